"""The harness of `semclust bench NAME`: rows, runs that are kept, tables, the chart, and the baselines themselves."""

import json
import math
import runpy
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from conftest import make_images, noisy_groups, save_images, tiny
from semclust import fitting, metrics
from semclust.arena import label_free, tables
from semclust.arena.bars import bar_chart
from semclust.arena.baselines import DeepCluster, pixel_clusters, whiten
from semclust.arena.machine import forget_peak, peak_gib
from semclust.arena.methods import COMPARED, METHODS, ablation, without
from semclust.arena.runs import judge
from semclust.cli import main, parse, settings_from
from semclust.config import Settings, check, preset
from semclust.data import open_images
from semclust.partition import centred

CPU = torch.device("cpu")
SMALL = "--image-size 8 --width 2 --backbone resnet10 --no-max-pool --batch-size 256 --projection-dim 8 --device cpu"


def bench(*words: object) -> int:
    """The exit status of `semclust bench WORDS`."""
    try:
        main(["bench", *map(str, words)])
    except SystemExit as error:
        return int(error.code or 0)
    return 0


@pytest.fixture(scope="module")
def digits(tmp_path_factory) -> Path:
    """The first 400 digits."""
    images = open_images("digits", size=8)
    path = tmp_path_factory.mktemp("data") / "few-digits.npz"
    np.savez(path, images=images.pixels[:400], labels=images.labels[:400])
    return path


@pytest.fixture(scope="module")
def compared(digits, tmp_path_factory) -> Path:
    """The folder of a finished comparison."""
    folder = tmp_path_factory.mktemp("bench") / "digits"
    assert bench(digits, "--seeds", 2, "--epochs", 4, *SMALL.split(), "--out", folder) == 0
    return folder


# ---- a whole comparison --------------------------------------------------------------------------------


def test_every_method_is_run_with_every_seed_and_judged(compared):
    table = json.loads((compared / "table.json").read_text())
    assert [row["method"] for row in table["rows"]] == [METHODS[name].title for name in COMPARED]
    for name, row in zip(COMPARED, table["rows"], strict=True):
        runs = [json.loads((compared / "runs" / f"{name}-seed{seed}.json").read_text()) for seed in (0, 1)]
        assert row["n"] == 2
        for epoch in ("last", "best", "label_free"):
            if runs[0][epoch] is None:
                assert row[epoch] is None
                continue
            values = [run[epoch]["acc"] for run in runs]
            assert row[epoch]["acc"] == pytest.approx([np.mean(values), np.std(values)])
        assert all(run["minutes"] > 0 and run["peak_gib"] > 0.05 for run in runs)
        assert {run["machine"]["torch"] for run in runs} == {torch.__version__}
        assert runs[0]["last"] != runs[1]["last"]  # another seed is another run
        assert len(runs[0]["history"]) == runs[0]["epochs"] == (0 if name == "k-means" else 4)
    assert table["rows"][COMPARED.index("k-means")]["last"]["acc"][0] > 0.7  # on the pixels of digits


def test_the_rows_have_the_settings_they_say(compared):
    stored = {name: json.loads((compared / "runs" / f"{name}-seed1.json").read_text())["settings"] for name in COMPARED}
    assert all(s["n_clusters"] == 10 and s["random_state"] == 1 and s["epochs"] == 4 for s in stored.values())
    assert stored["paper"]["temperature"] == preset("paper")["temperature"] and stored["paper"]["width"] == 2
    assert stored["moco"] == stored["default"] | {"tasks": ["instance"], "nearest": 0.0}
    assert stored["deepcluster"] == stored["moco"]


def test_the_table_in_markdown(compared):
    text = (compared / "table.md").read_text()
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert {line.count("|") for line in lines} == {7}
    assert text.startswith("## few-digits: 400 images of 8 x 8 x 1, 10 classes; 2 seeds")
    assert "Labels are used for these figures alone" in text and f"torch {torch.__version__}" in text
    (k_means,) = [line for line in lines if line.startswith("| k-means on pixels |")]
    assert " ±.0" in k_means
    assert [line.split("|")[1].strip() for line in lines[2:7]] == [
        "semclust, default",
        "- last",
        "- best by labels",
        "- label-free",
        "- label-free seed",
    ]


def test_finished_runs_are_not_run_again(compared, digits, monkeypatch, capsys):
    before = (compared / "table.json").read_bytes()
    monkeypatch.setattr("semclust.arena.runs.carry_out_one", lambda *_: pytest.fail("run again"))
    assert bench(digits, "--seeds", 2, "--epochs", 4, *SMALL.split(), "--out", compared) == 0
    assert (compared / "table.json").read_bytes() == before
    assert capsys.readouterr().out.count("(of before)") == 10


def test_an_interrupted_comparison_goes_on(tmp_path, monkeypatch, capsys):
    from semclust.arena import runs

    words = ["digits", "--seeds", 1, "--epochs", 1, "--methods", "k-means", "moco", *SMALL.split(), "--out", tmp_path]
    begun = []
    carry_out_one = runs.carry_out_one

    def stop_at_the_second(run, *args):
        begun.append(run.name)
        if len(begun) == 2:
            raise KeyboardInterrupt
        return carry_out_one(run, *args)

    monkeypatch.setattr(runs, "carry_out_one", stop_at_the_second)
    assert bench(*words) == 130
    assert "The same command goes on" in capsys.readouterr().err
    assert not (tmp_path / "table.json").exists()
    assert bench(*words) == 0
    assert begun == ["k-means-seed0", "moco-seed0", "moco-seed0"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--epochs", 5], "epochs was 4, now 5"),
        (["--epochs", 4, "-k", 7], "n_clusters was 10, now 7"),
        (["--epochs", 4, "--labels", "other.npy", "-k", 10], None),  # labels are no part of a run's training
    ],
)
def test_runs_of_other_settings_are_not_mixed_in(compared, digits, words, told, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    np.save("other.npy", np.zeros(400, int))
    monkeypatch.setattr("semclust.arena.runs.carry_out_one", lambda *_: pytest.fail("run"))
    status = bench(digits, "--seeds", 2, "--methods", "moco", *words, *SMALL.split(), "--out", compared)
    said = capsys.readouterr().err
    assert status == 1 and (told or "about other images or labels") in said and "--out" in said


def test_the_ablation_shares_runs_and_draws_bars(compared, digits, capsys):
    words = ["--ablation", "--seeds", 1, "--epochs", 4, *SMALL.split(), "--out", compared]
    assert bench(digits, *words) == 0
    assert capsys.readouterr().out.count("(of before)") == 2  # the whole method, and instance contrast alone
    rows = json.loads((compared / "ablation.json").read_text())["rows"]
    assert [row["method"] for row in rows] == ["semclust, default", *without(Settings())]
    chart = ElementTree.parse(compared / "ablation.svg").getroot()
    texts = [text.text for text in chart.iter("{http://www.w3.org/2000/svg}text")]
    assert set(texts) >= {"semclust, default", *without(Settings()), f"{rows[0]['last']['acc'][0]:.3f}"}


# ---- the rows ------------------------------------------------------------------------------------------


def test_flags_hold_for_every_method_also_where_they_are_a_presets_own_value():
    argv = ["bench", "digits", "--temperature", str(Settings().temperature)]
    assert settings_from(argv, "paper").temperature == Settings().temperature != preset("paper")["temperature"]
    assert settings_from(["bench", "digits"], "paper").epochs == preset("paper")["epochs"]
    assert settings_from(["bench", "digits", "--preset", "best"], "paper").epochs == preset("paper")["epochs"]
    assert parse(["bench", "digits", "--preset", "best"]).settings.effort == preset("best")["effort"]


def test_every_row_of_the_ablation_changes_what_is_there():
    for name in ("default", "paper"):
        settings = Settings(**preset(name))
        rows = without(settings)
        for changes in rows.values():
            check(replace(settings, **changes))
            assert any(getattr(settings, name) != value for name, value in changes.items())
        assert len(ablation(name, settings)) == 1 + len(rows)


def test_the_ablation_is_of_the_parts_that_there_are():
    of_paper = without(Settings(**preset("paper")))
    assert of_paper["without half as many clusters beside"] == {"tasks": ("cluster", "instance")}
    paper_lacks = {"without own labels", "without neighbours", "without attraction", "without over-clusters"}
    assert paper_lacks <= set(without(Settings())) and not paper_lacks & set(of_paper)


def test_a_folder_of_classes(tmp_path):
    pixels = noisy_groups(16, size=8)
    for group in range(4):
        save_images(tmp_path / "data" / f"class{group}", pixels[group::4])
    assert bench(tmp_path / "data", "--seeds", 1, "--methods", "k-means", "--out", tmp_path / "out") == 0
    (row,) = json.loads((tmp_path / "out" / "table.json").read_text())["rows"]
    assert row["last"]["acc"] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["x.npy"], "holds no labels to compare with"),
        (["digits", "--seeds", 0], "--seeds 0: expected at least 1"),
        (["digits", "--ablation", "--methods", "moco"], "--ablation and --methods"),
        (["digits", "--epochs", 3, "--minutes", 1], "--epochs and --minutes"),
        (["nowhere"], "no such file"),
    ],
)
def test_what_cannot_be_compared_is_told(words, told, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    np.save("x.npy", noisy_groups(8))
    assert bench(*words) == 1
    assert told in capsys.readouterr().err
    assert not (tmp_path / "bench").exists()


# ---- the baselines -------------------------------------------------------------------------------------

TRUTH = np.arange(48) % 4


def test_k_means_on_pixels_finds_patterns():
    found = pixel_clusters(noisy_groups(), 4, 0, CPU)
    assert metrics.clustering_accuracy(found, TRUTH) == 1
    assert (pixel_clusters(noisy_groups(), 4, 0, CPU) == found).all()


def test_whitened_features_have_no_preferred_direction():
    x = torch.randn(4000, 6, generator=torch.Generator().manual_seed(0)) * torch.tensor([9.0, 3, 1, 0.5, 0.1, 0])
    white = whiten(x)
    assert white.shape == (4000, 5)  # what does not vary is left out
    assert torch.allclose(white.norm(dim=1), torch.ones(4000), atol=1e-5)
    assert torch.allclose(white.T @ white / 4000, torch.eye(5) / 5, atol=0.02)


@pytest.fixture
def alternation():
    settings = tiny(tasks=("instance",), epochs=3, augment="none", warmup_epochs=0, learning_rate=0.3)
    return fitting.start(make_images(), settings, kind=DeepCluster)


def test_deepcluster_draws_pseudo_classes_evenly(alternation):
    alternation.pseudo.copy_((torch.arange(48) >= 4).long())  # 4 images against 44
    drawn = torch.cat([alternation._order().flatten() for _ in range(40)])
    assert 0.4 < (drawn < 4).float().mean() < 0.6
    assert len(drawn) == 40 * 48


def test_deepcluster_learns_its_pseudo_labels(alternation):
    before = {name: value.clone() for name, value in alternation.learner.encoder.named_parameters()}
    row, p = alternation.run_epoch()
    changed = [n for n, v in alternation.learner.encoder.named_parameters() if not torch.equal(v, before[n])]
    assert changed and all(name.startswith("backbone") for name in changed)  # the projection takes no part
    assert p.shape == (48, 4) and p.sum() == 48 and math.isnan(row["score"])
    alternation.pseudo.copy_(torch.arange(48) % 4)
    losses = []
    for _ in range(40):
        alternation.step = 0
        losses.append(alternation._steps(lambda n: None)["loss"])
    assert losses[-1] < 0.5 * math.log(4)  # that of a guess


def test_deepcluster_begins_its_head_anew_with_its_labels(alternation):
    alternation.run_epoch()
    assert alternation.head.weight.abs().max() < 0.1 and alternation.head.bias.abs().max() == 0
    for parameter in alternation.head.parameters():
        assert alternation.optimiser.state[parameter]["momentum_buffer"].abs().max() == 0


def test_deepcluster_repeats_and_keeps_to_a_budget():
    def history(**changes):
        training = fitting.start(make_images(), tiny(tasks=("instance",), **changes), kind=DeepCluster)
        share = fitting.keep_to_budget(training, None, lambda: 0.0, fitting.Watcher())
        return training.settings.epochs, [training.run_epoch(share=share(epoch))[0]["loss"] for epoch in range(2)]

    assert history(epochs=2) == history(epochs=2)
    assert history(minutes=0.02)[0] > 10


# ---- judging -------------------------------------------------------------------------------------------


def rows(*figures: tuple[float, float]) -> list[dict]:
    """(score, ACC) of each epoch."""
    return [
        {"epoch": epoch, "score": score, "acc": acc, "nmi": acc, "ari": acc}
        for epoch, (score, acc) in enumerate(figures, 1)
    ]


def test_the_three_epochs_of_a_run():
    nan = math.nan
    judged = judge(rows((nan, nan), (0.5, 0.6), (0.9, 0.7), (0.4, 0.8), (0.3, 0.5)))
    assert {name: figures["epoch"] for name, figures in judged.items()} == {"last": 5, "best": 4, "label_free": 3}
    assert judge(rows((nan, 0.3), (nan, 0.2)))["label_free"] is None


def test_the_seed_is_chosen_by_its_score():
    machine = {"device": "CPU", "threads": 1, "semclust": "0", "torch": "0", "python": "0"}
    runs = [
        {"method": "m", "minutes": 1.0, "peak_gib": 1.0, "epochs": 2, "machine": machine, **judge(rows(*figures))}
        for figures in ([(0.5, 0.9), (0.6, 0.8)], [(0.7, 0.5), (0.4, 0.4)])
    ]
    (row,) = tables.summarise(runs)
    assert row["label_free"]["acc"] == pytest.approx([0.65, 0.15])
    assert row["label_free_seed"]["acc"] == [0.5, 0.0]
    assert row["best"]["acc"] == pytest.approx([0.7, 0.2])


def test_what_choosing_by_score_costs():
    judged = label_free.judge_score([rows((0.1, 0.2), (0.2, 0.4), (0.3, 0.6)), rows((0.5, 0.8), (0.4, 0.9))])
    assert judged["correlation_over_epochs"] == pytest.approx(0.9)
    assert judged["loss_by_epoch"]["mean"] == pytest.approx(0.05)
    assert judged["loss_by_epoch_and_seed"] == pytest.approx(0.1)
    assert judged["correlation_over_runs"] is None


def test_rows_are_read_from_runs_of_both_kinds(compared, tmp_path):
    fitting_run = fitting.RunFolder.create(tmp_path, "run")
    fitting.fit(make_images(labels=TRUTH), tiny(epochs=4), run=fitting_run)
    found = label_free.read_rows(tmp_path)
    assert list(found) == [str(fitting_run.path)] and all(
        label_free.has_both(row) for row in found[str(fitting_run.path)]
    )
    of_bench = label_free.read_rows(compared / "runs")
    assert {Path(name).stem for name in of_bench} >= {"default-seed0", "moco-seed1"}
    assert not any("deepcluster" in name or "k-means" in name for name in of_bench)


# ---- surroundings --------------------------------------------------------------------------------------


def test_bars_are_as_long_as_their_figures():
    chart = ElementTree.fromstring(bar_chart("a < b & c", [("whole", 0.5, 0.1), ("<part>", 0.25, 0.0)]))
    space = "{http://www.w3.org/2000/svg}"
    bars = [rect for rect in chart.iter(f"{space}rect") if rect.get("class") != "ground"]
    assert float(bars[0].get("width")) == 2 * float(bars[1].get("width"))
    assert len([line for line in chart.iter(f"{space}line") if line.get("class") == "spread"]) == 1
    texts = [text.text for text in chart.iter(f"{space}text")]
    assert {"a < b & c", "<part>", "0.500 ± 0.100", "0.250"} <= set(texts)


def test_the_peak_of_memory_is_that_of_the_run():
    forget_peak(CPU)
    before = peak_gib(CPU)
    held = np.ones(2**27, np.uint8)  # 0.125 GiB
    during = peak_gib(CPU)
    del held
    assert during > before + 0.1
    forget_peak(CPU)
    assert peak_gib(CPU) < during - 0.05


def test_the_learning_rate_of_deepcluster_falls_once(digits):
    settings = Settings(**METHODS["deepcluster"].changes, n_clusters=3, epochs=20, width=4, warmup_epochs=0)
    training = fitting.start(open_images(digits, size=8), settings, kind=DeepCluster)
    rates = [training.learning_rate(epoch) for epoch in range(20)]
    assert rates == sorted(rates, reverse=True) and len(training._order()[0]) == training.batch_size


# ---- looks at features ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def close_look() -> dict:
    return runpy.run_path(str(Path(__file__).parents[1] / "benchmarks" / "close_look.py"))


def test_neighbours_tell_the_class_of_images_that_lie_together(close_look):
    """Also where the images come class by class, as from folders."""
    labels = np.repeat([f"class {i}" for i in range(6)], 40)
    means = np.eye(8)[:6][np.unique(labels, return_inverse=True)[1]]
    apart = torch.from_numpy(means + np.random.default_rng(0).normal(0, 0.01, (240, 8))).float()
    assert close_look["neighbours_tell"](apart, labels) == (1.0, 1.0)
    anywhere = torch.from_numpy(np.random.default_rng(1).normal(size=(240, 8)))
    knn, purity = close_look["neighbours_tell"](anywhere, labels)
    assert knn < 0.5 and purity < 0.3


def test_principal_components_are_told_from_the_largest_on(close_look):
    features = torch.from_numpy(np.random.default_rng(0).normal(size=(300, 120)) * np.linspace(1, 5, 120)).float()
    found = close_look["principal_components"](features)
    assert found.shape == (300, 96) and found.dtype == torch.float16
    assert (found.float().square().sum(0).diff() <= 0.01).all()
    x = centred(features)
    assert_close(found.float() @ found.float().T, x @ x.T, atol=0.1, rtol=0)  # but for 24 small directions


def test_a_look_is_at_the_epoch_that_has_ended(close_look):
    """The next one may look by another network, and at another size."""

    class Run:
        epoch = 7

        def features(self):
            return self.epoch

    looks = close_look["Looks"]("title", np.zeros(4), 1, None)
    looks.training = Run()
    assert looks.features_of_the_epoch() == 6 and looks.training.epoch == 7


def test_runs_are_grouped_by_data_set():
    group_of = runpy.run_path(str(Path(__file__).parents[1] / "benchmarks" / "label_free.py"))["group_of"]
    names = ["runs/cifar-10", "runs/cifar-10-2", "runs/cifar-100", "bench/digits/runs/default-seed1.json"]
    assert [group_of(name, names) for name in names] == ["cifar-10", "cifar-10", "cifar-100", "digits/default"]


def test_a_close_look_writes_what_bench_does_and_tells_of_every_phase(close_look, tmp_path, monkeypatch, capsys):
    pixels, order = noisy_groups(60, 8), np.argsort(np.arange(60) % 4, kind="stable")
    np.savez(tmp_path / "named.npz", images=pixels[order], labels=np.array(list("abcd"))[np.arange(60) % 4][order])
    words = f"{tmp_path / 'named.npz'} --methods default paper --seeds 1 --epochs 4 {SMALL} --out {tmp_path / 'looked'}"
    kept = tmp_path / "kept"
    monkeypatch.setattr("sys.argv", ["close_look.py", "--every", "9", "--keep", str(kept), *words.split()])
    close_look["main"]()
    told = capsys.readouterr().out
    looks = [line.split("epoch ")[1].split(":")[0] for line in told.splitlines() if "kNN" in line]
    assert looks == ["1, instances", "2, over-clusters", "3, clusters", "4, own labels", "1, clusters", "4, clusters"]
    assert told.count("mostly") == 2 * 4
    features = {path.name: np.load(path) for path in kept.iterdir()}
    default = [f"semclust-default-seed-0-1-of-2-{epoch}.npy" for epoch in (1, 2, 3, 4)]
    assert sorted(features) == [
        *default,
        "semclust-paper-seed-0-2-of-2-4.npy",
    ]  # of one phase, whose first epoch ends none
    assert {len(x) for x in features.values()} == {60}
    assert bench(*words.split()) == 0  # whose runs these are
    assert "(of before)" in capsys.readouterr().out
