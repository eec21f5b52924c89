"""Everything that training changes, apart from the optimiser's own state: networks, memories, labels.

Shapes: N images, C clusters, K keys in a contrastive set, d representation.
"""

from typing import cast

import torch
from torch import Tensor, nn

from semclust.backbones import group_batch_norm
from semclust.config import Settings
from semclust.core import SemanticMemory, bank_size
from semclust.model import Encoder, LinearClassifier, build_encoder, momentum_twin
from semclust.plan import TaskPlan, plan_tasks


class ClusterTask(nn.Module):
    """One clustering of all images into C groups: its memory, classifier, labels and swap counts."""

    memory: SemanticMemory
    classifier: LinearClassifier
    y: Tensor
    s: Tensor
    share: Tensor
    teacher: LinearClassifier | None

    def __init__(
        self,
        plan: TaskPlan,
        n_images: int,
        K: int,
        dim: int,
        classifier_dim: int,
        tau: float,
        projection: str,
        teaches: bool,
    ):
        """``teaches``: whether the classifier has a momentum twin, to learn from its own labels."""
        super().__init__()
        self.plan, self.projection, self.n_clusters = plan, projection, plan.n_clusters
        self.memory = SemanticMemory(plan.n_clusters, bank_size(K, plan.n_clusters), dim)
        self.classifier = LinearClassifier(classifier_dim, plan.n_clusters, tau)
        self.register_buffer("y", torch.randint(plan.n_clusters, (n_images,)))  # N: random at first
        self.register_buffer("s", torch.ones(n_images))  # N: swaps, from 1
        self.teacher = momentum_twin(self.classifier) if teaches else None
        if teaches:  # C: by which its labels are evened out
            self.register_buffer("share", torch.full((plan.n_clusters,), 1 / plan.n_clusters))

    def telling_classifier(self, taught: bool) -> LinearClassifier:
        """Likewise: the classifier or, where there is one and it teaches, its twin."""
        return self.teacher if taught and self.teacher is not None else self.classifier


class Learner(nn.Module):
    """The networks and the tasks that they learn jointly."""

    stored_keys: Tensor
    neighbours: Tensor

    def __init__(self, settings: Settings, image_shape: tuple[int, int, int], n_images: int):
        super().__init__()
        own = settings.projection_per_task
        projections = sorted(settings.tasks) if own else ["shared"]
        dim, tau = settings.projection_dim, settings.temperature
        self.encoder, n_features = build_encoder(settings, image_shape, projections)
        group_batch_norm(self.encoder, settings.batch_norm_groups)
        has_twin = settings.contrast == "moco" or settings.labels_itself
        self.twin = momentum_twin(self.encoder) if has_twin else None
        if settings.contrast == "instance-memory":  # an empty key is the zero vector, as in SemanticMemory
            self.register_buffer("stored_keys", torch.zeros(len(projections), n_images, dim))

        if settings.learns_pairs:  # in 4 bytes: there are many
            # In a cluster of its fair size, all of them should be a small part.
            k = max(1, min(settings.neighbours, n_images // (4 * settings.n_clusters)))
            self.register_buffer("neighbours", torch.zeros(n_images, k, dtype=torch.int32))

        # More keys than half the images would hold many images twice, and every image against itself.
        K = max(1, min(settings.memory_size, n_images // 2))
        # Extreme over-clustering, every image a cluster: one queue, no bank left out.
        self.instance_memory = SemanticMemory(1, K, dim)
        self.instance_projection = "instance" if "instance" in projections else projections[0]
        classifier_dim = dim if settings.classifier_input == "projection" else n_features
        self.task_modules = nn.ModuleDict()
        for name, plan in plan_tasks(settings, n_images).items():
            projection = name if name in projections else self.instance_projection
            teaches = settings.labels_itself and name != "over"
            self.task_modules[name] = ClusterTask(plan, n_images, K, dim, classifier_dim, tau, projection, teaches)

    def telling_encoder(self, taught: bool) -> Encoder:
        """What tells the clusters: the encoder or, where it is ``taught`` by its own labels, its twin."""
        if not taught:
            return self.encoder
        assert self.twin is not None
        return self.twin

    @property
    def tasks(self) -> dict[str, ClusterTask]:
        return cast(dict[str, ClusterTask], dict(self.task_modules.items()))
