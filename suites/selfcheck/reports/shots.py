"""Pictures of a page as people will see it: light, dark, on paper, and with one section on top.

python -m suites.selfcheck.reports.shots receipt.html docs/images [section ...]
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SCREEN = {"width": 1280, "height": 720}
DOTS_PER_INCH = 84


def shoot(page: Path, folder: Path, sections: list[str]) -> None:
    """Writes `light.png`, `dark.png`, `print.png` (the first sheet) and one of each section.

    Raises:
        FileNotFoundError: poppler's `pdftoppm`, which turns the sheet into a picture, is not installed.
    """
    from suites.selfcheck.reports.test_browser import ARGUMENTS, CHROMIUM, playwright

    folder.mkdir(parents=True, exist_ok=True)
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        for scheme in ("light", "dark"):
            opened = _opened(browser, page, viewport=SCREEN, color_scheme=scheme)
            opened.screenshot(path=folder / f"{scheme}.png")
            for section in sections if scheme == "light" else ():
                opened.evaluate(
                    "id => { document.documentElement.style.scrollBehavior = 'auto';"
                    " document.getElementById(id).scrollIntoView(); }",
                    section,
                )
                opened.screenshot(path=folder / f"{section}.png")
        with tempfile.TemporaryDirectory() as temporary:
            sheets = Path(temporary) / "print.pdf"
            opened.pdf(path=sheets, prefer_css_page_size=True)
            words = [
                "pdftoppm",
                "-png",
                "-singlefile",
                "-r",
                str(DOTS_PER_INCH),
                str(sheets),
                str(folder / "print"),
            ]
            subprocess.run(words, check=True)
        browser.close()


def _opened(browser: Any, page: Path, **options: Any) -> Any:
    opened = browser.new_page(**options)
    opened.goto(page.absolute().as_uri())
    opened.wait_for_function("document.documentElement.dataset.ready")
    return opened


if __name__ == "__main__":
    shoot(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
