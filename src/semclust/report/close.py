"""Which clusters are so close that a person may want to merge them.

Shapes: N images, G clusters that remain, d representation.
"""

from dataclasses import dataclass

import numpy as np

from semclust.groups import closeness

PAIRS = 10
CHUNK = 65536  # images at once, where the embeddings are a mapped file


@dataclass(frozen=True)
class Pair:
    """Two clusters by their position among those that remain, the larger first."""

    first: int
    second: int
    cosine: float  # between the mean embeddings
    swapped: float  # share of the images of both whose second choice is the other one


def closest_pairs(embeddings: np.ndarray, cluster: np.ndarray, runner_up: np.ndarray, n_clusters: int) -> list[Pair]:
    """The closest pairs, those first that ``semclust reduce`` would merge first; empty clusters are left out.

    embeddings: N x d unit vectors; cluster, runner_up: N positions, from 0 to ``n_clusters`` - 1."""
    sizes = np.bincount(cluster, minlength=n_clusters)
    total = np.zeros((n_clusters, embeddings.shape[1]))
    for start in range(0, len(cluster), CHUNK):
        rows = slice(start, start + CHUNK)
        np.add.at(total, cluster[rows], embeddings[rows])
    cosine = closeness(total)

    choices = np.zeros((n_clusters, n_clusters))
    np.add.at(choices, (cluster, runner_up), 1)
    swapped = (choices + choices.T) / np.maximum(sizes[:, None] + sizes[None, :], 1)

    first, second = np.triu_indices(n_clusters, k=1)
    both = (sizes[first] > 0) & (sizes[second] > 0)
    first, second = first[both], second[both]
    best = np.argsort(-cosine[first, second], kind="stable")[:PAIRS]
    return [
        Pair(int(i), int(j), float(cosine[i, j]), float(swapped[i, j]))
        for i, j in zip(first[best], second[best], strict=True)
    ]
