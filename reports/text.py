"""How numbers and names are written for people, the same in every form of a receipt."""

from __future__ import annotations

import math
from datetime import datetime

from qualify.records import Overall, Verdict

VERDICT_WORDS = {
    Verdict.PASSED: "passed",
    Verdict.FAILED_NUMERIC: "failed: numbers",
    Verdict.FAILED_SHAPE: "failed: shape",
    Verdict.FAILED_NONFINITE: "failed: not finite",
    Verdict.FAILED_NONDETERMINISTIC: "failed: not repeatable",
    Verdict.ERROR: "error",
    Verdict.CRASH: "crash",
    Verdict.HANG: "hang",
    Verdict.UNSUPPORTED: "unsupported",
    Verdict.SKIPPED: "skipped",
    Verdict.EXCLUDED: "excluded",
    Verdict.WAIVED: "waived",
    Verdict.STALE_WAIVER: "stale waiver",
    Verdict.NOT_RUN: "not run",
}
OVERALL_WORDS = {
    Overall.QUALIFIED: "Qualified",
    Overall.QUALIFIED_WITH_WAIVERS: "Qualified with waivers",
    Overall.NOT_QUALIFIED: "Not qualified",
    Overall.INCOMPLETE: "Incomplete",
}


RULE_WORDS = {
    "offers": "not offered by the subject",
    "capabilities": "ruled out by the subject",
    "refused": "refused by the subject",
}
"""Rules that keep cases from running and are no requirement of a machine."""


def figure(value: float | None, digits: int = 3) -> str:
    """A measured number with three significant digits: `0.00342` becomes `3.42e-3`."""
    if value is None:
        return "–"
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("∞" if value > 0 else "−∞")
    if value == 0:
        return "0"
    if value.is_integer() and abs(value) < 1e6:
        return f"{int(value):,}"
    if 0.01 <= abs(value) < 10**digits:
        return f"{value:.{digits}g}"
    mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def margin(value: float | None) -> str:
    """Error over budget: two decimals, rounded up so that a failing margin never reads 1.00."""
    if value is None:
        return "–"
    if not math.isfinite(value) or value >= 1000:
        return figure(value)
    if value == 0:
        return "0"
    return f"{max(0.01, math.ceil(value * 100 - 1e-9) / 100):.2f}"


def count(value: int) -> str:
    """A whole number with thousands set apart."""
    return f"{value:,}"


def plural(number: int, one: str, many: str = "") -> str:
    """`1 case`, `2 cases`."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def duration(seconds: float) -> str:
    """Seconds as `45 s`, `5 min 12 s`, `2 h 05 min`."""
    if not math.isfinite(seconds):
        return figure(seconds)
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def size(count_bytes: int) -> str:
    """Bytes as MiB."""
    return f"{count_bytes / 2**20:,.1f} MiB"


def when(stamp: str) -> str:
    """An ISO time as `30 November 2026, 07:00 UTC`; anything else as it stands."""
    try:
        moment = datetime.fromisoformat(stamp)
    except ValueError:
        return stamp
    return f"{moment.day} {moment:%B %Y, %H:%M}" + (" UTC" if stamp.endswith(("Z", "+00:00")) else "")


def place(coordinates: object) -> str:
    """Coordinates of an element: `token 77, head 3, channel 12`."""
    return ", ".join(f"{k} {v}" for k, v in dict(coordinates).items())  # type: ignore[call-overload]


def brief(digest: str, digits: int = 12) -> str:
    """The first digits of a digest or commit."""
    return digest.removeprefix("sha256:")[:digits]


def shown(value: str, limit: int = 2000) -> str:
    """Text of unknown origin for a terminal or a page of CI: printable, and not endless."""
    printable = "".join(c if c.isprintable() or c == " " else "\ufffd" for c in value)
    return printable if len(printable) <= limit else printable[: limit - 1] + "…"
