"""From a run folder to all that its page shows: plain values, in the words a reader sees.

Shapes: N images, G clusters that remain, S images that are shown, M of them on the map.
"""

import base64
import csv
import math
import shlex
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from semclust.assignments import Assignments
from semclust.budget import Schedule
from semclust.config import Settings, from_json, is_own_code
from semclust.display import printable
from semclust.errors import DamagedFileError, in_short
from semclust.groups import Groups
from semclust.plan import why_a_try
from semclust.report.against_labels import Comparison, compare, confusion
from semclust.report.close import closest_pairs
from semclust.report.curves import curves, phases, table_of_epochs
from semclust.report.kept import Kept, most_and_least_certain
from semclust.report.settings_table import fit_command, settings_table
from semclust.run_folder import RunFolder
from semclust.storage import read_json

ALL_NAMES = 4_000_000  # bytes, compressed, up to which the names of all images are in the page
REASONS = 12  # for skipping files, with a few examples of each
EXAMPLES = 5
SUMMARY: dict[str, type | tuple[type, ...]] = {
    "semclust": str,
    "torch": str,
    "python": str,
    "device": str,
    "image_shape": list,
    "seconds": (int, float),
    "score": (int, float),
    "warnings": list,
}


def read_settings(run: RunFolder) -> tuple[dict[str, Any], Settings]:
    """config.json, and the settings in it."""
    config = run.read_config()
    if "settings" not in config:
        raise DamagedFileError(f"{run.path / 'config.json'} lacks 'settings'; restore it from a copy, or fit again.")
    return config, Settings(**from_json(config["settings"]))


def read_summary(run: RunFolder) -> dict[str, Any]:
    """summary.json, with all that the page needs of it."""
    path = run.path / "summary.json"
    summary = read_json(path)
    wrong = [name for name, kind in SUMMARY.items() if not isinstance(summary.get(name), kind)]
    if wrong:
        raise DamagedFileError(
            f"{path} lacks {', '.join(wrong)}, or holds something else there. Restore it, or write it again: "
            f"semclust fit --resume {run.path}"
        )
    return summary


def collect(run: RunFolder, assigned: Assignments, kept: Kept) -> dict[str, Any]:
    """Everything on the page. ``data`` in it is for the script, the rest for the template."""
    config, settings = read_settings(run)
    summary, history = read_summary(run), run.read_metrics()
    groups = Groups.read(run.model)
    if max(assigned.cluster.max(), assigned.runner_up.max()) >= len(groups.of):
        raise DamagedFileError(
            f"{run.assignments} names clusters that the model does not have. Restore it, or fit again."
        )
    sizes = np.bincount(groups.of[assigned.cluster], minlength=len(groups.of))
    ids = sorted(groups.ids, key=lambda i: (-sizes[i], i))
    position = {cluster_id: i for i, cluster_id in enumerate(ids)}
    of = np.array([position[int(i)] for i in groups.of])
    cluster, runner_up = of[assigned.cluster], of[assigned.runner_up]  # from here on positions: 0 is the largest
    titles = [f"{i} · {printable(groups.names[i])}" if i in groups.names else str(i) for i in ids]
    truth = compare(cluster, len(ids), kept.labels, kept.classes) if kept.labels is not None else None

    uneven = share_of_steps(run)

    names = [printable(name) for name in assigned.names]
    clusters = describe_clusters(cluster, len(ids), assigned.confidence, kept, truth)
    for described, cluster_id, title in zip(clusters, ids, titles, strict=True):
        described |= {"id": cluster_id, "title": title}
    extremes = [row for described in clusters for end in ("most", "least") for row in described[end]]
    shown, numbers = shown_images(names, assigned, cluster, runner_up, extremes, kept, truth)
    for described in clusters:
        for end in ("most", "least"):
            described[end] = [numbers[row] for row in described[end]]
    return {
        "title": printable(run.path.resolve().name),
        "run": printable(str(run.path)),
        "n_images": len(names),
        "n_clusters": len(ids),
        "n_empty": int((sizes[ids] == 0).sum()),
        "largest": float(sizes.max() / len(names)),
        "groups": groups.fingerprint,
        "merged_from": len(groups.of) if len(ids) < len(groups.of) else None,
        "skipped": read_skipped(run.path / "skipped.csv"),
        "summary": {name: printable(value) if isinstance(value, str) else value for name, value in summary.items()},
        "warnings": [printable(str(warning)) for warning in summary["warnings"]],
        "why_a_try": why_a_try(settings, len(names)),
        "figures": truth and truth.figures,
        "pairs": describe_pairs(run, assigned, cluster, runner_up, ids, titles),
        "confusion": truth and confusion(truth, titles),
        "epochs": table_of_epochs(history),
        "settings": settings_table(config["settings"]),
        "source": printable(str(config.get("data"))),
        "labels": printable(str(config["labels"])) if config.get("labels") else None,
        "command": printable(fit_command(config, whole_epochs=uneven is None)),
        "uneven_epochs": uneven,
        "own_code": [
            f"your own {name}" for name in ("backbone", "augment") if is_own_code(config["settings"].get(name))
        ],
        "report_command": command("report", run.path),
        "time": in_words(summary["seconds"]),
        "sheets": [base64.b64encode(sheet).decode() for sheet in kept.sheets.files] if kept.sheets else [],
        "all_names": all_names(names, assigned.confidence, cluster),
        "data": {
            "clusters": clusters,
            "classes": truth and truth.classes,
            "images": shown,
            "sheets": kept.sheets and {**kept.sheets.about, "pictures": len(kept.pictured)},
            "map": {
                "points": [numbers[row] for row in kept.mapped.tolist()],
                "views": views(settings, kept),
                "n_images": len(names),
            },
            "curves": curves(history),
            "phases": phases(settings, len(names)),
        },
    }


# ---- clusters and images ---------------------------------------------------------------------------


def describe_clusters(
    cluster: np.ndarray, n_clusters: int, confidence: np.ndarray, kept: Kept, truth: Comparison | None
) -> list[dict[str, Any]]:
    """Of every cluster its size, confidence, most frequent class, and the rows of its extreme images."""
    sizes = np.bincount(cluster, minlength=n_clusters)
    mean = np.bincount(cluster, confidence, minlength=n_clusters) / np.maximum(sizes, 1)
    ends = most_and_least_certain(cluster, confidence, kept.extremes)
    described = []
    for i, size in enumerate(sizes.tolist()):
        most, least = ends.get(i, ([], []))
        one: dict[str, Any] = {
            "size": size,
            "confidence": round(float(mean[i]), 4) if size else None,
            "most": most,
            "least": least,
        }
        if truth and size:
            one["class"] = int(truth.table[i].argmax())
            one["purity"] = float(truth.table[i].max() / size)
            one["stands_for"] = int(truth.stands_for[i])
        described.append(one)
    return described


def shown_images(
    names: list[str],
    assigned: Assignments,
    cluster: np.ndarray,
    runner_up: np.ndarray,
    extremes: list[int],
    kept: Kept,
    truth: Comparison | None,
) -> tuple[dict[str, list[Any]], dict[int, int]]:
    """Columns about the images in the gallery or on the map, and the number that each row has there: first those that
    have a thumbnail."""
    others = np.setdiff1d(np.concatenate([kept.mapped, np.array(extremes, np.int64)]), kept.pictured)
    rows = np.concatenate([kept.pictured, others])
    columns = {
        "row": rows.tolist(),
        "name": [names[row] for row in rows],
        "cluster": cluster[rows].tolist(),
        "confidence": assigned.confidence[rows].tolist(),
        "runner_up": runner_up[rows].tolist(),
    }
    if truth:
        columns |= {"class": truth.labels[rows].tolist(), "right": truth.right[rows].astype(int).tolist()}
    return columns, {row: number for number, row in enumerate(rows.tolist())}


def all_names(names: list[str], confidence: np.ndarray, cluster: np.ndarray) -> str | None:
    """Cluster, confidence and name of all images, a line each, compressed; None where that is too much for a page."""
    lines = zip(cluster.tolist(), confidence.tolist(), names, strict=True)
    text = "\n".join(f"{position} {sure:.4f} {name}" for position, sure, name in lines)
    packed = zlib.compress(text.encode(), 9)
    return base64.b64encode(packed).decode() if len(packed) <= ALL_NAMES else None


def share_of_steps(run: RunFolder) -> float | None:
    """Of the steps of so many epochs, those that a run took which kept to a budget of time; None where it took all."""
    stored = run.read_schedule()
    shares = Schedule.from_json(*stored).shares if stored is not None else []
    return sum(shares) / len(shares) if set(shares) - {1.0} else None


def describe_pairs(
    run: RunFolder, assigned: Assignments, cluster: np.ndarray, runner_up: np.ndarray, ids: list[int], titles: list[str]
) -> list[dict[str, Any]]:
    if len(ids) <= 2:  # one cluster with everything in it is none
        return []
    return [
        {
            "positions": [pair.first, pair.second],
            "titles": [titles[pair.first], titles[pair.second]],
            "overlap": pair.overlap,
            "swapped": pair.swapped,
            "command": command("merge", run.path, ids[pair.first], ids[pair.second]),
        }
        for pair in closest_pairs(cluster, assigned.confidence, runner_up, assigned.margin, len(ids))
    ]


def command(verb: str, *words: Any) -> str:
    """A line to type into a shell."""
    return " ".join(["semclust", verb, *(shlex.quote(printable(str(word))) for word in words)])


def in_words(seconds: float) -> str:
    if not math.isfinite(seconds):
        return "unknown"
    minutes, hours = round(seconds / 60), round(seconds / 360) / 10
    return f"{seconds:.0f} s" if seconds < 120 else f"{minutes} min" if minutes < 120 else f"{hours:g} h"


def read_skipped(path: Path) -> dict[str, Any]:
    """How many files were skipped for each reason, with a few of their names."""
    if not path.exists():
        return {"n": 0, "reasons": []}
    try:
        with open(path, newline="", encoding="utf-8", errors="surrogateescape") as file:
            rows = [(row.get("path") or "", row.get("reason") or "unknown") for row in csv.DictReader(file)]
    except csv.Error as error:
        raise DamagedFileError(
            f"{path} is damaged ({in_short(error)}). Restore it, or delete it to leave it out."
        ) from error
    counts = Counter(reason for _, reason in rows)
    reasons = [
        {"reason": printable(reason), "n": n, "names": [printable(p) for p, why in rows if why == reason][:EXAMPLES]}
        for reason, n in counts.most_common(REASONS)
    ]
    return {"n": len(rows), "reasons": reasons, "more": max(0, len(counts) - REASONS)}


# ---- the map ---------------------------------------------------------------------------------------


def views(settings: Settings, kept: Kept) -> list[dict[str, Any]]:
    """What the map can show: places, and whose clusters give the colours (None: the result's)."""

    def view(kind: str, title: str, caption: str, places: str, task: str | None = None) -> dict[str, Any]:
        return {
            "kind": kind,
            "title": title,
            "caption": caption,
            "xy": np.round(kept.maps[places], 4).tolist(),
            "clusters": kept.tasks[task].tolist() if task else None,
        }

    found = [
        view("target", "Target clusters", "Features of the trained network, from which the clusters come.", "target")
    ]
    for task, title in (("under", "Under-clustering"), ("over", "Over-clustering")):
        if task not in kept.tasks:
            continue
        n = len(np.unique(kept.tasks[task]))
        if task in kept.maps:
            caption = f"Features of the task's own projection, coloured by its {n} clusters."
            found.append(view(task, title, caption, task, task))
        else:
            shared = (
                "The task's own features are not at hand"
                if settings.projection_per_task
                else "All tasks share features"
            )
            caption = f"{shared}: the places of the target clusters, coloured by this task's {n} clusters."
            found.append(view(task, title, caption, "target", task))
    if "untrained" in kept.maps:
        caption = f"The same images in the network as it was before training (seed {settings.random_state})."
        found.append(view("untrained", "Untrained network", caption, "untrained"))
    return found
