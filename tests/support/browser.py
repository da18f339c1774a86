"""Debian's chromium, driven by Playwright. Tests that need it are skipped where there is none."""

from contextlib import contextmanager
from pathlib import Path

import pytest

EXECUTABLE = Path("/usr/bin/chromium")
ARGUMENTS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
]
PATIENCE = 600_000
"""Milliseconds after which a test that waits for the page fails."""


@contextmanager
def chromium():
    """A browser. While it is open, this thread has a running event loop: `asyncio.run` is refused."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install -e '.[dev]'")
    if not EXECUTABLE.exists():
        pytest.skip(f"needs {EXECUTABLE}: apt-get install chromium")
    sync_api.expect.set_options(timeout=PATIENCE)
    with sync_api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=EXECUTABLE, args=ARGUMENTS)
        try:
            yield browser
        finally:
            browser.close()


class Watched:
    """A page of its own browser profile. `faults` has what no page may do: errors, dialogs, requests to elsewhere."""

    def __init__(self, browser, root, **settings):
        self.faults = []
        self.context = browser.new_context(**settings)
        self.context.set_default_timeout(PATIENCE)
        self.page = self.context.new_page()
        self.page.on("console", self._message)
        self.page.on("pageerror", lambda error: self.faults.append(f"error: {error}"))
        self.page.on("dialog", self._asked)
        self.page.on("popup", lambda popup: self.faults.append(f"popup: {popup.url}"))
        self.page.on("request", lambda request: self._fetched(request.url, root))

    def _message(self, message):
        if message.type in ("error", "warning"):  # what the policy refuses is told as an error
            self.faults.append(f"{message.type}: {message.text}")

    def _asked(self, dialog):
        self.faults.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def _fetched(self, url, root):
        if not url.startswith(f"{root}/"):
            self.faults.append(f"request: {url}")
