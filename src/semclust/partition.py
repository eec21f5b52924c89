"""Partitions of finished features: k-means, and a spectral partition that scales with the images.

Used to start the labels, to renew those of over-clusters and to group the features of instance contrast alone. Works
on whichever device the features lie; random numbers come from torch's default generator.

Shapes: N images, C clusters, d dimension, p landmarks.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 8192  # images at once, so that memory does not grow with N x p
DISTANCES_AT_ONCE = 2**23
CENTRES = 500  # of all restarts of k-means together, and of all draws of a partition: of many clusters each costs more
LANDMARKS = 1000
CANDIDATES = 2**18  # images among which neighbours are sought
ROWS, COLUMNS = 1024, 2**16  # of similarities at once
SAMPLE, OF_EACH = 20_000, 20  # images among which landmarks are sought, and clusters; more where these are very many
NEAR = 20  # neighbours by which a partition is judged
DRAWS, ATTEMPTS = 8, 4  # of landmarks, and of each kind with each of them, at a partition
MORE_CUT, FEW_CUT = 2, 0.03  # times as many ties, and a share of all besides, that may be cut for even clusters
SOFTNESS = 0.1  # of the borders between clusters while they are evened out, as a squared distance of unit vectors
EVEN_ROUNDS, BONUS_ROUNDS = 15, 8


def cluster_means(x: Tensor, y: Tensor, n_clusters: int) -> tuple[Tensor, Tensor]:
    """Mean of the rows of x (N x d) in each cluster (C x d; 0 where there are none), and their number (C)."""
    size = torch.bincount(y, minlength=n_clusters)
    total = torch.zeros(n_clusters, x.shape[1], dtype=x.dtype, device=x.device).index_add_(0, y, x)
    return total / size.clamp(min=1)[:, None], size


def k_means(x: Tensor, n_clusters: int, restarts: int | None = None, rounds: int = 100) -> tuple[Tensor, Tensor]:
    """Lloyd's algorithm from k-means++ starts; the best of ``restarts``, which run side by side. By default 10, and
    fewer for many clusters, where a start matters less and costs more. Returns labels (N), centres (C x d)."""
    restarts = restarts or max(1, min(10, CENTRES // n_clusters))
    centre = _spread_out(x, n_clusters, restarts)  # restarts x C x d
    label = torch.full((len(x), restarts), -1, device=x.device)
    check_every = 8 if x.is_cuda else 1  # a comparison waits for the device
    for number in range(1, rounds + 1):
        before, (distance, label) = label, nearest(x, centre)
        if number % check_every == 0 and torch.equal(label, before):
            break
        for own, own_label in zip(centre, label.T, strict=True):
            mean, size = cluster_means(x, own_label, n_clusters)
            own.copy_(torch.where((size > 0)[:, None], mean, own))
    best = distance.sum(0).argmin()
    return label[:, best], centre[best]


def spectral_partition(x: Tensor, n_clusters: int, tau: float, neighbours: int = 10, even: bool = True) -> Tensor:
    """Cut the neighbour graph of unit features x (N x d) into ``n_clusters`` groups: labels (N).

    Where k-means assumes round clusters of one size, this follows chains of neighbours. Left to itself it would rather
    cut off a small knot of images that are nearly the same than part two classes that touch. So where ``even``, the
    clusters are evened out: of many attempts the best one, unless clusters of their own sizes are better, or cut far
    fewer ties between neighbours.
    """
    C = n_clusters
    # Of so many images, where the borders run is clear enough.
    some = x[torch.randperm(len(x), device=x.device)[: max(SAMPLE, OF_EACH * C)]]
    even = even and len(some) * C <= DISTANCES_AT_ONCE  # of very many clusters, none is large or small enough to matter
    embed = SpectralEmbedding(some, 2 * C if even else C, tau, neighbours)
    of_some = embed(some)
    cut = embed, k_means(F.normalize(of_some[:, :C], dim=1), C)[1], torch.zeros(C, device=x.device)
    if even:
        judge = Judge(some, C)
        own, best = judge(_cut(of_some, *cut[1:])), -math.inf
        for draw in range(max(1, min(DRAWS, CENTRES // C))):
            if draw:  # other landmarks make another graph
                embed = SpectralEmbedding(some, 2 * C, tau, neighbours)
                of_some = embed(some)
            for centre, bonus in even_cuts(of_some, C):
                found = judge(_cut(of_some, centre, bonus))
                may_be = found.cut <= MORE_CUT * own.cut + FEW_CUT and found.modularity > own.modularity
                if may_be and found.worth > best:
                    cut, best = (embed, centre, bonus), found.worth
    embed, centre, bonus = cut
    return torch.cat([_cut(embed(chunk), centre, bonus) for chunk in x.split(CHUNK)])


def even_cuts(embedding: Tensor, n_clusters: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Several cuts into even clusters: centres among the first so many eigenvectors, and a bonus for each."""
    C = n_clusters
    for n_vectors in (C, round(1.5 * C), 2 * C):  # classes that touch are parted by later vectors
        rows = F.normalize(embedding[:, :n_vectors], dim=1)
        for _ in range(ATTEMPTS):
            yield even_centres(rows, k_means(rows, C, restarts=1)[1])


@dataclass(frozen=True)
class Judgement:
    """How good a partition is, as far as the features tell."""

    cut: float  # the share of ties between neighbours that it cuts
    modularity: float  # how many more it leaves whole than chance would at its sizes (Newman & Girvan 2004)
    between: float  # the share of the features' variance that lies between the clusters

    @property
    def worth(self) -> float:
        return self.modularity + self.between


class Judge:
    """Judges partitions of unit features x (N x d) around 0, without labels."""

    def __init__(self, x: Tensor, n_clusters: int):
        self.x, self.n_clusters = x, n_clusters
        self.near = nearest_neighbours(x, max(1, min(NEAR, len(x) // (4 * n_clusters))))

    def __call__(self, label: Tensor) -> Judgement:
        cut = torch.ne(label[self.near], label[:, None]).float().mean().item()
        mean, size = cluster_means(self.x, label, self.n_clusters)
        share = size.to(self.x) / len(label)
        between = share @ mean.square().sum(1)
        return Judgement(cut, 1 - cut - share.square().sum().item(), between.item())


class SpectralEmbedding:
    """The eigenvectors of the largest eigenvalues of a neighbour graph, the largest first, as a function of an image.

    Images are joined through p landmarks (Chen & Cai 2011): each is tied to its nearest few, and two images are close
    when they share landmarks. The eigenvectors of that graph come from a p x p matrix, and its ties tell those of
    images besides."""

    def __init__(self, x: Tensor, n_vectors: int, tau: float, neighbours: int):
        """Of the unit features x (N x d): ``n_vectors``, or fewer where there are not as many."""
        self.tau, n_landmarks = tau, min(len(x), max(n_vectors, min(LANDMARKS, len(x) // 6)))
        self.landmark = F.normalize(k_means(x, n_landmarks, restarts=1, rounds=10)[1], dim=1)
        self.neighbours = min(neighbours, n_landmarks)
        ties = [self.ties(chunk) for chunk in x.split(CHUNK)]
        scale = torch.stack([chunk.sum(0) for chunk in ties]).sum(0).clamp(min=1e-6).rsqrt()
        graph = x.new_zeros(n_landmarks, n_landmarks)
        for chunk in ties:
            z = chunk * scale
            graph += z.T @ z
        # In double precision, which not every GPU has; the largest eigenvalues come last.
        matrix = graph.double() if graph.is_cuda else graph.cpu().double()
        self.vector = scale[:, None] * torch.linalg.eigh(matrix)[1].flip(1)[:, :n_vectors].to(x)

    def ties(self, x: Tensor) -> Tensor:
        """Of unit features x to the landmarks, the nearest alone, which sum to 1 (N x p)."""
        closeness, which = (x @ self.landmark.T).topk(self.neighbours, dim=1)
        return x.new_zeros(len(x), len(self.landmark)).scatter_(1, which, (closeness / self.tau).softmax(1))

    def __call__(self, x: Tensor) -> Tensor:
        """The vectors' values of unit features x: N x n_vectors."""
        return torch.cat([self.ties(chunk) @ self.vector for chunk in x.split(CHUNK)])


def even_centres(x: Tensor, centre: Tensor) -> tuple[Tensor, Tensor]:
    """Centres (C x d), and a bonus for each (C), by which the unit rows of x fall into clusters of about one size."""
    N, C = len(x), len(centre)
    factor = torch.ones_like(centre[:, 0])  # by which the bonus makes each cluster more likely
    for _ in range(EVEN_ROUNDS):
        closeness = (-torch.cdist(x, centre).square() / SOFTNESS).exp()  # at least exp(-40): they are unit vectors
        for _ in range(BONUS_ROUNDS):  # after Sinkhorn: so that the probabilities of each cluster sum to N / C
            factor = N / C / (closeness.T @ (closeness @ factor).reciprocal())
        p = closeness * factor
        p = p / p.sum(1, keepdim=True)
        centre = p.T @ x / p.sum(0)[:, None].clamp(min=1e-9)
    return centre, factor.log() * SOFTNESS


def _cut(embedding: Tensor, centre: Tensor, bonus: Tensor) -> Tensor:
    """The cluster of each row: of the nearest centre, among as many eigenvectors as that has, after its bonus."""
    rows = max(1, DISTANCES_AT_ONCE // len(centre))
    chunks = (F.normalize(chunk[:, : centre.shape[1]], dim=1) for chunk in embedding.split(rows))
    return torch.cat([(torch.cdist(chunk, centre).square() - bonus).argmin(1) for chunk in chunks])


def nearest_neighbours(x: Tensor, k: int) -> Tensor:
    """Of each unit vector of x (N x d), the k nearest others: N x k. Of very many, the nearest of a random sample, so
    that the cost grows with N, not with its square."""
    some = torch.arange(len(x), device=x.device)
    if len(x) > CANDIDATES:
        some = torch.randperm(len(x), device=x.device)[:CANDIDATES]
    found = []
    for first in range(0, len(x), ROWS):
        rows = x[first : first + ROWS]
        own = torch.arange(first, first + len(rows), device=x.device)[:, None]
        near, which = rows.new_empty(len(rows), 0), own[:, :0]
        for candidates in some.split(COLUMNS):
            closeness = (rows @ x[candidates].T).masked_fill_(candidates == own, -torch.inf)
            closest = closeness.topk(min(k, len(candidates)), dim=1)
            near, which = torch.cat([near, closest.values], 1), torch.cat([which, candidates[closest.indices]], 1)
            near, best = near.topk(min(k, near.shape[1]), dim=1)
            which = which.gather(1, best)
        found.append(which)
    return torch.cat(found)


def centred(x: Tensor) -> Tensor:
    """Directions of the rows of x (N x d) from the mean direction: pooled features, none of which is negative, lie in
    a narrow cone that hides how they differ."""
    x = F.normalize(x, dim=1)
    return F.normalize(x - x.mean(0), dim=1)


def nearest(x: Tensor, centre: Tensor) -> tuple[Tensor, Tensor]:
    """Of each row of x and each set of centres (sets x C x d): squared distance to the nearest, and which it is
    (both N x sets)."""
    sets, C, _ = centre.shape
    rows = max(1, DISTANCES_AT_ONCE // (sets * C))
    parts = [torch.cdist(chunk, centre.flatten(0, 1)).unflatten(1, (sets, C)).min(2) for chunk in x.split(rows)]
    return torch.cat([p.values for p in parts]).square(), torch.cat([p.indices for p in parts])


def _spread_out(x: Tensor, n_clusters: int, restarts: int) -> Tensor:
    """k-means++ (Arthur & Vassilvitskii 2007): each centre is drawn far from those before it. restarts x C x d."""
    of_row = x.square().sum(1, keepdim=True)

    def to(centre: Tensor) -> Tensor:
        """Squared distances. By products, which for so few centres is faster than ``cdist``."""
        return (of_row + centre.square().sum(1) - x @ (2 * centre).T).clamp(min=0)

    centre = x[torch.randint(len(x), (restarts,), device=x.device)]
    centres, distance = [centre], to(centre)
    for _ in range(n_clusters - 1):
        # Of exponential waiting times at these rates, the shortest is each one's with a chance in proportion to its
        # rate. Where every image already lies on a centre, any will do.
        rate = distance + (distance.amax(0) == 0)
        centre = x[(rate / torch.empty_like(rate).exponential_()).argmax(0)]
        centres.append(centre)
        distance = torch.minimum(distance, to(centre))
    return torch.stack(centres, dim=1)
