"""Which files are found, and under which names."""

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from conftest import save_images
from messy import DEFECTS, FORMATS, make_messy_folder
from semclust.data import open_images
from semclust.errors import InputError
from semclust.files import expand, find_images


def test_nothing_of_a_messy_folder_is_lost(tmp_path: Path):
    n = 8 * (len(FORMATS) + len(DEFECTS))
    good, bad = make_messy_folder(tmp_path / "messy", n)
    images = open_images(tmp_path / "messy", size=16)
    assert sorted(images.names) == good and sorted(name for name, _ in images.skipped) == bad
    assert len(set(good + bad)) == n and len(bad) >= 10
    assert all(why and "\n" not in why for _, why in images.skipped)
    assert any("<img" in name for name in good) and any("\n" in name for name in good)
    assert any("\udce9" in name for name in good)
    assert all(os.path.lexists(images.file(i)) for i in range(len(images.names)))


def test_the_messy_folder_is_the_same_each_time(tmp_path: Path):
    names = [make_messy_folder(tmp_path / name, 60, seed=3) for name in "ab"]
    assert names[0] == names[1]
    a, b = (open_images(tmp_path / name, size=16) for name in "ab")
    assert (a.pixels == b.pixels).all()


def test_folders_with_the_ending_of_an_image_are_folders(tmp_path: Path):
    save_images(tmp_path / "trip.jpg", np.zeros((1, 16, 16, 3), np.uint8))
    (tmp_path / "b.jpg.txt").touch()
    assert find_images(str(tmp_path)) == (["trip.jpg/00.png"], [])


def test_a_folder_that_vanishes_while_it_is_listed(tmp_path: Path, monkeypatch):
    save_images(tmp_path / "a", np.zeros((1, 16, 16, 3), np.uint8))
    (tmp_path / "b").mkdir()
    real = os.stat

    def stat(path, **options):
        if str(path).endswith("b/"):
            raise FileNotFoundError(2, "No such file or directory")
        return real(path, **options)

    monkeypatch.setattr(os, "stat", stat)
    assert find_images(str(tmp_path)) == (["a/00.png"], [("b", "no such file, or a link that leads nowhere")])


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("s-{000..003}.tar", ["s-000.tar", "s-001.tar", "s-002.tar", "s-003.tar"]),
        ("s-{8..11}.tar", ["s-8.tar", "s-9.tar", "s-10.tar", "s-11.tar"]),
        ("s-{08..11}.tar", ["s-08.tar", "s-09.tar", "s-10.tar", "s-11.tar"]),
        ("{a,b}-{1..2}", ["a-1", "a-2", "b-1", "b-2"]),
        ("{train,val}/x.tar", ["train/x.tar", "val/x.tar"]),
        ("plain.tar", ["plain.tar"]),
        ("{}.tar", ["{}.tar"]),
        ("no-*.tar", []),
    ],
)
def test_patterns(pattern: str, expected: list[str], tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert expand(pattern) == expected


def test_images_by_pattern(tmp_path: Path, monkeypatch):
    for name in ("a/1.jpg", "a/2.png", "b/3.jpg", "b/c/4.jpg"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (16, 16)).save(tmp_path / name)
    (tmp_path / "a" / "notes.txt").touch()
    images = open_images(str(tmp_path / "*" / "*.jpg"))
    assert images.names == ["a/1.jpg", "b/3.jpg"] and images.file(1) == tmp_path / "b" / "3.jpg"
    assert open_images(str(tmp_path / "a" / "*")).names == ["1.jpg", "2.png"]
    assert open_images(str(tmp_path / "**" / "*.jpg")).names == ["a/1.jpg", "b/3.jpg", "b/c/4.jpg"]
    monkeypatch.chdir(tmp_path)
    assert open_images("{a,b}/*.jpg").names == ["a/1.jpg", "b/3.jpg"]
    with pytest.raises(InputError, match="fits no file that ends in"):
        open_images("a/*.txt")


def test_a_folder_whose_name_looks_like_a_pattern(tmp_path: Path):
    save_images(tmp_path / "set[1] {a,b}*", np.zeros((2, 16, 16, 3), np.uint8))
    assert open_images(str(tmp_path / "set[1] {a,b}*")).names == ["00.png", "01.png"]
