"""A run's folder: settings, one row an epoch, the last checkpoint, and at the end model and results.

config.json      data source and every setting
metrics.csv      one row an epoch
last.ckpt        all training state after the last whole epoch (safetensors)
model/           config.json and model.safetensors: what predicts
assignments.csv  path, cluster, confidence, runner_up, margin
embeddings.npy   one row an image, in the order of assignments.csv
skipped.csv      files that could not be read, with the reason
summary.json     final figures, time, versions
report.html      a page to look at; report.safetensors holds its thumbnails and map
"""

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from semclust import __version__
from semclust.errors import DamagedFileError, InputError
from semclust.storage import read_json, read_tensors, write_json, write_tensors, write_whole

FORMAT = 1
ASSIGNMENTS = ("path", "cluster", "confidence", "runner_up", "margin")


class RunFolder:
    """Paths and formats of one run; holds no training state itself."""

    def __init__(self, path: Path):
        self.path = path
        self.metrics = path / "metrics.csv"
        self.checkpoint = path / "last.ckpt"
        self.model = path / "model"
        self.assignments = path / "assignments.csv"

    @classmethod
    def create(cls, parent: Path, name: str) -> "RunFolder":
        """parent/name, or parent/name-2, -3, ...: never one that exists."""
        number = 1
        while True:
            path = parent / (name if number == 1 else f"{name}-{number}")
            try:
                path.mkdir(parents=True)
                return cls(path)
            except FileExistsError:
                if not parent.is_dir():
                    raise InputError(f"{str(parent)!r} is a file; expected a folder for runs (--out).") from None
                number += 1
            except OSError as error:
                raise InputError(
                    f"Cannot make the run folder {str(path)!r}: {error.strerror}. Choose --out."
                ) from error

    @classmethod
    def open(cls, path: Path) -> "RunFolder":
        if not path.is_dir():
            raise InputError(
                f"{str(path)!r} is not a run folder; expected one that `semclust fit` made, such as runs/photos."
            )
        if not (path / "config.json").exists():
            raise InputError(f"{str(path)!r} holds no config.json, so it is not a run folder of `semclust fit`.")
        return cls(path)

    def write_config(self, config: dict[str, Any]) -> None:
        write_json(self.path / "config.json", {"format": FORMAT, "semclust": __version__, **config})

    def read_config(self) -> dict[str, Any]:
        config = read_json(self.path / "config.json")
        if config.get("format") != FORMAT:
            raise DamagedFileError(
                f"{self.path / 'config.json'} has format {config.get('format')!r} (semclust "
                f"{config.get('semclust', 'unknown')}); this version reads {FORMAT}. Resume it with that version."
            )
        return config

    # ---- while training --------------------------------------------------------------------------

    def append_metrics(self, row: dict[str, Any]) -> None:
        new = not self.metrics.exists()
        with open(self.metrics, "a", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            if new:
                writer.writerow(row)
            writer.writerow("" if value != value else value for value in row.values())  # NaN: an empty cell

    def read_metrics(self) -> list[dict[str, Any]]:
        """The rows as ``append_metrics`` got them; an empty cell is NaN."""
        if not self.metrics.exists():
            return []

        def value(name: str, cell: str) -> Any:
            return cell if name == "sizes" and cell else int(cell) if name == "epoch" else float(cell or "nan")

        try:
            with open(self.metrics, newline="", encoding="utf-8") as file:
                return [{name: value(name, cell) for name, cell in row.items()} for row in csv.DictReader(file)]
        except (TypeError, ValueError) as error:
            raise DamagedFileError(f"{self.metrics} is damaged ({error}); restore it from a copy.") from error

    def drop_metrics_after(self, epoch: int) -> None:
        """Forget rows of epochs that no checkpoint holds: they are about to be repeated."""
        if not self.metrics.exists():
            return
        try:
            header, *rows = self.metrics.read_text(encoding="utf-8").splitlines(keepends=True) or [""]
            kept = [row for row in rows if row.endswith("\n") and int(row.split(",", 1)[0]) <= epoch]
        except ValueError as error:
            raise DamagedFileError(f"{self.metrics} is damaged ({error}); restore it from a copy.") from error
        if kept:
            write_whole(self.metrics, "".join([header, *kept]).encode())
        else:
            self.metrics.unlink()

    def write_checkpoint(self, tensors: dict[str, Tensor], epoch: int) -> None:
        write_tensors(self.checkpoint, tensors, {"format": FORMAT, "epoch": epoch})

    def read_checkpoint(self) -> tuple[dict[str, Tensor], int]:
        tensors, about = read_tensors(self.checkpoint)
        epoch = about.get("epoch")
        if about.get("format") != FORMAT or not isinstance(epoch, int):
            raise DamagedFileError(f"{self.checkpoint} is not a checkpoint of this version of semclust. Fit again.")
        return tensors, epoch

    # ---- results ---------------------------------------------------------------------------------

    def write_skipped(self, skipped: Sequence[tuple[str, str]]) -> None:
        if skipped:
            write_whole(self.path / "skipped.csv", csv_bytes(("path", "reason"), skipped))

    def write_results(self, names: Sequence[str], p: np.ndarray, q: np.ndarray, summary: dict[str, Any]) -> None:
        write_assignments(self.assignments, names, p)
        buffer = io.BytesIO()
        np.save(buffer, q)
        write_whole(self.path / "embeddings.npy", buffer.getvalue())
        write_json(self.path / "summary.json", summary)


def model_folder(path: Path) -> Path:
    """The model inside a run folder of `semclust fit`; a model folder is its own."""
    run = RunFolder(path)
    if run.model.is_dir():
        return run.model
    if run.metrics.exists() or run.checkpoint.exists():
        raise InputError(f"The run {str(path)!r} has no model yet; finish it with: semclust fit --resume {path}")
    return path


def free_path(path: Path) -> Path:
    """``path``, or with -2, -3, ... before its ending: one that does not exist."""
    number, free = 1, path
    while free.exists() or free.is_symlink():
        number += 1
        free = path.with_stem(f"{path.stem}-{number}")
    return free


def write_assignments(path: Path, names: Sequence[str], p: np.ndarray) -> None:
    """One row an image from the probabilities p (N x C)."""
    write_whole(path, csv_bytes(ASSIGNMENTS, assignment_rows(names, p)))


def assignment_rows(names: Sequence[str], p: np.ndarray) -> list[tuple[Any, ...]]:
    order = np.argsort(-p, axis=1, kind="stable")[:, :2]
    first, second = np.take_along_axis(p, order, axis=1).T
    return [
        (name, int(a), f"{x:.4f}", int(b), f"{x - y:.4f}")
        for name, (a, b), x, y in zip(names, order, first, second, strict=True)
    ]


def read_assignments(path: Path) -> tuple[list[str], np.ndarray]:
    """Names and clusters of ``write_assignments``."""
    try:
        with open(path, newline="", encoding="utf-8", errors="surrogateescape") as file:
            rows = list(csv.DictReader(file))
        if not rows:
            raise ValueError("it holds no row")
        return [row["path"] for row in rows], np.array([int(row["cluster"]) for row in rows])
    except FileNotFoundError:
        raise InputError(f"{path} is missing: has the run finished? `semclust fit --resume {path.parent}`") from None
    except (KeyError, TypeError, ValueError, csv.Error) as error:
        raise DamagedFileError(
            f"{path} is damaged ({error!r}); expected the columns {', '.join(ASSIGNMENTS)}."
        ) from error


def csv_bytes(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> bytes:
    text = io.StringIO()
    # A carriage return in a name is not quoted by itself, and would read as the end of a row.
    returns = any("\r" in str(cell) for row in rows for cell in row)
    writer = csv.writer(text, lineterminator="\n", quoting=csv.QUOTE_ALL if returns else csv.QUOTE_MINIMAL)
    writer.writerow(header)
    writer.writerows(rows)
    return text.getvalue().encode("utf-8", errors="surrogateescape")


def fingerprint(pixels: np.ndarray, names: Sequence[str]) -> str:
    """Tells whether a resumed run sees the images it began with."""
    import hashlib

    digest = hashlib.sha256(json.dumps([list(pixels.shape), list(names)]).encode())
    digest.update(np.ascontiguousarray(pixels).data)
    return digest.hexdigest()
