"""What happens to real jobs, done to real runs: killed, stopped, a full disk, a folder that can no longer be written.

Runs that are killed are children of this process, made by fork: they need not import torch again.
"""

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from conftest import RESULTS, make_images, tiny
from semclust import fitting, storage
from semclust.errors import StoppedError
from semclust.fitting import Watcher
from semclust.run_folder import RunFolder

KILLS = 30
EPOCHS = 12


def images():
    return make_images(48)


def settings(**changes):
    return tiny(**dict(epochs=EPOCHS) | changes)


def finish(run: RunFolder, watcher: Watcher | None = None, **changes) -> fitting.Fitted:
    """What the command line does, but for the page."""
    data = images()
    fitted = fitting.fit(data, settings(**changes), watcher, run)
    fitted.predictor.save(run.model)
    run.write_results(data.names, fitted.p, fitted.q, {})
    return fitted


def all_bytes(run: RunFolder) -> dict[str, bytes]:
    return {name: (run.path / name).read_bytes() for name in RESULTS}


@pytest.fixture
def run(tmp_path) -> RunFolder:
    return RunFolder.create(tmp_path, "run")


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory) -> tuple[dict[str, bytes], float]:
    """All results of a run that nothing happened to, and how long it took."""
    run = RunFolder.create(tmp_path_factory.mktemp("unbroken"), "run")
    started = time.monotonic()
    finish(run)
    return all_bytes(run), time.monotonic() - started


@contextlib.contextmanager
def child(work: Callable[[], object]) -> Iterator[int]:
    """A process that does ``work`` and exits with 0, or 1 where that failed. It is gone when the block is left."""
    number = os.fork()
    if not number:
        status = 1
        try:
            work()
            status = 0
        except StoppedError as stopped:
            status = stopped.status
        finally:
            os._exit(status)
    try:
        yield number
    finally:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(number, signal.SIGKILL)
            os.waitpid(number, 0)


def exit_status(number: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])


def wait_for(condition: Callable[[], bool], seconds: float = 30) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.002)


class Steps(Watcher):
    """Does something after the nth step of this process."""

    def __init__(self, at: int, then: Callable[[], object]):
        self.left, self.then = at, then

    def step(self, n_images):
        self.left -= 1
        if not self.left:
            self.then()


# ---- killed ------------------------------------------------------------------------------------------


def slow_writes(marker: Path) -> None:
    """Let every checkpoint be written in pieces, with a pause at each stage: half written, written but not named, and
    named while the one before has just been put aside. ``marker`` exists in the pauses."""
    real_replace = os.replace

    def pause():
        marker.touch()
        time.sleep(0.03)
        marker.unlink(missing_ok=True)

    class Slow(storage.WholeFile):
        def __enter__(self):
            file = super().__enter__()
            write = file.write

            class Halves:
                def __getattr__(self, name):
                    return getattr(file, name)

                def write(self, content):
                    write(content[: len(content) // 2])
                    file.flush()
                    pause()
                    return write(content[len(content) // 2 :])

            return Halves()

    def replace(source, target):
        pause()
        real_replace(source, target)

    storage.WholeFile = Slow
    os.replace = replace


def test_a_run_killed_thirty_times_ends_in_the_same_bytes(run, unbroken, tmp_path):
    """At random moments; every third time in the middle of writing a file, wherever that is."""
    expected, seconds = unbroken
    rng = random.Random(0)
    marker = tmp_path / "writing"
    in_writes = kills = 0
    while kills < KILLS:
        in_a_write = kills % 3 == 0
        marker.unlink(missing_ok=True)

        def work(run=run, slow=in_a_write):
            if slow:
                slow_writes(marker)
            finish(run)

        with child(work) as number:
            if in_a_write:
                for _ in range(rng.randint(0, 6)):  # pauses to let pass
                    wait_for(lambda: marker.exists() or finished(number))
                    wait_for(lambda: not marker.exists() or finished(number))
                wait_for(lambda: marker.exists() or finished(number))
            else:
                time.sleep(rng.uniform(0, min(1.0, seconds)))
            os.kill(number, signal.SIGKILL)
            if exit_status(number) == -signal.SIGKILL:
                kills += 1
                in_writes += bool(parts(run))
            else:  # it was faster: begin another one
                assert all_bytes(run) == expected
                run = RunFolder.create(tmp_path, "run")
    finish(run)
    assert all_bytes(run) == expected
    assert in_writes >= KILLS // 3 - 2
    assert not parts(run)


def parts(run: RunFolder) -> list[Path]:
    """Files that were not written to their end."""
    return list(run.path.rglob(".*.part"))


def finished(number: int) -> bool:
    """Whether the child has ended by itself."""
    return os.waitid(os.P_PID, number, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


# ---- asked to stop -----------------------------------------------------------------------------------


@pytest.mark.parametrize("asked, status", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.parametrize("step", [1, 2, 3, 5, 20])
def test_a_signal_ends_a_run_after_its_step_with_nothing_lost(run, unbroken, asked, status, step):
    """Within an epoch as at its end: three steps are one."""
    with pytest.raises(StoppedError, match=asked.name) as stopped:
        finish(run, Steps(step, lambda: os.kill(os.getpid(), asked)))
    assert stopped.value.status == status
    tensors, epoch = run.read_checkpoint()
    assert (epoch, int(tensors["progress"][0])) == ((step - 1) // 3, (step - 1) % 3 + 1)
    finish(run)
    assert all_bytes(run) == unbroken[0]


@pytest.mark.parametrize(
    "changes",
    [
        dict(contrast="instance-memory", symmetric=True),
        dict(contrast="simclr", projection_per_task=True),
        dict(batch_norm_groups=2, images_on="host"),
        dict(augment="strokes", tasks=("instance",)),
        dict(backbone="resnet18", width=2, augment="natural"),
    ],
    ids=str,
)
def test_stopped_at_every_step_a_run_ends_in_the_same_bytes(tmp_path, changes):
    changes = dict(epochs=4) | changes
    whole, broken = (RunFolder.create(tmp_path, name) for name in ("whole", "broken"))
    finish(whole, **changes)
    for _ in range(4 * 3):
        with pytest.raises(StoppedError):
            finish(broken, Steps(1, lambda: os.kill(os.getpid(), signal.SIGTERM)), **changes)
    finish(broken, Steps(1, lambda: pytest.fail("a step after the last")), **changes)
    assert all_bytes(broken) == all_bytes(whole)


def test_a_signal_while_labels_are_renewed_waits_for_no_epoch(run, unbroken, monkeypatch):
    """All steps of the epoch are done and kept; only the labels are renewed again."""
    features = fitting.Training._features

    def interrupted(self, on_part):
        if self.epoch == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return features(self, on_part)

    with monkeypatch.context() as patch:
        patch.setattr(fitting.Training, "_features", interrupted)
        with pytest.raises(StoppedError, match="after 4 epochs and 3 steps"):
            finish(run)
    finish(run)
    assert all_bytes(run) == unbroken[0]


def test_a_second_ctrl_c_ends_at_once(run, unbroken):
    """Even while the first waits for a step that does not end."""

    def stuck():
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)

    with child(lambda: finish(run, Steps(8, stuck))) as number:
        wait_for(lambda: run.checkpoint.exists() or finished(number))
        time.sleep(0.3)
        began = time.monotonic()
        os.kill(number, signal.SIGINT)
        os.kill(number, signal.SIGINT)
        assert exit_status(number) == -signal.SIGINT
        assert time.monotonic() - began < 5
    finish(run)
    assert all_bytes(run) == unbroken[0]


def test_signals_are_what_they_were_after_a_fit(run):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    finish(run)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_without_a_run_folder_ctrl_c_is_as_ever():
    with pytest.raises(KeyboardInterrupt):
        fitting.fit(images(), settings(), Steps(3, lambda: os.kill(os.getpid(), signal.SIGINT)))


# ---- checkpoints within an epoch ---------------------------------------------------------------------


def test_checkpoints_come_within_an_epoch_where_it_is_long(run, unbroken, monkeypatch):
    monkeypatch.setattr(fitting, "CHECKPOINT_EVERY", 0)
    places = []
    write = RunFolder.write_checkpoint
    monkeypatch.setattr(
        RunFolder,
        "write_checkpoint",
        lambda self, state, epoch: places.append((epoch, int(state["progress"][0]))) or write(self, state, epoch),
    )
    finish(run)
    assert {(0, 1), (0, 2), (0, 3), (1, 0), (7, 2)} <= set(places)
    assert all_bytes(run) == unbroken[0]


def test_training_does_not_wait_for_the_disk(run, monkeypatch):
    write, began, went_on = RunFolder.write_checkpoint, [], []

    def slow(self, state, epoch):
        began.append(epoch)
        if epoch == 2:
            wait_for(lambda: bool(went_on))  # until a step of the next epoch was made meanwhile
        write(self, state, epoch)

    class Watching(Watcher):
        def step(self, n_images):
            if 2 in began:
                went_on.append(True)

    monkeypatch.setattr(RunFolder, "write_checkpoint", slow)
    finish(run, Watching())
    assert went_on and run.read_checkpoint()[1] == EPOCHS
