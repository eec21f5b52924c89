"""What only a GPU can show. Skipped where there is none."""

import numpy as np
import pytest
import torch

from semclust import SemanticClusterer, preset
from semclust.arena.baselines import DeepCluster
from semclust.backbones import FoldedResNet, SmallImageResNet
from semclust.config import Settings
from semclust.data import open_images
from semclust.fitting import fit, start

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def stripes_and_spots(n: int = 120) -> np.ndarray:
    """Two kinds of coloured 16 px images: vertical stripes, and a bright square on noise."""
    random = np.random.default_rng(0)
    images = random.integers(0, 60, (n, 16, 16, 3), dtype=np.uint8)
    images[: n // 2, :, ::4] += 150
    images[n // 2 :, 4:10, 4:10] += 190
    return images


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
    The first has instance contrast alone, the second all tasks."""
    images = open_images(stripes_and_spots(480))
    settings = dict(n_clusters=2, epochs=8, width=16, batch_size=48, device="cuda", cluster_from=0.125, over_from=0.125)
    losses = []
    for records, compiles in ((False, False), (True, False), (True, True)):
        training = start(images, Settings(**settings | changes))
        training.engine.records, training.engine.compiles = records, compiles
        training._prepare_engine()
        losses.append([training.run_epoch()[0]["loss"] for _ in range(2)])
        assert (training._learn.graph is not None) == records if records else True
        assert training.engine.compiles == compiles  # no fallback
    return losses


@pytest.mark.parametrize("changes", [{}, {"symmetric": True}, {"contrast": "instance-memory"}], ids=str)
def test_recorded_and_compiled_steps_have_the_losses_of_plain_ones(changes):
    """bf16 rounds after other operations once they are fused, and the runs drift apart: 1 % in two epochs. Later ones
    learn from labels that rounding can turn (float32 against bf16 on a CPU: 0.1 % in two epochs, 1.4 % in four)."""
    plain, recorded, compiled = captured_and_plain(**changes)
    assert plain == pytest.approx(recorded, rel=1e-2)
    assert plain == pytest.approx(compiled, rel=1e-2)


def test_streamed_images_give_nearly_the_same_run():
    images = open_images(stripes_and_spots(480))
    settings = dict(n_clusters=2, epochs=3, width=16, batch_size=48, device="cuda")
    rows = [fit(images, Settings(images_on=where, **settings)).history[0]["loss"] for where in ("device", "host")]
    assert rows[0] == pytest.approx(rows[1], rel=1e-2)


def test_a_module_that_decides_by_its_values_is_trained_plainly_with_a_notice():
    class Undecided(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.convolution = torch.nn.Conv2d(3, 8, 3, stride=2)

        def forward(self, x):
            return self.convolution(x) if x.mean().item() < 1e9 else x

    heard: list[str] = []
    training = start(
        open_images(stripes_and_spots()),
        Settings(n_clusters=2, epochs=2, backbone=Undecided(), device="cuda"),
        heard.append,
    )
    for _ in range(2):
        training.run_epoch()
    assert len(heard) == 1 and "cannot be recorded" in heard[0]


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


@pytest.mark.parametrize("preset_name", ["default", "paper"])
def test_a_budget_of_time_is_kept(preset_name):
    images = open_images(stripes_and_spots(480))
    changes = dict(n_clusters=2, minutes=0.4, width=16, batch_size=48, device="cuda")
    fitted = fit(images, Settings(**preset(preset_name) | changes))
    assert 0.8 * 24 < fitted.seconds < 1.1 * 24
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
