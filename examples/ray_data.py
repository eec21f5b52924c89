"""Assign images by a finished model on a Ray cluster: one row for each file, written as Parquet.

python examples/ray_data.py runs/photos s3://bucket/photos clusters/    # or any folder that Ray Data can read

Files are read and decoded where they are assigned; every actor loads the model once. The clusters are those that
`semclust predict` finds. The run folder must be at the same path on every machine, as on a shared disk.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch

from semclust.devices import choose_device
from semclust.errors import InputError
from semclust.predictor import Predictor
from semclust.run_folder import model_folder

IMAGES = ["jpg", "jpeg", "png", "webp", "gif", "tif", "tiff", "bmp"]


class Pictures:
    """Encoded images, as semclust takes them from any data set: by number."""

    def __init__(self, contents: Sequence[bytes]):
        self.contents = contents

    def __len__(self) -> int:
        return len(self.contents)

    def __getitem__(self, i: int) -> bytes:
        return self.contents[i]


class Assign:
    """Files in; for each its cluster and confidence, or why it could not be read (then the cluster is -1)."""

    def __init__(self, run: str):
        torch.set_num_threads(1)  # Ray gives an actor one core unless it is told otherwise
        self.predictor = Predictor.load(model_folder(Path(run)))
        self.device = choose_device("auto")

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, Any]:
        n = len(batch["bytes"])
        cluster, confidence = np.full(n, -1), np.zeros(n, np.float32)
        reason = np.full(n, "", object)
        try:
            for part in self.predictor.stream(Pictures(batch["bytes"])):
                for row, why in part.skipped:
                    reason[int(row)] = why
                if part.names:
                    p, _ = self.predictor(part.pixels, self.device)
                    rows = np.array(part.names, int)
                    cluster[rows] = np.array(self.predictor.groups.ids)[p.argmax(1)]
                    confidence[rows] = p.max(1)
        except InputError:  # told after the last one, where most of these files are damaged: each has its reason
            pass
        return {"path": batch["path"], "cluster": cluster, "confidence": confidence, "reason": reason.astype(str)}


def assign(run: str, data: str, concurrency: int = 2, num_gpus: float = 0) -> "ray.data.Dataset":
    """num_gpus: for each actor; 0 where they compute on CPUs."""
    files = ray.data.read_binary_files(data, include_paths=True, file_extensions=IMAGES)
    return files.map_batches(
        Assign,
        fn_constructor_args=(str(Path(run).resolve()),),
        batch_size=512,
        concurrency=concurrency,
        num_gpus=num_gpus,
    )


if __name__ == "__main__":
    if len(sys.argv) != 4:
        raise SystemExit(__doc__)
    assign(sys.argv[1], sys.argv[2], num_gpus=int(torch.cuda.is_available())).write_parquet(sys.argv[3])
