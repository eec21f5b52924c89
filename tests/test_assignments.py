"""The table of assignments: any file name comes back, as CSV and as Parquet, and the rows follow the groups."""

import csv
import os
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from semclust.assignments import as_text, assignments_file, csv_bytes, read_assignments, write_assignments
from semclust.errors import DamagedFileError, InputError
from semclust.groups import Groups
from semclust.storage import WholeFile

ODD_NAMES = [
    "plain.png",
    "folder/in/folder.png",
    "comma, and space .png",
    'quote " and "" quotes.png',
    "line\nbreak.png",
    "carriage\rreturn.png",
    "both\r\n.png",
    "ünï-文字-🎉.png",
    os.fsdecode(b"not utf-8 \xff\xfe.png"),
    "=formula.png",
    "[red]markup[/red].png",
    "",
    "  ",
    "'single.png",
    "\ttab;semicolon|.png",
    "\ufeffmark.png",
]


def test_an_assignment_tells_cluster_confidence_runner_up_and_margin(tmp_path):
    p = np.array([[0.2, 0.7, 0.1], [0.5, 0.25, 0.25], [1 / 3, 1 / 3, 1 / 3]])
    write_assignments(tmp_path / "a.csv", ["x", "y", "z"], p)
    assert (tmp_path / "a.csv").read_text().splitlines() == [
        "path,cluster,confidence,runner_up,margin",
        "x,1,0.7000,0,0.5000",
        "y,0,0.5000,1,0.2500",
        "z,0,0.3333,1,0.0000",
    ]


def test_the_cluster_of_an_assignment_is_the_argmax(tmp_path):
    p = np.random.default_rng(0).random((200, 5)).round(1)  # with ties
    write_assignments(tmp_path / "a.csv", list(map(str, range(200))), p)
    assert (read_assignments(tmp_path / "a.csv").cluster == p.argmax(1)).all()


def test_every_column_is_read(tmp_path):
    write_assignments(tmp_path / "a.csv", ["x", "y", "z"], P, renamed())
    found = read_assignments(tmp_path / "a.csv")
    assert found.names == ["x", "y", "z"] and found.cluster.tolist() == [1, 0, 3]
    assert found.confidence.tolist() == [0.7, 0.7, 0.9] and found.runner_up.tolist() == [3, 3, 1]
    assert found.margin.tolist() == [0.5, 0.5, 0.8]


@pytest.mark.parametrize("name", ODD_NAMES, ids=ascii)
def test_any_name_comes_back(tmp_path, name):
    names = ["first.png", name, "last.png"]
    write_assignments(tmp_path / "a.csv", names, np.eye(3))
    assert read_assignments(tmp_path / "a.csv")[0] == names
    assert read_assignments(tmp_path / "a.csv")[1].tolist() == [0, 1, 2]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    st.lists(
        st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=8), min_size=1, max_size=6
    )
)
@example(["\r", "\n", '"', ",", "\r\n", "a\rb"])
def test_any_names_come_back(names):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.csv")
        write_assignments(path, names, np.tile([0.25, 0.75], (len(names), 1)))
        assert read_assignments(path)[0] == names


def test_names_that_are_not_utf8_keep_their_bytes(tmp_path):
    write_assignments(tmp_path / "a.csv", [os.fsdecode(b"\xff.png")], np.array([[0.5, 0.5]]))
    assert b"\xff.png,0," in (tmp_path / "a.csv").read_bytes()


def test_assignments_need_one_name_for_each_row(tmp_path):
    with pytest.raises(ValueError):
        write_assignments(tmp_path / "a.csv", ["x"], np.eye(2))
    assert not (tmp_path / "a.csv").exists()


def test_missing_assignments_tell_the_next_step(tmp_path):
    with pytest.raises(InputError, match="--resume") as caught:
        read_assignments(tmp_path / "assignments.csv")
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "path,cluster\nx,1\n",
        "path,cluster,confidence,runner_up,margin\n",
        "path,cluster,confidence,runner_up,margin\nx,one,0.5,1,0.5\n",
        "path,cluster,confidence,runner_up,margin\nx,1,much,1,0.5\n",
        "path,cluster,confidence,runner_up,margin\nx\n",
        f"path,cluster,confidence,runner_up,margin\n{'x' * 200_000},1,0.5,1,0.5\n",
    ],
    ids=["empty", "columns", "rows", "cluster", "confidence", "cut", "long"],
)
def test_damaged_assignments_are_named(tmp_path, content):
    (tmp_path / "assignments.csv").write_text(content)
    with pytest.raises(DamagedFileError, match=r"assignments\.csv.*path, cluster, confidence"):
        read_assignments(tmp_path / "assignments.csv")


def test_a_table_without_rows_is_told_as_such(tmp_path):
    (tmp_path / "assignments.csv").write_text("path,cluster,confidence,runner_up,margin\n")
    with pytest.raises(DamagedFileError, match="it holds no row"):
        read_assignments(tmp_path / "assignments.csv")


def renamed() -> Groups:
    groups = Groups(4)
    groups.merge([1, 2])
    groups.rename(1, '=a "b", c')
    return groups


P = np.array([[0.1, 0.3, 0.4, 0.2], [0.7, 0.0, 0.1, 0.2], [0.0, 0.1, 0.0, 0.9]])


def test_the_table_follows_the_groups(tmp_path):
    write_assignments(tmp_path / "a.csv", ["x", "y", "z"], P, renamed())
    with open(tmp_path / "a.csv", newline="") as file:
        assert list(csv.reader(file)) == [
            ["path", "cluster", "confidence", "runner_up", "margin", "name"],
            ["x", "1", "0.7000", "3", "0.5000", '=a "b", c'],
            ["y", "0", "0.7000", "3", "0.5000", ""],
            ["z", "3", "0.9000", "1", "0.8000", ""],
        ]


def test_rows_written_in_parts_are_those_written_at_once(tmp_path):
    names, p = ["a\rb", "b", "c\n", "d,e"], np.random.default_rng(0).random((4, 3))
    write_assignments(tmp_path / "whole.csv", names, p)
    with assignments_file(WholeFile(tmp_path / "parts.csv"), Groups(3)) as write:
        for i in range(4):
            write(names[i : i + 1], p[i : i + 1])
    assert (tmp_path / "parts.csv").read_bytes() == (tmp_path / "whole.csv").read_bytes()
    assert read_assignments(tmp_path / "parts.csv")[0] == names


def test_only_rows_with_a_carriage_return_are_quoted():
    assert csv_bytes(("a", "b"), [("x", 1), ("y\r", 2)]) == b'a,b\nx,1\n"y\r","2"\n'


@pytest.mark.parametrize("ending", [".csv", ".parquet"])
def test_a_table_that_breaks_off_leaves_no_file(tmp_path, ending):
    with (
        pytest.raises(KeyboardInterrupt),
        assignments_file(WholeFile(tmp_path / f"a{ending}"), Groups(2)) as write,
    ):
        write(["x"], np.array([[0.5, 0.5]]))
        raise KeyboardInterrupt
    assert os.listdir(tmp_path) == []


# ---- Parquet -----------------------------------------------------------------------------------------


def test_parquet_has_the_same_columns(tmp_path, monkeypatch):
    pq = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr("semclust.assignments.ROW_GROUP", 2)
    with assignments_file(WholeFile(tmp_path / "a.parquet"), renamed()) as write:
        for i in range(3):
            write([f"{i}.png"], renamed().apply(P[i : i + 1]))
    file = pq.ParquetFile(tmp_path / "a.parquet")
    assert file.num_row_groups == 2
    table = file.read().to_pydict()
    assert list(table) == ["path", "cluster", "confidence", "runner_up", "margin", "name"]
    assert table["path"] == ["0.png", "1.png", "2.png"] and table["cluster"] == [1, 0, 3]
    assert table["runner_up"] == [3, 3, 1] and table["name"] == ['=a "b", c', None, None]
    np.testing.assert_allclose(table["confidence"], [0.7, 0.7, 0.9], atol=1e-6)
    np.testing.assert_allclose(table["margin"], [0.5, 0.5, 0.8], atol=1e-6)


def test_parquet_without_names_has_no_such_column(tmp_path):
    pq = pytest.importorskip("pyarrow.parquet")
    write_assignments(tmp_path / "a.PARQUET", ["x"], np.array([[0.5, 0.5]]))
    assert pq.read_table(tmp_path / "a.PARQUET").column_names == [
        "path",
        "cluster",
        "confidence",
        "runner_up",
        "margin",
    ]


def test_names_in_parquet_are_unicode(tmp_path):
    pq = pytest.importorskip("pyarrow.parquet")
    names = [name for name in ODD_NAMES if name]
    write_assignments(tmp_path / "a.parquet", names, np.tile([0.25, 0.75], (len(names), 1)))
    assert pq.read_table(tmp_path / "a.parquet")["path"].to_pylist() == [as_text(name) for name in names]
    assert as_text(os.fsdecode(b"\xff ok")) == "\\xff ok" and as_text("ünï🎉") == "ünï🎉"


def test_without_pyarrow_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(InputError, match=r'pip install "semclust\[parquet\]"'):
        write_assignments(tmp_path / "a.parquet", ["x"], np.array([[0.5, 0.5]]))
    assert os.listdir(tmp_path) == []
