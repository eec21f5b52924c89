"""A headless Chromium for the tests of the report; they skip, saying so, where there is none."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

FLAGS = (
    "--headless",
    "--no-sandbox",  # which root needs
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@contextmanager
def chromium(width: int = 1280, height: int = 900) -> Iterator[Any]:
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    binary, driver = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")
    if not binary or not driver:
        pytest.skip("Chromium and chromedriver are not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    with TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        for flag in (*FLAGS, f"--user-data-dir={profile}", f"--window-size={width},{height}"):
            options.add_argument(flag)
        browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
        try:
            screen(browser, width, height)
            yield browser
        finally:
            browser.quit()


def screen(browser: Any, width: int, height: int = 900) -> None:
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def scheme(browser: Any, value: str) -> None:
    media = {"features": [{"name": "prefers-color-scheme", "value": value}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)


def show(browser: Any, page: Path) -> None:
    """Open a page from the disk and wait until its map is drawn."""
    from selenium.webdriver.support.ui import WebDriverWait

    browser.get_log("performance")
    browser.get(page.resolve().as_uri())
    WebDriverWait(browser, 20, 0.02).until(
        lambda b: b.execute_script("return performance.getEntriesByName('map-drawn').length > 0")
    )


def requests(browser: Any) -> list[str]:
    """The addresses that the page asked for since ``show``, but for itself and what lies inside it."""
    sent = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    urls = [event["params"]["request"]["url"] for event in sent if event["method"] == "Network.requestWillBeSent"]
    inside = ("data:", "blob:", "chrome://")  # the last: the browser's own pages, which it may open beside
    return [url for url in urls if not url.startswith(inside) and url != browser.current_url.split("#")[0]]
