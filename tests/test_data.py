"""Sources of images: what is read, how it is brought to one size, and what is refused or skipped."""

import io
import os
import pickle
import struct
import threading
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, PngImagePlugin

from conftest import refused, save_images
from semclust import arrays, decoding, workers
from semclust.data import open_images, stream_images
from semclust.decoding import SUFFIXES, decode, read_header
from semclust.errors import InputError, plural
from semclust.sources import choose_size
from semclust.truth import read_labels

ORIENTATION = 0x0112


def noise(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def save(path: Path, pixels: np.ndarray, **options) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, **options)
    return path


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Three readable colour images of one shape."""
    for i in range(3):
        save(tmp_path / "photos" / f"{i}.png", noise(20, 30, 3, seed=i))
    return tmp_path / "photos"


# ---- which source ------------------------------------------------------------------------------------


def test_digits_come_scaled_with_labels():
    images = open_images("digits", size=8)
    assert images.pixels.shape == (1797, 8, 8, 1) and images.pixels.dtype == np.uint8
    assert (images.pixels.min(), images.pixels.max()) == (0, 255)
    assert images.source == "digits" and images.value_range == (0.0, 16.0)
    assert images.labels[:3].tolist() == [0, 1, 2] and images.names[-1] == "1796"
    assert open_images("digits").pixels.shape == (1797, 16, 16, 1)


def test_digits_as_floats_give_the_same_pixels_in_the_range_of_the_fit():
    from sklearn.datasets import load_digits

    named = open_images("digits", size=8)
    again = open_images(load_digits().images[:5], size=8, value_range=named.value_range)
    assert (again.pixels == named.pixels[:5]).all()


def test_folder_is_read_recursively_in_order(tmp_path: Path):
    for name in ("b.PNG", "a/z.bmp", "a/c.png", "B.png"):
        save(tmp_path / "set" / name, np.full((16, 16), len(name), np.uint8))
    for name in ("notes.txt", ".hidden.png", ".cache/x.png", "png"):
        (tmp_path / "set" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "set" / name).write_text("no image")
    done = []
    images = open_images(str(tmp_path / "set"), on_image=done.append)
    assert images.names == ["B.png", "a/c.png", "a/z.bmp", "b.PNG"]
    assert images.pixels[:, 0, 0, 0].tolist() == [len(name) for name in images.names]
    assert images.source == "set" and images.labels is None and images.skipped == []
    assert done == [4] * 4


def test_folder_named_by_a_dot(photos: Path, monkeypatch):
    monkeypatch.chdir(photos)
    assert open_images(".").source == "photos"


def test_the_word_digits_is_the_set_even_beside_a_folder_of_that_name(photos: Path, monkeypatch):
    photos.rename(photos.with_name("digits"))
    monkeypatch.chdir(photos.parent)
    assert len(open_images("digits").names) == 1797
    assert len(open_images("./digits").names) == 3


def test_all_suffixes_are_read(tmp_path: Path):
    for suffix in SUFFIXES:
        save(tmp_path / f"image{suffix.upper()}", noise(20, 20, 3))
    images = open_images(tmp_path)
    assert len(images.names) == len(SUFFIXES) == 8 and images.skipped == []


def test_one_file_and_a_list_of_files(photos: Path, monkeypatch):
    one = open_images(photos / "1.png")
    assert one.names == ["1.png"] and one.source == "1" and one.pixels.shape == (1, 20, 30, 3)
    monkeypatch.chdir(photos.parent)
    several = open_images([photos / "2.png", "photos/0.png"])
    assert several.names == [(photos / "2.png").as_posix(), "photos/0.png"] and several.source == "images"
    assert (several.pixels == np.stack([noise(20, 30, 3, seed=2), noise(20, 30, 3, seed=0)])).all()


def test_a_listed_file_twice_is_two_images(photos: Path):
    assert len(open_images([photos / "2.png"] * 2).pixels) == 2


@pytest.mark.parametrize("key", ["images", "x", "X", "whatever"])
def test_npz_by_key_with_labels(tmp_path: Path, key: str):
    np.savez(tmp_path / "scans.npz", **{key: noise(4, 20, 20)}, y=np.arange(4))
    images = open_images(tmp_path / "scans.npz")
    assert (images.pixels[..., 0] == noise(4, 20, 20)).all()
    assert images.labels.tolist() == [0, 1, 2, 3]
    assert images.source == "scans" and images.names == ["0", "1", "2", "3"]


def test_npz_without_an_obvious_array_is_refused(tmp_path: Path):
    np.savez(tmp_path / "a.npz", x_train=noise(4, 20, 20), x_test=noise(4, 20, 20))
    refused(tmp_path / "a.npz", "x_train", "x_test", "expected one named images")
    np.savez(tmp_path / "b.npz", y=np.arange(4))
    refused(tmp_path / "b.npz", "['y']")


def test_npz_with_labels_of_another_length_is_refused(tmp_path: Path):
    np.savez(tmp_path / "a.npz", x=noise(4, 20, 20), labels=np.arange(5))
    refused(tmp_path / "a.npz", "(5,)", "expected 4")


def test_npy_stays_on_disk(tmp_path: Path):
    np.save(tmp_path / "scans.npy", noise(4, 20, 20, 3))
    images = open_images(tmp_path / "scans.npy")
    assert (images.pixels == noise(4, 20, 20, 3)).all()
    assert is_mapped(images.pixels)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns of arrays that cannot be written to
        assert open_images(tmp_path / "scans.npy", size=10).pixels.shape == (4, 10, 10, 3)


def is_mapped(pixels: np.ndarray) -> bool:
    owner = pixels
    while owner is not None and not isinstance(owner, np.memmap):
        owner = owner.base
    return owner is not None


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_npz_is_mapped_where_it_is_stored_and_read_where_it_is_compressed(tmp_path: Path, dtype, order):
    values = np.asarray(noise(4, 20, 20, 3), dtype, order) / dtype(1 if dtype == np.uint8 else 255)
    values = np.asarray(values, dtype, order)
    np.savez(tmp_path / "stored.npz", y=np.arange(4), images=values)
    np.savez_compressed(tmp_path / "packed.npz", y=np.arange(4), images=values)
    for name in ("stored", "packed"):
        images = open_images(tmp_path / f"{name}.npz")
        assert (images.pixels == noise(4, 20, 20, 3)).all() and images.labels.tolist() == [0, 1, 2, 3]
        assert is_mapped(images.pixels) == (name == "stored" and dtype == np.uint8 and order == "C")


def test_the_images_of_an_npz_without_an_array_in_them(tmp_path: Path):
    np.savez(tmp_path / "a.npz", images=np.zeros((0, 20, 20), np.uint8))
    refused(tmp_path / "a.npz", "no images")
    np.savez(tmp_path / "b.npz", images=np.uint8(3))
    refused(tmp_path / "b.npz", "()")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("no/such/folder", ["'no/such/folder'", "no such file or folder", "Check the path"]),
        ("", ["no such file"]),
        ("x" * 5000, ["no such file"]),
        ("nul\0byte", ["no such file"]),
        ("cifar:/data", ["scheme 'cifar' is unknown", "cifar10:PATH"]),
        ("s3://bucket/photos", ["scheme 's3' is unknown"]),
        ("C:/photos", ["no such file"]),
        ([], ["one or more"]),
        ([noise(8, 8)], ["np.stack"]),
        (3, ["int", "a folder of images"]),
        (b"photos", ["bytes"]),
        (None, ["NoneType"]),
    ],
)
def test_sources_that_are_none(source, words, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused(source, *words)


def test_existing_path_with_a_colon_is_a_path(tmp_path: Path):
    save(tmp_path / "set:one" / "a.png", noise(20, 20))
    assert open_images(tmp_path / "set:one").names == ["a.png"]


def test_file_of_another_kind_is_refused(tmp_path: Path):
    (tmp_path / "table.csv").write_text("a,b")
    refused(tmp_path / "table.csv", "'.csv'", "table.csv")


def test_folder_without_images_is_refused(tmp_path: Path):
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "empty", ".jpg", ".webp", "holds no file")


@pytest.mark.parametrize("options", [{"size": 0}, {"size": (8,)}, {"size": 2.5}, {"size": "8"}, {"channels": 7}])
def test_options_out_of_range_are_refused(photos: Path, options):
    refused(photos, next(iter(options)) + "=", **options)


@pytest.mark.parametrize("value_range", [(1.0, 0.0), (0.0, np.inf), (np.nan, 1.0)])
def test_ranges_that_are_none_are_refused(value_range):
    refused(np.zeros((2, 8, 8)), "value_range", value_range=value_range)


# ---- pieces of bounded size ----------------------------------------------------------------------------


def joined(source, chunk: int, **options):
    parts = list(stream_images(source, chunk=chunk, **options))
    assert all(len(part.names) == len(part.pixels) for part in parts)
    pixels = np.concatenate([part.pixels for part in parts])
    return pixels, [name for part in parts for name in part.names], parts


@pytest.mark.parametrize("chunk", [1, 2, 5, 100])
def test_a_stream_is_the_same_in_pieces(photos: Path, damage, chunk: int, monkeypatch):
    monkeypatch.setattr(workers, "AT_ONCE", 3)
    whole = open_images(photos, size=(10, 12), channels=3)
    told = []
    pixels, names, parts = joined(photos, chunk, size=(10, 12), channels=3, on_image=told.append)
    assert (pixels == whole.pixels).all() and names == whole.names
    assert [one for part in parts for one in part.skipped] == whole.skipped
    assert told == [20] * 20
    assert all(part.labels is None and part.source == "photos" for part in parts)
    assert [part.file(i) for part in parts for i in range(len(part.names))] == [photos / name for name in names]
    assert max(len(part.pixels) for part in parts) <= chunk + 3


@pytest.mark.parametrize("size", [(20, 20), (10, 10)])
@pytest.mark.parametrize("kind", [np.uint8, np.float32])
def test_a_stream_of_arrays(tmp_path: Path, kind, size, monkeypatch):
    monkeypatch.setattr(arrays, "CHUNK_VALUES", 2 * 20 * 20 * 3)
    values = noise(9, 20, 20, 3) if kind == np.uint8 else noise(9, 20, 20, 3).astype(np.float32) / 51 - 1
    np.savez(tmp_path / "a.npz", images=values, labels=np.arange(9))
    options = {"size": size, "channels": 3, "value_range": (-1.0, 4.0)}
    whole = open_images(tmp_path / "a.npz", **options)
    told = []
    pixels, names, parts = joined(tmp_path / "a.npz", 4, on_image=told.append, **options)
    assert (pixels == whole.pixels).all() and names == whole.names and told == [9] * 9
    assert np.concatenate([part.labels for part in parts]).tolist() == list(range(9))
    assert all(part.value_range == whole.value_range and part.file(0) is None for part in parts)
    assert max(len(part.names) for part in parts) <= 5


def test_a_stream_says_at_its_end_that_most_was_unreadable(photos: Path):
    for i in range(4):
        (photos / f"bad{i}.jpg").write_bytes(b"")
    stream = stream_images(photos, size=(10, 10), channels=3, chunk=2)
    names = [name for part in (next(stream), next(stream)) for name in part.names]
    with pytest.raises(InputError, match="4 of 7"):
        for part in stream:
            names += part.names
    assert names == ["0.png", "1.png", "2.png"]


def test_a_stream_complains_before_it_begins(photos: Path):
    with pytest.raises(InputError, match="no such file"):
        stream_images("no/such/folder", size=(8, 8), channels=3)
    with pytest.raises(InputError, match="chunk=0"):
        stream_images(photos, size=(8, 8), channels=3, chunk=0)
    with pytest.raises(InputError, match="size="):
        stream_images(photos, size=(0, 8), channels=3)


def test_a_stream_writes_nothing(tmp_path: Path, own_cache: Path):
    save_images(tmp_path / "many", noise(70, 8, 8, 1))
    assert len(joined(tmp_path / "many", 32, size=(8, 8), channels=1)[1]) == 70
    assert list(own_cache.iterdir()) == []


# ---- links, names, unreadable files --------------------------------------------------------------------


def test_linked_folders_are_followed_once_under_their_real_name(photos: Path, tmp_path: Path):
    save(tmp_path / "elsewhere" / "far.png", noise(20, 30, 3))
    save(photos / "inner" / "x.png", noise(20, 30, 3))
    (photos / "a-link").symlink_to(tmp_path / "elsewhere")
    (photos / "again").symlink_to(photos / "inner")
    (photos / "inner" / "loop").symlink_to(photos)
    (photos / "self").symlink_to(photos / "self")
    assert open_images(photos).names == ["0.png", "1.png", "2.png", "a-link/far.png", "inner/x.png"]


@pytest.fixture
def damage(photos: Path) -> dict[str, str]:
    """Files that cannot be read, with a word of the reason; as many readable ones beside them."""
    jpeg = io.BytesIO()
    Image.fromarray(noise(20, 30, 3)).save(jpeg, "JPEG")
    (photos / "1-truncated.jpg").write_bytes(jpeg.getvalue()[:900])
    (photos / "text.jpg").write_text("I am not an image, honestly. " * 40)
    (photos / "empty.png").write_bytes(b"")
    (photos / "dangling.gif").symlink_to(photos / "nowhere.gif")
    (photos / "itself.gif").symlink_to(photos / "itself.gif")
    os.mkfifo(photos / "pipe.bmp")
    ps = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 20 20\n%%EndComments\n"
    (photos / "program.tif").write_bytes(ps)
    header = struct.pack(">IIBBBBB", 50_000, 50_000, 8, 2, 0, 0, 0)
    (photos / "bomb.png").write_bytes(png(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(99))))
    for i in range(9):
        save(photos / f"good{i}.png", noise(20, 30, 3, seed=i))
    return {
        "1-truncated.jpg": "truncated",
        "bomb.png": "MAX_IMAGE_PIXELS",
        "dangling.gif": "leads nowhere",
        "empty.png": "empty file",
        "itself.gif": "symbolic links",
        "pipe.bmp": "not a regular file",
        "program.tif": "not an image",
        "text.jpg": "not an image",
    }


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png(kind: bytes, body: bytes) -> bytes:
    return b"\x89PNG\r\n\x1a\n" + chunk(kind, body)


def test_unreadable_files_are_skipped_with_their_reason(photos: Path, damage: dict[str, str]):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        images = open_images(photos)
    assert [name for name, _ in images.skipped] == sorted(damage)
    for name, reason in images.skipped:
        assert damage[name] in reason
        assert len(reason) < 130 and "\n" not in reason and str(photos) not in reason
    assert images.names == ["0.png", "1.png", "2.png", *(f"good{i}.png" for i in range(9))]
    for name, pixels in zip(images.names, images.pixels, strict=True):  # the rows have closed up around the gap
        assert (pixels == np.asarray(Image.open(photos / name))).all()


def test_mostly_unreadable_is_refused(photos: Path):
    for i in range(3):
        (photos / f"bad{i}.jpg").write_bytes(b"")
    assert len(open_images(photos).names) == 3  # half may be bad
    (photos / "bad3.jpg").write_bytes(b"")
    refused(photos, "4 of 7", "'bad0.jpg': empty file", "'bad2.jpg'", "...")


def test_failure_after_the_header_counts_too(tmp_path: Path):
    save(tmp_path / "a.jpg", noise(64, 64, 3))
    (tmp_path / "b.jpg").write_bytes((tmp_path / "a.jpg").read_bytes()[:900])
    (tmp_path / "c.jpg").write_bytes((tmp_path / "a.jpg").read_bytes()[:900])
    refused(tmp_path, "2 of 3", "'b.jpg': ", "truncated")
    refused(tmp_path / "b.jpg", "1 of 1")


def test_images_between_once_and_twice_the_pixel_limit_are_skipped(photos: Path, monkeypatch):
    save(photos / "large.png", noise(25, 30, 3))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 20 * 30)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        images = open_images(photos)
    assert told == []  # the list of skipped files says it
    assert images.names == ["0.png", "1.png", "2.png"] and images.skipped[0][0] == "large.png"
    assert "600" in images.skipped[0][1]
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    assert len(open_images(photos).names) == 4


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_no_permission_is_a_reason(photos: Path):
    (photos / "1.png").chmod(0)
    save(photos / "closed" / "x.png", noise(20, 30, 3))
    (photos / "closed").chmod(0)
    try:
        skipped = dict(open_images(photos).skipped)
    finally:
        (photos / "closed").chmod(0o700)
    assert skipped == {"1.png": "no permission to read it", "closed": "no permission to read it"}


def test_no_permission_is_a_reason_for_anyone(photos: Path, monkeypatch):
    """The same without relying on the rights of the user who runs the tests."""
    save(photos / "closed" / "x.png", noise(20, 30, 3))
    real_open, real_scandir = decoding.open_image, os.scandir

    def deny(real, denied):
        def ask(path):
            if Path(str(path)).name == denied:
                raise PermissionError(13, "Permission denied", str(path))
            return real(path)

        return ask

    monkeypatch.setattr(decoding, "open_image", deny(real_open, "1.png"))
    monkeypatch.setattr(os, "scandir", deny(real_scandir, "closed"))
    images = open_images(photos)
    assert images.names == ["0.png", "2.png"]
    assert dict(images.skipped) == {"1.png": "no permission to read it", "closed": "no permission to read it"}


def test_odd_file_names(tmp_path: Path):
    folder = os.fsencode(tmp_path)
    odd = [b"line\nbreak.png", b"latin\xe9.png", "köln 🦊.png".encode(), b"-k.png", b'a,"b".png']
    for name in odd:
        try:
            with open(folder + b"/" + name, "wb") as file:
                Image.fromarray(noise(20, 20)).save(file, "PNG")
        except OSError:
            pytest.skip(f"this file system takes no {name!r}")
    images = open_images(tmp_path)
    assert sorted(map(os.fsencode, images.names)) == sorted(odd)
    assert images.skipped == []
    (tmp_path / "sub").mkdir()
    with open(folder + b"/sub/bad\xff\n.jpg", "wb"):
        pass
    refused(tmp_path / "sub", "1 of 1")
    with pytest.raises(InputError) as caught:
        open_images(tmp_path / "sub")
    str(caught.value).encode("utf-8")  # can be printed
    assert "\n" not in str(caught.value)


def test_files_are_decoded_in_threads_and_progress_is_told_in_this_one(photos: Path, monkeypatch):
    monkeypatch.setattr(workers, "AT_ONCE", 2)
    working, telling = set(), []
    real = decoding.decode
    monkeypatch.setattr(decoding, "decode", lambda *a: (working.add(threading.get_ident()), real(*a))[1])
    images = open_images(photos, on_image=lambda n: telling.append((n, threading.get_ident())))
    assert threading.get_ident() not in working
    assert telling == [(3, threading.get_ident())] * 3
    assert (images.pixels[2] == noise(20, 30, 3, seed=2)).all()


# ---- decoding ------------------------------------------------------------------------------------------


def test_decode_of_the_own_size_is_exact(photos: Path):
    assert (decode(str(photos / "0.png"), (20, 30), 3) == noise(20, 30, 3)).all()


UPRIGHT = np.zeros((32, 48, 3), np.uint8)
UPRIGHT[:16, :16] = (255, 0, 0)  # red at the top left, blue at the bottom right
UPRIGHT[16:, 32:] = (0, 0, 255)
STORED = {  # what a camera stores under each orientation, in words of NumPy
    1: UPRIGHT,
    2: UPRIGHT[:, ::-1],
    3: UPRIGHT[::-1, ::-1],
    4: UPRIGHT[::-1],
    5: UPRIGHT.transpose(1, 0, 2),
    6: np.rot90(UPRIGHT, 1),
    7: UPRIGHT[::-1, ::-1].transpose(1, 0, 2),
    8: np.rot90(UPRIGHT, -1),
}


@pytest.mark.parametrize("suffix", ["jpg", "png", "tif", "webp"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(tmp_path: Path, orientation: int, suffix: str):
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    options = {"jpg": {"quality": 95, "subsampling": 0}, "webp": {"lossless": True}}.get(suffix, {})
    path = save(tmp_path / f"a.{suffix}", np.ascontiguousarray(STORED[orientation]), exif=exif, **options)
    images = open_images(path)
    assert images.pixels.shape == (1, 32, 48, 3)  # the shape, too, is the upright one
    assert np.abs(images.pixels[0].astype(int) - UPRIGHT).max() <= (12 if suffix == "jpg" else 0)


@pytest.mark.parametrize("exif", [b"Exif\0\0garbage, not TIFF", b"Exif\0\0II*\0\xff\xff\xff\x7f garbage"])
@pytest.mark.parametrize("suffix", ["png", "jpg"])
def test_damaged_exif_does_not_matter(tmp_path: Path, suffix: str, exif: bytes):
    save(tmp_path / f"a.{suffix}", UPRIGHT, exif=exif)
    images = open_images(tmp_path)
    assert images.skipped == [] and images.pixels.shape == (1, 32, 48, 3)


def test_a_large_jpeg_is_turned_and_shrunk(tmp_path: Path):
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    large = np.rot90(UPRIGHT, 1).repeat(30, 0).repeat(30, 1)  # 1440 x 960 as stored
    path = save(tmp_path / "a.jpg", np.ascontiguousarray(large), exif=exif, quality=90)
    pixels = open_images(path).pixels[0]
    assert pixels.shape == (96, 144, 3)
    assert np.abs(pixels[8, 8].astype(int) - (255, 0, 0)).max() < 12
    assert np.abs(pixels[88, 136].astype(int) - (0, 0, 255)).max() < 12
    assert pixels[8, 136].max() < 12 and pixels[88, 8].max() < 12


def test_transparency_lies_on_white(tmp_path: Path):
    rgba = np.zeros((16, 16, 4), np.uint8)
    rgba[:, :8] = (200, 0, 0, 255)
    rgba[:, 8:12] = (200, 0, 0, 0)
    rgba[:, 12:] = (0, 0, 0, 128)
    row = open_images(save(tmp_path / "rgba.png", rgba)).pixels[0, 5]
    assert row[0].tolist() == [200, 0, 0] and row[9].tolist() == [255, 255, 255] and row[14].tolist() == [127] * 3
    assert (open_images(rgba[None], channels=3).pixels[0, 5] == row).all()

    la = np.zeros((16, 16, 2), np.uint8)
    la[:, :8] = (40, 255)
    Image.fromarray(la).save(tmp_path / "la.png")
    images = open_images(tmp_path / "la.png")
    assert images.pixels.shape[3] == 1 and images.pixels[0, 5, [0, 9], 0].tolist() == [40, 255]


def test_palettes_with_and_without_transparency(tmp_path: Path):
    image = Image.new("P", (16, 16), 0)
    image.putpalette([10, 20, 30, 200, 100, 0])
    image.paste(1, (8, 0, 16, 16))
    image.save(tmp_path / "plain.png")
    image.save(tmp_path / "index.png", transparency=1)
    image.save(tmp_path / "bytes.png", transparency=bytes([255, 0]))
    image.save(tmp_path / "index.gif", transparency=1)
    images = open_images(tmp_path)
    assert images.names == ["bytes.png", "index.gif", "index.png", "plain.png"]
    assert images.pixels[:, 5, 0].tolist() == [[10, 20, 30]] * 4
    assert images.pixels[:, 5, 9].tolist() == [[255] * 3] * 3 + [[200, 100, 0]]


def test_transparent_colour_of_rgb_and_grey(tmp_path: Path):
    save(tmp_path / "rgb.png", np.full((16, 16, 3), 7, np.uint8), transparency=(7, 7, 7))
    save(tmp_path / "grey.png", np.full((16, 16), 9, np.uint8), transparency=9)
    assert (open_images(tmp_path).pixels == 255).all()


def test_cmyk(tmp_path: Path):
    Image.new("CMYK", (16, 16), (255, 0, 0, 0)).save(tmp_path / "cyan.jpg", quality=95)
    pixel = open_images(tmp_path).pixels[0, 8, 8].astype(int)
    assert np.abs(pixel - (0, 255, 255)).max() < 6
    assert open_images(tmp_path, channels=1).pixels.shape == (1, 16, 16, 1)


@pytest.mark.parametrize("suffix", ["png", "tif"])
def test_16_bits_are_scaled_not_clipped(tmp_path: Path, suffix: str):
    values = np.array([0, 255, 256, 32768, 65535], np.uint16)
    save(tmp_path / f"deep.{suffix}", np.tile(values.repeat(4), (20, 1)))
    images = open_images(tmp_path)
    assert images.pixels.shape == (1, 20, 20, 1)
    assert images.pixels[0, 3, ::4, 0].tolist() == [0, 0, 1, 128, 255]


def test_integers_of_32_bits_count_as_16(tmp_path: Path):
    values = np.array([-5, 256, 65535, 70000], np.int32)
    save(tmp_path / "deep.tif", np.tile(values.repeat(5), (20, 1)))
    assert Image.open(tmp_path / "deep.tif").mode == "I"
    assert open_images(tmp_path).pixels[0, 3, ::5, 0].tolist() == [0, 1, 255, 255]


def test_big_endian_16_bits(tmp_path: Path):
    deep = np.tile(np.array([0, 512, 65535, 300], ">u2").repeat(5), (20, 1))
    Image.frombytes("I;16B", (20, 20), deep.tobytes()).save(tmp_path / "deep.tif")
    assert open_images(tmp_path).pixels[0, 3, ::5, 0].tolist() == [0, 2, 255, 1]


def test_float_tiffs(tmp_path: Path):
    ramp = np.tile(np.linspace(0, 1, 16, dtype=np.float32), (16, 1))
    save(tmp_path / "share.tif", ramp)
    save(tmp_path / "wide.tif", ramp * 300 - 10)
    save(tmp_path / "holes.tif", np.where(ramp > 0.5, np.nan, ramp).astype(np.float32))
    images = open_images(tmp_path)
    assert images.names == ["share.tif", "wide.tif"] and images.pixels.shape[3] == 1
    assert (images.pixels[0, 0, :, 0] == np.rint(ramp[0] * 255)).all()
    assert images.pixels[1, 0, [0, -1], 0].tolist() == [0, 255]
    assert "NaN" in images.skipped[0][1]


def test_bilevel_image(tmp_path: Path):
    Image.fromarray(np.eye(16, dtype=bool)).save(tmp_path / "one.png")
    assert (open_images(tmp_path).pixels[0, ..., 0] == np.eye(16) * 255).all()


@pytest.mark.parametrize("suffix", ["gif", "tif", "webp"])
def test_first_frame(tmp_path: Path, suffix: str):
    frames = [Image.new("RGB", (16, 16), colour) for colour in ("red", "lime", "blue")]
    options = {"lossless": True} if suffix == "webp" else {}
    frames[0].save(tmp_path / f"a.{suffix}", save_all=True, append_images=frames[1:], **options)
    assert Image.open(tmp_path / f"a.{suffix}").n_frames == 3
    assert open_images(tmp_path).pixels[0, 8, 8].tolist() == [255, 0, 0]


def test_png_with_exif_after_its_pixels(tmp_path: Path):
    """The header pass cannot know of it, the decoding does."""
    save(tmp_path / "a.png", np.ascontiguousarray(STORED[3]))
    exif = Image.Exif()
    exif[ORIENTATION] = 3
    body, end = (tmp_path / "a.png").read_bytes()[:-12], (tmp_path / "a.png").read_bytes()[-12:]
    (tmp_path / "a.png").write_bytes(body + chunk(b"eXIf", exif.tobytes()[6:]) + end)
    assert (open_images(tmp_path).pixels[0] == UPRIGHT).all()


def test_headers_are_read_without_decoding(tmp_path: Path, monkeypatch):
    save(tmp_path / "a.png", noise(20, 30, 3))
    monkeypatch.setattr(PngImagePlugin.PngImageFile, "load", lambda self: pytest.fail("decoded"))
    assert read_header(str(tmp_path / "a.png")) == ((20, 30), False)


# ---- channels ------------------------------------------------------------------------------------------


def test_grey_folder_has_one_channel_until_a_colour_image_joins(tmp_path: Path):
    save(tmp_path / "a.png", noise(20, 20))
    save(tmp_path / "b.jpg", noise(20, 20))
    assert open_images(tmp_path).pixels.shape == (2, 20, 20, 1)
    save(tmp_path / "c.png", noise(20, 20, 3))
    images = open_images(tmp_path)
    assert images.pixels.shape == (3, 20, 20, 3)
    assert (images.pixels[0] == noise(20, 20)[..., None]).all()


def test_channels_asked_for(photos: Path):
    grey = open_images(photos, channels=1).pixels
    assert (grey[0, ..., 0] == np.asarray(Image.fromarray(noise(20, 30, 3)).convert("L"))).all()
    refused(photos, "channels=4", channels=4)


def test_array_channels_agree_with_pillow():
    rgb = noise(3, 20, 20, 3)
    grey = open_images(rgb, channels=1).pixels
    assert (grey[1, ..., 0] == np.asarray(Image.fromarray(rgb[1]).convert("L"))).all()
    assert (open_images(grey, channels=3).pixels == grey.repeat(3, 3)).all()

    rgba = noise(3, 20, 20, 4)
    image = Image.fromarray(rgba[2])
    white = np.asarray(Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB"))
    composed = open_images(rgba, channels=3).pixels
    assert np.abs(composed[2].astype(int) - white).max() <= 1  # Pillow rounds by other means
    alpha = rgba[..., 3:] / 255
    assert (composed == np.rint(rgba[..., :3] * alpha + 255 * (1 - alpha))).all()
    assert (open_images(rgba, channels=1).pixels == open_images(composed, channels=1).pixels).all()
    assert open_images(rgba).pixels.shape[3] == 4
    assert open_images(noise(3, 20, 20, 2)).pixels.shape[3] == 2


@pytest.mark.parametrize(("has", "asked"), [(2, 3), (2, 1), (1, 4), (3, 4), (3, 2), (1, 2)])
def test_array_channels_that_cannot_be_made(has: int, asked: int):
    refused(noise(3, 20, 20, has), plural(has, "channel"), plural(asked, "channel"), channels=asked)


# ---- size ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shapes", "asked", "expected"),
    [
        ([(28, 28)] * 2, None, (28, 28)),
        ([(16, 96)], None, (16, 96)),
        ([(96, 200)], None, (96, 200)),
        ([(8, 8)], None, (16, 16)),
        ([(15, 40)], None, (30, 80)),
        ([(5, 7)], None, (20, 28)),
        ([(480, 640)], None, (96, 128)),
        ([(200, 100)], None, (192, 96)),
        ([(20, 60), (40, 30), (90, 50)], None, (30, 30)),
        ([(4, 4), (5, 5)], None, (16, 16)),
        ([(400, 400), (500, 500)], None, (96, 96)),
        ([(28, 28)], 32, (32, 32)),
        ([(28, 28), (3, 3)], (20, 40), (20, 40)),
        ([(28, 28)], np.int64(12), (12, 12)),
    ],
)
def test_size_rule(shapes, asked, expected):
    assert choose_size(shapes, asked) == expected


def test_mixed_folder_becomes_squares(tmp_path: Path):
    for i, shape in enumerate([(40, 60), (50, 20), (30, 300)]):
        save(tmp_path / f"{i}.png", noise(*shape))
    assert open_images(tmp_path).pixels.shape == (3, 30, 30, 1)
    assert open_images(tmp_path, size=(18, 24)).pixels.shape == (3, 18, 24, 1)


def stripes() -> np.ndarray:
    """Thirds of 0, 100, 200 from left to right, 30 x 90."""
    return np.tile(np.repeat(np.uint8([0, 100, 200]), 30), (30, 1))


@pytest.mark.parametrize("as_file", [True, False])
def test_other_aspects_keep_the_centre(tmp_path: Path, as_file: bool):
    for pixels, size in ((stripes(), (30, 30)), (stripes().T, (30, 30)), (stripes(), (16, 16)), (stripes().T, 48)):
        source = save(tmp_path / "a.png", pixels) if as_file else pixels[None]
        cut = open_images(source, size=size).pixels[0, 2:-2, 2:-2]
        assert (cut == 100).all()
    whole = open_images(save(tmp_path / "b.png", stripes()) if as_file else stripes()[None], size=(10, 30)).pixels[0]
    assert whole[5, [2, 15, 27], 0].tolist() == [0, 100, 200]


def test_any_shape_fits_any_size(tmp_path: Path):
    random = np.random.default_rng(0)
    for _ in range(60):
        h, w, H, W = random.integers(1, 70, 4).tolist()
        path = save(tmp_path / "a.png", np.full((h, w), 77, np.uint8))
        assert (decode(str(path), (H, W), 1) == np.full((H, W, 1), 77)).all()
        assert (open_images(np.full((2, h, max(w, 5)), 77, np.uint8), size=(H, W)).pixels == 77).all()


def test_files_and_arrays_are_shrunk_alike(tmp_path: Path):
    smooth = np.asarray(Image.fromarray(noise(8, 8, 3)).resize((200, 200), Image.Resampling.BICUBIC))
    of_file = open_images(save(tmp_path / "a.png", smooth), size=50).pixels
    of_array = open_images(smooth[None], size=50).pixels
    assert np.abs(of_file.astype(int) - of_array).max() <= 3
    assert np.abs(of_array[0].astype(int) - smooth.reshape(50, 4, 50, 4, 3).mean((1, 3))).max() <= 6


def test_chunks_do_not_show(monkeypatch):
    pixels = noise(7, 20, 20, 3)
    whole = open_images(pixels, size=(12, 10)).pixels
    floats = open_images(pixels / 300 - 0.2)
    monkeypatch.setattr(arrays, "CHUNK_VALUES", 2 * 20 * 20 * 3)
    assert (open_images(pixels, size=(12, 10)).pixels == whole).all()
    again = open_images(pixels / 300 - 0.2)
    assert again.value_range == floats.value_range and (again.pixels == floats.pixels).all()


# ---- arrays --------------------------------------------------------------------------------------------


def test_bytes_pass_unchanged():
    grey, colour = noise(3, 20, 24), noise(3, 20, 24, 3)
    images = open_images(grey)
    assert (images.pixels == grey[..., None]).all() and images.names == ["0", "1", "2"] and images.source == "array"
    assert images.value_range == (0.0, 255.0) and images.labels is None
    assert (open_images(colour, value_range=(0.0, 1.0)).pixels == colour).all()  # bytes are bytes


def test_views_can_go_to_torch():
    pixels = open_images(noise(3, 20, 24, 3)[:, ::-1]).pixels
    assert (torch.from_numpy(pixels).numpy() == noise(3, 20, 24, 3)[:, ::-1]).all()


def test_tensors_and_other_array_likes():
    x = torch.from_numpy(noise(3, 20, 24))
    assert (open_images(x).pixels[..., 0] == noise(3, 20, 24)).all()
    weights = torch.rand(3, 20, 24, requires_grad=True)
    assert (open_images(weights).pixels[..., 0] == np.rint(weights.detach().double().numpy() * 255)).all()

    class Wrapped:
        def __array__(self, dtype=None, copy=None):
            return noise(3, 20, 24)

    assert (open_images(Wrapped()).pixels[..., 0] == noise(3, 20, 24)).all()
    refused(torch.zeros(3, 20, 24, dtype=torch.bfloat16), "Tensor", "float32")


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, ">f4"])
def test_floats_from_0_to_1(dtype):
    x = np.linspace(0, 1, 2 * 16 * 16).reshape(2, 16, 16).astype(dtype)
    images = open_images(x)
    assert images.value_range == (0.0, 1.0)
    assert (images.pixels[..., 0] == np.rint(x.astype(np.float64) * 255)).all()
    half = open_images(x / 2)  # still 0 to 1, not stretched
    assert half.value_range == (0.0, 1.0) and half.pixels.max() == 128


def test_other_floats_by_their_range():
    x = np.linspace(-3, 7, 2 * 16 * 16).reshape(2, 16, 16)
    images = open_images(x)
    assert images.value_range == (-3.0, 7.0)
    assert (images.pixels.min(), images.pixels.max()) == (0, 255)
    again = open_images(np.array([-9, -3, 2, 7, 90.0]).repeat(64).reshape(1, 20, 16), value_range=images.value_range)
    assert again.value_range == (-3.0, 7.0)
    assert again.pixels[0, ::4, 0, 0].tolist() == [0, 0, 128, 255, 255]


@pytest.mark.parametrize("value", [0.0, 0.5, 1.0, 5.0, -2.0, 1e300])
def test_constant_floats(value: float):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        images = open_images(np.full((2, 16, 16), value))
        assert (images.pixels == (np.rint(value * 255) if 0 <= value <= 1 else 0)).all()
        open_images(np.full((2, 16, 16), value), value_range=images.value_range)


def test_shares_given_to_a_model_of_bytes_are_refused():
    refused(np.full((2, 16, 16), 0.5), "X * 255", value_range=(0.0, 255.0))
    refused(np.linspace(0, 1, 512).reshape(2, 16, 16), "3.5 to 250 is expected: use X * 250", value_range=(3.5, 250.0))
    refused(np.linspace(-1, 1, 512).reshape(2, 16, 16), "use (X + 1) * 127.5", value_range=(0.0, 255.0))
    assert open_images(np.zeros((2, 16, 16)), value_range=(0.0, 255.0)).pixels.max() == 0
    assert (open_images(np.full((2, 16, 16), 77.0), value_range=(0.0, 255.0)).pixels == 77).all()


@pytest.mark.parametrize("value_range", [(0.0, 1.0), (-1.0, 1.0)])
def test_floats_of_another_range_than_was_fitted_are_refused(value_range, monkeypatch):
    """Also part by part; single values that stick out are cut off."""
    monkeypatch.setattr(arrays, "CHUNK_VALUES", 2 * 400)
    x = noise(5, 20, 20).astype(np.float32)
    refused(x, "0 to 255, on average 12", f"{value_range[0]:g} to 1 is expected", value_range=value_range)
    refused(-x, "0, on average -12", value_range=value_range)
    x /= 255
    x[3, 4, 5] = 99
    assert open_images(x, value_range=value_range).pixels[3, 4, 5, 0] == 255


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (noise(20), ["(20,)", "N x H x W"]),
        (noise(20, 64), ["(20, 64)", "X[None]", "reshape"]),
        (noise(2, 2, 20, 20, 3), ["(2, 2, 20, 20, 3)"]),
        (noise(20, 24, 3), ["one image", "X[None]"]),
        (noise(5, 3, 20, 20), ["X.transpose(0, 2, 3, 1)"]),
        (noise(5, 20, 20, 7), ["(5, 20, 20, 7)", "1 to 4 channels"]),
        (np.zeros((0, 20, 20), np.uint8), ["no images"]),
        (np.zeros((3, 0, 20), np.uint8), ["no pixels"]),
        (np.zeros((3, 20, 20, 0), np.uint8), ["no pixels"]),
        (np.array(3.0), ["()"]),
        (noise(3, 20, 20).astype(np.int64), ["int64", "0 to 255", "X.astype(np.uint8)"]),
        (noise(3, 20, 20).astype(np.uint16) * 9, ["uint16", "X.astype(np.float32)"]),
        (noise(3, 20, 20) > 9, ["bool", "* 255"]),
        (noise(3, 20, 20).astype(complex), ["complex"]),
        (noise(3, 20, 20).astype(object), ["object"]),
        (np.full((3, 20, 20), "a"), ["<U1"]),
    ],
)
def test_arrays_that_are_no_images(array, words):
    refused(array, *words)


def test_the_advice_for_wrong_arrays_works():
    assert open_images(noise(20, 24, 3)[None]).pixels.shape == (1, 20, 24, 3)
    assert open_images(noise(5, 3, 20, 24).transpose(0, 2, 3, 1)).pixels.shape == (5, 20, 24, 3)
    assert open_images((noise(3, 20, 20).astype(np.uint16) * 9).astype(np.float32)).value_range[1] > 255


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("value_range", [None, (0.0, 1.0)])
def test_values_that_are_not_finite(value, value_range, monkeypatch):
    monkeypatch.setattr(arrays, "CHUNK_VALUES", 2 * 400)
    x = np.zeros((5, 20, 20), np.float32)
    x[3, 4, 5] = x[3, 7, 0] = x[4, 0, 0] = value
    refused(x, "3 of 2000 values", "X[3, 4, 5]", value_range=value_range)


# ---- files of arrays that are not what they seem -------------------------------------------------------


class Booby:
    """Unpickling it writes a file."""

    def __init__(self, target: Path):
        self.target = target

    def __reduce__(self):
        return Path.touch, (self.target,)


def test_nothing_is_unpickled(tmp_path: Path):
    trap = tmp_path / "sprung"
    objects = np.array([Booby(trap)], dtype=object)
    np.savez(tmp_path / "objects.npz", images=objects)
    np.savez(tmp_path / "labels.npz", images=noise(1, 20, 20), labels=objects)
    np.save(tmp_path / "objects.npy", objects)
    (tmp_path / "pickle.npy").write_bytes(pickle.dumps(Booby(trap)))
    (tmp_path / "pickle.npz").write_bytes(pickle.dumps(Booby(trap)))
    for name in ("objects.npz", "labels.npz", "objects.npy", "pickle.npy", "pickle.npz"):
        refused(tmp_path / name, name, "Python objects", "np.save")
        with pytest.raises(InputError, match="Python objects"):
            read_labels(tmp_path / name, ["0"]) if name != "objects.npz" else open_images(tmp_path / name)
    assert not trap.exists()
    pickle.loads((tmp_path / "pickle.npy").read_bytes())
    assert trap.exists()  # the trap works


def test_damaged_arrays_are_refused(tmp_path: Path):
    np.save(tmp_path / "cut.npy", noise(4, 20, 20))
    np.savez_compressed(tmp_path / "cut.npz", images=noise(4, 20, 20))
    np.savez_compressed(tmp_path / "flipped.npz", images=noise(4, 20, 20))
    for name in ("cut.npy", "cut.npz"):
        (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:-400])
    whole = bytearray((tmp_path / "flipped.npz").read_bytes())
    whole[200:300] = bytes(100)
    (tmp_path / "flipped.npz").write_bytes(whole)
    (tmp_path / "empty.npy").write_bytes(b"")
    (tmp_path / "text.npz").write_text("hello")
    for name in ("cut.npy", "cut.npz", "flipped.npz", "empty.npy", "text.npz"):
        refused(tmp_path / name, name, "damaged")


# ---- labels for evaluation -----------------------------------------------------------------------------

NAMES = ["cat/1.png", "dog/2.png", "dog/3.png"]


def write(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_labels_from_csv_in_the_order_of_names(tmp_path: Path):
    text = "id,path,label\n7,dog/3.png,hund\n8,./cat/1.png, katze \n9,other.png,x\n1,dog/2.png,hund\n1,dog/2.png,hund\n"
    assert read_labels(write(tmp_path / "a.csv", text), NAMES).tolist() == ["katze", "hund", "hund"]


def test_labels_from_csv_as_excel_writes_it(tmp_path: Path):
    text = b"\xef\xbb\xbfpath, label\r\ncat/1.png,3\r\ndog/2.png,-1\r\ndog/3.png,0\r\n"
    labels = read_labels(str(write(tmp_path / "a.csv", text)), NAMES)
    assert labels.tolist() == [3, -1, 0] and labels.dtype.kind == "i"


def test_labels_with_leading_zeros_stay_apart(tmp_path: Path):
    text = "path,label\ncat/1.png,01\ndog/2.png,1\ndog/3.png,1\n"
    assert read_labels(write(tmp_path / "a.csv", text), NAMES).tolist() == ["01", "1", "1"]


def test_labels_for_odd_names(tmp_path: Path):
    names = ["line\nbreak.png", os.fsdecode(b"latin\xe9.png"), 'a,"b".png']
    text = b'path,label\n"line\nbreak.png",a\nlatin\xe9.png,b\n"a,""b"".png",c\n'
    assert read_labels(write(tmp_path / "a.csv", text), names).tolist() == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["[]", "path,label"]),
        ("cat/1.png,3\n", ["['cat/1.png', '3']", "path,label"]),
        ("path;label\ncat/1.png;3\n", ["['path;label']"]),
        ("path,label\n", ["3 of 3", "'cat/1.png', 'dog/2.png', 'dog/3.png'"]),
        ("path,label\ncat/1.png,3\ndog/2.png,\ndog/3.png\n", ["2 of 3", "dog/2.png"]),
        ("path,label\ncat/1.png,3\ncat/1.png,4\n", ["'cat/1.png' two labels, '3' and '4'", "line 3"]),
        ("path,label\n" + "a" * 200_000 + ",3\n", ["CSV"]),
    ],
)
def test_csv_that_cannot_be_used(tmp_path: Path, text: str, words: list[str]):
    with pytest.raises(InputError) as caught:
        read_labels(write(tmp_path / "a.csv", text), NAMES)
    for word in ["a.csv", *words]:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        (np.array([3, 1, 2], np.uint8), [3, 1, 2]),
        (np.array([[3], [1], [2]]), [3, 1, 2]),
        (np.array([3.0, 1.0, 2.0]), [3, 1, 2]),
        (np.array(["a", "b", "c"]), ["a", "b", "c"]),
    ],
)
def test_labels_from_arrays(tmp_path: Path, labels: np.ndarray, expected: list):
    np.save(tmp_path / "a.npy", labels)
    np.savez(tmp_path / "y.npz", y=labels, x=noise(3, 8, 8))
    np.savez(tmp_path / "labels.npz", labels=labels)
    for name in ("a.npy", "y.npz", "labels.npz"):
        assert read_labels(tmp_path / name, NAMES).tolist() == expected


def test_label_arrays_that_cannot_be_used(tmp_path: Path):
    np.save(tmp_path / "long.npy", np.arange(4))
    np.save(tmp_path / "half.npy", np.array([0.5, 1, 2]))
    np.savez(tmp_path / "other.npz", target=np.arange(3))
    for name, words in (("long.npy", "expected 3"), ("half.npy", "float64"), ("other.npz", "target")):
        with pytest.raises(InputError, match=words):
            read_labels(tmp_path / name, NAMES)
    with pytest.raises(InputError, match=r"no file of labels .*none\.csv"):
        read_labels(tmp_path / "none.csv", NAMES)


def test_labels_from_folders():
    assert read_labels("folders", NAMES).tolist() == ["cat", "dog", "dog"]
    assert read_labels("folders", ["a/x/1.png", "b/x/2.png", "3.png"]).tolist() == ["a", "b", "."]
    assert read_labels("folders", ["t/a/x/1.png", "t/a/2.png", "t/b/3.png"]).tolist() == ["a", "a", "b"]
    for names in (["dog/2.png", "dog/3.png"], ["0", "1"]):
        with pytest.raises(InputError, match="2 images, all in one folder"):
            read_labels("folders", names)
