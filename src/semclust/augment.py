"""Random views of a batch: every sample draws its own numbers, on whichever device the batch lies.

Images are n x c x H x W floats in [0, 1]. Random numbers come from torch's default generator of the
device, so ``torch.manual_seed`` makes views repeatable.
"""

import functools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Augmentation = Callable[[Tensor], Tensor]

BLUR_FROM = 64  # px; MoCo leaves blur out on smaller images, where it removes what there is to see
# Luminance and two colour differences (the NTSC signal): turning the latter turns the hue.
YIQ = ((0.299, 0.587, 0.114), (0.595716, -0.274453, -0.321263), (0.211456, -0.522591, 0.311135))


def natural(x: Tensor) -> Tensor:
    """MoCo v2's views for photographs: crop, flip, colour, and blur from 64 px up."""
    x = colour(crop_and_flip(x))
    return blur(x) if min(x.shape[2:]) >= BLUR_FROM else x


def strokes(x: Tensor) -> Tensor:
    """Views for digits, glyphs and drawings, where a flip or a crop can change the meaning."""
    n, device = len(x), x.device
    angle = uniform(n, -12, 12, device) * (math.pi / 180)
    shear = uniform(n, -0.16, 0.16, device)
    scale_x, scale_y = uniform(n, 0.84, 1.16, device), uniform(n, 0.84, 1.16, device)
    shift_x, shift_y = uniform(n, -0.16, 0.16, device), uniform(n, -0.16, 0.16, device)  # of half the side
    cos, sin = angle.cos(), angle.sin()
    # Maps places in the view to places in the image: scale, then shear, then turn, then shift.
    theta = torch.stack(
        [
            torch.stack([cos / scale_x, (cos * shear - sin) / scale_y, shift_x], 1),
            torch.stack([sin / scale_x, (sin * shear + cos) / scale_y, shift_y], 1),
        ],
        1,
    )
    return warp(x, theta)


def none(x: Tensor) -> Tensor:
    """The image itself."""
    return x


AUGMENTATIONS: dict[str, Augmentation] = {"natural": natural, "strokes": strokes, "none": none}


def choose_augmentation(augment: str | Augmentation, n_channels: int) -> Augmentation:
    """The callable behind the setting ``augment``."""
    if not isinstance(augment, str):
        return augment
    if augment == "auto":
        augment = "strokes" if n_channels == 1 else "natural"
    return AUGMENTATIONS[augment]


def uniform(n: int, low: float, high: float, device: torch.device) -> Tensor:
    return torch.empty(n, device=device).uniform_(low, high)


def chance(n: int, probability: float, device: torch.device) -> Tensor:
    return torch.rand(n, device=device) < probability


def warp(x: Tensor, theta: Tensor) -> Tensor:
    """Resample each image by its own affine map (n x 2 x 3); outside the image its border goes on."""
    grid = F.affine_grid(theta.to(x.dtype), list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, mode="bilinear", padding_mode="border", align_corners=False)


def crop_and_flip(x: Tensor) -> Tensor:
    """A random window of 20 to 100 % of the area, 3:4 to 4:3, stretched to the full size; half mirrored."""
    n, _, H, W = x.shape
    device = x.device
    area = uniform(n, 0.2, 1.0, device)
    aspect = torch.exp(uniform(n, math.log(3 / 4), math.log(4 / 3), device))
    width = (area * aspect * H / W).sqrt().clamp(max=1)  # as a share of the image's width
    height = (area / aspect * W / H).sqrt().clamp(max=1)
    centre_x = uniform(n, -1, 1, device) * (1 - width)
    centre_y = uniform(n, -1, 1, device) * (1 - height)
    mirror = torch.where(chance(n, 0.5, device), -1.0, 1.0)
    zero = torch.zeros_like(width)
    theta = torch.stack([torch.stack([width * mirror, zero, centre_x], 1), torch.stack([zero, height, centre_y], 1)], 1)
    return warp(x, theta)


def colour(x: Tensor) -> Tensor:
    """Jitter of brightness, contrast (0.4), saturation (0.4) and hue (0.1) for 80 %; grey for 20 %.

    All of it is one affine map of the colours for each sample, so the batch is read and written once.
    Images without colour take part in brightness and contrast alone; a fourth channel (alpha) in nothing.
    """
    n, c, _, _ = x.shape
    device = x.device
    jitter = chance(n, 0.8, device)

    def strength(amount: float) -> Tensor:
        return torch.where(jitter, uniform(n, 1 - amount, 1 + amount, device), 1.0)

    brightness, contrast, saturation = strength(0.4), strength(0.4), strength(0.4)
    turn = torch.where(jitter, uniform(n, -0.1, 0.1, device), 0.0) * (2 * math.pi)
    saturation = torch.where(chance(n, 0.2, device), 0.0, saturation)

    if c < 3:
        grey = x.mean((1, 2, 3))
        matrix = (brightness * contrast)[:, None, None] * torch.eye(c, device=device)
    else:
        yiq, rgb = colour_matrices(device)
        grey = (x[:, :3].mean((2, 3)) * yiq[0]).sum(1)
        rotation = torch.zeros(n, 3, 3, device=device)
        rotation[:, 0, 0] = 1
        rotation[:, 1, 1] = rotation[:, 2, 2] = saturation * turn.cos()
        rotation[:, 1, 2] = -saturation * turn.sin()
        rotation[:, 2, 1] = saturation * turn.sin()
        matrix = torch.eye(c, device=device).repeat(n, 1, 1)
        matrix[:, :3, :3] = rgb @ rotation @ yiq
        matrix[:, :3] *= (brightness * contrast)[:, None, None]
    offset = (brightness * (1 - contrast) * grey)[:, None].repeat(1, c)
    if c == 4:
        offset[:, 3] = 0
    out = torch.einsum("nij,njhw->nihw", matrix.to(x.dtype), x) + offset[:, :, None, None].to(x.dtype)
    return out.clamp(0, 1)


@functools.cache
def colour_matrices(device: torch.device) -> tuple[Tensor, Tensor]:
    """From RGB to YIQ and back; made once for a device, since a copy to a GPU would hold up every step."""
    yiq = torch.tensor(YIQ)
    return yiq.to(device), torch.linalg.inv(yiq).to(device)


def blur(x: Tensor) -> Tensor:
    """Gaussian blur of sigma 0.1 to 2 px for half of the samples."""
    n, c, H, W = x.shape
    sigma = uniform(n, 0.1, 2.0, x.device)
    reach = 4  # px to either side: two sigmas of the strongest blur
    distance = torch.arange(-reach, reach + 1, device=x.device)
    kernel = torch.exp(-(distance**2) / (2 * sigma[:, None] ** 2))
    kernel = torch.where(chance(n, 0.5, x.device)[:, None], kernel, (distance == 0).float())
    kernel = (kernel / kernel.sum(1, keepdim=True)).to(x.dtype).repeat_interleave(c, 0)  # (n c) x 9
    out = F.pad(x, (reach,) * 4, mode="reflect").reshape(1, n * c, H + 2 * reach, W + 2 * reach)
    out = F.conv2d(out, kernel[:, None, None, :], groups=n * c)
    out = F.conv2d(out, kernel[:, None, :, None], groups=n * c)
    return out.reshape(n, c, H, W)
