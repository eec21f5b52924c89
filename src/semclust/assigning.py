"""Images of any source assigned by a finished model, part by part: table, embeddings, sorted folder.

Memory does not grow with the number of images. What is written appears under its name at the end.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch

from semclust import metrics
from semclust.assignments import assignment_rows, assignments_file, csv_bytes
from semclust.data import Images
from semclust.distributed import ALONE, Group
from semclust.errors import InputError, plural
from semclust.predictor import Predictor
from semclust.sorting import By, SortedFolder
from semclust.sources import complain_if_most_are
from semclust.storage import WholeFile, free_path
from semclust.workers import share_cores

FEW = 10  # images whose rows are kept to be shown


@dataclass
class Assigned:
    """What was done."""

    n_images: int = 0
    n_skipped: int = 0
    few: list[tuple[Any, ...]] = field(default_factory=list)  # the first rows of the table
    figures: dict[str, float] | None = None  # ACC, NMI, ARI, where the data itself holds all labels
    sorted_folder: SortedFolder | None = None
    table: Path = Path()
    embeddings: Path | None = None
    skipped: Path | None = None


def assign(
    predictor: Predictor,
    data: Any,
    device: torch.device,
    *,
    out: Path | None = None,
    embeddings: bool = False,
    into: Path | None = None,
    by: By = "link",
    on_image: Callable[[int], None] | None = None,
    on_part: Callable[[int], None] | None = None,
    group: Group = ALONE,
) -> Assigned:
    """Write the table ``out`` (by default DATA-clusters.csv, here), and beside it what else is asked for.

    on_image: called for each file that is read, with their number; on_part: with how many images are done.
    Where the source ends in an InputError, what came before it is kept, and the error is raised.
    Several processes (``group``) share the work; the first writes what one would write, the others nothing.
    """
    groups, done = predictor.groups, Assigned()
    failures: list[InputError] = []
    parts: Iterator[Part]
    if group.alone:
        parts = (Part(images, *predict(predictor, images, device)) for images in predictor.stream(data, on_image))
    else:
        share_cores(group.local_size)
        parts = parts_of_all(predictor, data, device, group, with_pixels=into is not None)
    parts = until_error(parts, failures)
    if not group.first:
        for _ in parts:  # they are predicted here, and written by the first
            pass
        return done
    first = next(parts, None)
    if first is None:
        raise failures[0] if failures else InputError(f"{data!r} holds no image that could be read.")
    out = out or free_path(Path(f"{first.images.source}-clusters.csv"))

    table, vectors, left_out = (
        WholeFile(path, replace=False)
        for path in (out, out.with_name(f"{out.stem}-embeddings.npy"), out.with_name(f"{out.stem}-skipped.csv"))
    )
    clusters: list[np.ndarray] = []
    labels: list[np.ndarray] = []
    with contextlib.ExitStack() as stack:
        write = stack.enter_context(assignments_file(table, groups))
        append = stack.enter_context(_rows_of_array(vectors)) if embeddings else None
        done.sorted_folder = stack.enter_context(SortedFolder(into, groups, by)) if into else None
        skipped: BinaryIO | None = None
        for images, p, q in chain([first], parts):
            if images.skipped:
                if skipped is None:
                    skipped = stack.enter_context(left_out)
                    skipped.write(csv_bytes(("path", "reason"), []))
                skipped.write(csv_bytes(None, images.skipped))
                done.n_skipped += len(images.skipped)
            if not images.names:
                continue
            found = np.array(groups.ids)[p.argmax(1)]
            write(images.names, p)
            if append:
                append(q)
            if done.sorted_folder:
                done.sorted_folder.add(images, found)
            if images.labels is not None:
                clusters.append(found)
                labels.append(images.labels)
            room = FEW - len(done.few)
            done.few += assignment_rows(images.names[:room], p[:room], groups)
            done.n_images += len(images.names)
            if on_part:
                on_part(done.n_images)
        if not done.n_images:
            raise failures[0] if failures else InputError(f"{data!r} holds no image that could be read.")

    done.table, done.embeddings = table.path, vectors.path if embeddings else None
    done.skipped = left_out.path if done.n_skipped else None
    if failures:
        raise InputError(f"{failures[0]} What could be read, {plural(done.n_images, 'image')}, is in {done.table}.")
    if sum(map(len, labels)) == done.n_images:  # figures over some of the images would mislead
        done.figures = metrics.evaluate(np.concatenate(clusters), np.concatenate(labels))
    return done


class Part(NamedTuple):
    """Some images, and what the model finds about them: p (n x R) and q (n x d)."""

    images: Images
    p: np.ndarray
    q: np.ndarray


def predict(predictor: Predictor, images: Images, device: torch.device) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities and embeddings; of no images, none."""
    return predictor(images.pixels, device) if images.names else (np.empty((0, 0)), np.empty((0, 0)))


def parts_of_all(
    predictor: Predictor, data: Any, device: torch.device, group: Group, with_pixels: bool
) -> Iterator[Part]:
    """The parts that one process would have, in the same order, on the first rank. In every round each rank takes the
    next part. with_pixels: also of images that are no files, to be written as such."""
    own = group.in_turn(lambda: predictor.stream(data, turn=(group.rank, group.size)))
    skipped: list[tuple[str, str]] = []
    n_images = 0
    while True:
        found = group.to_first(next_part(own, predictor, device, with_pixels))
        for part in found:
            if not isinstance(part, Part):
                break
            skipped += part.images.skipped[part.images.n_unlisted :]
            n_images += len(part.images.names)
            yield part
        if group.from_first(partial(is_over, found)):
            break
    complain_if_most_are(skipped, n_images + len(skipped))


def next_part(
    own: Iterator[Images], predictor: Predictor, device: torch.device, with_pixels: bool
) -> "Part | InputError | None":
    """None at the end."""
    try:
        images = next(own, None)
    except InputError as error:
        return error
    if images is None:
        return None
    part = Part(images, *predict(predictor, images, device))
    if not with_pixels or images.folder is not None:
        images.pixels = images.pixels[:0]
    return part


def is_over(found: "list[Part | InputError | None]") -> bool:
    for part in found:
        if isinstance(part, InputError):
            raise part
    return any(part is None for part in found)


def until_error(parts: Iterator[Part], failures: list[InputError]) -> Iterator[Part]:
    """The same parts; an InputError ends them and is kept."""
    try:
        yield from parts
    except InputError as error:
        failures.append(error)


@contextlib.contextmanager
def _rows_of_array(whole: WholeFile) -> Iterator[Callable[[np.ndarray], None]]:
    """A function that appends rows to a .npy file. Their number is known at the end: NumPy leaves room for it."""
    shape, dtype = [0, 0], np.dtype(np.float32)

    def write_header(file: BinaryIO) -> None:
        header = {"descr": dtype.str, "fortran_order": False, "shape": tuple(shape)}
        np.lib.format.write_array_header_1_0(file, header)

    with whole as file:

        def append(rows: np.ndarray) -> None:
            if not shape[0]:
                shape[1] = rows.shape[1]
                write_header(file)
            shape[0] += len(rows)
            file.write(np.ascontiguousarray(rows, dtype).data)

        yield append
        file.seek(0)
        write_header(file)
