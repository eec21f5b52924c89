"""Files that were made to do harm: nothing that is read is run, and nothing but errors of semclust's own comes of it.

``python benchmarks/fuzz.py`` does the same for 100,000 inputs of each kind.
"""

import contextlib
import importlib.util
import io
import pickle
import sys
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from conftest import refused
from semclust import arrays
from semclust.errors import InputError, SemclustError
from semclust.truth import read_labels

FUZZ = Path(__file__).parents[1] / "benchmarks" / "fuzz.py"
INPUTS = 150  # of each kind


@pytest.fixture(scope="module")
def fuzz():
    spec = importlib.util.spec_from_file_location("fuzz", FUZZ)
    module = importlib.util.module_from_spec(spec)
    sys.modules["fuzz"] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def readers(fuzz, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SEMCLUST_CACHE", "")  # it is set there, and is what it was after this
        yield fuzz.make_readers(tmp_path_factory.mktemp("fuzz"))


@pytest.fixture
def cache_of_readers(fuzz, readers, monkeypatch):
    """Every test has a cache of its own; the files of these readers lie in theirs."""
    monkeypatch.setenv("SEMCLUST_CACHE", str(fuzz.CACHE))


@pytest.mark.usefixtures("cache_of_readers")
def test_whatever_the_bytes_each_reader_reads_them_or_says_so(fuzz, readers, capfd):
    found = {name: fuzz.fuzz(name, reader, INPUTS, None) for name, reader in readers.items()}
    assert {name: each["crashes"] for name, each in found.items() if each["crashes"]} == {}
    assert all(each["read"] + each["refused"] == INPUTS for each in found.values())
    never_refuse = {"image", "time.json", "cached pixels", "cached index"}  # they skip, or look for themselves
    assert {name for name, each in found.items() if not each["refused"]} == never_refuse


@pytest.mark.usefixtures("cache_of_readers")
def test_lists_within_lists_are_refused_like_any_damage(readers):
    deep = b'{"about": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    packed = safetensors.torch.save({"w": torch.ones(1)}, metadata={"about": deep.decode()})
    for reader in readers.values():
        for content in (deep, packed):
            with contextlib.suppress(SemclustError):
                reader.read(content)


def test_a_reader_that_takes_too_long_is_a_crash(fuzz, monkeypatch):
    """Even where it takes any error for damage."""
    monkeypatch.setattr(fuzz, "TOO_LONG", 0.05)

    def slow(content: bytes) -> None:
        try:
            time.sleep(0.2 if content else 0)
        except Exception as error:
            raise InputError("damaged") from error

    reader = fuzz.Reader(wholes=[b""], change=lambda content, rng: b"changed", read=slow)
    assert fuzz.fuzz("slow", reader, 1, None)["crashes"]


class Trap:
    """Unpickling this creates the file ``marker``."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


def traps(marker: Path) -> dict[str, bytes]:
    """The ways in which a file can carry a pickle."""
    trap, made = Trap(marker), {"pickle": pickle.dumps(Trap(marker)), "old pickle": pickle.dumps(Trap(marker), 0)}
    for name, save in [
        ("torch.save", lambda file: torch.save({"w": trap}, file)),
        ("torch.save of old", lambda file: torch.save({"w": trap}, file, _use_new_zipfile_serialization=False)),
        ("np.save", lambda file: np.save(file, np.array([trap] * 24, object))),
        ("np.savez", lambda file: np.savez(file, images=np.array([trap] * 24, object), labels=np.array([trap] * 24))),
        ("np.savez_compressed", lambda file: np.savez_compressed(file, y=np.array([trap] * 24, object))),
    ]:
        file = io.BytesIO()
        save(file)
        made[name] = file.getvalue()
    return made


@pytest.mark.usefixtures("cache_of_readers")
def test_no_reader_runs_what_a_file_holds(readers, tmp_path):
    marker = tmp_path / "marker"
    for content in traps(marker).values():
        for name, reader in readers.items():
            with contextlib.suppress(SemclustError):
                reader.read(content)
            assert not marker.exists(), name
    pickle.loads(traps(marker)["pickle"])
    assert marker.exists()  # the trap is one


@pytest.mark.parametrize("key", ["images", "labels"])
def test_a_packed_array_larger_than_the_memory_is_refused_before_it_is_read(tmp_path, monkeypatch, key):
    path = tmp_path / "bomb.npz"
    np.savez_compressed(path, **{key: np.zeros(2**20, np.uint8)})
    assert path.stat().st_size < 2**14
    monkeypatch.setattr(arrays, "memory_of_machine", lambda: 2**16)
    monkeypatch.setattr(zipfile.ZipExtFile, "read", lambda *args: pytest.fail("it was read"))
    if key == "images":
        refused(path, "more than this machine has memory", "np.savez")
    else:
        with pytest.raises(InputError, match="more than this machine has memory"):
            read_labels(path, [str(i) for i in range(24)])


@pytest.mark.parametrize("key", ["images", "labels"])
def test_a_member_that_is_no_array_is_named(tmp_path, key):
    path = tmp_path / "odd.npz"
    np.savez_compressed(path, **{"images": np.zeros((24, 8, 8), np.uint8)} if key == "labels" else {})
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr(f"{key}.npy", b"text")
    refused(path, "no array under", key)
