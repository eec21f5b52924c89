"""The paper's data sets and Fashion-MNIST by name, from the files that their makers publish: cifar10:PATH, ...

PATH is the published archive, what was unpacked from it, or the folder that either lies in. The protocols are the
paper's: train and test merged for CIFAR (of CIFAR-100 the 20 superclasses), and so for Fashion-MNIST; the labelled
images of STL-10; the training split of ImageNet's subsets and of Tiny-ImageNet. Labels are for evaluation only.
"""

import gzip
import io
import math
import os
import pickle
import struct
import tarfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from semclust import cache
from semclust.errors import InputError, in_short
from semclust.files import file_source, find_images
from semclust.pixels import array_source
from semclust.sources import AskedSize, Shape, Source

IMAGENET_10 = tuple(
    f"n{number:08}"
    for number in (2056570, 2085936, 2128757, 2690373, 2692877, 3095699, 4254680, 4285008, 4467665, 7747607)
)
IMAGENET_DOGS = tuple(
    f"n{number:08}"
    for number in (
        *(2085936, 2086646, 2088238, 2091467, 2097130, 2099601, 2101388, 2101556),
        *(2102177, 2105056, 2105412, 2105855, 2107142, 2110958, 2112137),
    )
)
BENCHMARKS = (
    *("cifar10", "cifar100", "stl10", "stl10-unlabelled", "imagenet-10", "imagenet-dogs", "tiny-imagenet"),
    "fashion-mnist",
)
INSTALLED = {"fashion-mnist": "/usr/share/datasets/fashion-mnist"}  # of Debian's package dataset-fashion-mnist

Contents = dict[str, np.ndarray]  # name of a file, and its bytes


def benchmark_source(name: str, path: str) -> Source:
    """``name``: one of BENCHMARKS."""
    path = os.path.expanduser(path)
    if not os.path.exists(path) and path == INSTALLED.get(name):
        raise InputError(f"{name}: {path!r} is not there; install Debian's dataset-{name}, or say {name}:PATH.")
    if not os.path.exists(path):
        raise InputError(f"{name}: there is no file or folder {path!r}; expected the published archive, or its folder.")
    if name == "cifar10":
        return _cifar(name, path, "cifar-10-batches-py", "cifar-10-batches-bin", CIFAR10, "labels", label_bytes=1)
    if name == "cifar100":
        return _cifar(name, path, "cifar-100-python", "cifar-100-binary", CIFAR100, "coarse_labels", label_bytes=2)
    if name.startswith("stl10"):
        return _stl10(name, path, unlabelled=name == "stl10-unlabelled")
    if name == "fashion-mnist":
        return _fashion_mnist(path)
    if name == "tiny-imagenet":
        return _tiny_imagenet(path)
    return _imagenet(name, path, IMAGENET_10 if name == "imagenet-10" else IMAGENET_DOGS)


# ---- CIFAR: 32 x 32, a row is 1,024 bytes of red, then of green, then of blue --------------------------

CIFAR10 = (("train", [f"data_batch_{i}" for i in range(1, 6)]), ("test", ["test_batch"]))
CIFAR100 = (("train", ["train"]), ("test", ["test"]))


def _cifar(
    name: str,
    path: str,
    python: str,
    binary: str,
    splits: Sequence[tuple[str, list[str]]],
    label_key: str,
    label_bytes: int,
) -> Source:
    wanted = [batch for _, batches in splits for batch in batches]
    archive = python.replace("-batches-py", "-python")
    layouts = [
        (python, f"{archive}.tar.gz", wanted),
        (binary, binary.replace("batches-bin", "binary") + ".tar.gz", [f"{batch}.bin" for batch in wanted]),
    ]
    contents, files = _published(name, path, layouts)
    parts, labels = [], []
    names: list[str] = []
    for split, batches in splits:
        n_before = len(names)
        for batch in batches:
            if files is wanted:
                rows, found = _python_batch(contents[batch], f"{path}: {batch}", label_key)
            else:
                rows, found = _binary_batch(contents[f"{batch}.bin"], f"{path}: {batch}.bin", label_bytes)
            parts.append(rows.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
            labels.append(found)
            names += [f"{split}/{i}" for i in range(len(names) - n_before, len(names) - n_before + len(rows))]
    return array_source(parts, name, labels=np.concatenate(labels), names=names)


def _binary_batch(content: np.ndarray, where: str, label_bytes: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of label and pixels; CIFAR-100 has the coarse label first, then the fine one."""
    if not len(content) or len(content) % (3072 + label_bytes):
        raise InputError(f"{where} has {len(content)} bytes, not rows of {3072 + label_bytes}; download it again.")
    rows = content.reshape(-1, 3072 + label_bytes)
    return rows[:, label_bytes:], rows[:, 0].astype(np.int64)


def _python_batch(content: np.ndarray, where: str, label_key: str) -> tuple[np.ndarray, np.ndarray]:
    try:
        batch = _BatchReader(io.BytesIO(content.tobytes()), encoding="bytes").load()
        rows, labels = batch[b"data"].values, np.array(batch[label_key.encode()])
        if labels.dtype.kind != "i" or rows.shape != (len(labels), 3072):
            raise ValueError(f"{len(labels)} labels for data of shape {rows.shape}")
        return rows, labels.astype(np.int64)
    except Exception as error:  # a damaged or foreign pickle can make the reader raise almost anything
        raise InputError(f"{where} is not a batch of CIFAR ({in_short(error)}); download it again.") from error


class _Array:
    """Stands in for NumPy's array in a batch: takes its shape and bytes, and nothing else."""

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, in_columns, content = state
        if dtype != _Bytes() or in_columns or not isinstance(content, bytes):
            raise ValueError("expected rows of bytes")
        self.values = np.frombuffer(content, np.uint8).reshape(shape)


class _Bytes:
    """Stands in for NumPy's type of bytes, the only one there is in a batch."""

    def __setstate__(self, state: Any) -> None: ...

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Bytes)


def _make_array(*_: Any) -> _Array:
    return _Array()


def _make_type(code: Any, *_: Any) -> _Bytes:
    if code not in (b"u1", "u1"):
        raise ValueError(f"an array of {code!r}; expected bytes")
    return _Bytes()


class _BatchReader(pickle.Unpickler):
    """Reads dictionaries, lists, strings, numbers and arrays of bytes. The batches are pickles, which could name any
    function to be called: here the names that arrays need lead to the stand-ins above, and all others are refused."""

    def find_class(self, module: str, name: str) -> Any:
        if module in ("numpy.core.multiarray", "numpy._core.multiarray") and name == "_reconstruct":
            return _make_array
        if module == "numpy" and name in ("ndarray", "dtype"):
            return _Array if name == "ndarray" else _make_type
        raise ValueError(f"it names {module}.{name}, which is no part of a batch")


# ---- STL-10: 96 x 96, column after column ---------------------------------------------------------------


def _stl10(name: str, path: str, unlabelled: bool) -> Source:
    splits = ["train", "test"]
    wanted = [f"{split}_{part}.bin" for split in splits for part in "Xy"] + ["unlabeled_X.bin"] * unlabelled
    contents, _ = _published(name, path, [("stl10_binary", "stl10_binary.tar.gz", wanted)])
    if unlabelled:
        splits.append("unlabeled")
    parts, names = [], []
    for split in splits:
        content = contents[f"{split}_X.bin"]
        if not len(content) or len(content) % (3 * 96 * 96):
            raise InputError(f"{path}: {split}_X.bin has {len(content)} bytes, not images of 27648; download it again.")
        parts.append(content.reshape(-1, 3, 96, 96).transpose(0, 3, 2, 1))
        names += [f"{split}/{i}" for i in range(len(parts[-1]))]
    if unlabelled:
        return array_source(parts, name, names=names)
    labels = np.concatenate([contents[f"{split}_y.bin"] for split in splits]).astype(np.int64) - 1  # stored from 1
    return array_source(parts, name, labels=labels, names=names)


def _published(name: str, path: str, layouts: Sequence[tuple[str, str, list[str]]]) -> tuple[Contents, list[str]]:
    """The files of the first layout (folder, archive, files) that is there, and which those are."""
    if os.path.isfile(path):
        for _, archive, files in layouts:
            if os.path.basename(path) == archive or len(layouts) == 1:
                return _from_archive(path, files), files
        expected = " or ".join(archive for _, archive, _ in layouts)
        raise InputError(f"{name}: {path!r} is not one of the published archives; expected {expected}.")
    for folder, archive, files in layouts:
        for place in (path, os.path.join(path, folder)):
            if os.path.isfile(os.path.join(place, files[0])):  # a folder train may be of something else
                missing = [file for file in files if not os.path.isfile(os.path.join(place, file))]
                if missing:
                    raise InputError(f"{name}: {place!r} lacks {', '.join(missing)}; unpack the archive again.")
                return {file: _map(os.path.join(place, file)) for file in files}, files
        if os.path.isfile(os.path.join(path, archive)):
            return _from_archive(os.path.join(path, archive), files), files
    expected = ", ".join(f"{folder}/ or {archive}" for folder, archive, _ in layouts)
    raise InputError(f"{name}: {path!r} holds neither; expected {expected}.")


def _map(path: str) -> np.ndarray:
    return np.memmap(path, np.uint8, "r") if os.path.getsize(path) else np.empty(0, np.uint8)


def _from_archive(path: str, files: list[str]) -> Contents:
    contents: Contents = {}
    try:
        with tarfile.open(path, "r|*") as tar:
            for entry in tar:
                name = entry.name.rpartition("/")[2]
                if name in files and entry.isreg() and (member := tar.extractfile(entry)):
                    contents[name] = _read_member(member, entry.size)  # type: ignore[arg-type]
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path!r} is damaged ({in_short(error)}); download it again.") from error
    if missing := [file for file in files if file not in contents]:
        raise InputError(f"{path!r} lacks {', '.join(missing)}; download it again.")
    return contents


def _read_member(member: BinaryIO, n_bytes: int) -> np.ndarray:
    """In memory, or in a nameless file if there is much of it. Trouble with that file is the store's to deal with: an
    error that comes out of here is one of the archive."""
    store = cache.Store(None, n_bytes, (1, 1, 1))
    try:
        while piece := member.read(cache.PIECE):
            store.append(np.frombuffer(piece, np.uint8).reshape(-1, 1, 1, 1))
    except BaseException:
        store.discard()
        raise
    return store.finish([], False, False, False).reshape(-1)


# ---- Fashion-MNIST: 28 x 28, grey; sizes as big-endian numbers, then all bytes ----------------------------


def _fashion_mnist(path: str) -> Source:
    parts, labels, names = [], [], []
    for split, prefix in (("train", "train"), ("test", "t10k")):
        images = _idx_file(path, f"{prefix}-images-idx3-ubyte", 3)
        classes = _idx_file(path, f"{prefix}-labels-idx1-ubyte", 1)
        if len(images) != len(classes):
            raise InputError(f"{path}: {prefix} has {len(images)} images but {len(classes)} labels; download it again.")
        parts.append(images)
        labels.append(classes.astype(np.int64))
        names += [f"{split}/{i}" for i in range(len(images))]
    return array_source(parts, "fashion-mnist", labels=np.concatenate(labels), names=names)


def _idx_file(path: str, file: str, dimensions: int) -> np.ndarray:
    for inside in ("", "fashion-mnist", "FashionMNIST/raw", "raw"):
        for name in (file, f"{file}.gz"):
            whole = os.path.join(path, inside, name)
            if os.path.isfile(whole):
                return _read_idx(whole, dimensions)
    raise InputError(f"fashion-mnist: {path!r} lacks {file}.gz; expected the folder with the four published files.")


def _read_idx(path: str, dimensions: int) -> np.ndarray:
    try:
        with gzip.open(path) if path.endswith(".gz") else open(path, "rb") as file:
            content = file.read()
        head = 4 + 4 * dimensions
        shape = struct.unpack(f">{dimensions}I", content[4:head])
        if content[:4] != bytes([0, 0, 8, dimensions]) or len(content) != head + math.prod(shape):
            raise ValueError("it is no IDX file of bytes, or cut short")
    except (OSError, EOFError, zlib.error, struct.error, ValueError) as error:
        raise InputError(f"{path!r} is damaged ({in_short(error)}); download it again.") from error
    return np.frombuffer(content, np.uint8, offset=head).reshape(shape)


# ---- ImageNet: one folder for each class -----------------------------------------------------------------


def _imagenet(name: str, path: str, classes: Sequence[str]) -> Source:
    for inside in ("", "train", "ILSVRC2012_img_train", "ILSVRC/Data/CLS-LOC/train", "Data/CLS-LOC/train"):
        tree = os.path.join(path, inside)
        missing = [wnid for wnid in classes if not os.path.isdir(os.path.join(tree, wnid))]
        if len(missing) < len(classes):
            break
    if missing:
        raise InputError(
            f"{name}: {path!r} lacks the folders of {len(missing)} of {len(classes)} classes ({', '.join(missing[:3])}"
            f"{', ...' if len(missing) > 3 else ''}); expected ImageNet's training images, one folder for each class."
        )
    return _class_folders(name, tree, classes, side=96)


def _tiny_imagenet(path: str) -> Source:
    for inside in ("train", "tiny-imagenet-200/train", ""):
        tree = os.path.join(path, inside)
        classes = sorted(entry.name for entry in os.scandir(tree) if _is_class(entry)) if os.path.isdir(tree) else []
        if classes:
            return _class_folders("tiny-imagenet", tree, classes, side=64)
    packed = path.endswith(".zip") or os.path.exists(os.path.join(path, "tiny-imagenet-200.zip"))
    raise InputError(
        f"tiny-imagenet: {path!r} holds no train/n01443537/images/...; "
        + ("unpack tiny-imagenet-200.zip first." if packed else "expected the folder tiny-imagenet-200.")
    )


def _is_class(entry: "os.DirEntry[str]") -> bool:
    return entry.name[:1] == "n" and entry.name[1:].isdigit() and entry.is_dir()


def _class_folders(name: str, tree: str, classes: Sequence[str], side: int) -> Source:
    names: list[str] = []
    labels: list[str] = []
    unlisted: list[tuple[str, str]] = []
    for wnid in classes:
        found, problems = find_images(os.path.join(tree, wnid))
        names += [f"{wnid}/{file}" for file in found]
        labels += [wnid] * len(found)
        unlisted += [(f"{wnid}/{folder}", why) for folder, why in problems]
    if not names:
        raise InputError(f"{name}: the folders of the classes in {str(Path(tree))!r} hold no images.")
    source = file_source(names, tree, name, np.array(labels), unlisted)
    of_files = source.shape

    def shape(size: AskedSize, channels: int | None) -> Shape:
        return of_files(side if size is None else size, channels or 3)  # as in the paper; a few images are grey

    source.shape = shape
    return source
