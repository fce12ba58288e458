"""Pictures of a page as people will see it: light, dark, on paper, and with one section on top.

python -m suites.selfcheck.reports.shots receipt.html docs/images [section ...]
"""

from __future__ import annotations

import sys
from pathlib import Path

from suites.selfcheck.reports.test_browser import ARGUMENTS, CHROMIUM, playwright


def shoot(page: Path, folder: Path, sections: list[str]) -> None:
    """Writes `light.png`, `dark.png`, `print.pdf` and one picture for each section."""
    folder.mkdir(parents=True, exist_ok=True)
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        for scheme in ("light", "dark"):
            opened = browser.new_page(viewport={"width": 1280, "height": 860}, color_scheme=scheme)
            opened.goto(page.absolute().as_uri())
            opened.wait_for_function("document.documentElement.dataset.ready")
            opened.screenshot(path=folder / f"{scheme}.png")
            for section in sections if scheme == "light" else ():
                opened.evaluate(
                    "id => { document.documentElement.style.scrollBehavior = 'auto';"
                    " document.getElementById(id).scrollIntoView(); }",
                    section,
                )
                opened.screenshot(path=folder / f"{section}.png")
        opened.pdf(path=folder / "print.pdf", prefer_css_page_size=True)
        browser.close()


if __name__ == "__main__":
    shoot(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
