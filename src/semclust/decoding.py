"""One encoded image: what its header says, and its pixels at a wanted size.

Shapes: H x W pixels, c channels.
"""

import errno
import io
import math
import os
import stat
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np
import PIL
from PIL import Image, ImageOps, UnidentifiedImageError

from semclust.arrays import Size
from semclust.errors import in_short
from semclust.sources import Block, Shape

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".tif", ".tiff", ".bmp")
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "TIFF", "BMP")  # Pillow knows more, some of which run other programs
DRAFT = 1.75  # times the wanted size that a JPEG must keep; just under 2, so that 500 x 375 is halved for 96 x 96
MAY_TURN = {"exif", "xmp", "XML:com.adobe.xmp", "Raw profile type exif"}  # where Pillow looks for an orientation
VERSION = 1  # of the pixels that decode() gives: a new one makes older caches stale

# A file, a piece (offset, length) of one, or a function that gives an image and its label.
Place = str | tuple[str, int, int] | Callable[[], tuple[Image.Image, int | str | None]]
Header = tuple[Size, bool]  # H and W as seen upright, and whether the image is grey

LASTING = {  # errors of the file system that come again until the file's own name, mode or time changes
    errno.ENOENT,
    errno.EACCES,
    errno.EPERM,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.EISDIR,
    errno.ENOTDIR,
}


def pixels_depend_on() -> tuple[object, ...]:
    """What decides on the pixels of an image, beside its file: part of every stamp in the cache."""
    return VERSION, PIL.__version__, Image.MAX_IMAGE_PIXELS


def read_headers(places: Sequence[Place]) -> list[Header | str]:
    """Of each image its header, or the reason why it has none."""

    def attempt(place: Place) -> Header | str:
        try:
            return read_header(place)
        except Exception as error:  # a damaged file can make Pillow raise almost anything
            return reason(error)

    return [attempt(place) for place in places]


def decode_block(places: Sequence[Place], shape: Shape) -> Block:
    """All images of ``places`` that can be read, at one shape."""
    H, W, c = shape
    rows = np.empty((len(places), H, W, c), np.uint8)
    block, n, labels = Block(rows), 0, []
    for i, place in enumerate(places):
        try:
            label = None
            if callable(place):
                image, label = place()
                rows[n] = to_pixels(image, (H, W), c)
            else:
                rows[n] = decode(place, (H, W), c)
            labels.append(label)
            n += 1
        except Exception as error:
            block.skipped.append((i, reason(error)))
            passing = isinstance(error, OSError) and error.errno is not None and error.errno not in LASTING
            block.lasting &= not passing and not isinstance(error, MemoryError)
    block.rows = rows[:n]
    block.labels = labels if places and callable(places[0]) else None
    return block


def reason(error: Exception) -> str:
    """A few words on one line, without the path."""
    match error:
        case FileNotFoundError():
            return "no such file, or a link that leads nowhere"
        case PermissionError():
            return "no permission to read it"
        case UnidentifiedImageError():
            return "not an image in a format that is read here"
        case Image.DecompressionBombError():
            return f"more pixels than PIL.Image.MAX_IMAGE_PIXELS = {Image.MAX_IMAGE_PIXELS} allows"
    return in_short(error)


def open_image(place: str | tuple[str, int, int] | bytes) -> Image.Image:
    """``place``: a file, a piece (offset, length) of one, or what such a file holds."""
    if isinstance(place, bytes):
        if not place:
            raise ValueError("empty file")
        image = Image.open(io.BytesIO(place), formats=FORMATS)
    elif isinstance(place, str):
        status = os.stat(place)
        if not stat.S_ISREG(status.st_mode):  # to open a pipe would wait for ever
            raise ValueError("not a regular file")
        if status.st_size == 0:
            raise ValueError("empty file")
        image = Image.open(place, formats=FORMATS)
    else:
        path, offset, length = place
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size < offset + length:  # before so much memory is asked for
                raise ValueError("the archive ends inside it")
            file.seek(offset)
            content = file.read(length)
        return open_image(content)
    if Image.MAX_IMAGE_PIXELS is not None and image.width * image.height > Image.MAX_IMAGE_PIXELS:
        image.close()
        raise Image.DecompressionBombError  # Pillow itself only warns up to twice the limit
    return image


def read_header(place: Place) -> Header:
    """H and W as seen upright, and whether the image is grey, without decoding it."""
    with place()[0] if callable(place) else open_image(place) as image:
        size = image.width, image.height
        with suppress(Exception):  # damaged metadata does not make the pixels unreadable
            orientation = Image.Image.getexif(image).get(0x0112, 1)  # PngImageFile's own decodes the whole image
            if orientation >= 5 and image.format != "TIFF":  # Pillow turns a TIFF by itself
                size = image.height, image.width
        return size[::-1], image.mode in ("1", "L", "LA", "F") or image.mode.startswith("I")


def decode(place: str | tuple[str, int, int], size: Size, channels: int) -> np.ndarray:
    """The image in a file (of several, the first) as H x W x c bytes: scaled to cover ``size``, its centre cut out."""
    with open_image(place) as opened:
        enough = math.ceil(DRAFT * max(size))
        if min(opened.size) >= 2 * enough:
            opened.draft(None, (enough, enough))  # lets a JPEG be decoded at 1/2, 1/4 or 1/8
        return to_pixels(opened, size, channels)


def to_pixels(opened: Image.Image, size: Size, channels: int) -> np.ndarray:
    H, W = size
    opened.load()
    if not MAY_TURN.isdisjoint(opened.info):
        with suppress(Exception):  # damaged metadata, again
            ImageOps.exif_transpose(opened, in_place=True)
    image, mode = _on_white(_in_bytes(opened)), "L" if channels == 1 else "RGB"
    if image.mode != mode:  # for a small image, each step that only copies takes a tenth of the time
        image = image.convert(mode)
    if image.size == (W, H):
        return np.frombuffer(image.tobytes(), np.uint8).reshape(H, W, channels)
    scale = min(image.width / W, image.height / H)
    left, top = max(0.0, (image.width - W * scale) / 2), max(0.0, (image.height - H * scale) / 2)
    box = (left, top, image.width - left, image.height - top)
    image = image.resize((W, H), Image.Resampling.BILINEAR, box, reducing_gap=2.0)
    return np.frombuffer(image.tobytes(), np.uint8).reshape(H, W, channels)


def _in_bytes(image: Image.Image) -> Image.Image:
    """Integers of 16 bits or more and floats, which Pillow would only clip, as 8 bits a pixel."""
    if image.mode != "F" and not image.mode.startswith("I"):
        return image
    values = np.asarray(image)
    if image.mode != "F":
        values = values // 256
    elif not np.isfinite(values).all():
        raise ValueError("holds NaN or infinite values")
    elif values.min() >= 0 and values.max() <= 1:
        values = values * 255
    return Image.fromarray(np.rint(values).clip(0, 255).astype(np.uint8))


def _on_white(image: Image.Image) -> Image.Image:
    if not image.has_transparency_data:
        return image
    image = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
