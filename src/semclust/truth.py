"""Labels to compare a clustering with. They are read for evaluation only; training never sees them."""

import csv
import os
import re
from pathlib import Path, PurePosixPath

import numpy as np

from semclust.arrays import numpy_file, unpacked
from semclust.errors import InputError, plural

LABEL_ARRAYS = ("labels", "y")  # in a .npz
WHOLE_NUMBER = re.compile(r"0|-?[1-9][0-9]{0,17}")  # 01 and 1 stay two labels


def read_labels(source: str | Path, names: list[str]) -> np.ndarray:
    """Labels (strings or integers) in the order of ``names``.

    source: a CSV file with the columns path and label; a .npy, or a .npz with the key labels or y, with one label
        for each name; or the word "folders": the outermost folder that an image lies in
        is its label.
    """
    if source == "folders":
        folders = [PurePosixPath(name).parts[:-1] for name in names]
        levels = zip(*folders, strict=False)  # photos/train/cat and photos/train/dog differ at the third: cat and dog
        shared = next((i for i, level in enumerate(levels) if len(set(level)) > 1), min(map(len, folders)))
        classes = [folder[shared] if len(folder) > shared else "." for folder in folders]
        if len(set(classes)) > 1:
            return np.array(classes)
        raise InputError(
            f'labels "folders": {plural(len(names), "image")}, all in one folder; expected one for each class. '
            "Use a CSV file with the columns path and label."
        )
    path = Path(source)
    if not os.path.isfile(path):
        raise InputError(f'There is no file of labels {str(source)!r}; expected a .csv, .npy or .npz, or "folders".')
    if path.suffix.lower() not in (".npy", ".npz"):
        return _labels_from_csv(path, names)
    with numpy_file(path) as loaded:
        if isinstance(loaded, np.ndarray):
            return check_labels(loaded, len(names), path.name)
        for key in LABEL_ARRAYS:
            if key in loaded:
                return check_labels(unpacked(loaded, path, key), len(names), path.name)
        raise InputError(f"{str(path)!r} holds the arrays {list(loaded)}; expected one named labels or y.")


def _labels_from_csv(path: Path, names: list[str]) -> np.ndarray:
    labels: dict[str, str] = {}
    try:
        # A byte order mark is what Excel writes; surrogates stand for file names that are not UTF-8.
        with path.open(newline="", encoding="utf-8-sig", errors="surrogateescape") as lines:
            rows = csv.DictReader(lines, restval="")
            rows.fieldnames = columns = [column.strip() for column in rows.fieldnames or []]
            if not {"path", "label"} <= set(columns):
                raise InputError(f"{str(path)!r} has the columns {columns}; expected path,label in the first line.")
            for row in rows:
                name, label = PurePosixPath(row["path"]).as_posix(), row["label"].strip()
                if label and labels.setdefault(name, label) != label:
                    raise InputError(
                        f"{str(path)!r} gives {name!r} two labels, {labels[name]!r} and {label!r} "
                        f"(line {rows.line_num}); leave one."
                    )
    except csv.Error as error:
        raise InputError(f"{str(path)!r} cannot be read as a CSV file ({error}).") from error
    wanted = [PurePosixPath(name).as_posix() for name in names]
    if missing := [name for name in wanted if name not in labels]:
        raise InputError(
            f"{len(missing)} of {len(names)} images have no label in {str(path)!r}, the first are {missing[:3]}; "
            "add them. Paths are relative to the folder of images, with /."
        )
    found = [labels[name] for name in wanted]
    whole = all(WHOLE_NUMBER.fullmatch(label) for label in found)
    return np.array([int(label) for label in found] if whole else found)


def check_labels(labels: np.ndarray, n: int, source: str) -> np.ndarray:
    """One integer or string for each of ``n`` images."""
    if labels.shape not in ((n,), (n, 1)):
        raise InputError(
            f"The labels in {source!r} have the shape {labels.shape}; expected {n}, one for each image that was read. "
            "Where files were skipped, use a CSV file with the columns path and label."
        )
    labels = np.array(labels).reshape(n)
    if labels.dtype.kind in "biu" or (labels.dtype.kind == "f" and (labels == np.rint(labels)).all()):
        return labels.astype(np.int64)
    if labels.dtype.kind != "U":
        raise InputError(f"The labels in {source!r} are {labels.dtype}; expected integers or strings.")
    return labels


def as_labels(labels: list[int | str | None]) -> np.ndarray | None:
    """Labels that came with the images: None where one is missing."""
    if not labels or any(label is None for label in labels):
        return None
    if all(isinstance(label, int) for label in labels):
        return np.array(labels, np.int64)
    return np.array([str(label) for label in labels])
