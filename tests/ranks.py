"""Run a function in several processes that form a group, as torchrun would start them."""

import multiprocessing
import os
import socket
import sys
from collections.abc import Callable
from typing import Any

from semclust.distributed import joined

PATIENCE = 120  # seconds


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def environment(rank: int, size: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def in_ranks(size: int, work: Callable[..., Any], *args: Any) -> list[Any]:
    """What ``work(group, *args)`` gives on each rank; an error of any is raised here."""
    context = multiprocessing.get_context("spawn")
    answers, port = context.SimpleQueue(), free_port()
    processes = [
        context.Process(target=_run, args=(answers, environment(rank, size, port), work, args), daemon=True)
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    found: dict[int, Any] = {}
    try:
        for _ in processes:
            rank, value, error = answers.get()
            if error is not None:
                raise AssertionError(f"rank {rank}: {error!r}") from error
            found[rank] = value
        for process in processes:
            process.join(PATIENCE)
    finally:
        for process in processes:
            process.kill()
            process.join()
    return [found[rank] for rank in range(size)]


def _run(answers: Any, environ: dict[str, str], work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    import torch

    torch.set_num_threads(1)
    os.environ.update(environ)
    rank = int(environ["RANK"])
    try:
        with joined() as group:
            answers.put((rank, work(group, *args), None))
    except BaseException as error:
        import traceback

        traceback.print_exc(file=sys.stderr)
        answers.put((rank, None, RuntimeError(f"{type(error).__name__}: {error}")))
