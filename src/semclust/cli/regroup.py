"""``semclust merge``, ``rename``, ``reduce`` and ``undo``: change the clusters of a finished run."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from tyro.conf import arg

from semclust.cli.common import own_name

if TYPE_CHECKING:
    from rich.console import Console

    from semclust.groups import Groups
    from semclust.run_folder import RunFolder


@dataclass
class Merge:
    """Make one cluster of several. It keeps the smallest id; no other id changes."""

    run: Annotated[Path, arg(metavar="RUN"), tyro.conf.Positional]
    """A finished run folder of `semclust fit`."""
    clusters: Annotated[tuple[str, ...], arg(metavar="CLUSTER CLUSTER ..."), tyro.conf.Positional]
    """Two or more, by id or name."""


@dataclass
class Rename:
    """Give a cluster a name."""

    run: Annotated[Path, arg(metavar="RUN"), tyro.conf.Positional]
    """A finished run folder of `semclust fit`."""
    cluster: Annotated[str, arg(metavar="CLUSTER"), tyro.conf.Positional]
    """Its id, or the name it has."""
    name: Annotated[str, arg(metavar="NAME"), tyro.conf.Positional]
    """Any text on one line that no other cluster has, and no number."""


@dataclass
class Reduce:
    """Merge the two closest clusters, again and again, until fewer are left."""

    run: Annotated[Path, arg(metavar="RUN"), tyro.conf.Positional]
    """A finished run folder of `semclust fit`."""
    to: int
    """Number of clusters to be left, at least 2."""


@dataclass
class Undo:
    """Take back the last merge, rename or reduce."""

    run: Annotated[Path, arg(metavar="RUN"), tyro.conf.Positional]
    """A finished run folder of `semclust fit`."""


def run(command: Merge | Rename | Reduce | Undo, console: "Console") -> None:
    from semclust.display import printable, show_groups
    from semclust.groups import Groups
    from semclust.report import shows
    from semclust.run_folder import RunFolder

    run = RunFolder.open_finished(command.run)
    groups = Groups.read(run.model)
    said = change(command, groups, run)
    sizes = run.write_groups(groups)
    show_groups(console, groups, sizes)
    undo = f"; to take it back: {own_name()} undo {run.path}" if not isinstance(command, Undo) else ""
    console.print(printable(f"{said}{undo}"), markup=False, highlight=False, soft_wrap=True)
    if (run.path / "report.html").exists() and not shows(run, groups):
        told = f"report.html still shows the clusters as they were; renew it: {own_name()} report {run.path}"
        console.print(printable(told), markup=False, highlight=False, soft_wrap=True)


def change(command: Merge | Rename | Reduce | Undo, groups: "Groups", run: "RunFolder") -> str:
    """Take the step that a command asks for, and tell it in words."""
    if isinstance(command, Merge):
        return f"merged into cluster {groups.title(groups.merge(command.clusters))}"
    if isinstance(command, Rename):
        return f"named cluster {groups.title(groups.rename(command.cluster, command.name))}"
    if isinstance(command, Reduce):
        _, p = run.read_probabilities(groups.n_clusters)
        pairs = ", ".join(f"{b} into {a}" for a, b in groups.reduce(command.to, p))
        return f"merged {pairs}"
    ((kind, _),) = groups.undo().items()
    return f"undone: {kind}; steps left to undo: {len(groups.steps)}"
