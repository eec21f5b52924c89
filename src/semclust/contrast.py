"""Where the keys of a step come from and where they are kept: the only place where the contrastive methods differ.

MoCo has a momentum twin of the encoder, SimCLR the encoder itself, instance memory a vector stored for each image.

Shapes: n batch, d representation; q and k are n x d for each projection.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from semclust.backbones import dealt
from semclust.config import Settings
from semclust.core import SemanticMemory
from semclust.distributed import Group
from semclust.engine import Engine
from semclust.learner import Learner
from semclust.model import follow
from semclust.plan import Phase

Encoded = tuple[Tensor, dict[str, Tensor]]  # pooled feature (n x D), and a representation for each projection

MOMENTUM = {"moco": 0.99, "simclr": 0.0, "instance-memory": 0.5}  # of the keys, where none is asked for


class Contrast:
    """The keys of one learner. What is said of a batch holds for this rank's part of it, but for ``n_batch``."""

    def __init__(
        self, learner: Learner, settings: Settings, group: Group, engine: Engine, encode: Callable[[Tensor], Any]
    ):
        """``encode``: the encoder as steps call it."""
        self.learner, self.settings, self.group = learner, settings, group
        self.momentum = MOMENTUM[settings.contrast] if settings.momentum is None else settings.momentum
        self._encode = encode
        self.encode_by_twin = engine.compiled(learner.twin) if learner.twin is not None else None
        self._enqueue = engine.compiled(SemanticMemory.enqueue)

    def keys(self, phase: Phase, view: Tensor, index: Tensor, n_batch: int) -> Encoded:
        """Of the views of the images ``index``: k, and the pooled feature, by which the network labels itself (nothing
        where k is stored). ``n_batch``: images of the step on all ranks."""
        learner, settings = self.learner, self.settings
        if not self.by_twin(phase):
            if settings.contrast == "simclr":
                return self._encode(view)
            stored = learner.stored_keys[:, index]
            return stored.new_empty(len(index), 0), dict(zip(learner.encoder.projections, stored, strict=True))
        assert self.encode_by_twin is not None
        with torch.no_grad():
            if settings.batch_norm == "local" and not self.group.alone:
                return self._keys_by_others(phase, view, n_batch)
            if settings.batch_norm_groups == 1:
                return self.encode_by_twin(view)
            order = dealt(len(view), settings.batch_norm_groups, view.device)  # beside others than q was
            back = order.argsort()
            h, k = self.encode_by_twin(view[order])
            return h[back], {name: x[back] for name, x in k.items()}

    def by_twin(self, phase: Phase) -> bool:
        """Whether the momentum twin makes the keys: whatever the method, a network that learned from labels which it
        has just given itself would soon see one cluster everywhere."""
        return self.settings.contrast == "moco" or phase.self_labels

    def _keys_by_others(self, phase: Phase, view: Tensor, n: int) -> Encoded:
        """What the twin makes of this rank's views, made by all ranks: beside others than the queries are."""
        assert self.encode_by_twin is not None
        group, lot = self.group, phase.lot

        def moved(x: Tensor, order: Tensor) -> Tensor:
            whole = group.gather(self._by_image(phase, x), n, lot)  # an image's views stay together
            return self._by_view(group.part(whole[order], at_once=lot))

        order = dealt(n, group.size, view.device)
        h, k = self.encode_by_twin(moved(view, order))
        back = order.argsort()
        return moved(h, back) if phase.self_labels else h[:, :0], {name: moved(x, back) for name, x in k.items()}

    def begin_self_labels(self) -> None:
        """Before the first epoch that learns from the network's own labels: a twin that nothing needed so far is to be
        what the encoder has become."""
        assert self.learner.twin is not None
        if self.settings.contrast != "moco":
            now = self.learner.encoder.state_dict()
            for name, value in self.learner.twin.state_dict().items():
                value.copy_(now[name])

    def follow(self, phase: Phase) -> None:
        """After the optimiser's step: let the twin follow the encoder, and the teachers their classifiers."""
        if not self.by_twin(phase):
            return
        momentum = self.momentum if self.settings.contrast == "moco" else MOMENTUM["moco"]
        if phase.self_labels:  # the twin is what predicts in the end, and must not be far behind
            momentum = min(momentum, MOMENTUM["moco"])
        assert self.learner.twin is not None
        follow(self.learner.twin, self.learner.encoder, momentum)
        for name in phase.tasks if phase.self_labels else ():
            task = self.learner.tasks[name]
            assert task.teacher is not None
            follow(task.teacher, task.classifier, momentum)

    @torch.no_grad()
    def remember(
        self, phase: Phase, index: Tensor, q: dict[str, Tensor], k: dict[str, Tensor], spoiled: Tensor
    ) -> None:
        """After the backward pass: write the keys of all ranks into the memories, but for those of a ``spoiled`` step.
        ``index``: whose they are, on all ranks."""
        learner, settings = self.learner, self.settings
        if settings.contrast == "instance-memory" and not phase.self_labels:
            m = self.momentum
            # An image that is met twice, as a neighbour of another, keeps the last of its vectors: writes of different
            # values to one place have no order.
            position = torch.arange(1, 1 + len(index), device=index.device)
            last = ((index == index[:, None]) * position).argmax(1)
            for i, name in enumerate(k):  # one vector an image, however many of its views were met
                met = q[name].unflatten(0, (self._n_views(phase), -1)).mean(0)
                mixed = F.normalize(m * k[name][: len(met)] + (1 - m) * met, dim=1)
                k[name] = self.group.gather(mixed, len(index), phase.lot)
                learner.stored_keys[i, index] = torch.where(spoiled, learner.stored_keys[i, index], k[name][last])
        else:
            k = self._keys_of_all(phase, k, len(index))
            index = index.repeat(self._n_views(phase))
        self._enqueue(learner.instance_memory, k[learner.instance_projection], torch.zeros_like(index), spoiled)
        for name in phase.tasks:
            task = learner.tasks[name]
            self._enqueue(task.memory, k[task.projection], task.y[index], spoiled)

    def _keys_of_all(self, phase: Phase, k: dict[str, Tensor], n: int) -> dict[str, Tensor]:
        """The keys of the whole batch of ``n`` images, as one process would have them."""
        if self.group.alone:
            return k
        together = torch.stack([self._by_image(phase, x) for x in k.values()], dim=1)  # n x projections x views x d
        gathered = self.group.gather(together, n, phase.lot)
        return dict(zip(k, map(self._by_view, gathered.unbind(1)), strict=True))

    def _n_views(self, phase: Phase) -> int:
        """Of an image, that are queries and keys."""
        return 2 if self.settings.symmetric and not phase.self_labels else 1

    def _by_image(self, phase: Phase, x: Tensor) -> Tensor:
        """n images x their views x ..., of all first views and then all second."""
        return x.unflatten(0, (self._n_views(phase), -1)).transpose(0, 1)

    def _by_view(self, x: Tensor) -> Tensor:
        """The way back."""
        return x.transpose(0, 1).flatten(0, 1).contiguous(memory_format=_layout_of(x))


def _layout_of(x: Tensor) -> torch.memory_format:
    """Images are laid out channels-last, all else plainly."""
    return torch.channels_last if x.ndim == 5 else torch.contiguous_format
