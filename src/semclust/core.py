"""The paper's Section 3.1: semantic memory, instance discrimination, cluster discrimination (Eq. 1-4, 7).

Everything here follows from one tensor. With unit vectors ``q`` and the keys of all memory banks,

    bank[i, j] = log sum_{k~ in M_j} exp(cos(q_i, k~) / tau)

is how close query i lies to bank j. The contrastive set of Eq. 2 is ``bank`` without the column of
the query's own cluster; the distance-based classifier of Eq. 3 is its softmax.

Shapes: n batch, C clusters, m keys in a bank, d dimension of a representation.
All representations are unit vectors, so an inner product is a cosine.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SIMILARITIES_AT_ONCE = 2**23
EVEN_ROUNDS = 100  # of Sinkhorn: on digits and Fashion-MNIST, 200 lead to the same shares
LEAST_SHARE = 0.1  # of 1 / C: no cluster is favoured more than tenfold, however small it is


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
    def enqueue(self, k: Tensor, y: Tensor, spoiled: Tensor | None = None) -> None:
        """Write each key k_i (n x d) into bank M_{y_i}, over the oldest key there; nothing where ``spoiled`` (a
        boolean on the device)."""
        C, m, d = self.keys.shape
        position = torch.arange(len(y), device=y.device)
        member = own_bank(y, C)
        age = member.cumsum(0).gather(1, y[:, None])[:, 0] - 1  # within the own cluster: 0 is the oldest
        slot = y * m + (self.next_slot[y] + age) % m
        # A cluster with more than m keys in the batch wraps around. Every key that meets the same slot
        # then writes the newest of them, so that the result does not depend on the order of writes.
        newest = torch.zeros(C * m, dtype=torch.long, device=y.device).scatter_reduce_(0, slot, position, "amax")
        keys, written = k[newest[slot]].to(self.keys.dtype), member.sum(0)
        if spoiled is not None:
            keys = torch.where(spoiled, self.keys.view(C * m, d)[slot], keys)
            written = torch.where(spoiled, 0, written)
        self.keys.view(C * m, d)[slot] = keys
        self.next_slot.copy_((self.next_slot + written) % m)


def own_bank(y: Tensor, C: int) -> Tensor:
    """Whether bank j is that of sample i's cluster: n x C."""
    return y[:, None] == torch.arange(C, device=y.device)


def bank_similarity(q: Tensor, keys: Tensor, tau: float) -> Tensor:
    """log sum over each bank of exp(cos(q_i, k~) / tau): n x C, from q (n x d) and keys (C x m x d).

    The gradient reaches q alone: keys are what the memory holds.
    """
    if len(_few_banks(q, keys)) == 1:
        return (_cosine(q, keys.detach()) / tau).logsumexp(2)
    return _BankSimilarity.apply(q, keys, tau)


class _BankSimilarity(torch.autograd.Function):
    """For large memories: the similarities themselves (n x C x m) are not kept. They are taken of a few banks at a
    time, and once more for the gradient."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, keys: Tensor, tau: float) -> Tensor:
        bank = torch.cat([_cosine(q, part).div(tau).logsumexp(2) for part in _few_banks(q, keys)], dim=1)
        ctx.save_for_backward(q, keys, bank)
        ctx.tau = tau
        return bank

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        q, keys, bank = ctx.saved_tensors
        to_q = torch.zeros_like(q)
        first = 0
        for part in _few_banks(q, keys):
            these = slice(first, first := first + len(part))
            share = (_cosine(q, part) / ctx.tau - bank[:, these, None]).exp()  # of each key in its bank's sum
            to_q = to_q + (share * gradient[:, these, None]).flatten(1) @ part.flatten(0, 1) / ctx.tau
        return to_q, None, None


def _cosine(q: Tensor, keys: Tensor) -> Tensor:
    """n x C x m."""
    return (q @ keys.flatten(0, 1).T).unflatten(1, keys.shape[:2])


def _few_banks(q: Tensor, keys: Tensor) -> tuple[Tensor, ...]:
    return keys.split(max(1, SIMILARITIES_AT_ONCE // (len(q) * keys.shape[1])))


def instance_loss(q: Tensor, k: Tensor, bank: Tensor, tau: float, y: Tensor | None = None) -> Tensor:
    """Cross-cluster instance discrimination L_ID(I_i) for each sample: n (Eq. 1).

    ``y`` (n) leaves the own cluster's bank out of the contrastive set (Eq. 2). Without it every bank
    counts as negative: plain instance contrast.
    """
    positive = (q * k).sum(1, keepdim=True) / tau  # n x 1
    if y is not None:
        bank = bank.masked_fill(own_bank(y, bank.shape[1]), -torch.inf)
    return torch.cat([positive, bank], dim=1).logsumexp(1) - positive[:, 0]


def nearest_key(k: Tensor, keys: Tensor) -> Tensor:
    """Of all keys in the memory (C x m x d), the most similar to each k_i: n x d.

    As a positive it stands for another image of the same class; after Dwibedi et al. (2021, "NNCLR"). Not in the paper.
    """
    keys = keys.flatten(0, 1)
    return keys[(k.detach() @ keys.T).argmax(1)]


def memory_assignment(bank: Tensor) -> Tensor:
    """p~ (n x C): probability of each cluster by distance to the keys in its bank (Eq. 3)."""
    return bank.softmax(1)


def attraction_loss(bank: Tensor, y: Tensor) -> Tensor:
    """-log p~_{i, y_i} for each sample: n. Pulls a query towards the keys of its own cluster.

    Not in the paper, whose clusters only push each other away.
    """
    return bank.logsumexp(1) - (bank * own_bank(y, bank.shape[1])).sum(1)


def cluster_loss(logits: Tensor, p_memory: Tensor) -> Tensor:
    """Consistency L_CD(I_i) between the memory's assignment p~ and the classifier's p for each sample: n (Eq. 4).

    ``logits`` are W^T q + B; the gradient reaches them only, never p~.
    """
    return -(p_memory.detach() * F.log_softmax(logits, dim=1)).sum(1)


def neighbour_loss(logits: Tensor) -> Tensor:
    """-log sum_j p_ij p_i'j for each sample i and its neighbour i': n. Rows 2i and 2i + 1 of ``logits`` (n x C)
    are neighbours.

    The chance that both are in one cluster; after Van Gansbeke et al. (2020, "SCAN"). Not in the paper.
    """
    log_p = F.log_softmax(logits, dim=1).unflatten(0, (-1, 2))
    return -log_p.sum(1).logsumexp(1).repeat_interleave(2)


def imbalance_loss(p: Tensor, mean: Tensor) -> Tensor:
    """For each sample: n. On average log C - H(mean), 0 for clusters of one size.

    ``mean`` (C) is that of p (n x C) over the whole batch. Its gradient is that of the average, though ``mean`` is
    taken as fixed: the gradient of sum_j m_j log m_j is (log m_j + 1) / n for each p_ij, and those of a row sum to 1.
    """
    return math.log(p.shape[1]) + (p * mean.detach().clamp(min=1e-8).log()).sum(1)


def self_label_loss(logits: Tensor, p: Tensor, share: Tensor, confidence: float) -> Tensor:
    """Cross entropy with the most likely cluster of p, 0 where p is not sure of it, for each sample: n.

    ``logits`` (n x C) are of a strongly changed view, p (n x C) is the momentum twin's for a hardly changed one; after
    Sohn et al. (2020, "FixMatch"). p is ``evened_out`` by ``share`` (C) first. Not in the paper.
    """
    p = p.detach()
    sure, y = evened_out(p, share).max(1)
    loss = F.cross_entropy(logits, y, reduction="none") * (sure >= confidence)
    return loss + 0 * p.sum(1)  # not finite where p is not: nobody is sure of that, but it must not pass unseen


def evened_out(p: Tensor, share: Tensor) -> Tensor:
    """Probabilities p (n x C) as they would be if all clusters were of one size: each cluster's divided by its
    ``share`` (C)."""
    even = p / share
    return even / even.sum(1, keepdim=True)


def even_share(p: Tensor) -> Tensor:
    """The share of each cluster (C) by which p (N x C) is ``evened_out``, so that the probabilities of each sum to
    N / C, as far as shares of at least ``LEAST_SHARE`` allow: where p is sure, or a cluster has hardly an image that
    could belong to it, clusters stay of different sizes. After Sinkhorn.

    To divide by the mean of p, once, changes little where p is sure, and clusters that are sure grow from epoch to
    epoch at the cost of the others."""
    N, C = p.shape
    share = torch.full_like(p[0], 1 / C)
    for _ in range(EVEN_ROUNDS):
        share = p.T @ (p @ share.reciprocal()).reciprocal() * (C / N)
        share = (share / share.sum()).clamp(min=LEAST_SHARE / C)
    return share


def overall_loss(l_id: Tensor, l_cd: Tensor) -> Tensor:
    """L = alpha L_ID + beta L_CD (Eq. 7) with alpha = beta = 1, as the paper has them for every data set."""
    return l_id + l_cd
