"""Run folders without a fit: what a run of any size would leave, for the tests and the benchmark of the report."""

from pathlib import Path

import numpy as np

from semclust.config import Settings, to_json
from semclust.report.kept import FILE, Kept, choose_gallery, write_kept
from semclust.report.pictures import make_sheets
from semclust.run_folder import RunFolder
from semclust.storage import write_json


def make_run(
    folder: Path,
    n: int = 300,
    n_clusters: int = 4,
    *,
    mapped: int = 2000,
    labels: bool = True,
    names: list[str] | None = None,
    skipped: list[tuple[str, str]] | None = None,
    warnings: list[str] | None = None,
    epochs: int = 5,
    size: int = 16,
    channels: int = 1,
    seed: int = 0,
) -> RunFolder:
    """A finished run of ``n`` images. Nine of ten have the class of their cluster."""
    rng = np.random.default_rng(seed)
    run = RunFolder.create(folder, "made")
    settings = Settings(n_clusters=n_clusters, epochs=epochs)
    run.write_config({"data": "photos", "labels": None, "fingerprint": "", "settings": to_json(settings)})
    run.model.mkdir()
    write_json(run.model / "config.json", {"settings": to_json(settings)})

    cluster = np.sort(rng.integers(n_clusters, size=n))
    sizes = np.bincount(cluster, minlength=n_clusters)
    order = np.argsort(-sizes, kind="stable")
    cluster = np.argsort(order)[cluster]  # 0 the largest
    runner_up = (cluster + rng.integers(1, n_clusters, size=n)) % n_clusters
    confidence = np.round(rng.beta(5, 1, size=n).clip(0.3, 1), 4)
    names = names or [f"2024/holiday-{i // 500}/DSC_{10_000 + i}.jpg" for i in range(n)]
    rows = [
        f"{quoted(name)},{a},{x:.4f},{b},{x - 0.1:.4f}\n"
        for name, a, x, b in zip(names, cluster, confidence, runner_up, strict=True)
    ]
    text = "path,cluster,confidence,runner_up,margin\n" + "".join(rows)
    run.assignments.write_bytes(text.encode("utf-8", errors="surrogateescape"))

    centre = rng.normal(size=(n_clusters, 16))
    q = centre[cluster] + 0.3 * rng.normal(size=(n, 16))
    np.save(run.path / "embeddings.npy", (q / np.linalg.norm(q, axis=1, keepdims=True)).astype(np.float32))
    for epoch in range(1, epochs + 1):
        early = epoch < epochs / 2
        run.append_metrics(
            {"epoch": epoch, "learning_rate": 0.1, "loss": 4 / epoch, "loss_id": 3 / epoch, "loss_cd": 1 / epoch}
            | {"spread": 0.9}
            | dict.fromkeys(
                ("clusters", "churn", "agreement", "confidence", "smallest", "largest", "score"),
                np.nan if early else 0.5,
            )
            | {"sizes": np.nan if early else "1 2 3"}
        )
    run.write_skipped(skipped or [])
    summary = {
        "semclust": "0.1.0",
        "torch": "2.8",
        "python": "3.10",
        "device": "cpu",
        "n_images": n,
        "image_shape": [size, size, channels],
        "seconds": 95.0,
        "score": 0.9,
        "warnings": warnings or [],
    }
    write_json(run.path / "summary.json", summary)

    extremes, gallery = choose_gallery(cluster, confidence, n_clusters)
    sample = np.sort(rng.permutation(n)[:mapped])
    pictured = np.concatenate([gallery, np.setdiff1d(sample, gallery)])
    places = rng.uniform(0.1, 0.9, (n_clusters, 2))[cluster[sample]] + rng.normal(0, 0.02, (len(sample), 2))
    pixels = textures(len(pictured), size, channels, rng)
    kept = Kept(
        extremes,
        pictured,
        sample,
        {"target": places.astype(np.float32), "untrained": rng.uniform(size=(len(sample), 2)).astype(np.float32)},
        {"under": cluster[sample] // 2, "over": cluster[sample] * 2 + sample % 2},
        make_sheets(pixels, np.arange(len(pixels))),
    )
    if labels:
        wrong = rng.random(n) < 0.1
        kept.labels = np.where(wrong, (cluster + 1) % n_clusters, cluster)
        kept.classes = [f"class {i}" for i in range(n_clusters)]
    write_kept(run.path / FILE, kept)
    return run


def textures(n: int, size: int, channels: int, rng: np.random.Generator) -> np.ndarray:
    """Pictures with about as much detail as photographs have: soft patches and some noise."""
    coarse = rng.integers(0, 256, (n, 4, 4, channels)).repeat(-(-size // 4), 1).repeat(-(-size // 4), 2)
    noise = rng.integers(-20, 21, (n, size, size, channels))
    return np.clip(coarse[:, :size, :size] + noise, 0, 255).astype(np.uint8)


def quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
