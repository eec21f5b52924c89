"""``semclust predict``: assign images by a finished model."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from tyro.conf import arg

from semclust.errors import plural

if TYPE_CHECKING:
    from rich.console import Console

    from semclust.distributed import Group


@dataclass
class Predict:
    """Assign the images of DATA by the model of a run."""

    run: Annotated[Path, arg(metavar="RUN"), tyro.conf.Positional]
    """A run folder of `semclust fit`, or a model folder."""
    data: Annotated[str, arg(metavar="DATA"), tyro.conf.Positional]
    """A folder of images, an image, or anything else that `semclust fit` takes."""
    out: Annotated[Path | None, arg(metavar="FILE")] = None
    """File to write, CSV or, where it ends in .parquet, Parquet; one that exists is never overwritten. By default
    DATA-clusters.csv, here."""
    embeddings: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Write the embeddings too, in the same order, to a .npy file beside it."""
    into: Annotated[Path | None, arg(metavar="DIR")] = None
    """Make this folder, with a folder for each cluster and its images inside. The originals stay where they are."""
    by: Literal["link", "copy", "hardlink"] = "link"
    """What --into puts there; where the file system cannot link, copies."""
    device: str = "auto"
    """cpu, cuda, mps; auto: a GPU where there is one."""


def run(command: Predict, console: "Console", group: "Group") -> None:
    from semclust import metrics
    from semclust.assigning import FEW, assign
    from semclust.assignments import is_parquet, need_parquet
    from semclust.display import printable
    from semclust.predictor import Predictor
    from semclust.run_folder import model_folder
    from semclust.sorting import check_folder
    from semclust.storage import check_new_file

    def say(text: str, style: str | None = None) -> None:
        console.print(printable(text), style=style, markup=False, highlight=False)

    def check_places() -> None:
        if command.out:
            check_new_file(command.out)
            if is_parquet(command.out):
                need_parquet()
        if command.into:
            check_folder(command.into, command.data)

    group.from_first(check_places)
    predictor = Predictor.load(model_folder(command.run))
    device = group.device(command.device)
    with assigning(console) as (on_image, on_part):
        done = assign(
            predictor,
            command.data,
            device,
            out=command.out,
            embeddings=command.embeddings,
            into=command.into,
            by=command.by,
            on_image=on_image,
            on_part=on_part,
            group=group,
        )
    if not group.first:
        return
    if done.n_skipped:
        say(f"skipped {plural(done.n_skipped, 'file')} that could not be read: {done.skipped}", "yellow")
    if done.figures:
        console.print(metrics.in_words(done.figures))
    if done.n_images <= FEW:
        for name, cluster, confidence, *_ in done.few:
            say(f"{name}: cluster {predictor.groups.title(cluster)}, confidence {confidence}")
    if folder := done.sorted_folder:
        if folder.copied_instead:
            copied = plural(folder.copied_instead, "file")
            say(f"copied {copied}, since links cannot be made in {folder.path}", "yellow")
        for name, reason in folder.failed[:FEW]:
            say(f"not in {folder.path}: {name}: {reason}", "yellow")
        sorted_images = done.n_images - len(folder.failed)
        say(f"{plural(sorted_images, 'image')} sorted into {folder.path}")
    if done.embeddings:
        say(f"embeddings: {done.embeddings}")
    say(f"{plural(done.n_images, 'image')} assigned; written to {done.table}")


@contextlib.contextmanager
def assigning(console: "Console") -> Iterator[tuple[Callable[[int], None], Callable[[int], None]]]:
    """A progress bar for images that are assigned. They are counted as their files are read; where they are no files,
    part by part."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("assigning images"), BarColumn(bar_width=20), TextColumn("{task.completed:,}"))
    speed = TextColumn("{task.fields[speed]}")
    with Progress(
        *columns, speed, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        bar = progress.add_task("", total=None, visible=False, speed="")
        task = progress.tasks[0]
        by_file = False

        def show(completed: int, total: int | None) -> None:
            speed = f"{completed / max(1e-9, task.elapsed or 0):,.0f} images/s"
            progress.update(bar, completed=completed, total=total, visible=True, speed=speed)

        def on_image(total: int) -> None:
            nonlocal by_file
            by_file = True
            show(int(task.completed) + 1, total)

        def on_part(n_images: int) -> None:
            if not by_file:
                show(n_images, None)

        yield on_image, on_part
