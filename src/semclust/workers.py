"""Decode images on all cores, in order and in bounded memory.

A few files are decoded by threads. Many are handed to processes: most of the time for a small image is spent in
Python, where threads wait for each other, and a decoder that crashes takes only its own process with it. A process
is this interpreter, started anew (so the caller's script needs no ``if __name__``), which is told by lines of JSON what
to decode, answers with a line of JSON and bytes, and ends with its standard input.
"""

import json
import os
import subprocess
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from queue import LifoQueue
from typing import Any, TypeVar

import numpy as np
from PIL import Image

from semclust.decoding import Header, Place, decode_block, read_headers
from semclust.sources import Block, Shape

PROCESSES_FROM = 2000  # images: fewer are done before a process has started
AT_ONCE = 512  # images between two signs of progress where threads decode
BATCH, BATCH_BYTES = 64, 2**21  # images, and bytes of pixels, for one worker at a time
PIPE = 2**20  # bytes that a worker can write before it must wait for its reader, as far as
ALL_PIPES = 2**25  # bytes allow for all of them: half of what Linux lets a user have
START = "import sys; sys.path[:] = sys.argv[1:]; from semclust.workers import serve; serve()"
CRASHED = "the decoder crashed on it"

Places = Callable[[int, int], list[Place]]  # from the first to before the last
Answer = TypeVar("Answer")


def blocks(places: Places, n: int, shape: Shape) -> Iterator[Block]:
    """The images at ``shape``, in order."""
    batch = max(1, min(BATCH, BATCH_BYTES // int(np.prod(shape))))
    return _run(
        places, n, batch, lambda some: decode_block(some, shape), lambda worker, some: worker.decode(some, shape)
    )


def headers(places: Places, n: int) -> Iterator[Header | str]:
    """Of each image its header, or the reason why it has none."""
    for some in _run(places, n, BATCH, read_headers, lambda worker, some: worker.headers(some)):
        yield from some


def _run(
    places: Places,
    n: int,
    batch: int,
    here: Callable[[list[Place]], Answer],
    there: Callable[["Worker", list[Place]], Answer],
) -> Iterator[Answer]:
    if n >= PROCESSES_FROM and (workers := _start_workers(places(0, 1))):
        yield from _in_processes(places, range(0, n, batch), workers, there)
        return
    few = max(1, batch // 32)  # so that a few files, too, keep all threads busy
    at_once = max(1, AT_ONCE * batch // BATCH)  # fewer where images are large: they wait in memory
    with ThreadPoolExecutor(n_cores()) as pool:
        for first in range(0, n, at_once):
            last = min(first + at_once, n)
            some = [places(start, min(start + few, last)) for start in range(first, last, few)]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of damaged metadata; what matters is in the list of skipped files
                answers = list(pool.map(here, some))
            yield from answers


def n_cores() -> int:
    """The cores that this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // _sharing)


_sharing = 1  # processes that decode at the same time on this machine


def share_cores(processes: int) -> None:
    """Leave each of several processes that decode at once its share of the cores."""
    global _sharing
    _sharing = processes


# ---- processes -------------------------------------------------------------------------------------


def _start_workers(sample: list[Place]) -> "list[Worker]":
    """One for each core; none where the images are Python objects, or where no process can be started."""
    if callable(sample[0]) or not sys.executable or getattr(sys, "frozen", False):
        return []
    workers: list[Worker] = []
    try:
        for _ in range(n_cores()):
            workers.append(Worker())
        for worker in workers:
            worker.ask([], None)  # one that cannot even start must not make every file look damaged
        return workers
    except (OSError, ValueError):
        for worker in workers:
            worker.stop()
        return []


def _in_processes(
    places: Places, starts: range, workers: "list[Worker]", there: Callable[["Worker", list[Place]], Answer]
) -> Iterator[Answer]:
    idle: LifoQueue[Worker] = LifoQueue()
    for worker in workers:
        idle.put(worker)

    def ask(start: int) -> Answer:
        worker = idle.get()
        try:
            return there(worker, places(start, min(start + starts.step, starts.stop)))
        finally:
            idle.put(worker)

    pool = ThreadPoolExecutor(len(workers))  # a thread for each process, to wait for it
    waiting: deque[Future[Answer]] = deque()
    try:
        for start in starts:
            waiting.append(pool.submit(ask, start))
            if len(waiting) > 2 * len(workers):  # bounds the memory where the reader is slower
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:  # also where the reader has stopped, or Ctrl-C came
        for future in waiting:
            future.cancel()
        for worker in workers:
            worker.closing = True
            worker.process.kill()
        pool.shutdown()
        for worker in workers:
            worker.stop()


class Worker:
    """A process that decodes; it is replaced where it crashes."""

    def __init__(self) -> None:
        self.process = self._start()
        self.closing = False

    @staticmethod
    def _start() -> "subprocess.Popen[bytes]":
        frugal = {
            **os.environ,
            "OPENBLAS_NUM_THREADS": "1",  # NumPy would start a pool of threads
            "MALLOC_MMAP_THRESHOLD_": str(2**26),  # glibc would hand memory back after each image, and fetch it anew:
            "MALLOC_TRIM_THRESHOLD_": str(2**27),  # a third of the time for photos
        }
        process = subprocess.Popen(
            [sys.executable, "-c", START, *map(str, sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # decoders print their complaints there
            env=frugal,
        )
        _widen(process.stdout)
        return process

    def headers(self, places: list[Place]) -> list[Header | str]:
        try:
            answer, _ = self.ask(places, None)
            return [
                item if isinstance(item, str) else ((item[0][0], item[0][1]), item[1]) for item in answer["headers"]
            ]
        except (OSError, ValueError):
            self._replace()
            return [CRASHED] if len(places) == 1 else [self.headers([place])[0] for place in places]

    def decode(self, places: list[Place], shape: Shape) -> Block:
        try:
            answer, content = self.ask(places, shape)
            rows = np.frombuffer(content, np.uint8).reshape(-1, *shape)
            return Block(rows, [(i, why) for i, why in answer["skipped"]], lasting=answer["lasting"])
        except (OSError, ValueError):
            self._replace()
            if len(places) == 1:
                return Block(np.empty((0, *shape), np.uint8), [(0, CRASHED)], lasting=False)
            alone = [self.decode([place], shape) for place in places]  # only the culprit is lost
            skipped = [(i, why) for i, block in enumerate(alone) for _, why in block.skipped]
            lasting = all(block.lasting for block in alone)
            return Block(np.concatenate([block.rows for block in alone]), skipped, lasting=lasting)

    def ask(self, places: list[Place], shape: Shape | None) -> tuple[dict[str, Any], bytes]:
        assert self.process.stdin and self.process.stdout
        question = {"places": places, "shape": shape, "limit": Image.MAX_IMAGE_PIXELS}
        self.process.stdin.write(json.dumps(question).encode() + b"\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline())  # an empty line, where it has ended, is no JSON
        content = self.process.stdout.read(answer["bytes"])
        if len(content) < answer["bytes"]:
            raise ValueError("ended within its answer")
        return answer, content

    def _replace(self) -> None:
        if self.closing:
            raise RuntimeError("decoding was stopped")
        self.stop()
        self.process = self._start()

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with suppress(OSError):
                pipe.close()  # type: ignore[union-attr]


def _widen(pipe: Any) -> None:
    """Popen's own ``pipesize`` would not start the process where no more is allowed."""
    with suppress(ImportError, AttributeError, OSError):  # it is Linux's alone
        import fcntl

        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, min(PIPE, ALL_PIPES // n_cores()))


def serve() -> None:
    """What a worker does: answer questions until its standard input ends."""
    import gc
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the one who asks
    warnings.simplefilter("ignore")
    gc.set_threshold(50_000)  # Pillow makes many objects and few cycles
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # nothing that a decoder prints gets into the answer
    for line in sys.stdin.buffer:
        question = json.loads(line)
        Image.MAX_IMAGE_PIXELS = question["limit"]
        places = [place if isinstance(place, str) else tuple(place) for place in question["places"]]
        content = memoryview(b"")
        answer: dict[str, Any]
        if question["shape"] is None:
            answer = {"headers": read_headers(places)}
        else:
            H, W, c = question["shape"]
            block = decode_block(places, (H, W, c))
            answer, content = {"skipped": block.skipped, "lasting": block.lasting}, block.rows.reshape(-1).data
        out.write(json.dumps({**answer, "bytes": len(content)}).encode() + b"\n")
        out.write(content)
        out.flush()
