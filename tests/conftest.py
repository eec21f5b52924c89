"""Small images, small networks and small settings that the tests of whole fits share."""

import math
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from semclust.config import Settings
from semclust.data import Images, open_images
from semclust.errors import InputError

torch.set_num_threads(1)

RESULTS = (  # of a finished run, but for its settings and the time it took
    "metrics.csv",
    "last.ckpt",
    "model/config.json",
    "model/model.safetensors",
    "assignments.csv",
    "embeddings.npy",
    "probabilities.npy",
)


@pytest.fixture(autouse=True, scope="session")
def no_real_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test reads or fills the cache of the one who runs it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SEMCLUST_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True, scope="session")
def heeded_ctrl_c() -> Iterator[None]:
    """Also where the tests are run in the background of a script, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test begins with an empty one."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("SEMCLUST_CACHE", str(folder))
    return folder


@pytest.fixture(autouse=True)
def checkpoint_every_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine is."""
    monkeypatch.setattr("semclust.fitting.QUICK_CHECKPOINT", 100.0)


class TinyBackbone(nn.Module):
    """One convolution with batch norm: trains in milliseconds, always from the same weights."""

    def __init__(self, channels: int = 1, features: int = 8):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.convolution = nn.Conv2d(channels, features, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(features)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.convolution(x)).relu()


class BadView:
    """The image itself; in some steps of all that there are, counted from 1, NaN."""

    def __init__(self, *bad: int):
        self.bad, self.calls = bad, 0

    def __call__(self, x):
        if not torch.is_grad_enabled():  # for the score of an epoch, not for a step
            return x
        self.calls += 1
        return x * math.nan if (self.calls + 1) // 2 in self.bad else x


def noisy_groups(n: int = 48, size: int = 8, channels: int = 1, groups: int = 4, seed: int = 0) -> np.ndarray:
    """n x size x size x channels bytes: a random pattern for each group, image i in group i % groups, and noise."""
    rng = np.random.default_rng(seed)
    pattern = rng.integers(0, 256, (groups, size, size, channels))
    noise = rng.normal(0, 20, (n, size, size, channels))
    return np.clip(pattern[np.arange(n) % groups] + noise, 0, 255).astype(np.uint8)


def make_images(n: int = 48, labels: np.ndarray | None = None, **kwargs) -> Images:
    return Images(noisy_groups(n, **kwargs), [f"{i}.png" for i in range(n)], "patterns", labels)


def tiny(**changes) -> Settings:
    """Settings of a fit that takes a fraction of a second, with the same rounding on every CPU."""
    values = dict(n_clusters=4, epochs=2, batch_size=16, projection_dim=8, device="cpu", backbone=TinyBackbone())
    values["precision"] = "float32"
    values["tasks"] = ("cluster", "under", "over", "instance")
    return Settings(**values | changes)


def save_images(folder: Path, pixels: np.ndarray) -> Path:
    """Write n x H x W x c bytes as 00.png, 01.png, ..."""
    folder.mkdir(parents=True, exist_ok=True)
    for i, image in enumerate(pixels):
        Image.fromarray(image[..., 0] if image.shape[2] == 1 else image).save(folder / f"{i:02}.png")
    return folder


def refused(source: object, *words: str, **options) -> None:
    """Opening ``source`` is an error in which these words stand."""
    with pytest.raises(InputError) as caught:
        open_images(source, **options)
    for word in words:
        assert word in str(caught.value)
