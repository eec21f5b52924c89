"""Tensors and JSON on disk: whole or not at all, and never executing what they read.

Files are written beside their place, flushed to the disk and then renamed, so a reader or a crash
never meets half a file. Tensors are safetensors, whose reader cannot run code; pickles are refused.
"""

import json
import os
from collections import OrderedDict
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from semclust.errors import DamagedFileError, InputError

NEXT_STEP = "Restore the file from a copy, or fit again"


class WholeFile:
    """A file that appears under its name when all of it is written, or not at all.

    with WholeFile(path) as file:
        file.write(content)

    What ``path`` holds is replaced in one step; with ``replace=False`` it is kept, and the new file takes the next
    free name, which is then its ``path``.
    """

    def __init__(self, path: Path, replace: bool = True):
        self.path, self.replace = path, replace
        self.beside = path.with_name(f".{path.name}.{os.getpid()}.part")

    def __enter__(self) -> BinaryIO:
        self.file = open(self.beside, "wb")
        return self.file

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        try:
            with self.file as file:
                if failure is None:
                    file.flush()
                    os.fsync(file.fileno())
            if failure is None and self.replace:
                os.replace(self.beside, self.path)
            elif failure is None:
                self.path = _place_anew(self.beside, self.path)
        finally:
            self.beside.unlink(missing_ok=True)


def write_whole(path: Path, content: bytes) -> None:
    """Replace ``path`` by ``content`` in one step."""
    with WholeFile(path) as file:
        file.write(content)


def free_path(path: Path) -> Path:
    """``path``, or with -2, -3, ... before its ending: one that does not exist."""
    number, free = 1, path
    while free.exists() or free.is_symlink():
        number += 1
        free = path.with_stem(f"{path.stem}-{number}")
    return free


def _place_anew(beside: Path, path: Path) -> Path:
    """Move ``beside`` to the ``free_path``, which is returned; a file that appears there at this moment is kept too."""
    while True:
        free = free_path(path)
        try:
            try:
                os.link(beside, free)
            except FileExistsError:
                raise
            except OSError:  # a file system without links: an empty file holds the name
                open(free, "xb").close()
                os.replace(beside, free)
            return free
        except FileExistsError:
            continue


def check_new_file(path: Path) -> None:
    """Raise InputError where ``path``, which was asked for by --out, cannot become a new file."""
    if path.exists() or path.is_symlink():
        raise InputError(f"{str(path)!r} exists and is not overwritten; choose another --out.")
    if not path.parent.is_dir():
        raise InputError(f"There is no folder {str(path.parent)!r} for --out; make it, or choose another.")


def write_json(path: Path, value: Any) -> None:
    write_whole(path, (json.dumps(value, indent=2) + "\n").encode())


def read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DamagedFileError(f"{path} is missing. {NEXT_STEP}.") from None
    except (OSError, ValueError) as error:
        raise DamagedFileError(f"{path} is not readable as JSON ({error}). {NEXT_STEP}.") from error
    if not isinstance(value, dict):
        raise DamagedFileError(f"{path} holds {type(value).__name__}, expected a JSON object. {NEXT_STEP}.")
    return value


def write_tensors(path: Path, tensors: dict[str, Tensor], about: dict[str, Any]) -> None:
    """A safetensors file with the JSON object ``about`` in its header."""
    # Clones, since safetensors refuses tensors that share their memory, as tied weights do.
    plain = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
    write_whole(path, save(plain, metadata={"about": json.dumps(about)}))


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the ``about`` of ``write_tensors``."""
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {}).get("about", "null"))
            tensors = {name: file.get_tensor(name) for name in sorted(file.keys())}
    except FileNotFoundError:
        raise DamagedFileError(f"{path} is missing. {NEXT_STEP}.") from None
    except (OSError, SafetensorError, ValueError) as error:
        if looks_like_pickle(path):
            raise DamagedFileError(
                f"{path} is a pickle, which could run code when loaded; expected a safetensors file. {NEXT_STEP}."
            ) from None
        raise DamagedFileError(f"{path} is damaged: not a whole safetensors file ({error}). {NEXT_STEP}.") from error
    if not isinstance(about, dict):
        raise DamagedFileError(f"{path} was not written by semclust: its header has no description. {NEXT_STEP}.")
    return tensors, about


def looks_like_pickle(path: Path) -> bool:
    """A pickle, or the zip file that torch.save makes of one."""
    try:
        with open(path, "rb") as file:
            start = file.read(2)
    except OSError:
        return False
    return start[:1] == b"\x80" or start == b"PK"


def load_into(module: torch.nn.Module, tensors: dict[str, Tensor], path: Path) -> None:
    """Load a state into ``module``; a name or shape that does not fit is an error about ``path``."""
    try:
        module.load_state_dict(as_state(tensors, module))
    except RuntimeError as error:
        raise DamagedFileError(
            f"{path} does not fit the settings beside it ({str(error).splitlines()[1].strip()[:200]}). {NEXT_STEP}."
        ) from error


def as_state(tensors: dict[str, Tensor], module: torch.nn.Module) -> dict[str, Tensor]:
    """A state for ``module``, with the versions of its parts' formats: without them a batch norm expects a count
    of batches. Few here keep one, so those of earlier files are left out."""
    own = module.state_dict()
    state = OrderedDict(
        (name, value) for name, value in tensors.items() if name in own or not name.endswith("num_batches_tracked")
    )
    state._metadata = own._metadata  # type: ignore[attr-defined]
    return state
