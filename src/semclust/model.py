"""The networks: encoder f_theta with its momentum twin, and linear classifier f_phi.

Shapes: n batch, c channels, H x W pixels, D pooled feature, d representation, N images, C clusters.
"""

import copy
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from semclust.augment import resized, view_size
from semclust.backbones import FoldedResNet, SmallImageResNet, Sobel, build_backbone, pool, stop_counting
from semclust.config import Settings
from semclust.errors import InputError
from semclust.partition import cluster_means
from semclust.plan import crop_size_in

Network = TypeVar("Network", bound=nn.Module)

START_STEPS, START_MOMENTUM = 200, 0.9  # of a classifier that learns a partition
START_PROBABILITIES = 2**27  # at once
START_DECAY = 1e-4  # of its weights, which would grow without end where the clusters can be told apart
START_SHARE = 0.1  # of the images, below which a cluster is learned from as if it were so large


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
        *,
        view_size: tuple[int, int],
    ):
        """``view_size``: height and width of the views that it learned from, at last."""
        super().__init__()
        self.view_size = view_size
        self.register_buffer("mean", torch.zeros(n_channels, 1, 1))
        self.register_buffer("std", torch.ones(n_channels, 1, 1))
        self.edges = Sobel() if sobel else nn.Identity()
        self.backbone = backbone
        self.projections = nn.ModuleDict(
            {name: _projection(n_features, projection_dim, projection_norm) for name in projections}
        )
        stop_counting(self)

    def pooled(self, x: Tensor) -> Tensor:
        """The backbone's feature, pooled where the backbone leaves a map (n x D)."""
        return pool(self.backbone(self.edges((x - self.mean) / self.std)))

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Pooled feature h (n x D) and, for each projection, q (n x d, unit length)."""
        return self.project(self.pooled(x))

    def at_view_size(self, x: Tensor) -> Tensor:
        """Whole images as large as the views that the network learns from: things that it sees larger than it learned
        them, and in larger maps, have other features, which the classifier does not know."""
        return resized(x, self.view_size)

    def folded(self) -> Callable[[Tensor], tuple[Tensor, dict[str, Tensor]]] | None:
        """The same function with the weights as they are now, in bfloat16 and as fast as it predicts; None where there
        is no such."""
        if not isinstance(self.backbone, SmallImageResNet) or self.mean.device.type != "cuda":
            return None
        backbone = FoldedResNet(self.backbone)
        return lambda x: self.project(backbone(self.edges((x - self.mean) / self.std)))

    def project(self, h: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The pooled feature h (n x D) itself and its projections."""
        # In full precision: at tau = 0.1 a rounding of q in bfloat16 would move a similarity by 4 %.
        return h.float(), {name: F.normalize(p(h).float(), dim=1) for name, p in self.projections.items()}


def build_encoder(
    settings: Settings, image_shape: tuple[int, int, int], projections: Iterable[str]
) -> tuple[Encoder, int]:
    """f_theta for images of shape (H, W, c), and the dimension D of its pooled feature."""
    size = view_size(settings.augment, image_shape, crop_size_in(settings, settings.n_epochs - 1))
    views = view_size(settings.augment, image_shape, settings.crop_size)
    how = settings.width, settings.max_pool, settings.sees == "edges"
    backbone, n_features = build_backbone(settings.backbone, image_shape, *how)
    if isinstance(settings.backbone, nn.Module) and views != image_shape[:2]:
        try:
            build_backbone(settings.backbone, (*views, image_shape[2]), *how)
        except InputError as error:
            raise InputError(
                f"{error}. Views are so small by crop_size={settings.crop_size:g}; for a network of one size only, "
                "say crop_size=1."
            ) from error
    encoder = Encoder(
        backbone,
        n_features,
        image_shape[2],
        projections,
        settings.projection_dim,
        settings.projection_norm,
        settings.sees == "edges",
        view_size=size,
    )
    return encoder, n_features


def _projection(n_features: int, dim: int, norm: bool) -> nn.Sequential:
    """MoCo v2's head: linear, ReLU, linear; with batch norm after the first where asked."""
    middle = [nn.BatchNorm1d(n_features)] if norm else []
    return nn.Sequential(
        nn.Linear(n_features, n_features, bias=not norm), *middle, nn.ReLU(), nn.Linear(n_features, dim)
    )


def in_unit_range(x: Tensor) -> Tensor:
    """Bytes (n x c x H x W) as floats from 0 to 1, as the encoder takes them."""
    return x.float().div(255).contiguous(memory_format=torch.channels_last)


def classifier_input(h: Tensor, q: Tensor, pooled: bool) -> Tensor:
    """What the classifier sees, of unit length: the pooled feature h (n x D) or the representation q (n x d)."""
    return F.normalize(h, dim=1) if pooled else q


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
        """Learn the clusters y of the features x (N x d) by logistic regression, from weights that point from the mean
        of all features to the mean of each cluster. By steps of one size, whose result changes little where rounding
        changes x a little; the features are centred for them, as all lie to one side. The gradient of a small cluster
        is scaled up: it is as small as the cluster, and of hundreds of clusters none would be learned in time. Of very
        many images and clusters a random part is enough."""
        weight, bias, C = self.linear.weight, self.linear.bias, len(self.linear.bias)
        if len(x) * C > START_PROBABILITIES:
            some = torch.randperm(len(x), device=x.device)[: START_PROBABILITIES // C]
            x, y = x[some], y[some]
        mean = x.mean(0)
        x = (x - mean) / self.tau
        centre, size = cluster_means(x, y, C)
        share = size.clamp(min=1) / len(x)
        weight.copy_(F.normalize(centre, dim=1))
        bias.copy_(share.log())
        faster = torch.where(size > 0, START_SHARE / share, 1.0).clamp(min=1)
        largest = 0.5 * (1 + x.square().sum(1).mean())  # no second derivative of the cross entropy is larger
        velocity, velocity_bias = torch.zeros_like(weight), torch.zeros_like(bias)
        for _ in range(START_STEPS):
            error = (F.linear(x, weight, bias).softmax(1) - F.one_hot(y, C)) * (faster / len(x))
            velocity.mul_(START_MOMENTUM).add_(error.T @ x + START_DECAY * weight)
            velocity_bias.mul_(START_MOMENTUM).add_(error.sum(0))
            weight.sub_(velocity / largest)
            bias.sub_(velocity_bias / largest)
        bias.sub_(weight @ mean / self.tau)

    @torch.no_grad()
    def choose_nearest(self, x: Tensor, y: Tensor) -> None:
        """Predict the cluster whose mean is nearest: |x - c|^2 differs from -2 (c x - |c|^2 / 2) by |x|^2."""
        centre, _ = cluster_means(x, y, len(self.linear.bias))
        self.linear.weight.copy_(centre)
        self.linear.bias.copy_(-centre.square().sum(1) / (2 * self.tau))


class ClusterNetwork(nn.Module):
    """f_theta and f_phi together, for one task: what predicts."""

    def __init__(self, encoder: Encoder, classifier: LinearClassifier, pooled: bool):
        super().__init__()
        self.encoder, self.classifier, self.pooled = encoder, classifier, pooled

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Probabilities p (n x C) and representation q (n x d) of images in [0, 1] (n x c x H x W)."""
        h, representations = self.encoder(self.encoder.at_view_size(x))
        (q,) = representations.values()
        return self.classifier(classifier_input(h, q, self.pooled)).softmax(1), q


def momentum_twin(network: Network) -> Network:
    """f_theta~: the same structure and the same start; moved by ``follow`` only."""
    twin = copy.deepcopy(network)
    return twin.requires_grad_(False)


@torch.no_grad()
def follow(twin: nn.Module, encoder: nn.Module, momentum: float) -> None:
    """theta~ <- m theta~ + (1 - m) theta."""
    torch._foreach_lerp_(list(twin.parameters()), list(encoder.parameters()), 1 - momentum)


def channels_last(module: nn.Module) -> nn.Module:
    """Lay the weights of convolutions out as CPUs and GPUs convolve fastest."""
    return module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
