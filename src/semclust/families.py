"""Which family of views suits images: that of photographs, or that of drawings.

Shapes: N images of H x W pixels with c channels.
"""

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from semclust.augment import LUMINANCE, Augmentation

# Of so many mirror images the distance is taken to the nearest hundredth of so many images, all of this size: that of
# the median one of CIFAR-10 (grey) is 1.00 times that of its image, of Fashion-MNIST 1.07, of the capitals A to Z 1.08,
# of MNIST 1.19, of digits 1.37.
MIRRORED, MIRRORED_AMONG, MIRRORED_SIZE, NEAR, UNLIKE = 1000, 4000, 16, 0.01, 1.15
# Of so many images, lines are so thin beside the image, and two tones tell so much of the variance: of letters in nine
# scripts 69 to 99 % are so, of MNIST 97 %, of Fashion-MNIST 13 %, of CIFAR-10 (grey) 1 %, of digits, which are blurred,
# none.
LINED, TWO_TONED, THIN = 256, 0.85, 0.12
PIXELS_AT_ONCE = 2**22


def choose_family(augment: str | Augmentation, pixels: np.ndarray) -> str:
    """The setting ``augment`` with auto resolved for images (N x H x W x c bytes). Of a user's own function, what auto
    would have been."""
    if not isinstance(augment, str) or augment == "auto":
        return "strokes" if are_drawings(pixels) else "natural"
    return augment


def are_grey(pixels: np.ndarray) -> bool:
    """Whether images (N x H x W x c bytes) have no colours, though they may be stored as red, green and blue."""
    some = pixels[:: math.ceil(len(pixels) / 256), ..., :3]
    return bool(np.ptp(some, axis=3).mean() < 1)  # of 255


def are_drawings(pixels: np.ndarray) -> bool:
    """Whether images (N x H x W x c bytes) are such as digits or glyphs: most consist of thin lines, or they are grey
    and mean something else when they are mirrored. Of an alphabet, half the letters are like their mirror images."""
    return are_lines(pixels) or (are_grey(pixels) and are_one_sided(pixels))


def are_lines(pixels: np.ndarray) -> bool:
    """Whether most images are of two tones, and one of them in thin lines."""
    some = torch.arange(0, len(pixels), math.ceil(len(pixels) / LINED))
    parts = some.split(max(1, PIXELS_AT_ONCE // pixels[0].size))
    of_lines = [consist_of_lines(shades(torch.from_numpy(pixels[part.numpy()]))) for part in parts]
    return bool(torch.cat(of_lines).float().mean() > 0.5)


def shades(x: Tensor) -> Tensor:
    """Images without their colours: N x H x W bytes of N x H x W x c."""
    return (x[..., :3].float() @ torch.tensor(LUMINANCE)).round().byte() if x.shape[3] >= 3 else x[..., 0]


def consist_of_lines(x: Tensor) -> Tensor:
    """Whether each image (N x H x W bytes) is of two tones, and one of them in thin lines."""
    told, darker = two_tones(x)
    return (told > TWO_TONED) & (line_width(darker) < THIN)


def two_tones(x: Tensor) -> tuple[Tensor, Tensor]:
    """Of each image (N x H x W bytes), the share of its variance that two tones tell when they are parted best (Otsu
    1979), and which pixels are of the darker one."""
    N, P = len(x), x[0].numel()
    tone = torch.arange(256.0, dtype=torch.float64)
    image = torch.arange(N)[:, None]
    share = torch.bincount((256 * image + x.flatten(1)).flatten(), minlength=256 * N).view(N, 256).double() / P
    mean = share @ tone
    deviation = tone - mean[:, None]  # N x 256
    below, gap = share.cumsum(1), (share * deviation).cumsum(1)
    told, darkest = (gap.square() / (below * (1 - below)).clamp(min=1e-9)).max(1)
    variance = (share * deviation.square()).sum(1)
    return told / variance.clamp(min=1e-9), x <= darkest[:, None, None]


def line_width(figure: Tensor) -> Tensor:
    """How wide the lines of a figure (N x H x W) are, or those of its ground where that is less, as a share of the
    shorter side: of lines along the pixels, twice the area by the length of the outline."""
    smaller = torch.minimum(figure.sum((1, 2)), (~figure).sum((1, 2)))
    outline = (figure[:, 1:] != figure[:, :-1]).sum((1, 2)) + (figure[:, :, 1:] != figure[:, :, :-1]).sum((1, 2))
    return 2 * smaller / outline.clamp(min=1) / min(figure.shape[1:])


def are_one_sided(pixels: np.ndarray) -> bool:
    """Whether images mean something else when they are mirrored, or nothing: most mirror images are then farther from
    all images than these are from each other. Those of photographs lie among them."""
    some = np.sort(np.random.default_rng(0).permutation(len(pixels))[:MIRRORED_AMONG])
    size = (min(pixels.shape[1], MIRRORED_SIZE), min(pixels.shape[2], MIRRORED_SIZE))
    parts = (torch.from_numpy(pixels[part]).permute(0, 3, 1, 2) for part in np.split(some, range(64, len(some), 64)))
    x = torch.cat([F.adaptive_avg_pool2d(part.float(), size) for part in parts])
    asked = torch.arange(0, len(x), math.ceil(len(x) / MIRRORED))
    near = max(1, min(len(x) - 1, max(3, round(NEAR * len(x)))))  # not the very nearest, which may be a copy

    def to_others(images: Tensor) -> Tensor:
        """The distance of each to those near it, among the images that it is not, itself or mirrored."""
        distance = torch.cdist(images.flatten(1), x.flatten(1))
        return distance.scatter_(1, asked[:, None], math.inf).kthvalue(near, dim=1).values

    apart = to_others(x[asked].flip(3)) > UNLIKE * to_others(x[asked])
    return bool(apart.float().mean() > 0.5)
