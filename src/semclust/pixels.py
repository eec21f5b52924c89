"""A source whose images are arrays already: they are only scaled to bytes, resized and given the wanted channels.

Shapes: N images, H x W pixels, c channels.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from semclust.arrays import (
    BYTE_RANGE,
    Range,
    check_array,
    choose_range,
    chunks,
    resize,
    scale,
    with_channels,
)
from semclust.errors import InputError, plural
from semclust.sources import AskedSize, Block, Shape, Source, Spans, choose_size
from semclust.truth import check_labels


def array_source(
    arrays: Sequence[np.ndarray],
    title: str,
    value_range: Range | None = None,
    labels: Any = None,
    names: Sequence[str] | None = None,
) -> Source:
    """The images of all ``arrays``, of one shape and type, in order; mapped files stay on disk."""
    for array in arrays:
        check_array(array)
    in_bytes = arrays[0].dtype == np.uint8
    value_range = BYTE_RANGE if in_bytes else choose_range(arrays[0], value_range)
    parts = [array[..., None] if array.ndim == 3 else array for array in arrays]
    n = sum(map(len, parts))
    _, H, W, c = parts[0].shape

    def shape(size: AskedSize, channels: int | None) -> Shape:
        channels = channels or c
        if (c, channels) not in {(c, c), (1, 3), (3, 1), (4, 3), (4, 1)}:
            wanted = plural(channels, "channel")
            raise InputError(f"Images of {plural(c, 'channel')} cannot be turned into {channels}; hand over {wanted}.")
        return (*choose_size([(H, W)], size), channels)

    def blocks(shape: Shape, spans: Spans) -> Iterator[Block]:
        size, channels = shape[:2], shape[2]
        first = 0  # row where each part begins
        for part in parts:
            here = [range(max(0, span.start - first), min(len(part), span.stop - first)) for span in spans]
            for part_of_span in (part[span.start : span.stop] for span in here if span):
                for rows in chunks(len(part_of_span), max(H * W * c, math.prod(shape))):
                    some = part_of_span[rows] if in_bytes else scale(part_of_span[rows], value_range)
                    yield Block(resize(with_channels(some, channels), size))
            first += len(part)

    usable = len(parts) == 1 and in_bytes and parts[0].flags.c_contiguous
    return Source(
        title,
        [str(row) for row in range(n)] if names is None else names,
        shape,
        blocks,
        labels=None if labels is None else check_labels(labels, n, title),
        ready=parts[0] if usable else None,
        value_range=value_range,
    )
