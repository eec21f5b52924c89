"""What the label-free score is worth: does it rise and fall with ACC, and what does choosing by it cost?"""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import spearmanr

from semclust.metrics import last_phase
from semclust.run_folder import RunFolder
from semclust.storage import read_json

Rows = list[dict[str, Any]]


def read_rows(path: Path) -> dict[str, Rows]:
    """Epochs of the last phase that have both a score and an ACC, by run: of a run folder of `semclust fit`, of the
    result of a run that `semclust bench` wrote, or of all of either kind in a folder."""
    if path.is_file():
        rows: Rows = read_json(path).get("history", []) if path.suffix == ".json" else []
        found = {str(path): rows}
    elif (path / "metrics.csv").exists():
        found = {str(path): RunFolder(path).read_metrics()}
    else:
        found = (
            {name: rows for inside in sorted(path.iterdir()) for name, rows in read_rows(inside).items()}
            if path.is_dir()
            else {}
        )
    usable = {name: [row for row in rows if has_both(row)] for name, rows in found.items()}
    return {name: last_phase(rows) for name, rows in usable.items() if rows}


def has_both(row: dict[str, Any]) -> bool:
    return all(isinstance(row.get(name), float) and not math.isnan(row[name]) for name in ("score", "acc"))


def judge_score(runs: Iterable[Rows]) -> dict[str, Any]:
    """Correlation of score and ACC, and the ACC that is lost by choosing by score. The runs are seeds of one method on
    one data set."""
    runs = list(runs)
    epochs = [row for rows in runs for row in rows]
    chosen = [max(rows, key=lambda row: row["score"]) for rows in runs]
    best = [max(rows, key=lambda row: row["acc"]) for rows in runs]
    losses = [right["acc"] - taken["acc"] for right, taken in zip(best, chosen, strict=True)]
    last = [rows[-1] for rows in runs]
    return {
        "runs": len(runs),
        "epochs": len(epochs),
        "correlation_over_epochs": correlation(epochs),
        "correlation_over_runs": correlation(last),
        "loss_by_epoch": {"mean": float(np.mean(losses)), "largest": max(losses)},
        "loss_by_seed_at_the_last_epoch": max(row["acc"] for row in last) - highest(last)["acc"],
        "loss_by_epoch_and_seed": max(row["acc"] for row in best) - highest(chosen)["acc"],
    }


def highest(rows: Rows) -> dict[str, Any]:
    return max(rows, key=lambda row: row["score"])


def correlation(rows: Rows) -> float | None:
    """Spearman's, of the ranks; None where there are too few rows, or all are the same."""
    score, acc = ([row[name] for row in rows] for name in ("score", "acc"))
    if len(rows) < 3 or len(set(score)) == 1 or len(set(acc)) == 1:
        return None
    return float(spearmanr(score, acc).statistic)
