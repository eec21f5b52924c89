"""The scikit-learn face: data of every kind, the conventions, save and load, and what is refused."""

import copy
import json
import pickle
import re
import shutil
import warnings
from dataclasses import fields
from pathlib import Path

import joblib
import numpy as np
import pytest
import torch
from sklearn.base import clone, is_clusterer
from sklearn.exceptions import NotFittedError
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from torch import nn

import semclust
from conftest import TinyBackbone, make_images, noisy_groups, save_images, tiny
from semclust import SemanticClusterer, Settings, fitting, preset
from semclust.devices import precision_on
from semclust.errors import DamagedFileError, InputError
from semclust.run_folder import RunFolder

N = 40


def small(**changes) -> SemanticClusterer:
    """Fits in a fraction of a second, and saves without a module of one's own."""
    values = dict(n_clusters=3, epochs=2, batch_size=20, image_size=8, width=2, projection_dim=8, device="cpu")
    return SemanticClusterer(**values | changes)


def grey(n: int = N, **kwargs) -> np.ndarray:
    return noisy_groups(n, groups=3, **kwargs)[..., 0]


@pytest.fixture(scope="module")
def fitted() -> SemanticClusterer:
    return small().fit(grey())


@pytest.fixture(scope="module")
def saved(fitted, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "model"
    fitted.save(folder)
    return folder


def sources(kind: str, folder: Path):
    """The same 40 images as a source of this kind."""
    colour = noisy_groups(N, size=16, channels=3)
    match kind:
        case "grey bytes":
            return colour[..., 0]
        case "grey with an axis":
            return colour[..., :1]
        case "colour floats":
            return (colour / 255).astype(np.float32)
        case "floats of any range":
            return colour[..., 0].astype(np.float64) * 7 - 900
        case "torch":
            return torch.from_numpy(colour)
        case "folder":
            return save_images(folder / "photos", colour)
        case "files":
            return sorted(save_images(folder / "photos", colour).iterdir())
        case "npz":
            np.savez(folder / "x.npz", images=colour, labels=np.arange(N))
            return str(folder / "x.npz")
        case "npy":
            np.save(folder / "x.npy", colour)
            return folder / "x.npy"


KINDS = [
    "grey bytes",
    "grey with an axis",
    "colour floats",
    "floats of any range",
    "torch",
    "folder",
    "files",
    "npz",
    "npy",
]


# ---- data --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [8, None], ids=["resized", "own size"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_data(kind, size, tmp_path):
    X = sources(kind, tmp_path)
    c = 1 if kind.startswith(("grey", "floats")) else 3
    model = small(epochs=1, image_size=size, backbone=TinyBackbone(c))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("default", message="The features have collapsed|.* clusters are empty|One cluster")
        labels = model.fit_predict(X)
        p, q = model.predict_proba(X), model.transform(X)
    assert labels is model.labels_ and labels.shape == (N,)
    np.testing.assert_array_equal(model.predict(X), labels)
    assert p.shape == (N, 3) and q.shape == (N, 8)
    np.testing.assert_allclose(p.sum(1), 1, atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(q, axis=1), 1, atol=1e-5)
    np.testing.assert_allclose(p, model.probabilities_, atol=1e-6)
    np.testing.assert_allclose(q, model.embedding_, atol=1e-6)
    assert len(model.names_) == N and model.skipped_ == [] and len(model.history_) == 1


def test_the_same_images_from_files_and_from_an_array_give_the_same_labels(tmp_path):
    array = small(epochs=1, image_size=None).fit(sources("torch", tmp_path))
    files = small(epochs=1, image_size=None).fit(sources("folder", tmp_path))
    np.testing.assert_array_equal(array.probabilities_, files.probabilities_)
    assert files.names_[0] == "00.png" and array.names_[0] == "0"


def test_digits_are_a_word():
    model = small(epochs=1, n_clusters=10, batch_size=256, backbone=TinyBackbone()).fit("digits")
    assert len(model.labels_) == 1797 and "acc" not in model.history_[0]


def test_labels_of_a_file_reach_neither_training_nor_figures(tmp_path):
    model = small(epochs=1).fit(sources("npz", tmp_path))
    assert "acc" not in model.history_[0]


def test_y_is_ignored(fitted):
    np.testing.assert_array_equal(small().fit(grey(), np.arange(N)).probabilities_, fitted.probabilities_)
    np.testing.assert_array_equal(small().fit_predict(grey(), ["a", "b"]), fitted.labels_)


def test_clusters_are_numbered_by_size(fitted):
    for model in (fitted, *(small(random_state=seed, epochs=1).fit(grey()) for seed in range(4))):
        sizes = np.bincount(model.labels_, minlength=3)
        assert sizes.sum() == N and (np.diff(sizes) <= 0).all()


def test_new_images_are_predicted_one_by_one_as_together(fitted):
    new = grey(30, seed=9)
    together = fitted.predict_proba(new)
    alone = np.concatenate([fitted.predict_proba(image[None]) for image in new])
    np.testing.assert_allclose(alone, together, atol=1e-5)


def test_more_images_than_one_batch_of_prediction(fitted):
    new = grey(1100, seed=9)
    p = fitted.predict_proba(new)
    assert p.shape == (1100, 3)
    np.testing.assert_allclose(p[600:700], fitted.predict_proba(new[600:700]), atol=1e-5)


def test_parts_without_an_image_are_passed_over(fitted, monkeypatch):
    new = grey(30, seed=9)
    parts = [make_images(0), *fitted.predictor_.stream(new), make_images(0)]
    expected = fitted.predict(new)
    monkeypatch.setattr(type(fitted.predictor_), "stream", lambda *_: iter(parts))
    np.testing.assert_array_equal(fitted.predict(new), expected)
    monkeypatch.setattr(type(fitted.predictor_), "stream", lambda *_: iter(parts[:1]))
    with pytest.raises(InputError, match="no image that could be read"):
        fitted.predict(new)


@pytest.fixture
def with_a_broken_file(tmp_path) -> Path:
    save_images(tmp_path / "photos", noisy_groups(30, size=16, seed=9))
    for name in ("07.png", "11.png"):
        (tmp_path / "photos" / name).write_bytes(b"broken")
    return tmp_path / "photos"


@pytest.mark.parametrize("method", ["predict", "predict_proba", "transform"])
@pytest.mark.parametrize("listed", [False, True], ids=["folder", "list"])
def test_a_file_that_cannot_be_read_is_an_error_and_no_missing_row(fitted, with_a_broken_file, method, listed):
    files = sorted(with_a_broken_file.iterdir())
    with pytest.raises(InputError, match=r"2 of the images could not.*07\.png: .*11\.png: .*`semclust predict`"):
        getattr(fitted, method)(files if listed else with_a_broken_file)
    readable = [file for file in files if file.name not in ("07.png", "11.png")]
    assert len(getattr(fitted, method)(readable)) == 28


def test_many_files_that_cannot_be_read_are_counted_and_a_few_named(fitted, monkeypatch):
    parts = [make_images(8), make_images(0)]
    parts[1].skipped = [(f"{i}\x1b.png", "empty file") for i in range(9)]
    monkeypatch.setattr(type(fitted.predictor_), "stream", lambda *_: iter(parts))
    with pytest.raises(InputError, match=r"9 of the images.*2\\x1b\.png: empty file; \.\.\.\)") as caught:
        fitted.predict(grey())
    assert "3\\x1b" not in str(caught.value) and "\x1b" not in str(caught.value)


def test_a_fit_leaves_out_what_cannot_be_read_and_says_so(with_a_broken_file):
    model = small(epochs=1)
    with pytest.warns(UserWarning, match="2 files could not be read"):
        embedding = model.fit_transform(with_a_broken_file)
    assert len(embedding) == len(model.names_) == len(model.labels_) == 28
    assert [name for name, _ in model.skipped_] == ["07.png", "11.png"]
    np.testing.assert_array_equal(embedding, model.embedding_)


def test_new_images_of_another_size_and_colour_are_brought_to_the_fitted_ones(fitted, tmp_path):
    """A grey 8 x 8 model takes files of 16 x 16 in colour."""
    assert fitted.predict(sources("folder", tmp_path)).shape == (N,)


def test_floats_keep_the_scale_of_the_fit():
    X = grey() * np.linspace(1, 7, N)[:, None, None] - 900  # images of 255 to 1785 steps of brightness
    model = small().fit(X)
    np.testing.assert_allclose(model.predict_proba(X[:1]), model.probabilities_[:1], atol=1e-5)
    np.testing.assert_allclose(model.predict_proba(X[3:5]), model.probabilities_[3:5], atol=1e-5)


def test_fit_does_not_write_into_the_data():
    X = noisy_groups(N, size=16)
    X.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("default", message="The features have collapsed|.* clusters are empty|One cluster")
        small(epochs=1, image_size=None).fit(X).predict(X)


# ---- conventions -------------------------------------------------------------------------------------


def test_the_parameters_are_the_settings():
    assert list(SemanticClusterer().get_params()) == sorted([*(f.name for f in fields(Settings)), "verbose"])
    for f in fields(Settings):
        assert getattr(SemanticClusterer(), f.name) == f.default
    assert semclust.SemanticClusterer is SemanticClusterer


def test_constructing_only_assigns():
    """Wrong values are told by fit, as scikit-learn asks."""
    tasks = ["nonsense"]
    model = SemanticClusterer(n_clusters="many", tasks=tasks)
    assert model.n_clusters == "many" and model.tasks is tasks
    assert SemanticClusterer(5).n_clusters == 5
    with pytest.raises(TypeError):
        SemanticClusterer(5, 10)
    with pytest.raises(TypeError):
        SemanticClusterer(clusters=5)


def test_get_and_set_params():
    model = SemanticClusterer(n_clusters=7)
    assert model.set_params(epochs=3, contrast="simclr") is model
    assert (model.n_clusters, model.epochs, model.contrast) == (7, 3, "simclr")
    with pytest.raises(ValueError, match="nonsense"):
        model.set_params(nonsense=1)


def test_a_clone_has_the_parameters_and_no_fit(fitted):
    copied = clone(fitted)
    assert copied.get_params() == fitted.get_params()
    assert not hasattr(copied, "labels_") and not hasattr(copied, "predictor_")
    with_module = clone(small(backbone=TinyBackbone(), augment=torch.flip))
    assert isinstance(with_module.backbone, TinyBackbone) and with_module.augment is torch.flip
    np.testing.assert_array_equal(copied.fit(grey()).probabilities_, fitted.probabilities_)


def test_repr_shows_what_was_changed():
    assert repr(SemanticClusterer()) == "SemanticClusterer()"
    assert repr(SemanticClusterer(n_clusters=7, contrast="simclr")) == (
        "SemanticClusterer(contrast='simclr', n_clusters=7)"
    )
    assert "TinyBackbone" in repr(SemanticClusterer(backbone=TinyBackbone()))
    assert "epochs" not in repr(SemanticClusterer(epochs=Settings.epochs))


def test_a_pipeline_reaches_the_parameters():
    flat = grey().reshape(N, 64)
    pipeline = make_pipeline(FunctionTransformer(lambda X: X.reshape(-1, 8, 8)), small())
    pipeline.set_params(semanticclusterer__n_clusters=4, semanticclusterer__epochs=1)
    assert pipeline.get_params()["semanticclusterer__n_clusters"] == 4
    labels = pipeline.fit_predict(flat)
    np.testing.assert_array_equal(labels, pipeline[-1].labels_)
    np.testing.assert_array_equal(pipeline.predict(flat), labels)
    assert pipeline.predict_proba(flat).shape == (N, 4)
    assert clone(pipeline).fit(flat).transform(flat).shape == (N, 8)


def test_it_counts_as_a_clusterer_and_transforms():
    assert is_clusterer(SemanticClusterer())
    assert small(epochs=1).fit_transform(grey()).shape == (N, 8)


def test_estimators_are_told_apart_by_identity():
    """As those of scikit-learn are: they can be keys and members of sets."""
    a, b = SemanticClusterer(), SemanticClusterer()
    assert a == a and a != b
    assert len({a, b}) == 2


def test_before_fit_nothing_is_predicted(tmp_path):
    for call in ("predict", "predict_proba", "transform"):
        with pytest.raises(NotFittedError):
            getattr(small(), call)(grey())
    with pytest.raises(NotFittedError):
        small().save(tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_a_second_fit_forgets_the_first():
    model = small().fit(grey())
    model.set_params(n_clusters=2).fit(noisy_groups(30, channels=3))
    assert model.predict_proba(noisy_groups(5, channels=3)).shape == (5, 2) and len(model.labels_) == 30


def test_a_seed_repeats_and_none_draws_one():
    first, again = (small(random_state=3).fit(grey()).probabilities_ for _ in range(2))
    np.testing.assert_array_equal(first, again)
    drawn = [small(random_state=None).fit(grey()) for _ in range(2)]
    assert not np.array_equal(drawn[0].probabilities_, drawn[1].probabilities_)
    assert drawn[0].random_state is None  # the parameter stays as it was set


def test_progress_is_shown_only_where_asked(capsys):
    quiet = small().fit(grey()).probabilities_
    assert capsys.readouterr() == ("", "")
    np.testing.assert_array_equal(small(verbose=True).fit(grey()).probabilities_, quiet)
    said = capsys.readouterr().out
    assert "40 images of 8 x 8 x 1 into 3 clusters" in said and "epoch 2/2" in said


def test_fit_leaves_the_parameters_alone():
    model = small()
    before = copy.copy(model.get_params())
    model.fit(grey())
    assert model.get_params() == before


def test_numbers_of_numpy_are_numbers(tmp_path):
    """A search over np.arange hands them over."""
    model = small(n_clusters=np.int64(3), epochs=np.int32(1), learning_rate=np.float32(0.05), random_state=np.int64(2))
    model.fit(grey()).save(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["settings"]["n_clusters"] == 3
    np.testing.assert_array_equal(SemanticClusterer.load(tmp_path).predict(grey()), model.labels_)


# ---- save, load, pickle ------------------------------------------------------------------------------


def test_a_saved_model_predicts_the_same(fitted, saved):
    assert sorted(path.name for path in saved.iterdir()) == ["config.json", "model.safetensors"]
    loaded = SemanticClusterer.load(saved)
    new = grey(30, seed=5)
    np.testing.assert_array_equal(loaded.predict_proba(new), fitted.predict_proba(new))
    np.testing.assert_array_equal(loaded.transform(new), fitted.transform(new))
    np.testing.assert_array_equal(loaded.predict(new), fitted.predict(new))
    auto = {
        "augment": "strokes",
        "sees": "colours",
        "precision": precision_on(torch.device("cpu"), "auto"),
    }  # what it was here
    assert loaded.get_params() == fitted.get_params() | auto


@pytest.mark.parametrize(
    "changes",
    [
        dict(classifier_input="pooled"),
        dict(projection_per_task=True),
        dict(sees="edges"),
        dict(max_pool=True),
        dict(projection_norm=False),
        dict(batch_norm_groups=2),
        dict(tasks=("instance",)),
        dict(contrast="simclr", temperature=0.5),
        dict(backbone="resnet34"),
        dict(augment=torch.square),
    ],
    ids=lambda changes: " ".join(changes),
)
def test_every_kind_of_model_comes_back(changes, tmp_path):
    X = noisy_groups(N, channels=3) / 255 * 9 - 3
    model = small(epochs=1, **changes).fit(X)
    model.save(tmp_path / "model")
    np.testing.assert_array_equal(SemanticClusterer.load(tmp_path / "model").predict_proba(X), model.predict_proba(X))


def test_a_model_is_saved_over_another(fitted, tmp_path):
    small(n_clusters=2, epochs=1).fit(grey()).save(tmp_path / "model")
    fitted.save(str(tmp_path / "model"))
    np.testing.assert_array_equal(SemanticClusterer.load(str(tmp_path / "model")).predict(grey()), fitted.labels_)


def test_equal_models_are_saved_as_equal_bytes(fitted, saved, tmp_path):
    small().fit(grey()).save(tmp_path)
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / name).read_bytes() == (saved / name).read_bytes()


def finished_run(folder):
    """Images, their run folder with its model, and what the fit gave."""
    images, settings = make_images(), tiny(backbone="resnet18", width=2)
    run = RunFolder.create(folder, "run")
    run.write_config({})
    done = fitting.fit(images, settings, run=run)
    done.predictor.save(run.model)
    return images, run, done


def test_a_run_folder_is_loaded_as_its_model(tmp_path):
    images, run, done = finished_run(tmp_path)
    loaded = SemanticClusterer.load(run.path)
    np.testing.assert_array_equal(loaded.predict(images.pixels), done.labels)


def test_a_loaded_model_can_be_fitted_anew(saved):
    np.testing.assert_array_equal(
        SemanticClusterer.load(saved).fit(grey()).probabilities_, small().fit(grey()).probabilities_
    )


def test_saving_and_loading_leave_the_random_state_alone(fitted, saved, tmp_path):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    fitted.save(tmp_path)
    SemanticClusterer.load(saved)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("way", ["pickle", "joblib", "deepcopy"])
def test_a_fitted_estimator_is_pickled(fitted, way, tmp_path):
    if way == "pickle":
        copied = pickle.loads(pickle.dumps(fitted))
    elif way == "joblib":
        joblib.dump(fitted, tmp_path / "model.joblib")
        copied = joblib.load(tmp_path / "model.joblib")
    else:
        copied = copy.deepcopy(fitted)
    np.testing.assert_array_equal(copied.predict_proba(grey()), fitted.predict_proba(grey()))
    np.testing.assert_array_equal(copied.labels_, fitted.labels_)
    assert copied.get_params() == fitted.get_params()


class TiedWeights(nn.Module):
    """Two layers that share one matrix."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(self.first(x.flatten(1)).relu())


class NamedAlike(nn.Module):
    """Has parts with the names that semclust's own network uses."""

    def __init__(self):
        super().__init__()
        self.projections = nn.ModuleDict({"shared": nn.Linear(64, 8)})
        self.backbone = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x):
        return self.backbone(self.projections["shared"](x.flatten(1))) - self.mean


@pytest.mark.parametrize("backbone", [TinyBackbone, TiedWeights, NamedAlike])
def test_a_backbone_of_ones_own(backbone, tmp_path):
    model = small(epochs=1, backbone=backbone()).fit(grey())
    np.testing.assert_array_equal(model.predict(grey()), model.labels_)
    model.save(tmp_path)
    loaded = SemanticClusterer.load(tmp_path, backbone=backbone())
    np.testing.assert_array_equal(loaded.predict_proba(grey()), model.predict_proba(grey()))
    with pytest.raises(InputError, match=f"{backbone.__name__}.*backbone="):
        SemanticClusterer.load(tmp_path)
    with pytest.raises(DamagedFileError, match=r"model\.safetensors does not fit"):
        SemanticClusterer.load(tmp_path, backbone=TinyBackbone(features=5))


def test_a_backbone_that_does_not_suit_the_images_is_named():
    with pytest.raises(InputError, match=r"TinyBackbone.*\(1, 8, 8\)"):
        small(backbone=TinyBackbone(3)).fit(grey())


def test_an_augmentation_of_ones_own(tmp_path):
    calls = []

    def mirror(x):
        calls.append(x.shape)
        return x.flip(3)

    model = small(epochs=1, augment=mirror).fit(grey())
    assert {shape[1:] for shape in calls} == {(1, 8, 8)}
    model.save(tmp_path)
    assert "mirror" in json.loads((tmp_path / "config.json").read_text())["settings"]["augment"]


@pytest.mark.parametrize(
    ("view", "told"),
    [
        (lambda x: x.double(), "made torch.float64 of 20 x 1 x 8 x 8 of a torch.float32 of 20 x 1 x 8 x 8"),
        (lambda x: x[:1], "made torch.float32 of 1 x 1 x 8 x 8 of"),
        (lambda x: x.repeat(1, 3, 1, 1), "of 20 x 3 x 8 x 8 of"),
        (lambda x: x.numpy(), "made ndarray"),
    ],
)
def test_an_augmentation_that_makes_no_views_is_refused(view, told):
    with pytest.raises(InputError, match=re.escape(told)):
        small(augment=view).fit(grey())


def test_a_network_for_images_of_one_size_is_told_of_smaller_views():
    pixels = noisy_groups(N, channels=3)
    fixed = nn.Sequential(nn.Flatten(), nn.Linear(8 * 8 * 3, 6))
    with pytest.raises(InputError, match=r"shape \(3, 6, 6\).*crop_size=0.75.*say crop_size=1"):
        small(backbone=fixed).fit(pixels)
    assert small(backbone=fixed, crop_size=1.0).fit(pixels).labels_.shape == (N,)


# ---- groups after the fit ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sharp() -> SemanticClusterer:
    """Surer of itself than such a model, so that images stay in clusters that are not merged."""
    model = small(epochs=3).fit(grey())
    network = model.predictor_.network
    linear, x = network.classifier.linear, torch.from_numpy(grey())[:, None].float() / 255
    with torch.no_grad():
        mean = torch.nn.functional.normalize(network.encoder(x)[0], dim=1).mean(0)
        linear.weight.mul_(50)
        linear.bias.copy_(-linear.weight @ mean / model.temperature)
    model._fitted_p = model.predict_proba(grey())
    return model._follow()


def regrouped(fitted) -> SemanticClusterer:
    return copy.deepcopy(fitted).merge([0, 1]).rename(2, "ships")


def follows(model: SemanticClusterer, p: np.ndarray, ids: list[int]) -> None:
    """Everything that the model tells is by the columns ``p`` for the clusters ``ids``."""
    assert model.clusters_.tolist() == ids
    np.testing.assert_allclose(model.predict_proba(grey()), p, atol=1e-6)
    np.testing.assert_array_equal(model.predict(grey()), np.array(ids)[p.argmax(1)])
    np.testing.assert_array_equal(model.probabilities_, p)
    np.testing.assert_array_equal(model.labels_, np.array(ids)[p.argmax(1)])


def test_everything_follows_a_merge_and_its_undoing(sharp):
    p = sharp.probabilities_
    model = regrouped(sharp)
    follows(model, np.stack([p[:, 0] + p[:, 1], p[:, 2]], axis=1), [0, 2])
    assert set(model.labels_) == {0, 2}
    assert model.cluster_names_ == {2: "ships"}
    np.testing.assert_array_equal(model.embedding_, sharp.embedding_)
    assert model.rename("ships", "boats").cluster_names_ == {2: "boats"}
    assert model.undo().cluster_names_ == {2: "ships"}
    follows(model.undo().undo(), p, [0, 1, 2])
    assert model.cluster_names_ == {}
    np.testing.assert_array_equal(model.transform(grey()), sharp.transform(grey()))


def test_reduce_leaves_the_number_asked_for(fitted):
    model = copy.deepcopy(fitted).reduce(2)
    assert len(model.clusters_) == 2 and model.predict_proba(grey()).shape == (N, 2)
    assert set(model.labels_) <= set(model.clusters_)
    follows(model.undo(), fitted.probabilities_, [0, 1, 2])


def test_groups_are_saved_and_loaded(fitted, tmp_path):
    model = regrouped(fitted)
    model.save(tmp_path)
    loaded = SemanticClusterer.load(tmp_path)
    assert loaded.clusters_.tolist() == [0, 2] and loaded.cluster_names_ == {2: "ships"}
    np.testing.assert_array_equal(loaded.predict(grey()), model.predict(grey()))
    np.testing.assert_array_equal(loaded.undo().undo().predict(grey()), fitted.predict(grey()))
    with pytest.raises(InputError, match="images of the fit"):
        loaded.reduce(2)
    fitted.save(tmp_path)  # over it: its groups go with it
    assert SemanticClusterer.load(tmp_path).clusters_.tolist() == [0, 1, 2]


def test_a_new_fit_starts_without_groups(fitted):
    assert regrouped(fitted).fit(grey()).clusters_.tolist() == [0, 1, 2]


def test_steps_that_cannot_be_taken_change_nothing(fitted):
    model = copy.deepcopy(fitted)
    for step in (lambda: model.merge([1]), lambda: model.rename(0, "7"), lambda: model.reduce(5), lambda: model.undo()):
        with pytest.raises(InputError):
            step()
    follows(model, fitted.probabilities_, [0, 1, 2])
    for call in (lambda: small().merge([0, 1]), lambda: small().undo(), lambda: small().reduce(2)):
        with pytest.raises(NotFittedError):
            call()


def test_a_run_folder_brings_its_results(tmp_path):
    images, run, done = finished_run(tmp_path)
    run.write_results(images.names, done.p, done.q, {})
    loaded = SemanticClusterer.load(run.path)
    assert loaded.names_ == images.names
    np.testing.assert_array_equal(loaded.labels_, done.labels)
    np.testing.assert_array_equal(loaded.probabilities_, done.p)
    np.testing.assert_array_equal(loaded.embedding_, done.q)
    assert len(loaded.reduce(2).clusters_) == 2
    groups = loaded.predictor_.groups
    run.write_groups(groups)
    again = SemanticClusterer.load(run.path)
    np.testing.assert_array_equal(again.labels_, loaded.labels_)
    assert not hasattr(SemanticClusterer.load(run.model), "labels_")
    assert not hasattr(again, "history_") and not hasattr(again, "skipped_")
    np.save(run.probabilities, done.p[:-1])
    with pytest.raises(DamagedFileError, match=r"probabilities\.npy has the shape \(47, 4\), but assignments\.csv"):
        SemanticClusterer.load(run.path)


# ---- what is refused ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "X, changes, words",
    [
        (grey(), dict(n_clusters=1), "n_clusters=1"),
        (grey(), dict(n_clusters=N // 2 + 1), f"n_clusters={N // 2 + 1}, but there are only {N} images"),
        (grey(), dict(n_clusters=2.5), r"n_clusters=2\.5"),
        (grey(), dict(epochs=0), "epochs=0"),
        (grey(), dict(backbone="resnet1"), "backbone='resnet1'"),
        (grey(), dict(image_size=2), "image_size=2"),
        (grey(), dict(image_size="8"), "image_size='8'"),
        (grey(), dict(device="gpu"), "device='gpu'"),
        (grey()[:3], dict(n_clusters=2), "3 images: expected at least 4"),
        (np.full((N, 8, 8), np.nan), {}, "NaN"),
        (np.where(np.eye(8), np.inf, np.zeros((N, 8, 8))), {}, "infinite"),
        (grey().reshape(N, 64), {}, r"shape \(40, 64\).*reshape"),
        (np.zeros((N, 2, 8, 8, 3)), {}, "shape"),
        (noisy_groups(N, channels=3).transpose(0, 3, 1, 2), {}, "transpose"),
        (grey().astype(np.int64), {}, r"int64.*astype\(np\.uint8\)"),
        (grey().astype(str), {}, "<U"),
        (grey().astype(complex), {}, "complex"),
        (grey()[:0], {}, "holds no images"),
        ([], {}, "one or more"),
        (None, {}, "NoneType"),
        ("nowhere", {}, "'nowhere'"),
        ([grey()[0], grey()[1]], {}, "np.stack"),
    ],
    ids=lambda value: "" if isinstance(value, np.ndarray | list) else str(value)[:40],
)
def test_bad_input_is_named(X, changes, words):
    with pytest.raises(InputError, match=words):
        small(**changes).fit(X)


@pytest.mark.parametrize(
    "X", [grey().reshape(N, 64), grey().astype(np.int64), "nowhere", None], ids=["flat", "int64", "nowhere", "None"]
)
def test_bad_input_to_predict_is_named(fitted, X):
    with pytest.raises(InputError):
        fitted.predict(X)


def test_a_folder_without_a_model_is_named(tmp_path):
    with pytest.raises(InputError, match="is not a model folder"):
        SemanticClusterer.load(tmp_path / "nowhere")
    with pytest.raises(InputError, match="is not a model folder"):
        SemanticClusterer.load(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        lambda about: about.update(format=99),
        lambda about: about.pop("format"),
        lambda about: about.pop("settings"),
        lambda about: about.pop("image_shape"),
        lambda about: about.update(image_shape=[8, 8]),
        lambda about: about.update(image_shape=[8, 8, -1]),
        lambda about: about.update(value_range="x"),
        lambda about: about.update(settings=3),
        lambda about: about["settings"].update(nonsense=1),
        lambda about: about["settings"].update(n_clusters=9),
        lambda about: about["settings"].update(width="wide"),
        lambda about: about["settings"].update(width=4),
        lambda about: about["settings"].update(projection_dim=None),
        lambda about: about["settings"].update(temperature=0),
    ],
    ids=range(14),
)
def test_a_model_with_a_damaged_description_is_named(saved, tmp_path, change):
    folder = shutil.copytree(saved, tmp_path / "model")
    about = json.loads((folder / "config.json").read_text())
    change(about)
    (folder / "config.json").write_text(json.dumps(about))
    with pytest.raises((DamagedFileError, InputError)) as caught:
        SemanticClusterer.load(folder)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize("damage", [lambda b: b[: len(b) // 2], lambda b: b"", lambda b: b"garbage" * 99, None])
def test_a_model_with_damaged_weights_is_named(saved, tmp_path, damage):
    folder = shutil.copytree(saved, tmp_path / "model")
    path = folder / "model.safetensors"
    if damage:
        path.write_bytes(damage(path.read_bytes()))
    else:
        path.unlink()
    with pytest.raises(DamagedFileError, match=r"model\.safetensors"):
        SemanticClusterer.load(folder)


def test_a_pickle_in_place_of_a_model_is_not_run(saved, tmp_path):
    folder = shutil.copytree(saved, tmp_path / "model")

    class Trap:
        def __reduce__(self):
            return Path.touch, (tmp_path / "marker",)

    torch.save({"w": Trap()}, folder / "model.safetensors")
    with pytest.raises(DamagedFileError, match="pickle"):
        SemanticClusterer.load(folder)
    assert not (tmp_path / "marker").exists()


def test_the_papers_settings_fit():
    paper = preset("paper") | dict(n_clusters=3, epochs=1, width=2, batch_size=20, device="cpu", image_size=8)
    assert SemanticClusterer(**paper).fit(noisy_groups(N, channels=3)).labels_.shape == (N,)


def test_what_is_wrong_with_a_fit_is_a_warning(tmp_path):
    blank = np.zeros((40, 16, 16), dtype=np.uint8)
    with pytest.warns(UserWarning, match="The features have collapsed"):
        SemanticClusterer(2, epochs=10, width=2, device="cpu").fit(blank)


def test_saving_never_replaces_what_is_not_a_model(fitted, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.json").write_text('{"data": "photos"}')
    (tmp_path / "file").write_text("notes")
    for place in ("run", "file"):
        with pytest.raises(InputError, match="holds something else"):
            fitted.save(tmp_path / place)
    assert (tmp_path / "run/config.json").read_text() == '{"data": "photos"}'
    fitted.save(tmp_path / "model")
    fitted.save(tmp_path / "model")  # a model may be replaced by a newer one


def test_the_labels_of_instance_contrast_alone_are_those_of_k_means():
    X = np.random.default_rng(0).integers(0, 255, (60, 16, 16), dtype=np.uint8)
    settings = dict(epochs=2, width=4, tasks=("instance",), classifier_input="projection", device="cpu")
    model = SemanticClusterer(n_clusters=3, **settings).fit(X)
    centres = np.stack([model.embedding_[model.labels_ == c].mean(0) for c in range(3)])
    distance = ((model.embedding_[:, None] - centres) ** 2).sum(2)
    assert (distance.argmin(1) == model.labels_).all()
