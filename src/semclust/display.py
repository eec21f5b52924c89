"""What a person sees while a fit runs and when it ends: a live bar on a terminal, plain lines elsewhere."""

import time
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from semclust.errors import plural
from semclust.fitting import Watcher
from semclust.groups import Groups
from semclust.metrics import in_words
from semclust.plan import why_a_try
from semclust.train import Training

EXAMPLES = 3
ESTIMATE_AFTER, LONG = 10, 20 * 60  # seconds: when to tell that a fit on a CPU will take long, and what is long
VIEWS = {"natural": "views as of photographs", "strokes": "views as of drawings", "none": "no views"}  # by augment
ROOM_FOR_FIGURES = 125  # columns; on a narrower terminal the bar shows the loss and the time left alone


class Display(Watcher):
    """Shows a fit on ``console``."""

    def __init__(self, console: Console):
        self.console = console
        self.progress: Progress | None = None

    def timing(self, minutes: float) -> None:
        self.console.print(f"timing a few steps of each phase, to plan for {plural_minutes(minutes)}")

    def begin(self, training: Training) -> None:
        self.close()
        settings, (H, W, c) = training.settings, training.image_shape
        n_weights = sum(p.numel() for p in training.learner.encoder.parameters())
        network = training.learner.encoder.backbone
        backbone = getattr(network, "name", type(network).__name__)
        self.console.print(
            f"{training.n_images:,} images of {H} x {W} x {c} into {settings.n_clusters} clusters "
            f"on {training.device}: {backbone}, {n_weights / 1e6:.1f} M weights, "
            f"{plural(settings.n_epochs, 'epoch')} of batches of {training.batch_size}, "
            f"{VIEWS[settings.augment] if isinstance(settings.augment, str) else 'views of your own'}"
            f"{', of which the network sees the edges' if settings.sees == 'edges' else ''}"
        )
        if why := why_a_try(settings, training.n_images):
            self.console.print(f"a try only: {why}", soft_wrap=True)
        if training.device.type != "cpu":
            self.console.print(f"{training.images}, {training.engine}")
        if training.epoch == settings.n_epochs:
            self.console.print(f"this run is done, after {plural(settings.n_epochs, 'epoch')}")
        elif training.epoch or training.step:
            within = f" and {training.step} of {len(training.losses)} steps" if training.step else ""
            self.console.print(f"resuming after epoch {training.epoch}{within}")
        self.began, self.images_done, self.estimated = time.monotonic(), 0, training.device.type != "cpu"
        self.estimated |= settings.minutes is not None  # how long it takes is what was asked for
        self.image_size = min(H, W)
        done = training.step * training.n_images // max(1, len(training.losses))  # of the next epoch
        self.total = (settings.n_epochs - training.epoch) * training.n_images - done
        self.epochs = settings.n_epochs
        self.narrow = self.console.width < ROOM_FOR_FIGURES
        if self.console.is_terminal and self.total:
            columns = [TextColumn("{task.description}"), BarColumn(bar_width=20)]
            if not self.narrow:
                columns += [TextColumn("{task.fields[speed]}"), TimeElapsedColumn()]
            columns += [TextColumn("left"), TimeRemainingColumn()]
            self.progress = Progress(*columns, console=self.console)
            self.bar = self.progress.add_task(f"epoch {training.epoch + 1}/{self.epochs}", total=self.total, speed="")
            self.progress.start()

    def step(self, n_images: int) -> None:
        self.images_done += n_images
        if not self.estimated and time.monotonic() - self.began >= ESTIMATE_AFTER:
            self.estimated = True
            left = (self.total - self.images_done) / self._speed()
            if left > LONG:
                self.console.print(
                    f"this will take about {clock(left)} at {self._speed():,.0f} images/s; --minutes {LONG // 60} "
                    f"plans a run that ends by then, a smaller --image-size (now {self.image_size} px) is faster, "
                    "and a GPU much faster",
                    soft_wrap=True,
                )
        if self.progress:
            self.progress.update(self.bar, advance=n_images, speed=f"{self._speed():,.0f} images/s")

    def epoch(self, row: dict[str, Any]) -> None:
        if self.progress:
            following = min(row["epoch"] + 1, self.epochs)
            shown = figures({name: row[name] for name in ("learns", "loss")}) if self.narrow else figures(row)
            self.progress.update(self.bar, description=f"epoch {following}/{self.epochs}  {shown}")
            return
        left = (self.total - self.images_done) / self._speed()
        self.console.print(
            f"epoch {row['epoch']}/{self.epochs}  {figures(row)}  {self._speed():,.0f} images/s  {clock(left)} left",
            soft_wrap=True,
        )

    def warn(self, message: str) -> None:
        self.console.print(f"[yellow]warning:[/] {escape(message)}", soft_wrap=True)

    def close(self) -> None:
        if self.progress:
            self.progress.stop()

    def _speed(self) -> float:
        """Images a second; 1 before the first: an epoch whose steps were all done before has only its labels left."""
        return max(1, self.images_done) / max(1e-9, time.monotonic() - self.began)


def figures(row: dict[str, Any]) -> str:
    """What an epoch learned, and the few figures of it that fit on a line."""
    shown = {"loss": "loss", "churn": "churn", "score": "score", "acc": "ACC"}
    told = [f"{title} {row[name]:.3f}" for name, title in shown.items() if name in row and row[name] == row[name]]
    return "  ".join([row["learns"], *told])


def plural_minutes(minutes: float) -> str:
    return "1 minute" if minutes == 1 else f"{minutes:g} minutes"


def clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"


def show_clusters(console: Console, summary: dict[str, Any], names: list[str], labels: Any, confidence: Any) -> None:
    """The table of clusters, with the names of the most certain images, and the figures below it."""
    table = Table(
        title=f"{summary['n_images']:,} images in {plural(len(summary['clusters']), 'cluster')}", title_justify="left"
    )
    for title in ("cluster", "images", "share", "confidence"):
        table.add_column(title, justify="right", no_wrap=True, min_width=len(title))
    table.add_column("most certain images", overflow="ellipsis", no_wrap=True, ratio=1)
    for cluster in summary["clusters"]:
        members = (labels == cluster["cluster"]).nonzero()[0]
        surest = members[(-confidence[members]).argsort(kind="stable")][:EXAMPLES]
        sure = "-" if cluster["confidence"] is None else f"{cluster['confidence']:.3f}"
        table.add_row(
            str(cluster["cluster"]),
            f"{cluster['size']:,}",
            f"{cluster['size'] / summary['n_images']:.1%}",
            sure,
            escape(", ".join(printable(names[i]) for i in surest)),
        )
    print_table(console, table)
    if "acc" in summary:
        console.print(f"{in_words(summary)}  (the fit never saw the labels)")
    console.print(f"label-free score {summary['score']:.4f}")


def show_groups(console: Console, groups: Groups, sizes: Any) -> None:
    """The clusters that remain, with their names and sizes (by id)."""
    table = Table(title=f"{plural(sizes.sum(), 'image')} in {plural(len(groups.ids), 'cluster')}", title_justify="left")
    for title in ("cluster", "images", "share"):
        table.add_column(title, justify="right", no_wrap=True, min_width=len(title))
    table.add_column("name", overflow="ellipsis", no_wrap=True, ratio=1)
    for cluster in groups.ids:
        name = escape(printable(groups.names.get(cluster, "")))
        table.add_row(str(cluster), f"{sizes[cluster]:,}", f"{sizes[cluster] / sizes.sum():.1%}", name)
    print_table(console, table)


def print_table(console: Console, table: Table) -> None:
    """A table whose last column, of ratio 1, gives way where the terminal is narrow; the others keep their width."""
    table.width = min(console.width, console.measure(table, options=console.options.update(width=10_000)).maximum)
    console.print(table)


def printable(name: str) -> str:
    """A file name as one line of printable text, whatever bytes it is made of."""
    return name if name.isprintable() else name.encode("unicode_escape").decode()
