"""The model as ONNX: the same probabilities and embeddings, for every kind of network."""

import json
import os
import sys

import numpy as np
import pytest
import torch
from torch import nn

from conftest import make_images, tiny
from semclust import __version__, export, fitting
from semclust.errors import InputError, SemclustError
from semclust.export import export_onnx

CPU = torch.device("cpu")
onnx = pytest.importorskip("onnx", reason="the extra onnx is not installed")
onnxruntime = pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")
pytest.importorskip("onnxscript", reason="the extra onnx is not installed")


def fitted(channels: int = 1, **changes):
    return fitting.fit(make_images(channels=channels), tiny(epochs=1, **changes)).predictor


@pytest.fixture(scope="module")
def predictor():
    return fitted()


@pytest.mark.parametrize(
    "channels, changes",
    [
        (3, dict(backbone="resnet18", width=2, sees="edges", batch_norm_groups=2)),
        (1, dict(backbone="resnet10", width=2, max_pool=True, classifier_input="pooled", projection_norm=False)),
    ],
    ids=["colour, edges, grouped norm", "grey, pool, pooled classifier"],
)
def test_networks_of_every_kind(channels, changes, tmp_path):
    predictor = fitted(channels, **changes)
    predictor.groups.merge([1, 3])
    predictor.groups.rename(1, "ships")
    before = {name: value.clone() for name, value in predictor.network.state_dict().items()}
    assert export_onnx(predictor, tmp_path / "model.onnx") < 1e-5
    assert not any(module.training for module in predictor.network.modules())
    for name, value in predictor.network.state_dict().items():
        assert torch.equal(value, before[name])
    assert os.listdir(tmp_path) == ["model.onnx"]
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    images = np.random.default_rng(3).integers(0, 256, (5, 8, 8, channels), dtype=np.uint8)
    p, q = session.run(["probabilities", "embedding"], {"images": images})
    wanted_p, wanted_q = predictor(images, CPU)
    assert p.shape == (5, 3) and q.shape == (5, 8)
    np.testing.assert_allclose(p, wanted_p, atol=1e-5)
    np.testing.assert_allclose(q, wanted_q, atol=1e-5)
    about = session.get_modelmeta().custom_metadata_map
    assert json.loads(about["clusters"]) == [0, 1, 2]
    assert json.loads(about["cluster_names"]) == ["0", "ships", "2"]
    assert json.loads(about["image_shape"]) == [8, 8, channels] and about["semclust"] == __version__
    assert json.loads(about["value_range"]) == [0, 255]


def test_a_file_is_never_overwritten(predictor, tmp_path):
    (tmp_path / "model.onnx").write_text("mine")
    with pytest.raises(InputError, match="exists and is not overwritten"):
        export_onnx(predictor, tmp_path / "model.onnx")
    assert (tmp_path / "model.onnx").read_text() == "mine"
    with pytest.raises(InputError, match="There is no folder"):
        export_onnx(predictor, tmp_path / "none" / "model.onnx")


def test_a_model_that_differs_is_not_written(predictor, tmp_path, monkeypatch):
    other = fitted(random_state=7)
    made = export._to_onnx(other)
    monkeypatch.setattr(export, "_to_onnx", lambda _: made)
    with pytest.raises(SemclustError, match="differs from the model by"):
        export_onnx(predictor, tmp_path / "model.onnx")
    assert os.listdir(tmp_path) == []


class ByValue(nn.Module):
    """A branch on what the images hold, which cannot be traced."""

    def forward(self, x):
        return x.flatten(1) if x.sum().item() > 3 else -x.flatten(1)


def test_a_backbone_that_cannot_be_exported_is_told(tmp_path):
    with pytest.raises(InputError, match="could not turn the model into ONNX"):
        export_onnx(fitted(backbone=ByValue()), tmp_path / "model.onnx")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("missing", ["onnx", "onnxruntime", "onnxscript"])
def test_without_a_package_the_extra_is_named(predictor, tmp_path, monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(InputError, match=r'pip install "semclust\[onnx\]"'):
        export_onnx(predictor, tmp_path / "model.onnx")
