"""The losses of a step: what ``core`` has, put together for each task with its labels, memory and weights (Eq. 1-4, 6).

They read the learner and change nothing. Shapes: n samples of a batch, D pooled feature, d representation; q and k are
n x d for each projection.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from semclust import core, labels
from semclust.config import Settings
from semclust.distributed import Group
from semclust.learner import ClusterTask, Learner
from semclust.model import classifier_input
from semclust.plan import Phase


def sample_losses(
    learner: Learner,
    settings: Settings,
    group: Group,
    phase: Phase,
    index: Tensor,
    h: Tensor,
    q: dict[str, Tensor],
    h_key: Tensor,
    k: dict[str, Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """L_ID, the pull towards the own cluster, and L_CD of each task and sample (each tasks x n), with the samples'
    weights in the mean. ``index``: the numbers of the images (n); h and h_key: the pooled features of their queries and
    keys (n x D)."""
    if phase.self_labels:
        own = torch.stack([self_label_loss(learner.tasks[name], settings, h, q, h_key, k) for name in phase.tasks])
        return torch.zeros_like(own), torch.zeros_like(own), own
    losses = []
    if "instance" in settings.tasks or not phase.tasks:
        l_id = instance_task_loss(learner, settings, phase.nearest, q, k)
        losses.append((l_id, torch.zeros_like(l_id), torch.zeros_like(l_id)))
    for name in phase.tasks:
        in_pairs = name != "over" and phase.in_pairs
        losses.append(cluster_task_losses(learner.tasks[name], settings, group, in_pairs, index, h, q, k))
    l_ids, pulls, l_cds = zip(*losses, strict=True)
    return torch.stack(l_ids), torch.stack(pulls), torch.stack(l_cds)


def instance_task_loss(
    learner: Learner, settings: Settings, nearest: bool, q: dict[str, Tensor], k: dict[str, Tensor]
) -> Tensor:
    """L_ID of the instance task, for each sample: every other image is a negative. ``nearest``: the nearest keys are
    positives, too."""
    name, tau, keys = learner.instance_projection, settings.temperature, learner.instance_memory.keys
    bank = core.bank_similarity(q[name], keys, tau)
    loss = core.instance_loss(q[name], k[name], bank, tau)
    if nearest:
        near = core.nearest_key(k[name], keys)
        loss = torch.lerp(loss, core.instance_loss(q[name], near, bank, tau), settings.nearest)
    return loss / len(bank)


def cluster_task_losses(
    task: ClusterTask,
    settings: Settings,
    group: Group,
    in_pairs: bool,
    index: Tensor,
    h: Tensor,
    q: dict[str, Tensor],
    k: dict[str, Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """L_ID (Eq. 1, 2, 6), the pull towards the own cluster and L_CD (Eq. 3, 4) of one clustering task, for each
    sample. ``in_pairs``: the samples are, and the classifier learns from that too."""
    tau = settings.temperature
    y = task.y[index]
    q_task, k_task = q[task.projection], k[task.projection]
    bank = core.bank_similarity(q_task, task.memory.keys, tau)
    l_id = core.instance_loss(q_task, k_task, bank, tau, y if settings.cross_cluster else None)
    # Not weighted as L_ID is: images that keep swapping would be pulled hardest, to whichever cluster they are in.
    pull = settings.attraction * core.attraction_loss(bank, y) if settings.attraction else torch.zeros_like(l_id)
    s = task.s[index]
    w = labels.sample_weights(s if settings.hard_samples else torch.ones_like(s))

    if settings.assign_by == "key":
        bank = core.bank_similarity(k_task.detach(), task.memory.keys, tau)
    seen = classifier_input(h, q_task, settings.classifier_input == "pooled")
    logits = task.classifier(seen if settings.classifier_trains_encoder or in_pairs else seen.detach())
    l_cd = core.cluster_loss(logits, core.memory_assignment(bank))
    if in_pairs:
        p = logits.softmax(1)
        total = group.sum(F.pad(p.detach(), (0, 1), value=1.0).sum(0))  # with the number of samples
        mean = total[:-1] / total[-1]
        l_cd = l_cd + core.neighbour_loss(logits) + settings.balance * core.imbalance_loss(p, mean)
    return w * l_id, pull / len(y), l_cd / len(y)


def self_label_loss(
    task: ClusterTask, settings: Settings, h: Tensor, q: dict[str, Tensor], h_key: Tensor, k: dict[str, Tensor]
) -> Tensor:
    """Of one clustering task, for each sample: that the classifier sees in the query what its teacher is sure of in the
    key. It stands in the place of L_CD."""
    pooled = settings.classifier_input == "pooled"
    logits = task.classifier(classifier_input(h, q[task.projection], pooled))
    assert task.teacher is not None
    p = task.teacher(classifier_input(h_key, k[task.projection], pooled)).softmax(1)
    return core.self_label_loss(logits, p, task.share, settings.self_label_confidence) / len(h)


def shares_of_batch(
    learner: Learner, settings: Settings, group: Group, phase: Phase, index: Tensor, n_tasks: int
) -> tuple[Tensor, float]:
    """Of each task's losses, which are means over this rank's part of the batch ``index``, the share in those over
    the whole, which are their sums over the ranks: of L_ID, with the samples' weights (tasks), and of the others."""
    part = group.part(index, at_once=phase.lot)
    plain = len(part) / len(index)
    weighted = torch.full((n_tasks,), plain, device=index.device)
    if settings.hard_samples and phase.tasks:
        shares = [learner.tasks[name].s for name in phase.tasks]
        weighted[-len(phase.tasks) :] = torch.stack([s[part].sum() / s[index].sum() for s in shares])
    return weighted, plain
