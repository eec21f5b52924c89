"""The scikit-learn face: ``SemanticClusterer``."""

import contextlib
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from sklearn.base import BaseEstimator, ClusterMixin, TransformerMixin
from sklearn.utils.validation import check_is_fitted
from torch import nn

from semclust import fitting
from semclust.config import Settings, check, values
from semclust.data import Images, open_images
from semclust.devices import choose_device
from semclust.display import Display, printable
from semclust.errors import InputError, plural
from semclust.groups import Groups
from semclust.predictor import Predictor
from semclust.run_folder import RunFolder, model_folder

FEW = 3  # images that an error names


@dataclass(kw_only=True, eq=False, repr=False)
class SemanticClusterer(ClusterMixin, TransformerMixin, BaseEstimator, Settings):
    """Group unlabelled images by meaning, by Semantic Contrastive Learning.

    The parameters are those of ``semclust.Settings``, and ``verbose``. Data ``X`` is whatever ``semclust.open_images``
    takes (docs/guide.md has a table): an array (n, H, W) or (n, H, W, channels) of uint8 or floats, a folder, files by
    name or pattern, a ``.npz`` or ``.npy`` file, tar shards, a data set of another library, a benchmark, or "digits".

    A fit leaves out files that cannot be read, with a warning: what it learned is about the images in ``names_``.
    ``predict``, ``predict_proba`` and ``transform`` have a row for every image of X, or raise InputError.

    Attributes after ``fit``; after ``load`` see there:
        labels_         cluster of each image, 0 the largest cluster
        probabilities_  n x R, for the clusters in clusters_
        embedding_      n x d, unit vectors
        clusters_       ids of the clusters: 0 to C - 1, less those that were merged into others since
        cluster_names_  names by id, of clusters that were given one
        history_        one dictionary of figures an epoch
        names_          name of each image: its path, or its row number
        skipped_        (name, reason) of files that could not be read
        predictor_      the model itself

    ``merge``, ``rename``, ``reduce`` and ``undo`` change the clusters after the fit, and all of the above and every
    prediction follow. Ids stay what they were: merging 3 and 7 leaves 3, and no other is renumbered.

    >>> SemanticClusterer(n_clusters=10).fit_predict(images)  # doctest: +SKIP
    """

    # As any estimator, one is equal to itself only; Settings are equal by their values.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    verbose: bool = False
    """Show the progress of a fit."""

    def fit(self, X: Any, y: Any = None) -> "SemanticClusterer":
        """Learn features and clusters of X. ``y`` is ignored: no label ever reaches training."""
        check(self._settings())
        images = open_images(X, size=self.image_size)
        images.labels = None
        display = Display(Console()) if self.verbose else None
        with contextlib.closing(display) if display else contextlib.nullcontext():
            fitted = fitting.fit(images, fitting.draw_seed(self._settings()), display)
        return self._take(fitted, images)

    def fit_predict(self, X: Any, y: Any = None, **kwargs: Any) -> np.ndarray:
        """Learn, and return the cluster of each image."""
        return self.fit(X).labels_

    def fit_transform(self, X: Any, y: Any = None, **kwargs: Any) -> np.ndarray:
        """Learn, and return the embedding of each image."""
        return self.fit(X).embedding_

    def predict(self, X: Any) -> np.ndarray:
        """The most likely cluster of each image: one of ``clusters_``."""
        most_likely = self.predict_proba(X).argmax(1)
        return self.clusters_[most_likely]

    def predict_proba(self, X: Any) -> np.ndarray:
        """Probability of each cluster: n x R, in the order of ``clusters_``."""
        return self._apply(X)[0]

    def transform(self, X: Any) -> np.ndarray:
        """Embedding of each image: n x d, unit vectors."""
        return self._apply(X)[1]

    def merge(self, clusters: Sequence[int | str]) -> "SemanticClusterer":
        """Make one cluster of several, given by id or name; it keeps the smallest id."""
        self._groups.merge(clusters)
        return self._follow()

    def rename(self, cluster: int | str, name: str) -> "SemanticClusterer":
        """Give a cluster a name: some text that no other cluster has, and no number."""
        self._groups.rename(cluster, name)
        return self._follow()

    def reduce(self, to: int) -> "SemanticClusterer":
        """Merge the closest two clusters, again and again, until ``to`` are left.

        Close are clusters with many images that could be in either, so the probabilities of the fit are needed: a
        model loaded from a run folder has them, one loaded from a model folder does not.
        """
        groups = self._groups
        if not hasattr(self, "_fitted_p"):
            raise InputError(
                "reduce needs the images of the fit, which a model folder does not hold; load the run folder, "
                "or name the clusters to merge: merge([3, 7])."
            )
        groups.reduce(to, self._fitted_p)
        return self._follow()

    def undo(self) -> "SemanticClusterer":
        """Take back the last ``merge``, ``rename`` or ``reduce``."""
        self._groups.undo()
        return self._follow()

    def save(self, path: str | Path) -> None:
        """Write the model into the folder ``path``: safetensors and JSON, no pickle."""
        check_is_fitted(self)
        self.predictor_.save(Path(path))

    @classmethod
    def load(cls, path: str | Path, backbone: nn.Module | None = None) -> "SemanticClusterer":
        """A model that ``save`` wrote, or a run folder of ``semclust fit``. It predicts at once; from a run folder
        also ``labels_``, ``probabilities_``, ``embedding_`` and ``names_`` are there, the arrays mapped from disk.
        ``history_`` and ``skipped_`` are of a fit in the same program only; a run folder has metrics.csv and
        skipped.csv. Parameters that followed from the images, such as the family of views, are what they were."""
        predictor = Predictor.load(model_folder(Path(path)), backbone)
        made = cls(**values(predictor.settings))
        made.predictor_ = predictor
        run = RunFolder(Path(path))
        if run.probabilities.exists():
            made.names_, made._fitted_p, made.embedding_ = run.read_results(predictor.settings.n_clusters)
        return made._follow()

    @property
    def _groups(self) -> Groups:
        check_is_fitted(self)
        return self.predictor_.groups

    def _follow(self) -> "SemanticClusterer":
        """Let the attributes follow the groups."""
        self.clusters_, self.cluster_names_ = np.array(self._groups.ids), dict(self._groups.names)
        if hasattr(self, "_fitted_p"):
            self.probabilities_ = self._groups.apply(self._fitted_p)
            self.labels_ = self.clusters_[self.probabilities_.argmax(1)]
        return self

    def _settings(self) -> Settings:
        return Settings(**values(self))

    def _take(self, fitted: fitting.Fitted, images: Images) -> "SemanticClusterer":
        self.predictor_, self.history_ = fitted.predictor, fitted.history
        self._fitted_p, self.embedding_ = fitted.p, fitted.q  # n x C: what the clusters are regrouped from
        self.names_, self.skipped_ = images.names, images.skipped
        for message in fitted.warnings:
            warnings.warn(message, stacklevel=3)
        if images.skipped:
            warnings.warn(f"{plural(len(images.skipped), 'file')} could not be read: see skipped_.", stacklevel=3)
        return self._follow()

    def _apply(self, X: Any) -> tuple[np.ndarray, np.ndarray]:
        check_is_fitted(self)
        device = choose_device(self.device)
        parts, skipped = [], []
        for images in self.predictor_.stream(X):
            skipped += images.skipped
            if images.names and not skipped:  # a part may hold nothing but files that cannot be read
                parts.append(self.predictor_(images.pixels, device))
        if skipped:
            few = "; ".join(printable(f"{name}: {reason}") for name, reason in skipped[:FEW])
            raise InputError(
                f"{len(skipped)} of the images could not be read, so the rows would not be those of the data "
                f"({few}{'; ...' if len(skipped) > FEW else ''}). Take them out, or use `semclust predict`, which "
                "names every image in a table and lists what it leaves out."
            )
        if not parts:
            raise InputError("There is no image that could be read, so there is nothing to predict.")
        p, q = zip(*parts, strict=True)
        return np.concatenate(p), np.concatenate(q)
