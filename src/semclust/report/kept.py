"""What only the end of a fit knows and the report needs: thumbnails, the map, labels to compare with.

It is kept in the run folder as report.safetensors, so that a report can be written again when the
images have moved. Its size is bounded, whatever the number of images.

Shapes: N images, C clusters, M images on the map, d representation.
"""

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from semclust.config import Settings, is_own_code
from semclust.data import Images
from semclust.devices import choose_device, own_random_numbers
from semclust.errors import DamagedFileError, InputError, plural
from semclust.learner import Learner
from semclust.model import in_unit_range
from semclust.plan import labels_itself_in
from semclust.report.pictures import Sheets, make_sheets
from semclust.report.places import places
from semclust.run_folder import RunFolder
from semclust.storage import load_into, read_tensors, write_tensors

FORMAT = 1
FILE = "report.safetensors"
EXTREMES = 10  # most certain images of a cluster that are shown, and as many of the least certain
PICTURES = 4000  # in the gallery, at most
MAPPED = (2000, 5000)  # images on the map: all up to the first, a tenth, at most the second
CLASSES = 10_000  # beyond that, labels are names rather than classes
LABEL_LENGTH = 200
BATCH = 512


@dataclass
class Kept:
    """Rows are those of assignments.csv."""

    extremes: int  # images at either end of a cluster that have a thumbnail
    pictured: np.ndarray  # rows that have a thumbnail, in the order of the tiles
    mapped: np.ndarray  # M rows that lie on the map
    maps: dict[str, np.ndarray]  # M x 2 for each kind of features
    tasks: dict[str, np.ndarray]  # M clusters of under- and over-clustering
    sheets: Sheets | None = None  # None: the images were not at hand
    labels: np.ndarray | None = None  # N numbers of classes
    classes: list[str] = field(default_factory=list)


def keep(
    run: RunFolder,
    settings: Settings,
    images: Images | None,
    clusters: np.ndarray,
    confidence: np.ndarray,
) -> Kept:
    """Collect it from a finished run and its images, and store it there. Without images there are no
    thumbnails, and on the map there is the final network alone."""
    N, C = len(clusters), settings.n_clusters
    seed = settings.random_state or 0
    rng = np.random.default_rng(seed)
    n_mapped = min(N, max(MAPPED[0], min(N // 10, MAPPED[1])))
    mapped = np.sort(rng.permutation(N)[:n_mapped])
    # A checkpoint is what people delete first to save space: without it, the final network is on the map alone.
    tensors = run.read_checkpoint()[0] if run.checkpoint.exists() else {}
    tasks = {
        task: tensors[f"learner.task_modules.{task}.y"].numpy()[mapped]
        for task in ("under", "over")
        if f"learner.task_modules.{task}.y" in tensors
    }
    features = {"target": run.read_embeddings(N)[mapped]}
    extremes, gallery = choose_gallery(clusters, confidence, C)
    kept = Kept(extremes, np.empty(0, np.int64), mapped, {}, tasks)
    if images is not None:
        add_pictures(kept, images.pixels, gallery)
        if images.labels is not None:
            names, labels = np.unique(images.labels, return_inverse=True)
            if len(names) <= CLASSES:
                kept.labels, kept.classes = labels, [str(name)[:LABEL_LENGTH] for name in names]
        if tensors and not is_own_code(settings.backbone):  # that module is not here
            features |= features_of_tasks(images.pixels[mapped], settings, tensors, tasks, run.checkpoint)
    with ThreadPoolExecutor() as pool:
        kept.maps = dict(zip(features, pool.map(lambda x: places(x, seed), features.values()), strict=True))
    write_kept(run.path / FILE, kept)
    return kept


def add_pictures(kept: Kept, pixels: np.ndarray, gallery: np.ndarray) -> None:
    """Thumbnails of the images on the map and of the rows in ``gallery``, in place of those that were there."""
    kept.pictured = np.concatenate([gallery, np.setdiff1d(kept.mapped, gallery)])
    kept.sheets = make_sheets(pixels, kept.pictured)


def choose_gallery(clusters: np.ndarray, confidence: np.ndarray, n_clusters: int) -> tuple[int, np.ndarray]:
    """How many images to show at either end of a cluster, and which: rows, cluster after cluster."""
    largest = np.argsort(-np.bincount(clusters, minlength=n_clusters), kind="stable")[: PICTURES // 2]
    each = max(1, min(EXTREMES, PICTURES // (2 * len(largest))))
    ends = most_and_least_certain(clusters, confidence, each)
    rows = [row for cluster in largest for end in ends.get(int(cluster), ()) for row in end]
    return each, np.array(rows, np.int64)


def most_and_least_certain(
    clusters: np.ndarray, confidence: np.ndarray, each: int
) -> dict[int, tuple[list[int], list[int]]]:
    """Of each cluster the positions of its most certain members, and of its least certain, the extremes first.

    No image is on both lists: where members are few, the surer half is on the first."""
    order = np.lexsort((np.arange(len(clusters)), -confidence, clusters))
    ids, starts = np.unique(clusters[order], return_index=True)
    found = {}
    for cluster, members in zip(ids.tolist(), np.split(order, starts[1:]), strict=True):
        n = len(members)
        most, least = min(each, math.ceil(n / 2)), min(each, n // 2)
        found[cluster] = (members[:most].tolist(), members[::-1][:least].tolist())
    return found


@torch.no_grad()
def features_of_tasks(
    pixels: np.ndarray,
    settings: Settings,
    tensors: dict[str, torch.Tensor],
    tasks: dict[str, np.ndarray],
    source: Path,
) -> dict[str, np.ndarray]:
    """M x d features of the network before any training and, where the tasks have projections of their
    own, of under- and over-clustering. ``tensors``: the checkpoint, which comes from ``source``."""
    try:
        device = choose_device(settings.device)
    except InputError:  # the run was fitted on a machine with another device
        device = torch.device("cpu")
    with own_random_numbers(settings.random_state, 0, device):  # the numbers that the run began with
        learner = Learner(settings, pixels.shape[1:], len(pixels))
    encoder = learner.encoder.to(device).eval()

    def projection(task: str) -> str:
        return task if task in encoder.projections else learner.instance_projection

    def features(wanted: list[str]) -> dict[str, np.ndarray]:
        parts: dict[str, list[np.ndarray]] = {task: [] for task in wanted}
        for start in range(0, len(pixels), BATCH):
            x = torch.tensor(pixels[start : start + BATCH]).to(device).permute(0, 3, 1, 2)
            q = encoder(encoder.at_view_size(in_unit_range(x)))[1]
            for task in wanted:
                parts[task].append(q[projection(task)].cpu().numpy())
        return {task: np.concatenate(part) for task, part in parts.items()}

    taught = labels_itself_in(settings, settings.n_epochs - 1)
    prefix = "learner.twin." if taught else "learner.encoder."
    trained = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
    encoder.mean.copy_(trained["mean"])
    encoder.std.copy_(trained["std"])
    found = {"untrained": features(["cluster"])["cluster"]}
    if settings.projection_per_task and tasks:
        load_into(encoder, trained, source)
        found |= features(list(tasks))
    return found


# ---- on disk ---------------------------------------------------------------------------------------


def write_kept(path: Path, kept: Kept) -> None:
    arrays = {"pictured": kept.pictured, "mapped": kept.mapped}
    arrays |= {f"map.{kind}": places for kind, places in kept.maps.items()}
    arrays |= {f"task.{task}": clusters.astype(np.int32) for task, clusters in kept.tasks.items()}
    if kept.labels is not None:
        small = len(kept.classes) <= np.iinfo(np.uint8).max
        arrays["labels"] = kept.labels.astype(np.uint8 if small else np.int32)
    for number, sheet in enumerate(kept.sheets.files if kept.sheets else []):
        arrays[f"sheet.{number}"] = np.frombuffer(sheet, np.uint8)
    about = {
        "format": FORMAT,
        "extremes": kept.extremes,
        "classes": kept.classes,
        "sheets": kept.sheets and {**kept.sheets.about, "files": len(kept.sheets.files)},
    }
    write_tensors(path, {name: torch.tensor(array) for name, array in arrays.items()}, about)


def read_kept(path: Path, n_images: int) -> Kept:
    """What ``write_kept`` stored, for the ``n_images`` of assignments.csv."""
    tensors, about = read_tensors(path)
    next_step = f"Delete it and run: semclust report {path.parent}"
    if about.get("format") != FORMAT:
        raise DamagedFileError(
            f"{path} has format {about.get('format')!r}; this version of semclust reads {FORMAT}. {next_step}"
        )
    arrays = {name: tensor.numpy() for name, tensor in tensors.items()}

    def beginning(prefix: str) -> dict[str, np.ndarray]:
        return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}

    try:
        pictures: dict[str, Any] | None = about["sheets"]
        sheets = None
        if pictures:
            files = [arrays[f"sheet.{i}"].tobytes() for i in range(pictures.pop("files"))]
            sheets = Sheets(files, pictures)
        kept = Kept(
            int(about["extremes"]),
            arrays["pictured"],
            arrays["mapped"],
            beginning("map."),
            beginning("task."),
            sheets,
            arrays.get("labels"),
            [str(name) for name in about["classes"]],
        )
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise DamagedFileError(f"{path} is damaged ({error!r}). {next_step}") from error
    rows = np.concatenate([kept.pictured, kept.mapped])
    if (len(rows) and rows.max() >= n_images) or (kept.labels is not None and len(kept.labels) != n_images):
        raise DamagedFileError(f"{path} does not belong to assignments.csv with {plural(n_images, 'row')}. {next_step}")
    return kept
