"""Encoder f_theta, linear classifier f_phi, and what each clustering task keeps.

Shapes: n batch, c channels, H x W pixels, D pooled feature, d representation, N images, C clusters.
"""

import copy
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from semclust.backbones import BLOCKS, SmallImageResNet, Sobel
from semclust.core import SemanticMemory, bank_size
from semclust.errors import InputError


class Encoder(nn.Module):
    """f_theta: images in [0, 1] (n x c x H x W) to a pooled feature and a unit representation a task."""

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        backbone: nn.Module,
        n_features: int,
        n_channels: int,
        projections: Iterable[str],
        projection_dim: int = 128,
        projection_norm: bool = True,
        sobel: bool = False,
    ):
        super().__init__()
        self.register_buffer("mean", torch.zeros(n_channels, 1, 1))
        self.register_buffer("std", torch.ones(n_channels, 1, 1))
        self.edges = Sobel() if sobel else nn.Identity()
        self.backbone = backbone
        self.projections = nn.ModuleDict(
            {name: _projection(n_features, projection_dim, projection_norm) for name in projections}
        )

    def pooled(self, x: Tensor) -> Tensor:
        """The backbone's feature, pooled where the backbone leaves a map (n x D)."""
        return pool(self.backbone(self.edges((x - self.mean) / self.std)))

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Pooled feature h (n x D) and, for each projection, q (n x d, unit length)."""
        h = self.pooled(x)
        # In full precision: at tau = 0.1 a rounding of q in bfloat16 would move a similarity by 4 %.
        return h.float(), {name: F.normalize(p(h).float(), dim=1) for name, p in self.projections.items()}


def pool(feature: Tensor) -> Tensor:
    return feature.flatten(2).mean(2) if feature.ndim > 2 else feature


def _projection(n_features: int, dim: int, norm: bool) -> nn.Sequential:
    """MoCo v2's head: linear, ReLU, linear; with batch norm after the first where asked."""
    middle = [nn.BatchNorm1d(n_features)] if norm else []
    return nn.Sequential(
        nn.Linear(n_features, n_features, bias=not norm), *middle, nn.ReLU(), nn.Linear(n_features, dim)
    )


class LinearClassifier(nn.Module):
    """f_phi: logits W^T x / tau + B of unit features x. Without the 1 / tau the logits of a unit vector
    would be too small for any confident prediction."""

    def __init__(self, dim: int, n_clusters: int, tau: float):
        super().__init__()
        self.linear = nn.Linear(dim, n_clusters)
        self.tau = tau

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.linear.weight) / self.tau + self.linear.bias

    @torch.no_grad()
    def start_from(self, x: Tensor, y: Tensor) -> None:
        """Point each cluster's weights from the mean of all features to the mean of its own."""
        mean = x.mean(0)
        self.linear.weight.copy_(F.normalize(self._means(x, y) - mean, dim=1))
        self.linear.bias.copy_(-(self.linear.weight @ mean) / self.tau)

    @torch.no_grad()
    def choose_nearest(self, x: Tensor, y: Tensor) -> None:
        """Predict the cluster whose mean is nearest: |x - c|^2 differs from -2 (c x - |c|^2 / 2) by |x|^2."""
        centre = self._means(x, y)
        self.linear.weight.copy_(centre)
        self.linear.bias.copy_(-centre.square().sum(1) / (2 * self.tau))

    def _means(self, x: Tensor, y: Tensor) -> Tensor:
        size = torch.bincount(y, minlength=len(self.linear.bias)).clamp(min=1)
        return torch.zeros_like(self.linear.weight).index_add_(0, y, x) / size[:, None]


class ClusterNetwork(nn.Module):
    """f_theta and f_phi together, for one task: what predicts."""

    def __init__(self, encoder: Encoder, classifier: LinearClassifier, pooled: bool):
        super().__init__()
        self.encoder, self.classifier, self.pooled = encoder, classifier, pooled

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Probabilities p (n x C) and representation q (n x d) of images in [0, 1] (n x c x H x W)."""
        h, representations = self.encoder(x)
        (q,) = representations.values()
        return self.classifier(F.normalize(h, dim=1) if self.pooled else q).softmax(1), q


@dataclass(frozen=True)
class TaskPlan:
    """When a clustering task learns."""

    n_clusters: int
    begins: int  # epoch from which it learns; from 0 on, its first labels are random
    guided_until: int  # epoch from which its labels come from its classifier alone


class ClusterTask(nn.Module):
    """One clustering of all images into C groups: its memory, classifier, labels and swap counts."""

    memory: SemanticMemory
    classifier: LinearClassifier
    y: Tensor
    s: Tensor

    def __init__(
        self, plan: TaskPlan, n_images: int, K: int, dim: int, classifier_dim: int, tau: float, projection: str
    ):
        super().__init__()
        self.plan, self.projection, self.n_clusters = plan, projection, plan.n_clusters
        self.memory = SemanticMemory(plan.n_clusters, bank_size(K, plan.n_clusters), dim)
        self.classifier = LinearClassifier(classifier_dim, plan.n_clusters, tau)
        self.register_buffer("y", torch.randint(plan.n_clusters, (n_images,)))  # N: random at first
        self.register_buffer("s", torch.ones(n_images))  # N: swaps, from 1


def momentum_twin(encoder: Encoder) -> Encoder:
    """f_theta~: the same structure and the same start; moved by ``follow`` only."""
    twin = copy.deepcopy(encoder)
    return twin.requires_grad_(False)


@torch.no_grad()
def follow(twin: nn.Module, encoder: nn.Module, momentum: float) -> None:
    """theta~ <- m theta~ + (1 - m) theta."""
    torch._foreach_lerp_(list(twin.parameters()), list(encoder.parameters()), 1 - momentum)


def channels_last(module: nn.Module) -> nn.Module:
    """Lay the weights of convolutions out as CPUs and GPUs convolve fastest."""
    return module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def build_backbone(
    backbone: str | nn.Module, image_shape: tuple[int, int, int], width: int | None, max_pool: bool, sobel: bool
) -> tuple[nn.Module, int]:
    """The network for images of shape (H, W, c), and the dimension of its pooled feature."""
    H, W, c = image_shape
    in_channels = 2 if sobel else c
    if isinstance(backbone, nn.Module):
        own = copy.deepcopy(backbone)
        return own, _n_features(own, (in_channels, H, W))
    # Small images get by with fewer layers and channels, and then train in a minute on a CPU.
    if backbone == "auto":
        backbone = "resnet18" if min(H, W) >= 32 else "resnet10"
    if backbone not in BLOCKS:
        raise InputError(f"backbone={backbone!r}: expected {', '.join(BLOCKS)}, or in Python an nn.Module.")
    width = width or max(16, min(64, min(H, W) ** 2 // 16 // 8 * 8))
    return SmallImageResNet(backbone, in_channels, width, max_pool), 8 * width


def _n_features(backbone: nn.Module, shape: tuple[int, int, int]) -> int:
    """Dimension of the pooled output of a user's module, found by running it on two blank images."""
    try:
        with torch.no_grad():
            device = next((p.device for p in backbone.parameters()), torch.device("cpu"))
            out = backbone.eval()(torch.zeros(2, *shape, device=device))
        if not isinstance(out, Tensor) or out.ndim < 2 or len(out) != 2:
            raise InputError(
                f"backbone {type(backbone).__name__} returned {getattr(out, 'shape', type(out).__name__)} for a batch "
                f"of 2 images; expected a tensor of shape (2, features) or (2, features, h, w)."
            )
        return pool(out).shape[1]
    except InputError:
        raise
    except Exception as error:  # a user's module can raise anything
        raise InputError(
            f"backbone {type(backbone).__name__} cannot take images of shape {shape} (channels, height, width): {error}"
        ) from error


class GroupedBatchNorm2d(nn.BatchNorm2d):
    """Batch norm over each of several parts of the batch: statistics of fewer images, so that a query
    cannot find its key by the batch they share (He et al. 2020 shuffle among GPUs to this end)."""

    groups: int = 1

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or len(x) < 2 * self.groups:
            return super().forward(x)
        return torch.cat([super(GroupedBatchNorm2d, self).forward(part) for part in x.tensor_split(self.groups)])


def group_batch_norm(module: nn.Module, groups: int) -> None:
    """Turn every BatchNorm2d of ``module`` into one that works on ``groups`` parts of the batch.

    In place, by its class: the weights stay where they are, also in a user's own module."""
    if groups == 1:
        return
    for child in module.modules():
        if type(child) is nn.BatchNorm2d:
            child.__class__ = GroupedBatchNorm2d
            child.groups = groups  # type: ignore[assignment]
