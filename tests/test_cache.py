"""Decoded images on disk: reused, renewed, bounded, and never in the way."""

import errno
import json
import multiprocessing
import os
import time
import warnings
from pathlib import Path

import numpy as np
import pytest

from conftest import save_images
from semclust import cache, decoding, files
from semclust.cache import Store
from semclust.data import open_images, stream_images


@pytest.fixture(autouse=True)
def keep_small_sets(monkeypatch):
    monkeypatch.setattr(files, "WORTH_KEEPING", 1)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return save_images(tmp_path / "photos", noise(5, 20, 20, 3))


def noise(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def pixel_files() -> list[Path]:
    return sorted(cache.folder().glob("*.pixels"))


def is_mapped(pixels: np.ndarray) -> bool:
    owner = pixels
    while owner is not None and not isinstance(owner, np.memmap):
        owner = owner.base
    return owner is not None


@pytest.fixture
def decoded(monkeypatch) -> list[str]:
    """Every decoding of an image, by name."""
    names: list[str] = []
    real = decoding.decode
    monkeypatch.setattr(decoding, "decode", lambda place, *a: (names.append(Path(place).name), real(place, *a))[1])
    return names


# ---- reuse ---------------------------------------------------------------------------------------------


def test_images_are_decoded_once(photos: Path, decoded):
    first = open_images(photos)
    assert len(decoded) == 5 and is_mapped(first.pixels) and not first.pixels.flags.writeable
    told = []
    again = open_images(str(photos), on_image=told.append)
    assert len(decoded) == 5 and told == [] and is_mapped(again.pixels)
    assert (again.pixels == noise(5, 20, 20, 3)).all() and again.names == first.names
    assert again.file(2) == photos / "02.png" and again.source == "photos"
    assert len(pixel_files()) == 1 and not list(cache.folder().glob("*.part"))


def test_headers_are_read_once(photos: Path, monkeypatch):
    open_images(photos)
    monkeypatch.setattr(decoding, "open_image", lambda place: pytest.fail("opened again"))
    assert open_images(photos).pixels.shape == open_images(photos, size=20, channels=3).pixels.shape


def test_what_a_fit_chose_serves_a_prediction_and_the_reverse(photos: Path, decoded):
    open_images(photos)
    open_images(photos, size=(20, 20), channels=3)
    parts = list(stream_images(photos, size=(20, 20), channels=3, chunk=2))
    assert len(decoded) == 5 and [len(part.names) for part in parts] == [2, 2, 1]
    open_images(photos, size=8, channels=1)
    assert len(decoded) == 10
    open_images(photos, size=8)  # 1 channel was asked for, so it does not tell the images' own
    assert len(decoded) == 15
    assert open_images(photos, size=8).pixels.shape == (5, 8, 8, 3) and len(decoded) == 15
    open_images(photos, channels=3)
    assert len(decoded) == 15
    open_images(photos, channels=1)
    assert len(decoded) == 20


@pytest.mark.parametrize("change", ["content", "time", "name", "fewer", "more", "mode", "link", "limit"])
def test_any_change_is_seen(photos: Path, change: str, decoded, monkeypatch, tmp_path):
    open_images(photos)
    path = photos / "03.png"
    if change == "content":
        status = path.stat()
        save_images(tmp_path / "new", noise(1, 20, 21, 3))
        path.write_bytes((tmp_path / "new" / "00.png").read_bytes())
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    elif change == "time":
        os.utime(path, ns=(1, 1))
    elif change == "name":
        path.rename(photos / "x.png")
    elif change == "fewer":
        path.unlink()
    elif change == "more":
        (photos / "more.png").write_bytes(path.read_bytes())
    elif change == "mode":
        path.chmod(0o640)
    elif change == "link":
        (photos / "link.png").symlink_to("nowhere")
    else:
        monkeypatch.setattr(decoding.Image, "MAX_IMAGE_PIXELS", 10_000)
    n = len(decoded)
    open_images(photos)
    assert len(decoded) > n
    n = len(decoded)
    open_images(photos)
    assert len(decoded) == n


def test_equal_folders_are_told_apart(photos: Path, tmp_path: Path, decoded):
    open_images(photos)
    photos.rename(tmp_path / "other")
    open_images(tmp_path / "other")
    assert len(decoded) == 10


def test_lists_of_files_are_kept_too(photos: Path, decoded, monkeypatch):
    monkeypatch.chdir(photos)
    listed = ["03.png", photos / "01.png"]
    first = open_images(listed)
    assert (open_images(listed).pixels == first.pixels).all() and len(decoded) == 2
    assert first.file(0) == photos / "03.png" and first.file(1) == photos / "01.png"
    os.utime(photos / "01.png", ns=(1, 1))
    open_images(listed)
    assert len(decoded) == 4
    open_images(list(reversed(listed)))
    assert len(decoded) == 6


def test_few_images_are_not_worth_a_file(photos: Path, monkeypatch):
    monkeypatch.setattr(files, "WORTH_KEEPING", 6)
    assert not is_mapped(open_images(photos).pixels) and pixel_files() == []


def test_what_was_skipped_is_remembered_without_a_gap(photos: Path, decoded):
    (photos / "00.png").write_bytes(b"")
    (photos / "02.png").write_bytes((photos / "02.png").read_bytes()[:200])
    first = open_images(photos, size=20)
    n = len(decoded)
    again = open_images(photos, size=20)
    assert len(decoded) == n and is_mapped(again.pixels)
    assert again.names == first.names == ["01.png", "03.png", "04.png"]
    assert again.skipped == first.skipped and [name for name, _ in again.skipped] == ["00.png", "02.png"]
    assert (again.pixels == noise(5, 20, 20, 3)[[1, 3, 4]]).all()
    parts = list(stream_images(photos, size=(20, 20), channels=3, chunk=2))
    assert len(decoded) == n
    assert [part.names for part in parts] == [["01.png"], ["03.png"], ["04.png"]]
    assert [one for part in parts for one in part.skipped] == again.skipped
    assert (np.concatenate([part.pixels for part in parts]) == again.pixels).all()


def test_a_reason_that_may_pass_is_not_kept(photos: Path, monkeypatch):
    real = decoding.open_image

    def fail(place: str):
        if place.endswith("02.png"):
            raise OSError(errno.EMFILE, "Too many open files")
        return real(place)

    with monkeypatch.context() as patch:
        patch.setattr(decoding, "open_image", fail)
        assert [name for name, _ in open_images(photos).skipped] == ["02.png"]
    assert list(cache.folder().iterdir()) == []
    assert open_images(photos).skipped == []


def test_an_interruption_leaves_nothing(photos: Path, monkeypatch):
    def stop(total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        open_images(photos, on_image=stop)
    assert list(cache.folder().iterdir()) == []


# ---- damage --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["cut", "empty", "pixel", "last pixel", "index", "end", "text", "swapped", "shape"])
def test_a_damaged_file_is_noticed_and_made_again(photos: Path, damage: str, decoded, monkeypatch):
    monkeypatch.setattr(cache, "PIECE", 2**12)
    first = open_images(photos)
    (path,) = pixel_files()
    content = bytearray(path.read_bytes())
    if damage == "cut":
        content = content[:-100]
    elif damage == "empty":
        content = bytearray()
    elif damage == "pixel":
        content[1000] ^= 128
    elif damage == "last pixel":
        content[5 * 20 * 20 * 3 - 1] ^= 1
    elif damage == "index":
        content[5 * 20 * 20 * 3 + 12] ^= 1
    elif damage == "end":
        content[-1] ^= 1
    elif damage == "text":
        content = bytearray(b"hello")
    elif damage == "swapped":
        content[:4096], content[4096:8192] = content[4096:8192], content[:4096]
    else:
        content = content[1200:]
    path.unlink()  # another file of that name: the one that is mapped stays as it is
    path.write_bytes(content)
    assert (open_images(photos).pixels == first.pixels).all() and len(decoded) == 10
    assert (open_images(photos).pixels == first.pixels).all() and len(decoded) == 10


def test_a_damaged_index_is_not_believed(photos: Path):
    (photos / "00.png").write_bytes(b"")
    open_images(photos)
    (path,) = pixel_files()
    path.write_bytes(path.read_bytes().replace(b"empty file", b"emptx file"))
    assert open_images(photos).skipped == [("00.png", "empty file")]


def test_every_bit_and_every_page_counts():
    piece = noise(cache.PIECE)
    whole = cache._checksum(piece, cache.PIECE)
    for byte in (0, 7, 4095, 4096, 9999, cache.PIECE - 1):
        for bit in range(8):
            piece[byte] ^= 1 << bit
            assert cache._checksum(piece, cache.PIECE) != whole
            piece[byte] ^= 1 << bit
    swapped = np.concatenate([piece[4096:8192], piece[:4096], piece[8192:]])
    assert cache._checksum(swapped, cache.PIECE) != whole == cache._checksum(piece, cache.PIECE)
    assert cache._checksum(piece.copy(), 5000) == cache._checksum(
        np.append(piece[:5000], np.zeros_like(piece[5000:])), 5000
    )


# ---- where it cannot be written ------------------------------------------------------------------------


def test_without_a_folder_for_it_images_are_held_in_memory(photos: Path, tmp_path: Path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("SEMCLUST_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.warns(UserWarning, match=r"file/cache.*SEMCLUST_CACHE"):
        images = open_images(photos)
    assert not is_mapped(images.pixels) and (images.pixels == noise(5, 20, 20, 3)).all()


@pytest.mark.parametrize("when", [0, 1, "end", "rename", "map"])
def test_a_disk_that_fills_up_midway(photos: Path, monkeypatch, when):
    monkeypatch.setattr(cache, "PIECE", 2**12)
    written = []
    real = cache._write_all

    def write(file, content):
        if len(written) == when or (when == "end" and b"own_size" in bytes(content)):
            file.write(content[:1000])  # some of it still fits
            raise OSError(errno.ENOSPC, "No space left on device")
        real(file, content)
        written.append(len(content))

    if when == "rename":
        monkeypatch.setattr(os, "replace", lambda *a: (_ for _ in ()).throw(PermissionError(13, "denied")))
    elif when == "map":
        monkeypatch.setattr(np, "memmap", lambda *a, **k: (_ for _ in ()).throw(OSError(12, "Cannot allocate")))
    else:
        monkeypatch.setattr(cache, "_write_all", write)
    (photos / "00.png").write_bytes(b"")
    with pytest.warns(UserWarning, match="held in memory"):
        images = open_images(photos, size=20)
    assert (images.pixels == noise(5, 20, 20, 3)[1:]).all() and images.names[0] == "01.png"
    assert list(cache.folder().iterdir()) == []


def test_a_disk_that_is_too_full_is_known_before(photos: Path, monkeypatch):
    monkeypatch.setattr(cache.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 5999})())
    with pytest.warns(UserWarning, match="No space left"):
        assert not is_mapped(open_images(photos).pixels)
    monkeypatch.setattr(cache.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 6000})())
    assert is_mapped(open_images(photos).pixels)


def test_a_user_without_a_home(photos: Path, monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("SEMCLUST_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    with pytest.warns(UserWarning, match="no home"):
        assert len(open_images(photos).names) == 5


def test_where_the_cache_is(monkeypatch, tmp_path: Path):
    assert str(cache.folder()) == os.environ["SEMCLUST_CACHE"]
    monkeypatch.delenv("SEMCLUST_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.folder() == tmp_path / "semclust"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache.folder() == tmp_path / "home" / ".cache" / "semclust"


def test_the_cache_is_private(photos: Path, monkeypatch, tmp_path: Path):
    monkeypatch.setenv("SEMCLUST_CACHE", str(tmp_path / "a" / "b"))
    open_images(photos)
    assert (tmp_path / "a" / "b").stat().st_mode & 0o077 == 0 and pixel_files()[0].stat().st_mode & 0o077 == 0


# ---- bounds --------------------------------------------------------------------------------------------


def test_the_least_recently_used_go_first(tmp_path: Path, monkeypatch, decoded):
    monkeypatch.setattr(cache, "LIMIT", 15_000)  # two of about 6,200 bytes
    sets = [save_images(tmp_path / str(i), noise(5, 20, 20, 3, seed=i)) for i in range(3)]
    for number, folder in enumerate(sets[:2]):
        open_images(folder)
        for path in pixel_files():
            if path.stat().st_mtime > 1e9:
                os.utime(path, (1000 * (number + 1), 1000 * (number + 1)))
    assert len(pixel_files()) == 2
    open_images(sets[0])  # now the other one is the oldest
    open_images(sets[2])
    assert len(pixel_files()) == 2
    decoded.clear()
    open_images(sets[0])
    assert decoded == []
    open_images(sets[1])
    assert len(decoded) == 5


def full_disk(monkeypatch, own_cache: Path, size: int) -> None:
    """A disk of ``size`` bytes that holds the cache alone."""

    def usage(path):
        return type("Usage", (), {"free": size - sum(file.stat().st_size for file in own_cache.iterdir())})()

    monkeypatch.setattr(cache.shutil, "disk_usage", usage)


def put(stamp: str, n_bytes: int, time: float) -> Path:
    """A set of pixels that was used at ``time``."""
    store = Store(stamp, n_bytes, (1, 1, 1))
    store.append(np.zeros((n_bytes, 1, 1, 1), np.uint8))
    store.finish([], True, True, True)
    os.utime(store.path, (time, time))
    return store.path


def test_one_set_above_the_limit_is_kept_and_drives_out_no_other(tmp_path: Path, monkeypatch, decoded):
    open_images(save_images(tmp_path / "a", noise(2, 20, 20, 3)))
    monkeypatch.setattr(cache, "LIMIT", 4000)
    open_images(save_images(tmp_path / "b", noise(5, 20, 20, 3)))
    decoded.clear()
    assert all(is_mapped(open_images(tmp_path / name).pixels) for name in "ab") and decoded == []
    open_images(save_images(tmp_path / "c", noise(1, 20, 20, 3)))
    assert [path.stat().st_size // 1200 for path in pixel_files()] == [1]  # and does not stay for ever


@pytest.mark.parametrize("stamp", [None, "c" * 40])
def test_room_is_made_only_as_far_as_the_disk_demands(stamp, monkeypatch, own_cache):
    """For pixels that are not kept, and for more than LIMIT."""
    monkeypatch.setattr(cache, "SCRATCH_FROM", 1)
    oldest, newer = put("a" * 40, 5000, 1000), put("b" * 40, 5000, 2000)
    monkeypatch.setattr(cache, "LIMIT", 10_000 if stamp is None else 100)
    Store(stamp, 6000, (1, 1, 1)).discard()
    assert pixel_files() == [oldest, newer]
    full_disk(monkeypatch, own_cache, 15_000)
    Store(stamp, 6000, (1, 1, 1)).discard()
    assert pixel_files() == [newer]
    with pytest.warns(UserWarning, match="No space left"):
        Store(stamp, 16_000, (1, 1, 1)).discard()
    assert pixel_files() == [newer]  # it would have gone in vain


def test_files_of_others_stay(photos: Path, monkeypatch, own_cache):
    """The folder may be any: all that goes are files with names of ours."""
    foreign = [
        "mine.txt",
        "thesis.zip.part",
        "semclust-notes.txt",
        "my-semclust-1.part",
        "package.json",
        f"{'a' * 40}.json",
        f"{'a' * 39}-index.json",
        f"x{'a' * 40}-index.json",
        "raw.pixels",
        f"{'a' * 40}-copy.pixels",
        f"{'a' * 40}-2x2x1.pixels.bak",
    ]
    ours = ["semclust-old_1.part", f"{'a' * 40}-index.json", f"{'0' * 40}-20x20x3.pixels"]
    fresh = "semclust-fresh.part"  # is being written
    long_ago = time.time() - cache.ABANDONED - 10
    for name in (*foreign, *ours, fresh):
        (own_cache / name).write_text("keep")
        if name != fresh:
            os.utime(own_cache / name, (long_ago, long_ago))
    monkeypatch.setattr(cache, "LIMIT", 6000)
    open_images(photos)
    (made,) = pixel_files_of(photos)
    assert sorted(os.listdir(own_cache)) == sorted([*foreign, fresh, made])


def pixel_files_of(photos: Path) -> list[str]:
    source = files.folder_source(str(photos))
    return [path.name for path in pixel_files() if path.name.startswith(source.stamp)]


def test_all_names_that_are_made_are_known(photos: Path, monkeypatch, own_cache):
    seen = set()
    real = cache._write_all
    monkeypatch.setattr(cache, "_write_all", lambda *a: (seen.update(os.listdir(own_cache)), real(*a)))
    open_images(photos)
    cache.keep_json("a" * 40, {})
    seen.update(os.listdir(own_cache))
    assert len(seen) == 3 and all(cache.OUR_NAMES.fullmatch(name) for name in seen)


def open_or_mapped(path: str) -> bool:
    links = (f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd"))
    opened = {os.readlink(link) for link in links if os.path.islink(link)}
    return os.path.realpath(path) in opened or os.path.realpath(path) in Path("/proc/self/maps").read_text()


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="needs Linux to see which files are open")
def test_a_file_is_renamed_when_it_is_neither_open_nor_mapped(photos: Path, monkeypatch):
    """Windows refuses it otherwise."""
    real = os.replace
    refused = []

    def replace(before, after):
        refused.append(open_or_mapped(before))
        real(before, after)

    monkeypatch.setattr(os, "replace", replace)
    images = open_images(photos)
    assert refused == [False] and open_or_mapped(pixel_files()[0])
    assert (images.pixels == noise(5, 20, 20, 3)).all()


def test_pixels_that_are_not_kept_go_to_a_nameless_file_if_they_are_many(monkeypatch, own_cache):
    monkeypatch.setattr(cache, "SCRATCH_FROM", 5 * 10 * 10 * 3)
    images = open_images(noise(5, 20, 20, 3), size=10)
    assert is_mapped(images.pixels) and list(own_cache.iterdir()) == []
    few = open_images(noise(4, 20, 20, 3), size=10)
    assert not is_mapped(few.pixels) and (few.pixels == images.pixels[:4]).all()


def test_rows_of_any_size_are_stored_in_order(monkeypatch):
    monkeypatch.setattr(cache, "PIECE", 2**12)
    rows = noise(400, 9, 7, 3)
    store, start = Store("a" * 40, 400, (9, 7, 3)), 0
    for n in (1, 0, 3, 150, 20, 226):
        store.append(rows[start : start + n])
        start += n
    pixels = store.finish([], False, False, True)
    assert (pixels == rows).all()
    assert (cache.find("a" * 40, (9, 7), 3).pixels == rows).all()
    assert cache.find("a" * 40, (9, 7), 1) is None and cache.find("a" * 40, None, 3) is None
    assert cache.find("b" * 40, (9, 7), 3) is None


def build(folder: str, where: str) -> int:
    os.environ["SEMCLUST_CACHE"] = where
    files.WORTH_KEEPING = 1
    return int(open_images(folder).pixels.sum())


def test_two_processes_that_make_the_same_file(photos: Path, own_cache):
    with multiprocessing.get_context("fork").Pool(2) as pool:
        sums = pool.starmap(build, [(str(photos), str(own_cache))] * 6)
    assert set(sums) == {int(noise(5, 20, 20, 3).sum())} and len(list(own_cache.iterdir())) == 1


def test_json_is_kept_whole(own_cache, monkeypatch):
    cache.keep_json("a", {"x": [1]})
    (path,) = own_cache.iterdir()
    os.utime(path, (1000, 1000))
    assert cache.find_json("a") == {"x": [1]} and cache.find_json("b") is None
    assert path.stat().st_mtime > 1000  # it was used
    monkeypatch.setattr(os, "replace", lambda *a: (_ for _ in ()).throw(OSError("full")))
    cache.keep_json("b", {"x": [2]})
    assert cache.find_json("b") is None and list(own_cache.iterdir()) == [path]
    path.write_text(json.dumps([1]))
    assert cache.find_json("a") is None


def test_a_kept_set_warns_of_nothing(photos: Path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        open_images(photos)
        open_images(photos)
