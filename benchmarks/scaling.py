"""Time and memory of training against the numbers of images, clusters and keys and the size of the images, on a GPU.

python benchmarks/scaling.py [OUT.json]: one line a setting, each changing one thing about the first.
"""

import gc
import json
import sys
from pathlib import Path

import torch

from semclust.config import Settings
from semclust.speed import measure_speed

FIRST = dict(n_images=60_000, size=32, n_clusters=10, memory_size=4096)
CHANGES: tuple[dict[str, int], ...] = (
    {},
    {"n_images": 10_000},
    {"n_images": 600_000},
    {"n_clusters": 100},
    {"n_clusters": 1000},
    {"memory_size": 65_536},
    {"size": 64, "n_images": 10_000},
    {"size": 96, "n_images": 10_000},
)


def main(out: Path) -> None:
    rows = []
    print(f"{'images':>8} {'px':>3} {'C':>5} {'K':>6} {'us/image':>9} {'refresh s':>9} {'GiB':>6}")
    for change in CHANGES:
        case = FIRST | change
        # Recorded, not compiled: every case would be compiled anew, a minute each. Compiled, all are faster alike.
        large = case["n_images"] > 100_000
        settings = Settings(case["n_clusters"], memory_size=case["memory_size"], batch_size=256, device="cuda")
        settings.epochs = 1 if large else 10  # so few that the engine does not compile
        epochs = 1 if large or case["size"] > 32 else 3
        row = measure_speed(settings, case["n_images"], case["size"], epochs=epochs, beside=case["size"] == 96)
        gc.collect()  # the networks of this case: the next one's peak of memory is its own
        torch.cuda.empty_cache()
        rows.append(row)
        out.write_text(json.dumps(rows, indent=2) + "\n")
        print(
            f"{row['images']:>8} {case['size']:>3} {row['clusters']:>5} {row['keys']:>6} "
            f"{1e6 * row['seconds_per_epoch'] / row['images']:>9.1f} {row['seconds_per_label_refresh']:>9.3f} "
            f"{row['peak_memory_gib']:>6.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).with_name("scaling.json")))
