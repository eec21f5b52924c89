"""Files on disk: whole or not at all, damage told in words, and nothing that is read is ever run."""

import io
import os
import pickle
import struct
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save, save_file
from torch import nn
from torch.testing import assert_close

from semclust import storage
from semclust.backbones import stop_counting
from semclust.errors import DamagedFileError, InputError
from semclust.storage import (
    WholeFile,
    check_new_file,
    free_path,
    load_into,
    read_json,
    read_tensors,
    write_json,
    write_tensors,
    write_whole,
)

TENSORS = {"b": torch.arange(6.0).reshape(2, 3), "a": torch.tensor([1, 2]), "scalar": torch.tensor(3.5)}


def damaged(path: Path, *words: str) -> None:
    """Reading ``path`` says that this file is damaged."""
    with pytest.raises(DamagedFileError) as caught:
        (read_json if path.suffix == ".json" else read_tensors)(path)
    for word in (str(path), *words):
        assert word in str(caught.value)


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    write_tensors(tmp_path / "x.safetensors", TENSORS, {"format": 1, "epoch": 7})
    return tmp_path / "x.safetensors"


class Trap:
    """Unpickling this creates the file ``marker``."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


# ---- whole or not at all -----------------------------------------------------------------------------


def test_a_file_is_replaced_as_a_whole(tmp_path):
    path = tmp_path / "file"
    for content in (b"first", b"a longer second", b""):
        write_whole(path, content)
        assert path.read_bytes() == content
        assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("interruption", [OSError("no space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("where", ["fsync", "replace"])
def test_a_failing_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, where, interruption):
    path = tmp_path / "file"
    write_whole(path, b"old")

    def fail(*args):
        raise interruption

    monkeypatch.setattr(storage.os, where, fail)
    with pytest.raises(type(interruption)):
        write_whole(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_a_disk_that_fills_up_midway_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_whole(path, b"old")

    class Half(io.FileIO):
        def write(self, content):
            super().write(content[: len(content) // 2])
            raise OSError("no space left on device")

    monkeypatch.setattr(storage, "open", Half, raising=False)
    with pytest.raises(OSError, match="no space"):
        write_whole(path, b"new content")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_the_content_is_on_the_disk_before_the_old_file_goes(tmp_path, monkeypatch):
    happened = []
    fsync, replace = os.fsync, os.replace

    def watched_fsync(number):
        happened.append(("fsync", os.fstat(number).st_size))
        fsync(number)

    def watched_replace(source, target):
        happened.append(("replace", os.path.getsize(source)))
        replace(source, target)

    monkeypatch.setattr(storage.os, "fsync", watched_fsync)
    monkeypatch.setattr(storage.os, "replace", watched_replace)
    write_whole(tmp_path / "file", b"12345")
    assert happened[:2] == [("fsync", 5), ("replace", 5)]
    assert [what for what, _ in happened] == ["fsync", "replace", "fsync"]  # at last of the folder, with the new name


# ---- round trips -------------------------------------------------------------------------------------


def test_tensors_and_their_description_come_back(stored):
    tensors, about = read_tensors(stored)
    assert about == {"format": 1, "epoch": 7}
    assert set(tensors) == set(TENSORS)
    for name, value in TENSORS.items():
        assert_close(tensors[name], value, rtol=0, atol=0)
        assert tensors[name].dtype == value.dtype


def test_equal_tensors_give_equal_bytes_whatever_their_order_and_layout(tmp_path):
    x = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0))
    y = torch.arange(3)
    write_tensors(tmp_path / "1", {"x": x, "y": y}, {"format": 1})
    write_tensors(tmp_path / "2", {"y": y, "x": x.to(memory_format=torch.channels_last)}, {"format": 1})
    assert (tmp_path / "1").read_bytes() == (tmp_path / "2").read_bytes()


def test_tensors_that_share_their_memory_are_written(tmp_path):
    x = torch.arange(4.0)
    write_tensors(tmp_path / "x", {"one": x, "other": x}, {})
    assert all(torch.equal(value, x) for value in read_tensors(tmp_path / "x")[0].values())


@pytest.mark.parametrize("length", [*range(256, 512, 8), 0x4B50])
def test_a_header_of_any_length_is_read(tmp_path, length):
    """The file starts with the length of its header: one in 32 starts like a pickle, one in 8192 like a zip file."""
    path = tmp_path / "x.safetensors"

    def header(padding: int) -> int:
        write_tensors(path, {"w": torch.ones(1)}, {"padding": "." * padding})
        return struct.unpack("<Q", path.read_bytes()[:8])[0]

    assert header(length - header(0)) == length
    assert read_tensors(path)[0]["w"].tolist() == [1]


def test_a_parameter_that_needs_a_gradient_is_written(tmp_path):
    write_tensors(tmp_path / "x", {"w": nn.Parameter(torch.ones(2))}, {})
    assert not read_tensors(tmp_path / "x")[0]["w"].requires_grad


def test_json_comes_back(tmp_path):
    value = {"name": "ünï\n🎉 \udcff", "list": [1, 2.5, None], "nested": {"a": True}}
    write_json(tmp_path / "x.json", value)
    assert read_json(tmp_path / "x.json") == value


# ---- damage ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["x.json", "x.safetensors"])
def test_a_missing_file_is_named(tmp_path, name):
    damaged(tmp_path / name, "is missing", "Restore")


@pytest.mark.parametrize("name", ["x.json", "x.safetensors"])
def test_a_folder_in_place_of_a_file_is_damage(tmp_path, name):
    (tmp_path / name).mkdir()
    damaged(tmp_path / name)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe\x00", b'{"a": 1', b"not json"])
def test_json_that_is_no_json_is_damage(tmp_path, content):
    (tmp_path / "x.json").write_bytes(content)
    damaged(tmp_path / "x.json", "JSON")


@pytest.mark.parametrize("content", ["[1]", "3", "null", '"text"'])
def test_json_that_is_no_object_is_damage(tmp_path, content):
    (tmp_path / "x.json").write_text(content)
    damaged(tmp_path / "x.json", "expected a JSON object")


@pytest.mark.parametrize("keep", [0, 1, 7, 8, 9, 100, -1])
def test_a_truncated_tensor_file_is_damage(stored, keep):
    stored.write_bytes(stored.read_bytes()[:keep])
    damaged(stored)


@pytest.mark.parametrize("content", [b"garbage", b"\0" * 100, bytes(range(200)) * 5, struct.pack("<Q", 2**60) + b"{}"])
def test_garbage_is_damage(stored, content):
    stored.write_bytes(content)
    damaged(stored)


def test_bytes_after_the_end_are_damage(stored):
    stored.write_bytes(stored.read_bytes() + b"more")
    damaged(stored)


def test_a_flipped_bit_anywhere_is_damage(stored):
    """But for one that changes no value, as in a blank of the header."""
    whole = stored.read_bytes()
    expected = read_tensors(stored)
    harmless = 0
    for i in range(len(whole)):
        flipped = bytearray(whole)
        flipped[i] ^= 1 << (i % 7)
        stored.write_bytes(flipped)
        try:
            tensors, about = read_tensors(stored)
            assert about.items() >= expected[1].items() and tensors.keys() == expected[0].keys()
            assert all(torch.equal(tensors[name], expected[0][name]) for name in tensors)
            harmless += 1
        except DamagedFileError as error:
            assert str(stored) in str(error)
    assert harmless < 10


def test_a_file_without_a_checksum_is_damage(stored):
    with safe_open(stored, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    stored.write_bytes(save(tensors, metadata={"about": '{"format": 1}'}))
    damaged(stored)


def test_what_a_file_held_stays_under_another_name(tmp_path):
    path, before = tmp_path / "last", tmp_path / "previous"
    for content in (b"1", b"2", b"3"):
        with WholeFile(path, keep=before) as file:
            file.write(content)
    assert (path.read_bytes(), before.read_bytes()) == (b"3", b"2")
    assert sorted(os.listdir(tmp_path)) == ["last", "previous"]


@pytest.mark.parametrize("links", [True, False])
def test_where_the_new_file_cannot_be_placed_both_stay(tmp_path, monkeypatch, links):
    path, before = tmp_path / "last", tmp_path / "previous"
    for content in (b"1", b"2"):
        with WholeFile(path, keep=before) as file:
            file.write(content)
    replace = os.replace

    def fail(source, target):
        if Path(target) == path:
            raise OSError("no")
        replace(source, target)

    def no_link(*args):
        raise OSError("no links")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail)
        if not links:
            patch.setattr(os, "link", no_link)
        with pytest.raises(OSError, match="no"), WholeFile(path, keep=before) as file:
            file.write(b"3")
    assert before.read_bytes() == b"2"
    assert sorted(os.listdir(tmp_path)) == (["last", "previous"] if links else ["previous"])
    with WholeFile(path, keep=before) as file:  # both names are one file now, or there is only one
        file.write(b"4")
    assert (path.read_bytes(), before.read_bytes()) == (b"4", b"2")
    assert sorted(os.listdir(tmp_path)) == ["last", "previous"]


def test_a_tensor_file_of_another_origin_is_refused(stored):
    save_file(TENSORS, stored)
    damaged(stored, "was not written by semclust")
    save_file(TENSORS, stored, metadata={"format": "pt"})
    damaged(stored, "was not written by semclust")
    save_file(TENSORS, stored, metadata={"about": "[1]"})
    damaged(stored, "was not written by semclust")
    save_file(TENSORS, stored, metadata={"about": "{not json"})
    damaged(stored)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_is_refused_and_not_run(stored, protocol):
    marker = stored.with_name("marker")
    stored.write_bytes(pickle.dumps(Trap(marker), protocol))
    damaged(stored, "pickle" if protocol >= 2 else "safetensors")
    assert not marker.exists()
    pickle.loads(stored.read_bytes())
    assert marker.exists()  # the trap was live


@pytest.mark.parametrize("zipped", [True, False])
def test_a_file_of_torch_save_is_refused_and_not_run(stored, zipped):
    marker = stored.with_name("marker")
    torch.save({"w": torch.ones(2), "trap": Trap(marker)}, stored, _use_new_zipfile_serialization=zipped)
    damaged(stored, "pickle, which could run code")
    assert not marker.exists()


# ---- a state that does not fit -----------------------------------------------------------------------


def test_a_state_that_fits_is_loaded():
    module = nn.Linear(2, 3)
    state = {"weight": torch.ones(3, 2), "bias": torch.arange(3.0)}
    load_into(module, state, Path("x"))
    assert torch.equal(module.weight, state["weight"]) and torch.equal(module.bias, state["bias"])


@pytest.mark.parametrize(
    "state",
    [
        {"weight": torch.ones(3, 2)},
        {"weight": torch.ones(3, 2), "bias": torch.ones(4)},
        {"weight": torch.ones(3, 2), "bias": torch.ones(3), "more": torch.ones(1)},
        {},
    ],
    ids=["missing", "wrong shape", "unknown", "empty"],
)
def test_a_state_that_does_not_fit_names_the_file(tmp_path, state):
    with pytest.raises(DamagedFileError, match="does not fit") as caught:
        load_into(nn.Linear(2, 3), state, tmp_path / "model.safetensors")
    assert str(tmp_path / "model.safetensors") in str(caught.value)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_batch_norms_are_loaded_with_and_without_a_count_of_batches(momentum):
    """One that takes a cumulative average keeps count."""
    stored, module = (nn.Sequential(nn.BatchNorm2d(2, momentum=momentum)) for _ in range(2))
    stop_counting(stored)
    stop_counting(module)
    stored(torch.rand(4, 2, 3, 3))
    load_into(module, dict(stored.state_dict()), Path("x"))
    assert torch.equal(module[0].running_mean, stored[0].running_mean)
    assert module[0].num_batches_tracked == (1 if momentum is None else None)


# ---- files that are written bit by bit ---------------------------------------------------------------


def test_a_whole_file_appears_at_the_end(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("old")
    with WholeFile(path) as file:
        file.write(b"new")
        assert path.read_text() == "old"
    assert path.read_text() == "new" and os.listdir(tmp_path) == ["a.csv"]


@pytest.mark.parametrize("failure", [OSError, KeyboardInterrupt])
def test_a_file_that_breaks_off_leaves_no_trace(tmp_path, failure):
    path = tmp_path / "a.csv"
    path.write_text("old")
    with pytest.raises(failure), WholeFile(path) as file:
        file.write(b"new")
        raise failure
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["a.csv"]


def test_a_new_file_takes_a_name_that_is_free_at_the_end(tmp_path):
    whole = WholeFile(tmp_path / "a.csv", replace=False)
    with whole as file:
        file.write(b"new")
        (tmp_path / "a.csv").write_text("of another process")
    assert whole.path == tmp_path / "a-2.csv" and whole.path.read_text() == "new"
    assert (tmp_path / "a.csv").read_text() == "of another process"
    assert sorted(os.listdir(tmp_path)) == ["a-2.csv", "a.csv"]


@pytest.mark.parametrize("links", [True, False])
def test_a_file_that_appears_at_the_last_moment_is_kept(tmp_path, monkeypatch, links):
    """Between the choice of a name and the move to it another process may take that name."""
    real_free_path = storage.free_path
    others = iter(["first", "second"])

    def free_and_taken(path):
        free = real_free_path(path)
        if (content := next(others, None)) is not None:
            free.write_text(content)
        return free

    def no_links(*args):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(storage, "free_path", free_and_taken)
    if not links:
        monkeypatch.setattr(os, "link", no_links)
    whole = WholeFile(tmp_path / "a.csv", replace=False)
    with whole as file:
        file.write(b"new")
    assert whole.path == tmp_path / "a-3.csv"
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "a.csv": "first",
        "a-2.csv": "second",
        "a-3.csv": "new",
    }


def test_where_no_new_file_can_be(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for path, words in [
        (tmp_path, "exists and is not overwritten"),
        (tmp_path / "file", "exists and is not overwritten"),
        (tmp_path / "link", "exists and is not overwritten"),
        (tmp_path / "none" / "x", "There is no folder"),
        (tmp_path / "file" / "x", "There is no folder"),
    ]:
        with pytest.raises(InputError, match=words) as caught:
            check_new_file(path)
        assert "--out" in str(caught.value)
    check_new_file(tmp_path / "new")
    assert sorted(os.listdir(tmp_path)) == ["file", "link"]


def test_a_free_path_does_not_exist(tmp_path):
    path = tmp_path / "a.b-clusters.csv"
    assert free_path(path) == path
    path.touch()
    assert free_path(path) == tmp_path / "a.b-clusters-2.csv"
    (tmp_path / "a.b-clusters-2.csv").mkdir()
    (tmp_path / "a.b-clusters-3.csv").symlink_to(tmp_path / "nowhere")
    assert free_path(path) == tmp_path / "a.b-clusters-4.csv"
    (tmp_path / "plain").touch()
    assert free_path(tmp_path / "plain") == tmp_path / "plain-2"
