"""The methods beside semclust, on its own parts: the same images, views, backbone, optimiser and schedule.

Shapes: n batch, N images, D pooled feature, C clusters.
"""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from semclust import metrics
from semclust.devices import own_random_numbers
from semclust.partition import k_means
from semclust.plan import Phase
from semclust.train import Training

PSEUDO_CLASSES = 10  # times the clusters that are asked for: Caron et al. found many more than there are classes best
COMPONENTS = 256  # of the features that are kept before they are clustered
ROUNDS = 20  # of k-means for the pseudo classes; the last k-means has the usual ten starts


def pixel_clusters(pixels: np.ndarray, n_clusters: int, seed: int, device: torch.device) -> np.ndarray:
    """k-means on the pixels of N images: labels (N)."""
    with own_random_numbers(seed, 0, device):
        x = torch.tensor(pixels).to(device).flatten(1).float() / 255
        return k_means(x, n_clusters)[0].cpu().numpy()


class DeepCluster(Training):
    """Caron et al. 2018: cluster the features, learn to tell these clusters apart, and again.

    The pseudo labels come from k-means on the features, reduced by PCA, whitened and of unit length. Images are drawn
    so that every pseudo class is met as often as the others, and the linear head starts anew whenever labels change.
    The clusters that are asked for come from k-means on the features of unit length, without PCA: on the digits these
    were far better (ACC 0.92 and 0.81 against 0.51 and 0.53 after 40 epochs, two seeds).
    """

    keeps_pooled = True

    def __init__(self, *args: Any):
        super().__init__(*args)
        seed = self.settings.random_state
        with own_random_numbers(seed, 0, self.device):
            h, _ = self.features()
            self.n_pseudo = max(2, min(PSEUDO_CLASSES * self.settings.n_clusters, self.n_images // 8))
            self.head = nn.Linear(h.shape[1], self.n_pseudo).to(self.device)
            # As parts of the learner, head and labels are stored and restored with it.
            self.learner.add_module("head", self.head)
            self.learner.register_buffer("pseudo", torch.zeros(self.n_images, dtype=torch.long, device=self.device))
            self.trained += self.head.parameters()
            self.optimiser.add_param_group({"params": list(self.head.parameters())})
            for parameter in self.head.parameters():
                self.optimiser.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
            self._renew_pseudo_labels(whiten(h))

    @property
    def pseudo(self) -> Tensor:
        return self.learner.get_buffer("pseudo")

    def kind_of_epoch(self, epoch: int) -> tuple[str, str]:
        return "pseudo classes", ""

    def scores_clusters(self, epoch: int) -> bool:
        return False  # its clusters come from a k-means of their own, not from a classifier that could see views

    def _order(self) -> Tensor:
        n_batches, n = super()._order().shape
        size = torch.bincount(self.pseudo, minlength=self.n_pseudo)
        return torch.multinomial(1 / size[self.pseudo], n_batches * n, replacement=True).view(n_batches, n)

    def _learn_from(self, phase: Phase, views: Tensor, index: Tensor) -> Tensor:
        with self.precision:
            h, _ = self._encode(views)
        loss = F.cross_entropy(self.head(h), self.pseudo[index].repeat(2))
        self.optimiser.zero_grad()
        loss.backward()
        self.optimiser.step()
        return torch.stack([loss, loss, torch.zeros_like(loss)]).detach()

    @torch.no_grad()
    def _renew_labels(self, h: Tensor, q: dict[str, Tensor]) -> tuple[dict[str, Any], Tensor]:
        self._renew_pseudo_labels(whiten(h))
        x = F.normalize(h, dim=1)
        clusters = k_means(x, self.settings.n_clusters)[0]
        return metrics.health_of_features(x), F.one_hot(clusters, self.settings.n_clusters).float()

    @torch.no_grad()
    def _renew_pseudo_labels(self, x: Tensor) -> None:
        self.pseudo.copy_(k_means(x, self.n_pseudo, restarts=1, rounds=ROUNDS)[0])
        self.head.weight.normal_(0, 0.01)
        self.head.bias.zero_()
        for parameter in self.head.parameters():
            self.optimiser.state[parameter]["momentum_buffer"].zero_()


def whiten(h: Tensor) -> Tensor:
    """The first principal components of the features h (N x D), each of variance 1, then rows of unit length."""
    h = h.double() if h.device.type != "mps" else h
    h = h - h.mean(0)
    variance, direction = torch.linalg.eigh(h.T @ h / len(h))
    kept = variance[-COMPONENTS:] > 1e-6 * variance[-1]  # a component that does not vary holds noise alone
    scale = variance[-COMPONENTS:][kept].clamp(min=1e-12).rsqrt()
    return F.normalize(h @ (direction[:, -COMPONENTS:][:, kept] * scale), dim=1).float()
