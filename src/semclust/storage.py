"""Tensors and JSON on disk: whole or not at all, and never executing what they read.

Files are written beside their place, flushed to the disk and then renamed, so a reader or a crash
never meets half a file. Tensors are safetensors, whose reader cannot run code; pickles are refused. A checksum of all
tensors stands in the header and is compared when they are read.
"""

import contextlib
import hashlib
import json
import os
import re
from collections import OrderedDict
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from semclust.errors import DamagedFileError, InputError

NEXT_STEP = "Restore the file from a copy, or fit again"
PART = re.compile(r"\.(.+)\.\d+\.part")  # a file on its way to its name; one of a process that was killed stays


class WholeFile:
    """A file that appears under its name when all of it is written, or not at all.

    with WholeFile(path) as file:
        file.write(content)

    What ``path`` holds is replaced in one step, and with ``keep`` stays under that name; with ``replace=False`` it is
    kept, and the new file takes the next free name, which is then its ``path``.
    """

    def __init__(self, path: Path, replace: bool = True, keep: Path | None = None):
        self.path, self.replace, self.keep = path, replace, keep
        self.beside = _beside(path)

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
                if self.keep is not None and self.path.exists():
                    _also_name(self.path, self.keep)
                os.replace(self.beside, self.path)
            elif failure is None:
                self.path = _place_anew(self.beside, self.path)
            if failure is None:
                _flush_names(self.path.parent)
        finally:
            with contextlib.suppress(OSError):  # of a folder that cannot be written: the error that told so goes on
                self.beside.unlink(missing_ok=True)


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.part")


def _also_name(path: Path, name: Path) -> None:
    """Let ``name``, in one step, be what ``path`` is."""
    link = _beside(name)
    try:
        os.link(path, link)
        os.replace(link, name)
    except OSError:  # a file system without links: for a moment there is no ``path``
        os.replace(path, name)
    finally:
        link.unlink(missing_ok=True)  # it stays where both were one file already


def _flush_names(folder: Path) -> None:
    """Bring the names in ``folder`` to the disk, as far as the file system can be told to."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


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
    except (OSError, ValueError, RecursionError) as error:  # the last: of lists within lists within lists
        raise DamagedFileError(f"{path} is not readable as JSON ({error}). {NEXT_STEP}.") from error
    if not isinstance(value, dict):
        raise DamagedFileError(f"{path} holds {type(value).__name__}, expected a JSON object. {NEXT_STEP}.")
    return value


def write_tensors(path: Path, tensors: dict[str, Tensor], about: dict[str, Any], keep: Path | None = None) -> None:
    """A safetensors file with the JSON object ``about`` in its header. What ``path`` held stays as ``keep``."""
    plain = _apart(tensors)
    about = {**about, "sha256": checksum(plain, about)}  # in one entry: safetensors writes several in any order
    with WholeFile(path, keep=keep) as file:
        file.write(save(plain, metadata={"about": json.dumps(about)}))


def on_host(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies in the memory of the host."""
    return {
        name: torch.empty_like(value, device="cpu", memory_format=torch.contiguous_format).copy_(value.detach())
        for name, value in tensors.items()
    }


def _apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors on the host, none of them in the memory of another, as tied weights are: safetensors refuses that."""
    apart: dict[str, Tensor] = {}
    taken = set()
    for name, value in tensors.items():
        value = value.detach().cpu().contiguous()
        apart[name] = value.clone() if value.untyped_storage().data_ptr() in taken else value
        taken.add(value.untyped_storage().data_ptr())
    return apart


def checksum(tensors: dict[str, Tensor], about: dict[str, Any]) -> str:
    """Of names, shapes and content of all tensors, and of ``about``."""
    digest = hashlib.sha256(json.dumps(about).encode())
    for name in sorted(tensors):
        value = tensors[name]
        digest.update(json.dumps([name, str(value.dtype), list(value.shape)]).encode())
        if value.numel():  # one without values cannot be viewed as bytes
            digest.update(value.contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the ``about`` of ``write_tensors``."""
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {}).get("about", "null"))
            tensors = {name: file.get_tensor(name) for name in sorted(file.keys())}
        if isinstance(about, dict) and about.pop("sha256", None) != checksum(tensors, about):
            raise ValueError("its content does not have the checksum that it says")
    except FileNotFoundError:
        raise DamagedFileError(f"{path} is missing. {NEXT_STEP}.") from None
    except (OSError, SafetensorError, ValueError, RecursionError) as error:
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


def check_shapes(module: torch.nn.Module, tensors: dict[str, Tensor], path: Path) -> None:
    """Raise where ``load_into`` would, without a value of ``module``."""
    expected = {name: value.shape for name, value in module.state_dict().items()}
    given = {name: value.shape for name, value in as_state(tensors, module).items()}
    if expected != given:
        differs = next(name for name in {**expected, **given} if expected.get(name) != given.get(name))
        raise DamagedFileError(f"{path} does not fit the settings beside it ({differs}). {NEXT_STEP}.")


def as_state(tensors: dict[str, Tensor], module: torch.nn.Module) -> dict[str, Tensor]:
    """A state for ``module``, with the versions of its parts' formats: without them a batch norm expects a count
    of batches, which few here keep."""
    state = OrderedDict(tensors)
    state._metadata = module.state_dict()._metadata  # type: ignore[attr-defined]
    return state
