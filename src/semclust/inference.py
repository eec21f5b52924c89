"""The network as it is over many images: their features, by which labels are renewed.

Shapes: N images, D pooled feature, d representation.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from semclust.devices import mixed_precision
from semclust.errors import plural
from semclust.loader import ImageLoader
from semclust.model import Encoder

INFERENCE_BATCH = 1024  # images at once, where the device has memory enough
CPU_BATCH = 128  # on a CPU: what passes from layer to layer then lies in its caches, which is 1.3 times as fast


def usual_batch(device: torch.device) -> int:
    return CPU_BATCH if device.type == "cpu" else INFERENCE_BATCH


class Inference:
    """Features by encoders whose weights change."""

    def __init__(
        self,
        images: ImageLoader,
        precision: str,
        on_notice: Callable[[str], None],
        device: torch.device,
    ):
        self.images, self.on_notice = images, on_notice
        self.precision, self.folds = mixed_precision(device, precision), precision == "bfloat16"
        self.batch = usual_batch(device)

    @torch.no_grad()
    def features(
        self,
        encoder: Encoder,
        encode: Callable[[Tensor], Any],
        numbers: Tensor,
        look: Callable[[Tensor], Tensor],
        pooled: bool,
        on_part: Callable[[], None],
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """h (N x D) and q of each projection (N x d) of the images ``numbers``. Without ``pooled``, h has
        no columns: it would take four times the memory of q.

        encode: the encoder as steps call it.
        look: from images as bytes to what the encoder sees of them, all of one size.
        on_part: called after each batch; an exception that is raised there changes nothing."""
        while True:
            try:
                encoder.eval()
                fastest = (encoder.folded() if self.folds else None) or encode
                return self._by_batches(fastest, numbers, look, pooled, on_part)
            except torch.OutOfMemoryError:
                if self.batch == 1:
                    raise
            self.batch //= 2
            if numbers.device.type == "cuda":
                torch.cuda.empty_cache()
            self.on_notice(
                f"The device is out of memory: labels are now renewed by batches of {plural(self.batch, 'image')}."
            )

    def _by_batches(
        self,
        encode: Callable[[Tensor], Any],
        numbers: Tensor,
        look: Callable[[Tensor], Tensor],
        pooled: bool,
        on_part: Callable[[], None],
    ) -> tuple[Tensor, dict[str, Tensor]]:
        wholes: list[Tensor] = []  # of h and each q, filled part by part: to put parts together takes twice the memory
        done = 0
        for part in self._in_even_batches(numbers):
            x = look(part)  # in full precision: places in an image would be rounded, too
            with self.precision:
                h, q = encode(x)
            found = [h if pooled else h[:, :0], *q.values()]
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
        n = min(self.batch, len(numbers))
        filled = math.ceil(len(numbers) / n) * n
        return self.images.batches(numbers[torch.arange(filled, device=numbers.device) % len(numbers)].split(n))
