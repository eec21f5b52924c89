"""semclust groups unlabelled images by meaning.

from semclust import SemanticClusterer
labels = SemanticClusterer(n_clusters=10).fit_predict(images)
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["SemanticClusterer", "SemclustError", "Settings", "open_images", "preset"]

if TYPE_CHECKING:
    from semclust.config import Settings, preset
    from semclust.data import open_images
    from semclust.errors import SemclustError
    from semclust.estimator import SemanticClusterer

_HOME = {
    "SemanticClusterer": "semclust.estimator",
    "SemclustError": "semclust.errors",
    "Settings": "semclust.config",
    "open_images": "semclust.data",
    "preset": "semclust.config",
}


def __getattr__(name: str) -> Any:
    """Import on first use, so that `semclust --help` does not wait for torch."""
    if name not in _HOME:
        raise AttributeError(f"module 'semclust' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
