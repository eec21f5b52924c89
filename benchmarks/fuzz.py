"""Damaged and hostile files for every reader: whatever the bytes, it reads them or raises an error of semclust's own.

python benchmarks/fuzz.py                                  100,000 inputs for each reader -> benchmarks/fuzz.json
python benchmarks/fuzz.py --inputs 1000 --readers tar csv

Each input is a whole file, changed at random where it hurts: a field of its JSON, a cell, a header with its checksum
made right again, or any bytes. What is none of semclust's errors, takes over TOO_LONG seconds or wants more memory than
there is counts as a crash; the input is kept in --crashes, and the command fails.
"""

import argparse
import contextlib
import csv
import io
import json
import multiprocessing
import os
import platform
import random
import resource
import shutil
import signal
import sys
import tarfile
import tempfile
import time
import traceback
import warnings
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn

from semclust import __version__, cache, fitting
from semclust.assignments import read_assignments
from semclust.config import Settings, check, from_json, to_json
from semclust.data import Images, open_images
from semclust.decoding import decode_block, read_headers
from semclust.errors import SemclustError
from semclust.groups import Groups
from semclust.predictor import Predictor
from semclust.report.kept import read_kept
from semclust.run_folder import RunFolder
from semclust.shards import shard_source
from semclust.truth import read_labels

TOO_LONG = 20  # seconds
MEMORY = 6 * 2**30  # bytes of addresses
NASTY = [0, 1, -1, 2, 255, 2**31 - 1, 2**31, 2**63 - 1, 2**63, -(2**63), 10**30, 10**400]
WORDS: list[Any] = [
    None, True, False, "", "x", "\x00", "../../etc/passwd", "/etc/passwd", "nan", "=1+1", "<script>", "é" * 50,
    float("nan"), float("inf"), -float("inf"), 1e308, -0.0, 0.5, [], {}, [[]], [None], {"a": 1}, "9" * 5000,
    "python:Evil", "\ud800", [1] * 1000, *NASTY,
]  # fmt: skip

CACHE = Path()  # that the readers use

Mutate = Callable[[bytes, random.Random], bytes]


# ---- changes ---------------------------------------------------------------------------------------


def change_bytes(content: bytes, rng: random.Random) -> bytes:
    """A few of: a bit flipped, a byte set, bytes removed, doubled, put in, moved or cut off; more often near the start,
    where headers are."""
    made = bytearray(content)
    for _ in range(rng.choice([1, 1, 1, 2, 3, 8])):
        end = len(made) if rng.random() < 0.5 else min(len(made), 600)
        at = rng.randrange(end) if end else 0
        n = rng.choice([1, 2, 4, 8, 64, 512])
        match rng.randrange(8):
            case 0 if made:
                made[at] ^= 1 << rng.randrange(8)
            case 1 if made:
                made[at] = rng.choice([0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)])
            case 2:
                del made[at : at + n]
            case 3:
                made[at:at] = made[at : at + n]
            case 4:
                made[at:at] = rng.randbytes(n)
            case 5:
                made[at : at + n] = rng.choice([b"\x00", b"\xff", b"9", b"{", b'"', b","]) * n
            case 6:
                number = rng.choice(NASTY[:10]) & (2**64 - 1)
                made[at : at + 8] = number.to_bytes(8, rng.choice(["little", "big"]))
            case 7 if rng.random() < 0.3:
                del made[at:]
    return bytes(made)


def change_json(content: bytes, rng: random.Random) -> bytes:
    """Another value somewhere, or a key removed, added or renamed."""
    value = json.loads(content)
    for _ in range(rng.choice([1, 1, 2, 4])):
        value = _change_node(value, rng)
    made = json.dumps(value).encode()
    return change_bytes(made, rng) if rng.random() < 0.2 else made


def _change_node(value: Any, rng: random.Random) -> Any:
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        match rng.randrange(8):
            case 0:
                return {k: v for k, v in value.items() if k != key}
            case 1:
                return {**value, rng.choice(["new", "", "format", "__class__"]): rng.choice(WORDS)}
        return {**value, key: _change_node(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.7:
        at = rng.randrange(len(value))
        match rng.randrange(6):
            case 0:
                return value[:at] + value[at + 1 :]
            case 1:
                return [*value[:at], rng.choice(WORDS), *value[at:]]
        return [_change_node(item, rng) if i == at else item for i, item in enumerate(value)]
    if isinstance(value, int | float) and abs(value) < 1e300 and rng.random() < 0.4:
        return rng.choice([value + 1, -value, value * 2, value + 0.5, str(value), value * 10**9])
    return rng.choice(WORDS)


def change_safetensors(content: bytes, rng: random.Random) -> bytes:
    """Of the header a value, with its length made right again; or any bytes."""
    if rng.random() < 0.5:
        return change_bytes(content, rng)
    n = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + n])
    if rng.random() < 0.3 and "__metadata__" in header:
        about = change_json(header["__metadata__"]["about"].encode(), rng)
        header["__metadata__"]["about"] = about.decode("utf-8", "replace")
    else:
        header = _change_node(header, rng)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + content[8 + n :]


def change_csv(content: bytes, rng: random.Random) -> bytes:
    """A cell, a row or a column."""
    rows = list(csv.reader(io.StringIO(content.decode("utf-8", "surrogateescape"))))
    for _ in range(rng.choice([1, 1, 2, 5])):
        row = rng.choice(rows) if rows else []
        match rng.randrange(5):
            case 0 if rows:
                rows.remove(row)
            case 1:
                rows.insert(rng.randrange(len(rows) + 1), list(row))
            case 2 if row:
                row.pop(rng.randrange(len(row)))
            case _ if row:
                word = rng.choice(WORDS)
                row[rng.randrange(len(row))] = (word if isinstance(word, str) else repr(word))[:5000]
    text = io.StringIO()
    csv.writer(text, lineterminator=rng.choice(["\n", "\r\n"])).writerows(rows)
    made = text.getvalue().encode("utf-8", "surrogatepass")
    return change_bytes(made, rng) if rng.random() < 0.4 else made


def change_numpy(content: bytes, rng: random.Random) -> bytes:
    """Of a .npy another type, order or shape in the header; or any bytes."""
    if rng.random() < 0.5 or not content.startswith(b"\x93NUMPY"):
        return change_bytes(content, rng)
    end = content.index(b"\n") + 1
    descr = rng.choice(["|u1", "<i8", "<f8", ">f4", "|O", "|S8", "<U4", "|V9", "<M8[s]", "|b1", "<c16", "x", ""])
    number = rng.choice([*NASTY[:10], 3, 12])
    shape = rng.choice([(), (12,), (12, 8), (12, 8, 8), (12, 8, 8, 3), (0, 8, 8), (number,), (12, number, 8)])
    fields = {"descr": descr, "fortran_order": rng.choice([True, False, None, 3]), "shape": shape}
    text = (repr(fields) if rng.random() < 0.9 else rng.choice(["__import__('os')", "{", "()" * 30])).encode()
    padded = text.ljust(max(len(text), end - 10) - 1) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(padded).to_bytes(2, "little") + padded + content[end:]


def change_tar(content: bytes, rng: random.Random) -> bytes:
    """Fields of a member's header, with its checksum made right again; or any bytes."""
    if rng.random() < 0.4:
        return change_bytes(content, rng)
    made = bytearray(content)
    for _ in range(rng.choice([1, 1, 3])):
        start = 512 * rng.randrange(max(1, len(made) // 512))
        header = made[start : start + 512]
        if len(header) < 512 or not header[0]:
            continue
        at, width = rng.choice([(0, 100), (100, 8), (124, 12), (136, 12), (156, 1), (157, 100), (257, 8), (345, 155)])
        word = rng.choice(
            [b"../../x.png", b"/etc/x.png", b"777777777777", b"-1", b"\x80" + b"\xff" * 11, b"0", b"x", b""]
        )
        header[at : at + width] = (rng.randbytes(width) if rng.random() < 0.3 else word)[:width].ljust(width, b"\x00")
        header[148:156] = b" " * 8
        header[148:156] = b"%06o\x00 " % sum(header)
        made[start : start + 512] = header
    return bytes(made)


# ---- readers ---------------------------------------------------------------------------------------


@dataclass
class Reader:
    """One kind of file: whole ones to start from, how they are changed, and what reads them."""

    wholes: list[bytes]
    change: Mutate
    read: Callable[[bytes], object]


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, 2, 3, stride=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.convolution(x)


def make_readers(folder: Path) -> dict[str, Reader]:
    """A small run with all its files in ``folder``, and who reads them."""
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (24, 16, 16, 1), np.uint8)
    images = Images(pixels, [f"{i}.png" for i in range(24)], "made")
    settings = Settings(
        n_clusters=3,
        epochs=2,
        batch_size=12,
        projection_dim=4,
        device="cpu",
        backbone="resnet10",
        width=1,
        augment="strokes",
    )
    run = RunFolder.create(folder, "run")
    run.write_config({"data": "x", "labels": None, "fingerprint": "0", "settings": to_json(settings)})
    fitted = fitting.fit(images, settings, run=run)
    fitted.predictor.save(run.model)
    run.write_results(images.names, fitted.p, fitted.q, fitting.summarise(fitted, images))
    with_own, own_run = replace(settings, backbone=Tiny()), RunFolder.create(folder, "own-run")
    of_own = fitting.fit(images, with_own, run=own_run).predictor
    of_own.groups.merge([0, 1])
    of_own.groups.rename(0, "ships")
    of_own.save(folder / "own")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from semclust.report import write_report

        write_report(run.path, images=images)
    training = fitting.start(images, with_own)
    at = folder / "input"
    at.mkdir()
    shutil.copytree(run.model, at / "model")
    shutil.copytree(folder / "own", at / "own")
    (at / "run").mkdir()
    changed = RunFolder(at / "run")

    def through(path: Path, read: Callable[[Path], object]) -> Callable[[bytes], object]:
        def written(content: bytes) -> object:
            path.write_bytes(content)
            return read(path)

        return written

    def load_own(path: Path) -> object:
        return Predictor.load(path.parent, backbone=Tiny())

    def load_either(content: bytes) -> object:
        place = own if b"python:" in content else model
        (place / "config.json").write_bytes(content)
        return Predictor.load(place, backbone=Tiny() if place == own else None)

    def load_checkpoint(path: Path) -> None:
        tensors, epoch = changed.read_checkpoint(path)
        rows = tensors.pop("metrics", None)
        training.load_state(tensors, epoch, path)
        if rows is not None:
            rows.numpy().tobytes()

    def read_config(path: Path) -> None:
        config = changed.read_config()
        check(Settings(**from_json(config.get("settings"))))  # type: ignore[arg-type]

    def read_time(path: Path) -> None:
        assert changed.read_seconds() >= 0

    def read_schedule(path: Path) -> None:
        share_of_steps = fitting.keep_to_budget(with_budget, changed, lambda: 0.0, fitting.Watcher())
        assert share_of_steps(min(2, with_budget.settings.n_epochs - 1)) > 0

    def read_index(path: Path) -> None:
        cache.find_json(path.name.removesuffix(cache.JSON))

    def read_pixels(path: Path) -> None:
        kept = cache.find("0" * 40, None, None)
        assert kept is None or kept.pixels.sum() >= 0

    def decode(content: bytes) -> None:
        place = at / "image"
        place.write_bytes(content)
        read_headers([str(place)])
        assert len(decode_block([str(place)], (16, 16, 3)).rows) <= 1

    def open_and_sum(path: Path) -> None:
        assert open_images(path, size=16).pixels.sum() >= 0

    def index_tar(path: Path) -> None:
        shard_source([str(path)])
        for kept in cache.folder().glob(f"*{cache.JSON}"):
            kept.unlink()
        if zlib.crc32(path.read_bytes()) % 20 == 0:  # of some the images, too: that starts threads, which takes time
            open_and_sum(path)

    def groups(path: Path) -> None:
        Groups.read(path.parent)

    names = images.names
    labels_csv = "path,label\n" + "".join(f"{name},{i % 3}\n" for i, name in enumerate(names))
    saved = {suffix: io.BytesIO() for suffix in ("npy", "labels", "npz", "packed")}
    np.save(saved["npy"], pixels)
    np.save(saved["labels"], np.arange(24) % 3)
    np.savez(saved["npz"], images=pixels, labels=np.arange(24))
    np.savez_compressed(saved["packed"], images=pixels, y=np.arange(24))
    own_cache(folder)
    model, own, finished = at / "model", at / "own", run.path
    zeros, ones = "0" * 40, "1" * 40
    with_budget = fitting.start(images, replace(with_own, minutes=1.0))
    times = {"instance": 0.1, "cluster": 0.2}
    schedule = {
        "epochs": 12,
        "steps": times,
        "renewal": {"cluster; ": 0.1},
        "start": 0.2,
        "end": 0.1,
        "shares": [1.0, 0.5],
    }
    index = {"names": ["a"], "offsets": [0], "lengths": [1], "labels": [None], "unlisted": []}
    readers: dict[str, Reader] = {}

    def add(name: str, wholes: list[bytes], change: Mutate, path: Path, read: Callable[[Path], object]) -> None:
        readers[name] = Reader(wholes, change, through(path, read))

    def add_own(name: str, change: Mutate, place: Path, read: Callable[[Path], object], *of: Path) -> None:
        add(name, [file.read_bytes() for file in of or (place,)], change, place, read)

    of_both = [(own / "config.json").read_bytes()] * 9 + [(model / "config.json").read_bytes()]  # this one takes longer
    readers["model config"] = Reader(of_both, change_json, load_either)
    add_own("model weights", change_safetensors, own / "model.safetensors", load_own)
    add_own("groups.json", change_json, own / "groups.json", groups)
    add_own("run config", change_json, changed.path / "config.json", read_config, finished / "config.json")
    of_run = (own_run.checkpoint, own_run.previous)
    add_own("checkpoint", change_safetensors, changed.checkpoint, load_checkpoint, *of_run)
    add_own("metrics.csv", change_csv, changed.metrics, lambda path: changed.read_metrics(), run.metrics)
    add_own("time.json", change_json, changed.path / "time.json", read_time, finished / "time.json")
    add("schedule.json", [json.dumps(schedule).encode()], change_json, changed.schedule, read_schedule)
    add_own("assignments.csv", change_csv, changed.assignments, read_assignments, run.assignments)
    kept = "report.safetensors"
    add_own("report data", change_safetensors, changed.path / kept, lambda path: read_kept(path, 24), finished / kept)
    add("labels.csv", [labels_csv.encode()], change_csv, at / "labels.csv", lambda path: read_labels(path, names))
    of_labels = [saved["labels"].getvalue()]
    add("labels.npy", of_labels, change_numpy, at / "labels.npy", lambda path: read_labels(path, names))
    add("images.npy", [saved["npy"].getvalue()], change_numpy, at / "images.npy", open_and_sum)
    packed = [saved["npz"].getvalue(), saved["packed"].getvalue()]
    add("images.npz", packed, change_bytes, at / "images.npz", open_and_sum)
    add("tar", [made_tar(pixels[:3])], change_tar, at / "shard.tar", index_tar)
    readers["image"] = Reader(made_images(), change_bytes, decode)
    cached = cache.folder() / f"{zeros}-16x16x1{cache.SUFFIX}"
    add("cached pixels", [made_cache(pixels)], change_bytes, cached, read_pixels)
    add("cached index", [json.dumps(index).encode()], change_json, cache.folder() / f"{ones}{cache.JSON}", read_index)
    return readers


def own_cache(folder: Path) -> None:
    global CACHE
    CACHE = folder / "cache"
    CACHE.mkdir()
    os.environ["SEMCLUST_CACHE"] = str(CACHE)


def made_cache(pixels: np.ndarray) -> bytes:
    store = cache.Store("0" * 40, len(pixels), (16, 16, 1))
    store.append(pixels)
    store.finish([(24, "damaged")], True, True, True)
    assert store.path is not None
    return store.path.read_bytes()


def made_tar(pixels: np.ndarray) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for i, image in enumerate(pixels):
            png = io.BytesIO()
            Image.fromarray(image[..., 0]).save(png, "PNG")
            for ending, content in (("png", png.getvalue()), ("cls", str(i).encode())):
                member = tarfile.TarInfo(f"{i:03}.{ending}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return packed.getvalue()


def made_images() -> list[bytes]:
    rng = np.random.default_rng(1)
    colour = Image.fromarray(rng.integers(0, 256, (20, 24, 3), np.uint8))
    made = []
    for kind, image in [
        *((kind, colour) for kind in ("JPEG", "PNG", "WEBP", "GIF", "TIFF", "BMP")),
        ("PNG", colour.convert("RGBA")),
        ("PNG", colour.convert("P")),
        ("TIFF", colour.convert("F")),
        ("JPEG", colour.convert("CMYK")),
    ]:
        content = io.BytesIO()
        image.save(content, kind)
        made.append(content.getvalue())
    return made


# ---- the run ---------------------------------------------------------------------------------------


class TooLongError(BaseException):
    """None that a reader takes for damage: TimeoutError is an OSError, as an unreadable file is."""


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """An input that takes too long, or too much memory, is an error like any other."""

    def alarm(*_: object) -> None:
        raise TooLongError("it takes too long")

    before = signal.signal(signal.SIGALRM, alarm)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, hard))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def fuzz(name: str, reader: Reader, inputs: int, crashes: Path | None, seed: int = 0) -> dict[str, Any]:
    """Read ``inputs`` changed files; how many were read, how many refused, and which crashed."""
    rng = random.Random(f"{name} {seed}")
    for content in reader.wholes:
        reader.read(content)
    read = refused = 0
    crashed: list[str] = []
    started = time.monotonic()
    with limited(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in range(inputs):
            content = reader.change(rng.choice(reader.wholes), rng)
            signal.setitimer(signal.ITIMER_REAL, TOO_LONG)
            try:
                reader.read(content)
                read += 1
            except SemclustError as error:
                assert str(error).strip(), "an error without words"
                refused += 1
            except (Exception, TooLongError):
                what = traceback.format_exc()
                crashed.append(what.strip().splitlines()[-1][:200])
                if crashes is not None:
                    crashes.mkdir(parents=True, exist_ok=True)
                    (crashes / f"{name}-{number}").write_bytes(content)
                    (crashes / f"{name}-{number}.txt").write_text(what)
    seconds = round(time.monotonic() - started, 1)
    reader.read(reader.wholes[0])  # others may need this file whole
    return {"inputs": inputs, "read": read, "refused": refused, "crashes": crashed, "seconds": seconds}


def fuzz_some(names: list[str], inputs: int, crashes: Path, seed: int) -> dict[str, dict[str, Any]]:
    torch.set_num_threads(1)
    memory = Path("/dev/shm")
    found = {}
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        readers = make_readers(Path(folder))
        for name in names or list(readers):
            found[name] = fuzz(name, readers[name], inputs, crashes, seed)
            print(f"{name}: {found[name]}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--readers", nargs="*", default=[])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--crashes", type=Path, default=Path("fuzz-crashes"))
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        names = chosen.readers or list(make_readers(Path(folder)))
    found: dict[str, dict[str, Any]] = {}
    with multiprocessing.get_context("spawn").Pool(chosen.processes) as pool:
        jobs = [([name], chosen.inputs, chosen.crashes, chosen.seed) for name in names]
        for part in pool.starmap(fuzz_some, jobs, chunksize=1):
            found |= part
    crashes = sum(len(each["crashes"]) for each in found.values())
    about = {"semclust": __version__, "python": platform.python_version(), "torch": torch.__version__}
    chosen.out.write_text(json.dumps({**about, "seed": chosen.seed, "readers": found}, indent=2) + "\n")
    print(f"{crashes} crashes in {sum(each['inputs'] for each in found.values()):,} inputs; written to {chosen.out}")
    sys.exit(1 if crashes else 0)


if __name__ == "__main__":
    main()
