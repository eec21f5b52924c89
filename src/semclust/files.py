"""Find image files: in a folder with all folders inside it, by a pattern, or from a list.

File names are text of other people: they may hold line breaks, markup, or bytes that are not UTF-8 (kept as
surrogates, as ``os.fsdecode`` gives them).
"""

import glob
import hashlib
import os
import re
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from semclust.decoding import SUFFIXES, Place, pixels_depend_on, reason
from semclust.errors import InputError
from semclust.pictures import picture_source
from semclust.sources import Source

AT_ONCE = 1000  # files whose stamps are mixed in one go
WORTH_KEEPING = 64  # images: fewer are decoded again as fast as they are looked up


def folder_source(folder: str) -> Source:
    """All image files under ``folder``."""
    names, unlisted = find_images(folder)
    if not names:
        also = f" Folders that cannot be listed: {unlisted}." if unlisted else ""
        raise InputError(f"The folder {folder!r} holds no file that ends in {', '.join(SUFFIXES)}.{also}")
    return file_source(names, folder, Path(folder).resolve().name or "images", unlisted=unlisted)


def file_source(
    names: list[str],
    folder: str,
    title: str,
    labels: np.ndarray | None = None,
    unlisted: Sequence[tuple[str, str]] = (),
) -> Source:
    """The files ``names`` in ``folder``; "" is the current one, and lets names be absolute."""
    base = os.path.abspath(folder)

    def places(start: int, stop: int) -> list[Place]:
        return [os.path.join(base, name) for name in names[start:stop]]

    return picture_source(
        title,
        names,
        places,
        labels=labels,
        unlisted=list(unlisted),
        folder=Path(base),
        stamp=stamp(title, names, folder and os.path.join(base, "")) if len(names) >= WORTH_KEEPING else None,
    )


def find_images(folder: str) -> tuple[list[str], list[tuple[str, str]]]:
    """Sorted names of the image files under ``folder``; folders that cannot be listed, with the reason."""
    names: list[str] = []
    unlisted: list[tuple[str, str]] = []
    seen: set[tuple[int, int]] = set()
    waiting = deque([""])
    while waiting:
        inside = waiting.popleft()
        try:
            here = os.path.join(folder, inside)
            status = os.stat(here)
            if (status.st_dev, status.st_ino) in seen:
                continue
            seen.add((status.st_dev, status.st_ino))
            with os.scandir(here) as entries:
                for entry in entries:
                    if entry.name.startswith("."):
                        continue
                    if _is_folder(entry):
                        # Links wait until all real folders are read: a folder goes by its real name, and a loop ends.
                        (waiting.append if entry.is_symlink() else waiting.appendleft)(f"{inside}{entry.name}/")
                    elif entry.name.lower().endswith(SUFFIXES):
                        names.append(inside + entry.name)
        except OSError as error:
            unlisted.append((inside.rstrip("/") or ".", reason(error)))
    return sorted(names), sorted(unlisted)


def _is_folder(entry: "os.DirEntry[str]") -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def stamp(title: str, names: Sequence[str], before: str) -> str:
    """Changes whenever one of the files (each ``before`` + name) does, or what decoding makes of it.

    The title tells a benchmark, which has a size of its own, from the same files as a folder.
    """
    here = os.path.abspath(before)
    digest = hashlib.sha256(repr((pixels_depend_on(), title, here)).encode())
    for start in range(0, len(names), AT_ONCE):
        known = []
        for name in names[start : start + AT_ONCE]:
            try:
                status = os.stat(before + name)
                known.append(f"{name}\0{status.st_size} {status.st_mtime_ns} {status.st_mode}\0")
            except OSError:  # a link that leads nowhere: so it will next time
                known.append(f"{name}\0\0")
        digest.update("".join(known).encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:40]


def expand(pattern: str) -> list[str]:
    """The files that a pattern names: {000..015} and {a,b} count up or list, * ? [ ] look at the disk."""
    if braces := re.search(r"\{(\d+)\.\.(\d+)\}|\{([^{}]*,[^{}]*)\}", pattern):
        first, last, listed = braces.groups()
        if first is None:
            inside = listed.split(",")
        else:
            width = len(first) if first.startswith("0") or len(first) == len(last) else 0
            inside = [f"{number:0{width}}" for number in range(int(first), int(last) + 1)]
        before, after = pattern[: braces.start()], pattern[braces.end() :]
        return [path for part in inside for path in expand(f"{before}{part}{after}")]
    if re.search(r"[*?\[]", pattern) and not os.path.exists(pattern):
        return sorted(glob.glob(pattern, recursive=True))
    return [pattern]
