"""Small-image ResNets: sizes, parameter counts, starting point and gradients; Sobel edges as a loop."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

from semclust.backbones import (
    BLOCKS,
    BasicBlock,
    FoldedResNet,
    SmallImageResNet,
    Sobel,
    convolution,
    convolve_pixels,
    fold,
)


def n_parameters_by_hand(name, in_channels, w):
    """Weights of every 3 x 3 and 1 x 1 convolution and two numbers a channel for each batch norm."""
    total = 9 * in_channels * w + 2 * w
    before = w
    for stage, n_blocks in enumerate(
        {"resnet10": [1, 1, 1, 1], "resnet18": [2, 2, 2, 2], "resnet34": [3, 4, 6, 3]}[name]
    ):
        here = w * 2**stage
        for _ in range(n_blocks):
            total += 9 * before * here + 2 * here + 9 * here * here + 2 * here
            if before != here:
                total += before * here + 2 * here
            before = here
    return total


def n_parameters(module):
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize("name", ["resnet18", "resnet34"])
@pytest.mark.parametrize("max_pool", [False, True])
@pytest.mark.parametrize("c, H, W, width", [(1, 8, 8, 4), (2, 13, 21, 3), (3, 33, 17, 4), (4, 16, 16, 6)])
def test_any_size_and_number_of_channels_gives_a_pooled_feature(name, max_pool, c, H, W, width):
    torch.manual_seed(0)
    network = SmallImageResNet(name, c, width, max_pool).eval()
    x = torch.rand(3, c, H, W)
    h = network(x)
    assert h.shape == (3, 8 * width) and h.isfinite().all()
    assert_close(network(x[1:2]), h[1:2])  # images do not see each other


def test_sizes_of_the_maps_along_the_network():
    x = torch.rand(1, 3, 32, 32)
    for max_pool, after_stem, at_end in [(False, 32, 4), (True, 17, 3)]:
        network = SmallImageResNet("resnet18", 3, 4, max_pool).eval()
        stem = network.stem(x)
        assert stem.shape == (1, 4, after_stem, after_stem)
        assert network.stages(stem).shape == (1, 32, at_end, at_end)
        strides = [block.conv1.stride[0] for block in network.stages]
        assert strides == [1, 1, 2, 1, 2, 1, 2, 1]


def test_pool_of_the_stem_takes_the_largest_of_each_square():
    network = SmallImageResNet("resnet18", 1, 2, max_pool=True).eval()
    x = torch.rand(1, 1, 6, 6)
    before, after = network.stem[:3](x), network.stem(x)
    assert after.shape[2:] == (4, 4)
    assert_close(after[..., 1, 2], before[..., 1:3, 3:5].amax((2, 3)))
    assert_close(after[..., 0, 0], before[..., 0, 0])  # the corner and its padding


@pytest.mark.parametrize("name, known", [("resnet18", 11_168_832), ("resnet34", 21_276_992)])
def test_parameter_counts_of_the_full_networks(name, known):
    """Those of the CIFAR ResNets without their last linear layer."""
    with torch.device("meta"):
        network = SmallImageResNet(name, 3, 64)
    assert n_parameters(network) == n_parameters_by_hand(name, 3, 64) == known


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("H, W", [(1, 1), (2, 1), (5, 1), (1, 2), (5, 3)])
@pytest.mark.parametrize("stride", [1, 2])
def test_gradients_of_the_smallest_maps_are_right(stride, H, W, dtype):
    """On a CPU, in bfloat16, torch's own were what lay in memory before."""
    for channels in (4, 8, 16, 64):
        layer = convolution(channels, channels, stride)
        x = torch.randn(6, channels, H, W).contiguous(memory_format=torch.channels_last)
        plain = F.conv2d(x, layer.weight, stride=stride, padding=1)
        shift = torch.randn_like(plain)
        (expected,) = torch.autograd.grad(plain, layer.weight, shift)
        for _ in range(3):
            left_in_memory = [torch.full((2**n,), math.nan) for n in range(2, 17) for _ in range(8)]
            del left_in_memory
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
                out = layer(x)
            (found,) = torch.autograd.grad(out, layer.weight, shift.to(out.dtype))
            assert out.dtype == dtype and out.shape == plain.shape
            assert (found - expected).norm() <= (0.02 if dtype == torch.bfloat16 else 1e-5) * expected.norm()


@pytest.mark.parametrize("name", sorted(BLOCKS))
@pytest.mark.parametrize("in_channels, width", [(1, 16), (2, 5), (4, 8)])
def test_parameter_counts_of_narrow_networks(name, in_channels, width):
    plain, pooled = (SmallImageResNet(name, in_channels, width, max_pool) for max_pool in (False, True))
    assert n_parameters(plain) == n_parameters(pooled) == n_parameters_by_hand(name, in_channels, width)


@pytest.mark.parametrize("H, W", [(8, 8), (9, 6), (5, 7), (1, 1)])
def test_shortcut_that_skips_pixels_is_a_convolution_of_stride_2(H, W):
    torch.manual_seed(0)
    block = BasicBlock(3, 6, stride=2).eval()
    nn.init.normal_(block.norm2.weight)
    x = torch.randn(2, 3, H, W)
    conv, norm = block.shortcut
    strided = norm(F.conv2d(x, conv.weight, stride=2))
    branch = block.norm2(block.conv2(F.relu(block.norm1(block.conv1(x)))))
    assert branch.shape == strided.shape == (2, 6, (H + 1) // 2, (W + 1) // 2)
    assert_close(block(x), F.relu(branch + strided))


def test_shortcut_is_the_input_itself_where_size_and_channels_stay():
    block = BasicBlock(4, 4, stride=1)
    assert isinstance(block.shortcut, nn.Identity)
    x = torch.rand(2, 4, 5, 5)
    assert_close(block(x), x)  # the branch starts at zero and x is not negative


def test_every_residual_branch_starts_at_zero():
    torch.manual_seed(0)
    network = SmallImageResNet("resnet34", 3, 4)
    x = network.stem(torch.rand(4, 3, 12, 12))
    for block in network.stages:
        assert block.norm2.weight.eq(0).all() and block.norm2.bias.eq(0).all()
        after = block(x)
        assert_close(after, F.relu(block.shortcut(x)))
        x = after
    assert x.std() > 0.1  # the shortcuts alone still tell images apart


@pytest.mark.parametrize("max_pool", [False, True])
def test_gradient_reaches_every_parameter_after_two_steps(max_pool):
    torch.manual_seed(0)
    network = SmallImageResNet("resnet18", 3, 4, max_pool)
    optimiser = torch.optim.SGD(network.parameters(), lr=0.1)
    x, goal = torch.rand(16, 3, 16, 16), torch.randn(16, 32)
    losses = []
    for _ in range(8):
        optimiser.zero_grad()
        loss = F.mse_loss(network(x), goal)
        loss.backward()
        gradients = {name: p.grad for name, p in network.named_parameters()}
        if losses:  # at first the branches are cut off by their zero
            assert [name for name, grad in gradients.items() if grad is None or grad.eq(0).all()] == []
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("c", [1, 2, 3, 4])
def test_sobel_against_a_loop(c):
    torch.manual_seed(c)
    x = torch.rand(2, c, 5, 7, dtype=torch.float64)
    edges = Sobel()(x)
    assert edges.shape == (2, 2, 5, 7) and edges.dtype == torch.float64

    def grey(n, i, j):
        inside = 0 <= i < 5 and 0 <= j < 7
        return sum(x[n, channel, i, j].item() for channel in range(c)) / c if inside else 0.0

    for n in range(2):
        for i in range(5):
            for j in range(7):
                left_to_right = sum(w * (grey(n, i + d, j - 1) - grey(n, i + d, j + 1)) for d, w in weights_across())
                top_to_bottom = sum(w * (grey(n, i - 1, j + d) - grey(n, i + 1, j + d)) for d, w in weights_across())
                assert_close(edges[n, :, i, j], torch.tensor([left_to_right, top_to_bottom], dtype=torch.float64))


def weights_across():
    return [(-1, 1.0), (0, 2.0), (1, 1.0)]


def test_sobel_is_not_trained():
    assert list(Sobel().parameters()) == []


# What only a GPU uses, as far as a CPU can tell.


@pytest.mark.parametrize("channels", [1, 2, 3, 8, 9])
def test_channels_filled_up_with_zeros_change_nothing(channels):
    x, weight, bias = torch.randn(2, channels, 7, 5), torch.randn(6, channels, 3, 3), torch.randn(6)
    assert_close(convolve_pixels(x, weight, bias), F.conv2d(x, weight, bias, padding=1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("stride", [1, 2])
def test_a_folded_convolution_does_what_convolution_and_norm_do(stride):
    torch.manual_seed(0)
    convolution, norm = nn.Conv2d(4, 6, 3, stride, padding=1, bias=False), nn.BatchNorm2d(6)
    nn.init.uniform_(norm.weight, 0.5, 1.5)
    nn.init.normal_(norm.bias)
    for _ in range(5):
        norm(convolution(2 + 3 * torch.randn(16, 4, 8, 8)))
    norm.eval()
    weight, bias = fold(convolution, norm)
    x = torch.randn(3, 4, 8, 8)
    expected = norm(convolution(x)).detach()
    folded = F.conv2d(x, weight.float(), bias.float(), stride=stride, padding=1).detach()
    assert (folded - expected).norm() < 0.01 * expected.norm()  # bfloat16 has 8 bits


def test_a_folded_network_takes_its_parts_in_order(monkeypatch):
    """With the fused convolutions of cuDNN written out."""
    torch.manual_seed(0)

    def plain(x, weight, bias, stride, padding, dilation, groups):
        return F.conv2d(x, weight, bias, stride, padding, dilation, groups).relu()

    def added(x, weight, beside, alpha, bias, stride, padding, dilation, groups):
        return (F.conv2d(x, weight, bias, stride, padding, dilation, groups) + alpha * beside).relu()

    monkeypatch.setattr(torch, "cudnn_convolution_relu", plain)
    monkeypatch.setattr(torch, "cudnn_convolution_add_relu", added)
    for max_pool in (False, True):
        network = SmallImageResNet("resnet18", 3, 8, max_pool)
        for norm in network.modules():
            if isinstance(norm, nn.BatchNorm2d):
                nn.init.uniform_(norm.weight, 0.5, 1.5)
                nn.init.normal_(norm.bias, 0, 0.1)
        x = torch.randn(8, 3, 16, 16)
        with torch.no_grad():
            for _ in range(5):
                network(x)
            expected, folded = network.eval()(x), FoldedResNet(network)(x)
        assert (folded - expected).norm() < 0.03 * expected.norm()
