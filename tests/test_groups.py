"""Clusters after the fit: steps that add up and can be taken back, and a file that is checked."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semclust.errors import DamagedFileError, InputError
from semclust.groups import Groups, check_name


def probabilities(n: int = 50, clusters: int = 6, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).dirichlet(np.full(clusters, 0.3), n).astype(np.float32)


def model_folder(path: Path, n_clusters: int = 6) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps({"settings": {"n_clusters": n_clusters}}))
    return path


def members(*sizes: int) -> tuple[np.ndarray, np.ndarray]:
    """Certain members of clusters of these sizes: probabilities and labels."""
    labels = np.repeat(np.arange(len(sizes)), sizes)
    return np.eye(len(sizes))[labels], labels


# ---- steps -------------------------------------------------------------------------------------------


def test_at_first_the_clusters_are_those_of_the_fit():
    groups, p = Groups(6), probabilities()
    assert groups.ids == list(range(6)) and groups.names == {} and groups.steps == []
    assert groups.apply(p) is p  # not a digit changes


def test_a_merge_leaves_the_smallest_id_and_renumbers_none():
    groups, p = Groups(6), probabilities()
    assert groups.merge([5, 1, 3]) == 1
    assert groups.ids == [0, 1, 2, 4] and groups.of.tolist() == [0, 1, 2, 1, 4, 1]
    expected = np.stack([p[:, 0], p[:, 1] + p[:, 3] + p[:, 5], p[:, 2], p[:, 4]], axis=1)
    np.testing.assert_allclose(groups.apply(p), expected, atol=1e-6)
    assert groups.merge([4, 1]) == 1
    assert groups.of.tolist() == [0, 1, 2, 1, 1, 1] and groups.ids == [0, 1, 2]


def test_probabilities_are_left_alone_and_stay_below_one():
    p = np.full((3, 11), 0.1, np.float32)  # ten of them add up to 1.0000001
    p[:, 10] = 0
    before = p.copy()
    groups = Groups(11)
    groups.merge(range(10))
    assert groups.apply(p).max() == 1 and groups.apply(p).dtype == np.float32
    np.testing.assert_array_equal(p, before)


def test_columns_that_are_not_merged_keep_every_bit():
    groups, p = Groups(6), probabilities()
    groups.merge([2, 4])
    np.testing.assert_array_equal(groups.apply(p)[:, [0, 1, 3, 4]], p[:, [0, 1, 3, 5]])


def test_a_name_is_given_changed_and_free_again():
    groups = Groups(6)
    assert groups.rename(2, "  ships ") == 2 and groups.names == {2: "ships"}
    groups.rename("ships", "boats")
    groups.rename(3, "ships")
    assert groups.names == {2: "boats", 3: "ships"}
    groups.rename(3, "ships")  # its own name is no other's
    assert groups.title(2) == "2 boats" and groups.title(0) == "0"


def test_clusters_are_found_by_id_or_name():
    groups = Groups(6)
    groups.rename(4, "ships")
    for given_as in (4, "4", "ships", " ships ", np.int64(4)):
        assert groups.find(given_as) == 4
    assert groups.merge(["ships", "1"]) == 1
    assert groups.find("ships") == 1


def test_a_merged_cluster_keeps_the_first_name():
    groups = Groups(6)
    groups.rename(3, "ships")
    groups.merge([1, 3])
    assert groups.names == {1: "ships"}
    groups.rename(5, "boats")
    groups.merge([1, 5])
    assert groups.names == {1: "ships"}
    groups.rename(2, "boats")  # free again


def test_undo_takes_back_step_by_step():
    groups = Groups(6)
    groups.rename(3, "ships")
    groups.merge([1, 3])
    groups.rename(1, "boats")
    seen = [(groups.ids, dict(groups.names))]
    for _ in range(3):
        groups.undo()
        seen.append((groups.ids, dict(groups.names)))
    everything, merged = list(range(6)), [0, 1, 2, 4, 5]
    assert seen == [(merged, {1: "boats"}), (merged, {1: "ships"}), (everything, {3: "ships"}), (everything, {})]
    with pytest.raises(InputError, match="nothing to undo"):
        groups.undo()


@pytest.mark.parametrize("clusters", [[], [3], [3, 3], ["3", 3]], ids=str)
def test_one_cluster_cannot_be_merged(clusters):
    with pytest.raises(InputError, match="expected two clusters or more"):
        Groups(6).merge(clusters)


@pytest.mark.parametrize("cluster", [6, -1, "6", "ships", "", None, 1.0, 2.5, [1]], ids=repr)
def test_an_unknown_cluster_is_named(cluster):
    groups = Groups(6)
    for call in (lambda: groups.merge([0, cluster]), lambda: groups.rename(cluster, "x")):
        with pytest.raises(InputError, match=r"There is no cluster .*expected one of 0, 1, 2, 3, 4, 5\.") as caught:
            call()
        assert repr(cluster) in str(caught.value)
    assert groups.steps == [] and groups.ids == list(range(6))


def test_a_cluster_that_was_merged_tells_where_it_went():
    groups = Groups(6)
    groups.rename(3, "ships")
    groups.merge([3, 5])
    with pytest.raises(InputError, match=r"no cluster 5 \(it was merged into 3 ships\)"):
        groups.merge([5, 1])


def test_two_clusters_at_least_remain():
    groups = Groups(3)
    with pytest.raises(InputError, match="at least 2 must remain"):
        groups.merge([0, 1, 2])
    groups.merge([0, 1])
    with pytest.raises(InputError, match="at least 2 must remain"):
        groups.merge([0, 2])
    assert groups.ids == [0, 2] and len(groups.steps) == 1


@pytest.mark.parametrize(
    "name", ["", "  ", "\n", "a\nb", "a\x00b", "\x1b[31m", "\udcff", "a\u2028b", "7", "-7", "٣", None]
)
def test_what_is_no_name(name):
    groups = Groups(6)
    with pytest.raises(InputError, match="name"):
        groups.rename(2, name)
    assert groups.names == {} and groups.steps == []


@pytest.mark.parametrize(
    "name", ["=cmd|x", "a/b", "..", 'say "x"', "🎉", "👨‍👩‍👧", "[red]x[/]", "<b>", "3 ships", "3.5", "-x", "x" * 999]
)
def test_any_other_text_is_a_name(name):
    assert check_name(name) == name


def test_no_two_clusters_have_one_name():
    groups = Groups(6)
    groups.rename(2, "ships")
    with pytest.raises(InputError, match=r"Cluster 2 has the name 'ships'.*merge 2 and 3"):
        groups.rename(3, "ships")
    assert groups.names == {2: "ships"} and len(groups.steps) == 1


# ---- reduce ------------------------------------------------------------------------------------------


def test_reduce_merges_the_closest_first():
    p, _ = members(5, 4, 3, 2)
    p[5:9] = [0, 0.7, 0.2, 0.1]  # images of cluster 1 that might be of 2, and less likely of 3
    groups = Groups(4)
    assert groups.reduce(3, p) == [[1, 2]]
    assert groups.ids == [0, 1, 3]


@pytest.mark.parametrize("family", [0.5, 1.0, 2.0])
def test_families_of_clusters_are_found_also_where_they_are_faint(family):
    """And no cluster swallows all others as it grows."""
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(20), 100)
    logits = rng.normal(size=(2000, 20)) + family * (labels[:, None] // 4 == np.arange(20) // 4)
    logits[np.arange(2000), labels] += 5
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    groups = Groups(20)
    groups.reduce(5, p)
    assert groups.of.tolist() == np.repeat([0, 4, 8, 12, 16], 4).tolist()


def test_reduce_is_one_step():
    groups = Groups(6)
    groups.rename(0, "x")
    assert len(groups.reduce(2, probabilities())) == 4
    assert len(groups.ids) == 2 and len(groups.steps) == 2
    groups.undo()
    assert groups.ids == list(range(6)) and groups.names == {0: "x"}


def naive_reduction(p: np.ndarray, to: int) -> list[set[int]]:
    """The same from the probabilities of the merged clusters, anew for each merge."""
    groups = [{c} for c in range(p.shape[1])]
    while len(groups) > to:
        chances = [[sum(row[c] for c in group) for row in p.tolist()] for group in groups]
        close = {
            (a, b): np.dot(chances[a], chances[b]) / (sum(chances[a]) * sum(chances[b]))
            for a in range(len(groups))
            for b in range(a + 1, len(groups))
        }
        a, b = max(close, key=lambda pair: close[pair])
        groups[a] |= groups.pop(b)
    return groups


@pytest.mark.parametrize("seed", range(10))
def test_reduce_agrees_with_a_naive_one(seed, monkeypatch):
    monkeypatch.setattr("semclust.groups.CHUNK", 7)
    rng = np.random.default_rng(seed)
    p = np.eye(7)[np.concatenate([np.arange(7), rng.integers(0, 7, 33)])] + rng.random((40, 7)) * 0.1
    groups = Groups(7)
    groups.reduce(3, p / p.sum(1, keepdims=True))
    assert sorted(map(sorted, naive_reduction(p / p.sum(1, keepdims=True), 3))) == sorted(
        np.flatnonzero(groups.of == cluster).tolist() for cluster in groups.ids
    )


def test_reduce_goes_on_from_what_was_merged():
    p, _ = members(4, 4, 4, 4)
    p[8:12] = [0.3, 0.0, 0.5, 0.2]
    assert Groups(4).reduce(3, p) == [[0, 2]]
    groups = Groups(4)
    groups.merge([0, 1])  # of which half has nothing to do with 2
    assert groups.reduce(2, p) == [[2, 3]]


def with_empty(shares: list[list[float]]) -> np.ndarray:
    """Probabilities of the clusters 0 and 1, which are very close, and 2; and one empty cluster for each row of
    ``shares``, which tells the probability that the images of 0, 1 and 2 give it."""
    labels = np.repeat([0, 1, 2], 4)
    lost = np.array(shares)[:, labels].T
    between = np.array([[0.55, 0.45, 0], [0.45, 0.55, 0], [0, 0, 1]])[labels]
    return np.hstack([between * (1 - lost.sum(1, keepdims=True)), lost])


def test_reduce_merges_empty_clusters_first():
    p = with_empty([[0.2, 0, 0.1]])  # less close to any than 0 and 1 are
    groups = Groups(4)
    ((_, second),) = groups.reduce(3, p)
    assert second == 3


def test_an_empty_cluster_goes_where_its_probability_lies():
    assert Groups(4).reduce(3, with_empty([[0, 0, 0.4]])) == [[2, 3]]
    assert Groups(4).reduce(3, with_empty([[0.3, 0, 0]])) == [[0, 3]]


def test_two_empty_clusters_are_emptied_one_after_the_other():
    merges = Groups(5).reduce(3, with_empty([[0.2, 0, 0.2], [0.2, 0, 0.2]]))
    assert {cluster for pair in merges for cluster in pair} >= {3, 4}


def test_a_cluster_that_no_image_gives_any_chance_can_be_merged():
    p, _ = members(3, 3, 3)
    groups = Groups(4)
    groups.reduce(3, np.hstack([p, np.zeros((9, 1))]))
    assert groups.ids == [0, 1, 2]


def test_the_fingerprint_is_of_what_is_seen():
    groups, other = Groups(4), Groups(4)
    assert groups.fingerprint == other.fingerprint
    groups.rename(2, "ships")
    seen = groups.fingerprint
    assert seen != other.fingerprint
    groups.rename(2, "boats")
    groups.rename(2, "ships")
    assert groups.fingerprint == seen
    groups.merge([2, 3])
    assert groups.fingerprint != seen


@pytest.mark.parametrize("to", [1, 0, -3, 6, 7, 2.5, "3", None, True])
def test_reduce_to_a_number_that_cannot_be(to):
    groups = Groups(6)
    with pytest.raises(InputError, match="from 2 to 5"):
        groups.reduce(to, probabilities())
    assert groups.steps == []


def test_two_clusters_always_remain():
    groups = Groups(3)
    groups.merge([0, 1])
    with pytest.raises(InputError, match="only 2 clusters left, and 2 always remain"):
        groups.reduce(2, probabilities()[:, :3])


# ---- the file ----------------------------------------------------------------------------------------


def test_without_a_file_nothing_has_changed(tmp_path):
    groups = Groups.read(model_folder(tmp_path))
    assert groups.ids == list(range(6)) and groups.steps == []


def test_groups_come_back_and_undo_removes_the_file(tmp_path):
    folder = model_folder(tmp_path)
    groups = Groups(6)
    groups.rename(2, 'a/"=ünï🎉')
    groups.merge([1, 4])
    groups.reduce(3, probabilities())
    groups.write(folder)
    back = Groups.read(folder)
    assert (back.ids, back.names, back.steps) == (groups.ids, groups.names, groups.steps)
    np.testing.assert_array_equal(back.of, groups.of)
    for _ in range(3):
        back.undo()
        back.write(folder)
    assert [path.name for path in folder.iterdir()] == ["config.json"]
    back.write(folder)  # again: nothing to remove


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.booleans()), max_size=8))
def test_any_steps_that_are_taken_are_read_again(tmp_path_factory, steps):
    groups = Groups(6)
    for a, b, rename in steps:
        try:
            groups.rename(a, f"name {b}") if rename else groups.merge([a, b])
        except InputError:
            continue
    folder = model_folder(tmp_path_factory.getbasetemp() / "steps")
    groups.write(folder)
    back = Groups.read(folder)
    assert (back.of.tolist(), back.names) == (groups.of.tolist(), groups.names)
    p = probabilities()
    np.testing.assert_allclose(back.apply(p).sum(1), 1, atol=1e-5)
    assert back.apply(p).shape == (50, len(back.ids))


@pytest.mark.parametrize(
    "content",
    [
        "",
        "garbage",
        "[]",
        "{}",
        '{"format": 2, "n_clusters": 6, "steps": []}',
        '{"format": 1, "n_clusters": 10, "steps": [{"merge": [1, 2]}]}',
        '{"format": 1, "n_clusters": 6}',
        '{"format": 1, "n_clusters": 6, "steps": 3}',
        '{"format": 1, "n_clusters": 6, "steps": [3]}',
        '{"format": 1, "n_clusters": 6, "steps": [{"split": [1, 2]}]}',
        '{"format": 1, "n_clusters": 6, "steps": [{"merge": [1, 6]}]}',
        '{"format": 1, "n_clusters": 6, "steps": [{"merge": [1]}]}',
        '{"format": 1, "n_clusters": 6, "steps": [{"merge": [0, 1, 2, 3, 4, 5]}]}',
        '{"format": 1, "n_clusters": 6, "steps": [{"merge": [[1], 2]}]}',
        '{"format": 1, "n_clusters": 6, "steps": [{"reduce": [1, 2]}]}',
        '{"format": 1, "n_clusters": 6, "steps": [{"rename": [1, "a\\nb"]}]}',
        '{"format": 1, "n_clusters": 6, "steps": [{"rename": [1, null]}]}',
        '{"format": 1, "n_clusters": 6, "steps": [{"rename": [1]}]}',
        '{"format": 1, "n_clusters": 6, "steps": [{"rename": [1, "x"]}, {"rename": [2, "x"]}]}',
    ],
)
def test_a_damaged_file_is_named(tmp_path, content):
    folder = model_folder(tmp_path)
    (folder / "groups.json").write_text(content)
    with pytest.raises(DamagedFileError, match=r"groups\.json"):
        Groups.read(folder)


@pytest.mark.parametrize("content", ["{}", '{"settings": 3}', '{"settings": {"n_clusters": "x"}}', "no"])
def test_a_damaged_model_is_named(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(DamagedFileError, match=r"config\.json"):
        Groups.read(tmp_path)
