"""Every setting, once: the estimator's parameters, the command line's flags, a run's config.json."""

import dataclasses
import json
import math
import numbers
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import resources
from typing import TYPE_CHECKING, Any, Literal, get_args, get_type_hints

from semclust.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor, nn

    Backbone = str | nn.Module
    Augment = str | Callable[[Tensor], Tensor]
else:  # what the command line can say
    Backbone = Literal["auto", "resnet10", "resnet18", "resnet34"]
    Augment = Literal["auto", "natural", "strokes", "none"]

OWN_CODE = "python:"  # before the name under which the user's own module or callable is stored
Task = Literal["cluster", "under", "over", "instance"]


def setting(default: Any, low: float | None = None, high: float | None = None, kw_only: bool = True) -> Any:
    """A dataclass field with the range of values it takes (both ends included)."""
    return field(default=default, metadata={"low": low, "high": high}, kw_only=kw_only)


@dataclass(kw_only=True)
class Settings:
    """How to learn. The defaults are what works best so far; `preset("paper")` is the paper."""

    n_clusters: int = setting(10, low=2, high=1_000_000, kw_only=False)
    """Number of clusters C."""

    # ---- how long and how fast ----------------------------------------------------------------
    epochs: int | None = setting(None, low=1)
    """Passes over the images. None: 80; for photographs, which take longer to be understood, 600 on an NVIDIA or AMD
    GPU and elsewhere 200, as nobody would wait for more; times effort."""
    effort: float = setting(1.0, low=0.02)
    """Where neither epochs nor minutes are given: how many times as long to learn as usual."""
    minutes: float | None = setting(None, low=0.01)
    """Time that a fit may take, in place of epochs: as many are chosen as fit into it on this machine, or ten with a
    part of their steps, with the learning rate decayed at the end. Reading the images and the report come on top."""
    batch_size: int | None = setting(None, low=2)
    """Images a step. None: 512, and fewer for small sets, so that an epoch has 36 steps; at least 32."""
    learning_rate: float | None = setting(None, low=0)
    """Peak learning rate of SGD; it decays to 0 along a cosine until the clusters start, see also cluster_rate. None:
    0.17 for batches of 256, and in proportion to the square root of their size; lower for more than 50 epochs."""
    weight_decay: float = setting(5e-4, low=0)
    """Weight decay of SGD."""
    warmup_epochs: int = setting(3, low=0)
    """Epochs in which the learning rate rises to its peak; where it starts anew later, it rises for one."""

    # ---- images ------------------------------------------------------------------------------
    image_size: int | None = setting(None, low=4, high=1024)
    """Side in pixels of the squares that images become: scaled to cover them, with the centre cut out. None: squares
    only where images have several shapes, else their own; within 16 to 96."""
    augment: Augment = "auto"
    """Random views: natural (photographs), strokes (digits, glyphs, drawings), none; in Python also
    a callable on a batch (n x c x H x W, 0 to 1). auto: strokes for grey images of thin
    lines, or whose mirror images are unlike them; natural otherwise."""
    crop_size: float = setting(0.75, low=0.1, high=1)
    """Side of the cropped views of photographs, as a share of the image's. A crop shows a part of the image: at this
    size about as large as it was, for little more than half of the work. 1 in the paper."""

    # ---- network -----------------------------------------------------------------------------
    backbone: Backbone = "auto"
    """Network under the projection: resnet10, resnet18, resnet34; in Python also your own nn.Module.
    auto: resnet18, and resnet10 for images under 32 px."""
    width: int | None = setting(None, low=1, high=4096)
    """Channels of the ResNet's first stage. None: on an NVIDIA or AMD GPU 64, and fewer for images under 32 px;
    elsewhere 16, for more epochs in the same time."""
    max_pool: bool = False
    """Halve the resolution after the stem, as IIC and PICA do."""
    sees: Literal["auto", "colours", "edges"] = "auto"
    """What the network sees of an image: its colours (or shades of grey), or its edges alone, by Sobel's filters, as
    PICA feeds them. auto: the edges of drawings in colours, which would be grouped by colour; else colours."""
    projection_dim: int = setting(128, low=2, high=65_536)
    """Dimension d of a representation q."""
    projection_norm: bool = True
    """Batch norm inside the projection."""
    projection_per_task: bool = False
    """A projection of its own for each task, in place of a shared one."""
    batch_norm_groups: int = setting(1, low=1)
    """Split each batch for batch norm, and otherwise for the keys than for the queries, so that keys cannot be told by
    their batch's statistics."""
    batch_norm: Literal["synchronised", "local"] = "synchronised"
    """With several processes: batch norm over the whole batch, as one process has it; or over each process's own
    part, with the keys dealt out among the processes, as MoCo shuffles them, which waits less."""

    # ---- the method --------------------------------------------------------------------------
    contrast: Literal["moco", "simclr", "instance-memory"] = "moco"
    """Where the key k of a sample comes from: the momentum encoder, the other view through the same
    encoder, or a vector stored for each image."""
    momentum: float | None = setting(None, low=0, high=1)
    """Share m that the momentum encoder keeps at each step, or a stored vector when its image is met.
    None: 0.99, and 0.5 for stored vectors, which are met once an epoch. The twin that teaches where there is no
    momentum encoder otherwise has 0.99, and none that teaches has more."""
    symmetric: bool = False
    """Use each view once as query and once as key: twice the work a step."""
    temperature: float = setting(0.2, low=1e-3)
    """Temperature tau of all similarities."""
    memory_size: int = setting(4096, low=1)
    """Keys K in a contrastive set; at most half the number of images is used."""
    tasks: tuple[Task, ...] = ("cluster", "over", "instance")
    """What is learned jointly: C clusters, C/2 clusters, several times C clusters, every image by itself."""
    task_sum: Literal["mean", "sum"] = "mean"
    """How the losses of the tasks are put together."""
    classifier_input: Literal["projection", "pooled"] = "pooled"
    """What the linear classifier sees: the projection q or the backbone's pooled feature."""
    classifier_trains_encoder: bool = False
    """Let the gradient of the consistency loss reach the encoder, not the classifier alone. Where pairs of neighbours
    are learned, it does."""
    min_cluster_size: float = setting(0.16, low=0, high=1)
    """Clusters under this share of the mean size are merged away and the largest split in their
    place. 0 turns this off, for data that is truly imbalanced (see also balance)."""

    # ---- what the default adds to the paper --------------------------------------------------
    nearest: float = setting(0.5, low=0, high=1)
    """In instance contrast, weight of a second positive beside the image's own key, which has the rest: the key in the
    memory that is nearest to it, most often of another image of the same class. 0 in the paper."""
    nearest_from: float = setting(0.25, low=0, high=1)
    """Share of the epochs after which the nearest key joins: until then, features tell little of the meaning."""
    over_factor: int = setting(4, low=2)
    """Clusters of the task "over", as a multiple of C."""
    over_from: float = setting(0.25, low=0, high=1)
    """Share of the epochs after which the task "over" joins instance contrast."""
    over_until: float = setting(0.5, low=0, high=1)
    """Share of the epochs after which it ends, or earlier, see self_label_from. Fine clusters, too, hold together some
    of what is not one class: the features are to settle without them before the clusters start."""
    over_by: Literal["k-means", "classifier"] = "k-means"
    """What renews the labels of the task "over": k-means on the pooled features, anew after every epoch, so that no
    early partition locks itself in; or the task's classifier, as for the other tasks."""
    cluster_from: float = setting(0.65, low=0, high=1)
    """Share of the epochs after which the tasks "cluster" and "under" join, or later, see cluster_epochs. Their labels
    start from a spectral partition of the pooled features; at 0 they start at random, as in the paper."""
    cluster_epochs: int = setting(60, low=1)
    """They are learned so, by the paper's losses and what is added to them, for so many epochs at most, unless from
    the start: most of a long run is for the features."""
    cluster_rate: float = setting(0.25, low=0, high=1)
    """Peak of the learning rate from then on, as a share of learning_rate; it decays to 0, and once more while the
    network labels itself. The clusters so start from settled features, which they change only a little."""
    neighbours: int = setting(20, low=0)
    """From then on images are learned in pairs: each beside one of so many nearest neighbours (by the pooled features
    when the clusters start; fewer where clusters are small), on whose cluster the classifier is to agree. 0: no pairs,
    as in the paper."""
    balance: float = setting(5.0, low=0)
    """How much clusters of even sizes matter: of pairs, all images in one cluster would agree best. Less for data that
    is truly imbalanced; at 0 the partition that clusters start from is not evened out either."""
    self_label_from: float = setting(0.75, low=0, high=1)
    """Share of the epochs after which the network learns from its own labels: what the classifier's momentum twin is
    sure of in a whole image that is hardly changed, the classifier is to see in a strongly changed one. From then on
    the twin is what predicts. 1: never, as in the paper."""
    self_label_confidence: float = setting(0.95, low=0, high=1)
    """Probability from which on the twin is sure. Where balance is above 0, the probabilities are evened out first, so
    that no cluster grows at the cost of the others."""
    assign_by: Literal["query", "key"] = "key"
    """Whose distances to the memory the classifier learns from: the paper's query, or the key, which
    is another view: this asks the classifier to agree across views."""
    attraction: float = setting(1.0, low=0)
    """Weight of a term that pulls a query towards the bank of its own cluster; 0 in the paper."""

    # ---- the paper's ablations ---------------------------------------------------------------
    cross_cluster: bool = True
    """Contrast with other clusters only; False: with all banks."""
    online: bool = True
    """Renew the labels to learn from by the classifier; False: by the memory's distance-based assignment.
    The result is the classifier's either way."""
    hard_samples: bool = True
    """Weigh samples by how often they swapped clusters; False: all the same."""

    # ---- running -----------------------------------------------------------------------------
    random_state: int | None = setting(0, low=0)
    """Seed. The same seed on the same CPU gives the same run, on a GPU nearly; None draws one."""
    device: str = "auto"
    """cpu, cuda, cuda:1, mps. auto: a GPU where there is one."""
    precision: Literal["auto", "bfloat16", "float32"] = "auto"
    """Of convolutions and matrix products in training. auto: bfloat16 on a GPU that computes in it, and on such a CPU
    unless the backbone is your own; float32 elsewhere."""
    images_on: Literal["auto", "device", "host"] = "auto"
    """Where the images lie: in the memory of the device, or streamed to it from the host's memory or disk.
    auto: on the device, where they take at most half of its free memory."""
    compile: bool = True
    """Record the steps on a GPU, and compile them where the run is long enough to pay for that."""

    @property
    def n_epochs(self) -> int:
        """``epochs``, once it is decided for the images (``plan.decided``)."""
        if self.epochs is None:  # as no finished model would have stored it
            raise InputError("epochs=None: expected the number that was decided on for the images.")
        return self.epochs

    @property
    def instance_alone(self) -> bool:
        """Whether there is instance contrast only, and no clusters to learn."""
        return "cluster" not in self.tasks

    @property
    def learns_pairs(self) -> bool:
        """Whether the clusters are learned from pairs of neighbours."""
        return self.neighbours > 0 and not self.instance_alone

    @property
    def labels_itself(self) -> bool:
        """Whether a run ends with epochs that are learned from its own labels."""
        return self.self_label_from < 1 and not self.instance_alone


def preset(name: str) -> dict[str, Any]:
    """The settings that the preset ``name`` changes: ``SemanticClusterer(**preset("paper"))``."""
    presets = json.loads(resources.files("semclust").joinpath("presets.json").read_text())
    if name not in presets:
        raise InputError(f"There is no preset {name!r}; expected one of {', '.join(presets)}.")
    return from_json(presets[name])


def values(settings: Settings) -> dict[str, Any]:
    """Name and value of every setting, also of a subclass that has other fields besides."""
    return {f.name: getattr(settings, f.name) for f in dataclasses.fields(Settings)}


def to_json(settings: Settings) -> dict[str, Any]:
    """Plain JSON values; a module or callable of the user's is stored by name only."""

    def plain(value: Any) -> Any:
        if value is None or isinstance(value, str | int | float):
            return value
        if isinstance(value, numbers.Number):  # NumPy's
            return value.item()  # type: ignore[attr-defined]
        if isinstance(value, tuple | list):
            return list(value)
        return f"{OWN_CODE}{getattr(value, '__qualname__', type(value).__qualname__)}"

    return {name: plain(value) for name, value in values(settings).items()}


def is_own_code(value: Any) -> bool:
    """Whether a stored value is only the name of a module or callable of the user's."""
    return isinstance(value, str) and value.startswith(OWN_CODE)


def from_json(values: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments for Settings from JSON values."""
    if not isinstance(values, dict):
        raise InputError(f"The settings are {values!r}; expected names and values.")
    unknown = set(values) - {f.name for f in dataclasses.fields(Settings)}
    if unknown:
        raise InputError(f"Unknown settings {', '.join(sorted(unknown))}: written by another version of semclust?")
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def check(settings: Settings, as_flags: bool = False) -> None:
    """Raise InputError for the first value that is of the wrong kind, out of range or at odds with another.
    ``as_flags``: named as on the command line, where they come from there."""

    def named(name: str, value: Any) -> str:
        return _as_flag(name, value) if as_flags else f"{name}={value!r}"

    hints = get_type_hints(Settings)
    for f in dataclasses.fields(Settings):
        value, hint = getattr(settings, f.name), hints[f.name]
        if f.name in ("backbone", "augment") and callable(value):
            continue
        told = named(f.name, value)
        low, high = f.metadata.get("low"), f.metadata.get("high")
        kinds = get_args(hint) if type(None) in get_args(hint) else (hint,)
        if value is None and type(None) in kinds:
            continue
        if f.name == "tasks":
            choices = get_args(Task)
            if not isinstance(value, tuple | list) or not value or any(task not in choices for task in value):
                raise InputError(f"{told}: expected one or more of {', '.join(choices)}.")
            if len(set(value)) < len(value):
                raise InputError(f"{told}: expected each task once.")
            if "cluster" not in value and set(value) != {"instance"}:
                raise InputError(f"{told}: expected 'cluster' among them, or 'instance' alone.")
        elif get_args(hint) and type(None) not in kinds:
            if not isinstance(value, str) or value not in get_args(hint):
                raise InputError(f"{told}: expected one of {', '.join(get_args(hint))}.")
        elif bool in kinds:
            if not isinstance(value, bool):
                raise InputError(f"{told}: expected True or False.")
        elif str in kinds:
            if not isinstance(value, str):
                raise InputError(f"{told}: expected a word, such as {f.default!r}.")
        elif int in kinds or float in kinds:
            whole = int in kinds
            if not is_number(value, whole):
                raise InputError(f"{told}: expected a {'whole ' if whole else ''}number.")
            if (low is not None and value < low) or (high is not None and value > high):
                bounds = f"from {low} to {high}" if high is not None else f"of at least {low}"
                raise InputError(f"{told}: expected a number {bounds}.")
    if "over" in settings.tasks and settings.over_from >= settings.over_until:
        raise InputError(
            f"{named('over_from', settings.over_from)} with {named('over_until', settings.over_until)}: expected it to "
            "begin before it ends."
        )
    if settings.labels_itself and settings.self_label_from < settings.cluster_from:
        raise InputError(
            f"{named('self_label_from', settings.self_label_from)} with "
            f"{named('cluster_from', settings.cluster_from)}: expected clusters before the network labels itself; at "
            f"least {named('self_label_from', settings.cluster_from)}, or {named('self_label_from', 1)} for never."
        )
    if "over" in settings.tasks and settings.labels_itself and settings.over_from >= settings.self_label_from:
        raise InputError(
            f"{named('over_from', settings.over_from)} with {named('self_label_from', settings.self_label_from)}: "
            "expected over-clusters to begin before the network labels itself, where they end."
        )
    if settings.learns_pairs and settings.cluster_from == 0:
        raise InputError(
            f"{named('neighbours', settings.neighbours)} with {named('cluster_from', settings.cluster_from)}: expected "
            f"{named('neighbours', 0)} there, since no features are learned yet by which images could be near, or "
            "clusters that start later."
        )


def _as_flag(name: str, value: Any) -> str:
    words = map(str, value) if isinstance(value, tuple | list) else [str(value)]
    return " ".join([f"--{name.replace('_', '-')}", *words])


def is_number(value: Any, whole: bool = False) -> bool:
    """Whether it is a finite one, and no truth value."""
    try:
        kind = numbers.Integral if whole else numbers.Real
        return isinstance(value, kind) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer beyond all floats
        return False
