"""What several commands share: settings as flags, the way to end, paths, and the bar while images are read."""

import contextlib
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

import tyro
from tyro.conf import arg

from semclust.config import Settings
from semclust.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console

    from semclust.distributed import Group

INTERRUPTED = 130
Preset = Literal["quick", "default", "best", "paper"]


@dataclass(kw_only=True)
class FitSettings(Settings):
    """Every setting of the method; one that is not given comes from the preset."""

    n_clusters: Annotated[int, arg(aliases=["-k"])] = tyro.MISSING
    """Number of clusters C."""


def end(message: str, status: int = 1) -> NoReturn:
    """Tell the message and exit. Of several processes that end together, one tells it."""
    if not several_processes() or may_tell():
        print(message, file=sys.stderr, flush=True)
    raise SystemExit(status) from None


def may_tell() -> bool:
    from semclust import distributed

    return distributed.may_tell()


@contextlib.contextmanager
def leaving_a_group_at_once() -> Iterator[None]:
    """Where a process ends that is still in a group with others: the threads that talk to them are still there, and now
    and then Python's own way out would destroy one while it runs, which ends the process by SIGABRT in place of its
    status."""
    try:
        yield
    except SystemExit as ended:
        if several_processes():
            from semclust import distributed

            if distributed.has_joined() and isinstance(ended.code, int):
                sys.stdout.flush()
                os._exit(ended.code)
        raise


def several_processes() -> bool:
    """Whether torchrun started this process beside others; known without importing torch."""
    return os.environ.get("WORLD_SIZE", "1") != "1"


@contextlib.contextmanager
def processes(may_be_several: bool) -> Iterator["Group"]:
    """The processes that run this command together."""
    if several_processes() and not may_be_several:
        raise InputError("This command runs in one process; start it without torchrun.")
    from semclust.distributed import joined

    with joined() as group:
        yield group


def own_name() -> str:
    """How the user calls this command: by its path where it is not on the PATH, as in .venv/bin/semclust."""
    called = sys.argv[0]
    return called if Path(called).name == "semclust" and not shutil.which("semclust") else "semclust"


def absolute(source: str) -> str:
    """A path that still holds when a run is resumed from another folder; other words stay as they are."""
    from semclust.data import is_named

    if source in ("digits", "folders"):
        return source
    if Path(source).exists():
        return str(Path(source).resolve())
    if is_named(source):
        name, colon, path = source.partition(":")
        return f"{name}:{Path(path).expanduser().resolve()}" if colon else name
    return os.path.abspath(source) if any(sign in source for sign in "*?[{") else source  # a pattern


@contextlib.contextmanager
def reading(console: "Console") -> Iterator[Callable[[int], None]]:
    """A progress bar for reading images; it appears with the first of them."""
    from rich.progress import Progress

    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("reading images", total=None, visible=False)

        def on_image(total: int) -> None:
            progress.update(bar, advance=1, total=total, visible=True)

        yield on_image
