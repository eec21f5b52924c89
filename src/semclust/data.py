"""Open a source of images, whatever it is, as one array of bytes.

    images = open_images("photos/")             # a folder, with all folders inside it
    images = open_images("scans.npz", size=32)  # or .npy, one image, a list of images, an array, "digits"
    images.pixels                               # N x H x W x c, uint8
    images.names, images.skipped                # one name for each row; what could not be read, and why

    read_labels("labels.csv", images.names)     # for evaluation only

Shapes: N images, H x W pixels, c channels.
"""

import csv
import math
import os
import re
import stat
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from semclust.errors import InputError

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".tif", ".tiff", ".bmp")
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "TIFF", "BMP")  # Pillow knows more, some of which run other programs
ACCEPTED = (
    f"a folder of images, an image file ({' '.join(s[1:] for s in SUFFIXES)}), a list of image files, a .npy or .npz "
    'file, an array (N x H x W or N x H x W x c), or "digits"'
)
IMAGE_KEYS, LABEL_KEYS = ("images", "x", "X"), ("labels", "y")
SMALLEST, LARGEST = 16, 96  # of the shorter side, where no size is asked for
BYTE_RANGE = (0.0, 255.0)
FILES_AT_ONCE = 512  # handed to the threads: bounds the memory for waiting work, and the wait after Ctrl-C
CHUNK_VALUES = 2**22  # array values converted at once

Size = tuple[int, int]  # H, W
AskedSize = int | Size | None
Range = tuple[float, float]
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
    on_image: called with the number of files done since the last call.

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
    return Images(pixels[: len(kept)], [readable[row] for row in kept], source, skipped=left_out)


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
                    on_image(1)
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
    text = " ".join((getattr(error, "strerror", None) or str(error)).split())[:120]
    return text if text and isinstance(error, (OSError, ValueError)) else f"{type(error).__name__} {text}".strip()


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
    _check_array(array)
    value_range = BYTE_RANGE if array.dtype == np.uint8 else _choose_range(array, value_range)
    n, H, W, c = (array := array[..., None] if array.ndim == 3 else array).shape
    size, channels = choose_size([(H, W)], size), channels or c
    if (c, channels) not in {(c, c), (1, 3), (3, 1), (4, 3), (4, 1)}:
        raise InputError(f"Images of {c} channels cannot be turned into {channels}; hand over {channels} channels.")
    labels = None if labels is None else _check_labels(labels, n, source)
    names = [str(row) for row in range(n)]
    if array.dtype == np.uint8 and (H, W, c) == (*size, channels):
        return Images(np.ascontiguousarray(array), names, source, labels)  # a mapped file stays on disk
    pixels = np.empty((n, *size, channels), np.uint8)
    for rows in _chunks(n, max(H * W * c, math.prod(size) * channels)):
        part = array[rows] if array.dtype == np.uint8 else _scale(array[rows], value_range)
        pixels[rows] = _resize(_with_channels(part, channels), size)
    return Images(pixels, names, source, labels, value_range=value_range)


def _check_array(array: np.ndarray) -> None:
    shape, dtype, hint = array.shape, array.dtype, ""
    if 0 in shape:
        raise InputError(f"An array of shape {shape} holds no {'pixels' if shape[0] else 'images'}; expected some.")
    if array.ndim not in (3, 4) or (array.ndim == 3 and shape[2] <= 4) or (array.ndim == 4 and shape[3] > 4):
        if array.ndim == 2:
            hint = " For one grey image use X[None]; for images flattened to rows, X.reshape(-1, H, W)."
        elif array.ndim == 3:
            hint = " This looks like one image (H x W x c): use X[None]."
        elif array.ndim == 4 and shape[1] <= 4:
            hint = " This looks like N x c x H x W: use X.transpose(0, 2, 3, 1)."
        raise InputError(f"An array of shape {shape}: expected N x H x W or N x H x W x c with 1 to 4 channels.{hint}")
    if dtype != np.uint8 and dtype.kind != "f":
        if dtype.kind == "b":
            hint = " Use X.astype(np.uint8) * 255."
        elif dtype.kind in "iu":
            low, high = array.min(), array.max()
            fits = low >= 0 and high <= 255
            use = "X.astype(np.uint8)" if fits else "X.astype(np.float32), which is scaled by its range"
            hint = f" The values are {low} to {high}: use {use}."
        raise InputError(f"An array of {dtype}: expected uint8 (0 to 255) or floats.{hint}")


def _chunks(n: int, values_each: int) -> Iterator[slice]:
    rows = max(1, CHUNK_VALUES // values_each)
    return (slice(start, start + rows) for start in range(0, n, rows))


def _choose_range(array: np.ndarray, asked: Range | None) -> Range:
    """The values of a float array that become 0 and 255."""
    low, high, n_bad, first_bad = math.inf, -math.inf, 0, ""
    for rows in _chunks(len(array), array[0].size):
        bad = ~np.isfinite(array[rows])
        if bad.any():
            n_bad += int(bad.sum())
            image, *rest = np.argwhere(bad)[0].tolist()
            first_bad = first_bad or f"X{[rows.start + image, *rest]}"
        low, high = min(low, float(array[rows].min())), max(high, float(array[rows].max()))
    if n_bad:
        raise InputError(
            f"{n_bad} of {array.size} values are NaN or infinite, the first is {first_bad}; "
            "replace them (np.nan_to_num) or leave those images out."
        )
    if asked is None:
        return (0.0, 1.0) if low >= 0 and high <= 1 else (low, high)
    if tuple(asked) == BYTE_RANGE and low >= 0 and 0 < high <= 1:  # a set of black images is less likely
        raise InputError("All values lie within 0 to 1, where 0 to 255 is expected: use X * 255.")
    return float(asked[0]), float(asked[1])


def _scale(part: np.ndarray, value_range: Range) -> np.ndarray:
    low, high = value_range
    share = (part.astype(np.float64) - low) / ((high - low) or 1.0)  # constant images become black
    return np.rint(share.clip(0, 1) * 255).astype(np.uint8)


def _with_channels(part: np.ndarray, channels: int) -> np.ndarray:
    """n x H x W x c bytes with another c, by the same formulas as Pillow's for files."""
    if part.shape[3] == 4 and channels < 4:
        colour, alpha = part[..., :3].astype(np.uint32), part[..., 3:].astype(np.uint32)
        part = ((colour * alpha + 255 * (255 - alpha) + 127) // 255).astype(np.uint8)
    if part.shape[3] == 3 and channels == 1:
        luminance = part.astype(np.uint32) @ np.array([[19595], [38470], [7471]], np.uint32)
        part = ((luminance + 2**15) >> 16).astype(np.uint8)
    return part.repeat(3, axis=3) if part.shape[3] == 1 and channels == 3 else part


def _resize(part: np.ndarray, size: Size) -> np.ndarray:
    """n x h x w x c bytes to n x H x W x c: scaled to cover ``size``, then the centre cut out."""
    (h, w), (H, W) = part.shape[1:3], size
    if (h, w) == size:
        return part
    import torch
    from torch.nn.functional import interpolate

    scale = max(H / h, W / w)
    cover = max(H, round(h * scale)), max(W, round(w * scale))
    x = torch.from_numpy(np.array(part)).permute(0, 3, 1, 2).float()
    x = interpolate(x, size=cover, mode="bilinear", align_corners=False, antialias=True)
    top, left = (cover[0] - H) // 2, (cover[1] - W) // 2
    x = x[:, :, top : top + H, left : left + W].round().clamp(0, 255).byte()
    return x.permute(0, 2, 3, 1).numpy()


# ---- .npy and .npz ---------------------------------------------------------------------------------


@contextmanager
def _numpy_file(path: Path) -> Iterator[Any]:
    """The array in a .npy (mapped), or the open .npz. Nothing is ever unpickled."""
    try:
        loaded = np.load(path, mmap_mode="r", allow_pickle=False)
        with nullcontext() if isinstance(loaded, np.ndarray) else loaded:
            yield loaded
    except InputError:
        raise
    except Exception as error:  # of zip, zlib, header or memory: a damaged file can raise any of them
        raise InputError(
            f"{str(path)!r} is damaged or holds Python objects, which are never loaded ({_reason(error)}); "
            "write it again with np.save or np.savez from arrays of numbers."
        ) from error


def _load_images(path: Path) -> tuple[np.ndarray, np.ndarray | None]:
    """Images and, where a .npz has them, labels."""
    with _numpy_file(path) as loaded:
        if isinstance(loaded, np.ndarray):
            return loaded, None
        keys = [key for key in IMAGE_KEYS if key in loaded] or [key for key in loaded if key not in LABEL_KEYS]
        if not keys or (len(keys) > 1 and keys[0] not in IMAGE_KEYS):
            raise InputError(
                f"{str(path)!r} holds the arrays {list(loaded)}; expected one named images, x or X, or a single one."
            )
        return loaded[keys[0]], next((loaded[key] for key in LABEL_KEYS if key in loaded), None)


# ---- labels, for evaluation ------------------------------------------------------------------------


def read_labels(source: str | Path, names: list[str]) -> np.ndarray:
    """Labels (strings or integers) in the order of ``names``.

    source: a CSV file with the columns path and label; a .npy, or a .npz with the key labels or y, with one label
        for each name; or the word "folders": the folder that an image lies in is its label.
    """
    if source == "folders":
        folders = [PurePosixPath(name).parent.as_posix() for name in names]
        if len(set(folders)) > 1:
            return np.array(folders)
        raise InputError(
            f'labels "folders": all {len(names)} images lie in one folder; expected one for each class. '
            "Use a CSV file with the columns path and label."
        )
    path = Path(source)
    if not os.path.isfile(path):
        raise InputError(f'There is no file of labels {str(source)!r}; expected a .csv, .npy or .npz, or "folders".')
    if path.suffix.lower() not in (".npy", ".npz"):
        return _labels_from_csv(path, names)
    with _numpy_file(path) as loaded:
        if isinstance(loaded, np.ndarray):
            return _check_labels(loaded, len(names), path.name)
        for key in LABEL_KEYS:
            if key in loaded:
                return _check_labels(loaded[key], len(names), path.name)
        raise InputError(f"{str(path)!r} holds the arrays {list(loaded)}; expected one named labels or y.")


def _labels_from_csv(path: Path, names: list[str]) -> np.ndarray:
    labels: dict[str, str] = {}
    try:
        # A byte order mark is what Excel writes; surrogates stand for file names that are not UTF-8.
        with path.open(newline="", encoding="utf-8-sig", errors="surrogateescape") as lines:
            rows = csv.DictReader(lines, restval="")
            rows.fieldnames = columns = [column.strip() for column in rows.fieldnames or []]
            if not {"path", "label"} <= set(columns):
                raise InputError(f"{str(path)!r} has the columns {columns}; expected path,label in the first line.")
            for row in rows:
                name, label = PurePosixPath(row["path"]).as_posix(), row["label"].strip()
                if label and labels.setdefault(name, label) != label:
                    raise InputError(
                        f"{str(path)!r} gives {name!r} two labels, {labels[name]!r} and {label!r} "
                        f"(line {rows.line_num}); leave one."
                    )
    except csv.Error as error:
        raise InputError(f"{str(path)!r} cannot be read as a CSV file ({error}).") from error
    wanted = [PurePosixPath(name).as_posix() for name in names]
    if missing := [name for name in wanted if name not in labels]:
        raise InputError(
            f"{len(missing)} of {len(names)} images have no label in {str(path)!r}, the first are {missing[:3]}; "
            "add them. Paths are relative to the folder of images, with /."
        )
    found = [labels[name] for name in wanted]
    whole = all(re.fullmatch(r"0|-?[1-9][0-9]{0,17}", label) for label in found)  # 01 and 1 stay two labels
    return np.array([int(label) for label in found] if whole else found)


def _check_labels(labels: np.ndarray, n: int, source: str) -> np.ndarray:
    """One integer or string for each of ``n`` images."""
    if labels.shape not in ((n,), (n, 1)):
        raise InputError(
            f"The labels in {source!r} have the shape {labels.shape}; expected {n}, one for each image that was read. "
            "Where files were skipped, use a CSV file with the columns path and label."
        )
    labels = np.array(labels).reshape(n)
    if labels.dtype.kind in "biu" or (labels.dtype.kind == "f" and (labels == np.rint(labels)).all()):
        return labels.astype(np.int64)
    if labels.dtype.kind != "U":
        raise InputError(f"The labels in {source!r} are {labels.dtype}; expected integers or strings.")
    return labels
