"""A run's folder: names that are never reused, rows that can be taken back, and CSV files for any file name."""

import csv
import errno
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from semclust import __version__
from semclust.assignments import ASSIGNMENTS, read_assignments
from semclust.errors import DamagedFileError, InputError
from semclust.run_folder import RunFolder, fingerprint
from semclust.storage import write_tensors


def row(epoch: int, **more):
    return {"epoch": epoch, "loss": 1 / (3 + epoch), "score": math.nan, "sizes": "3 2 1", **more}


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    made = RunFolder.create(tmp_path / "runs", "photos")
    made.write_config({"data": "photos", "settings": {}})
    return made


# ---- the folder itself -------------------------------------------------------------------------------


def test_folders_are_numbered_and_never_reused(tmp_path):
    names = [RunFolder.create(tmp_path / "runs", "photos").path.name for _ in range(4)]
    assert names == ["photos", "photos-2", "photos-3", "photos-4"]
    shutil.rmtree(tmp_path / "runs" / "photos-2")
    assert RunFolder.create(tmp_path / "runs", "photos").path.name == "photos-2"
    assert RunFolder.create(tmp_path / "runs", "photos").path.name == "photos-5"
    assert RunFolder.create(tmp_path / "runs", "other").path.name == "other"


def test_a_folder_is_made_with_its_parents_and_empty(tmp_path):
    path = RunFolder.create(tmp_path / "a" / "b", "photos").path
    assert path == tmp_path / "a" / "b" / "photos"
    assert os.listdir(path) == []


def test_an_abandoned_folder_takes_those_along_that_were_made_for_it_and_hold_nothing_else(tmp_path):
    (tmp_path / "a").mkdir()
    first, second = (RunFolder.create(tmp_path / "a" / "b" / "c", "photos") for _ in range(2))
    first.abandon()
    assert os.listdir(tmp_path / "a" / "b" / "c") == ["photos-2"]
    second.abandon()
    assert os.listdir(tmp_path / "a" / "b" / "c") == []  # was there before the second
    RunFolder.create(tmp_path / "a" / "d" / "e", "photos").abandon()
    assert os.listdir(tmp_path / "a") == ["b"]


def test_a_file_or_link_of_that_name_is_passed_over(tmp_path):
    (tmp_path / "photos").write_text("mine")
    (tmp_path / "photos-2").symlink_to(tmp_path / "nowhere")
    assert RunFolder.create(tmp_path, "photos").path.name == "photos-3"
    assert (tmp_path / "photos").read_text() == "mine"


@pytest.mark.parametrize("kind", ["file", "link", "below a file"])
def test_a_parent_that_is_no_folder_is_an_error(tmp_path, kind):
    parent = tmp_path / "out"
    if kind == "link":
        parent.symlink_to(tmp_path / "nowhere")
    else:
        parent.write_text("")
    with pytest.raises(InputError, match="--out") as caught:
        RunFolder.create(parent / "deeper" if kind == "below a file" else parent, "photos")
    assert str(parent) in str(caught.value)


def test_a_name_that_is_too_long_is_an_error(tmp_path):
    with pytest.raises(InputError, match="--out"):
        RunFolder.create(tmp_path, "x" * 300)


def test_opening_what_is_no_run_folder_is_an_error(tmp_path, run):
    assert RunFolder.open(run.path).path == run.path
    for path, words in [(tmp_path / "none", "is not a run folder"), (tmp_path, "holds no config.json")]:
        with pytest.raises(InputError, match=words) as caught:
            RunFolder.open(path)
        assert str(path) in str(caught.value)


@pytest.mark.parametrize("content", ['{"epochs": 1e30}', '{"epochs": "many"}', '{"epochs": true}', "{}"])
def test_epochs_that_no_schedule_has_are_told_with_their_file(run, content):
    run.write_config({"data": "photos", "settings": {}})
    run.schedule.write_text(content)
    with pytest.raises(DamagedFileError, match=r"schedule\.json is damaged"):
        run.read_config()
    run.schedule.write_text('{"epochs": 7}')
    assert run.read_config()["settings"]["epochs"] == 7


def test_settings_that_are_none_are_left_for_who_reads_them(run):
    run.write_config({"data": "photos", "settings": [1]})
    run.schedule.write_text('{"epochs": 7}')
    assert run.read_config()["settings"] == [1]


def test_the_config_comes_back_with_its_versions(run):
    assert run.read_config() == {"format": 4, "semclust": __version__, "data": "photos", "settings": {}}


def test_a_model_folder_is_no_run(tmp_path):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(InputError, match="is a model folder; expected the run folder of"):
        RunFolder.open(tmp_path)


@pytest.mark.parametrize("number", [1, 2, "3", None])
def test_a_config_of_another_format_is_refused(run, number):
    path = run.path / "config.json"
    path.write_text(json.dumps({"format": number, "semclust": "9.9"}))
    with pytest.raises(DamagedFileError, match=r"9\.9") as caught:
        run.read_config()
    assert str(path) in str(caught.value) and repr(number) in str(caught.value)


def test_a_missing_config_is_named(run):
    (run.path / "config.json").unlink()
    with pytest.raises(DamagedFileError, match=r"config\.json is missing"):
        run.read_config()


# ---- rows and checkpoints ----------------------------------------------------------------------------


def test_rows_come_back_as_they_were(run):
    assert run.read_metrics() == []
    rows = [row(1, sizes=math.nan), row(2, score=0.1 + 0.2), row(3, score=1e-300)]
    for each in rows:
        run.append_metrics(each)
    back = run.read_metrics()
    assert list(map(repr, back)) == list(map(repr, rows))  # repr: NaN equals NaN, 1 is not 1.0
    lines = run.metrics.read_text().splitlines()
    assert lines[0] == "epoch,loss,score,sizes"
    assert lines[1] == f"1,{1 / 4},,"


def test_rows_are_only_ever_appended(run):
    run.append_metrics(row(1))
    before = run.metrics.read_bytes()
    run.append_metrics(row(2))
    assert run.metrics.read_bytes().startswith(before)


def test_a_cell_that_is_too_long_is_damage(run):
    run.metrics.write_text(f"epoch,loss\n1,{'1' * 200_000}\n")
    with pytest.raises(DamagedFileError, match=r"metrics\.csv"):
        run.read_metrics()


@pytest.mark.parametrize("content", [b"epoch,loss\ngarbage\n", b"epoch,loss\n1,x\n", b"\xff\xfe\n\xff\xfe\n"])
def test_damaged_rows_are_named(run, content):
    run.metrics.write_bytes(content)
    with pytest.raises(DamagedFileError, match=r"metrics\.csv"):
        run.read_metrics()


def test_a_checkpoint_comes_back(run):
    run.write_checkpoint({"w": torch.arange(3.0)}, 17)
    tensors, epoch = run.read_checkpoint()
    assert epoch == 17 and tensors["w"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("about", [{}, {"format": 4}, {"format": 3, "epoch": 3}, {"format": 4, "epoch": "3"}])
def test_a_checkpoint_of_another_format_is_refused(run, about):
    write_tensors(run.checkpoint, {"w": torch.ones(1)}, about)
    with pytest.raises(DamagedFileError, match=r"last\.ckpt"):
        run.read_checkpoint()


# ---- results -----------------------------------------------------------------------------------------


def test_results_are_written(run):
    p, q = np.array([[0.9, 0.1], [0.3, 0.7]], np.float32), np.eye(2, 5, dtype=np.float32)
    run.write_results(["a", "b"], p, q, {"score": 0.5})
    assert read_assignments(run.assignments)[1].tolist() == [0, 1]
    np.testing.assert_array_equal(np.load(run.path / "embeddings.npy"), q)
    assert json.loads((run.path / "summary.json").read_text()) == {"score": 0.5}
    assert tuple(run.assignments.read_text().splitlines()[0].split(",")) == ASSIGNMENTS


def test_results_come_back_and_fit_together(run):
    p, q = np.array([[0.9, 0.1], [0.3, 0.7]], np.float32), np.eye(2, 5, dtype=np.float32)
    run.write_results(["a", "b"], p, q, {})
    names, p_again, q_again = run.read_results(2)
    assert names == ["a", "b"] and isinstance(q_again, np.memmap)
    np.testing.assert_array_equal(p_again, p)
    np.testing.assert_array_equal(q_again, q)
    with pytest.raises(DamagedFileError, match=r"\(2, 2\); expected 3 clusters.*--resume"):
        run.read_results(3)


def test_embeddings_that_are_none_are_refused(run):
    run.write_results(["a", "b"], np.eye(2), np.eye(2, 5), {})
    assert run.read_embeddings(2).shape == (2, 5)
    with pytest.raises(DamagedFileError, match=r"embeddings\.npy has the shape \(2, 5\), but.* 3 rows.*--resume"):
        run.read_embeddings(3)
    for wrong in (np.ones(2), np.eye(2, dtype=int), np.array([[None], ["a"]], object)):
        np.save(run.embeddings, wrong)
        with pytest.raises(DamagedFileError, match=r"embeddings\.npy is damaged.*--resume"):
            run.read_embeddings(2)
    run.embeddings.write_bytes(b"garbage")
    with pytest.raises(DamagedFileError, match=r"embeddings\.npy is damaged.*--resume"):
        run.read_embeddings(2)
    run.embeddings.unlink()
    with pytest.raises(InputError, match=r"embeddings\.npy is missing.*--resume"):
        run.read_embeddings(2)


def test_skipped_files_are_listed_where_there_are_any(run):
    run.write_skipped([])
    assert not (run.path / "skipped.csv").exists()
    skipped = [("a,b\n.png", "empty file"), ("ünï.png", 'not "an" image')]
    run.write_skipped(skipped)
    with open(run.path / "skipped.csv", newline="", encoding="utf-8") as file:
        assert list(map(tuple, csv.reader(file))) == [("path", "reason"), *skipped]


def test_a_run_folder_keeps_no_half_files(run, monkeypatch):
    """Each result is written whole: where renaming fails, the earlier one stays."""
    run.write_results(["a"], np.array([[0.9, 0.1]]), np.ones((1, 2)), {"score": 0.5})
    run.write_checkpoint({"w": torch.ones(1)}, 1)
    run.append_metrics(row(1))
    run.append_metrics(row(2))
    before = {path: path.read_bytes() for path in run.path.iterdir()}

    def fail(*args):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    for write in (
        lambda: run.write_results(["b"], np.array([[0.2, 0.8]]), np.zeros((1, 2)), {"score": 0.1}),
        lambda: run.write_checkpoint({"w": torch.zeros(1)}, 2),
        lambda: run.write_metrics(b"epoch\n1\n"),
        lambda: run.write_config({}),
        lambda: run.write_skipped([("a", "b")]),
    ):
        with pytest.raises(OSError, match="disk full"):
            write()
    assert {path: path.read_bytes() for path in run.path.iterdir()} == before


# ---- small helpers -----------------------------------------------------------------------------------


def test_the_fingerprint_is_taken_piece_by_piece(tmp_path, monkeypatch):
    """So that of a mapped file, which may be larger than the memory, is the same."""
    pixels = np.random.default_rng(0).integers(0, 256, (10, 6, 6, 1), dtype=np.uint8)
    same = fingerprint(pixels, ["a"])
    np.save(tmp_path / "a.npy", pixels)
    monkeypatch.setattr("semclust.arrays.CHUNK_VALUES", 3 * 36)
    sizes = []
    real = np.ascontiguousarray
    monkeypatch.setattr(np, "ascontiguousarray", lambda part: (sizes.append(len(part)), real(part))[1])
    assert fingerprint(np.load(tmp_path / "a.npy", mmap_mode="r"), ["a"]) == same
    assert sizes == [3, 3, 3, 1]


def test_the_fingerprint_sees_pixels_names_shape_and_order():
    pixels = np.random.default_rng(0).integers(0, 256, (4, 6, 6, 1), dtype=np.uint8)
    names = ["a", "b", "c", os.fsdecode(b"\xff")]
    same = fingerprint(pixels, names)
    assert same == fingerprint(pixels.copy(), list(names))
    assert same == fingerprint(np.asfortranarray(pixels), names)
    changed = pixels.copy()
    changed[3, 5, 5, 0] ^= 1
    others = [
        fingerprint(changed, names),
        fingerprint(pixels[::-1], names),
        fingerprint(pixels.reshape(4, 4, 9, 1), names),
        fingerprint(pixels, ["a", "b", "c", "d"]),
        fingerprint(pixels, ["b", "a", "c", names[3]]),
    ]
    assert len({same, *others}) == 6


def test_a_run_is_fitted_by_one_process_at_a_time(run):
    """The lock belongs to an open file: two in one process exclude each other as two processes do."""
    with run.locked():
        with pytest.raises(InputError, match=f"being fitted by another process \\({os.getpid()}\\)"), run.locked():
            pass
        other = "import sys; from pathlib import Path; from semclust.run_folder import RunFolder\n"
        other += "with RunFolder(Path(sys.argv[1])).locked(): pass"
        again = subprocess.run([sys.executable, "-c", other, run.path], capture_output=True, text=True)
        assert again.returncode and "being fitted by another process" in again.stderr
    with run.locked():
        pass


def test_a_file_system_without_locks_is_taken_as_it_is(run, monkeypatch):
    fcntl = pytest.importorskip("fcntl")

    def refuses(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuses)
    with run.locked(), run.locked():
        pass


def test_the_time_of_a_run_is_kept_and_not_worth_an_error(run):
    assert run.read_seconds() == 0
    run.write_seconds(12.34)
    assert run.read_seconds() == 12.3
    (run.path / "time.json").write_text('{"seconds": "long"}')
    assert run.read_seconds() == 0
