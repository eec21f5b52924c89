"""The training loop: joint learning of several tasks, one epoch at a time (Section 3.2).

An epoch is: steps over all images in random order, then the renewal of the labels that the next one learns from. All
that training changes is in ``Training.state()``, and every epoch seeds its own random numbers, so a run can stop after
any step and go on as if it had not.

Several processes (``distributed.Group``) hold the same learner and know the same batches; each works on its part of
every batch. What is said of a batch here holds for the part, but for ``index``, the numbers of the whole batch.

Shapes: n batch, N images, c channels, H x W pixels, C clusters.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from semclust import core, metrics
from semclust.augment import Augmentation, RandomView, checked_view, resized, view_size, weak_and_strong
from semclust.config import Settings
from semclust.contrast import Contrast
from semclust.devices import mixed_precision, own_random_numbers, precision_on, random_state, set_random_state
from semclust.distributed import ALONE, Group, checksum, synchronise_batch_norm
from semclust.engine import Engine, fast_kernels
from semclust.errors import DamagedFileError, NotFiniteError
from semclust.inference import INFERENCE_BATCH, Inference
from semclust.learner import Learner
from semclust.loader import choose_loader
from semclust.losses import sample_losses, shares_of_batch
from semclust.model import channels_last, classifier_input, in_unit_range
from semclust.plan import (
    Phase,
    crop_size_in,
    decided,
    labels_itself_in,
    plan_batches,
    plan_clusters,
    plan_phase,
    plan_tasks,
    rate_at,
    usual_rate,
)
from semclust.refresh import has_clusters, renew_labels, renewed, start_self_labels
from semclust.storage import load_into

SGD_MOMENTUM = 0.9
PLAIN_IMAGES_A_SECOND = 8_000  # of a GPU without compiling, about: how far a budget of time reaches
SKIPPED_IN_A_ROW = 3  # steps that were not finite, after which a run does not go on as it is
SCORED_IMAGES = 4096  # at most, whose views tell how far an epoch's clusters can be trusted
SOME_IMAGES = 512  # about, of which features tell how the network is doing while they are needed for nothing else
LOOK_EVERY = 100  # steps, for such: to look is to wait for the device

Keys = tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]  # numbers of images, their q and their k


class Training:
    """A run in progress. ``run_epoch`` until ``epoch == settings.n_epochs``."""

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
        settings = decided(settings, pixels, device)
        possible = group.all_true(precision_on(device, settings.precision) == "bfloat16")  # the same for all of a batch
        if settings.precision == "bfloat16" and not possible:
            where = f"this device ({device})" if group.alone else "some process's device"
            on_notice(
                f"precision=bfloat16, in which {where} does not compute: the fit goes on in float32, and ends in other "
                "bytes than where it does. A fit that begins with precision=float32 is in float32 everywhere."
            )
            settings = replace(settings, precision="float32")
        self.settings, self.device, self.augmentation, self.group = settings, device, augmentation, group
        self.on_notice = on_notice
        self.epoch = self.step = 0  # whole epochs, and steps of the next one, that are done
        self.losses = torch.zeros(0, 3)  # of those steps: L, L_ID, L_CD
        self.skipped_before = 0  # steps in a row, up to the beginning of this epoch
        self.rate_factor = 1.0  # what the learning rate was lowered by
        self.parts = 1  # in which a step goes through the network, where a GPU has too little memory
        self._random_state: list[Tensor] = []  # to go on from within an epoch
        self.n_images, self.image_shape = len(pixels), pixels.shape[1:]
        self.images = choose_loader(pixels, device, settings.images_on)
        self.n_batches, self.batch_size = plan_batches(settings, self.n_images)
        with own_random_numbers(settings.random_state, 0, device):
            self.learner = Learner(settings, self.image_shape, self.n_images)
        self._local_norms = not group.alone and settings.batch_norm == "local"
        if not group.alone and not self._local_norms:
            synchronise_batch_norm(self.learner, group)
        channels_last(self.learner.to(device))
        self.precision = mixed_precision(device, settings.precision)
        self._measure_colours()
        learning = [*self.learner.encoder.parameters(), *self.learner.task_modules.parameters()]
        self.trained = [parameter for parameter in learning if parameter.requires_grad]  # teachers follow
        self.weak, self.strong = weak_and_strong(settings.augment)
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
        self._recorded: Phase | None = None  # what the recorded step learns
        self._prepare_engine()

    def _prepare_engine(self) -> None:
        """What calls the networks, compiled where the engine compiles."""
        self._view = self.engine.compiled(self._two_views)
        self._encode = self.engine.compiled(self.learner.encoder)
        self._sample_losses = self.engine.compiled(sample_losses)
        self.contrast = Contrast(self.learner, self.settings, self.group, self.engine, self._encode)
        self.inference = Inference(self.images, self.settings.precision, self.on_notice, self.device)

    def set_epochs(self, epochs: int) -> None:
        """Plan the run anew, before it begins, for another number of epochs."""
        self.settings = replace(self.settings, epochs=epochs)
        for name, plan in plan_tasks(self.settings, self.n_images).items():
            self.learner.tasks[name].plan = plan

    @property
    def phase(self) -> Phase:
        """What the steps of the current epoch learn."""
        return self.phase_of(self.epoch)

    def phase_of(self, epoch: int) -> Phase:
        plans = {name: task.plan for name, task in self.learner.tasks.items()}
        return plan_phase(self.settings, plans, epoch)

    def kind_of_epoch(self, epoch: int) -> tuple[str, str]:
        """What an epoch (from 0) learns, and which labels it takes from a partition at its end, as names of tasks; or
        that it is the last before the network labels itself. Epochs of one kind take the same time."""
        phase = self.phase_of(epoch)
        learned = [*phase.tasks, *(["nearest"] if phase.nearest else []), *(["itself"] if phase.self_labels else [])]
        parted = [name for name, task in self.learner.tasks.items() if task.plan.is_parted_after(epoch + 1)]
        parted += ["itself"] if self.starts_self_labels(epoch + 1) else []
        return " ".join(learned), "" if self.settings.instance_alone else " ".join(parted)

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
            row: dict[str, Any] = {"epoch": self.epoch + 1, "learns": self.phase.learns}
            row |= self._steps(on_step, share)
            self._agree()
            renews = self.renews_labels(self.epoch + 1)
            h, q = (self.features if renews else self.features_of_some)(lambda: on_step(0))
            scored = self.scores_clusters(self.epoch + 1)
            of_views = self._features_of_views(lambda: on_step(0)) if scored else None
            if not self.group.all_true(all_finite([h, *q.values(), *self.trained])):
                raise self._not_finite("Weights or features were not finite after the last step")
            self.skipped_before = self._skipped_steps()[1]  # only now: until here the steps may be counted once more
            self.epoch, self.step = self.epoch + 1, 0
            figures, p = self._renew_labels_of_all(h, q) if renews else (self._figures_of_some(q), h[:0])
            del h, q
            if of_views is not None:
                figures |= self._across_views(p, *of_views)
            if self.starts_self_labels(self.epoch):
                self._start_self_labels()
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
            for x in self.images.batches(self.group.part(order[self.step :], 1, self.phase.lot).unbind()):
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
            self._steps(lambda n_images: None, 1.0 if n is None else n / self.n_batches)
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
        # What a network keeps besides its weights, such as the means of batch norm, in training and in its twin.
        kept = [*self.learner.encoder.buffers(), *(self.learner.twin.buffers() if self.learner.twin else [])]
        self._statistics = [buffer for buffer in kept if buffer.is_floating_point()]
        if self._recorded != self.phase:
            self._recorded = self.phase
            self._learn = self.engine.recorded(functools.partial(self._learn_from, self.phase))

    def _order(self) -> Tensor:
        """The images of each step (steps x n): all of them in random order. Every batch has the same size, as a
        recorded step needs it; to fill the last one, the first few images come once more. Where pairs are learned, half
        of them, each followed by one of its neighbours."""
        n_batches, n = self.n_batches, self.batch_size
        order = torch.randperm(self.n_images, device=self.device)
        order = torch.cat([order, order[: n_batches * n - self.n_images]]).view(n_batches, n)
        if not self.phase.in_pairs:
            return order
        order = order[:, : n // 2]
        which = torch.randint(self.learner.neighbours.shape[1], order.shape, device=self.device)
        return torch.stack([order, self.learner.neighbours[order, which].long()], dim=2).flatten(1)

    def _not_finite(self, what: str) -> NotFiniteError:
        return NotFiniteError(f"{what} of epoch {self.epoch + 1}.")

    @property
    def peak_rate(self) -> float:
        rate = self.settings.learning_rate
        return usual_rate(self.batch_size, self.settings.n_epochs) if rate is None else rate

    def learning_rate(self, epoch: float) -> float:
        """After so many epochs, of which the last may be a part."""
        return rate_at(epoch, self.settings, self.rate_factor * self.peak_rate)

    def _step(self, x: Tensor, index: Tensor, rate: float) -> Tensor:
        """One optimiser step on the batch ``index``: L, L_ID, L_CD. x: its images (n x c x H x W bytes)."""
        for group in self.optimiser.param_groups:
            group["lr"].fill_(rate)
        # Views are made outside of what is recorded: they draw random numbers, and may be the user's own code.
        first, second = (self.strong, self.weak) if self.phase.self_labels else (self.augmentation,) * 2
        if isinstance(first, RandomView) and isinstance(second, RandomView):
            u = torch.rand(2, len(index), max(first.numbers, second.numbers), device=x.device)  # of the whole batch
            views = self._view(first, second, x, self.group.part(u, 1, self.phase.lot))
        else:
            x = in_unit_range(x)
            with self._numbers_of_rank():
                views = torch.cat([checked_view(view(x), x) for view in (first, second)])
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
        self._recorded = None  # to be recorded anew
        self._begin_steps()
        self.on_notice(
            f"The device is out of memory: each step of {n} images now goes in {self.parts} parts, whose gradients are "
            "added up. Batch norm, the weights of hard samples and the evenness of clusters see one part at a time. "
            f"A batch_size of {n // 2}, or a smaller image_size, would do without."
        )

    @staticmethod
    def _two_views(first: RandomView, second: RandomView, x: Tensor, u: Tensor) -> Tensor:
        """2n views of n images, by the random numbers u (2 x n x as many as needed)."""
        x = in_unit_range(x)
        if first is second:
            return first.by(torch.cat([x, x]), u.flatten(0, 1))
        return torch.cat([view.by(x, own[:, : view.numbers]) for view, own in zip((first, second), u, strict=True)])

    def _learn_from(self, phase: Phase, views: Tensor, index: Tensor) -> Tensor:
        """Learn the tasks of ``phase`` from two views of each image, the first n and the second n.

        Whether all is finite is decided on the device, which the host does not wait for; if not, nothing is learned
        and the losses are NaN."""
        statistics = torch.cat([buffer.flatten() for buffer in self._statistics])
        self.optimiser.zero_grad()
        losses = torch.zeros(3, device=self.device)
        keys: list[Keys] = []
        own = self.group.part(index, at_once=phase.lot)
        in_lots = (x.unflatten(0, (-1, phase.lot)).tensor_split(self.parts) for x in (*views.chunk(2), own))
        split = ([part.flatten(0, 1) for part in parts] for parts in in_lots)
        try:
            for query, key, some in zip(*split, strict=True):
                of_part, q, k = self._add_gradient(phase, query, key, some, len(some) / len(own), index)
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
        self.contrast.follow(phase)
        for numbers, q, k in keys:
            self.contrast.remember(phase, numbers, q, k, spoiled)
        return torch.where(spoiled, math.nan, losses)

    def _add_gradient(
        self, phase: Phase, query: Tensor, key: Tensor, index: Tensor, share: float, batch: Tensor
    ) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """Of some images of a step, a ``share`` of it: add up the gradient. Returns the losses L, L_ID, L_CD, and what
        the memories are to remember: q and k. ``batch``: the images of the step on all ranks."""
        if self.settings.symmetric and not phase.self_labels:  # each view is query once and key once
            query, key, index = torch.cat([query, key]), torch.cat([key, query]), index.repeat(2)
        with self.precision:
            # The twin needs nothing of the encoder and has no gradient: it runs beside it. Not where either waits for
            # other processes, which would have to meet them in the same order.
            with self.engine.beside(self.contrast.by_twin(phase) and self.group.alone) as meet:
                h_key, k = self.contrast.keys(phase, key, index, len(batch))
            try:
                h, q = self._encode(query)
            finally:
                meet()
        # The sums over the batch stay outside of what is compiled: its compiler would put each of them, with all that
        # comes before it, into a single block.
        of_samples = self._sample_losses(self.learner, self.settings, self.group, phase, index, h, q, h_key, k)
        l_ids, pulls, l_cds = (each.sum(1) for each in of_samples)
        if not self.group.alone:
            for_l_id, for_others = shares_of_batch(self.learner, self.settings, self.group, phase, batch, len(l_ids))
            l_ids, pulls, l_cds = l_ids * for_l_id, pulls * for_others, l_cds * for_others
        l_ids = l_ids + pulls
        loss = core.overall_loss(l_ids, l_cds).sum()
        if self.settings.task_sum == "mean":
            loss = loss / len(l_ids)
        loss = loss * share
        loss.backward()
        losses = torch.stack([loss, l_ids.mean() * share, l_cds.mean() * share]).detach()
        return losses, {name: each.detach() for name, each in q.items()}, k

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
        h, q = self._gathered_to_first(h, q)
        figures, p = self._renew_labels(h, q) if group.first else ({}, h[:0])
        group.share(renewed(self.learner, self.settings, self.epoch))
        return group.from_first(lambda: figures), p

    def _renew_labels(self, h: Tensor, q: dict[str, Tensor]) -> tuple[dict[str, Any], Tensor]:
        """Of all tasks, from the features of all images; other methods renew theirs."""
        return renew_labels(self.learner, self.settings, self.epoch, h, q)

    def starts_self_labels(self, epoch: int) -> bool:
        """Whether the network learns from its own labels from the epoch ``epoch`` (from 0) on."""
        return epoch == plan_clusters(self.settings)[1] < self.settings.n_epochs

    def _start_self_labels(self) -> None:
        """From features at the size that images are looked at from now on. Nothing interrupts it: until its end the
        state is not whole."""
        self.contrast.begin_self_labels()
        h, q = self._gathered_to_first(*self.features())
        if self.group.first:
            start_self_labels(self.learner, self.settings, h, q)
        if not self.group.alone:
            self.group.share(renewed(self.learner, self.settings, self.epoch))

    def _gathered_to_first(self, h: Tensor, q: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """The features of all images, on the first rank."""
        gather = functools.partial(self.group.gather_to_first, n=self.n_images)
        return gather(h), {name: gather(x) for name, x in q.items()}

    def renews_labels(self, epoch: int) -> bool:
        """Whether anything learns from labels after ``epoch`` epochs, or would: then they come from all images."""
        return self.settings.instance_alone or any(task.plan.learns_in(epoch) for task in self.learner.tasks.values())

    def scores_clusters(self, epoch: int) -> bool:
        """Whether there are clusters after ``epoch`` epochs that are the result so far, by which to choose an epoch."""
        return has_clusters(self.learner, self.settings, epoch)

    @torch.no_grad()
    def _across_views(self, p: Tensor, h: Tensor, q: dict[str, Tensor]) -> dict[str, float]:
        """How far the clusters of the epoch that has ended (p, N x C) are those of ``_features_of_views``."""
        task = self.learner.tasks["cluster"]
        classifier = task.telling_classifier(labels_itself_in(self.settings, self.epoch - 1))
        pooled = self.settings.classifier_input == "pooled"
        p_view = classifier(classifier_input(h, q[task.projection], pooled)).softmax(1)
        some = self._some_images(SCORED_IMAGES)
        return self.group.from_first(lambda: metrics.across_views(p, some, p_view))

    def _figures_of_some(self, q: dict[str, Tensor]) -> dict[str, Any]:
        """The figures of an epoch after which no labels are renewed, by ``features_of_some``."""
        some = self.group.gather(q[self.learner.tasks["cluster"].projection], len(self._some_images(SOME_IMAGES)))
        return metrics.health_of_features(some)

    @property
    def keeps_pooled(self) -> bool:
        """Whether the label refresh needs the pooled features h of all images."""
        if self.settings.classifier_input == "pooled":
            return True
        if "over" in self.learner.tasks and self.settings.over_by == "k-means":
            return True
        return not self.settings.instance_alone and any(task.plan.begins > 0 for task in self.learner.tasks.values())

    def features(self, on_part: Callable[[], None] = lambda: None) -> tuple[Tensor, dict[str, Tensor]]:
        """h and q of this rank's part of all images, by what tells the clusters in the current epoch, the encoder or
        its twin, at the size for it; see ``Inference.features``."""
        numbers = torch.arange(*self.group.bounds(self.n_images), device=self.device)
        return self._features_of(numbers, self._whole, on_part)

    def features_of_some(self, on_part: Callable[[], None] = lambda: None) -> tuple[Tensor, dict[str, Tensor]]:
        """The same of this rank's part of ``_some_images``."""
        return self._features_of(self.group.part(self._some_images(SOME_IMAGES)), self._whole, on_part)

    def _features_of_views(self, on_part: Callable[[], None] = lambda: None) -> tuple[Tensor, dict[str, Tensor]]:
        """The same of a view of each of ``SCORED_IMAGES``, on the first rank, which alone scores."""
        return self._features_of(self._some_images(SCORED_IMAGES if self.group.first else 1), self._changed, on_part)

    def _some_images(self, n: int) -> Tensor:
        """The numbers of n images or fewer, which are spread over all."""
        return torch.arange(0, self.n_images, math.ceil(self.n_images / n), device=self.device)

    def _whole(self, x: Tensor) -> Tensor:
        """Images (n x c x H x W bytes) as they are looked at in the current epoch."""
        return resized(in_unit_range(x), self.size_for(self.epoch))

    def _changed(self, x: Tensor) -> Tensor:
        """The same of a random view of each, such as the current epoch learns from: by the same numbers in every epoch,
        and of every run, so that scores differ in nothing else. Those of the epoch are left alone."""
        change = self.strong if labels_itself_in(self.settings, self.epoch) else self.augmentation
        with own_random_numbers(0, 0, self.device):
            return resized(change(in_unit_range(x)), self.size_for(self.epoch))

    def _features_of(
        self, numbers: Tensor, look: Callable[[Tensor], Tensor], on_part: Callable[[], None]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        taught = labels_itself_in(self.settings, self.epoch)
        encoder = self.learner.telling_encoder(taught)
        encode = self.contrast.encode_by_twin if taught else self._encode
        assert encode is not None
        return self.inference.features(encoder, encode, numbers, look, self.keeps_pooled, on_part)

    def size_for(self, epoch: int) -> tuple[int, int]:
        """Height and width of the views that the epoch ``epoch`` (from 0) learns from: images without augmentation are
        looked at in this size."""
        return view_size(self.settings.augment, self.image_shape, crop_size_in(self.settings, epoch))

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
        tensors["progress"] = torch.tensor([self.step, self.skipped_before, self.parts, self.inference.batch])
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
        """What ``state()`` holds besides the networks."""
        self._random_state = [tensors[f"random.{i}"] for i in range(2) if f"random.{i}" in tensors]
        try:
            progress = tensors["progress"].tolist()
            step, self.skipped_before, parts, batch = map(int, progress)
            if parts < 1 or batch < 1 or step < 0:
                raise ValueError(f"progress {progress}")
            self.inference.batch = min(self.inference.batch, batch)  # smaller, where memory ran out before
            if step:
                self.losses = tensors["losses"].reshape(-1, 3).to(self.device)
                if not self._random_state or step > len(self.losses):
                    raise ValueError(f"step {step} of {len(self.losses)}")
            self.rate_factor = float(tensors["rate_factor"])
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise DamagedFileError(f"{source} is damaged ({error!r}). Restore it, or fit again.") from error
        if parts != self.parts:
            self.parts, self._recorded = parts, None  # to be recorded anew
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


def all_finite(tensors: Iterable[Tensor]) -> bool:
    return bool(torch.stack([tensor.isfinite().all() for tensor in tensors]).all())
