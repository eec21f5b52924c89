"""Where tensors are computed: the device, its precision, its random numbers."""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

import numpy as np
import torch

from semclust.errors import InputError


def choose_device(device: str) -> torch.device:
    """The device behind the setting ``device``."""
    if device == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        chosen = torch.device(device)
        torch.zeros(1, device=chosen)
    except (RuntimeError, AssertionError) as error:
        why = str(error).splitlines()[0].partition("Expected one of")[0]  # of all kinds there are
        raise InputError(
            f"device={device!r} cannot be used here{why and f' ({why})'}; expected auto, cpu, cuda or mps."
        ) from error
    return chosen


def computes_in_bfloat16(device: torch.device) -> bool:
    """Whether the device does so itself, and does not only emulate it: then it is up to twice as fast."""
    if device.type == "cpu":
        # Not a public function: without it, as on a CPU without the instructions.
        supported = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
        return torch.backends.mkldnn.is_available() and supported()
    return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)


def precision_on(device: torch.device, asked: str, sound: bool = True) -> Literal["bfloat16", "float32"]:
    """What the setting ``precision`` comes to on the device, which may not compute in bfloat16. ``sound``: whether the
    network is known to be computed rightly in it, and may have it unasked."""
    possible = asked != "float32" and computes_in_bfloat16(device)
    return "bfloat16" if possible and (sound or asked == "bfloat16") else "float32"


def mixed_precision(device: torch.device, precision: str) -> torch.autocast:
    """For convolutions and products, with ``precision`` as ``precision_on`` has it."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bfloat16")


@contextlib.contextmanager
def own_random_numbers(seed: int | None, stream: int, device: torch.device) -> Iterator[None]:
    """Seed torch from (seed, stream) inside the block and restore the caller's random state after it."""
    numbers = int(np.random.SeedSequence([seed or 0, stream]).generate_state(1, np.uint64)[0]) >> 1
    before = random_state(device)
    torch.default_generator.manual_seed(numbers)  # torch.manual_seed would also seed devices not in use here
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(numbers)
    elif device.type == "mps":
        torch.mps.manual_seed(numbers)
    try:
        yield
    finally:
        set_random_state(before, device)


def random_state(device: torch.device) -> list[torch.Tensor]:
    """Where the random numbers of torch and of the device are."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    elif device.type == "mps":
        states.append(torch.mps.get_rng_state())
    return states


def set_random_state(states: list[torch.Tensor], device: torch.device) -> None:
    """Go on where ``random_state`` was taken; of another kind of device only torch's own numbers do."""
    torch.set_rng_state(states[0])
    if device.type == "cuda" and len(states) > 1:
        torch.cuda.set_rng_state(states[1], device)
    elif device.type == "mps" and len(states) > 1:
        torch.mps.set_rng_state(states[1])


def seconds_of(work: Callable[[], Any], device: torch.device) -> float:
    synchronise(device)
    start = time.perf_counter()
    work()
    synchronise(device)
    return time.perf_counter() - start


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
