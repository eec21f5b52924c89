"""Which images are taken for drawings, and by what."""

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw
from torch.testing import assert_close

from semclust import families, open_images

SIDE = 28


def drawn(rng: np.random.Generator, n: int, draw) -> np.ndarray:
    """n images of what ``draw(pen, points, width)`` draws through random points, each with its own mirror image beside
    it, as of a letter A: nothing tells left from right."""
    images = []
    for _ in range(n):
        image = Image.new("L", (4 * SIDE, 4 * SIDE))
        points = [tuple(point) for point in rng.integers(8, 2 * SIDE, (3, 2)).tolist()]
        for half in (points, [(4 * SIDE - x, y) for x, y in points]):
            draw(ImageDraw.Draw(image), half, int(rng.integers(6, 11)))
        images.append(np.asarray(image.resize((SIDE, SIDE), Image.Resampling.BOX)))
    return np.array(images)[..., None]


def lines(pen: ImageDraw.ImageDraw, points: list, width: int) -> None:
    pen.line(points, fill=255, width=width)


def discs(pen: ImageDraw.ImageDraw, points: list, width: int) -> None:
    (x, y), radius = points[0], 2 * width + 6
    pen.ellipse([x - radius, y - radius, x + radius, y + radius], fill=255)


@pytest.mark.parametrize("inverted", [False, True])
def test_thin_lines_are_drawings_though_they_are_like_their_mirror_images(inverted):
    glyphs, blobs = (drawn(np.random.default_rng(0), 300, draw) for draw in (lines, discs))
    if inverted:
        glyphs, blobs = 255 - glyphs, 255 - blobs
    assert not families.are_one_sided(glyphs) and families.are_lines(glyphs)
    assert families.choose_family("auto", glyphs) == "strokes"
    assert families.choose_family("auto", blobs) == "natural"
    rng = np.random.default_rng(1)
    drawn_on_noise = (0.3 * glyphs + 0.7 * rng.integers(0, 256, glyphs.shape)).astype(np.uint8)
    assert not families.are_lines(drawn_on_noise)


def in_inks(images: np.ndarray) -> np.ndarray:
    """The same in as many colours on white."""
    share = images / 255
    inks = np.random.default_rng(2).integers(0, 200, (len(images), 1, 1, 3))
    return (share * inks + (1 - share) * 255).round().astype(np.uint8)


def test_lines_are_drawings_in_colours_too():
    glyphs, blobs = (in_inks(drawn(np.random.default_rng(0), 300, draw)) for draw in (lines, discs))
    assert not families.are_grey(glyphs)
    assert families.choose_family("auto", glyphs) == "strokes"
    assert families.choose_family("auto", blobs) == "natural"


def test_two_tones_are_those_of_the_best_threshold():
    x = torch.randint(0, 256, (5, 6, 7), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    x[1], x[2] = 9, torch.where(x[2] > 99, 255, 0)
    told, darker = families.two_tones(x)
    for image, share, dark in zip(x.double(), told, darker, strict=True):
        best = 0.0
        for threshold in image.unique()[:-1]:
            parts = (image[image <= threshold], image[image > threshold])
            within = sum(part.var(correction=0) * len(part) for part in parts) / image.numel()
            best = max(best, float(1 - within / image.var(correction=0)))
        assert abs(share - best) < 1e-9
        if 0 < best < 1:
            parts = (image[dark], image[~dark])
            within = sum(part.var(correction=0) * len(part) for part in parts) / image.numel()
            assert_close(1 - within / image.var(correction=0), torch.tensor(best, dtype=torch.float64))
    assert told[1] == 0 and abs(told[2] - 1) < 1e-9


def test_the_width_of_lines_is_told_of_either_tone():
    figure = torch.zeros(3, 40, 60, dtype=torch.bool)
    figure[0, :, 20:24] = figure[1, 5:9] = figure[1, 20:24] = True  # 4 px; 40 px are the shorter side
    figure[2, 10:20, 10:20] = True  # a square, which has an outline all around
    assert_close(families.line_width(figure), torch.tensor([0.1, 0.1, 0.125]))
    assert_close(families.line_width(~figure), families.line_width(figure))


def test_many_large_images_are_looked_at_a_few_at_a_time(monkeypatch):
    seen = []
    look = families.two_tones
    monkeypatch.setattr(families, "two_tones", lambda x: seen.append(len(x)) or look(x))
    monkeypatch.setattr(families, "PIXELS_AT_ONCE", 5000)
    families.are_lines(np.zeros((1000, 40, 30, 1), np.uint8))
    assert sum(seen) == 250 and max(seen) == 4


def test_digits_are_drawings_and_photographs_are_not():
    digits = open_images("digits").pixels
    assert families.are_drawings(digits) and families.are_drawings(digits[:200])
    shoe_or_shirt = np.random.default_rng(0).integers(0, 2, 1797) == 1  # among them as many mirrored ones
    assert not families.are_drawings(np.where(shoe_or_shirt[:, None, None, None], digits[:, :, ::-1], digits))
    noise = np.random.default_rng(0).integers(0, 256, (300, 12, 20, 1), dtype=np.uint8)
    assert not families.are_drawings(noise)


@pytest.mark.parametrize("n", [2, 4, 5000])
def test_images_that_are_all_alike_are_no_drawings(n):
    assert not families.are_drawings(np.full((n, 5, 70, 1), 7, np.uint8))


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_grey_may_be_stored_as_red_green_and_blue(channels):
    digits = open_images("digits").pixels.repeat(channels, axis=3)
    if channels == 4:
        digits[..., 3] = 255
    assert families.are_grey(digits) and families.choose_family("auto", digits) == "strokes"
    assert not families.are_grey(np.random.default_rng(0).integers(0, 256, (5, 4, 4, 3), np.uint8))


def test_copies_do_not_hide_that_images_are_drawings():
    digits = open_images("digits").pixels[:400]
    assert families.are_drawings(np.concatenate([digits, digits]))


def test_photographs_of_which_there_are_copies_are_no_drawings():
    """As of a burst, or of a film."""
    rng = np.random.default_rng(0)
    coarse = torch.from_numpy(rng.normal(size=(300, 1, 4, 4)))
    smooth = torch.nn.functional.interpolate(coarse, (16, 16), mode="bicubic").numpy()
    pixels = (127 + 50 * smooth).clip(0, 255).astype(np.uint8).transpose(0, 2, 3, 1)
    near_copies = (pixels + rng.integers(0, 3, pixels.shape)).clip(0, 255).astype(np.uint8)
    assert not families.are_drawings(pixels)
    assert not families.are_drawings(np.concatenate([pixels, pixels]))
    assert not families.are_drawings(np.concatenate([pixels, near_copies]))


def test_large_images_are_looked_at_in_parts(monkeypatch):
    pooled = []
    pool = torch.nn.functional.adaptive_avg_pool2d
    monkeypatch.setattr(families.F, "adaptive_avg_pool2d", lambda x, size: pooled.append(len(x)) or pool(x, size))
    families.are_drawings(np.zeros((150, 40, 30, 1), np.uint8))
    assert pooled == [64, 64, 22]


def test_colours_are_of_photographs_whatever_they_show():
    digits = open_images("digits").pixels
    assert families.choose_family("auto", digits) == "strokes"
    in_red = digits * np.array([1, 0, 0], np.uint8)
    assert families.choose_family("auto", in_red) == "natural"
    assert families.choose_family("none", digits) == "none"
    assert families.choose_family(torch.flip, digits) == "strokes"


def test_images_that_may_not_be_written_are_looked_at_without_a_word(recwarn):
    """As of a file that is mapped."""
    digits = open_images("digits").pixels.copy()
    digits.flags.writeable = False
    assert families.choose_family("auto", digits) == "strokes"
    assert not recwarn.list
