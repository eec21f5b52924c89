"""From a folder as people have them to sorted folders and a page, by the commands alone: nothing is lost on the way."""

import csv
import os

import numpy as np
import pytest

from messy import make_messy_folder
from semclust.cli import main

N_IMAGES = int(os.environ.get("SEMCLUST_MESSY_IMAGES", 400))


def column(path, name: str) -> list[str]:
    with open(path, newline="", encoding="utf-8", errors="surrogateescape") as file:
        return [row[name] for row in csv.DictReader(file)]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A fit on the folder, and its images in folders."""
    here = tmp_path_factory.mktemp("messy")
    good, bad = make_messy_folder(here / "photos", N_IMAGES)
    before = {path: path.lstat().st_mtime_ns for path in sorted((here / "photos").rglob("*"))}
    words = ["--epochs", "2", "--image-size", "16", "--backbone", "resnet10", "--width", "4", "--device", "cpu"]
    main(["fit", str(here / "photos"), "-k", "4", "--out", str(here / "runs"), *words])
    run = here / "runs" / "photos"
    main(["predict", str(run), str(here / "photos"), "--out", str(here / "new.csv"), "--into", str(here / "sorted")])
    after = {path: path.lstat().st_mtime_ns for path in sorted((here / "photos").rglob("*"))}
    assert before == after  # nothing in the folder was touched
    return here, run, good, bad


def test_every_file_is_assigned_or_skipped_exactly_once(finished):
    _, run, good, bad = finished
    assigned, skipped = column(run / "assignments.csv", "path"), column(run / "skipped.csv", "path")
    assert sorted(assigned) == good
    files_skipped = [name for name in skipped if name in set(bad)]
    assert sorted(files_skipped) == bad and len(good) + len(bad) == N_IMAGES
    assert not set(assigned) & set(skipped) and len(set(skipped)) == len(skipped)
    assert all(column(run / "skipped.csv", "reason"))
    assert np.load(run / "embeddings.npy").shape[0] == len(good)


def test_prediction_says_what_the_fit_said(finished):
    here, run, _, _ = finished
    assert column(here / "new.csv", "path") == column(run / "assignments.csv", "path")
    assert column(here / "new.csv", "cluster") == column(run / "assignments.csv", "cluster")


def test_every_assigned_file_lies_in_the_folder_of_its_cluster(finished):
    here, run, _, _ = finished
    cluster_of = dict(
        zip(column(run / "assignments.csv", "path"), column(run / "assignments.csv", "cluster"), strict=True)
    )
    found = {}
    for link in (here / "sorted").rglob("*"):
        if not link.is_dir():
            name = os.path.relpath(os.readlink(link), here / "photos")
            assert name not in found
            found[name] = link.parent.name
    assert found == cluster_of


def test_the_page_holds_every_name_as_text(finished):
    _, run, _, _ = finished
    page = (run / "report.html").read_text(encoding="utf-8")
    assert "<img src=x" not in page and len(page) < 20e6
