"""Takes the pictures of the page for the documentation: `python docs/site/screenshots.py` (needs Debian's chromium).

Serves `examples/corpus` with the bundled model and saves screenshots with few colours, each below 150 kB.
"""

from __future__ import annotations

import io
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, Page, expect, sync_playwright

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "docs" / "images"
COMMAND = [sys.executable, "-c", "from ragkv.cli.main import main; main()"]
QUESTION = "In which town is the company that makes Ranatix?"
MOST_BYTES = 150_000


@contextmanager
def serving() -> Iterator[str]:
    """The address of a server that answers from the examples."""
    with tempfile.TemporaryDirectory() as folder:
        index = f"{folder}/corpus"
        subprocess.run([*COMMAND, "ingest", str(ROOT / "examples" / "corpus"), "--index", index, "--quiet"], check=True)
        command = [*COMMAND, "serve", "--index", index, "--port", "0", "--quiet"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            try:
                assert server.stdout is not None
                yield server.stdout.readline().split()[-1].removesuffix("/v1")
            finally:
                server.terminate()


def opened(browser: Browser, url: str, scheme: str, width: int, height: int) -> Page:
    context = browser.new_context(
        viewport={"width": width, "height": height}, color_scheme=scheme, reduced_motion="reduce"
    )
    page = context.new_page()
    page.goto(url)
    expect(page.locator("#samples button")).to_have_count(3, timeout=60_000)
    return page


def asked(page: Page, *settings: tuple[str, int]) -> None:
    """Ask once with each of these engines and numbers of chunks."""
    page.get_by_role("button", name="Settings").click()
    for place, (engine, top_k) in enumerate(settings):
        if place and place == page.locator(".lane").count():
            page.get_by_role("button", name="Compare another setting").click()
        lane = page.locator(".lane").nth(place)
        lane.get_by_label("Engine").select_option(engine)
        lane.get_by_label("Passages to read").fill(str(top_k))
    page.keyboard.press("Escape")
    page.get_by_label("Question").fill(QUESTION)
    page.keyboard.press("Enter")
    expect(page.locator(".turn").last.locator(".made")).to_have_count(len(settings), timeout=60_000)


def keep(page: Page, name: str) -> None:
    """Save a screenshot as a PNG of 128 colours."""
    seen = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    few = seen.quantize(128, dither=Image.Dither.NONE)
    path = IMAGES / f"{name}.png"
    few.save(path, optimize=True)
    assert path.stat().st_size < MOST_BYTES, path


def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    with serving() as url, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox", "--disable-gpu"])
        page = opened(browser, url, "light", 1200, 800)
        asked(page, ("pced", 3))
        keep(page, "page-ask")
        page.locator(".turn").last.locator(".source-open").nth(1).click()
        expect(page.locator("#reader .marked")).to_be_visible()
        keep(page, "page-source")
        page = opened(browser, url, "dark", 1200, 1120)
        asked(page, ("pced", 4), ("ape", 4), ("full", 8))
        keep(page, "page-compare")
        browser.close()


if __name__ == "__main__":
    main()
