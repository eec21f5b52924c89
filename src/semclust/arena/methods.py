"""What is compared. A row is a preset and what it changes in that; flags of the command come between the two.

Light: the command line reads the names without importing torch.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

from semclust.config import Settings

Name = Literal["quick", "default", "best", "paper", "k-means", "moco", "deepcluster"]


@dataclass(frozen=True)
class Method:
    title: str
    preset: str | None = None  # None: the one that the command names, so that backbone and epochs are the same
    changes: dict[str, Any] = field(default_factory=dict)
    by: Literal["semclust", "k-means", "deepcluster"] = "semclust"


INSTANCE_ALONE: dict[str, Any] = {"tasks": ("instance",), "nearest": 0.0}  # every image told apart from all others

METHODS: dict[Name, Method] = {
    "quick": Method("semclust, quick", "quick"),
    "default": Method("semclust, default", "default"),
    "best": Method("semclust, best", "best"),
    "paper": Method("semclust, paper", "paper"),
    "k-means": Method("k-means on pixels", by="k-means"),
    "moco": Method("instance contrast (MoCo) + k-means", changes=INSTANCE_ALONE),
    # The tasks of semclust are not learned; the network and its projection are those of instance contrast.
    "deepcluster": Method("DeepCluster + k-means", changes=INSTANCE_ALONE, by="deepcluster"),
}
COMPARED: tuple[Name, ...] = ("default", "k-means", "moco", "deepcluster", "paper")


def without(settings: Settings) -> dict[str, dict[str, Any]]:
    """What each part of these settings is worth: the changes that take it away. The first four are the paper's
    ablations, the others what the default adds to the paper."""
    tasks = settings.tasks
    rows: dict[str, dict[str, Any]] = {
        "without cross-cluster discrimination": {"cross_cluster": False},
        "without online cluster discrimination": {"online": False},
        "without hard samples": {"hard_samples": False},
        "instance contrast alone": INSTANCE_ALONE,
        "without own labels": {"self_label_from": 1.0},
        "without neighbours": {"neighbours": 0},
        "without nearest keys as positives": {"nearest": 0.0},
        "without attraction": {"attraction": 0.0},
        "crops of the full size": {"crop_size": 1.0},
    }
    if "over" in tasks:
        rows["without over-clusters"] = {"tasks": tuple(task for task in tasks if task != "over")}
        rows["over-clusters by their classifier"] = {"over_by": "classifier"}
    if "under" in tasks:
        rows["without half as many clusters beside"] = {"tasks": tuple(task for task in tasks if task != "under")}
    else:
        rows["with half as many clusters beside"] = {"tasks": (*tasks, "under")}
    return {title: row for title, row in rows.items() if dataclasses.replace(settings, **row) != settings}


def ablation(preset: str, settings: Settings) -> dict[str, Method]:
    """The whole method, a preset with the ``settings`` of the command, and the method without each of its parts, by the
    name that its runs are stored under. The whole and instance contrast alone are rows of the comparison too, and share
    their runs with it."""
    whole: dict[str, Method] = {preset: Method(f"semclust, {preset}", preset)}
    for title, changes in without(settings).items():
        stored = "moco" if changes == METHODS["moco"].changes else title.replace(" ", "-")
        whole[stored] = Method(title, preset, changes)
    return whole
