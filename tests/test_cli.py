"""The commands: what they write, what they say, and how they fail; and what a person sees meanwhile."""

import csv
import io
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console

import semclust
from conftest import RESULTS, make_images, noisy_groups, save_images, tiny
from semclust import Settings, fitting, preset
from semclust.assignments import read_assignments
from semclust.cli import main, parse
from semclust.cli.common import FitSettings
from semclust.cli.predict import assigning
from semclust.display import Display, clock, figures, printable, show_clusters
from semclust.run_folder import RunFolder

FAST = ["-k", "3", "--epochs", "3", "--width", "2", "--batch-size", "8", "--device", "cpu", "--no-report"]
N = 20
ALL_RESULTS = ("config.json", *RESULTS)


def call(*argv) -> int:
    """The exit status of a command."""
    try:
        main([str(word) for word in argv])
    except SystemExit as end:
        assert isinstance(end.code, int)
        return end.code
    except KeyboardInterrupt:
        pytest.fail("a traceback for Ctrl-C")  # and not the end of all tests
    return 0


def refused(capsys, *argv, status: int = 1) -> str:
    """What a command that fails says on stderr: words, and no traceback."""
    assert call(*argv) == status
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert status == 2 or said.startswith("semclust: ")
    return said


def shell(*words, env: dict[str, str] | None = None, **options) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *map(str, words)],
        capture_output=True,
        timeout=100,
        env=environment() | (env or {}),
        **options,
    )


def environment() -> dict[str, str]:
    source = str(Path(semclust.__file__).parents[1])
    return os.environ | {"PYTHONPATH": source, "OMP_NUM_THREADS": "1"}


def contents(run: Path, names=ALL_RESULTS) -> dict[str, bytes]:
    return {name: (run / name).read_bytes() for name in names}


def rows(path: Path) -> list[dict[str, str]]:
    with open(path, newline="", encoding="utf-8", errors="surrogateescape") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    """Twenty grey images in the folders a and b, and a text file that claims to be a photograph."""
    folder = tmp_path_factory.mktemp("data") / "photos"
    pixels = noisy_groups(N, size=16)
    save_images(folder / "a", pixels[:12])
    save_images(folder / "b", pixels[12:])
    (folder / "a" / "notes.jpg").write_text("not an image")
    (folder / "readme.txt").write_text("not an image either")
    return folder


@pytest.fixture(scope="module")
def finished(photos, tmp_path_factory) -> Path:
    """The run folder of a whole fit; tests must not change it."""
    out = tmp_path_factory.mktemp("finished")
    assert call("fit", photos, *FAST, "--out", out) == 0
    return out / "photos"


@pytest.fixture
def run(finished, tmp_path) -> Path:
    """A copy that a test may change."""
    return shutil.copytree(finished, tmp_path / "copy" / "photos")


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def labels_csv(tmp_path) -> Path:
    path = tmp_path / "labels.csv"
    names = [f"{folder}/{i:02}.png" for folder, n in (("a", 12), ("b", 8)) for i in range(n)]
    path.write_text("path,label\n" + "".join(f"{name},{'cat' if i % 2 else 'dog'}\n" for i, name in enumerate(names)))
    return path


# ---- fit ---------------------------------------------------------------------------------------------


def test_a_fit_writes_a_run_folder(finished, photos):
    assert sorted(path.name for path in finished.iterdir()) == sorted(
        [
            "config.json",
            "metrics.csv",
            "last.ckpt",
            "previous.ckpt",
            "model",
            "assignments.csv",
            "embeddings.npy",
            "probabilities.npy",
            "skipped.csv",
            "summary.json",
            "time.json",
            ".lock",
        ]
    )
    assert sorted(path.name for path in (finished / "model").iterdir()) == ["config.json", "model.safetensors"]
    config = json.loads((finished / "config.json").read_text())
    assert config["data"] == str(photos) and config["labels"] is None
    assert config["settings"].keys() == {f.name for f in fields(Settings)}
    assert config["settings"]["n_clusters"] == 3 and config["settings"]["epochs"] == 3
    assert config["settings"]["augment"] in ("natural", "strokes")  # what auto was: a resumed run must not decide anew
    assert [row["epoch"] for row in rows(finished / "metrics.csv")] == ["1", "2", "3"]
    assert [row["path"] for row in rows(finished / "skipped.csv")] == ["a/notes.jpg"]


def test_the_results_agree_with_each_other(finished):
    table = rows(finished / "assignments.csv")
    assert [row["path"] for row in table] == [f"a/{i:02}.png" for i in range(12)] + [f"b/{i:02}.png" for i in range(8)]
    for row in table:
        assert 1 / 3 <= float(row["confidence"]) <= 1 and row["cluster"] != row["runner_up"]
        assert 0 <= float(row["margin"]) <= float(row["confidence"])
    sizes = np.bincount([int(row["cluster"]) for row in table], minlength=3)
    assert (np.diff(sizes) <= 0).all()
    summary = json.loads((finished / "summary.json").read_text(), parse_constant=pytest.fail)
    assert [cluster["size"] for cluster in summary["clusters"]] == sizes.tolist()
    assert summary["n_images"] == N and summary["n_skipped"] == 1 and summary["image_shape"] == [16, 16, 1]
    q = np.load(finished / "embeddings.npy")
    assert q.shape == (N, 128)
    np.testing.assert_allclose(np.linalg.norm(q, axis=1), 1, atol=1e-5)
    model = semclust.SemanticClusterer.load(finished)
    data = Path(json.loads((finished / "config.json").read_text())["data"])
    assert model.predict([data / row["path"] for row in table]).tolist() == [int(row["cluster"]) for row in table]


def test_a_fit_says_what_it_does(photos, here, capsys):
    assert call("fit", photos, *FAST) == 0
    said = capsys.readouterr()
    assert said.err == ""
    assert "skipped 1 file that could not be read: " in said.out and "skipped.csv" in said.out
    assert "20 images of 16 x 16 x 1 into 3 clusters on cpu" in said.out
    lines = said.out.splitlines()
    epochs = [line for line in lines if line.startswith("epoch ")]
    assert [line.split()[1] for line in epochs] == ["1/3", "2/3", "3/3"]
    assert all("images/s" in line and "left" in line for line in epochs)
    assert "20 images in 3 clusters" in said.out and "label-free score" in said.out
    assert lines[-1].endswith("run folder: runs/photos")
    assert "\x1b" not in said.out


def test_a_second_fit_makes_a_second_folder_with_the_same_results(photos, finished, here):
    assert call("fit", f"{photos}/", *FAST) == 0
    first = contents(here / "runs" / "photos")
    assert call("fit", photos, *FAST) == 0
    assert sorted(os.listdir("runs")) == ["photos", "photos-2"]
    assert contents(here / "runs" / "photos") == first == contents(here / "runs" / "photos-2") == contents(finished)


def test_another_seed_is_another_run(photos, finished, here):
    assert call("fit", photos, *FAST, "--random-state", 5) == 0
    assert contents(here / "runs/photos", ["last.ckpt"]) != contents(finished, ["last.ckpt"])


def test_a_seed_that_was_drawn_is_kept(photos, here):
    assert call("fit", photos, *FAST, "--random-state", "None", "--epochs", "1") == 0
    seed = json.loads((here / "runs/photos/config.json").read_text())["settings"]["random_state"]
    assert isinstance(seed, int)


def test_a_relative_path_is_kept_as_an_absolute_one(photos, here):
    (here / "link").symlink_to(photos)
    assert call("fit", "./link", *FAST, "--epochs", "1", "--out", "elsewhere/deep") == 0
    config = json.loads((here / "elsewhere/deep/photos/config.json").read_text())
    assert config["data"] == str(photos)


def test_digits_are_the_embedded_ones_even_beside_a_folder_of_that_name(here, capsys):
    save_images(here / "digits", noisy_groups(12, size=16))
    small = ["-k", "10", "--epochs", "1", "--width", "1", "--batch-size", "600", "--image-size", "8", "--device", "cpu"]
    assert call("fit", "digits", *small, "--no-report") == 0
    assert "1,797 images" in capsys.readouterr().out
    assert call("evaluate", "runs/digits") == 0
    assert "ACC 0." in capsys.readouterr().out
    assert call("fit", "./digits", *FAST, "--epochs", "1") == 0
    assert "12 images" in capsys.readouterr().out


def test_labels_only_add_figures(photos, finished, labels_csv, here, capsys):
    assert call("fit", photos, *FAST, "--labels", labels_csv.name) == 0
    assert "the fit never saw the labels" in capsys.readouterr().out
    run = here / "runs/photos"
    assert contents(run, ["assignments.csv"]) == contents(finished, ["assignments.csv"])
    states = [RunFolder(each).read_checkpoint()[0] for each in (run, finished)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[1] if name != "metrics")
    assert {"acc", "nmi", "ari"} <= rows(run / "metrics.csv")[0].keys()
    assert 0 < json.loads((run / "summary.json").read_text())["acc"] <= 1
    assert json.loads((run / "config.json").read_text())["labels"] == str(labels_csv)


def test_labels_by_folder_even_beside_a_folder_of_that_name(photos, here, capsys):
    (here / "folders").mkdir()
    assert call("fit", photos, *FAST, "--epochs", "1", "--labels", "folders") == 0
    assert "ACC" in capsys.readouterr().out


ODD_NAMES = [
    "[red]x[/red].png",
    "[bold].png",
    "line\nbreak.png",
    "return\r.png",
    "🎉.png",
    'comma, quote".png',
    "\x1b[31mescape.png",
    os.fsdecode(b"byte \xff.png"),
    ":smile: \\.png",
]


def save_odd_images(folder: Path) -> Path:
    for i, name in enumerate(ODD_NAMES):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        with open(folder / name, "wb") as file:
            Image.fromarray(noisy_groups(len(ODD_NAMES), size=16)[i, ..., 0]).save(file, "PNG")
    (folder / "[link=x]bad.png").write_text("no image")
    return folder


def test_odd_file_names_break_neither_tables_nor_files(here, capsys):
    save_odd_images(here / "odd")
    assert call("fit", "odd", *FAST, "-k", "3", "--epochs", "1") == 0
    said = capsys.readouterr().out
    table = [line for line in said.splitlines() if line.startswith("│")]
    assert len(table) == 3  # a row for each cluster: no name breaks a line
    assert "\x1b" not in said
    shown = " ".join(table)
    assert "[red]x[/red].png" in shown or "[bold].png" in shown  # markup is text
    run = here / "runs/odd"
    assert sorted(read_assignments(run / "assignments.csv")[0]) == sorted(ODD_NAMES)
    assert [row["path"] for row in rows(run / "skipped.csv")] == ["[link=x]bad.png"]
    assert call("predict", run, "odd") == 0
    assert "skipped 1 file that could not be read: odd-clusters-skipped.csv" in capsys.readouterr().out
    assert [row["path"] for row in rows(here / "odd-clusters-skipped.csv")] == ["[link=x]bad.png"]
    with open("labels.csv", "w", newline="", encoding="utf-8", errors="surrogateescape") as file:
        csv.writer(file, quoting=csv.QUOTE_ALL).writerows(
            [("path", "label"), *((name, "[red]" if i % 2 else "[/]") for i, name in enumerate(ODD_NAMES))]
        )
    assert call("evaluate", run, "--labels", "labels.csv") == 0
    assert "[red]" in capsys.readouterr().out


# ---- resume ------------------------------------------------------------------------------------------


@pytest.fixture
def interrupted(photos, here, monkeypatch, capsys) -> Path:
    """A run that was stopped by Ctrl-C after its second epoch of three."""
    show = Display.epoch

    def stop(self, row):
        show(self, row)
        if row["epoch"] == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Display, "epoch", stop)
        assert call("fit", photos, *FAST) == 130
    said = capsys.readouterr()
    assert "Interrupted. Go on with: semclust fit --resume runs/photos" in said.err
    assert "Traceback" not in said.err
    assert not (here / "runs/photos/model").exists()
    return here / "runs" / "photos"


def test_an_interrupted_run_goes_on_to_the_same_bytes(interrupted, finished, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir("/")
    assert call("fit", "--resume", interrupted) == 0
    said = capsys.readouterr().out
    assert "resuming after epoch 2" in said and "epoch 3/3" in said and "epoch 2/3" not in said
    assert contents(interrupted) == contents(finished)
    assert os.listdir(interrupted.parent) == ["photos"]
    assert "ignored" not in said


def test_a_finished_run_stays_as_it_is(run, capsys):
    before = contents(run)
    summary = json.loads((run / "summary.json").read_text())
    assert call("fit", "--resume", run) == 0
    assert contents(run) == before
    assert json.loads((run / "summary.json").read_text()) | {"seconds": 0} == summary | {"seconds": 0}
    assert "epoch 3/3" not in capsys.readouterr().out


def test_resume_in_one_word(run):
    assert call("fit", f"--resume={run}") == 0


def test_flags_that_a_resumed_run_ignores_are_named(run, capsys):
    before = contents(run)
    assert call("fit", "photos", "--resume", run, "-k", "7", "--epochs=9", "--no-online", "--preset", "paper") == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("ignored")]
    for word in ("photos", "-k", "--epochs=9", "--no-online", "--preset"):
        assert word in line.split()
    assert "--resume" not in line
    assert contents(run) == before


def test_a_run_whose_images_changed_is_not_resumed(photos, here, capsys):
    own = shutil.copytree(photos, here / "own")
    assert call("fit", own, *FAST, "--epochs", "1") == 0
    before = contents(here / "runs/own")
    capsys.readouterr()
    Image.new("L", (16, 16)).save(own / "a" / "00.png")
    assert str(own) in refused(capsys, "fit", "--resume", "runs/own")
    Image.new("L", (16, 16)).save(own / "a" / "new.png")
    assert "are not those" in refused(capsys, "fit", "--resume", "runs/own")
    shutil.rmtree(own)
    assert str(own) in refused(capsys, "fit", "--resume", "runs/own")
    assert contents(here / "runs/own") == before


DAMAGE = [b"", b"garbage", b"\x80\x04.", None]


def damage(path: Path, content: bytes | None) -> None:
    path.write_bytes(path.read_bytes()[:5000] if content is None else content)


@pytest.mark.parametrize("content", DAMAGE, ids=["empty", "garbage", "pickle", "half"])
def test_damaged_checkpoints_are_named(interrupted, content, capsys):
    damage(interrupted / "last.ckpt", content)
    damage(interrupted / "previous.ckpt", content)
    rows_before = (interrupted / "metrics.csv").read_bytes()
    said = refused(capsys, "fit", "--resume", interrupted)
    assert "last.ckpt" in said and "previous.ckpt" in said
    assert (interrupted / "metrics.csv").read_bytes() == rows_before


@pytest.mark.parametrize("content", [*DAMAGE, "missing"], ids=["empty", "garbage", "pickle", "half", "missing"])
def test_in_place_of_a_damaged_checkpoint_goes_the_one_before_it(interrupted, finished, content, capsys):
    if content == "missing":
        (interrupted / "last.ckpt").unlink()
    else:
        damage(interrupted / "last.ckpt", content)
    assert call("fit", "--resume", interrupted) == 0
    said = capsys.readouterr().out
    assert "last.ckpt" in said and "from the checkpoint before it, previous.ckpt" in said
    assert "resuming after epoch 1" in said
    assert contents(interrupted) == contents(finished)


def test_a_run_that_was_stopped_before_its_first_checkpoint_starts_anew(interrupted, finished):
    (interrupted / "last.ckpt").unlink()
    (interrupted / "previous.ckpt").unlink()
    rows = (interrupted / "metrics.csv").read_text().splitlines(keepends=True)
    (interrupted / "metrics.csv").write_text("".join(rows[:2]))
    assert call("fit", "--resume", interrupted) == 0
    assert contents(interrupted) == contents(finished)


def test_a_finished_run_without_its_checkpoints_is_left_alone(run, capsys):
    (run / "last.ckpt").unlink()
    (run / "previous.ckpt").unlink()
    kept = [name for name in ALL_RESULTS if name != "last.ckpt"]
    before = contents(run, kept)
    assert "last.ckpt is missing" in refused(capsys, "fit", "--resume", run)
    assert contents(run, kept) == before


@pytest.mark.parametrize("content", [b"epoch,loss\ngarbage\n", b"\xff\xfe\n" * 3, None])
def test_damaged_rows_are_those_of_the_checkpoint_again(run, finished, content):
    if content is None:
        (run / "metrics.csv").unlink()
    else:
        (run / "metrics.csv").write_bytes(content)
    assert call("fit", "--resume", run) == 0
    assert contents(run) == contents(finished)


@pytest.mark.parametrize(
    "change",
    [
        lambda config: config.update(format=9),
        lambda config: config.pop("settings"),
        lambda config: config.pop("data"),
        lambda config: config.pop("labels"),
        lambda config: config.update(settings=3),
        lambda config: config["settings"].update(nonsense=1),
        lambda config: config["settings"].update(width="wide"),
        lambda config: config["settings"].update(n_clusters=4),
        lambda config: config.update(data=None),
    ],
    ids=range(9),
)
def test_a_damaged_config_is_told(run, change, capsys):
    config = json.loads((run / "config.json").read_text())
    change(config)
    (run / "config.json").write_text(json.dumps(config))
    refused(capsys, "fit", "--resume", run)


def test_a_run_of_before_there_was_a_setting_is_not_resumed_with_its_default(run, finished, capsys):
    config = json.loads((run / "config.json").read_text())
    settings = config["settings"]
    config["settings"] = {name: settings[name] for name in settings if name not in ("over_by", "crop_size")}
    (run / "config.json").write_text(json.dumps(config))
    said = refused(capsys, "fit", "--resume", run)
    assert "config.json lacks the settings crop_size, over_by" in said and "with that version" in said
    (run / "config.json").write_text(json.dumps(config | {"settings": settings}))
    assert call("fit", "--resume", run) == 0


def test_a_killed_process_is_resumed_to_the_same_bytes(photos, here):
    """Not asked to stop but killed, at a moment of no one's choosing."""
    flags = [*FAST, "--epochs", "10"]
    process = subprocess.Popen(
        [sys.executable, "-m", "semclust", "fit", str(photos), *flags],
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        until = time.monotonic() + 90
        while not (here / "runs/photos/last.ckpt").exists() and time.monotonic() < until and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    finally:
        process.kill()
        process.wait(30)
    assert call("fit", "--resume", "runs/photos") == 0
    assert call("fit", photos, *flags) == 0
    assert contents(here / "runs/photos") == contents(here / "runs/photos-2")


@pytest.mark.parametrize("command", ["fit", "predict"])
def test_an_interruption_while_images_are_read_ends_quietly(command, run, photos, here, monkeypatch, capsys):
    def stop(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("semclust.workers.blocks", stop)
    argv = ["fit", photos, *FAST] if command == "fit" else ["predict", run, photos]
    assert call(*argv) == 130
    assert "Traceback" not in capsys.readouterr().err
    assert not (here / "runs").exists()


# ---- flags -------------------------------------------------------------------------------------------


def settings_of(*words: str) -> FitSettings:
    return parse(["fit", "photos", "-k", "7", *words]).settings


def test_flags_start_from_the_defaults():
    for f in fields(Settings):
        assert getattr(settings_of(), f.name) == (7 if f.name == "n_clusters" else f.default)


@pytest.mark.parametrize("words", [["--preset", "paper"], ["--preset=paper"]])
def test_the_papers_preset_with_flags_over_it(words):
    paper = settings_of(*words)
    for f in fields(Settings):
        expected = preset("paper").get(f.name, 7 if f.name == "n_clusters" else f.default)
        assert getattr(paper, f.name) == expected, f.name
    for argv in (["--epochs", "3", *words, "--no-max-pool"], [*words, "--no-max-pool", "--epochs", "3"]):
        changed = settings_of(*argv)
        assert (changed.epochs, changed.max_pool) == (3, False)
        assert (changed.momentum, changed.tasks) == (preset("paper")["momentum"], preset("paper")["tasks"])


@pytest.mark.parametrize("name", ["quick", "best"])
def test_presets_of_other_lengths(name):
    assert settings_of("--preset", name).effort == preset(name)["effort"]
    assert settings_of("--preset", name).epochs is None
    assert settings_of("--preset", name, "--epochs", "3").epochs == 3


def test_minutes_in_place_of_epochs(photos, capsys):
    assert settings_of("--minutes", "2.5").minutes == 2.5
    assert call("fit", photos, "-k", 3, "--minutes=2", "--epochs", 3) == 1
    assert "--epochs and --minutes: expected one of them" in capsys.readouterr().err


def test_the_default_preset_changes_nothing():
    assert settings_of("--preset", "default") == settings_of()


def test_values_reach_the_settings():
    found = settings_of("--tasks", "cluster", "instance", "--sees", "edges", "--no-online", "--batch-size", "None")
    assert (found.tasks, found.sees, found.online, found.batch_size) == (("cluster", "instance"), "edges", False, None)
    found = settings_of("--contrast", "instance-memory", "--temperature", "0.5", "--image-size", "32")
    assert (found.contrast, found.temperature, found.image_size) == ("instance-memory", 0.5, 32)
    assert parse(["fit", "photos", "--n-clusters", "4"]).settings.n_clusters == 4


def test_every_setting_is_a_flag_with_its_help(capsys):
    assert call("fit", "--help") == 0
    said = capsys.readouterr().out
    for f in fields(Settings):
        assert f"--{f.name.replace('_', '-')}" in said
    for word in ("-k ", "--preset", "--resume", "--labels", "--out", "[DATA]", "Temperature tau"):
        assert word in said


@pytest.mark.parametrize(
    "argv, words",
    [
        (["fit", "photos"], "-k"),
        (["fit"], "-k"),
        ([], "fit"),
        (["fit", "photos", "-k", "x"], "'x'"),
        (["fit", "photos", "-k", "3", "--nonsense", "3"], "--nonsense"),
        (["fit", "photos", "-k", "3", "--contrast", "byol"], "byol"),
        (["fit", "photos", "-k", "3", "--preset", "fast"], "fast"),
        (["fit", "photos", "more", "-k", "3"], "more"),
        (["fit", "photos", "-k"], "-k"),
        (["predict", "runs/photos"], "DATA"),
        (["cluster", "photos"], "cluster"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_usage_ends_with_2(argv, words, here, capsys):
    assert words in refused(capsys, *argv, status=2)
    assert os.listdir(here) == []


@pytest.mark.parametrize(
    "argv, words",
    [
        (["fit", "DATA", "-k", "1"], "--n-clusters 1: expected a number from 2"),
        (["fit", "DATA", "-k", "-3"], "--n-clusters -3: expected"),
        (["fit", "DATA", "-k", "3", "--tasks", "over", "under"], "--tasks over under: expected 'cluster' among them"),
        (["bench", "speed", "--batch-size", "1"], "--batch-size 1: expected a number of at least 2"),
        (["fit", "DATA", "-k", "11"], "n_clusters=11, but there are only 20 images; choose a k of at most 10"),
        (["fit", "DATA", "-k", "3", "--epochs", "0"], "--epochs 0: expected"),
        (["fit", "DATA", "-k", "3", "--learning-rate", "nan"], "--learning-rate nan: expected"),
        (["fit", "DATA", "-k", "3", "--device", "tpu9"], "device='tpu9'"),
        (["fit", "DATA", "-k", "3", "--labels", "none.csv"], "'none.csv'"),
        (["fit", "DATA", "-k", "3", "--out", "file"], "file"),
        (["fit", "-k", "3"], "No data"),
        (["fit", "nowhere", "-k", "3"], "'nowhere'"),
        (["fit", "empty", "-k", "3"], "empty"),
        (["fit", "file", "-k", "3"], "file"),
        (["fit", "cifar99:/data", "-k", "3"], "cifar99"),
        (["fit", "--resume", "nowhere"], "'nowhere' is not a run folder"),
        (["fit", "--resume", "empty"], "config.json"),
        (["fit", "--resume", "file"], "'file'"),
        (["predict", "nowhere", "DATA"], "'nowhere'"),
        (["predict", "empty", "DATA"], "'empty' is not a model folder or run"),
        (["predict", "RUN", "nowhere"], "'nowhere'"),
        (["predict", "RUN", "DATA", "--device", "tpu9"], "device='tpu9'"),
        (["predict", "RUN", "DATA", "--out", "file"], "'file' exists"),
        (["predict", "RUN", "DATA", "--out", "missing/x.csv"], "missing"),
        (["evaluate", "nowhere"], "'nowhere'"),
        (["evaluate", "RUN"], "say --labels"),
        (["evaluate", "RUN", "--labels", "none.csv"], "'none.csv'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_done_ends_with_1_and_names_the_value(argv, words, photos, finished, here, capsys):
    (here / "empty").mkdir()
    (here / "file").write_text("mine")
    said = refused(capsys, *({"DATA": photos, "RUN": finished}.get(word, word) for word in argv))
    assert words in said
    assert sorted(os.listdir(here)) == ["empty", "file"] and (here / "file").read_text() == "mine"
    assert os.listdir(here / "empty") == []


def test_a_loss_that_breaks_ends_with_1_and_can_be_resumed(photos, here, capsys):
    said = refused(capsys, "fit", photos, *FAST, "--learning-rate", "1e38", "--warmup-epochs", "0")
    assert "learning rate (now 1e+38)" in said and "epoch 1" in said
    assert (here / "runs/photos/config.json").exists() and not (here / "runs/photos/model").exists()


def test_a_folder_of_which_most_files_are_bad_is_refused(here, capsys):
    save_images(here / "bad", noisy_groups(4, size=16))
    for i in range(9):
        (here / "bad" / f"x{i}.png").write_text("no image")
    assert "9 of 13" in refused(capsys, "fit", "bad", *FAST)
    assert not (here / "runs").exists()


# ---- predict -----------------------------------------------------------------------------------------


def test_predict_writes_one_row_an_image_and_never_overwrites(finished, photos, here, capsys):
    for name in ("photos-clusters.csv", "photos-clusters-2.csv"):
        assert call("predict", finished, photos) == 0
        said = capsys.readouterr().out
        assert f"20 images assigned; written to {name}" in said
        assert f"could not be read: {name[:-4]}-skipped.csv" in said
        assert [row["path"] for row in rows(here / f"{name[:-4]}-skipped.csv")] == ["a/notes.jpg"]
        assert (here / name).read_bytes() == (finished / "assignments.csv").read_bytes()
    assert call("predict", finished, photos, "--out", "mine.csv") == 0
    before = (here / "mine.csv").read_bytes()
    assert "'mine.csv' exists" in refused(capsys, "predict", finished, photos / "b", "--out", "mine.csv")
    assert (here / "mine.csv").read_bytes() == before


def test_predict_takes_one_image_an_array_and_a_model_folder(finished, photos, here, capsys):
    assert call("predict", finished / "model", photos / "a" / "03.png") == 0
    assert read_assignments(here / "03-clusters.csv")[0] == ["03.png"]
    pixels = noisy_groups(N, size=16)[..., 0]
    np.savez("new.npz", images=pixels, labels=np.arange(N) % 2)
    np.save("new.npy", pixels)
    capsys.readouterr()
    assert call("predict", finished, "new.npz") == 0
    assert "ACC" in capsys.readouterr().out
    assert call("predict", finished, "new.npy") == 0
    assert "ACC" not in capsys.readouterr().out
    names, clusters, *_ = read_assignments(here / "new-clusters.csv")
    assert names == [str(i) for i in range(N)]
    assert clusters.tolist() == read_assignments(finished / "assignments.csv")[1].tolist()
    assert (here / "new-clusters.csv").read_bytes() == (here / "new-clusters-2.csv").read_bytes()


def test_predict_from_a_run_that_has_not_finished_says_so(interrupted, photos, capsys):
    assert f"--resume {interrupted}" in refused(capsys, "predict", interrupted, photos)


def test_predict_from_a_damaged_model_is_told(run, photos, here, capsys):
    (run / "model" / "model.safetensors").write_bytes(b"garbage")
    assert "model.safetensors" in refused(capsys, "predict", run, photos)
    (run / "model" / "config.json").unlink()
    assert "config.json" in refused(capsys, "predict", run, photos)


# ---- evaluate ----------------------------------------------------------------------------------------


def test_evaluate_by_csv_folders_and_array(finished, labels_csv, here, capsys):
    clusters = read_assignments(finished / "assignments.csv").cluster
    by_folder = np.array(["a"] * 12 + ["b"] * 8)
    by_file = np.array(["dog", "cat"] * 10)
    np.save("y.npy", np.arange(N) % 2)
    np.savez("y.npz", labels=np.arange(N) % 2)
    for source, labels in [
        ("labels.csv", by_file),
        ("folders", by_folder),
        ("y.npy", by_file),
        ("y.npz", by_file),
    ]:
        assert call("evaluate", finished, "--labels", source) == 0
        said = capsys.readouterr().out
        best = max(
            sum(names[c] == label for c, label in zip(clusters, labels, strict=True))
            for names in permuted(sorted(set(labels)))
        )
        assert f"ACC {best / N:.4f}" in said and "NMI" in said and "ARI" in said
        table = [line.split("│")[1:-1] for line in said.splitlines() if line.startswith("│")]
        assert len(table) == len(set(clusters))
        counts = np.array([[0 if cell.strip() == "." else int(cell) for cell in line[1:]] for line in table])
        assert counts.sum() == N
        assert sorted(counts.sum(1), reverse=True) == sorted(np.bincount(clusters)[np.unique(clusters)], reverse=True)


def permuted(classes: list[str]) -> list[dict[int, str | None]]:
    """Every way to give two of three clusters a class each."""
    a, b = classes
    return [
        {i: a if i == first else b if i == second else None for i in range(3)}
        for first in range(3)
        for second in range(3)
        if first != second
    ]


def test_evaluate_uses_the_labels_that_the_run_knows(here, photos, labels_csv, capsys):
    np.savez("own.npz", images=noisy_groups(N, size=16), labels=np.arange(N) % 2)
    assert call("fit", "own.npz", *FAST, "--epochs", "1") == 0
    assert call("fit", photos, *FAST, "--epochs", "1", "--labels", "labels.csv") == 0
    capsys.readouterr()
    for run in ("runs/own", "runs/photos"):
        assert call("evaluate", run) == 0
        summary = json.loads((here / run / "summary.json").read_text())
        assert (
            f"ACC {summary['acc']:.4f}  NMI {summary['nmi']:.4f}  ARI {summary['ari']:.4f}" in capsys.readouterr().out
        )
    np.savez("own.npz", images=noisy_groups(N - 3, size=16), labels=np.arange(N - 3) % 2)
    assert "own.npz" in refused(capsys, "evaluate", "runs/own")


def test_labels_that_do_not_cover_the_images_are_told(finished, here, capsys):
    (here / "some.csv").write_text("path,label\na/00.png,x\n")
    assert "19 of 20 images have no label" in refused(capsys, "evaluate", finished, "--labels", "some.csv")
    (here / "columns.csv").write_text("file,class\na/00.png,x\n")
    assert "expected path,label" in refused(capsys, "evaluate", finished, "--labels", "columns.csv")
    np.save("y.npy", np.arange(N - 1))
    assert "(19,)" in refused(capsys, "evaluate", finished, "--labels", "y.npy")


def test_classes_of_any_name_are_shown_as_text(run, capsys):
    """Also by a standard output that takes nothing but Unicode."""
    table = (run / "assignments.csv").read_bytes().replace(b"a/", b"b\x1b[31mad [red]/").replace(b"\nb/", b"\ncaf\xe9/")
    (run / "assignments.csv").write_bytes(table)
    assert call("evaluate", run, "--labels", "folders") == 0
    said = capsys.readouterr().out
    assert "b\\x1b[31mad [red]" in said and "caf\\udce9" in said
    assert "\x1b" not in said and said.encode()


def test_evaluate_needs_a_finished_and_whole_run(interrupted, run, labels_csv, capsys):
    assert "--resume" in refused(capsys, "evaluate", interrupted, "--labels", labels_csv)
    for content in ("path,cluster,confidence,runner_up,margin\n", "garbage\n", ""):
        (run / "assignments.csv").write_text(content)
        assert "assignments.csv" in refused(capsys, "evaluate", run, "--labels", labels_csv)


def test_evaluate_notices_that_rows_are_missing(run, labels_csv, capsys):
    lines = (run / "assignments.csv").read_text().splitlines(keepends=True)
    (run / "assignments.csv").write_text("".join(lines[:5]))
    assert "but assignments.csv 4 rows" in refused(capsys, "evaluate", run, "--labels", labels_csv)


def test_evaluate_names_what_the_config_lacks(run, capsys):
    config = json.loads((run / "config.json").read_text())
    del config["data"]
    (run / "config.json").write_text(json.dumps(config))
    assert "config.json" in refused(capsys, "evaluate", run)


# ---- groups after the fit ----------------------------------------------------------------------------


def test_merge_rename_reduce_and_undo_to_the_same_bytes(run, capsys):
    before = {path.name: path.read_bytes() for path in [*run.iterdir(), *run.glob("model/*")] if path.is_file()}
    p = np.load(run / "probabilities.npy")
    assert p.shape == (N, 3) and p.dtype == np.float32

    assert call("rename", run, "2", "ships") == 0
    said = capsys.readouterr().out
    assert "named cluster 2 ships" in said and f"semclust undo {run}" in said
    assert call("merge", run, "ships", 0) == 0
    said = capsys.readouterr().out
    assert "20 images in 2 clusters" in said and "merged into cluster 0 ships" in said
    table = rows(run / "assignments.csv")
    merged = np.stack([p[:, 0] + p[:, 2], p[:, 1]], axis=1)
    assert [int(row["cluster"]) for row in table] == merged.argmax(1).tolist()
    assert [row["confidence"] for row in table] == [f"{x:.4f}" for x in merged.max(1)]
    assert {row["runner_up"] for row in table} <= {"0", "1"}
    assert all(row["name"] == ("ships" if row["cluster"] == "0" else "") for row in table)
    assert [row["path"] for row in table] == read_assignments(run / "assignments.csv")[0]

    assert call("undo", run) == 0 and call("reduce", run, "--to", 2) == 0
    assert " into " in capsys.readouterr().out
    assert len(json.loads((run / "model/groups.json").read_text())["steps"]) == 2
    assert call("undo", run) == 0 and call("undo", run) == 0
    assert "undone: rename; steps left to undo: 0" in capsys.readouterr().out
    after = {path.name: path.read_bytes() for path in [*run.iterdir(), *run.glob("model/*")] if path.is_file()}
    assert after == before
    assert "nothing to undo" in refused(capsys, "undo", run)


def test_predict_evaluate_and_a_resumed_run_follow_the_groups(run, photos, labels_csv, here, capsys):
    assert call("merge", run, 1, 2) == 0 and call("rename", run, 1, "[red]both[/]") == 0
    regrouped = contents(run, ["assignments.csv", "model/groups.json"])
    assert call("predict", run, photos) == 0
    assert (here / "photos-clusters.csv").read_bytes() == regrouped["assignments.csv"]
    assert call("predict", run, photos / "a" / "03.png") == 0
    row = rows(here / "03-clusters.csv")[0]
    assert f"03.png: cluster {row['cluster']}{' ' if row['name'] else ''}{row['name']}, conf" in capsys.readouterr().out
    assert call("evaluate", run, "--labels", labels_csv) == 0
    said = capsys.readouterr().out
    assert "1 [red]both[/]" in said and "ACC" in said
    assert call("fit", "--resume", run) == 0
    said = capsys.readouterr().out
    assert "20 images in 2 clusters" in said and "[red]both[/]" in said
    sizes = Counter(row["cluster"] for row in rows(run / "assignments.csv"))
    shown = {line.split("│")[1].strip(): int(line.split("│")[2]) for line in said.splitlines() if line[:1] == "│"}
    assert shown == {"0": sizes["0"], "1": sizes["1"]}
    assert contents(run, regrouped) == regrouped


def test_a_parquet_table_in_the_run_follows_too(run, here, capsys):
    pq = pytest.importorskip("pyarrow.parquet")
    assert call("merge", run, 1, 2) == 0 and not (run / "assignments.parquet").exists()
    assert call("export", run, "--format", "parquet") == 0
    assert "20 rows written" in capsys.readouterr().out
    for step in (["rename", run, 0, "x"], ["undo", run], ["undo", run]):
        assert call(*step) == 0
        table = pq.read_table(run / "assignments.parquet").to_pylist()
        plain = rows(run / "assignments.csv")
        assert [(r["path"], str(r["cluster"]), f"{r['confidence']:.4f}") for r in table] == [
            (r["path"], r["cluster"], r["confidence"]) for r in plain
        ]
        assert table[0].keys() == plain[0].keys()
    assert call("export", run, "--format", "parquet", "--out", "mine.parquet") == 0
    assert "exists" in refused(capsys, "export", run, "--format", "parquet", "--out", "mine.parquet")
    assert "ends in .parquet" in refused(capsys, "export", run, "--format", "parquet", "--out", "mine.csv")


@pytest.mark.parametrize(
    "argv, words",
    [
        (["merge", "RUN", "1"], "expected two clusters or more"),
        (["merge", "RUN"], "expected two clusters or more"),
        (["merge", "RUN", "1", "7"], "There is no cluster '7'"),
        (["merge", "RUN", "1", "ships"], "There is no cluster 'ships'"),
        (["merge", "RUN", "0", "1", "2"], "at least 2 must remain"),
        (["rename", "RUN", "1", ""], "is no name"),
        (["rename", "RUN", "1", "a\nb"], "control characters"),
        (["rename", "RUN", "1", "2"], "is a number"),
        (["rename", "RUN", "9", "x"], "There is no cluster '9'"),
        (["reduce", "RUN", "--to", "3"], "from 2 to 2"),
        (["reduce", "RUN", "--to", "1"], "from 2 to 2"),
        (["undo", "RUN"], "nothing to undo"),
        (["merge", "MODEL", "0", "1"], "is a model folder"),
        (["undo", "nowhere"], "'nowhere' is not a run folder"),
        (["export", "nowhere", "--format", "onnx"], "'nowhere'"),
        (["export", "MODEL", "--format", "parquet"], "is a model folder"),
        (["export", "RUN", "--format", "onnx", "--out", "missing/x.onnx"], "'missing'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_steps_that_cannot_be_taken_change_nothing(run, here, argv, words, capsys):
    before = contents(run)
    assert words in refused(capsys, *({"RUN": run, "MODEL": run / "model"}.get(word, word) for word in argv))
    assert contents(run) == before and not (run / "model/groups.json").exists()


def test_an_unfinished_or_older_run_cannot_be_regrouped(interrupted, run, capsys):
    assert "--resume" in refused(capsys, "merge", interrupted, 0, 1)
    (run / "probabilities.npy").unlink()
    before = (run / "assignments.csv").read_bytes()
    assert f"semclust fit --resume {run}" in refused(capsys, "merge", run, 0, 1)
    assert not (run / "model/groups.json").exists()
    assert call("fit", "--resume", run) == 0  # as it was told
    assert call("merge", run, 0, 1) == 0 and call("undo", run) == 0
    assert (run / "assignments.csv").read_bytes() == before


@pytest.mark.parametrize("content", ["garbage", '{"format": 1, "n_clusters": 9, "steps": [{"merge": [7, 8]}]}'])
def test_damaged_groups_are_named(run, photos, content, here, capsys):
    (run / "model/groups.json").write_text(content)
    for argv in (
        ["merge", run, 0, 1],
        ["predict", run, photos],
        ["undo", run],
        ["evaluate", run, "--labels", "folders"],
    ):
        assert "groups.json" in refused(capsys, *argv)


@pytest.mark.parametrize(
    "name, array",
    [
        ("probabilities.npy", np.zeros((3, 3), np.float32)),
        ("probabilities.npy", np.zeros((N, 2), np.float32)),
        ("probabilities.npy", np.zeros((N, 3), int)),
    ],
    ids=["images", "clusters", "integers"],
)
def test_results_that_do_not_fit_each_other_are_named(run, name, array, capsys):
    np.save(run / name, array)
    before = (run / "assignments.csv").read_bytes()
    assert str(run) in refused(capsys, "merge", run, 0, 1)
    assert (run / "assignments.csv").read_bytes() == before and not (run / "model/groups.json").exists()


def test_where_a_table_cannot_be_written_nothing_changes(run, monkeypatch, capsys):
    before = contents(run)

    def fail(*args):
        raise OSError(28, "No space left on device")

    for place in ("semclust.groups.write_json", "semclust.assignments.csv_bytes"):
        with monkeypatch.context() as patch:
            patch.setattr(place, fail)
            assert "No space left on device" in refused(capsys, "merge", run, 0, 1)
        assert contents(run) == before and not (run / "model/groups.json").exists()
        assert [path.name for path in run.rglob(".*")] == [".lock"]


def test_an_outdated_report_is_told(run, capsys):
    (run / "report.html").unlink(missing_ok=True)
    assert call("merge", run, 0, 1) == 0 and "report.html" not in capsys.readouterr().out
    renew = f"semclust report {run}"
    assert call("report", run) == 0 and "of the 3 clusters of the fit" in (run / "report.html").read_text()
    capsys.readouterr()
    assert call("rename", run, 0, "ships") == 0 and renew in capsys.readouterr().out
    assert call("undo", run) == 0 and renew not in capsys.readouterr().out  # it shows what there is again
    assert call("undo", run) == 0 and renew in capsys.readouterr().out
    (run / "report.html").write_text("of an earlier version")
    assert call("merge", run, 0, 1) == 0 and renew in capsys.readouterr().out


# ---- sorted folders, embeddings, Parquet, ONNX ---------------------------------------------------------


def test_predict_into_folders(finished, photos, here, capsys):
    assert call("predict", finished, photos, "--into", "sorted", "--embeddings") == 0
    said = capsys.readouterr().out
    assert "20 images sorted into sorted" in said and "embeddings: photos-clusters-embeddings.npy" in said
    links = {path.resolve(): path for path in (here / "sorted").rglob("*") if path.is_symlink()}
    table = rows(here / "photos-clusters.csv")
    assert {photos / row["path"] for row in table} == links.keys()
    for row in table:
        assert links[photos / row["path"]].parent.name == row["cluster"]
    stored = np.load(here / "photos-clusters-embeddings.npy")
    np.testing.assert_allclose(stored, np.load(finished / "embeddings.npy"), atol=1e-5)
    before = sorted(os.listdir(here))
    assert "'sorted' exists" in refused(capsys, "predict", finished, photos, "--into", "sorted")
    assert "lies inside" in refused(capsys, "predict", finished, photos, "--into", photos / "sorted")
    assert sorted(os.listdir(here)) == before and not (photos / "sorted").exists()
    assert call("predict", finished, photos, "--into", "copies", "--by", "copy") == 0
    assert sum(path.is_file() and not path.is_symlink() for path in (here / "copies").rglob("*")) == N


def test_what_sorting_could_not_do_is_told(finished, photos, here, monkeypatch, capsys):
    def fail(*args):
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(os, "symlink", fail)
    assert call("predict", finished, photos, "--into", "sorted") == 0
    assert "copied 20 files, since links cannot be made in sorted" in capsys.readouterr().out


def test_predict_writes_parquet_by_the_ending(finished, photos, here, monkeypatch, capsys):
    pq = pytest.importorskip("pyarrow.parquet")
    assert call("predict", finished, photos, "--out", "a.parquet") == 0
    table = pq.read_table("a.parquet")
    assert table["path"].to_pylist() == [row["path"] for row in rows(finished / "assignments.csv")]
    assert (here / "a-skipped.csv").exists()
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    said = refused(capsys, "predict", finished, photos, "--out", "b.parquet")
    assert 'pip install "semclust[parquet]"' in said


def test_an_interruption_of_predict_leaves_nothing(finished, photos, here, monkeypatch, capsys):
    from semclust.predictor import Predictor

    def stop(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(Predictor, "__call__", stop)
    assert call("predict", finished, photos, "--into", "sorted", "--embeddings") == 130
    assert os.listdir(here) == []


def test_a_killed_predict_leaves_no_half_table(finished, photos, here):
    """Killed while it writes: there is no file under the final name."""
    code = (
        "import os, signal, sys\n"
        "from semclust.cli import main\n"
        "from semclust.predictor import Predictor\n"
        "def die(*args): os.kill(os.getpid(), signal.SIGKILL)\n"
        "Predictor.__call__ = die\n"
        f"main(['predict', {str(finished)!r}, {str(photos)!r}, '--into', 'sorted'])\n"
    )
    assert shell("-c", code).returncode == -signal.SIGKILL
    assert all(name.startswith(".") for name in os.listdir(here))


@pytest.mark.parametrize("array", [False, True])
def test_the_bar_of_predict(array):
    out, text = console(True)
    with assigning(out) as (on_image, on_part):
        if not array:
            for _ in range(1500):
                on_image(3000)
        on_part(1024)
    assert ("1,024" if array else "1,500") in text.getvalue() and "images/s" in text.getvalue()


def test_onnx_from_the_command_line(run, here, capsys):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    assert call("merge", run, 0, 1) == 0
    capsys.readouterr()
    assert call("export", run, "--format", "onnx") == 0
    said = capsys.readouterr()
    assert re.search(r"largest difference .*: \d(\.\d)?e-0[6-9]; written to photos\.onnx\n$", said.out)
    assert said.out.count("\n") == 1 and said.err == ""
    session = onnxruntime.InferenceSession("photos.onnx", providers=["CPUExecutionProvider"])
    p, q = session.run(None, {"images": noisy_groups(N, size=16)})
    np.testing.assert_allclose(q, np.load(run / "embeddings.npy"), atol=1e-5)
    assert (np.array([0, 2])[p.argmax(1)] == read_assignments(run / "assignments.csv")[1]).all()


# ---- other processes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("argv", [["--help"], ["fit", "--help"], ["--version"], ["fit", "x"]], ids=" ".join)
def test_what_needs_no_torch_does_not_import_it(argv):
    code = (
        "import sys\n"
        "from semclust.cli import main\n"
        f"try: main({argv!r})\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'sklearn', 'scipy', 'numpy', 'PIL'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    )
    done = shell("-c", code)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout or argv == ["fit", "x"]


def test_the_module_is_the_command():
    done = shell("-m", "semclust", "--version", text=True)
    assert (done.returncode, done.stdout) == (0, f"semclust {semclust.__version__}\n")
    done = shell("-m", "semclust", "fit", "nowhere", "-k", "3", text=True)
    assert done.returncode == 1 and done.stderr.startswith("semclust: Cannot open 'nowhere'")
    assert done.stdout == "" and "Traceback" not in done.stderr


def test_a_folder_whose_name_is_not_utf8(here):
    """On a terminal of strict UTF-8, which cannot show such a name as it is."""
    folder = os.fsdecode(b"photos \xff")
    save_images(here / folder, noisy_groups(12, size=16))
    done = shell("-m", "semclust", "fit", folder, *FAST, "--epochs", "1", env={"PYTHONIOENCODING": "utf-8:strict"})
    assert done.returncode == 0, done.stderr.decode(errors="replace")[-500:]
    assert (here / "runs" / folder / "assignments.csv").exists()


# ---- what a person sees ------------------------------------------------------------------------------


def console(terminal: bool) -> tuple[Console, io.StringIO]:
    text = io.StringIO()
    return Console(file=text, force_terminal=terminal, width=120, color_system=None), text


@pytest.mark.parametrize(
    "augment, words",
    [
        ("natural", "views as of photographs"),
        ("strokes", "views as of drawings"),
        ("none", "no views"),
        (torch.square, "views of your own"),
    ],
)
def test_a_fit_says_which_views_it_learns_from(augment, words):
    out, text = console(terminal=False)
    Display(out).begin(fitting.start(make_images(48), tiny(augment=augment)))
    assert f"batches of 16, {words}" in " ".join(text.getvalue().split())


@pytest.mark.parametrize("epochs, changes, told", [(9, {}, True), (10, {}, False), (2, {"cluster_from": 0.0}, False)])
def test_so_few_epochs_that_they_are_a_try_are_told(epochs, changes, told):
    out, text = console(terminal=False)
    changes = {"neighbours": 0} | changes
    Display(out).begin(fitting.start(make_images(200), tiny(epochs=epochs, **changes)))
    assert ("a try only: 9 epochs are too few" in text.getvalue()) == told


def test_so_few_images_that_they_are_a_try_are_told():
    out, text = console(terminal=False)
    Display(out).begin(fitting.start(make_images(199), tiny()))
    assert "a try only: 199 images are too few to learn from" in text.getvalue()


@pytest.mark.parametrize("minutes, words", [(1, "1 minute"), (0.5, "0.5 minutes"), (10.0, "10 minutes")])
def test_a_fit_says_that_it_is_being_timed(minutes, words):
    out, text = console(terminal=False)
    Display(out).timing(minutes)
    assert text.getvalue() == f"timing a few steps of each phase, to plan for {words}\n"


@pytest.mark.parametrize("terminal", [True, False])
def test_a_fit_is_shown(terminal):
    out, text = console(terminal)
    out.width = 140  # room for all
    display = Display(out)
    try:
        fitting.fit(make_images(48, labels=np.arange(48) % 4), tiny(epochs=4), display)
    finally:
        display.close()
    said = text.getvalue()
    assert "48 images of 8 x 8 x 1 into 4 clusters on cpu: TinyBackbone" in said
    assert "4 epochs of batches of 16, views as of " in said and "images/s" in said
    if terminal:
        assert display.progress.finished and display.images_done == 48 * 4
        assert "epoch 4/4  own labels  loss" in said and "ACC" in said
    else:
        assert said.count("\nepoch ") == 4 and "ACC" in said
        assert said.rstrip().endswith("0:00:00 left")


@pytest.mark.parametrize("terminal", [True, False])
def test_a_resumed_fit_is_shown(terminal, tmp_path):
    images, settings = make_images(), tiny(epochs=3)
    run = RunFolder.create(tmp_path, "run")

    class Stop(Display):
        def epoch(self, row):
            super().epoch(row)
            if row["epoch"] == 2:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fitting.fit(images, settings, Stop(console(False)[0]), run)
    for words in ("resuming after epoch 2", "this run is done, after 3 epochs"):
        out, text = console(terminal)
        display = Display(out)
        fitting.fit(images, settings, display, run)
        display.close()
        assert words in text.getvalue() and "4/3" not in text.getvalue()


def test_a_warning_is_text_and_not_markup():
    out, text = console(False)
    Display(out).warn("look at [red]this[/red] [/] " + "word " * 50)
    assert text.getvalue() == "warning: look at [red]this[/red] [/] " + "word " * 50 + "\n"


def test_figures_on_a_line():
    row = {"epoch": 1, "learns": "clusters", "loss": 1.23456, "churn": math.nan, "score": 0.5, "spread": 0.7}
    assert figures(row) == "clusters  loss 1.235  score 0.500"
    assert figures(row | {"churn": 0.25, "acc": 0.9}) == "clusters  loss 1.235  churn 0.250  score 0.500  ACC 0.900"


@pytest.mark.parametrize(
    "seconds, shown", [(0, "0:00:00"), (59.6, "0:01:00"), (61, "0:01:01"), (3599.7, "1:00:00"), (90_000, "25:00:00")]
)
def test_time_left(seconds, shown):
    assert clock(seconds) == shown


def test_names_are_printable():
    assert printable("plain ünï 🎉.png") == "plain ünï 🎉.png"
    for name in [*ODD_NAMES, "\u202ertl.png", "\x07", "\x9b31m"]:
        assert printable(name).isprintable()
    assert printable("a\nb") == "a\\nb"


def test_the_table_shows_the_most_certain_images_of_each_cluster():
    summary = {
        "n_images": 5,
        "score": 0.25,
        "clusters": [
            {"cluster": 0, "size": 4, "confidence": 0.75},
            {"cluster": 1, "size": 1, "confidence": 0.5},
            {"cluster": 2, "size": 0, "confidence": None},
        ],
    }
    out, text = console(False)
    names = ["[red]low", "best\n", "b", "c", "other[/]"]
    show_clusters(out, summary, names, np.array([0, 0, 0, 0, 1]), np.array([0.5, 0.9, 0.8, 0.8, 0.5]))
    lines = [line.split("│")[1:-1] for line in text.getvalue().splitlines() if line.startswith("│")]
    assert [[cell.strip() for cell in line] for line in lines] == [
        ["0", "4", "80.0%", "0.750", "best\\n, b, c"],
        ["1", "1", "20.0%", "0.500", "other[/]"],
        ["2", "0", "0.0%", "-", ""],
    ]
    assert "label-free score 0.2500" in text.getvalue() and "ACC" not in text.getvalue()
    out, text = console(False)
    show_clusters(
        out, summary | {"acc": 0.5, "nmi": 0.25, "ari": 0.125}, names, np.array([0, 0, 0, 0, 1]), np.full(5, 0.5)
    )
    assert "ACC 0.5000  NMI 0.2500  ARI 0.1250  (the fit never saw the labels)" in text.getvalue()


def test_where_the_figures_of_a_bench_cannot_go_is_told_before_anything_is_measured(here, capsys, monkeypatch):
    monkeypatch.setattr("semclust.speed.measure_speed", lambda *_: pytest.fail("it has begun"))
    (here / "mine.json").touch()
    (here / "link.json").symlink_to("nowhere")
    for out in ("mine.json", "link.json"):
        assert "not overwritten" in refused(capsys, "bench", "speed", "--out", out)
    assert "There is no folder 'none'" in refused(capsys, "bench", "speed", "--out", "none/x.json")
