"""What happens to real jobs, done to real runs: killed, stopped, a full disk, a folder that can no longer be written.

Runs that are killed are children of this process, made by fork: they need not import torch again.
"""

import contextlib
import ctypes
import faulthandler
import os
import random
import resource
import shutil
import signal
import subprocess
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from conftest import RESULTS, TinyBackbone, make_images, save_images, tiny
from semclust import budget, devices, fitting, storage
from semclust.cli import main
from semclust.data import open_images
from semclust.display import Display
from semclust.errors import DamagedFileError, InputError, StoppedError
from semclust.fitting import Watcher
from semclust.inference import Inference
from semclust.run_folder import RunFolder
from semclust.signals import StopSignals
from semclust.storage import read_json, write_tensors

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
            faulthandler.disable()  # a child that is to crash need not tell where
            work()
            status = 0
        except StoppedError as stopped:
            status = stopped.status
        except BaseException:
            traceback.print_exc()
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


def wait_for(condition: Callable[[], bool], seconds: float = 120) -> None:
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


def test_sigterm_while_steps_are_timed_is_told_and_leaves_a_run_to_begin_anew(run, monkeypatch):
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(budget, "measure", lambda training: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(StoppedError, match="SIGTERM while steps were timed; nothing has been learned") as stopped:
        finish(run, minutes=0.2)
    assert stopped.value.status == 143 and signal.getsignal(signal.SIGTERM) is before
    assert not run.checkpoint.exists() and run.read_schedule() is None
    assert finish(run).history


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
    features = fitting.Training._features_of

    def interrupted(self, *args):
        if self.epoch == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return features(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(fitting.Training, "_features_of", interrupted)
        with pytest.raises(StoppedError, match="after 4 epochs and 3 steps"):
            finish(run)
    finish(run)
    assert all_bytes(run) == unbroken[0]


def test_steps_that_were_skipped_are_counted_once_where_labels_are_renewed_again(run):
    """Two at the beginning of the epoch and one at its end are not three in a row."""
    bad = iter([True] * 4 + [False] * 6 + [True] * 2)  # 6 steps, two views

    def view(x):
        return x * torch.nan if next(bad, False) else x

    def stop_while_renewing(self, *args):
        os.kill(os.getpid(), signal.SIGTERM)
        return features(self, *args)

    features = fitting.Training._features_of
    changes = dict(augment=view, batch_size=8, epochs=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fitting.Training, "_features_of", stop_while_renewing)
        with pytest.raises(StoppedError, match="after 0 epochs and 6 steps"):
            finish(run, **changes)
    heard = Heard()
    assert [row["skipped_steps"] for row in finish(run, heard, **changes).history] == [3, 0]
    assert not any("in a row" in message for message in heard.warnings)


def test_a_stop_whose_first_checkpoint_cannot_be_written_says_so(run, monkeypatch):
    def full(self, state, epoch):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(RunFolder, "write_checkpoint", full)
    with pytest.raises(StoppedError, match="after 0 epochs and 2 steps, of which no checkpoint could be kept"):
        finish(run, Steps(2, lambda: os.kill(os.getpid(), signal.SIGTERM)))


def test_a_second_ctrl_c_ends_at_once(run, unbroken, tmp_path):
    """Even while the first waits for a step that does not end."""
    stuck = tmp_path / "stuck"

    def hang():
        os.kill(os.getpid(), signal.SIGINT)
        stuck.touch()
        time.sleep(600)

    with child(lambda: finish(run, Steps(8, hang))) as number:
        wait_for(stuck.exists)
        os.kill(number, signal.SIGINT)
        assert exit_status(number) == -signal.SIGINT
    finish(run)
    assert all_bytes(run) == unbroken[0]


def test_signals_are_what_they_were_after_a_fit(run):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    finish(run)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_signal_while_the_handlers_are_set_back_leaves_none_behind(monkeypatch):
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    real = signal.signal

    def interrupted(number, handler):
        if handler == before[number] and signal.getsignal(signal.SIGTERM) == signals._note:
            signals._note(signal.SIGTERM, None)  # as it would be called if SIGTERM came now
        return real(number, handler)

    with StopSignals() as signals:
        monkeypatch.setattr(signal, "signal", interrupted)
    assert signals.received == signal.SIGTERM
    assert {number: signal.getsignal(number) for number in before} == before


def test_ctrl_c_stays_ignored_where_a_shell_had_it_ignored(run, unbroken, capfd):
    def interrupt():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as of a job in a script's background
    try:
        with pytest.raises(StoppedError, match=r"Stopped by SIGTERM after 1 epoch and 2 steps\.") as stopped:
            finish(run, Steps(5, interrupt))
        assert stopped.value.status == 143 and signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    assert "Ctrl-C" not in capfd.readouterr().err
    finish(run)
    assert all_bytes(run) == unbroken[0]


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


# ---- disks and folders -------------------------------------------------------------------------------


class Heard(Watcher):
    """Does something at the end of some epochs, and keeps what was told."""

    def __init__(self, then: dict[int, Callable[[], object]] | None = None):
        self.then, self.warnings = then or {}, []

    def epoch(self, row):
        self.then.get(row["epoch"], lambda: None)()

    def warn(self, message):
        self.warnings.append(message)


def limit_files(size: int) -> None:
    """Let no file of this process grow beyond ``size``: the kernel refuses to write more, as on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def test_a_disk_that_is_full_for_a_while_costs_nothing(run, unbroken):
    def work():
        heard = Heard({3: lambda: limit_files(100), 7: lambda: limit_files(resource.RLIM_INFINITY)})
        finish(run, heard)
        assert sum("checkpoint could not be written" in message for message in heard.warnings) == 1
        assert sum("metrics.csv could not be written" in message for message in heard.warnings) == 1

    with child(work) as number:
        assert exit_status(number) == 0
    assert all_bytes(run) == unbroken[0]


def test_a_disk_that_stays_full_costs_what_came_after_the_last_checkpoint(run, unbroken):
    def work():
        with pytest.raises(OSError, match="File too large"):
            finish(run, Heard({4: lambda: limit_files(100)}))

    with child(work) as number:
        assert exit_status(number) == 0
    assert run.read_checkpoint()[1] in (3, 4) and not parts(run)  # the fourth may have been on its way
    finish(run)
    assert all_bytes(run) == unbroken[0]


def mount(*words: object) -> None:
    """In a name space of this process alone, which ends with it."""
    subprocess.run(["mount", *map(str, words)], check=True, stderr=subprocess.DEVNULL)


def own_mounts() -> bool:
    """Let this process mount what it likes, unseen by others; False where it may not."""
    new_mounts, new_user = 0x20000, 0x10000000
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(new_mounts | (new_user if os.geteuid() else 0)):
        return False
    try:
        mount("--make-rprivate", "/")
        return True
    except (OSError, subprocess.CalledProcessError):
        return False


NOT_POSSIBLE = 77


def with_mounts(work: Callable[[], object]) -> None:
    """Do ``work`` in a child that may mount; skip where none may."""

    def in_child():
        if not own_mounts():
            os._exit(NOT_POSSIBLE)
        work()

    with child(in_child) as number:
        status = exit_status(number)
    if status == NOT_POSSIBLE:
        pytest.skip("this user cannot mount")
    assert status == 0


def fill(folder: Path) -> None:
    with open(folder / "filler", "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


def test_a_file_system_without_a_free_byte_costs_nothing(tmp_path, unbroken):
    def work():
        mount("-t", "tmpfs", "-o", "size=1m", "none", tmp_path)
        run = RunFolder.create(tmp_path, "run")
        heard = Heard({2: lambda: fill(tmp_path), 6: (tmp_path / "filler").unlink})
        finish(run, heard)
        assert any("No space left on device" in message for message in heard.warnings)
        assert all_bytes(run) == unbroken[0]

    with_mounts(work)


def make_read_only(folder: Path) -> None:
    """As another process may: whatever is opened from now on cannot be written."""
    mount("--bind", folder, folder)
    for _ in range(100):  # the system refuses while a checkpoint is being written
        with contextlib.suppress(subprocess.CalledProcessError):
            return mount("-o", "remount,bind,ro", folder)
        time.sleep(0.01)
    raise AssertionError("the folder could not be made read-only")


def test_a_folder_that_is_read_only_for_a_while_costs_nothing(run, unbroken):
    def work():
        heard = Heard(
            {2: lambda: make_read_only(run.path), 6: lambda: subprocess.run(["umount", run.path], check=True)}
        )
        finish(run, heard)
        assert any("Read-only file system" in message for message in heard.warnings)

    with_mounts(work)
    assert all_bytes(run) == unbroken[0]


def test_a_folder_that_stays_read_only_costs_what_came_after_the_last_checkpoint(run, unbroken):
    def work():
        with pytest.raises(OSError, match="Read-only file system"):
            finish(run, Heard({5: lambda: make_read_only(run.path)}))

    with_mounts(work)
    assert run.read_checkpoint()[1] in (4, 5)  # the fifth may have been on its way
    finish(run)
    assert all_bytes(run) == unbroken[0]


@pytest.mark.parametrize("seed", range(6))
def test_renames_that_a_crash_undoes_cost_the_work_since_the_ones_that_lasted(run, unbroken, monkeypatch, seed):
    """The file system says that a rename is done, and after the crash it was not."""
    rng, replace = random.Random(seed), os.replace

    def work():
        def forgetful(source, target):
            if rng.random() < 0.5:
                replace(source, target)

        os.replace = forgetful
        finish(run, Steps(20, lambda: os.kill(os.getpid(), signal.SIGKILL)))

    with child(work) as number:
        assert exit_status(number) == -signal.SIGKILL
    finish(run)
    assert all_bytes(run) == unbroken[0]


@pytest.mark.parametrize("size", [0, 1, 100, 5000])
def test_a_checkpoint_whose_blocks_never_reached_the_disk_gives_way_to_the_one_before(run, unbroken, size):
    """Its name is there, but what it held is cut off or zeros."""
    with pytest.raises(StoppedError):
        finish(run, Steps(20, lambda: os.kill(os.getpid(), signal.SIGTERM)))
    whole = run.checkpoint.read_bytes()
    run.checkpoint.write_bytes(whole[:size] + bytes(len(whole) - size if size == 5000 else 0))
    heard = Heard()
    finish(run, heard)
    assert any("previous.ckpt" in message for message in heard.warnings)
    assert all_bytes(run) == unbroken[0]


def test_a_clock_that_jumps_back_changes_nothing(run, unbroken, monkeypatch):
    now = [4e9]

    def back():
        now[0] -= 1e6
        return now[0]

    with pytest.raises(StoppedError):
        finish(run, Steps(10, lambda: os.kill(os.getpid(), signal.SIGTERM)))
    for path in run.path.iterdir():
        os.utime(path, (4e9, 4e9))  # from the future
    monkeypatch.setattr(time, "time", back)
    monkeypatch.setattr(time, "time_ns", lambda: int(back() * 1e9))
    fitted = finish(run)
    assert all_bytes(run) == unbroken[0]
    assert 0 < fitted.seconds < 1e4


# ---- memory of the device ----------------------------------------------------------------------------


class SmallDevice(TinyBackbone):
    """Runs out of memory where more than ``most`` images come at once, as the device would say it."""

    def __init__(self, most: int, norm: bool = True):
        super().__init__()
        self.most, self.norm = most, self.norm if norm else torch.nn.Identity()

    def forward(self, x):
        if len(x) > self.most and self.training:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().forward(x)


def test_a_step_that_does_not_fit_goes_in_parts_with_the_same_gradient(monkeypatch):
    """Without what sees one part at a time (batch norm, weights of samples, evenness) the weights are the same, too."""
    plain = dict(projection_norm=False, hard_samples=False, balance=0.0, epochs=3)
    heard = Heard()
    whole = fitting.fit(images(), settings(backbone=SmallDevice(99, norm=False), **plain))
    parted = fitting.fit(images(), settings(backbone=SmallDevice(4, norm=False), **plain), heard)
    assert [message for message in heard.warnings if "out of memory" in message and "4 parts" in message]
    for a, b in zip(whole.history, parted.history, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4)
    weights = (fitted.predictor.network.state_dict() for fitted in (whole, parted))
    for a, b in zip(*(each.values() for each in weights), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


class LateSmallDevice(SmallDevice):
    """Finds out only after its batch norm has seen the images."""

    def forward(self, x):
        features = TinyBackbone.forward(self, x)
        if len(x) > self.most and self.training:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return features


@pytest.mark.parametrize("contrast", ["moco", "simclr"])
def test_what_batch_norm_saw_in_a_step_that_did_not_fit_is_forgotten(contrast):
    states = []
    for parts in (1, 4):  # found out; known before
        training = fitting.start(images(), settings(backbone=LateSmallDevice(4), contrast=contrast))
        training.parts = parts
        training.run_epoch()
        assert training.parts == 4
        states.append(training.state())
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())


@pytest.mark.parametrize("contrast", ["moco", "simclr", "instance-memory"])
@pytest.mark.parametrize("symmetric", [False, True])
def test_a_run_in_parts_goes_on_in_parts(tmp_path, contrast, symmetric):
    changes = dict(backbone=SmallDevice(8), contrast=contrast, symmetric=symmetric, epochs=4)
    whole, broken = (RunFolder.create(tmp_path, name) for name in ("whole", "broken"))
    fitted = finish(whole, **changes)
    assert all(row["skipped_steps"] == 0 for row in fitted.history)
    for step in (2, 3, 4):
        with pytest.raises(StoppedError):
            finish(broken, Steps(step, lambda: os.kill(os.getpid(), signal.SIGTERM)), **changes)
    heard = Heard()
    finish(broken, heard, **changes)
    assert not heard.warnings or "out of memory" not in heard.warnings[0]  # it is known by now
    assert all_bytes(broken) == all_bytes(whole)


def test_a_device_too_small_for_two_images_is_told():
    with pytest.raises(torch.OutOfMemoryError):
        fitting.fit(images(), settings(backbone=SmallDevice(1)))


def test_labels_are_renewed_by_smaller_batches_where_memory_is_short(monkeypatch):
    encode, sizes = Inference._by_batches, []

    def small(self, *args):
        sizes.append(self.batch)
        if self.batch > 20:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return encode(self, *args)

    expected = fitting.fit(images(), settings())
    monkeypatch.setattr(Inference, "_by_batches", small)
    heard = Heard()
    fitted = fitting.fit(images(), settings(), heard)
    assert sizes[:4] == [128, 64, 32, 16] and set(sizes[4:]) == {16}
    assert any("batches of 16" in message for message in heard.warnings)
    assert np.allclose(fitted.p, expected.p, atol=1e-4)


# ---- data --------------------------------------------------------------------------------------------


@pytest.fixture
def array_file(tmp_path) -> Path:
    path = tmp_path / "images.npy"
    np.save(path, images().pixels)
    return path


def fit_file(path: Path, run: RunFolder, watcher: Watcher | None = None) -> dict[str, bytes]:
    data = open_images(path, size=8)
    fitted = fitting.fit(data, settings(), watcher, run)
    fitted.predictor.save(run.model)
    run.write_results(data.names, fitted.p, fitted.q, {})
    return {name: content for name, content in all_bytes(run).items() if name != "assignments.csv"}


def test_an_array_that_is_written_to_during_a_fit_ends_it_before_the_next_checkpoint(run, unbroken, array_file):
    whole = array_file.read_bytes()

    def change():
        with open(array_file, "r+b") as file:
            file.seek(1000)
            file.write(bytes(100))

    with pytest.raises(InputError, match=r"images\.npy changed while"):
        fit_file(array_file, run, Steps(10, change))
    assert run.read_checkpoint()[1] == 3
    array_file.write_bytes(whole)
    found = fit_file(array_file, run)
    assert found == {name: unbroken[0][name] for name in found}


def test_an_array_that_is_cut_off_during_a_fit_costs_what_came_after_the_last_checkpoint(run, unbroken, array_file):
    """The system ends a process that reads where a file was."""
    whole = array_file.read_bytes()
    with child(lambda: fit_file(array_file, run, Steps(10, lambda: os.truncate(array_file, 0)))) as number:
        assert exit_status(number) in (-signal.SIGBUS, 1)
    array_file.write_bytes(whole)
    found = fit_file(array_file, run)
    assert found == {name: unbroken[0][name] for name in found}


@pytest.mark.parametrize("how", ["removed", "replaced"])
def test_an_array_whose_name_goes_during_a_fit_costs_nothing(run, unbroken, array_file, how):
    def go():
        if how == "replaced":
            (array_file.parent / "other").write_bytes(b"other")
            os.replace(array_file.parent / "other", array_file)
        else:
            array_file.unlink()

    found = fit_file(array_file, run, Steps(10, go))
    assert found == {name: unbroken[0][name] for name in found}


def test_images_and_cache_that_vanish_during_a_fit_cost_nothing(run, unbroken, tmp_path, own_cache, monkeypatch):
    monkeypatch.setattr("semclust.files.WORTH_KEEPING", 1)
    folder = save_images(tmp_path / "photos", images().pixels)
    data = open_images(folder, size=8)
    assert list(own_cache.iterdir())

    def vanish():
        shutil.rmtree(folder)
        shutil.rmtree(own_cache)

    fitted = fitting.fit(data, settings(), Steps(10, vanish), run)
    fitted.predictor.save(run.model)
    assert all_of(run, "last.ckpt") == unbroken[0]["last.ckpt"]
    assert all_of(run, "model/model.safetensors") == unbroken[0]["model/model.safetensors"]


def all_of(run: RunFolder, name: str) -> bytes:
    return (run.path / name).read_bytes()


# ---- two at once, and other versions -----------------------------------------------------------------


def test_a_second_fit_in_the_same_folder_is_told_and_harms_nothing(run, unbroken, tmp_path):
    tried = tmp_path / "tried"
    with child(lambda: finish(run, Steps(10, lambda: wait_for(tried.exists)))) as number:
        wait_for(run.checkpoint.exists)
        with pytest.raises(InputError, match=rf"being fitted by another process \({number}\)"):
            finish(run)
        tried.touch()
        assert exit_status(number) == 0
    assert all_bytes(run) == unbroken[0]
    finish(run)  # the lock went with its process


def test_a_folder_that_another_fit_has_just_begun_in_is_not_abandoned(run):
    run.write_config({})
    with run.locked():
        run.abandon()
        assert run.read_config()
    run.abandon()
    assert not run.path.exists()


@pytest.mark.parametrize("lacks, says", [("metrics", "lacks the rows of metrics"), ("progress", "damaged.*progress")])
def test_a_checkpoint_that_lacks_a_part_is_damage(run, lacks, says):
    with pytest.raises(KeyboardInterrupt):
        finish(run, Heard({5: lambda: (_ for _ in ()).throw(KeyboardInterrupt)}))
    tensors, epoch = run.read_checkpoint()
    run.write_checkpoint({name: value for name, value in tensors.items() if name != lacks}, epoch)
    with pytest.raises(DamagedFileError, match=rf"last\.ckpt.*{says}"):
        finish(run)


def test_a_checkpoint_of_another_version_says_which(run):
    write_tensors(run.checkpoint, {"w": torch.ones(1)}, {"format": 9, "semclust": "7.5", "epoch": 3})
    with pytest.raises(DamagedFileError, match=r"last\.ckpt has format 9, written by semclust 7\.5"):
        finish(run)


@pytest.mark.parametrize("step", [3, 4])  # of 2 an epoch
@pytest.mark.parametrize("asked, status", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_the_command_says_how_to_go_on(tmp_path, monkeypatch, capsys, asked, status, step):
    folder = save_images(tmp_path / "photos", images().pixels)
    flags = ["-k", "3", "--epochs", "3", "--width", "2", "--device", "cpu", "--no-report", "--image-size", "8"]
    monkeypatch.chdir(tmp_path)
    left = [step, step - 2]

    def step(self, n_images):
        show(self, n_images)
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), asked)

    show = Display.step
    with monkeypatch.context() as patch:
        patch.setattr(Display, "step", step)
        with pytest.raises(SystemExit) as ended:
            main(["fit", str(folder), *flags])
    assert ended.value.code == status
    said = capsys.readouterr().err
    assert f"Stopped by {asked.name} after" in said and "semclust fit --resume runs/photos" in said
    main(["fit", "--resume", "runs/photos", "--no-report"])
    assert f"resuming after epoch 1 and {left[1]} of 2 steps" in capsys.readouterr().out
    main(["fit", str(folder), *flags])
    first, second = (RunFolder(tmp_path / "runs" / name) for name in ("photos", "photos-2"))
    assert all_bytes(first) == all_bytes(second)


def test_a_run_whose_device_does_not_compute_in_its_precision_goes_on_in_another(tmp_path, monkeypatch, capsys):
    """Begun in bfloat16, as on some CPUs, and resumed where there is none: from there on it is in float32, also where
    there is bfloat16 again."""
    folder = save_images(tmp_path / "photos", images().pixels)
    flags = ["-k", "3", "--epochs", "3", "--width", "8", "--device", "cpu", "--no-report", "--image-size", "8"]
    monkeypatch.chdir(tmp_path)
    run = RunFolder(tmp_path / "runs" / "photos")

    def go_on(*words, stops_after=None, bfloat16):
        show = Display.epoch

        def epoch(self, row):
            show(self, row)
            if row["epoch"] == stops_after:
                os.kill(os.getpid(), signal.SIGTERM)

        with monkeypatch.context() as patch:
            patch.setattr(Display, "epoch", epoch)
            patch.setattr(devices, "computes_in_bfloat16", lambda device: bfloat16)
            with pytest.raises(SystemExit) if stops_after else contextlib.nullcontext():
                main(["fit", *words])
        return run.read_config()["settings"]["precision"], "goes on in float32" in capsys.readouterr().out

    assert go_on(str(folder), *flags, stops_after=1, bfloat16=True) == ("bfloat16", False)
    assert go_on("--resume", "runs/photos", stops_after=2, bfloat16=False) == ("float32", True)
    assert go_on("--resume", "runs/photos", "--no-report", bfloat16=True) == ("float32", False)
    assert read_json(run.model / "config.json")["settings"]["precision"] == "float32"
    assert [row["epoch"] for row in run.read_metrics()] == [1, 2, 3]


@pytest.mark.parametrize("full", [".summary.json", ".embeddings.npy", "model/.model.safetensors"])
def test_a_disk_that_is_full_when_results_are_written_is_told_with_the_way_on(tmp_path, monkeypatch, capsys, full):
    """A real refusal: what is written to /dev/full meets a full disk."""
    folder = save_images(tmp_path / "photos", images().pixels)
    flags = ["-k", "3", "--epochs", "2", "--width", "2", "--device", "cpu", "--no-report", "--image-size", "8"]
    monkeypatch.chdir(tmp_path)
    run = RunFolder(tmp_path / "runs" / "photos")

    def fill_up(self, row):
        part = run.path / f"{full}.{os.getpid()}.part"
        part.parent.mkdir(exist_ok=True)
        if not part.is_symlink():
            part.symlink_to("/dev/full")

    with monkeypatch.context() as patch:
        patch.setattr(Display, "epoch", fill_up)
        with pytest.raises(SystemExit) as ended:
            main(["fit", str(folder), *flags])
    assert ended.value.code == 1
    said = capsys.readouterr().err
    assert "No space left on device" in said and "semclust fit --resume runs/photos" in said
    main(["fit", "--resume", "runs/photos", "--no-report"])
    main(["fit", str(folder), *flags])
    assert all_bytes(run) == all_bytes(RunFolder(tmp_path / "runs" / "photos-2"))
