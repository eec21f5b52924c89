"""The paper's data sets, from small files in the published formats."""

import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest

from conftest import refused
from published import cifar10, cifar100, class_folder, fashion_mnist, pack, python2_pickle, random_rows, stl10
from semclust import benchmarks, cache
from semclust.benchmarks import BENCHMARKS, IMAGENET_10, IMAGENET_DOGS
from semclust.data import find_source, open_images, stream_images
from semclust.errors import InputError

LAYOUTS = [
    ("cifar10", "python", "cifar-10-batches-py", "cifar-10-python.tar.gz"),
    ("cifar10", "binary", "cifar-10-batches-bin", "cifar-10-binary.tar.gz"),
    ("cifar100", "python", "cifar-100-python", "cifar-100-python.tar.gz"),
    ("cifar100", "binary", "cifar-100-binary", "cifar-100-binary.tar.gz"),
]


@pytest.mark.parametrize(("name", "kind", "folder", "archive"), LAYOUTS)
def test_cifar_from_everything_that_is_published(tmp_path: Path, name, kind, folder, archive):
    rows, labels = (cifar10 if name == "cifar10" else cifar100)(tmp_path / folder, kind)
    pack(tmp_path / folder, tmp_path / archive)
    upright = rows.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)

    def check(path: Path) -> None:
        images = open_images(f"{name}:{path}")
        assert images.pixels.shape == (len(rows), 32, 32, 3) and (images.pixels == upright).all()
        assert images.labels.tolist() == labels
        assert images.source == name and images.file(0) is None
        assert len(set(images.names)) == len(rows)
        n_train = sum(one.startswith("train/") for one in images.names)
        assert n_train == (15 if name == "cifar10" else 4)
        assert images.names[0] == "train/0" and images.names[n_train] == "test/0"

    check(tmp_path)
    check(tmp_path / folder)
    shutil.rmtree(tmp_path / folder)
    check(tmp_path)
    check(tmp_path / archive)


def test_the_pickles_of_the_helper_are_real_ones():
    """So the format that is tested is the one that Python itself reads."""
    data = random_rows(2, 0)
    batch = pickle.loads(python2_pickle({"labels": [3, 70000], "data": data, "name": "x" * 300}), encoding="bytes")
    assert batch[b"labels"] == [3, 70000] and (batch[b"data"] == data).all() and batch[b"name"] == b"x" * 300


def test_a_batch_that_would_run_code_is_refused(tmp_path: Path):
    folder, trap = tmp_path / "cifar-10-batches-py", tmp_path / "sprung"
    cifar10(folder, "python")

    class Booby:
        def __reduce__(self):
            return Path.touch, (trap,)

    for content in (
        pickle.dumps(Booby()),
        pickle.dumps({b"data": Booby(), b"labels": []}, protocol=2),
        b"cos\nsystem\n(S'touch " + str(trap).encode() + b"'\ntR.",
        b"cnumpy\nload\n(S'x'\ntR.",
        pickle.dumps(np.array([Booby()], dtype=object), protocol=2),
    ):
        (folder / "data_batch_3").write_bytes(content)
        refused(f"cifar10:{folder}", "data_batch_3", "not a batch of CIFAR")
    assert not trap.exists()
    pickle.loads(pickle.dumps(Booby()))
    assert trap.exists()  # the trap works


@pytest.mark.parametrize(
    "batch",
    [
        {"labels": [1, 2], "data": np.zeros((3, 3072), np.uint8)},
        {"labels": [1, 2, 3], "data": np.zeros((3, 3000), np.uint8)},
        {"labels": ["a", "b", "c"], "data": np.zeros((3, 3072), np.uint8)},
        {"fine": [1, 2, 3], "data": np.zeros((3, 3072), np.uint8)},
        {"labels": [1, 2, 3]},
    ],
)
def test_a_batch_of_another_content_is_refused(tmp_path: Path, batch):
    cifar10(tmp_path / "b", "python")
    (tmp_path / "b" / "test_batch").write_bytes(python2_pickle(batch))
    refused(f"cifar10:{tmp_path / 'b'}", "test_batch", "not a batch of CIFAR", "download it again")


def test_arrays_of_other_types_in_a_batch_are_refused(tmp_path: Path):
    cifar10(tmp_path / "b", "python")
    batch = python2_pickle({"labels": [1], "data": np.zeros((1, 3072), np.uint8)})
    for kind in (b"U\x02O8", b"U\x02f4"):
        (tmp_path / "b" / "test_batch").write_bytes(batch.replace(b"U\x02u1", kind))
        refused(f"cifar10:{tmp_path / 'b'}", "expected bytes")


def test_incomplete_and_damaged_files_are_named(tmp_path: Path):
    folder = tmp_path / "cifar-10-batches-bin"
    cifar10(folder, "binary")
    (folder / "data_batch_2.bin").write_bytes(bytes(3000))
    refused(f"cifar10:{tmp_path}", "data_batch_2.bin", "3000 bytes", "3073")
    (folder / "data_batch_2.bin").unlink()
    refused(f"cifar10:{tmp_path}", "lacks data_batch_2.bin")
    archive = pack(folder, tmp_path / "cifar-10-binary.tar.gz")
    refused(f"cifar10:{archive}", "lacks data_batch_2.bin")
    archive.write_bytes(archive.read_bytes()[:-3000])
    refused(f"cifar10:{archive}", "damaged", "download it again")
    refused(f"cifar10:{tmp_path / 'no'}", "no file or folder")
    (tmp_path / "empty").mkdir()
    refused(f"cifar10:{tmp_path / 'empty'}", "cifar-10-batches-py", "cifar-10-binary.tar.gz")
    (tmp_path / "x.zip").touch()
    refused(f"cifar10:{tmp_path / 'x.zip'}", "expected cifar-10-python.tar.gz")


@pytest.mark.parametrize("scratch", [2**28, 1000])
def test_stl10_upright_with_labels_and_all_on_request(tmp_path: Path, monkeypatch, scratch):
    monkeypatch.setattr(cache, "SCRATCH_FROM", scratch)
    pixels, labels = stl10(tmp_path / "stl10_binary")
    archive = pack(tmp_path / "stl10_binary", tmp_path / "stl10_binary.tar.gz")
    for path in (tmp_path, tmp_path / "stl10_binary", archive):
        images = open_images(f"stl10:{path}")
        assert images.pixels.shape == (5, 96, 96, 3) and (images.pixels == pixels[:5]).all()
        assert images.labels.tolist() == labels and images.names[1:3] == ["train/1", "test/0"]
        everything = open_images(f"stl10-unlabelled:{path}")
        assert (everything.pixels == pixels).all() and everything.labels is None
        assert everything.names[-1] == "unlabeled/3" and everything.source == "stl10-unlabelled"
    assert list(cache.folder().glob("*")) == [] if cache.folder().exists() else True
    (tmp_path / "stl10_binary" / "test_X.bin").write_bytes(bytes(100))
    refused(f"stl10:{tmp_path}", "test_X.bin", "27648")


def test_cifar100_beside_a_folder_called_train(tmp_path: Path):
    _, labels = cifar100(tmp_path / "cifar-100-python", "python")
    (tmp_path / "train").mkdir()
    assert open_images(f"cifar100:{tmp_path}").labels.tolist() == labels
    shutil.rmtree(tmp_path / "cifar-100-python")
    refused(f"cifar100:{tmp_path}", "expected cifar-100-python/")


@pytest.mark.parametrize("trouble", ["no folder", "full", "fills up"])
def test_trouble_with_the_cache_is_not_blamed_on_the_archive(tmp_path: Path, monkeypatch, own_cache, trouble):
    monkeypatch.setattr(cache, "SCRATCH_FROM", 1000)
    pixels, _ = stl10(tmp_path / "stl10_binary")
    archive = pack(tmp_path / "stl10_binary", tmp_path / "stl10_binary.tar.gz")
    where = own_cache
    if trouble == "no folder":
        where = archive / "cache"
        monkeypatch.setenv("SEMCLUST_CACHE", str(where))
    elif trouble == "full":
        monkeypatch.setattr(cache.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 10_000})())
    else:
        monkeypatch.setattr(cache, "_write_all", lambda *a: (_ for _ in ()).throw(OSError(28, "No space left")))
    with pytest.warns(UserWarning, match=f"{where}.*SEMCLUST_CACHE"):
        images = open_images(f"stl10:{archive}")
    assert (images.pixels == pixels[:5]).all() and list(own_cache.iterdir()) == []


def test_room_is_made_for_what_an_archive_holds(tmp_path: Path, monkeypatch, own_cache):
    monkeypatch.setattr(cache, "SCRATCH_FROM", 1000)
    stl10(tmp_path / "stl10_binary")
    archive = pack(tmp_path / "stl10_binary", tmp_path / "stl10_binary.tar.gz")
    old = own_cache / f"{'a' * 40}-10x10x1.pixels"
    old.write_bytes(bytes(10**6))

    def usage(path):
        return type("Usage", (), {"free": 10**6 + 50_000 - sum(file.stat().st_size for file in own_cache.iterdir())})()

    monkeypatch.setattr(cache.shutil, "disk_usage", usage)
    assert len(find_source(f"stl10:{archive}").names) == 5 and not old.exists()


def test_a_damaged_archive_leaves_nothing_in_the_cache(tmp_path: Path, monkeypatch, own_cache):
    monkeypatch.setattr(cache, "SCRATCH_FROM", 1000)
    stl10(tmp_path / "stl10_binary")
    archive = pack(tmp_path / "stl10_binary", tmp_path / "stl10_binary.tar.gz")
    archive.write_bytes(archive.read_bytes()[:40_000])
    refused(f"stl10:{archive}", "damaged", "download it again")
    assert list(own_cache.iterdir()) == []


def test_the_classes_of_the_protocol():
    assert len(IMAGENET_10) == len(set(IMAGENET_10)) == 10 and len(IMAGENET_DOGS) == len(set(IMAGENET_DOGS)) == 15
    assert IMAGENET_10[0] == "n02056570" and IMAGENET_10[-1] == "n07747607"
    assert IMAGENET_DOGS[0] == "n02085936" and IMAGENET_DOGS[-1] == "n02112137" and "n02105412" in IMAGENET_DOGS


@pytest.mark.parametrize("inside", ["", "train", "ILSVRC/Data/CLS-LOC/train"])
@pytest.mark.parametrize(("name", "classes"), [("imagenet-10", IMAGENET_10), ("imagenet-dogs", IMAGENET_DOGS)])
def test_imagenet_subsets_by_class(tmp_path: Path, name, classes, inside):
    tree = tmp_path / inside
    for i, wnid in enumerate([*classes, "n01440764"]):
        class_folder(tree / wnid, 2, f"rgb({10 * i}, 0, 0)", (50 + i, 40))
    images = open_images(f"{name}:{tmp_path}")
    assert images.pixels.shape == (2 * len(classes), 96, 96, 3)
    assert images.labels.tolist() == [wnid for wnid in classes for _ in range(2)]
    assert images.names[0] == f"{classes[0]}/{classes[0]}_0.JPEG" and images.file(0).is_file()
    assert open_images(f"{name}:{tmp_path}", size=32).pixels.shape[1:] == (32, 32, 3)
    assert len(open_images(f"{name}:{tmp_path}").names) == len(images.names)
    shutil.rmtree(tree / classes[1])
    refused(f"{name}:{tmp_path}", "1 of", classes[1])


def test_a_benchmark_has_its_own_size_beside_the_same_files_as_a_folder(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("semclust.files.WORTH_KEEPING", 1)
    for wnid in IMAGENET_10:
        class_folder(tmp_path / wnid, 1, "red", (40, 40))
    for _ in range(2):
        assert open_images(f"imagenet-10:{tmp_path}").pixels.shape == (10, 96, 96, 3)
        assert open_images(tmp_path).pixels.shape == (10, 40, 40, 3)


def test_labels_stay_with_their_images_where_one_is_skipped(tmp_path: Path):
    for wnid in IMAGENET_10:
        class_folder(tmp_path / wnid, 2, "red", (40, 40))
    (tmp_path / IMAGENET_10[2] / f"{IMAGENET_10[2]}_0.JPEG").write_bytes(b"")
    images = open_images(f"imagenet-10:{tmp_path}")
    assert [name.split("/")[0] for name in images.names] == images.labels.tolist() and len(images.labels) == 19
    parts = list(stream_images(f"imagenet-10:{tmp_path}", size=(96, 96), channels=3, chunk=3))
    assert [label for part in parts for label in part.labels] == images.labels.tolist()


@pytest.mark.parametrize("inside", ["tiny-imagenet-200/train", "train", ""])
def test_tiny_imagenet(tmp_path: Path, inside):
    for i, wnid in enumerate(("n01443537", "n01629819")):
        class_folder(tmp_path / inside / wnid / "images", 3, f"rgb(0, {99 * i}, 0)", (64, 64))
        (tmp_path / inside / wnid / f"{wnid}_boxes.txt").write_text("n01443537_0.JPEG\t0\t10\t63\t58\n")
    images = open_images(f"tiny-imagenet:{tmp_path}")
    assert images.pixels.shape == (6, 64, 64, 3) and images.labels.tolist() == ["n01443537"] * 3 + ["n01629819"] * 3
    assert images.names[0] == "n01443537/images/images_0.JPEG"


def test_tiny_imagenet_that_is_still_packed(tmp_path: Path):
    (tmp_path / "tiny-imagenet-200.zip").touch()
    refused(f"tiny-imagenet:{tmp_path}", "unpack tiny-imagenet-200.zip")
    refused(f"tiny-imagenet:{tmp_path / 'tiny-imagenet-200.zip'}", "unpack")
    (tmp_path / "x").mkdir()
    refused(f"tiny-imagenet:{tmp_path / 'x'}", "expected the folder tiny-imagenet-200")


def test_every_name_is_known(tmp_path: Path):
    for name in BENCHMARKS:
        with pytest.raises(InputError, match=name):
            benchmarks.benchmark_source(name, str(tmp_path))


# ---- Fashion-MNIST -------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True])
def test_fashion_mnist(tmp_path: Path, monkeypatch, packed):
    folder = tmp_path / "fashion-mnist"
    pixels, labels = fashion_mnist(folder, packed)
    monkeypatch.setitem(benchmarks.INSTALLED, "fashion-mnist", str(folder))
    for source in (f"fashion-mnist:{folder}", f"fashion-mnist:{tmp_path}", "fashion-mnist"):
        images = open_images(source)
        assert (images.pixels[..., 0] == pixels).all() and images.labels.tolist() == labels
        assert images.source == "fashion-mnist" and images.names[4:6] == ["train/4", "test/0"]


def test_fashion_mnist_that_is_not_whole(tmp_path: Path, monkeypatch):
    monkeypatch.setitem(benchmarks.INSTALLED, "fashion-mnist", str(tmp_path / "nowhere"))
    refused("fashion-mnist", "install Debian's dataset-fashion-mnist", "fashion-mnist:PATH")
    refused(f"fashion-mnist:{tmp_path}", "lacks train-images-idx3-ubyte.gz")
    folder = tmp_path / "files"
    fashion_mnist(folder, packed=True)
    images, labels = folder / "train-images-idx3-ubyte.gz", folder / "train-labels-idx1-ubyte.gz"
    whole = images.read_bytes()
    for broken in (whole[:-20], b"not packed", labels.read_bytes()):
        images.write_bytes(broken)
        refused(f"fashion-mnist:{folder}", "train-images-idx3-ubyte.gz", "damaged")
    images.write_bytes((folder / "t10k-images-idx3-ubyte.gz").read_bytes())
    refused(f"fashion-mnist:{folder}", "2 images but 5 labels")
