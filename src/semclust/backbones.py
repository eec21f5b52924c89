"""Residual networks for small images (He et al. 2016), as IIC and PICA trim them.

Shapes: n batch, c channels, H x W pixels, D dimension of the pooled feature.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BLOCKS = {"resnet10": (1, 1, 1, 1), "resnet18": (2, 2, 2, 2), "resnet34": (3, 4, 6, 3)}


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions and a shortcut."""

    def __init__(self, in_channels: int, channels: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.stride = stride
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != channels:
            self.shortcut = nn.Sequential(nn.Conv2d(in_channels, channels, 1, bias=False), nn.BatchNorm2d(channels))
        # The residual branch starts at zero: the network starts shallow, which keeps the momentum twin
        # close to it in the first steps.
        nn.init.zeros_(self.norm2.weight)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.norm1(self.conv1(x)))
        # Skipping pixels here equals a stride in the shortcut's convolution, which in torch 2.13 on a CPU
        # writes out of bounds for fewer than 8 channels (channels-last, backward).
        skipped = x[:, :, :: self.stride, :: self.stride]
        return F.relu(self.norm2(self.conv2(out)) + self.shortcut(skipped))


class SmallImageResNet(nn.Module):
    """A ResNet with a 3 x 3 stride-1 stem; images (n x c x H x W) to pooled features (n x D).

    ``max_pool`` adds PICA's pool after the stem (2 x 2, stride 2, padding 1: 32 px become 17 x 17).
    ``width`` is the number of channels of the first stage; D is 8 times that.
    """

    def __init__(self, name: str, in_channels: int, width: int = 64, max_pool: bool = False):
        super().__init__()
        self.name = name
        self.stem = nn.Sequential(
            nn.Conv2d(in_channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        )
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


class Sobel(nn.Module):
    """Horizontal and vertical edges of the grey image: n x c x H x W to n x 2 x H x W, as PICA feeds."""

    kernel: Tensor

    def __init__(self) -> None:
        super().__init__()
        horizontal = torch.tensor([[1.0, 0.0, -1.0], [2.0, 0.0, -2.0], [1.0, 0.0, -1.0]])
        self.register_buffer("kernel", torch.stack([horizontal, horizontal.T])[:, None])

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x.mean(1, keepdim=True), self.kernel.to(x.dtype), padding=1)
