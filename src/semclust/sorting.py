"""A folder for each cluster, with links to the images or copies of them. The originals are only ever read.

    with SortedFolder(Path("sorted"), groups, "link") as sorted_folder:
        sorted_folder.add(images, clusters)

The folder is filled under another name beside its place and appears there at the end, so an interruption leaves none.
"""

import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import numpy as np
from PIL import Image

from semclust.data import Images
from semclust.errors import InputError, in_short
from semclust.groups import Groups
from semclust.storage import free_path

By = Literal["link", "copy", "hardlink"]
UNSAFE = set('/\\:*?"<>|')  # in a file name, on one system or another
LONGEST = 255  # bytes of a file name
LONGEST_TITLE = 60  # characters of a cluster's name in its folder's


class SortedFolder:
    """Fills ``path`` with a folder for each cluster: its id, and a safe form of its name where it has one.

    by: "link" (absolute symbolic links, which survive that the sorted folder is moved), "copy" or "hardlink". Where
        the file system cannot link, files are copied.
    """

    def __init__(self, path: Path, groups: Groups, by: By):
        self.path, self.groups, self.by = path, groups, by
        self.beside = Path(os.path.abspath(path)).with_name(f".{path.name}.{os.getpid()}.part")
        self.copied_instead = 0
        self.failed: list[tuple[str, str]] = []  # name and reason
        self._next_number: dict[Path, int] = {}  # of names that were met more than once

    def __enter__(self) -> "SortedFolder":
        self.beside.mkdir()
        return self

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        try:
            if failure is None:
                if self.path.exists() and any(self.path.iterdir()):  # filled by someone else meanwhile
                    self.path = free_path(self.path)
                if not self.path.exists():
                    self.beside.rename(self.path)
                else:
                    for folder in self.beside.iterdir():
                        folder.rename(self.path / folder.name)
        finally:
            shutil.rmtree(self.beside, ignore_errors=True)

    def add(self, images: Images, clusters: np.ndarray) -> None:
        """Put each image into the folder of its cluster; one that has no file is written as PNG."""
        for row, cluster in enumerate(clusters.tolist()):
            folder = self.beside / folder_name(cluster, self.groups.names.get(cluster))
            folder.mkdir(exist_ok=True)
            file = images.file(row)
            if file is None:
                name = PurePosixPath(images.names[row]).stem
                self._new(folder / fitting_name(safe(name), ".png"), partial(_save_png, images.pixels[row]))
                continue
            try:
                with open(file, "rb"):
                    pass
            except OSError as error:  # gone since it was read
                self.failed.append((images.names[row], in_short(error)))
                continue
            self._new(folder / file.name, partial(self._put, file))

    def _new(self, path: Path, make: Callable[[Path], None]) -> None:
        """``make`` the file ``path``; where there is one, cat.jpg becomes cat-2.jpg."""
        number = self._next_number.get(path, 1)
        while True:
            try:
                make(path if number == 1 else numbered(path, number))
                return
            except FileExistsError:
                number += 1
                self._next_number[path] = number

    def _put(self, file: Path, path: Path) -> None:
        if self.by != "copy" and self._link(file, path):
            return
        with open(file, "rb") as source, open(path, "xb") as target:
            shutil.copyfileobj(source, target, 2**20)
        shutil.copystat(file, path)
        self.copied_instead += self.by != "copy"

    def _link(self, file: Path, path: Path) -> bool:
        """Whether it could be done. What keeps it does not matter: where copying fails as well, as over a file that
        exists, that is told."""
        try:
            if self.by == "link":
                os.symlink(os.path.abspath(file), path)
            else:
                os.link(os.path.realpath(file), path)  # of a link, the file that it leads to
        except (OSError, NotImplementedError):
            return False
        return True


def check_folder(path: Path, data: Any) -> None:
    """Raise InputError where ``path`` cannot become the sorted folder of ``data``."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise InputError(f"{str(path)!r} exists and is not an empty folder; choose another --into.")
    if path.is_symlink():
        raise InputError(f"{str(path)!r} is a link; choose a folder that does not exist yet for --into.")
    if not path.parent.is_dir():
        raise InputError(f"There is no folder {str(path.parent)!r} for --into; make it, or choose another.")
    if isinstance(data, str | os.PathLike) and os.path.isdir(data):
        inside = path.resolve()
        if inside.is_relative_to(Path(os.fsdecode(data)).resolve()):
            raise InputError(
                f"{str(path)!r} lies inside the folder of images {os.fsdecode(data)!r}, so the next run would read "
                "the images twice; choose an --into elsewhere."
            )


def folder_name(cluster: int, name: str | None) -> str:
    """2, or 2-ships."""
    return f"{cluster}-{safe(name)[:LONGEST_TITLE].rstrip(' .')}" if name else str(cluster)


def safe(name: str) -> str:
    """A name that can be a file's on any system."""
    kept = "".join("_" if c in UNSAFE or not c.isprintable() else c for c in name).strip(" .")
    return kept or "_"


def numbered(path: Path, number: int) -> Path:
    """cat-2.jpg for cat.jpg."""
    return path.with_name(fitting_name(path.stem, f"-{number}{path.suffix}"))


def fitting_name(stem: str, ending: str) -> str:
    """A file's name, with the stem cut by whole characters where it would be too long."""
    stem = stem[:LONGEST]
    while stem and len(os.fsencode(stem + ending)) > LONGEST:
        stem = stem[:-1]
    return stem + ending


def _save_png(pixels: np.ndarray, path: Path) -> None:
    image = Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels)
    with open(path, "xb") as file:
        image.save(file, "PNG")
