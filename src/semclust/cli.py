"""The commands. Only light modules are imported at the top, so that --help answers at once.

semclust fit photos/ -k 20
semclust fit --resume runs/photos
semclust predict runs/photos new/
semclust evaluate runs/photos --labels labels.csv
semclust report runs/photos
"""

import contextlib
import dataclasses
import itertools
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import tyro
from tyro.conf import OmitArgPrefixes, arg

from semclust import __version__
from semclust.config import Settings, check, from_json, preset, to_json, values
from semclust.errors import InputError, SemclustError, TrainingError

if TYPE_CHECKING:
    import numpy as np
    from rich.console import Console

    from semclust.data import Images
    from semclust.run_folder import RunFolder

INTERRUPTED = 130
FEW = 10  # images whose clusters `predict` shows on the screen


@dataclass(kw_only=True)
class FitSettings(Settings):
    """Every setting of the method; one that is not given comes from the preset."""

    n_clusters: Annotated[int, arg(aliases=["-k"])] = tyro.MISSING
    """Number of clusters C."""


@dataclass
class Fit:
    """Group the images of DATA; results go into a new run folder."""

    data: Annotated[str | None, arg(metavar="[DATA]"), tyro.conf.Positional] = None
    """A folder of images, a .npz or .npy file, or "digits" (embedded)."""
    preset: Literal["default", "paper"] = "default"
    """The settings to start from; other flags change single ones."""
    labels: Annotated[str | None, arg(metavar="LABELS")] = None
    """Labels to compare with, for the figures only: a CSV (path,label), a .npy, or "folders"."""
    out: Path = Path("runs")
    """Folder in which the run folder is made."""
    resume: Annotated[Path | None, arg(metavar="RUN")] = None
    """Go on with this run folder; its own settings hold."""
    report: bool = True
    """Write report.html, a page to look at, when the fit is done."""
    settings: OmitArgPrefixes[FitSettings] = dataclasses.field(default_factory=FitSettings)


@dataclass
class Predict:
    """Assign the images of DATA by the model of a run."""

    run: Annotated[Path, arg(metavar="RUN"), tyro.conf.Positional]
    """A run folder of `semclust fit`, or a model folder."""
    data: Annotated[str, arg(metavar="DATA"), tyro.conf.Positional]
    """A folder of images, an image, a .npz or .npy file, or "digits"."""
    out: Annotated[Path | None, arg(metavar="CSV")] = None
    """File to write; one that exists is never overwritten. By default DATA-clusters.csv, here."""
    device: str = "auto"
    """cpu, cuda, mps; auto: a GPU where there is one."""


@dataclass
class Evaluate:
    """Compare a run's clusters with labels: ACC, NMI, ARI and the confusion table."""

    run: Annotated[Path, arg(metavar="RUN"), tyro.conf.Positional]
    """A finished run folder of `semclust fit`."""
    labels: Annotated[str | None, arg(metavar="LABELS")] = None
    """A CSV (columns path,label), a .npy or .npz in the order of assignments.csv, or "folders" (the
    outermost folder of each image). By default the labels that the data itself holds (digits, a .npz)."""


@dataclass
class Report:
    """Write one page about a run: its clusters in pictures, a map, curves, tables and settings."""

    run: Annotated[Path, arg(metavar="RUN"), tyro.conf.Positional]
    """A finished run folder of `semclust fit`."""
    out: Annotated[Path | None, arg(metavar="HTML")] = None
    """File to write; one that exists is never overwritten. By default report.html in the run folder."""


Command = (
    Annotated[Fit, tyro.conf.subcommand("fit")]
    | Annotated[Predict, tyro.conf.subcommand("predict")]
    | Annotated[Evaluate, tyro.conf.subcommand("evaluate")]
    | Annotated[Report, tyro.conf.subcommand("report")]
)


def main(argv: list[str] | None = None) -> None:
    """Run one command; exits with 0, 1 (an error that is told in words), 2 (usage) or 130 (interrupted)."""
    argv = sys.argv[1:] if argv is None else argv
    if argv == ["--version"]:
        print(f"semclust {__version__}")
        return
    try:
        run_command(parse(argv), argv)
    except SemclustError as error:
        end(f"semclust: {error}")
    except KeyboardInterrupt:
        end("\nInterrupted.", INTERRUPTED)
    except BrokenPipeError:  # the reader of our output has gone, as in `semclust --help | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
    except OSError as error:
        end(f"semclust: {error}. Check the path, its permissions and the space on the disk.")
    except RuntimeError as error:
        if type(error).__name__ != "OutOfMemoryError":
            raise
        end("semclust: the GPU is out of memory. Try a smaller --batch-size or --image-size.")


def end(message: str, status: int = 1) -> NoReturn:
    print(message, file=sys.stderr)
    raise SystemExit(status) from None


def run_command(command: Fit | Predict | Evaluate | Report, argv: list[str]) -> None:
    from rich.console import Console

    console = Console(soft_wrap=not sys.stdout.isatty())
    if isinstance(command, Fit):
        fit(command, argv, console)
    elif isinstance(command, Predict):
        predict(command, console)
    elif isinstance(command, Report):
        report(command, console)
    else:
        evaluate(command, console)


def parse(argv: list[str]) -> Fit | Predict | Evaluate | Report:
    """The command in ``argv``. A preset moves the defaults, so it is looked up before the flags are read."""
    default: Any = tyro.MISSING
    if argv[:1] == ["fit"]:
        words = [part for word in argv for part in word.split("=", 1)]
        settings = FitSettings(n_clusters=Settings.n_clusters) if "--resume" in words else FitSettings()
        if ("--preset", "paper") in itertools.pairwise(words):
            settings = dataclasses.replace(settings, **preset("paper"))
        default = Fit(settings=settings)
    return tyro.cli(
        Command,
        args=argv,
        default=default,
        prog="semclust",
        description="Group unlabelled images by meaning.",
    )


def fit(command: Fit, argv: list[str], console: "Console") -> None:
    from semclust import fitting
    from semclust.data import open_images
    from semclust.display import Display, printable, show_clusters
    from semclust.run_folder import RunFolder, fingerprint
    from semclust.truth import read_labels

    if command.resume:
        run = RunFolder.open(command.resume)
        config = run.read_config()
        heeded = ("--resume", "--report", "--no-report")
        ignored = [word for word in argv if word.startswith("-") and word.split("=")[0] not in heeded]
        if command.data:
            ignored.insert(0, command.data)
        if ignored:
            console.print(f"ignored, since a resumed run keeps its own settings: {' '.join(ignored)}", markup=False)
        try:
            settings = Settings(**from_json(config["settings"]))
            data, labels = config["data"], config["labels"]
        except KeyError as error:
            raise InputError(
                f"{run.path / 'config.json'} lacks {error}; restore it from a copy, or fit again."
            ) from None
    else:
        if command.data is None:
            raise InputError("No data. Name a folder of images: semclust fit photos/ -k 20")
        settings = fitting.draw_seed(Settings(**values(command.settings)))
        data, labels = absolute(command.data), command.labels and absolute(command.labels)

    check(settings)
    with reading(console) as on_image:
        images = open_images(data, size=settings.image_size, on_image=on_image)
    if labels:
        images.labels = read_labels(labels, images.names)
    seen = fingerprint(images.pixels, images.names)
    if command.resume:
        if seen != config.get("fingerprint"):
            raise InputError(
                f"The images of {data!r} are not those that {run.path} began with. Restore them, or fit anew."
            )
    else:
        fitting.check_suits(images, settings)
        run = RunFolder.create(command.out, images.source)
        run.write_config({"data": data, "labels": labels, "fingerprint": seen, "settings": to_json(settings)})
    run.write_skipped(images.skipped)
    if images.skipped:
        told = f"{len(images.skipped)} files could not be read and were skipped: {run.path / 'skipped.csv'}"
        console.print(printable(told), style="yellow", markup=False, highlight=False)

    try:
        with contextlib.closing(Display(console)) as display:
            fitted = fitting.fit(images, settings, display, run)
    except KeyboardInterrupt:
        end(f"\nInterrupted. Go on with: {own_name()} fit --resume {run.path}", INTERRUPTED)
    except TrainingError as error:
        kept = f" The last good checkpoint is {run.checkpoint}." if run.checkpoint.exists() else ""
        raise TrainingError(f"{error}{kept}") from error
    summary = fitting.summarise(fitted, images)
    fitted.predictor.save(run.model)
    run.write_results(images.names, fitted.p, fitted.q, summary)
    show_clusters(console, summary, images.names, fitted.labels, fitted.p.max(1))
    console.print(f"{summary['seconds']:.0f} s; run folder: {printable(str(run.path))}", markup=False, highlight=False)
    if command.report:
        report_on_fit(run, images, console)


def report_on_fit(run: "RunFolder", images: "Images", console: "Console") -> None:
    """The report at the end of a fit. All results are written by now: whatever fails here loses none of them."""
    from semclust.display import printable
    from semclust.report import write_report

    again = f"Try again with: {own_name()} report {run.path}"
    try:
        with console.status("writing the report"):
            path = write_report(run.path, images=images)
    except KeyboardInterrupt:
        end(f"\nInterrupted while writing the report; the results are complete. {again}", INTERRUPTED)
    except Exception as error:
        told = f"warning: the report could not be written ({type(error).__name__}: {error}). {again}"
        console.print(printable(told), style="yellow", markup=False, highlight=False, soft_wrap=True)
    else:
        console.print(f"report: {printable(str(path))}", markup=False, highlight=False)


def report(command: Report, console: "Console") -> None:
    from semclust.display import printable
    from semclust.report import write_report

    with console.status("writing the report"):
        path = write_report(command.run, command.out)
    console.print(printable(str(path)), markup=False, highlight=False, soft_wrap=True)


def predict(command: Predict, console: "Console") -> None:
    from semclust import metrics
    from semclust.devices import choose_device
    from semclust.display import printable
    from semclust.predictor import Predictor
    from semclust.run_folder import assignment_rows, free_path, model_folder, write_assignments

    if command.out and command.out.exists():
        raise InputError(f"{str(command.out)!r} exists and is not overwritten; choose another --out.")
    if command.out and not command.out.parent.is_dir():
        raise InputError(f"There is no folder {str(command.out.parent)!r} for --out; make it, or choose another.")
    predictor = Predictor.load(model_folder(command.run))
    with reading(console) as on_image:
        images = predictor.open(command.data, on_image)
    p, _ = predictor(images.pixels, choose_device(command.device))
    out = command.out or free_path(Path(f"{images.source}-clusters.csv"))
    write_assignments(out, images.names, p)
    for name, reason in images.skipped:
        console.print(f"skipped {name!r}: {reason}", markup=False, highlight=False)
    if images.labels is not None:
        console.print(metrics.in_words(metrics.evaluate(p.argmax(1), images.labels)))
    if len(p) <= FEW:
        for name, cluster, confidence, *_ in assignment_rows(images.names, p):
            shown = f"{printable(name)}: cluster {cluster}, confidence {confidence}"
            console.print(shown, markup=False, highlight=False)
    console.print(
        f"{len(p):,} {'image' if len(p) == 1 else 'images'} assigned; written to {printable(str(out))}",
        markup=False,
        highlight=False,
    )


def evaluate(command: Evaluate, console: "Console") -> None:
    import numpy as np
    from rich.markup import escape
    from rich.table import Table

    from semclust import metrics
    from semclust.run_folder import RunFolder, read_assignments
    from semclust.truth import read_labels

    run = RunFolder.open(command.run)
    names, clusters = read_assignments(run.assignments)
    labels = read_labels(command.labels, names) if command.labels else labels_of(run, names)
    console.print(metrics.in_words(metrics.evaluate(clusters, labels)))
    table = Table(title="images of each class in each cluster", title_justify="left")
    table.add_column("cluster", justify="right")
    for name in np.unique(labels):
        table.add_column(escape(str(name)), justify="right")
    for cluster, row in zip(np.unique(clusters), metrics.contingency(clusters, labels), strict=True):
        table.add_row(str(cluster), *(f"{n:,}" if n else "." for n in row))
    console.print(table)


def labels_of(run: "RunFolder", names: list[str]) -> "np.ndarray":
    """The labels that a run was fitted beside, or that its data itself holds."""
    from semclust.data import open_images
    from semclust.truth import read_labels

    config = run.read_config()
    if config.get("labels"):
        return read_labels(config["labels"], names)
    data = config.get("data")
    if data is None:
        raise InputError(f"{run.path / 'config.json'} names no data; say --labels labels.csv.")
    files = data != "digits" and Path(data).is_dir()  # a folder holds none: there is no need to read it
    labels = None if files else open_images(data).labels
    if labels is None:
        raise InputError(f"{data!r} holds no labels; say --labels labels.csv, or --labels folders.")
    if len(labels) != len(names):
        raise InputError(
            f"{data!r} holds {len(labels)} labels, but the run has {len(names)} images: it has changed since. "
            "Restore it, or say --labels labels.csv."
        )
    return labels


def own_name() -> str:
    """How the user calls this command: by its path where it is not on the PATH, as in .venv/bin/semclust."""
    called = sys.argv[0]
    return called if Path(called).name == "semclust" and not shutil.which("semclust") else "semclust"


def absolute(source: str) -> str:
    """A path that still holds when a run is resumed from another folder; other words stay as they are."""
    return source if source in ("digits", "folders") or not Path(source).exists() else str(Path(source).resolve())


@contextlib.contextmanager
def reading(console: "Console") -> Iterator[Callable[[int], None]]:
    """A progress bar for reading images; it appears with the first of them."""
    from rich.progress import Progress

    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("reading images", total=None, visible=False)

        def on_image(total: int) -> None:
            progress.update(bar, advance=1, total=total, visible=True)

        yield on_image
