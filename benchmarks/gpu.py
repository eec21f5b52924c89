"""What the README says of a GPU, measured one thing after the other, the most wanted first, as far as the time allows.

python benchmarks/gpu.py --cifar10 cifar10.npz --fashion-mnist FOLDER --minutes 27 --out gpu
        each job runs if it is expected to end in time, and is ended where it does not; what it prints goes to
        gpu/NAME.txt, what it finds to gpu/bench (the tables there are of the last job alone: for one of all, run
        `semclust bench` once more with --out there), and all of it after each job to gpu/results.tar.gz; features at
        the end of each phase to gpu/NAME, 12 MB for 60,000 images. The folder is to be new
python benchmarks/gpu.py --list
        the jobs and the minutes that each is expected to take
python benchmarks/gpu.py ... --only cifar10-best tests
        these alone
python benchmarks/gpu.py ... --flags --epochs 2 --width 4
        with flags for every run of the arena, to try the jobs out
"""

import argparse
import os
import re
import subprocess
import sys
import tarfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Job:
    name: str
    minutes: float  # that it is expected to take on an H200
    data: str | None  # the data set that it needs
    words: tuple[str, ...]


def arena(name: str, minutes: float, data: str, *words: str, folder: str = "") -> Job:
    """Runs of other settings than the default's go to a ``folder`` of their own: results are stored by method."""
    return Job(
        name,
        minutes,
        data,
        ("benchmarks/close_look.py", "DATA", "--keep", f"OUT/{name}", "--out", f"OUT/bench/{folder or data}", *words),
    )


def default(data: str, minutes: float, seed: int) -> Job:
    words = ("--methods", "default", "--seeds", "1", "--random-state", str(seed))
    return arena(f"{data}-default-{seed}", minutes, data, *words)


def without_over(preset: str, minutes: float) -> Job:
    """CIFAR-10 without over-clusters, which are suspected of knots: groups of one class in the midst of another."""
    folder = "cifar10-without-over"
    words = ("--methods", preset, "--seeds", "1", "--tasks", "cluster", "instance")
    return arena(f"{folder}-{preset}", minutes, "cifar10", *words, folder=folder)


def temperature(tau: float) -> Job:
    """Features of instance contrast alone: the higher tau, the less the nearest images are pushed apart."""
    folder = f"cifar10-tau-{tau}"
    words = ("--methods", "moco", "--seeds", "1", "--epochs", "80", "--temperature", str(tau))
    return arena(folder, 2.5, "cifar10", *words, folder=folder)


# The first two fit into 27 minutes, and so do the next four.
JOBS = (
    without_over("best", 19),
    arena("cifar10-paper", 7, "cifar10", "--methods", "paper", "--seeds", "1"),
    without_over("default", 10),
    temperature(0.2),
    temperature(0.3),
    temperature(0.5),
    arena("cifar10-others", 15, "cifar10", "--methods", "moco", "deepcluster", "--seeds", "1"),
    default("cifar10", 10, 0),
    default("cifar10", 9, 1),
    Job("tests", 4, None, ("-m", "pytest", "-q", "tests/test_gpu.py")),
    arena("cifar10-best", 19, "cifar10", "--methods", "best", "--seeds", "1"),
    # Of fewer epochs: a row each, of which there are a dozen.
    Job(
        "cifar10-ablation",
        25,
        "cifar10",
        ("-m", "semclust", "bench", "DATA", "--ablation", "--seeds", "1", "--epochs", "60", "--out", "OUT/ablation"),
    ),
    default("fashion-mnist", 6, 0),
    default("fashion-mnist", 6, 1),
    Job("scaling", 6, None, ("benchmarks/scaling.py", "OUT/scaling.json")),
    Job("speed", 4, None, ("-m", "semclust", "bench", "speed", "--out", "OUT/speed.json")),
    Job("speed-paper", 4, None, ("-m", "semclust", "bench", "speed", "--preset", "paper", "--out", "OUT/paper.json")),
    arena("fashion-mnist-others", 14, "fashion-mnist", "--methods", "k-means", "moco", "deepcluster", "--seeds", "2"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--cifar10", type=Path, help="a .npz with labels")
    parser.add_argument("--fashion-mnist", type=Path, help="the folder of its files")
    parser.add_argument("--minutes", type=float, default=27)
    parser.add_argument("--out", type=Path, default=Path("gpu"))
    parser.add_argument("--only", nargs="+", choices=[job.name for job in JOBS], metavar="NAME")
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[])
    asked = parser.parse_args()
    if asked.list:
        print("\n".join(f"{job.name:24}{job.minutes:5.1f} min  {' '.join(job.words)}" for job in JOBS))
        return
    data = {"cifar10": asked.cifar10 and str(asked.cifar10.resolve())}
    data["fashion-mnist"] = asked.fashion_mnist and f"fashion-mnist:{asked.fashion_mnist.resolve()}"
    if asked.out.exists():
        raise SystemExit(f"{asked.out} is there already; choose another --out.")
    asked.out.mkdir(parents=True)
    end = time.monotonic() + 60 * asked.minutes
    for job in JOBS:
        if asked.only and job.name not in asked.only:
            continue
        left = end - time.monotonic()
        if job.data and data[job.data] is None:
            print(f"{job.name}: left out, no --{job.data}", flush=True)
        elif 60 * job.minutes > left:
            print(f"{job.name}: left out, {job.minutes:g} minutes of the {left / 60:.1f} that are left", flush=True)
        else:
            carry_out(job, data.get(job.data or "") or "", asked.out.resolve(), left, asked.flags)


def carry_out(job: Job, data: str, out: Path, seconds: float, flags: list[str]) -> None:
    words = [data if word == "DATA" else re.sub("^OUT", str(out), word) for word in job.words]
    words += flags if job.data else []
    began = time.monotonic()
    paths = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": paths, "PYTHONUNBUFFERED": "1"}
    with (out / f"{job.name}.txt").open("w") as told:
        try:
            status = subprocess.run(
                [sys.executable, *words], cwd=ROOT, env=environment, stdout=told, stderr=told, timeout=seconds
            ).returncode
        except subprocess.TimeoutExpired:
            status = "out of time"
    last = "".join((out / f"{job.name}.txt").read_text(errors="replace").splitlines(keepends=True)[-12:])
    print(f"{job.name}: {status}, {(time.monotonic() - began) / 60:.1f} minutes\n{last}", flush=True)
    with tarfile.open(out / "results.tar.gz", "w:gz") as tar:
        for path in sorted(out.rglob("*")):
            if path.is_file() and path.suffix not in (".gz", ".npy"):
                tar.add(path, path.relative_to(out))


if __name__ == "__main__":
    main()
