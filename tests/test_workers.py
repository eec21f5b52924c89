"""Decoding by threads and by processes: the same images in the same order, whatever happens to a worker."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from conftest import save_images
from messy import make_messy_folder
from semclust import workers
from semclust.data import open_images, stream_images
from semclust.workers import Worker


def noise(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


@pytest.fixture
def in_processes(monkeypatch):
    monkeypatch.setattr(workers, "PROCESSES_FROM", 1)
    monkeypatch.setattr(workers, "BATCH", 3)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return save_images(tmp_path / "photos", noise(20, 20, 24, 3))


def test_processes_and_threads_agree_on_a_messy_folder(tmp_path: Path, monkeypatch):
    good, bad = make_messy_folder(tmp_path / "messy", 300)
    by_threads = open_images(tmp_path / "messy", size=24, channels=3)
    assert sorted(by_threads.names) == good and sorted(name for name, _ in by_threads.skipped) == bad
    monkeypatch.setattr(workers, "PROCESSES_FROM", 1)
    monkeypatch.setattr(workers, "decode_block", lambda *a: pytest.fail("decoded in this process"))
    parts = list(stream_images(tmp_path / "messy", size=(24, 24), channels=3, chunk=50))
    monkeypatch.setenv("SEMCLUST_CACHE", str(tmp_path / "other"))
    by_processes = open_images(tmp_path / "messy", size=24, channels=3)
    for names, skipped, pixels in (
        (by_processes.names, by_processes.skipped, by_processes.pixels),
        (
            [name for part in parts for name in part.names],
            [one for part in parts for one in part.skipped],
            np.concatenate([part.pixels for part in parts]),
        ),
    ):
        assert names == by_threads.names and skipped == by_threads.skipped and (pixels == by_threads.pixels).all()


def test_headers_by_processes(photos: Path, in_processes, monkeypatch):
    monkeypatch.setattr(workers, "read_headers", lambda *a: pytest.fail("read in this process"))
    assert open_images(photos).pixels.shape == (20, 20, 24, 3)


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().rsplit(")")[-1].split()[0]


@pytest.fixture
def started(monkeypatch) -> list[subprocess.Popen]:
    processes = []
    real = Worker._start
    monkeypatch.setattr(Worker, "_start", staticmethod(lambda: (processes.append(real()), processes[-1])[1]))
    return processes


def test_no_process_is_left_behind(photos: Path, in_processes, started):
    open_images(photos, size=20, channels=3)
    stream = stream_images(photos, size=(20, 20), channels=3, chunk=1)
    next(stream)
    stream.close()

    def stop(total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        open_images(photos, size=10, channels=3, on_image=stop)
    assert len(started) >= 3 and all(process.poll() is not None for process in started)


def test_a_worker_ends_with_its_parent(photos: Path):
    code = "from semclust.workers import Worker; print(Worker().process.pid, flush=True); import time; time.sleep(60)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment)
    worker = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 10
    while alive(worker) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(worker)


def test_a_decoder_that_crashes_loses_only_its_file(photos: Path, in_processes, monkeypatch):
    """A worker that is asked for the file 07 kills itself, as a fault in a decoder would."""
    crash = (
        "import sys; sys.path[:] = sys.argv[1:]; import os, semclust.decoding as d; real = d.open_image\n"
        "d.open_image = lambda place: os.abort() if place.endswith('07.png') else real(place)\n"
        "from semclust.workers import serve; serve()"
    )
    monkeypatch.setattr(workers, "START", crash)
    images = open_images(photos)
    assert images.skipped == [("07.png", workers.CRASHED)] and len(images.names) == 19
    assert (images.pixels == np.delete(noise(20, 20, 24, 3), 7, axis=0)).all()


def test_workers_that_cannot_start_are_done_without(photos: Path, in_processes, monkeypatch):
    for start in ("raise SystemExit(3)", "print('hello')"):
        monkeypatch.setattr(workers, "START", start)
        assert len(open_images(photos).names) == 20
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    assert len(open_images(photos).names) == 20
    monkeypatch.setattr(sys, "executable", "")
    assert len(open_images(photos).names) == 20


def test_processes_are_used_where_pipes_cannot_be_widened(photos: Path, in_processes, monkeypatch):
    """Linux lets an ordinary user have 64 MiB in all pipes together."""
    fcntl = pytest.importorskip("fcntl")
    real, asked = fcntl.fcntl, []

    def refuse(file, command, *a):
        if command == fcntl.F_SETPIPE_SZ:
            asked.append(command)
            raise PermissionError(1, "Operation not permitted")
        return real(file, command, *a)

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    monkeypatch.setattr(workers, "decode_block", lambda *a: pytest.fail("decoded in this process"))
    assert (open_images(photos, size=(20, 24), channels=3).pixels == noise(20, 20, 24, 3)).all() and asked


@pytest.mark.parametrize("n_cores", [1, 32, 33, 64, 256])
def test_all_pipes_together_are_what_a_user_may_have(n_cores: int, monkeypatch):
    fcntl = pytest.importorskip("fcntl")
    monkeypatch.setattr(workers, "n_cores", lambda: n_cores)
    worker = Worker()
    size = sum(fcntl.fcntl(pipe, fcntl.F_GETPIPE_SZ) for pipe in (worker.process.stdin, worker.process.stdout))
    worker.stop()
    assert (n_cores > 32 or size > 2**20) and n_cores * size <= 2**26


def test_what_a_decoder_prints_does_not_matter(photos: Path, in_processes, monkeypatch):
    noisy = workers.START.replace(
        "serve()",
        "import semclust.decoding as d, os; real = d.open_image\n"
        "d.open_image = lambda place: (print('hi'), os.write(1, b'hey'), real(place))[2]\nserve()",
    )
    monkeypatch.setattr(workers, "START", noisy)
    assert (open_images(photos).pixels == noise(20, 20, 24, 3)).all()


def test_workers_leave_ctrl_c_to_the_one_who_asks():
    worker = Worker()
    worker.ask([], None)
    worker.process.send_signal(signal.SIGINT)
    assert worker.ask([], None)[0]["headers"] == []
    worker.stop()


def test_the_limit_of_pixels_holds_in_processes(photos: Path, in_processes, monkeypatch):
    save_images(photos / "more", noise(1, 40, 40, 3))
    monkeypatch.setattr("PIL.Image.MAX_IMAGE_PIXELS", 500)
    assert [name for name, _ in open_images(photos, size=20, channels=3).skipped] == ["more/00.png"]


def test_a_file_that_vanishes_is_skipped(photos: Path, monkeypatch):
    monkeypatch.setattr(workers, "AT_ONCE", 4)
    images = open_images(photos, size=20, on_image=lambda total: (photos / "15.png").unlink(missing_ok=True))
    assert images.skipped == [("15.png", "no such file, or a link that leads nowhere")] and len(images.pixels) == 19


@pytest.mark.parametrize("processes", [True, False])
def test_large_images_wait_in_small_numbers(photos: Path, processes: bool, monkeypatch):
    """At most two batches for each worker, or as many as threads take at once, whatever the size of an image."""
    monkeypatch.setattr(workers, "PROCESSES_FROM", 1 if processes else 10**9)
    monkeypatch.setattr(workers, "BATCH_BYTES", 2 * 100 * 100 * 3)
    monkeypatch.setattr(workers, "AT_ONCE", 64)
    asked = []

    def places(start: int, stop: int) -> list:
        asked.append(stop)
        return [str(photos / f"{i:02}.png") for i in range(start, stop)]

    blocks = workers.blocks(places, 20, (100, 100, 3))
    first = next(blocks)
    assert len(first) <= 2 and max(asked) <= 2 * (2 * workers.n_cores() + 1)
    assert len(first) + sum(len(block) for block in blocks) == 20
