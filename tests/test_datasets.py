"""Data sets of other libraries: anything with len and [i]."""

import io
import threading

import numpy as np
import pytest
import torch
from PIL import Image

from conftest import noisy_groups, refused, tiny
from semclust import SemanticClusterer
from semclust.config import values
from semclust.data import open_images, stream_images
from semclust.errors import InputError


def noise(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


PIXELS = noise(5, 20, 24, 3)
LABELS = [3, 1, 4, 1, 5]


class Flowers:
    """What a data set of torchvision looks like from outside."""

    def __init__(self, items: list):
        self.items, self.busy = items, threading.Lock()

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, i: int):
        assert type(i) is int and self.busy.acquire(blocking=False), "asked by two threads at once"
        try:
            item = self.items[i]
            return item() if callable(item) else item
        finally:
            self.busy.release()


@pytest.mark.parametrize(
    "form",
    [
        lambda image, label: (Image.fromarray(image), label),
        lambda image, label: [Image.fromarray(image), np.int64(label), "more"],
        lambda image, label: (image, torch.tensor(label)),
        lambda image, label: (torch.from_numpy(image).permute(2, 0, 1), label),
        lambda image, label: (torch.from_numpy(image).permute(2, 0, 1) / 255, label),
        lambda image, label: (image.astype(np.float32) / 255, label),
        lambda image, label: (image.astype(np.int64), label),
        lambda image, label: {"image": Image.fromarray(image), "label": label},
        lambda image, label: {"img": image, "labels": label, "other": None},
        lambda image, label: {"image": {"bytes": png(image), "path": None}, "label": label},
    ],
)
def test_forms_of_items(form):
    images = open_images(Flowers([form(image, label) for image, label in zip(PIXELS, LABELS, strict=True)]))
    assert (images.pixels == PIXELS).all() and images.labels.tolist() == LABELS
    assert images.names == ["0", "1", "2", "3", "4"] and images.source == "flowers" and images.file(0) is None


def png(image: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "PNG")
    return buffer.getvalue()


def test_images_without_labels_and_with_odd_ones():
    assert open_images(Flowers([Image.fromarray(image) for image in PIXELS])).labels is None
    assert open_images(Flowers([(image, "abcde"[i]) for i, image in enumerate(PIXELS)])).labels.tolist() == list(
        "abcde"
    )
    for label in (None, 0.5, [1, 2], np.arange(3), torch.arange(2)):
        items = [(image, 1) for image in PIXELS[:4]] + [(PIXELS[4], label)]
        assert open_images(Flowers(items)).labels is None


def test_sizes_and_modes_are_mixed():
    items = [Image.fromarray(noise(30, 40)), noise(50, 60, 4), torch.zeros(1, 25, 70), noise(26, 26).astype(bool)]
    images = open_images(Flowers(items))
    assert images.pixels.shape == (4, 28, 28, 3)
    grey = open_images(Flowers([noise(20, 20), torch.from_numpy(noise(1, 20, 20))]))
    assert grey.pixels.shape == (2, 20, 20, 1) and (grey.pixels[..., 0] == noise(20, 20)).all()


def test_the_range_of_floats_is_remembered():
    floats = Flowers([torch.from_numpy(image).permute(2, 0, 1) / 255 for image in PIXELS])
    images = open_images(floats)
    assert images.value_range == (0.0, 1.0)
    again = open_images(PIXELS[:2].astype(np.float32) / 255, value_range=images.value_range)
    assert (again.pixels == PIXELS[:2]).all()
    assert (open_images(floats, value_range=(0.0, 255.0)).pixels == PIXELS).all()  # of a model that was fitted on bytes
    wide = Flowers([image / 255 * 4 - 2 for image in PIXELS])
    assert (open_images(wide, value_range=(-2.0, 2.0)).pixels == PIXELS).all()
    assert open_images(Flowers(list(PIXELS))).value_range == (0.0, 255.0)


def test_floats_from_0_to_255_are_treated_as_in_a_fit():
    """A model that was fitted on bytes passes their range on: floats must not be taken for 0 to 1 and become white."""
    wide = Flowers([image.astype(np.float32) for image in PIXELS])
    refused(wide, "floats from 0 to 255", "floats from 0 to 1")
    with pytest.raises(InputError, match="floats from 0 to 255"):
        list(stream_images(wide, size=(20, 24), channels=3, value_range=(0.0, 255.0)))
    halves = Flowers([image.astype(np.float32) / 255 for image in PIXELS] + [PIXELS[0].astype(np.float32)])
    (part,) = stream_images(halves, size=(20, 24), channels=3, value_range=(0.0, 255.0))
    assert (part.pixels == PIXELS).all() and [name for name, _ in part.skipped] == ["5"]
    (part,) = stream_images(halves, size=(20, 24), channels=3, value_range=(0.0, 1.0))  # of a fit on floats
    assert (part.pixels[5] == np.where(PIXELS[0] > 0, 255, 0)).all() and not part.skipped


def test_encoded_images_have_the_limit_of_pixels_too(monkeypatch):
    small = [png(image) for image in PIXELS]
    for content in (lambda one: one, lambda one: {"image": {"bytes": one, "path": None}}):
        items = Flowers([content(one) for one in [*small, png(noise(40, 40, 3))]])
        with monkeypatch.context() as patch:
            patch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)  # Pillow itself only warns up to twice that
            assert [name for name, why in open_images(items).skipped if "MAX_IMAGE_PIXELS" in why] == ["5"]
        assert open_images(items).skipped == []
    assert open_images(Flowers([*small, b""])).skipped == [("5", "empty file")]


def test_items_that_are_no_images_are_skipped_with_their_labels():
    def fail():
        raise KeyError("corrupt record")

    items = [
        (PIXELS[0], 0),
        fail,
        (PIXELS[1], 1),
        ("text", 9),
        (PIXELS[2], 2),
        (PIXELS[3], 3),
        (np.full((9, 9), np.nan), 9),
    ]
    images = open_images(Flowers(items))
    assert images.names == ["0", "2", "4", "5"] and images.labels.tolist() == [0, 1, 2, 3]
    assert (images.pixels.shape[0], len(images.skipped)) == (4, 3)
    reasons = dict(images.skipped)
    assert "corrupt record" in reasons["1"] and "str is no image" in reasons["3"] and "NaN" in reasons["6"]
    parts = list(stream_images(Flowers(items), size=(20, 24), channels=3, chunk=2))
    assert [name for part in parts for name in part.names] == images.names
    assert [label for part in parts for label in (part.labels if part.labels is not None else [])] == [0, 1, 2, 3]
    assert [one for part in parts for one in part.skipped] == images.skipped


def test_sets_of_something_else_are_refused():
    refused(Flowers([]), "empty")
    refused(Flowers([torch.randn(3, 20, 20) * 2] * 3), "3 of 3", "expected bytes, or floats from 0 to 1")
    refused(Flowers([{"text": "a"}] * 3), "the key image or img", "['text']")
    refused(Flowers(["a.png"] * 3), "str is no image", "a PIL image")
    refused(Flowers([np.zeros((20, 20, 7), np.uint8)]), "(20, 20, 7)")
    refused(Flowers([np.zeros((0, 20, 3), np.uint8)]), "no pixels")
    refused(Flowers([np.zeros((20, 20), complex)]), "complex")
    refused({"train": Flowers([PIXELS[0]])}, "data['train']")


def test_the_images_of_the_caller_stay_as_they_are():
    mine = [Image.open(io.BytesIO(png(image))) for image in PIXELS]
    for _ in range(2):
        assert (open_images(Flowers(mine)).pixels == PIXELS).all()
    assert (np.asarray(mine[0]) == PIXELS[0]).all()


def test_nothing_is_kept_of_a_set_that_may_change(own_cache):
    items = [Image.fromarray(np.full((8, 8), i, np.uint8)) for i in range(100)]
    assert open_images(Flowers(items), size=8).pixels[:, 0, 0, 0].tolist() == list(range(100))
    items.reverse()
    assert open_images(Flowers(items), size=8).pixels[0, 0, 0, 0] == 99
    assert list(own_cache.iterdir()) == []


def test_a_data_set_can_be_fitted():
    data = Flowers([(Image.fromarray(image[..., 0]), i % 4) for i, image in enumerate(noisy_groups())])
    model = SemanticClusterer(**values(tiny(epochs=1))).fit(data)
    assert model.names_ == [str(i) for i in range(48)] and (model.predict(data) == model.labels_).all()


def test_hugging_face_datasets(tmp_path):
    datasets = pytest.importorskip("datasets", reason="too large to be a requirement; to run it: pip install datasets")
    rows = {"image": [Image.fromarray(image) for image in PIXELS], "label": LABELS}
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(num_classes=6)})
    data = datasets.Dataset.from_dict(rows, features=features)
    images = open_images(data)
    assert (images.pixels == PIXELS).all() and images.labels.tolist() == LABELS
    assert (open_images(data.with_format("torch")).pixels == PIXELS).all()
    assert (open_images(data.with_format("numpy")).pixels == PIXELS).all()
    encoded = data.cast_column("image", datasets.Image(decode=False))
    assert (open_images(encoded).pixels == PIXELS).all()
    Image.fromarray(PIXELS[0]).save(tmp_path / "a.png")
    paths = datasets.Dataset.from_dict({"image": [str(tmp_path / "a.png")] * 2})
    paths = paths.cast_column("image", datasets.Image(decode=False))
    assert paths[0]["image"]["bytes"] is None and (open_images(paths).pixels == PIXELS[0]).all()
    assert (open_images(data.select([2, 0])).pixels == PIXELS[[2, 0]]).all()
    refused(datasets.DatasetDict({"train": data}), "data['train']")
