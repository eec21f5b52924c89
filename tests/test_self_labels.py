"""The last phase of a run: the network learns from its own labels."""

import copy
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from conftest import TinyBackbone, make_images, tiny
from semclust import contrast, core, fitting, metrics, refresh
from semclust.augment import strokes, view_size
from semclust.config import Settings
from semclust.model import LinearClassifier
from semclust.plan import Phase, plan_clusters, plan_phase, plan_tasks
from semclust.predictor import Predictor
from semclust.train import Training

CONTRASTS = ("moco", "simclr", "instance-memory")


def started(n: int = 48, **changes) -> Training:
    return fitting.start(make_images(n), tiny(**changes))


def about_to_label_itself(**changes) -> Training:
    """Before the first epoch that learns from its own labels: the fourth of five."""
    training = started(**dict(epochs=5, cluster_from=0.4, self_label_from=0.6) | changes)
    for _ in range(3):
        training.run_epoch()
    assert training.phase.self_labels
    return training


# ---- the loss ----------------------------------------------------------------------------------------


def test_only_what_the_teacher_is_sure_of_is_learned():
    logits = torch.randn(4, 3, requires_grad=True)
    p = torch.tensor([[0.97, 0.02, 0.01], [0.02, 0.94, 0.04], [0.01, 0.03, 0.96], [0.4, 0.3, 0.3]])
    loss = core.self_label_loss(logits, p, torch.full((3,), 1 / 3), 0.95)
    log_p = logits.log_softmax(1)
    assert_close(loss, torch.stack([-log_p[0, 0], log_p[1, 0] * 0, -log_p[2, 2], log_p[3, 0] * 0]))
    (gradient,) = torch.autograd.grad(loss.sum(), logits)
    assert gradient[[0, 2]].abs().min() > 0 and not gradient[[1, 3]].any()


def test_probabilities_are_evened_out_by_the_shares_of_the_clusters():
    """A large cluster has to be surer than a small one, and may lose an image to it."""
    logits = torch.zeros(2, 2)
    p = torch.tensor([[0.96, 0.04], [0.4, 0.6]])
    share = torch.tensor([0.8, 0.2])
    even = p / share / (p / share).sum(1, keepdim=True)
    assert even[0, 0] < 0.95 < p[0, 0] and even[1, 1] > 0.85
    assert core.self_label_loss(logits, p, share, 0.85).tolist() == pytest.approx([math.log(2)] * 2)
    assert core.self_label_loss(logits, p, share, 0.95).tolist() == [0, 0]
    assert core.self_label_loss(logits, p, torch.full((2,), 0.5), 0.95).tolist() == pytest.approx([math.log(2), 0])


@pytest.mark.parametrize("N, C", [(500, 4), (60, 2), (300, 20)])
def test_shares_even_clusters_out_to_one_size(N, C):
    generator = torch.Generator().manual_seed(N)
    size = torch.linspace(-1, 1, C)  # the last is about e^2 times as large as the first
    p = (2 * torch.randn(N, C, generator=generator) + size).softmax(1)
    assert (p.mean(0) * C - 1).abs().max() > 0.3
    share = core.even_share(p)
    assert_close(core.evened_out(p, share).mean(0), torch.full((C,), 1 / C), rtol=1e-3, atol=0)
    assert share[-1] > share[0] and share.sum() == pytest.approx(1)


def test_shares_of_sure_clusters_even_them_out_further_than_one_division():
    """As far as they may: a tenth of the fair share is the least."""
    labels = torch.cat([torch.full((200,), 0), torch.full((100,), 1)])
    p = (torch.nn.functional.one_hot(labels, 2) * 7 + torch.randn(300, 2)).softmax(1)
    once, share = core.evened_out(p, p.mean(0)).mean(0), core.even_share(p)
    reached = core.evened_out(p, share).mean(0)
    assert share.min() == pytest.approx(0.05) and once[0] > reached[0] > 0.6


def test_of_even_clusters_all_shares_are_the_same():
    p = torch.eye(3).repeat(5, 1) * 0.85 + 0.05
    assert_close(core.even_share(p), torch.full((3,), 1 / 3))
    assert_close(core.evened_out(p, core.even_share(p)), p)


def test_an_empty_cluster_is_favoured_tenfold_at_most():
    """One that hardly an image could belong to stays small."""
    p = torch.tensor([[0.9, 0.1 - 1e-6, 1e-6], [0.1 - 1e-6, 0.9, 1e-6]]).repeat(20, 1)
    share = core.even_share(p)
    assert share[2] == pytest.approx(0.1 / 3) and share[0] == pytest.approx(share[1]) and share[0] > 0.45
    assert core.evened_out(p, share)[:, 2].max() < 1e-4
    alone = core.even_share(torch.eye(3)[:1].expand(10, 3))  # all images sure of one cluster
    assert alone.tolist() == pytest.approx([1, 0.1 / 3, 0.1 / 3])


def test_all_is_learned_or_nothing_at_the_ends_of_confidence():
    p = torch.tensor([[1.0, 0.0], [0.6, 0.4], [0.5, 0.5]])
    for confidence, learned in ((0.0, 3), (0.6, 2), (1.0, 1)):
        loss = core.self_label_loss(torch.zeros(3, 2), p, torch.full((2,), 0.5), confidence)
        assert (loss > 0).sum() == learned


def test_a_teacher_that_is_not_finite_is_noticed():
    p = torch.tensor([[0.99, 0.01], [math.nan, 0.5], [math.inf, 0.0]])
    loss = core.self_label_loss(torch.zeros(3, 2), p, torch.full((2,), 0.5), 0.95)
    assert loss.isfinite().tolist() == [True, False, False]


def test_no_gradient_reaches_the_teacher():
    logits, p = torch.randn(6, 3, requires_grad=True), torch.randn(6, 3, requires_grad=True)
    loss = core.self_label_loss(logits, p.softmax(1), torch.full((3,), 1 / 3), 0.0).sum()
    assert torch.autograd.grad(loss, p, allow_unused=True) == (None,)


# ---- the plan ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, starts",
    [
        (dict(epochs=80), (52, 60)),
        (dict(epochs=600), (390, 450)),
        (dict(epochs=600, cluster_epochs=20), (430, 450)),
        (dict(epochs=600, self_label_from=1.0), (540, 600)),
        (dict(epochs=100, cluster_from=0.9), (90, 90)),
        (dict(epochs=100, cluster_from=0.0, neighbours=0), (0, 75)),
        (dict(epochs=100, cluster_from=0.0, neighbours=0, self_label_from=0.0), (0, 1)),
        (dict(epochs=100, tasks=("instance",)), (100, 100)),
        (dict(epochs=1), (1, 1)),
        (dict(epochs=2), (1, 1)),
        (dict(epochs=10), (6, 7)),
    ],
    ids=str,
)
def test_the_network_labels_itself_after_the_clusters(changes, starts):
    settings = Settings(**changes)
    assert plan_clusters(settings) == starts
    plans = plan_tasks(settings, 1000)
    assert plans["cluster"].begins == starts[0]
    for epoch in range(settings.n_epochs):
        phase = plan_phase(settings, plans, epoch)
        assert phase.self_labels == (epoch >= starts[1])
        if phase.self_labels:
            assert phase == Phase(("cluster",), nearest=False, in_pairs=False, self_labels=True)


def test_over_clusters_end_before_the_network_labels_itself():
    """Or their labels would be renewed for nobody."""
    settings = Settings(epochs=100, over_from=0.2, over_until=1.0)
    assert plan_tasks(settings, 1000)["over"].ends == 75
    assert plan_tasks(replace(settings, self_label_from=1.0), 1000)["over"].ends == 100


def test_metrics_tell_how_many_labels_are_sure():
    training = about_to_label_itself(tasks=("cluster", "instance"), self_label_confidence=0.6)
    task = training.learner.tasks["cluster"]
    row, p = training.run_epoch()
    even = p / task.share
    highest = (even / even.sum(1, keepdim=True)).max(1).values
    assert row["sure"] == pytest.approx((highest >= 0.6).float().mean().item())
    in_the_middle = highest.median().item()
    expected = (highest >= in_the_middle).float().mean().item()
    assert 0.5 <= expected < 1
    settings = replace(training.settings, self_label_confidence=in_the_middle)
    assert refresh.share_sure(task, settings, p) == pytest.approx(expected, abs=1 / 48)
    task.teacher = None
    assert math.isnan(refresh.share_sure(task, settings, p))


def test_metrics_tell_what_an_epoch_learns():
    fitted = fitting.fit(make_images(), tiny(epochs=20, tasks=("cluster", "over", "instance")))
    words = [row["learns"] for row in fitted.history]
    assert (
        words == ["instances"] * 5 + ["over-clusters"] * 5 + ["instances"] * 3 + ["clusters"] * 2 + ["own labels"] * 5
    )


def test_an_epoch_is_chosen_among_those_that_learned_from_the_same_as_the_last():
    def row(epoch, learns, score):
        return {"epoch": epoch, "learns": learns, "score": score}

    rows = [row(1, "clusters", 0.99), row(2, "own labels", 0.7), row(3, "own labels", 0.9), row(4, "own labels", 0.8)]
    assert metrics.best_epoch(rows) == 3
    assert metrics.best_epoch(rows[:1]) == 1


# ---- a step ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("contrast", CONTRASTS)
def test_a_step_learns_the_teachers_labels_of_weak_views_in_strong_ones(monkeypatch, contrast):
    training = about_to_label_itself(contrast=contrast, self_label_confidence=0.3, tasks=("cluster", "instance"))
    learner, task, index = training.learner, training.learner.tasks["cluster"], torch.arange(16)
    (x,) = training.images.batches([index])
    whole = x.float() / 255
    given: dict[str, torch.Tensor] = {}

    def views(first, second, x, u):
        given["strong"], given["weak"] = first.by(whole, u[0][:, : first.numbers]), second.by(whole, u[1, :, :0])
        return torch.cat([given["strong"], given["weak"]])

    training._view = views
    training._begin_steps()
    teacher, classifier = task.teacher.linear.weight.clone(), task.classifier.linear.weight.clone()
    twin, encoder, share = copy.deepcopy(learner.twin), copy.deepcopy(learner.encoder), task.share.clone()
    with torch.no_grad():
        p = task.teacher(F.normalize(twin(whole)[0], dim=1)).softmax(1)  # a drawing, hardly changed, is itself
        logits = task.classifier(F.normalize(encoder(next_strong_views(training, whole))[0], dim=1))
        expected = core.self_label_loss(logits, p, share, 0.3).mean()
    torch.manual_seed(1)
    loss, l_id, l_cd = training._step(x, index, 0.1)
    assert torch.equal(given["weak"], whole)
    assert l_id == 0 and loss == l_cd > 0
    assert_close(l_cd, expected, rtol=1e-4, atol=1e-5)
    assert not torch.equal(task.classifier.linear.weight, classifier)
    for followed, before, leads in (
        (task.teacher.linear.weight, teacher, task.classifier.linear.weight),
        *zip(learner.twin.parameters(), twin.parameters(), learner.encoder.parameters(), strict=True),
    ):
        assert_close(followed.data, 0.99 * before.data + 0.01 * leads.data)


def next_strong_views(training: Training, x: torch.Tensor) -> torch.Tensor:
    """That a step draws where the seed is 1."""
    torch.manual_seed(1)
    u = torch.rand(2, len(x), training.strong.numbers)
    return training.strong.by(x, u[0])


def test_each_view_is_used_one_way_alone():
    """Also where it is otherwise used both ways: what was seen in a strong view is no label for a weak one."""
    training = about_to_label_itself(symmetric=True)
    given = []
    training.learner.encoder.register_forward_hook(lambda module, inputs, output: given.append(len(inputs[0])))
    training.learner.twin.register_forward_hook(lambda module, inputs, output: given.append(len(inputs[0])))
    slot = training.learner.instance_memory.next_slot.item()
    training._begin_steps()
    (x,) = training.images.batches([torch.arange(16)])
    training._step(x, torch.arange(16), 0.1)
    assert given == [16, 16]
    size = training.learner.instance_memory.keys.shape[1]
    assert training.learner.instance_memory.next_slot.item() == (slot + 16) % size


def test_stored_vectors_rest_while_the_twin_makes_the_keys():
    training = about_to_label_itself(contrast="instance-memory")
    stored, memory = training.learner.stored_keys.clone(), training.learner.instance_memory.keys.clone()
    training.run_epoch()
    assert torch.equal(training.learner.stored_keys, stored)
    assert not torch.equal(training.learner.instance_memory.keys, memory)


def test_teachers_are_not_trained():
    training = about_to_label_itself()
    assert len(training.trained) == len(training.optimiser.param_groups[0]["params"])
    teachers = [p for task in training.learner.tasks.values() if task.teacher for p in task.teacher.parameters()]
    assert len(teachers) == 4 and not any(p.requires_grad for p in teachers)  # of "cluster" and "under", not of "over"
    assert not {id(p) for p in teachers} & {id(p) for p in training.trained}


@pytest.mark.parametrize("contrast", ["simclr", "instance-memory"])
def test_a_twin_that_nothing_needed_so_far_starts_as_the_encoder(contrast):
    training = started(epochs=5, cluster_from=0.4, self_label_from=0.6, contrast=contrast)
    first = copy.deepcopy(training.learner.twin.state_dict())
    for epoch in range(5):
        now = training.learner.twin.state_dict()
        assert all(torch.equal(now[name], value) for name, value in first.items()) == (epoch < 3)
        if epoch == 3:
            assert all(torch.equal(now[name], value) for name, value in training.learner.encoder.state_dict().items())
        training.run_epoch()


def test_without_it_there_is_no_teacher():
    for changes in (dict(self_label_from=1.0, contrast="simclr"), dict(tasks=("instance",), contrast="simclr")):
        training = started(**changes)
        assert training.learner.twin is None
        assert not training.settings.labels_itself
        assert all(task.teacher is None for task in training.learner.tasks.values())


def test_a_users_own_views_serve_as_strong_ones():
    seen = []

    def own(x):
        seen.append(len(x))
        return x.flip(-1)

    fitting.fit(make_images(), tiny(epochs=5, augment=own))
    # Two views in each step of three epochs, one in each of the last two; and for the score of epochs with clusters.
    assert len(seen) == 3 * 3 * 2 + 2 * 3 + 3


def test_a_users_own_views_may_be_smaller_than_the_image():
    fitted = fitting.fit(make_images(), tiny(epochs=5, augment=lambda x: x[..., 1:7, 1:7]))
    assert fitted.history[-1]["learns"] == "own labels"


# ---- labels and sizes --------------------------------------------------------------------------------


@pytest.mark.parametrize("balance", [0.0, 5.0])
def test_shares_even_the_probabilities_out_where_even_clusters_are_wanted(balance):
    training = about_to_label_itself(balance=balance)
    cluster, under = (training.learner.tasks[name] for name in ("cluster", "under"))

    def assert_shares(p):
        assert_close(cluster.share, core.even_share(p) if balance else torch.full((4,), 0.25))
        of_under = under.teacher(F.normalize(training.features()[0], dim=1)).softmax(1)
        assert_close(under.share, core.even_share(of_under.detach()) if balance else torch.full((2,), 0.5))

    whole_images = cluster.teacher(F.normalize(training.features()[0], dim=1)).softmax(1)
    assert_shares(whole_images.detach())  # from the first step on, by what teaches then
    for _ in range(2):
        assert_shares(training.run_epoch()[1])


def test_the_classifier_learns_its_labels_anew_at_the_size_of_whole_images():
    """Photographs are learned from crops until then."""
    images = make_images(96, size=16, channels=3)
    settings = tiny(epochs=10, cluster_from=0.4, self_label_from=0.7, crop_size=0.5, backbone=TinyBackbone(3))
    training = fitting.start(images, settings)
    sizes, looks, by_inference = [], [], training.inference.features

    def features(encoder, encode, numbers, look, *rest):
        sizes.append(tuple(look(torch.zeros(1, 3, 16, 16, dtype=torch.uint8)).shape[2:]))
        looks.append(encoder)
        return by_inference(encoder, encode, numbers, look, *rest)

    training.inference.features = features
    for epoch in range(1, 11):
        training.run_epoch()
        if epoch == 7:
            h, q = training.features()
            sizes.pop(), looks.pop()
            for name in ("cluster", "under"):
                task = training.learner.tasks[name]
                anew = LinearClassifier(h.shape[1], task.n_clusters, settings.temperature)
                anew.start_from(F.normalize(h, dim=1), task.y)
                assert same_weights(anew, task.classifier) and same_weights(anew, task.teacher)
                keys = {tuple(key) for key in task.memory.keys.flatten(0, 1).tolist()}
                assert len(keys & {tuple(row) for row in q[task.projection].tolist()}) > 20
    # From the end of the fourth epoch on also at views, for the score; once more for the start of own labels.
    assert sizes == [(8, 8)] * (3 + 2 * 4) + [(16, 16)] * (1 + 2 * 3)
    assert looks == [training.learner.encoder] * (3 + 2 * 4) + [training.learner.twin] * (1 + 2 * 3)
    assert training.size_for(6) == (8, 8) and training.size_for(7) == training.size_for(10) == (16, 16)


@pytest.mark.parametrize("contrast", CONTRASTS)
def test_the_teacher_tells_the_clusters(contrast):
    """Its batch norms have seen images that are hardly changed; those of the network, strongly changed ones alone."""
    images = make_images(48)
    training = fitting.start(images, tiny(epochs=5, cluster_from=0.4, self_label_from=0.6, contrast=contrast))
    learner, task = training.learner, training.learner.tasks["cluster"]
    for epoch in range(5):
        _, p = training.run_epoch()
        if epoch > 2:
            h, _ = learner.twin.eval()(torch.from_numpy(images.pixels).permute(0, 3, 1, 2) / 255)
            assert_close(p, task.teacher(F.normalize(h, dim=1)).softmax(1))
    predictor = Predictor.from_learner(learner, training.settings, (8, 8, 1), (0, 255))
    found, _ = predictor(images.pixels, torch.device("cpu"))
    assert_close(torch.from_numpy(found), p)
    assert not torch.allclose(task.teacher.linear.weight, task.classifier.linear.weight)


@pytest.mark.parametrize("momentum, followed", [(0.5, 0.5), (0.999, 0.99), (1.0, 0.99)])
def test_the_teacher_is_never_far_behind(momentum, followed, monkeypatch):
    """It is what predicts."""
    training = about_to_label_itself(momentum=momentum)
    seen = []
    monkeypatch.setattr(contrast, "follow", lambda twin, network, share: seen.append(share))
    training.run_epoch()
    assert set(seen) == {followed}


def test_without_own_labels_the_network_itself_predicts():
    images = make_images(48)
    for changes in (dict(epochs=1), dict(epochs=5, self_label_from=1.0), dict(epochs=5, tasks=("instance",))):
        training = fitting.start(images, tiny(**changes))
        for _ in range(changes["epochs"]):
            _, p = training.run_epoch()
        predictor = Predictor.from_learner(training.learner, training.settings, (8, 8, 1), (0, 255))
        assert_close(torch.from_numpy(predictor(images.pixels, torch.device("cpu"))[0]), p)
        assert same_weights(predictor.network.classifier, training.learner.tasks["cluster"].classifier)
        weights = zip(
            predictor.network.encoder.backbone.state_dict().values(),
            training.learner.encoder.backbone.state_dict().values(),
            strict=True,
        )
        assert all(mine is None or torch.equal(own, mine) for own, mine in weights)


def same_weights(one: LinearClassifier, other: LinearClassifier) -> bool:
    return torch.equal(one.linear.weight, other.linear.weight) and torch.equal(one.linear.bias, other.linear.bias)


def test_the_first_own_labels_are_those_of_the_clusters_before():
    """Not the random ones of the beginning, where the clusters are learned from it on."""
    changes = dict(cluster_from=0.0, neighbours=0, self_label_from=0.0, tasks=("cluster", "instance"))
    training = started(epochs=6, **changes)
    random = training.learner.tasks["cluster"].y.clone()
    training.run_epoch()
    assert training.phase.self_labels
    assert not torch.equal(training.learner.tasks["cluster"].y, random)


@pytest.mark.parametrize("self_label_from, size", [(0.7, (16, 16)), (1.0, (8, 8))])
@pytest.mark.parametrize("epochs", [1, 6])
def test_a_model_predicts_at_the_size_that_it_learned_from_at_last(epochs, self_label_from, size):
    images = make_images(48, labels=np.arange(48) % 4, size=16, channels=3)
    changes = dict(
        self_label_from=self_label_from, crop_size=0.5, backbone=TinyBackbone(3), tasks=("cluster", "instance")
    )
    fitted = fitting.fit(images, tiny(epochs=epochs, **changes))
    encoder = fitted.predictor.network.encoder
    assert encoder.view_size == (size if epochs > 1 else (8, 8))  # a single epoch learns from no labels
    assert view_size("natural", (16, 16, 3), 0.5) == (8, 8)
    assert metrics.evaluate(fitted.labels, images.labels)["acc"] == pytest.approx(fitted.history[-1]["acc"], abs=0.03)


@pytest.mark.parametrize("contrast", CONTRASTS)
def test_groups_that_are_clear_stay_found(contrast):
    y = np.arange(96) % 4
    changes = dict(self_label_from=0.8, learning_rate=0.1, tasks=("cluster", "instance"), augment=strokes)
    settings = tiny(epochs=30, contrast=contrast, **changes)
    fitted = fitting.fit(make_images(96, labels=y), settings)
    before = [row for row in fitted.history if row["learns"] == "clusters"][-1]
    assert before["acc"] > 0.75 and fitted.history[-1]["acc"] >= before["acc"]
    assert fitted.history[-1]["smallest"] > 0.1  # without the twin, simclr ends in one cluster


def test_memories_keep_up_with_the_features():
    """What the label-free score compares the classifier with."""
    training = about_to_label_itself()
    memory = training.learner.tasks["cluster"].memory
    before = memory.keys.clone()
    training.run_epoch()
    assert not torch.equal(memory.keys, before)
