"""Decoded images kept on disk, so that the next run need not decode them again.

They lie in $SEMCLUST_CACHE, else $XDG_CACHE_HOME/semclust, else ~/.cache/semclust, one file for each set of images and
shape. The files together take at most LIMIT bytes, beside a single larger one: the least recently used go first. All of
them may be deleted at any time. The folder may hold other things, too: only names that are made here are ever removed.

A file is n x H x W x c bytes of pixels, then a JSON object, then its length and checksum, then END. It is written
beside its place and renamed, so two processes that make the same one do not meet; its checksums are compared when it is
opened, which finds a damaged one without waiting for the disk (fsync) when it is written.
"""

import contextlib
import errno
import json
import math
import os
import re
import shutil
import struct
import tempfile
import time
import warnings
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from semclust.errors import in_short
from semclust.sources import AskedSize, Shape, choose_size

LIMIT = 32 * 2**30  # bytes of all files together
SCRATCH_FROM = 2**28  # bytes: pixels that are not kept go to a file nevertheless if they are more
PAGE, PIECE = 2**12, 2**20  # bytes; a piece is written at once, and has a checksum
ABANDONED = 24 * 3600  # seconds after which a half-written file has no writer any more
SUFFIX, JSON, PART = ".pixels", "-index.json", ".part"
BEFORE_PART = "semclust-"
OUR_NAMES = re.compile(r"[0-9a-f]{40}(-\d+x\d+x\d+\.pixels|-index\.json)|semclust-\w+\.part")
END = b"semclust pixels 1\n"
TAIL = struct.Struct(f"<QI{len(END)}s")  # length and checksum of the JSON, END


@dataclass
class Kept:
    """What an earlier run left."""

    pixels: np.ndarray  # mapped, read-only
    skipped: list[tuple[int, str]]  # row in the source, and reason


def folder() -> Path:
    named = os.environ.get("SEMCLUST_CACHE")
    if named:
        return Path(named)
    above = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(above) if above else Path.home() / ".cache") / "semclust"
    except RuntimeError as error:
        raise OSError("this user has no home folder") from error


def find(stamp: str, size: AskedSize, channels: int | None) -> Kept | None:
    """The images of ``stamp`` at the size and channels asked for, or at their own (None)."""
    try:
        paths = sorted(folder().glob(f"{stamp}-*{SUFFIX}"))
    except OSError:
        return None
    for path in paths:
        try:
            index = _read_index(path)
            n, H, W, c = index["shape"]
            own_size, own_channels = index["own_size"], index["own_channels"]
            wanted_size = own_size if size is None else list(choose_size([], size))
            wanted_channels = channels or own_channels
            if wanted_size != [H, W] or c != wanted_channels:
                continue
            _compare_checksums(path, n * H * W * c, index["checksums"])
            skipped = [(int(row), str(why)) for row, why in index["skipped"]]
            pixels = np.memmap(path, np.uint8, "r", shape=(n, H, W, c))
            with contextlib.suppress(OSError):
                os.utime(path)  # the least recently used go first
            return Kept(pixels, skipped)
        except (OSError, ValueError, KeyError, TypeError, RecursionError, struct.error):  # damaged, or just removed
            with contextlib.suppress(OSError):
                path.unlink()
    return None


def find_json(stamp: str) -> dict[str, Any] | None:
    """What ``keep_json`` kept. Any JSON object is given: the one who asks knows what must be in it."""
    try:
        path = folder() / f"{stamp}{JSON}"
        value = json.loads(path.read_text(encoding="ascii"))
        with contextlib.suppress(OSError):
            os.utime(path)  # the least recently used go first
        return value if isinstance(value, dict) else None
    except (OSError, ValueError, RecursionError):
        return None


def keep_json(stamp: str, value: dict[str, Any]) -> None:
    """Keep what is slow to find again; where that is not possible, it is found again."""
    with contextlib.suppress(OSError):
        text = json.dumps(value).encode()
        handle, part = _new_part(len(text), to_keep=True)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(text)
            os.replace(part, part.with_name(f"{stamp}{JSON}"))
        except OSError:
            part.unlink()


def _read_index(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - TAIL.size))
        length, checksum, end = TAIL.unpack(file.read(TAIL.size))
        start = size - TAIL.size - length
        if end != END or start < 0:
            raise ValueError("it ends too early")
        file.seek(start)
        text = file.read(length)
    if zlib.crc32(text) != checksum:
        raise ValueError("its index is damaged")
    index = json.loads(text)
    if int(np.prod(index["shape"], dtype=np.int64)) != start:
        raise ValueError("its length is wrong")
    return index


def _compare_checksums(path: Path, n_bytes: int, expected: list[int]) -> None:
    """Read in pieces rather than through the map, whose pages would count as memory of this process."""
    if len(expected) != math.ceil(n_bytes / PIECE):
        raise ValueError("it lacks checksums")
    piece = np.empty(PIECE, np.uint8)
    with open(path, "rb", buffering=0) as file:
        for start, checksum in zip(range(0, n_bytes, PIECE), expected, strict=True):
            n_here = min(PIECE, n_bytes - start)
            if file.readinto(piece[:n_here].data) != n_here or _checksum(piece, n_here) != checksum:
                raise ValueError("its pixels are damaged")


def _checksum(piece: np.ndarray, n_bytes: int) -> int:
    """A sum of all words, times an odd number for each page: four times as fast as zlib.crc32, and it need not
    withstand anyone, only notice what a failing disk or program leaves."""
    piece[n_bytes:] = 0
    pages = piece.view(np.uint64).reshape(PIECE // PAGE, -1).sum(1, dtype=np.uint64)
    return int((pages * (2 * np.arange(len(pages), dtype=np.uint64) + 1)).sum(dtype=np.uint64))


class Store:
    """Takes rows of pixels one after the other: into a file to keep, a nameless file, or memory."""

    def __init__(self, stamp: str | None, n: int, shape: Shape):
        """``n``: the most rows that can come. ``stamp``: None where nothing is to be kept."""
        self.shape, self.most, self.n = shape, n, 0
        self.path: Path | None = None  # where the file will be kept
        self.at: Path | None = None  # where it is now
        self.file: Any = None
        self.memory: np.ndarray | None = None
        self.checksums: list[int] = []
        self.piece, self.in_piece = np.empty(0, np.uint8), 0  # what is not written yet, and how many bytes that is
        n_bytes = n * int(np.prod(shape))
        if stamp is None and n_bytes < SCRATCH_FROM:
            self.memory = np.empty((n, *shape), np.uint8)
            return
        try:
            handle, self.at = _new_part(n_bytes, to_keep=stamp is not None)
            self.file = os.fdopen(handle, "wb", buffering=0)
            self.piece = np.empty(PIECE, np.uint8)
            if stamp is not None:
                H, W, c = shape
                self.path = self.at.with_name(f"{stamp}-{H}x{W}x{c}{SUFFIX}")
        except OSError as error:
            self._go_on_in_memory(error)

    def append(self, rows: np.ndarray) -> None:
        if self.file is not None:
            try:
                self._write(np.ascontiguousarray(rows).reshape(-1))
            except OSError as error:
                self._go_on_in_memory(error)
        if self.memory is not None:
            self.memory[self.n : self.n + len(rows)] = rows
        self.n += len(rows)

    def finish(
        self, skipped: Sequence[tuple[int, str]], own_size: bool, own_channels: bool, lasting: bool
    ) -> np.ndarray:
        """The pixels. The file is kept if it has a name and what was skipped will be so next time.

        own_size, own_channels: these are what the images themselves suggest, not only what was asked for.
        """
        if self.memory is not None:
            return self.memory[: self.n]
        assert self.at is not None
        H, W, c = self.shape
        try:
            self._flush()
            index = {
                "shape": [self.n, H, W, c],
                "own_size": [H, W] if own_size else None,
                "own_channels": c if own_channels else None,
                "skipped": list(skipped),
                "checksums": self.checksums,
            }
            text = json.dumps(index).encode()
            _write_all(self.file, memoryview(text + TAIL.pack(len(text), zlib.crc32(text), END)))
            self.file.close()  # Windows does not rename a file that is open or mapped
            if self.path is not None and lasting:
                os.replace(self.at, self.path)
                self.at = self.path
            pixels = np.memmap(self.at, np.uint8, "r", shape=(self.n, H, W, c))
        except OSError as error:
            self._go_on_in_memory(error)
            return self.finish(skipped, own_size, own_channels, lasting)
        if self.at != self.path:
            self.discard()
        return pixels

    def discard(self) -> None:
        """Leave no half file behind; what is mapped stays readable."""
        if self.file is not None:
            self.file.close()
        if self.at is not None:
            with contextlib.suppress(OSError):
                self.at.unlink()

    def _write(self, content: np.ndarray) -> None:
        while len(content):
            here, content = content[: PIECE - self.in_piece], content[PIECE - self.in_piece :]
            self.piece[self.in_piece : self.in_piece + len(here)] = here
            self.in_piece += len(here)
            if self.in_piece == PIECE:
                self._flush()

    def _flush(self) -> None:
        if self.in_piece:
            _write_all(self.file, self.piece[: self.in_piece].data)
            self.checksums.append(_checksum(self.piece, self.in_piece))
            self.in_piece = 0

    def _go_on_in_memory(self, error: Exception) -> None:
        warnings.warn(
            f"Images cannot be kept in the cache, {_folder_in_words()} ({in_short(error)}); they are held in memory. "
            "The variable SEMCLUST_CACHE can name another folder for it.",
            stacklevel=4,
        )
        self.memory = np.empty((self.most, *self.shape), np.uint8)
        if self.at is not None:
            so_far = self.memory[: self.n].reshape(-1)
            n_written = min(len(self.checksums) * PIECE, len(so_far))
            view = so_far[:n_written].data
            with open(self.at, "rb", buffering=0) as file:
                while view and (count := file.readinto(view)):
                    view = view[count:]
            so_far[n_written:] = self.piece[: len(so_far) - n_written]
            self.discard()
            self.file = self.at = None


def _write_all(file: Any, content: memoryview) -> None:
    while content:  # a raw file may take less than all
        content = content[file.write(content) :]


def _folder_in_words() -> str:
    try:
        return repr(str(folder()))
    except OSError:
        return "which has no folder"


def _new_part(n_bytes: int, to_keep: bool) -> tuple[int, Path]:
    """A new file in the cache's folder, open to be written, after room was made for it."""
    where = folder()
    where.mkdir(parents=True, exist_ok=True, mode=0o700)
    _make_room(where, n_bytes, to_keep)
    handle, part = tempfile.mkstemp(PART, BEFORE_PART, where)
    return handle, Path(part)


def _make_room(where: Path, n_bytes: int, to_keep: bool) -> None:
    """Remove what was used least recently until ``n_bytes`` more fit: on the disk and, if they are ``to_keep``, within
    LIMIT. What would exceed that alone makes no others go for it."""
    files = []
    for entry in os.scandir(where):
        if not OUR_NAMES.fullmatch(entry.name):
            continue
        with contextlib.suppress(OSError):  # removed by another process
            status = entry.stat()
            if entry.name.endswith(PART) and status.st_mtime < time.time() - ABANDONED:
                os.unlink(entry.path)
            else:
                files.append((status.st_mtime, status.st_size, entry.path))
    removable = [file for file in sorted(files) if not file[2].endswith(PART)]
    if shutil.disk_usage(where).free + sum(size for _, size, _ in removable) < n_bytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # and nothing is removed in vain
    total = sum(size for _, size, _ in files)
    limit = LIMIT if to_keep and n_bytes <= LIMIT else math.inf
    for _, size, path in removable:
        if total + n_bytes <= limit and shutil.disk_usage(where).free >= n_bytes:
            return
        with contextlib.suppress(OSError):
            os.unlink(path)
            total -= size
    if shutil.disk_usage(where).free < n_bytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
