"""Arrays of pixels: what is accepted, and how they become bytes of one size and number of channels.

Shapes: N images, H x W pixels, c channels.
"""

import math
import os
import struct
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from semclust.errors import InputError, in_short

BYTE_RANGE = (0.0, 255.0)
CHUNK_VALUES = 2**22  # array values converted at once
FAR = 2  # times as wide as the range that is expected: values that are on average so far outside are of another one

Size = tuple[int, int]  # H, W
Range = tuple[float, float]


def check_array(array: np.ndarray) -> None:
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


def chunks(n: int, values_each: int) -> Iterator[slice]:
    rows = max(1, CHUNK_VALUES // values_each)
    return (slice(start, start + rows) for start in range(0, n, rows))


def choose_range(array: np.ndarray, asked: Range | None) -> Range:
    """The values of a float array that become 0 and 255."""
    low, high, mean, n_bad, first_bad = math.inf, -math.inf, 0.0, 0, ""
    for rows in chunks(len(array), array[0].size):
        bad = ~np.isfinite(array[rows])
        if bad.any():
            n_bad += int(bad.sum())
            image, *rest = np.argwhere(bad)[0].tolist()
            first_bad = first_bad or f"X{[rows.start + image, *rest]}"
        low, high = min(low, float(array[rows].min())), max(high, float(array[rows].max()))
        mean += float(array[rows].mean(dtype=np.float64)) * len(array[rows]) / len(array)
    if n_bad:
        raise InputError(
            f"{n_bad} of {array.size} values are NaN or infinite, the first is {first_bad}; "
            "replace them (np.nan_to_num) or leave those images out."
        )
    if asked is None:
        return (0.0, 1.0) if low >= 0 and high <= 1 else (low, high)
    least, most = map(float, asked)
    if low >= -1 and 0 < high <= 1 < most / FAR:  # a set of black images is less likely
        within, use = ("0 to 1", f"X * {most:g}") if low >= 0 else ("-1 to 1", f"(X + 1) * {most / 2:g}")
        raise InputError(f"All values lie within {within}, where {least:g} to {most:g} is expected: use {use}.")
    if least < most and not least - FAR * (most - least) <= mean <= most + FAR * (most - least):
        raise InputError(
            f"The values are {low:g} to {high:g}, on average {mean:g}, where {least:g} to {most:g} is expected: give "
            "them in the units of the images that were fitted."
        )
    return least, most


def scale(part: np.ndarray, value_range: Range) -> np.ndarray:
    low, high = value_range
    share = (part.astype(np.float64) - low) / ((high - low) or 1.0)  # constant images become black
    return np.rint(share.clip(0, 1) * 255).astype(np.uint8)


def with_channels(part: np.ndarray, channels: int) -> np.ndarray:
    """n x H x W x c bytes with another c, by the same formulas as Pillow's for files."""
    if part.shape[3] == 4 and channels < 4:
        colour, alpha = part[..., :3].astype(np.uint32), part[..., 3:].astype(np.uint32)
        part = ((colour * alpha + 255 * (255 - alpha) + 127) // 255).astype(np.uint8)
    if part.shape[3] == 3 and channels == 1:
        luminance = part.astype(np.uint32) @ np.array([[19595], [38470], [7471]], np.uint32)
        part = ((luminance + 2**15) >> 16).astype(np.uint8)
    return part.repeat(3, axis=3) if part.shape[3] == 1 and channels == 3 else part


def resize(part: np.ndarray, size: Size) -> np.ndarray:
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


@contextmanager
def numpy_file(path: Path) -> Iterator[Any]:
    """The array in a .npy (mapped), or the open .npz. Nothing is ever unpickled."""
    try:
        loaded = np.load(path, mmap_mode="r", allow_pickle=False)
        with nullcontext() if isinstance(loaded, np.ndarray) else loaded:
            yield loaded
    except InputError:
        raise
    except Exception as error:  # of zip, zlib, header or memory: a damaged file can raise any of them
        raise InputError(
            f"{str(path)!r} is damaged or holds Python objects, which are never loaded ({in_short(error)}); "
            "write it again with np.save or np.savez from arrays of numbers."
        ) from error


def member(loaded: Any, path: Path, key: str) -> np.ndarray:
    """One array of an open .npz: mapped where np.savez wrote it, read where it is compressed."""
    entry = loaded.zip.getinfo(key if key in loaded.zip.namelist() else f"{key}.npy")
    if entry.compress_type != zipfile.ZIP_STORED:
        return unpacked(loaded, path, key)
    with open(path, "rb") as file:
        file.seek(entry.header_offset)
        fixed = file.read(30)  # of the local header; the lengths of name and extra field stand at its end
        file.seek(entry.header_offset + 30 + sum(struct.unpack("<HH", fixed[26:30])))
        version = np.lib.format.read_magic(file)
        read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, in_columns, dtype = read_header(file)
        if version > (2, 0) or dtype.hasobject or 0 in shape or not shape:
            return unpacked(loaded, path, key)  # which refuses objects
        return np.memmap(path, dtype, "r", file.tell(), shape, "F" if in_columns else "C")


def unpacked(loaded: Any, path: Path, key: str) -> np.ndarray:
    """One array of an open .npz, in memory: a few bytes can be packed to stand for any number of them."""
    entry = loaded.zip.getinfo(key if key in loaded.zip.namelist() else f"{key}.npy")
    if entry.file_size > memory_of_machine():
        raise InputError(
            f"{str(path)!r} holds {entry.file_size / 2**30:,.1f} GiB under {key!r}, more than this machine has memory; "
            "write it without compression, by np.savez, so that it is read from the disk."
        )
    array = loaded[key]
    if not isinstance(array, np.ndarray):  # NumPy gives what is no array as it is
        raise InputError(f"{str(path)!r} holds no array under {key!r}; write it again with np.savez.")
    return array


def memory_of_machine() -> float:
    """Bytes; infinite where the system does not tell."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return math.inf
