"""``semclust export`` and ``semclust report``: what a finished run holds, in other forms."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from tyro.conf import arg

from semclust.errors import InputError, plural

if TYPE_CHECKING:
    from rich.console import Console


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
        said = f"{plural(sizes.sum(), 'row')} written to {out}"
    console.print(printable(said), markup=False, highlight=False, soft_wrap=True)


def report(command: Report, console: "Console") -> None:
    from semclust.display import printable
    from semclust.report import write_report

    with console.status("writing the report"):
        path = write_report(command.run, command.out)
    console.print(printable(str(path)), markup=False, highlight=False, soft_wrap=True)
