"""A receipt where people are: JUnit XML and CTRF for pages of CI, Markdown for the page of a job."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Sequence
from datetime import datetime
from xml.sax.saxutils import escape, quoteattr

from qualify.records import EXECUTED, FAILURES, CaseRecord, Verdict
from reports import figures, text
from reports.model import Body, Receipt

BROKEN = frozenset({Verdict.ERROR, Verdict.CRASH, Verdict.HANG})
CTRF_STATUS = {
    Verdict.PASSED: "passed",
    Verdict.WAIVED: "other",
    Verdict.NOT_RUN: "pending",
    Verdict.SKIPPED: "skipped",
    Verdict.UNSUPPORTED: "skipped",
    Verdict.EXCLUDED: "skipped",
}
ILLEGAL_IN_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
SHOWN_FAILURES = 8


def junit(receipt: Receipt) -> str:
    """JUnit XML: a suite for each check, a test for each case; waived and unexecuted ones are skipped."""
    suites: dict[str, list[CaseRecord]] = defaultdict(list)
    for case in receipt.body.cases:
        suites[case.check].append(case)
    lines = ['<?xml version="1.0" encoding="UTF-8"?>', f"<testsuites {_counts(receipt.body.cases)}>"]
    for check, cases in suites.items():
        lines.append(f"<testsuite name={_attribute(check)} {_counts(cases)}>")
        lines += [_testcase(case) for case in cases]
        lines.append("</testsuite>")
    return "\n".join([*lines, "</testsuites>", ""])


def _counts(cases: Sequence[CaseRecord]) -> str:
    errors = sum(c.verdict in BROKEN for c in cases)
    failures = sum(c.verdict in FAILURES for c in cases) - errors
    skipped = sum(c.verdict not in FAILURES and c.verdict is not Verdict.PASSED for c in cases)
    seconds = sum(c.duration_s for c in cases)
    counts = {"tests": len(cases), "failures": failures, "errors": errors, "skipped": skipped}
    return " ".join(f'{name}="{number}"' for name, number in counts.items()) + f' time="{seconds:.3f}"'


def _testcase(case: CaseRecord) -> str:
    head = (
        f"<testcase name={_attribute(case.case_id)} classname={_attribute(f'{case.subject}.{case.check}')} "
        f'time="{case.duration_s:.3f}"'
    )
    if case.verdict is Verdict.PASSED:
        return head + "/>"
    element = "error" if case.verdict in BROKEN else "failure" if case.verdict in FAILURES else "skipped"
    message = _attribute(f"{case.verdict}: {case.reason}")
    inside = _xml(f"{case.reason}\n{case.command}") if element != "skipped" else ""
    return f"{head}><{element} message={message}>{inside}</{element}></testcase>"


def _attribute(value: str) -> str:
    return quoteattr(ILLEGAL_IN_XML.sub("\ufffd", value))


def _xml(value: str) -> str:
    return escape(ILLEGAL_IN_XML.sub("\ufffd", value))


def ctrf(receipt: Receipt) -> str:
    """CTRF JSON: the verdicts in CTRF's five words; the exact verdict, margin and command beside them."""
    cases = receipt.body.cases
    statuses = [CTRF_STATUS.get(case.verdict, "failed") for case in cases]
    start = _milliseconds(receipt.body.header.time)
    summary = {
        status: statuses.count(status) for status in ("passed", "failed", "pending", "skipped", "other")
    }
    tests = [
        {
            "name": case.case_id,
            "status": status,
            "duration": round(1000 * case.duration_s),
            "suite": case.check,
            "rawStatus": str(case.verdict),
            "message": case.reason,
            "extra": {"margin": text.margin(figures.case_margin(case)), "command": case.command},
        }
        for case, status in zip(cases, statuses, strict=True)
    ]
    results = {
        "tool": {"name": "gdn-qualify", "version": receipt.body.header.harness.version},
        "summary": {
            "tests": len(cases),
            **summary,
            "start": start,
            "stop": start + round(1000 * receipt.body.header.duration_s),
        },
        "tests": tests,
        "extra": {"receipt": receipt.id, "verdict": str(receipt.body.header.verdict)},
    }
    made = {"reportFormat": "CTRF", "specVersion": "0.0.0", "results": results}
    return json.dumps(made, ensure_ascii=False, separators=(",", ":")) + "\n"


def _milliseconds(stamp: str) -> int:
    try:
        return round(1000 * datetime.fromisoformat(stamp).timestamp())
    except (ValueError, OverflowError):
        return 0


def markdown(receipt: Receipt) -> str:
    """One screen of Markdown for the page of a job."""
    body = receipt.body
    judged = figures.judged(body.plan, body.cases)
    groups = figures.failure_groups(judged)
    lines = [
        f"## {text.OVERALL_WORDS[body.header.verdict]}: {_md(', '.join(s.name for s in body.subjects))}, "
        f"profile {_md(body.header.profile)}",
        "",
        *_reasons(body.header.reasons),
        "| planned | executed | failed | waived | not executed |",
        "| ---: | ---: | ---: | ---: | ---: |",
        _table_row(judged),
        "",
        *_tight_lines(judged),
        *_evidence_lines(body),
    ]
    for group in groups[:SHOWN_FAILURES]:
        case = group.worst
        lines += [
            f"**{_md(group.check)}{': ' + _md(group.tensor) if group.tensor else ''}**, "
            f"{text.plural(len(group.cases), 'case')}: {_md(case.reason)}",
            "",
            *_fenced(case.command),
            "",
        ]
    return "\n".join([*lines, f"Receipt `{receipt.id}`.", ""])


def _reasons(reasons: Sequence[str]) -> list[str]:
    return [*(f"- {_md(reason)}" for reason in reasons[:SHOWN_FAILURES]), ""] if reasons else []


def _table_row(cases: Sequence[CaseRecord]) -> str:
    executed = sum(c.verdict in EXECUTED for c in cases)
    failed = sum(c.verdict in FAILURES for c in cases)
    waived = sum(c.verdict is Verdict.WAIVED for c in cases)
    return f"| {len(cases):,} | {executed:,} | {failed:,} | {waived:,} | {len(cases) - executed:,} |"


def _tight_lines(cases: Sequence[CaseRecord]) -> list[str]:
    tight = figures.tightest(cases, 4)
    if not tight:
        return []
    told = ", ".join(f"{_md(t.comparison.tensor)} {text.margin(t.comparison.margin)}" for t in tight)
    return [f"Tightest margins: {told}.", ""]


def _evidence_lines(body: Body) -> list[str]:
    if not body.controls and not body.discrimination:
        return []
    caught = sum(c.caught for c in body.controls)
    ruled = sum(d.excluded for d in body.discrimination)
    told = [f"Planted faults caught: {caught} of {len(body.controls)}."] if body.controls else []
    told += (
        [f"Wrong answers ruled out: {ruled} of {len(body.discrimination)}."] if body.discrimination else []
    )
    return [" ".join(told), ""]


def _md(value: str) -> str:
    """Text that Markdown and HTML leave alone."""
    plain = " ".join(value.split())
    return (
        re.sub(r"([\\`*_{}\[\]()<>#|~!@&])", r"\\\1", text.shown(plain))
        .replace("\\<", "&lt;")
        .replace("\\>", "&gt;")
    )


def _fenced(command: str) -> list[str]:
    fence = "`" * (3 + max((len(run) for run in re.findall(r"`+", command)), default=0))
    return [fence, text.shown(" ".join(command.split())), fence]
