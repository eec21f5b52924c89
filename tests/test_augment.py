"""Random views: what they keep, what they change, how often, and that each sample draws for itself."""

import math

import pytest
import torch
from torch.testing import assert_close

from semclust import augment
from semclust.errors import InputError

STRONG = [augment.strong_natural, augment.strong_drawn]
VIEWS = [
    *(augment.natural, augment.strokes, augment.crop_and_flip, augment.colour, augment.blur),
    *(augment.light, augment.pen, augment.drawn, augment.shifted, augment.posed, augment.cut_out, *STRONG),
]
ALL = [*VIEWS, augment.none]
LUMINANCE = torch.tensor([0.299, 0.587, 0.114])


def by_name(function):
    return function.__name__


def seeded(view, x, seed=0):
    torch.manual_seed(seed)
    return view(x)


def one_image(c=3, H=12, W=10):
    """Colours well inside [0, 1], so that no jitter is cut off."""
    generator = torch.Generator().manual_seed(1)
    return 0.3 + 0.2 * torch.rand(1, c, H, W, generator=generator)


def copies(image, n):
    return image.expand(n, -1, -1, -1).contiguous()


def glyph_F():
    x = torch.zeros(1, 1, 28, 28)
    x[..., 4:24, 8:11] = x[..., 4:7, 8:21] = x[..., 12:15, 8:18] = 1
    return x


# What every augmentation keeps.


@pytest.mark.parametrize("view", ALL, ids=by_name)
@pytest.mark.parametrize("c", [1, 2, 3, 4])
@pytest.mark.parametrize("n, H, W", [(1, 8, 8), (3, 9, 14), (5, 21, 8), (1, 64, 80), (2, 70, 65)])
def test_shape_type_and_range_are_kept(view, c, n, H, W):
    for dtype in (torch.float32, torch.float64):
        x = torch.rand(n, c, H, W).round().to(dtype)  # only 0 and 1: the ends of the range
        before = x.clone()
        out = seeded(view, x)
        assert out.shape == x.shape and out.dtype == x.dtype and out.device == x.device
        assert out.isfinite().all() and out.min() > -1e-6 and out.max() < 1 + 1e-6
        assert torch.equal(x, before)


@pytest.mark.parametrize("view", ALL, ids=by_name)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_stays_half(view, dtype):
    assert seeded(view, torch.rand(2, 3, 64, 64).to(dtype)).dtype == dtype


def test_setting_names_reach_their_functions():
    named = {"natural": augment.natural, "strokes": augment.drawn, "none": augment.none}
    assert named == augment.AUGMENTATIONS


def test_crops_can_be_smaller_than_the_image_and_show_the_same():
    x = torch.rand(3, 3, 64, 48)
    u = torch.rand(3, augment.natural.numbers)
    smaller = augment.choose_augmentation("natural", crop_size=0.75)
    assert smaller(x).shape == (3, 3, 48, 36)
    u[:, -1] = 1  # not blurred, which is by pixels
    whole, small = augment.natural.by(x, u), smaller.by(x, u)
    again = torch.nn.functional.interpolate(whole, (48, 36), mode="bilinear", align_corners=False)
    assert (small - again).abs().mean() < 0.05 < (small - again.flip(3)).abs().mean()
    assert augment.choose_augmentation("strokes", crop_size=0.5) is augment.drawn  # no crops: all is seen


def test_none_is_the_identity():
    x = torch.rand(4, 3, 8, 8)
    assert torch.equal(augment.none(x), x)


# Randomness.


@pytest.mark.parametrize(
    "view, different", [(v, 0.3 if v in (augment.blur, augment.cut_out) else 0.7) for v in VIEWS], ids=str
)
def test_each_sample_draws_its_own_numbers(view, different):
    """The share of distinct views of one image; half are not blurred, a fifth keep their colours, and
    holes begin and end with a pixel."""
    views = seeded(view, copies(one_image(), 200)).flatten(1)
    assert len(views.unique(dim=0)) > 200 * different


@pytest.mark.parametrize("view", VIEWS, ids=by_name)
def test_views_are_repeatable_under_a_seed(view):
    x = torch.rand(32, 3, 64, 66)
    assert torch.equal(seeded(view, x, 5), seeded(view, x, 5))
    assert not torch.equal(seeded(view, x, 5), seeded(view, x, 6))


@pytest.mark.parametrize("view", VIEWS, ids=by_name)
@pytest.mark.parametrize("c", [1, 3, 4])
def test_a_view_does_not_depend_on_the_other_images_of_the_batch(view, c):
    x, others = torch.rand(6, c, 66, 64), torch.rand(6, c, 66, 64)
    others[2] = x[2]
    assert_close(seeded(view, x)[2], seeded(view, others)[2])


# Warp, crop and flip.


def test_warp_by_the_identity_returns_the_image():
    x = torch.rand(3, 2, 7, 11)
    theta = torch.eye(2, 3).expand(3, 2, 3)
    assert_close(augment.warp(x, theta), x, rtol=0, atol=1e-5)


@pytest.mark.parametrize("H, W", [(32, 32), (32, 64), (48, 16)])
def test_what_is_turned_keeps_its_angles_in_images_that_are_no_squares(H, W):
    y, x = torch.meshgrid(torch.arange(H) * 1.0, torch.arange(W) * 1.0, indexing="ij")
    angle, one, zero = torch.tensor([0.3]), torch.ones(1), torch.zeros(1)
    places = augment.warp(torch.stack([x, y])[None], augment.affine(angle, zero, one, one, zero, zero))[
        0
    ]  # where each pixel comes from
    i, j = H // 2, W // 2
    to_right, to_bottom = places[:, i, j + 1] - places[:, i, j], places[:, i + 1, j] - places[:, i, j]
    cos, sin = math.cos(0.3), math.sin(0.3)
    assert_close(torch.stack([to_right, to_bottom]), torch.tensor([[cos, sin], [-sin, cos]]), rtol=0, atol=1e-4)


def test_warp_gives_each_sample_its_own_map_and_repeats_the_border():
    x = torch.rand(2, 1, 6, 6)
    mirror = torch.tensor([[-1.0, 0, 0], [0, 1, 0]])
    one_pixel_right = torch.tensor([[1.0, 0, 2 / 6], [0, 1, 0]])
    out = augment.warp(x, torch.stack([mirror, one_pixel_right]))
    assert_close(out[0], x[0].flip(-1), rtol=0, atol=1e-5)
    assert_close(out[1], torch.cat([x[1, ..., 1:], x[1, ..., -1:]], -1), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "view",
    [augment.crop_and_flip, augment.strokes, augment.shifted, augment.posed, augment.cut_out],
    ids=by_name,
)
@pytest.mark.parametrize("value", [0.0, 0.37, 1.0])
def test_a_constant_image_stays_constant_when_moved(view, value):
    x = torch.full((50, 3, 9, 13), value)
    assert_close(seeded(view, x), x)


def test_half_of_the_crops_are_mirrored_and_none_is_upside_down():
    down, right = torch.meshgrid(torch.linspace(0, 1, 16), torch.linspace(0, 1, 16), indexing="ij")
    views = seeded(augment.crop_and_flip, copies(torch.stack([right, down])[None], 2000))
    mirrored = views[:, 0, 8, -1] < views[:, 0, 8, 0]
    assert 0.45 < mirrored.float().mean() < 0.55
    assert (views[:, 1, -1, 8] > views[:, 1, 0, 8]).all()


def test_crops_are_windows_inside_the_image_of_the_stated_area_and_aspect():
    H, W, n = 48, 32, 2000
    down, right = torch.meshgrid((torch.arange(H) + 0.5) / H, (torch.arange(W) + 0.5) / W, indexing="ij")
    views = seeded(augment.crop_and_flip, copies(torch.stack([right, down])[None], n))
    left, middle = views[:, 0, H // 2, W // 2 - 1], views[:, 0, H // 2, W // 2]
    above, below = views[:, 1, H // 2 - 1, W // 2], views[:, 1, H // 2, W // 2]
    width, height = (middle - left).abs() * W, (below - above) * H
    area = width * height
    assert area.min() > 0.199 and area.max() < 1.001
    assert area.min() < 0.25 and area.max() > 0.8
    for size, centre in ((width, (left + middle) / 2), (height, (above + below) / 2)):
        assert ((centre - 0.5).abs() + size / 2).max() < 0.501
        assert ((centre - 0.5).abs() + size / 2).max() > 0.49  # the window reaches the edge
    whole = (width > 0.999) | (height > 0.999)  # cut to the image: of any aspect
    aspect = (width * W / (height * H))[~whole]
    assert aspect.min() > 0.745 and aspect.max() < 1.34
    assert aspect.min() < 0.8 and aspect.max() > 1.25


def test_strokes_stay_closer_to_themselves_than_to_their_mirror_image():
    x = glyph_F()
    views = seeded(augment.strokes, copies(x, 300))

    def distance(to):
        return (views - to).square().mean((1, 2, 3))

    for mirrored in (x.flip(-1), x.flip(-2), x.flip(-1, -2)):
        closer = distance(x) < distance(mirrored)
        assert distance(x).mean() < 0.8 * distance(mirrored).mean()
        assert closer.float().mean() > 0.85


def test_strokes_move_both_ways_and_never_out_of_the_image():
    side, half = 41, 20
    down, right = torch.meshgrid(torch.arange(side) - half, torch.arange(side) - half, indexing="ij")
    spot = torch.exp(-(down**2 + right**2) / 8.0)[None, None]
    views = seeded(augment.strokes, copies(spot, 500))
    mass = views.sum((1, 2, 3))
    for axis in (down, right):
        place = (views * axis).sum((1, 2, 3)) / mass
        assert place.abs().max() < 0.45 * half
        assert place.max() > 0.1 * half and place.min() < -0.1 * half
        assert place.mean().abs() < 0.02 * half
    assert mass.max() > 1.2 * spot.sum() and mass.min() < 0.8 * spot.sum()  # larger and smaller


def test_strokes_turn_shear_and_scale_each_by_itself():
    """The map is read off a view of the coordinates, then taken apart."""
    n, side = 2000, 32
    places = (torch.arange(side) + 0.5) / side * 2 - 1
    down, right = torch.meshgrid(places, places, indexing="ij")
    views = seeded(augment.strokes, copies(torch.stack([right, down])[None], n))
    middle = slice(side // 2 - 1, side // 2 + 1)
    centre = views[:, :, middle, middle] * side / 2
    to_right, to_bottom = centre.diff(dim=3)[..., 0, 0], centre.diff(dim=2)[..., 0, 0]  # n x 2: columns of the map
    angle = torch.atan2(to_right[:, 1], to_right[:, 0])
    upright = to_bottom[:, 0] * angle.cos() + to_bottom[:, 1] * angle.sin()  # the second column turned back
    scale_x, scale_y = to_right.norm(dim=1), to_bottom[:, 1] * angle.cos() - to_bottom[:, 0] * angle.sin()
    shear = upright / scale_y
    assert scale_x.min() > 0.5 and scale_y.min() > 0.5  # a mirrored or flat map would be at or below 0
    assert angle.abs().max() < math.pi / 6 and angle.mean().abs() < 0.01 and angle.std() > 0.05
    assert shear.abs().max() < 0.3 and shear.mean().abs() < 0.01 and shear.std() > 0.05
    correlation = torch.corrcoef(torch.stack([angle, shear, scale_x, scale_y]))
    assert (correlation - torch.eye(4)).abs().max() < 0.1


# Colour.


def test_one_channel_stays_one_channel_and_keeps_its_order_of_brightness():
    x = one_image(c=1)
    out = seeded(augment.colour, copies(x, 100))
    assert out.shape == (100, 1, 12, 10)
    order = x.flatten().argsort()
    assert (out.flatten(1)[:, order].diff(dim=1) >= 0).all()


@pytest.mark.parametrize("c", [1, 3])
def test_brightness_moves_the_mean_and_contrast_only_the_deviation(c):
    x = one_image(c)
    out = seeded(augment.colour, copies(x, 2000))
    luminance = [(image * LUMINANCE[:, None, None]).sum(1) if c == 3 else image[:, 0] for image in (x, out)]
    before, after = luminance
    brightness = after.mean((1, 2)) / before.mean()
    contrast = after.std((1, 2)) / before.std() / brightness
    for factor in (brightness, contrast):
        assert factor.min() > 0.599 and factor.max() < 1.401
        assert factor.min() < 0.65 and factor.max() > 1.35
        assert (factor.mean() - 1).abs() < 0.03
    untouched = (brightness - 1).abs() + (contrast - 1).abs() < 1e-4
    assert 0.17 < untouched.float().mean() < 0.23  # jitter is for 80 %
    assert torch.corrcoef(torch.stack([brightness, contrast])[:, ~untouched])[0, 1].abs() < 0.1


def test_a_fifth_turns_grey_and_a_fifth_of_the_others_keep_their_colours():
    x = torch.tensor([0.6, 0.4, 0.5])[None, :, None, None] + torch.zeros(2000, 3, 2, 2)
    out = seeded(augment.colour, x)
    grey = (out - out.mean(1, keepdim=True)).abs().amax((1, 2, 3)) < 1e-5
    same = (out - x).abs().amax((1, 2, 3)) < 1e-5
    assert 0.17 < grey.float().mean() < 0.23
    assert 0.13 < same.float().mean() < 0.19


def test_hue_turns_by_up_to_a_tenth_of_the_circle_and_saturation_by_up_to_four_tenths():
    x = one_image()
    out = seeded(augment.colour, copies(x, 2000))
    # The colour differences of the NTSC signal, as one complex number a pixel.
    differences = torch.tensor([[0.595716, -0.274453, -0.321263], [0.211456, -0.522591, 0.311135]])
    before, after = (torch.view_as_complex(image.permute(0, 2, 3, 1) @ differences.T).flatten(1) for image in (x, out))
    factor = (after * before.conj()).sum(1) / before.abs().square().sum()
    assert_close(after, factor[:, None] * before, rtol=0, atol=1e-5)  # one map for all pixels
    coloured = factor.abs() > 1e-3
    turn = factor[coloured].angle() / (2 * math.pi)
    assert turn.abs().max() < 0.1001 and turn.mean().abs() < 0.005
    assert turn.max() > 0.095 and turn.min() < -0.095
    luminance = [(image * LUMINANCE[:, None, None]).sum(1).std((1, 2)) for image in (x, out)]
    saturation = (factor.abs() * luminance[0] / luminance[1])[coloured]
    assert saturation.min() > 0.599 and saturation.max() < 1.401
    assert saturation.min() < 0.62 and saturation.max() > 1.38 and (saturation.mean() - 1).abs() < 0.03


def test_a_grey_colour_image_stays_grey():
    x = torch.rand(200, 1, 6, 6).expand(-1, 3, -1, -1)
    out = seeded(augment.colour, x)
    assert_close(out, out[:, :1].expand(-1, 3, -1, -1), rtol=0, atol=1e-5)
    assert (out - x).abs().max() > 0.1


def test_transparency_is_left_alone_and_colours_do_not_depend_on_it():
    x = torch.rand(50, 4, 6, 6)
    out = seeded(augment.colour, x)
    assert_close(out[:, 3], x[:, 3])
    assert_close(out[:, :3], seeded(augment.colour, x[:, :3]))


# Blur.


@pytest.mark.parametrize("H, W, blurred", [(64, 64, True), (90, 64, True), (63, 64, False), (64, 32, False)])
def test_natural_views_are_blurred_from_64_pixels(H, W, blurred, monkeypatch):
    seen = []
    monkeypatch.setattr(augment.blur, "by", lambda x, u: seen.append(x.shape) or x)
    augment.natural(torch.rand(2, 3, H, W))
    assert seen == [(2, 3, H, W)] * blurred


def test_half_of_the_samples_are_blurred_each_by_its_own_strength():
    image = torch.rand(1, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    x = copies(image, 1000)
    out = seeded(augment.blur, x)
    change = (out - x).abs().amax((1, 2, 3))
    # A sigma of 0.1 to 0.2 px changes next to nothing: a twentieth of the blurred ones.
    assert 0.42 < (change > 1e-4).float().mean() < 0.52
    deviation = out.std((1, 2, 3)) / x.std((1, 2, 3))
    assert deviation.max() < 1.0001 and deviation.min() < 0.35
    assert_close(out.mean((1, 2, 3)), x.mean((1, 2, 3)), rtol=0.05, atol=0)


def test_blur_spreads_a_point_alike_in_all_directions_and_keeps_channels_apart():
    x = torch.zeros(40, 2, 21, 21)
    x[:, 0, 10, 10] = 1
    out = seeded(augment.blur, x)
    spot = out[:, 0]
    assert_close(spot.sum((1, 2)), torch.ones(40))
    for turned in (spot.flip(1), spot.flip(2), spot.transpose(1, 2)):
        assert_close(spot, turned)
    assert spot.amin() >= 0 and spot[:, 10, 10].min() < 0.1
    assert out[:, 1].eq(0).all()


def test_light_changes_brightness_and_contrast_and_no_hue():
    x = copies(one_image(3, 8, 8), 400)
    out = seeded(augment.light, x)
    same = (out - x).abs().amax((1, 2, 3)) < 1e-5
    assert 0.12 < same.float().mean() < 0.28
    # One affine map of all values for each sample.
    a, b = (x[:, 0, 0, 1] - x[:, 0, 0, 0]), (out[:, 0, 0, 1] - out[:, 0, 0, 0])
    gain = b / a
    offset = out[:, 0, 0, 0] - gain * x[:, 0, 0, 0]
    assert_close(out, gain[:, None, None, None] * x + offset[:, None, None, None], rtol=0, atol=1e-4)
    assert gain.min() < 0.6 and gain.max() > 1.4


def test_a_drawing_is_moved_drawn_with_another_pen_and_lit():
    x, u = torch.rand(20, 1, 12, 12), torch.rand(20, augment.drawn.numbers)
    for_strokes, for_pen, for_light = u.split([6, 2, 3], dim=1)
    moved = augment.pen.by(augment.strokes.by(x, for_strokes), for_pen)
    assert_close(augment.drawn.by(x, u), augment.light.by(moved, for_light))


@pytest.mark.parametrize("side, line, thickest, thinnest", [(28, 4, 6, 2), (84, 12, 18, 6), (16, 4, 6, 2)])
def test_a_pen_is_up_to_so_much_thicker_and_thinner(side, line, thickest, thinnest):
    x = torch.zeros(1, 1, side, side)
    first = (side - line) // 2
    x[..., first : first + line] = 1
    views = seeded(augment.pen, copies(x, 1000))[:, 0, side // 2]  # a row across the line
    width = views.sum(1)
    assert thinnest - 0.01 <= width.min() < thinnest + 0.1 and thickest - 0.1 < width.max() <= thickest + 0.01
    assert abs(width.mean() - line) < 0.1 and 0.17 < (width == line).float().mean() < 0.23
    dark = seeded(augment.pen, copies(1 - x, 1000))[:, 0, side // 2]
    assert_close((1 - dark).sum(1), 2 * line - width, rtol=0, atol=1e-4)  # a dark line, by the same numbers


# Weak and strong views.


def test_a_shifted_photograph_is_moved_by_up_to_an_eighth_and_half_are_mirrored():
    x = torch.zeros(1, 1, 33, 33)
    x[..., 16, 18] = 1  # two to the right of the middle
    views = seeded(augment.shifted, copies(x, 400))[:, 0]
    weight = views / views.sum((1, 2), keepdim=True)
    across, down = (torch.arange(33.0) - 16,) * 2
    column, row = (weight.sum(1) * across).sum(1), (weight.sum(2) * down).sum(1)
    assert -4.2 < row.min() < -3.8 and 3.8 < row.max() < 4.2 and abs(row.mean()) < 0.3  # of 33: an eighth is 4.1
    assert -6.2 < column.min() < -5.5 and 5.5 < column.max() < 6.2  # from 2, and from -2 where it is mirrored
    assert abs(column.mean()) < 0.4


def test_a_pose_leaves_some_as_they_are_but_for_the_shift():
    """Turn, shear, scale and far shift each by a chance of a half: of a sixteenth of the samples, none."""
    u = torch.rand(800, augment.posed.numbers)
    x = copies(one_image(1, 16, 16), 800)
    out = augment.posed.by(x, u)
    still = (u[:, [0, 2, 4, 7]] >= 0.5).all(1)
    assert 20 < still.sum() < 90
    for_shift = torch.stack([u[:, 12], u[:, 10], u[:, 11]], dim=1)
    assert_close(out[still], augment.shifted.by(x[still], for_shift[still]), rtol=0, atol=1e-5)
    one = u[:1].clone()
    one[:, [0, 2, 4, 7]] = 0.9
    for chance, number in ((0, 1), (2, 3), (4, 5), (4, 6), (7, 8), (7, 9)):
        moved = one.clone()
        moved[:, chance], moved[:, number] = 0.1, 0.9
        other = moved.clone()
        other[:, number] = 0.1
        views = [augment.posed.by(x[:1], v) for v in (one, moved, other)]
        assert all((a - b).abs().max() > 1e-3 for a, b in zip(views, views[1:] + views[:1], strict=True))


@pytest.mark.parametrize("side", [0.25, 0.5])
def test_a_hole_has_its_size_and_the_mean_colour_of_its_image(side):
    x = torch.rand(300, 3, 16, 24)
    out = augment.cut_out.by(x, torch.rand(300, 2), side)
    changed = (out != x).any(1)
    assert_close(out, torch.where(changed[:, None], x.mean((2, 3), keepdim=True), x), rtol=0, atol=0)
    assert changed.any(2).sum(1).max() == 16 * side and changed.any(1).sum(1).max() == 24 * side
    whole = changed.sum((1, 2)) == 16 * 24 * side**2
    assert abs(whole.float().mean() - (1 - side) ** 2) < 0.15  # the others reach over an edge
    assert changed.any(0).all()  # it may be anywhere


def test_the_bright_parts_of_a_tenth_of_the_photographs_are_inverted_but_never_transparency():
    u = torch.rand(2000, augment.strong_natural.numbers)
    u[:, augment.posed.numbers] = 0.9  # no jitter of colours
    u[:, augment.posed.numbers + 5] = 0.9  # not grey
    x = torch.full((2000, 4, 8, 8), 0.8)
    x[:, 3] = 0.9
    out = augment.strong_natural.by(x, u)
    assert_close(out[:, 3], x[:, 3])
    level = out[:, :3].mean((1, 2, 3))
    inverted = (level - 0.2).abs() < 1e-4
    assert 0.07 < inverted.float().mean() < 0.13 and (inverted | ((level - 0.8).abs() < 1e-4)).all()


def test_weak_and_strong_views_follow_the_family():
    assert augment.weak_and_strong("natural") == (augment.shifted, augment.strong_natural)
    assert augment.weak_and_strong("strokes") == (augment.none, augment.strong_drawn)
    assert augment.weak_and_strong("none") == (augment.none, augment.cut_out)


# ---- by the settings ---------------------------------------------------------------------------------


def test_a_family_that_nobody_decided_on_is_told():
    with pytest.raises(InputError, match="augment='auto': expected what it was decided to be"):
        augment.view_size("auto", (8, 8, 1))


def test_a_users_own_view_is_taken_for_the_usual_change():
    weak, strong = augment.weak_and_strong(lambda x: 1 - x)
    x = torch.rand(40, 3, 8, 8)
    assert weak(x) is x
    changed = seeded(strong, x) != 1 - x
    assert 0 < changed.float().mean() < 0.1  # by a hole of a sixteenth
