"""Settings: what is refused and how, JSON and back, the paper's values, and the list of names."""

import dataclasses
import inspect
import json
import math
from typing import get_args, get_type_hints

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from semclust.augment import AUGMENTATIONS
from semclust.backbones import BLOCKS
from semclust.config import Settings, check, from_json, preset, to_json
from semclust.errors import InputError

repeatable = settings(max_examples=40, deadline=None, derandomize=True)

NAMES = [
    "n_clusters",
    "epochs",
    "effort",
    "minutes",
    "batch_size",
    "learning_rate",
    "weight_decay",
    "warmup_epochs",
    "image_size",
    "augment",
    "crop_size",
    "backbone",
    "width",
    "max_pool",
    "sees",
    "projection_dim",
    "projection_norm",
    "projection_per_task",
    "batch_norm_groups",
    "batch_norm",
    "contrast",
    "momentum",
    "symmetric",
    "temperature",
    "memory_size",
    "tasks",
    "task_sum",
    "classifier_input",
    "classifier_trains_encoder",
    "min_cluster_size",
    "nearest",
    "nearest_from",
    "over_factor",
    "over_from",
    "over_until",
    "over_by",
    "cluster_from",
    "cluster_epochs",
    "cluster_rate",
    "neighbours",
    "balance",
    "self_label_from",
    "self_label_confidence",
    "assign_by",
    "attraction",
    "cross_cluster",
    "online",
    "hard_samples",
    "random_state",
    "device",
    "precision",
    "images_on",
    "compile",
]


def test_a_new_setting_is_a_decision():
    """Each name is a flag of the command line, a parameter in Python and a key in config.json: change with care."""
    assert [f.name for f in dataclasses.fields(Settings)] == NAMES


def test_defaults_are_allowed():
    check(Settings())


# What is refused.

BAD = [
    *[("n_clusters", value) for value in (1, 0, -3, 2.5, 10.0, "10", True, math.nan, None, [10], np.float64(10))],
    *[("temperature", value) for value in (0, 0.0, -0.1, math.nan, "0.1", None, False, 1j)],
    *[("momentum", value) for value in (1.5, -0.1, math.nan, "0.9", True)],
    *[("epochs", value) for value in (0, -1, 1.5, "200")],
    *[("effort", value) for value in (0, 0.01, -1, None, "much")],
    *[("minutes", value) for value in (-1, math.nan, math.inf, "ten", True)],
    *[("batch_size", value) for value in (1, 0, -256, 2.5, "256", True)],
    *[("learning_rate", value) for value in (-0.1, math.nan, "fast", True)],
    *[("weight_decay", value) for value in (-1e-9, math.nan)],
    *[("warmup_epochs", value) for value in (-1, 0.5)],
    *[("image_size", value) for value in (3, 0, 1025, 32.0, "32", (32, 32))],
    *[("augment", value) for value in ("blurry", "", None, 3, ["natural"], "Natural")],
    *[("crop_size", value) for value in (0, 0.05, 1.5, "half", None)],
    *[("precision", value) for value in ("bfloat", "float16", None, 32)],
    *[("backbone", value) for value in ("vgg16", "", None, 18, "resnet50")],
    *[("width", value) for value in (0, -1, 1.5, "64")],
    *[("max_pool", value) for value in (1, 0, "yes", None)],
    *[("sees", value) for value in (1, None, True, "sobel")],
    *[("projection_dim", value) for value in (1, 0, 2.5)],
    *[("projection_norm", value) for value in (1, None)],
    *[("projection_per_task", value) for value in (1, "")],
    *[("batch_norm_groups", value) for value in (0, -8, 1.5, None)],
    *[("batch_norm", value) for value in ("none", "", None, True, ["local"])],
    *[("contrast", value) for value in ("x", "MoCo", None, 0, True)],
    *[("memory_size", value) for value in (0, -1, 4096.5)],
    *[("tasks", value) for value in ((), [], ("under",), ("foo",), ("cluster", "foo"), "cluster", None, {"cluster"})],
    *[("tasks", value) for value in (("under", "instance"), ("over",), ("over", "under", "instance"))],
    *[("task_sum", value) for value in ("average", None)],
    *[("classifier_input", value) for value in ("q", None)],
    *[("classifier_trains_encoder", value) for value in (1, "True")],
    *[("min_cluster_size", value) for value in (-0.01, 1.01, math.nan, "small")],
    *[("over_factor", value) for value in (1, 0, 2.5)],
    *[("nearest", value) for value in (-0.1, 1.1, None)],
    *[("nearest_from", value) for value in (-0.1, 1.1)],
    *[("over_from", value) for value in (-0.1, 1.1)],
    *[("over_until", value) for value in (-0.1, 1.1, "end")],
    *[("over_by", value) for value in ("kmeans", None, True)],
    *[("cluster_from", value) for value in (-0.1, 1.1, math.nan)],
    *[("cluster_epochs", value) for value in (0, -1, 1.5)],
    *[("cluster_rate", value) for value in (-0.1, 1.5, "low")],
    *[("neighbours", value) for value in (-1, 0.5, "all")],
    *[("balance", value) for value in (-1, math.nan, "even")],
    *[("self_label_from", value) for value in (-0.1, 1.1, "end", None)],
    *[("self_label_confidence", value) for value in (-0.1, 1.1, math.nan, "sure")],
    *[("assign_by", value) for value in ("value", None)],
    *[("attraction", value) for value in (-0.5, math.nan)],
    *[("cross_cluster", value) for value in (1, "False", None)],
    *[("online", value) for value in (0, "True")],
    *[("hard_samples", value) for value in (1, None)],
    *[("random_state", value) for value in (-1, 0.5, "0", True)],
    *[("symmetric", value) for value in (1, "yes", None)],
    *[("images_on", value) for value in ("gpu", "", None)],
    *[("compile", value) for value in (0, "no", None)],
]


@pytest.mark.parametrize("name, value", BAD, ids=lambda part: str(part))
def test_a_bad_value_is_refused_with_its_name_and_what_was_expected(name, value):
    with pytest.raises(InputError) as caught:
        check(Settings(**{name: value}))
    message = str(caught.value)
    assert message.startswith(f"{name}={value!r}: expected ") and message.endswith(".")


def test_every_setting_but_the_device_refuses_something():
    assert {name for name, _ in BAD} == set(NAMES) - {"device"}


@pytest.mark.parametrize(
    "name, value, expected",
    [
        ("n_clusters", 1, "from 2 to 1000000"),
        ("n_clusters", 2.5, "a whole number"),
        ("momentum", 1.5, "from 0 to 1"),
        ("image_size", 2000, "from 4 to 1024"),
        ("learning_rate", "fast", "a number"),
        ("contrast", "x", "moco, simclr, instance-memory"),
        ("augment", "blurry", "auto, natural, strokes, none"),
        ("tasks", ("foo",), "cluster, under, over, instance"),
        ("tasks", (), "one or more of cluster"),
        ("tasks", ("under",), "'cluster' among them"),
        ("online", 1, "True or False"),
    ],
)
def test_the_message_says_what_would_do(name, value, expected):
    with pytest.raises(InputError) as caught:
        check(Settings(**{name: value}))
    assert expected in str(caught.value)


# What is taken.

GOOD = [
    *[("n_clusters", value) for value in (2, 1000, np.int64(10), np.int32(3), np.uint8(5))],
    *[("momentum", value) for value in (0, 1, 0.0, 1.0, np.float64(0.5), np.float32(0.9), np.int64(1))],
    *[("temperature", value) for value in (1e-3, 1, np.float32(0.07))],
    *[("batch_size", value) for value in (None, 2, np.int64(256))],
    *[("image_size", value) for value in (None, 4, 1024)],
    *[("random_state", value) for value in (None, 0, np.int64(7))],
    *[("width", value) for value in (None, 1)],
    *[("warmup_epochs", value) for value in (0, 10)],
    *[("learning_rate", value) for value in (None, 0, 0.03)],
    *[("tasks", value) for value in (("cluster",), ("instance",), ["cluster", "under"], ("over", "cluster"))],
    *[("augment", value) for value in ("auto", "natural", "strokes", "none", abs)],
    *[("backbone", value) for value in ("resnet18", "resnet34", nn.Identity())],
    *[("contrast", value) for value in ("moco", "simclr", "instance-memory")],
    *[("online", value) for value in (True, False)],
]


@pytest.mark.parametrize("name, value", GOOD, ids=lambda part: str(part))
def test_good_values_are_taken(name, value):
    check(Settings(**{name: value}))


@pytest.mark.parametrize("f", dataclasses.fields(Settings), ids=lambda f: f.name)
def test_both_ends_of_a_range_are_allowed_and_no_more(f):
    low, high = f.metadata.get("low"), f.metadata.get("high")
    with_all_plans = dict(neighbours=0, tasks=("cluster",), cluster_from=0.0, self_label_from=1.0)
    for end, beyond in ((low, -1), (high, 1)):
        if end is not None:
            check(Settings(**with_all_plans | {f.name: end}))
            with pytest.raises(InputError, match=f"^{f.name}="):
                check(Settings(**{f.name: end + beyond}))


def test_every_setting_says_what_it_is_for():
    source = inspect.getsource(Settings)
    for name in NAMES:
        after = source.split(f"\n    {name}: ", 1)[1].split("\n", 2)[1]
        assert after.strip().startswith('"""'), name


def test_names_on_the_command_line_are_those_that_exist():
    hints = get_type_hints(Settings)
    assert set(get_args(hints["augment"])) == {"auto", *AUGMENTATIONS}
    assert set(get_args(hints["backbone"])) == {"auto", *BLOCKS}


# JSON and back.


def through_json(chosen):
    return Settings(**from_json(json.loads(json.dumps(to_json(chosen)))))


@repeatable
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "n_clusters": st.integers(2, 1000),
            "batch_size": st.none() | st.integers(2, 4096),
            "learning_rate": st.floats(0, 10),
            "max_pool": st.booleans(),
            "tasks": st.sampled_from([("cluster",), ("instance",), ("cluster", "under", "over")]),
            "contrast": st.sampled_from(["moco", "simclr"]),
            "random_state": st.none() | st.integers(0, 2**40),
        },
    )
)
def test_settings_survive_json(changes):
    chosen = Settings(**changes)
    again = through_json(chosen)
    assert again == chosen and type(again.tasks) is tuple
    check(again)


def test_json_holds_every_setting_in_order():
    values = to_json(Settings())
    assert list(values) == NAMES
    assert values["tasks"] == list(Settings().tasks) and values["batch_size"] is Settings().batch_size


def test_numbers_of_numpy_survive_json():
    chosen = Settings(
        n_clusters=np.int64(7), epochs=np.int32(3), momentum=np.float32(0.5), temperature=np.float64(0.25)
    )
    check(chosen)
    again = through_json(chosen)
    assert (again.n_clusters, again.epochs, again.momentum, again.temperature) == (7, 3, 0.5, 0.25)
    check(again)


def own_view(x):
    return x


def test_what_json_cannot_hold_is_stored_by_name():
    values = to_json(Settings(backbone=nn.Identity(), augment=own_view))
    assert values["backbone"] == "python:Identity" and values["augment"] == "python:own_view"
    with pytest.raises(InputError, match="python:Identity"):
        check(Settings(**from_json(values | {"augment": "auto"})))


def test_an_unknown_key_is_refused_by_name():
    with pytest.raises(InputError, match=r"Unknown settings n_klusters, zeal"):
        from_json({"n_clusters": 3, "zeal": 1, "n_klusters": 3})


# Presets.


def test_paper_preset_holds_the_values_of_the_paper():
    chosen = preset("paper")
    stated = {
        "temperature": 0.1,
        "momentum": 0.9,
        "memory_size": 4096,
        "learning_rate": 0.03,
        "weight_decay": 5e-4,
        "batch_size": 256,
        "epochs": 200,
        "backbone": "resnet34",
        "max_pool": True,
        "width": 64,
        "contrast": "moco",
        "augment": "natural",
        "tasks": ("cluster", "under", "instance"),
        "assign_by": "query",
    }
    assert {name: chosen.get(name) for name in stated} == stated
    additions = ("warmup_epochs", "cluster_from", "neighbours", "attraction", "projection_norm")
    assert {name: chosen.get(name) for name in additions} == dict.fromkeys(additions, 0)
    whole = Settings(**chosen)
    check(whole)
    assert whole.cross_cluster and whole.online and whole.hard_samples and whole.sees == "colours"


def test_default_preset_changes_nothing():
    assert preset("default") == {}
    assert Settings(**preset("default")) == Settings()


def test_quick_and_best_differ_from_the_default_in_how_long_they_take_alone():
    efforts = [Settings(**preset(name)).effort for name in ("quick", "default", "best")]
    assert efforts == sorted(set(efforts))
    assert {*preset("quick"), *preset("best")} == {"effort"}


@pytest.mark.parametrize("name", ["Paper", "", "worst"])
def test_an_unknown_preset_is_refused_with_those_there_are(name):
    with pytest.raises(InputError, match=rf"no preset '{name}'.*quick, default, best, paper"):
        preset(name)


def test_neighbours_need_features_to_be_found_by():
    with pytest.raises(InputError, match=r"neighbours=20 with cluster_from=0\.0: expected neighbours=0"):
        check(Settings(cluster_from=0.0))
    check(Settings(cluster_from=0.0, neighbours=0))
    check(Settings(cluster_from=0.0, tasks=("instance",)))


@pytest.mark.parametrize("over_from", [0.5, 0.9])
def test_over_clusters_begin_before_they_end(over_from):
    with pytest.raises(InputError, match=rf"over_from={over_from} with over_until=0\.5: expected it to begin before"):
        check(Settings(over_from=over_from))
    check(Settings(over_from=over_from, over_until=1.0, self_label_from=1.0))
    check(Settings(over_from=over_from, tasks=("cluster",)))


def test_the_network_labels_itself_after_the_clusters_have_begun():
    words = r"self_label_from=0\.75 with cluster_from=0\.9: expected clusters before .* at least self_label_from=0\.9"
    with pytest.raises(InputError, match=words):
        check(Settings(cluster_from=0.9))
    with pytest.raises(InputError, match=r"--self-label-from 0\.75 with --cluster-from 0\.9: .* --self-label-from 1 "):
        check(Settings(cluster_from=0.9), as_flags=True)
    for changes in (dict(self_label_from=0.9), dict(self_label_from=1.0), dict(tasks=("instance",))):
        check(Settings(cluster_from=0.9, **changes))


def test_over_clusters_begin_before_the_network_labels_itself():
    with pytest.raises(InputError, match=r"over_from=0\.9 with self_label_from=0\.75: expected over-clusters to begin"):
        check(Settings(over_from=0.9, over_until=1.0))
    for changes in (dict(over_from=0.7), dict(tasks=("cluster",)), dict(self_label_from=0.95)):
        check(Settings(**dict(over_from=0.9, over_until=1.0) | changes))


def test_epochs_that_nobody_decided_on_are_told():
    with pytest.raises(InputError, match="epochs=None: expected the number that was decided"):
        Settings().n_epochs  # noqa: B018
