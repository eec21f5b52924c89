"""The default settings on scikit-learn's digits, three seeds, beside k-means and Ward on pixels.

python benchmarks/digits.py            prints a table and writes benchmarks/digits.json
"""

import json
import math
import platform
import resource
import time
from pathlib import Path

import numpy as np
import torch
from sklearn.cluster import AgglomerativeClustering, KMeans

from semclust import Settings, fitting, metrics, open_images

SEEDS = (0, 1, 2)


def main() -> None:
    images = open_images("digits")
    truth = images.labels
    pixels = open_images("digits", size=8).pixels.reshape(len(truth), -1) / 255.0
    rows = [
        (
            "k-means on pixels",
            [metrics.evaluate(KMeans(10, n_init=10, random_state=s).fit_predict(pixels), truth) for s in SEEDS],
        ),
        ("Ward on pixels", [metrics.evaluate(AgglomerativeClustering(10).fit_predict(pixels), truth)]),
    ]
    runs, last_epochs = [], []
    for seed in SEEDS:
        started = time.monotonic()
        fitted = fitting.fit(images, Settings(n_clusters=10, random_state=seed, device="cpu"))
        final = metrics.evaluate(fitted.labels, truth)
        best = max((row for row in fitted.history if not math.isnan(row["acc"])), key=lambda row: row["acc"])
        picked = fitted.history[metrics.best_epoch(fitted.history) - 1]
        last_epochs.append(final)
        runs.append(
            {
                "seed": seed,
                **final,
                "seconds": time.monotonic() - started,
                "score": fitted.history[-1]["score"],
                "best_epoch_acc": best["acc"],
                "label_free_epoch_acc": picked["acc"],
            }
        )
        print(json.dumps(runs[-1]), flush=True)
    rows.append(("semclust, default", last_epochs))

    print("\n| digits, 1,797 images | n | ACC | NMI | ARI |\n|---|---|---|---|---|")
    for name, figures in rows:
        cells = [
            f"{np.mean([f[m] for f in figures]):.3f} ± {np.std([f[m] for f in figures]):.3f}"
            for m in ("acc", "nmi", "ari")
        ]
        print(f"| {name} | {len(figures)} | {' | '.join(cells)} |")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    seconds = np.mean([run["seconds"] for run in runs])
    print(f"{torch.get_num_threads()} threads, {seconds:.0f} s a fit, peak memory {peak:.2f} GiB")
    result = {
        "table": {name: figures for name, figures in rows},
        "runs": runs,
        "peak_gib": peak,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": platform.processor() or platform.machine(),
    }
    (Path(__file__).parent / "digits.json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
