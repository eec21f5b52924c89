"""Pseudo labels: their renewal, merge-and-split, and what their swaps say about a sample (Eq. 5-6).

Shapes: N images, C clusters, d dimension of a representation.
"""

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from semclust.partition import cluster_means


def most_likely(p: Tensor) -> Tensor:
    """y_i = argmax_j p_ij (Eq. 5)."""
    return p.argmax(1)


def count_swaps(s: Tensor, y: Tensor, y_before: Tensor) -> Tensor:
    """s_i^e = s_i^{e-1} + 1[y_i^e != y_i^{e-1}] (Eq. 6). s starts at 1: from 0, a batch without a
    swap would have the weights 0 / 0."""
    return s + (y != y_before).to(s.dtype)


def sample_weights(s: Tensor) -> Tensor:
    """w_i = s_i / sum_j s_j over the mini-batch (Eq. 6): samples that swap often weigh more."""
    return s / s.sum()


def merge_and_split(y: Tensor, x: Tensor, n_clusters: int, min_size: float) -> Tensor:
    """Dissolve clusters of fewer than ``min_size`` members and refill their ids by halving the largest.

    After Zhan et al. (2020, "Online Deep Clustering"). Merge: every member of a small cluster moves to
    the nearest centroid (inner product) of a cluster that is not small. Split: each emptied id in turn
    takes one half of the currently largest cluster.

    y: N labels; x: N x d unit representations. Returns the new labels; an id that is not small keeps
    its meaning, so the classifier's outputs stay comparable from epoch to epoch. Where every cluster is
    small, nothing changes.
    """
    y = y.clone()
    centroid, size = cluster_means(x, y, n_clusters)
    small = size < min_size
    if not small.any() or small.all():
        return y

    closeness = (x @ centroid.T).masked_fill(small[None, :], -torch.inf)
    y = torch.where(small[y], closeness.argmax(1), y)

    for empty in small.nonzero()[:, 0]:
        largest = torch.bincount(y, minlength=n_clusters).argmax()
        members = (y == largest).nonzero()[:, 0]
        y[members[smaller_half(x[members], min_size)]] = empty
    return y


def smaller_half(x: Tensor, min_size: float) -> Tensor:
    """Which rows of x leave when it is halved (boolean): the smaller part, so that the other keeps its id.

    2-means may split off a few outliers, fewer than ``min_size``; then the cut goes through the middle,
    along the line between the two means.
    """
    half = second_half(x)
    if 2 * half.sum() > len(x):
        half = ~half
    if half.sum() < min_size:
        along = x @ (x[half].mean(0) - x[~half].mean(0))
        half = torch.zeros_like(half)
        half[along.argsort(descending=True, stable=True)[: len(x) // 2]] = True
    return half


def second_half(x: Tensor, rounds: int = 24) -> Tensor:
    """Which rows of x belong to the second of two groups, by 2-means (boolean).

    Starts from the row farthest from the mean and the row farthest from that one, so it needs no
    random numbers. Where 2-means finds only one group (equal rows), every second row is taken.
    """

    def farthest_from(centre: Tensor) -> Tensor:
        return x[(x - centre).square().sum(1).argmax()]

    first = farthest_from(x.mean(0))
    second = farthest_from(first)
    total = x.sum(0)
    half = torch.zeros(len(x), dtype=torch.bool, device=x.device)
    for number in range(rounds):
        # |x - second|^2 < |x - first|^2: beyond the middle between the two
        towards = second - first
        before, half = half, x @ towards > towards @ (first + second) / 2
        if number % 8 == 7 and torch.equal(half, before):  # a comparison waits for the device: not in every round
            break
        inside, n_inside = half.to(x.dtype) @ x, half.sum()
        first, second = (total - inside) / (len(x) - n_inside), inside / n_inside
    if not half.any() or half.all():
        return torch.arange(len(x), device=x.device) % 2 == 1
    return half


def match_ids(y: np.ndarray, reference: np.ndarray, n_clusters: int) -> np.ndarray:
    """Rename the clusters of y so that as many images as possible keep their label in ``reference``."""
    overlap = np.zeros((n_clusters, n_clusters), dtype=np.int64)
    np.add.at(overlap, (y, reference), 1)
    rows, columns = linear_sum_assignment(overlap, maximize=True)
    new_id = np.empty(n_clusters, dtype=np.int64)
    new_id[rows] = columns
    return new_id[y]
