"""How good a clustering is: against labels where they exist, and by itself where they do not.

Shapes: N images, C clusters, d representation.
"""

import math
from typing import Any

import numpy as np
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from semclust.config import Settings
from semclust.errors import plural
from semclust.plan import FEWEST_EPOCHS

FIGURES = ("acc", "nmi", "ari")
COLLAPSED_SPREAD = 0.05
FEW_SURE = 0.05  # of the images
SPREAD_BY = 500  # steps: of runs that went well, some had no spread yet after 180
GIANT_CLUSTER = 0.8


def contingency(predicted: np.ndarray, true: np.ndarray) -> np.ndarray:
    """How many images of each true class (column) lie in each cluster (row)."""
    rows, columns = (np.unique(labels, return_inverse=True)[1] for labels in (predicted, true))
    table = np.zeros((rows.max() + 1, columns.max() + 1), dtype=np.int64)
    np.add.at(table, (rows, columns), 1)
    return table


def clustering_accuracy(predicted: np.ndarray, true: np.ndarray) -> float:
    """ACC: share of images that are right under the best one-to-one map of clusters to classes.

    With more clusters than classes the clusters left over count as wrong, and the reverse.
    """
    table = contingency(predicted, true)
    return float(table[linear_sum_assignment(table, maximize=True)].sum() / table.sum())


def evaluate(predicted: np.ndarray, true: np.ndarray) -> dict[str, float]:
    """ACC, NMI and ARI of cluster ids against true classes (any integers or strings)."""
    from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score

    return {
        "acc": clustering_accuracy(predicted, true),
        "nmi": float(normalized_mutual_info_score(true, predicted)),
        "ari": float(adjusted_rand_score(true, predicted)),
    }


def in_words(figures: dict[str, Any]) -> str:
    return f"ACC {figures['acc']:.4f}  NMI {figures['nmi']:.4f}  ARI {figures['ari']:.4f}"


def health(p: Tensor, y_memory: Tensor, churn: float, sure: float) -> dict[str, Any]:
    """Figures of one clustering that need no label; the names are ``HEALTH``. Without a score, see ``across_views``.

    p: N x C probabilities of the classifier; y_memory: N labels by the memory; churn and sure: as they are told.
    """
    N, C = p.shape
    y = p.argmax(1)
    sizes = y.bincount(minlength=C).cpu()
    agreement = (y == y_memory).float().mean().item()
    return {
        "clusters": C,
        "churn": churn,  # share of images whose label changed
        "agreement": agreement,  # share of images on whose cluster classifier and memory agree
        "confidence": p.max(1).values.mean().item(),
        "sure": sure,  # share of images that are sure enough to be learned from where the network labels itself
        "smallest": sizes.min().item() / N,
        "largest": sizes.max().item() / N,
        "view_agreement": math.nan,
        "score": math.nan,
        "sizes": " ".join(map(str, sizes.tolist())),
    }


HEALTH = (
    "clusters",
    "churn",
    "agreement",
    "confidence",
    "sure",
    "smallest",
    "largest",
    "view_agreement",
    "score",
    "sizes",
)


def across_views(p: Tensor, some: Tensor, p_view: Tensor) -> dict[str, float]:
    """The rest of ``HEALTH``, for clusters that are the result: how far the classifier says the same of changed images.

    p: N x C probabilities of all images; p_view: those of views of the images ``some``."""
    together = (p[some] * p_view).sum(1)  # the chance that image and view are in one cluster
    agreement = together.nan_to_num(0.0).mean().item()  # a user's own view may be anything
    sizes = p.argmax(1).bincount(minlength=p.shape[1]).cpu()
    return {"view_agreement": agreement, "score": label_free_score(agreement, sizes)}


def health_of_features(q: Tensor) -> dict[str, Any]:
    """The same columns of an epoch that has no clusters to tell of: only the spread of the features (N x d)."""
    return {"spread": spread(q)} | dict.fromkeys(HEALTH, math.nan)


def spread(q: Tensor) -> float:
    """Variance of unit vectors q (N x d), 0 to 1: at 0 all images look alike to the network."""
    return 1 - q.mean(0).square().sum().item()


def complaints(row: dict[str, Any], settings: Settings, rate: float, steps: int) -> dict[str, str]:
    """What is wrong with an epoch's figures: a word for it, and a message with the figures and the next step.
    ``rate``: the peak learning rate; ``steps``: that the run has taken by then."""
    semantic = not math.isnan(row["churn"])  # clusters have been learned for at least an epoch
    found = {}
    # Not in the first epochs: the statistics that batch norm uses without augmentation are only forming, and epochs of
    # few images have few steps.
    last = row["epoch"] == settings.n_epochs >= FEWEST_EPOCHS
    judged = row["epoch"] >= 3 and (steps >= SPREAD_BY or last)
    if row["spread"] < COLLAPSED_SPREAD and judged:
        advice = [f"a learning_rate of {rate / 3:.2g} (now {rate})"]
        advice += ["momentum 0.99"] if settings.momentum is not None and settings.momentum < 0.99 else []
        advice += ["warmup_epochs 3"] if settings.warmup_epochs < 3 else []
        advice += ["projection_norm"] if not settings.projection_norm else []
        found["collapse"] = (
            f"The features have collapsed: all images look alike to the network (epoch {row['epoch']}: spread "
            f"{row['spread']:.3f}, below {COLLAPSED_SPREAD}). Try {', '.join(advice)}."
        )
    if semantic and row["largest"] > GIANT_CLUSTER:
        advice = [f"more epochs (now {settings.n_epochs})"]
        advice += ["min_cluster_size 0.16"] if settings.min_cluster_size < 0.16 else []
        found["giant cluster"] = (
            f"One cluster holds {row['largest']:.0%} of the images (epoch {row['epoch']}; told from "
            f"{GIANT_CLUSTER:.0%} on). If the groups are not that uneven, try {' and '.join(advice)}."
        )
    if row.get("skipped_steps"):
        found["skipped steps"] = (
            f"The loss or gradient was not finite in {plural(row['skipped_steps'], 'step')} of epoch {row['epoch']}, "
            "which changed nothing. metrics.csv counts what is skipped (skipped_steps). Should there be many, try a "
            f"learning_rate of {rate / 3:.2g} (now {rate})."
        )
    if settings.labels_itself and last and row.get("sure", math.nan) < FEW_SURE:
        found["unsure"] = (
            f"The network learned from its own labels, but was sure of {row['sure']:.0%} of the images only, so that "
            f"the last {1 - settings.self_label_from:.0%} of the epochs brought little. Try more epochs (now "
            f"{settings.n_epochs}), or a self_label_confidence below {settings.self_label_confidence:g}."
        )
    empty = str(row["sizes"]).split().count("0")
    if semantic and row["epoch"] == settings.n_epochs and empty:
        left = settings.n_clusters - empty
        groups = f"fewer groups: try n_clusters={left}" if left > 1 else "only one group: look whether they differ"
        found["empty clusters"] = f"{empty} of {settings.n_clusters} clusters are empty. The images may hold {groups}."
    return found


def label_free_score(agreement: float, sizes: Tensor) -> float:
    """How far a clustering can be trusted without labels, 0 to 1: agreement across views, times the evenness of the
    cluster sizes (their entropy), without which one giant cluster would win."""
    share = sizes.double() / sizes.sum()
    entropy = max(0.0, -(share * share.clamp(min=1e-12).log()).sum().item())
    return agreement * entropy / math.log(len(sizes))


def best_epoch(history: list[dict[str, Any]]) -> int:
    """The epoch that the label-free score would choose."""
    return max(last_phase(history), key=lambda row: -1.0 if math.isnan(row["score"]) else row["score"])["epoch"]


def last_phase(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The epochs that learned from the same as the last one: only their scores can be compared."""
    return [row for row in history if row.get("learns") == history[-1].get("learns")]
