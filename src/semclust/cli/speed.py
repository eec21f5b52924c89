"""``semclust bench speed``: how fast training runs on this machine."""

import dataclasses
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from tyro.conf import OmitArgPrefixes, arg

from semclust.cli.common import FitSettings, Preset
from semclust.config import Settings, check, values

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(kw_only=True)
class SpeedSettings(FitSettings):
    """Every setting of the method, but for how long to fit: that is --epochs-timed here."""

    epochs: tyro.conf.Suppress[tyro.conf.Fixed[int | None]] = None
    minutes: tyro.conf.Suppress[tyro.conf.Fixed[float | None]] = None


@dataclass
class BenchSpeed:
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
    the images streamed; and reckon from all phases what a whole run would take."""
    preset: Preset = "default"
    """The settings to start from; other flags change single ones. quick and best: the default for fewer and for more
    epochs; paper: as published."""
    out: Annotated[Path | None, arg(metavar="JSON")] = None
    """File for the figures; one that exists is never overwritten. By default bench-speed.json, here, or -2, ..."""
    settings: OmitArgPrefixes[SpeedSettings] = dataclasses.field(default_factory=SpeedSettings)


def run(command: BenchSpeed, console: "Console") -> None:
    started = time.perf_counter()  # before torch is imported: that is part of the time to the first step
    from semclust.speed import in_words, measure_speed
    from semclust.storage import check_new_file, free_path, write_json

    settings = Settings(**values(command.settings))
    check(settings, as_flags=True)
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
