"""The paper's formulas a second time: plain loops over Python floats, read from its equations."""

import math
from collections import deque
from itertools import pairwise, permutations


def dot(a, b):
    return sum(u * v for u, v in zip(a, b, strict=True))


def cosine(a, b):
    """cos(a, b); 0 for the zero vector of an empty slot."""
    norms = math.sqrt(dot(a, a)) * math.sqrt(dot(b, b))
    return dot(a, b) / norms if norms > 0 else 0.0


def kernel_sum(q, keys, tau):
    """Sum of exp(cos(q, k~) / tau) over a list of keys."""
    return sum(math.exp(cosine(q, key) / tau) for key in keys)


# Section 3.1, semantic memory.


def bank_size(K, C):
    return max(1, K // (C - 1))


def empty_banks(C, m, d):
    """M_1 ... M_C, oldest key first; an empty slot is the zero vector."""
    return [deque([[0.0] * d for _ in range(m)], maxlen=m) for _ in range(C)]


def enqueue(banks, k, y):
    """One sample after the other; a full deque drops its oldest."""
    for k_i, y_i in zip(k, y, strict=True):
        banks[y_i].append(list(k_i))


def contrastive_set(banks, y_i=None):
    """Q_i, Eq. 2: the keys of every bank but the own one; without a label, the keys of all banks."""
    return [key for j, bank in enumerate(banks) if j != y_i for key in bank]


# Losses, Eq. 1, 3, 4, 7.


def instance_loss(q_i, k_i, negatives, tau):
    """L_ID(I_i), Eq. 1."""
    return -math.log(math.exp(cosine(q_i, k_i) / tau) / kernel_sum(q_i, [*negatives, k_i], tau))


def nearest_key(k_i, keys):
    """The key most like k_i."""
    return max(keys, key=lambda key: cosine(k_i, key))


def memory_assignment(q_i, banks, tau):
    """p~_i, Eq. 3."""
    total = kernel_sum(q_i, [key for bank in banks for key in bank], tau)
    return [kernel_sum(q_i, bank, tau) / total for bank in banks]


def attraction_loss(q_i, banks, y_i, tau):
    """-log p~_{i, y_i}, an addition to the paper."""
    return -math.log(memory_assignment(q_i, banks, tau)[y_i])


def softmax(logits_i):
    total = sum(math.exp(value) for value in logits_i)
    return [math.exp(value) / total for value in logits_i]


def cluster_loss(logits, p_memory):
    """L_CD, Eq. 4."""
    total = 0.0
    for logits_i, p_memory_i in zip(logits, p_memory, strict=True):
        for p_ij, p_memory_ij in zip(softmax(logits_i), p_memory_i, strict=True):
            total -= p_memory_ij * math.log(p_ij)
    return total / len(logits)


def overall_loss(l_id, l_cd, alpha, beta):
    return alpha * l_id + beta * l_cd


# Labels, Eq. 5, 6.


def most_likely(p):
    return [max(range(len(p_i)), key=p_i.__getitem__) for p_i in p]


def swap_counts(labels_by_epoch):
    """s_i after the last epoch, from 1."""
    counts = [1] * len(labels_by_epoch[0])
    for before, now in pairwise(labels_by_epoch):
        for i in range(len(counts)):
            counts[i] += 1 if now[i] != before[i] else 0
    return counts


def sample_weights(s):
    return [s_i / sum(s) for s_i in s]


def weighted_loss(s, losses):
    """L_ID over the batch, Eq. 6."""
    return sum(w_i * loss_i for w_i, loss_i in zip(sample_weights(s), losses, strict=True))


def follow(twin, encoder, m):
    """theta~ <- m theta~ + (1 - m) theta."""
    return [m * a + (1 - m) * b for a, b in zip(twin, encoder, strict=True)]


# Merge-and-split.


def mean(rows):
    return [sum(column) / len(rows) for column in zip(*rows, strict=True)]


def squared_distance(a, b):
    return sum((u - v) ** 2 for u, v in zip(a, b, strict=True))


def farthest(rows, centre):
    return max(rows, key=lambda row: squared_distance(row, centre))


def second_half(rows):
    """2-means from the row farthest from the mean and the row farthest from that: is a row in the second half?"""
    first = farthest(rows, mean(rows))
    second = farthest(rows, first)
    before = None
    for _ in range(50):
        half = [squared_distance(row, second) < squared_distance(row, first) for row in rows]
        if len(set(half)) < 2:
            return [i % 2 == 1 for i in range(len(rows))]
        if half == before:
            break
        before = half
        first = mean([row for row, inside in zip(rows, half, strict=True) if not inside])
        second = mean([row for row, inside in zip(rows, half, strict=True) if inside])
    return half


def nearest(row, centroids):
    """The cluster whose centroid has the largest inner product with the row."""
    return max(centroids, key=lambda j: dot(row, centroids[j]))


def smaller_half(rows, min_size):
    half = second_half(rows)
    if 2 * sum(half) > len(rows):
        half = [not inside for inside in half]
    if sum(half) >= min_size or len(rows) < 2:
        return half
    there = mean([row for row, inside in zip(rows, half, strict=True) if inside])
    here = mean([row for row, inside in zip(rows, half, strict=True) if not inside])
    along = [dot(row, [a - b for a, b in zip(there, here, strict=True)]) for row in rows]
    leaving = sorted(range(len(rows)), key=lambda i: -along[i])[: len(rows) // 2]
    return [i in leaving for i in range(len(rows))]


def merge_and_split(y, x, C, min_size):
    y = list(y)
    small = [j for j in range(C) if y.count(j) < min_size]
    kept = [j for j in range(C) if j not in small]
    if not small or not kept:
        return y
    centroids = {j: mean([x_i for x_i, y_i in zip(x, y, strict=True) if y_i == j]) for j in kept}
    y = [nearest(x_i, centroids) if y_i in small else y_i for x_i, y_i in zip(x, y, strict=True)]
    for empty in small:
        largest = max(range(C), key=y.count)
        members = [i for i, y_i in enumerate(y) if y_i == largest]
        for i, inside in zip(members, smaller_half([x[i] for i in members], min_size), strict=True):
            if inside:
                y[i] = empty
    return y


def best_agreement(y, reference, C):
    """How many labels can agree with the reference under the best renaming of the clusters."""
    return max(sum(names[a] == b for a, b in zip(y, reference, strict=True)) for names in permutations(range(C)))
