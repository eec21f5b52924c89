"""Label renewal, swap weights, merge-and-split and id matching against plain loops."""

from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import naive
from semclust import core, labels

repeatable = settings(max_examples=60, deadline=None, derandomize=True)
seeds = st.integers(0, 2**32 - 1)


def close(actual, expected):
    torch.testing.assert_close(actual, torch.as_tensor(expected, dtype=actual.dtype), rtol=1e-10, atol=1e-10)


def features(rng, N, d):
    """Continuous rows, cut to multiples of 2^-20: sums and squares are then exact, so that the two rows of
    a pair lie exactly, not almost, equally far from their mean."""
    return torch.from_numpy(rng.integers(-(2**20), 2**20, (N, d)) / 2**20)


def uneven(rng, N, C):
    """Labels of very different cluster sizes, some of them empty."""
    return torch.from_numpy(rng.choice(C, N, p=rng.dirichlet(np.full(C, 0.5))))


@st.composite
def clusterings(draw, fewest=1):
    """Labels, features, the number of clusters and a least size."""
    C, d = draw(st.integers(2, 7)), draw(st.integers(1, 5))
    N = draw(st.integers(fewest, 40))
    rng = np.random.default_rng(draw(seeds))
    least = draw(st.integers(0, 8)) - draw(st.sampled_from([0, 0.5]))
    return uneven(rng, N, C), features(rng, N, d), C, least


# Eq. 5 and 6.


@repeatable
@given(N=st.integers(1, 20), C=st.integers(2, 7), seed=seeds)
def test_most_likely(N, C, seed):
    p = torch.from_numpy(np.random.default_rng(seed).dirichlet(np.ones(C), N))
    assert labels.most_likely(p).tolist() == naive.most_likely(p.tolist())


@repeatable
@given(N=st.integers(1, 12), C=st.integers(2, 4), epochs=st.integers(1, 6), seed=seeds)
def test_swaps_and_weights_over_epochs(N, C, epochs, seed):
    rng = np.random.default_rng(seed)
    y = torch.from_numpy(rng.integers(0, C, (epochs, N)))
    s = torch.ones(N, dtype=torch.float64)
    for before, now in pairwise(y):
        s_before = s.clone()
        counted = labels.count_swaps(s, now, before)
        assert torch.equal(s, s_before)
        s = counted
    assert s.tolist() == naive.swap_counts(y.tolist())
    w, loss = labels.sample_weights(s), torch.from_numpy(rng.random(N))
    close(w, naive.sample_weights(s.tolist()))
    close(w.sum(), 1.0)
    close((w * loss).sum(), naive.weighted_loss(s.tolist(), loss.tolist()))


def test_a_batch_without_swaps_is_weighed_evenly():
    assert labels.sample_weights(torch.ones(4)).tolist() == [0.25] * 4


def test_hard_samples_weigh_more_in_the_instance_loss():
    rng = np.random.default_rng(0)
    q, k, keys = (F.normalize(features(rng, rows, 3), dim=1) for rows in (5, 5, 8))
    keys = keys.unflatten(0, (4, 2))
    y, s = torch.tensor([0, 1, 3, 2, 1]), torch.tensor([1.0, 4.0, 1.0, 2.0, 1.0], dtype=torch.float64)
    l_id = (labels.sample_weights(s) * core.instance_loss(q, k, core.bank_similarity(q, keys, 0.1), 0.1, y)).sum()
    each = [
        naive.instance_loss(q_i, k_i, naive.contrastive_set(keys.tolist(), y_i), 0.1)
        for q_i, k_i, y_i in zip(q.tolist(), k.tolist(), y.tolist(), strict=True)
    ]
    close(l_id, naive.weighted_loss(s.tolist(), each))


# Merge-and-split.


@settings(repeatable, max_examples=150)
@given(clusterings())
def test_merge_and_split(clustering):
    y, x, C, least = clustering
    y_before, x_before = y.clone(), x.clone()
    after = labels.merge_and_split(y, x, C, least)
    assert after.tolist() == naive.merge_and_split(y.tolist(), x.tolist(), C, least)
    assert torch.equal(y, y_before) and torch.equal(x, x_before)


@repeatable
@given(clusterings(), st.booleans())
def test_clusters_that_are_not_small_keep_their_id(clustering, identical):
    y, x, C, least = clustering
    x = torch.ones_like(x) if identical else x
    after = labels.merge_and_split(y, x, C, least)
    size = torch.bincount(y, minlength=C)
    small = size < least
    moved = (after != y) & ~small[y]
    assert small[after[moved]].all()  # only a split takes members away, and only for an emptied id
    assert torch.bincount(after, minlength=C)[~small & (size > 0)].gt(0).all()
    if not small.any() or small.all():
        assert torch.equal(after, y)


@repeatable
@given(clusterings(fewest=7), st.booleans())
def test_no_cluster_stays_empty(clustering, identical):
    y, x, C, least = clustering
    least = max(1, min(least, int(torch.bincount(y).max())))  # at least one cluster is not small
    x = torch.ones_like(x) if identical else x
    after = labels.merge_and_split(y, x, C, least)
    assert sorted(set(after.tolist())) == list(range(C))


@repeatable
@given(clusterings())
def test_least_size_zero_is_the_identity(clustering):
    y, x, C, _ = clustering
    after = labels.merge_and_split(y, x, C, 0)
    assert torch.equal(after, y) and after.data_ptr() != y.data_ptr()


def test_all_clusters_small_is_the_identity():
    y = torch.tensor([0, 1, 1, 2])
    assert torch.equal(labels.merge_and_split(y, features(np.random.default_rng(0), 4, 2), 4, 3), y)


def test_a_cluster_of_exactly_the_least_size_is_not_small():
    y = torch.tensor([0, 0, 1, 1, 1, 1])
    x = features(np.random.default_rng(1), 6, 2)
    assert torch.equal(labels.merge_and_split(y, x, 2, 2), y)
    assert not torch.equal(labels.merge_and_split(y, x, 2, 2.5), y)


def test_merge_goes_to_the_nearest_centroid_and_split_halves_the_largest():
    east, north, south = [1.0, 0.0], [0.0, 1.0], [0.0, -1.0]
    x = torch.tensor([east, east, east, north, north, south, [0.6, 0.8]], dtype=torch.float64)
    y = torch.tensor([0, 0, 0, 1, 1, 1, 2])
    # The last row joins cluster 1 or 0 by centroids (0, 1/3) and (1, 0): 0.27 against 0.6. Then cluster 0 is the
    # largest. 2-means would part the newcomer from the three equal rows, fewer than 2: it is cut in the middle.
    assert labels.merge_and_split(y, x, 3, 2).tolist() == [2, 0, 0, 1, 1, 1, 2]


def test_sizes_are_recounted_before_each_split():
    x = torch.tensor([[0.0], [1.0], [10.0], [11.0], [100.0], [101.0], [110.0], [111.0]], dtype=torch.float64)
    y = torch.zeros(8, dtype=torch.long)
    after = labels.merge_and_split(y, x, 4, 1)
    assert torch.bincount(after).tolist() == [2, 2, 2, 2]
    assert len(after[::2].unique()) == 4 and torch.equal(after[::2], after[1::2])


@pytest.mark.parametrize("N", [2, 3, 8, 9])
def test_identical_rows_are_halved_all_the_same(N):
    half = labels.second_half(torch.full((N, 3), 0.1))
    assert half.tolist() == [i % 2 == 1 for i in range(N)]


def test_a_single_row_cannot_be_halved():
    assert labels.second_half(torch.ones(1, 3)).tolist() == [False]


@repeatable
@given(N=st.integers(1, 30), d=st.integers(1, 5), seed=seeds)
def test_second_half(N, d, seed):
    x = features(np.random.default_rng(seed), N, d)
    half = labels.second_half(x)
    assert half.tolist() == naive.second_half(x.tolist())
    if N > 1:
        assert half.any() and not half.all()


def test_a_row_between_the_two_starts_stays_in_the_first_half():
    assert labels.second_half(torch.tensor([[-1.0], [0.0], [1.0]])).tolist() == [False, False, True]


def test_second_half_separates_two_groups():
    rng = np.random.default_rng(2)
    right = torch.from_numpy(rng.permutation([True] * 9 + [False] * 4))
    half = labels.second_half(0.1 * features(rng, 13, 3) + right[:, None])
    assert torch.equal(half, right) or torch.equal(half, ~right)


# Ids from one clustering to the next.


@repeatable
@given(N=st.integers(1, 30), C=st.integers(2, 5), seed=seeds)
def test_match_ids_agrees_as_far_as_any_renaming_can(N, C, seed):
    rng = np.random.default_rng(seed)
    y, reference = uneven(rng, N, C).numpy(), uneven(rng, N, C).numpy()
    renamed = labels.match_ids(y, reference, C)
    assert (renamed == reference).sum() == naive.best_agreement(y.tolist(), reference.tolist(), C)
    pairs = set(zip(y.tolist(), renamed.tolist(), strict=True))
    assert len(pairs) == len({a for a, _ in pairs}) == len({b for _, b in pairs})  # one name for each cluster
    assert renamed.min() >= 0 and renamed.max() < C


def test_match_ids_undoes_a_permutation():
    reference = np.array([0, 1, 2, 3, 0, 1, 2, 3, 3])
    assert labels.match_ids(np.array([2, 0, 3, 1])[reference], reference, 4).tolist() == reference.tolist()


def test_an_outlier_does_not_take_the_cluster_with_it():
    """2-means would split 1 / 99: the id must stay with the bulk, and the halves must be of use."""
    rng = np.random.default_rng(0)
    x = features(rng, 101, 3) * 0.01
    x[7] = torch.tensor([5.0, 0.0, 0.0], dtype=x.dtype)
    y = torch.zeros(101, dtype=torch.long)
    y[100] = 1  # a cluster of one, to be dissolved
    after = labels.merge_and_split(y, x, 2, min_size=8)
    assert torch.bincount(after).tolist() == [51, 50]
    assert after[7] == 1


def test_the_larger_half_keeps_the_id():
    x = torch.cat([torch.zeros(30, 2), torch.ones(12, 2)]).double() + 0.01 * torch.arange(42)[:, None] / 42
    after = labels.merge_and_split(torch.zeros(42, dtype=torch.long), x, 2, min_size=5)
    assert after.tolist() == [0] * 30 + [1] * 12
    after = labels.merge_and_split(torch.zeros(42, dtype=torch.long), x.flip(0), 2, min_size=5)
    assert after.tolist() == [1] * 12 + [0] * 30
