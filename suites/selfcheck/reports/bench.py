"""Prints how receipts of 20,000 cases behave, and what 10,000 damaged files do to their readers.

python -m suites.selfcheck.reports.bench            sizes and times
python -m suites.selfcheck.reports.bench fuzz       damaged receipts, policies, waivers and envelopes
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

from qualify.canonical import canonical_bytes
from qualify.errors import UsageError
from qualify.waivers import read_waivers
from reports import exports, page, signing
from reports.changes import compare
from reports.gates import read_policy
from reports.merge import merge
from reports.model import load
from reports.parts import write_receipt
from reports.reading import ReceiptError
from reports.verify import disagreement, verify
from suites.selfcheck.reports import edits, synthetic

CASES, SHARDS, DAMAGED = 20_000, 64, 10_000
TODAY = date(2026, 11, 30)


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


POLICY = b'verdict = ["QUALIFIED"]\nmax_margin = 0.97\nno_loosening = true\nmin_executed.dtype.bf16 = 3\n'
WAIVERS = b"""[[waiver]]
cases = "kernels/op.whole[*dtype:fp16*]*"
owner = "kim"
issue = "GQ-12"
reason = "the driver rounds twice"
expires = 2027-01-31
driver = ">=570,<580"
"""


def fuzz(folder: Path) -> None:
    """Damages files at random and counts what their readers say; a crash ends the run with its traceback."""
    receipt = synthetic.receipt(6)
    whole = canonical_bytes(receipt) + b"\n"
    path = synthetic.write(folder / "sound.json", receipt)
    signing.make_key(folder / "key", folder / "key.pub")
    envelope = signing.sign(load(path), folder / "key")
    readers: dict[str, tuple[bytes, Callable[[Path], Any]]] = {
        "receipts": (whole, lambda p: load(p).id),
        "policies": (POLICY, read_policy),
        "waivers": (WAIVERS, lambda p: read_waivers(p, TODAY)),
        "envelopes": (envelope, lambda p: signing.verify_envelope(p, [folder / "key.pub"])),
    }
    rng = random.Random(2026)
    for name, (sound, read) in readers.items():
        found: Counter[str] = Counter()
        slowest = 0.0
        for _ in range(DAMAGED // len(readers)):
            data = edits.damaged(sound, rng)
            damaged, undamaged = folder / "damaged", folder / "undamaged"
            undamaged.write_bytes(sound)
            damaged.write_bytes(data)
            start = time.perf_counter()
            try:
                same = read(damaged) == read(undamaged)
                found["read to the same content" if same else "read to other valid content"] += 1
            except (ReceiptError, UsageError):
                found["refused"] += 1
            slowest = max(slowest, time.perf_counter() - start)
        print(f"{name:10} {dict(found)}, slowest {slowest:.3f} s")


def main() -> None:
    """Runs the part that the command line names."""
    with tempfile.TemporaryDirectory() as temporary:
        (fuzz if "fuzz" in sys.argv[1:] else sizes)(Path(temporary))


if __name__ == "__main__":
    main()
