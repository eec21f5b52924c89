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
semclust bench digits --seeds 3
semclust bench speed
"""

import dataclasses
import itertools
import os
import sys
import warnings
from typing import Annotated, Any, get_args

import tyro

from semclust import __version__
from semclust.cli import arena, evaluate, fit, output, predict, regroup, speed
from semclust.cli.arena import BenchData
from semclust.cli.common import INTERRUPTED, FitSettings, Preset, end, leaving_a_group_at_once, processes
from semclust.cli.evaluate import Evaluate
from semclust.cli.fit import Fit
from semclust.cli.output import Export, Report
from semclust.cli.predict import Predict
from semclust.cli.regroup import Merge, Reduce, Rename, Undo
from semclust.cli.speed import BenchSpeed, SpeedSettings
from semclust.config import Settings, preset
from semclust.errors import InputError, SemclustError

AnyCommand = Fit | Predict | Evaluate | Merge | Rename | Reduce | Undo | Export | Report | BenchData | BenchSpeed


def commands(bench: type[BenchData] | type[BenchSpeed]) -> Any:
    """All commands by name; ``bench`` has two faces, whose flags are different."""
    return (
        Annotated[Fit, tyro.conf.subcommand("fit")]
        | Annotated[Predict, tyro.conf.subcommand("predict")]
        | Annotated[Evaluate, tyro.conf.subcommand("evaluate")]
        | Annotated[Merge, tyro.conf.subcommand("merge")]
        | Annotated[Rename, tyro.conf.subcommand("rename")]
        | Annotated[Reduce, tyro.conf.subcommand("reduce")]
        | Annotated[Undo, tyro.conf.subcommand("undo")]
        | Annotated[Export, tyro.conf.subcommand("export")]
        | Annotated[Report, tyro.conf.subcommand("report")]
        | Annotated[bench, tyro.conf.subcommand("bench")]
    )


@leaving_a_group_at_once()
def main(argv: list[str] | None = None) -> None:
    """Run one command; exits with 0, 1 (an error that is told in words), 2 (usage), 130 (SIGINT) or 143 (SIGTERM)."""
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


def run_command(command: AnyCommand, argv: list[str]) -> None:
    from rich.console import Console

    with processes(isinstance(command, Fit | Predict)) as group, warnings.catch_warnings():
        console = Console(soft_wrap=not sys.stdout.isatty(), quiet=not group.first)
        warnings.showwarning = lambda message, *place: console.print(
            f"warning: {message}", style="yellow", markup=False
        )
        if isinstance(command, Fit):
            fit.run(command, argv, console, group)
        elif isinstance(command, Predict):
            predict.run(command, console, group)
        elif isinstance(command, Report):
            output.report(command, console)
        elif isinstance(command, BenchSpeed):
            speed.run(command, console)
        elif isinstance(command, BenchData):
            arena.run(command, lambda start: settings_from(argv, start), names_k(argv), console)
        elif isinstance(command, Evaluate):
            evaluate.run(command, console)
        elif isinstance(command, Export):
            output.export(command, console)
        else:
            regroup.run(command, console)


def parse(argv: list[str], start_from: str | None = None) -> AnyCommand:
    """The command in ``argv``. A preset moves the defaults, so it is looked up before the flags are read;
    ``start_from`` is one to take in place of that which the flags name."""
    default: Any = tyro.MISSING
    words = [part for word in argv for part in word.split("=", 1)]
    bench = BenchSpeed if "speed" in argv[1:] else BenchData
    if argv[:1] in (["fit"], ["bench"]):
        if {"--epochs", "--minutes"} <= set(words):
            raise InputError("--epochs and --minutes: expected one of them; minutes decide on the number of epochs.")
        needs_k = argv[0] == "fit" and "--resume" not in words
        kind: type[Any] = SpeedSettings if argv[0] == "bench" and bench is BenchSpeed else FitSettings
        settings = kind() if needs_k else kind(n_clusters=Settings.n_clusters)
        named = [name for name in get_args(Preset) if ("--preset", name) in itertools.pairwise(words)]
        for name in [start_from] if start_from else named:
            settings = dataclasses.replace(settings, **preset(name))
        default = Fit(settings=settings) if argv[0] == "fit" else bench(tyro.MISSING, settings=settings)
    return tyro.cli(
        commands(bench),
        args=argv,
        default=default,
        prog="semclust",
        description="Group unlabelled images by meaning.",
    )


def settings_from(argv: list[str], start_from: str) -> FitSettings:
    """The settings of a preset with the flags in ``argv`` over it."""
    command = parse(argv, start_from)
    assert isinstance(command, BenchData)
    return command.settings


def names_k(argv: list[str]) -> bool:
    return any(word.split("=")[0] in ("-k", "--n-clusters") for word in argv)
