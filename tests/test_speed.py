"""The measurement of speed: that it measures what it says, on sizes that take seconds."""

import json
import sys
import time

import numpy as np
import pytest
import torch

from conftest import TinyBackbone, tiny
from semclust import speed
from semclust.backbones import SmallImageResNet
from semclust.cli import main
from semclust.errors import InputError
from semclust.train import Training

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def result():
    told: list[str] = []
    settings = tiny(epochs=20, backbone=TinyBackbone(3), n_clusters=3)
    return speed.measure_speed(settings, n_images=96, size=8, epochs=2, tell=told.append), told


def test_figures_fit_together(result):
    figures, told = result
    assert figures["images"] == 96 and figures["image_shape"] == [8, 8, 3] and figures["epochs_timed"] == 2
    assert figures["images_per_second"] == pytest.approx(96 / figures["seconds_per_epoch"])
    low, high = figures["seconds_per_epoch_spread"]
    assert 0 < low <= figures["seconds_per_epoch"] <= high
    assert 0 < figures["seconds_per_label_refresh"] < figures["seconds_per_epoch"]
    assert figures["time_to_first_step"] > 0
    ours, plain = figures["step_images_per_second"], figures["baseline_images_per_second"]
    assert figures["times_the_baseline"] == pytest.approx(ours / plain)
    assert figures["share_of_peak"] == pytest.approx(figures["tflops"] / figures["peak_tflops"])
    assert 0 < figures["share_of_peak"] < 1
    assert len(told) == 4 and told[1].startswith("warm-up") and told[3].startswith("epoch 2")


def test_a_whole_run_is_reckoned_from_all_its_phases(result):
    figures, _ = result
    run = figures["whole_run"]
    assert run["epochs"] == 20
    seconds = run["seconds_per_epoch"]
    of_each = {"instances": 8, "over-clusters": 5, "clusters": 4, "own labels": 3}
    assert list(seconds) == list(of_each) and min(seconds.values()) > 0
    steps_alone = sum(n * seconds[learns] for learns, n in of_each.items())
    # The partition and the last pass over the images are more.
    assert 0.9 * steps_alone < 60 * run["minutes"] < 10 * steps_alone + 20
    assert any(line.startswith("a whole run of 20 epochs: about ") for line in speed.in_words(figures))


def test_work_is_counted_forwards_backwards_for_the_key_and_for_the_labels(result):
    figures, _ = result
    # three passes for the query, one for the key, of smaller views; one of the whole image for its label
    assert figures["view_size"] < figures["image_shape"][:2]
    flop = 2e9 * 5 * figures["gmac_per_view"]
    assert figures["tflops"] == pytest.approx(96 * flop / figures["seconds_per_epoch"] / 1e12)


@pytest.mark.parametrize("name, max_pool, gmac", [("resnet18", False, 0.56), ("resnet34", True, 0.44)])
def test_operations_of_the_networks_are_those_known(name, max_pool, gmac):
    pixels = np.zeros((4, 32, 32, 3), np.uint8)
    settings = tiny(backbone=name, max_pool=max_pool, width=64, n_clusters=2, epochs=1, crop_size=1.0)
    training = Training(pixels, settings, lambda x: x, CPU)
    assert isinstance(training.learner.encoder.backbone, SmallImageResNet)
    assert speed.flop_a_view(training) / 2e9 == pytest.approx(gmac, abs=0.01)


def test_the_tasks_of_the_last_phase_are_at_work(monkeypatch):
    seen = set()
    learn = Training._learn_from
    monkeypatch.setattr(
        Training, "_learn_from", lambda self, phase, *batch: seen.add(phase.tasks) or learn(self, phase, *batch)
    )
    monkeypatch.setattr(speed, "peak_tflops", lambda device, precision: 1.0)
    settings = tiny(epochs=20, backbone=TinyBackbone(3), n_clusters=4)
    speed.measure_speed(settings, 96, 8, epochs=1, beside=False)
    assert seen == {("cluster", "under")}


def test_views_of_the_plain_script_are_random_and_keep_their_shape():
    pixels = np.random.default_rng(0).integers(0, 256, (3, 12, 10, 3), dtype=np.uint8)
    views = speed.PillowViews(pixels)
    first, second, index = views[2]
    assert len(views) == 3 and index == 2
    assert first.shape == second.shape == (3, 12, 10) and first.dtype == torch.float32
    assert first.min() >= 0 and first.max() <= 1 and not torch.equal(first, second)
    grey = speed.PillowViews(pixels[..., :1])[0][0]
    assert grey.shape == (1, 12, 10)


def test_seconds_are_those_of_the_work():
    assert 0.05 <= speed.seconds_of(lambda: time.sleep(0.05), CPU) < 5


@pytest.mark.parametrize("changes", [dict(tasks=("instance",)), dict(epochs=1)], ids=str)
def test_settings_without_a_last_phase_are_measured_too(monkeypatch, changes):
    monkeypatch.setattr(speed, "peak_tflops", lambda device, precision: 1.0)
    settings = tiny(**dict(epochs=20, backbone=TinyBackbone(3), n_clusters=4) | changes)
    assert speed.measure_speed(settings, 48, 8, epochs=1)["images"] == 48


@pytest.mark.parametrize("n, size, epochs", [(47, 8, 1), (48, 3, 1), (48, 8, 0), (0, 8, 1)])
def test_too_little_to_measure_is_refused(n, size, epochs):
    with pytest.raises(InputError, match=r"expected at least 48 images \(3 batches\), 4 px and 1 epoch"):
        speed.measure_speed(tiny(), n, size, epochs=epochs)


def test_memory_is_unknown_where_the_system_does_not_tell(monkeypatch):
    monkeypatch.setitem(sys.modules, "resource", None)
    assert speed.peak_memory(CPU) is None


def test_the_command_writes_the_figures_and_overwrites_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(speed, "peak_tflops", lambda device, precision: 1.0)
    words = [
        "bench",
        "speed",
        "--images",
        "96",
        "--size",
        "8",
        "--epochs-timed",
        "1",
        "--width",
        "2",
        "--device",
        "cpu",
    ]
    main(words)
    main(words)
    shown = capsys.readouterr().out
    assert "96 images of 8 x 8 x 3, resnet10, 10 clusters" in shown and "times a plain script" in shown
    figures = json.loads((tmp_path / "bench-speed.json").read_text())
    assert figures["images"] == 96 and (tmp_path / "bench-speed-2.json").exists()
    with pytest.raises(SystemExit):
        main([*words, "--out", "bench-speed.json"])
    assert json.loads((tmp_path / "bench-speed.json").read_text()) == figures


@pytest.mark.parametrize("words", [["--epochs", "3"], ["--epochs=3"], ["--minutes", "1"]], ids=" ".join)
def test_settings_of_how_long_to_fit_are_not_offered(words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["bench", "speed", *words])
    assert ended.value.code == 2 and "Unrecognized" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["bench", "speed", "--help"])
    offered = capsys.readouterr().out.split()
    assert not {"--epochs", "--minutes"} & set(offered) and {"--epochs-timed", "--batch-size"} <= set(offered)


def test_every_call_times_a_whole_epoch_of_steps(monkeypatch):
    training = Training(np.zeros((48, 8, 8, 3), np.uint8), tiny(backbone=TinyBackbone(3)), lambda x: x, CPU)
    steps: list[int] = []
    step = training._step
    monkeypatch.setattr(training, "_step", lambda *args: steps.append(1) or step(*args))
    for number in (1, 2):
        speed.seconds_of_steps(training, CPU)
        assert len(steps) == number * 3


def test_the_plain_script_learns_what_the_last_phase_does_also_from_odd_batches(monkeypatch):
    seen = []
    learn = Training._learn_from
    monkeypatch.setattr(
        Training,
        "_learn_from",
        lambda self, phase, views, index: seen.append((phase.tasks, len(index))) or learn(self, phase, views, index),
    )
    settings = tiny(epochs=20, backbone=TinyBackbone(3), n_clusters=4, batch_size=17)
    pixels = np.zeros((70, 8, 8, 3), np.uint8)
    assert speed.plain_speed(settings, pixels, CPU) > 0
    assert set(seen) == {(("cluster", "under"), 14)}
