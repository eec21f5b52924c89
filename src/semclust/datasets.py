"""A data set of another library: anything with len() and [i] that gives an image, (image, label) or a dictionary.

So Hugging Face datasets, torchvision and your own need no support of their own. Items are fetched one at a time, since
not every data set can be asked by several threads; the rest of the work is done on all cores.
"""

import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
from PIL import Image

from semclust.arrays import BYTE_RANGE, Range, scale
from semclust.decoding import Place, open_image
from semclust.errors import InputError
from semclust.pictures import picture_source
from semclust.sources import Source

IMAGE_KEYS = ("image", "img")
LABEL_KEYS = ("label", "labels")
EXPECTED = "a PIL image, an array or tensor, (image, label), or a dictionary with image or img and perhaps label"


def is_dataset(data: Any) -> bool:
    return hasattr(data, "__len__") and hasattr(data, "__getitem__") and not isinstance(data, (str, bytes, bytearray))


def dataset_source(data: Any, value_range: Range | None) -> Source:
    """value_range: values of float images that become 0 and 255; others are clipped. None, or that of bytes, which a
    model that was fitted on bytes passes on: 0 to 1, and an image with others is skipped."""
    if isinstance(data, Mapping):
        raise InputError(
            f"{type(data).__name__} holds {list(data)[:5]}; hand over one of its parts, as in "
            f"data[{next(iter(data), 'train')!r}]."
        )
    n = len(data)
    if n == 0:
        raise InputError(f"{type(data).__name__} is empty; expected images.")
    asking = threading.Lock()
    clip = value_range not in (None, BYTE_RANGE)
    low, high = value_range if value_range and clip else (0.0, 1.0)

    def place(i: int) -> Place:
        def fetch() -> tuple[Image.Image, int | str | None]:
            with asking:
                image, label = split(data[i])
            return as_image(image, (low, high), clip), as_label(label)

        return fetch

    return picture_source(
        type(data).__name__.lower(),
        [str(i) for i in range(n)],
        lambda start, stop: [place(i) for i in range(start, stop)],
        value_range=(low, high) if _first_is_float(data) else BYTE_RANGE,
    )


def _first_is_float(data: Any) -> bool:
    try:
        return as_array(split(data[0])[0]).dtype.kind == "f"
    except Exception:  # not an array, or an item that will be skipped
        return False


def split(item: Any) -> tuple[Any, Any]:
    """Image and label (None where there is none) of an item."""
    if isinstance(item, Mapping):
        found = [key for key in IMAGE_KEYS if key in item]
        if not found:
            raise ValueError(f"a dictionary of {list(item)[:6]}; expected the key image or img")
        return item[found[0]], next((item[key] for key in LABEL_KEYS if key in item), None)
    if isinstance(item, (tuple, list)) and item:
        return item[0], item[1] if len(item) > 1 else None
    return item, None


def as_image(image: Any, value_range: Range, clip: bool) -> Image.Image:
    if isinstance(image, Mapping) and image.get("bytes"):  # a Hugging Face image that was left encoded
        image = image["bytes"]
    elif isinstance(image, Mapping) and isinstance(image.get("path"), str):
        return open_image(image["path"])
    if isinstance(image, bytes):
        return open_image(image)
    if isinstance(image, Image.Image):
        return image.copy()  # it is the caller's: what follows turns and closes it
    array = as_array(image)
    if array.dtype.kind == "f":
        (low, high), (least, most) = value_range, (array.min(), array.max())
        if not np.isfinite(array).all():
            raise ValueError("holds NaN or infinite values")
        if not clip and (least < low or most > high):
            raise ValueError(f"floats from {least:.3g} to {most:.3g}; expected bytes, or floats from 0 to 1")
        array = scale(array, value_range)
    elif array.dtype.kind == "b":
        array = array.astype(np.uint8) * np.uint8(255)
    elif array.dtype != np.uint8:
        if array.dtype.kind not in "iu" or array.min() < 0 or array.max() > 65535:
            raise ValueError(f"an array of {array.dtype}; expected bytes, or floats from 0 to 1")
        array = (array // 256 if array.max() > 255 else array).astype(np.uint8)
    return Image.fromarray(np.ascontiguousarray(array))


def as_array(image: Any) -> np.ndarray:
    """H x W or H x W x c; torch's c x H x W is turned."""
    if isinstance(image, Image.Image) or not hasattr(image, "__array__"):
        raise ValueError(f"{type(image).__name__} is no image; expected {EXPECTED}")
    array = np.asarray(image.detach().cpu() if hasattr(image, "detach") else image)
    channels_last = array.ndim == 3 and array.shape[2] in (1, 3, 4)
    channels_first = array.ndim == 3 and array.shape[0] in (1, 3, 4)
    if channels_first and (hasattr(image, "detach") or not channels_last):
        array = array.transpose(1, 2, 0)
    elif array.ndim != 2 and not channels_last:
        raise ValueError(f"an array of shape {array.shape}; expected H x W, H x W x c or c x H x W")
    if 0 in array.shape:
        raise ValueError(f"an array of shape {array.shape} holds no pixels")
    return array[..., 0] if array.ndim == 3 and array.shape[2] == 1 else array


def as_label(label: Any) -> int | str | None:
    if hasattr(label, "item") and getattr(label, "size", 1) != 0:  # a number of NumPy or torch
        try:
            label = label.item()
        except (TypeError, ValueError, RuntimeError):  # several numbers
            return None
    return int(label) if isinstance(label, (bool, int)) else label if isinstance(label, str) else None
