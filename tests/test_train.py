"""Whole fits: they learn, they repeat, they resume to the byte, and each setting does what it says."""

import gc
import itertools
import math
import random
import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

import naive
from conftest import RESULTS, BadView, TinyBackbone, make_images, tiny
from semclust import core, devices, fitting, metrics, open_images, refresh, train
from semclust.augment import AUGMENTATIONS, choose_augmentation, strokes
from semclust.budget import Schedule
from semclust.config import Settings, preset
from semclust.contrast import MOMENTUM
from semclust.devices import choose_device, own_random_numbers
from semclust.errors import DamagedFileError, InputError, TrainingError
from semclust.fitting import Watcher
from semclust.losses import cluster_task_losses, sample_losses
from semclust.partition import centred, spectral_partition
from semclust.plan import STEPS_AN_EPOCH, decided, plan_batches, plan_tasks, usual_batch_size
from semclust.run_folder import RunFolder
from semclust.storage import on_host
from semclust.train import Training

CONTRASTS = ("moco", "simclr", "instance-memory")
FROM_THE_START = dict(over_from=0.0, over_until=1.0, cluster_from=0.0, neighbours=0, self_label_from=1.0)
LATE = dict(over_from=0.25, cluster_from=0.65)


def weights(fitted: fitting.Fitted) -> dict[str, torch.Tensor]:
    return fitted.predictor.network.state_dict()


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def losses(fitted: fitting.Fitted) -> list[float]:
    return [row["loss"] for row in fitted.history]


def started(n: int = 48, **changes) -> Training:
    return fitting.start(make_images(n), tiny(**changes))


def save_all(run: RunFolder, images, fitted: fitting.Fitted) -> None:
    """What the command line writes at the end, but for the time it took."""
    fitted.predictor.save(run.model)
    run.write_results(images.names, fitted.p, fitted.q, {})


def all_bytes(run: RunFolder) -> dict[str, bytes]:
    return {name: (run.path / name).read_bytes() for name in RESULTS}


# ---- learning ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("tasks", [("instance",), ("cluster", "under", "instance")], ids=["instance", "clusters"])
@pytest.mark.parametrize("contrast", CONTRASTS)
def test_a_few_epochs_lower_the_loss(contrast, tasks):
    settings = tiny(
        contrast=contrast,
        tasks=tasks,
        epochs=8,
        augment=strokes,
        memory_size=16,  # full after an epoch: a growing memory would raise the loss
        momentum=0.9,
        learning_rate=0.1,
        warmup_epochs=0,
        **FROM_THE_START,
    )
    learned = losses(fitting.fit(make_images(96), settings))
    assert learned[-1] < learned[1] - 0.1
    if contrast != "instance-memory":  # whose stored keys come closer to features that stand still
        idle = losses(fitting.fit(make_images(96), Settings(**vars(settings) | {"learning_rate": 0.0})))
        assert learned[-1] < idle[-1] - 0.1


@pytest.mark.parametrize("backbone", ["resnet18", TinyBackbone(3)], ids=["resnet18", "own"])
def test_three_colours_are_three_clusters(backbone):
    y = np.arange(90) % 3
    images = make_images(90, channels=3, labels=y)
    images.pixels = images.pixels // 8
    images.pixels[np.arange(90), :, :, y] += 200
    settings = tiny(n_clusters=3, epochs=12, augment="none", backbone=backbone, width=4)
    fitted = fitting.fit(images, settings)
    assert fitted.history[-1]["acc"] > 0.95 and fitted.history[-1]["nmi"] > 0.8
    assert min(np.bincount(fitted.labels)) > 25


def test_an_epoch_visits_every_image_in_batches_of_one_size():
    training = started(50, batch_size=16, neighbours=0)
    batches: list[list[int]] = []
    step = training._step

    def watched(x, index, rate):
        assert torch.equal(x, training.images.pixels[index].permute(0, 3, 1, 2))
        batches.append(index.tolist())
        return step(x, index, rate)

    training._step = watched
    counts: list[int] = []
    for _ in range(2):
        training.run_epoch(counts.append)
        assert [len(batch) for batch in batches[-4:]] == [13] * 4
        assert all(len(set(batch)) == 13 for batch in batches)
        seen = np.bincount(np.concatenate(batches[-4:]), minlength=50)
        assert seen.min() == 1 and seen.sum() == 52 and seen.max() == 2  # two come once more, to fill the last batch
    assert batches[:4] != batches[4:]
    # What is told adds up to the images there are; and a word at the end of each look, at images and at views.
    assert counts == [12, 13, 12, 13, 0, 0] * 2


@pytest.mark.parametrize("starts", [(0, 8), (5, 8), (8, 8), (0, 5), (3, 5), (5, 5)], ids=str)
@pytest.mark.parametrize("warmup", [0, 2])
def test_the_learning_rate_rises_and_falls_to_zero_in_every_phase(warmup, starts):
    """Until the clusters start, until the network labels itself, and until the end."""
    clusters, by_itself = starts
    neighbours = dict(neighbours=0) if clusters == 0 else {}
    shares = dict(cluster_from=clusters / 8, self_label_from=by_itself / 8)
    training = started(epochs=8, warmup_epochs=warmup, learning_rate=0.5, cluster_rate=0.4, **shares, **neighbours)
    rates = [training.learning_rate(step / 10) for step in range(81)]
    bounds = sorted({0, clusters, by_itself, 8})
    for step, rate in enumerate(rates[:-1]):
        epoch = step / 10
        start, end = next((a, b) for a, b in itertools.pairwise(bounds) if a <= epoch < b)
        cosine = (0.4 if start else 1.0) * 0.25 * (1 + math.cos(math.pi * (epoch - start) / (end - start)))
        rises = 1 if start else warmup
        assert rate == pytest.approx(cosine if epoch - start >= rises else cosine * (epoch - start + 0.01) / rises)
    assert rates[79] < 3e-3
    row, _ = training.run_epoch()
    assert row["learning_rate"] == training.learning_rate(2 / 3)
    assert training.optimiser.param_groups[0]["lr"].item() == pytest.approx(row["learning_rate"])


@pytest.mark.parametrize("batch_size, rate", [(256, 0.17), (64, 0.085), (49, 0.074), (1024, 0.21)])
def test_the_learning_rate_follows_the_size_of_a_batch(batch_size, rate):
    """The size that it has, not the one that was asked for."""
    n = 400 if batch_size == 1024 else batch_size
    assert started(n, batch_size=batch_size, neighbours=0).peak_rate == rate
    assert started(n, batch_size=batch_size, learning_rate=0.5).peak_rate == 0.5


@pytest.mark.parametrize("epochs, rate", [(10, 0.17), (50, 0.17), (200, 0.12), (800, 0.085)])
def test_the_learning_rate_of_a_long_run_is_lower(epochs, rate):
    training = started(256, batch_size=256, epochs=1)
    training.set_epochs(epochs)
    assert training.peak_rate == rate


def test_batches_follow_the_number_of_images():
    assert usual_batch_size(40) == 32
    assert usual_batch_size(STEPS_AN_EPOCH * 50) == 50
    assert usual_batch_size(STEPS_AN_EPOCH * 600) == 512


@pytest.mark.parametrize(
    "n, batch_size, neighbours, planned",
    [
        (40, None, 0, (2, 20)),
        (50, 7, 0, (8, 7)),
        (50, 7, 3, (9, 6)),
        (49, 16, 3, (4, 14)),
        (49, 16, 0, (4, 13)),
        (5, 2, 3, (3, 2)),
        (5, 2, 0, (2, 3)),
    ],
)
def test_batches_are_of_one_size_and_even_where_pairs_are_learned(n, batch_size, neighbours, planned):
    settings = Settings(batch_size=batch_size, neighbours=neighbours)
    assert plan_batches(settings, n) == planned


@pytest.mark.parametrize("epochs, begins", [(50, 32), (100, 65), (300, 195), (600, 390), (1200, 840)])
def test_of_a_long_run_most_is_for_the_features(epochs, begins):
    assert plan_tasks(Settings(epochs=epochs), 1000)["cluster"].begins == begins
    assert plan_tasks(Settings(epochs=epochs, cluster_from=0.0, neighbours=0), 1000)["cluster"].begins == 0
    assert plan_tasks(Settings(epochs=epochs, tasks=("instance",)), 1000)["cluster"].begins == epochs


@pytest.mark.parametrize("cluster_epochs, begins", [(1, 19), (3, 17), (7, 13), (100, 13)])
def test_the_clusters_learn_for_so_many_epochs_at_most(cluster_epochs, begins):
    settings = Settings(epochs=20, cluster_epochs=cluster_epochs, self_label_from=1.0)
    assert plan_tasks(settings, 1000)["cluster"].begins == begins


def drawings() -> np.ndarray:
    return open_images("digits").pixels[:200]


@pytest.mark.parametrize(
    "changes, channels, epochs",
    [
        (dict(), 1, 80),
        (dict(), 3, 600),
        (dict(augment="natural"), 1, 600),
        (dict(augment="strokes"), 3, 80),
        (dict(augment="none"), 3, 80),
        (dict(augment=lambda x: x), 3, 600),
        (dict(effort=0.5), 3, 300),
        (dict(effort=0.03), 1, 2),
        (dict(epochs=7, effort=3.0), 3, 7),
    ],
)
def test_photographs_are_learned_longer_on_a_gpu(changes, channels, epochs):
    settings = tiny(**dict(epochs=None, backbone=TinyBackbone(channels)) | changes)
    images = make_images(24, channels=channels)
    images.pixels = drawings() if channels == 1 else images.pixels
    assert decided(settings, images.pixels, torch.device("cuda")).epochs == epochs
    on_cpu = epochs // 3 if epochs in (600, 300) else epochs
    assert decided(settings, images.pixels, torch.device("cpu")).epochs == on_cpu


@pytest.mark.parametrize("augment", ["auto", "none", torch.flip])
@pytest.mark.parametrize("pixels, family", [("drawings", "strokes"), ("photographs", "natural")])
def test_what_follows_from_the_images_is_decided_once(augment, pixels, family):
    pixels = drawings() if pixels == "drawings" else np.random.default_rng(0).integers(0, 256, (60, 8, 8, 1), np.uint8)
    settings = tiny(epochs=None, augment=augment, backbone=TinyBackbone())
    found = decided(settings, pixels, torch.device("cpu"))
    assert found.augment == (family if augment == "auto" else augment)
    assert found.epochs == (200 if family == "natural" and augment != "none" else 80)  # a callable: as auto would be
    assert decided(found, pixels[::-1, :, ::-1], torch.device("cpu")) is found


def test_drawings_in_colours_are_seen_by_their_edges():
    cpu = torch.device("cpu")
    in_black = np.full((60, 12, 12, 3), 255, np.uint8)
    in_black[np.arange(60), :, np.arange(60) % 12] = 0  # a line in each
    in_red = in_black.copy()
    in_red[..., 0] = 255
    photographs = np.random.default_rng(0).integers(0, 256, in_red.shape, np.uint8)

    def sees(pixels: np.ndarray, **changes) -> str:
        found = decided(tiny(**dict(backbone="auto") | changes), pixels, cpu)
        assert decided(found, photographs, cpu) is found  # once for all
        return found.sees

    assert [sees(pixels) for pixels in (in_red, in_black, photographs)] == ["edges", "colours", "colours"]
    assert sees(in_red, sees="colours") == "colours" and sees(photographs, sees="edges") == "edges"
    assert sees(photographs, augment="strokes") == "edges" and sees(in_red, augment="natural") == "colours"
    assert sees(in_red, backbone=TinyBackbone(3)) == "colours"  # a user's own network has its channels


@pytest.mark.parametrize(
    "side, on_gpu", [((4, 4), 16), ((16, 16), 16), ((20, 20), 24), ((28, 28), 48), ((96, 28), 48), ((32, 40), 64)]
)
def test_width_follows_from_the_smaller_side_and_is_narrow_without_a_gpu(side, on_gpu):
    pixels, cpu, gpu = np.zeros((4, *side, 3), np.uint8), torch.device("cpu"), torch.device("cuda")
    found = decided(tiny(backbone="auto"), pixels, gpu)
    assert found.width == on_gpu and decided(found, pixels, cpu) is found  # also where it is resumed
    assert decided(tiny(backbone="auto"), pixels, cpu).width == 16
    assert decided(tiny(backbone="auto", width=24), pixels, gpu).width == 24
    assert decided(tiny(backbone=TinyBackbone(3)), pixels, cpu).width is None  # a user's own network has its width


@pytest.mark.parametrize(
    "changes, expected",
    [
        (dict(backbone="resnet10", width=4), True),
        (dict(), False),
        (dict(backbone="resnet10", precision="float32"), False),
    ],
    ids=["named", "own", "refused"],
)
def test_a_cpu_learns_in_bfloat16_where_the_network_is_known_to_be_sound_in_it(changes, expected, monkeypatch):
    monkeypatch.setattr(devices, "computes_in_bfloat16", lambda device: True)
    training = fitting.start(make_images(), tiny(**dict(precision="auto") | changes))
    with training.precision:
        assert torch.is_autocast_enabled("cpu") is expected
    assert math.isfinite(training.run_epoch()[0]["loss"])


@pytest.mark.parametrize("avx512, mkldnn, expected", [(True, True, True), (True, False, False), (False, True, False)])
def test_a_cpu_computes_in_bfloat16_where_it_has_the_instructions(avx512, mkldnn, expected, monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: mkldnn)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512, raising=False)
    assert devices.computes_in_bfloat16(torch.device("cpu")) is expected
    monkeypatch.delattr(torch.cpu, "_is_avx512_bf16_supported")  # it is not public
    assert not devices.computes_in_bfloat16(torch.device("cpu"))


def test_a_run_keeps_its_precision_and_tells_where_the_device_does_not_compute_in_it(monkeypatch):
    pixels, cpu, asked = make_images().pixels, torch.device("cpu"), tiny(backbone="resnet10", precision="auto")
    monkeypatch.setattr(devices, "computes_in_bfloat16", lambda device: True)
    begun = decided(asked, pixels, cpu)
    assert begun.precision == "bfloat16"
    own = tiny(precision="bfloat16")
    assert decided(own, pixels, cpu).precision == "bfloat16"  # at the user's own risk
    monkeypatch.setattr(devices, "computes_in_bfloat16", lambda device: False)
    assert decided(asked, pixels, cpu).precision == "float32"
    told = []
    training = fitting.start(make_images(), begun, told.append)
    assert training.settings.precision == "float32" and not training.precision._enabled
    assert len(told) == 1 and "precision=bfloat16" in told[0] and "goes on in float32" in told[0]


def test_features_of_all_images_are_taken_only_where_labels_come_from_them(monkeypatch):
    monkeypatch.setattr(train, "SOME_IMAGES", 10)
    training = started(epochs=20, self_label_from=1.0, **LATE)
    taken: list[list[int]] = []
    features_of = training._features_of

    def watched(numbers, look, on_part):
        if look == training._whole:
            taken.append(numbers.tolist())
        return features_of(numbers, look, on_part)

    monkeypatch.setattr(training, "_features_of", watched)
    rows = [training.run_epoch()[0] for _ in range(20)]
    renewed = [*range(5, 10), *range(13, 21)]  # epochs after which "over", or the clusters, learn from labels
    assert [epoch for epoch, numbers in enumerate(taken, 1) if numbers == list(range(48))] == renewed
    assert all(numbers == list(range(0, 48, 5)) for epoch, numbers in enumerate(taken, 1) if epoch not in renewed)
    assert all(0 < row["spread"] <= 1 for row in rows)


def test_nearest_keys_join_the_positives_after_a_while():
    training = started(epochs=8, nearest_from=0.5)
    plain = started(epochs=8, nearest=0.0)
    for epoch in range(6):
        losses = [run.run_epoch()[0]["loss"] for run in (training, plain)]
        assert (losses[0] == losses[1]) == (epoch < 4)


def test_the_network_sees_colours_of_mean_0_and_deviation_1():
    training = fitting.start(make_images(24, channels=3), tiny(backbone=TinyBackbone(3)))
    x = pixels_of(training, torch.arange(24)).float() / 255
    for encoder in (training.learner.encoder, training.learner.twin):
        scaled = (x - encoder.mean) / encoder.std
        assert_close(scaled.mean((0, 2, 3)), torch.zeros(3), rtol=0, atol=1e-4)
        assert_close(scaled.std((0, 2, 3), correction=0), torch.ones(3), rtol=0, atol=1e-4)


# ---- repeating ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("backbone", ["resnet18", TinyBackbone()], ids=["resnet18", "own"])
def test_the_same_seed_gives_the_same_run_and_another_seed_another(backbone):
    first, again, other = (
        fitting.fit(make_images(), tiny(backbone=backbone, width=4, epochs=3, random_state=seed)) for seed in (5, 5, 6)
    )
    assert same(weights(first), weights(again))
    assert list(map(repr, first.history)) == list(map(repr, again.history))
    np.testing.assert_array_equal(first.p, again.p)
    np.testing.assert_array_equal(first.q, again.q)
    assert not same(weights(first), weights(other))
    assert losses(first) != losses(other)


def test_a_run_does_not_depend_on_the_callers_random_state():
    torch.manual_seed(1)
    first = fitting.fit(make_images(), tiny(backbone="resnet18", width=2, epochs=1))
    torch.manual_seed(2)
    assert same(weights(first), weights(fitting.fit(make_images(), tiny(backbone="resnet18", width=2, epochs=1))))


@pytest.mark.parametrize("backbone", ["resnet18", TinyBackbone()], ids=["resnet18", "own"])
def test_a_fit_leaves_the_callers_random_state_alone(backbone):
    torch.manual_seed(123)
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    fitting.fit(make_images(), tiny(backbone=backbone, width=2, epochs=1))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1] == before[1]).all()
    assert random.getstate() == before[2]


def test_a_fit_leaves_the_users_backbone_images_and_settings_alone():
    backbone = TinyBackbone().eval()
    before = {name: value.clone() for name, value in backbone.state_dict().items()}
    images, settings = make_images(), tiny(backbone=backbone)
    pixels, values = images.pixels.copy(), dict(vars(settings))
    fitting.fit(images, settings)
    assert same(backbone.state_dict(), before) and not backbone.training
    assert (images.pixels == pixels).all() and vars(settings) == values


def test_labels_never_reach_training():
    rng = np.random.default_rng(0)
    y = np.arange(48) % 4
    blind, seen, shuffled = (
        fitting.fit(make_images(48, labels), tiny(epochs=6)) for labels in (None, y, rng.permutation(y))
    )
    assert same(weights(blind), weights(seen)) and same(weights(blind), weights(shuffled))
    for fitted in (seen, shuffled):
        for with_labels, without in zip(fitted.history, blind.history, strict=True):
            assert with_labels.keys() - without.keys() == {"acc", "nmi", "ari"}
            assert repr({name: with_labels[name] for name in without}) == repr(without)
    assert seen.history[-1]["acc"] != shuffled.history[-1]["acc"]


# ---- resuming ----------------------------------------------------------------------------------------


class StopAtEpoch(Watcher):
    """Interrupts after an epoch was stored, as Ctrl-C may."""

    def __init__(self, epoch: int):
        self.last = epoch

    def epoch(self, row):
        if row["epoch"] == self.last:
            raise KeyboardInterrupt


class StopAtStep(Watcher):
    """Interrupts after so many steps of this process."""

    def __init__(self, steps: int):
        self.left = steps

    def step(self, n_images):
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt


def stop_before(monkeypatch, method: str, times: int) -> None:
    """Interrupts just before a file of a run folder is written for the nth time."""
    write, left = getattr(RunFolder, method), times

    def interrupted(self, *args):
        nonlocal left
        left -= 1
        if not left:
            monkeypatch.setattr(RunFolder, method, write)
            raise KeyboardInterrupt
        write(self, *args)

    monkeypatch.setattr(RunFolder, method, interrupted)


def unbroken(folder: Path, images, settings: Settings) -> RunFolder:
    run = RunFolder.create(folder, "unbroken")
    save_all(run, images, fitting.fit(images, settings, run=run))
    return run


@pytest.mark.parametrize("contrast", CONTRASTS)
def test_a_run_interrupted_in_every_phase_ends_in_the_same_bytes(tmp_path, monkeypatch, contrast):
    images, settings = make_images(48, labels=np.arange(48) % 4), tiny(contrast=contrast, epochs=20)
    plans = plan_tasks(settings, 48)
    over, cluster = plans["over"].begins, plans["cluster"].begins
    assert over > 1 and cluster > over + 2 and cluster + 5 < 20
    expected = unbroken(tmp_path, images, settings)

    run = RunFolder.create(tmp_path, "broken")
    stops = [
        StopAtStep(2),  # before the first checkpoint
        StopAtEpoch(1),
        StopAtEpoch(over),  # the first labels of "over"
        StopAtStep(5),  # in the middle of an epoch
        StopAtEpoch(cluster),  # the first labels of "cluster", and the neighbours
        "write_checkpoint",  # between an epoch's row and its checkpoint
        "append_metrics",  # before both
        StopAtStep(4),
        StopAtEpoch(cluster + 4),
        StopAtEpoch(20),
    ]
    for stop in stops:
        if isinstance(stop, str):
            stop_before(monkeypatch, stop, times=2)
        with pytest.raises(KeyboardInterrupt):
            fitting.fit(images, settings, Watcher() if isinstance(stop, str) else stop, run)
    fitted = fitting.fit(images, settings, run=run)
    save_all(run, images, fitted)
    assert all_bytes(run) == all_bytes(expected)
    assert [row["epoch"] for row in fitted.history] == list(range(1, 21))


@pytest.mark.parametrize(
    "changes",
    [
        dict(projection_per_task=True, contrast="instance-memory", classifier_input="pooled"),
        dict(batch_norm_groups=2, sees="edges", task_sum="sum", online=False, backbone=TinyBackbone(2)),
        dict(tasks=("instance",)),
        dict(backbone="resnet18", width=2, batch_size=24),
        dict(backbone="resnet18", width=8, batch_size=24, precision="auto"),
        FROM_THE_START,
    ],
    ids=["own projections", "groups", "instance alone", "resnet18", "bfloat16", "from the start"],
)
def test_a_run_with_other_settings_resumes_to_the_byte(tmp_path, changes, monkeypatch):
    monkeypatch.setattr(devices, "computes_in_bfloat16", lambda device: True)  # of another CPU, if slowly
    images, settings = make_images(), tiny(epochs=4, **changes)
    expected = unbroken(tmp_path, images, settings)
    run = RunFolder.create(tmp_path, "broken")
    for watcher in (StopAtEpoch(1), StopAtStep(2), StopAtEpoch(2), StopAtEpoch(3)):
        with pytest.raises(KeyboardInterrupt):
            fitting.fit(images, settings, watcher, run)
    save_all(run, images, fitting.fit(images, settings, run=run))
    assert all_bytes(run) == all_bytes(expected)


def test_resuming_does_not_depend_on_what_happened_before(tmp_path):
    """The bytes are equal because the state is whole, not because the same random numbers come by chance."""
    images, settings = make_images(), tiny(epochs=3)
    run = unbroken(tmp_path, images, settings)
    other = RunFolder.create(tmp_path, "other")
    with pytest.raises(KeyboardInterrupt):
        fitting.fit(images, settings, StopAtEpoch(2), other)
    tensors, _ = other.read_checkpoint()
    for name in tensors:
        if tensors[name].dtype == torch.float32 and name.startswith("velocity"):
            tensors[name] = tensors[name] * 0
    other.write_checkpoint(tensors, 2)
    save_all(other, images, fitting.fit(images, settings, run=other))
    assert all_bytes(other)["last.ckpt"] != all_bytes(run)["last.ckpt"]


@pytest.mark.parametrize(
    "quick, share, written", [(100.0, 0.05, [1, 2, 3, 4]), (0.0, 1e-9, [1, 4]), (0.0, 1e9, [1, 2, 3, 4])]
)
def test_slow_checkpoints_are_written_less_often_but_always_at_the_end(tmp_path, monkeypatch, quick, share, written):
    monkeypatch.setattr(fitting, "QUICK_CHECKPOINT", quick)
    monkeypatch.setattr(fitting, "CHECKPOINT_SHARE", share)
    epochs = []
    write = RunFolder.write_checkpoint
    monkeypatch.setattr(
        RunFolder, "write_checkpoint", lambda self, state, epoch: epochs.append(epoch) or write(self, state, epoch)
    )
    run = RunFolder.create(tmp_path, "run")
    fitting.fit(make_images(), tiny(epochs=4), run=run)
    assert epochs == written
    assert len(run.read_metrics()) == 4


def test_a_finished_run_trains_no_further(tmp_path):
    images, settings = make_images(), tiny()
    run = unbroken(tmp_path, images, settings)
    before = all_bytes(run)

    class NoStep(Watcher):
        def step(self, n_images):
            pytest.fail("a step in a finished run")

    fitted = fitting.fit(images, settings, NoStep(), run)
    save_all(run, images, fitted)
    assert all_bytes(run) == before
    assert len(fitted.history) == 2


def test_the_time_of_a_run_is_that_of_all_its_parts(tmp_path, monkeypatch):
    run = RunFolder.create(tmp_path, "run")
    now = [0.0]
    monkeypatch.setattr(fitting.time, "monotonic", lambda: now[0])

    class Clock(fitting.Watcher):
        def __init__(self, last: int):
            self.last = last

        def epoch(self, row):
            now[0] += 100
            if row["epoch"] == self.last:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fitting.fit(make_images(), tiny(epochs=4), Clock(2), run)
    assert run.read_seconds() == 100  # until the checkpoint of the second epoch
    fitted = fitting.fit(make_images(), tiny(epochs=4), Clock(9), run)
    assert fitted.seconds == 300  # two more epochs
    assert fitting.fit(make_images(), tiny(epochs=4), run=run).seconds == run.read_seconds() == 200


def test_warnings_of_before_an_interruption_are_not_lost(tmp_path):
    images, settings = make_images(), tiny(backbone=Collapsed(), epochs=2)
    expected = fitting.fit(images, settings).warnings
    assert expected
    run = RunFolder.create(tmp_path, "run")
    with pytest.raises(KeyboardInterrupt):
        fitting.fit(images, settings, StopAtEpoch(2), run)
    assert fitting.fit(images, settings, run=run).warnings == expected


def test_the_state_holds_all_that_training_changes():
    """A second run that is given the state, and nothing else, goes on alike; and the state is not shared with it."""
    first = started(epochs=20, **LATE)
    for _ in range(14):
        first.run_epoch()
    state = {name: value.clone() for name, value in first.state().items()}
    second = started(epochs=20, **LATE)
    second.load_state(state, 14, Path("x"))
    rows = [training.run_epoch()[0] for training in (first, second)]
    assert repr(rows[0]) == repr(rows[1])
    assert same(first.state(), second.state())
    assert not same(first.state(), state)
    assert sum(name.startswith("velocity.") for name in state) == len(first.trained)


@pytest.mark.parametrize(
    "damage",
    [
        lambda tensors: tensors.pop("learner.task_modules.cluster.y"),
        lambda tensors: tensors.update({"learner.task_modules.cluster.s": torch.ones(7)}),
        lambda tensors: tensors.update({"velocity.0": torch.ones(3, 7)}),
        lambda tensors: tensors.pop("velocity.0"),
        lambda tensors: tensors.update({"velocity.99": torch.ones(1)}),
    ],
    ids=["a tensor is missing", "other shape", "velocity of other shape", "velocity is missing", "unknown velocity"],
)
def test_a_checkpoint_that_does_not_fit_is_refused(tmp_path, damage):
    images, settings = make_images(), tiny(epochs=3)
    run = RunFolder.create(tmp_path, "run")
    with pytest.raises(KeyboardInterrupt):
        fitting.fit(images, settings, StopAtEpoch(2), run)
    tensors, epoch = run.read_checkpoint()
    damage(tensors)
    run.write_checkpoint(tensors, epoch)
    with pytest.raises(DamagedFileError, match=r"last\.ckpt"):
        fitting.fit(images, settings, run=run)


# ---- one step, beside the paper's formulas ------------------------------------------------------------


def banks_of(memory) -> list:
    """The banks as deques, oldest key first."""
    C, m, d = memory.keys.shape
    banks = naive.empty_banks(C, m, d)
    for bank, keys, start in zip(banks, memory.keys.double().tolist(), memory.next_slot.tolist(), strict=True):
        bank.extend(keys[start:] + keys[:start])
    return banks


def scrambled(training: Training) -> None:
    """Give every task labels, swap counts and a memory that training would take long to reach."""
    torch.manual_seed(0)
    learner = training.learner
    for memory in (learner.instance_memory, *(task.memory for task in learner.tasks.values())):
        C, _, d = memory.keys.shape
        k = nn.functional.normalize(torch.randn(30, d), dim=1)
        memory.enqueue(k, torch.randint(C, (30,)))
    for task in learner.tasks.values():
        task.s.copy_(torch.randint(1, 9, task.s.shape))
        nn.init.normal_(task.classifier.linear.bias)


def pixels_of(training: Training, index: torch.Tensor) -> torch.Tensor:
    (x,) = training.images.batches([index])
    return x


def step_on(training: Training, index: torch.Tensor, rate: float = 0.01) -> torch.Tensor:
    training._begin_steps()
    return training._step(pixels_of(training, index), index, rate)


def recorded(module: nn.Module) -> list:
    calls: list = []
    module.register_forward_hook(lambda module, inputs, output: calls.append((inputs, output)))
    return calls


@pytest.mark.parametrize(
    "changes",
    [
        dict(),
        dict(tasks=("cluster",)),
        dict(tasks=("instance",)),
        dict(tasks=("cluster", "under", "instance"), assign_by="query", attraction=0.0),
        dict(task_sum="sum"),
        dict(cross_cluster=False),
        dict(hard_samples=False),
        dict(classifier_input="projection"),
        dict(classifier_trains_encoder=True),
        dict(projection_per_task=True),
        dict(contrast="simclr"),
        dict(contrast="instance-memory"),
        dict(attraction=0.3, temperature=0.5, momentum=0.7),
        dict(batch_norm_groups=2),
        dict(symmetric=True),
        dict(symmetric=True, contrast="simclr"),
    ],
    ids=lambda changes: " ".join(f"{name}={value}" for name, value in changes.items()) or "default",
)
def test_a_step_has_the_losses_of_the_paper(changes):
    training = started(**FROM_THE_START | changes)
    settings, learner = training.settings, training.learner
    scrambled(training)
    training.run_epoch()  # so that twin, stored keys and labels are those of a run on its way
    tau = settings.temperature
    index = torch.arange(0, 48, 5)
    before = {name: (banks_of(task.memory), task.y[index].tolist()) for name, task in learner.tasks.items()}
    instance_banks = banks_of(learner.instance_memory)
    s = {name: task.s[index].tolist() for name, task in learner.tasks.items()}
    linear = {
        name: (task.classifier.linear.weight.double().tolist(), task.classifier.linear.bias.tolist())
        for name, task in learner.tasks.items()
    }
    stored = learner.stored_keys.clone() if settings.contrast == "instance-memory" else None
    twin_before = [p.clone() for p in learner.twin.parameters()] if learner.twin is not None else []
    encoder_calls = recorded(learner.encoder)
    learner.train()
    if settings.contrast == "moco":
        keys_back = {}
        find_keys = training.contrast.keys

        def keys(*args):
            h_key, k = find_keys(*args)
            keys_back.update(k)
            return h_key, k

        training.contrast.keys = keys
    result = step_on(training, index)
    if settings.symmetric:  # every image once with either view as its query
        index = index.repeat(2)
        before = {name: (banks, y * 2) for name, (banks, y) in before.items()}
        s = {name: values * 2 for name, values in s.items()}

    h = encoder_calls[-1][1][0].detach().double().tolist()
    q = {name: value.detach().double().tolist() for name, value in encoder_calls[-1][1][1].items()}
    if settings.contrast == "moco":
        k = {name: value.double().tolist() for name, value in keys_back.items()}
    elif settings.contrast == "simclr":
        k = {name: value.detach().double().tolist() for name, value in encoder_calls[0][1][1].items()}
    else:
        k = dict(zip(q, stored[:, index].double().tolist(), strict=True))

    l_ids, l_cds = [], []
    if "instance" in settings.tasks:
        name = learner.instance_projection
        negatives = naive.contrastive_set(instance_banks)
        own = [naive.instance_loss(a, b, negatives, tau) for a, b in zip(q[name], k[name], strict=True)]
        near = [naive.nearest_key(b, negatives) for b in k[name]]
        other = [naive.instance_loss(a, b, negatives, tau) for a, b in zip(q[name], near, strict=True)]
        w = settings.nearest
        l_ids.append(((1 - w) * sum(own) + w * sum(other)) / len(own))
        l_cds.append(0.0)
    for name, task in learner.tasks.items():
        if name not in training.phase.tasks:
            continue
        (banks, y), (W, B) = before[name], linear[name]
        q_task, k_task = q[task.projection], k[task.projection]
        each, pulls = [], []
        for q_i, k_i, y_i in zip(q_task, k_task, y, strict=True):
            negatives = naive.contrastive_set(banks, y_i if settings.cross_cluster else None)
            pulls.append(settings.attraction * naive.attraction_loss(q_i, banks, y_i, tau))
            each.append(naive.instance_loss(q_i, k_i, negatives, tau))
        weighted = naive.weighted_loss(s[name] if settings.hard_samples else [1] * len(each), each)
        l_ids.append(weighted + sum(pulls) / len(pulls))
        seen = [[v / math.sqrt(naive.dot(row, row)) for v in row] for row in h]
        seen = seen if settings.classifier_input == "pooled" else q_task
        logits = [[naive.dot(w, x_i) / tau + b for w, b in zip(W, B, strict=True)] for x_i in seen]
        asked = k_task if settings.assign_by == "key" else q_task
        l_cds.append(naive.cluster_loss(logits, [naive.memory_assignment(a, banks, tau) for a in asked]))
    loss = sum(l_ids) + sum(l_cds)
    if settings.task_sum == "mean":
        loss /= len(l_ids)
    expected = [loss, sum(l_ids) / len(l_ids), sum(l_cds) / len(l_cds)]
    assert_close(result, torch.tensor(expected), rtol=1e-4, atol=1e-4)

    # After the step: the twin has followed, the keys are in the memories.
    if settings.contrast == "instance-memory":
        m = training.contrast.momentum
        for name, place in zip(q, range(len(stored)), strict=True):
            mixed = [naive.follow(a, b, m) for a, b in zip(k[name], q[name], strict=True)]
            k[name] = [[v / math.sqrt(naive.dot(row, row)) for v in row] for row in mixed]
            assert_close(learner.stored_keys[place, index], torch.tensor(k[name]), rtol=1e-4, atol=1e-5)
        untouched = torch.ones(48, dtype=torch.bool).index_fill(0, index, False)
        assert torch.equal(learner.stored_keys[:, untouched], stored[:, untouched])
    for twin_weight, start, weight in zip(
        learner.twin.parameters() if twin_before else [], twin_before, learner.encoder.parameters(), strict=False
    ):
        m = training.contrast.momentum
        assert_close(twin_weight.detach(), m * start + (1 - m) * weight.detach(), rtol=1e-5, atol=1e-7)
    naive.enqueue(instance_banks, k[learner.instance_projection], [0] * len(index))
    assert_close(torch.tensor(banks_of(learner.instance_memory)), torch.tensor(instance_banks), rtol=0, atol=1e-5)
    for name, task in learner.tasks.items():
        banks, y = before[name]
        if name in training.phase.tasks:
            naive.enqueue(banks, k[task.projection], y)
        assert_close(torch.tensor(banks_of(task.memory)), torch.tensor(banks), rtol=0, atol=1e-5)


def test_a_stored_vector_moves_towards_the_mean_of_both_views():
    training = started(**FROM_THE_START, contrast="instance-memory", symmetric=True)
    training.run_epoch()
    learner, index = training.learner, torch.arange(0, 48, 5)
    stored, next_slot = learner.stored_keys.clone(), learner.instance_memory.next_slot.clone()
    calls = recorded(learner.encoder)
    step_on(training, index)
    m = training.contrast.momentum
    for place, q in enumerate(calls[0][1][1].values()):
        views = q.detach().chunk(2)
        mixed = m * stored[place, index] + (1 - m) * (views[0] + views[1]) / 2
        assert_close(learner.stored_keys[place, index], nn.functional.normalize(mixed, dim=1))
    size = learner.instance_memory.keys.shape[1]
    assert learner.instance_memory.next_slot.item() == (next_slot.item() + len(index)) % size  # each is remembered once


def test_a_step_moves_the_weights_against_the_gradient_of_the_loss():
    """The first step of SGD with momentum, from rest: w - rate x (gradient + decay x w)."""
    training = started(**FROM_THE_START, contrast="simclr", weight_decay=0.01)
    before = [p.detach().clone() for p in training.trained]
    step_on(training, torch.arange(16), rate=0.3)
    for old, p in zip(before, training.trained, strict=True):
        gradient = torch.zeros_like(old) if p.grad is None else p.grad
        moved = old - 0.3 * (gradient + 0.01 * old) if p.grad is not None else old
        assert_close(p.detach(), moved, rtol=1e-5, atol=1e-6)
    assert sum(p.grad is not None and bool(p.grad.abs().max() > 0) for p in training.trained) > 6


def one_batch(training: Training):
    """A forward pass of 16 images: index, h, q, k."""
    index = torch.arange(16)
    torch.manual_seed(0)
    training.learner.train()
    x = pixels_of(training, index).float() / 255
    h, q = training.learner.encoder(training.augmentation(x))
    _, k = training.contrast.keys(training.phase, training.augmentation(x), index, len(index))
    return index, h, q, k


def losses_of_clusters(training: Training, *batch) -> tuple[torch.Tensor, ...]:
    """Those of the target task, without pairs."""
    return cluster_task_losses(training.learner.tasks["cluster"], training.settings, training.group, False, *batch)


def reaches(loss: torch.Tensor, module: nn.Module) -> bool:
    found = torch.autograd.grad(loss, list(module.parameters()), retain_graph=True, allow_unused=True)
    return any(g is not None and bool(g.abs().max() > 1e-7) for g in found)


@pytest.mark.parametrize("classifier_input", ["projection", "pooled"])
@pytest.mark.parametrize("trains", [False, True])
def test_the_consistency_loss_trains_the_encoder_only_where_asked(classifier_input, trains):
    training = started(**FROM_THE_START, classifier_trains_encoder=trains, classifier_input=classifier_input)
    scrambled(training)
    task = training.learner.tasks["cluster"]
    l_id, _, l_cd = losses_of_clusters(training, *one_batch(training))
    assert reaches(l_cd.sum(), training.learner.encoder) == trains
    assert reaches(l_cd.sum(), task.classifier)
    assert reaches(l_id.sum(), training.learner.encoder)
    assert not reaches(l_id.sum(), task.classifier)


@pytest.mark.parametrize("changes", [dict(cross_cluster=False), dict(attraction=0.0), dict(assign_by="query")], ids=str)
def test_an_ablation_changes_the_loss_of_the_same_state(changes):
    results = []
    for settings in (dict(), changes):
        training = started(**FROM_THE_START | settings)
        scrambled(training)
        losses = losses_of_clusters(training, *one_batch(training))
        results.append([loss.sum().item() for loss in losses])
    assert results[0] != results[1]


def test_images_that_swap_weigh_more():
    """With all swaps on one image, the loss is nearly that image's own."""
    training = started(**FROM_THE_START)
    scrambled(training)
    task = training.learner.tasks["cluster"]
    batch = one_batch(training)

    def l_id(hard: int | None) -> float:
        task.s.fill_(1)
        if hard is not None:
            task.s[hard] = 1e6
        return losses_of_clusters(training, *batch)[0].sum().item()

    each = [l_id(i) for i in range(16)]
    assert max(each) - min(each) > 0.1
    assert l_id(None) == pytest.approx(sum(each) / 16, rel=1e-3)
    training.settings.hard_samples = False
    assert l_id(each.index(max(each))) == l_id(None)


# ---- labels ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("online", [True, False])
def test_labels_come_from_the_classifier_or_from_the_memory(online):
    training = started(**FROM_THE_START, epochs=3, online=online, min_cluster_size=0.0, over_by="classifier")
    differ = False
    for _ in range(2):
        training.run_epoch()
        h, q = training.features()
        for task in training.learner.tasks.values():
            rows = q["shared"].double().tolist()
            by_memory = naive.most_likely(
                [naive.memory_assignment(q_i, banks_of(task.memory), training.settings.temperature) for q_i in rows]
            )
            by_classifier = task.classifier(F.normalize(h, dim=1)).argmax(1).tolist()
            differ |= by_memory != by_classifier
            assert task.y.tolist() == (by_classifier if online else by_memory)
    assert differ


def test_small_clusters_are_merged_away():
    sizes = {}
    for share in (0.0, 0.9):
        training = started(**FROM_THE_START, min_cluster_size=share)
        training.run_epoch()
        task = training.learner.tasks["cluster"]
        with torch.no_grad():
            task.classifier.linear.bias.copy_(torch.tensor([100.0, 0, 0, 0]))
        training._renew_labels(*training.features())
        sizes[share] = task.y.bincount(minlength=4).tolist()
    assert sizes[0.0] == [48, 0, 0, 0]
    assert min(sizes[0.9]) > 0


@pytest.mark.parametrize(
    "changes", [FROM_THE_START, dict(cluster_from=0.3, over_from=0.0)], ids=["random", "partition"]
)
def test_swaps_are_counted(changes):
    training = started(epochs=10, **changes)
    history = {name: [task.y.tolist()] for name, task in training.learner.tasks.items()}
    for _ in range(10):
        training.run_epoch()
        for name, task in training.learner.tasks.items():
            begins = task.plan.begins
            if training.epoch <= begins:  # what was before the first partition does not count
                history[name] = []
            history[name].append(task.y.tolist())
            assert task.s.tolist() == naive.swap_counts(history[name])
    assert max(training.learner.tasks["cluster"].s) > 1


def test_over_clusters_are_made_anew_after_every_epoch(monkeypatch):
    def clusters_of(x, n_clusters, restarts=None):
        seen.append((n_clusters, restarts, x.norm(dim=1)))
        return torch.arange(len(x)) % n_clusters, None

    seen: list = []
    monkeypatch.setattr("semclust.refresh.k_means", clusters_of)
    for by, times in (("k-means", 4), ("classifier", 0)):
        training = started(epochs=8, over_from=0.125, over_until=0.625, cluster_from=0.75, over_by=by)
        seen.clear()
        for _ in range(8):
            training.run_epoch()
        assert len(seen) == times
        for n_clusters, restarts, lengths in seen:
            assert n_clusters == training.learner.tasks["over"].n_clusters and restarts == 1
            assert_close(lengths, torch.ones_like(lengths))


def test_tasks_join_in_their_turn():
    """Instance contrast first; then "over" beside it, for a while; then "cluster" and "under", whose labels a
    partition gives."""
    training = started(epochs=20, **LATE)
    tasks = training.learner.tasks
    assert {name: task.n_clusters for name, task in tasks.items()} == {"cluster": 4, "under": 2, "over": 6}
    begins = {"over": 5, "cluster": 13, "under": 13}
    rows = []
    for epoch in range(20):
        before = {name: (task.y.clone(), task.memory.keys.clone()) for name, task in tasks.items()}
        rows.append(training.run_epoch()[0])
        for name, task in tasks.items():
            y, keys = before[name]
            rests = epoch + 1 < begins[name] or (name == "over" and epoch >= 10)
            assert torch.equal(keys, task.memory.keys) == rests
            if rests:
                assert torch.equal(y, task.y)
            elif epoch + 1 == begins[name]:
                # The partition starts classifier and memory: they agree with it on most images.
                agree = task.classifier(F.normalize(training.features()[0], dim=1)).argmax(1) == task.y
                assert agree.float().mean() > 0.7
    assert all(math.isnan(row["score"]) == (row["epoch"] < 13) for row in rows)
    assert [row["clusters"] for row in rows[4:9]] == [6] * 5  # "over" is what there is to tell of
    assert all(row["clusters"] == 4 for row in rows[12:])
    told = [6, 7, 8, 9, *range(14, 21)]  # of labels that had been learned from
    assert [row["epoch"] for row in rows if not math.isnan(row["churn"])] == told
    assert [row["epoch"] for row in rows if row["loss_cd"] > 0] == [*range(6, 11), *range(14, 21)]
    assert all(math.isfinite(row["spread"]) for row in rows)


@pytest.mark.parametrize("balance", [0.0, 5.0])
def test_clusters_start_from_a_partition_of_the_pooled_features_and_go_on_by_themselves(monkeypatch, balance):
    training = started(epochs=8, cluster_from=0.25, tasks=("cluster", "instance"), balance=balance)
    when = []

    def partition(x, n_clusters, tau, even):
        assert torch.equal(x, centred(training.features()[0]))
        when.append((training.epoch, even))
        return spectral_partition(x, n_clusters, tau)

    monkeypatch.setattr(refresh, "spectral_partition", partition)
    for _ in range(8):
        training.run_epoch()
    assert when == [(2, balance > 0)]


# ---- pairs of neighbours -----------------------------------------------------------------------------


def test_images_come_in_pairs_of_neighbours_once_clusters_are_learned():
    training = started(50, epochs=4, cluster_from=0.5, neighbours=3, batch_size=11)
    training.run_epoch()
    assert sorted(set(training._order().flatten().tolist())) == list(range(50))
    training.run_epoch()
    h = centred(training.features()[0])
    near = (h @ h.T).fill_diagonal_(-1).topk(3, dim=1).indices
    assert torch.equal(training.learner.neighbours.sort(1).values, near.sort(1).values.int())
    order = training._order()
    assert order.shape == (5, 10)  # whole pairs alone
    image, neighbour = order.unflatten(1, (-1, 2)).unbind(2)
    assert len(image.unique()) == 25 or len(image.unique()) == 24  # the last batch is filled by the first images
    assert (near[image] == neighbour[..., None]).any(2).all()
    kept = training.learner.neighbours.clone()
    training.run_epoch()
    assert torch.equal(training.learner.neighbours, kept)  # as they were when the clusters started


def test_the_classifier_learns_from_pairs_with_a_gradient_to_the_encoder():
    """L_CD of a batch against the formulas, and that it reaches the weights below the classifier."""
    training = started(48, epochs=4, cluster_from=0.25, neighbours=3, balance=2.0, over_from=0.25)
    training.run_epoch()
    index, x = training._order()[0], torch.rand(16, 1, 8, 8)
    task = training.learner.tasks["cluster"]
    h, q = training.learner.encoder(x)
    k = {name: F.normalize(torch.rand_like(each), dim=1) for name, each in q.items()}
    phase = replace(training.phase, tasks=("cluster", "over"))
    _, _, l_cd = sample_losses(training.learner, training.settings, training.group, phase, index, h, q, h, k)
    p = task.classifier(F.normalize(h, dim=1)).softmax(1)
    memory = core.memory_assignment(core.bank_similarity(k["shared"], task.memory.keys, 0.2))
    mean = p.mean(0)
    expected = -(memory * p.log()).sum(1).mean()
    expected = expected - sum((p[i] @ p[i + 1]).log() for i in range(0, 16, 2)) / 8
    expected = expected + 2.0 * (math.log(4) + (mean * mean.log()).sum())
    torch.testing.assert_close(l_cd[1].sum(), expected)
    found, wanted = (torch.autograd.grad(loss, h, retain_graph=True)[0] for loss in (l_cd[1].sum(), expected))
    torch.testing.assert_close(found, wanted)
    assert not torch.autograd.grad(l_cd[2].sum(), h)[0].any()  # fine clusters have no pairs


@pytest.mark.parametrize("parts", [2, 3, 4])
def test_parts_of_a_step_keep_pairs_together(monkeypatch, parts):
    training = started(48, epochs=4, cluster_from=0.25, neighbours=3)
    training.run_epoch()
    order, seen = training._order()[0], []
    add_gradient = training._add_gradient

    def watch(phase, query, key, index, *rest):
        seen.append(index)
        return add_gradient(phase, query, key, index, *rest)

    monkeypatch.setattr(training, "_add_gradient", watch)
    training.parts = parts
    training._begin_steps()
    training._step(next(iter(training.images.batches([order]))), order, 0.1)
    assert len(seen) == parts and all(len(index) % 2 == 0 for index in seen)
    assert torch.equal(torch.cat(seen), order)


def test_instance_contrast_alone_gives_the_k_means_of_its_features():
    training = started(96, epochs=3, tasks=("instance",))
    for _ in range(3):
        row, _ = training.run_epoch()
    h = F.normalize(training.features()[0], dim=1)
    y = training.learner.tasks["cluster"].y
    mean = torch.stack([h[y == j].mean(0) for j in range(4)])
    nearest = torch.cdist(h, mean).argmin(1)
    assert torch.equal(nearest, y)
    assert row["loss_cd"] == 0 and not math.isnan(row["score"])


# ---- every setting runs ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        *(dict(contrast=contrast) for contrast in CONTRASTS),
        dict(cross_cluster=False),
        dict(online=False),
        dict(hard_samples=False),
        dict(tasks=("instance",)),
        dict(tasks=("cluster",)),
        dict(tasks=("cluster", "instance")),
        dict(tasks=("cluster", "over")),
        dict(tasks=("cluster", "under")),
        dict(classifier_input="projection"),
        dict(classifier_input="projection", tasks=("instance",)),
        dict(classifier_trains_encoder=True),
        dict(projection_per_task=True),
        dict(projection_per_task=True, contrast="instance-memory"),
        dict(projection_per_task=True, tasks=("cluster",)),
        dict(projection_norm=False),
        dict(batch_norm_groups=2),
        dict(batch_norm_groups=2, contrast="simclr"),
        dict(sees="edges", backbone=TinyBackbone(2)),
        dict(sees="edges", backbone="resnet18", width=2),
        dict(max_pool=True, backbone="resnet18", width=2),
        dict(task_sum="sum"),
        dict(assign_by="query"),
        dict(attraction=0.0),
        dict(min_cluster_size=0.0),
        dict(augment="natural"),
        dict(augment="none"),
        dict(over_factor=2, over_from=0.5, over_until=1.0),
        dict(nearest=0.0),
        dict(nearest=1.0, nearest_from=0.5),
        dict(momentum=0.0),
        dict(momentum=1.0),
        dict(cluster_from=1.0, over_from=0.99, over_until=1.0, self_label_from=1.0),
        dict(neighbours=0),
        dict(neighbours=1000),
        dict(balance=0.0),
        dict(preset("paper"), epochs=2, batch_size=16, width=2, backbone="resnet18"),
    ],
    ids=lambda changes: " ".join(f"{k}={v}" for k, v in changes.items() if not isinstance(v, nn.Module))[:60],
)
def test_two_epochs_with_each_setting(changes):
    images, settings = make_images(), tiny(**changes)
    training = fitting.start(images, settings)
    needs_twin = settings.contrast == "moco" or settings.labels_itself
    assert (training.learner.twin is None) == (not needs_twin)
    assert ("stored_keys" in dict(training.learner.named_buffers())) == (settings.contrast == "instance-memory")
    fitted = fitting.fit(images, settings)
    assert fitted.p.shape == (48, 4) and fitted.q.shape == (48, settings.projection_dim)
    assert np.isfinite(fitted.p).all() and np.isfinite(fitted.q).all()
    np.testing.assert_allclose(fitted.p.sum(1), 1, atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(fitted.q, axis=1), 1, atol=1e-5)
    assert (np.diff(np.bincount(fitted.labels, minlength=4)) <= 0).all()  # 0 is the largest
    assert len(fitted.history) == 2
    for row in fitted.history:
        assert all(math.isfinite(row[name]) for name in ("learning_rate", "loss", "loss_id", "loss_cd", "spread"))
        assert row["loss"] > 0 and row["loss_cd"] >= 0
    last = fitted.history[-1]
    assert all(0 <= last[name] <= 1 for name in ("agreement", "confidence", "smallest", "largest", "score"))
    assert sum(map(int, last["sizes"].split())) == 48


def test_the_paper_has_its_own_tasks():
    settings = Settings(**preset("paper"), n_clusters=4)
    plans = plan_tasks(settings, 1000)
    assert {name: (plan.n_clusters, plan.begins, plan.ends) for name, plan in plans.items()} == {
        "cluster": (4, 0, math.inf),
        "under": (2, 0, math.inf),
    }


@pytest.mark.parametrize("momentum, moves", [(0.9, True), (1.0, False)])
def test_the_momentum_twin_follows(momentum, moves):
    training = started(momentum=momentum)
    twin = training.learner.twin
    before = [p.clone() for p in twin.parameters()]
    assert all(map(torch.equal, before, training.learner.encoder.parameters()))
    training.run_epoch()
    assert all(torch.equal(a, b) for a, b in zip(before, twin.parameters(), strict=True)) != moves
    assert not any(p.requires_grad for p in twin.parameters())


@pytest.mark.parametrize("contrast", CONTRASTS)
def test_the_momentum_is_that_of_the_method_where_none_is_set(contrast):
    assert started(contrast=contrast, momentum=None).contrast.momentum == MOMENTUM[contrast]
    assert started(contrast=contrast, momentum=0.0).contrast.momentum == 0


def test_keys_of_a_split_batch_are_dealt_out_and_put_back():
    training = started(batch_norm_groups=2, augment="none")
    learner = training.learner
    x = pixels_of(training, torch.arange(16)).float() / 255
    learner.eval()  # batch norm without the batch: the twin gives what the encoder gives
    seen = recorded(learner.twin)
    h_key, k = training.contrast.keys(training.phase, x, torch.arange(16), 16)
    h, q = learner.encoder(x)
    assert_close(k["shared"], q["shared"].detach())
    assert_close(h_key, h.detach())
    ((given,), _) = seen[0]
    assert torch.equal(given, x[[*range(0, 16, 2), *range(1, 16, 2)]])
    assert sorted(given.flatten(1).sum(1).tolist()) == sorted(x.flatten(1).sum(1).tolist())


# ---- odd sizes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "n, changes",
    [
        (48, dict(n_clusters=2)),
        (48, dict(n_clusters=3)),
        (48, dict(n_clusters=5)),
        (48, dict(n_clusters=9, memory_size=4)),  # fewer keys than other clusters
        (48, dict(memory_size=1)),
        (48, dict(n_clusters=2, memory_size=6, batch_size=48)),  # a batch larger than a bank
        (50, dict(batch_size=16)),
        (40, dict(batch_size=None)),
        (40, dict(batch_size=1000)),
        (4, dict(n_clusters=2)),
        (7, dict(n_clusters=3)),
        (41, dict(batch_size=2)),  # would leave a batch of one image
        (13, dict(batch_size=6, batch_norm_groups=3)),
        (14, dict(batch_size=7, batch_norm_groups=3, backbone="resnet18", width=2)),  # 1 x 1 maps, parts of 3, 3 and 1
    ],
    ids=lambda value: str(value) if isinstance(value, int) else " ".join(f"{k}={v}" for k, v in value.items()),
)
def test_odd_sizes(n, changes):
    fitted = fitting.fit(make_images(n), tiny(epochs=3, **changes))
    assert fitted.p.shape == (n, changes.get("n_clusters", 4))
    assert all(map(math.isfinite, losses(fitted)))


def test_the_number_of_clusters_of_each_task():
    def n_clusters(C: int, n: int = 10_000, **changes) -> dict[str, int]:
        plans = plan_tasks(Settings(n_clusters=C, epochs=50, **changes), n)
        return {name: plan.n_clusters for name, plan in plans.items()}

    both = ("cluster", "under", "over")
    assert n_clusters(10) == {"cluster": 10, "over": 40}
    assert n_clusters(10, tasks=both) == {"cluster": 10, "under": 5, "over": 40}
    assert n_clusters(5, tasks=both) == {"cluster": 5, "under": 2, "over": 20}
    assert n_clusters(2, tasks=both) == {"cluster": 2, "over": 8}  # half of 2 is no clustering
    assert n_clusters(3, over_factor=2) == {"cluster": 3, "over": 6}
    assert n_clusters(10, n=200) == {"cluster": 10, "over": 25}
    assert n_clusters(10, n=80) == {"cluster": 10}
    assert n_clusters(10, tasks=("instance",)) == {"cluster": 10}


def test_a_memory_holds_at_most_half_of_the_images():
    learner = started(40, n_clusters=3, memory_size=4096).learner
    assert learner.instance_memory.keys.shape[:2] == (1, 20)
    assert learner.tasks["cluster"].memory.keys.shape[:2] == (3, 10)
    assert started(40, n_clusters=3, memory_size=8).learner.tasks["cluster"].memory.keys.shape[:2] == (3, 4)


@pytest.mark.parametrize(
    "n, changes, words",
    [
        (3, dict(n_clusters=2), "3 images: expected at least 4"),
        (1, dict(n_clusters=2), "1 image: expected at least 4"),
        (6, dict(n_clusters=4), "n_clusters=4, but there are only 6 images; choose a k of at most 3."),
        (48, dict(n_clusters=1), "n_clusters=1"),
        (48, dict(device="nonsense"), "device='nonsense'"),
        (48, dict(tasks=("over",)), "tasks=\\('over',\\)"),
    ],
)
def test_what_cannot_be_learned_is_refused(n, changes, words):
    with pytest.raises(InputError, match=words):
        fitting.fit(make_images(n), tiny(**changes))


def test_device_and_augmentation_are_chosen():
    assert choose_device("cpu") == torch.device("cpu")
    assert choose_device("auto").type in ("cpu", "cuda", "mps")
    assert choose_augmentation("strokes") is AUGMENTATIONS["strokes"]
    assert choose_augmentation("natural") is AUGMENTATIONS["natural"]
    assert choose_augmentation(torch.flip) is torch.flip


def test_a_callable_augmentation_is_used_for_queries_and_keys():
    seen = []

    def watched(x):
        seen.append((tuple(x.shape), float(x.min()) >= 0, float(x.max()) <= 1))
        return x.flip(3)

    fitting.fit(make_images(), tiny(augment=watched, epochs=1))
    # Three steps, two views; and one of all images, for the score.
    assert seen == [((16, 1, 8, 8), True, True)] * 6 + [((48, 1, 8, 8), True, True)]


# ---- what goes wrong ---------------------------------------------------------------------------------


@pytest.mark.parametrize("contrast", CONTRASTS)
@pytest.mark.parametrize("symmetric", [False, True])
def test_a_step_that_is_not_finite_changes_nothing(contrast, symmetric):
    training = started(augment=BadView(7), contrast=contrast, symmetric=symmetric, **FROM_THE_START)
    training.run_epoch()
    training.run_epoch()
    before = on_host(training.state())
    assert step_on(training, torch.arange(16)).isnan().all()
    after = training.state()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert all(name.startswith("learner.twin.") and "running" not in name for name in moved)  # it follows the weights
    assert step_on(training, torch.arange(16)).isfinite().all()
    assert not torch.equal(before["velocity.0"], training.state()["velocity.0"])


def test_steps_that_are_not_finite_are_skipped_and_counted(tmp_path):
    listener, run = Listener(), RunFolder.create(tmp_path, "run")
    fitted = fitting.fit(make_images(), tiny(augment=BadView(2, 3, 5, 11), epochs=6), listener, run)
    assert [row["skipped_steps"] for row in fitted.history] == [2, 1, 0, 1, 0, 0]
    assert all(math.isfinite(row["loss"]) for row in fitted.history)
    assert sum("skipped" in message for message in listener.heard) == 1
    assert all(value.isfinite().all() for value in run.read_checkpoint()[0].values())
    assert [row["skipped_steps"] for row in run.read_metrics()] == [2, 1, 0, 1, 0, 0]
    assert np.isfinite(fitted.q).all()


def test_after_three_such_steps_in_a_row_a_run_goes_back_and_learns_more_slowly(tmp_path):
    """Also where they are of two epochs; and the checkpoint remembers the rate."""
    listener, run = Listener(), RunFolder.create(tmp_path, "run")
    settings = tiny(augment=BadView(9, 10, 11), epochs=5, learning_rate=0.06)
    fitted = fitting.fit(make_images(), settings, listener, run)
    (told,) = [message for message in listener.heard if "in a row" in message]
    assert "from 0.06 to 0.02" in told and "went on from epoch 3" in told
    expected = [row["learning_rate"] for row in fitting.fit(make_images(), tiny(epochs=5, learning_rate=0.06)).history]
    found = [row["learning_rate"] for row in fitted.history]
    assert found[:3] == expected[:3] and found[3:] == pytest.approx([rate / 3 for rate in expected[3:]])
    assert [row["epoch"] for row in run.read_metrics()] == [1, 2, 3, 4, 5]
    again = fitting.fit(make_images(), settings, run=run)
    assert any("from 0.06 to 0.02" in message for message in again.warnings)


def test_a_checkpoint_between_such_steps_and_the_look_at_them_is_none_to_go_back_to(tmp_path, monkeypatch):
    """The steps in it would be counted once more, and the run would end with the lower rate untried."""
    monkeypatch.setattr(fitting, "CHECKPOINT_EVERY", 0)  # after every step
    listener, run = Listener(), RunFolder.create(tmp_path, "run")
    settings = tiny(augment=BadView(14, 15, 16), epochs=3, batch_size=4)  # 12 steps an epoch
    fitted = fitting.fit(make_images(), settings, listener, run)
    (told,) = [message for message in listener.heard if "in a row" in message]
    assert "went on from epoch 1" in told
    assert [row["skipped_steps"] for row in fitted.history] == [0, 2, 0]


class Onlooker(Watcher):
    """Looks at the training itself, which it does not keep."""

    def begin(self, training):
        self.training = weakref.proxy(training)

    def epoch(self, row):
        assert self.training.epoch == row["epoch"]


@pytest.mark.parametrize("minutes", [None, 5])
def test_a_run_that_goes_back_holds_one_training_at_a_time(minutes, monkeypatch):
    """On a GPU there may be no room for two. Who watches is told of the other one."""
    begun, starts = [], fitting.start

    def start(*args, **kwargs):
        gc.collect()
        assert not any(training() for training in begun)
        training = starts(*args, **kwargs)
        begun.append(weakref.ref(training))
        return training

    def three_epochs(training, *args):
        training.set_epochs(3)
        return Schedule(3, {"": 0.01}, {"; ": 0.01}, end=0.0)

    monkeypatch.setattr(fitting, "start", start)
    monkeypatch.setattr(fitting, "make_schedule", three_epochs)
    view, run_epoch = BadView(), Training.run_epoch

    def spoiled_once(self, *args):
        view.bad = range(10**9) if self.epoch == 1 and len(begun) == 1 else ()
        return run_epoch(self, *args)

    monkeypatch.setattr(Training, "run_epoch", spoiled_once)
    fitting.fit(make_images(), tiny(augment=view, epochs=3, minutes=minutes), Onlooker())
    assert len(begun) == 2


def test_without_a_run_folder_it_goes_back_to_the_start():
    listener = Listener()
    fitted = fitting.fit(make_images(), tiny(augment=BadView(4, 5, 6), epochs=3), listener)
    assert any("went on from epoch 0" in message for message in listener.heard)
    assert [row["epoch"] for row in fitted.history] == [1, 2, 3]


def test_a_run_that_is_not_finite_even_then_ends_and_keeps_the_last_good_checkpoint(tmp_path):
    images = make_images()
    healthy = tiny(augment=BadView(), epochs=5, learning_rate=0.06)
    expected = unbroken(tmp_path, images, healthy)
    run = RunFolder.create(tmp_path, "bad")
    with pytest.raises(TrainingError, match=r"step 3 of epoch 4\. .*lowered before, to 0\.02.*\(now 0\.06\)"):
        fitting.fit(images, tiny(augment=BadView(*range(10, 99)), epochs=5, learning_rate=0.06), run=run)
    tensors, epoch = run.read_checkpoint()
    assert epoch == 3 and all(value.isfinite().all() for value in tensors.values())
    assert [row["epoch"] for row in run.read_metrics()] == [1, 2, 3]
    save_all(run, images, fitting.fit(images, healthy, run=run))
    assert {name: all_bytes(run)[name] for name in RESULTS if "config" not in name} == {
        name: all_bytes(expected)[name] for name in RESULTS if "config" not in name
    }


@pytest.mark.parametrize("changes", [dict(), FROM_THE_START, dict(tasks=("instance",))], ids=["default", "paper", "i"])
@pytest.mark.parametrize("batch_size", [16, 48])
def test_a_learning_rate_that_is_far_too_high_is_told_and_spoils_no_checkpoint(tmp_path, batch_size, changes):
    """With one step an epoch, the weights break after the last loss of the epoch was computed."""
    run = RunFolder.create(tmp_path, "run")
    settings = tiny(learning_rate=1e38, warmup_epochs=0, epochs=3, batch_size=batch_size, **changes)
    with pytest.raises(TrainingError, match=r"epoch [123].*learning rate \(now 1e\+38\)"):
        fitting.fit(make_images(), settings, run=run)
    if run.checkpoint.exists():
        training = fitting.start(make_images(), settings)
        training.load_state(*run.read_checkpoint(), run.checkpoint)
        assert training.features()[0].isfinite().all()


class Collapsed(nn.Module):
    """Sees nothing: the same feature for every image."""

    def __init__(self):
        super().__init__()
        self.feature = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return self.feature.expand(len(x), 8)


class Listener(Watcher):
    def __init__(self):
        self.heard: list[str] = []
        self.calls: list[str] = []

    def begin(self, training):
        self.calls.append("begin")

    def step(self, n_images):
        self.calls.append("step")

    def epoch(self, row):
        self.calls.append("epoch")

    def warn(self, message):
        self.heard.append(message)


def test_collapsed_features_are_told_once():
    listener = Listener()
    fitted = fitting.fit(make_images(), tiny(backbone=Collapsed(), epochs=10, learning_rate=0.06), listener)
    collapse = [message for message in listener.heard if "collapsed" in message]
    assert len(collapse) == 1 and "(now 0.06)" in collapse[0]
    assert fitted.warnings == listener.heard
    assert listener.calls == ["begin", *["step", "step", "step", "epoch"] * 10]


def test_a_healthy_run_is_not_warned_about():
    images = make_images(96, groups=3)
    listener = Listener()
    changes = dict(learning_rate=0.2, warmup_epochs=0, momentum=0.9, augment=strokes)
    fitting.fit(images, tiny(n_clusters=3, epochs=6, **changes), listener)
    assert not [message for message in listener.heard if "collapsed" in message]


def test_one_giant_cluster_is_told():
    listener = Listener()
    settings = tiny(backbone=Collapsed(), epochs=6, min_cluster_size=0.0, **FROM_THE_START)
    fitted = fitting.fit(make_images(), settings, listener)
    assert any("One cluster holds 100%" in message for message in listener.heard)
    assert any("3 of 4 clusters are empty" in message for message in listener.heard)
    assert (fitted.labels == 0).all()


def test_the_summary_is_plain_and_adds_up():
    images = make_images(48, labels=np.arange(48) % 4)
    images.skipped = [("x.png", "empty file")]
    fitted = fitting.fit(images, tiny(epochs=3))
    summary = fitting.summarise(fitted, images)
    assert summary["n_images"] == 48 and summary["n_skipped"] == 1
    assert [c["cluster"] for c in summary["clusters"]] == [0, 1, 2, 3]
    assert [c["size"] for c in summary["clusters"]] == np.bincount(fitted.labels, minlength=4).tolist()
    for cluster in summary["clusters"]:
        mine = fitted.p[fitted.labels == cluster["cluster"]].max(1, initial=0)
        assert cluster["confidence"] == (pytest.approx(mine.mean()) if len(mine) else None)
    assert summary["score"] == fitted.history[-1]["score"]
    assert summary["acc"] == fitted.history[-1]["acc"]
    assert summary["image_shape"] == [8, 8, 1]


def test_a_missing_seed_is_drawn_and_kept():
    settings = tiny(random_state=None)
    drawn = {fitting.draw_seed(settings).random_state for _ in range(3)}
    assert len(drawn) == 3 and all(isinstance(seed, int) and seed >= 0 for seed in drawn)
    assert settings.random_state is None
    fixed = tiny(random_state=7)
    assert fitting.draw_seed(fixed) is fixed


def test_an_image_that_is_met_twice_in_a_batch_keeps_its_last_vector():
    training = started(contrast="instance-memory", momentum=0.0, neighbours=0, tasks=("cluster", "instance"))
    index = torch.tensor([3, 5, 3, 7])
    q = F.normalize(torch.randn(4, 8), dim=1)
    training.contrast.remember(training.phase, index, {"shared": q}, {"shared": torch.zeros(4, 8)}, torch.tensor(False))
    assert_close(training.learner.stored_keys[0, [3, 5, 7]], q[[2, 1, 3]])


# ---- the score ---------------------------------------------------------------------------------------


def test_the_score_is_of_views_such_as_are_learned_from_by_what_tells_the_clusters():
    """The network, or its twin and strongly changed images where it learns from its own labels: agreement with what it
    says of the images themselves."""
    training = fitting.start(make_images(), tiny(epochs=6, cluster_from=0.4, self_label_from=0.7))
    for _ in range(6):
        taught = training.phase.self_labels
        row, p = training.run_epoch()
        if math.isnan(row["score"]):
            assert row["learns"] in ("instances", "over-clusters")
            continue
        if training.starts_self_labels(training.epoch):  # another classifier by now
            continue
        task, encoder = training.learner.tasks["cluster"], training.learner.telling_encoder(taught)
        change = training.strong if taught else training.augmentation
        with torch.no_grad(), own_random_numbers(0, 0, training.device):
            h, _ = encoder.eval()(change(pixels_of(training, torch.arange(48)) / 255))
            p_view = task.telling_classifier(taught)(F.normalize(h, dim=1)).softmax(1)
        sizes = p.argmax(1).bincount(minlength=4)
        assert row["view_agreement"] == pytest.approx((p * p_view).sum(1).mean().item(), abs=1e-4)
        assert row["score"] == pytest.approx(metrics.label_free_score(row["view_agreement"], sizes))
    assert row["learns"] == "own labels"


def test_the_score_leaves_the_random_numbers_of_a_run_alone(monkeypatch):
    """So a run is the same whether it is scored or not."""
    scored, plain = (fitting.start(make_images(), tiny(epochs=4)) for _ in range(2))
    monkeypatch.setattr(plain, "scores_clusters", lambda epoch: False)
    for _ in range(4):
        with_score, without = scored.run_epoch()[0], plain.run_epoch()[0]
        assert with_score["loss"] == without["loss"] and math.isnan(without["score"])
    assert not math.isnan(with_score["score"])


def test_of_many_images_some_are_scored(monkeypatch):
    monkeypatch.setattr(train, "SCORED_IMAGES", 10)
    training = fitting.start(make_images(), tiny(epochs=1, tasks=("instance",)))
    looked_at = []
    changed = training._changed
    monkeypatch.setattr(training, "_changed", lambda x: looked_at.append(len(x)) or changed(x))
    row, _ = training.run_epoch()
    assert sum(looked_at) == 10 and 0 < row["score"] <= 1
