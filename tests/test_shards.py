"""Tar files in WebDataset's layout."""

import errno
import gzip
import json
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from conftest import refused
from published import encoded, shard
from semclust import cache, shards
from semclust.data import open_images, stream_images


def noise(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


@pytest.fixture
def set_of_three(tmp_path: Path) -> Path:
    """shards-000.tar to shards-002.tar with 3 images each; image i is all of value i, of class i % 2."""
    for number in range(3):
        members = {}
        for i in range(3 * number, 3 * number + 3):
            members[f"{i:04}.png"] = encoded(np.full((20, 20, 3), i, np.uint8))
            members[f"{i:04}.cls"] = f"{i % 2}\n".encode()
            members[f"{i:04}.json"] = b"{}"
        shard(tmp_path / f"shards-{number:03}.tar", members)
    return tmp_path


@pytest.mark.parametrize(
    "pattern", ["shards-{000..002}.tar", "shards-*.tar", "shards-00?.tar", "shards-{000,001,002}.tar"]
)
def test_shards_by_pattern(set_of_three: Path, pattern: str):
    images = open_images(str(set_of_three / pattern))
    assert images.pixels[:, 0, 0, 0].tolist() == list(range(9))
    assert images.labels.tolist() == [0, 1, 0, 1, 0, 1, 0, 1, 0] and images.labels.dtype.kind == "i"
    assert images.names[3] == "shards-001.tar/0003.png" and len(set(images.names)) == 9
    assert images.source == "shards" and images.file(0) is None and images.skipped == []


def test_one_shard_and_a_list(set_of_three: Path):
    one = open_images(set_of_three / "shards-001.tar")
    assert one.pixels[:, 0, 0, 0].tolist() == [3, 4, 5] and one.source == "shards"
    two = open_images([set_of_three / "shards-002.tar", str(set_of_three / "shards-000.tar")])
    assert two.pixels[:, 0, 0, 0].tolist() == [6, 7, 8, 0, 1, 2]


def test_shards_are_scanned_once_and_not_unpacked(set_of_three: Path, monkeypatch):
    pattern = str(set_of_three / "shards-*.tar")
    before = sorted(os.listdir(set_of_three))
    first = open_images(pattern)
    with monkeypatch.context() as patch:
        patch.setattr(shards, "_scan", lambda path: pytest.fail("scanned again"))
        again = open_images(pattern)
    assert (again.pixels == first.pixels).all() and again.names == first.names
    assert (again.labels == first.labels).all()
    assert sorted(os.listdir(set_of_three)) == before
    shard(set_of_three / "shards-001.tar", {"new.png": encoded(np.full((20, 20, 3), 99, np.uint8)), "new.cls": b"7"})
    changed = open_images(pattern)
    assert changed.pixels[:, 0, 0, 0].tolist() == [0, 1, 2, 99, 6, 7, 8] and changed.labels[3] == 7


def test_an_index_that_is_damaged_is_made_again(set_of_three: Path):
    pattern = str(set_of_three / "shards-*.tar")
    open_images(pattern)
    for index in cache.folder().glob("*.json"):
        index.write_text("[]" if "a" in index.name else '{"names"')
    assert len(open_images(pattern).names) == 9


@pytest.mark.parametrize(
    "change",
    [
        dict.clear,
        lambda index: index.update(names=None),
        lambda index: index.update(names="abc"),
        lambda index: index.update(names=[1, 2, 3]),
        lambda index: index["names"].pop(),
        lambda index: index["lengths"].append(1),
        lambda index: index.update(offsets=["0", "1", "2"]),
        lambda index: index.update(lengths=[None] * 3),
        lambda index: index.update(labels=[[], [], []]),
        lambda index: index.update(labels=[]),
        lambda index: index.update(unlisted=[1]),
        lambda index: index.update(unlisted=[["a"]]),
        lambda index: index.pop("unlisted"),
    ],
)
def test_an_index_of_another_form_is_made_again(set_of_three: Path, change):
    path = set_of_three / "shards-000.tar"
    names = open_images(path).names
    (kept,) = cache.folder().glob("*.json")
    index = json.loads(kept.read_text())
    assert shards._is_index(index)
    change(index)
    kept.write_text(json.dumps(index))
    again = open_images(path)
    assert again.names == names and again.labels.tolist() == [0, 1, 0] and again.skipped == []
    assert shards._is_index(json.loads(kept.read_text()))


def test_shards_work_without_a_cache(set_of_three: Path, monkeypatch):
    monkeypatch.setenv("SEMCLUST_CACHE", "/dev/null/no")
    with pytest.warns(UserWarning, match="held in memory"):
        assert len(open_images(str(set_of_three / "shards-*.tar")).names) == 9


def test_members_of_many_kinds(tmp_path: Path):
    pixels = noise(20, 20, 3)
    path = shard(
        tmp_path / "a.tar",
        {
            "./b/1.left.JPG": encoded(pixels, "JPEG"),
            "./b/1.right.webp": encoded(pixels, "WEBP"),
            "b/1.cls": b"cat",
            "../../etc/2.png": encoded(pixels),
            "/3.png": encoded(pixels),
            "<img src=x>\n.png": encoded(pixels),
            "._4.png": b"a Mac's",
            ".hidden/5.png": encoded(pixels),
            "6.txt": b"text",
            "7.png": b"",
            "8.jpg": b"no image" * 20,
            "x" * 300 + ".png": encoded(pixels),
        },
    )
    images = open_images(path)
    names = [name.removeprefix("a.tar/") for name in images.names]
    expected = ["b/1.left.JPG", "b/1.right.webp", "../../etc/2.png", "/3.png", "<img src=x>\n.png", "x" * 300 + ".png"]
    assert names == expected
    assert [name for name, _ in images.skipped] == ["a.tar/7.png", "a.tar/8.jpg"]
    assert "empty" in images.skipped[0][1] and images.labels is None  # not every image has one
    assert (images.pixels[2] == pixels).all()


def test_labels_in_words(tmp_path: Path):
    members = {"1.cls": b" cat\n", "1.png": encoded(noise(20, 20)), "2.png": encoded(noise(20, 20)), "2.cls": b"3"}
    assert open_images(shard(tmp_path / "a.tar", members)).labels.tolist() == ["cat", "3"]


def test_keys_of_different_folders_are_different(tmp_path: Path):
    members = {
        f"{folder}/1.{kind}": content
        for folder, label in (("a", b"0"), ("b", b"1"))
        for kind, content in (("png", encoded(noise(20, 20))), ("cls", label))
    }
    assert open_images(shard(tmp_path / "a.tar", members)).labels.tolist() == [0, 1]


def test_shards_of_the_same_name_in_two_folders(tmp_path: Path):
    for folder in "ab":
        shard(tmp_path / folder / "s.tar", {"1.png": encoded(noise(20, 20))})
    assert open_images(str(tmp_path / "*" / "s.tar")).names == ["a/s.tar/1.png", "b/s.tar/1.png"]


def test_links_in_a_tar_are_no_images(tmp_path: Path):
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        link = tarfile.TarInfo("1.png")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
        folder = tarfile.TarInfo("folder.png")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
        for name in ("2.png", "3.png"):
            Image.fromarray(noise(20, 20)).save(tmp_path / name)
            tar.add(tmp_path / name, name)
    images = open_images(tmp_path / "a.tar")
    assert images.names == ["a.tar/2.png", "a.tar/3.png"] and images.skipped == [("a.tar/1.png", "not a regular file")]


def test_a_shard_that_is_cut_off(set_of_three: Path):
    members = {f"{i}.png": encoded(noise(40, 40, 3, seed=i)) for i in range(4)}
    path = shard(set_of_three / "cut.tar", members)
    path.write_bytes(path.read_bytes()[: 3 * 5632 + 2000])  # inside the fourth
    images = open_images(path)
    assert images.names == [f"cut.tar/{i}.png" for i in range(3)]
    reasons = dict(images.skipped)
    assert "cut off" in reasons["cut.tar"] and "ends inside" in reasons["cut.tar/3.png"]


def offset_of(path: Path, member: int) -> int:
    with tarfile.open(path) as tar:
        return tar.getmembers()[member].offset


@pytest.mark.parametrize("damage", ["header", "zeros", "cut header", "a bit"])
def test_a_damaged_header_is_told_and_not_kept(tmp_path: Path, damage: str):
    """tarfile takes it for the end, and all that follows would be lost without a word."""
    path = shard(tmp_path / "a.tar", {f"{i}.png": encoded(noise(20, 20, seed=i)) for i in range(6)})
    whole, at = path.read_bytes(), offset_of(path, 4)
    content = bytearray(whole)
    if damage == "header":
        content[at : at + 512] = b"\xff" * 512
    elif damage == "zeros":
        content[at : at + 512] = bytes(512)
    elif damage == "cut header":
        content = content[: at + 100]
    else:
        content[at + 2] ^= 1
    path.write_bytes(content)
    for _ in range(2):
        images = open_images(path)
        assert images.names == [f"a.tar/{i}.png" for i in range(4)]
        assert [name for name, _ in images.skipped] == ["a.tar"]
        assert "cut off or damaged" in images.skipped[0][1] and str(at) in images.skipped[0][1]
    assert list(cache.folder().glob("*.json")) == []
    path.write_bytes(whole)
    assert len(open_images(path).names) == 6 and open_images(path).skipped == []


@pytest.mark.parametrize("kind, size", [(tarfile.REGTYPE, -512), (tarfile.XHDTYPE, 2**60)], ids=["negative", "vast"])
def test_a_header_with_an_impossible_size_is_damage(tmp_path: Path, kind: bytes, size: int):
    """Both were found by random damage: the one as an OverflowError, the other as a MemoryError."""
    path = shard(tmp_path / "a.tar", {f"{i}.png": encoded(noise(20, 20, seed=i)) for i in range(3)})
    impossible = tarfile.TarInfo("x.png")
    impossible.type, impossible.size = kind, size
    content, at = bytearray(path.read_bytes()), offset_of(path, 2)
    content[at : at + 512] = impossible.tobuf(tarfile.GNU_FORMAT)
    path.write_bytes(content)
    images = open_images(path)
    assert images.names == ["a.tar/0.png", "a.tar/1.png"]
    assert [name for name, _ in images.skipped] == ["a.tar"] and "cut off or damaged" in images.skipped[0][1]


def test_what_could_not_be_read_for_a_while_is_found_later(tmp_path: Path, monkeypatch):
    """The file is the same: neither its index nor its pixels may be taken from the time of the error."""
    path = shard(tmp_path / "a.tar", {f"{i}.png": encoded(noise(20, 20, seed=i)) for i in range(6)})
    real, asked = tarfile.TarFile.next, []

    def fail(tar):
        asked.append(tar)
        if len(asked) > 4:
            raise OSError(errno.EIO, "Input/output error")
        return real(tar)

    with monkeypatch.context() as patch:
        patch.setattr(tarfile.TarFile, "next", fail)
        images = open_images(path)
        assert "Input/output error" in images.skipped[0][1] and len(images.pixels) == len(images.names) < 6
    later = open_images(path)
    assert len(later.names) == len(later.pixels) == 6 and later.skipped == []


def test_a_shard_without_an_end_or_with_a_long_one_is_whole(tmp_path: Path):
    path = shard(tmp_path / "a.tar", {f"{i}.png": encoded(noise(20, 20, seed=i)) for i in range(3)})
    whole = path.read_bytes()
    with tarfile.open(path) as tar:
        tar.getmembers()
        end = tar.offset
    for content in (whole[:end], whole[: end + 512], whole + bytes(3 * 2**20)):
        path.write_bytes(content)
        assert len(open_images(path).names) == 3 and open_images(path).skipped == []


def test_what_is_no_shard(tmp_path: Path, set_of_three: Path):
    (tmp_path / "text.tar").write_text("hello" * 300)
    refused(tmp_path / "text.tar", "text.tar", "tar file")
    (tmp_path / "a.tar.gz").write_bytes(gzip.compress((set_of_three / "shards-000.tar").read_bytes()))
    refused(tmp_path / "a.tar.gz", "compressed", "decompress")
    refused(str(tmp_path / "shards-{000..004}.tar"), "no tar file", "shards-003.tar", "5 were named")
    refused(str(tmp_path / "none-*.tar"), "fits no file")
    refused(shard(tmp_path / "none.tar", {"a.txt": b"x"}), "No member", ".jpg")
    refused([set_of_three / "shards-000.tar", "x.png"], "1 of 2", "tar files only")


def test_shards_stream_in_the_same_order(set_of_three: Path):
    pattern = str(set_of_three / "shards-*.tar")
    whole = open_images(pattern, size=20, channels=3)
    for fresh in (False, True):
        if fresh:
            for file in cache.folder().iterdir():
                file.unlink()
        parts = list(stream_images(pattern, size=(20, 20), channels=3, chunk=4))
        assert (np.concatenate([part.pixels for part in parts]) == whole.pixels).all()
        assert [name for part in parts for name in part.names] == whole.names
        assert np.concatenate([part.labels for part in parts]).tolist() == whole.labels.tolist()


def test_webdataset_reads_the_same(set_of_three: Path):
    import webdataset

    urls = [str(set_of_three / f"shards-{i:03}.tar") for i in range(3)]
    samples = list(webdataset.WebDataset(urls, shardshuffle=False).decode("rgb8").to_tuple("png", "cls"))
    images = open_images(urls)
    assert (np.stack([image for image, _ in samples]) == images.pixels).all()
    assert [label for _, label in samples] == images.labels.tolist()
