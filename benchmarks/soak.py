"""Many short fits in one process: memory and open files stay where they are.

python benchmarks/soak.py                  200 fits and 50 resumes -> benchmarks/soak.json
python benchmarks/soak.py --fits 20 --resumes 10

Each fit writes a run folder, is loaded and predicts. Each resume is of a run that a signal stopped within an epoch. The
first tenth warms up; after it, memory may grow by GROWTH at most, and no file, thread or process may stay.
"""

import argparse
import gc
import json
import os
import platform
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from semclust import __version__, fitting
from semclust.config import Settings
from semclust.data import Images
from semclust.errors import StoppedError
from semclust.predictor import Predictor
from semclust.run_folder import RunFolder

GROWTH = 16  # MiB


def made_images(n: int = 96) -> Images:
    rng = np.random.default_rng(0)
    pattern = rng.integers(0, 256, (4, 16, 16, 1))
    pixels = np.clip(pattern[np.arange(n) % 4] + rng.normal(0, 20, (n, 16, 16, 1)), 0, 255).astype(np.uint8)
    return Images(pixels, [f"{i}.png" for i in range(n)], "patterns")


def settings(seed: int) -> Settings:
    contrast = ("moco", "simclr", "instance-memory")[seed % 3]
    return Settings(n_clusters=4, epochs=3, batch_size=32, width=2, device="cpu", random_state=seed, contrast=contrast)


def fit(run: RunFolder, images: Images, seed: int, watcher: fitting.Watcher | None = None) -> None:
    fitted = fitting.fit(images, settings(seed), watcher, run)
    fitted.predictor.save(run.model)
    run.write_results(images.names, fitted.p, fitted.q, fitting.summarise(fitted, images))
    Predictor.load(run.model)(images.pixels[:64], torch.device("cpu"))


class Stop(fitting.Watcher):
    """Asks to stop after some steps, as Ctrl-C does."""

    def __init__(self, steps: int):
        self.left = steps

    def step(self, n_images: int) -> None:
        self.left -= 1
        if not self.left:
            os.kill(os.getpid(), signal.SIGTERM)


def resume(run: RunFolder, images: Images, number: int) -> None:
    try:
        fit(run, images, number, Stop(1 + number % 8))
        raise AssertionError("it did not stop")
    except StoppedError:
        fit(run, images, number)


def usage() -> dict[str, Any]:
    gc.collect()
    with open("/proc/self/statm", encoding="ascii") as file:
        pages = int(file.read().split()[1])
    return {
        "MiB": round(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, 1),
        "files": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
    }


def soak(fits: int, resumes: int) -> dict[str, Any]:
    images = made_images()
    rows = []
    started = time.monotonic()
    silent, kept = os.open(os.devnull, os.O_WRONLY), os.dup(2)  # every signal is told on stderr
    for number in range(fits + resumes):
        with tempfile.TemporaryDirectory() as folder:
            run = RunFolder.create(Path(folder), "run")
            if number < fits:
                fit(run, images, number)
            else:
                os.dup2(silent, 2)
                resume(run, images, number)
                os.dup2(kept, 2)
        rows.append(usage())
    os.close(silent)
    os.close(kept)
    begin, end = rows[max(0, len(rows) // 10 - 1)], rows[-1]
    most = max(row["MiB"] for row in rows[len(rows) // 10 :])
    flat = most - begin["MiB"] <= GROWTH and end["files"] <= begin["files"] and end["threads"] <= begin["threads"]
    return {
        "semclust": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "fits": fits,
        "resumes": resumes,
        "seconds": round(time.monotonic() - started, 1),
        "after the first tenth": begin,
        "at the end": end,
        "most MiB after the first tenth": most,
        "flat": flat,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fits", type=int, default=200)
    parser.add_argument("--resumes", type=int, default=50)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    found = soak(chosen.fits, chosen.resumes)
    text = json.dumps(found, indent=2)
    chosen.out.write_text(text + "\n")
    print(text)
    sys.exit(0 if found["flat"] else 1)


if __name__ == "__main__":
    main()
