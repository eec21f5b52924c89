"""The plan of a run, made before it begins: what is learned when, for how long, and from batches of which size."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch

from semclust.config import Settings
from semclust.devices import precision_on
from semclust.distributed import Group
from semclust.errors import InputError
from semclust.families import are_grey, choose_family

EPOCHS = {"drawings": 80, "photographs": 600, "photographs without a GPU": 200}
SHORT = 50  # epochs; runs that are longer have a lower learning rate
LATER_WARMUP = 1  # epochs in which the rate rises where it starts anew, from a network that has learned
STEPS_AN_EPOCH = 36  # at least, by smaller batches where images are few
FEWEST_EPOCHS = 10  # that make sense: fewer leave no epoch or two for each phase of a run
FEWEST_IMAGES = 200  # to learn anything from


@dataclass(frozen=True)
class TaskPlan:
    """When a clustering task learns."""

    n_clusters: int
    begins: int  # epoch from which it learns; from 0 on, its first labels are random
    ends: float = math.inf  # epoch from which it learns no more

    def learns_in(self, epoch: int) -> bool:
        return self.begins <= epoch < self.ends

    def is_parted_after(self, epochs: int) -> bool:
        """Whether the labels then come from a partition of the features: at the start of the task."""
        return epochs == self.begins and self.learns_in(epochs)


def epoch_at(share: float, settings: Settings) -> int:
    """The epoch that begins after a ``share`` of them; only at 0 the first."""
    return max(1, math.floor(share * settings.n_epochs)) if share else 0


def plan_clusters(settings: Settings) -> tuple[int, int]:
    """The epochs (from 0) in which the clusters begin, and the labels that the network gives itself; the number of
    epochs where they never do."""
    never = settings.n_epochs
    if settings.instance_alone:
        return never, never
    begin = epoch_at(settings.cluster_from, settings)
    by_itself = max(1, begin, epoch_at(settings.self_label_from, settings)) if settings.labels_itself else never
    by_itself = min(never, by_itself)
    if begin:  # else from random labels
        begin = max(begin, by_itself - settings.cluster_epochs)
    return begin, by_itself


def why_a_try(settings: Settings, n_images: int) -> str | None:
    """Why such a run cannot tell how good the clusters could be, in words; None where it can."""
    if n_images < FEWEST_IMAGES:
        return f"{n_images} images are too few to learn from: a few hundred are the least, some thousands are better."
    if settings.n_epochs < FEWEST_EPOCHS and settings.cluster_from > 0:
        are = "epoch is" if settings.n_epochs == 1 else "epochs are"
        return (
            f"{settings.n_epochs} {are} too few to tell how good the clusters could be: {FEWEST_EPOCHS} leave one or "
            "two for each phase, and the default has many more."
        )
    return None


def labels_itself_in(settings: Settings, epoch: int) -> bool:
    """Whether the network learns from its own labels in the epoch ``epoch`` (from 0), or did at last.

    From there on its momentum twin, the teacher, tells the clusters: it sees images that are hardly changed, as they
    are in the end. Those that the network itself sees are strongly changed, and its batch norms expect that."""
    begins = plan_clusters(settings)[1]
    return begins < settings.n_epochs and epoch >= begins


def crop_size_in(settings: Settings, epoch: int) -> float:
    """Of the views that the epoch ``epoch`` (from 0) learns from: own labels are of whole images."""
    return 1.0 if labels_itself_in(settings, epoch) else settings.crop_size


def plan_tasks(settings: Settings, n_images: int) -> dict[str, TaskPlan]:
    """How many clusters each task has and when it learns. "cluster" is always there: instance contrast
    alone never trains on it, but it holds the k-means of the features."""
    C = settings.n_clusters
    begins, by_itself = plan_clusters(settings)
    plans = {"cluster": TaskPlan(C, begins)}
    if "under" in settings.tasks and C // 2 > 1:
        plans["under"] = TaskPlan(C // 2, begins)
    n_over = min(settings.over_factor * C, n_images // 8)  # fewer than 8 images are not a cluster to learn from
    if "over" in settings.tasks and n_over > C:
        ends = min(epoch_at(settings.over_until, settings), by_itself)  # own labels are of the others alone
        plans["over"] = TaskPlan(n_over, epoch_at(settings.over_from, settings), ends)
    return plans


@dataclass(frozen=True)
class Phase:
    """What the steps of an epoch learn: another phase is another step to record."""

    tasks: tuple[str, ...]  # the clustering tasks that learn
    nearest: bool  # whether instance contrast has nearest keys for positives, too
    in_pairs: bool  # whether each image is followed by one of its neighbours
    self_labels: bool = False  # whether the network learns from its own labels, and from nothing else

    @property
    def learns(self) -> str:
        """In a word, as metrics.csv has it."""
        if self.self_labels:
            return "own labels"
        return "clusters" if "cluster" in self.tasks else "over-clusters" if self.tasks else "instances"

    @property
    def lot(self) -> int:
        """Images of a batch that stay together where it is dealt out."""
        return 2 if self.in_pairs else 1


def plan_phase(settings: Settings, plans: Mapping[str, TaskPlan], epoch: int) -> Phase:
    """Of the epoch ``epoch`` (from 0), by the plans of the tasks."""
    tasks = tuple(name for name, plan in plans.items() if plan.learns_in(epoch))
    joins = max(1, math.floor(settings.nearest_from * settings.n_epochs))  # in the first epoch there are no keys yet
    nearest = settings.nearest > 0 and epoch >= joins
    if labels_itself_in(settings, epoch):
        return Phase(tasks, nearest=False, in_pairs=False, self_labels=True)
    return Phase(tasks, nearest, in_pairs=settings.learns_pairs and "cluster" in tasks)


def decided(settings: Settings, pixels: np.ndarray, device: torch.device) -> Settings:
    """The same settings for these images (N x H x W x c bytes), with all that follows from their kind and the device:
    the family of views, what the network sees, the precision and, where none are given, its width and the epochs.
    Without an NVIDIA or AMD GPU nobody would wait for as much as photographs need; there, a narrow network for many
    epochs learns more in the same time than a wide one for few."""
    if settings.precision == "auto":
        # On a CPU a user's own network may have what torch computes wrongly in bfloat16: see ``StridedConvolution``.
        sound = device.type != "cpu" or isinstance(settings.backbone, str)
        settings = replace(settings, precision=precision_on(device, "auto", sound))
    if settings.width is None and isinstance(settings.backbone, str):
        settings = replace(settings, width=usual_width(pixels.shape[1:3], device))
    if settings.epochs is not None and settings.augment != "auto" and settings.sees != "auto":
        return settings
    family = choose_family(settings.augment, pixels)
    if settings.augment == "auto":
        settings = replace(settings, augment=family)
    if settings.sees == "auto":
        # A user's own network takes as many channels as the images have.
        in_colours = family == "strokes" and isinstance(settings.backbone, str) and not are_grey(pixels)
        settings = replace(settings, sees="edges" if in_colours else "colours")
    if settings.epochs is not None:
        return settings
    kind = "photographs" if family == "natural" else "drawings"
    if kind == "photographs" and device.type != "cuda":
        kind = "photographs without a GPU"
    return replace(settings, epochs=round(settings.effort * EPOCHS[kind]))


def usual_width(image_size: tuple[int, ...], device: torch.device) -> int:
    """Channels of the first stage for images of this height and width: small ones get by with fewer."""
    return max(16, min(64, min(image_size) ** 2 // 16 // 8 * 8)) if device.type == "cuda" else 16


def usual_batch_size(n_images: int) -> int:
    return max(32, min(512, n_images // STEPS_AN_EPOCH))


def usual_rate(batch_size: int, epochs: int) -> float:
    """The noise of a batch's gradient falls with the root of its size; and the more steps there are, the smaller they
    may be. Rounded as people would write it down."""
    rate = 0.17 * math.sqrt(batch_size / 256) * (SHORT / max(SHORT, epochs)) ** 0.25
    return float(f"{rate:.2g}")


def rate_at(epoch: float, settings: Settings, highest: float) -> float:
    """The learning rate: after a linear rise, a cosine decay from ``highest`` to 0 until the clusters start, and a
    lower one from there on, or two: one until the network learns from its own labels."""
    starts = [0, *plan_clusters(settings), settings.n_epochs]
    start = max(start for start in starts if start <= epoch)
    end = min((end for end in starts if end > epoch), default=start + 1)
    peak, warmup = (settings.cluster_rate, LATER_WARMUP) if start else (1.0, settings.warmup_epochs)
    rise = min(1.0, (epoch - start + 1e-2) / warmup) if warmup else 1.0
    fall = 0.5 * (1 + math.cos(math.pi * (epoch - start) / (end - start)))
    return highest * peak * rise * fall


def plan_batches(settings: Settings, n_images: int) -> tuple[int, int]:
    """Number of batches in an epoch, and of images in each: at most ``batch_size``, but 3 where batches of 2 would
    leave one image alone. An even number where pairs are learned later: of another size, the step would have to be
    compiled once more for them."""
    lot = 2 if settings.learns_pairs else 1
    most = (settings.batch_size or usual_batch_size(n_images)) // lot * lot
    n_batches = min(math.ceil(n_images / most), (n_images + lot - 1) // 2)
    return n_batches, math.ceil(n_images / n_batches / lot) * lot


def check_shares(settings: Settings, n_images: int, group: Group) -> None:
    """Raise InputError where a run cannot be shared by so many processes."""
    if group.alone:
        return
    n = plan_batches(settings, n_images)[1]
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
