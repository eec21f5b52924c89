"""Size and speed of the report at 100,000 images, in a headless Chromium.

python benchmarks/report.py            prints the figures and writes benchmarks/report.json
"""

import json
import os
import platform
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from browser import chromium, requests, show
from made_runs import make_run
from semclust.report import write_report
from semclust.report.kept import FILE, MAPPED

CASES = (  # images, clusters, side of the pictures
    (2_000, 10, 32),
    (100_000, 10, 96),
    (100_000, 100, 64),
    (100_000, 1_000, 32),
    (1_000_000, 20, 32),
)
REPEATS = 3
DRAWN = "return performance.getEntriesByName('map-drawn')[0].startTime"
FILTER = """
const before = performance.now(), select = document.getElementById("pick-cluster");
select.value = "3";
select.dispatchEvent(new Event("input", {bubbles: true}));
document.getElementById("cards").getBoundingClientRect();
return [performance.now() - before, document.querySelectorAll(".card:not([hidden])").length];
"""
SEARCH = """
document.getElementById("pick-cluster").value = "-1";
const before = performance.now(), input = document.getElementById("search");
input.value = "DSC_1";
input.dispatchEvent(new Event("input", {bubbles: true}));
document.getElementById("found").getBoundingClientRect();
return [performance.now() - before, document.getElementById("gallery-status").textContent];
"""


def main() -> None:
    rows = []
    for n, n_clusters, size in CASES:
        with TemporaryDirectory() as folder:
            mapped = max(MAPPED[0], min(n // 10, MAPPED[1]))
            run = make_run(Path(folder), n, n_clusters, mapped=mapped, size=size, channels=3)
            started = time.monotonic()
            page = write_report(run.path)
            row = {"images": n, "clusters": n_clusters, "picture_px": size, "write_s": time.monotonic() - started}
            row |= {"page_mb": page.stat().st_size / 1e6, "kept_mb": (run.path / FILE).stat().st_size / 1e6}
            drawn, answered, searched = [], [], []
            for _ in range(REPEATS):
                with chromium() as browser:
                    show(browser, page)
                    drawn.append(browser.execute_script(DRAWN))
                    took, cards = browser.execute_script(FILTER)
                    assert cards == 1
                    answered.append(took)
                    time.sleep(1)  # the names of all images are unpacked after the page is drawn
                    took, row["search"] = browser.execute_script(SEARCH)
                    searched.append(took)
                    assert not requests(browser)
            row |= {"map_drawn_ms": max(drawn), "filter_ms": max(answered), "search_ms": max(searched)}
        rows.append({key: round(value, 2) if isinstance(value, float) else value for key, value in row.items()})
        print(json.dumps(rows[-1]), flush=True)
    result = {
        "rows": rows,
        "what": f"navigation to the map drawn, a filter answered, a search answered: the worst of {REPEATS}",
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "processor": platform.processor() or platform.machine(),
    }
    (Path(__file__).parent / "report.json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
