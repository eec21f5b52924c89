"""``semclust fit``: group images, into a new run folder or on in one."""

import contextlib
import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from tyro.conf import OmitArgPrefixes, arg

from semclust.cli.common import INTERRUPTED, FitSettings, absolute, end, own_name, reading
from semclust.config import Settings, check, from_json, to_json, values
from semclust.errors import InputError, StoppedError, TrainingError

if TYPE_CHECKING:
    from rich.console import Console

    from semclust.data import Images
    from semclust.run_folder import RunFolder


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


def run(command: Fit, argv: list[str], console: "Console") -> None:
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

    again = f"Go on with: {own_name()} fit --resume {run.path}"
    try:
        with contextlib.closing(Display(console)) as display:
            fitted = fitting.fit(images, settings, display, run)
        summary = fitting.summarise(fitted, images)
        groups = fitted.predictor.groups = run.read_groups(settings.n_clusters)
        fitted.predictor.save(run.model)
        run.write_results(images.names, fitted.p, fitted.q, summary, groups)
    except StoppedError as stopped:
        end(f"{stopped} {again}", stopped.status)
    except KeyboardInterrupt:
        end(f"\nInterrupted. {again}", INTERRUPTED)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise InputError(
            f"{error}. The run folder is whole up to its last checkpoint. Look after the disk and its space. {again}"
        ) from error
    except TrainingError as error:
        kept = f" The last good checkpoint is {run.checkpoint}." if run.checkpoint.exists() else ""
        raise TrainingError(f"{error}{kept}") from error
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
