"""A source whose images must be decoded one by one: files, members of archives, items of a data set."""

import bisect
import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

from semclust import workers
from semclust.decoding import Header, Place
from semclust.errors import InputError
from semclust.sources import AskedSize, Block, Shape, Source, Spans, choose_size, complain_if_most_are
from semclust.workers import Places

GLANCE = 64  # headers to read before all of them


def picture_source(title: str, names: list[str], places: Places, **about: Any) -> Source:
    """``about``: the other fields of ``Source``."""
    n = len(names)

    def shape(size: AskedSize, channels: int | None) -> Shape:
        """As far as the headers are needed for it, from the headers."""
        if channels not in (None, 1, 3):
            raise InputError(f"channels={channels}: images in files can be read as 1 (grey) or 3 (RGB) channels.")
        if size is not None and channels is not None:
            return (*choose_size([], size), channels)
        if size is not None and any(not isinstance(header, str) and not header[1] for header in glance()):
            return (*choose_size([], size), 3)  # one in colour is enough
        known: Counter[Header] = Counter()  # there are far fewer shapes than images
        unknown: list[tuple[str, str]] = []
        for name, header in zip(names, workers.headers(places, n), strict=True):
            if isinstance(header, str):
                unknown.append((name, header))
            else:
                known[header] += 1
        complain_if_most_are(unknown, n)
        own = choose_size([shape for shape, _ in known.elements()], size)
        return (*own, channels or (1 if all(grey for _, grey in known) else 3))

    def glance() -> Iterator[Header | str]:
        return workers.headers(places, min(n, GLANCE))

    def blocks(shape: Shape, spans: Spans) -> Iterator[Block]:
        ends = list(itertools.accumulate(map(len, spans)))

        def places_in_spans(start: int, stop: int) -> list[Place]:
            found: list[Place] = []
            while start < stop:
                number = bisect.bisect_right(ends, start)
                some = spans[number][start - ends[number] :][: stop - start]  # from the end of the span backwards
                found += places(some.start, some.stop)
                start += len(some)
            return found

        return workers.blocks(places_in_spans, ends[-1], shape)

    return Source(title, names, shape, blocks, **about)
