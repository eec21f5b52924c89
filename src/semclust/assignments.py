"""The table of assignments, one row an image: written as the images come, as CSV or Parquet, and read again.

path, cluster, confidence, runner_up, margin; and name, where a cluster was given one.

Shapes: N images, R clusters.
"""

import contextlib
import csv
import io
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from semclust.errors import DamagedFileError, InputError
from semclust.groups import Groups
from semclust.storage import WholeFile

ASSIGNMENTS = ("path", "cluster", "confidence", "runner_up", "margin")
ROW_GROUP = 65_536  # rows that a Parquet file holds together

Write = Callable[[Sequence[str], np.ndarray], None]


@contextlib.contextmanager
def assignments_file(whole: WholeFile, groups: Groups) -> Iterator[Write]:
    """A function that appends rows to ``whole``, given names and probabilities (N x R, the clusters of ``groups``)."""
    with whole as file:
        if is_parquet(whole.path):
            with _parquet(file, groups) as write:
                yield write
        else:
            file.write(csv_bytes((*ASSIGNMENTS, "name") if groups.names else ASSIGNMENTS, []))

            def write(names: Sequence[str], p: np.ndarray) -> None:
                file.write(csv_bytes(None, assignment_rows(names, p, groups)))

            yield write


def write_assignments(path: Path, names: Sequence[str], p: np.ndarray, groups: Groups | None = None) -> None:
    """The whole table from the probabilities p (N x C) of the clusters of the fit."""
    groups = groups or Groups(p.shape[1])
    with assignments_file(WholeFile(path), groups) as write:
        write(names, groups.apply(p))


def assignment_rows(names: Sequence[str], p: np.ndarray, groups: Groups) -> list[tuple[Any, ...]]:
    """Rows as a CSV file has them."""
    rows = [
        (name, int(a), f"{x:.4f}", int(b), f"{x - y:.4f}")
        for name, a, x, b, y in zip(names, *_columns(p, groups), strict=True)
    ]
    return [(*row, groups.names.get(row[1], "")) for row in rows] if groups.names else rows


def _columns(p: np.ndarray, groups: Groups) -> tuple[np.ndarray, ...]:
    """Cluster, its probability, the runner-up and its probability."""
    order = np.argsort(-p, axis=1, kind="stable")[:, :2]
    first, second = np.array(groups.ids)[order].T
    x, y = np.take_along_axis(p, order, axis=1).T
    return first, x, second, y


class Assignments(NamedTuple):
    """The columns of a table of assignments."""

    names: list[str]
    cluster: np.ndarray
    confidence: np.ndarray
    runner_up: np.ndarray
    margin: np.ndarray


def read_assignments(path: Path) -> Assignments:
    """The table that ``write_assignments`` wrote as CSV."""
    try:
        with open(path, newline="", encoding="utf-8", errors="surrogateescape") as file:
            rows = [
                (r["path"], int(r["cluster"]), float(r["confidence"]), int(r["runner_up"]), float(r["margin"]))
                for r in csv.DictReader(file)
            ]
        if not rows:
            raise ValueError("it holds no row")
        names, *columns = zip(*rows, strict=True)
        return Assignments(list(names), *map(np.array, columns))
    except FileNotFoundError:
        raise InputError(f"{path} is missing: has the run finished? `semclust fit --resume {path.parent}`") from None
    except (KeyError, TypeError, ValueError, csv.Error) as error:
        raise DamagedFileError(
            f"{path} is damaged ({error!r}); expected the columns {', '.join(ASSIGNMENTS)}. Restore it, or fit again."
        ) from error


def csv_bytes(header: Sequence[str] | None, rows: Sequence[Sequence[Any]]) -> bytes:
    """Lines of a CSV file; without a header they can be appended to one."""
    text = io.StringIO()
    plain = csv.writer(text, lineterminator="\n")
    # A carriage return in a name is not quoted by itself, and would read as the end of a row.
    quoted = csv.writer(text, lineterminator="\n", quoting=csv.QUOTE_ALL)
    for row in rows if header is None else (header, *rows):
        (quoted if any("\r" in cell for cell in row if isinstance(cell, str)) else plain).writerow(row)
    return text.getvalue().encode("utf-8", errors="surrogateescape")


# ---- Parquet -----------------------------------------------------------------------------------------


def is_parquet(path: Path) -> bool:
    return path.suffix.lower() == ".parquet"


def need_parquet() -> None:
    """Raise InputError where the package for it is missing."""
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError as error:
        raise InputError(f'Parquet needs pyarrow ({error}): pip install "semclust[parquet]"') from error


@contextlib.contextmanager
def _parquet(file: BinaryIO, groups: Groups) -> Iterator[Write]:
    need_parquet()
    import pyarrow as pa
    import pyarrow.parquet as pq

    kinds = (pa.string(), pa.int32(), pa.float32(), pa.int32(), pa.float32())
    columns = [*zip(ASSIGNMENTS, kinds, strict=True), *([("name", pa.string())] if groups.names else [])]
    schema = pa.schema(columns)
    waiting: list[Any] = []

    with pq.ParquetWriter(file, schema) as writer:

        def flush() -> None:
            if waiting:
                writer.write_table(pa.concat_tables(waiting))
                waiting.clear()

        def write(names: Sequence[str], p: np.ndarray) -> None:
            first, x, second, y = _columns(p, groups)
            values = [[as_text(name) for name in names], first, x, second, x - y]
            if groups.names:
                values.append([groups.names.get(cluster) for cluster in first.tolist()])
            arrays = [pa.array(value, field.type) for value, field in zip(values, schema, strict=True)]
            waiting.append(pa.Table.from_arrays(arrays, schema=schema))
            if sum(map(len, waiting)) >= ROW_GROUP:
                flush()

        yield write
        flush()


def as_text(name: str) -> str:
    r"""A file name as the Unicode that Parquet asks for: bytes that are none become \xff."""
    return name.encode("utf-8", errors="surrogateescape").decode("utf-8", errors="backslashreplace")
