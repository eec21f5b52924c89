"""A folder for each cluster: nothing is lost, nothing overwritten, and the originals are as they were."""

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from conftest import noisy_groups, save_images
from semclust.data import open_images
from semclust.errors import InputError
from semclust.groups import Groups
from semclust.sorting import SortedFolder, check_folder, fitting_name, folder_name, numbered, safe


def sort(images, path: Path, clusters, groups: Groups | None = None, by="link") -> SortedFolder:
    with SortedFolder(path, groups or Groups(4), by) as folder:
        folder.add(images, np.array(clusters))
    return folder


def tree(path: Path) -> list[str]:
    return sorted(each.relative_to(path).as_posix() for each in path.rglob("*") if not each.is_dir())


def stamp(path: Path) -> dict[str, tuple]:
    """Content and times of all files of a folder."""
    files = [each for each in path.rglob("*") if each.is_file()]
    return {str(each): (each.read_bytes(), each.stat().st_mtime_ns, each.stat().st_mode) for each in files}


@pytest.fixture
def photos(tmp_path) -> Path:
    save_images(tmp_path / "photos" / "a", noisy_groups(3, size=16))
    save_images(tmp_path / "photos" / "b", noisy_groups(2, size=16, seed=1))
    return tmp_path / "photos"


@pytest.mark.parametrize("by", ["link", "copy", "hardlink"])
def test_two_files_of_one_name_are_both_kept_and_the_originals_untouched(photos, tmp_path, by):
    os.utime(photos / "b/00.png", (1e9, 1e9))
    before = stamp(photos)
    images = open_images(photos)
    folder = sort(images, tmp_path / "sorted", [0, 0, 2, 0, 0], by=by)
    assert tree(tmp_path / "sorted") == ["0/00-2.png", "0/00.png", "0/01-2.png", "0/01.png", "2/02.png"]
    for name, original in [("0/00.png", "a/00.png"), ("0/00-2.png", "b/00.png"), ("0/01-2.png", "b/01.png")]:
        made = tmp_path / "sorted" / name
        assert made.read_bytes() == (photos / original).read_bytes()
        assert made.is_symlink() == (by == "link")
        assert made.samefile(photos / original) == (by != "copy")
        assert made.stat().st_mtime == (photos / original).stat().st_mtime
    assert stamp(photos) == before and folder.copied_instead == 0 and folder.failed == []


def test_links_are_absolute_and_survive_a_move(photos, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sort(open_images("photos"), Path("sorted"), [0] * 5)
    (tmp_path / "deep/er").mkdir(parents=True)
    os.rename("sorted", "deep/er/moved")
    monkeypatch.chdir("/")
    for link in (tmp_path / "deep/er/moved/0").iterdir():
        assert os.path.isabs(os.readlink(link)) and link.read_bytes()


def test_many_files_of_one_name(tmp_path):
    for i in range(12):
        save_images(tmp_path / "photos" / f"{i:02}", noisy_groups(1, size=16, seed=i))
    (tmp_path / "photos" / "99").mkdir()
    Image.new("L", (16, 16)).save(tmp_path / "photos" / "99" / "00-2.png")
    images = open_images(tmp_path / "photos")
    for name in ("one", "two"):  # the same each time
        sort(images, tmp_path / name, [0] * 13)
    expected = {"00.png", *(f"00-{i}.png" for i in range(2, 13)), "00-2-2.png"}
    assert {each.name for each in (tmp_path / "one/0").iterdir()} == expected
    assert os.readlink(tmp_path / "one/0/00-7.png").endswith("06/00.png")
    assert {f: os.readlink(tmp_path / "one/0" / f) for f in expected} == {
        f: os.readlink(tmp_path / "two/0" / f) for f in expected
    }


def test_odd_names(tmp_path):
    names = ["line\nbreak.png", "-rf.png", 'quote".png', "🎉.png", os.fsdecode(b"byte \xff.png"), "x" * 251 + ".png"]
    for folder in ("a", "b"):
        (tmp_path / "photos" / folder).mkdir(parents=True)
        for name in names:
            with open(tmp_path / "photos" / folder / name, "wb") as file:
                Image.new("L", (16, 16)).save(file, "PNG")
    images = open_images(tmp_path / "photos")
    sort(images, tmp_path / "sorted", [1] * 12, by="copy")
    found = {each.name for each in (tmp_path / "sorted/1").iterdir()}
    assert len(found) == 12 and set(names) < found
    assert os.fsdecode(b"byte \xff-2.png") in found and "x" * 249 + "-2.png" in found


def test_a_link_among_the_images_leads_to_the_same_file(photos, tmp_path):
    os.symlink("../b/01.png", photos / "a" / "link.png")  # a relative one
    for by in ("link", "copy", "hardlink"):
        images = open_images(photos)
        sort(images, tmp_path / by, [0] * 6, by=by)
        assert (tmp_path / by / "0/link.png").read_bytes() == (photos / "b/01.png").read_bytes()


@pytest.mark.parametrize("by, call", [("link", "symlink"), ("hardlink", "link")])
def test_where_links_cannot_be_made_files_are_copied(photos, tmp_path, monkeypatch, by, call):
    def fail(*args, **kwargs):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, call, fail)
    folder = sort(open_images(photos), tmp_path / "sorted", [0] * 5, by=by)
    assert folder.copied_instead == 5
    assert not (tmp_path / "sorted/0/00.png").is_symlink()
    assert (tmp_path / "sorted/0/00-2.png").read_bytes() == (photos / "b/00.png").read_bytes()


def test_images_without_files_are_written_as_png(tmp_path):
    pixels = {c: noisy_groups(3, channels=c) for c in (1, 2, 3, 4)}
    for c, array in pixels.items():
        sort(open_images(array, size=(8, 8)), tmp_path / str(c), [0, 1, 1])
        assert tree(tmp_path / str(c)) == ["0/0.png", "1/1.png", "1/2.png"]
        back = np.asarray(Image.open(tmp_path / str(c) / "1/2.png"))
        np.testing.assert_array_equal(back.reshape(8, 8, c), array[2])


def test_names_without_files_cannot_leave_the_folder(tmp_path):
    images = open_images(noisy_groups(5), size=(8, 8))
    images.names = ["../../x.png", "..", "/etc/passwd", "a\x00\nb.jpg", "../../x.png"]
    (tmp_path / "in").mkdir()
    sort(images, tmp_path / "in/sorted", [0] * 5)
    assert sorted(os.listdir(tmp_path / "in")) == ["sorted"]
    assert tree(tmp_path / "in/sorted") == ["0/_.png", "0/a__b.png", "0/passwd.png", "0/x-2.png", "0/x.png"]


def test_long_names_without_files_are_cut(tmp_path):
    images = open_images(noisy_groups(4), size=(8, 8))
    images.names = ["a.tar/" + "é" * 130 + ".png", "a.tar/" + "é" * 140 + ".png", "b.tar/" + "x" * 300, "y" * 251]
    sort(images, tmp_path / "sorted", [0] * 4)
    cut = ["é" * 125 + ".png", "é" * 124 + "-2.png", "x" * 251 + ".png", "y" * 251 + ".png"]
    assert tree(tmp_path / "sorted") == sorted(f"0/{name}" for name in cut)


def test_a_folder_bears_id_and_name(photos, tmp_path):
    groups = Groups(4)
    groups.rename(2, "ships / boats")
    sort(open_images(photos), tmp_path / "sorted", [0, 2, 2, 0, 0], groups)
    assert sorted(os.listdir(tmp_path / "sorted")) == ["0", "2-ships _ boats"]


@pytest.mark.parametrize(
    "name, expected",
    [
        (None, "3"),
        ("ships", "3-ships"),
        ("a/b\\c:d", "3-a_b_c_d"),
        ("..", "3-_"),
        (" x. ", "3-x"),
        ("=cmd|'x'!A0", "3-=cmd_'x'!A0"),
        ("tab\tnew\nline", "3-tab_new_line"),
        ("ünï 🎉", "3-ünï 🎉"),
        ("y" * 300, "3-" + "y" * 60),
        ("y" * 59 + ". z", "3-" + "y" * 59),
    ],
)
def test_names_of_folders(name, expected):
    assert folder_name(3, name) == expected


def test_safe_and_numbered():
    assert safe("///") == "___" and safe("") == "_" and safe(" . ") == "_"
    assert numbered(Path("a/cat.tar.gz"), 2) == Path("a/cat.tar-2.gz")
    assert numbered(Path("cat"), 12) == Path("cat-12")
    assert len(os.fsencode(numbered(Path("ü" * 125 + ".jpeg"), 10).name)) <= 255
    assert numbered(Path("ü" * 125 + ".jpeg"), 10) == Path("ü" * 123 + "-10.jpeg")  # no half of a letter
    assert fitting_name("ok", ".png") == "ok.png" and fitting_name("x", "." * 300) == "." * 300


def test_a_file_that_vanished_is_told(photos, tmp_path):
    images = open_images(photos)
    (photos / "a/01.png").unlink()
    folder = sort(images, tmp_path / "sorted", [0] * 5)
    assert folder.failed == [("a/01.png", "No such file or directory")]
    assert len(tree(tmp_path / "sorted")) == 4


@pytest.mark.parametrize("by", ["link", "copy"])
def test_an_interruption_leaves_nothing(photos, tmp_path, by):
    before = stamp(photos)
    with pytest.raises(KeyboardInterrupt), SortedFolder(tmp_path / "sorted", Groups(4), by) as folder:
        folder.add(open_images(photos), np.zeros(5, int))
        raise KeyboardInterrupt
    assert os.listdir(tmp_path) == ["photos"] and stamp(photos) == before


def test_an_empty_folder_is_filled(photos, tmp_path):
    (tmp_path / "sorted").mkdir(mode=0o750)
    sort(open_images(photos), tmp_path / "sorted", [0, 1, 1, 0, 0])
    assert sorted(os.listdir(tmp_path / "sorted")) == ["0", "1"]
    assert sorted(os.listdir(tmp_path)) == ["photos", "sorted"]
    assert (tmp_path / "sorted").stat().st_mode & 0o777 == 0o750


def test_a_folder_that_was_filled_meanwhile_is_kept(photos, tmp_path):
    with SortedFolder(tmp_path / "sorted", Groups(4), "link") as folder:
        folder.add(open_images(photos), np.zeros(5, int))
        (tmp_path / "sorted").mkdir()
        (tmp_path / "sorted/mine").touch()
    assert folder.path == tmp_path / "sorted-2" and os.listdir(tmp_path / "sorted") == ["mine"]
    assert len(tree(tmp_path / "sorted-2")) == 5


def test_where_a_folder_cannot_be_made(photos, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full/x").mkdir(parents=True)
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    (tmp_path / "loose").symlink_to("nowhere")
    (tmp_path / "into-photos").symlink_to("photos/a")
    for path, words in [
        ("full", "exists"),
        ("file", "exists"),
        ("link", "is a link"),
        ("loose", "is a link"),
        ("missing/x", "There is no folder 'missing'"),
        ("photos", "exists"),
        ("photos/sorted", "lies inside"),
        ("photos/a/sorted", "lies inside"),
        ("empty/../photos/sorted", "lies inside"),
        ("into-photos/sorted", "lies inside"),
    ]:
        with pytest.raises(InputError, match=words) as caught:
            check_folder(Path(path), "photos")
        assert "--into" in str(caught.value)
    for path in ("new", "empty", "photos-2", "./new"):
        check_folder(Path(path), "photos")
    check_folder(Path("photos/sorted"), "digits")
