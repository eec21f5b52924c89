"""From images and settings to a finished model: the loop around ``train.Training``."""

import contextlib
import math
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from semclust import __version__, metrics
from semclust.augment import choose_augmentation
from semclust.budget import Pace, Schedule, make_schedule
from semclust.config import Settings, check
from semclust.data import Images
from semclust.devices import choose_device
from semclust.errors import DamagedFileError, InputError
from semclust.predictor import Predictor
from semclust.run_folder import RunFolder
from semclust.train import Training

QUICK_CHECKPOINT = 0.1  # seconds; one that takes no longer is written after every epoch
CHECKPOINT_SHARE = 0.05  # of the time, that longer ones may take: then some epochs go without


class Watcher:
    """What a fit tells while it runs. The methods do nothing; a face overrides what it shows."""

    def begin(self, training: Training) -> None: ...
    def step(self, n_images: int) -> None: ...
    def epoch(self, row: dict[str, Any]) -> None: ...
    def warn(self, message: str) -> None: ...


@dataclass
class Fitted:
    """What a fit gives."""

    predictor: Predictor
    p: np.ndarray  # N x C probabilities, clusters numbered by size
    q: np.ndarray  # N x d embeddings
    history: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    seconds: float = 0.0  # of the whole run, also of before an interruption

    @property
    def labels(self) -> np.ndarray:
        return self.p.argmax(1)


def fit(images: Images, settings: Settings, watcher: Watcher | None = None, run: RunFolder | None = None) -> Fitted:
    """Learn features and clusters of ``images``; with ``run``, keep rows and checkpoints there and go on
    from its last checkpoint if it has one. Labels of the images only add ACC, NMI and ARI to the rows."""
    with run.locked() if run is not None else contextlib.nullcontext():
        return _fit(images, settings, watcher or Watcher(), run)


def _fit(images: Images, settings: Settings, watcher: Watcher, run: RunFolder | None) -> Fitted:
    started = time.monotonic()
    seconds_before = run.read_seconds() if run is not None and run.checkpoint.exists() else 0.0

    def seconds() -> float:
        """That the run has taken so far, also before an interruption."""
        return seconds_before + time.monotonic() - started

    training = start(images, settings, watcher.warn)
    history: list[dict[str, Any]] = []
    if run is not None and not run.checkpoint.exists() and (run.model.exists() or len(run.read_metrics()) > 1):
        raise InputError(f"{run.checkpoint} is missing, so the run cannot go on. Restore it, or fit anew.")
    share_of_steps = keep_to_budget(training, run, seconds)
    settings = training.settings  # with the number of epochs, where that follows from the budget
    if run is not None:
        if run.checkpoint.exists():
            tensors, epoch = run.read_checkpoint()
            training.load_state(tensors, epoch, run.checkpoint)
        run.drop_metrics_after(training.epoch)
        history = run.read_metrics()
        if len(history) != training.epoch:
            raise DamagedFileError(
                f"{run.metrics} holds {len(history)} epochs, but {run.checkpoint} {training.epoch}. "
                "Restore metrics.csv from a copy, or fit anew."
            )
    warnings = list(dict.fromkeys(m for row in history for m in metrics.complaints(row, settings)))
    watcher.begin(training)
    finished_before = training.epoch == settings.epochs
    last_checkpoint, checkpoint_took = time.monotonic(), 0.0

    while training.epoch < settings.epochs:
        row, p = training.run_epoch(watcher.step, share_of_steps())
        if images.labels is not None:
            clustered = not math.isnan(row["score"])
            found = metrics.evaluate(p.argmax(1).cpu().numpy(), images.labels) if clustered else {}
            row |= dict.fromkeys(metrics.FIGURES, math.nan) | found
        history.append(row)
        if run is not None:
            run.append_metrics(row)
            now = time.monotonic()
            due = checkpoint_took <= QUICK_CHECKPOINT or now - last_checkpoint >= checkpoint_took / CHECKPOINT_SHARE
            if due or training.epoch == settings.epochs:
                run.write_checkpoint(training.state(), training.epoch)
                last_checkpoint = time.monotonic()
                checkpoint_took = last_checkpoint - now
                run.write_seconds(seconds())
        watcher.epoch(row)
        for message in metrics.complaints(row, settings):
            if message not in warnings:
                warnings.append(message)
                watcher.warn(message)

    predictor = Predictor.from_learner(training.learner, settings, images.pixels.shape[1:], images.value_range)
    probabilities, q = predictor(images.pixels, training.device)
    order = predictor.number_by_size(probabilities.argmax(1))
    took = seconds_before if finished_before else seconds()
    return Fitted(predictor, probabilities[:, order], q, history, warnings, took)


def keep_to_budget(training: Training, run: RunFolder | None, seconds: Callable[[], float]) -> Callable[[], float]:
    """Plan a run for as many epochs as fit into its minutes, where it has such a budget. Returns what tells, before
    each epoch, the share of its steps to take. Of a run that goes on, what was decided before holds."""
    minutes = training.settings.minutes
    if minutes is None:
        return lambda: 1.0
    stored = run.read_schedule() if run is not None else None
    if stored is not None:
        schedule = Schedule.from_json(*stored)
        training.set_epochs(schedule.epochs)
    elif run is not None and run.checkpoint.exists():
        raise DamagedFileError(f"{run.path / 'schedule.json'} is missing. Restore it from a copy, or fit anew.")
    else:
        schedule = make_schedule(training, minutes, seconds)
    pace = Pace(schedule, training, minutes, seconds, resumed=stored is not None)

    def share_of_steps() -> float:
        share = pace.share(training.epoch)
        if run is not None:
            run.write_schedule(schedule.to_json())
        return share

    return share_of_steps


def check_suits(images: Images, settings: Settings) -> None:
    """Raise InputError where the settings are wrong in themselves or for these images."""
    check(settings)
    choose_device(settings.device)
    n, C = len(images.pixels), settings.n_clusters
    if n < 4:
        raise InputError(f"{n} images are too few; expected at least 4, and a few hundred to learn anything.")
    if n < C:
        raise InputError(f"n_clusters={C}, but there are only {n} images; choose a k of at most {n // 2}.")


def start(
    images: Images,
    settings: Settings,
    on_notice: Callable[[str], None] = lambda message: None,
    kind: type[Training] = Training,
) -> Training:
    """A run at epoch 0."""
    check_suits(images, settings)
    augmentation = choose_augmentation(settings.augment, images.pixels.shape[3], settings.crop_size)
    return kind(images.pixels, settings, augmentation, choose_device(settings.device), on_notice)


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
