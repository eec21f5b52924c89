"""Batches of images: the right ones, from wherever they lie, and nothing left behind."""

import threading

import numpy as np
import pytest
import torch

from semclust.loader import BUFFERS, Resident, Streamed, as_tensor, choose_loader

CPU = torch.device("cpu")
pixels = np.random.default_rng(0).integers(0, 256, (50, 5, 4, 3), dtype=np.uint8)


@pytest.fixture(params=[Resident, Streamed])
def loader(request):
    return request.param(pixels, CPU)


def test_batches_are_the_images_of_their_numbers(loader):
    order = torch.randperm(50)
    for numbers in (order.view(5, 10), order.split(7), [torch.tensor([3])] * (2 * BUFFERS + 1)):
        batches = [batch.clone() for batch in loader.batches(numbers)]
        assert len(batches) == len(numbers)
        for index, batch in zip(numbers, batches, strict=True):
            assert batch.dtype == torch.uint8 and batch.is_contiguous(memory_format=torch.channels_last)
            assert np.array_equal(batch.permute(0, 2, 3, 1).numpy(), pixels[index.numpy()])


def test_a_batch_stays_as_it_is_while_the_next_are_fetched(loader):
    numbers = torch.arange(50).split(5)
    kept = list(loader.batches(numbers))
    for index, batch in zip(numbers, kept, strict=True):
        assert np.array_equal(batch.permute(0, 2, 3, 1).numpy(), pixels[index.numpy()])


def loader_threads() -> int:
    return sum(thread.name == "semclust-loader" for thread in threading.enumerate())


def test_leaving_early_ends_the_thread():
    batches = Streamed(pixels, CPU).batches(torch.arange(50).view(50, 1))
    next(batches)
    assert loader_threads() == 1
    batches.close()
    assert loader_threads() == 0


def test_an_error_while_gathering_is_raised_where_the_batch_is_awaited():
    batches = Streamed(pixels, CPU).batches([torch.tensor([1]), torch.tensor([99])])
    next(batches)
    with pytest.raises((IndexError, RuntimeError)):
        next(batches)
    assert loader_threads() == 0


def test_images_on_a_cpu_are_not_copied(tmp_path):
    assert np.shares_memory(Resident(pixels, CPU).pixels.numpy(), pixels)
    np.save(tmp_path / "images.npy", pixels)
    mapped = np.load(tmp_path / "images.npy", mmap_mode="r")
    assert np.shares_memory(as_tensor(mapped).numpy(), mapped)


def test_images_that_are_not_in_one_piece_are_read_right():
    (batch,) = Resident(pixels[:, ::-1], CPU).batches([torch.tensor([7])])
    assert np.array_equal(batch[0].permute(1, 2, 0).numpy(), pixels[7, ::-1])


@pytest.mark.parametrize("images_on, kind", [("auto", Resident), ("device", Resident), ("host", Streamed)])
def test_where_images_lie_can_be_chosen(images_on, kind):
    assert isinstance(choose_loader(pixels, CPU, images_on), kind)


@pytest.mark.parametrize("free, kind", [(2 * pixels.nbytes, Resident), (2 * pixels.nbytes - 1, Streamed)])
def test_images_lie_on_a_gpu_where_half_of_its_free_memory_is_enough(monkeypatch, free, kind):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 10 * free))
    made = []
    monkeypatch.setattr(Resident, "__init__", lambda self, *args: made.append(Resident))
    monkeypatch.setattr(Streamed, "__init__", lambda self, *args: made.append(Streamed))
    choose_loader(pixels, torch.device("cuda"), "auto")
    assert made == [kind]
