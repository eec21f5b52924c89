"""The finished model as ONNX, for programs without Python: images in, probabilities and embedding out.

images         n x H x W x c, uint8: colours as they are, the normalisation is inside
probabilities  n x R, of the clusters that remain after merging
embedding      n x d, unit vectors

The metadata holds ids and names of the clusters, and what else is needed to prepare images.
"""

import copy
import json
import logging
import warnings
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from semclust import __version__
from semclust.errors import InputError, SemclustError, in_short
from semclust.predictor import Predictor
from semclust.storage import WholeFile, check_new_file

TOLERANCE = 1e-3  # of a probability or a coordinate; differences of rounding are a thousandth of that
BATCHES = (1, 2, 7)  # of random images that both models see


class ImagesIn(nn.Module):
    """The network with everything around it that ``Predictor`` does."""

    merge: Tensor

    def __init__(self, predictor: Predictor):
        super().__init__()
        self.network = copy.deepcopy(predictor.network).cpu().eval()
        # C x R: a 1 where a cluster of the fit went into one that remains.
        self.register_buffer("merge", torch.from_numpy(predictor.groups.apply(np.eye(predictor.groups.n_clusters))))

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        p, q = self.network(images.permute(0, 3, 1, 2).float().div(255))
        return p @ self.merge.float(), q


def export_onnx(predictor: Predictor, path: Path) -> float:
    """Write ``path``, which must not exist, after ONNX Runtime has found the same on random images.

    Returns the largest difference of a probability or coordinate."""
    try:
        import onnx
        import onnxruntime
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise InputError(f'ONNX needs more packages ({error}): pip install "semclust[onnx]"') from error

    check_new_file(path)
    model = _to_onnx(predictor)
    onnx.helper.set_model_props(model, _about(predictor))
    content = model.SerializeToString()

    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    random, difference = np.random.default_rng(0), 0.0
    for n in BATCHES:
        images = random.integers(0, 256, (n, *predictor.image_shape), dtype=np.uint8)
        expected = predictor(images, torch.device("cpu"))
        for found, wanted in zip(session.run(None, {"images": images}), expected, strict=True):
            difference = max(difference, float(np.abs(found - wanted).max()))
    if not difference < TOLERANCE:
        raise SemclustError(
            f"The ONNX model differs from the model by {difference:.2g} on random images, so it was not written. "
            "Please report this with the versions of torch, onnx and onnxruntime."
        )
    with WholeFile(path, replace=False) as file:
        file.write(content)
    return difference


def _to_onnx(predictor: Predictor):  # type: ignore[no-untyped-def]
    """The model as an onnx.ModelProto."""
    example = torch.zeros(2, *predictor.image_shape, dtype=torch.uint8)
    log = logging.getLogger("torch.onnx")
    level = log.level
    try:
        log.setLevel(logging.ERROR)  # it tells of packages that are not needed
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.onnx.export(
                ImagesIn(predictor),
                (example,),
                dynamo=True,
                verbose=False,
                input_names=["images"],
                output_names=["probabilities", "embedding"],
                dynamic_shapes={"images": {0: torch.export.Dim("n")}},
            )
    except Exception as error:  # of a backbone of the user's own that cannot be traced
        raise InputError(
            f"torch could not turn the model into ONNX ({in_short(error)}). With a backbone of your own, see "
            "https://pytorch.org/docs/stable/onnx.html for what can be exported."
        ) from error
    finally:
        log.setLevel(level)
    assert program is not None
    return program.model_proto


def _about(predictor: Predictor) -> dict[str, str]:
    """Text by name, as ONNX stores it; lists are JSON."""
    groups = predictor.groups
    return {
        "semclust": __version__,
        "clusters": json.dumps(groups.ids),
        "cluster_names": json.dumps([groups.names.get(cluster, str(cluster)) for cluster in groups.ids]),
        "image_shape": json.dumps(list(predictor.image_shape)),
        "value_range": json.dumps(list(predictor.value_range)),
    }
