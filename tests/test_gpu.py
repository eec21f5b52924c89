"""What only a GPU can show. Skipped where there is none."""

import contextlib
import dataclasses
import gc
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from conftest import BadView, TinyBackbone
from ranks import in_ranks
from semclust import SemanticClusterer, metrics, preset, train
from semclust.arena.baselines import DeepCluster
from semclust.backbones import FoldedResNet, SmallImageResNet
from semclust.cli import main
from semclust.config import Settings
from semclust.data import open_images
from semclust.distributed import ALONE, Group
from semclust.engine import RecordedStep
from semclust.errors import InputError, NotFiniteError
from semclust.fitting import fit, start
from semclust.inference import INFERENCE_BATCH
from semclust.run_folder import RunFolder
from semclust.storage import on_host
from semclust.train import Training

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def stripes_and_spots(n: int = 120) -> np.ndarray:
    """Two kinds of coloured 16 px images: vertical stripes, and a bright square on noise."""
    random = np.random.default_rng(0)
    images = random.integers(0, 60, (n, 16, 16, 3), dtype=np.uint8)
    images[: n // 2, :, ::4] += 150
    images[n // 2 :, 4:10, 4:10] += 190
    return images


EARLY = dict(n_clusters=2, epochs=8, cluster_from=0.125, over_from=0.125)  # all tasks from the second epoch on


def begin(n: int = 480, heard: Callable[[str], None] = lambda message: None, **changes) -> Training:
    """A run whose steps of 48 images are recorded, and not compiled."""
    return start(
        open_images(stripes_and_spots(n)), Settings(**EARLY | dict(batch_size=48, device="cuda") | changes), heard
    )


def is_recorded(training: Training) -> bool:
    return isinstance(training._learn, RecordedStep) and training._learn.graph is not None


@pytest.mark.parametrize("contrast", ["moco", "simclr", "instance-memory"])
def test_a_fit_on_the_gpu_predicts_the_same_on_the_cpu(contrast):
    X = stripes_and_spots()
    model = SemanticClusterer(n_clusters=2, epochs=4, width=8, contrast=contrast, device="cuda").fit(X)
    on_gpu = model.predict_proba(X)
    on_cpu = model.set_params(device="cpu").predict_proba(X)
    assert np.isfinite(on_gpu).all()
    np.testing.assert_allclose(on_gpu, on_cpu, atol=2e-2)


def test_losses_on_gpu_and_cpu_start_alike():
    """Random numbers differ between devices, and bf16 rounds: the first epoch's losses are close, not equal."""
    images = open_images(stripes_and_spots())
    settings = dict(n_clusters=2, epochs=1, width=8, learning_rate=0.0)
    rows = [fit(images, Settings(device=device, **settings)).history[0] for device in ("cpu", "cuda")]
    assert rows[0]["loss"] == pytest.approx(rows[1]["loss"], rel=0.05)


def captured_and_plain(**changes) -> list[list[float]]:
    """The losses of the first epochs, plain, recorded, and compiled and recorded, from the same random numbers.
    The first has instance contrast alone, the second all tasks, or the network's own labels."""
    images = open_images(stripes_and_spots(480))
    settings = EARLY | dict(width=16, batch_size=48, device="cuda", nearest_from=0.125)
    losses = []
    for records, compiles in ((False, False), (True, False), (True, True)):
        training = start(images, Settings(**settings | changes))
        training.engine.records, training.engine.compiles = records, compiles
        training._prepare_engine()
        losses.append([training.run_epoch()[0]["loss"] for _ in range(2)])
        assert (training._learn.graph is not None) == records if records else True
        assert training.engine.compiles == compiles  # no fallback
    return losses


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"symmetric": True},
        {"contrast": "instance-memory"},
        {"batch_norm_groups": 4},
        {"self_label_from": 0.125, "self_label_confidence": 0.0},
    ],
    ids=str,
)
def test_recorded_and_compiled_steps_have_the_losses_of_plain_ones(changes):
    """bf16 rounds after other operations once they are fused, and the runs drift apart: on an H200 hardly in the first
    epoch and by up to 2.1 % in the second. Later ones learn from labels that rounding can turn (float32 against bf16 on
    a CPU: 0.1 % in two epochs, 1.4 % in four)."""
    plain, recorded, compiled = captured_and_plain(**changes)
    assert plain == pytest.approx(recorded, rel=1e-2)
    assert plain == pytest.approx(compiled, rel=3e-2)


def test_views_for_the_score_are_not_rounded():
    """Steps compute in bfloat16; places in an image would be off by half a pixel in that."""
    images = open_images(stripes_and_spots())
    training = start(images, Settings(n_clusters=2, epochs=12, width=16, device="cuda"))
    seen = []
    changed = training._changed
    training._changed = lambda x: seen.append(changed(x)) or seen[-1]
    rows = [training.run_epoch()[0] for _ in range(12)]
    assert seen and all(view.dtype == torch.float32 for view in seen)
    assert torch.equal(seen[0], seen[1])  # the same views in every epoch
    assert 0.5 < rows[-1]["score"] <= 1


def test_streamed_images_give_nearly_the_same_run():
    images = open_images(stripes_and_spots(480))
    settings = dict(n_clusters=2, epochs=3, width=16, batch_size=48, device="cuda")
    rows = [fit(images, Settings(images_on=where, **settings)).history[0]["loss"] for where in ("device", "host")]
    assert rows[0] == pytest.approx(rows[1], rel=1e-2)


class Undecided(TinyBackbone):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.mean().item() < 1e9 else x


def learn_undecided() -> tuple[list[str], bool]:
    """What is told; and whether another run's steps are recorded after that."""
    heard: list[str] = []
    training = begin(heard=heard.append, backbone=Undecided(3))
    for _ in range(2):
        training.run_epoch()
    torch.cuda.empty_cache()
    other = begin()
    other.run_epoch()
    return heard, is_recorded(other)


def test_a_module_that_decides_by_its_values_is_trained_plainly_with_a_notice(apart):
    """And leaves nothing in torch's memory that would be in the way of what comes after it."""
    heard, recorded = apart["undecided"]
    assert len(heard) == 1 and "cannot be recorded" in heard[0]
    assert recorded


def test_a_network_predicts_the_same_with_its_batch_norms_folded():
    torch.manual_seed(0)
    for max_pool in (False, True):
        network = SmallImageResNet("resnet18", 3, 64, max_pool).cuda().to(memory_format=torch.channels_last)
        for norm in network.modules():
            if isinstance(norm, torch.nn.BatchNorm2d):
                torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
                torch.nn.init.normal_(norm.bias, 0, 0.1)
        x = torch.randn(64, 3, 32, 32, device="cuda")
        with torch.no_grad():
            for _ in range(5):
                network(x)
            network.eval()
            expected, folded = network(x), FoldedResNet(network)(x)
        assert (expected - folded).norm() / expected.norm() < 0.02


def test_a_run_in_float32_takes_features_in_float32():
    for precision, rounds in (("float32", False), ("bfloat16", True)):
        training = begin(precision=precision)
        training.run_epoch()
        found, _ = training.features()
        x = torch.from_numpy(stripes_and_spots(480)).cuda().permute(0, 3, 1, 2)
        with torch.no_grad():
            expected, _ = training.learner.encoder.eval()(training._whole(x))
        apart = (found - expected).norm() / expected.norm()
        assert (apart > 1e-3) == rounds, (precision, apart)


@pytest.mark.parametrize("preset_name", ["default", "paper"])
def test_a_budget_of_time_is_kept(preset_name):
    images = open_images(stripes_and_spots(480))
    changes = dict(n_clusters=2, minutes=0.4, width=16, batch_size=48, device="cuda")
    fitted = fit(images, Settings(**preset(preset_name) | changes))
    assert 0.8 * 24 < fitted.seconds < 1.1 * 24, [len(fitted.history), fitted.warnings]
    assert len(fitted.history) >= 10 and fitted.history[-1]["learning_rate"] < 1e-3


def test_a_recorded_step_of_deepcluster_learns_as_a_plain_one():
    images = open_images(stripes_and_spots(480))
    settings = Settings(n_clusters=2, epochs=4, width=16, batch_size=48, device="cuda", tasks=("instance",))
    losses = []
    for records in (False, True):
        training = start(images, settings, kind=DeepCluster)
        training.engine.records = records
        losses.append([training.run_epoch()[0]["loss"] for _ in range(2)])
    assert losses[0] == pytest.approx(losses[1], rel=0.02)


# ---- faults --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("contrast, symmetric", [("moco", False), ("simclr", True), ("instance-memory", False)])
def test_a_recorded_step_that_is_not_finite_changes_nothing_and_the_next_one_learns(contrast, symmetric):
    """Ten steps an epoch, of which the fourth and later ones are recorded; the 17th of all is NaN."""
    training = begin(augment=BadView(17), backbone=TinyBackbone(3), contrast=contrast, symmetric=symmetric)
    states: list[dict[str, Tensor]] = []
    recorded: list[bool] = []

    def look(n_images: int) -> None:
        if n_images:
            states.append(on_host(training.state()))
            recorded.append(is_recorded(training))

    rows = [training.run_epoch(look)[0] for _ in range(2)]
    before, spoiled, after = states[15:18]
    assert all(recorded[15:18])
    assert [row["skipped_steps"] for row in rows] == [0, 1] and math.isfinite(rows[1]["loss"])
    assert spoiled["losses"][6].isnan().all() and after["losses"][[5, 7]].isfinite().all()
    learnt = [name for name in before if name.startswith(("learner.", "velocity."))]
    moved = {name for name in learnt if not torch.equal(before[name], spoiled[name])}
    assert all(name.startswith("learner.twin.") and "running" not in name for name in moved)  # it follows the weights
    assert all(spoiled[name].isfinite().all() for name in learnt)
    for kind in ("velocity.0", "learner.encoder.backbone.norm.running_mean", "learner.instance_memory.keys"):
        assert not torch.equal(spoiled[kind], after[kind])
        assert not torch.equal(states[14][kind], before[kind])  # each step changes it


def test_three_recorded_steps_in_a_row_that_are_not_finite_are_an_error():
    training = begin(augment=BadView(16, 17, 18), backbone=TinyBackbone(3))
    training.run_epoch()
    with pytest.raises(NotFiniteError, match="3 times in a row, at last at step 8 of epoch 2"):
        training.run_epoch()
    assert is_recorded(training)


class Hungry(TinyBackbone):
    """Takes 128 MiB of the GPU for each image while it looks at it: 6 GiB for a batch of 48. One by one, so that
    nothing else is cut from a large block, which then could not be given back."""

    def forward(self, x: Tensor) -> Tensor:
        taken = [torch.empty(128 * 2**20, dtype=torch.uint8, device=x.device) for _ in x]
        result = super().forward(x)
        del taken
        return result


@contextlib.contextmanager
def memory_left(gib: float) -> Iterator[None]:
    """Let this process take so much more of the GPU than it has."""
    gc.collect()
    torch.cuda.empty_cache()
    allowed = torch.cuda.memory_reserved() + gib * 2**30
    torch.cuda.set_per_process_memory_fraction(allowed / torch.cuda.mem_get_info()[1])
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()


def learn_with_little_memory(contrast: str, records: bool) -> dict[str, Any]:
    """6 GiB do not fit into 4.5; their half does, with a third of that to spare for the workspaces of libraries."""
    heard: list[str] = []
    training = begin(96, heard.append, backbone=Hungry(3), contrast=contrast, compile=records)
    with memory_left(4.5):
        rows = [training.run_epoch()[0] for _ in range(4)]
    found = {"parts": training.parts, "batch": training.inference.batch, "recorded": is_recorded(training)}
    by_few = training.features()[1]
    training.inference.batch = INFERENCE_BATCH
    by_all = training.features()[1]
    apart = max(float((by_few[name] - by_all[name]).abs().max()) for name in by_all)
    losses = [row["loss"] for row in rows if not row["skipped_steps"]]
    return found | {"heard": heard, "losses": losses, "apart": apart}


CASES = [("simclr", True), ("moco", False), ("moco", True)]  # contrast, and whether steps are to be recorded


def work_apart(alone: Group) -> dict[str, Any]:
    found: dict[str, Any] = {str(case): learn_with_little_memory(*case) for case in CASES}
    return found | {"undecided": learn_undecided()}


@pytest.fixture(scope="module")
def apart() -> dict[str, Any]:
    """What is found in a process of its own, since it is about the state of torch's memory."""
    return in_ranks(1, work_apart)[0]


@pytest.mark.parametrize("contrast, records", CASES)
def test_a_gpu_that_is_out_of_memory_gets_smaller_parts_and_batches(contrast, records, apart):
    """The two networks of moco run side by side, and a graph would keep the memory of both at once: too much to be
    recorded here, so such a run goes on plainly."""
    found, recorded = apart[str((contrast, records))], contrast == "simclr"
    assert found["parts"] == 2 and found["recorded"] == recorded
    assert found["heard"][0].startswith("The device is out of memory: each step of 48 images now goes in 2 parts")
    assert any("cannot be recorded" in message for message in found["heard"]) == (records and not recorded)
    assert found["batch"] < 48  # how much less: beside a graph, which keeps its memory, there is not much
    told = [message for message in found["heard"] if "labels are now renewed" in message]
    assert told[-1].endswith(f"by batches of {found['batch']} images.")
    assert len(found["losses"]) == 4 and np.isfinite(found["losses"]).all()
    assert found["apart"] < 2e-2  # bf16 of a unit vector


def test_a_run_with_recorded_steps_goes_on_within_an_epoch_as_if_it_had_not_stopped(tmp_path):
    """The random numbers are the same to the bit. Losses and weights are not: sums on a GPU have no fixed order, and
    after a stop the first three steps are plain ones, of other kernels. Of ten steps, five are taken after the stop;
    without the noise of bf16, losses differ by less than 0.2 %, and the weights by less than a tenth of how far they
    moved in these steps. With other random numbers both are far off."""
    run, changes = RunFolder.create(tmp_path, "run"), dict(width=8, precision="float32")
    numbers: dict[Training, list[Tensor]] = {}

    def epoch(training: Training) -> Tensor:
        """Its losses."""

        def look(n_images: int) -> None:
            if n_images:
                numbers.setdefault(training, []).append(training.state()["random.1"])
            if n_images and training.epoch == 1 and training.step == 5 and not run.checkpoint.exists():
                assert is_recorded(training)
                run.write_checkpoint(on_host(training.state()), training.epoch)
                at_stop.append(weights(training))

        training.run_epoch(look)
        return training.losses[:, 0]

    def weights(training: Training) -> Tensor:
        return torch.cat([parameter.detach().flatten() for parameter in training.trained])

    at_stop: list[Tensor] = []
    unbroken = begin(**changes)
    epoch(unbroken)
    expected = epoch(unbroken)

    resumed = begin(**changes)
    resumed.load_state(*run.newest_checkpoint(print))
    assert (resumed.epoch, resumed.step) == (1, 5) and torch.equal(weights(resumed), at_stop[0])
    losses = epoch(resumed)
    assert is_recorded(resumed) and len(numbers[resumed]) == 5
    assert all(torch.equal(a, b) for a, b in zip(numbers[unbroken][-5:], numbers[resumed], strict=True))
    torch.testing.assert_close(losses, expected, rtol=2e-3, atol=0)
    apart, moved = (weights(resumed) - weights(unbroken)).norm(), (weights(unbroken) - at_stop[0]).norm()
    assert apart < 0.1 * moved


# ---- several processes ---------------------------------------------------------------------------------------


def test_torchrun_with_one_process_finds_the_clusters_of_a_plain_run(tmp_path):
    """Nearly: sums on a GPU have no fixed order, which can turn the label of an image."""
    images = stripes_and_spots(180)[:150]  # 90 and 60: clusters are numbered by size
    np.savez(tmp_path / "images.npz", images=images)
    fitting = f"fit {tmp_path / 'images.npz'} -k 2 --epochs 8 --width 8 --device cuda --no-report --out".split()
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1", "-m", "semclust"]
    paths = os.pathsep.join(path for path in sys.path if path)
    ended = subprocess.run(
        [*launcher, *fitting, str(tmp_path / "by-torchrun")],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr
    main([*fitting, str(tmp_path / "plain")])
    by_torchrun, plain = (clusters(tmp_path / kind / "images") for kind in ("by-torchrun", "plain"))
    assert len(by_torchrun) == 150 and len(set(plain)) == 2
    assert metrics.evaluate(by_torchrun, plain)["acc"] >= 0.95


def clusters(run: Path) -> np.ndarray:
    rows = (run / "assignments.csv").read_text().splitlines()[1:]
    return np.array([int(row.split(",")[1]) for row in rows])


class Talkative(Group):
    """One process that tells itself all that several would tell each other."""

    alone = False


def fit_with(group: Group, precision: str) -> tuple[list[float], np.ndarray]:
    """Losses and probabilities of plain steps. In float32 without TF32, whose 10 bits would hide what is compared."""

    def exact_kernels(device: torch.device) -> contextlib.AbstractContextManager[None]:
        return torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False)

    with pytest.MonkeyPatch.context() as patch:
        if precision == "float32":
            patch.setattr(train, "fast_kernels", exact_kernels)
        settings = Settings(**EARLY | dict(epochs=4, width=8, batch_size=47, device="cuda", compile=False))
        fitted = fit(
            open_images(stripes_and_spots(240)), dataclasses.replace(settings, precision=precision), group=group
        )
    return [row["loss"] for row in fitted.history], fitted.p


# One process against several: of float32 the sums have another order, bf16 rounds them. The first epoch learns from no
# labels; the partition after it sums in no fixed order on a GPU, so that a label or two may differ from run to run.
WITHIN = {"float32": (1e-4, 2e-2), "auto": (3e-2, 3e-2)}  # the first epoch, and the second


def told_by_nccl(alone: Group) -> dict[str, Any]:
    """What the exchanges of a group of one give, on the GPU; and its fits."""
    dist.init_process_group("cpu:gloo,cuda:nccl")
    group = Talkative()
    device = group.device("cuda")
    x = torch.arange(6.0, device=device).view(3, 2)
    one, two = x.clone(), x[0].clone()
    group.sum_all([one, two])
    shared = x.t().clone()
    group.share([shared, shared.t()])
    averaged = x.clone()
    group.average([averaged])
    try:
        group.check_same("a", "What", "Next.")
        differs = False
    except InputError:
        differs = True
    found = {
        "device": str(device),
        "sums": [tensor.tolist() for tensor in (group.sum(x.clone()), one, averaged, group.gather(x, 3))],
        "to_first": [group.gather_to_first(x, 3).tolist(), group.to_first("b")],
        "row": two.tolist(),
        "shared": shared.tolist(),
        "whole": (group.all_true(True), group.all_true(False), group.highest(7)),
        "made": (group.from_first(lambda: "c"), group.in_turn(lambda: "d"), group.exchange("e")),
        "differs": differs,
        "fits": {precision: fit_with(group, precision) for precision in WITHIN},
    }
    dist.destroy_process_group()
    return found


@pytest.fixture(scope="module")
def fits_of_one() -> dict[str, tuple[list[float], np.ndarray]]:
    return {precision: fit_with(ALONE, precision) for precision in WITHIN}


def compare(found: tuple[list[float], np.ndarray], expected: tuple[list[float], np.ndarray], precision: str) -> None:
    """Losses of the first two epochs, and in float32 the clusters."""
    for loss, wanted, within in zip(found[0], expected[0], WITHIN[precision], strict=False):
        assert loss == pytest.approx(wanted, rel=within)
    if precision == "float32":
        assert metrics.evaluate(found[1].argmax(1), expected[1].argmax(1))["acc"] > 0.9


def test_nccl_carries_all_that_processes_tell_each_other(fits_of_one):
    (found,) = in_ranks(1, told_by_nccl)
    x = [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
    assert found["device"] == "cuda:0"
    assert found["sums"] == [x] * 4 and found["row"] == x[0]
    assert found["to_first"] == [x, ["b"]] and found["shared"] == [[0.0, 2.0, 4.0], [1.0, 3.0, 5.0]]
    assert found["whole"] == (True, False, 7) and found["made"] == ("c", "d", ["e"]) and not found["differs"]
    for precision in WITHIN:
        compare(found["fits"][precision], fits_of_one[precision], precision)


def through_the_host(collective: Callable[..., Any]) -> Callable[..., Any]:
    """The same exchange by gloo: NCCL refuses two ranks on one GPU, and gloo sends no tensors of one."""

    def call(*args: Any) -> None:
        lists = [arg if isinstance(arg, list) else [arg] for arg in args]
        on_gpu = [x for each in lists for x in each if isinstance(x, Tensor) and x.is_cuda]
        hosts = {id(x): x.detach().cpu() for x in on_gpu}
        moved = [[hosts.get(id(x), x) for x in each] for each in lists]
        collective(*(new if isinstance(arg, list) else new[0] for arg, new in zip(args, moved, strict=True)))
        for x in on_gpu:
            x.detach().copy_(hosts[id(x)])

    return call


def fits_of_rank(group: Group) -> dict[str, tuple[list[float], np.ndarray]]:
    """Two ranks share the GPU, each as the only one of its machine."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_reduce", "all_gather", "broadcast", "send", "recv"):
            patch.setattr(dist, name, through_the_host(getattr(dist, name)))
        group = dataclasses.replace(group, local_rank=0, local_size=1)
        return {precision: fit_with(group, precision) for precision in WITHIN}


@pytest.mark.parametrize("precision", WITHIN)
def test_two_processes_that_share_a_gpu_have_the_losses_of_one(precision, fits_of_one, fits_of_two):
    compare(fits_of_two[0][precision], fits_of_one[precision], precision)
    assert fits_of_two[1][precision][0] == fits_of_two[0][precision][0]


@pytest.fixture(scope="module")
def fits_of_two() -> list[dict[str, tuple[list[float], np.ndarray]]]:
    return in_ranks(2, fits_of_rank)
