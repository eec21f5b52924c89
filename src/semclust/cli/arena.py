"""``semclust bench NAME``: semclust beside other methods, and without its parts, on labelled data."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from tyro.conf import OmitArgPrefixes, arg

from semclust.arena.methods import COMPARED, METHODS, Method, Name, ablation
from semclust.cli.common import INTERRUPTED, FitSettings, Preset, end, reading
from semclust.config import Settings, check, values
from semclust.errors import InputError

if TYPE_CHECKING:
    import numpy as np
    from rich.console import Console

    from semclust.arena.runs import Run
    from semclust.data import Images
    from semclust.fitting import Watcher


@dataclass
class BenchData:
    """Compare semclust with other methods on labelled data, or with itself without its parts (--ablation). Every
    finished run is kept and not run again. Without -k there are as many clusters as classes. How fast training is:
    `semclust bench speed`."""

    data: Annotated[str, arg(metavar="NAME"), tyro.conf.Positional]
    """Labelled data: digits, fashion-mnist, cifar10:PATH or any other benchmark, a .npz with labels, a folder with one
    for each class; or "speed"."""
    seeds: int = 3
    """Runs of each method, with seeds from --random-state on."""
    methods: tuple[Name, ...] = COMPARED
    """What to compare. All but the presets of semclust have the backbone and the epochs of --preset."""
    ablation: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """The method of --preset without each of its parts, in place of other methods."""
    labels: Annotated[str | None, arg(metavar="LABELS")] = None
    """Labels, where the data holds none: a CSV (path,label), a .npy, or "folders"."""
    preset: Preset = "default"
    """The settings that baselines and ablations start from; other flags change single ones, of all methods."""
    out: Annotated[Path | None, arg(metavar="DIR")] = None
    """Folder for tables and runs. By default bench/NAME."""
    settings: OmitArgPrefixes[FitSettings] = dataclasses.field(default_factory=FitSettings)


def run(
    command: BenchData,
    settings_of: Callable[[str], FitSettings],
    k_given: bool,
    console: "Console",
    watcher: "Callable[[str, np.ndarray], Watcher] | None" = None,
) -> None:
    """``settings_of``: a preset with the flags of the command over it. ``k_given``: whether -k is among them.
    ``watcher``: makes what watches a run, of its title and the labels; by default a line that tells how far it is."""
    from semclust.arena import tables
    from semclust.arena.runs import carry_out
    from semclust.errors import plural
    from semclust.run_folder import fingerprint

    if command.seeds < 1:
        raise InputError(f"--seeds {command.seeds}: expected at least 1.")
    if command.ablation and command.methods != COMPARED:
        raise InputError("--ablation and --methods: expected one of them; the rows of an ablation are its own.")
    methods: dict[str, Method] = (
        ablation(command.preset, Settings(**values(settings_of(command.preset))))
        if command.ablation
        else {name: METHODS[name] for name in command.methods}
    )
    images, labels = open_labelled(command, console)
    n_classes = len(set(labels.tolist()))
    runs = planned(command, methods, settings_of, None if k_given else n_classes, images.pixels)
    folder = command.out or Path("bench") / images.source

    def tell(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    H, W, c = images.pixels.shape[1:]
    kind = f"{len(images.pixels):,} images of {H} x {W} x {c}, {n_classes} classes"
    title = f"{images.source}: {kind}; {plural(command.seeds, 'seed')}"
    tell(title)
    data = fingerprint(images.pixels, [*images.names, *map(str, labels)])
    try:
        with console.status("") as status:
            line = status_line(status.update)
            watch = line if watcher is None else lambda title: watcher(title, labels)
            results = carry_out(runs, images, data, folder / "runs", tell, watch)
    except KeyboardInterrupt:
        end("\nInterrupted. The same command goes on after the last finished run.", INTERRUPTED)
    rows = tables.summarise(results)
    tables.show(console, title, rows)
    written = write_tables(folder, "ablation" if command.ablation else "table", title, rows)
    tell(f"written to {folder}: {', '.join(written)}, runs/")


def write_tables(folder: Path, name: str, title: str, rows: list[dict[str, Any]]) -> list[str]:
    """The names of the files that are written."""
    from semclust.arena.bars import bar_chart
    from semclust.arena.tables import markdown
    from semclust.storage import write_json, write_whole

    write_json(folder / f"{name}.json", {"title": title, "rows": rows})
    write_whole(folder / f"{name}.md", markdown(title, rows).encode())
    bars = [(row["method"], *row["last"]["acc"]) for row in rows]
    write_whole(folder / f"{name}.svg", bar_chart(f"ACC of the last epoch. {title}", bars).encode())
    return [f"{name}.{suffix}" for suffix in ("json", "md", "svg")]


def open_labelled(command: BenchData, console: "Console") -> tuple["Images", "np.ndarray"]:
    """The images and their labels: those asked for, those of the data, or the folders that the images lie in."""
    from semclust.data import open_images
    from semclust.truth import read_labels

    with reading(console) as on_image:
        images = open_images(command.data, size=command.settings.image_size, on_image=on_image)
    if command.labels:
        images.labels = read_labels(command.labels, images.names)
    elif images.labels is None and images.folder is not None:
        images.labels = read_labels("folders", images.names)
    if images.labels is None:
        raise InputError(f"{command.data!r} holds no labels to compare with; say --labels FILE.csv (path,label).")
    return images, images.labels


def planned(
    command: BenchData,
    methods: dict[str, Method],
    settings_of: Callable[[str], FitSettings],
    n_clusters: int | None,
    pixels: "np.ndarray",
) -> list["Run"]:
    """Every method with every seed. ``n_clusters``: the number of classes, as in the paper, where no -k is given."""
    from semclust.arena.runs import Run
    from semclust.devices import choose_device
    from semclust.plan import decided

    runs = []
    for name, method in methods.items():
        start = Settings(**values(settings_of(method.preset or command.preset)))
        changes: dict[str, Any] = dict(method.changes)
        if n_clusters is not None:
            changes["n_clusters"] = n_clusters
        settings = dataclasses.replace(start, **changes)
        check(settings, as_flags=True)
        # With the number of epochs: another device may have another, and the runs of both are not to be mixed.
        settings = decided(settings, pixels, choose_device(settings.device))
        for seed in range(command.seeds):
            number = (start.random_state or 0) + seed
            seeded = dataclasses.replace(settings, random_state=number)
            runs.append(Run(f"{name}-seed{number}", method, seeded))
    return runs


def status_line(update: Callable[[str], None]) -> Callable[[str], "Watcher"]:
    """Makes watchers that show a run on one line."""
    from rich.markup import escape

    from semclust.fitting import Watcher

    class Line(Watcher):
        def __init__(self, title: str):
            self.title, self.acc = title, ""
            update(escape(title))

        def begin(self, training: Any) -> None:
            self.epoch_now, self.epochs = training.epoch + 1, training.settings.n_epochs
            self.met, self.n_images = 0, training.n_images

        def step(self, n_images: int) -> None:
            self.met += n_images
            share = f"{min(1.0, self.met / self.n_images):.0%}"
            update(escape(f"{self.title}: epoch {self.epoch_now} of {self.epochs}, {share}{self.acc}"))

        def epoch(self, row: dict[str, Any]) -> None:
            self.acc = f"; ACC {row['acc']:.3f}" if row["acc"] == row["acc"] else ""
            self.epoch_now, self.met = row["epoch"] + 1, 0

    return Line
