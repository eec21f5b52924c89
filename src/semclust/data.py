"""Open a source of images, whatever it is, as one array of bytes.

    images = open_images("photos/")             # a folder, with all folders inside it
    images = open_images("scans.npz", size=32)  # or any other of SOURCES
    images.pixels                               # N x H x W x c, uint8
    images.names, images.skipped                # one name for each row; what could not be read, and why

    for part in stream_images("photos/", size=(32, 32), channels=3):  # the same in bounded memory
        part.pixels, part.names

This is the one place that tells sources apart; each kind has a file of its own.
Shapes: N images, H x W pixels, c channels.
"""

import bisect
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from semclust import cache
from semclust.arrays import BYTE_RANGE, Range, Size, member, numpy_file, unpacked
from semclust.benchmarks import BENCHMARKS, INSTALLED, benchmark_source
from semclust.datasets import dataset_source, is_dataset
from semclust.decoding import SUFFIXES
from semclust.errors import InputError
from semclust.files import expand, file_source, folder_source
from semclust.pixels import array_source
from semclust.shards import is_shard, shard_source
from semclust.sources import AskedSize, Block, Source, Spans, complain_if_most_are
from semclust.truth import LABEL_ARRAYS, as_labels

SOURCES = f"""a folder of images
an image file ({" ".join(suffix[1:] for suffix in SUFFIXES)}), or a list of them, or a pattern such as "photos/*.jpg"
a .npy or .npz file
tar files in WebDataset's layout: one, a list, or a pattern such as "shards-{{000..015}}.tar" or "shards-*.tar"
an array (N x H x W or N x H x W x c)
a data set with len() and [i], as of Hugging Face datasets or torchvision
a benchmark: {", ".join(f"{name}:PATH" for name in BENCHMARKS)}
"digits\""""
ACCEPTED = SOURCES.replace("\n", "; ")
IMAGE_ARRAYS = ("images", "x", "X")  # in a .npz

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
    folder: Path | None = None  # that the names are relative to, where each is a file
    n_unlisted: int = 0  # so many of the skipped, the first, are no images but folders that cannot be listed

    def file(self, row: int) -> Path | None:
        """The file that an image came from; None where it has none of its own, as in an array or a tar."""
        return None if self.folder is None else self.folder / self.names[row]


def open_images(
    data: Any,
    *,
    size: AskedSize = None,
    channels: int | None = None,
    value_range: Range | None = None,
    on_image: OnImage = None,
) -> Images:
    """Read all images of ``data``, which is one of SOURCES.

    size: side of a square or (H, W). None: the images' own, see ``sources.choose_size``.
    channels: None: 1 if all files are grey, else 3; arrays keep theirs.
    value_range: values of a float array that become 0 and 255; values outside are clipped. None: 0 to 1 if
        all lie there, else the lowest and the highest. Bytes and files have no use for it.
    on_image: called for each image that is decoded, with the number of images in all. Images that were decoded by an
        earlier call are taken from the cache (``semclust.cache``).

    The word "digits" is scikit-learn's set of digits; a folder of that name is "./digits".
    """
    _check_options(size, channels, value_range)
    source = find_source(data, value_range)
    labels = source.labels
    if kept := source.stamp and cache.find(source.stamp, size, channels):
        pixels, skipped = kept.pixels, kept.skipped
    else:
        shape = source.shape(size, channels)
        if (ready := source.as_they_are(shape)) is not None:
            pixels, skipped = ready, []
        else:
            pixels, skipped, own_labels = _read(source, shape, size is None, channels is None, on_image)
            labels = labels if own_labels is None else own_labels
    return _images(source, pixels, list(source.names), labels, skipped, source.unlisted)


def stream_images(
    data: Any,
    *,
    size: Size,
    channels: int,
    value_range: Range | None = None,
    on_image: OnImage = None,
    chunk: int = 1024,
    turn: tuple[int, int] = (0, 1),
) -> Iterator[Images]:
    """The images that ``open_images`` gives, in the same order, in pieces of ``chunk``, one in memory at a time.

    turn: (i, n): of every n pieces only the i-th (from 0), for one of n processes that share the work. That most images
        cannot be read is then for them to find out.

    Nothing is written to the cache, but what lies there is used. That most images cannot be read is known only at the
    end: the error comes after the last piece. A piece may be empty but for its ``skipped``, and has no ``labels`` where
    one of its images lacks a label: those of a data set are complete only if every piece with images has them.
    """
    _check_options(size, channels, value_range)
    if chunk < 1:
        raise InputError(f"chunk={chunk}: expected at least 1.")
    source = find_source(data, value_range)
    first, every = turn
    n = len(source.names)
    spans = [range(start, min(n, start + chunk)) for start in range(0, n, chunk)][first::every]
    if not spans:
        return iter(())
    return _stream(source, (size, channels), on_image, spans, whole=every == 1, unlisted=first == 0)


def find_source(data: Any, value_range: Range | None = None) -> Source:
    """What ``data`` stands for; images are not read yet."""
    if isinstance(data, str) and data == "digits":
        from sklearn.datasets import load_digits

        digits = load_digits()
        return array_source([digits.images], "digits", (0.0, 16.0), digits.target)
    if isinstance(data, (list, tuple)):
        if not data or not all(isinstance(item, (str, os.PathLike)) for item in data):
            raise InputError("A list must hold paths of images, one or more; for a list of arrays use np.stack(X).")
        return _from_list([os.fsdecode(item) for item in data])
    if isinstance(data, (str, os.PathLike)):
        return _from_path(os.fsdecode(data), value_range)
    if hasattr(data, "__array__"):
        return array_source([_as_array(data)], "array", value_range)
    if is_dataset(data):
        return dataset_source(data, value_range)
    raise InputError(f"Images cannot be read from {type(data).__name__}; expected {ACCEPTED}.")


def is_named(data: str) -> bool:
    """Whether a word stands for a benchmark: cifar10:/path, or fashion-mnist where Debian's package has it; but no file
    or folder of that very name."""
    name, colon, _ = data.partition(":")
    return (name in BENCHMARKS if colon else name in INSTALLED) and not os.path.exists(data)


def _from_path(text: str, value_range: Range | None) -> Source:
    path = Path(text)
    suffix = path.suffix.lower()
    if os.path.isdir(text):
        return folder_source(text)
    if os.path.isfile(text) and suffix in SUFFIXES:
        return file_source([path.name], str(path.parent), path.stem)
    if os.path.isfile(text) and suffix in (".npy", ".npz"):
        array, labels = _load_images(path)
        return array_source([array], path.stem, value_range, labels)
    if os.path.isfile(text) and is_shard(text):
        return shard_source([text])
    if is_named(text):
        name, colon, where = text.partition(":")
        return benchmark_source(name, where if colon else INSTALLED[name])
    if os.path.isfile(text):
        problem = f"files that end in {path.suffix!r} are not read"
    elif scheme := re.match(r"([\w-]{2,}):", text):  # two letters or more, for C:\ is a drive
        problem = f"the scheme {scheme[1]!r} is unknown"
    elif re.search(r"[*?\[{]", text):
        if files := expand(text):
            return _from_list(files, relative=True)
        problem = "the pattern fits no file"
    else:
        raise InputError(f"Cannot open {text!r}: there is no such file or folder. Check the path.")
    raise InputError(f"Cannot open {text!r}: {problem}. Expected {ACCEPTED}.")


def _from_list(files: list[str], relative: bool = False) -> Source:
    """``relative``: the names begin at the folder that all share, not where the paths given do."""
    n_shards = sum(is_shard(file) for file in files)
    if n_shards == len(files):
        return shard_source(files)
    if n_shards:
        raise InputError(f"{n_shards} of {len(files)} files are tar files; expected images only, or tar files only.")
    if relative:
        files = [file for file in files if Path(file).suffix.lower() in SUFFIXES]
        if not files:
            raise InputError(f"The pattern fits no file that ends in .tar, {', '.join(SUFFIXES)}.")
        base = os.path.commonpath([os.path.dirname(os.path.abspath(file)) for file in files])
        names = [Path(os.path.relpath(file, base)).as_posix() for file in files]
        return file_source(names, base, Path(base).name or "images")
    return file_source([Path(file).as_posix() for file in files], "", "images")


def _as_array(data: Any) -> np.ndarray:
    try:
        return np.asarray(data.detach().cpu() if hasattr(data, "detach") else data)
    except Exception as error:  # whatever a foreign __array__ raises
        raise InputError(
            f"{type(data).__name__} cannot be read as an array ({error}); hand over a NumPy array of uint8 or float32."
        ) from error


def _load_images(path: Path) -> tuple[np.ndarray, np.ndarray | None]:
    """Images and, where a .npz has them, labels."""
    with numpy_file(path) as loaded:
        if isinstance(loaded, np.ndarray):
            return loaded, None
        keys = [key for key in IMAGE_ARRAYS if key in loaded] or [key for key in loaded if key not in LABEL_ARRAYS]
        if not keys or (len(keys) > 1 and keys[0] not in IMAGE_ARRAYS):
            raise InputError(
                f"{str(path)!r} holds the arrays {list(loaded)}; expected one named images, x or X, or a single one."
            )
        labels = next((unpacked(loaded, path, key) for key in LABEL_ARRAYS if key in loaded), None)
        return member(loaded, path, keys[0]), labels


def _check_options(size: AskedSize, channels: int | None, value_range: Range | None) -> None:
    sides = size if isinstance(size, (tuple, list)) else (1 if size is None else size,) * 2
    if len(sides) != 2 or not all(isinstance(side, (int, np.integer)) and side >= 1 for side in sides):
        raise InputError(f"size={size!r}: expected a side in pixels, or (H, W).")
    if channels not in (None, 1, 2, 3, 4):
        raise InputError(f"channels={channels!r}: expected 1 (grey) or 3 (RGB).")
    low, high = value_range or BYTE_RANGE
    if not -math.inf < low <= high < math.inf:
        raise InputError(f"value_range={value_range!r}: expected two finite numbers, the lower one first.")


# ---- reading ---------------------------------------------------------------------------------------


def _read(
    source: Source, shape: tuple[int, int, int], own_size: bool, own_channels: bool, on_image: OnImage
) -> tuple[np.ndarray, list[tuple[int, str]], np.ndarray | None]:
    """Pixels, rows that were skipped, and labels that came with the images; kept in the cache where that is of use."""
    n = len(source.names)
    store = cache.Store(source.stamp, n, shape)
    skipped: list[tuple[int, str]] = []
    labels: list[Any] = []
    start, lasting = 0, True
    try:
        for block in source.blocks(shape, [range(n)]):
            store.append(block.rows)
            skipped += [(start + i, why) for i, why in block.skipped]
            labels += block.labels or []
            start, lasting = start + len(block), lasting and block.lasting
            _tell(on_image, len(block), n)
        complain_if_most_are([(source.names[row], why) for row, why in skipped], n)
    except BaseException:
        store.discard()
        raise
    pixels = store.finish(skipped, own_size, own_channels, lasting)
    return pixels, skipped, as_labels(labels)


def _stream(
    source: Source, asked: tuple[Size, int], on_image: OnImage, spans: Spans, whole: bool, unlisted: bool
) -> Iterator[Images]:
    """whole: the spans are all rows. unlisted: tell with the first piece what could not be listed."""
    n, shape = sum(map(len, spans)), source.shape(*asked)
    left_out, all_skipped = source.unlisted if unlisted else [], []
    for span, block in zip(spans, _pieces(source, shape, spans), strict=True):
        these = slice(span.start, span.stop)
        labels = None if source.labels is None else source.labels[these]
        if block.labels is not None:
            labels = as_labels(block.labels)
        part = _images(source, block.rows, list(source.names[these]), labels, block.skipped, left_out)
        all_skipped += part.skipped[len(left_out) :]
        left_out = []
        _tell(on_image, len(block), n)
        yield part
    if whole:
        complain_if_most_are(all_skipped, n)


def _pieces(source: Source, shape: tuple[int, int, int], spans: Spans) -> Iterator[Block]:
    """A block for each span."""
    ready = source.as_they_are(shape)
    known: dict[int, str] = {}
    if kept := source.stamp and cache.find(source.stamp, shape[:2], shape[2]):
        ready, known = kept.pixels, dict(kept.skipped)
    if ready is not None:
        absent = sorted(known)
        for span in spans:
            before, until = (bisect.bisect_left(absent, row) for row in (span.start, span.stop))
            skipped = [(row - span.start, known[row]) for row in absent[before:until]]
            yield Block(ready[span.start - before : span.stop - until], skipped)
        return
    waiting: list[Block] = []
    blocks = source.blocks(shape, spans)
    for span in spans:
        while sum(map(len, waiting)) < len(span):
            waiting.append(next(blocks))
        block, rest = _cut(_join(waiting), len(span))
        waiting = [rest] if len(rest) else []
        yield block


def _cut(block: Block, n: int) -> tuple[Block, Block]:
    """Its first ``n`` images, and the others."""
    skipped, others = [(i, why) for i, why in block.skipped if i < n], [(i - n, w) for i, w in block.skipped if i >= n]
    row, labels = n - len(skipped), block.labels
    return (
        Block(block.rows[:row], skipped, None if labels is None else labels[:row]),
        Block(block.rows[row:], others, None if labels is None else labels[row:]),
    )


def _join(blocks: list[Block]) -> Block:
    skipped, labels, start = [], [], 0
    for block in blocks:
        skipped += [(start + i, why) for i, why in block.skipped]
        labels += block.labels or []
        start += len(block)
    rows = np.concatenate([block.rows for block in blocks])
    return Block(rows, skipped, labels if blocks[0].labels is not None else None)


def _images(
    source: Source,
    pixels: np.ndarray,
    names: list[str],
    labels: np.ndarray | None,
    skipped: Sequence[tuple[int, str]],
    unlisted: list[tuple[str, str]],
) -> Images:
    """``names``: of all images, also of those that were skipped; ``labels``: likewise, or of the pixels alone."""
    left_out = unlisted + [(names[row], why) for row, why in skipped]
    if skipped:
        bad = {row for row, _ in skipped}
        kept = [row for row in range(len(names)) if row not in bad]
        names = [names[row] for row in kept]
        labels = labels[kept] if labels is not None and len(labels) != len(kept) else labels
    return Images(pixels, names, source.title, labels, left_out, source.value_range, source.folder, len(unlisted))


def _tell(on_image: OnImage, n: int, total: int) -> None:
    if on_image:
        for _ in range(n):
            on_image(total)
