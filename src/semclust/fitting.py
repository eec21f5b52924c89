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
from semclust.config import Settings, check
from semclust.data import Images
from semclust.devices import choose_device
from semclust.distributed import ALONE, Group
from semclust.errors import DamagedFileError, InputError
from semclust.predictor import BATCH, Predictor
from semclust.run_folder import RunFolder
from semclust.train import Training, check_shares

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
    Of several processes (``group``), the first alone is given the run folder."""
    with run.locked() if run is not None else contextlib.nullcontext():
        return _fit(images, settings, watcher or Watcher(), run, group)


def _fit(images: Images, settings: Settings, watcher: Watcher, run: RunFolder | None, group: Group) -> Fitted:
    started = time.monotonic()
    training = start(images, settings, watcher.warn, group)
    history: list[dict[str, Any]] = []
    seconds_before = 0.0  # of training, before an interruption
    if run is not None:
        if not run.checkpoint.exists() and (run.model.exists() or len(run.read_metrics()) > 1):
            raise InputError(f"{run.checkpoint} is missing, so the run cannot go on. Restore it, or fit anew.")
        if run.checkpoint.exists():
            tensors, epoch = run.read_checkpoint()
            training.load_state(tensors, epoch, run.checkpoint)
            seconds_before = run.read_seconds()
        run.drop_metrics_after(training.epoch)
        history = run.read_metrics()
        if len(history) != training.epoch:
            raise DamagedFileError(
                f"{run.metrics} holds {len(history)} epochs, but {run.checkpoint} {training.epoch}. "
                "Restore metrics.csv from a copy, or fit anew."
            )
    history = training.take_over(history)
    warnings = list(dict.fromkeys(m for row in history for m in metrics.complaints(row, settings)))
    watcher.begin(training)
    finished_before = training.epoch == settings.epochs
    last_checkpoint, checkpoint_took = time.monotonic(), 0.0

    while training.epoch < settings.epochs:
        row, p = training.run_epoch(watcher.step)
        if images.labels is not None and group.first:
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
                run.write_seconds(seconds_before + last_checkpoint - started)
        watcher.epoch(row)
        for message in metrics.complaints(row, settings):
            if message not in warnings:
                warnings.append(message)
                watcher.warn(message)

    predictor = Predictor.from_learner(training.learner, settings, images.pixels.shape[1:], images.value_range)
    probabilities, q = predict_all(predictor, images.pixels, training.device, group)
    order = predictor.number_by_size(probabilities.argmax(1))
    seconds = seconds_before + (0.0 if finished_before else time.monotonic() - started)
    return Fitted(predictor, probabilities[:, order], q, history, warnings, seconds)


def predict_all(
    predictor: Predictor, pixels: np.ndarray, device: torch.device, group: Group
) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities and embeddings of all images, each rank's share of them computed there, on the first rank."""
    n = len(pixels)
    start, stop = group.bounds(n, at_once=BATCH)  # in whole batches: the same that one process computes
    found = predictor(pixels[start : max(stop, start + 1)] if start < n else pixels[:1], device)
    p, q = (torch.from_numpy(rows[: stop - start]) for rows in found)
    return tuple(group.gather_to_first(x, n, BATCH).numpy() for x in (p, q))  # type: ignore[return-value]


def check_suits(images: Images, settings: Settings, group: Group = ALONE) -> None:
    """Raise InputError where the settings are wrong in themselves, for these images, or for so many processes."""
    check(settings)
    choose_device(settings.device)
    n, C = len(images.pixels), settings.n_clusters
    if n < 4:
        raise InputError(f"{n} images are too few; expected at least 4, and a few hundred to learn anything.")
    if n < C:
        raise InputError(f"n_clusters={C}, but there are only {n} images; choose a k of at most {n // 2}.")
    check_shares(settings, n, group)


def start(
    images: Images,
    settings: Settings,
    on_notice: Callable[[str], None] = lambda message: None,
    group: Group = ALONE,
) -> Training:
    """A run at epoch 0."""
    check_suits(images, settings, group)
    augmentation = choose_augmentation(settings.augment, images.pixels.shape[3])
    return Training(images.pixels, settings, augmentation, group.device(settings.device), on_notice, group)


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
