"""Which clusters are so close that a person may want to merge them.

Shapes: N images, G clusters that remain.
"""

from dataclasses import dataclass

import numpy as np

PAIRS = 10
LEAST = 0.005  # overlap that is told: where there is less, clusters are apart


@dataclass(frozen=True)
class Pair:
    """Two clusters by their position among those that remain, the larger first."""

    first: int
    second: int
    overlap: float  # the chance that an image of the smaller one is in the other
    swapped: float  # share of the images of both whose second choice is the other one


def closest_pairs(
    cluster: np.ndarray, confidence: np.ndarray, runner_up: np.ndarray, margin: np.ndarray, n_clusters: int
) -> list[Pair]:
    """The pairs that overlap most, by the two most likely clusters of each image: all probabilities would take long to
    read where there are many clusters. Empty ones are left out.

    Columns of the table of assignments (N each); cluster, runner_up: positions, from 0 to ``n_clusters`` - 1."""
    second_chance = np.maximum(confidence - margin, 0)
    total = np.bincount(cluster, confidence, n_clusters) + np.bincount(runner_up, second_chance, n_clusters)
    shared = np.zeros((n_clusters, n_clusters))
    np.add.at(shared, (cluster, runner_up), confidence * second_chance)
    shared = shared + shared.T
    overlap = shared / np.minimum(total[:, None], total[None, :]).clip(1e-12)

    sizes = np.bincount(cluster, minlength=n_clusters)
    choices = np.zeros((n_clusters, n_clusters))
    np.add.at(choices, (cluster, runner_up), 1)
    swapped = (choices + choices.T) / np.maximum(sizes[:, None] + sizes[None, :], 1)

    first, second = np.triu_indices(n_clusters, k=1)
    told = (sizes[first] > 0) & (sizes[second] > 0) & (overlap[first, second] >= LEAST)
    first, second = first[told], second[told]
    best = np.argsort(-overlap[first, second], kind="stable")[:PAIRS]
    return [
        Pair(int(i), int(j), float(overlap[i, j]), float(swapped[i, j]))
        for i, j in zip(first[best], second[best], strict=True)
    ]
