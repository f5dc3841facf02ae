"""A headless Chromium for tests of pages: it reaches this machine only, and tells what it asked for and logged."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--no-proxy-server",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)
_WAIT_S = 60.0
_POLL_S = 0.05


def missing() -> str:
    """Why there is no browser here; empty: there is one."""
    if not any(map(shutil.which, _BROWSERS)):
        return "needs Chromium (apt install chromium)"
    return (
        "" if shutil.which("chromedriver") else "needs chromedriver (apt install chromium-driver)"
    )


class Browser:
    """Every call blocks: call it from a thread."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    def open(self, url: str) -> None:
        self.driver.get(url)

    def run(self, script: str, *args: Any) -> Any:
        return self.driver.execute_script(script, *args)

    def find(self, css: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, css)

    def texts(self, css: str) -> list[str]:
        found: list[str] = self.run(
            "return [...document.querySelectorAll(arguments[0])].map(each => each.innerText.trim())",
            css,
        )
        return found

    def until(self, condition: str, *args: Any) -> None:
        """Waits for a JavaScript expression to hold."""
        WebDriverWait(self.driver, _WAIT_S, _POLL_S).until(
            lambda _: self.run(f"return Boolean({condition})", *args), condition
        )

    def look(self, width: int, height: int, *, dark: bool = False, still: bool = False) -> None:
        """The window's size, the reader's colour scheme, and whether nothing may move."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        motion = {"name": "prefers-reduced-motion", "value": "reduce" if still else ""}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme, motion]})

    def screenshot(self, path: Path) -> None:
        shot = self.driver.execute_cdp_cmd("Page.captureScreenshot", {})
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def complaints(self) -> list[str]:
        """What was logged on the console since the last call."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requested(self) -> list[str]:
        """The addresses asked for since the last call."""
        events = [json.loads(each["message"]) for each in self.driver.get_log("performance")]
        sent = [e["message"] for e in events]
        return [
            message["params"]["request"]["url"]
            for message in sent
            if message["method"] == "Network.requestWillBeSent"
        ]


@contextmanager
def opened(profile: Path) -> Iterator[Browser]:
    """`profile`: an empty folder. The driver's own path is given, so that nothing is downloaded."""
    options = webdriver.ChromeOptions()
    options.binary_location = next(filter(None, map(shutil.which, _BROWSERS)))
    for flag in (*_FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    service = Service(shutil.which("chromedriver"), log_output=subprocess.DEVNULL)
    driver = webdriver.Chrome(options, service)
    try:
        # What a browser shows first asks for parts of its own.
        driver.get("about:blank")
        yield Browser(driver)
    finally:
        driver.quit()
