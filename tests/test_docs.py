"""What the documents say: commands and snippets about using the groups typed as they stand there, links followed."""

import re
import shlex
from pathlib import Path

import numpy as np
import pytest

import semclust
from conftest import noisy_groups, save_images
from semclust.cli import main

ROOT = Path(__file__).parents[1]
GUIDE = ROOT / "docs" / "guide.md"
DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]


@pytest.fixture(scope="module")
def section() -> str:
    text = GUIDE.read_text(encoding="utf-8")
    return text[text.index("## Using the groups") : text.index("## Comparing methods")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with photos/ and their run, as the guide supposes."""
    folder = tmp_path_factory.mktemp("guide")
    save_images(folder / "photos", noisy_groups(60, size=16, groups=10))
    flags = ["-k", "10", "--epochs", "1", "--width", "2", "--device", "cpu", "--out", str(folder / "runs")]
    main(["fit", str(folder / "photos"), *flags])
    return folder


def snippet(section: str, word: str) -> str:
    (found,) = (code for code in re.findall(r"```python\n(.*?)```", section, re.S) if word in code)
    return found


def test_the_commands(section, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    before = Path("runs/photos/assignments.csv").read_bytes()
    lines = [line for line in section.splitlines() if line.startswith("semclust ")]
    assert [line.split()[1] for line in lines] == ["merge", "rename", "reduce", "undo"]
    for line in lines:
        main(shlex.split(line, comments=True)[1:])
    assert "steps left to undo: 2" in capsys.readouterr().out
    for _ in range(2):
        main(["undo", "runs/photos"])
    assert Path("runs/photos/assignments.csv").read_bytes() == before


def test_the_estimator(section, folder, monkeypatch):
    monkeypatch.chdir(folder)
    names = {"SemanticClusterer": semclust.SemanticClusterer}
    exec(snippet(section, "model.merge"), names)
    assert names["model"].clusters_.tolist() == [0, 1, 2, 3, 4, 5, 6, 8, 9]
    assert semclust.SemanticClusterer.load("my-model").cluster_names_ == {2: "ships"}


def test_onnx(section, folder, monkeypatch):
    for package in ("onnx", "onnxruntime", "onnxscript"):
        pytest.importorskip(package)
    monkeypatch.chdir(folder)
    main(["export", "runs/photos", "--format", "onnx"])
    names: dict = {}
    exec(snippet(section, "onnxruntime"), names)
    assert names["probabilities"].shape == (1, 10)
    np.testing.assert_allclose(np.linalg.norm(names["embedding"]), 1, atol=1e-5)


def links(document: Path) -> list[str]:
    """But for those to other sites."""
    found = re.findall(r"\]\(([^)\s]+)\)", document.read_text(encoding="utf-8"))
    return [link for link in found if "://" not in link]


def headings(document: Path) -> set[str]:
    """As what a page shows of a heading is linked to."""
    found = re.findall(r"^#+ (.+)$", document.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path):
    for link in links(document):
        path, _, heading = link.partition("#")
        target = document.parent / path if path else document
        assert target.exists(), link
        assert not heading or heading in headings(target), link


def test_every_module_has_its_line():
    told = (ROOT / "docs" / "code.md").read_text(encoding="utf-8")
    modules = {path.name + "/" * path.is_dir() for path in (ROOT / "src" / "semclust").iterdir()}
    left_out = {"__init__.py", "__main__.py", "__pycache__/", "py.typed"}
    assert [name for name in sorted(modules - left_out) if f"\n  {name} " not in told] == []
