"""From finished runs to a table: means and spreads over the seeds, as JSON, as Markdown and on the terminal."""

import statistics
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from semclust.arena.runs import EPOCHS
from semclust.errors import plural
from semclust.metrics import FIGURES

TITLES = {
    "last": "last",
    "best": "best by labels",
    "label_free": "label-free",
    "label_free_seed": "label-free seed",
}
EXPLAINED = (
    "Mean and standard deviation over the seeds. Labels are used for these figures alone: no run sees them, and only "
    "the best epoch is chosen by them. Label-free is the epoch of the highest score, and the seed the one whose epoch "
    "scores highest. Minutes are those of one run, GiB the peak of its memory."
)


def summarise(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each method, in the order in which they come."""
    by_method: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        by_method.setdefault(result["method"], []).append(result)
    return [summarise_method(method, of_seeds) for method, of_seeds in by_method.items()]


def summarise_method(method: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    row: dict[str, Any] = {"method": method, "n": len(runs)}
    row |= {epoch: of_epochs([run[epoch] for run in runs]) for epoch in EPOCHS}
    chosen = [run["label_free"] for run in runs if run["label_free"]]
    highest = max(chosen, key=lambda figures: figures["score"], default=None)
    row["label_free_seed"] = of_epochs([highest]) if len(chosen) > 1 else None
    row["minutes"] = mean_and_spread([run["minutes"] for run in runs])
    peaks = [run["peak_gib"] for run in runs if run["peak_gib"] is not None]
    row["peak_gib"] = max(peaks, default=None)
    row["epochs"] = sorted({run["epochs"] for run in runs})
    row["machines"] = sorted({in_words(run["machine"]) for run in runs})
    return row


def of_epochs(figures: list[dict[str, Any] | None]) -> dict[str, list[float]] | None:
    """ACC, NMI and ARI of one epoch of each run: mean and spread; None where there is no such epoch."""
    there = [one for one in figures if one is not None]
    return {name: mean_and_spread([one[name] for one in there]) for name in FIGURES} if there else None


def mean_and_spread(values: list[float]) -> list[float]:
    return [statistics.fmean(values), statistics.pstdev(values)]


def in_words(machine: dict[str, Any]) -> str:
    return (
        f"{machine['device']}, {plural(machine['threads'], 'thread')}; semclust {machine['semclust']}, "
        f"torch {machine['torch']}, Python {machine['python']}"
    )


HEADINGS = ("method, epoch", "ACC", "NMI", "ARI", "min", "GiB")


def lines_of(row: dict[str, Any]) -> list[list[str]]:
    """A line for the method, with its time and memory, and one for each epoch; one in all where there are none."""

    def figures(epoch: str) -> list[str]:
        if row["n"] == 1 or epoch == "label_free_seed":
            return [f"{row[epoch][name][0]:.3f}" for name in FIGURES]
        means_and_spreads = (row[epoch][name] for name in FIGURES)
        return [f"{mean:.3f} ±{f'{spread:.3f}'.removeprefix('0')}" for mean, spread in means_and_spreads]

    memory = "-" if row["peak_gib"] is None else f"{row['peak_gib']:.1f}"
    costs = [f"{row['minutes'][0]:.1f}", memory]
    if row["epochs"] == [0]:
        return [[row["method"], *figures("last"), *costs]]
    there = [epoch for epoch in TITLES if row[epoch]]
    return [[row["method"], "", "", "", *costs], *([f"- {TITLES[epoch]}", *figures(epoch), "", ""] for epoch in there)]


def markdown(title: str, rows: list[dict[str, Any]]) -> str:
    lines = [f"## {title}", "", f"| {' | '.join(HEADINGS)} |", "|---|--:|--:|--:|--:|--:|"]
    lines += [f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for row in rows for line in lines_of(row)]
    lines += ["", EXPLAINED, "", *(f"- {note}" for note in notes(rows))]
    return "\n".join(lines) + "\n"


def notes(rows: list[dict[str, Any]]) -> list[str]:
    """What the runs were measured on and how many epochs they had."""
    machines = sorted({machine for row in rows for machine in row["machines"]})
    trained = [row for row in rows if row["epochs"] != [0]]
    numbers = {n for row in trained for n in row["epochs"]}
    if len(numbers) <= 1:
        return machines + [plural(n, "epoch") for n in numbers]
    by_method = (f"{row['method']} {' to '.join(map(str, ends(row['epochs'])))}" for row in trained)
    return [*machines, f"epochs: {'; '.join(by_method)}"]


def ends(numbers: list[int]) -> list[int]:
    """The first and the last, once where they are the same."""
    return sorted({numbers[0], numbers[-1]})


def show(console: Console, title: str, rows: list[dict[str, Any]]) -> None:
    table = Table(title=escape(title), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in HEADINGS:
        words = heading == HEADINGS[0]
        table.add_column(heading, justify="left" if words else "right", no_wrap=not words)
    for row in rows:
        method, *of_epochs = lines_of(row)
        table.add_row(f"[bold]{escape(method[0])}[/]", *method[1:])
        for line in of_epochs:
            table.add_row(*line)
    console.print(table)
    for note in notes(rows):
        console.print(note, markup=False, highlight=False)
