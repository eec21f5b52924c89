"""Small data sets in the exact formats that the makers of the benchmarks publish."""

import gzip
import io
import struct
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image


def random_rows(n: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (n, 3072), dtype=np.uint8)


def python2_pickle(batch: dict[str, object]) -> bytes:
    """What cPickle of Python 2 wrote under protocol 2 for a dictionary of strings, lists and one array of bytes."""

    def text(value: bytes) -> bytes:
        return b"U" + bytes([len(value)]) + value if len(value) < 256 else b"T" + struct.pack("<i", len(value)) + value

    def number(value: int) -> bytes:
        if 0 <= value < 256:
            return b"K" + bytes([value])
        return b"M" + struct.pack("<H", value) if 0 <= value < 65536 else b"J" + struct.pack("<i", value)

    def array(value: np.ndarray) -> bytes:
        made = (
            b"cnumpy.core.multiarray\n_reconstruct\nq\x10cnumpy\nndarray\nq\x11K\x00\x85q\x12U\x01bq\x13\x87q\x14Rq\x15"
        )
        kind = b"cnumpy\ndtype\nq\x16U\x02u1q\x17K\x00K\x01\x87q\x18Rq\x19(K\x03U\x01|NNN" + number(-1) * 2 + b"K\x00tb"
        shape = b"".join(map(number, value.shape)) + b"\x86q\x1a"
        return made + b"(K\x01" + shape + kind + b"\x89" + text(value.tobytes()) + b"tb"

    def item(value: object) -> bytes:
        if isinstance(value, np.ndarray):
            return array(value)
        if isinstance(value, list):
            return b"](" + b"".join(map(item, value)) + b"e"
        return number(value) if isinstance(value, int) else text(str(value).encode())

    return b"\x80\x02}q\x01(" + b"".join(text(key.encode()) + item(value) for key, value in batch.items()) + b"u."


def fashion_mnist(folder: Path, packed: bool) -> tuple[np.ndarray, list[int]]:
    """Five images for training and two for testing, as .gz or unpacked; their pixels and labels, in this order."""
    folder.mkdir(parents=True)
    pixels = np.random.default_rng(0).integers(0, 256, (7, 28, 28), dtype=np.uint8)
    labels = [3, 1, 4, 1, 5, 9, 2]
    for prefix, rows in (("train", slice(0, 5)), ("t10k", slice(5, 7))):
        n = len(pixels[rows])
        for name, head, content in (
            ("images-idx3", struct.pack(">4I", 2051, n, 28, 28), pixels[rows].tobytes()),
            ("labels-idx1", struct.pack(">2I", 2049, n), bytes(labels[rows])),
        ):
            whole = head + content
            path = folder / f"{prefix}-{name}-ubyte{'.gz' * packed}"
            path.write_bytes(gzip.compress(whole) if packed else whole)
    return pixels, labels


def cifar10(folder: Path, kind: str, n: int = 3) -> tuple[np.ndarray, list[int]]:
    """Five batches for training and one for testing, of ``n`` images each; their rows and labels, in this order."""
    folder.mkdir(parents=True)
    rows, labels = [], []
    for number, name in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]):
        data, classes = random_rows(n, number), [(number + i) % 10 for i in range(n)]
        rows.append(data)
        labels += classes
        if kind == "python":
            batch = {
                "batch_label": "training batch",
                "labels": classes,
                "data": data,
                "filenames": [f"{i}.png" for i in range(n)],
            }
            (folder / name).write_bytes(python2_pickle(batch))
        else:
            (folder / f"{name}.bin").write_bytes(np.column_stack([np.uint8(classes), data]).tobytes())
    (folder / ("batches.meta" if kind == "python" else "batches.meta.txt")).write_bytes(b"not needed")
    return np.concatenate(rows), labels


def cifar100(folder: Path, kind: str, n: int = 4) -> tuple[np.ndarray, list[int]]:
    """Rows and the labels of the superclasses."""
    folder.mkdir(parents=True)
    rows, labels = [], []
    for number, name in enumerate(["train", "test"]):
        data = random_rows(n, 50 + number)
        coarse, fine = [(3 * i + number) % 20 for i in range(n)], [(7 * i) % 100 for i in range(n)]
        rows.append(data)
        labels += coarse
        if kind == "python":
            batch = {
                "data": data,
                "batch_label": name,
                "fine_labels": fine,
                "coarse_labels": coarse,
                "filenames": [f"{i}.png" for i in range(n)],
            }
            (folder / name).write_bytes(python2_pickle(batch))
        else:
            (folder / f"{name}.bin").write_bytes(np.column_stack([np.uint8(coarse), np.uint8(fine), data]).tobytes())
    return np.concatenate(rows), labels


def stl10(folder: Path, n_train: int = 2, n_test: int = 3, n_unlabelled: int = 4) -> tuple[np.ndarray, list[int]]:
    """All images (train, test, unlabelled) upright as N x 96 x 96 x 3, and the labels of the first two, from 0."""
    folder.mkdir(parents=True)
    images, labels = [], []
    for number, (name, n) in enumerate({"train": n_train, "test": n_test, "unlabeled": n_unlabelled}.items()):
        pixels = np.random.default_rng(number).integers(0, 256, (n, 96, 96, 3), dtype=np.uint8)
        images.append(pixels)
        (folder / f"{name}_X.bin").write_bytes(pixels.transpose(0, 3, 2, 1).tobytes())  # channel, column, row
        if name != "unlabeled":
            classes = [(number + i) % 10 for i in range(n)]
            labels += classes
            (folder / f"{name}_y.bin").write_bytes(bytes(label + 1 for label in classes))
    (folder / "class_names.txt").write_text("airplane\nbird\n")
    return np.concatenate(images), labels


def pack(folder: Path, archive: Path) -> Path:
    """The .tar.gz in which such a folder is published."""
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(folder, folder.name)
    return archive


def class_folder(folder: Path, n: int, colour: str, size: tuple[int, int]) -> None:
    folder.mkdir(parents=True)
    for i in range(n):
        Image.new("RGB", size, colour).save(folder / f"{folder.name}_{i}.JPEG")


def shard(path: Path, members: dict[str, bytes]) -> Path:
    """A tar in WebDataset's layout."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def encoded(pixels: np.ndarray, kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind)
    return buffer.getvalue()
