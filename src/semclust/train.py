"""The training loop: joint learning of several tasks, one epoch at a time (Section 3.2).

An epoch is: steps over all images in random order, then the renewal of every label. All that training
changes lies in ``Training.learner`` and ``Training.optimiser``; every epoch seeds its own random
numbers, so a run can stop after any epoch and go on as if it had not.

Shapes: n batch, N images, c channels, H x W pixels, C clusters, d representation.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from semclust import core, labels, metrics
from semclust.augment import Augmentation
from semclust.backbones import build_backbone, group_batch_norm
from semclust.config import Settings
from semclust.core import SemanticMemory
from semclust.devices import mixed_precision, own_random_numbers
from semclust.errors import DamagedFileError, TrainingError
from semclust.model import ClusterTask, Encoder, TaskPlan, channels_last, classifier_input, follow, momentum_twin
from semclust.partition import k_means, spectral_partition
from semclust.storage import load_into

SGD_MOMENTUM = 0.9
MOMENTUM = {"moco": 0.99, "simclr": 0.0, "instance-memory": 0.5}  # of the keys, where none is asked for
INFERENCE_BATCH = 1024
PARTITION_EVERY = 4  # epochs, while a partition of the features guides the labels
STEPS_AN_EPOCH = 36  # at least, by smaller batches where images are few


class Learner(nn.Module):
    """Everything that training changes, apart from the optimiser's own state."""

    stored_keys: Tensor

    def __init__(self, settings: Settings, image_shape: tuple[int, int, int], n_images: int):
        super().__init__()
        backbone, n_features = build_backbone(
            settings.backbone, image_shape, settings.width, settings.max_pool, settings.sobel
        )
        own = settings.projection_per_task
        projections = sorted(settings.tasks) if own else ["shared"]
        dim, tau = settings.projection_dim, settings.temperature
        self.encoder = Encoder(
            backbone, n_features, image_shape[2], projections, dim, settings.projection_norm, settings.sobel
        )
        group_batch_norm(self.encoder, settings.batch_norm_groups)
        self.twin = momentum_twin(self.encoder) if settings.contrast == "moco" else None
        if settings.contrast == "instance-memory":  # an empty key is the zero vector, as in SemanticMemory
            self.register_buffer("stored_keys", torch.zeros(len(projections), n_images, dim))

        # More keys than half the images would hold many images twice, and every image against itself.
        K = max(1, min(settings.memory_size, n_images // 2))
        # Extreme over-clustering, every image a cluster: one queue, no bank left out.
        self.instance_memory = SemanticMemory(1, K, dim)
        self.instance_projection = "instance" if "instance" in projections else projections[0]
        classifier_dim = dim if settings.classifier_input == "projection" else n_features
        self.task_modules = nn.ModuleDict()
        for name, plan in plan_tasks(settings, n_images).items():
            projection = name if name in projections else self.instance_projection
            self.task_modules[name] = ClusterTask(plan, n_images, K, dim, classifier_dim, tau, projection)

    @property
    def tasks(self) -> dict[str, ClusterTask]:
        return cast(dict[str, ClusterTask], dict(self.task_modules.items()))


def plan_tasks(settings: Settings, n_images: int) -> dict[str, TaskPlan]:
    """How many clusters each task has and when it learns. "cluster" is always there: instance contrast
    alone never trains on it, but it holds the k-means of the features."""
    C = settings.n_clusters

    def epoch(share: float) -> int:
        return max(1, math.floor(share * settings.epochs)) if share else 0  # at 0, and only there, from random labels

    begins = epoch(settings.cluster_from) if "cluster" in settings.tasks else settings.epochs
    plans = {"cluster": TaskPlan(C, begins, epoch(settings.guided_until))}
    if "under" in settings.tasks and C // 2 > 1:
        plans["under"] = TaskPlan(C // 2, begins, epoch(settings.guided_until))
    n_over = min(settings.over_factor * C, n_images // 8)  # fewer than 8 images are not a cluster to learn from
    if "over" in settings.tasks and n_over > C:
        plans["over"] = TaskPlan(n_over, epoch(settings.over_from), 0)
    return plans


class Training:
    """A run in progress. ``run_epoch`` until ``epoch == settings.epochs``."""

    def __init__(self, pixels: np.ndarray, settings: Settings, augmentation: Augmentation, device: torch.device):
        """``pixels``: N x H x W x c, uint8."""
        self.settings, self.device, self.augmentation = settings, device, augmentation
        self.epoch = 0
        self.n_images = len(pixels)
        self.images = torch.tensor(pixels).to(device).permute(0, 3, 1, 2)  # N x c x H x W
        self.batch_size = settings.batch_size or max(32, min(256, self.n_images // STEPS_AN_EPOCH))
        self.momentum = MOMENTUM[settings.contrast] if settings.momentum is None else settings.momentum
        with own_random_numbers(settings.random_state, 0, device):
            self.learner = Learner(settings, pixels.shape[1:], self.n_images)
        channels_last(self.learner.to(device))
        self._measure_colours()
        self.trained = [*self.learner.encoder.parameters(), *self.learner.task_modules.parameters()]
        self.optimiser = torch.optim.SGD(
            self.trained, lr=0.0, momentum=SGD_MOMENTUM, weight_decay=settings.weight_decay
        )
        for parameter in self.trained:  # as SGD would at the first step, but there from the start to be saved
            self.optimiser.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)

    def learns(self, task: ClusterTask) -> bool:
        """Whether the current epoch trains on this task."""
        return self.epoch >= task.plan.begins

    # ---- one epoch -------------------------------------------------------------------------------

    def run_epoch(self, on_step: Callable[[int], None] = lambda n: None) -> tuple[dict[str, Any], Tensor]:
        """Train for one epoch and renew the labels. Returns the row of figures, and the classifier's
        probabilities p of all images without augmentation (N x C)."""
        with own_random_numbers(self.settings.random_state, 1 + self.epoch, self.device):
            row: dict[str, Any] = {"epoch": self.epoch + 1}
            row |= self._steps(on_step)
            h, q = self.features()
            if not all(tensor.isfinite().all() for tensor in (h, *q.values(), *self.trained)):
                raise self._not_finite("Weights or features were not finite after the last step")
            self.epoch += 1
            figures, p = self._renew_labels(h, q)
        return row | figures, p

    def _steps(self, on_step: Callable[[int], None]) -> dict[str, float]:
        self.learner.train()
        order = torch.randperm(self.n_images, device=self.device)
        # Batches of nearly one size: a last batch of a few images would have useless batch statistics.
        n_batches = min(math.ceil(self.n_images / self.batch_size), self.n_images // 2)
        batches = order.tensor_split(n_batches)
        losses = torch.zeros(len(batches), 3, device=self.device)
        for step, index in enumerate(batches):
            rate = self.learning_rate(self.epoch + step / len(batches))
            for group in self.optimiser.param_groups:
                group["lr"] = rate
            losses[step] = self._step(index)
            on_step(len(index))
        finite = losses.isfinite().all(1)
        if not finite.all():
            bad = int((~finite).nonzero()[0, 0])
            raise self._not_finite(f"The loss became {losses[bad, 0].item()} at step {bad + 1} of {len(batches)}")
        loss, l_id, l_cd = losses.mean(0).tolist()
        return {"learning_rate": rate, "loss": loss, "loss_id": l_id, "loss_cd": l_cd}

    def _not_finite(self, what: str) -> TrainingError:
        rate = self.settings.learning_rate
        return TrainingError(
            f"{what} in epoch {self.epoch + 1}. Lower the learning rate (now {rate}), for example to {rate / 3:.2g}."
        )

    def learning_rate(self, epoch: float) -> float:
        """Cosine decay over all epochs, after a linear rise."""
        rise = min(1.0, (epoch + 1e-2) / self.settings.warmup_epochs) if self.settings.warmup_epochs else 1.0
        return self.settings.learning_rate * rise * 0.5 * (1 + math.cos(math.pi * epoch / self.settings.epochs))

    def _step(self, index: Tensor) -> Tensor:
        """One optimiser step on the images ``index`` (n): the losses L, L_ID, L_CD."""
        learner, settings = self.learner, self.settings
        x = self.images[index].float().div(255).contiguous(memory_format=torch.channels_last)
        query, key = self.augmentation(x), self.augmentation(x)
        with mixed_precision(self.device):
            h, q = learner.encoder(query)
            k = self._keys(key, index)

        active = [task for task in learner.tasks.values() if self.learns(task)]
        zero = torch.zeros((), device=self.device)
        l_ids, l_cds = [], []
        if "instance" in settings.tasks or not active:
            l_ids.append(self._instance_task_loss(q, k))
            l_cds.append(zero)
        for task in active:
            l_id, l_cd = self._cluster_task_losses(task, index, h, q, k)
            l_ids.append(l_id)
            l_cds.append(l_cd)
        loss = core.overall_loss(torch.stack(l_ids), torch.stack(l_cds)).sum()
        if settings.task_sum == "mean":
            loss = loss / len(l_ids)

        self.optimiser.zero_grad()
        loss.backward()
        self.optimiser.step()
        self._remember(index, q, k, active)
        return torch.stack([loss, torch.stack(l_ids).mean(), torch.stack(l_cds).mean()]).detach()

    def _keys(self, view: Tensor, index: Tensor) -> dict[str, Tensor]:
        """k for each projection (n x d): the only place where the contrastive methods differ."""
        learner = self.learner
        if self.settings.contrast == "simclr":
            return learner.encoder(view)[1]
        if self.settings.contrast == "instance-memory":
            return dict(zip(learner.encoder.projections, learner.stored_keys[:, index], strict=True))
        assert learner.twin is not None
        with torch.no_grad():
            if self.settings.batch_norm_groups == 1:
                return learner.twin(view)[1]
            shuffle = torch.randperm(len(view), device=view.device)  # other neighbours in the batch than q had
            back = shuffle.argsort()
            return {name: k[back] for name, k in learner.twin(view[shuffle])[1].items()}

    def _instance_task_loss(self, q: dict[str, Tensor], k: dict[str, Tensor]) -> Tensor:
        """L_ID of the instance task: every other image is a negative."""
        name, tau = self.learner.instance_projection, self.settings.temperature
        bank = core.bank_similarity(q[name], self.learner.instance_memory.keys, tau)
        return core.instance_loss(q[name], k[name], bank, tau).mean()

    def _cluster_task_losses(
        self, task: ClusterTask, index: Tensor, h: Tensor, q: dict[str, Tensor], k: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """L_ID (Eq. 1, 2, 6) and L_CD (Eq. 3, 4) of one clustering task."""
        settings, tau = self.settings, self.settings.temperature
        y = task.y[index]
        q_task, k_task = q[task.projection], k[task.projection]
        bank = core.bank_similarity(q_task, task.memory.keys, tau)
        l_id = core.instance_loss(q_task, k_task, bank, tau, y if settings.cross_cluster else None)
        if settings.attraction:
            l_id = l_id + settings.attraction * core.attraction_loss(bank, y)
        s = task.s[index]
        w = labels.sample_weights(s if settings.hard_samples else torch.ones_like(s))

        if settings.assign_by == "key":
            bank = core.bank_similarity(k_task.detach(), task.memory.keys, tau)
        seen = self._classifier_sees(h, q_task)
        logits = task.classifier(seen if settings.classifier_trains_encoder else seen.detach())
        return (w * l_id).sum(), core.cluster_loss(logits, core.memory_assignment(bank))

    def _classifier_sees(self, h: Tensor, q: Tensor) -> Tensor:
        return classifier_input(h, q, self.settings.classifier_input == "pooled")

    @torch.no_grad()
    def _remember(self, index: Tensor, q: dict[str, Tensor], k: dict[str, Tensor], active: list[ClusterTask]) -> None:
        """After the backward pass: move the momentum twin, write the keys into the memories."""
        learner = self.learner
        if learner.twin is not None:
            follow(learner.twin, learner.encoder, self.momentum)
        if self.settings.contrast == "instance-memory":
            m = self.momentum
            for i, name in enumerate(k):
                k[name] = F.normalize(m * k[name] + (1 - m) * q[name].detach(), dim=1)
                learner.stored_keys[i, index] = k[name]
        learner.instance_memory.enqueue(k[learner.instance_projection], torch.zeros_like(index))
        for task in active:
            task.memory.enqueue(k[task.projection], task.y[index])

    # ---- label refresh ---------------------------------------------------------------------------

    @torch.no_grad()
    def _renew_labels(self, h: Tensor, q: dict[str, Tensor]) -> tuple[dict[str, Any], Tensor]:
        """Renew y and s of every task from the features of all images (Eq. 5, 6).

        The figures are those of the target task, or of "over" while that is all there is."""
        tasks = self.learner.tasks
        over_only = not self.instance_alone and not self.learns(tasks["cluster"])
        figures = dict.fromkeys(metrics.HEALTH, math.nan)
        for name, task in tasks.items():
            q_task = q[task.projection]
            seen = self._classifier_sees(h, q_task)
            y = self._next_labels(task, seen, q_task)
            churn = torch.ne(y, task.y).float().mean().item()
            task.s.copy_(labels.count_swaps(task.s, y, task.y))
            task.y.copy_(y)
            if self.epoch <= task.plan.begins:  # the labels so far were random: no swap means anything
                churn = math.nan
                task.s.fill_(1)
            if name == "cluster":
                p = task.classifier(seen).softmax(1)
                if not over_only:
                    figures = metrics.health(p, self._memory_labels(task, q_task), churn)
            elif name == "over" and over_only and self.learns(task):
                p_over = task.classifier(seen).softmax(1)
                figures = metrics.health(p_over, self._memory_labels(task, q_task), churn)
                figures["score"] = math.nan  # these clusters are not the result, by which to choose an epoch
        return {"spread": metrics.spread(q[tasks["cluster"].projection])} | figures, p

    def _next_labels(self, task: ClusterTask, seen: Tensor, q: Tensor) -> Tensor:
        """The labels that the next epoch learns from."""
        settings, C = self.settings, task.n_clusters
        age = self.epoch - task.plan.begins
        if self.instance_alone:
            task.classifier.choose_nearest(seen, self._same_ids(k_means(seen, C)[0], task))
            y = labels.most_likely(task.classifier(seen))
        elif not self.learns(task):
            return task.y
        elif age == 0 or (self.epoch < task.plan.guided_until and age % PARTITION_EVERY == 0):
            y = self._same_ids(spectral_partition(q, C, settings.temperature), task)
            if age == 0:
                task.classifier.start_from(seen, y)
        else:
            y = labels.most_likely(task.classifier(seen)) if settings.online else self._memory_labels(task, q)
            return labels.merge_and_split(y, q, C, settings.min_cluster_size * self.n_images / C)
        if age <= 0:  # at the start, and at every refresh of instance contrast alone, the memory is filled anew
            shuffled = torch.randperm(len(q), device=q.device)
            task.memory.enqueue(q[shuffled], y[shuffled])
        return y

    def _same_ids(self, y: Tensor, task: ClusterTask) -> Tensor:
        """Name the clusters of a partition as they were named before, as far as they are the same."""
        renamed = labels.match_ids(y.cpu().numpy(), task.y.cpu().numpy(), task.n_clusters)
        return torch.from_numpy(renamed).to(y.device)

    @property
    def instance_alone(self) -> bool:
        return "cluster" not in self.settings.tasks

    def _memory_labels(self, task: ClusterTask, q: Tensor) -> Tensor:
        """The most likely cluster of every image by the memory (N, Eq. 3)."""
        keys, tau = task.memory.keys, self.settings.temperature
        parts = q.split(INFERENCE_BATCH)  # one after the other: N x C similarities would not fit for many clusters
        return torch.cat(
            [labels.most_likely(core.memory_assignment(core.bank_similarity(x, keys, tau))) for x in parts]
        )

    @torch.no_grad()
    def features(self) -> tuple[Tensor, dict[str, Tensor]]:
        """h (N x D) and q of each projection (N x d) of all images, without augmentation."""
        encoder = self.learner.encoder.eval()
        hs, qs = [], []
        for part in self.images.split(INFERENCE_BATCH):
            with mixed_precision(self.device):
                h, q = encoder(part.float().div(255).contiguous(memory_format=torch.channels_last))
            hs.append(h)
            qs.append(q)
        return torch.cat(hs), {name: torch.cat([q[name] for q in qs]) for name in qs[0]}

    # ---- surroundings ----------------------------------------------------------------------------

    def _measure_colours(self) -> None:
        """Let the encoder subtract the mean colour of the images and divide by their deviation."""
        sums = torch.zeros(2, self.images.shape[1], dtype=torch.float64)
        for part in self.images.split(INFERENCE_BATCH):
            x = part.float() / 255
            sums += torch.stack([x.mean((2, 3)).sum(0), x.square().mean((2, 3)).sum(0)]).cpu()
        mean, square = sums / self.n_images
        std = (square - mean**2).clamp(min=0).sqrt().clamp(min=1e-3)
        for encoder in filter(None, (self.learner.encoder, self.learner.twin)):
            encoder.mean.copy_(mean[:, None, None])
            encoder.std.copy_(std[:, None, None])

    # ---- state -----------------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """All tensors that a resumed run needs; with the epoch, the settings and the images it is whole."""
        tensors = {f"learner.{name}": value for name, value in self.learner.state_dict().items()}
        for i, parameter in enumerate(self.trained):
            tensors[f"velocity.{i}"] = self.optimiser.state[parameter]["momentum_buffer"]
        return tensors

    def load_state(self, tensors: dict[str, Tensor], epoch: int, source: Path) -> None:
        """Go on from ``state()`` after ``epoch`` epochs; ``source`` is named where it does not fit."""
        prefix = "learner."
        learner = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
        load_into(self.learner, learner, source)
        velocities = [tensors.get(f"velocity.{i}") for i in range(len(self.trained))]
        if len(tensors) != len(learner) + len(velocities) or any(
            velocity is None or velocity.shape != parameter.shape
            for velocity, parameter in zip(velocities, self.trained, strict=True)
        ):
            raise DamagedFileError(f"{source} does not hold this run's optimiser state. Restore it, or fit again.")
        for velocity, parameter in zip(velocities, self.trained, strict=True):
            self.optimiser.state[parameter]["momentum_buffer"].copy_(velocity)
        self.epoch = epoch
