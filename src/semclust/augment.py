"""Random views of a batch: every sample draws its own numbers, on whichever device the batch lies.

Images are n x c x H x W floats in [0, 1]. A view is a pure function of the images and of uniform random
numbers u (n x as many as it needs, in [0, 1)), so that it can be compiled into few kernels and is the same
view either way. The numbers come from torch's default generator of the device: ``torch.manual_seed`` makes
views repeatable.
"""

import functools
import math
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from semclust.errors import InputError

Augmentation = Callable[[Tensor], Tensor]

PEN_SIZE = 28  # px of an image, whose lines a pen makes up to one pixel thicker or thinner on either side
BLUR_FROM = 64  # px; MoCo leaves blur out on smaller images, where it removes what there is to see
# Luminance and two colour differences (the NTSC signal): turning the latter turns the hue.
LUMINANCE = (0.299, 0.587, 0.114)
YIQ = np.array([LUMINANCE, (0.595716, -0.274453, -0.321263), (0.211456, -0.522591, 0.311135)])
RGB = np.linalg.inv(YIQ)
# A map of RGB that turns hue by an angle t is STAYS + cos(t) TURNS + sin(t) CROSSES, each 3 x 3.
STAYS = np.outer(RGB[:, 0], YIQ[0]).tolist()
TURNS = (np.outer(RGB[:, 1], YIQ[1]) + np.outer(RGB[:, 2], YIQ[2])).tolist()
CROSSES = (np.outer(RGB[:, 2], YIQ[1]) - np.outer(RGB[:, 1], YIQ[2])).tolist()


class RandomView:
    """``view(x)`` draws random numbers for each image of x; ``view.by(x, u)`` takes them as they are."""

    def __init__(self, by: Callable[..., Tensor], numbers: int):
        functools.update_wrapper(self, by)
        self.by, self.numbers = by, numbers

    def __call__(self, x: Tensor) -> Tensor:
        return self.by(x, torch.rand(len(x), self.numbers, device=x.device))


def random_view(numbers: int) -> Callable[[Callable[..., Tensor]], RandomView]:
    """Make a view of a function of images and ``numbers`` random numbers for each."""
    return lambda by: RandomView(by, numbers)


@random_view(6)
def strokes(x: Tensor, u: Tensor) -> Tensor:
    """Turned, sheared, scaled and shifted, but not mirrored or cropped, which can change the meaning of a drawing."""
    angle = between(-12, 12, u[:, 0]) * (math.pi / 180)
    shear = between(-0.25, 0.25, u[:, 1])  # as upright letters and slanted ones differ
    scale_x, scale_y = between(0.84, 1.16, u[:, 2]), between(0.84, 1.16, u[:, 3])
    shift_x, shift_y = between(-0.16, 0.16, u[:, 4]), between(-0.16, 0.16, u[:, 5])  # of half the side
    return warp(x, affine(angle, shear, scale_x, scale_y, shift_x, shift_y))


@random_view(5)
def crop_and_flip(x: Tensor, u: Tensor, size: float = 1.0) -> Tensor:
    """A random window of 20 to 100 % of the area, 3:4 to 4:3, stretched to a share ``size`` of the image's sides;
    half mirrored."""
    H, W = x.shape[2:]
    area = between(0.2, 1.0, u[:, 0])
    aspect = torch.exp(between(math.log(3 / 4), math.log(4 / 3), u[:, 1]))
    width = (area * aspect * H / W).sqrt().clamp(max=1)  # as a share of the image's width
    height = (area / aspect * W / H).sqrt().clamp(max=1)
    centre_x = between(-1, 1, u[:, 2]) * (1 - width)
    centre_y = between(-1, 1, u[:, 3]) * (1 - height)
    mirror = mirrored(u[:, 4])
    zero = torch.zeros_like(width)
    theta = torch.stack([torch.stack([width * mirror, zero, centre_x], 1), torch.stack([zero, height, centre_y], 1)], 1)
    return warp(x, theta, size)


@random_view(6)
def colour(x: Tensor, u: Tensor) -> Tensor:
    """Jitter of brightness, contrast (0.4), saturation (0.4) and hue (0.1) for 80 %; grey for 20 %.

    All of it is one affine map of the colours for each sample, so the batch is read and written once.
    Images without colour take part in brightness and contrast alone; a fourth channel (alpha) in nothing.
    """
    n, c, _, _ = x.shape
    jitter = u[:, 0] < 0.8
    brightness, contrast, saturation = (torch.where(jitter, between(0.6, 1.4, u[:, i]), 1.0) for i in (1, 2, 3))
    turn = torch.where(jitter, between(-0.1, 0.1, u[:, 4]), 0.0) * (2 * math.pi)
    saturation = torch.where(u[:, 5] < 0.2, 0.0, saturation)

    if c < 3:
        grey = x.mean((1, 2, 3))
        matrix = torch.eye(c, device=x.device).expand(n, c, c)
    else:
        r, g, b = (weight * x[:, i].mean((1, 2)) for i, weight in enumerate(LUMINANCE))
        grey = r + g + b
        matrix = hue_and_saturation(turn, saturation)
    gain, offset = brightness * contrast, brightness * (1 - contrast) * grey
    colours = torch.einsum("nij,njhw->nihw", (gain[:, None, None] * matrix).to(x.dtype), x[:, :3])
    colours = (colours + offset[:, None, None, None].to(x.dtype)).clamp(0, 1)
    return torch.cat([colours, x[:, 3:]], dim=1) if c == 4 else colours


@random_view(3)
def light(x: Tensor, u: Tensor) -> Tensor:
    """Jitter of brightness and contrast (0.4) alone, for 80 %: ``colour`` without a turn of hue or a loss of colour."""
    unchanged = torch.full_like(u, 0.5)
    unchanged[:, 2] = 1.0
    return colour.by(x, torch.cat([u, unchanged], dim=1))


@random_view(2)
def pen(x: Tensor, u: Tensor) -> Tensor:
    """Drawn with a thicker or a thinner pen, for 80 %: every pixel moves towards the brightest around it, or towards
    the darkest. Which of both thickens depends on what is the line and what the ground."""
    reach = max(1, round(min(x.shape[2:]) / PEN_SIZE))
    side = 2 * reach + 1
    brightest, darkest = F.max_pool2d(x, side, 1, reach), -F.max_pool2d(-x, side, 1, reach)
    share = torch.where(u[:, 0] < 0.8, between(-1, 1, u[:, 1]), 0.0).to(x.dtype)[:, None, None, None]
    return x + share.clamp(min=0) * (brightest - x) + share.clamp(max=0) * (x - darkest)


@random_view(strokes.numbers + pen.numbers + light.numbers)
def drawn(x: Tensor, u: Tensor) -> Tensor:
    """Views for digits, glyphs and drawings: moved, with another pen, and lighter or darker, by all of which they could
    be told apart, or grouped, without a look at what they show."""
    for_strokes, for_pen, for_light = u.split([strokes.numbers, pen.numbers, light.numbers], dim=1)
    return light.by(pen.by(strokes.by(x, for_strokes), for_pen), for_light)


def hue_and_saturation(turn: Tensor, saturation: Tensor) -> Tensor:
    """A map of RGB for each sample (n x 3 x 3): the luminance stays, the two colour differences turn and shrink."""
    along, across = saturation * turn.cos(), saturation * turn.sin()
    # Built from numbers, not from matrices on the device, which a step would have to copy there.
    return torch.stack(
        [
            torch.stack([STAYS[i][j] + TURNS[i][j] * along + CROSSES[i][j] * across for j in range(3)], 1)
            for i in range(3)
        ],
        1,
    )


@random_view(2)
def blur(x: Tensor, u: Tensor) -> Tensor:
    """Gaussian blur of sigma 0.1 to 2 px for half of the samples."""
    H, W = x.shape[2:]
    sigma = between(0.1, 2.0, u[:, 0])
    reach = 4  # px to either side: two sigmas of the strongest blur
    distance = torch.arange(-reach, reach + 1, device=x.device)
    kernel = torch.exp(-(distance**2) / (2 * sigma[:, None] ** 2))
    kernel = torch.where(u[:, 1:2] < 0.5, kernel, (distance == 0).float())
    kernel = (kernel / kernel.sum(1, keepdim=True)).to(x.dtype)
    # As sums of shifted images, which a compiler turns into one pass: a kernel for each image is no convolution
    # that the libraries are fast at.
    weight = kernel[:, :, None, None, None].unbind(1)
    x = F.pad(x, (reach,) * 4, mode="reflect")
    x = torch.stack([w * x[:, :, :, i : i + W] for i, w in enumerate(weight)]).sum(0)
    return torch.stack([w * x[:, :, i : i + H] for i, w in enumerate(weight)]).sum(0)


@random_view(crop_and_flip.numbers + colour.numbers + blur.numbers)
def natural(x: Tensor, u: Tensor, size: float = 1.0) -> Tensor:
    """MoCo v2's views for photographs: crop, flip, colour, and blur for images from 64 px up."""
    for_crop, for_colour, for_blur = u.split([crop_and_flip.numbers, colour.numbers, blur.numbers], dim=1)
    view = colour.by(crop_and_flip.by(x, for_crop, size), for_colour)
    return blur.by(view, for_blur) if min(x.shape[2:]) >= BLUR_FROM else view


@random_view(3)
def shifted(x: Tensor, u: Tensor) -> Tensor:
    """Photographs that are hardly changed: half mirrored, and shifted by up to an eighth of their sides."""
    one, zero = torch.ones_like(u[:, 0]), torch.zeros_like(u[:, 0])
    shift_x, shift_y = between(-0.25, 0.25, u[:, 1:]).unbind(1)  # of half the side
    return warp(x, affine(zero, zero, mirrored(u[:, 0]), one, shift_x, shift_y))


@random_view(2)
def cut_out(x: Tensor, u: Tensor, side: float = 0.25) -> Tensor:
    """With a hole of ``side`` times the image's sides somewhere, in the mean colour of the image."""

    def within(u: Tensor, length: int) -> Tensor:
        place = (torch.arange(length, device=x.device) + 0.5) / length
        return (place - u[:, None]).abs() < side / 2

    hole = within(u[:, 0], x.shape[2])[:, None, :, None] & within(u[:, 1], x.shape[3])[:, None, None, :]
    return torch.where(hole, x.mean((2, 3), keepdim=True), x)


@random_view(13)
def posed(x: Tensor, u: Tensor) -> Tensor:
    """Photographs turned by up to 29 degrees, sheared, scaled and shifted, each in half of the samples, beside what
    ``shifted`` does."""

    def in_half(chance: Tensor, value: Tensor) -> Tensor:
        return torch.where(chance < 0.5, value, 0.0)

    angle = in_half(u[:, 0], between(-0.5, 0.5, u[:, 1]))
    shear = in_half(u[:, 2], between(-0.3, 0.3, u[:, 3]))
    scale_x, scale_y = (1 / (1 + in_half(u[:, 4], between(-0.35, 0.25, u[:, i]))) for i in (5, 6))
    shift_x, shift_y = (
        in_half(u[:, 7], between(-0.3, 0.3, u[:, far])) + between(-0.25, 0.25, u[:, near])
        for far, near in ((8, 10), (9, 11))
    )
    return warp(x, affine(angle, shear, mirrored(u[:, 12]) * scale_x, scale_y, shift_x, shift_y))


@random_view(posed.numbers + colour.numbers + 1 + cut_out.numbers)
def strong_natural(x: Tensor, u: Tensor) -> Tensor:
    """Photographs changed so much that only their meaning remains: posed, coloured, some with their bright parts
    inverted, and with a hole; after RandAugment and Cutout, as FixMatch uses them."""
    for_pose, for_colour, for_inverting, for_hole = u.split([posed.numbers, colour.numbers, 1, cut_out.numbers], dim=1)
    x = colour.by(posed.by(x, for_pose), for_colour)
    colours = x[:, :3]  # without a fourth channel (alpha)
    inverted = (for_inverting < 0.1)[:, :, None, None] & (colours > 0.5)
    x = torch.cat([torch.where(inverted, 1 - colours, colours), x[:, 3:]], dim=1)
    return cut_out.by(x, for_hole, side=0.5)


@random_view(drawn.numbers + cut_out.numbers)
def strong_drawn(x: Tensor, u: Tensor) -> Tensor:
    """Drawings as they are usually changed, with a small hole: moved further, or with more missing, a digit is soon
    another one."""
    for_drawn, for_hole = u.split([drawn.numbers, cut_out.numbers], dim=1)
    return cut_out.by(drawn.by(x, for_drawn), for_hole)


@random_view(0)
def none(x: Tensor, u: Tensor) -> Tensor:
    """The image itself."""
    return x


AUGMENTATIONS: dict[str, Augmentation] = {"natural": natural, "strokes": drawn, "none": none}
# Hardly and strongly changed, for what the network is to label itself.
WEAK_AND_STRONG: dict[str, tuple[RandomView, RandomView]] = {
    "natural": (shifted, strong_natural),
    "strokes": (none, strong_drawn),
    "none": (none, cut_out),
}


def choose_augmentation(augment: str | Augmentation, crop_size: float = 1.0) -> Augmentation:
    """The callable behind the setting ``augment``, where that is no longer auto; views that are crops have
    ``crop_size`` times the image's sides."""
    if not isinstance(augment, str):
        return augment
    if augment == "natural" and crop_size < 1:
        return RandomView(functools.partial(natural.by, size=crop_size), natural.numbers)
    return AUGMENTATIONS[augment]


def checked_view(view: object, x: Tensor) -> Tensor:
    """What a user's own function made of the images x (n x c x H x W). Raise InputError where it is no view of them."""
    if isinstance(view, Tensor) and view.dtype == x.dtype and view.ndim == 4 and view.shape[:2] == x.shape[:2]:
        return view
    found = f"{view.dtype} of {sides(view)}" if isinstance(view, Tensor) else type(view).__name__
    raise InputError(
        f"augment made {found} of a {x.dtype} of {sides(x)}; expected as many images, of as many channels, in the same "
        "type."
    )


def sides(x: Tensor) -> str:
    return " x ".join(map(str, x.shape))


def weak_and_strong(augment: str | Augmentation) -> tuple[Augmentation, Augmentation]:
    """Views of whole images that change them hardly and strongly. A user's own function is taken for a usual change:
    without it, and with it and a hole, at the image's size."""
    if isinstance(augment, str):
        return WEAK_AND_STRONG[augment]
    return none, lambda x: cut_out(resized(augment(x), (x.shape[2], x.shape[3])))


def view_size(augment: str | Augmentation, image_shape: tuple[int, ...], crop_size: float = 1.0) -> tuple[int, int]:
    """Height and width of the views of images of shape (H, W, c); of a user's own function, taken to be the image's."""
    if augment == "auto":  # as no finished model would have stored it
        raise InputError("augment='auto': expected what it was decided to be for the images, natural or strokes.")
    H, W, _ = image_shape
    return smaller_sides(H, W, crop_size) if augment == "natural" else (H, W)


def smaller_sides(H: int, W: int, size: float) -> tuple[int, int]:
    """``size`` times a height and a width, a pixel at least."""
    return max(1, round(size * H)), max(1, round(size * W))


def between(low: float, high: float, u: Tensor) -> Tensor:
    return low + (high - low) * u


def resized(x: Tensor, size: tuple[int, int]) -> Tensor:
    """Images (n x c x H x W) of another height and width."""
    return x if tuple(x.shape[2:]) == size else F.interpolate(x, size, mode="bilinear", align_corners=False)


def mirrored(u: Tensor) -> Tensor:
    """-1 in half of the samples, as a factor of their width."""
    return torch.where(u < 0.5, -1.0, 1.0)


def affine(angle: Tensor, shear: Tensor, scale_x: Tensor, scale_y: Tensor, shift_x: Tensor, shift_y: Tensor) -> Tensor:
    """A map for each sample (n x 2 x 3) from places in the view to places in the image: scale, then shear, then turn,
    then shift."""
    cos, sin = angle.cos(), angle.sin()
    return torch.stack(
        [
            torch.stack([cos / scale_x, (cos * shear - sin) / scale_y, shift_x], 1),
            torch.stack([sin / scale_x, (sin * shear + cos) / scale_y, shift_y], 1),
        ],
        1,
    )


def warp(x: Tensor, theta: Tensor, size: float = 1.0) -> Tensor:
    """Resample each image by its own affine map (n x 2 x 3), at ``size`` times its sides; outside the image its
    border goes on."""
    n, c, H, W = x.shape
    if H != W:  # places are told from -1 to 1 along either side, but what turns must turn as in a square
        (a, b, e), (f, g, h) = (row.unbind(1) for row in theta.unbind(1))
        theta = torch.stack([torch.stack([a, b * (H / W), e], 1), torch.stack([f * (W / H), g, h], 1)], 1)
    grid = F.affine_grid(theta.to(x.dtype), [n, c, *smaller_sides(H, W, size)], align_corners=False)
    return F.grid_sample(x, grid, mode="bilinear", padding_mode="border", align_corners=False)
