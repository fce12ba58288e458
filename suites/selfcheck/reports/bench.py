"""Prints how receipts of 20,000 cases behave, and what 10,000 damaged files do to each of their readers.

python -m suites.selfcheck.reports.bench            sizes and times
python -m suites.selfcheck.reports.bench fuzz       damaged receipts, policies, waivers and envelopes
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from reports import exports, page
from reports.changes import compare
from reports.merge import merge
from reports.model import load
from reports.parts import write_receipt
from reports.verify import disagreement, verify
from suites.selfcheck.reports import fuzz, synthetic

CASES, SHARDS, DAMAGED = 20_000, 64, 10_000


@contextmanager
def timed(what: str) -> Iterator[None]:
    """Prints how long something took, by the clock and by the processor."""
    clock, processor = time.perf_counter(), time.process_time()
    yield
    print(f"{what:44} {time.perf_counter() - clock:7.2f} s   {time.process_time() - processor:7.2f} s of CPU")


def sizes(folder: Path) -> None:
    """Receipts of 20,000 cases: read, shown, verified, compared, merged."""
    shards = [
        synthetic.write(folder / f"{i}.json", value)
        for i, value in enumerate(synthetic.shards(CASES, SHARDS))
    ]
    with timed(f"merge of {SHARDS} shards"):
        write_receipt(folder / "receipt.json", merge(shards))
    path = folder / "receipt.json"
    later = synthetic.write(folder / "later.json", synthetic.receipt(CASES, seed=0, failures=5))
    print(f"receipt: {path.stat().st_size / 1e6:.1f} MB")
    with timed("read"):
        receipt = load(path)
    comparisons = sum(len(c.comparisons) for c in receipt.body.cases)
    print(f"{len(receipt.body.cases):,} cases, {comparisons:,} comparisons")
    with timed("page"):
        made = page.render(receipt, disagreement(receipt.body))
    print(f"page: {len(made.encode()) / 1e6:.2f} MB")
    (folder / "receipt.html").write_text(made)
    with timed("JUnit, CTRF, Markdown"):
        for write in (exports.junit, exports.ctrf, exports.markdown):
            write(receipt)
    with timed("verify"):
        assert verify(path).passed
    with timed("diff of two"):
        moved = compare(load(path), load(later)).moved
    print(f"{len(moved)} things moved")
    interactive(folder / "receipt.html")


def interactive(path: Path) -> None:
    """How long headless chromium takes until the page answers, where it is installed."""
    try:
        from suites.selfcheck.reports.test_browser import ARGUMENTS, CHROMIUM, playwright
    except BaseException as error:  # noqa: BLE001 - pytest's skip is no Exception
        print(f"time to interactive: not measured ({error})")
        return
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        opened = browser.new_page()
        start = time.perf_counter()
        opened.goto(path.as_uri())
        opened.wait_for_function("document.documentElement.dataset.ready")
        opened.locator("input[type=search]").fill("dtype:bf16")
        print(f"{'open, ready and searched in chromium':44} {time.perf_counter() - start:7.2f} s")
        browser.close()


def damage(folder: Path) -> None:
    """10,000 damaged files for every reader, and what each said; a crash ends the run with its traceback.

    Raises:
        SystemExit: something damaged was accepted, or something valid was read as what it does not say.
    """
    print(f"{'':10} {'damaged':>8} {'refused':>8} {'still valid':>12} {'read as it says':>16} {'slowest':>9}")
    broken = []
    for reader in fuzz.readers(folder):
        found = fuzz.fuzzed(reader, DAMAGED, folder)
        print(
            f"{reader.name:10} {found.damaged:8,} {found.refused:8,} {found.valid:12,} "
            f"{found.as_it_says:16,} {found.slowest_s:7.3f} s"
        )
        if reader.pinned is not None:
            print(f"{'':10} under its digest {found.refused_under_digest:,} of {found.drawn:,} refused")
        if not found.holds(reader):
            broken.append(reader.name)
    if broken:
        raise SystemExit(f"not everything held: {', '.join(broken)}")


def main() -> None:
    """Runs the part that the command line names."""
    with tempfile.TemporaryDirectory() as temporary:
        (damage if "fuzz" in sys.argv[1:] else sizes)(Path(temporary))


if __name__ == "__main__":
    main()
