"""Memory, losses and momentum update against the paper's formulas written as loops."""

from itertools import pairwise
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.overrides import TorchFunctionMode

import naive
from semclust import core
from semclust.model import follow

repeatable = settings(max_examples=50, deadline=None, derandomize=True)
seeds = st.integers(0, 2**32 - 1)
temperatures = st.sampled_from([0.07, 0.1, 0.5, 1.0])


def unit(rng, *shape):
    x = rng.standard_normal(shape)
    return torch.from_numpy(x / np.linalg.norm(x, axis=-1, keepdims=True))


def partly_filled(rng, C, m, d):
    """Banks of unit keys in which each holds between none and m; the rest is zero."""
    keys = unit(rng, C, m, d)
    filled = torch.from_numpy(rng.integers(0, m + 1, (C, 1)))
    return keys * (torch.arange(m) < filled)[:, :, None]


def close(actual, expected):
    torch.testing.assert_close(actual, torch.as_tensor(expected, dtype=actual.dtype), rtol=1e-10, atol=1e-10)


@st.composite
def problems(draw):
    """Queries, their keys, labels, banks and a temperature, of any small size."""
    n, C, m, d = (draw(st.integers(low, high)) for low, high in [(1, 7), (2, 6), (1, 5), (1, 6)])
    rng = np.random.default_rng(draw(seeds))
    y = torch.from_numpy(rng.integers(0, C, n))
    return unit(rng, n, d), unit(rng, n, d), y, partly_filled(rng, C, m, d), draw(temperatures)


# Semantic memory.


@repeatable
@given(K=st.integers(1, 10_000), C=st.integers(2, 300))
@example(K=3, C=5)  # more other clusters than keys
def test_bank_size_leaves_about_K_negatives(K, C):
    m = core.bank_size(K, C)
    assert m == naive.bank_size(K, C) >= 1
    assert K - (C - 1) < m * (C - 1) <= max(K, C - 1)


def test_bank_size_of_a_single_cluster_is_K():
    assert core.bank_size(17, 1) == 17


@repeatable
@given(
    batches=st.lists(st.integers(0, 12), min_size=1, max_size=5),
    C=st.integers(1, 5),
    m=st.integers(1, 5),
    d=st.integers(1, 4),
    seed=seeds,
)
@example(batches=[12, 1, 12], C=1, m=5, d=3, seed=0)  # every batch wraps around the one bank
def test_enqueue_keeps_the_newest_keys_of_each_cluster_in_order(batches, C, m, d, seed):
    rng = np.random.default_rng(seed)
    memory = core.SemanticMemory(C, m, d).double()
    banks = naive.empty_banks(C, m, d)
    for n in batches:
        k, y = unit(rng, n, d), torch.from_numpy(rng.integers(0, C, n))
        memory.enqueue(k, y)
        naive.enqueue(banks, k.tolist(), y.tolist())
        for j in range(C):
            oldest_first = memory.keys[j].roll(-int(memory.next_slot[j]), 0)
            assert torch.equal(oldest_first, torch.tensor(list(banks[j]), dtype=torch.float64))


class LastWriteFirst(TorchFunctionMode):
    """Carries out an indexed write from its last row to its first, as a GPU may."""

    seen = False

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.__setitem__:
            self.seen = True
            target, index, value = args
            args = target, index.flip(0), value.flip(0)
        return func(*args, **(kwargs or {}))


def test_enqueue_does_not_depend_on_the_order_of_writes():
    rng = np.random.default_rng(0)
    forwards, backwards = (core.SemanticMemory(3, 2, 4).double() for _ in range(2))
    for n in (3, 20, 7):
        k, y = unit(rng, n, 4), torch.from_numpy(rng.integers(0, 3, n))
        forwards.enqueue(k, y)
        with LastWriteFirst() as mode:
            backwards.enqueue(k, y)
        assert mode.seen
        assert torch.equal(forwards.keys, backwards.keys)


def test_memory_is_restored_with_its_place_in_the_queue():
    rng = np.random.default_rng(1)
    whole, resumed = (core.SemanticMemory(2, 3, 4).double() for _ in range(2))
    whole.enqueue(unit(rng, 4, 4), torch.tensor([0, 0, 1, 0]))
    resumed.load_state_dict(whole.state_dict())
    k, y = unit(rng, 3, 4), torch.tensor([1, 0, 0])
    whole.enqueue(k, y)
    resumed.enqueue(k, y)
    assert torch.equal(whole.keys, resumed.keys)


def test_enqueue_carries_no_gradient_and_leaves_its_input():
    rng = np.random.default_rng(2)
    memory = core.SemanticMemory(3, 2, 4)
    k, y = unit(rng, 5, 4).requires_grad_(), torch.tensor([2, 0, 1, 0, 2])
    k_before, y_before = k.detach().clone(), y.clone()
    memory.enqueue(k, y)
    assert memory.keys.dtype == torch.float32 and not memory.keys.requires_grad
    assert torch.equal(k, k_before) and torch.equal(y, y_before)


# Losses.


@repeatable
@given(problems())
def test_bank_similarity_and_instance_loss(problem):
    q, k, y, keys, tau = problem
    banks = keys.tolist()
    bank = core.bank_similarity(q, keys, tau)
    close(bank.exp(), [[naive.kernel_sum(q_i, keys_j, tau) for keys_j in banks] for q_i in q.tolist()])

    samples = list(zip(q.tolist(), k.tolist(), y.tolist(), strict=True))
    across = [naive.instance_loss(q_i, k_i, naive.contrastive_set(banks, y_i), tau) for q_i, k_i, y_i in samples]
    close(core.instance_loss(q, k, bank, tau, y), across)
    against_all = [naive.instance_loss(q_i, k_i, naive.contrastive_set(banks), tau) for q_i, k_i, _ in samples]
    close(core.instance_loss(q, k, bank, tau), against_all)


@repeatable
@given(problems())
def test_nearest_key(problem):
    _, k, _, keys, _ = problem
    k = k.requires_grad_()
    found = core.nearest_key(k, keys)
    all_keys = [key for bank in keys.tolist() for key in bank]
    for row, k_i in zip(found.tolist(), k.tolist(), strict=True):
        assert naive.cosine(k_i, row) == pytest.approx(naive.cosine(k_i, naive.nearest_key(k_i, all_keys)))
        assert row in all_keys
    assert not found.requires_grad


@repeatable
@given(problems())
def test_memory_assignment_and_attraction(problem):
    q, _, y, keys, tau = problem
    banks = keys.tolist()
    bank = core.bank_similarity(q, keys, tau)
    close(core.memory_assignment(bank), [naive.memory_assignment(q_i, banks, tau) for q_i in q.tolist()])
    attraction = [naive.attraction_loss(q_i, banks, y_i, tau) for q_i, y_i in zip(q.tolist(), y.tolist(), strict=True)]
    close(core.attraction_loss(bank, y), attraction)


@repeatable
@given(n=st.integers(1, 7), C=st.integers(2, 6), seed=seeds)
def test_cluster_loss(n, C, seed):
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(5 * rng.standard_normal((n, C)))
    p_memory = torch.from_numpy(rng.dirichlet(np.ones(C), n))
    losses = core.cluster_loss(logits, p_memory)
    assert losses.shape == (n,)
    close(losses.mean(), naive.cluster_loss(logits.tolist(), p_memory.tolist()))


def test_overall_loss_has_both_parts():
    l_id, l_cd = torch.tensor(0.7, dtype=torch.float64), torch.tensor(1.9, dtype=torch.float64)
    close(core.overall_loss(l_id, l_cd), naive.overall_loss(0.7, 1.9, 1, 1))


def test_whole_step_of_enqueue_then_loss():
    rng = np.random.default_rng(3)
    C, K, d, tau = 4, 10, 5, 0.1
    memory = core.SemanticMemory(C, core.bank_size(K, C), d).double()
    banks = naive.empty_banks(C, naive.bank_size(K, C), d)
    for n in (3, 9, 14):
        q, k, y = unit(rng, n, d), unit(rng, n, d), torch.from_numpy(rng.integers(0, C, n))
        loss = core.instance_loss(q, k, core.bank_similarity(q, memory.keys, tau), tau, y)
        negatives = [naive.contrastive_set(banks, y_i) for y_i in y.tolist()]
        assert {len(Q) for Q in negatives} == {9}
        expected = map(naive.instance_loss, q.tolist(), k.tolist(), negatives, [tau] * n)
        close(loss, list(expected))
        memory.enqueue(k, y)
        naive.enqueue(banks, k.tolist(), y.tolist())


# Gradients.


def test_cluster_loss_has_a_gradient_to_the_logits_only():
    rng = np.random.default_rng(4)
    q = unit(rng, 6, 3).requires_grad_()
    logits = torch.from_numpy(rng.standard_normal((6, 4))).requires_grad_()
    p_memory = core.memory_assignment(core.bank_similarity(q, unit(rng, 4, 2, 3), 0.1))
    core.cluster_loss(logits, p_memory).mean().backward()
    assert q.grad is None
    close(logits.grad, (logits.softmax(1) - p_memory).detach() / 6)


@repeatable
@given(problems())
def test_instance_loss_has_no_gradient_to_the_own_bank(problem):
    q, k, y, keys, tau = problem
    bank = core.bank_similarity(q, keys, tau).requires_grad_()
    core.instance_loss(q, k, bank, tau, y).sum().backward()
    own = core.own_bank(y, len(keys))
    assert bank.grad[own].eq(0).all() and bank.grad[~own].ne(0).all()


@repeatable
@given(problems(), st.integers(1, 40))
def test_bank_similarity_does_not_depend_on_how_many_banks_are_taken_at_once(problem, at_once):
    q, _, _, keys, tau = problem
    results = []
    for similarities in (2**23, at_once):
        with patch.object(core, "SIMILARITIES_AT_ONCE", similarities):
            x = q.clone().requires_grad_()
            bank = core.bank_similarity(x, keys, tau)
            (bank * torch.arange(1.0, 1 + len(keys), dtype=torch.float64)).sum().backward()
        results.append((bank.detach(), x.grad))
    plain = q.clone().requires_grad_()
    whole = (plain @ keys.flatten(0, 1).T / tau).unflatten(1, keys.shape[:2]).logsumexp(2)
    (whole * torch.arange(1.0, 1 + len(keys), dtype=torch.float64)).sum().backward()
    for bank, gradient in results:
        torch.testing.assert_close(bank, whole.detach(), rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(gradient, plain.grad, rtol=1e-10, atol=1e-10)


def test_gradients_to_query_and_key_are_those_of_the_formula():
    rng = np.random.default_rng(5)
    keys, tau, step = unit(rng, 3, 2, 4), 0.2, 1e-5
    negatives = naive.contrastive_set(keys.tolist(), 1)
    q, k = (unit(rng, 1, 4).requires_grad_() for _ in range(2))
    bank = core.bank_similarity(q, keys, tau)
    (core.instance_loss(q, k, bank, tau, torch.tensor([1])) + core.attraction_loss(bank, torch.tensor([1]))).backward()

    def formula(q_i, k_i):
        attraction = naive.attraction_loss(q_i, keys.tolist(), 1, tau)
        return naive.instance_loss(q_i, k_i, negatives, tau) + attraction

    def tangent(x, grad):
        """The formula has a cosine, so it only moves along the sphere."""
        return grad - (grad * x).sum() * x

    for x, place in ((q, 0), (k, 1)):
        slope = []
        for axis in torch.eye(4, dtype=torch.float64):
            ends = [[v.detach()[0] for v in (q, k)] for _ in range(2)]
            ends[0][place], ends[1][place] = ends[0][place] + step * axis, ends[1][place] - step * axis
            up, down = (formula(*(v.tolist() for v in end)) for end in ends)
            slope.append((up - down) / (2 * step))
        expected = torch.tensor(slope, dtype=torch.float64)
        torch.testing.assert_close(tangent(x.detach()[0], x.grad[0]), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("aligned", [1.0, -1.0])
def test_float32_stays_finite_at_a_low_temperature(aligned):
    tau, C, d = 0.01, 3, 4
    q = torch.eye(d)[:2].requires_grad_()
    keys = torch.zeros(C, 2, d)
    keys[1], keys[2] = torch.eye(d)[0], -torch.eye(d)[0]  # bank 0 is empty
    y = torch.tensor([1, 2])
    bank = core.bank_similarity(q, keys, tau)
    p_memory = core.memory_assignment(bank)
    logits = q @ torch.ones(d, C).cumsum(1) / tau * aligned
    losses = [
        core.instance_loss(q, aligned * q.detach(), bank, tau, y).sum(),
        core.instance_loss(q, aligned * q.detach(), bank, tau).sum(),
        core.attraction_loss(bank, y).sum(),
        core.cluster_loss(logits, p_memory).mean(),
    ]
    assert all(loss.dtype == torch.float32 and loss.isfinite() for loss in losses)
    sum(losses).backward()
    assert q.grad.isfinite().all()
    close(p_memory.sum(1).double(), [1.0, 1.0])


# A few steps lower the loss.


def descend(loss_of, parameter, rate, steps=20):
    """The losses along plain gradient descent."""
    losses = []
    for _ in range(steps):
        loss = loss_of(parameter)
        losses.append(loss.item())
        (grad,) = torch.autograd.grad(loss, parameter)
        parameter = (parameter - rate * grad).detach().requires_grad_()
    return losses


def test_steps_lower_the_instance_loss():
    rng = np.random.default_rng(6)
    k, keys, y = unit(rng, 8, 6), unit(rng, 3, 4, 6), torch.from_numpy(rng.integers(0, 3, 8))

    def loss_of(x):
        q = nn.functional.normalize(x, dim=1)
        return core.instance_loss(q, k, core.bank_similarity(q, keys, 0.2), 0.2, y).mean()

    losses = descend(loss_of, unit(rng, 8, 6).requires_grad_(), rate=0.3)
    assert losses[-1] < 0.5 * losses[0]


def test_steps_take_the_cluster_loss_down_to_the_entropy_of_the_memory():
    rng = np.random.default_rng(7)
    p_memory = torch.from_numpy(rng.dirichlet(np.ones(4), 10))
    entropy = -(p_memory * p_memory.log()).sum(1).mean().item()
    start = torch.from_numpy(rng.standard_normal((10, 4))).requires_grad_()
    losses = descend(lambda logits: core.cluster_loss(logits, p_memory).mean(), start, rate=10.0, steps=100)
    assert all(after < before for before, after in pairwise(losses))
    assert entropy < losses[-1] < entropy + 0.05 * (losses[0] - entropy)


# Momentum update.


@repeatable
@given(momentum=st.sampled_from([0.0, 0.3, 0.9, 0.99, 0.996, 1.0]), rounds=st.integers(1, 4), seed=seeds)
def test_twin_follows_the_encoder(momentum, rounds, seed):
    rng = np.random.default_rng(seed)
    twin, encoder = (nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 1)).double() for _ in range(2))
    for module in (twin, encoder):
        for parameter in module.parameters():
            nn.init.constant_(parameter, 0)
            parameter.data += torch.from_numpy(rng.standard_normal(parameter.shape))

    def flat(module):
        return nn.utils.parameters_to_vector(module.parameters()).detach().clone()

    goal, expected = flat(encoder), flat(twin).tolist()
    for _ in range(rounds):
        follow(twin, encoder, momentum)
        expected = naive.follow(expected, goal.tolist(), momentum)
        close(flat(twin), expected)
        assert torch.equal(flat(encoder), goal)
