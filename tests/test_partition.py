"""k-means and the spectral partition on shapes whose groups are known."""

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.cluster import KMeans
from sklearn.metrics import adjusted_rand_score
from torch import Tensor

from semclust import partition
from semclust.partition import cluster_means, k_means, nearest, nearest_neighbours, spectral_partition

repeatable = settings(max_examples=25, deadline=None, derandomize=True)
seeds = st.integers(0, 2**32 - 1)


def agreement(labels, truth):
    """1 where two partitions are the same up to the names of their groups."""
    return adjusted_rand_score(truth, labels)


def blobs(C, each, d=3, noise=0.05, seed=0):
    """Groups around points at least 1 apart."""
    rng = np.random.default_rng(seed)
    centres = np.stack([rng.permutation(C) + rng.uniform(-0.1, 0.1, C) for _ in range(d)], 1)
    y = np.repeat(np.arange(C), each)
    x = centres[y] + noise * rng.standard_normal((len(y), d))
    return torch.from_numpy(x).float(), y


def lifted(plane):
    """Points of the plane on the unit sphere: seen from below, they keep their neighbours."""
    return F.normalize(torch.cat([plane, torch.ones(len(plane), 1)], 1), dim=1)


def rings(n=400):
    angle = torch.linspace(0, 4 * math.pi, n)
    radius = torch.where(torch.arange(n) % 2 == 0, 0.3, 1.0) + 0.02 * torch.randn(n)
    return lifted(torch.stack([angle.cos(), angle.sin()], 1) * radius[:, None]), torch.arange(n) % 2


def arcs(n=400):
    angle = torch.rand(n) * math.pi
    second = torch.arange(n) % 2 == 1
    across = torch.where(second, 1 - angle.cos(), angle.cos()) - 0.5
    up = torch.where(second, 0.5 - angle.sin(), angle.sin()) - 0.25
    return lifted(torch.stack([across, up], 1) + 0.03 * torch.randn(n, 2)), second.long()


def inertia(x, labels, C):
    return sum(((x[labels == j] - x[labels == j].mean(0)) ** 2).sum().item() for j in range(C) if (labels == j).any())


# k-means.


@repeatable
@given(C=st.integers(2, 8), each=st.integers(3, 30), seed=seeds)
def test_k_means_recovers_separated_blobs(C, each, seed):
    x, y = blobs(C, each, seed=seed)
    torch.manual_seed(seed % 1000)
    labels, centres = k_means(x, C)
    assert labels.shape == (C * each,) and labels.dtype == torch.int64 and centres.shape == (C, 3)
    assert agreement(labels, y) == 1
    for j in range(C):
        torch.testing.assert_close(centres[j], x[labels == j].mean(0))


@repeatable
@given(C=st.integers(2, 9), d=st.integers(1, 6), spread=st.floats(0.05, 1.5), seed=seeds)
def test_k_means_is_about_as_tight_as_that_of_scikit_learn(C, d, spread, seed):
    rng = np.random.default_rng(seed)
    centres = rng.standard_normal((C, d))
    x = centres[rng.integers(0, C, 150)] + spread * rng.standard_normal((150, d))
    torch.manual_seed(0)
    labels, _ = k_means(torch.from_numpy(x), C)
    reference = KMeans(C, n_init=10, random_state=0).fit(x).inertia_
    assert inertia(x, labels.numpy(), C) <= 1.05 * reference


def test_k_means_keeps_the_best_of_its_restarts():
    x, _ = blobs(12, 8, d=2, noise=0.25, seed=3)
    one, many = [], []
    for seed in range(10):
        torch.manual_seed(seed)
        one.append(inertia(x, k_means(x, 12, restarts=1)[0], 12))
        torch.manual_seed(seed)
        many.append(inertia(x, k_means(x, 12, restarts=10)[0], 12))
    assert np.mean(many) < 0.97 * np.mean(one)


def test_k_means_with_as_many_clusters_as_rows():
    x, _ = blobs(6, 1, noise=0)
    labels, centres = k_means(x, 6)
    assert sorted(labels.tolist()) == list(range(6))
    assert torch.equal(centres[labels], x)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_k_means_of_very_few_rows(n):
    x = torch.eye(3)[:n]
    labels, centres = k_means(x, n)
    assert sorted(labels.tolist()) == list(range(n))
    assert torch.equal(centres[labels], x)
    labels, _ = k_means(x, 1)
    assert labels.tolist() == [0] * n


@pytest.mark.parametrize("n", [5, 60])
def test_k_means_of_rows_that_are_all_the_same(n):
    labels, centres = k_means(torch.full((n, 4), 0.3), 3)
    assert len(set(labels.tolist())) == 1
    torch.testing.assert_close(centres, torch.full((3, 4), 0.3))


def test_k_means_with_fewer_different_rows_than_clusters():
    x = torch.eye(2).repeat_interleave(20, 0)
    labels, centres = k_means(x, 5)
    assert labels.min() >= 0 and labels.max() < 5 and centres.isfinite().all()
    assert agreement(labels, [0] * 20 + [1] * 20) == 1


@pytest.mark.parametrize("cut", [k_means, lambda x, C: spectral_partition(x, C, 0.1)], ids=["k_means", "spectral"])
def test_partitions_are_repeatable_under_a_seed(cut):
    x = F.normalize(torch.randn(150, 4, generator=torch.Generator().manual_seed(0)), dim=1)

    def partition_of(seed):
        torch.manual_seed(seed)
        result = cut(x, 9)
        return (result[0] if isinstance(result, tuple) else result).tolist()

    assert partition_of(3) == partition_of(3)
    assert any(partition_of(seed) != partition_of(3) for seed in range(4, 8))


def test_nearest_against_a_loop():
    rng = np.random.default_rng(0)
    x, sets = rng.standard_normal((50, 3)), rng.standard_normal((2, 40, 3))
    distance, which = nearest(torch.from_numpy(x), torch.from_numpy(sets))
    assert distance.shape == which.shape == (50, 2)
    for i, s in itertools.product(range(50), range(2)):
        squared = [sum((x[i] - c) ** 2) for c in sets[s]]
        assert which[i, s] == int(np.argmin(squared))
        assert distance[i, s].item() == pytest.approx(min(squared), abs=1e-10)


def test_nearest_does_not_depend_on_how_many_distances_are_taken_at_once(monkeypatch):
    x, sets = torch.randn(50, 3), torch.randn(2, 7, 3)
    whole = nearest(x, sets)
    monkeypatch.setattr(partition, "DISTANCES_AT_ONCE", 40)
    for a, b in zip(nearest(x, sets), whole, strict=True):
        torch.testing.assert_close(a, b)


def test_starts_of_k_means_are_spread_out():
    x, y = blobs(5, 40, noise=0.01)
    torch.manual_seed(0)
    starts = partition._spread_out(x, 5, restarts=50)
    assert starts.shape == (50, 5, x.shape[1])
    hit = [len({int(y[(x - centre).norm(dim=1).argmin()]) for centre in start}) for start in starts]
    assert np.mean(hit) > 4.8  # five rows at random would fall into 3.4 of the 5 groups


# Spectral partition.


@pytest.mark.parametrize("shape", [rings, arcs])
@pytest.mark.parametrize("seed", range(3))
def test_spectral_partition_follows_shapes_that_k_means_cuts(shape, seed):
    torch.manual_seed(seed)
    x, y = shape()
    assert agreement(spectral_partition(x, 2, tau=0.1, neighbours=5), y) > 0.98
    assert agreement(k_means(x, 2)[0], y) < 0.6


def touching_and_a_knot():
    """Five classes of 150, of which the last two touch, and 15 images that are nearly the same."""
    centre = torch.eye(24)[[0, 1, 2, 3, 3, 20]]
    centre[4, 10] = 0.7
    y = torch.arange(6).repeat_interleave(torch.tensor([150] * 5 + [15]))
    noise = torch.tensor([0.15] * 5 + [0.02])[y][:, None]
    return F.normalize(centre[y] + noise * torch.randn(len(y), 24), dim=1), y


def test_borders_that_a_sample_shows_hold_for_all_images(monkeypatch):
    monkeypatch.setattr(partition, "SAMPLE", 120)
    torch.manual_seed(0)
    y = torch.arange(4).repeat_interleave(300)
    x = F.normalize(torch.eye(4, 12)[y] + 0.15 * torch.randn(1200, 12), dim=1)
    assert agreement(spectral_partition(x, 4, tau=0.2), y) > 0.98


@pytest.mark.parametrize("seed", [0, 2])
def test_classes_that_touch_are_parted_rather_than_a_knot_cut_off(seed):
    torch.manual_seed(seed)
    x, y = touching_and_a_knot()
    for even in (True, False):
        torch.manual_seed(seed)
        label = spectral_partition(x, 5, tau=0.2, even=even)
        sizes = label.bincount(minlength=5)
        assert (agreement(label[y < 5], y[y < 5]) > 0.95) == even
        assert (sizes.min() > 120) == even


def test_of_several_draws_of_landmarks_the_best_partition_is_taken(monkeypatch):
    torch.manual_seed(0)
    y = torch.arange(4).repeat_interleave(60)
    x = F.normalize(torch.eye(4, 12)[y] + 0.15 * torch.randn(240, 12), dim=1)
    draw, drawn = partition.SpectralEmbedding, []

    def one_good_draw(*args) -> Callable[[Tensor], Tensor]:
        drawn.append(args)
        return draw(*args) if len(drawn) == 5 else lambda some: torch.randn(len(some), 8)

    monkeypatch.setattr(partition, "SpectralEmbedding", one_good_draw)
    assert agreement(spectral_partition(x, 4, tau=0.2), y) > 0.98
    assert len(drawn) == partition.DRAWS


@pytest.mark.parametrize("C, draws", [(10, 8), (100, 5), (400, 1)])
def test_of_many_clusters_fewer_draws_are_made(C, draws, monkeypatch):
    drawn = []
    draw = partition.SpectralEmbedding
    monkeypatch.setattr(partition, "SpectralEmbedding", lambda *args: drawn.append(args) or draw(*args))
    monkeypatch.setattr(partition, "EVEN_ROUNDS", 1)
    torch.manual_seed(0)
    spectral_partition(F.normalize(torch.randn(1200, 8), dim=1), C, tau=0.2)
    assert len(drawn) == draws


@pytest.mark.parametrize("C, shares", [(2, (0.9, 0.1)), (3, (0.6, 0.3, 0.1)), (4, (0.4, 0.3, 0.2, 0.1))])
def test_clusters_are_evened_out(C, shares):
    torch.manual_seed(0)
    y = torch.multinomial(torch.tensor(shares), 2000, replacement=True)
    x = F.normalize(torch.eye(C, 8)[y] + 0.2 * torch.randn(2000, 8), dim=1)
    centre, _ = cluster_means(x, y, C)
    even_centre, bonus = partition.even_centres(x, centre)
    sizes = partition._cut(x, even_centre, bonus).bincount(minlength=C)
    assert sizes.max() < 1.6 * sizes.min()
    assert partition._cut(x, centre, torch.zeros(C)).bincount(minlength=C).max() > 1.5 * 2000 / C


def test_even_clusters_are_left_as_they_are():
    torch.manual_seed(0)
    y = torch.arange(4).repeat_interleave(50)
    x = F.normalize(torch.eye(4, 8)[y] + 0.1 * torch.randn(200, 8), dim=1)
    centre, _ = cluster_means(x, y, 4)
    assert torch.equal(partition._cut(x, *partition.even_centres(x, centre)), y)


@pytest.mark.parametrize("C, each", [(2, 10), (4, 5), (5, 60), (10, 30)])
def test_spectral_partition_recovers_separated_groups(C, each):
    torch.manual_seed(0)
    y = torch.arange(C).repeat_interleave(each)
    x = F.normalize(torch.eye(C, 12)[y] + 0.05 * torch.randn(C * each, 12), dim=1)
    labels = spectral_partition(x, C, tau=0.1)
    assert labels.shape == (C * each,) and labels.dtype == torch.int64
    assert agreement(labels, y) == 1


def test_spectral_partition_recovers_groups_of_very_different_sizes():
    torch.manual_seed(0)
    y = torch.arange(3).repeat_interleave(torch.tensor([400, 60, 20]))
    x = F.normalize(torch.eye(3, 8)[y] + 0.1 * torch.randn(len(y), 8), dim=1)
    assert agreement(spectral_partition(x, 3, tau=0.1), y) == 1


@pytest.mark.parametrize("C", [2, 3, 10, 18, 19, 20])
def test_spectral_partition_of_20_images_into_any_number(C):
    torch.manual_seed(0)
    labels = spectral_partition(F.normalize(torch.randn(20, 5), dim=1), C, tau=0.1)
    assert labels.shape == (20,) and labels.min() >= 0 and labels.max() < C
    assert len(labels.unique()) > C / 2


@pytest.mark.parametrize("n, C", [(4, 2), (4, 4), (3, 2)])
def test_spectral_partition_of_fewer_images_than_neighbours(n, C):
    labels = spectral_partition(torch.eye(4)[:n], C, tau=0.1)
    assert labels.shape == (n,) and labels.max() < C


def test_spectral_partition_of_images_that_are_all_the_same():
    labels = spectral_partition(torch.eye(4)[:1].repeat(30, 1), 3, tau=0.1)
    assert labels.shape == (30,) and labels.min() >= 0 and labels.max() < 3


# Chunks.


@pytest.mark.parametrize("chunk", [1, 37, 200])
def test_chunks_do_not_change_k_means(chunk, monkeypatch):
    x = torch.randn(200, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def run():
        torch.manual_seed(0)
        return k_means(x, 7)

    labels, centres = run()
    monkeypatch.setattr(partition, "DISTANCES_AT_ONCE", chunk * 7 * 10)  # of 7 clusters, ten restarts side by side
    in_chunks, centres_in_chunks = run()
    assert torch.equal(labels, in_chunks)
    torch.testing.assert_close(centres, centres_in_chunks)


@pytest.mark.parametrize("chunk", [7, 64, 399])
def test_chunks_do_not_change_the_spectral_partition(chunk, monkeypatch):
    torch.manual_seed(0)
    x, _ = arcs()
    x = x.double()

    def run():
        torch.manual_seed(1)
        return spectral_partition(x, 4, tau=0.1)

    whole = run()
    monkeypatch.setattr(partition, "CHUNK", chunk)
    assert agreement(run(), whole) == 1


def test_landmarks_from_a_sample_of_the_images_still_separate(monkeypatch):
    """The sample must be dense enough for its landmarks, a sixth as many, to form the rings: 300 images are not."""
    torch.manual_seed(0)
    x, y = rings(1200)
    monkeypatch.setattr(partition, "SAMPLE", 600)
    assert agreement(spectral_partition(x, 2, tau=0.1), y) > 0.98


@pytest.mark.parametrize("rows, columns", [(1024, 65_536), (7, 65_536), (1024, 9), (7, 9), (7, 2)])
def test_nearest_neighbours_are_those_of_all_pairs_whatever_is_looked_at_at_once(monkeypatch, rows, columns):
    monkeypatch.setattr(partition, "ROWS", rows)
    monkeypatch.setattr(partition, "COLUMNS", columns)
    x = F.normalize(torch.randn(40, 6, generator=torch.Generator().manual_seed(0)), dim=1)
    expected = (x @ x.T).fill_diagonal_(-2).topk(5, dim=1).indices
    assert torch.equal(partition.nearest_neighbours(x, 5), expected)


def test_an_image_is_no_neighbour_of_itself_also_where_others_are_the_same():
    found = partition.nearest_neighbours(torch.ones(6, 1), 5)
    assert all(sorted(row) == [j for j in range(6) if j != i] for i, row in enumerate(found.tolist()))


def test_centred_features_are_directions_from_the_mean_direction():
    x = torch.rand(50, 4, generator=torch.Generator().manual_seed(0))
    unit = x / x.norm(dim=1, keepdim=True)
    away = unit - unit.mean(0)
    torch.testing.assert_close(partition.centred(3 * x), away / away.norm(dim=1, keepdim=True))


def test_neighbours_among_very_many_are_sought_in_a_sample(monkeypatch):
    torch.manual_seed(0)
    x = F.normalize(torch.randn(300, 8), dim=1)
    monkeypatch.setattr(partition, "CANDIDATES", 100)
    monkeypatch.setattr(partition, "ROWS", 64)
    torch.manual_seed(1)
    found = nearest_neighbours(x, 5)
    torch.manual_seed(1)
    sample = torch.randperm(300)[:100]
    closeness = x @ x[sample].T
    closeness[torch.arange(300)[:, None] == sample] = -torch.inf
    expected = sample[closeness.topk(5, dim=1).indices]
    assert torch.equal(found.sort(1).values, expected.sort(1).values)
