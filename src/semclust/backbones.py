"""The network under the projection: residual networks for small images (He et al. 2016), as IIC and PICA
trim them, or a module of the user's own.

Shapes: n batch, c channels, H x W pixels, D dimension of the pooled feature.
"""

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from semclust.errors import InputError

BLOCKS = {"resnet10": (1, 1, 1, 1), "resnet18": (2, 2, 2, 2), "resnet34": (3, 4, 6, 3)}


class StemConvolution(nn.Conv2d):
    """A 3 x 3 convolution of images."""

    def __init__(self, in_channels: int, out_channels: int):
        super().__init__(in_channels, out_channels, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return convolve_pixels(x, self.weight) if x.is_cuda else super().forward(x)


def convolve_pixels(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A 3 x 3 convolution whose channels are filled up to 8 with zeros, as many as the matrix units of a GPU take:
    with the 3 channels of an image they would stand idle."""
    fill = (0, 0, 0, 0, 0, -x.shape[1] % 8)
    return F.conv2d(F.pad(x, fill), F.pad(weight, fill), bias, padding=1)


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions and a shortcut."""

    def __init__(self, in_channels: int, channels: int, stride: int):
        super().__init__()
        self.conv1 = convolution(in_channels, channels, stride)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = convolution(channels, channels)
        self.norm2 = nn.BatchNorm2d(channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != channels:
            self.shortcut = nn.Sequential(Shortcut(in_channels, channels, stride), nn.BatchNorm2d(channels))
        # The residual branch starts at zero: the network starts shallow, which keeps the momentum twin
        # close to it in the first steps.
        nn.init.zeros_(self.norm2.weight)

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(out + self.shortcut(x))


def convolution(in_channels: int, channels: int, stride: int = 1) -> nn.Conv2d:
    """Of 3 x 3 pixels."""
    kind = nn.Conv2d if stride == 1 else StridedConvolution
    return kind(in_channels, channels, 3, stride, padding=1, bias=False)


class StridedConvolution(nn.Conv2d):
    """A 3 x 3 convolution with a stride. Maps that are one pixel wide are so after any stride, and on a CPU get none
    across: in bfloat16 torch 2.13 gives such a stride's weights gradients of whatever lies in memory."""

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda or x.shape[3] > 1:
            return super().forward(x)
        return F.conv2d(x, self.weight, stride=(self.stride[0], 1), padding=1)


class Shortcut(nn.Conv2d):
    """A 1 x 1 convolution with a stride. On a CPU it skips the pixels first, which is the same: torch 2.13 writes
    out of bounds there in the backward pass of a strided one with fewer than 8 channels (channels-last)."""

    def __init__(self, in_channels: int, channels: int, stride: int):
        super().__init__(in_channels, channels, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda:
            return super().forward(x)
        return F.conv2d(x[:, :, :: self.stride[0], :: self.stride[1]], self.weight)


class SmallImageResNet(nn.Module):
    """A ResNet with a 3 x 3 stride-1 stem; images (n x c x H x W) to pooled features (n x D).

    ``max_pool`` adds PICA's pool after the stem (2 x 2, stride 2, padding 1: 32 px become 17 x 17).
    ``width`` is the number of channels of the first stage; D is 8 times that.
    """

    def __init__(self, name: str, in_channels: int, width: int = 64, max_pool: bool = False):
        super().__init__()
        self.name = name
        self.stem = nn.Sequential(StemConvolution(in_channels, width), nn.BatchNorm2d(width), nn.ReLU())
        if max_pool:
            self.stem.append(nn.MaxPool2d(2, stride=2, padding=1))
        stages: list[nn.Module] = []
        channels = width
        for stage, n_blocks in enumerate(BLOCKS[name]):
            for block in range(n_blocks):
                stride = 2 if stage > 0 and block == 0 else 1
                stages.append(BasicBlock(channels, width * 2**stage, stride))
                channels = width * 2**stage
        self.stages = nn.Sequential(*stages)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        return self.stages(self.stem(x)).mean((2, 3))


class FoldedResNet:
    """A ResNet as it predicts, with each batch norm folded into the convolution before it, in bfloat16 on a GPU:
    half of the passes over memory are gone."""

    def __init__(self, network: SmallImageResNet):
        stem, norm, *pool_and_relu = network.stem
        assert isinstance(stem, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d)
        self.stem = fold(stem, norm)
        self.pool = pool_and_relu[1] if len(pool_and_relu) > 1 else nn.Identity()
        self.blocks = []
        for block in network.stages:
            assert isinstance(block, BasicBlock)
            shortcut = fold(*block.shortcut) if isinstance(block.shortcut, nn.Sequential) else None
            stride = block.conv1.stride[0]
            self.blocks.append((fold(block.conv1, block.norm1), fold(block.conv2, block.norm2), shortcut, stride))

    def __call__(self, x: Tensor) -> Tensor:
        """Pooled features (n x D) of normalised images (n x c x H x W)."""
        x = x.to(torch.bfloat16, memory_format=torch.channels_last)
        x = self.pool(convolve_pixels(x, *self.stem).relu_())
        for (weight1, bias1), (weight2, bias2), shortcut, stride in self.blocks:
            beside = x if shortcut is None else F.conv2d(x, *shortcut, stride=stride)
            x = torch.cudnn_convolution_relu(x, weight1, bias1, (stride, stride), (1, 1), (1, 1), 1)
            x = torch.cudnn_convolution_add_relu(x, weight2, beside, 1.0, bias2, (1, 1), (1, 1), (1, 1), 1)
        return x.mean((2, 3), dtype=torch.float32)


def fold(convolution: nn.Conv2d, norm: nn.BatchNorm2d) -> tuple[Tensor, Tensor]:
    """Weight and bias of the convolution that does what both do when predicting."""
    assert norm.running_mean is not None and norm.running_var is not None
    scale = norm.weight / (norm.running_var + norm.eps).sqrt()
    weight = (convolution.weight * scale[:, None, None, None]).bfloat16()
    return weight.contiguous(memory_format=torch.channels_last), (norm.bias - norm.running_mean * scale).bfloat16()


class Sobel(nn.Module):
    """Horizontal and vertical edges of the grey image: n x c x H x W to n x 2 x H x W, as PICA feeds."""

    kernel: Tensor

    def __init__(self) -> None:
        super().__init__()
        horizontal = torch.tensor([[1.0, 0.0, -1.0], [2.0, 0.0, -2.0], [1.0, 0.0, -1.0]])
        self.register_buffer("kernel", torch.stack([horizontal, horizontal.T])[:, None])

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x.mean(1, keepdim=True), self.kernel.to(x.dtype), padding=1)


def pool(feature: Tensor) -> Tensor:
    return feature.flatten(2).mean(2) if feature.ndim > 2 else feature


def build_backbone(
    backbone: str | nn.Module, image_shape: tuple[int, int, int], width: int | None, max_pool: bool, sobel: bool
) -> tuple[nn.Module, int]:
    """The network for images of shape (H, W, c), and the dimension of its pooled feature. ``width``: of a named
    one, see ``plan.usual_width``."""
    H, W, c = image_shape
    in_channels = 2 if sobel else c
    if isinstance(backbone, nn.Module):
        own = copy.deepcopy(backbone)
        return own, _n_features(own, (in_channels, H, W))
    # Small images get by with fewer layers, and then train in a minute on a CPU.
    if backbone == "auto":
        backbone = "resnet18" if min(H, W) >= 32 else "resnet10"
    if not isinstance(backbone, str) or backbone not in BLOCKS:
        raise InputError(f"backbone={backbone!r}: expected {', '.join(BLOCKS)}, or in Python an nn.Module.")
    if width is None:  # as no finished model would have stored it
        raise InputError("width=None: expected the number that was decided on for the images.")
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


class GroupedBatchNorm(nn.modules.batchnorm._BatchNorm):
    """Batch norm over each of several parts of the batch: statistics of fewer images, so that a query
    cannot find its key by the batch they share (He et al. 2020 shuffle among GPUs to this end)."""

    groups: int = 1

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or len(x) < 2 * self.groups:
            return super().forward(x)
        if x.is_cuda and len(x) % self.groups == 0 and self.affine and self.track_running_stats and self.momentum:
            return self._at_once(x, self.momentum)
        return torch.cat([super(GroupedBatchNorm, self).forward(part) for part in x.tensor_split(self.groups)])

    def _at_once(self, x: Tensor, momentum: float) -> Tensor:
        """The same for parts of one size, as sums that a compiler turns into few kernels: one call a part would be
        many small ones."""
        parts = x.unflatten(0, (self.groups, -1))
        over = [dim for dim in range(parts.ndim) if dim not in (0, 2)]
        variance, mean = torch.var_mean(parts.float(), over, correction=0, keepdim=True)
        shape = [1, 1, -1] + [1] * (parts.ndim - 3)
        scale = (variance + self.eps).rsqrt() * self.weight.view(shape)
        n = parts[0, :, 0].numel()
        # Part after part: of updates by the share a, the last counts a, the one before it a (1 - a), ...
        last_first = torch.arange(self.groups - 1, -1, -1, device=x.device)
        share = (momentum * (1 - momentum) ** last_first)[:, None]
        with torch.no_grad():
            for kept, new in ((self.running_mean, mean), (self.running_var, variance * n / (n - 1))):
                assert kept is not None
                kept.mul_((1 - momentum) ** self.groups).add_((share * new.flatten(1)).sum(0))
        return ((parts - mean) * scale + self.bias.view(shape)).to(x.dtype).flatten(0, 1)


class GroupedBatchNorm1d(GroupedBatchNorm, nn.BatchNorm1d):
    pass


class GroupedBatchNorm2d(GroupedBatchNorm, nn.BatchNorm2d):
    pass


GROUPED: dict[type[nn.Module], type[GroupedBatchNorm]] = {
    nn.BatchNorm1d: GroupedBatchNorm1d,
    nn.BatchNorm2d: GroupedBatchNorm2d,
}


def group_batch_norm(module: nn.Module, groups: int) -> None:
    """Turn every batch norm of ``module`` into one that works on ``groups`` parts of the batch.

    In place, by its class: the weights stay where they are, also in a user's own module."""
    if groups == 1:
        return
    for child in module.modules():
        if type(child) in GROUPED:
            child.__class__ = GROUPED[type(child)]
            child.groups = groups  # type: ignore[assignment]


def dealt(n: int, groups: int, device: torch.device) -> Tensor:
    """An order of n images that deals those of each of several parts out to all of them."""
    return (torch.arange(n, device=device) % groups).argsort(stable=True)


def stop_counting(module: nn.Module) -> None:
    """Let no batch norm of ``module`` count its batches: the count only matters for a cumulative average, and on a
    GPU it is a kernel of its own in every layer."""
    for child in module.modules():
        if isinstance(child, nn.modules.batchnorm._BatchNorm) and child.momentum is not None:
            child.num_batches_tracked = None
