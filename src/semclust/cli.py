"""The commands. Only light modules are imported at the top, so that --help answers at once.

semclust fit photos/ -k 20
semclust fit --resume runs/photos
semclust predict runs/photos new/
semclust evaluate runs/photos --labels labels.csv
semclust merge runs/photos 3 7
semclust rename runs/photos 2 ships
semclust reduce runs/photos --to 8
semclust undo runs/photos
semclust export runs/photos --format onnx
semclust report runs/photos
semclust bench speed
"""

import contextlib
import dataclasses
import itertools
import os
import shutil
import sys
import time
import warnings
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
    from semclust.groups import Groups
    from semclust.run_folder import RunFolder

INTERRUPTED = 130


@dataclass(kw_only=True)
class FitSettings(Settings):
    """Every setting of the method; one that is not given comes from the preset."""

    n_clusters: Annotated[int, arg(aliases=["-k"])] = tyro.MISSING
    """Number of clusters C."""


@dataclass
class Fit:
    """Group the images of DATA; results go into a new run folder."""

    data: Annotated[str | None, arg(metavar="[DATA]"), tyro.conf.Positional] = None
    """A folder of images, a .npz or .npy file, tar shards ("shards-{000..015}.tar", "shards-*.tar"), a benchmark
    (cifar10:PATH, cifar100:, stl10:, stl10-unlabelled:, imagenet-10:, imagenet-dogs:, tiny-imagenet:), or "digits"
    (embedded)."""
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


@dataclass
class Evaluate:
    """Compare a run's clusters with labels: ACC, NMI, ARI and the confusion table."""

    run: Annotated[Path, arg(metavar="RUN"), tyro.conf.Positional]
    """A finished run folder of `semclust fit`."""
    labels: Annotated[str | None, arg(metavar="LABELS")] = None
    """A CSV (columns path,label), a .npy or .npz in the order of assignments.csv, or "folders" (the
    outermost folder of each image). By default the labels that the data itself holds (digits, a .npz, tar shards
    with .cls, a benchmark)."""


@dataclass
class Merge:
    """Make one cluster of several. It keeps the smallest id; no other id changes."""

    run: Annotated[Path, arg(metavar="RUN"), tyro.conf.Positional]
    """A finished run folder of `semclust fit`."""
    clusters: Annotated[tuple[str, ...], arg(metavar="CLUSTER CLUSTER ..."), tyro.conf.Positional]
    """Two or more, by id or name."""


@dataclass
class Rename:
    """Give a cluster a name."""

    run: Annotated[Path, arg(metavar="RUN"), tyro.conf.Positional]
    """A finished run folder of `semclust fit`."""
    cluster: Annotated[str, arg(metavar="CLUSTER"), tyro.conf.Positional]
    """Its id, or the name it has."""
    name: Annotated[str, arg(metavar="NAME"), tyro.conf.Positional]
    """Any text on one line that no other cluster has, and no number."""


@dataclass
class Reduce:
    """Merge the two closest clusters, again and again, until fewer are left."""

    run: Annotated[Path, arg(metavar="RUN"), tyro.conf.Positional]
    """A finished run folder of `semclust fit`."""
    to: int
    """Number of clusters to be left, at least 2."""


@dataclass
class Undo:
    """Take back the last merge, rename or reduce."""

    run: Annotated[Path, arg(metavar="RUN"), tyro.conf.Positional]
    """A finished run folder of `semclust fit`."""


@dataclass
class Export:
    """Write the model as ONNX, or the assignments as Parquet."""

    run: Annotated[Path, arg(metavar="RUN"), tyro.conf.Positional]
    """A finished run folder of `semclust fit`; for ONNX also a model folder."""
    format: Literal["onnx", "parquet"]
    """onnx: images in, probabilities and embedding out. parquet: the table of assignments."""
    out: Annotated[Path | None, arg(metavar="FILE")] = None
    """File to write; one that exists is never overwritten. By default RUN.onnx, here, or assignments.parquet in the
    run folder, where it then follows merges as assignments.csv does."""


@dataclass
class Report:
    """Write one page about a run: its clusters in pictures, a map, curves, tables and settings."""

    run: Annotated[Path, arg(metavar="RUN"), tyro.conf.Positional]
    """A finished run folder of `semclust fit`."""
    out: Annotated[Path | None, arg(metavar="HTML")] = None
    """File to write; one that exists is never overwritten. By default report.html in the run folder."""


@dataclass
class Bench:
    """Measure on this machine: how fast training runs, beside a plain training script in the same run."""

    what: Annotated[Literal["speed"], arg(metavar="speed"), tyro.conf.Positional]
    """speed: images a second, seconds an epoch and a label refresh, use of the device, memory, time to first step."""
    images: int = 60_000
    """How many, of random bytes."""
    size: int = 32
    """Their side in pixels."""
    channels: Literal[1, 3] = 3
    """Grey or colour."""
    epochs_timed: int = 4
    """After one to warm up."""
    baseline: bool = True
    """Run the plain script too (Pillow views in DataLoader workers, float32, eager) and, on a GPU, the same steps with
    the images streamed."""
    preset: Literal["default", "paper"] = "default"
    """The settings to start from; other flags change single ones."""
    out: Annotated[Path | None, arg(metavar="JSON")] = None
    """File for the figures; one that exists is never overwritten. By default bench-speed.json, here, or -2, ..."""
    settings: OmitArgPrefixes[FitSettings] = dataclasses.field(default_factory=FitSettings)


Command = (
    Annotated[Fit, tyro.conf.subcommand("fit")]
    | Annotated[Predict, tyro.conf.subcommand("predict")]
    | Annotated[Evaluate, tyro.conf.subcommand("evaluate")]
    | Annotated[Merge, tyro.conf.subcommand("merge")]
    | Annotated[Rename, tyro.conf.subcommand("rename")]
    | Annotated[Reduce, tyro.conf.subcommand("reduce")]
    | Annotated[Undo, tyro.conf.subcommand("undo")]
    | Annotated[Export, tyro.conf.subcommand("export")]
    | Annotated[Report, tyro.conf.subcommand("report")]
    | Annotated[Bench, tyro.conf.subcommand("bench")]
)
AnyCommand = Fit | Predict | Evaluate | Merge | Rename | Reduce | Undo | Export | Report | Bench


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


def run_command(command: AnyCommand, argv: list[str]) -> None:
    from rich.console import Console

    console = Console(soft_wrap=not sys.stdout.isatty())
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *place: console.print(
            f"warning: {message}", style="yellow", markup=False
        )
        if isinstance(command, Fit):
            fit(command, argv, console)
        elif isinstance(command, Predict):
            predict(command, console)
        elif isinstance(command, Report):
            report(command, console)
        elif isinstance(command, Bench):
            bench(command, console)
        elif isinstance(command, Evaluate):
            evaluate(command, console)
        elif isinstance(command, Export):
            export(command, console)
        else:
            regroup(command, console)


def parse(argv: list[str]) -> AnyCommand:
    """The command in ``argv``. A preset moves the defaults, so it is looked up before the flags are read."""
    default: Any = tyro.MISSING
    if argv[:1] in (["fit"], ["bench"]):
        words = [part for word in argv for part in word.split("=", 1)]
        needs_k = argv[0] == "fit" and "--resume" not in words
        settings = FitSettings() if needs_k else FitSettings(n_clusters=Settings.n_clusters)
        if ("--preset", "paper") in itertools.pairwise(words):
            settings = dataclasses.replace(settings, **preset("paper"))
        default = Fit(settings=settings) if argv[0] == "fit" else Bench(what=tyro.MISSING, settings=settings)
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
    from semclust.display import Display, printable, show_clusters, show_groups
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
    groups = fitted.predictor.groups = run.read_groups(settings.n_clusters)
    fitted.predictor.save(run.model)
    run.write_results(images.names, fitted.p, fitted.q, summary, groups)
    if groups.steps:  # of a run that had finished before
        show_groups(console, groups, groups.sizes(groups.apply(fitted.p)))
    else:
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
    from semclust.assigning import FEW, assign
    from semclust.assignments import is_parquet, need_parquet
    from semclust.devices import choose_device
    from semclust.display import plural, printable
    from semclust.predictor import Predictor
    from semclust.run_folder import model_folder
    from semclust.sorting import check_folder
    from semclust.storage import check_new_file

    def say(text: str, style: str | None = None) -> None:
        console.print(printable(text), style=style, markup=False, highlight=False)

    if command.out:
        check_new_file(command.out)
        if is_parquet(command.out):
            need_parquet()
    if command.into:
        check_folder(command.into, command.data)
    predictor = Predictor.load(model_folder(command.run))
    device = choose_device(command.device)
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
        )
    if done.n_skipped:
        say(f"{done.n_skipped:,} files could not be read and were skipped: {done.skipped}", "yellow")
    if done.figures:
        console.print(metrics.in_words(done.figures))
    if done.n_images <= FEW:
        for name, cluster, confidence, *_ in done.few:
            say(f"{name}: cluster {predictor.groups.title(cluster)}, confidence {confidence}")
    if folder := done.sorted_folder:
        if folder.copied_instead:
            say(f"{folder.copied_instead:,} files were copied, since links cannot be made in {folder.path}", "yellow")
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


def regroup(command: Merge | Rename | Reduce | Undo, console: "Console") -> None:
    from semclust.display import printable, show_groups
    from semclust.groups import Groups
    from semclust.run_folder import RunFolder

    run = RunFolder.open_finished(command.run)
    groups = Groups.read(run.model)
    said = change(command, groups, run)
    sizes = run.write_groups(groups)
    show_groups(console, groups, sizes)
    undo = f"; to take it back: {own_name()} undo {run.path}" if not isinstance(command, Undo) else ""
    console.print(printable(f"{said}{undo}"), markup=False, highlight=False, soft_wrap=True)
    if (run.path / "report.html").exists():
        told = f"report.html still shows the clusters as they were; renew it: {own_name()} report {run.path}"
        console.print(printable(told), markup=False, highlight=False, soft_wrap=True)


def change(command: Merge | Rename | Reduce | Undo, groups: "Groups", run: "RunFolder") -> str:
    """Take the step that a command asks for, and tell it in words."""
    if isinstance(command, Merge):
        return f"merged into cluster {groups.title(groups.merge(command.clusters))}"
    if isinstance(command, Rename):
        return f"named cluster {groups.title(groups.rename(command.cluster, command.name))}"
    if isinstance(command, Reduce):
        _, p, q = run.read_results(groups.n_clusters)
        pairs = ", ".join(f"{b} into {a}" for a, b in groups.reduce(command.to, p, q))
        return f"merged {pairs}"
    ((kind, _),) = groups.undo().items()
    return f"undone: {kind}; steps left to undo: {len(groups.steps)}"


def export(command: Export, console: "Console") -> None:
    from semclust.display import printable
    from semclust.storage import check_new_file, free_path

    if command.out:
        check_new_file(command.out)
    if command.format == "onnx":
        from semclust.export import export_onnx
        from semclust.predictor import Predictor
        from semclust.run_folder import model_folder

        predictor = Predictor.load(model_folder(command.run))
        out = command.out or free_path(Path(f"{command.run.resolve().name}.onnx"))
        difference = export_onnx(predictor, out)
        said = f"largest difference from the model on random images: {difference:.1g}; written to {out}"
    else:
        from semclust.assignments import is_parquet, need_parquet
        from semclust.groups import Groups
        from semclust.run_folder import RunFolder

        need_parquet()
        run = RunFolder.open_finished(command.run)
        out = command.out or run.parquet
        if not is_parquet(out):
            raise InputError(f"--out {str(out)!r}: expected a name that ends in .parquet.")
        sizes = run.write_tables([out], Groups.read(run.model))
        said = f"{sizes.sum():,} rows written to {out}"
    console.print(printable(said), markup=False, highlight=False, soft_wrap=True)


def evaluate(command: Evaluate, console: "Console") -> None:
    import numpy as np
    from rich.markup import escape
    from rich.table import Table

    from semclust import metrics
    from semclust.assignments import read_assignments
    from semclust.display import printable
    from semclust.run_folder import RunFolder
    from semclust.truth import read_labels

    run = RunFolder.open(command.run)
    names, clusters, *_ = read_assignments(run.assignments)
    groups = run.read_groups(int(clusters.max()) + 1)
    labels = read_labels(command.labels, names) if command.labels else labels_of(run, names)
    console.print(metrics.in_words(metrics.evaluate(clusters, labels)))
    table = Table(title="images of each class in each cluster", title_justify="left")
    table.add_column("cluster", justify="right")
    for name in np.unique(labels):
        table.add_column(escape(printable(str(name))), justify="right")
    for cluster, row in zip(np.unique(clusters), metrics.contingency(clusters, labels), strict=True):
        table.add_row(escape(printable(groups.title(int(cluster)))), *(f"{n:,}" if n else "." for n in row))
    console.print(table)


def bench(command: Bench, console: "Console") -> None:
    started = time.perf_counter()  # before torch is imported: that is part of the time to the first step
    from semclust.speed import in_words, measure_speed
    from semclust.storage import check_new_file, free_path, write_json

    settings = Settings(**values(command.settings))
    check(settings)
    if command.out:
        check_new_file(command.out)

    def tell(message: str) -> None:
        console.print(message, markup=False, highlight=False)

    figures = measure_speed(
        settings,
        command.images,
        command.size,
        command.channels,
        command.epochs_timed,
        command.baseline,
        started,
        tell,
    )
    for line in in_words(figures):
        tell(line)
    out = command.out or free_path(Path("bench-speed.json"))
    write_json(out, figures)
    tell(f"written to {out}")


def labels_of(run: "RunFolder", names: list[str]) -> "np.ndarray":
    """The labels that a run was fitted beside, or that its data itself holds."""
    from semclust.data import find_source
    from semclust.truth import read_labels

    config = run.read_config()
    if config.get("labels"):
        return read_labels(config["labels"], names)
    data = config.get("data")
    if data is None:
        raise InputError(f"{run.path / 'config.json'} names no data; say --labels labels.csv.")
    files = data != "digits" and Path(data).is_dir()  # a folder holds none: there is no need to list it
    source = None if files else find_source(data)
    if source is None or source.labels is None:
        raise InputError(f"{data!r} holds no labels; say --labels labels.csv, or --labels folders.")
    labels = source.labels
    if source.stamp or source.folder:  # some of the images may have been skipped
        rows = {name: row for row, name in enumerate(source.names)}
        labels = labels[[rows[name] for name in names if name in rows]]
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
    from semclust.data import is_named

    if source in ("digits", "folders"):
        return source
    if Path(source).exists():
        return str(Path(source).resolve())
    if is_named(source):
        name, path = source.split(":", 1)
        return f"{name}:{Path(path).expanduser().resolve()}"
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
