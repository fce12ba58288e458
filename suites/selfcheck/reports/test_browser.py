"""The page in a real browser: accessible, quiet, alive; with scripts and without, light, dark and printed.

Needs Debian's chromium (or CHROMIUM), playwright, and for the accessibility checks axe-core (AXE_CORE: the
path of axe.min.js; `npm pack axe-core`). What is missing skips, with its reason.
"""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from reports import history, page
from reports.changes import compare
from reports.model import Receipt, from_json
from suites.selfcheck.reports import hostile, synthetic

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
AXE = Path(os.environ.get("AXE_CORE", "node_modules/axe-core/axe.min.js"))
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--no-first-run",
    "--disable-sync",
    "--disable-component-update",
]

if CHROMIUM is None:
    pytest.skip("chromium is not installed", allow_module_level=True)
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        made = started.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield made
        made.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Addresses of rendered pages by name."""
    folder = tmp_path_factory.mktemp("pages")
    sound = from_json(synthetic.receipt(150))
    failing = from_json(synthetic.receipt(150, failures=4, missed=1, metrics=synthetic.METRICS))
    made = {
        "sound": page.render(sound),
        "failing": page.render(failing),
        "hostile": page.render(from_json(hostile.receipt())),
        "diff": page.render_diff(sound, failing, compare(sound, failing).moved),
        "history": page.render_history(
            history.lines([_run(sound, "2026-11-01"), _run(failing, "2026-11-02")])
        ),
    }
    for name, source in made.items():
        (folder / f"{name}.html").write_text(source)
    return {name: (folder / f"{name}.html").as_uri() for name in made}


def _run(receipt: Receipt, day: str) -> history.Run:
    return history.Run(
        receipt.id, day, "h100", "kernels", receipt.body.header.verdict, 9, 0, {"o": 0.4, "dg": 1.1}
    )


class Visit:
    """An open page, with everything that it asked for and complained about."""

    def __init__(self, browser: Any, address: str, **options: Any) -> None:
        self.context = browser.new_context(viewport={"width": 1280, "height": 900}, **options)
        self.page = self.context.new_page()
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self.page.on("request", lambda r: self.requests.append(r.url))
        self.page.on("console", lambda m: self.complaints.append(m.text))
        self.page.on("pageerror", lambda e: self.complaints.append(str(e)))
        self.page.goto(address)

    def __enter__(self) -> Visit:
        return self

    def __exit__(self, *_: object) -> None:
        self.context.close()


LOOKS: dict[str, dict[str, Any]] = {
    "light": {"color_scheme": "light"},
    "dark": {"color_scheme": "dark"},
    "narrow": {"color_scheme": "light", "viewport": {"width": 420, "height": 800}},
    "print": {"color_scheme": "dark"},
    "without scripts": {"java_script_enabled": False},
}
NAMES = ("sound", "failing", "hostile", "diff", "history")
SEEN = [
    *(("failing", look) for look in ("light", "dark", "narrow", "print")),
    ("sound", "light"),
    ("hostile", "light"),
    *((name, look) for name in ("diff", "history") for look in ("light", "dark")),
]


@pytest.mark.parametrize("name", NAMES)
def test_a_page_asks_for_nothing_and_complains_of_nothing(
    browser: Any, pages: dict[str, str], name: str
) -> None:
    for look in ("light", "without scripts"):
        with Visit(browser, pages[name], **LOOKS[look]) as visit:
            assert visit.requests == [pages[name]]
            assert visit.complaints == []


@pytest.mark.skipif(not AXE.is_file(), reason=f"axe-core is not at {AXE}; set AXE_CORE")
@pytest.mark.parametrize(("name", "look"), SEEN)
def test_axe_finds_no_violation(browser: Any, pages: dict[str, str], name: str, look: str) -> None:
    options = {"viewport": {"width": 1280, "height": 900}, **LOOKS[look]}
    context = browser.new_context(bypass_csp=True, **options)
    opened = context.new_page()
    opened.emulate_media(media="print" if look == "print" else "screen")
    opened.goto(pages[name])
    opened.add_script_tag(path=str(AXE))
    found = opened.evaluate("axe.run(document, {resultTypes: ['violations']})")
    context.close()
    assert [(v["id"], [n["html"][:160] for n in v["nodes"][:3]]) for v in found["violations"]] == []


def test_hostile_text_runs_nothing(browser: Any, pages: dict[str, str]) -> None:
    with Visit(browser, pages["hostile"], bypass_csp=True) as visit:
        visit.page.wait_for_function("document.documentElement.dataset.ready")
        for button in visit.page.locator("#table button").all()[:5]:
            button.click()
        visit.page.locator("#map button").first.click()
        assert visit.page.evaluate("window.owned") is None


def test_a_script_that_slipped_in_would_not_run(browser: Any, tmp_path: Path, sound_receipt: Receipt) -> None:
    """The page's own policy is the second line: even an unescaped script is refused."""
    made = page.render(sound_receipt).replace("<main>", "<main><script>window.owned=1</script>", 1)
    (tmp_path / "page.html").write_text(made)
    with Visit(browser, (tmp_path / "page.html").as_uri()) as visit:
        assert visit.page.evaluate("window.owned") is None
        assert any("Content Security Policy" in c for c in visit.complaints)


def test_the_map_turns_to_other_axes_and_leads_to_its_cases(browser: Any, pages: dict[str, str]) -> None:
    with Visit(browser, pages["failing"]) as visit:
        selects = visit.page.locator("#map-controls select")
        selects.nth(0).select_option("dtype")
        selects.nth(1).select_option("sm")
        assert set(visit.page.locator("#map tbody th").all_inner_texts()) == {"bf16", "fp16", "fp32"}
        visit.page.locator("#map td.failed button").first.click()
        assert visit.page.locator(".chips button").count() == 2
        assert "matching cases" in visit.page.locator("[role=status]").inner_text()


def test_search_filter_order_and_detail(
    browser: Any, pages: dict[str, str], failing_receipt: Receipt
) -> None:
    with Visit(browser, pages["failing"]) as visit:
        visit.page.locator("input[type=search]").fill("op.whole dtype:bf16")
        ids = visit.page.locator("#table tbody button").all_inner_texts()
        assert ids
        assert all("op.whole" in i and "dtype:bf16" in i for i in ids)
        visit.page.locator("input[type=search]").fill("")
        visit.page.locator("#browser select").nth(0).select_option("failed")
        assert visit.page.locator("#table tbody tr").count() == 5
        visit.page.locator("#table tbody button").first.press("Enter")
        command = visit.page.locator(".opened pre").inner_text()
        known = [shlex.split(case.command) for case in failing_receipt.body.cases]
        assert shlex.split(command) in known
        assert shlex.split(command)[3:] == ["--subject", synthetic.GIVEN]
        assert visit.page.locator(".opened tbody tr").count() >= 1


def test_without_scripts_the_page_is_whole(browser: Any, pages: dict[str, str]) -> None:
    with Visit(browser, pages["failing"], java_script_enabled=False) as visit:
        assert visit.page.locator("table.map td.failed").count() > 0
        assert visit.page.locator("article.case").count() > 0
        assert not visit.page.locator("#browser").is_visible()
        visit.page.locator("#register summary").first.click()
        assert visit.page.locator("#register pre").first.is_visible()


def test_everything_is_reached_by_keyboard(browser: Any, pages: dict[str, str]) -> None:
    with Visit(browser, pages["failing"]) as visit:
        visit.page.keyboard.press("Tab")
        assert visit.page.evaluate("document.activeElement.className") == "skip-link"
        reached = set()
        for _ in range(80):
            visit.page.keyboard.press("Tab")
            reached.add(visit.page.evaluate("document.activeElement.tagName"))
        assert {"A", "SELECT", "BUTTON"} <= reached


def test_two_thousand_cases_are_alive_at_once(browser: Any, tmp_path: Path) -> None:
    receipt = from_json(synthetic.receipt(2000))
    (tmp_path / "page.html").write_text(page.render(receipt))
    with Visit(browser, (tmp_path / "page.html").as_uri()) as visit:
        visit.page.wait_for_function("document.documentElement.dataset.ready", timeout=2000)
        assert "2,006 cases" in visit.page.locator("[role=status]").inner_text()
