"""The report: what is kept, what is collected, where it is written. The page itself: test_report_page.py."""

import base64
import csv
import dataclasses
import hashlib
import io
import json
import math
import re
import shlex
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from conftest import make_images, save_images, tiny
from made_runs import make_run
from semclust import Settings, fitting, report
from semclust.arrays import resize
from semclust.assignments import read_assignments
from semclust.cli import main, parse
from semclust.config import to_json, values
from semclust.data import Images
from semclust.errors import DamagedFileError, InputError
from semclust.groups import Groups
from semclust.plan import decided
from semclust.report import content, kept, page, pictures, write_report
from semclust.report.against_labels import compare, confusion
from semclust.report.close import closest_pairs
from semclust.report.curves import curves, phases, table_of_epochs
from semclust.report.kept import features_of_tasks, most_and_least_certain, read_kept
from semclust.report.places import places
from semclust.report.settings_table import descriptions, fit_command, settings_table
from semclust.run_folder import RunFolder, fingerprint
from semclust.storage import read_json, write_json
from semclust.train import Training


def fitted_run(folder, settings: Settings, images: Images | None = None) -> tuple[RunFolder, Images]:
    """A run as `semclust fit` leaves it, but for the report."""
    images = images or make_images(40, labels=np.arange(40) % 4)
    run = RunFolder.create(folder, "run")
    config = {"data": "gone", "labels": None, "fingerprint": fingerprint(images.pixels, images.names)}
    settings = decided(settings, images.pixels, torch.device("cpu"))
    run.write_config({**config, "settings": to_json(settings)})
    run.write_skipped(images.skipped)
    fitted = fitting.fit(images, settings, run=run)
    fitted.predictor.save(run.model)
    run.write_results(images.names, fitted.p, fitted.q, fitting.summarise(fitted, images))
    return run, images


def data_of(html) -> dict:
    """What the script of a page gets."""
    return json.loads(re.search(r'id="data">(.*?)</script>', html.read_text("utf-8"), re.DOTALL)[1])


def rows_of(run: RunFolder) -> list[dict[str, str]]:
    with open(run.assignments, newline="") as file:
        return list(csv.DictReader(file))


def collected(run: RunFolder) -> dict:
    assigned = read_assignments(run.assignments)
    return content.collect(run, assigned, read_kept(run.path / kept.FILE, len(assigned.names)))


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> RunFolder:
    return make_run(tmp_path_factory.mktemp("made"), skipped=[("a.jpg", "empty file"), ("b.jpg", "empty file")])


# ---- a whole fit -----------------------------------------------------------------------------------


def test_a_fit_becomes_a_page_that_needs_the_images_no_more(tmp_path):
    run, images = fitted_run(tmp_path, tiny(backbone="resnet10", width=2))
    html = write_report(run.path, images=images)
    assert html == run.path / "report.html"
    first = html.read_bytes()
    assert write_report(run.path) == html  # from the folder alone: its data is "gone"
    assert html.read_bytes() == first
    data = data_of(html)
    assert [view["kind"] for view in data["map"]["views"]] == ["target", "under", "over", "untrained"]
    assert data["map"]["views"][1]["xy"] == data["map"]["views"][0]["xy"]
    assert data["map"]["views"][3]["xy"] != data["map"]["views"][0]["xy"]
    assert "All tasks share features" in data["map"]["views"][1]["caption"]
    assert sum(cluster["size"] for cluster in data["clusters"]) == 40
    assert data["sheets"]["pictures"] == len(data["images"]["name"]) == 40


def test_without_images_there_are_names_and_a_map(tmp_path):
    run, _ = fitted_run(tmp_path, tiny())
    data = data_of(write_report(run.path))
    assert data["sheets"] is None and data["classes"] is None
    assert [view["kind"] for view in data["map"]["views"]] == ["target", "under", "over"]
    assert all(cluster["most"] for cluster in data["clusters"] if cluster["size"])
    assert "were not at hand" in (run.path / "report.html").read_text("utf-8")


def test_without_a_checkpoint_the_final_network_is_on_the_map(tmp_path):
    run, images = fitted_run(tmp_path, tiny(backbone="resnet10", width=2))
    run.checkpoint.unlink()
    data = data_of(write_report(run.path, images=images))
    assert [view["kind"] for view in data["map"]["views"]] == ["target"] and data["sheets"]["pictures"] == 40


def test_images_are_found_again_where_the_fit_found_them(tmp_path):
    images = make_images(40)
    np.savez(tmp_path / "set.npz", images=images.pixels, labels=np.arange(40) % 4)
    images.names = [str(i) for i in range(40)]
    run, _ = fitted_run(tmp_path, tiny(), images)
    run.write_config(run.read_config() | {"data": str(tmp_path / "set.npz")})
    settings = tiny(image_size=8)
    config = run.read_config() | {"fingerprint": fingerprint(images.pixels, images.names)}
    found = report.find_images(config, settings)
    assert found is not None and np.array_equal(found.pixels, images.pixels)
    assert np.array_equal(found.labels, np.arange(40) % 4)
    labelled = report.find_images(config | {"labels": "no such file"}, settings)
    assert labelled is not None  # pictures are worth having without labels
    assert report.find_images(config | {"fingerprint": "of other images"}, settings) is None
    assert report.find_images(config | {"data": str(tmp_path / "moved.npz")}, settings) is None
    assert report.find_images({"data": str(tmp_path / "set.npz")}, settings) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"tasks": ("instance",)},
        {"tasks": ("cluster",)},
        {"epochs": 1},
        {"backbone": "resnet10", "width": 2, "projection_per_task": True},
        {"projection_per_task": True},  # on a backbone of the user's own
    ],
    ids=str,
)
def test_every_kind_of_run_has_a_page(tmp_path, changes):
    run, images = fitted_run(tmp_path, tiny(**changes))
    data = data_of(write_report(run.path, images=images))
    kinds = [view["kind"] for view in data["map"]["views"]]
    own_network = "backbone" in changes
    assert ("untrained" in kinds) == own_network
    assert ("under" in kinds) == ("tasks" not in changes)
    if "projection_per_task" in changes:
        target, under = data["map"]["views"][:2]
        assert (under["xy"] != target["xy"]) == own_network
        assert ("not at hand" in under["caption"]) != own_network
    assert data["phases"] == [] or data["phases"][-1]["epoch"] < run.read_config()["settings"]["epochs"]
    written = (run.path / "report.html").read_text("utf-8")
    assert ("your own backbone" in written) != own_network


def test_a_resumed_run_has_the_same_page(tmp_path):
    settings = tiny(epochs=3)
    run, images = fitted_run(tmp_path / "whole", settings)
    fitting.fit(images, settings, run=run)  # which finds all epochs done
    assert data_of(write_report(run.path, images=images))["curves"][0]["epochs"] == [1, 2, 3]


def test_colour_images(tmp_path):
    images = make_images(24, channels=3)
    run, _ = fitted_run(tmp_path, tiny(backbone="resnet10", width=2), images)
    data = data_of(write_report(run.path, images=images))
    assert data["sheets"]["pictures"] == 24 and data["classes"] is None
    assert "right" not in data["images"]


# ---- what is kept ----------------------------------------------------------------------------------


def test_the_untrained_network_is_the_one_that_the_run_began_with(tmp_path):
    changes = dict(projection_per_task=True, random_state=5, epochs=10, augment="strokes")  # the teacher tells at last
    settings = tiny(backbone="resnet10", width=2, **changes)
    run, images = fitted_run(tmp_path, settings)
    rows = np.arange(0, 40, 3)
    tensors, epoch = run.read_checkpoint()
    tasks = {"under": rows, "over": rows}
    found = features_of_tasks(images.pixels[rows], settings, tensors, tasks, run.checkpoint)
    assert set(found) == {"untrained", "under", "over"}
    training: Training = fitting.start(images, settings)
    assert np.allclose(found["untrained"], training.features()[1]["cluster"].numpy()[rows], atol=1e-5)
    training.load_state(tensors, epoch, run.checkpoint)
    q = training.features()[1]
    for task in tasks:
        assert np.allclose(found[task], q[task].numpy()[rows], atol=1e-5)


def test_a_run_of_another_machine_s_device_is_read_on_the_cpu(tmp_path):
    run, images = fitted_run(tmp_path, tiny(backbone="resnet10", width=2))
    settings = tiny(backbone="resnet10", width=2, augment="strokes", device="cuda:99")
    found = features_of_tasks(images.pixels, settings, run.read_checkpoint()[0], {}, run.checkpoint)
    assert found["untrained"].shape == (40, 8)


def test_the_most_and_the_least_certain():
    cluster = np.array([0, 0, 0, 0, 0, 1, 1, 1, 3])
    confidence = np.array([0.5, 0.9, 0.7, 0.9, 0.6, 0.2, 0.3, 0.1, 1.0])
    found = most_and_least_certain(cluster, confidence, 2)
    assert found == {0: ([1, 3], [0, 4]), 1: ([6, 5], [7]), 3: ([8], [])}  # equal ones in their order, none twice


def test_the_gallery_is_bounded_for_many_clusters():
    rng = np.random.default_rng(0)
    for n_clusters in (2, 100, 1000, 9000):
        clusters, confidence = rng.integers(n_clusters, size=50_000), rng.random(50_000)
        each, rows = kept.choose_gallery(clusters, confidence, n_clusters)
        assert 1 <= each <= kept.EXTREMES and len(rows) == len(set(rows)) <= kept.PICTURES
        assert len(set(clusters[rows])) == min(n_clusters, kept.PICTURES // 2)
        assert clusters[rows[0]] == np.bincount(clusters).argmax()


def test_kept_comes_back_as_it_was(made, tmp_path):
    before = read_kept(made.path / kept.FILE, 300)
    kept.write_kept(tmp_path / "again", before)
    after = read_kept(tmp_path / "again", 300)
    for field in dataclasses.fields(before):
        old, new = getattr(before, field.name), getattr(after, field.name)
        if isinstance(old, dict):
            assert {name: array.tolist() for name, array in old.items()} == {n: a.tolist() for n, a in new.items()}
        else:
            assert np.array_equal(old, new) if isinstance(old, np.ndarray) else old == new


def test_kept_that_does_not_fit_is_refused(made, tmp_path):
    with pytest.raises(DamagedFileError, match="does not belong"):
        read_kept(made.path / kept.FILE, 200)
    with pytest.raises(DamagedFileError, match="does not belong"):
        read_kept(made.path / kept.FILE, 301)
    torch_file = tmp_path / "report.safetensors"
    kept.write_tensors(torch_file, {"mapped": torch.zeros(1)}, {"format": 1})
    with pytest.raises(DamagedFileError, match="damaged"):
        read_kept(torch_file, 300)
    kept.write_tensors(torch_file, {}, {"format": 2})
    with pytest.raises(DamagedFileError, match="format 2"):
        read_kept(torch_file, 300)


def test_labels_that_name_every_image_are_no_classes(tmp_path, monkeypatch):
    monkeypatch.setattr(kept, "CLASSES", 3)
    run, images = fitted_run(tmp_path, tiny())  # four of them
    assert data_of(write_report(run.path, images=images))["classes"] is None


@pytest.mark.parametrize(("n", "expected"), [(50, 50), (2500, 2000), (30_000, 3000), (90_000, 5000)])
def test_the_map_shows_all_images_or_a_stated_sample(tmp_path, monkeypatch, n, expected):
    run, _ = fitted_run(tmp_path, tiny())
    np.save(run.path / "embeddings.npy", np.zeros((n, 8), np.float32))
    monkeypatch.setattr(kept, "places", lambda x, seed: np.zeros((len(x), 2), np.float32))
    monkeypatch.setattr(RunFolder, "read_checkpoint", lambda self: ({}, 2))
    found = kept.keep(run, tiny(), None, np.zeros(n, int), np.ones(n))
    assert len(found.mapped) == len(set(found.mapped)) == expected
    assert (np.diff(found.mapped) > 0).all() and found.mapped.max() < n


# ---- pictures and places ---------------------------------------------------------------------------


def tile(sheets: pictures.Sheets, number: int) -> np.ndarray:
    """As pictures.js finds it."""
    (w, h), (cw, ch) = sheets.about["tile"], sheets.about["cell"]
    columns, lines = sheets.about["columns"], sheets.about["lines"]
    image = np.asarray(Image.open(io.BytesIO(sheets.files[number // (columns * lines)])))
    line, column = divmod(number % (columns * lines), columns)
    top, left = line * ch + sheets.about["edge"], column * cw + sheets.about["edge"]
    return image[top : top + h, left : left + w]


@pytest.mark.parametrize(("shape", "kind"), [((12, 9, 1), "PNG"), ((16, 16, 3), "PNG"), ((40, 28, 3), "JPEG")])
def test_a_thumbnail_is_the_image(shape, kind):
    rng = np.random.default_rng(0)
    H, W, c = shape
    level = rng.integers(0, 256, (2000, 1, 1, c))
    pixels = (level + np.zeros((1, H, W, 1))).astype(np.uint8)
    rows = rng.permutation(2000)[:1500]
    sheets = pictures.make_sheets(pixels, rows)
    assert Image.open(io.BytesIO(sheets.files[0])).format == kind
    assert sheets.about["tile"] == [W, H]
    for number in (0, 1, 700, 1499):
        expected = pixels[rows[number]][..., 0] if c == 1 else pixels[rows[number]]
        assert np.abs(tile(sheets, number).astype(int) - expected).max() <= (0 if kind == "PNG" else 6)


@pytest.mark.parametrize("channels", [2, 4])
def test_thumbnails_of_other_channels(channels):
    pixels = np.full((3, 16, 16, channels), 100, np.uint8)
    pixels[..., -1] = 255
    sheets = pictures.make_sheets(pixels, np.arange(3))
    assert (tile(sheets, 2) == 100).all()


def test_thumbnails_shrink_until_they_fit(tmp_path):
    noise = np.random.default_rng(0).integers(0, 256, (60, 100, 80, 3)).astype(np.uint8)
    np.save(tmp_path / "noise.npy", noise)
    mapped = np.load(tmp_path / "noise.npy", mmap_mode="r")
    large, small = (pictures.make_sheets(mapped, np.arange(60), budget) for budget in (10**9, 150_000))
    assert large.about["tile"] == [77, 96] and max(small.about["tile"]) < 96
    assert sum(map(len, small.files)) <= 150_000 < sum(map(len, large.files))
    least = pictures.make_sheets(mapped, np.arange(60), 1)
    assert max(least.about["tile"]) == 16
    assert np.abs(tile(large, 7).astype(int) - resize(noise[7:8], (96, 77))[0]).mean() < 40


def test_what_is_alike_lies_together():
    rng = np.random.default_rng(0)
    group = np.arange(120) % 3
    features = rng.normal(size=(3, 10))[group] + 0.05 * rng.normal(size=(120, 10))
    found = places(features, 7)
    assert found.shape == (120, 2) and found.min() >= 0 and found.max() <= 1
    assert np.ptp(found, axis=0).max() == pytest.approx(1, abs=1e-5)
    distance = np.linalg.norm(found[:, None] - found[None], axis=2)
    np.fill_diagonal(distance, np.inf)
    assert (group[distance.argmin(1)] == group).mean() > 0.95
    assert np.array_equal(found, places(features, 7))


def test_places_of_collapsed_and_of_few_images():
    assert (places(np.ones((9, 4)), 0) == 0.5).all()
    assert np.isfinite(places(np.eye(4), 2**40)).all()


# ---- what is collected -----------------------------------------------------------------------------


def test_a_page_holds_what_the_run_folder_says(made):
    held = collected(made)
    data = held["data"]
    rows = rows_of(made)
    sizes = [cluster["size"] for cluster in data["clusters"]]
    assert sizes == sorted(sizes, reverse=True) and sum(sizes) == 300 == held["n_images"]
    for cluster in data["clusters"]:
        members = [i for i, row in enumerate(rows) if int(row["cluster"]) == cluster["id"]]
        members.sort(key=lambda i: (-float(rows[i]["confidence"]), i))
        shown = {end: [data["images"]["row"][number] for number in cluster[end]] for end in ("most", "least")}
        assert shown == {"most": members[:10], "least": members[::-1][:10]}
        mean = np.mean([float(rows[i]["confidence"]) for i in members])
        assert cluster["confidence"] == pytest.approx(mean, abs=1e-4)
    for number, row in enumerate(data["images"]["row"]):
        assert data["images"]["name"][number] == rows[row]["path"]
        assert data["images"]["confidence"][number] == float(rows[row]["confidence"])
        assert data["clusters"][data["images"]["runner_up"][number]]["id"] == int(rows[row]["runner_up"])
    assert held["skipped"]["reasons"] == [{"reason": "empty file", "n": 2, "names": ["a.jpg", "b.jpg"]}]


def test_all_names_can_be_searched_until_they_are_too_many(made, monkeypatch):
    lines = zlib.decompress(base64.b64decode(collected(made)["all_names"])).decode().split("\n")
    rows = rows_of(made)
    ids = [cluster["id"] for cluster in collected(made)["data"]["clusters"]]
    assert lines == [f"{ids.index(int(row['cluster']))} {row['confidence']} {row['path']}" for row in rows]
    monkeypatch.setattr(content, "ALL_NAMES", 100)
    assert collected(made)["all_names"] is None


def test_right_is_the_class_that_the_cluster_stands_for(made):
    held = collected(made)
    data, stored = held["data"], read_kept(made.path / kept.FILE, 300)
    for cluster, right, row in zip(
        data["images"]["cluster"], data["images"]["right"], data["images"]["row"], strict=True
    ):
        assert right == (data["clusters"][cluster]["stands_for"] == stored.labels[row])
    assert 0 < sum(data["images"]["right"]) < len(data["images"]["right"])
    assert held["figures"]["acc"] == pytest.approx(np.mean(data["images"]["right"]))  # all of them are shown


def test_clusters_beyond_the_classes_stand_for_none():
    truth = compare(np.array([0, 0, 0, 1, 1, 2]), 4, np.array([1, 1, 0, 0, 0, 1]), ["a", "b"])
    assert truth.stands_for.tolist() == [1, 0, -1, -1]
    assert truth.right.tolist() == [True, True, False, True, True, False]
    assert truth.figures["acc"] == pytest.approx(4 / 6)


def test_the_confusion_table_has_a_diagonal():
    truth = compare(np.array([0, 0, 0, 1, 1, 2]), 3, np.array([1, 1, 0, 0, 0, 1]), ["a", "b<c"])
    table = confusion(truth, ["0", "1", "2"])
    assert [row["title"] for row in table["rows"]] == ["1", "0", "2"]  # for class a, for b, for none
    assert [[cell["n"] for cell in row["cells"]] for row in table["rows"]] == [[2, 0], [1, 2], [0, 1]]
    assert [[cell["match"] for cell in row["cells"]] for row in table["rows"]] == [
        [True, False],
        [False, True],
        [False, False],
    ]
    assert [[cell["shade"] for cell in row["cells"]] for row in table["rows"]] == [[9, 0], [3, 6], [0, 9]]
    assert table["left_out"] == [0, 0]


def test_a_large_confusion_table_shows_the_largest():
    rng = np.random.default_rng(0)
    cluster = np.sort(rng.integers(60, size=2000))
    truth = compare(cluster, 60, rng.integers(50, size=2000), [f"c{i}" for i in range(50)])
    table = confusion(truth, [str(i) for i in range(60)])
    assert len(table["rows"]) == len(table["classes"]) == 40 and table["left_out"] == [20, 10]


def test_merged_and_renamed_clusters(made, monkeypatch):
    merged = Groups(4, [{"merge": [1, 2]}, {"rename": [1, "cats & <dogs>"]}])
    monkeypatch.setattr(content, "Groups", type("Stub", (), {"read": staticmethod(lambda folder: merged)}))
    held = collected(made)
    rows = rows_of(made)
    confidence = [float(row["confidence"]) for row in rows]
    both = [i for i, row in enumerate(rows) if row["cluster"] in "12"]
    first = held["data"]["clusters"][0]
    assert first["id"] == 1 and first["title"] == "1 · cats & <dogs>" and first["size"] == len(both)
    shown = [held["data"]["images"]["row"][number] for number in first["most"]]
    assert shown == sorted(both, key=lambda i: (-confidence[i], i))[:10]
    assert held["merged_from"] == 4 and held["n_clusters"] == 3
    assert {cluster["id"] for cluster in held["data"]["clusters"]} == {0, 1, 3}
    assert all(" 2" not in pair["command"] for pair in held["pairs"])
    assert any(pair["command"].endswith(" 1 3") or pair["command"].endswith(" 1 0") for pair in held["pairs"])


def regroupable(folder: Path, monkeypatch) -> tuple[RunFolder, Images]:
    """A run of 400 images in four clusters with its page; few of them have a thumbnail."""
    monkeypatch.setattr(kept, "MAPPED", (20, 20))
    images = make_images(400, labels=np.arange(400) % 4)
    np.save(folder / "set.npy", images.pixels)
    images.names = [str(i) for i in range(400)]
    run, _ = fitted_run(folder, tiny(epochs=1, n_clusters=4, image_size=8), images)
    run.write_config(run.read_config() | {"data": str(folder / "set.npy")})
    p = np.random.default_rng(0).dirichlet([0.5] * 4, 400).astype(np.float32)
    run.write_results(images.names, p, np.load(run.embeddings), read_json(run.path / "summary.json"))
    write_report(run.path, images=images)
    return run, images


def extremes_of(run: RunFolder, data: dict) -> list[bool]:
    """Whether each image in the gallery has a picture, once it is checked that they are the right ones."""
    rows, pictured = rows_of(run), []
    for cluster in data["clusters"]:
        members = [i for i, row in enumerate(rows) if int(row["cluster"]) == cluster["id"]]
        surest = sorted(members, key=lambda i: (-float(rows[i]["confidence"]), i))
        assert [data["images"]["row"][number] for number in cluster["most"]] == surest[:10]
        assert [data["images"]["row"][number] for number in cluster["least"]] == surest[:-11:-1]
        pictured += [number < data["sheets"]["pictures"] for number in cluster["most"] + cluster["least"]]
    return pictured


@pytest.mark.parametrize("at_hand", [True, False])
def test_the_most_and_least_certain_follow_a_merge_and_its_undoing(tmp_path, monkeypatch, at_hand):
    run, images = regroupable(tmp_path, monkeypatch)
    before = data_of(run.path / "report.html")
    assert all(extremes_of(run, before))
    if not at_hand:
        (tmp_path / "set.npy").unlink()
    groups = Groups.read(run.model)
    groups.merge([0, 2])
    run.write_groups(groups)
    merged = data_of(write_report(run.path))
    assert all(extremes_of(run, merged)) == at_hand
    assert merged["map"] == before["map"] | {"points": merged["map"]["points"]}
    if at_hand:
        stored = read_kept(run.path / kept.FILE, 400)
        assert stored.sheets == pictures.make_sheets(images.pixels, stored.pictured)
        assert stored.labels.tolist() == images.labels.tolist()
        (tmp_path / "set.npy").unlink()
        assert data_of(write_report(run.path)) == merged  # again from the folder alone
        np.save(tmp_path / "set.npy", images.pixels)
    groups.undo()
    run.write_groups(groups)
    undone = data_of(write_report(run.path))
    assert all(extremes_of(run, undone))
    assert [cluster["size"] for cluster in undone["clusters"]] == [cluster["size"] for cluster in before["clusters"]]


def test_images_are_looked_for_only_where_pictures_are_missing(made, monkeypatch):
    monkeypatch.setattr(report, "find_images", lambda *_: pytest.fail("there is no need to"))
    write_report(made.path)


def test_close_clusters():
    cluster = np.repeat(np.arange(4), 5)
    runner_up = np.array([1] * 5 + [0] * 4 + [2] + [3] * 5 + [2] * 5)
    confidence = np.repeat([0.6, 0.7, 1.0, 0.9], 5)
    margin = np.repeat([0.2, 0.4, 1.0, 0.8], 5)
    pairs = closest_pairs(cluster, confidence, runner_up, margin, 5)  # the fifth is empty
    by = {(pair.first, pair.second): pair for pair in pairs}
    assert list(by) == [(0, 1), (2, 3), (1, 2)]  # of the others, no image could be in either
    total = [5 * 0.6 + 4 * 0.3, 5 * 0.7 + 5 * 0.4, 5 * 1.0 + 5 * 0.1 + 0.3, 5 * 0.9]
    assert by[0, 1].overlap == pytest.approx((5 * 0.6 * 0.4 + 4 * 0.7 * 0.3) / total[0])
    assert by[2, 3].overlap == pytest.approx(5 * 0.9 * 0.1 / total[3])
    assert by[1, 2].overlap == pytest.approx(0.7 * 0.3 / total[1])
    assert by[0, 1].swapped == pytest.approx(0.9) and by[2, 3].swapped == 1 and by[1, 2].swapped == pytest.approx(0.1)


def test_a_run_that_kept_to_its_minutes_is_not_said_to_be_repeated_by_its_epochs(made):
    assert collected(made)["uneven_epochs"] is None
    schedule = {"epochs": 2, "steps": {"": 1.0}, "renewal": {"; ": 1.0}, "end": 0.0}
    made.write_schedule(schedule | {"shares": [1.0, 1.0]})
    assert collected(made)["uneven_epochs"] is None
    same = "gives the same result"
    assert same in write_report(made.path).read_text()
    made.write_schedule(schedule | {"shares": [1.0, 0.5]})
    assert collected(made)["uneven_epochs"] == 0.75
    page = write_report(made.path).read_text()
    assert "took 75 % of the steps" in page and same not in page


def test_the_command_names_the_minutes_where_epochs_were_not_whole():
    config = {"data": "photos", "settings": to_json(Settings(minutes=5, epochs=10))}
    assert fit_command(config, whole_epochs=False) == "semclust fit photos -k 10 --minutes 5"
    assert fit_command(config) == "semclust fit photos -k 10 --epochs 10"
    config = {"data": "photos", "settings": to_json(Settings(epochs=10))}
    assert fit_command(config, whole_epochs=False) == "semclust fit photos -k 10 --epochs 10"


def test_only_the_closest_pairs_are_suggested(made, tmp_path):
    assert len(collected(made)["pairs"]) == 6
    assert collected(make_run(tmp_path, n_clusters=2))["pairs"] == []  # to merge the last two leaves nothing
    half, none = np.full(60, 0.5), np.zeros(60)
    assert len(closest_pairs(np.arange(60) % 30, half, np.arange(60) % 29, none, 30)) == 10


def test_the_command_to_merge_can_be_typed(tmp_path):
    run = make_run(tmp_path / "it's; rm -rf $HOME")
    words = shlex.split(collected(run)["pairs"][0]["command"])
    assert words[:3] == ["semclust", "merge", str(run.path)] and {int(word) for word in words[3:]} < {0, 1, 2, 3}


def test_rows_without_a_figure_are_gaps(made):
    history = made.read_metrics()
    drawn = {line["title"]: line["values"] for chart in curves(history) for line in chart["lines"]}
    assert drawn["in all"] == [4, 2, 1.3333, 1, 0.8]
    assert drawn["churn"] == [None, None, 0.5, 0.5, 0.5]
    assert "ACC" not in drawn
    table = table_of_epochs(history)
    assert table["rows"][0][:4] == ["1", "4", "3", "1"]
    assert table["rows"][0][table["columns"].index("churn")] == ""
    assert curves([]) == [] and table_of_epochs([]) == {"columns": ["epoch"], "rows": []}


def test_phases():
    marks = phases(Settings(n_clusters=10, epochs=50), 1797)
    assert [mark["epoch"] for mark in marks] == [12, 25, 32, 37]
    assert "40 fine clusters" in marks[0]["title"] and "the 10 clusters" in marks[2]["title"]
    assert phases(Settings(n_clusters=10, epochs=50, tasks=("instance",)), 1797) == []
    assert marks[3]["title"] == "own labels alone"
    early = Settings(n_clusters=10, epochs=50, cluster_from=0.0, tasks=("cluster",), neighbours=0, self_label_from=1.0)
    assert phases(early, 1797) == []


# ---- settings --------------------------------------------------------------------------------------


def test_every_setting_is_described():
    assert list(descriptions()) == [field.name for field in dataclasses.fields(Settings)]
    assert descriptions()["temperature"] == "Temperature tau of all similarities."
    table = settings_table(to_json(Settings(n_clusters=7, momentum=0.5, sees="edges")))
    changed = {row["name"]: (row["value"], row["default"]) for row in table if row["changed"]}
    assert changed == {"n_clusters": ("7", "10"), "momentum": ("0.5", "automatic"), "sees": ("edges", "auto")}


@pytest.mark.parametrize(
    "settings",
    [
        Settings(n_clusters=3),
        Settings(n_clusters=3, tasks=("cluster", "under"), sees="edges", online=False, momentum=0.9, contrast="simclr"),
    ],
)
def test_the_command_repeats_the_settings(settings):
    line = fit_command({"data": "my photos", "labels": "a b.csv", "settings": to_json(settings)})
    command = parse(shlex.split(line)[1:])
    assert Settings(**values(command.settings)) == settings
    assert (command.data, command.labels) == ("my photos", "a b.csv")


# ---- where it is written ---------------------------------------------------------------------------


def test_a_page_replaces_its_own_kind_only(tmp_path):
    run = make_run(tmp_path)
    html = write_report(run.path)
    html.write_text(html.read_text("utf-8").replace("</html>", "old</html>"), "utf-8")
    write_report(run.path)
    assert not html.read_text("utf-8").endswith("old</html>")
    html.write_text("my own notes")
    with pytest.raises(InputError, match="not written by semclust"):
        write_report(run.path)
    assert html.read_text() == "my own notes"
    assert write_report(run.path, tmp_path / "other.html").read_bytes().startswith(b"<!doctype html>")
    with pytest.raises(InputError, match="not overwritten"):
        write_report(run.path, tmp_path / "other.html")
    (tmp_path / "link.html").symlink_to(tmp_path / "nowhere")
    with pytest.raises(InputError, match="not overwritten"):
        write_report(run.path, tmp_path / "link.html")
    with pytest.raises(InputError, match="no folder"):
        write_report(run.path, tmp_path / "no" / "other.html")
    assert sorted(p.name for p in run.path.iterdir() if p.name.startswith(".")) == []


def test_a_run_that_is_no_finished_run(tmp_path):
    with pytest.raises(InputError, match="not a run folder"):
        write_report(tmp_path / "nothing")
    run = make_run(tmp_path)
    run.assignments.rename(tmp_path / "assignments.csv")
    with pytest.raises(InputError, match="has the run finished"):
        write_report(run.path)
    run.assignments.write_text("path,cluster\na,0\n")
    with pytest.raises(DamagedFileError, match="damaged"):
        write_report(run.path)
    run.assignments.write_text("path,cluster,confidence,runner_up,margin\n")
    with pytest.raises(DamagedFileError, match="damaged"):
        write_report(run.path)


def test_files_that_do_not_belong_together_are_refused(tmp_path):
    run = make_run(tmp_path)
    text = run.assignments.read_text()
    run.assignments.write_text(text.replace(",0,", ",7,"))
    with pytest.raises(DamagedFileError, match="does not have"):
        write_report(run.path)
    run.assignments.write_text(text)
    config = run.read_config()
    write_json(run.path / "config.json", {"format": config["format"]})
    with pytest.raises(DamagedFileError, match="lacks 'settings'"):
        write_report(run.path)
    run.write_config(config)
    (run.path / "report.safetensors").unlink()  # from here on the map is made anew, of the embeddings
    np.save(run.path / "embeddings.npy", np.ones((299, 4)))
    with pytest.raises(DamagedFileError, match=r"\(299, 4\), but"):
        write_report(run.path)
    (run.path / "embeddings.npy").unlink()
    with pytest.raises(InputError, match="is missing"):
        write_report(run.path)


@pytest.mark.parametrize("name", content.SUMMARY)
def test_a_summary_that_lacks_something_is_damage(tmp_path, name):
    run = make_run(tmp_path)
    whole = read_json(run.path / "summary.json")
    for damaged in ({key: value for key, value in whole.items() if key != name}, whole | {name: {}}):
        write_json(run.path / "summary.json", damaged)
        with pytest.raises(DamagedFileError, match=rf"summary\.json lacks {name}, .*--resume"):
            write_report(run.path)


def test_a_damaged_list_of_skipped_files_is_named(tmp_path):
    run = make_run(tmp_path)
    (run.path / "skipped.csv").write_text(f"path,reason\n{'x' * 200_000},empty file\n")
    with pytest.raises(DamagedFileError, match=r"skipped\.csv is damaged"):
        write_report(run.path)


# ---- the page as text ------------------------------------------------------------------------------

HOSTILE = [
    "<img src=x onerror=alert(1)>.jpg",
    "</script><script>alert(2)</script>.jpg",
    "line\nbreak\u2028.jpg",
    "not-utf8-\udcff.jpg",
    "]]>--><!--'\"&amp;.jpg",
    "日本語.jpg",
]


def test_whatever_a_file_is_called_it_stays_text(tmp_path):
    names = [f"{i}-{HOSTILE[i % len(HOSTILE)]}" for i in range(40)]
    run = make_run(tmp_path, 40, 2, names=names, skipped=[(name, name) for name in HOSTILE], warnings=HOSTILE[:4])
    config = run.read_config() | {"data": HOSTILE[0], "labels": HOSTILE[1]}
    config["settings"]["device"] = HOSTILE[1]
    run.write_config(config)
    write_json(run.path / "summary.json", read_json(run.path / "summary.json") | {"device": HOSTILE[1]})
    html = write_report(run.path)
    text = html.read_bytes().decode("utf-8")
    assert "<img" not in text and "alert(2)</script>" not in text and "<script>alert" not in text
    assert "\u2028" not in text
    shown = data_of(html)["images"]["name"]
    assert "0-<img src=x onerror=alert(1)>.jpg" in shown and "5-日本語.jpg" in shown
    assert "2-line\\nbreak\\u2028.jpg" in shown and "3-not-utf8-\\udcff.jpg" in shown


def test_nothing_but_the_page_s_own_script_and_style_may_run(made):
    text = write_report(made.path).read_text("utf-8")
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)[1].replace("&#39;", "'")
    assert policy.startswith("default-src 'none'") and "unsafe" not in policy
    for tag, name in (("script", "script-src"), ("style", "style-src")):
        (inside,) = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert f"{name} 'sha256-{digest}'" in policy
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text) and " style=" not in text


def test_a_figure_that_is_no_number_is_an_error_and_no_broken_page(made):
    held = collected(made)
    held["data"]["clusters"][0]["confidence"] = math.nan
    with pytest.raises(ValueError, match="JSON"):
        page.render(held)


def test_health_in_words(tmp_path):
    text = write_report(make_run(tmp_path, warnings=["One & only"]).path).read_text("utf-8")
    assert "1 warning during the fit" in text and "One &amp; only" in text and "Healthy" not in text
    run = make_run(tmp_path)
    config = run.read_config()
    run.write_config(config | {"settings": config["settings"] | {"epochs": 10}})
    text = write_report(run.path).read_text("utf-8")
    assert "Healthy" in text and "during the fit" not in text
    run.assignments.write_text(run.assignments.read_text().replace(",1,0.", ",0,0.").replace(",2,0.", ",0,0."))
    text = write_report(run.path).read_text("utf-8")
    assert "Healthy" not in text and "2 clusters are empty." in text and "The largest cluster holds" in text
    run.write_config(config | {"settings": config["settings"] | {"epochs": 9}})
    text = write_report(run.path).read_text("utf-8")
    assert "Healthy" not in text and "A try only." in text and "9 epochs are too few" in text


@pytest.mark.parametrize(("seconds", "words"), [(0.4, "0 s"), (95.2, "95 s"), (130, "2 min"), (9000, "2.5 h")])
def test_time_in_words(seconds, words):
    assert content.in_words(seconds) == words


# ---- the commands ----------------------------------------------------------------------------------

FIT = ["-k", "3", "--epochs", "1", "--width", "2", "--batch-size", "8", "--device", "cpu"]


@pytest.fixture
def photos(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_images(tmp_path / "photos", make_images(20).pixels)
    (tmp_path / "photos" / "empty.png").touch()


def call(*argv) -> int:
    try:
        main([str(word) for word in argv])
    except SystemExit as ended:
        return int(ended.code)
    return 0


def test_a_fit_ends_with_a_report_and_the_command_repeats_it(photos, tmp_path, capsys):
    assert call("fit", "photos", *FIT) == 0
    html = tmp_path / "runs" / "photos" / "report.html"
    assert "report: runs/photos/report.html" in capsys.readouterr().out
    first = html.read_bytes()
    assert b"Why 1 file was skipped" in first
    (tmp_path / "photos").rename(tmp_path / "moved")
    html.unlink()
    assert call("report", "runs/photos") == 0
    assert capsys.readouterr().out.strip() == "runs/photos/report.html"
    assert html.read_bytes() == first
    assert call("report", "runs/photos", "--out", "page.html") == 0
    assert (tmp_path / "page.html").read_bytes() == first
    assert call("report", "runs/photos", "--out", "page.html") == 1
    assert "not overwritten" in capsys.readouterr().err


def test_a_fit_without_a_report_can_have_one_later(photos, tmp_path, capsys):
    assert call("fit", "photos", *FIT, "--no-report") == 0
    run = tmp_path / "runs" / "photos"
    assert not (run / "report.html").exists() and not (run / kept.FILE).exists()
    assert call("fit", "--resume", run, "--no-report") == 0
    said = capsys.readouterr().out
    assert "ignored" not in said and "report:" not in said and not (run / "report.html").exists()
    assert call("report", run) == 0
    data = data_of(run / "report.html")
    assert data["sheets"]["pictures"] == 20 and data["map"]["views"][-1]["kind"] == "untrained"


def test_a_report_that_fails_loses_nothing(photos, tmp_path, capsys, monkeypatch):
    def fail(x, seed):
        raise RuntimeError("no [room] left")

    monkeypatch.setattr(kept, "places", fail)
    assert call("fit", "photos", *FIT) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "warning: the report could not be written (RuntimeError: no [room] left)" in said
    assert said.endswith("Try again with: semclust report runs/photos")
    run = tmp_path / "runs" / "photos"
    assert (run / "assignments.csv").exists() and (run / "model" / "model.safetensors").exists()
    assert not (run / "report.html").exists()
    monkeypatch.undo()
    assert call("report", run) == 0 and (run / "report.html").exists()


def test_an_interrupted_report_says_so(photos, tmp_path, capsys, monkeypatch):
    def interrupt(x, seed):
        raise KeyboardInterrupt

    monkeypatch.setattr(kept, "places", interrupt)
    assert call("fit", "photos", *FIT) == 130
    assert "the results are complete. Try again with: semclust report runs/photos" in capsys.readouterr().err
    assert (tmp_path / "runs" / "photos" / "summary.json").exists()


def test_the_page_travels_with_the_package():
    """The files beside the Python code are in the wheel's list."""
    here = Path(report.__file__).parent
    project = (here.parents[2] / "pyproject.toml").read_text()
    assert '"semclust.report" = ["web/*"]' in project
    assert {path.name for path in (here / "web").iterdir()} == {"page.html", "style.css", *page.SCRIPTS}
