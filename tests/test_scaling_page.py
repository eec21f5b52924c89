"""The tables of docs/scaling.md are those that benchmarks/reckoning.py prints."""

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TABLES = runpy.run_path(str(ROOT / "benchmarks" / "reckoning.py"))["tables"]()


@pytest.mark.parametrize("name", TABLES)
def test_the_tables_are_the_reckoned_ones(name: str):
    assert "\n".join(TABLES[name]) in (ROOT / "docs" / "scaling.md").read_text()
