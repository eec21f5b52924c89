"""The same fit by 1, 2 and 4 processes on this machine: loss of every epoch, and how far the results differ. Beside
them one process with other instructions of the processor, which also add up in another order: so much is rounding.

python benchmarks/processes.py [EPOCHS]: fits scikit-learn's digits by torchrun with gloo, writes processes.json here
and docs/processes.svg.
"""

import csv
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from semclust.labels import match_ids

HERE = Path(__file__).parent
OTHER = {"ATEN_CPU_CAPABILITY": "default"}  # torch's own kernels without AVX
CASES: tuple[tuple[int, dict[str, str]], ...] = ((1, {}), (1, OTHER), (2, {}), (4, {}))
COLOURS = ("#1f6f8b", "#8fbf9f", "#d98e04", "#b23a48")
WIDTH, HEIGHT, MARGIN = 640, 300, 48


def fit(size: int, environ: dict[str, str], epochs: int, out: Path) -> dict[str, Any]:
    arguments = ["-m", "semclust", "fit", "digits", "-k", "10", "--epochs", str(epochs), "--device", "cpu"]
    arguments += ["--precision", "float32"]
    launcher = [] if size == 1 else ["-m", "torch.distributed.run", "--nproc-per-node", str(size)]
    command = [sys.executable, *launcher, *arguments, "--no-report", "--out", str(out)]
    began = time.monotonic()
    subprocess.run(
        command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1", **environ}, stdout=subprocess.DEVNULL
    )
    with open(out / "digits" / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    with open(out / "digits" / "assignments.csv", newline="") as file:
        clusters = [int(row["cluster"]) for row in csv.DictReader(file)]
    return {
        "processes": size,
        "other_instructions": bool(environ),
        "seconds": round(time.monotonic() - began, 1),
        "loss": [float(row["loss"]) for row in rows],
        "acc": float(rows[-1]["acc"]),
        "clusters": clusters,
    }


def picture(runs: list[dict[str, Any]]) -> str:
    """The curves as SVG; that of one process is drawn widest, so that it shows below those of several."""
    losses = [loss for run in runs for loss in run["loss"]]
    low, high, n = min(losses), max(losses), len(runs[0]["loss"])

    def place(epoch: int, loss: float) -> str:
        x = MARGIN + epoch * (WIDTH - 2 * MARGIN) / max(1, n - 1)
        y = HEIGHT - MARGIN - (loss - low) / (high - low) * (HEIGHT - 2 * MARGIN)
        return f"{x:.1f},{y:.1f}"

    lines, names = [], []
    for i, (run, colour) in enumerate(zip(runs, COLOURS, strict=True)):
        points = " ".join(place(epoch, loss) for epoch, loss in enumerate(run["loss"]))
        lines.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="{10 - 2.6 * i:.1f}"/>')
        title = f"{run['processes']} process{'' if run['processes'] == 1 else 'es'}"
        title += ", other instructions" if run["other_instructions"] else ""
        names.append(f'<text x="400" y="{60 + 20 * i}" fill="{colour}">{title}</text>')
    bottom = HEIGHT - MARGIN
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
            'font-size="14">',
            f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
            f'<path d="M{MARGIN},{MARGIN} V{bottom} H{WIDTH - MARGIN}" fill="none" stroke="#888"/>',
            f'<text x="{MARGIN}" y="{MARGIN - 14}">loss</text>',
            f'<text x="{WIDTH - MARGIN}" y="{bottom + 30}" text-anchor="end">epoch {n}</text>',
            f'<text x="{MARGIN}" y="{bottom + 30}">epoch 1</text>',
            f'<text x="{MARGIN - 6}" y="{bottom}" text-anchor="end">{low:.2f}</text>',
            f'<text x="{MARGIN - 6}" y="{MARGIN + 5}" text-anchor="end">{high:.2f}</text>',
            *lines,
            *names,
            "</svg>\n",
        ]
    )


def main(epochs: int) -> None:
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        for number, (size, environ) in enumerate(CASES):
            runs.append(fit(size, environ, epochs, Path(folder) / str(number)))
            first, run = runs[0], runs[-1]
            run["relative_difference_of_losses"] = [
                float(f"{abs(a - b) / abs(a):.2g}") for a, b in zip(first["loss"], run["loss"], strict=True)
            ]
            # Clusters are numbered by size, so two of about one size may have changed places.
            renamed = match_ids(np.array(run["clusters"]), np.array(first["clusters"]), 10)
            run["same_cluster"] = float((renamed == first["clusters"]).mean())
            print({name: value for name, value in run.items() if name not in ("loss", "clusters")}, flush=True)
    (HERE.parent / "docs" / "processes.svg").write_text(picture(runs))
    for run in runs:
        del run["clusters"]
    figures = {"torch": torch.__version__, "data": "digits", "epochs": epochs, "backend": "gloo", "runs": runs}
    (HERE / "processes.json").write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20)
