"""Clusters after the fit: merged, renamed, reduced in number, and all of it undone again.

The model never changes. Beside it lies groups.json, a list of steps, and what a user sees is what these steps make of
the C clusters of the fit. Ids are stable: of merged clusters the smallest id remains, which was the largest at the time
of the fit, the others disappear, and none is renumbered. So a command means the same a minute later.

Shapes: N images, C clusters of the fit, R of them that remain.
"""

import hashlib
import json
import operator
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from semclust.errors import DamagedFileError, InputError
from semclust.storage import read_json, write_json

FORMAT = 1
FILE = "groups.json"
FEWEST = 2  # below that there is no runner-up, and nothing is told apart
CHUNK = 8192  # images at once, so that what is mapped from a file stays there

Cluster = int | str  # an id, or a name that was given


class Groups:
    """The steps that were taken after a fit of ``n_clusters``, and what they make of its clusters."""

    def __init__(self, n_clusters: int, steps: Sequence[dict[str, Any]] = ()):
        self.n_clusters = n_clusters
        self._start(steps)

    def _start(self, steps: Sequence[dict[str, Any]]) -> None:
        self.of = np.arange(self.n_clusters)  # the remaining id of each of the C clusters
        self.names: dict[int, str] = {}  # of clusters that were given one
        self.steps: list[dict[str, Any]] = []
        for step in steps:
            self._take(step)

    def _take(self, step: dict[str, Any]) -> None:
        match step:
            case {"merge": [*clusters]}:
                self._join(clusters)
            case {"reduce": [*merges]}:
                for clusters in merges:
                    self._join(clusters)
            case {"rename": [cluster, name]}:
                self._name(cluster, name)
            case _:
                raise InputError(f"{step!r} is no step; expected merge, rename or reduce.")
        self.steps.append(step)

    @property
    def ids(self) -> list[int]:
        """The clusters that remain, in order."""
        return np.unique(self.of).tolist()

    @property
    def fingerprint(self) -> str:
        """The same for the same clusters with the same names, and for no others."""
        return hashlib.sha256(json.dumps([self.of.tolist(), sorted(self.names.items())]).encode()).hexdigest()

    def title(self, cluster: int) -> str:
        """Id and, where there is one, name."""
        return f"{cluster} {self.names[cluster]}" if cluster in self.names else str(cluster)

    def find(self, cluster: Cluster) -> int:
        """The id of a cluster that is given by id or by name."""
        if isinstance(cluster, str):
            found = next((i for i, name in self.names.items() if name == cluster.strip()), None)
            if found is not None:
                return found
        try:
            asked = int(cluster) if isinstance(cluster, str) else operator.index(cluster)
        except (TypeError, ValueError):
            asked = -1
        if asked in self.ids:
            return asked
        why = f" (it was merged into {self.title(int(self.of[asked]))})" if 0 <= asked < self.n_clusters else ""
        raise InputError(
            f"There is no cluster {cluster!r}{why}; expected one of {', '.join(map(self.title, self.ids))}."
        )

    def apply(self, p: np.ndarray) -> np.ndarray:
        """Probabilities of the clusters of the fit (N x C) to those of the clusters in ``ids`` (N x R)."""
        if len(self.ids) == self.n_clusters:
            return p
        column = {cluster: i for i, cluster in enumerate(self.ids)}
        merged = np.array(p[:, self.ids])
        for cluster, into in enumerate(self.of.tolist()):
            if cluster != into:
                merged[:, column[into]] += p[:, cluster]
        return np.minimum(merged, 1)  # rounding can carry a sum past it

    def sizes(self, p: np.ndarray) -> np.ndarray:
        """How many images each cluster has (C, by id), from the probabilities p (N x R) of those that remain."""
        return np.bincount(np.array(self.ids)[p.argmax(1)], minlength=self.n_clusters)

    # ---- steps -----------------------------------------------------------------------------------

    def merge(self, clusters: Sequence[Cluster]) -> int:
        """Make one cluster of several; returns its id, the smallest of theirs."""
        ids = sorted({self.find(cluster) for cluster in clusters})
        self._take({"merge": ids})
        return ids[0]

    def rename(self, cluster: Cluster, name: str) -> int:
        """Give a cluster a name; returns its id."""
        found = self.find(cluster)
        self._take({"rename": [found, check_name(name)]})
        return found

    def reduce(self, to: int, p: np.ndarray) -> list[list[int]]:
        """Merge the closest two, again and again, until ``to`` clusters are left; all this is one step.

        p: probabilities of the clusters of the fit for its images (N x C). How close two clusters are is told by
        ``_closeness``; empty ones go first. Returns the merged pairs of ids.
        """
        ids = self.ids
        if len(ids) <= FEWEST:
            raise InputError(f"to={to!r}: there are only {len(ids)} clusters left, and {FEWEST} always remain.")
        if isinstance(to, bool) or not isinstance(to, int | np.integer) or not FEWEST <= to < len(ids):
            raise InputError(
                f"to={to!r}: expected a whole number from {FEWEST} to {len(ids) - 1}, since there are {len(ids)} now."
            )
        shared, total, empty = _shared(self.apply(p))
        merges = []
        while len(ids) > to:
            close = _closeness(shared, total)
            if empty.any():
                close[~(empty[:, None] | empty[None, :])] = -np.inf
            a, b = divmod(int(close.argmax()), len(ids))
            merges.append([ids[a], ids[b]])
            shared[a] += shared[b]
            shared[:, a] += shared[:, b]
            total[a] += total[b]
            empty[a] &= empty[b]
            shared = np.delete(np.delete(shared, b, 0), b, 1)
            total, empty, ids = np.delete(total, b), np.delete(empty, b), ids[:b] + ids[b + 1 :]
        self._take({"reduce": merges})
        return merges

    def undo(self) -> dict[str, Any]:
        """Take the last step back; returns it."""
        if not self.steps:
            raise InputError("There is nothing to undo: the clusters are those of the fit.")
        *kept, last = self.steps
        self._start(kept)
        return last

    def _join(self, clusters: Sequence[Cluster]) -> None:
        ids = sorted({self.find(cluster) for cluster in clusters})
        if len(ids) < 2:
            named = f"only cluster {ids[0]}" if ids else "no cluster"
            raise InputError(f"There is {named} to merge; expected two clusters or more, by id or name.")
        if len(self.ids) - len(ids) + 1 < FEWEST:
            raise InputError(
                f"Merging {', '.join(map(str, ids))} would leave one cluster with everything in it; "
                f"at least {FEWEST} must remain."
            )
        name = next((self.names[i] for i in ids if i in self.names), None)
        for i in ids:
            self.names.pop(i, None)
        if name is not None:
            self.names[ids[0]] = name
        self.of[np.isin(self.of, ids)] = ids[0]

    def _name(self, cluster: Cluster, name: str) -> None:
        found, name = self.find(cluster), check_name(name)
        other = next((i for i, given in self.names.items() if given == name and i != found), None)
        if other is not None:
            raise InputError(
                f"Cluster {other} has the name {name!r} already; choose another, or merge {other} and {found}."
            )
        self.names[found] = name

    # ---- the file --------------------------------------------------------------------------------

    @classmethod
    def read(cls, folder: Path) -> "Groups":
        """The groups of the model in ``folder``; without a groups.json its clusters are those of the fit."""
        about = read_json(folder / "config.json")
        try:
            n_clusters = operator.index(about["settings"]["n_clusters"])
        except (KeyError, TypeError) as error:
            raise DamagedFileError(
                f"{folder / 'config.json'} does not tell the number of clusters ({error!r}). Fit again, or restore it."
            ) from error
        path = folder / FILE
        if not path.exists():
            return cls(n_clusters)
        stored = read_json(path)
        next_step = "Restore it, or delete it to return to the clusters of the fit."
        if stored.get("format") != FORMAT or stored.get("n_clusters") != n_clusters:
            raise DamagedFileError(
                f"{path} is for {stored.get('n_clusters')!r} clusters in format {stored.get('format')!r}; "
                f"expected {n_clusters} and {FORMAT}. {next_step}"
            )
        try:
            return cls(n_clusters, stored["steps"])
        except (KeyError, TypeError, ValueError) as error:  # ValueError: also what the steps themselves raise
            raise DamagedFileError(f"{path} is damaged ({error}). {next_step}") from error

    def write(self, folder: Path) -> None:
        """Write groups.json beside the model in ``folder``; without any step there is none."""
        if self.steps:
            write_json(folder / FILE, {"format": FORMAT, "n_clusters": self.n_clusters, "steps": self.steps})
        else:
            (folder / FILE).unlink(missing_ok=True)


def check_name(name: str) -> str:
    """A name for a cluster: some text on one line that cannot be mistaken for an id."""
    if not isinstance(name, str) or not name.strip():
        raise InputError(f"{name!r} is no name for a cluster; expected some text.")
    name = name.strip()
    if any(unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp") for character in name):
        raise InputError(f"The name {name!r} has control characters or is not Unicode; expected text on one line.")
    if name.lstrip("+-").isdecimal():
        raise InputError(f"The name {name!r} is a number, which stands for an id; expected a word.")
    return name


def _shared(p: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of probabilities p (N x R): the sum of the products for each two clusters (R x R), the sum for each (R), and
    whether no image is in it (R)."""
    R = p.shape[1]
    shared, total, sizes = np.zeros((R, R)), np.zeros(R), np.zeros(R)
    for start in range(0, len(p), CHUNK):
        part = np.asarray(p[start : start + CHUNK], np.float64)
        shared += part.T @ part
        total += part.sum(0)
        sizes += np.bincount(part.argmax(1), minlength=R)
    return shared, total, sizes == 0


def _closeness(shared: np.ndarray, total: np.ndarray) -> np.ndarray:
    """How close each two clusters are: how many images could be in either, beside as many as would be by chance at
    their sizes, so that a cluster does not become the closest of all as it grows. In the upper triangle (R x R); -inf
    elsewhere.

    shared: sums of p_i p_j over the images (R x R); total: sums of p_i (R). Clusters that split what is one thing share
    many images. Their mean embeddings tell that less well, since embeddings keep single images apart, also within a
    cluster."""
    by_chance = (total[:, None] * total[None, :]).clip(1e-12)
    return np.where(np.triu(np.ones(shared.shape, bool), 1), shared / by_chance, -np.inf)
