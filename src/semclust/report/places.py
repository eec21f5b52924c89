"""Places of images on a plane, so that what is alike lies together: t-SNE."""

import numpy as np

NEIGHBOURS = 30  # the perplexity: how many images count as near
ROUNDS = 500  # half of scikit-learn's own: on the digits the map looks the same, in half the time


def places(features: np.ndarray, seed: int) -> np.ndarray:
    """M x 2 coordinates within 0 to 1 of M x d features; the same seed gives the same map."""
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits

    x = features.astype(np.float32)
    if np.ptp(x, axis=0).max() < 1e-6:  # all images look alike: they lie in one place
        return np.full((len(x), 2), 0.5, np.float32)
    tsne = TSNE(
        init="pca", max_iter=ROUNDS, angle=0.7, perplexity=min(NEIGHBOURS, (len(x) - 1) / 3), random_state=seed % 2**32
    )
    # Threads of its own would wait for each other a thousand times: four times the work where the cores are busy.
    with threadpool_limits(1, "openmp"):
        found = tsne.fit_transform(x)
    low, high = found.min(0), found.max(0)
    # One scale for both axes: distances mean the same in every direction.
    return ((found - (low + high) / 2) / max(np.max(high - low), 1e-9) + 0.5).astype(np.float32)
