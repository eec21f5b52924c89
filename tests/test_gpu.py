"""What only a GPU can show. Skipped where there is none."""

import numpy as np
import pytest
import torch

from semclust import SemanticClusterer
from semclust.config import Settings
from semclust.data import open_images
from semclust.fitting import fit

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
