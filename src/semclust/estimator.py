"""The scikit-learn face: ``SemanticClusterer``."""

import contextlib
import warnings
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
from semclust.display import Display
from semclust.predictor import Predictor
from semclust.run_folder import model_folder


@dataclass(kw_only=True, eq=False, repr=False)
class SemanticClusterer(ClusterMixin, TransformerMixin, BaseEstimator, Settings):
    """Group unlabelled images by meaning, by Semantic Contrastive Learning.

    The parameters are those of ``semclust.Settings``, and ``verbose``. Data ``X`` is whatever ``semclust.open_images``
    takes: an array (n, H, W) or (n, H, W, channels) of uint8 or floats, a folder, a list of files, a
    ``.npz`` or ``.npy`` file, or "digits".

    Attributes after ``fit``:
        labels_         cluster of each image, 0 the largest cluster
        probabilities_  n x C
        embedding_      n x d, unit vectors
        history_        one dictionary of figures an epoch
        names_          name of each image: its path, or its row number
        skipped_        (name, reason) of files that could not be read
        predictor_      the model itself

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

    def predict(self, X: Any) -> np.ndarray:
        """The most likely cluster of each image."""
        return self.predict_proba(X).argmax(1)

    def predict_proba(self, X: Any) -> np.ndarray:
        """Probability of each cluster: n x C."""
        return self._apply(X)[0]

    def transform(self, X: Any) -> np.ndarray:
        """Embedding of each image: n x d, unit vectors."""
        return self._apply(X)[1]

    def save(self, path: str | Path) -> None:
        """Write the model into the folder ``path``: safetensors and JSON, no pickle."""
        check_is_fitted(self)
        self.predictor_.save(Path(path))

    @classmethod
    def load(cls, path: str | Path, backbone: nn.Module | None = None) -> "SemanticClusterer":
        """A model that ``save`` wrote, or a run folder of ``semclust fit``. It predicts at once."""
        predictor = Predictor.load(model_folder(Path(path)), backbone)
        made = cls(**values(predictor.settings))
        made.predictor_ = predictor
        return made

    def _settings(self) -> Settings:
        return Settings(**values(self))

    def _take(self, fitted: fitting.Fitted, images: Images) -> "SemanticClusterer":
        self.predictor_, self.history_ = fitted.predictor, fitted.history
        self.labels_, self.probabilities_, self.embedding_ = fitted.labels, fitted.p, fitted.q
        self.names_, self.skipped_ = images.names, images.skipped
        for message in fitted.warnings:
            warnings.warn(message, stacklevel=3)
        if images.skipped:
            warnings.warn(f"{len(images.skipped)} files could not be read: see skipped_.", stacklevel=3)
        return self

    def _apply(self, X: Any) -> tuple[np.ndarray, np.ndarray]:
        check_is_fitted(self)
        images = self.predictor_.open(X)
        return self.predictor_(images.pixels, choose_device(self.device))
