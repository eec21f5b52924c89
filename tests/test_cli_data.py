"""The commands on other sources than a folder."""

import json
from pathlib import Path

import pytest

from conftest import noisy_groups
from published import cifar10, encoded, shard
from semclust.cli import main
from semclust.cli.common import absolute

FAST = ["-k", "2", "--epochs", "1", "--width", "2", "--batch-size", "8", "--device", "cpu"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_sources_hold_from_any_folder(here: Path):
    (here / "photos").mkdir()
    (here / "set*").mkdir()
    assert absolute("digits") == "digits" and absolute("folders") == "folders"
    assert absolute("photos") == str(here / "photos") and absolute("set*") == str(here / "set*")
    assert absolute("cifar10:photos") == f"cifar10:{here / 'photos'}"
    assert absolute("cifar10:~/x") == f"cifar10:{Path.home() / 'x'}"
    assert absolute("shards-{000..015}.tar") == str(here / "shards-{000..015}.tar")
    assert absolute("photos/*.jpg") == str(here / "photos" / "*.jpg")
    assert absolute("no/such") == "no/such"


def test_a_fit_of_shards_is_evaluated_by_their_own_labels(here: Path, monkeypatch, capsys):
    pixels = noisy_groups(20, size=16, groups=2)
    for number in range(2):
        members = {}
        for i in range(10 * number, 10 * number + 10):
            members[f"{i}.png"] = encoded(pixels[i, ..., 0]) if i != 3 else b"broken"
            members[f"{i}.cls"] = str(i % 2).encode()
        shard(here / f"s-{number}.tar", members)
    main(["fit", "s-{0..1}.tar", *FAST])
    config = json.loads((here / "runs" / "s" / "config.json").read_text())
    assert config["data"] == str(here / "s-{0..1}.tar")
    assert "s-0.tar/3.png" in (here / "runs" / "s" / "skipped.csv").read_text()
    summary = json.loads((here / "runs" / "s" / "summary.json").read_text())
    assert summary["n_images"] == 19
    (here / "else").mkdir()
    monkeypatch.chdir(here / "else")
    capsys.readouterr()
    main(["evaluate", str(here / "runs" / "s")])
    assert f"ACC {summary['acc']:.3f}" in capsys.readouterr().out
    main(["predict", str(here / "runs" / "s"), str(here / "s-*.tar")])
    assert "19 images assigned" in capsys.readouterr().out
    (here / "s-1.tar").unlink()
    with pytest.raises(SystemExit):
        main(["evaluate", str(here / "runs" / "s")])
    assert "s-1.tar" in capsys.readouterr().err


def test_a_benchmark_by_name(here: Path, capsys):
    cifar10(here / "data" / "cifar-10-batches-py", "python")
    main(["fit", "cifar10:data", *FAST])
    main(["evaluate", "runs/cifar10"])
    assert "ACC" in capsys.readouterr().out
    assert (here / "runs" / "cifar10" / "assignments.csv").read_text().splitlines()[1].startswith("train/0,")


def test_help_names_the_sources(capsys):
    with pytest.raises(SystemExit):
        main(["fit", "--help"])
    said = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for word in ("folder of images", ".npz", "shards-{000..015}.tar", "cifar10:PATH", "tiny-imagenet:", "digits"):
        assert word in said
