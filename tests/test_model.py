"""Encoder, classifier, a user's own network, momentum twin and grouped batch norm."""

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

from semclust import model
from semclust.augment import choose_augmentation
from semclust.backbones import (
    GroupedBatchNorm1d,
    GroupedBatchNorm2d,
    SmallImageResNet,
    Sobel,
    build_backbone,
    dealt,
    group_batch_norm,
    pool,
)
from semclust.config import Settings
from semclust.errors import InputError
from semclust.model import ClusterNetwork, Encoder, LinearClassifier, build_encoder, follow, momentum_twin


def small_encoder(projections=("shared",), c=3, **kwargs):
    torch.manual_seed(0)
    network = SmallImageResNet("resnet18", 2 if kwargs.get("sobel") else c, 4)
    return Encoder(network, 32, c, projections, projection_dim=5, view_size=(8, 8), **kwargs)


def build(module, shape=(8, 6, 3), width=None, max_pool=False, sobel=False):
    return build_backbone(module, shape, width, max_pool, sobel)


class Reads(nn.Module):
    """Remembers what it was given."""

    def forward(self, x):
        self.seen = x
        return x


# Encoder.


@pytest.mark.parametrize("projection_norm", [False, True])
@pytest.mark.parametrize("sobel", [False, True])
@pytest.mark.parametrize("c", [1, 3, 4])
def test_representations_are_unit_vectors_one_for_each_projection(projection_norm, sobel, c):
    encoder = small_encoder(("cluster", "instance"), c, projection_norm=projection_norm, sobel=sobel)
    h, q = encoder(torch.rand(6, c, 9, 8))
    assert h.shape == (6, 32) and h.std(0).max() > 0 and list(q) == ["cluster", "instance"]
    for rows in q.values():
        assert rows.shape == (6, 5)
        assert_close(rows.norm(dim=1), torch.ones(6))
    assert (q["cluster"] - q["instance"]).abs().max() > 0.1


def test_projection_is_a_head_of_two_layers_on_the_pooled_feature():
    encoder = small_encoder(projection_norm=False).eval()
    x = torch.rand(4, 3, 8, 8)
    h, q = encoder(x)
    first, _, second = encoder.projections["shared"]
    assert_close(h, encoder.pooled(x))
    assert_close(q["shared"], F.normalize(second(F.relu(first(h))), dim=1))
    norms = [m for m in small_encoder(projection_norm=True).projections.modules() if isinstance(m, nn.BatchNorm1d)]
    assert len(norms) == 1


def test_backbone_sees_colours_less_their_mean_over_their_deviation():
    encoder = Encoder(Reads(), 3, 3, ["shared"], view_size=(4, 4))
    mean, std = torch.tensor([0.1, 0.5, 0.9]), torch.tensor([0.2, 0.25, 0.5])
    encoder.mean.copy_(mean[:, None, None])
    encoder.std.copy_(std[:, None, None])
    x = torch.rand(2, 3, 4, 5)
    h = encoder.pooled(x)
    by_channel = torch.stack([(x[:, j] - mean[j]) / std[j] for j in range(3)], 1)
    assert_close(encoder.backbone.seen, by_channel)
    assert_close(h, by_channel.mean((2, 3)))
    assert {"mean", "std"} < set(encoder.state_dict())


def test_backbone_sees_edges_of_the_normalised_image_where_asked():
    encoder = Encoder(Reads(), 2, 3, ["shared"], sobel=True, view_size=(4, 4))
    encoder.std.fill_(0.5)
    encoder.mean.fill_(0.3)
    x = torch.rand(2, 3, 4, 5)
    encoder.pooled(x)
    assert_close(encoder.backbone.seen, Sobel()((x - 0.3) / 0.5))


def test_pool_averages_maps_and_leaves_vectors():
    maps = torch.rand(2, 3, 4, 5)
    assert_close(pool(maps), maps.sum((2, 3)) / 20)
    assert_close(pool(maps[..., 0]), maps[..., 0].sum(2) / 4)
    vectors = torch.rand(2, 3)
    assert torch.equal(pool(vectors), vectors)


# A named network.


@pytest.mark.parametrize("sobel, c_in", [(False, 4), (True, 2)])
def test_named_network_takes_the_channels_it_is_fed(sobel, c_in):
    network, n_features = build("resnet34", (8, 6, 4), width=3, max_pool=True, sobel=sobel)
    assert network.stem[0].in_channels == c_in and n_features == 24
    assert isinstance(network.stem[-1], nn.MaxPool2d) and len(network.stages) == 16
    assert network(torch.rand(2, c_in, 8, 6)).shape == (2, n_features)


def test_a_named_network_is_as_wide_as_asked():
    network, n_features = build("resnet18", (8, 8, 1), width=5)
    assert network.stem[0].out_channels == 5 and n_features == 40
    with pytest.raises(InputError, match="width=None: expected the number that was decided on"):
        build("resnet18", (8, 8, 1))


def test_an_unknown_name_is_refused_by_name():
    with pytest.raises(InputError, match=r"backbone='vgg'.*resnet18, resnet34"):
        build("vgg")


# A user's own network.


class OwnVectors(nn.Module):
    def __init__(self, in_channels=3):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(in_channels, 7, 3), nn.BatchNorm2d(7), nn.Flatten(), nn.LazyLinear(11))
        with torch.no_grad():
            self.net(torch.zeros(2, in_channels, 8, 6))

    def forward(self, x):
        return self.net(x)


class OwnPair(nn.Module):
    def forward(self, x):
        return x.mean((2, 3)), x


class OwnTotal(nn.Module):
    def forward(self, x):
        return x.mean()


class OwnFlat(nn.Module):
    def forward(self, x):
        return x.mean((1, 2, 3))


class OwnJoined(nn.Module):
    """Mixes up the images of a batch."""

    def forward(self, x):
        return x.reshape(1, -1)


@pytest.mark.parametrize(
    "module, n_features", [(OwnVectors(), 11), (nn.Conv2d(3, 9, 3), 9), (nn.Flatten(), 144), (nn.Flatten(2), 3)]
)
def test_own_network_may_return_vectors_or_maps(module, n_features):
    network, found = build(module)
    assert found == n_features
    encoder = Encoder(network, found, 3, ["shared"], view_size=(8, 6))
    h, q = encoder(torch.rand(4, 3, 8, 6))
    assert h.shape == (4, n_features) and q["shared"].shape == (4, 128)


def test_own_network_is_fed_edges_where_asked():
    network, n_features = build(nn.Conv2d(2, 9, 3), sobel=True)
    assert n_features == 9
    h, _ = Encoder(network, n_features, 3, ["shared"], sobel=True, view_size=(8, 6))(torch.rand(4, 3, 8, 6))
    assert h.shape == (4, 9)


@pytest.mark.parametrize("module", [OwnPair(), OwnTotal(), OwnFlat(), OwnJoined()], ids=lambda m: type(m).__name__)
def test_own_network_of_the_wrong_output_is_refused_by_class_name(module):
    with pytest.raises(InputError, match=rf"{type(module).__name__} returned .*expected a tensor of shape"):
        build(module)


@pytest.mark.parametrize("module", [OwnVectors(in_channels=4), nn.Sequential(nn.Flatten(), nn.Linear(10, 4))])
def test_own_network_that_cannot_take_the_images_is_refused_by_class_name(module):
    with pytest.raises(InputError, match=rf"{type(module).__name__} cannot take .*\(3, 8, 6\)"):
        build(module)


@pytest.mark.parametrize("training", [True, False])
def test_own_network_is_copied_and_left_as_it_was(training):
    own = OwnVectors().train(training)
    before = copy.deepcopy(own.state_dict())
    network, _ = build(own)
    assert own.training is training and all(m.training is training for m in own.modules())
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(1)
    network.train()(torch.rand(4, 3, 8, 6))
    for name, value in own.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_mode_of_an_own_network_is_restored_when_it_fails():
    own = OwnVectors(in_channels=4)
    with pytest.raises(InputError):
        build(own)
    assert own.training


class OwnAsserts(nn.Module):
    """As the vision transformers of torchvision do for images of another size."""

    def forward(self, x):
        assert x.shape[2] == 224, "Wrong image height"
        return x.mean((2, 3))


@pytest.mark.parametrize("module", [OwnAsserts(), nn.BatchNorm1d(3)], ids=lambda m: type(m).__name__)
def test_own_network_may_refuse_the_images_by_any_error(module):
    with pytest.raises(InputError, match=f"{type(module).__name__} cannot take"):
        build(module)


class OwnCounter(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.norm = nn.BatchNorm2d(3).eval()  # frozen

    def forward(self, x):
        self.calls += 1
        return self.norm(x)


def test_own_network_is_not_touched_by_the_trial_run():
    own = OwnCounter()
    build(own)
    assert own.calls == 0 and own.training and not own.norm.training


def test_own_network_may_find_its_sizes_by_itself():
    network, n_features = build(nn.Sequential(nn.LazyConv2d(4, 3), nn.Flatten()))
    assert n_features == 96
    assert not any(isinstance(p, nn.UninitializedParameter) for p in network.parameters())


# Classifier.


def test_logits_are_scaled_by_the_temperature_but_for_the_bias():
    classifier = LinearClassifier(3, 4, tau=0.2)
    x = F.normalize(torch.randn(5, 3), dim=1)
    W, B = classifier.linear.weight, classifier.linear.bias
    expected = torch.stack([torch.stack([W[j] @ x_i / 0.2 + B[j] for j in range(4)]) for x_i in x])
    assert_close(classifier(x), expected)


def groups_around(directions, sizes, noise=0.1):
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(len(directions)).repeat_interleave(torch.tensor(sizes))
    x = directions[y] + noise * torch.randn(len(y), directions.shape[1], generator=generator)
    return F.normalize(x, dim=1), y


@pytest.mark.parametrize("sizes", [[50, 50, 50, 50], [200, 60, 20, 5]])
@pytest.mark.parametrize("shift", [0.0, 2.0])
def test_classifier_starts_from_well_separated_groups(sizes, shift):
    """Also where all features lie to one side, as after a ReLU."""
    x, y = groups_around(torch.eye(4, 6) + shift * torch.eye(6)[5], sizes, noise=0.05)
    classifier = LinearClassifier(6, 4, tau=0.1)
    classifier.start_from(x, y)
    assert torch.equal(classifier(x).argmax(1), y)
    assert classifier(x).softmax(1).max(1).values.mean() > 0.9
    assert all(p.requires_grad and p.grad is None for p in classifier.parameters())


def test_classifier_learns_clusters_that_lie_one_behind_the_other():
    """Seen from the mean of all, which is near the first, the others lie in nearly one direction."""
    angle = torch.tensor([0.0, 0.26, 0.52])
    x, y = groups_around(torch.stack([angle.cos(), angle.sin()], 1), [300, 30, 30], noise=0.03)
    classifier = LinearClassifier(2, 3, tau=0.2)
    with torch.no_grad():  # as where labels are renewed
        classifier.start_from(x, y)
    assert torch.equal(classifier(x).argmax(1), y)


def test_classifier_is_as_sure_of_hundreds_of_clusters_as_of_few():
    """As sure as own labels ask for, whose first come from it."""
    directions = F.normalize(torch.randn(200, 64, generator=torch.Generator().manual_seed(0)), dim=1)
    x, y = groups_around(directions, [20] * 200, noise=0.05)
    classifier = LinearClassifier(64, 200, tau=0.2)
    classifier.start_from(x, y)
    sure, found = classifier(x).softmax(1).max(1)
    assert torch.equal(found, y) and (sure > 0.95).float().mean() > 0.9


def test_classifier_knows_small_clusters_beside_large_ones():
    directions = F.normalize(torch.randn(8, 128, generator=torch.Generator().manual_seed(0)), dim=1)
    towards_one_side = F.normalize(directions + 2 * 128**-0.5, dim=1)
    x, y = groups_around(towards_one_side, [2000] * 4 + [5] * 4, noise=0.06)
    classifier = LinearClassifier(128, 8, tau=0.2)
    classifier.start_from(x, y)
    assert torch.equal(classifier(x)[y >= 4].argmax(1), y[y >= 4])


def test_classifier_starts_from_a_part_of_very_many_images(monkeypatch):
    """Drawn at random: classes may lie in the data in turn."""
    monkeypatch.setattr(model, "START_PROBABILITIES", 4 * 200)
    x, y = groups_around(torch.eye(4, 6), [100] * 4, noise=0.05)
    in_turn = torch.arange(400).view(4, 100).T.flatten()
    classifier = LinearClassifier(6, 4, tau=0.1)
    classifier.start_from(x[in_turn], y[in_turn])
    assert torch.equal(classifier(x).argmax(1), y)


def test_classifier_starts_with_a_cluster_left_empty():
    x, y = groups_around(torch.eye(3, 6), [40, 40, 40])
    classifier = LinearClassifier(6, 4, tau=0.1)
    classifier.start_from(x, y + (y == 2))  # no image in cluster 2
    assert torch.equal(classifier(x).argmax(1), y + (y == 2))
    assert all(p.isfinite().all() for p in classifier.parameters())


# What predicts.


@pytest.mark.parametrize("pooled", [False, True])
def test_cluster_network_gives_probabilities_and_representation(pooled):
    encoder = small_encoder().eval()
    classifier = LinearClassifier(32 if pooled else 5, 4, tau=0.1)
    x = torch.rand(6, 3, 8, 8)
    p, q = ClusterNetwork(encoder, classifier, pooled)(x)
    h, representations = encoder(x)
    assert torch.equal(q, representations["shared"])
    seen = h / h.norm(dim=1, keepdim=True) if pooled else q
    assert_close(p, torch.softmax(classifier(seen), 1))
    assert p.shape == (6, 4)
    assert_close(p.sum(1), torch.ones(6))


# Momentum twin.


def test_twin_starts_equal_has_no_gradients_and_shares_nothing():
    encoder = small_encoder()
    twin = momentum_twin(encoder)
    ours, theirs = encoder.state_dict(), twin.state_dict()
    assert list(ours) == list(theirs)
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]) and value.data_ptr() != theirs[name].data_ptr(), name
    assert not any(p.requires_grad for p in twin.parameters())
    assert all(p.requires_grad for p in encoder.parameters())
    assert not twin(torch.rand(4, 3, 8, 8))[1]["shared"].requires_grad


def test_twin_moves_its_share_of_the_way_and_stays_without_gradients():
    encoder = small_encoder()
    twin = momentum_twin(encoder)
    before = [p.clone() for p in twin.parameters()]
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.add_(torch.randn_like(parameter))
    follow(twin, encoder, 0.75)
    for was, now, goal in zip(before, twin.parameters(), encoder.parameters(), strict=True):
        assert_close(now, 0.75 * was + 0.25 * goal.detach())
        assert not now.requires_grad and now.grad is None


# Grouped batch norm.


def random_norm(cls=nn.BatchNorm2d):
    torch.manual_seed(0)
    norm = cls(3)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    return norm


@pytest.mark.parametrize("n, groups", [(8, 1), (8, 2), (8, 4), (12, 3), (9, 3), (5, 2)])
def test_grouped_batch_norm_is_a_batch_norm_of_each_part(n, groups):
    grouped, plain = random_norm(GroupedBatchNorm2d), random_norm()
    grouped.groups = groups
    x = torch.randn(n, 3, 4, 5) + torch.arange(n)[:, None, None, None]
    parts = [plain(part) for part in x.split(-(-n // groups))]
    assert len(parts) == groups
    out = grouped(x)
    assert_close(out, torch.cat(parts))
    assert_close(grouped.running_mean, plain.running_mean)
    assert_close(grouped.running_var, plain.running_var)
    if groups > 1:
        assert (out - random_norm()(x)).abs().max() > 0.1
    grouped.eval(), plain.eval()
    assert_close(grouped(x), plain(x))


@pytest.mark.parametrize("cls, shape", [(GroupedBatchNorm2d, (12, 3, 4, 5)), (GroupedBatchNorm1d, (12, 3))])
def test_all_parts_at_once_are_normed_as_one_after_the_other(cls, shape):
    one_by_one, at_once = random_norm(cls), random_norm(cls)
    one_by_one.groups = at_once.groups = 3
    for _ in range(2):
        x = torch.randn(shape) + torch.arange(12).view(-1, *[1] * (len(shape) - 1))
        a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
        out, same = one_by_one(a), at_once._at_once(b, 0.1)
        assert_close(out, same)
        upstream = torch.randn(shape)
        out.backward(upstream), same.backward(upstream)
        assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-5)
        assert_close(one_by_one.weight.grad, at_once.weight.grad)
        assert_close(one_by_one.running_mean, at_once.running_mean)
        assert_close(one_by_one.running_var, at_once.running_var)


@pytest.mark.parametrize("n, groups", [(16, 4), (512, 8), (13, 3)])
def test_images_of_a_part_are_dealt_out_to_all_parts(n, groups):
    order = dealt(n, groups, torch.device("cpu"))
    assert sorted(order.tolist()) == list(range(n))
    before = torch.empty(n, dtype=torch.long)
    for part, members in enumerate(torch.arange(n).tensor_split(groups)):
        before[members] = part
    for members in order.tensor_split(groups):
        counts = before[members].bincount(minlength=groups)
        assert counts.max() - counts.min() <= (2 if n % groups else 0)


def test_grouped_batch_norm_takes_a_batch_too_small_to_split_whole():
    grouped = random_norm(GroupedBatchNorm2d)
    grouped.groups = 4
    x = torch.randn(7, 3, 4, 5)
    assert_close(grouped(x), random_norm()(x))


@pytest.mark.parametrize("n, groups", [(10, 4), (7, 3), (13, 6)])
def test_grouped_batch_norm_leaves_no_image_by_itself(n, groups):
    """A part of one image with maps of one pixel has no deviation."""
    grouped = random_norm(GroupedBatchNorm2d)
    grouped.groups = groups
    out = grouped(torch.randn(n, 3, 1, 1))
    assert out.shape == (n, 3, 1, 1) and out.isfinite().all()


def test_every_2d_batch_norm_of_a_network_is_grouped_and_nothing_else_changes():
    encoder = small_encoder(projection_norm=True)
    before = copy.deepcopy(encoder)
    group_batch_norm(encoder, 2)
    kinds = [type(m) for m in encoder.modules()]
    assert nn.BatchNorm2d not in kinds and nn.BatchNorm1d not in kinds
    assert kinds.count(GroupedBatchNorm2d) == [type(m) for m in before.modules()].count(nn.BatchNorm2d) == 20
    assert kinds.count(GroupedBatchNorm1d) == 1
    assert all(m.groups == 2 for m in encoder.modules() if isinstance(m, GroupedBatchNorm2d))
    assert list(encoder.state_dict()) == list(before.state_dict())
    twin = momentum_twin(encoder)
    assert all(m.groups == 2 for m in twin.modules() if isinstance(m, GroupedBatchNorm2d))
    x = torch.rand(8, 3, 8, 8)
    assert_close(encoder.backbone(x), torch.cat([before.backbone(part) for part in x.split(4)]))
    assert_close(encoder.eval()(x)[0], before.eval()(x)[0])


def test_batch_norms_are_folded_on_a_gpu_alone():
    """A CPU has no convolution that adds and rectifies, too, even where it computes in bfloat16."""
    settings = Settings(epochs=10, augment="natural", backbone="resnet10", width=8)
    encoder, _ = build_encoder(settings, (16, 16, 3), ["shared"])
    assert encoder.folded() is None


def test_whole_images_are_seen_as_large_as_the_views_that_were_learned_from():
    of_network = dict(backbone="resnet10", width=4, n_clusters=3, projection_dim=5)
    settings = Settings(epochs=10, self_label_from=1.0, augment="natural", **of_network)
    encoder, n_features = build_encoder(settings, (32, 24, 3), ["shared"])
    assert (encoder.view_size, n_features) == ((24, 18), 32)
    assert build_encoder(replace(settings, self_label_from=0.8), (32, 24, 3), ["shared"])[0].view_size == (32, 24)
    x = torch.rand(2, 3, 32, 24)
    classifier = LinearClassifier(5, 3, tau=0.1)
    network = ClusterNetwork(encoder.eval(), classifier, pooled=False)
    smaller = choose_augmentation("natural", settings.crop_size)(x).shape[2:]
    whole = F.interpolate(x, smaller, mode="bilinear")
    assert_close(network(x)[1], encoder(whole)[1]["shared"])
    assert build_encoder(replace(settings, augment="strokes"), (32, 24, 3), ["shared"])[0].view_size == (32, 24)
    assert build_encoder(replace(settings, augment=lambda x: x), (32, 24, 3), ["shared"])[0].view_size == (32, 24)
