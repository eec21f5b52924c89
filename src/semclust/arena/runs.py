"""One run of a method, and a folder that keeps the finished ones: what is there is not run again."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from semclust import fitting, metrics
from semclust.arena.baselines import DeepCluster, pixel_clusters
from semclust.arena.machine import about_machine, forget_peak, peak_gib
from semclust.arena.methods import Method
from semclust.config import Settings, to_json
from semclust.data import Images
from semclust.devices import choose_device
from semclust.errors import InputError
from semclust.fitting import Watcher
from semclust.storage import read_json, write_json

EPOCHS = ("last", "best", "label_free")  # by which a run is judged; the best is chosen by the labels


@dataclass
class Run:
    """A run that is asked for."""

    name: str  # of its file
    method: Method
    settings: Settings  # with its seed

    @property
    def title(self) -> str:
        return f"{self.method.title}, seed {self.settings.random_state}"


def carry_out(
    runs: list[Run],
    images: Images,
    data: str,
    folder: Path,
    tell: Callable[[str], None],
    watcher: Callable[[str], Watcher],
) -> list[dict[str, Any]]:
    """The results of all runs, in order: those that lie in ``folder``, and the others as they are finished there.

    data: tells these images from others. watcher: makes what watches a run of the title that it gets.
    """
    folder.mkdir(parents=True, exist_ok=True)
    finished = {run.name: earlier(run, data, folder) for run in runs}  # before any is begun: one may not fit in
    results = []
    for number, run in enumerate(runs, 1):
        result = finished[run.name]
        if result is None:
            result = {"method": run.method.title, "by": run.method.by, "settings": to_json(run.settings), "data": data}
            result |= carry_out_one(run, images, watcher(f"{run.title} ({number} of {len(runs)})"))
            write_json(folder / f"{run.name}.json", result)
        last = metrics.in_words(result["last"])
        again = "" if finished[run.name] is None else "  (of before)"
        tell(f"{run.title}: {last}  {result['minutes']:.1f} min{again}")
        results.append(result | {"method": run.method.title})  # it may have been run as a row of another table
    return results


def earlier(run: Run, data: str, folder: Path) -> dict[str, Any] | None:
    """The result of the same run, where it was finished before."""
    path = folder / f"{run.name}.json"
    if not path.exists():
        return None
    found = read_json(path)
    stored, wanted = found.get("settings"), to_json(run.settings)
    if not isinstance(stored, dict) or not {"last", "minutes", "history"} <= set(found):
        raise InputError(f"{path} is not the result of a run; remove it, or choose another --out.")
    differing = [
        f"{name} was {stored.get(name)!r}, now {value!r}" for name, value in wanted.items() if stored.get(name) != value
    ]
    if found.get("data") != data:
        differing.append("it is about other images or labels")
    if differing:
        raise InputError(f"{path} is of another run ({'; '.join(differing)}). Choose another --out, or remove it.")
    return found


def carry_out_one(run: Run, images: Images, watcher: Watcher) -> dict[str, Any]:
    """Figures of one run, as plain JSON values."""
    assert images.labels is not None
    settings, device = run.settings, choose_device(run.settings.device)
    forget_peak(device)
    started = time.monotonic()
    history: list[dict[str, Any]] = []
    if run.method.by == "k-means":
        labels = pixel_clusters(images.pixels, settings.n_clusters, settings.random_state or 0, device)
        found = {"last": metrics.evaluate(labels, images.labels), "best": None, "label_free": None}
    else:
        if run.method.by == "deepcluster":
            history = deepcluster(images, images.labels, settings, watcher)
        else:
            history = fitting.fit(images, settings, watcher).history
        found = judge(history)
    return {
        **found,
        "epochs": len(history),
        "minutes": (time.monotonic() - started) / 60,
        "peak_gib": peak_gib(device),
        "machine": about_machine(device),
        "history": [{name: plain(value) for name, value in row.items()} for row in history],
    }


def deepcluster(images: Images, labels: np.ndarray, settings: Settings, watcher: Watcher) -> list[dict[str, Any]]:
    """The rows of DeepCluster's epochs."""
    started = time.monotonic()
    training = fitting.start(images, settings, watcher.warn, kind=DeepCluster)
    share_of_steps = fitting.keep_to_budget(training, None, lambda: time.monotonic() - started, watcher)
    watcher.begin(training)
    history = []
    while training.epoch < training.settings.n_epochs:
        row, p = training.run_epoch(watcher.step, share_of_steps(training.epoch))
        history.append(row | metrics.evaluate(p.argmax(1).cpu().numpy(), labels))
        watcher.epoch(history[-1])
    return history


def judge(history: list[dict[str, Any]]) -> dict[str, dict[str, Any] | None]:
    """The figures of the last epoch, of the best by the labels, and of the one that the label-free score chooses."""
    clustered = [row for row in history if not math.isnan(row["acc"])]
    scored = [row for row in metrics.last_phase(clustered) if not math.isnan(row["score"])]

    def figures(row: dict[str, Any]) -> dict[str, Any]:
        return {name: plain(row[name]) for name in ("epoch", *metrics.FIGURES, "score")}

    return {
        "last": figures(history[-1]),
        "best": figures(max(clustered, key=lambda row: row["acc"])),
        "label_free": figures(scored[[row["epoch"] for row in scored].index(metrics.best_epoch(scored))])
        if scored
        else None,
    }


def plain(value: Any) -> Any:
    """JSON has no NaN."""
    return None if isinstance(value, float) and math.isnan(value) else value
