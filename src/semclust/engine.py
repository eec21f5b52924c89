"""How a step is carried out: plainly, or compiled and recorded as one CUDA graph.

Both are the same computation. A step of small kernels leaves a GPU idle while Python prepares the next one;
a recorded step is launched as a whole. What cannot be compiled or recorded, such as a user's own module that
decides by its values, runs plainly, with a notice.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from semclust.errors import in_short

# Compiling a ResNet takes about a minute and gains about 100 microseconds an image: it pays from there on.
WORTH_COMPILING = 1_000_000  # images seen in a run
PLAIN_STEPS = 3  # before recording: they compile, choose algorithms and allocate what they keep

Step = Callable[..., Tensor]


class Engine:
    """Compiles functions and records steps where that is possible and pays."""

    def __init__(self, device: torch.device, images_seen: float, compile: bool, on_notice: Callable[[str], None]):
        """``images_seen``: in the whole run. ``compile``: whether to, where it pays."""
        self.on_notice = on_notice
        self.second_stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.records = compile and device.type == "cuda"
        self.compiles = self.records and images_seen >= WORTH_COMPILING and can_compile(device)

    def __str__(self) -> str:
        return ("compiled and recorded step" if self.compiles else "recorded step") if self.records else "plain step"

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, compiled at its first call; where that fails, the function itself."""
        if not self.compiles:
            return function
        fast = torch.compile(function, dynamic=False, options={"combo_kernels": True})  # small kernels side by side

        def call(*args: Any) -> Any:
            if not self.compiles:
                return function(*args)
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # of the compiler's, about its own choices
                    return fast(*args)
            except Exception as error:
                self.compiles = False
                result = function(*args)  # an error of the function itself is raised here, in its own words
                self.on_notice(f"This network is not compiled, which makes it slower ({in_short(error)}).")
                return result

        return call

    @contextlib.contextmanager
    def beside(self, possible: bool) -> Iterator[Callable[[], None]]:
        """Where ``possible``, the work in this block runs on the GPU beside what follows it, until the function that is
        given is called. That must be, also after an error: who goes on then, must not overtake this work."""
        stream = self.second_stream
        if stream is None or not possible:
            yield lambda: None
            return
        stream.wait_stream(torch.cuda.current_stream())

        def meet() -> None:
            torch.cuda.current_stream().wait_stream(stream)

        try:
            with torch.cuda.stream(stream):
                yield meet
        except BaseException:
            meet()
            raise

    def recorded(self, step: Step) -> Step:
        """``step``, recorded as a CUDA graph after a few calls; its inputs must keep their shapes. What it reads
        and writes besides must stay where it is in memory, and its result is overwritten by the next call."""
        return RecordedStep(step, self) if self.records else step


class RecordedStep:
    def __init__(self, step: Step, engine: Engine):
        self.step, self.engine = step, engine
        self.graph: torch.cuda.CUDAGraph | None = None
        self.plain_steps = 0

    def __call__(self, *inputs: Tensor) -> Tensor:
        if self.graph is None and self.engine.records and self.plain_steps >= PLAIN_STEPS:
            self._record(inputs)
        if self.graph is None:
            self.plain_steps += 1
            return self._on_side_stream(inputs) if self.engine.records else self.step(*inputs)
        for buffer, value in zip(self.inputs, inputs, strict=True):
            buffer.copy_(value)
        self.graph.replay()
        return self.result

    def _on_side_stream(self, inputs: tuple[Tensor, ...]) -> Tensor:
        """As recording demands of the calls before it: libraries then set up nothing while they are recorded."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            result = self.step(*inputs)
        torch.cuda.current_stream().wait_stream(stream)
        return result

    def _record(self, inputs: tuple[Tensor, ...]) -> None:
        """Recording runs nothing: a failure leaves all as it was."""
        self.inputs = [value.clone() for value in inputs]
        graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
        try:
            with torch.cuda.graph(graph, pool=pool):
                self.result = self.step(*self.inputs)
            self.graph = graph
        except RuntimeError as error:
            torch.cuda.synchronize()
            self.engine.records = False
            # The generator still believes that it is being recorded; a copy of its state does not.
            generator = torch.cuda.default_generators[torch.cuda.current_device()]
            generator.graphsafe_set_state(generator.clone_state())
            give_back(pool)
            self.engine.on_notice(f"The step cannot be recorded, which makes it slower ({in_short(error)}).")


def give_back(pool: Any) -> None:
    """The memory of a recording that failed. torch 2.11 leaves its allocator in the midst of such a one, where it gives
    no memory back and raises at the next attempt to; where torch has ended it, there is nothing to do."""
    device = torch.cuda.current_device()
    with contextlib.suppress(RuntimeError):  # it is not being recorded to
        torch._C._cuda_endAllocateToPool(device, pool)
        torch._C._cuda_releasePool(device, pool)


@contextlib.contextmanager
def fast_kernels(device: torch.device) -> Iterator[None]:
    """Let the libraries try their algorithms once and keep the fastest, and multiply float32 on the matrix units
    (TF32: 10 bits of mantissa, so that a similarity of the memory is off by about 0.005)."""
    if device.type != "cuda":
        yield
        return
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        with torch.backends.cudnn.flags(enabled=True, benchmark=True, deterministic=False, allow_tf32=True):
            yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def can_compile(device: torch.device) -> bool:
    """Whether torch can generate kernels for this GPU here."""
    return find_spec("triton") is not None and torch.cuda.get_device_capability(device) >= (7, 0)
