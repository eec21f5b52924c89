"""What the label-free score is worth: its correlation with ACC, and the ACC lost by choosing epoch and seed by it.

python benchmarks/label_free.py bench/digits bench/fashion-mnist    the results of `semclust bench`
python benchmarks/label_free.py runs                                run folders that were fitted beside labels

Runs of one method on one data set, which differ in their seeds, are judged together: semclust bench names their files
METHOD-seedN.json, semclust fit their folders NAME, NAME-2, ...  --out FILE keeps the figures as JSON.
"""

import argparse
import re
from collections.abc import Collection
from pathlib import Path

from rich.console import Console
from rich.table import Table

from semclust.arena.label_free import Rows, judge_score, read_rows
from semclust.storage import write_json

GOAL = 0.01  # ACC that choosing by score may cost


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("folders", nargs="+", type=Path)
    arguments.add_argument("--out", type=Path)
    asked = arguments.parse_args()
    groups: dict[str, list[Rows]] = {}
    for folder in asked.folders:
        found = read_rows(folder)
        for name, rows in found.items():
            groups.setdefault(group_of(name, found), []).append(rows)
    if not groups:
        arguments.error("no run there has both a label-free score and an ACC")
    judged = {name: judge_score(runs) for name, runs in sorted(groups.items())}
    if len(groups) > 1:
        judged["all"] = {
            **judge_score([rows for runs in groups.values() for rows in runs]),
            "loss_by_seed_at_the_last_epoch": max(one["loss_by_seed_at_the_last_epoch"] for one in judged.values()),
            "loss_by_epoch_and_seed": max(one["loss_by_epoch_and_seed"] for one in judged.values()),
        }  # seeds are chosen within a group: the largest loss of any
    show(judged)
    if asked.out:
        write_json(asked.out, judged)


def group_of(name: str, names: Collection[str]) -> str:
    """Of a run's path: data set and method, without the seed. ``names``: of all runs; NAME-2 is another run of NAME
    only where there is a NAME."""
    numbered = re.fullmatch(r"(.*)-\d+", name)
    if numbered and numbered[1] in names:
        name = numbered[1]
    parts = [part for part in Path(name).parts if part != "runs"]
    return re.sub(r"-seed\d+\.json$", "", "/".join(parts[-2:]))


def show(judged: dict[str, dict]) -> None:
    table = Table(title="the label-free score against ACC", title_justify="left")
    table.add_column("runs of", overflow="fold")
    for heading in ("n", "epochs", "r epochs", "r runs", "by epoch", "by seed", "by both"):
        table.add_column(heading, justify="right")
    for name, one in judged.items():
        correlations = [one["correlation_over_epochs"], one["correlation_over_runs"]]
        losses = [one["loss_by_epoch"]["mean"], one["loss_by_seed_at_the_last_epoch"], one["loss_by_epoch_and_seed"]]
        table.add_row(
            name,
            str(one["runs"]),
            str(one["epochs"]),
            *("-" if value is None else f"{value:.2f}" for value in correlations),
            *(f"[{'red' if loss > GOAL else 'green'}]{loss:.3f}[/]" for loss in losses),
        )
    console = Console()
    console.print(table)
    console.print("r: rank correlation of score and ACC over all epochs, and over the last epochs of the runs")
    console.print(f"by: ACC that is lost to the best by choosing epoch, seed or both by score; over {GOAL} in red")


if __name__ == "__main__":
    main()
