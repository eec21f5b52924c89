"""The paper's Section 3.1: semantic memory, instance discrimination, cluster discrimination (Eq. 1-4, 7).

Everything here follows from one tensor. With unit vectors ``q`` and the keys of all memory banks,

    bank[i, j] = log sum_{k~ in M_j} exp(cos(q_i, k~) / tau)

is how close query i lies to bank j. The contrastive set of Eq. 2 is ``bank`` without the column of
the query's own cluster; the distance-based classifier of Eq. 3 is its softmax.

Shapes: n batch, C clusters, m keys in a bank, d dimension of a representation.
All representations are unit vectors, so an inner product is a cosine.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def bank_size(K: int, C: int) -> int:
    """Keys per bank, so that leaving one of C banks out leaves about K: K / (C - 1), at least one."""
    return max(1, K // max(1, C - 1))


class SemanticMemory(nn.Module):
    """C first-in-first-out banks M_1 ... M_C of momentum keys, one for each cluster.

    An empty slot holds the zero vector: its cosine with every query is 0, which is what the random
    keys that MoCo starts from have on average, without their noise.
    """

    keys: Tensor
    next_slot: Tensor

    def __init__(self, n_clusters: int, size: int, dim: int):
        super().__init__()
        self.register_buffer("keys", torch.zeros(n_clusters, size, dim))  # C x m x d
        self.register_buffer("next_slot", torch.zeros(n_clusters, dtype=torch.long))  # C

    @torch.no_grad()
    def enqueue(self, k: Tensor, y: Tensor) -> None:
        """Write each key k_i (n x d) into bank M_{y_i}, over the oldest key there."""
        m = self.keys.shape[1]
        y, order = torch.sort(y, stable=True)
        count = torch.zeros_like(self.next_slot).scatter_add_(0, y, torch.ones_like(y))
        position = torch.arange(len(y), device=y.device)
        rank = position - (count.cumsum(0) - count)[y]  # age within the own cluster: 0 is the oldest
        slot = (self.next_slot[y] + rank) % m
        # A cluster with more than m keys in the batch wraps around. Every key that meets the same slot
        # then writes the newest of them, so that the result does not depend on the order of writes.
        newest = position + (count[y] - 1 - rank) // m * m
        self.keys[y, slot] = k[order][newest].to(self.keys.dtype)
        self.next_slot.copy_((self.next_slot + count) % m)


def bank_similarity(q: Tensor, keys: Tensor, tau: float) -> Tensor:
    """log sum over each bank of exp(cos(q_i, k~) / tau): n x C, from q (n x d) and keys (C x m x d)."""
    C, m, d = keys.shape
    cosine = q @ keys.reshape(C * m, d).T  # n x (C m)
    return (cosine / tau).unflatten(1, (C, m)).logsumexp(2)


def instance_loss(q: Tensor, k: Tensor, bank: Tensor, tau: float, y: Tensor | None = None) -> Tensor:
    """Cross-cluster instance discrimination L_ID(I_i) for each sample: n (Eq. 1).

    ``y`` (n) leaves the own cluster's bank out of the contrastive set (Eq. 2). Without it every bank
    counts as negative: plain instance contrast.
    """
    positive = (q * k).sum(1, keepdim=True) / tau  # n x 1
    if y is not None:
        bank = bank.scatter(1, y[:, None], -torch.inf)
    return torch.cat([positive, bank], dim=1).logsumexp(1) - positive[:, 0]


def memory_assignment(bank: Tensor) -> Tensor:
    """p~ (n x C): probability of each cluster by distance to the keys in its bank (Eq. 3)."""
    return bank.softmax(1)


def attraction_loss(bank: Tensor, y: Tensor) -> Tensor:
    """-log p~_{i, y_i} for each sample: n. Pulls a query towards the keys of its own cluster.

    Not in the paper, whose clusters only push each other away.
    """
    return bank.logsumexp(1) - bank.gather(1, y[:, None])[:, 0]


def cluster_loss(logits: Tensor, p_memory: Tensor) -> Tensor:
    """Consistency L_CD between the memory's assignment p~ and the classifier's p (Eq. 4).

    ``logits`` are W^T q + B; the gradient reaches them only, never p~.
    """
    return -(p_memory.detach() * F.log_softmax(logits, dim=1)).sum(1).mean()


def overall_loss(l_id: Tensor, l_cd: Tensor, alpha: float = 1.0, beta: float = 1.0) -> Tensor:
    """L = alpha L_ID + beta L_CD (Eq. 7). The paper fixes both at 1, so that nothing is tuned to a data set."""
    return alpha * l_id + beta * l_cd
