"""From images and settings to a finished model: the loop around ``train.Training``."""

import contextlib
import math
import os
import platform
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from semclust import __version__, cache, metrics
from semclust.augment import choose_augmentation
from semclust.budget import Pace, Schedule, make_schedule
from semclust.checkpoints import CheckpointWriter
from semclust.config import Settings, check
from semclust.data import Images
from semclust.devices import choose_device
from semclust.distributed import ALONE, Group
from semclust.errors import DamagedFileError, InputError, NotFiniteError, StoppedError, TrainingError, in_short, plural
from semclust.plan import check_shares, decided
from semclust.predictor import BATCH, Predictor
from semclust.run_folder import RunFolder, metrics_csv
from semclust.signals import StopSignals, ended_by_sigterm
from semclust.storage import on_host
from semclust.train import Training

QUICK_CHECKPOINT = 0.1  # seconds; while training waits no longer for one, there is one after every epoch
CHECKPOINT_SHARE = 0.05  # of the time, that training may wait for longer ones: then some epochs go without
CHECKPOINT_EVERY = 600  # seconds, also within an epoch
ASK_EVERY = 8  # steps after which several processes ask each other for signals
LOWER_RATE = 1 / 3  # times the learning rate, after steps that were not finite


class Watcher:
    """What a fit tells while it runs. The methods do nothing; a face overrides what it shows."""

    def timing(self, minutes: float) -> None: ...  # before begin, where a budget of time is about to be planned for
    def begin(self, training: Training) -> None: ...  # and again with another, where the run went back
    def step(self, n_images: int) -> None: ...
    def epoch(self, row: dict[str, Any]) -> None: ...
    def warn(self, message: str) -> None: ...


@dataclass
class Fitted:
    """What a fit gives. Of several processes the first has p and q; the others' have no rows."""

    predictor: Predictor
    p: np.ndarray  # N x C probabilities, clusters numbered by size
    q: np.ndarray  # N x d embeddings
    history: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    seconds: float = 0.0  # of the whole run, also of before an interruption

    @property
    def labels(self) -> np.ndarray:
        return self.p.argmax(1)


def fit(
    images: Images,
    settings: Settings,
    watcher: Watcher | None = None,
    run: RunFolder | None = None,
    group: Group = ALONE,
) -> Fitted:
    """Learn features and clusters of ``images``; with ``run``, keep rows and checkpoints there and go on
    from its last checkpoint if it has one. Labels of the images only add ACC, NMI and ARI to the rows.
    Of several processes (``group``), the first alone is given the run folder.

    With ``run``, SIGINT and SIGTERM end the fit after its step, with a checkpoint and StoppedError."""
    watcher = watcher or Watcher()
    started = time.monotonic()
    with run.locked() if run is not None else contextlib.nullcontext():
        fitting = Fitting(images, settings, watcher, run, group)
        settings = fitting.settings  # with the number of epochs, where that follows from the budget
        finished_before = fitting.training.epoch == settings.n_epochs
        watcher.begin(fitting.training)
        fitting.learn()
        training = fitting.training
        predictor = Predictor.from_learner(training.learner, settings, images.pixels.shape[1:], images.value_range)
        probabilities, q = predict_all(predictor, images.pixels, training.device, group)
        fitting.check_images()
    order = predictor.number_by_size(probabilities.argmax(1))
    seconds = fitting.seconds_before + (0.0 if finished_before else time.monotonic() - started)
    return Fitted(predictor, probabilities[:, order], q, fitting.history, fitting.warnings, seconds)


def predict_all(
    predictor: Predictor, pixels: np.ndarray, device: torch.device, group: Group
) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities and embeddings of all images, each rank's share of them computed there, on the first rank."""
    n = len(pixels)
    start, stop = group.bounds(n, at_once=BATCH)  # in whole batches: the same that one process computes
    found = predictor(pixels[start : max(stop, start + 1)] if start < n else pixels[:1], device)
    p, q = (torch.from_numpy(rows[: stop - start]) for rows in found)
    return tuple(group.gather_to_first(x, n, BATCH).numpy() for x in (p, q))  # type: ignore[return-value]


class Fitting:
    """The loop over the epochs: rows, checkpoints, warnings, and what to do when something fails."""

    def __init__(self, images: Images, settings: Settings, watcher: Watcher, run: RunFolder | None, group: Group):
        self.images, self.settings, self.watcher, self.run, self.group = images, settings, watcher, run, group
        self.signals: StopSignals | None = None
        self.file = mapped_file(images.pixels)
        self.history: list[dict[str, Any]] = []
        self.warnings: list[str] = []
        self.complained: set[str] = set()
        self.writer = CheckpointWriter(run) if run is not None else None
        self.started, self.seconds_before = time.monotonic(), 0.0  # of training, before an interruption
        self.last_checkpoint, self.waited = self.started, 0.0
        self.kept = (-1, 0)  # epoch and step of the last checkpoint
        self.rows_missing = False  # metrics.csv could not be written
        if run is not None:
            run.remove_parts()
            begun = run.checkpoint.exists() or run.previous.exists()
            if not begun and (run.model.exists() or len(run.read_metrics()) > 1):
                raise InputError(f"{run.checkpoint} is missing, so the run cannot go on. Restore it, or fit anew.")
            self.seconds_before = run.read_seconds() if begun else 0.0
        self.training = start(images, settings, self.warn, group)
        self.share_of_steps = keep_to_budget(self.training, run, self.seconds, watcher)
        self.settings = self.training.settings
        if run is not None:
            if self.settings.precision != settings.precision != "auto":  # it is so from now on, wherever it goes on
                run.change_setting("precision", self.settings.precision)
            self.go_on_from_checkpoint(run)
        self.history = self.training.take_over(self.history)
        for row in self.history:
            self.complain(row, aloud=False)

    def seconds(self) -> float:
        """That the run has taken so far, also before an interruption."""
        return self.seconds_before + time.monotonic() - self.started

    def learn(self) -> None:
        """Epoch after epoch, to the last."""
        listens = self.group.from_first(lambda: self.run is not None)  # what a signal ends, a run folder keeps
        with StopSignals(self.group) if listens else contextlib.nullcontext() as self.signals, self.writing():
            while self.training.epoch < self.settings.n_epochs:
                try:
                    share = self.share_of_steps(self.training.epoch)
                    row, p = self.training.run_epoch(self.after_step, share)
                except NotFiniteError as error:
                    self.lower_rate(error)
                    continue
                self.after_epoch(row, p)
                self.stop_if_asked()

    def after_step(self, n_images: int) -> None:
        if n_images:
            self.watcher.step(n_images)
        if self.group.alone or (n_images and self.training.step % ASK_EVERY == 0):
            self.stop_if_asked()
        if self.run is not None and time.monotonic() - self.last_checkpoint >= CHECKPOINT_EVERY:
            self.keep()

    def after_epoch(self, row: dict[str, Any], p: Tensor) -> None:
        if self.images.labels is not None and self.group.first:
            clustered = not math.isnan(row["score"])
            found = metrics.evaluate(p.argmax(1).cpu().numpy(), self.images.labels) if clustered else {}
            row |= dict.fromkeys(metrics.FIGURES, math.nan) | found
        # metrics.csv keeps the columns that it began with.
        self.history.append({name: row.get(name, math.nan) for name in (self.history or [row])[0]})
        if self.run is not None:
            self.write_row(self.run, self.history[-1])
            since = time.monotonic() - self.last_checkpoint
            last = self.training.epoch == self.settings.n_epochs
            if last or self.waited <= QUICK_CHECKPOINT or since >= self.waited / CHECKPOINT_SHARE:
                self.keep()
        self.watcher.epoch(row)
        self.complain(row)

    # ---- warnings --------------------------------------------------------------------------------

    def warn(self, message: str) -> None:
        """Tell it, and keep it for the summary; once."""
        if message not in self.warnings:
            self.warnings.append(message)
            self.watcher.warn(message)

    def complain(self, row: dict[str, Any], aloud: bool = True) -> None:
        """Warn of what is wrong with an epoch; of each thing once, in the first epoch that it is seen in."""
        training = self.training
        steps = row["epoch"] * training.n_batches
        for what, message in metrics.complaints(row, self.settings, training.peak_rate, steps).items():
            if what not in self.complained:
                self.complained.add(what)
                self.warnings.append(message)
                if aloud:
                    self.watcher.warn(message)

    # ---- checkpoints -----------------------------------------------------------------------------

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """However the block is left, no checkpoint is being written after it; the last one must be."""
        try:
            yield
        except BaseException:
            if self.writer is not None:
                self.writer.settle()
            raise
        if self.writer is not None and (failure := self.writer.settle()):
            raise failure

    def keep(self) -> None:
        """Hand a copy of all state to the thread that writes it."""
        assert self.run is not None and self.writer is not None
        began = time.monotonic()
        self.tell_failure(self.writer.settle())
        self.check_images()
        first = not self.run.checkpoint.exists()
        if self.training.is_finite():  # what is not would not be a good one to go back to
            state = on_host(self.training.state())
            state["metrics"] = as_bytes(metrics_csv(self.history) if self.history else "")
            self.writer.write(state, self.training.epoch, self.seconds_before + began - self.started)
            self.kept = (self.training.epoch, self.training.step)
        self.last_checkpoint = time.monotonic()
        self.waited = self.last_checkpoint - began
        if first:  # until there is one, a run that is killed has nothing to go back to
            self.tell_failure(self.writer.settle())

    def tell_failure(self, failure: OSError | None) -> None:
        if failure is not None:
            self.kept = (-1, 0)  # at least not this one
            self.warn(
                f"A checkpoint could not be written ({in_short(failure)}); the one before it is whole. The run goes on "
                "and tries again. Look after the disk and the folder."
            )

    def write_row(self, run: RunFolder, row: dict[str, Any]) -> None:
        """Where that fails, the rows are written once they can be; every checkpoint has them too."""
        try:
            if self.rows_missing:
                run.write_metrics(metrics_csv(self.history).encode())
            else:
                run.append_metrics(row)
            self.rows_missing = False
        except OSError as error:
            self.rows_missing = True
            self.warn(f"{run.metrics} could not be written ({in_short(error)}). The run goes on and tries again.")

    def go_on_from_checkpoint(self, run: RunFolder) -> None:
        """Rows of epochs that the checkpoint does not hold are forgotten: they are about to be repeated."""
        found = run.newest_checkpoint(self.warn)
        if found is None:
            run.write_metrics(b"")
            self.history = []
            return
        tensors, epoch, path = found
        self.training.load_state(tensors, epoch, path)
        if "metrics" not in tensors:
            raise DamagedFileError(f"{path} lacks the rows of metrics.csv. Restore it from a copy, or fit anew.")
        run.write_metrics(tensors["metrics"].numpy().tobytes())
        self.history = run.read_metrics()
        if self.training.rate_factor < 1:
            self.warnings.append(self.lower_rate_in_words())

    # ---- faults ----------------------------------------------------------------------------------

    def stop_if_asked(self) -> None:
        """Where a signal has come to any process, write a checkpoint and raise StoppedError."""
        received = self.group.highest(self.signals.received or 0) if self.signals is not None else 0
        if received:
            told = self.group.from_first(lambda: self.keep_last(signal.Signals(received)))
            raise StoppedError(told, 128 + received)

    def keep_last(self, received: signal.Signals) -> str:
        """Write a last checkpoint, and tell so."""
        assert self.writer is not None
        training = self.training
        within = f" and {plural(training.step, 'step')}" if training.step else ""
        where = f"after {plural(training.epoch, 'epoch')}{within}"
        told = f"Stopped by {received.name} {where}"
        here = (training.epoch, training.step)
        if self.kept != here:
            self.keep()
        if failure := self.writer.settle():
            told += f". The checkpoint could not be written ({in_short(failure)}), but the one before it is whole"
        elif self.kept != here:  # it could not be written, as was told, or is not finite
            told += ", of which no checkpoint could be kept; the one before it is whole"
        return f"{told}."

    def lower_rate(self, error: NotFiniteError) -> None:
        """Go back to the last good checkpoint, or to the start, with a lower learning rate; the second time, end."""
        rate = self.training.peak_rate
        if self.training.rate_factor < 1:
            raise TrainingError(
                f"{error} The learning rate had been lowered before, to {rate * LOWER_RATE:.2g}, which did not help. "
                f"Lower the learning rate (now {rate}), for example to {rate / 10:.2g}, or look at your own backbone "
                "or augmentation where you use one."
            ) from error
        if self.writer is not None:
            self.tell_failure(self.writer.settle())
        error.__traceback__ = None
        del self.training  # its memory is needed for the next one, and nothing else holds it
        self.training = start(self.images, self.settings, self.warn, self.group)
        self.history = []
        if self.run is not None:
            self.go_on_from_checkpoint(self.run)
        self.history = self.training.take_over(self.history)
        self.training.rate_factor = LOWER_RATE
        self.warn(f"{error} {self.lower_rate_in_words()} It went on from epoch {self.training.epoch}.")
        self.watcher.begin(self.training)

    def lower_rate_in_words(self) -> str:
        rate = self.training.peak_rate
        return f"The learning rate was lowered from {rate} to {rate * LOWER_RATE:.2g}, since steps were not finite."

    def check_images(self) -> None:
        """Raise where the file that the images are read from, as they are needed, has changed since the start."""
        if self.file is None:
            return
        path, before = self.file
        try:
            now = os.stat(path)
        except OSError:
            return  # what is mapped stays readable when its name has gone, or means another file
        if os.path.samestat(now, before) and (now.st_size, now.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
            raise InputError(f"{path} changed while it was being fitted. Restore it and resume the run, or fit anew.")


def keep_to_budget(
    training: Training, run: RunFolder | None, seconds: Callable[[], float], watcher: Watcher
) -> Callable[[int], float]:
    """Plan a run for as many epochs as fit into its minutes, where it has such a budget. Returns what tells, before
    each epoch (from 0), the share of its steps to take. Of a run that goes on, what was decided before holds."""
    minutes = training.settings.minutes
    if minutes is None:
        return lambda epoch: 1.0
    stored = run.read_schedule() if run is not None else None
    if stored is not None:
        schedule = Schedule.from_json(*stored)
        training.set_epochs(schedule.epochs)
    elif run is not None and (run.checkpoint.exists() or run.previous.exists()):
        raise DamagedFileError(f"{run.path / 'schedule.json'} is missing. Restore it from a copy, or fit anew.")
    else:
        watcher.timing(minutes)
        told = "Stopped by SIGTERM while steps were timed; nothing has been learned yet."
        with ended_by_sigterm(told) if run is not None else contextlib.nullcontext():
            schedule = make_schedule(training, minutes, seconds)
    pace = Pace(schedule, training, minutes, seconds, resumed=stored is not None)

    def share_of_steps(epoch: int) -> float:
        share = pace.share(epoch)
        if run is not None:
            run.write_schedule(schedule.to_json())
        return share

    return share_of_steps


def mapped_file(pixels: np.ndarray) -> tuple[str, os.stat_result] | None:
    """The user's file that ``pixels`` are a map of; None where they are none. A file of the cache is written once."""
    base: Any = pixels
    while base is not None and not isinstance(base, np.memmap):
        base = getattr(base, "base", None)
    if base is None or base.filename is None or str(base.filename).endswith(cache.SUFFIX):
        return None
    try:
        return str(base.filename), os.stat(base.filename)
    except OSError:
        return None


def as_bytes(text: str) -> Tensor:
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)


def check_suits(images: Images, settings: Settings, group: Group = ALONE) -> None:
    """Raise InputError where the settings are wrong in themselves, for these images, or for so many processes."""
    check(settings)
    choose_device(settings.device)
    if settings.minutes is not None and not group.alone:
        raise InputError(f"minutes={settings.minutes} with {group}: expected one process, or a number of epochs.")
    n, C = len(images.pixels), settings.n_clusters
    if n < 4:
        raise InputError(f"{plural(n, 'image')}: expected at least 4, and a few hundred to learn anything.")
    if n < 2 * C:
        raise InputError(f"n_clusters={C}, but there are only {n} images; choose a k of at most {n // 2}.")
    check_shares(settings, n, group)


def start(
    images: Images,
    settings: Settings,
    on_notice: Callable[[str], None] = lambda message: None,
    group: Group = ALONE,
    kind: type[Training] = Training,
) -> Training:
    """A run at epoch 0."""
    check_suits(images, settings, group)
    device = group.device(settings.device)
    settings = decided(settings, images.pixels, device)
    augmentation = choose_augmentation(settings.augment, settings.crop_size)
    return kind(images.pixels, settings, augmentation, device, on_notice, group)


def draw_seed(settings: Settings) -> Settings:
    """The same settings with a seed, drawn if there was none: what a run folder must remember."""
    if settings.random_state is not None:
        return settings
    return replace(settings, random_state=int(np.random.SeedSequence().generate_state(1)[0]))


def summarise(fitted: Fitted, images: Images) -> dict[str, Any]:
    """The figures at the end of a run, as plain JSON values."""
    labels, p = fitted.labels, fitted.p
    sizes = np.bincount(labels, minlength=p.shape[1])
    figures = metrics.evaluate(labels, images.labels) if images.labels is not None else {}
    return {
        "semclust": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": str(next(fitted.predictor.network.parameters()).device),
        "n_images": len(labels),
        "n_skipped": len(images.skipped),
        "image_shape": list(fitted.predictor.image_shape),
        "seconds": round(fitted.seconds, 1),
        "score": fitted.history[-1]["score"],  # label-free
        "label_free_epoch": metrics.best_epoch(fitted.history),
        **figures,
        "clusters": [
            {"cluster": c, "size": int(sizes[c]), "confidence": _mean(p[labels == c, c])} for c in range(len(sizes))
        ],
        "warnings": fitted.warnings,
    }


def _mean(values: np.ndarray) -> float | None:
    return float(values.mean()) if len(values) else None
