"""Accuracy against brute force, NMI and ARI against scikit-learn, and the figures that need no label."""

import math
from itertools import permutations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score

import naive
from semclust import metrics
from semclust.config import Settings
from semclust.metrics import clustering_accuracy, complaints, contingency, evaluate, health, label_free_score, spread

repeatable = settings(max_examples=40, deadline=None, derandomize=True)


@st.composite
def labelled(draw):
    """Cluster ids and true classes, of numbers that may differ."""
    N, C, classes = draw(st.integers(1, 25)), draw(st.integers(1, 5)), draw(st.integers(1, 5))
    ids = st.lists(st.integers(0, C - 1), min_size=N, max_size=N)
    truth = st.lists(st.integers(0, classes - 1), min_size=N, max_size=N)
    return np.array(draw(ids)), np.array(draw(truth))


# With labels.


@repeatable
@given(labelled())
def test_accuracy_against_every_map_of_clusters_to_classes(case):
    predicted, true = case
    right = naive.best_agreement(predicted.tolist(), true.tolist(), 5)
    assert clustering_accuracy(predicted, true) == pytest.approx(right / len(true))


@repeatable
@given(labelled())
def test_evaluate_agrees_with_scikit_learn(case):
    predicted, true = case
    figures = evaluate(predicted, true)
    assert list(figures) == ["acc", "nmi", "ari"] and all(type(value) is float for value in figures.values())
    assert figures["acc"] == clustering_accuracy(predicted, true)
    assert figures["nmi"] == pytest.approx(normalized_mutual_info_score(true, predicted))
    assert figures["ari"] == pytest.approx(adjusted_rand_score(true, predicted))


@pytest.mark.parametrize(
    "predicted, true, accuracy",
    [
        ([0, 0, 1, 1, 2, 2], [0, 0, 1, 1, 1, 1], 4 / 6),  # a cluster left over is wrong
        ([0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 2, 2], 4 / 6),  # as is a class left over
        ([0, 0, 0, 0], [0, 1, 2, 3], 1 / 4),
        ([0, 1, 2, 3], [0, 0, 0, 0], 1 / 4),
        ([5, 5, -3, 900], [1, 1, 0, 7], 1.0),
        ([0, 0, 1, 1, 1], [0, 0, 0, 0, 1], 3 / 5),  # not the map that suits the first cluster best
    ],
)
def test_accuracy_where_clusters_and_classes_differ(predicted, true, accuracy):
    assert clustering_accuracy(np.array(predicted), np.array(true)) == pytest.approx(accuracy)


def test_accuracy_takes_the_best_map_as_a_whole_not_one_cluster_after_the_other():
    predicted, true = np.repeat([0, 0, 1, 1], [6, 5, 5, 0]), np.repeat([0, 1, 0, 1], [6, 5, 5, 0])
    best = max(sum(names[p] == t for p, t in zip(predicted, true, strict=True)) for names in permutations(range(2)))
    assert best == 10
    assert clustering_accuracy(predicted, true) == best / 16  # the greedy map would give 6


def test_labels_may_be_words():
    predicted = np.array([2, 2, 0, 0, 1])
    true = np.array(["cat", "cat", "dog", "dog", "a bird"])
    assert evaluate(predicted, true) == {"acc": 1.0, "nmi": pytest.approx(1), "ari": pytest.approx(1)}
    assert clustering_accuracy(np.array(["x", "x", "y", "y", "y"]), true) == pytest.approx(4 / 5)


def test_contingency_counts_classes_in_each_cluster():
    table = contingency(np.array([7, 7, 3, 3, 3]), np.array(["b", "a", "b", "b", "c"]))
    assert table.tolist() == [[0, 2, 1], [1, 1, 0]]


def test_figures_in_words():
    assert metrics.in_words({"acc": 0.5, "nmi": 0.25, "ari": 1 / 3}) == "ACC 0.5000  NMI 0.2500  ARI 0.3333"


# Without labels.


def random_assignments(N, C, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).dirichlet(np.full(C, 0.3), N))


def evenness(sizes):
    """Entropy of the cluster sizes as a share of the most there can be."""
    shares = [size / sum(sizes) for size in sizes]
    return -sum(share * math.log(share) for share in shares if share > 0) / math.log(len(sizes))


@pytest.mark.parametrize("N, C", [(40, 3), (7, 5), (1, 2)])
def test_health_against_direct_computation(N, C):
    p, p_memory = random_assignments(N, C, 0), random_assignments(N, C, 1)
    row = health(p, p_memory.argmax(1), churn=0.125, sure=0.75)
    y, y_memory = naive.most_likely(p.tolist()), naive.most_likely(p_memory.tolist())
    sizes = [y.count(j) for j in range(C)]
    assert tuple(row) == metrics.HEALTH
    assert row == {
        "clusters": C,
        "churn": 0.125,
        "agreement": pytest.approx(sum(a == b for a, b in zip(y, y_memory, strict=True)) / N),
        "confidence": pytest.approx(sum(max(p_i) for p_i in p.tolist()) / N),
        "sure": 0.75,
        "smallest": pytest.approx(min(sizes) / N),
        "largest": pytest.approx(max(sizes) / N),
        "view_agreement": pytest.approx(math.nan, nan_ok=True),
        "score": pytest.approx(math.nan, nan_ok=True),
        "sizes": " ".join(str(size) for size in sizes),
    }


@pytest.mark.parametrize("N, C", [(40, 3), (7, 5), (1, 2)])
def test_agreement_across_views_against_direct_computation(N, C):
    p, p_view = random_assignments(N, C, 0), random_assignments(N, C, 1)
    some = torch.arange(0, N, 2)
    row = metrics.across_views(p, some, p_view[some])
    assert set(row) < set(metrics.HEALTH)
    chances = [sum(p[i, j].item() * p_view[i, j].item() for j in range(C)) for i in some.tolist()]
    assert row["view_agreement"] == pytest.approx(sum(chances) / len(chances))
    sizes = [naive.most_likely(p.tolist()).count(j) for j in range(C)]
    assert row["score"] == pytest.approx(row["view_agreement"] * evenness(sizes))


def test_spread_is_the_variance_of_the_features():
    q = torch.nn.functional.normalize(torch.randn(30, 6, dtype=torch.float64), dim=1)
    centre = naive.mean(q.tolist())
    variance = sum(naive.squared_distance(q_i, centre) for q_i in q.tolist()) / 30
    assert spread(q) == pytest.approx(variance)
    same = torch.eye(4)[:1].expand(10, 4)
    assert spread(same) == pytest.approx(0)
    assert spread(torch.cat([same[:5], -same[:5]])) == pytest.approx(1)


@repeatable
@given(sizes=st.lists(st.integers(0, 50), min_size=2, max_size=7).filter(any), agreement=st.floats(0, 1))
def test_score_is_the_agreement_times_the_evenness_of_the_sizes(sizes, agreement):
    score = label_free_score(agreement, torch.tensor(sizes))
    assert score == pytest.approx(agreement * evenness(sizes), abs=1e-9)
    assert -1e-9 <= score <= 1 + 1e-9


@pytest.mark.parametrize("C", [2, 7])
def test_score_of_the_extremes(C):
    alike, one = torch.full((C,), 20), torch.eye(C, dtype=torch.int64)[1] * 20
    assert label_free_score(1.0, alike) == pytest.approx(1)
    assert label_free_score(0.0, alike) == 0
    assert label_free_score(1.0, one) == pytest.approx(0, abs=1e-9)


def test_score_of_assignments():
    sure, unsure, all_images = torch.eye(4).repeat(5, 1), torch.full((20, 4), 1 / 4), torch.arange(20)

    def score(p, p_view):
        return metrics.across_views(p, all_images, p_view)["score"]

    assert score(sure, sure) == pytest.approx(1)
    assert score(sure, sure.roll(1, 1)) == 0  # all views are of other clusters than their images
    assert score(sure, unsure) == pytest.approx(1 / 4)
    assert score(sure, sure * torch.tensor([1.0, math.nan, 1.0, 1.0])) == 0  # views that are not finite agree with none
    assert score(unsure, unsure) == pytest.approx(0, abs=1e-9)  # all fall to one cluster


def test_the_best_epoch_is_the_one_of_the_highest_score():
    rows = [{"epoch": i + 1, "score": score} for i, score in enumerate([math.nan, 0.2, 0.9, 0.5])]
    assert metrics.best_epoch(rows) == 3


# Complaints.


def row_of(epoch=10, spread=0.8, sizes=(25, 25, 25, 25)):
    return {
        "churn": 0.1,
        "epoch": epoch,
        "spread": spread,
        "largest": max(sizes) / sum(sizes),
        "smallest": min(sizes) / sum(sizes),
        "sizes": " ".join(map(str, sizes)),
    }


def say(row, semantic=True, **changes):
    row = row if semantic else row | {"churn": math.nan}  # no clusters were learned yet
    rate, steps = changes.pop("learning_rate", 0.06), changes.pop("steps", 1000)
    return list(complaints(row, Settings(**{"n_clusters": 4, "epochs": 10, **changes}), rate, steps).values())


def test_a_healthy_run_gives_no_complaint():
    for epoch in (1, 5, 10):
        for semantic in (False, True):
            assert say(row_of(epoch), semantic) == []
            assert say(row_of(epoch, spread=0.1, sizes=(70, 10, 10, 10)), semantic) == []


@pytest.mark.parametrize("semantic", [False, True])
def test_collapse_is_told_at_any_time_with_what_to_try(semantic):
    chosen = {"momentum": 0.9, "learning_rate": 0.5, "warmup_epochs": 2, "projection_norm": False}
    (message,) = say(row_of(3, spread=0.01), semantic, **chosen)
    assert "collapsed" in message and "epoch 3: spread 0.010" in message and "now 0.5" in message
    assert all(
        advice in message for advice in ("learning_rate of 0.17", "momentum 0.99", "warmup_epochs", "projection_norm")
    )


def test_few_steps_are_no_collapse_unless_they_are_all():
    assert say(row_of(9, spread=0.01), steps=499) == []
    assert len(say(row_of(9, spread=0.01), steps=500)) == 1
    assert len(say(row_of(10, spread=0.01), steps=20)) == 1
    assert say(row_of(9, spread=0.01), steps=20, epochs=9) == []


def test_no_complaint_advises_what_is_already_set():
    (collapse,) = say(row_of(3, spread=0.01), momentum=0.99, warmup_epochs=3, projection_norm=True)
    assert not any(word in collapse for word in ("momentum", "warmup_epochs", "projection_norm"))
    (giant,) = say(row_of(5, sizes=(85, 5, 5, 5)), min_cluster_size=0.16)
    assert "min_cluster_size" not in giant


def test_a_giant_cluster_is_told_once_there_are_clusters():
    row = row_of(5, sizes=(85, 5, 5, 5))
    (message,) = say(row, epochs=50, min_cluster_size=0.0)
    assert "One cluster holds 85% of the images (epoch 5" in message and "try" in message
    assert "more epochs (now 50) and min_cluster_size 0.16" in message
    assert say(row, semantic=False) == []


def test_empty_clusters_are_told_at_the_end_with_a_smaller_number():
    row = row_of(10, sizes=(50, 0, 50, 0))
    (message,) = say(row)
    assert "2 of 4 clusters are empty" in message and "n_clusters=2" in message
    assert say(row, epochs=11) == []  # not before the last epoch
    assert say(row, semantic=False) == []
    (message,) = say(row_of(10, sizes=(30, 20, 10, 10, 20, 10, 10, 10, 10, 10, 0)), n_clusters=11)
    assert "1 of 11" in message and "n_clusters=10" in message  # sizes such as 10 and 20 are not empty


def test_own_labels_of_hardly_any_image_are_told():
    (message,) = say(row_of(10) | {"sure": 0.04})
    assert "sure of 4% of the images only" in message and "the last 25% of the epochs" in message
    assert "more epochs (now 10), or a self_label_confidence below 0.95" in message
    assert (
        say(row_of(9) | {"sure": 0.04})
        == say(row_of(10) | {"sure": 0.06})
        == say(row_of(10) | {"sure": math.nan})
        == []
    )
    assert say(row_of(10) | {"sure": 0.04}, self_label_from=1.0) == []


def test_the_number_of_clusters_that_is_proposed_is_never_below_two():
    row = row_of(10, sizes=(100, 0, 0, 0))
    giant, empty = say(row)
    assert "One cluster" in giant and "3 of 4" in empty and "only one group" in empty


def test_figures_of_epochs_without_clusters_give_no_complaint():
    row = row_of(10) | dict.fromkeys(("largest", "smallest", "sizes"), math.nan)
    assert say(row, semantic=False) == say(row, semantic=True) == []


def test_all_troubles_are_told_together():
    assert len(say(row_of(10, spread=0.0, sizes=(95, 5, 0, 0)))) == 3
