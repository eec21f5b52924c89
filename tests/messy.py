"""A folder as people really have them: every format that is read, every defect that is skipped, and odd names."""

import io
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

ODD_NAMES = (  # without the ending; some file systems take fewer of them
    b"<img src=x onerror=alert(1)>",
    b"line\nbreak",
    b"carriage\rreturn",
    b"latin\xe9",
    "köln 🦊".encode(),
    b"comma, \"quotes\" and 'apostrophes'",
    b"-k 3",
    b" spaces ",
    b"=1+1",
    b"100%s {0} $HOME `ls`",
    b"semi;colon\ttab",
    b"long" * 50,
    b"two.dots.png",
    b"&lt;b&gt;",
)
ORIENTATION = 0x0112


def make_messy_folder(folder: Path, n: int, seed: int = 0) -> tuple[list[str], list[str]]:
    """Write ``n`` files with the endings of images, nested three folders deep.

    Returns the names (with / , relative to ``folder``) of those that can be read and of those that cannot, each sorted.
    About one of eight is bad. Beside them lie files that are no images, hidden files, and folders linked in a loop.
    """
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    good: list[str] = []
    bad: list[str] = []
    for i in range(n):
        defect = DEFECTS[(i // 8) % len(DEFECTS)] if i % 8 == 7 else None
        write = defect or FORMATS[(i - i // 8) % len(FORMATS)]
        place = (b"", b"holiday/", b"holiday/2021/beach/", b"odd names/")[i % 4]
        name = place + _stem(i) + write.__name__.rsplit("_", 1)[-1].encode().join((b".", b""))
        if i % 3 == 0:
            name = name[: name.rindex(b".")] + name[name.rindex(b".") :].upper()
        path = os.fsencode(folder) + b"/" + name
        os.makedirs(os.path.dirname(path), exist_ok=True)
        try:
            write(path, _picture(rng, i))
        except OSError:  # a name that this file system refuses
            assert not os.path.lexists(path), path
            name = place + b"%06d.png" % i
            path, defect = os.fsencode(folder) + b"/" + name, None
            plain_png(path, _picture(rng, i))
        readable = defect is None or (defect is forbidden_png and os.access(path, os.R_OK))  # root may read all
        (good if readable else bad).append(os.fsdecode(name))
    (folder / "notes.txt").write_text("no image")
    (folder / ".hidden.jpg").write_bytes(b"")
    (folder / ".thumbnails").mkdir(exist_ok=True)
    (folder / ".thumbnails" / "x.png").write_bytes(b"")
    for link, target in (("loop", folder), ("gone", folder / "no such folder"), ("itself", folder / "itself")):
        if not (folder / link).is_symlink():
            (folder / link).symlink_to(target, target_is_directory=True)
    return sorted(good), sorted(bad)


def _stem(i: int) -> bytes:
    return ODD_NAMES[i // 5 % len(ODD_NAMES)] + b"%d" % i if i % 5 == 4 else b"IMG_%06d" % i


def _picture(rng: np.random.Generator, i: int) -> np.ndarray:
    """H x W x 3 bytes, 24 to 80 pixels a side: one of four colours and textures, with noise."""
    H, W = (int(side) for side in rng.integers(24, 81, 2))
    y, x = np.mgrid[:H, :W]
    wave = np.sin((x, y, x + y, x - y)[i % 4] / 3.0)[..., None]
    colour = np.array(((220, 60, 60), (60, 180, 60), (60, 90, 220), (210, 190, 60))[i % 4])
    return np.clip(colour + 50 * wave + rng.normal(0, 12, (H, W, 3)), 0, 255).astype(np.uint8)


def _save(path: bytes, image: Image.Image, kind: str, **options) -> None:
    with open(path, "w+b") as file:  # the writer of TIFF also reads
        image.save(file, kind, **options)


# ---- what can be read; the ending of the file is the last word of the name -----------------------------


def plain_jpg(path: bytes, pixels: np.ndarray) -> None:
    _save(path, Image.fromarray(pixels), "JPEG", quality=90)


def turned_jpeg(path: bytes, pixels: np.ndarray) -> None:
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    _save(path, Image.fromarray(np.ascontiguousarray(np.rot90(pixels))), "JPEG", exif=exif)


def grey_jpg(path: bytes, pixels: np.ndarray) -> None:
    _save(path, Image.fromarray(pixels).convert("L"), "JPEG")


def cmyk_jpg(path: bytes, pixels: np.ndarray) -> None:
    _save(path, Image.fromarray(pixels).convert("CMYK"), "JPEG")


def plain_png(path: bytes, pixels: np.ndarray) -> None:
    _save(path, Image.fromarray(pixels), "PNG")


def deep_png(path: bytes, pixels: np.ndarray) -> None:
    _save(path, Image.fromarray(pixels[..., 0].astype(np.uint16) * 257), "PNG")


def palette_png(path: bytes, pixels: np.ndarray) -> None:
    _save(path, Image.fromarray(pixels).quantize(32), "PNG", transparency=3)


def alpha_png(path: bytes, pixels: np.ndarray) -> None:
    _save(path, Image.fromarray(np.dstack([pixels, pixels[..., 1]])), "PNG")


def grey_alpha_png(path: bytes, pixels: np.ndarray) -> None:
    _save(path, Image.fromarray(np.ascontiguousarray(pixels[..., :2])), "PNG")


def bilevel_png(path: bytes, pixels: np.ndarray) -> None:
    _save(path, Image.fromarray(pixels).convert("1"), "PNG")


def plain_webp(path: bytes, pixels: np.ndarray) -> None:
    _save(path, Image.fromarray(pixels), "WEBP")


def animated_gif(path: bytes, pixels: np.ndarray) -> None:
    _save(path, Image.fromarray(pixels), "GIF", save_all=True, append_images=[Image.fromarray(255 - pixels)])


def pages_tiff(path: bytes, pixels: np.ndarray) -> None:
    _save(path, Image.fromarray(pixels), "TIFF", save_all=True, append_images=[Image.fromarray(255 - pixels)])


def deep_tif(path: bytes, pixels: np.ndarray) -> None:
    _save(path, Image.fromarray(pixels[..., 0].astype(np.uint16) * 257), "TIFF")


def plain_bmp(path: bytes, pixels: np.ndarray) -> None:
    _save(path, Image.fromarray(pixels), "BMP")


def misnamed_jpg(path: bytes, pixels: np.ndarray) -> None:
    """A PNG that says it is a JPEG: what counts is the content."""
    plain_png(path, pixels)


def linked_png(path: bytes, pixels: np.ndarray) -> None:
    hidden = os.path.join(os.path.dirname(path), b".original-%d" % zlib.crc32(path))
    plain_png(hidden, pixels)
    os.symlink(hidden, path)


# ---- what cannot ---------------------------------------------------------------------------------------


def truncated_jpg(path: bytes, pixels: np.ndarray) -> None:
    _cut(path, pixels, "JPEG")


def truncated_png(path: bytes, pixels: np.ndarray) -> None:
    _cut(path, pixels, "PNG")


def _cut(path: bytes, pixels: np.ndarray, kind: str) -> None:
    whole = io.BytesIO()
    Image.fromarray(pixels).save(whole, kind)
    with open(path, "wb") as file:
        file.write(whole.getvalue()[: len(whole.getvalue()) // 2])


def empty_gif(path: bytes, pixels: np.ndarray) -> None:
    open(path, "wb").close()


def text_jpg(path: bytes, pixels: np.ndarray) -> None:
    with open(path, "wb") as file:
        file.write(b"<html><script>alert(1)</script></html>" * 20)


def program_tif(path: bytes, pixels: np.ndarray) -> None:
    """PostScript, which Pillow would hand to another program."""
    with open(path, "wb") as file:
        file.write(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 20 20\n%%EndComments\n")


def bomb_png(path: bytes, pixels: np.ndarray) -> None:
    """A few bytes that claim to be 50,000 x 50,000 pixels."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", 50_000, 50_000, 8, 2, 0, 0, 0)
    with open(path, "wb") as file:
        file.write(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(99))))


def dangling_webp(path: bytes, pixels: np.ndarray) -> None:
    os.symlink(path + b".nowhere", path)


def circular_bmp(path: bytes, pixels: np.ndarray) -> None:
    os.symlink(path, path)


def pipe_tiff(path: bytes, pixels: np.ndarray) -> None:
    os.mkfifo(path)


def forbidden_png(path: bytes, pixels: np.ndarray) -> None:
    plain_png(path, pixels)
    os.chmod(path, 0)


FORMATS: tuple[Callable[[bytes, np.ndarray], None], ...] = (
    plain_jpg,
    plain_png,
    turned_jpeg,
    plain_webp,
    animated_gif,
    grey_jpg,
    pages_tiff,
    cmyk_jpg,
    deep_png,
    plain_bmp,
    palette_png,
    alpha_png,
    deep_tif,
    misnamed_jpg,
    grey_alpha_png,
    bilevel_png,
    linked_png,
)
DEFECTS: tuple[Callable[[bytes, np.ndarray], None], ...] = (
    truncated_jpg,
    empty_gif,
    text_jpg,
    bomb_png,
    dangling_webp,
    truncated_png,
    program_tif,
    circular_bmp,
    pipe_tiff,
    forbidden_png,
)
