"""``semclust evaluate``: a run's clusters against labels."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from tyro.conf import arg

from semclust.errors import InputError, plural

if TYPE_CHECKING:
    import numpy as np
    from rich.console import Console

    from semclust.run_folder import RunFolder


@dataclass
class Evaluate:
    """Compare a run's clusters with labels: ACC, NMI, ARI and the confusion table."""

    run: Annotated[Path, arg(metavar="RUN"), tyro.conf.Positional]
    """A finished run folder of `semclust fit`."""
    labels: Annotated[str | None, arg(metavar="LABELS")] = None
    """A CSV (columns path,label), a .npy or .npz in the order of assignments.csv, or "folders" (the
    outermost folder of each image). By default the labels that the data itself holds (digits, a .npz, tar shards
    with .cls, a benchmark)."""


def run(command: Evaluate, console: "Console") -> None:
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
    run.read_embeddings(len(names))  # which tell whether the table is whole
    labels = read_labels(command.labels, names) if command.labels else labels_of(run, names)
    console.print(metrics.in_words(metrics.evaluate(clusters, labels)))
    table = Table(title="images of each class in each cluster", title_justify="left")
    table.add_column("cluster", justify="right")
    for name in np.unique(labels):
        table.add_column(escape(printable(str(name))), justify="right")
    for cluster, row in zip(np.unique(clusters), metrics.contingency(clusters, labels), strict=True):
        table.add_row(escape(printable(groups.title(int(cluster)))), *(f"{n:,}" if n else "." for n in row))
    console.print(table)


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
        raise InputError(f"{data!r} holds no labels; say --labels FILE.csv (path,label), or --labels folders.")
    labels = source.labels
    if source.stamp or source.folder:  # some of the images may have been skipped
        rows = {name: row for row, name in enumerate(source.names)}
        labels = labels[[rows[name] for name in names if name in rows]]
    if len(labels) != len(names):
        raise InputError(
            f"{data!r} holds {plural(len(labels), 'label')}, but the run has {plural(len(names), 'image')}: it has "
            "changed since. Restore it, or say --labels labels.csv."
        )
    return labels
