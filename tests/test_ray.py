"""The example for Ray Data finds what `semclust predict` finds. Skips where Ray is not installed."""

import csv
import os
import sys
from pathlib import Path

import pytest

from conftest import noisy_groups, save_images
from semclust.cli import main

ray = pytest.importorskip("ray", reason='needs Ray: pip install "semclust[ray]"')
pytest.importorskip("ray.data")


@pytest.fixture
def cluster(monkeypatch):
    monkeypatch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    paths = os.pathsep.join([str(Path(__file__).parents[1] / "examples"), *(path for path in sys.path if path)])
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}},
    )
    ray.data.DataContext.get_current().enable_progress_bars = False
    yield
    ray.shutdown()


def test_ray_assigns_as_predict_does(cluster, tmp_path: Path, monkeypatch):
    photos = save_images(tmp_path / "photos", noisy_groups(30, channels=3))
    flags = "--epochs 1 --width 4 --device cpu --image-size 8 --no-report --out"
    main(["fit", str(photos), "-k", "3", *flags.split(), str(tmp_path / "runs")])
    (photos / "broken.png").write_bytes(b"no image")
    run, table = tmp_path / "runs" / "photos", tmp_path / "table.csv"
    main(["predict", str(run), str(photos), "--device", "cpu", "--out", str(table)])

    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "examples"))
    import ray_data

    found = {Path(row["path"]).name: row for row in ray_data.assign(str(run), str(photos), concurrency=1).take_all()}
    with open(table, newline="") as file:
        expected = {row["path"]: row for row in csv.DictReader(file)}
    assert len(found) == 31
    for name, row in expected.items():
        assert str(found[name]["cluster"]) == row["cluster"]
        assert abs(found[name]["confidence"] - float(row["confidence"])) < 1e-4
    assert found["broken.png"]["cluster"] == -1
    assert found["broken.png"]["reason"]
