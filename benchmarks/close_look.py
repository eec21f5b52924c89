"""`semclust bench` with looks at the features while they are learned: what limits a run, and what it confuses.

python benchmarks/close_look.py cifar10:PATH --methods default --seeds 1 --out look
        flags are those of `semclust bench`, and so is all that is written; only minutes and memory are with the looks
python benchmarks/close_look.py ... --every 20
        a look after every 20 epochs (else 50), and wherever the run begins to learn something else
python benchmarks/close_look.py ... --keep FOLDER
        there, the features at the end of each phase, for partitions of them elsewhere: TITLE-EPOCH.npy, as N x 96
        half floats, their first principal components (all, where there are fewer)

A look tells how well the neighbours of an image tell its class: `kNN` is the share of a sixth of the images, drawn at
random, that their 20 nearest among the others are right about, `purity` the share of the 20 nearest neighbours of all
images that are of their class. After the last epoch: which classes have which labels.
"""

import argparse
import re
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor

from semclust import cli, fitting, metrics
from semclust.arena.baselines import DeepCluster
from semclust.errors import SemclustError
from semclust.partition import centred, nearest_neighbours
from semclust.train import Training

NEIGHBOURS = 20
COMPONENTS = 96
WORTH_TELLING = 0.002  # of all images, that have the label of another class


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--every", type=int, default=50, metavar="EPOCHS")
    parser.add_argument("--keep", type=Path, metavar="FOLDER")
    asked, flags = parser.parse_known_args()
    if asked.every < 1:
        parser.error(f"--every {asked.every}: expected at least 1")
    argv = ["bench", *flags]
    try:
        command = cli.parse(argv)
        if not isinstance(command, cli.BenchData):
            parser.error("expected labelled data; `bench speed` looks at no features")
        cli.arena.run(
            command,
            lambda start: cli.settings_from(argv, start),
            cli.names_k(argv),
            Console(soft_wrap=True),
            lambda title, labels: Looks(title, labels, asked.every, asked.keep),
        )
    except SemclustError as error:
        raise SystemExit(f"close_look: {error}") from None


class Looks(fitting.Watcher):
    def __init__(self, title: str, labels: np.ndarray, every: int, folder: Path | None):
        self.title, self.labels, self.every, self.folder = title, labels, every, folder
        self.began = time.monotonic()
        print(title, flush=True)

    def begin(self, training: Training) -> None:
        # Where the run goes back it makes another one, for which there may be no room beside this.
        self.training: Training = weakref.proxy(training)
        self.tell(f"{training.engine}, batches of {training.batch_size}, rate {training.peak_rate}")

    def epoch(self, row: dict[str, Any]) -> None:
        epoch, last = row["epoch"], self.training.settings.n_epochs
        ends_a_phase = epoch == last or self.training.phase_of(epoch) != self.training.phase_of(epoch - 1)
        if epoch > 1 and epoch % self.every and not ends_a_phase:
            return
        figures = "  ".join(f"{name} {row[name]:.4g}" for name in ("loss", "spread", "acc", "score", "sure"))
        h, q = self.features_of_the_epoch()
        task = self.training.learner.tasks["cluster"]
        features = h if self.training.keeps_pooled else q[task.projection]
        if ends_a_phase and self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            name = re.sub(r"\W+", "-", self.title).strip("-")
            np.save(self.folder / f"{name}-{epoch}.npy", principal_components(features).cpu().numpy())
        knn, purity = neighbours_tell(features, self.labels)
        self.tell(f"epoch {epoch}, {row['learns']}: kNN {knn:.4f}  purity {purity:.4f}  {figures}")
        if epoch == last and not isinstance(self.training, DeepCluster):  # whose clusters are no task's
            for line in confused(task.y.cpu().numpy(), self.labels):
                self.tell(line)

    def features_of_the_epoch(self) -> tuple[Tensor, dict[str, Tensor]]:
        """As its row is of them: by the network that told the clusters in it, at the size for it. The training is at
        the next one already, which may look otherwise."""
        self.training.epoch -= 1
        try:
            return self.training.features()
        finally:
            self.training.epoch += 1

    def warn(self, message: str) -> None:
        self.tell(message)

    def tell(self, text: str) -> None:
        print(f"{time.monotonic() - self.began:7.1f} s  {text}", flush=True)


def neighbours_tell(features: Tensor, labels: np.ndarray) -> tuple[float, float]:
    """kNN and purity of N features (N x D) of images with these labels (N)."""
    x, y = F.normalize(features, dim=1), torch.from_numpy(np.unique(labels, return_inverse=True)[1]).to(features.device)
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(x))).to(x.device)
    asked, known = order[: len(x) // 6], order[len(x) // 6 :]
    nearest = torch.cat([(x[some] @ x[known].T).topk(NEIGHBOURS, dim=1).indices for some in asked.split(1000)])
    right = F.one_hot(y[known[nearest]]).sum(1).argmax(1) == y[asked]
    purity = y[nearest_neighbours(x, NEIGHBOURS)] == y[:, None]
    return right.float().mean().item(), purity.float().mean().item()


def principal_components(features: Tensor) -> Tensor:
    """The first so many of the directions of N features (N x D), as half floats."""
    x = centred(features)
    directions = torch.linalg.eigh((x.T @ x).double()).eigenvectors.flip(1)[:, :COMPONENTS]
    return (x @ directions.to(x)).half()


def confused(learned: np.ndarray, labels: np.ndarray) -> list[str]:
    """For each label, the class that most of its images are of, and which others have it."""
    table, classes = metrics.contingency(learned, labels), np.unique(labels)
    lines = []
    for row in table:
        order = (-row).argsort()
        others = [f"{classes[i]} {row[i]}" for i in order[1:] if row[i] >= WORTH_TELLING * len(labels)]
        lines.append(f"mostly {classes[order[0]]}: {row[order[0]]}; also {', '.join(others) or 'nothing to tell'}")
    return lines


if __name__ == "__main__":
    main()
