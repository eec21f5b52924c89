"""What every source of images says of itself, and the pieces in which it gives them.

Shapes: n images, H x W pixels, c channels.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from semclust.arrays import BYTE_RANGE, Range, Size
from semclust.errors import InputError

SMALLEST, LARGEST = 16, 96  # of the shorter side, where no size is asked for

AskedSize = int | Size | None
Shape = tuple[int, int, int]  # H, W, c
Spans = Sequence[range]  # rows, one range after the other


@dataclass
class Block:
    """The next images of a source, in order."""

    rows: np.ndarray  # n x H x W x c bytes of those that could be read
    skipped: list[tuple[int, str]] = field(default_factory=list)  # place in this block, and the reason
    labels: list[int | str | None] | None = None  # of the rows, where they come with the images
    lasting: bool = True  # False: a reason may pass, such as too many open files

    def __len__(self) -> int:
        return len(self.rows) + len(self.skipped)


@dataclass
class Source:
    """A source that has been found, but not been read."""

    title: str  # short name for a run folder
    names: Sequence[str]
    shape: Callable[[AskedSize, int | None], Shape]  # for the size and channels asked for, if any
    blocks: Callable[[Shape, Spans], Iterator[Block]]  # of these rows
    labels: np.ndarray | None = None  # one for each name
    unlisted: list[tuple[str, str]] = field(default_factory=list)  # what could not even be listed, and why
    folder: Path | None = None  # the names are files in it
    stamp: str | None = None  # changes with the images; None: not worth keeping, or nothing tells a change
    ready: np.ndarray | None = None  # bytes that are used as they are where their shape is the wanted one
    value_range: Range = BYTE_RANGE

    def as_they_are(self, shape: Shape) -> np.ndarray | None:
        """``ready``, where it has the wanted shape."""
        return self.ready if self.ready is not None and self.ready.shape[1:] == shape else None


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


def complain_if_most_are(skipped: Sequence[tuple[str, str]], n: int) -> None:
    """Stop where more than half of ``n`` images cannot be read: something else is wrong then."""
    if 2 * len(skipped) > n:
        first = "; ".join(f"{name!r}: {why}" for name, why in skipped[:3]) + ("; ..." if len(skipped) > 3 else "")
        raise InputError(
            f"{len(skipped)} of {n} images cannot be read ({first}). "
            "At least half must be readable: repair these files, or take them out."
        )
