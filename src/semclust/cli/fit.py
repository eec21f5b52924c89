"""``semclust fit``: group images, into a new run folder or on in one."""

import contextlib
import dataclasses
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from tyro.conf import OmitArgPrefixes, arg

from semclust.cli.common import INTERRUPTED, FitSettings, Preset, absolute, end, own_name, reading
from semclust.config import Settings, check, from_json, to_json, values
from semclust.errors import GroupError, InputError, StoppedError, TrainingError, plural

if TYPE_CHECKING:
    from rich.console import Console

    from semclust.data import Images
    from semclust.distributed import Group
    from semclust.run_folder import RunFolder


@dataclass
class Fit:
    """Group the images of DATA; results go into a new run folder."""

    data: Annotated[str | None, arg(metavar="[DATA]"), tyro.conf.Positional] = None
    """A folder of images, a .npz or .npy file, tar shards ("shards-{000..015}.tar", "shards-*.tar"), a benchmark
    (cifar10:PATH, cifar100:, stl10:, stl10-unlabelled:, imagenet-10:, imagenet-dogs:, tiny-imagenet:,
    fashion-mnist:), or "digits" (embedded)."""
    preset: Preset = "default"
    """The settings to start from; other flags change single ones. quick and best: the default for fewer and for more
    epochs; paper: as published."""
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
class Plan:
    """What is to be fitted, how, and where to."""

    settings: Settings
    data: str
    labels: str | None
    run: "RunFolder | None" = None  # None: one is made once the images are known
    config: dict[str, Any] = field(default_factory=dict)  # that the run began with


def run(command: Fit, argv: list[str], console: "Console", group: "Group") -> None:
    """Of several processes, all learn; the first decides, writes and speaks."""
    from semclust import fitting
    from semclust.data import open_images
    from semclust.display import Display, printable, show_clusters, show_groups
    from semclust.truth import read_labels

    plan = group.from_first(lambda: plan_of_resumed(command, argv, console) if command.resume else new_plan(command))
    check(plan.settings, as_flags=plan.run is None)
    with reading(console) as on_image:
        # Of the processes on a machine one decodes, on all cores; the others find the pixels in the cache.
        images = group.in_turn(lambda: open_images(plan.data, size=plan.settings.image_size, on_image=on_image))
    if plan.labels:
        images.labels = group.from_first(lambda: read_labels(str(plan.labels), images.names))
    run, settings = group.from_first(partial(open_run, command, plan, images, group, same_images(images, group)))
    if plan.run is None and run.checkpoint.exists():
        console.print(f"going on with {printable(str(run.path))}, which this job began", markup=False)
    if images.skipped:
        told = f"skipped {plural(len(images.skipped), 'file')} that could not be read: {run.path / 'skipped.csv'}"
        console.print(printable(told), style="yellow", markup=False, highlight=False)

    machines = f"--nproc-per-node {group.size}" if group.size == group.local_size else "..."
    by = own_name() if group.alone else f"torchrun {machines} -m semclust"
    again = f"Go on with: {by} fit --resume {run.path}"
    try:
        with contextlib.closing(Display(console)) as display:
            fitted = fitting.fit(images, settings, display, run if group.first else None, group)
        if not group.first:
            return
        summary = fitting.summarise(fitted, images)
        groups = fitted.predictor.groups = run.read_groups(settings.n_clusters)
        fitted.predictor.save(run.model)
        run.write_results(images.names, fitted.p, fitted.q, summary, groups)
    except StoppedError as stopped:
        end(f"{stopped} {again}", stopped.status)
    except KeyboardInterrupt:
        end(f"\nInterrupted. {again}", INTERRUPTED)
    except GroupError as error:
        raise GroupError(f"{error} Where torchrun does not restart the job: {again[0].lower()}{again[1:]}") from error
    except BrokenPipeError:
        raise
    except OSError as error:
        raise InputError(
            f"{error}. The run folder is whole up to its last checkpoint. Look after the disk and its space. {again}"
        ) from error
    except InputError:
        if not command.resume and group.first:
            run.abandon()
        raise
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


def new_plan(command: Fit) -> Plan:
    if command.data is None:
        raise InputError("No data. Name a folder of images: semclust fit photos/ -k 20")
    settings = Settings(**values(command.settings))
    return Plan(settings, absolute(command.data), command.labels and absolute(command.labels))


def plan_of_resumed(command: Fit, argv: list[str], console: "Console") -> Plan:
    from semclust.run_folder import RunFolder

    assert command.resume is not None
    run = RunFolder.open(command.resume)
    config = run.read_config()
    heeded = ("--resume", "--report", "--no-report")
    ignored = [word for word in argv if word.startswith("-") and word.split("=")[0] not in heeded]
    if command.data:
        ignored.insert(0, command.data)
    if ignored:
        console.print(f"ignored, since a resumed run keeps its own settings: {' '.join(ignored)}", markup=False)
    try:
        settings = from_json(config["settings"])
        if lacking := [name for name in values(Settings()) if name not in settings]:
            raise InputError(
                f"{run.path / 'config.json'} lacks the settings {', '.join(lacking)}: an earlier version began this "
                "run, and did not do what is the default now. Resume it with that version, or add them with the values "
                "that it had then."
            )
        return Plan(Settings(**settings), config["data"], config["labels"], run, config)
    except KeyError as error:
        raise InputError(f"{run.path / 'config.json'} lacks {error}; restore it from a copy, or fit again.") from None


def open_run(command: Fit, plan: Plan, images: "Images", group: "Group", seen: str) -> "tuple[RunFolder, Settings]":
    """The folder of the run, and its settings. ``seen``: fingerprint of the images."""
    from semclust import distributed, fitting
    from semclust.plan import decided
    from semclust.run_folder import RunFolder

    run, settings = plan.run, plan.settings
    if run is not None:
        if seen != plan.config.get("fingerprint"):
            raise InputError(
                f"The images of {plan.data!r} are not those that {run.path} began with. Restore them, or fit anew."
            )
    else:
        fitting.check_suits(images, settings, group)
        settings = decided(settings, images.pixels, group.device(settings.device))
        config = {"data": plan.data, "labels": plan.labels, "fingerprint": seen, "settings": to_json(settings)}
        job = distributed.job_name()
        run = RunFolder.of_job(command.out, job, config, distributed.restarts() > 0) if job else None
        if run is not None:
            settings = Settings(**from_json(run.read_config()["settings"]))
        else:
            settings = fitting.draw_seed(settings)
            run = RunFolder.create(command.out, images.source)
            run.write_config(config | {"settings": to_json(settings)} | ({"job": job} if job else {}))
    run.write_skipped(images.skipped)
    return run, settings


def same_images(images: "Images", group: "Group") -> str:
    """The fingerprint of the images, of which all processes must see the same."""
    from semclust.run_folder import fingerprint

    # One of each machine goes through the pixels, which the others share with it.
    of_pixels = fingerprint(images.pixels, images.names) if group.local_rank == 0 else None
    seen = group.exchange((of_pixels, fingerprint(images.pixels[:1], images.names)))
    if len({pixels for pixels, _ in seen if pixels}) > 1 or len({names for _, names in seen}) > 1:
        raise InputError(
            "The processes do not see the same images. Let the data be the same on every machine, and not change "
            "while a fit begins."
        )
    return str(seen[0][0])


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
