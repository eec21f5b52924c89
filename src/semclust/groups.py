"""The clusters after the fit: which were merged, and what they are called."""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from semclust.storage import read_json


@dataclass
class Groups:
    ids: list[int]  # of the clusters that remain, in order
    of: np.ndarray  # original cluster -> the one that remains
    names: dict[int, str] = field(default_factory=dict)

    @classmethod
    def read(cls, model_folder: Path) -> "Groups":
        C = int(read_json(model_folder / "config.json")["settings"]["n_clusters"])
        return cls(list(range(C)), np.arange(C))
