"""Open a source of images, whatever it is, as one array of bytes.

    images = open_images("photos/")             # a folder, with all folders inside it
    images = open_images("scans.npz", size=32)  # or .npy, one image, a list of images, an array, "digits"
    images.pixels                               # N x H x W x c, uint8
    images.names, images.skipped                # one name for each row; what could not be read, and why

Shapes: N images, H x W pixels, c channels.
"""

import math
import os
import re
import stat
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from semclust.arrays import (
    BYTE_RANGE,
    Range,
    Size,
    check_array,
    choose_range,
    chunks,
    numpy_file,
    resize,
    scale,
    with_channels,
)
from semclust.errors import InputError, in_short
from semclust.truth import LABEL_KEYS, check_labels

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".tif", ".tiff", ".bmp")
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "TIFF", "BMP")  # Pillow knows more, some of which run other programs
ACCEPTED = (
    f"a folder of images, an image file ({' '.join(s[1:] for s in SUFFIXES)}), a list of image files, a .npy or .npz "
    'file, an array (N x H x W or N x H x W x c), or "digits"'
)
IMAGE_KEYS = ("images", "x", "X")  # in a .npz
SMALLEST, LARGEST = 16, 96  # of the shorter side, where no size is asked for
FILES_AT_ONCE = 512  # handed to the threads: bounds the memory for waiting work, and the wait after Ctrl-C

AskedSize = int | Size | None
OnImage = Callable[[int], None] | None


@dataclass
class Images:
    """What a source gave. ``pixels`` may share memory with the array or file it came from: do not write to it."""

    pixels: np.ndarray  # N x H x W x c, uint8
    names: list[str]  # one for each image: its path (with /) relative to the folder, or its row number
    source: str  # short name for a run folder
    labels: np.ndarray | None = None  # only for evaluation; training never sees them
    skipped: list[tuple[str, str]] = field(default_factory=list)  # name and reason
    value_range: Range = BYTE_RANGE  # what 0 and 255 stand for, where the source held floats
    folder: Path | None = None  # of the files, where the names are files

    def file(self, row: int) -> Path | None:
        """The original file of a row; None where the images are not files."""
        return None if self.folder is None else self.folder / self.names[row]


def open_images(
    data: Any,
    *,
    size: AskedSize = None,
    channels: int | None = None,
    value_range: Range | None = None,
    on_image: OnImage = None,
) -> Images:
    """Read all images of ``data``.

    size: side of a square or (H, W). None: the images' own, see ``choose_size``.
    channels: None: 1 if all files are grey, else 3; arrays keep theirs.
    value_range: values of a float array that become 0 and 255; values outside are clipped. None: 0 to 1 if
        all lie there, else the lowest and the highest. Bytes and files have no use for it.
    on_image: called after each file with the number of files in all.

    The word "digits" is scikit-learn's set of digits; a folder of that name is "./digits".
    """
    _check_options(size, channels, value_range)
    if isinstance(data, str) and data == "digits":
        from sklearn.datasets import load_digits

        digits = load_digits()
        return _from_array(digits.images, "digits", size, channels, (0.0, 16.0), digits.target)
    if isinstance(data, (list, tuple)):
        if not data or not all(isinstance(item, (str, os.PathLike)) for item in data):
            raise InputError("A list must hold paths of images, one or more; for a list of arrays use np.stack(X).")
        names = [Path(os.fsdecode(item)).as_posix() for item in data]
        return _from_files(names, Path(), "images", size, channels, on_image)
    if not isinstance(data, (str, os.PathLike)):
        return _from_array(_as_array(data), "array", size, channels, value_range)

    text = os.fsdecode(data)
    path = Path(text)
    suffix = path.suffix.lower()
    if os.path.isdir(text):
        names, unlisted = _image_files(path)
        if not names:
            also = f" Folders that cannot be listed: {unlisted}." if unlisted else ""
            raise InputError(f"The folder {text!r} holds no file that ends in {', '.join(SUFFIXES)}.{also}")
        images = _from_files(names, path, path.resolve().name or "images", size, channels, on_image)
        images.skipped = unlisted + images.skipped
        return images
    if os.path.isfile(text) and suffix in SUFFIXES:
        return _from_files([path.name], path.parent, path.stem, size, channels, on_image)
    if os.path.isfile(text) and suffix in (".npy", ".npz"):
        array, labels = _load_images(path)
        return _from_array(array, path.stem, size, channels, value_range, labels)
    if os.path.isfile(text):
        problem = f"files that end in {path.suffix!r} are not read"
    elif scheme := re.match(r"([\w-]{2,}):", text):  # two letters or more, for C:\ is a drive
        problem = f"the scheme {scheme[1]!r} is unknown"
    else:
        problem = "there is no such file or folder"
    raise InputError(f"Cannot open {text!r}: {problem}. Expected {ACCEPTED}.")


def _check_options(size: AskedSize, channels: int | None, value_range: Range | None) -> None:
    sides = size if isinstance(size, (tuple, list)) else (1 if size is None else size,) * 2
    if len(sides) != 2 or not all(isinstance(side, (int, np.integer)) and side >= 1 for side in sides):
        raise InputError(f"size={size!r}: expected a side in pixels, or (H, W).")
    if channels not in (None, 1, 2, 3, 4):
        raise InputError(f"channels={channels!r}: expected 1 (grey) or 3 (RGB).")
    low, high = value_range or BYTE_RANGE
    if not -math.inf < low <= high < math.inf:
        raise InputError(f"value_range={value_range!r}: expected two finite numbers, the lower one first.")


def choose_size(shapes: Sequence[Size], asked: AskedSize) -> Size:
    """The H and W to which images of these shapes are brought.

    Where nothing is asked for: images of one shape keep it if the shorter side has 16 to 96 pixels, are enlarged
    by a whole factor if it has fewer, and shrunk to 96 if it has more. Images of several shapes become squares.
    """
    if asked is not None:
        H, W = asked if isinstance(asked, (tuple, list)) else (asked, asked)
        return int(H), int(W)
    if len(set(shapes)) > 1:
        side = int(np.clip(np.median([min(shape) for shape in shapes]), SMALLEST, LARGEST))
        return side, side
    H, W = shapes[0]
    shorter = min(H, W)
    factor = LARGEST / shorter if shorter > LARGEST else math.ceil(SMALLEST / shorter)
    return round(H * factor), round(W * factor)


# ---- files -----------------------------------------------------------------------------------------


def _image_files(folder: Path) -> tuple[list[str], list[tuple[str, str]]]:
    """Sorted names of the image files under ``folder``; folders that cannot be listed, with the reason."""
    names: list[str] = []
    unlisted: list[tuple[str, str]] = []
    seen: set[tuple[int, int]] = set()
    waiting = deque([folder])
    while waiting:
        here = waiting.popleft()
        try:
            status = here.stat()
            inside = [] if (status.st_dev, status.st_ino) in seen else os.listdir(here)
            seen.add((status.st_dev, status.st_ino))
        except OSError as error:
            unlisted.append((here.relative_to(folder).as_posix(), _reason(error)))
            continue
        for path in (here / name for name in inside if not name.startswith(".")):
            if os.path.isdir(path):
                # Links wait until all real folders are read: a folder goes by its real name, and a loop ends.
                (waiting.append if path.is_symlink() else waiting.appendleft)(path)
            elif path.suffix.lower() in SUFFIXES:
                names.append(path.relative_to(folder).as_posix())
    return sorted(names), sorted(unlisted)


def _from_files(
    names: list[str], folder: Path, source: str, size: AskedSize, channels: int | None, on_image: OnImage
) -> Images:
    """First all headers, which tell the size and channels to aim at, then the pixels."""
    if channels not in (None, 1, 3):
        raise InputError(f"channels={channels}: image files can be read as 1 (grey) or 3 (RGB) channels.")
    headers = _in_threads(lambda name: _read_header(folder / name), names)
    skipped = {name: why for name, why in zip(names, headers, strict=True) if isinstance(why, str)}
    _complain_if_most_are(skipped, names)
    known = [header for header in headers if not isinstance(header, str)]
    H, W = choose_size([shape for shape, _ in known], size)
    c = channels or (1 if all(grey for _, grey in known) else 3)

    readable = [name for name in names if name not in skipped]
    pixels = np.empty((len(readable), H, W, c), np.uint8)

    def fill(row: int) -> None:
        pixels[row] = decode(folder / readable[row], (H, W), c)

    reasons = _in_threads(fill, range(len(readable)), on_image)
    skipped |= {name: why for name, why in zip(readable, reasons, strict=True) if why}
    _complain_if_most_are(skipped, names)
    kept = [row for row, why in enumerate(reasons) if not why]
    for to, row in enumerate(kept):  # close the gaps in place: a second array may not fit into memory
        if to != row:
            pixels[to] = pixels[row]
    left_out = [(name, skipped[name]) for name in names if name in skipped]
    return Images(pixels[: len(kept)], [readable[row] for row in kept], source, skipped=left_out, folder=folder)


def _in_threads(work: Callable[[Any], Any], items: Sequence[Any], on_image: OnImage = None) -> list[Any]:
    """``work`` of every item, in order; a string with the reason stands for one that raised."""

    def attempt(item: Any) -> Any:
        try:
            return work(item)
        except Exception as error:  # a damaged file can make Pillow raise almost anything
            return _reason(error)

    results = []
    with ThreadPoolExecutor(os.cpu_count()) as pool, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of damaged metadata; what matters is in the list of skipped files
        for start in range(0, len(items), FILES_AT_ONCE):
            for result in pool.map(attempt, items[start : start + FILES_AT_ONCE]):
                results.append(result)
                if on_image:
                    on_image(len(items))
    return results


def _reason(error: Exception) -> str:
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


def _complain_if_most_are(skipped: dict[str, str], names: list[str]) -> None:
    bad = [name for name in names if name in skipped]
    if 2 * len(bad) > len(names):
        first = "; ".join(f"{name!r}: {skipped[name]}" for name in bad[:3]) + ("; ..." if len(bad) > 3 else "")
        raise InputError(
            f"{len(bad)} of {len(names)} image files cannot be read ({first}). "
            "At least half must be readable: repair these files, or take them out."
        )


def _open(path: Path) -> Image.Image:
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):  # to open a pipe would wait for ever
        raise ValueError("not a regular file")
    if status.st_size == 0:
        raise ValueError("empty file")
    image = Image.open(path, formats=FORMATS)
    if Image.MAX_IMAGE_PIXELS is not None and image.width * image.height > Image.MAX_IMAGE_PIXELS:
        image.close()
        raise Image.DecompressionBombError  # Pillow itself only warns up to twice the limit
    return image


def _read_header(path: Path) -> tuple[Size, bool]:
    """(H, W) as seen upright, and whether the image is grey, without decoding it."""
    with _open(path) as image:
        size = image.width, image.height
        with suppress(Exception):  # damaged metadata does not make the pixels unreadable
            orientation = Image.Image.getexif(image).get(0x0112, 1)  # PngImageFile's own decodes the whole image
            if orientation >= 5 and image.format != "TIFF":  # Pillow turns a TIFF by itself
                size = image.height, image.width
        return size[::-1], image.mode in ("1", "L", "LA", "F") or image.mode.startswith("I")


def decode(path: Path, size: Size, channels: int) -> np.ndarray:
    """The image in a file (of several, the first) as H x W x c bytes: scaled to cover ``size``, its centre cut out."""
    H, W = size
    with _open(path) as opened:
        opened.draft(None, (2 * max(size), 2 * max(size)))  # lets a JPEG be decoded at 1/2, 1/4 or 1/8
        opened.load()
        with suppress(Exception):  # damaged metadata, again
            ImageOps.exif_transpose(opened, in_place=True)
        image = _on_white(_in_bytes(opened)).convert("L" if channels == 1 else "RGB")
    scale = min(image.width / W, image.height / H)
    left, top = max(0.0, (image.width - W * scale) / 2), max(0.0, (image.height - H * scale) / 2)
    box = (left, top, image.width - left, image.height - top)
    image = image.resize((W, H), Image.Resampling.BILINEAR, box, reducing_gap=2.0)
    return np.asarray(image).reshape(H, W, channels)


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


# ---- arrays ----------------------------------------------------------------------------------------


def _as_array(data: Any) -> np.ndarray:
    if not hasattr(data, "__array__"):
        raise InputError(f"Images cannot be read from {type(data).__name__}; expected {ACCEPTED}.")
    try:
        return np.asarray(data.detach().cpu() if hasattr(data, "detach") else data)
    except Exception as error:  # whatever a foreign __array__ raises
        raise InputError(
            f"{type(data).__name__} cannot be read as an array ({error}); hand over a NumPy array of uint8 or float32."
        ) from error


def _from_array(
    array: np.ndarray, source: str, size: AskedSize, channels: int | None, value_range: Range | None, labels: Any = None
) -> Images:
    check_array(array)
    value_range = BYTE_RANGE if array.dtype == np.uint8 else choose_range(array, value_range)
    n, H, W, c = (array := array[..., None] if array.ndim == 3 else array).shape
    size, channels = choose_size([(H, W)], size), channels or c
    if (c, channels) not in {(c, c), (1, 3), (3, 1), (4, 3), (4, 1)}:
        raise InputError(f"Images of {c} channels cannot be turned into {channels}; hand over {channels} channels.")
    labels = None if labels is None else check_labels(labels, n, source)
    names = [str(row) for row in range(n)]
    if array.dtype == np.uint8 and (H, W, c) == (*size, channels):
        return Images(np.ascontiguousarray(array), names, source, labels)  # a mapped file stays on disk
    pixels = np.empty((n, *size, channels), np.uint8)
    for rows in chunks(n, max(H * W * c, math.prod(size) * channels)):
        part = array[rows] if array.dtype == np.uint8 else scale(array[rows], value_range)
        pixels[rows] = resize(with_channels(part, channels), size)
    return Images(pixels, names, source, labels, value_range=value_range)


def _load_images(path: Path) -> tuple[np.ndarray, np.ndarray | None]:
    """Images and, where a .npz has them, labels."""
    with numpy_file(path) as loaded:
        if isinstance(loaded, np.ndarray):
            return loaded, None
        keys = [key for key in IMAGE_KEYS if key in loaded] or [key for key in loaded if key not in LABEL_KEYS]
        if not keys or (len(keys) > 1 and keys[0] not in IMAGE_KEYS):
            raise InputError(
                f"{str(path)!r} holds the arrays {list(loaded)}; expected one named images, x or X, or a single one."
            )
        return loaded[keys[0]], next((loaded[key] for key in LABEL_KEYS if key in loaded), None)


# ---- stand-in ----------------------------------------------------------------------------------------


def stream_images(
    data: Any,
    *,
    size: AskedSize,
    channels: int,
    value_range: Range | None = None,
    on_image: OnImage = None,
    chunk: int = 1024,
) -> Iterator[Images]:
    """The images of ``data`` in parts of at most ``chunk``."""
    images = open_images(data, size=size, channels=channels, value_range=value_range, on_image=on_image)
    for start in range(0, len(images.names), chunk):
        rows = slice(start, start + chunk)
        labels = None if images.labels is None else images.labels[rows]
        skipped = [] if start else images.skipped
        part = images.pixels[rows], images.names[rows], images.source, labels, skipped
        yield Images(*part, images.value_range, images.folder)
