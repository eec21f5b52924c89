"""Images assigned part by part: what is written is whole, in order, and in step with each other."""

import csv
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from conftest import make_images, noisy_groups, save_images, tiny
from semclust import assigning, fitting
from semclust.assigning import assign
from semclust.assignments import read_assignments
from semclust.data import Images
from semclust.errors import InputError
from semclust.predictor import Predictor

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def predictor() -> Predictor:
    return fitting.fit(make_images(), tiny(epochs=8)).predictor


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def regrouped(predictor):
    """The same model with clusters merged and named, for one test."""
    predictor.groups.merge([0, 1])
    predictor.groups.rename(2, "twos")
    yield predictor
    predictor.groups.undo()
    predictor.groups.undo()


def parts(*sizes: int, failure: BaseException | None = None, labels: bool = False, skipped=(), unlabelled=()):
    """A stream of parts of these sizes, which may end in a failure. ``unlabelled``: sizes of parts without labels."""
    pixels, start = noisy_groups(sum(sizes)), 0
    for size in sizes:
        rows = slice(start, start + size)
        part = Images(pixels[rows], [f"{i}.png" for i in range(start, start + size)], "stream")
        part.labels = np.arange(start, start + size) % 4 if labels and size not in unlabelled else None
        part.skipped = list(skipped)
        yield part
        start += size
    if failure:
        raise failure


def streaming(monkeypatch, *sizes, **options) -> None:
    monkeypatch.setattr(Predictor, "stream", lambda *_: parts(*sizes, **options))


def test_parts_add_up_to_the_whole(predictor, here, monkeypatch):
    streaming(monkeypatch, 5, 1, 20)
    seen = []
    done = assign(predictor, "x", CPU, embeddings=True, on_part=seen.append)
    p, q = predictor(noisy_groups(26), CPU)
    names, clusters, *_ = read_assignments(here / "stream-clusters.csv")
    assert names == [f"{i}.png" for i in range(26)]
    np.testing.assert_array_equal(clusters, p.argmax(1))
    stored = np.load(here / "stream-clusters-embeddings.npy", allow_pickle=False)
    assert stored.dtype == np.float32
    np.testing.assert_allclose(stored, q, atol=1e-6)
    assert seen == [5, 6, 26] and done.n_images == 26 and done.figures is None
    assert done.table == Path("stream-clusters.csv") and done.skipped is None
    assert len(done.few) == assigning.FEW and done.few[0][0] == "0.png"
    assert sorted(os.listdir(here)) == ["stream-clusters-embeddings.npy", "stream-clusters.csv"]


def test_groups_are_followed(regrouped, here, monkeypatch):
    streaming(monkeypatch, 20, 20)
    assign(regrouped, "x", CPU, out=Path("a.csv"), into=Path("sorted"))
    with open("a.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    p, _ = regrouped(noisy_groups(40), CPU)
    assert p.shape == (40, 3)
    assert [int(row["cluster"]) for row in rows] == np.array([0, 2, 3])[p.argmax(1)].tolist()
    assert {row["cluster"] for row in rows} > {"0"}  # ids that are not the columns
    for row in rows:
        assert row["name"] == ("twos" if row["cluster"] == "2" else "")
        folder = "2-twos" if row["cluster"] == "2" else row["cluster"]
        assert (here / "sorted" / folder / f"{Path(row['path']).stem}.png").exists()


def test_labels_give_figures(predictor, here, monkeypatch):
    streaming(monkeypatch, 20, 20, labels=True)
    done = assign(predictor, "x", CPU)
    assert done.figures is not None and 0.25 <= done.figures["acc"] <= 1


@pytest.mark.parametrize("unlabelled", [[5], [20], [21]])
def test_labels_of_some_images_give_no_figures(predictor, here, monkeypatch, unlabelled):
    streaming(monkeypatch, 20, 5, 21, labels=True, unlabelled=unlabelled)
    assert assign(predictor, "x", CPU).figures is None


def test_a_part_without_images_needs_no_labels(predictor, here, monkeypatch):
    streaming(monkeypatch, 20, 0, labels=True, unlabelled=[0])
    assert assign(predictor, "x", CPU).figures is not None


def test_skipped_files_are_listed_beside_the_table(predictor, here, monkeypatch):
    streaming(monkeypatch, 4, 4, skipped=[("bad, one.png", "empty file")])
    done = assign(predictor, "x", CPU, out=Path("a.parquet.csv"))
    assert done.n_skipped == 2 and done.skipped == Path("a.parquet-skipped.csv")
    assert done.skipped.read_text() == 'path,reason\n"bad, one.png",empty file\n"bad, one.png",empty file\n'


def test_what_was_read_before_an_error_is_kept(predictor, here, monkeypatch):
    streaming(monkeypatch, 4, 4, failure=InputError("9 of 17 image files cannot be read."))
    with pytest.raises(InputError, match=r"9 of 17 .*What could be read, 8 images, is in stream-clusters\.csv"):
        assign(predictor, "x", CPU, embeddings=True, into=Path("sorted"))
    assert len(read_assignments(here / "stream-clusters.csv")[0]) == 8
    assert len(np.load(here / "stream-clusters-embeddings.npy")) == 8
    assert sum(len(files) for _, _, files in os.walk("sorted")) == 8


@pytest.mark.parametrize("sizes", [(), (0,), (0, 0)], ids=str)
@pytest.mark.parametrize("failure", [None, InputError("all 3 files cannot be read")], ids=["ends", "fails"])
def test_no_image_is_an_error_and_no_file(predictor, here, monkeypatch, sizes, failure):
    streaming(monkeypatch, *sizes, failure=failure, skipped=[("a", "b")])
    with pytest.raises(InputError, match="all 3 files cannot be read" if failure else "holds no image"):
        assign(predictor, "x", CPU, embeddings=True, into=Path("sorted"))
    assert os.listdir(here) == []


@pytest.mark.parametrize(
    "failure", [KeyboardInterrupt(), OSError(28, "No space left on device"), MemoryError()], ids=repr
)
def test_any_other_end_leaves_no_file(predictor, here, monkeypatch, failure):
    streaming(monkeypatch, 4, 4, failure=failure, skipped=[("a", "b")])
    with pytest.raises(type(failure)):
        assign(predictor, "x", CPU, embeddings=True, into=Path("sorted"))
    assert os.listdir(here) == []


def test_a_full_disk_leaves_no_file(predictor, here, monkeypatch):
    """/dev/full takes no byte."""
    streaming(monkeypatch, 4)
    opened = open

    def full(path, *args, **kwargs):
        return opened("/dev/full" if str(path).endswith(".part") else path, *args, **kwargs)

    monkeypatch.setattr("builtins.open", full)
    with pytest.raises(OSError, match="No space left"):
        assign(predictor, "x", CPU)
    assert os.listdir(here) == []


def test_files_of_another_process_are_kept(predictor, here, monkeypatch):
    streaming(monkeypatch, 4, 4)

    def meanwhile(n):
        for name in ("stream-clusters.csv", "stream-clusters-embeddings.npy"):
            (here / name).write_text("other")

    done = assign(predictor, "x", CPU, embeddings=True, on_part=meanwhile)
    assert done.table == Path("stream-clusters-2.csv")
    assert (
        (here / "stream-clusters.csv").read_text() == (here / "stream-clusters-embeddings.npy").read_text() == "other"
    )
    assert len(np.load(here / "stream-clusters-embeddings-2.npy")) == 8


def test_a_folder_of_images(predictor, here):
    save_images(here / "photos", noisy_groups(6))
    (here / "photos/bad.png").write_text("no image")
    counted = []
    done = assign(predictor, "photos", CPU, into=Path("sorted"), on_image=counted.append)
    assert done.n_images == 6 and done.n_skipped == 1 and len(counted) >= 6
    links = [path for path in (here / "sorted").rglob("*") if path.is_symlink()]
    assert sorted(path.name for path in links) == [f"{i:02}.png" for i in range(6)]
    assert all(path.resolve().parent == here / "photos" for path in links)


@pytest.mark.parametrize("n", [1, 9, 10, 12345])
def test_the_number_of_rows_fits_into_the_header(tmp_path, n):
    whole = assigning.WholeFile(tmp_path / "a.npy")
    with assigning._rows_of_array(whole) as append:
        for start in range(0, n, 5000):
            append(np.arange(start, min(n, start + 5000), dtype=np.float32)[:, None] * [1, 2])
    back = np.load(tmp_path / "a.npy", mmap_mode="r")
    assert back.shape == (n, 2) and back.dtype == np.float32
    np.testing.assert_array_equal(back[:, 1], 2 * np.arange(n))
