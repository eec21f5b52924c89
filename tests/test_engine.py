"""Compiled and recorded steps: where there is no GPU, that they are left alone, and fall back in words."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from conftest import make_images, tiny
from semclust import engine, fitting
from semclust.engine import WORTH_COMPILING, Engine

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def pretend_gpu(monkeypatch):
    """A GPU as far as choices go."""
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(engine, "can_compile", lambda device: True)


def notices(**changes):
    heard: list[str] = []
    made = Engine(**dict(device=CUDA, images_seen=WORTH_COMPILING, compile=True, on_notice=heard.append) | changes)
    return made, heard


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(), "compiled and recorded step"),
        (dict(images_seen=WORTH_COMPILING - 1), "recorded step"),
        (dict(compile=False), "plain step"),
        (dict(device=CPU), "plain step"),
    ],
)
def test_short_runs_are_not_compiled_and_a_cpu_records_nothing(pretend_gpu, changes, words):
    made, _ = notices(**changes)
    assert str(made) == words


def test_without_a_compiler_steps_are_only_recorded(pretend_gpu, monkeypatch):
    monkeypatch.setattr(engine, "can_compile", lambda device: False)
    assert str(notices()[0]) == "recorded step"


def test_on_a_cpu_functions_and_steps_are_themselves():
    made, _ = notices(device=CPU)

    def function(x):
        return x

    assert made.compiled(function) is function and made.recorded(function) is function
    with made.beside(True) as meet:
        pass
    meet()


def test_streams_meet_also_after_an_error(pretend_gpu, monkeypatch):
    waited = []

    def stream(name):
        return SimpleNamespace(name=name, wait_stream=lambda other: waited.append((name, other.name)))

    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream("first"))
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    made, _ = notices()
    made.second_stream = stream("second")
    with made.beside(True) as meet:
        pass
    assert waited == [("second", "first")]
    meet()
    assert waited[1:] == [("first", "second")]
    with pytest.raises(ZeroDivisionError), made.beside(True):
        raise ZeroDivisionError
    assert waited[2:] == [("second", "first"), ("first", "second")]


def test_what_cannot_be_compiled_runs_as_it_is_and_says_so_once(pretend_gpu, monkeypatch):
    def refuses(function, **options):
        def fast(*args):
            raise RuntimeError("no kernel\nand a long tale")

        return fast

    monkeypatch.setattr(torch, "compile", refuses)
    made, heard = notices()
    double = made.compiled(lambda x: 2 * x)
    triple = made.compiled(lambda x: 3 * x)
    assert [double(2), double(3), triple(2)] == [4, 6, 6]
    assert heard == ["This network is not compiled, which makes it slower (RuntimeError no kernel and a long tale)."]


def test_an_error_of_the_function_itself_is_raised_in_its_own_words(pretend_gpu, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    made, heard = notices()
    with pytest.raises(ZeroDivisionError):
        made.compiled(lambda x: 1 / x)(0)
    assert not heard


class Recorder:
    """Stands in for torch.cuda.graph: what runs inside is noted, not carried out."""

    def __init__(self, fails: bool):
        self.fails = fails

    def __call__(self, graph, pool):
        return self

    def __enter__(self):
        if self.fails:
            raise RuntimeError("not while capturing")

    def __exit__(self, *exc):
        return False


@pytest.mark.parametrize("left_open", [True, False])  # what torch does with the memory of such a recording
def test_a_step_that_cannot_be_recorded_goes_on_plainly_and_says_so(pretend_gpu, monkeypatch, left_open):
    given_back = []

    def end(device, pool):
        if not left_open:
            raise RuntimeError("not currently recording to mempool_id")

    monkeypatch.setattr(torch.cuda, "graph", Recorder(fails=True))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", lambda *pool: given_back.append(pool), raising=False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    restored = []
    generator = SimpleNamespace(clone_state=lambda: "whole", graphsafe_set_state=restored.append)
    monkeypatch.setattr(torch.cuda, "default_generators", [generator])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(engine.RecordedStep, "_on_side_stream", lambda self, inputs: self.step(*inputs))
    made, heard = notices()
    calls = []
    step = made.recorded(lambda x: calls.append(x) or 2 * x)
    assert [step(torch.tensor(float(i))).item() for i in range(6)] == [0, 2, 4, 6, 8, 10]
    assert len(calls) == 6 and len(heard) == 1 and "cannot be recorded" in heard[0] and not made.records
    assert restored == ["whole"] and given_back == [(0, (0, 1))] * left_open


def test_training_says_what_it_does():
    training = fitting.start(make_images(), tiny(images_on="host"))
    assert str(training.engine) == "plain step" and str(training.images) == "images streamed to cpu"


def test_streamed_images_give_the_same_run():
    rows = [fitting.fit(make_images(), tiny(images_on=where)).history for where in ("device", "host")]
    assert rows[0] == rows[1]
