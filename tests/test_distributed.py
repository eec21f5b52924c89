"""Several processes: what one process would do, shared. Here two, on the CPU, which talk by gloo."""

import contextlib
import copy
import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import semclust.predictor
from conftest import RESULTS, make_images, noisy_groups, save_images, tiny
from ranks import environment, free_port, in_ranks
from semclust import assigning, devices, fitting
from semclust.cli import main
from semclust.config import Settings, from_json
from semclust.data import open_images, stream_images
from semclust.distributed import ALONE, Group, checksum, from_environment, job_name, synchronise_batch_norm
from semclust.errors import InputError
from semclust.metrics import clustering_accuracy
from semclust.plan import check_shares
from semclust.predictor import Predictor
from semclust.run_folder import RunFolder
from semclust.train import Training

# One process against two, float32: the sums over a batch are taken in another order.
LOSSES_WITHIN = 1e-5  # relative
PROBABILITIES_WITHIN = 1e-4

# ---- who does what -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("n, size, at_once", [(7, 2, 1), (7, 3, 1), (3, 4, 1), (0, 2, 1), (1000, 3, 64), (5, 2, 512)])
def test_parts_are_all_in_order_and_of_nearly_one_size(n, size, at_once):
    bounds = [Group(rank, size).bounds(n, at_once=at_once) for rank in range(size)]
    assert [row for start, stop in bounds for row in range(start, stop)] == list(range(n))
    assert all(start % at_once == 0 for start, stop in bounds if start < stop)
    lots = [-(-(stop - start) // at_once) for start, stop in bounds]
    assert max(lots) - min(lots) <= 1


def test_the_environment_of_torchrun_is_a_group():
    assert from_environment({}) == from_environment({"WORLD_SIZE": "1"}) == ALONE
    assert from_environment(environment(1, 3, 29500)) == Group(1, 3, 1, 3)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"RANK": None}, ["WORLD_SIZE=3", "RANK is missing", "torchrun"]),
        ({"MASTER_ADDR": None, "LOCAL_RANK": None}, ["LOCAL_RANK, MASTER_ADDR are missing"]),
        ({"RANK": "first"}, ["RANK='first'", "number"]),
        ({"WORLD_SIZE": "many"}, ["WORLD_SIZE='many'", "number"]),
        ({"RANK": "3"}, ["RANK=3", "WORLD_SIZE=3"]),
        ({"LOCAL_RANK": "5"}, ["LOCAL_RANK=5"]),
        ({"RANK": "-1"}, ["RANK=-1"]),
    ],
)
def test_a_broken_environment_is_named(change, words):
    environ = environment(1, 3, 29500) | change
    with pytest.raises(InputError) as caught:
        from_environment({name: value for name, value in environ.items() if value is not None})
    assert all(word in str(caught.value) for word in words)


def test_a_job_has_the_same_name_in_every_restart_and_no_other_has_it():
    assert job_name({}) is None
    assert job_name({"TORCHELASTIC_RUN_ID": "slurm-17"}) == "slurm-17"
    logs = "/tmp/torchelastic_ab/none_x7w2/attempt_{}/0/error.json"
    names = {
        job_name({"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_ERROR_FILE": logs.format(attempt)})
        for attempt in range(3)
    }
    assert names == {"none_x7w2"}
    assert job_name({"TORCHELASTIC_RUN_ID": "none"}) is None


@pytest.mark.parametrize(
    "changes, size, words",
    [
        (dict(batch_size=2), 3, ["3 processes", "batches of 2", "--batch-size"]),
        (dict(batch_size=4, batch_norm="local"), 3, ["leaves a process 1", "at least 2"]),
        (dict(batch_norm_groups=4), 2, ["batch_norm_groups=4", "--batch-norm local"]),
    ],
)
def test_too_many_processes_are_refused_in_words(changes, size, words):
    with pytest.raises(InputError) as caught:
        check_shares(Settings(**changes), 48, Group(0, size))
    assert all(word in str(caught.value) for word in words)
    check_shares(Settings(**changes), 48, ALONE)


def test_each_process_takes_a_gpu_of_its_own(monkeypatch):
    monkeypatch.setattr("semclust.distributed.choose_device", torch.device)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    assert Group(3, 4, 1, 2).device("cuda") == torch.device("cuda:1")
    assert Group(3, 4, 1, 2).device("cpu") == torch.device("cpu")
    for group, device, words in [
        (Group(2, 3, 2, 3), "cuda", ["3 processes", "2 GPU", "--device cpu"]),
        (Group(0, 2, 0, 2), "cuda:1", ["cuda:1", "2 processes"]),
    ]:
        with pytest.raises(InputError) as caught:
            group.device(device)
        assert all(word in str(caught.value) for word in words)


# ---- the same as one process -------------------------------------------------------------------------------

EARLY = dict(cluster_from=0.3, over_from=0.2)
CASES = {
    "default": {},
    "paper": dict(
        cluster_from=0,
        neighbours=0,
        tasks=("cluster", "under", "instance"),
        attraction=0,
        assign_by="query",
        nearest=0,
    ),
    "late": dict(over_from=0.25, over_until=0.5, cluster_from=0.75),  # after the second epoch no labels are renewed
    "symmetric": dict(symmetric=True, **EARLY),
    "simclr": dict(contrast="simclr", **EARLY),
    "instance-memory": dict(contrast="instance-memory", symmetric=True, **EARLY),
    "pooled": dict(classifier_input="pooled", projection_per_task=True, **EARLY),
    "instance": dict(tasks=("instance",)),
    "all-alike": dict(hard_samples=False, task_sum="sum", online=False, cross_cluster=False, **EARLY),
    # Rounding of so many layers turns which of two keys is nearest, and adds up from epoch to epoch.
    "resnet": dict(backbone="resnet10", width=8, precision="float32", nearest=0.0, epochs=3, **EARLY),
}
IN_TWO = dict(self_label_from=1.0, **EARLY)  # of two epochs, the second learns the clusters
LOCAL = dict(batch_norm="local", symmetric=True, **IN_TWO)
IN_BFLOAT16 = dict(precision="bfloat16", backbone="resnet10", width=8, **IN_TWO)


def settings_of(case: str) -> Settings:
    return tiny(**dict(epochs=4, batch_size=17) | CASES[case])  # a batch that two do not share evenly


def fit_case(group: Group, settings: Settings, n_images: int = 50) -> tuple:
    fitted = fitting.fit(make_images(n_images, np.arange(n_images) % 4), settings, group=group)
    scores = [row["score"] for row in fitted.history]
    return [row["loss"] for row in fitted.history], fitted.p, fitted.q, scores


def dim(x: torch.Tensor) -> torch.Tensor:
    """An augmentation of the user's own."""
    return x * torch.rand(len(x), 1, 1, 1)


def work_of_rank(group: Group, to_assign: list[tuple[str, str]]) -> dict:
    """All that is looked at below, in one start of the processes."""
    result: dict = {case: fit_case(group, settings_of(case)) for case in CASES}
    devices.computes_in_bfloat16 = lambda device: True  # this process is the test's own; other CPUs do so slowly
    for name, changes in (("local", LOCAL), ("own-views", dict(augment=dim, **IN_TWO)), ("bfloat16", IN_BFLOAT16)):
        training = fitting.start(make_images(50), tiny(batch_size=17, **changes), group=group)
        training.run_epoch()
        training.run_epoch()
        result[name] = checksums(training)
        result[f"{name}-precision"] = training.settings.precision
        result[f"{name}-y"] = {key: task.y.tolist() for key, task in training.learner.tasks.items()}
    devices.computes_in_bfloat16 = lambda device: group.first
    told: list[str] = []
    training = fitting.start(make_images(50), tiny(batch_size=17, **IN_BFLOAT16), told.append, group)
    result["mixed"] = training.settings.precision, told
    result["resumed"], result["unbroken"] = resumed_within_an_epoch(group)
    spoiled = fitting.start(make_images(48), tiny(augment=Spoiled(group.rank == 1), batch_norm="local"), group=group)
    result["spoiled"] = spoiled.run_epoch()[0]["skipped_steps"], checksums(spoiled)
    result["groups"] = fit_case(group, grouped(batch_norm="local"), 48)[0]
    result["norms"] = [normalised(group, *case) for case in NORMS]
    result["assigned"] = [assign_in_pieces(group, data, out) for data, out in to_assign]
    return result


def checksums(training: Training) -> dict[str, str]:
    state = {name: value for name, value in training.state().items() if value.is_floating_point()}
    return {name: checksum([value.float()]) for name, value in state.items()}


class Spoiled:
    """Views of which the first are not finite, on one rank."""

    def __init__(self, here: bool):
        self.here = here

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        bad, self.here = self.here, False
        return x * torch.nan if bad else x


class Stopped(Exception): ...


def resumed_within_an_epoch(group: Group) -> tuple[dict, dict]:
    """The state after two epochs, where the first rank alone had the state of a run that was stopped; and unbroken."""
    settings = tiny(batch_size=17, **IN_TWO)

    def stop(n_images: int) -> None:
        if training.epoch == 1 and training.step == 2:
            kept.update({name: value.clone() for name, value in training.state().items()})
            raise Stopped

    kept: dict[str, torch.Tensor] = {}
    training = fitting.start(make_images(50), settings, group=group)
    training.run_epoch(stop)
    with contextlib.suppress(Stopped):
        training.run_epoch(stop)
    resumed = fitting.start(make_images(50), settings, group=group)
    if group.first:
        resumed.load_state(kept, training.epoch, Path("kept"))
    assert resumed.take_over([{"epoch": 1}] if group.first else []) == [{"epoch": 1}]
    assert (resumed.epoch, resumed.step) == (1, 2)
    resumed.run_epoch()
    unbroken = fitting.start(make_images(50), settings, group=group)
    unbroken.run_epoch()
    unbroken.run_epoch()
    return checksums(resumed), checksums(unbroken)


def grouped(**changes) -> Settings:
    return tiny(epochs=1, batch_size=16, **changes)


@pytest.fixture(scope="module")
def ranks(sources: Path) -> list[dict]:
    return in_ranks(2, work_of_rank, to_assign(sources, "two"))


@pytest.mark.parametrize("case", CASES)
def test_two_processes_give_the_losses_and_labels_of_one(case: str, ranks: list[dict]):
    losses, p, q, scores = fit_case(ALONE, settings_of(case))
    shared_losses, shared_p, shared_q, shared_scores = ranks[0][case]
    np.testing.assert_allclose(shared_losses, losses, rtol=LOSSES_WITHIN)
    np.testing.assert_allclose(shared_p, p, atol=PROBABILITIES_WITHIN)
    np.testing.assert_allclose(shared_q, q, atol=PROBABILITIES_WITHIN)
    assert (shared_p.argmax(1) == p.argmax(1)).all()
    np.testing.assert_allclose(shared_scores, scores, atol=PROBABILITIES_WITHIN)  # NaN where there is none
    assert ranks[1][case][0] == shared_losses
    np.testing.assert_array_equal(ranks[1][case][3], shared_scores)
    assert len(ranks[1][case][1]) == 0  # what was found is the first one's


@pytest.mark.parametrize("name", ["local", "own-views", "bfloat16"])
def test_all_ranks_hold_the_same_state(name: str, ranks: list[dict]):
    assert ranks[0][name] == ranks[1][name]
    assert ranks[0][f"{name}-y"] == ranks[1][f"{name}-y"]
    assert ranks[0][f"{name}-precision"] == ("bfloat16" if name == "bfloat16" else "float32")


def test_where_one_rank_does_not_compute_in_bfloat16_none_does(ranks: list[dict]):
    """And the first one tells: the others are not heard."""
    for precision, told in (rank["mixed"] for rank in ranks):
        assert precision == "float32" and len(told) == 1 and "some process" in told[0]


def test_ranks_resume_within_an_epoch_to_the_bit(ranks: list[dict]):
    assert ranks[0]["resumed"] == ranks[0]["unbroken"] == ranks[1]["resumed"]


def test_a_step_that_is_spoiled_on_one_rank_is_skipped_on_all(ranks: list[dict]):
    assert ranks[0]["spoiled"] == ranks[1]["spoiled"]
    assert ranks[0]["spoiled"][0] == 1


def test_local_batch_norm_is_that_of_groups_in_one_process(ranks: list[dict]):
    """With the keys shuffled alike. Running statistics differ, so the first epoch is compared."""
    losses = fit_case(ALONE, grouped(batch_norm_groups=2), 48)[0]
    np.testing.assert_allclose(ranks[0]["groups"], losses, rtol=LOSSES_WITHIN)
    with_all = fit_case(ALONE, grouped(), 48)[0]
    assert abs(with_all[0] - losses[0]) > 100 * LOSSES_WITHIN  # so that the comparison says something


NORMS = [
    (nn.BatchNorm2d(3), (7, 3, 4, 5)),
    (nn.BatchNorm1d(5), (9, 5)),
    (nn.BatchNorm1d(2, affine=False, momentum=None), (6, 2, 3)),
    (nn.BatchNorm3d(2, track_running_stats=False), (5, 2, 2, 3, 2)),
]


def normalised(group: Group, norm: nn.Module, shape: tuple) -> list[np.ndarray]:
    """Output, gradients and running statistics of two steps of a batch norm."""
    norm = copy.deepcopy(norm)
    if not group.alone:
        synchronise_batch_norm(norm, group)
    numbers = torch.Generator().manual_seed(0)
    found = []
    for _ in range(2):
        x = 3 + 2 * torch.randn(shape, generator=numbers)
        upstream = torch.randn(shape, generator=numbers)
        own = group.part(x).clone().requires_grad_()
        y = norm(own)
        (y * group.part(upstream)).sum().backward()
        found += [group.gather(tensor.detach(), len(x)) for tensor in (y, own.grad)]
    gradients = [group.sum(parameter.grad) for parameter in norm.parameters()]
    return [x.numpy() for x in (*found, *gradients, *(buffer.float() for buffer in norm.buffers()))]


@pytest.mark.parametrize("case", range(len(NORMS)))
def test_synchronised_batch_norm_is_that_of_the_whole_batch(case: int, ranks: list[dict]):
    expected = normalised(ALONE, *NORMS[case])
    for rank in ranks:
        for found, wanted in zip(rank["norms"][case], expected, strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


# ---- prediction ----------------------------------------------------------------------------------------------


def small_predictor() -> Predictor:
    torch.manual_seed(0)
    settings = Settings(n_clusters=3, epochs=10, augment="natural", backbone="resnet10", width=4, projection_dim=8)
    return Predictor._blank(settings, (8, 8, 3), (0.0, 255.0))


def assign_in_pieces(group: Group, data: str, out: str) -> tuple:
    """``assign`` with pieces of a few images, so that there are several rounds."""
    torch.set_num_threads(1)
    semclust.predictor.stream_images = functools.partial(stream_images, chunk=5)  # type: ignore[attr-defined]
    try:
        done = assigning.assign(
            small_predictor(),
            data,
            torch.device("cpu"),
            out=Path(out) / "table.csv",
            embeddings=True,
            into=Path(out) / "sorted",
            group=group,
        )
    except InputError as error:
        return (str(error),)
    finally:
        semclust.predictor.stream_images = stream_images  # type: ignore[attr-defined]
    return done.n_images, done.n_skipped, done.few, done.figures


def tree(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.name.startswith(".")
    }


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> Path:
    folder, pixels = tmp_path_factory.mktemp("sources"), noisy_groups(38, channels=3)
    photos = save_images(folder / "photos", pixels)
    for broken in (3, 4, 5, 6, 7, 8, 31):
        (photos / f"{broken:02}.png").write_bytes(b"no image")
    ruined = save_images(folder / "ruined", pixels[:20])
    for broken in range(6, 20):
        (ruined / f"{broken:02}.png").write_bytes(b"no image")
    np.savez(folder / "rows.npz", images=pixels, labels=np.arange(38) % 4)
    np.save(folder / "floats.npy", noisy_groups(13, size=9, channels=3) / 255)
    save_images(folder / "few", pixels[:2])
    return folder


def to_assign(sources: Path, kind: str) -> list[tuple[str, str]]:
    """Data, and the folder for what is found about it."""
    names = ("photos", "ruined", "rows.npz", "floats.npy", "few")
    made = [(str(sources / name), str(sources / kind / name)) for name in names]
    for _, out in made:
        Path(out).mkdir(parents=True)
    return made


def test_shared_prediction_writes_the_bytes_of_one_process(sources: Path, ranks: list[dict]):
    alone = [assign_in_pieces(ALONE, *case) for case in to_assign(sources, "one")]
    one_folder, two_folder = str(sources / "one"), str(sources / "two")
    shared = [tuple(str(item).replace(two_folder, one_folder) for item in each) for each in ranks[0]["assigned"]]
    assert shared == [tuple(map(str, each)) for each in alone]
    assert "14 of 20 images cannot be read" in alone[1][0]
    assert alone[2][3]["acc"] > 0
    one, two = tree(sources / "one"), tree(sources / "two")
    assert one == two
    assert {"photos/table.csv", "photos/table-skipped.csv", "rows.npz/table-embeddings.npy"} <= set(one)


# ---- torchrun --------------------------------------------------------------------------------------------------

# Without pairs and in float32: the features of a few epochs are so alike that rounding decides who is whose
# neighbour, and that of bfloat16 turns the labels of a fifth of the images.
FIT = (
    "--epochs 6 --neighbours 0 --width 4 --batch-size 16 --device cpu --precision float32 --image-size 8 "
    "--cluster-from 0.3 --over-from 0.2 --no-report"
)


def torchrun(*args: object, n: int = 2) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(n)]
    return [*launcher, *map(str, args)]


def called(command: list[str], **environ: str) -> subprocess.CompletedProcess:
    return subprocess.run(command, env=own_environment(**environ), capture_output=True, text=True, timeout=300)


def own_environment(**environ: str) -> dict[str, str]:
    paths = os.pathsep.join(path for path in sys.path if path)
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths, **environ}


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    return save_images(tmp_path_factory.mktemp("data") / "photos", noisy_groups(72, channels=3))


@pytest.fixture(scope="module")
def restarted(photos: Path, tmp_path_factory) -> Path:
    """The run of a job of which a process was killed."""
    out = tmp_path_factory.mktemp("restarted")
    command = torchrun("--max-restarts", 2, "-m", "semclust", "fit", photos, "-k", 4, *FIT.split(), "--out", out)
    job = subprocess.Popen(
        command,
        env=own_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # so that its workers end with it, whatever happens here
    )
    try:
        run = RunFolder(out / "photos")
        until(lambda: run.checkpoint.exists() or job.poll() is not None)
        os.kill(process_of_rank(job.pid, 1), signal.SIGKILL)
        told, _ = job.communicate(timeout=300)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
        job.wait()
    assert job.returncode == 0, told
    assert "going on with" in told and "resuming after epoch" in told
    return run.path


def until(happened, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


def process_of_rank(parent: int, rank: int) -> int:
    """Among the children of torchrun."""
    for child in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
        if f"RANK={rank}\0".encode() in Path(f"/proc/{child}/environ").read_bytes().replace(b"LOCAL_RANK", b""):
            return int(child)
    raise AssertionError(f"there is no rank {rank}")


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc to find the process to kill")
def test_a_job_goes_on_in_its_own_run_after_a_process_was_killed(photos: Path, restarted: Path, tmp_path: Path):
    """And ends in the bytes of two processes that nothing happened to; one process finds nearly the same
    clusters: over six epochs, rounding can turn a label."""
    arguments = ["-m", "semclust", "fit", str(photos), "-k", "4", *FIT.split(), "--out"]
    unbroken = called(torchrun(*arguments, tmp_path / "two"))
    assert unbroken.returncode == 0, unbroken.stderr
    assert unbroken.stdout.count("run folder:") == 1  # one rank speaks
    two = tmp_path / "two" / "photos"
    for name in RESULTS:
        assert (restarted / name).read_bytes() == (two / name).read_bytes(), name
    assert [path.name for path in restarted.parent.iterdir()] == ["photos"]
    main([*arguments[2:], str(tmp_path / "one")])
    assert clustering_accuracy(clusters(tmp_path / "one" / "photos"), clusters(two)) >= 0.9


def clusters(run: Path) -> np.ndarray:
    return np.array([int(line.split(",")[1]) for line in (run / "assignments.csv").read_text().splitlines()[1:]])


def test_torchrun_predicts_to_the_same_bytes_and_speaks_once(photos: Path, restarted: Path, tmp_path: Path):
    arguments = ["-m", "semclust", "predict", str(restarted), str(photos), "--device", "cpu", "--out"]
    shared = called(torchrun(*arguments, tmp_path / "two.csv"))
    assert shared.returncode == 0, shared.stderr
    assert shared.stdout.count("72 images assigned") == 1
    main([*arguments[2:], str(tmp_path / "one.csv")])
    assert (tmp_path / "two.csv").read_bytes() == (tmp_path / "one.csv").read_bytes()


FAILS = """
import os, sys
from semclust import cli, fitting
from semclust.errors import InputError
if os.environ["RANK"] == "1":
    def check_suits(*args): raise InputError("This rank has a problem of its own.")
    fitting.check_suits = check_suits
cli.main(sys.argv[1:])
"""


@contextlib.contextmanager
def two_processes(folder: Path, *arguments: object) -> Iterator[list[subprocess.Popen]]:
    """Of Python, as torchrun would start them."""
    port = free_port()
    processes = [
        subprocess.Popen(
            [sys.executable, *map(str, arguments)],
            env=own_environment(**environment(rank, 2, port)),
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_an_error_of_one_process_ends_all_with_one_message(photos: Path, tmp_path: Path):
    with two_processes(tmp_path, "-c", FAILS, "fit", photos, "-k", 4, *FIT.split()) as processes:
        told = "".join(process.communicate(timeout=300)[1] for process in processes)
    assert [process.returncode for process in processes] == [1, 1]
    assert told.count("semclust: ") == told.count("This rank has a problem of its own.") == 1, told
    assert "Traceback" not in told


def test_a_signal_to_one_process_stops_all_with_a_checkpoint(photos: Path, tmp_path: Path):
    """And one process can go on with what two began."""
    arguments = ["-m", "semclust", "fit", photos, "-k", 4, *FIT.split(), "--epochs", 60]
    with two_processes(tmp_path, *arguments) as processes:
        run = RunFolder(tmp_path / "runs" / "photos")
        until(lambda: run.checkpoint.exists())
        processes[1].send_signal(signal.SIGTERM)
        told = "".join(process.communicate(timeout=300)[1] for process in processes)
    assert [process.returncode for process in processes] == [128 + signal.SIGTERM] * 2, told
    assert told.count("Stopped by SIGTERM") == told.count("--resume") == 1, told
    tensors, epoch, _ = run.newest_checkpoint(lambda message: None)
    assert len(run.read_metrics()) == epoch > 0
    training = fitting.start(open_images(photos, size=8), Settings(**from_json(run.read_config()["settings"])))
    tensors.pop("metrics")
    training.load_state(tensors, epoch, run.checkpoint)
    assert training.run_epoch()[0]["epoch"] == epoch + 1


LEAVES = """
import os
from pathlib import Path
from semclust.distributed import joined
with joined() as group:
    group.exchange(group.rank)
    import torch.distributed.nn  # as torch's compiler does
print(*(thread.read_text() for thread in Path("/proc/self/task").glob("*/comm")))
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc to see threads")
def test_nothing_of_a_group_outlives_it(tmp_path: Path):
    """A thread that is left can end the process by SIGABRT on Python's way out."""
    with two_processes(tmp_path, "-c", LEAVES) as processes:
        for process in processes:
            threads, errors = process.communicate(timeout=300)
            assert process.returncode == 0, errors
            assert threads and "gloo" not in threads


def test_other_commands_run_in_one_process(monkeypatch, capsys):
    for name, value in environment(0, 2, free_port()).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        main(["merge", "runs/photos", "1", "2"])
    assert ended.value.code == 1
    assert "without torchrun" in capsys.readouterr().err


# ---- whose run it is ---------------------------------------------------------------------------------------------


def test_a_job_finds_its_own_unfinished_run_only(tmp_path: Path):
    own_settings = {"n_clusters": 4, "random_state": 7, "precision": "bfloat16"}
    config = {"data": "photos", "labels": None, "fingerprint": "f", "settings": own_settings}

    def made(name: str, finished: bool = False, **changes) -> Path:
        run = RunFolder.create(tmp_path, name)
        run.write_config(config | {"job": "17"} | changes)
        if finished:
            (run.path / "summary.json").write_text("{}")
        return run.path

    def found(restarted: bool = False, **changes) -> Path | None:
        run = RunFolder.of_job(tmp_path, "17", config | changes, restarted)
        return run and run.path

    made("other-job", job="16")
    made("other-data", data="paintings")
    made("other-settings", settings=own_settings | {"n_clusters": 5})
    (tmp_path / "no-run").mkdir()
    (tmp_path / "no-run" / "config.json").write_text("{")
    assert found() is None
    finished = made("finished", finished=True)
    assert found() is None
    assert found(restarted=True) == finished
    own = made("own")
    assert found() == own
    assert found(settings=own_settings | {"precision": "float32"}) == own  # of a machine that computes in no other
    timed = own_settings | {"epochs": 60, "minutes": 2.0}
    made("timed", settings=timed)
    RunFolder(tmp_path / "timed").write_schedule({"epochs": 23})  # decided since
    assert found(settings=timed) == tmp_path / "timed"
    assert found(settings=own_settings | {"random_state": None}) == own
    assert found(settings=own_settings | {"random_state": 8}) is None
