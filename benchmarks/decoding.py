"""Decoding against a plain torch DataLoader with Pillow, in the same run; and memory at 10,000 and 100,000 files.

python benchmarks/decoding.py            prints the figures and writes benchmarks/decoding.json

Both sides use a process for each core, the same interpolation and the same size; the loader hands over batches of 256
that are thrown away, semclust writes its cache. A round is loader, first use, use from the cache; figures are medians
of the rounds, by the clock and of processor time. Files lie in the system's page cache after a first pass. Memory is
the peak (VmHWM: ru_maxrss would remember the parent's) of a process of its own that opens a folder of 32 x 32 PNGs,
and of the largest of its workers.
"""

import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np
import PIL
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from semclust import open_images
from semclust.workers import n_cores

SETS = {  # number of JPEGs, width, height, side to decode to
    "photos, 500 x 375 to 96 x 96": (4000, 500, 375, 96),
    "small, 64 x 64": (20000, 64, 64, 64),
}
ROUNDS = 5
MEMORY = """
import json, re, resource, sys
from semclust import open_images
images = open_images(sys.argv[1])
peak = int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1])
worker = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
print(json.dumps({"images": len(images.names), "mib_of_pixels": round(images.pixels.nbytes / 2**20),
    "peak_mib": round(peak / 1024), "largest_worker_mib": round(worker / 1024)}))
"""


class Plain(Dataset):
    """What most people write."""

    def __init__(self, folder: Path, side: int):
        self.paths, self.side = sorted(str(path) for path in folder.iterdir()), side

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, i: int) -> torch.Tensor:
        with Image.open(self.paths[i]) as image:
            small = image.convert("RGB").resize((self.side, self.side), Image.Resampling.BILINEAR)
        return torch.from_numpy(np.array(small))


def make_photos(folder: Path, n: int, width: int, height: int) -> None:
    """Smooth colours with some noise: about as hard for a decoder as a photo of that size."""
    folder.mkdir()
    random = np.random.default_rng(0)
    motifs = []
    for _ in range(16):
        coarse = random.integers(0, 256, (height // 16 + 1, width // 16 + 1, 3), dtype=np.uint8)
        smooth = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC))
        motifs.append((smooth + random.normal(0, 8, smooth.shape)).clip(0, 255).astype(np.uint8))
    for i in range(n):
        Image.fromarray(np.roll(motifs[i % 16], 7 * i, axis=1)).save(folder / f"{i:06}.jpg", quality=85)


def seconds(work) -> tuple[float, float]:
    """By the clock, and of all processors together with those of the workers, which other programs disturb less."""
    started, used = time.perf_counter(), processor_seconds()
    work()
    return time.perf_counter() - started, processor_seconds() - used


def processor_seconds() -> float:
    both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in both)


def measure_speed(folder: Path, cache: Path, side: int) -> dict[str, object]:
    data = Plain(folder, side)
    n, rounds = len(data), []

    def load() -> None:
        assert sum(len(batch) for batch in DataLoader(data, 256, num_workers=n_cores())) == n

    def open_them() -> None:
        assert len(open_images(folder, size=side).pixels) == n

    for path in data.paths:  # into the page cache
        Path(path).read_bytes()
    for _ in range(ROUNDS):
        shutil.rmtree(cache, ignore_errors=True)
        times = {"loader": seconds(load), "first": seconds(open_them), "cached": seconds(open_them)}
        rounds.append({name: [round(n / clock), round(n / processor)] for name, (clock, processor) in times.items()})
        print(rounds[-1], flush=True)

    def ratio(name: str) -> list[float]:
        return [round(median(r[name][i] / r["loader"][i] for r in rounds), 2) for i in range(2)]

    return {
        "images": n,
        "images_per_second, by the clock and of processor time": rounds,
        "first_use_over_loader": ratio("first"),
        "cache_over_loader": ratio("cached"),
    }


def measure_memory(folder: Path, n: int) -> dict[str, float]:
    """n files of 32 x 32 pixels, of eight different contents, in folders of 1,000."""
    for start in range(0, n, 1000):
        (folder / str(start)).mkdir(parents=True)
        for i in range(start, start + 1000):
            shutil.copyfile(folder.parent / f"{i % 8}.png", folder / str(start) / f"{i:06}.png")
    done = subprocess.run([sys.executable, "-c", MEMORY, folder], check=True, capture_output=True, text=True)
    shutil.rmtree(folder)
    return json.loads(done.stdout)


def main() -> None:
    torch.set_num_threads(1)
    result: dict[str, object] = {
        "cores": n_cores(),
        "processor": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "pillow": PIL.__version__,
    }
    with tempfile.TemporaryDirectory() as temporary:
        folder, cache = Path(temporary), Path(temporary, "cache")
        os.environ["SEMCLUST_CACHE"] = str(cache)
        for name, (n, width, height, side) in SETS.items():
            make_photos(folder / "photos", n, width, height)
            result[name] = measure_speed(folder / "photos", cache, side)
            shutil.rmtree(folder / "photos")
            shutil.rmtree(cache)
            print(name, {k: v for k, v in result[name].items() if k.endswith("loader")}, flush=True)
        random = np.random.default_rng(0)
        for i in range(8):
            Image.fromarray(random.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(folder / f"{i}.png")
        result["memory"] = [measure_memory(folder / "many", n) for n in (10_000, 100_000)]
        for row in result["memory"]:
            print(row)
    (Path(__file__).parent / "decoding.json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
