"""The refresh of the labels at the end of an epoch: y of every task, and how often it has swapped (Eq. 5, 6).

Shapes: N images, C clusters, D pooled feature, d representation.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from semclust import core, labels, metrics
from semclust.config import Settings
from semclust.learner import ClusterTask, Learner
from semclust.model import LinearClassifier, classifier_input, follow
from semclust.partition import centred, k_means, nearest_neighbours, spectral_partition
from semclust.plan import labels_itself_in

AT_ONCE = 1024  # images whose similarities to a whole memory are taken, or that are written into it


@torch.no_grad()
def renew_labels(
    learner: Learner, settings: Settings, epoch: int, h: Tensor, q: dict[str, Tensor]
) -> tuple[dict[str, Any], Tensor]:
    """Renew y and s of every task after ``epoch`` epochs, from the features of all images: h (N x D) and, for each
    projection, q (N x d). Something learns from labels then, or instance contrast is alone.

    Returns figures, and p of the target task (N x C). The figures are those of that task, or of "over" while that is
    all there is."""
    tasks = learner.tasks
    taught = labels_itself_in(settings, epoch - 1)
    told = "cluster" if has_clusters(learner, settings, epoch) else "over"
    p: dict[str, Tensor] = {}
    for name, task in tasks.items():
        q_task = q[task.projection]
        seen = classifier_input(h, q_task, settings.classifier_input == "pooled")
        classifier = task.telling_classifier(taught)
        y = next_labels(learner, settings, epoch, name, classifier, seen, h, q_task)
        churn = torch.ne(y, task.y).float().mean().item()
        task.s.copy_(labels.count_swaps(task.s, y, task.y))
        task.y.copy_(y)
        if epoch <= task.plan.begins:  # the labels so far were random: no swap means anything
            churn = math.nan
            task.s.fill_(1)
        teaches = taught and task.teacher is not None
        if name in ("cluster", told) or teaches:
            p[name] = classifier(seen).softmax(1)
        if teaches:
            even_out(task, settings, p[name])
        if name == told:
            sure = share_sure(task, settings, p[name])
            figures = metrics.health(p[name], memory_labels(task, q_task, settings.temperature), churn, sure)
    return {"spread": metrics.spread(q[tasks["cluster"].projection])} | figures, p["cluster"]


def has_clusters(learner: Learner, settings: Settings, epoch: int) -> bool:
    """Whether there are clusters after ``epoch`` epochs that are the result so far."""
    return settings.instance_alone or learner.tasks["cluster"].plan.learns_in(epoch)


def even_out(task: ClusterTask, settings: Settings, p: Tensor) -> None:
    """From the probabilities p of all images (N x C), learn what evens them out, where even clusters are wanted."""
    if settings.balance > 0:
        task.share.copy_(core.even_share(p))


def share_sure(task: ClusterTask, settings: Settings, p: Tensor) -> float:
    """Of all images, those whose p (N x C) is sure enough to be learned from; NaN where the network never labels them
    itself."""
    if task.teacher is None:
        return math.nan
    sure = core.evened_out(p, task.share).max(1).values >= settings.self_label_confidence
    return sure.float().mean().item()


def next_labels(
    learner: Learner,
    settings: Settings,
    epoch: int,
    name: str,
    classifier: LinearClassifier,
    seen: Tensor,
    h: Tensor,
    q: Tensor,
) -> Tensor:
    """The labels of the task ``name`` that the next epoch learns from, by its ``classifier`` where they are not from a
    partition. ``seen``: what that sees, of h or q; q: by its projection."""
    task = learner.tasks[name]
    C, tau = task.n_clusters, settings.temperature
    if settings.instance_alone:
        task.classifier.choose_nearest(seen, same_ids(k_means(seen, C)[0], task))
        y = labels.most_likely(task.classifier(seen))
        fill(task, q, y)
        return y
    if not task.plan.learns_in(epoch):
        return task.y
    starts = task.plan.is_parted_after(epoch)
    if name == "over" and settings.over_by == "k-means":
        # One start is enough: that the labels differ a little from epoch to epoch is what they are renewed for.
        y = same_ids(k_means(F.normalize(h, dim=1), C, restarts=1)[0], task)
    elif starts:
        directions = centred(h)
        if name == "cluster" and settings.learns_pairs:
            learner.neighbours.copy_(nearest_neighbours(directions, learner.neighbours.shape[1]))
        y = same_ids(spectral_partition(directions, C, tau, even=settings.balance > 0), task)
        del directions  # as large as h
    else:
        y = labels.most_likely(classifier(seen)) if settings.online else memory_labels(task, q, tau)
        y = labels.merge_and_split(y, q, C, settings.min_cluster_size * len(q) / C)
    if starts:
        task.classifier.start_from(seen, y)
        fill(task, q, y)
    return y


@torch.no_grad()
def start_self_labels(learner: Learner, settings: Settings, h: Tensor, q: dict[str, Tensor]) -> None:
    """Once, before the network learns from its own labels: let the classifiers know the labels as they are in whole
    images, of which h (N x D) and q are, and let their teachers know what they know."""
    for task in learner.tasks.values():
        if task.teacher is not None:
            q_task = q[task.projection]
            seen = classifier_input(h, q_task, settings.classifier_input == "pooled")
            task.classifier.start_from(seen, task.y)
            fill(task, q_task, task.y)
            follow(task.teacher, task.classifier, 0.0)
            even_out(task, settings, task.teacher(seen).softmax(1))


def renewed(learner: Learner, settings: Settings, epoch: int) -> list[Tensor]:
    """All that ``renew_labels`` may change after ``epoch`` epochs."""
    found = [*learner.task_modules.parameters(), *learner.task_modules.buffers()]
    if settings.learns_pairs and learner.tasks["cluster"].plan.is_parted_after(epoch):
        found.append(learner.neighbours)
    return found


def same_ids(y: Tensor, task: ClusterTask) -> Tensor:
    """Name the clusters of a partition as they were named before, as far as they are the same."""
    renamed = labels.match_ids(y.cpu().numpy(), task.y.cpu().numpy(), task.n_clusters)
    return torch.from_numpy(renamed).to(y.device)


def fill(task: ClusterTask, q: Tensor, y: Tensor) -> None:
    """Write all images into the memory of a task whose labels are new, in random order."""
    for some in torch.randperm(len(q), device=q.device).split(AT_ONCE):
        task.memory.enqueue(q[some], y[some])


def memory_labels(task: ClusterTask, q: Tensor, tau: float) -> Tensor:
    """The most likely cluster of every image by the memory (N, Eq. 3)."""
    parts = q.split(AT_ONCE)  # one after the other: N x C similarities would not fit for many clusters
    return torch.cat(
        [labels.most_likely(core.memory_assignment(core.bank_similarity(x, task.memory.keys, tau))) for x in parts]
    )
