"""A run's folder: settings, one row an epoch, the last checkpoint, and at the end model and results.

config.json        data source and every setting
metrics.csv        one row an epoch
last.ckpt          all training state and the rows so far (safetensors); previous.ckpt is the one before it
model/             config.json and model.safetensors: what predicts; groups.json, where clusters were regrouped
assignments.csv    path, cluster, confidence, runner_up, margin; and name, where a cluster was given one
probabilities.npy  of the clusters of the fit, in the same order: what the assignments are made from after a merge
embeddings.npy     one row an image, in the order of assignments.csv
skipped.csv        files that could not be read, with the reason
summary.json       final figures, time, versions
time.json          seconds that the run took until its checkpoint
schedule.json      where time is the budget: what was decided by it
report.html        a page to look at; report.safetensors holds its thumbnails and map
"""

import contextlib
import csv
import io
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from torch import Tensor

from semclust import __version__
from semclust.arrays import chunks, numpy_file
from semclust.assignments import assignments_file, csv_bytes, read_assignments, write_assignments
from semclust.config import is_number
from semclust.errors import DamagedFileError, InputError, plural
from semclust.groups import FILE, Groups
from semclust.storage import PART, WholeFile, read_json, read_tensors, write_json, write_tensors, write_whole

FORMAT = 4
ROWS_AT_ONCE = 8192
TEXTS = ("learns", "sizes")  # columns of metrics.csv that are not numbers
OF_A_FIT = (  # files that nothing else writes
    "config.json",
    "metrics.csv",
    "last.ckpt",
    "previous.ckpt",
    "time.json",
    "schedule.json",
    "skipped.csv",
    "probabilities.npy",
    "embeddings.npy",
    "summary.json",
    "model.safetensors",
)

Checkpoint = tuple[dict[str, Tensor], int, Path]  # tensors, whole epochs, and the file


class RunFolder:
    """Paths and formats of one run; holds no training state itself."""

    def __init__(self, path: Path):
        self.path = path
        self.made_for_it: list[Path] = []  # folders around it, the innermost first
        self.metrics = path / "metrics.csv"
        self.checkpoint = path / "last.ckpt"
        self.previous = path / "previous.ckpt"
        self.model = path / "model"
        self.assignments = path / "assignments.csv"
        self.schedule = path / "schedule.json"
        self.parquet = path / "assignments.parquet"
        self.probabilities = path / "probabilities.npy"
        self.embeddings = path / "embeddings.npy"

    @classmethod
    def create(cls, parent: Path, name: str) -> "RunFolder":
        """parent/name, or parent/name-2, -3, ...: never one that exists."""
        number = 1
        missing = [folder for folder in (parent, *parent.parents) if not os.path.exists(folder)]
        while True:
            path = parent / (name if number == 1 else f"{name}-{number}")
            try:
                path.mkdir(parents=True)
                made = cls(path)
                made.made_for_it = missing
                return made
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
        run = cls(path)
        if not run.assignments.exists() and not run.model.is_dir() and (path / "model.safetensors").exists():
            raise InputError(
                f"{str(path)!r} is a model folder; expected the run folder of `semclust fit`, such as runs/photos. "
                "In Python a model of its own can be changed: SemanticClusterer.load(path).merge([3, 7])"
            )
        return run

    @classmethod
    def of_job(cls, parent: Path, job: str, config: dict[str, Any], restarted: bool) -> "RunFolder | None":
        """The run that a job of torchrun began in ``parent`` with the same ``config``, so that the job can go on with
        it: the newest, if it has not finished. A job that was ``restarted`` also finds its finished one: some process
        ended while the first was writing the results. A seed of None stands for any, as it was drawn."""
        found = []
        for path in parent.glob("*/config.json"):
            run = cls(path.parent)
            with contextlib.suppress(DamagedFileError, OSError):
                stored = run.read_config()
                finished = (run.path / "summary.json").exists()
                if stored.get("job") == job and (restarted or not finished) and _is_run_of(config, stored):
                    found.append((path.stat().st_mtime, str(path), run))
        return max(found)[2] if found else None

    def abandon(self) -> None:
        """Remove the folder again, where nothing has been learned in it and no other process is about to."""
        with contextlib.suppress(InputError, OSError), self.locked():
            if self.metrics.exists() or self.checkpoint.exists() or self.previous.exists():
                return
            for name in ("config.json", "skipped.csv", "schedule.json", ".lock"):
                (self.path / name).unlink(missing_ok=True)
            for folder in (self.path, *self.made_for_it):
                folder.rmdir()  # refused where there is something else in it

    def write_config(self, config: dict[str, Any]) -> None:
        write_json(self.path / "config.json", {"format": FORMAT, "semclust": __version__, **config})

    def change_setting(self, name: str, value: Any) -> None:
        config = self.read_config()
        self.write_config(config | {"settings": config["settings"] | {name: value}})

    def read_config(self) -> dict[str, Any]:
        config = read_json(self.path / "config.json")
        if config.get("format") != FORMAT:
            raise DamagedFileError(
                f"{self.path / 'config.json'} has format {config.get('format')!r} (semclust "
                f"{config.get('semclust', 'unknown')}); this version reads {FORMAT}. Use the one that wrote it, or fit "
                "anew."
            )
        if (stored := self.read_schedule()) and isinstance(config.get("settings"), dict):
            epochs = stored[0].get("epochs")  # they follow from the budget of time
            if not is_number(epochs, whole=True):
                raise DamagedFileError(
                    f"{self.schedule} is damaged (epochs {epochs!r:.40}). Restore it from a copy, or fit anew."
                )
            config["settings"]["epochs"] = epochs
        return config

    # ---- while training --------------------------------------------------------------------------

    def append_metrics(self, row: dict[str, Any]) -> None:
        rows = metrics_csv([row])
        with open(self.metrics, "a", newline="", encoding="utf-8") as file:
            file.write(rows if not file.tell() else rows.split("\n", 1)[1])

    def write_metrics(self, content: bytes) -> None:
        """Let metrics.csv be ``content``, or where that is empty no file."""
        if content:
            write_whole(self.metrics, content)
        else:
            self.metrics.unlink(missing_ok=True)

    def read_metrics(self) -> list[dict[str, Any]]:
        """The rows as ``append_metrics`` got them; an empty cell is NaN."""
        if not self.metrics.exists():
            return []

        def value(name: str, cell: str) -> Any:
            if name in TEXTS and cell:
                return cell
            return int(cell) if cell.isdecimal() or name == "epoch" else float(cell or "nan")

        try:
            with open(self.metrics, newline="", encoding="utf-8") as file:
                rows = list(csv.DictReader(file))
            if any(None in row or None in row.values() for row in rows):
                raise ValueError("a row is longer or shorter than the first")
            return [{name: value(name, cell) for name, cell in row.items()} for row in rows]
        except (TypeError, ValueError, csv.Error) as error:
            raise DamagedFileError(f"{self.metrics} is damaged ({error}); restore it from a copy.") from error

    def write_checkpoint(self, tensors: dict[str, Tensor], epoch: int) -> None:
        """The last one stays as the previous one."""
        about = {"format": FORMAT, "semclust": __version__, "epoch": epoch}
        write_tensors(self.checkpoint, tensors, about, keep=self.previous)

    def read_checkpoint(self, path: Path | None = None) -> tuple[dict[str, Tensor], int]:
        """Tensors and whole epochs of the last checkpoint, or of that in ``path``."""
        path = path or self.checkpoint
        tensors, about = read_tensors(path)
        epoch = about.get("epoch")
        if about.get("format") != FORMAT or not isinstance(epoch, int):
            raise DamagedFileError(
                f"{path} has format {about.get('format')!r}, written by semclust "
                f"{about.get('semclust', '(unknown version)')}; this version reads format {FORMAT}. "
                "Resume the run with that version, or fit again."
            )
        return tensors, epoch

    def newest_checkpoint(self, on_notice: Callable[[str], None]) -> Checkpoint | None:
        """The last checkpoint or, where it is damaged or missing, with a notice the previous one; None where the run
        has not come to one yet."""
        if not self.previous.exists():
            return (*self.read_checkpoint(), self.checkpoint) if self.checkpoint.exists() else None
        try:
            return *self.read_checkpoint(), self.checkpoint
        except DamagedFileError as damage:
            try:
                tensors, epoch = self.read_checkpoint(self.previous)
            except DamagedFileError as error:
                raise DamagedFileError(f"{damage} The one before it is no help: {error}") from error
            on_notice(f"{damage} The run goes on from the checkpoint before it, {self.previous.name}.")
            return tensors, epoch, self.previous

    def remove_parts(self) -> None:
        """Remove what a fit that was killed had half written."""
        for folder in (self.path, self.model):
            for path in folder.glob(".*.part"):
                name = PART.fullmatch(path.name)
                if name and name[1] in OF_A_FIT:
                    path.unlink(missing_ok=True)

    def write_seconds(self, seconds: float) -> None:
        """How long the run took until its checkpoint. In a file of its own: all others are the same to the byte
        whether a run was interrupted or not."""
        write_json(self.path / "time.json", {"seconds": round(seconds, 1)})

    def read_seconds(self) -> float:
        try:
            seconds = float(read_json(self.path / "time.json")["seconds"])
        except (DamagedFileError, KeyError, OverflowError, TypeError, ValueError):
            return 0.0  # a time is not worth an error
        return seconds if 0 <= seconds < math.inf else 0.0

    def write_schedule(self, schedule: dict[str, Any]) -> None:
        """What ``budget.Schedule`` decided, before the epoch that it is about."""
        write_json(self.schedule, schedule)

    def read_schedule(self) -> tuple[dict[str, Any], Path] | None:
        """The same and the file it lies in; None where nothing was decided."""
        return (read_json(self.schedule), self.schedule) if self.schedule.exists() else None

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep others from fitting in this folder. The lock ends with the process, however that ends."""
        with open(self.path / ".lock", "a+", encoding="ascii") as file:
            if not take_lock(file):
                file.seek(0)
                holder = file.read(20).strip() or "unknown"
                raise InputError(f"{self.path} is being fitted by another process ({holder}). Wait for it, or stop it.")
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
            yield

    # ---- results ---------------------------------------------------------------------------------

    def write_skipped(self, skipped: Sequence[tuple[str, str]]) -> None:
        if skipped:
            write_whole(self.path / "skipped.csv", csv_bytes(("path", "reason"), skipped))

    def write_results(
        self, names: Sequence[str], p: np.ndarray, q: np.ndarray, summary: dict[str, Any], groups: Groups | None = None
    ) -> None:
        """p: N x C, of the clusters of the fit; the assignments are those of ``groups``."""
        for path, array in ((self.probabilities, p), (self.embeddings, q)):
            with WholeFile(path) as file:
                np.save(file, array)
        write_assignments(self.assignments, names, p, groups)
        write_json(self.path / "summary.json", summary)

    # ---- groups after the fit --------------------------------------------------------------------

    @classmethod
    def open_finished(cls, path: Path) -> "RunFolder":
        """A run whose results are there, to regroup or export them."""
        run = cls.open(path)
        if not run.model.is_dir():
            raise unfinished(path)
        return run

    def read_groups(self, n_clusters: int) -> Groups:
        """What was made of the ``n_clusters`` of the fit since; of a run that has not finished yet, nothing."""
        return Groups.read(self.model) if (self.model / FILE).exists() else Groups(n_clusters)

    def read_results(self, n_clusters: int) -> tuple[list[str], np.ndarray, np.ndarray]:
        """Names, probabilities (N x C, of the clusters of the fit) and embeddings; the arrays are mapped."""
        names, p = self.read_probabilities(n_clusters)
        return names, p, self.read_embeddings(len(names))

    def read_probabilities(self, n_clusters: int) -> tuple[list[str], np.ndarray]:
        """The first two of these."""
        names = read_assignments(self.assignments).names
        p = self._read_array(self.probabilities, len(names))
        if p.shape[1] != n_clusters:
            raise DamagedFileError(
                f"{self.probabilities} has the shape {p.shape}; expected {n_clusters} clusters. "
                f"`semclust fit --resume {self.path}` writes it again."
            )
        return names, p

    def read_embeddings(self, n_images: int) -> np.ndarray:
        """embeddings.npy, mapped: N x d, a row for each of the ``n_images`` of assignments.csv."""
        return self._read_array(self.embeddings, n_images)

    def _read_array(self, path: Path, n_images: int) -> np.ndarray:
        again = f"`semclust fit --resume {self.path}` writes it"
        if not path.exists():
            raise InputError(f"{path} is missing: has the run finished? {again}.")
        try:
            with numpy_file(path) as array:
                if not isinstance(array, np.ndarray) or array.ndim != 2 or array.dtype.kind != "f":
                    raise InputError("It is no table of numbers.")
        except InputError as error:
            raise DamagedFileError(f"{path} is damaged. {again} again.") from error
        if len(array) != n_images:
            raise DamagedFileError(
                f"{path} has the shape {array.shape}, but assignments.csv {plural(n_images, 'row')}. {again} again."
            )
        return array

    def write_groups(self, groups: Groups) -> np.ndarray:
        """Store ``groups`` beside the model and let the assignments follow: all, or where one fails none.

        Returns how many images each cluster has, by id."""
        tables = [self.assignments, *([self.parquet] if self.parquet.exists() else [])]
        return self.write_tables(tables, groups, store=True)

    def write_tables(self, paths: Sequence[Path], groups: Groups, store: bool = False) -> np.ndarray:
        """Assignments by ``groups`` as CSV or Parquet, by the ending of each path."""
        names, p = self.read_probabilities(groups.n_clusters)
        sizes = np.zeros(groups.n_clusters, np.int64)
        with contextlib.ExitStack() as stack:
            writes = [stack.enter_context(assignments_file(WholeFile(path), groups)) for path in paths]
            for start in range(0, len(names), ROWS_AT_ONCE):
                part = groups.apply(p[start : start + ROWS_AT_ONCE])
                sizes += groups.sizes(part)
                for write in writes:
                    write(names[start : start + ROWS_AT_ONCE], part)
            if store:
                groups.write(self.model)
        return sizes


def _is_run_of(config: dict[str, Any], stored: dict[str, Any]) -> bool:
    """Whether a run with the config ``stored`` is of the same data and settings; a seed of None stands for any."""
    settings = dict(stored.get("settings", {}))
    settings["precision"] = config["settings"]["precision"]  # that of the machine where it began
    if config["settings"].get("minutes") is not None:  # by which the epochs were decided since
        settings["epochs"] = config["settings"]["epochs"]
    if config["settings"]["random_state"] is None:
        settings["random_state"] = None
    return settings == config["settings"] and all(
        stored.get(name) == config[name] for name in ("data", "labels", "fingerprint")
    )


def metrics_csv(rows: Sequence[dict[str, Any]]) -> str:
    """A header and a line for each row; NaN is an empty cell."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(rows[0])
    for row in rows:
        writer.writerow("" if value != value else value for value in row.values())
    return text.getvalue()


def model_folder(path: Path) -> Path:
    """The model inside a run folder of `semclust fit`; a model folder is its own."""
    run = RunFolder(path)
    if run.model.is_dir():
        return run.model
    if run.metrics.exists() or run.checkpoint.exists() or run.previous.exists():
        raise unfinished(path)
    return path


def unfinished(path: Path) -> InputError:
    return InputError(f"The run {str(path)!r} has no model yet; finish it with: semclust fit --resume {path}")


def fingerprint(pixels: np.ndarray, names: Sequence[str]) -> str:
    """Tells whether a resumed run sees the images it began with."""
    import hashlib

    digest = hashlib.sha256(json.dumps([list(pixels.shape), list(names)]).encode())
    for rows in chunks(len(pixels), pixels[:1].size):  # a mapped file may be larger than the memory
        digest.update(np.ascontiguousarray(pixels[rows]).data)
    return digest.hexdigest()


def take_lock(file: IO[str]) -> bool:
    """Whether this process now holds the file, or the file system cannot tell."""
    try:
        import fcntl
    except ImportError:  # Windows
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a network file system without locks
        pass
    return True
