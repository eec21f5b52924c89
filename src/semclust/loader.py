"""Batches of images by their numbers: from the device's own memory where they fit, else streamed into it.

Shapes: N images, n batch, c channels, H x W pixels. Batches are n x c x H x W uint8 on the device,
in channels-last layout; the same memory may be used again for the next one.
"""

import queue
import threading
import warnings
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

SHARE_OF_FREE_MEMORY = 0.5  # that the images may take on a GPU; networks and features need the rest
BUFFERS = 4  # batches on their way to the device at once

Buffer = tuple[Tensor, torch.cuda.Event | None]  # the event: when the device has fetched what it held


class Resident:
    """All images lie on the device. On a CPU they stay where they are: an array, or a file mapped into memory."""

    def __init__(self, pixels: np.ndarray, device: torch.device):
        """``pixels``: N x H x W x c, uint8."""
        self.pixels = as_tensor(pixels).to(device)

    def __str__(self) -> str:
        return f"images on {self.pixels.device}"

    def batches(self, numbers: Sequence[Tensor]) -> Iterator[Tensor]:
        """The images of each of ``numbers`` (n, on the device)."""
        return (self.pixels[index].permute(0, 3, 1, 2) for index in numbers)


class Streamed:
    """The images stay in the host's memory or on its disk; a thread gathers the next batches while the
    device computes, in pinned memory, from which the device fetches them by itself."""

    def __init__(self, pixels: np.ndarray, device: torch.device):
        """``pixels``: N x H x W x c, uint8."""
        self.pixels, self.device = as_tensor(pixels), device

    def __str__(self) -> str:
        return f"images streamed to {self.device}"

    def batches(self, numbers: Sequence[Tensor]) -> Iterator[Tensor]:
        """The images of each of ``numbers`` (n, on any device)."""
        pinned = self.device.type == "cuda"
        shape = max(len(index) for index in numbers), *self.pixels.shape[1:]
        on_host = [index.cpu() for index in numbers]
        free: queue.Queue[Buffer | None] = queue.Queue()
        for _ in range(BUFFERS):
            free.put((torch.empty(shape, dtype=torch.uint8, pin_memory=pinned), None))
        ready: queue.Queue[Tensor | BaseException] = queue.Queue()

        def gather() -> None:
            try:
                for index in on_host:
                    taken = free.get()
                    if taken is None:
                        return
                    buffer, fetched = taken
                    if fetched is not None:
                        fetched.synchronize()
                    torch.index_select(self.pixels, 0, index, out=buffer[: len(index)])
                    ready.put(buffer)
            except BaseException as error:  # to be raised where the batch is awaited
                ready.put(error)

        thread = threading.Thread(target=gather, name="semclust-loader", daemon=True)
        thread.start()
        try:
            for index in on_host:
                buffer = ready.get()
                if isinstance(buffer, BaseException):
                    raise buffer
                batch = buffer[: len(index)].to(self.device, non_blocking=True, copy=True)
                free.put((buffer, torch.cuda.current_stream(self.device).record_event() if pinned else None))
                yield batch.permute(0, 3, 1, 2)
        finally:
            free.put(None)  # wakes the thread where the loop was left early
            thread.join()


ImageLoader = Resident | Streamed


def choose_loader(pixels: np.ndarray, device: torch.device, images_on: str) -> ImageLoader:
    """``images_on``: "device", "host", or "auto": the device where they take at most half of its free memory."""
    if images_on == "auto":
        fits = device.type != "cuda" or pixels.nbytes <= SHARE_OF_FREE_MEMORY * torch.cuda.mem_get_info(device)[0]
        images_on = "device" if fits else "host"
    return (Resident if images_on == "device" else Streamed)(pixels, device)


def as_tensor(pixels: np.ndarray) -> Tensor:
    """The same memory as a tensor."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable.*")  # nothing here writes to it
        return torch.from_numpy(np.ascontiguousarray(pixels))
