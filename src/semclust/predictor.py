"""The finished model: encoder and classifier without anything that only training needs.

Shapes: N images, H x W pixels, c channels, C clusters of the fit, R of them that remain, d representation.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from semclust import __version__
from semclust.config import OWN_CODE, Settings, check, from_json, is_own_code, to_json
from semclust.data import Images, stream_images
from semclust.errors import DamagedFileError, InputError, in_short
from semclust.groups import Groups
from semclust.inference import usual_batch
from semclust.learner import Learner
from semclust.model import ClusterNetwork, LinearClassifier, build_encoder, channels_last, in_unit_range
from semclust.plan import labels_itself_in
from semclust.storage import as_state, check_shapes, load_into, read_json, read_tensors, write_json, write_tensors

FORMAT = 5
BATCH = 512
LARGEST = 1024  # side in pixels, as of the setting image_size


@dataclass
class Predictor:
    """Images in, probabilities and embeddings out; ``save`` and ``load`` without pickle."""

    settings: Settings
    image_shape: tuple[int, int, int]  # H, W, c that the network was trained on
    value_range: tuple[float, float]  # of float arrays: what 0 and 255 stand for
    network: ClusterNetwork
    groups: Groups  # what became of the clusters after the fit

    @classmethod
    def from_learner(
        cls, learner: Learner, settings: Settings, image_shape: tuple[int, int, int], value_range: tuple[float, float]
    ) -> "Predictor":
        """Take over a learner's weights for the target task: those of the teacher, where there was one."""
        made = cls._blank(settings, image_shape, value_range)
        task = learner.tasks["cluster"]
        taught = labels_itself_in(settings, settings.n_epochs - 1)
        kept = f"projections.{task.projection}."
        encoder = {}
        for name, value in learner.telling_encoder(taught).state_dict().items():
            if name.startswith(kept):
                encoder[f"projections.cluster.{name.removeprefix(kept)}"] = value
            elif not name.startswith("projections."):
                encoder[name] = value
        made.network.encoder.load_state_dict(as_state(encoder, made.network.encoder))
        made.network.classifier.load_state_dict(task.telling_classifier(taught).state_dict())
        return made

    @classmethod
    def _blank(
        cls, settings: Settings, image_shape: tuple[int, int, int], value_range: tuple[float, float]
    ) -> "Predictor":
        with torch.random.fork_rng(devices=[]):  # the weights are about to be replaced: draw from no one's numbers
            network = cls._blank_network(settings, image_shape)
        return cls(settings, image_shape, value_range, network, Groups(settings.n_clusters))

    @staticmethod
    def _blank_network(settings: Settings, image_shape: tuple[int, int, int]) -> ClusterNetwork:
        encoder, n_features = build_encoder(settings, image_shape, ["cluster"])
        dim, pooled = settings.projection_dim, settings.classifier_input == "pooled"
        classifier = LinearClassifier(n_features if pooled else dim, settings.n_clusters, settings.temperature)
        network = ClusterNetwork(encoder, classifier, pooled)
        channels_last(network).eval()
        return network

    def number_by_size(self, labels: np.ndarray) -> np.ndarray:
        """Renumber the clusters, 0 the largest of ``labels``; returns the old id of each new one."""
        sizes = np.bincount(labels, minlength=self.settings.n_clusters)
        order = np.argsort(-sizes, kind="stable")
        linear = self.network.classifier.linear
        with torch.no_grad():
            linear.weight.copy_(linear.weight[order.tolist()])
            linear.bias.copy_(linear.bias[order.tolist()])
        return order

    def stream(
        self, data: Any, on_image: Callable[[int], None] | None = None, turn: tuple[int, int] = (0, 1)
    ) -> Iterator[Images]:
        """Images from any source, part by part, in the size, channels and range that the network was trained on.
        turn: as in ``stream_images``."""
        H, W, c = self.image_shape
        return stream_images(data, size=(H, W), channels=c, value_range=self.value_range, on_image=on_image, turn=turn)

    @torch.no_grad()
    def __call__(self, pixels: np.ndarray, device: torch.device) -> tuple[np.ndarray, np.ndarray]:
        """Probabilities (N x R) and embeddings (N x d, unit length) of N x H x W x c uint8 pixels."""
        network = self.network.to(device)
        p: list[Tensor] = []
        q: list[Tensor] = []
        at_once = min(BATCH, usual_batch(device))
        for start in range(0, len(pixels), at_once):
            part = torch.tensor(pixels[start : start + at_once]).to(device)
            for parts, result in zip((p, q), network(in_unit_range(part.permute(0, 3, 1, 2))), strict=True):
                parts.append(result.cpu())
        return self.groups.apply(torch.cat(p).numpy()), torch.cat(q).numpy()

    def save(self, folder: Path) -> None:
        """Write config.json, model.safetensors and, where there are steps, groups.json. An earlier model in ``folder``
        is replaced, nothing else."""
        if folder.is_file() or ((folder / "config.json").exists() and not is_model(folder)):
            raise InputError(f"{str(folder)!r} holds something else than a model; choose another folder to save to.")
        folder.mkdir(parents=True, exist_ok=True)
        about = {
            "format": FORMAT,
            "semclust": __version__,
            "image_shape": list(self.image_shape),
            "value_range": list(self.value_range),
            "settings": to_json(self.settings),
        }
        write_tensors(folder / "model.safetensors", self.network.state_dict(), {"format": FORMAT})
        write_json(folder / "config.json", about)
        self.groups.write(folder)

    @classmethod
    def load(cls, folder: Path, backbone: nn.Module | None = None) -> "Predictor":
        """``backbone``: the module that was fitted, where it was the user's own."""
        if not folder.is_dir() or not (any(folder.glob("*.safetensors")) or (folder / "config.json").exists()):
            raise InputError(
                f"{str(folder)!r} is not a model folder or run; expected one that save() or `semclust fit` wrote, "
                "such as runs/photos."
            )
        about = read_json(folder / "config.json")
        if about.get("format") != FORMAT:
            raise DamagedFileError(
                f"{folder / 'config.json'} has format {about.get('format')!r}, written by semclust "
                f"{about.get('semclust', '(unknown version)')}; this version reads format {FORMAT}. "
                "Load it there, or fit again."
            )
        try:
            settings = Settings(**from_json(about["settings"]))
            check(replace(settings, backbone="auto", augment="auto"))  # either may stand for the user's own
            of_own_width = not isinstance(settings.backbone, str) or is_own_code(settings.backbone)
            undecided = settings.epochs is None or settings.augment == "auto" or settings.sees == "auto"
            if undecided or (settings.width is None and not of_own_width):
                raise ValueError("settings that were never decided on: epochs, augment, sees or width")
            H, W, c = map(int, about["image_shape"])
            low, high = map(float, about["value_range"])
            if min(H, W, c) < 1 or max(H, W) > LARGEST or c > 4:
                raise ValueError(f"image_shape {[H, W, c]}")
        except (KeyError, OverflowError, TypeError, ValueError) as error:
            raise DamagedFileError(
                f"{folder / 'config.json'} is damaged ({error!r}). Fit again, or restore it."
            ) from error
        if is_own_code(settings.backbone) and backbone is None:
            raise InputError(
                f"{folder} was fitted on your own backbone {str(settings.backbone).removeprefix(OWN_CODE)}; "
                "pass it: SemanticClusterer.load(path, backbone=YourModule())."
            )
        if backbone is not None:
            settings.backbone = backbone
        path = folder / "model.safetensors"
        tensors, _ = read_tensors(path)
        try:
            if not isinstance(settings.backbone, nn.Module):
                with torch.device("meta"):  # which takes no memory: first see whether it is as large as the file
                    check_shapes(cls._blank_network(settings, (H, W, c)), tensors, path)
            made = cls._blank(settings, (H, W, c), (low, high))
        except (MemoryError, OverflowError, RuntimeError) as error:
            raise DamagedFileError(
                f"{folder / 'config.json'} tells of a network that cannot be made ({in_short(error)}). "
                "Fit again, or restore it."
            ) from error
        load_into(made.network, tensors, path)
        made.groups = Groups.read(folder)
        return made


def is_model(folder: Path) -> bool:
    try:
        return "image_shape" in read_json(folder / "config.json")
    except DamagedFileError:
        return False
