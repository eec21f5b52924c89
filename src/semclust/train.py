"""The training loop: joint learning of several tasks, one epoch at a time (Section 3.2).

An epoch is: steps over all images in random order, then the renewal of every label. All that training
changes is in ``Training.state()``, and every epoch seeds its own random numbers, so a run can stop after any
step and go on as if it had not.

Several processes (``distributed.Group``) hold the same learner and know the same batches; each works on its part of
every batch. What is said of a batch here holds for the part, but for ``index``, the numbers of the whole batch.

Shapes: n batch, N images, c channels, H x W pixels, C clusters, d representation.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from semclust import core, labels, metrics
from semclust.augment import Augmentation, RandomView, choose_family
from semclust.backbones import dealt, group_batch_norm
from semclust.config import Settings
from semclust.core import SemanticMemory
from semclust.devices import mixed_precision, own_random_numbers, random_state, set_random_state
from semclust.distributed import ALONE, Group, checksum, synchronise_batch_norm
from semclust.engine import Engine, fast_kernels
from semclust.errors import DamagedFileError, InputError, NotFiniteError, plural
from semclust.loader import choose_loader
from semclust.model import ClusterTask, TaskPlan, build_encoder, channels_last, classifier_input, follow, momentum_twin
from semclust.partition import centred, k_means, nearest_neighbours, spectral_partition
from semclust.storage import load_into

EPOCHS, EPOCHS_OF_PHOTOGRAPHS = 50, 700
SGD_MOMENTUM = 0.9
MOMENTUM = {"moco": 0.99, "simclr": 0.0, "instance-memory": 0.5}  # of the keys, where none is asked for
INFERENCE_BATCH = 1024
PLAIN_IMAGES_A_SECOND = 8_000  # of a GPU without compiling, about: how far a budget of time reaches
STEPS_AN_EPOCH = 36  # at least, by smaller batches where images are few
SKIPPED_IN_A_ROW = 3  # steps that were not finite, after which a run does not go on as it is
SOME_IMAGES = 4096  # about, of which features tell how the network is doing while they are needed for nothing else
LOOK_EVERY = 100  # steps, for such: to look is to wait for the device

Keys = tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]  # numbers of images, their q and their k


class Learner(nn.Module):
    """Everything that training changes, apart from the optimiser's own state."""

    stored_keys: Tensor
    neighbours: Tensor

    def __init__(self, settings: Settings, image_shape: tuple[int, int, int], n_images: int):
        super().__init__()
        own = settings.projection_per_task
        projections = sorted(settings.tasks) if own else ["shared"]
        dim, tau = settings.projection_dim, settings.temperature
        self.encoder, n_features = build_encoder(settings, image_shape, projections)
        group_batch_norm(self.encoder, settings.batch_norm_groups)
        self.twin = momentum_twin(self.encoder) if settings.contrast == "moco" else None
        if settings.contrast == "instance-memory":  # an empty key is the zero vector, as in SemanticMemory
            self.register_buffer("stored_keys", torch.zeros(len(projections), n_images, dim))

        if settings.learns_pairs:  # in 4 bytes: there are many
            # In a cluster of its fair size, all of them should be a small part.
            k = max(1, min(settings.neighbours, n_images // (4 * settings.n_clusters)))
            self.register_buffer("neighbours", torch.zeros(n_images, k, dtype=torch.int32))

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
        return max(1, math.floor(share * settings.n_epochs)) if share else 0  # at 0, and only there, from random labels

    begins = epoch(settings.cluster_from) if "cluster" in settings.tasks else settings.n_epochs
    plans = {"cluster": TaskPlan(C, begins)}
    if "under" in settings.tasks and C // 2 > 1:
        plans["under"] = TaskPlan(C // 2, begins)
    n_over = min(settings.over_factor * C, n_images // 8)  # fewer than 8 images are not a cluster to learn from
    if "over" in settings.tasks and n_over > C:
        plans["over"] = TaskPlan(n_over, epoch(settings.over_from), epoch(settings.over_until))
    return plans


def with_epochs(settings: Settings, n_channels: int, device: torch.device) -> Settings:
    """The same settings with a number of epochs, which where none is given follows from the kind of images. On a CPU
    nobody would wait for as many as photographs need."""
    if settings.epochs is not None:
        return settings
    many = choose_family(settings.augment, n_channels) == "natural" and device.type != "cpu"
    return replace(settings, epochs=round(settings.effort * (EPOCHS_OF_PHOTOGRAPHS if many else EPOCHS)))


def usual_batch_size(n_images: int) -> int:
    return max(32, min(512, n_images // STEPS_AN_EPOCH))


def usual_rate(batch_size: int) -> float:
    """The noise of a batch's gradient falls with the root of its size. Rounded as people would write it down."""
    return float(f"{0.17 * math.sqrt(batch_size / 256):.2g}")


def plan_batches(n_images: int, batch_size: int) -> tuple[int, int]:
    """Number of batches in an epoch, and of images in each, which is at most ``batch_size`` but at least 2."""
    n_batches = min(math.ceil(n_images / batch_size), n_images // 2)
    return n_batches, math.ceil(n_images / n_batches)


def check_shares(settings: Settings, n_images: int, group: Group) -> None:
    """Raise InputError where a run cannot be shared by so many processes."""
    if group.alone:
        return
    n = plan_batches(n_images, settings.batch_size or usual_batch_size(n_images))[1]
    # Batch norm of one image is 0, and a pair is two.
    fewest = 2 if settings.batch_norm == "local" or settings.learns_pairs else 1
    if n // group.size < fewest:
        raise InputError(
            f"{group} for batches of {n} images, which leaves a process {n // group.size}; expected at least {fewest} "
            "for each, a pair where neighbours are learned. Start fewer processes, or choose a larger --batch-size."
        )
    if settings.batch_norm_groups > 1:
        raise InputError(
            f"batch_norm_groups={settings.batch_norm_groups} with {group}: expected 1. With --batch-norm local "
            "the part of each process is a group of its own."
        )


class Training:
    """A run in progress. ``run_epoch`` until ``epoch == settings.epochs``."""

    def __init__(
        self,
        pixels: np.ndarray,
        settings: Settings,
        augmentation: Augmentation,
        device: torch.device,
        on_notice: Callable[[str], None] = lambda message: None,
        group: Group = ALONE,
    ):
        """``pixels``: N x H x W x c, uint8; all of them, also where ``group`` shares the work."""
        settings = with_epochs(settings, pixels.shape[3], device)
        self.settings, self.device, self.augmentation, self.group = settings, device, augmentation, group
        self.on_notice = on_notice
        self.epoch = self.step = 0  # whole epochs, and steps of the next one, that are done
        self.losses = torch.zeros(0, 3)  # of those steps: L, L_ID, L_CD
        self.skipped_before = 0  # steps in a row, up to the beginning of this epoch
        self.rate_factor = 1.0  # what the learning rate was lowered by
        self.parts = 1  # in which a step goes through the network, where a GPU has too little memory
        self.inference_batch = INFERENCE_BATCH
        self._random_state: list[Tensor] = []  # to go on from within an epoch
        self.n_images, self.image_shape = len(pixels), pixels.shape[1:]
        self.images = choose_loader(pixels, device, settings.images_on)
        self.batch_size = settings.batch_size or usual_batch_size(self.n_images)
        self.peak_rate = usual_rate(self._batches()[1]) if settings.learning_rate is None else settings.learning_rate
        self.momentum = MOMENTUM[settings.contrast] if settings.momentum is None else settings.momentum
        with own_random_numbers(settings.random_state, 0, device):
            self.learner = Learner(settings, self.image_shape, self.n_images)
        self._local_norms = not group.alone and settings.batch_norm == "local"
        if not group.alone and not self._local_norms:
            synchronise_batch_norm(self.learner, group)
        channels_last(self.learner.to(device))
        self.precision = mixed_precision(device, settings.precision == "auto")
        self._measure_colours()
        self.trained = [*self.learner.encoder.parameters(), *self.learner.task_modules.parameters()]
        # The rate is a tensor where steps are recorded: a number would be recorded for good.
        self.optimiser = torch.optim.SGD(
            self.trained,
            lr=torch.zeros((), device=device),
            momentum=SGD_MOMENTUM,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        for parameter in self.trained:  # as SGD would at the first step, but there from the start to be saved
            self.optimiser.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)

        budget = settings.minutes
        images_seen = settings.n_epochs * self.n_images if budget is None else budget * 60 * PLAIN_IMAGES_A_SECOND
        self.engine = Engine(device, images_seen, settings.compile and group.alone, on_notice)
        if settings.compile and not group.alone and device.type == "cuda":
            on_notice(
                "Steps that several processes share are not recorded or compiled yet: for small images one GPU may be "
                "as fast as several."
            )
        self._phase: tuple[tuple[str, ...], bool] | None = None  # what the recorded step learns
        self._prepare_engine()

    def _prepare_engine(self) -> None:
        """What of a step is compiled, where the engine compiles."""
        self._view = self.engine.compiled(self._two_views)
        self._encode = self.engine.compiled(self.learner.encoder)
        self._encode_key = self.engine.compiled(self.learner.twin) if self.learner.twin is not None else None
        self._losses = self.engine.compiled(self._sample_losses)
        self._enqueue = self.engine.compiled(SemanticMemory.enqueue)

    def learns(self, task: ClusterTask) -> bool:
        """Whether the current epoch trains on this task."""
        return task.plan.learns_in(self.epoch)

    def set_epochs(self, epochs: int) -> None:
        """Plan the run anew, before it begins, for another number of epochs."""
        self.settings = replace(self.settings, epochs=epochs)
        for name, plan in plan_tasks(self.settings, self.n_images).items():
            self.learner.tasks[name].plan = plan

    def kind_of_epoch(self, epoch: int) -> tuple[str, str]:
        """What an epoch (from 0) learns, and which labels it takes from a partition at its end, as names of tasks.
        Epochs of one kind take the same time."""
        if self.instance_alone:
            return "instance", ""
        parted = [name for name, task in self.learner.tasks.items() if self._is_parted(task, epoch + 1)]
        return " ".join(self._learned_in(epoch)), " ".join(parted)

    def _learned_in(self, epoch: int) -> tuple[str, ...]:
        """The tasks that an epoch learns: another set of them is another step to record."""
        return tuple(name for name, task in self.learner.tasks.items() if task.plan.learns_in(epoch))

    # ---- one epoch -------------------------------------------------------------------------------

    def run_epoch(
        self, on_step: Callable[[int], None] = lambda n: None, share: float = 1.0
    ) -> tuple[dict[str, Any], Tensor]:
        """Train for one epoch, or the rest of one, and renew the labels. Returns the row of figures, and the
        classifier's probabilities p of all images without augmentation (N x C; of none while no labels are needed).

        on_step: called after each step with its number of images, and with 0 while the labels are renewed. ``state()``
        is whole there, and an exception that is raised there ends the epoch.
        share: of the steps of a whole epoch that this one takes, fewer or more, where time is the budget; of the rest
        of an epoch, the same as of its beginning."""
        with own_random_numbers(self.settings.random_state, 1 + self.epoch, self.device), fast_kernels(self.device):
            row: dict[str, Any] = {"epoch": self.epoch + 1}
            row |= self._steps(on_step, share)
            self._agree()
            renews = self.renews_labels(self.epoch + 1)
            h, q = (self.features if renews else self.features_of_some)(lambda: on_step(0))
            if not self.group.all_true(all_finite([h, *q.values(), *self.trained])):
                raise self._not_finite("Weights or features were not finite after the last step")
            self.skipped_before = self._skipped_steps()[1]  # only now: until here the steps may be counted once more
            self.epoch, self.step = self.epoch + 1, 0
            figures, p = self._renew_labels_of_all(h, q) if renews else (self._figures_of_some(q), h[:0])
        return row | figures, p

    def _steps(self, on_step: Callable[[int], None], share: float = 1.0) -> dict[str, float]:
        self._begin_steps()
        order = self._order()
        if share != 1:
            more = [self._order() for _ in range(1, math.ceil(share))]
            order = torch.cat([order, *more])[: max(1, round(share * len(order)))]
        steps = len(order)
        if not self.step:
            self.losses = torch.zeros(steps, 3, device=self.device)
        elif self._random_state:
            set_random_state(self._random_state, self.device)
            self._random_state = []
        if self.step < steps:
            for x in self.images.batches(self._part(order[self.step :], 1).unbind()):
                rate = self.learning_rate(self.epoch + self.step / steps)
                self.losses[self.step] = self._step(x, order[self.step], rate)
                self.step += 1
                if self.step % LOOK_EVERY == 0:
                    self._skipped_steps()
                on_step(self.step * self.n_images // steps - (self.step - 1) * self.n_images // steps)
        skipped, _ = self._skipped_steps()
        loss, l_id, l_cd = self.losses[self.losses.isfinite().all(1)].mean(0).tolist()
        return {
            "learning_rate": self.learning_rate(self.epoch + (steps - 1) / steps),
            "loss": loss,
            "loss_id": l_id,
            "loss_cd": l_cd,
            "skipped_steps": skipped,
        }

    def try_steps(self, n: int | None = None) -> None:
        """The first n steps of an epoch, or all of them, to see how long they take: they train, but the epoch that is
        to come, or the rest of it, is as long as before."""
        step, losses = self.step, self.losses
        self.step = 0
        try:
            self._steps(lambda n_images: None, 1.0 if n is None else n / self._batches()[0])
        finally:
            self.step, self.losses = step, losses

    def _skipped_steps(self) -> tuple[int, int]:
        """How many steps of this epoch were not finite, and how many of them are the last in a row."""
        spoiled = (~self.losses[: self.step].isfinite().all(1)).tolist()
        in_a_row = self.skipped_before
        for step, bad in enumerate(spoiled, 1):
            in_a_row = in_a_row + 1 if bad else 0
            if in_a_row >= SKIPPED_IN_A_ROW:
                raise self._not_finite(
                    f"The loss or its gradient was not finite {in_a_row} times in a row, at last at step {step}"
                )
        return sum(spoiled), in_a_row

    def _begin_steps(self) -> None:
        self.learner.train()
        phase = (self._learned_in(self.epoch), self._seeks_nearest)
        # What a network keeps besides its weights, such as the means of batch norm, in training and in its twin.
        kept = [*self.learner.encoder.buffers(), *(self.learner.twin.buffers() if self.learner.twin else [])]
        self._statistics = [buffer for buffer in kept if buffer.is_floating_point()]
        if phase != self._phase:
            self._phase = phase
            self._learn = self.engine.recorded(functools.partial(self._learn_from, phase[0]))

    def _order(self) -> Tensor:
        """The images of each step (steps x n): all of them in random order. Every batch has the same size, as a
        recorded step needs it; to fill the last one, the first few images come once more. Where pairs are learned, half
        of them, each followed by one of its neighbours."""
        n_batches, n = self._batches()
        order = torch.randperm(self.n_images, device=self.device)
        order = torch.cat([order, order[: n_batches * n - self.n_images]]).view(n_batches, n)
        if not self._in_pairs(self._learned_in(self.epoch)):
            return order
        order = order[:, : n // 2]
        which = torch.randint(self.learner.neighbours.shape[1], order.shape, device=self.device)
        return torch.stack([order, self.learner.neighbours[order, which].long()], dim=2).flatten(1)

    def _in_pairs(self, active: tuple[str, ...]) -> bool:
        """Whether steps that learn the tasks ``active`` do so from pairs of neighbours."""
        return self.settings.learns_pairs and "cluster" in active

    @property
    def _lot(self) -> int:
        """Images of a batch that stay together where it is dealt out."""
        return 2 if self._in_pairs(self._learned_in(self.epoch)) else 1

    def _part(self, x: Tensor, dim: int = 0) -> Tensor:
        """This rank's part of something of each image of a batch."""
        return self.group.part(x, dim, self._lot)

    def _gather(self, x: Tensor, n: int) -> Tensor:
        """Something of each of a batch's n images, of this rank's part."""
        return self.group.gather(x, n, self._lot)

    def _batches(self) -> tuple[int, int]:
        """Number of batches in an epoch, and of images in each."""
        return plan_batches(self.n_images, self.batch_size)

    def _not_finite(self, what: str) -> NotFiniteError:
        return NotFiniteError(f"{what} of epoch {self.epoch + 1}.")

    def learning_rate(self, epoch: float) -> float:
        """After a linear rise, a cosine decay to 0 until the clusters start, and a second, lower one from there on."""
        settings, begins = self.settings, self.learner.tasks["cluster"].plan.begins
        rise = min(1.0, (epoch + 1e-2) / settings.warmup_epochs) if settings.warmup_epochs else 1.0
        if epoch < begins:
            peak, progress = 1.0, epoch / begins
        else:
            peak = settings.cluster_rate if begins else 1.0
            progress = (epoch - begins) / max(1, settings.n_epochs - begins)
        fall = 0.5 * (1 + math.cos(math.pi * progress))
        return self.rate_factor * self.peak_rate * peak * rise * fall

    def _step(self, x: Tensor, index: Tensor, rate: float) -> Tensor:
        """One optimiser step on the batch ``index``: L, L_ID, L_CD. x: its images (n x c x H x W bytes)."""
        for group in self.optimiser.param_groups:
            group["lr"].fill_(rate)
        # Views are made outside of what is recorded: they draw random numbers, and may be the user's own code.
        if isinstance(self.augmentation, RandomView):
            u = torch.rand(2, len(index), self.augmentation.numbers, device=x.device)  # of the whole batch
            views = self._view(x, self._part(u, 1).flatten(0, 1))
        else:
            x = in_unit_range(x)
            with self._numbers_of_rank():
                views = torch.cat([self.augmentation(x), self.augmentation(x)])
        while True:
            try:
                return self._learn(views, index)
            except torch.OutOfMemoryError:
                # The halves would be single images, of which batch norm learns nothing; and of several processes the
                # others wait in the middle of this step.
                if len(index) < 4 * self.parts or not self.group.alone:
                    raise
            self._halve(len(index))  # here, where the error no longer holds what the step had computed

    @contextlib.contextmanager
    def _numbers_of_rank(self) -> Iterator[None]:
        """Random numbers of this process's own, for code that draws nobody knows how many."""
        if self.group.alone:
            yield
            return
        drawn = int(torch.randint(2**31, ()))
        with own_random_numbers(drawn, self.group.rank, self.device):
            yield

    def _halve(self, n: int) -> None:
        """Let steps of n images go through the network in twice as many parts."""
        self.parts *= 2
        self.optimiser.zero_grad()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        self._phase = None  # to be recorded anew
        self._begin_steps()
        self.on_notice(
            f"The device is out of memory: each step of {n} images now goes in {self.parts} parts, whose gradients are "
            "added up. Batch norm, the weights of hard samples and the evenness of clusters see one part at a time. "
            f"A batch_size of {n // 2}, or a smaller image_size, would do without."
        )

    def _two_views(self, x: Tensor, u: Tensor) -> Tensor:
        """2n views, by the random numbers u, of n images."""
        assert isinstance(self.augmentation, RandomView)
        x = in_unit_range(x)
        return self.augmentation.by(torch.cat([x, x]), u)

    def _learn_from(self, active: tuple[str, ...], views: Tensor, index: Tensor) -> Tensor:
        """Learn the tasks ``active`` from two views of each image, the first n and the second n.

        Whether all is finite is decided on the device, which the host does not wait for; if not, nothing is learned
        and the losses are NaN."""
        statistics = torch.cat([buffer.flatten() for buffer in self._statistics])
        self.optimiser.zero_grad()
        losses = torch.zeros(3, device=self.device)
        keys: list[Keys] = []
        own = self._part(index)
        in_lots = (x.unflatten(0, (-1, self._lot)).tensor_split(self.parts) for x in (*views.chunk(2), own))
        split = ([part.flatten(0, 1) for part in parts] for parts in in_lots)
        try:
            for query, key, some in zip(*split, strict=True):
                of_part, q, k = self._add_gradient(active, query, key, some, len(some) / len(own), index)
                losses = losses + of_part
                keys.append((some if self.group.alone else index, q, k))
        except torch.OutOfMemoryError:  # the step is to come again, in smaller parts
            self._set_statistics(statistics)
            raise
        gradients = [parameter.grad for parameter in self.trained if parameter.grad is not None]
        self.group.sum_all([*gradients, losses])
        spoiled = self._spoiled(gradients, losses)
        if self.optimiser.defaults["fused"]:  # as it is but for the script that speed is compared with
            self.optimiser.found_inf = spoiled.float()  # type: ignore[attr-defined]  # at 1, a step changes nothing
        self.optimiser.step()
        self._restore_statistics(statistics, spoiled)
        if self.learner.twin is not None:
            follow(self.learner.twin, self.learner.encoder, self.momentum)
        for numbers, q, k in keys:
            self._remember(numbers, q, k, active, spoiled)
        return torch.where(spoiled, math.nan, losses)

    def _add_gradient(
        self, active: tuple[str, ...], query: Tensor, key: Tensor, index: Tensor, share: float, batch: Tensor
    ) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """Of some images of a step, a ``share`` of it: add up the gradient. Returns the losses L, L_ID, L_CD, and what
        the memories are to remember: q and k. ``batch``: the images of the step on all ranks."""
        if self.settings.symmetric:  # each view is query once and key once
            query, key, index = torch.cat([query, key]), torch.cat([key, query]), index.repeat(2)
        with self.precision:
            # The twin needs nothing of the encoder and has no gradient: it runs beside it. Not where either waits for
            # other processes, which would have to meet them in the same order.
            with self.engine.beside(self.settings.contrast == "moco" and self.group.alone) as meet:
                k = self._keys(key, index, len(batch))
            try:
                h, q = self._encode(query)
            finally:
                meet()
        # The sums over the batch stay outside of what is compiled: its compiler would put each of them, with all that
        # comes before it, into a single block.
        l_ids, pulls, l_cds = (of_samples.sum(1) for of_samples in self._losses(active, index, h, q, k))
        if not self.group.alone:
            l_ids, pulls, l_cds = self._shares_of_batch(active, batch, l_ids, pulls, l_cds)
        l_ids = l_ids + pulls
        loss = core.overall_loss(l_ids, l_cds).sum()
        if self.settings.task_sum == "mean":
            loss = loss / len(l_ids)
        loss = loss * share
        loss.backward()
        losses = torch.stack([loss, l_ids.mean() * share, l_cds.mean() * share]).detach()
        return losses, {name: each.detach() for name, each in q.items()}, k

    def _shares_of_batch(
        self, active: tuple[str, ...], index: Tensor, l_ids: Tensor, pulls: Tensor, l_cds: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Of each task's losses, which are means over this rank's part of the batch ``index``, the share in those over
        the whole: their sums over the ranks."""
        part = self._part(index)
        mean = torch.full_like(l_ids, len(part) / len(index))
        weighted = mean.clone()
        if self.settings.hard_samples and active:
            shares = [self.learner.tasks[name].s for name in active]
            weighted[-len(active) :] = torch.stack([s[part].sum() / s[index].sum() for s in shares])
        return l_ids * weighted, pulls * mean, l_cds * mean

    @staticmethod
    def _spoiled(gradients: list[Tensor], losses: Tensor) -> Tensor:
        """Whether a loss or the gradient is not finite: a boolean on the device."""
        return ~(nn.utils.get_total_norm(gradients) + losses.sum()).isfinite()

    @torch.no_grad()
    def _restore_statistics(self, before: Tensor, spoiled: Tensor) -> None:
        """Where a step was ``spoiled``, let the networks' statistics be what they were."""
        now = torch.cat([buffer.flatten() for buffer in self._statistics])
        self._set_statistics(torch.where(spoiled, before, now))

    @torch.no_grad()
    def _set_statistics(self, values: Tensor) -> None:
        parts = values.split([buffer.numel() for buffer in self._statistics])
        shaped = [part.view_as(buffer) for part, buffer in zip(parts, self._statistics, strict=True)]
        torch._foreach_copy_(self._statistics, shaped)

    def _sample_losses(
        self, active: tuple[str, ...], index: Tensor, h: Tensor, q: dict[str, Tensor], k: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """L_ID, the pull towards the own cluster, and L_CD of each task and sample (each tasks x n), with the samples'
        weights in the mean."""
        losses = []
        if "instance" in self.settings.tasks or not active:
            l_id = self._instance_task_loss(q, k)
            losses.append((l_id, torch.zeros_like(l_id), torch.zeros_like(l_id)))
        for name in active:
            in_pairs = name != "over" and self._in_pairs(active)
            losses.append(self._cluster_task_losses(self.learner.tasks[name], index, h, q, k, in_pairs))
        l_ids, pulls, l_cds = zip(*losses, strict=True)
        return torch.stack(l_ids), torch.stack(pulls), torch.stack(l_cds)

    def _keys(self, view: Tensor, index: Tensor, n_batch: int) -> dict[str, Tensor]:
        """k for each projection (n x d): the only place where the contrastive methods differ. ``n_batch``: images
        of the step on all ranks."""
        learner = self.learner
        if self.settings.contrast == "simclr":
            return self._encode(view)[1]
        if self.settings.contrast == "instance-memory":
            return dict(zip(learner.encoder.projections, learner.stored_keys[:, index], strict=True))
        assert self._encode_key is not None
        with torch.no_grad():
            if self._local_norms:
                return self._keys_by_others(view, n_batch)
            if self.settings.batch_norm_groups == 1:
                return self._encode_key(view)[1]
            order = dealt(len(view), self.settings.batch_norm_groups, view.device)  # beside others than q was
            back = order.argsort()
            return {name: k[back] for name, k in self._encode_key(view[order])[1].items()}

    def _keys_by_others(self, view: Tensor, n: int) -> dict[str, Tensor]:
        """The keys of this rank's views, made by all ranks: beside others than the queries are."""
        assert self._encode_key is not None
        group = self.group
        order = dealt(n, group.size, view.device)
        views = self._by_image(view)  # an image's views stay together
        k = self._encode_key(self._by_view(self._part(self._gather(views, n)[order])))[1]
        back = order.argsort()
        return {name: self._by_view(self._part(self._gather(self._by_image(x), n)[back])) for name, x in k.items()}

    def _by_image(self, x: Tensor) -> Tensor:
        """n images x their views x ..., of all first views and then all second."""
        return x.unflatten(0, (2 if self.settings.symmetric else 1, -1)).transpose(0, 1)

    def _by_view(self, x: Tensor) -> Tensor:
        """The way back."""
        return x.transpose(0, 1).flatten(0, 1).contiguous(memory_format=_layout_of(x))

    def _instance_task_loss(self, q: dict[str, Tensor], k: dict[str, Tensor]) -> Tensor:
        """L_ID of the instance task, for each sample: every other image is a negative."""
        name, tau, keys = self.learner.instance_projection, self.settings.temperature, self.learner.instance_memory.keys
        bank = core.bank_similarity(q[name], keys, tau)
        loss = core.instance_loss(q[name], k[name], bank, tau)
        if self._seeks_nearest:
            near = core.nearest_key(k[name], keys)
            loss = torch.lerp(loss, core.instance_loss(q[name], near, bank, tau), self.settings.nearest)
        return loss / len(bank)

    @property
    def _seeks_nearest(self) -> bool:
        """Whether instance contrast has nearest keys for positives in the current epoch."""
        settings = self.settings
        return settings.nearest > 0 and self.epoch >= math.floor(settings.nearest_from * settings.n_epochs)

    def _cluster_task_losses(
        self,
        task: ClusterTask,
        index: Tensor,
        h: Tensor,
        q: dict[str, Tensor],
        k: dict[str, Tensor],
        in_pairs: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """L_ID (Eq. 1, 2, 6), the pull towards the own cluster and L_CD (Eq. 3, 4) of one clustering task, for each
        sample. ``in_pairs``: the samples are, and the classifier learns from that too."""
        settings, tau = self.settings, self.settings.temperature
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
        seen = self._classifier_sees(h, q_task)
        logits = task.classifier(seen if settings.classifier_trains_encoder or in_pairs else seen.detach())
        l_cd = core.cluster_loss(logits, core.memory_assignment(bank))
        if in_pairs:
            p = logits.softmax(1)
            total = self.group.sum(F.pad(p.detach(), (0, 1), value=1.0).sum(0))  # with the number of samples
            mean = total[:-1] / total[-1]
            l_cd = l_cd + core.neighbour_loss(logits) + settings.balance * core.imbalance_loss(p, mean)
        return w * l_id, pull / len(y), l_cd / len(y)

    def _classifier_sees(self, h: Tensor, q: Tensor) -> Tensor:
        return classifier_input(h, q, self.settings.classifier_input == "pooled")

    @torch.no_grad()
    def _remember(
        self,
        index: Tensor,
        q: dict[str, Tensor],
        k: dict[str, Tensor],
        active: tuple[str, ...],
        spoiled: Tensor,
    ) -> None:
        """After the backward pass: write the keys of all ranks into the memories, but for those of a ``spoiled`` step.
        ``index``: whose they are, on all ranks."""
        learner = self.learner
        if self.settings.contrast == "instance-memory":
            m, n_views = self.momentum, 2 if self.settings.symmetric else 1
            # An image that is met twice, as a neighbour of another, keeps the last of its vectors: writes of different
            # values to one place have no order.
            position = torch.arange(1, 1 + len(index), device=index.device)
            last = ((index == index[:, None]) * position).argmax(1)
            for i, name in enumerate(k):  # one vector an image, however many of its views were met
                met = q[name].unflatten(0, (n_views, -1)).mean(0)
                k[name] = self._gather(F.normalize(m * k[name][: len(met)] + (1 - m) * met, dim=1), len(index))
                learner.stored_keys[i, index] = torch.where(spoiled, learner.stored_keys[i, index], k[name][last])
        else:
            k = self._keys_of_all(k, len(index))
            index = index.repeat(2) if self.settings.symmetric else index
        self._enqueue(learner.instance_memory, k[learner.instance_projection], torch.zeros_like(index), spoiled)
        for name in active:
            task = learner.tasks[name]
            self._enqueue(task.memory, k[task.projection], task.y[index], spoiled)

    def _keys_of_all(self, k: dict[str, Tensor], n: int) -> dict[str, Tensor]:
        """The keys of the whole batch of ``n`` images, as one process would have them."""
        if self.group.alone:
            return k
        together = torch.stack([self._by_image(x) for x in k.values()], dim=1)  # n x projections x views x d
        return dict(zip(k, map(self._by_view, self._gather(together, n).unbind(1)), strict=True))

    # ---- label refresh ---------------------------------------------------------------------------

    def _agree(self) -> None:
        """At the end of an epoch's steps: let all ranks have the same network, and make sure that they do."""
        group = self.group
        if group.alone:
            return
        if self._local_norms:  # their running statistics are of each rank's own images
            group.average([x for name, x in self.learner.named_buffers() if ".running_" in name])
        group.check_same(
            checksum(self.trained),
            f"The weights after epoch {self.epoch + 1}",
            "Let all machines have the same GPUs and versions of torch, then go on from the last checkpoint.",
        )

    def _renew_labels_of_all(self, h: Tensor, q: dict[str, Tensor]) -> tuple[dict[str, Any], Tensor]:
        """``_renew_labels`` from the features that every rank has of its part of the images. The first rank does it,
        since sums on GPUs are not the same to the bit; the others take over what it finds, but for p."""
        group = self.group
        if group.alone:
            return self._renew_labels(h, q)
        h = group.gather_to_first(h, self.n_images)
        q = {name: group.gather_to_first(x, self.n_images) for name, x in q.items()}
        figures, p = self._renew_labels(h, q) if group.first else ({}, h[:0])
        found = [*self.learner.task_modules.parameters(), *self.learner.task_modules.buffers()]
        if self._finds_neighbours():
            found.append(self.learner.neighbours)
        group.share(found)
        return group.from_first(lambda: figures), p

    @torch.no_grad()
    def _renew_labels(self, h: Tensor, q: dict[str, Tensor]) -> tuple[dict[str, Any], Tensor]:
        """Renew y and s of every task from the features of all images (Eq. 5, 6).

        The figures are those of the target task, or of "over" while that is all there is."""
        tasks = self.learner.tasks
        if self._finds_neighbours():
            self.learner.neighbours.copy_(nearest_neighbours(centred(h), self.learner.neighbours.shape[1]))
        over_only = not self.instance_alone and not self.learns(tasks["cluster"])
        figures = dict.fromkeys(metrics.HEALTH, math.nan)
        for name, task in tasks.items():
            q_task = q[task.projection]
            seen = self._classifier_sees(h, q_task)
            y = self._next_labels(task, seen, h, q_task)
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

    def _next_labels(self, task: ClusterTask, seen: Tensor, h: Tensor, q: Tensor) -> Tensor:
        """The labels that the next epoch learns from. ``seen``: what the classifier sees, of h or q."""
        settings, C = self.settings, task.n_clusters
        age = self.epoch - task.plan.begins
        if self.instance_alone:
            task.classifier.choose_nearest(seen, self._same_ids(k_means(seen, C)[0], task))
            y = labels.most_likely(task.classifier(seen))
        elif not self.learns(task):
            return task.y
        elif self._is_parted(task, self.epoch):
            y = self._same_ids(spectral_partition(centred(h), C, settings.temperature), task)
            task.classifier.start_from(seen, y)
        elif self.clusters_anew and task is self.learner.tasks.get("over"):
            # One start is enough: that the labels differ a little from epoch to epoch is what they are renewed for.
            return self._same_ids(k_means(F.normalize(h, dim=1), C, restarts=1)[0], task)
        else:
            y = labels.most_likely(task.classifier(seen)) if settings.online else self._memory_labels(task, q)
            return labels.merge_and_split(y, q, C, settings.min_cluster_size * self.n_images / C)
        if age <= 0:  # at the start, and at every refresh of instance contrast alone, the memory is filled anew
            for some in torch.randperm(len(q), device=q.device).split(INFERENCE_BATCH):
                task.memory.enqueue(q[some], y[some])
        return y

    def renews_labels(self, epoch: int) -> bool:
        """Whether anything learns from labels after ``epoch`` epochs, or would: then they come from all images."""
        return self.instance_alone or any(task.plan.learns_in(epoch) for task in self.learner.tasks.values())

    def _figures_of_some(self, q: dict[str, Tensor]) -> dict[str, Any]:
        """The figures of an epoch after which no labels are renewed, by ``features_of_some``."""
        some = self.group.gather(q[self.learner.tasks["cluster"].projection], len(self._some_images()))
        return {"spread": metrics.spread(some)} | dict.fromkeys(metrics.HEALTH, math.nan)

    def _finds_neighbours(self) -> bool:
        """Whether this renewal finds the pairs to learn from: once, when the clusters start."""
        return self.settings.learns_pairs and self._is_parted(self.learner.tasks["cluster"], self.epoch)

    @staticmethod
    def _is_parted(task: ClusterTask, epoch: int) -> bool:
        """Whether the labels after ``epoch`` epochs come from a partition of the features: at the start of a task."""
        return epoch == task.plan.begins and task.plan.learns_in(epoch)

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

    @property
    def clusters_anew(self) -> bool:
        """Whether the labels of the task "over" come from k-means after every epoch."""
        return "over" in self.learner.tasks and self.settings.over_by == "k-means"

    @property
    def keeps_pooled(self) -> bool:
        """Whether the label refresh needs the pooled features h of all images."""
        if self.settings.classifier_input == "pooled":
            return True
        return not self.instance_alone and any(task.plan.begins > 0 for task in self.learner.tasks.values())

    def features(self, on_part: Callable[[], None] = lambda: None) -> tuple[Tensor, dict[str, Tensor]]:
        """h (N x D) and q of each projection (N x d) of this rank's part of all images, without augmentation. Where
        nothing needs h, that has no columns: it would take four times the memory of q.

        on_part: called after each batch; an exception that is raised there changes nothing."""
        return self._features_of(torch.arange(*self.group.bounds(self.n_images), device=self.device), on_part)

    def features_of_some(self, on_part: Callable[[], None] = lambda: None) -> tuple[Tensor, dict[str, Tensor]]:
        """The same of this rank's part of ``_some_images``."""
        return self._features_of(self.group.part(self._some_images()), on_part)

    def _some_images(self) -> Tensor:
        """The numbers of a few images, which are spread over all."""
        return torch.arange(0, self.n_images, math.ceil(self.n_images / SOME_IMAGES), device=self.device)

    @torch.no_grad()
    def _features_of(self, numbers: Tensor, on_part: Callable[[], None]) -> tuple[Tensor, dict[str, Tensor]]:
        while True:
            try:
                return self._features(numbers, on_part)
            except torch.OutOfMemoryError:
                if self.inference_batch == 1:
                    raise
            self.inference_batch //= 2
            images = plural(self.inference_batch, "image")
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            self.on_notice(f"The device is out of memory: labels are now renewed by batches of {images}.")

    def _features(self, numbers: Tensor, on_part: Callable[[], None]) -> tuple[Tensor, dict[str, Tensor]]:
        encode = self.learner.encoder.eval().folded() or self._encode
        wholes: list[Tensor] = []  # of h and each q, filled part by part: to put parts together takes twice the memory
        done = 0
        for part in self._in_even_batches(numbers):
            with self.precision:
                h, q = encode(self.learner.encoder.at_view_size(in_unit_range(part)))
            found = [h if self.keeps_pooled else h[:, :0], *q.values()]
            wholes = wholes or [x.new_empty(len(numbers), x.shape[1]) for x in found]
            for whole, x in zip(wholes, found, strict=True):
                rows = whole[done : done + len(x)]
                rows.copy_(x[: len(rows)])
            done += len(part)
            on_part()
        return wholes[0], dict(zip(q, wholes[1:], strict=True))

    def _in_even_batches(self, numbers: Tensor) -> Iterator[Tensor]:
        """Some images in batches of one size: a compiled network is made for one. After the last image the first of
        them come again."""
        n = min(self.inference_batch, len(numbers))
        filled = math.ceil(len(numbers) / n) * n
        return self.images.batches(numbers[torch.arange(filled, device=self.device) % len(numbers)].split(n))

    # ---- surroundings ----------------------------------------------------------------------------

    def _measure_colours(self) -> None:
        """Let the encoder subtract the mean colour of the images and divide by their deviation."""
        sums = torch.zeros(2, self.image_shape[2], dtype=torch.float64)
        own = self.group.part(torch.arange(self.n_images, device=self.device))
        for part in self.images.batches(own.split(INFERENCE_BATCH)):
            x = part.float() / 255
            sums += torch.stack([x.mean((2, 3)).sum(0), x.square().mean((2, 3)).sum(0)]).cpu()
        mean, square = self.group.sum(sums) / self.n_images
        std = (square - mean**2).clamp(min=0).sqrt().clamp(min=1e-3)
        for encoder in filter(None, (self.learner.encoder, self.learner.twin)):
            encoder.mean.copy_(mean[:, None, None])
            encoder.std.copy_(std[:, None, None])

    # ---- state -----------------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """All tensors that a resumed run needs; with the epoch, the settings and the images it is whole. Within an
        epoch, only where ``run_epoch`` calls ``on_step``."""
        tensors = {f"learner.{name}": value for name, value in self.learner.state_dict().items()}
        for i, parameter in enumerate(self.trained):
            tensors[f"velocity.{i}"] = self.optimiser.state[parameter]["momentum_buffer"]
        tensors["progress"] = torch.tensor([self.step, self.skipped_before, self.parts, self.inference_batch])
        tensors["rate_factor"] = torch.tensor(self.rate_factor, dtype=torch.float64)
        if self.step:
            tensors["losses"] = self.losses
            tensors |= {f"random.{i}": state for i, state in enumerate(random_state(self.device))}
        return tensors

    def is_finite(self) -> bool:
        """Whether the weights are, and the steps since the last look too, so that it is worth to keep this state."""
        try:
            self._skipped_steps()
        except NotFiniteError:  # raised at the next look; who goes back to this state would meet the same steps again
            return False
        return all_finite(self.trained)

    def load_state(self, tensors: dict[str, Tensor], epoch: int, source: Path) -> None:
        """Go on from ``state()`` after ``epoch`` epochs; ``source`` is named where it does not fit."""
        prefix = "learner."
        learner = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
        load_into(self.learner, learner, source)
        velocities = [tensors.get(f"velocity.{i}") for i in range(len(self.trained))]
        n_velocities = sum(name.startswith("velocity.") for name in tensors)
        if n_velocities != len(velocities) or any(
            velocity is None or velocity.shape != parameter.shape
            for velocity, parameter in zip(velocities, self.trained, strict=True)
        ):
            raise DamagedFileError(f"{source} does not hold this run's optimiser state. Restore it, or fit again.")
        for velocity, parameter in zip(velocities, self.trained, strict=True):
            self.optimiser.state[parameter]["momentum_buffer"].copy_(velocity)
        self.epoch = epoch
        self._load_progress(tensors, source)

    def _load_progress(self, tensors: dict[str, Tensor], source: Path) -> None:
        """What ``state()`` holds besides the networks; files of earlier versions lack it, and end with an epoch."""
        progress = tensors.get("progress", torch.tensor([0, 0, 1, INFERENCE_BATCH])).tolist()
        self._random_state = [tensors[f"random.{i}"] for i in range(2) if f"random.{i}" in tensors]
        try:
            step, self.skipped_before, parts, self.inference_batch = map(int, progress)
            if parts < 1 or self.inference_batch < 1 or step < 0:
                raise ValueError(f"progress {progress}")
            if step:
                self.losses = tensors["losses"].reshape(-1, 3).to(self.device)
                if not self._random_state or step > len(self.losses):
                    raise ValueError(f"step {step} of {len(self.losses)}")
            self.rate_factor = float(tensors.get("rate_factor", 1.0))
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise DamagedFileError(f"{source} is damaged ({error!r}). Restore it, or fit again.") from error
        if parts != self.parts:
            self.parts, self._phase = parts, None  # to be recorded anew
        self.step = step

    def take_over(self, history: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Go on as the first rank does, which may have loaded a state. ``history``: its rows, which all are given."""
        if self.group.alone:
            return history
        self.parts = 1  # each rank has a part already
        progress = (self.epoch, self.step, self.skipped_before, self.rate_factor, self.losses.cpu(), self._random_state)
        progress, history = self.group.from_first(lambda: (progress, history))
        self.epoch, self.step, self.skipped_before, self.rate_factor, losses, self._random_state = progress
        self.losses = losses.to(self.device)
        learnt = [value for name, value in self.state().items() if name.startswith(("learner.", "velocity."))]
        self.group.share(learnt)
        return history


def _layout_of(x: Tensor) -> torch.memory_format:
    """Images are laid out channels-last, all else plainly."""
    return torch.channels_last if x.ndim == 5 else torch.contiguous_format


def all_finite(tensors: Iterable[Tensor]) -> bool:
    return bool(torch.stack([tensor.isfinite().all() for tensor in tensors]).all())


def in_unit_range(x: Tensor) -> Tensor:
    """Bytes (n x c x H x W) as floats from 0 to 1."""
    return x.float().div(255).contiguous(memory_format=torch.channels_last)
