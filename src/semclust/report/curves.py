"""The course of the training: what the charts draw, and the same as a table."""

import math
from typing import Any

from semclust.config import Settings
from semclust.plan import plan_clusters, plan_tasks

CURVES = (
    ("Loss", None, (("loss", "in all"), ("loss_id", "instance"), ("loss_cd", "cluster"))),
    (
        "Health, without labels",
        (0, 1),
        (
            ("score", "score"),
            ("view_agreement", "agreement across views"),
            ("agreement", "agreement with the memory"),
            ("confidence", "confidence"),
            ("sure", "sure enough to learn from"),
            ("spread", "spread"),
        ),
    ),
    (
        "Movement and sizes, as shares of all images",
        None,
        (("churn", "churn"), ("largest", "largest cluster"), ("smallest", "smallest cluster")),
    ),
    ("Against the labels", (0, 1), (("acc", "ACC"), ("nmi", "NMI"), ("ari", "ARI"))),
)


def curves(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The charts: a title, the range of values where it is known, and lines with a value or None an epoch."""
    drawn = []
    for title, span, lines in CURVES:
        found = [{"title": name, "values": [_value(row.get(column)) for row in history]} for column, name in lines]
        found = [line for line in found if any(value is not None for value in line["values"])]
        if found:
            drawn.append({"title": title, "span": span, "lines": found, "epochs": [row["epoch"] for row in history]})
    return drawn


def _value(value: Any) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.5g}")


def phases(settings: Settings, n_images: int) -> list[dict[str, Any]]:
    """When the tasks begin, after which epoch."""
    plans = plan_tasks(settings, n_images)
    marks = []
    if (over := plans.get("over")) and over.learns_in(over.begins):
        marks += [(over.begins, f"{over.n_clusters} fine clusters join"), (int(over.ends), "the fine clusters end")]
    if "cluster" in settings.tasks:
        clusters, by_itself = plan_clusters(settings)
        marks += [(clusters, f"the {settings.n_clusters} clusters start"), (by_itself, "own labels alone")]
    return [{"epoch": epoch, "title": title} for epoch, title in marks if 0 < epoch < settings.n_epochs]


def table_of_epochs(history: list[dict[str, Any]]) -> dict[str, Any]:
    """The curves' figures for those who read rather than look."""
    columns = [(c, name) for _, _, lines in CURVES for c, name in lines if history and c in history[0]]
    rows = [
        [str(row["epoch"]), *("" if (v := _value(row[c])) is None else f"{v:.4g}" for c, _ in columns)]
        for row in history
    ]
    return {"columns": ["epoch", *(name for _, name in columns)], "rows": rows}
