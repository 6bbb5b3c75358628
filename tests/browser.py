"""Headless Chromium for the tests, by chromedriver's WebDriver protocol: JSON over plain HTTP."""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the key of an element's name, by the WebDriver standard


class Browser:
    """One window of headless Chromium."""

    def __init__(self, driver: str, profile: Path) -> None:
        self.driver = driver
        self.downloads = profile.with_name("downloads")
        preferences = {
            "download.default_directory": str(self.downloads),
            "profile.default_content_setting_values.automatic_downloads": 1,  # more than one
        }
        options = {"args": [*FLAGS, f"--user-data-dir={profile}"], "prefs": preferences}
        wanted = {
            "browserName": "chrome",
            "goog:chromeOptions": options,
            "goog:loggingPrefs": {"browser": "ALL"},
        }
        session = self._ask("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self.session = f"/session/{session['sessionId']}"

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.driver + path, data, {"Content-Type": "application/json"}, method=method
        )
        try:
            with urllib.request.urlopen(request, timeout=240) as response:
                return json.load(response)["value"]
        except urllib.error.HTTPError as error:
            raise RuntimeError(json.load(error)["value"]["message"]) from None

    def open(self, address: str) -> None:
        self._ask("POST", self.session + "/url", {"url": address})

    def run(self, script: str, *arguments: Any) -> Any:
        """The value of JavaScript that says `return …`."""
        return self._ask("POST", self.session + "/execute/sync", {"script": script, "args": list(arguments)})

    def wait(self, expression: str, seconds: float = 240) -> Any:
        """The value of a JavaScript expression once it is true."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            value = self.run(f"return {expression}")
            if value:
                return value
            time.sleep(0.05)
        raise AssertionError(f"{expression} did not become true in {seconds} s")

    def type(self, css: str, text: str) -> None:
        """Type into the element, or choose files (one per line) for a file input."""
        element = self._ask("POST", self.session + "/element", {"using": "css selector", "value": css})[
            ELEMENT
        ]
        self._ask("POST", f"{self.session}/element/{element}/value", {"text": text})

    def drop(self, css: str, *paths: Path) -> None:
        """Drop files and folders on the middle of an element, as if dragged from the desktop."""
        box = self.run(
            "const e = document.querySelector(arguments[0]); e.scrollIntoView({block: 'center'});"
            "const r = e.getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2]",
            css,
        )
        data = {"items": [], "files": list(map(str, paths)), "dragOperationsMask": 1}
        for kind in ("dragEnter", "dragOver", "drop"):
            self._command("Input.dispatchDragEvent", type=kind, x=box[0], y=box[1], data=data)

    def reload(self) -> None:
        self._ask("POST", self.session + "/refresh", {})

    def look(self, width: int, height: int = 900, dark: bool = False) -> None:
        """The size of the window and the colours the user prefers."""
        self._command(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        preference = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._command("Emulation.setEmulatedMedia", features=[preference])

    def screenshot(self, path: Path) -> None:
        """The whole page, also what lies below the window."""
        content = self._command("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(content))

    def complaints(self) -> list[str]:
        """Errors and warnings on the console since the last call."""
        return [
            entry["message"] for entry in self._ask("POST", self.session + "/se/log", {"type": "browser"})
        ]

    def downloaded(self, name: str, seconds: float = 60) -> Path:
        """A file that the page gave to be saved, once it is there."""
        end = time.monotonic() + seconds
        while not (self.downloads / name).is_file() and time.monotonic() < end:
            time.sleep(0.05)
        return self.downloads / name

    def close(self) -> None:
        self._ask("DELETE", self.session)

    def _command(self, command: str, **parameters: Any) -> Any:
        return self._ask("POST", self.session + "/goog/cdp/execute", {"cmd": command, "params": parameters})


@contextlib.contextmanager
def chromium(profile: Path) -> Iterator[Browser]:
    """A headless Chromium with a fresh profile, or a skip that says how to get one."""
    program = shutil.which("chromedriver")
    if program is None:
        pytest.skip("needs Chromium: install the Debian packages chromium and chromium-driver")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    driver = subprocess.Popen(
        [program, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        for _ in range(200):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            time.sleep(0.05)
        browser = Browser(f"http://127.0.0.1:{port}", profile)
        try:
            yield browser
        finally:
            browser.close()
    finally:
        driver.terminate()
        driver.wait()
