"""Several processes that fit or predict together, started by torchrun: who there is, and what they tell each other.

torchrun --nproc-per-node 2 -m semclust fit photos/ -k 20

Every process (a rank) runs the same program. All of them draw the same random numbers and form the same batches, of
which each works on its own part; what depends on the whole batch is put together again here. So the result is that of
one process, but for rounding. Where there is one process only, nothing here does anything.

Tensors on a GPU travel by NCCL, all others by gloo.
"""

import contextlib
import hashlib
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before there is a group: see joined
from torch import Tensor, nn

from semclust.devices import choose_device
from semclust.errors import GroupError, InputError, SemclustError, in_short, plural

# Decoding the images or a partition of many may take one rank hours while the others wait. That a rank has died is
# noticed by torchrun, which ends or restarts the group, and not by the clock.
PATIENCE = timedelta(days=1)
TOLD = "semclust/told"  # counts those who want to tell the user of an error
LET_FIRST_SPEAK = 1.0  # seconds that others wait before they tell of one: the first rank knows more
NO_JOB = ("", "none")  # torchrun's id where the user gave none

Value = TypeVar("Value")


@dataclass(frozen=True)
class Group:
    """The processes that work together, as one of them sees it."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0  # on this machine
    local_size: int = 1

    @property
    def alone(self) -> bool:
        return self.size == 1

    @property
    def first(self) -> bool:
        """Whether this is the one rank that writes and speaks."""
        return self.rank == 0

    def __str__(self) -> str:
        return "one process" if self.alone else f"{self.size} processes"

    def device(self, device: str) -> torch.device:
        """The device behind the setting ``device``: of several GPUs, each rank of a machine has its own."""
        chosen = choose_device(device)
        if self.alone or chosen.type == "cpu":
            return chosen
        if chosen.type != "cuda" or chosen.index is not None:
            raise InputError(
                f"device={device!r} with {self}: expected auto, cpu or cuda, of which each process takes one."
            )
        n_gpus = torch.cuda.device_count()
        if self.local_size > n_gpus:
            raise InputError(
                f"{self.local_size} processes on {socket.gethostname()}, which has {plural(n_gpus, 'GPU')}: start at "
                "most one for each (torchrun --nproc-per-node gpu), or say --device cpu."
            )
        own = torch.device("cuda", self.local_rank)
        torch.cuda.set_device(own)
        return own

    # ---- who does what ---------------------------------------------------------------------------

    def bounds(self, n: int, rank: int | None = None, at_once: int = 1) -> tuple[int, int]:
        """First and last-but-one of a rank's part of ``n`` things, which are dealt ``at_once``, in order. The parts
        differ by one such lot at most."""
        rank = self.rank if rank is None else rank
        lots = -(-n // at_once)
        return tuple(min(n, lots * r // self.size * at_once) for r in (rank, rank + 1))  # type: ignore[return-value]

    def part(self, x: Tensor, dim: int = 0, at_once: int = 1) -> Tensor:
        """This rank's part of a tensor that all ranks have. ``at_once``: as in ``bounds``."""
        if self.alone:
            return x
        start, stop = self.bounds(x.shape[dim], at_once=at_once)
        return x.narrow(dim, start, stop - start)

    def from_first(self, make: Callable[[], Value]) -> Value:
        """What ``make`` gives on the first rank, on all ranks; likewise where it raises an error that is foreseen."""
        if self.alone:
            return make()
        outcome: list[Any] = [None, None]
        if self.first:
            try:
                outcome[0] = make()
            except (SemclustError, OSError) as error:
                outcome[1] = error
        with gone():
            dist.broadcast_object_list(outcome, 0)
        value, failure = outcome
        if failure is not None:
            raise failure
        return value

    def in_turn(self, make: Callable[[], Value]) -> Value:
        """``make`` on every rank, on one of each machine before the others, which then find what it left there.
        An error of the former is raised by all."""
        if self.alone:
            return make()
        value, error = None, None
        if self.local_rank == 0:
            value, error = attempt(make)
        self._raise_any(error)
        if self.local_rank != 0:
            value, error = attempt(make)
        self._raise_any(error)
        return value  # type: ignore[return-value]

    def _raise_any(self, error: Exception | None) -> None:
        """Raise the first error that a rank has, on all of them."""
        errors = self.exchange(error)
        if found := next(filter(None, errors), None):
            raise found

    # ---- what they tell each other ---------------------------------------------------------------

    def exchange(self, value: Value) -> list[Value]:
        """The values of all ranks, by rank, on all ranks. For small ones."""
        if self.alone:
            return [value]
        values: list[Any] = [None] * self.size
        with gone():
            dist.all_gather_object(values, value)
        return values

    def to_first(self, value: Value) -> list[Value]:
        """The values of all ranks, by rank, on the first; nothing elsewhere."""
        if self.alone:
            return [value]
        values: list[Any] = [None] * self.size if self.first else []
        with gone():
            dist.gather_object(value, values if self.first else None, 0)
        return values

    def sum(self, x: Tensor) -> Tensor:
        """The sum over all ranks, in place of ``x``."""
        if not self.alone:
            with gone():
                dist.all_reduce(x)
        return x

    def sum_all(self, tensors: Sequence[Tensor]) -> None:
        """The same for many tensors, which travel as one."""
        if self.alone:
            return
        flat = torch.cat([x.reshape(-1) for x in tensors])
        self.sum(flat)
        for x, total in zip(tensors, flat.split([x.numel() for x in tensors]), strict=True):
            x.copy_(total.view_as(x))

    def all_true(self, own: bool) -> bool:
        """Whether it is true on every rank."""
        return own if self.alone else int(self.sum(torch.tensor(int(not own)))) == 0

    def highest(self, own: int) -> int:
        """The highest number of any rank."""
        if self.alone:
            return own
        found = torch.tensor(own)
        with gone():
            dist.all_reduce(found, dist.ReduceOp.MAX)
        return int(found)

    def gather(self, x: Tensor, n: int, at_once: int = 1) -> Tensor:
        """All rows, of which every rank has its ``part`` x, on every rank. ``n``: their number. ``at_once``: as in
        ``bounds``."""
        if self.alone:
            return x
        bounds = [self.bounds(n, rank, at_once) for rank in range(self.size)]
        most = max(stop - start for start, stop in bounds)
        padded = x if len(x) == most else torch.cat([x, x.new_zeros(most - len(x), *x.shape[1:])])
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        with gone():
            dist.all_gather(parts, padded.contiguous())
        return torch.cat([part[: stop - start] for part, (start, stop) in zip(parts, bounds, strict=True)])

    def gather_to_first(self, x: Tensor, n: int, at_once: int = 1) -> Tensor:
        """The same on the first rank alone; elsewhere x without any row. ``at_once``: as in ``bounds``."""
        if self.alone:
            return x
        if not self.first:
            if x.numel():
                with gone():
                    dist.send(x.contiguous(), 0)
            return x[:0]
        whole = x.new_empty(n, *x.shape[1:])
        whole[: len(x)] = x
        with gone():
            for rank in range(1, self.size):
                start, stop = self.bounds(n, rank, at_once)
                if whole[start:stop].numel():
                    dist.recv(whole[start:stop], rank)
        return whole

    def share(self, tensors: Sequence[Tensor]) -> None:
        """Give every rank the first one's values, in place."""
        if self.alone:
            return
        with gone():
            for x in tensors:
                whole = x.detach().contiguous()
                dist.broadcast(whole, 0)
                if whole.data_ptr() != x.data_ptr():
                    x.detach().copy_(whole)

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Give every rank the mean over all ranks, in place."""
        self.sum_all(tensors)
        for x in tensors:
            x.div_(self.size)

    def check_same(self, x: Any, what: str, next_step: str) -> None:
        """Raise an error on all ranks where they do not agree on ``x``."""
        values = self.exchange(x)
        if other := next((rank for rank, value in enumerate(values) if value != values[0]), None):
            raise InputError(
                f"{what}: the processes 0 and {other} differ ({values[0]} and {values[other]}). {next_step}"
            )


ALONE = Group()


def attempt(make: Callable[[], Value]) -> tuple[Value | None, Exception | None]:
    try:
        return make(), None
    except (SemclustError, OSError) as error:
        return None, error


@contextlib.contextmanager
def gone() -> Iterator[None]:
    """Tell where an exchange failed, which means that another process has ended."""
    try:
        yield
    except RuntimeError as error:
        raise GroupError("Another process of this job has ended, so this one cannot go on.") from error


# ---- beginning and end -----------------------------------------------------------------------------------


def from_environment(environ: Mapping[str, str] = os.environ) -> Group:
    """The group that torchrun describes in the environment; one process where it does not."""
    if environ.get("WORLD_SIZE", "1") == "1":
        return ALONE
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in names if name not in environ]
    next_step = "Start it by torchrun, which sets all of them; to use one process, unset WORLD_SIZE."
    if missing:
        raise InputError(
            f"WORLD_SIZE={environ['WORLD_SIZE']} in the environment asks for several processes, but "
            f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing. {next_step}"
        )
    numbers = {}
    for name in names[:4]:
        try:
            numbers[name] = int(environ[name])
        except ValueError:
            raise InputError(f"{name}={environ[name]!r} in the environment: expected a number. {next_step}") from None
    rank, size, local_rank, local_size = numbers.values()
    if not (0 <= rank < size and 0 <= local_rank < local_size <= size):
        told = ", ".join(f"{name}={number}" for name, number in numbers.items())
        raise InputError(f"{told} in the environment: expected ranks below the number of processes. {next_step}")
    return Group(rank, size, local_rank, local_size)


_store: Any = None  # of the group that this process has joined


@contextlib.contextmanager
def joined() -> Iterator[Group]:
    """Meet the other processes; inside the block they can talk.

    Afterwards nothing is left of the group. If torch.distributed.nn, as torch's compiler does, were first imported in
    between, its default arguments would hold the group, and a thread of gloo could still want Python's lock while
    Python is on its way out, which ends the process by SIGABRT."""
    global _store
    group = from_environment()
    if group.alone:
        yield group
        return
    try:
        store, _, _ = next(dist.rendezvous("env://", group.rank, group.size, timeout=PATIENCE))
        _store = dist.PrefixStore(
            f"semclust/{restarts()}", store
        )  # torchrun's still holds what was said before a restart
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
        dist.init_process_group(backend, store=_store, rank=group.rank, world_size=group.size, timeout=PATIENCE)
    except (RuntimeError, ValueError) as error:
        raise GroupError(
            f"The {group} of this job did not meet ({in_short(error)}). Check that MASTER_ADDR:MASTER_PORT "
            f"({os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}) can be reached from every machine."
        ) from error
    yield group
    dist.destroy_process_group()  # after an error the process ends anyway, and this could wait for others
    _store = None


def has_joined() -> bool:
    """Whether this process is in a group with others, and has not left it."""
    return _store is not None


def may_tell() -> bool:
    """Whether this process is the one that tells the user of an error: of all that end by it, one does. Who only
    notices that another has ended comes later than that one, and so does not."""
    first = from_environment_or_alone().first
    if _store is None:
        return first
    if not first:
        time.sleep(LET_FIRST_SPEAK)
    try:
        return _store.add(TOLD, 1) == 1
    except RuntimeError:  # whoever kept the count has gone, and was not silent about it
        return False


def from_environment_or_alone() -> Group:
    try:
        return from_environment()
    except InputError:
        return ALONE


def job_name(environ: Mapping[str, str] = os.environ) -> str | None:
    """What is the same in every restart of one job of torchrun, and in no other: its own --rdzv-id, else the folder
    that torchrun makes for its logs. None outside of torchrun."""
    if "TORCHELASTIC_RUN_ID" not in environ:
        return None
    job = environ["TORCHELASTIC_RUN_ID"]
    if job not in NO_JOB:
        return job
    # .../none_x7w2/attempt_0/0/error.json
    folders = Path(environ.get("TORCHELASTIC_ERROR_FILE", "")).parts[-4:-3]
    return folders[0] if folders and folders[0].startswith("none_") else None


def restarts(environ: Mapping[str, str] = os.environ) -> int:
    """How often torchrun has restarted this job."""
    count = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return int(count) if count.isdecimal() else 0


def checksum(tensors: Sequence[Tensor]) -> str:
    """Tells whether ranks hold the same float32 values, to the bit; taken on the device."""
    sums = torch.stack([x.detach().contiguous().view(torch.int32).sum() for x in tensors])  # whole numbers: no rounding
    return hashlib.sha256(sums.cpu().numpy().tobytes()).hexdigest()[:16]


# ---- batch norm over all ranks -----------------------------------------------------------------------------


class _Synchronised(nn.modules.batchnorm._BatchNorm):
    """Batch norm over the batches of all ranks together."""

    group: Group = ALONE

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        self._check_input_dim(x)
        y, mean, variance, n = _normalise(x, self.weight, self.bias, self.eps, self.group)
        if self.track_running_stats:
            self._follow(mean, variance * (n / (n - 1)))
        return y

    @torch.no_grad()
    def _follow(self, mean: Tensor, variance: Tensor) -> None:
        assert self.running_mean is not None and self.running_var is not None
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        share: Any = self.momentum
        if share is None:  # the mean over all batches so far
            assert self.num_batches_tracked is not None
            share = 1.0 / self.num_batches_tracked
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_(variance.to(self.running_var.dtype), share)


class SynchronisedBatchNorm1d(_Synchronised, nn.BatchNorm1d): ...


class SynchronisedBatchNorm2d(_Synchronised, nn.BatchNorm2d): ...


class SynchronisedBatchNorm3d(_Synchronised, nn.BatchNorm3d): ...


SYNCHRONISED: dict[type, type] = {
    nn.BatchNorm1d: SynchronisedBatchNorm1d,
    nn.BatchNorm2d: SynchronisedBatchNorm2d,
    nn.BatchNorm3d: SynchronisedBatchNorm3d,
}


def synchronise_batch_norm(module: nn.Module, group: Group) -> None:
    """Turn every batch norm of ``module`` into one over all ranks, in place, by its class: the weights stay where they
    are, also in a user's own module."""
    for child in module.modules():
        if type(child) in SYNCHRONISED:
            child.__class__ = SYNCHRONISED[type(child)]
            child.group = group  # type: ignore[assignment]


def _normalise(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, group: Group
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _Normalise.apply(x, weight, bias, eps, group)


class _Normalise(torch.autograd.Function):
    """x (n x c x ...) with mean 0 and variance 1 over all ranks, then weight and bias. Also gives mean, variance
    (both c) and the number of values that they are over.

    Every rank tells the others its number, mean and squared deviation, and for the gradient two sums: torch's own
    SyncBatchNorm does the same, but on GPUs only.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, group: Group
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        c = x.shape[1]
        over = [dim for dim in range(x.ndim) if dim != 1]
        own_variance, own_mean = torch.var_mean(x.float(), over, correction=0)
        n_own = own_mean.new_full((1,), x.numel() // c)
        parts = torch.stack(_gather_same(torch.cat([n_own, own_mean, own_variance]), group))  # ranks x (1 + 2c)
        numbers, means, variances = parts.split([1, c, c], dim=1)
        n = numbers.sum()
        mean = (numbers * means).sum(0) / n
        variance = (numbers * (variances + (means - mean).square())).sum(0) / n
        ctx.save_for_backward(x, weight, mean, variance, n)
        ctx.eps, ctx.group = eps, group
        y = torch.nn.functional.batch_norm(x, mean, variance, weight, bias, False, 0.0, eps)
        ctx.mark_non_differentiable(mean, variance, n)
        return y, mean, variance, n

    @staticmethod
    def backward(ctx: Any, to_y: Tensor, *_: Any) -> tuple[Tensor, Tensor | None, Tensor | None, None, None]:
        x, weight, mean, variance, n = ctx.saved_tensors
        over = [dim for dim in range(x.ndim) if dim != 1]
        shape = [1, -1, *[1] * (x.ndim - 2)]
        scale = (variance + ctx.eps).rsqrt()
        centred = (x.float() - mean.view(shape)) * scale.view(shape)
        to_bias = to_y.float().sum(over)
        to_weight = (to_y.float() * centred).sum(over)
        of_all = ctx.group.sum(torch.cat([to_bias, to_weight])) / n
        mean_to_y, mean_along = of_all.chunk(2)
        if weight is not None:
            scale = scale * weight
        to_x = (to_y - mean_to_y.view(shape) - centred * mean_along.view(shape)) * scale.view(shape)
        to_x = to_x.to(x.dtype)
        return to_x, to_weight if weight is not None else None, to_bias if weight is not None else None, None, None


def _gather_same(x: Tensor, group: Group) -> list[Tensor]:
    """x of every rank, by rank; of the same shape on all."""
    parts = [torch.empty_like(x) for _ in range(group.size)]
    with gone():
        dist.all_gather(parts, x)
    return parts
