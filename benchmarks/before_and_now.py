"""The digits on a CPU by an earlier commit and as it is now, in turn: seconds of a fit and ACC of its last epoch.

python benchmarks/before_and_now.py f76579b 33 50
        the earlier commit's default, then the default now for 33 and 50 epochs, three seeds each; prints a line a
        fit and writes benchmarks/before_and_now.json
"""

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
SEEDS = (0, 1, 2)
# Of what both versions have. A fit is timed from its images to the last prediction, without imports.
FIT = """
import json, sys, time
from semclust import Settings, fitting, metrics, open_images
seed, epochs = json.loads(sys.argv[1])
changes = {} if epochs is None else {"epochs": epochs}
images = open_images("digits")
started = time.perf_counter()
fitted = fitting.fit(images, Settings(n_clusters=10, random_state=seed, device="cpu", **changes))
seconds = time.perf_counter() - started
acc = metrics.evaluate(fitted.p.argmax(1), images.labels)["acc"]
print(json.dumps({"seconds": seconds, "acc": acc, "epochs": len(fitted.history), "source": metrics.__file__}))
"""


def fit(source: Path, seed: int, epochs: int | None) -> dict[str, float]:
    words = [sys.executable, "-W", "ignore", "-c", FIT, json.dumps([seed, epochs])]
    done = subprocess.run(words, env=os.environ | {"PYTHONPATH": str(source)}, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    result = json.loads(done.stdout.splitlines()[-1])
    assert Path(result.pop("source")).is_relative_to(source), "another version was imported"
    return result


def main(commit: str, *numbers: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(
            ["git", "archive", commit, "src"], cwd=HERE.parent, capture_output=True, check=True
        ).stdout
        subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)
        kinds = {"before": (Path(folder) / "src", None)}
        kinds |= {f"now, {n} epochs": (HERE.parent / "src", int(n)) for n in numbers}
        found: dict[str, list[dict[str, float]]] = {name: [] for name in kinds}
        for seed in SEEDS:
            for name, (source, epochs) in kinds.items():
                found[name].append(fit(source, seed, epochs))
                print(f"{name}, seed {seed}: {json.dumps(found[name][-1])}", flush=True)
    usual = statistics.fmean(run["seconds"] for run in found["before"])
    table = {
        name: {
            "seconds": statistics.fmean(run["seconds"] for run in runs),
            "times_as_fast": usual / statistics.fmean(run["seconds"] for run in runs),
            "acc": statistics.fmean(run["acc"] for run in runs),
            "acc_spread": statistics.pstdev(run["acc"] for run in runs),
        }
        for name, runs in found.items()
    }
    for name, figures in table.items():
        print(f"{name}: {json.dumps({key: round(value, 3) for key, value in figures.items()})}")
    import torch

    about = {"commit": commit, "torch": torch.__version__, "threads": torch.get_num_threads()}
    about |= {"python": platform.python_version(), "processor": platform.processor() or platform.machine()}
    (HERE / "before_and_now.json").write_text(json.dumps(about | {"table": table, "runs": found}, indent=2) + "\n")


if __name__ == "__main__":
    if len(sys.argv) < 3:
        raise SystemExit(__doc__)
    main(*sys.argv[1:])
