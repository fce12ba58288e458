"""The receipt as one self-contained HTML page, computed from the receipt alone.

Everything that comes from the receipt passes through autoescape, or through `script_json` on its way into the
data block; the page's policy lets only the page's own script run. Without scripts the page is complete.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from qualify.records import EXECUTED, FAILURES, CaseRecord, Comparison, Overall, Verdict
from qualify.verdicts import LACKS
from reports import charts, figures, rederive, text
from reports.history import Line
from reports.model import Body, Moved, Plan, Receipt, SubjectFacts
from reports.reading import short

TEMPLATES = Path(__file__).with_name("templates")
SHOWN_PER_CAUSE = 1
SHOWN_CAUSES = 40
COMMANDS_PER_CAUSE = 500
MAX_NAMES = 16
"""More names of things that held than this are counted."""

MAX_FIGURES = 200_000
"""Rows of figures of passed cases that the page carries; the receipt holds all."""

TONES = {
    Overall.QUALIFIED: "pass",
    Overall.QUALIFIED_WITH_WAIVERS: "warn",
    Overall.NOT_QUALIFIED: "fail",
    Overall.INCOMPLETE: "warn",
}
FILLS = {Verdict.PASSED: "fill-pass", Verdict.WAIVED: "fill-warn", Verdict.NOT_RUN: "fill-none"}
SECTION_WORDS = {
    "gpu": "GPU",
    "software": "Software",
    "switches": "Numeric switches",
    "variables": "Environment variables",
    "system": "System",
}


def render(receipt: Receipt, disagreement: str = "") -> str:
    """The page of a receipt.

    Args:
        receipt: a receipt that was read.
        disagreement: why the recorded verdict does not follow from the cases, if it does not.
    """
    body = receipt.body
    judged = figures.judged(body.plan, body.cases)
    failures = figures.failure_groups(judged)
    skips = figures.skip_rows(judged, body.skips)
    script = asset("page.js")
    context = (
        first_screen(receipt, judged, disagreement)
        | findings(body, judged, failures)
        | error_tables(body.plan, judged)
        | evidence(body, skips)
        | surroundings(body)
        | register(body, failures, skips)
    )
    return (
        environment()
        .get_template("receipt.html.j2")
        .render(
            receipt=receipt,
            body=body,
            header=body.header,
            plan=body.plan,
            cases=body.cases,
            words=text.VERDICT_WORDS,
            style=Markup(asset("page.css")),
            script=Markup(script),
            script_hash=script_hash(script),
            contents=contents(context, body),
            **context,
        )
    )


@cache
def environment() -> jinja2.Environment:
    """The template environment: autoescape everywhere, an undefined name is an error."""
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
    )
    for name in ("figure", "margin", "count", "plural", "duration", "when", "place", "brief"):
        made.filters[name] = getattr(text, name)
    made.filters["plural"] = lambda number, one: text.plural(number, one)
    made.filters["id"] = breakable
    made.filters["brief_text"] = lambda value: short(value, 420)
    made.filters["rule"] = lambda name: text.RULE_WORDS.get(name, name)
    made.filters["whole"] = lambda number: f"{number:,.0f}"
    made.globals["inf"] = math.inf
    made.globals["NAMED"] = MAX_NAMES
    made.globals["subject_facts"] = subject_facts
    return made


def breakable(case_id: str) -> Markup:
    """An id that breaks between its levels when it does not fit on a line."""
    return Markup("<wbr>").join(re.split(r"(?<=[,\[\]])", case_id))


@cache
def asset(name: str) -> str:
    """The text of a style sheet or script of the page."""
    return (TEMPLATES / name).read_text(encoding="utf-8")


def script_hash(script: str) -> str:
    """The source expression by which a content security policy allows exactly this script."""
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def script_json(value: Any) -> Markup:
    """JSON for a data block: nothing in it can end the block."""
    dumped = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    for character in "<>&\u2028\u2029":
        dumped = dumped.replace(character, f"\\u{ord(character):04x}")
    return Markup(dumped)


@dataclass(frozen=True)
class Part:
    """One stretch of the bar that shows what became of the plan."""

    word: str
    number: int
    fill: str
    start: float
    width: float


def parts(cases: Sequence[CaseRecord]) -> Iterator[Part]:
    """The stretches of the bar, failures together, in thousandths of its length."""
    numbers: dict[tuple[str, str], int] = defaultdict(int)
    for verdict, number in figures.composition(cases):
        word = "failed" if verdict in FAILURES else text.VERDICT_WORDS[verdict]
        numbers[word, "fill-fail" if verdict in FAILURES else FILLS.get(verdict, "fill-idle")] += number
    start = 0.0
    for (word, fill), number in numbers.items():
        width = 1000 * number / len(cases)
        yield Part(word, number, fill, start, width)
        start += width


def first_screen(receipt: Receipt, judged: Sequence[CaseRecord], disagreement: str) -> dict[str, Any]:
    """What answers a reviewer's first questions."""
    body = receipt.body
    worse = [m for m in body.comparison.moved if m.worse] if body.comparison else []
    control_checks = rederive.control_checks(body.plan)
    return {
        "disagreement": disagreement,
        "verdict_word": text.OVERALL_WORDS[body.header.verdict],
        "tone": TONES[body.header.verdict],
        "sentence": sentence(judged, [c for c in body.cases if c.check in control_checks]),
        "judged": judged,
        "subject_line": subject_line(body),
        "identity": identity(body),
        "parts": list(parts(judged)),
        "tightest": figures.tightest(judged),
        "worse": worse,
        "gates_failed": sum(not gate.passed for gate in body.gates),
        "caught": sum(c.caught for c in body.controls),
        "open_controls": [row for row in figures.control_rows(body)[1] if not row.caught],
        "ruled_out": sum(d.excluded for d in body.discrimination),
        "open_answers": [group for group in figures.wrong_answer_groups(body) if group.still_open],
    }


def sentence(cases: Sequence[CaseRecord], controls: Sequence[CaseRecord] = ()) -> str:
    """What happened, in one sentence that follows from the cases.

    Args:
        cases: that judge the subject.
        controls: that judge the judge.
    """
    counts = dict(figures.composition(cases))
    failed = sum(number for verdict, number in counts.items() if verdict in FAILURES)
    executed = sum(number for verdict, number in counts.items() if verdict in EXECUTED)
    lacking = sum(lacks(case) for case in cases)
    must = [case for case in cases if case.must_run and not lacks(case)]
    missing = sum(case.verdict not in EXECUTED for case in must)
    open_cases = counts.get(Verdict.NOT_RUN, 0)
    said = [
        f"{text.plural(failed, 'case')} of {executed:,} executed failed" if failed
        else f"{text.plural(executed, 'case was', 'cases were')} executed and none failed"
    ]  # fmt: skip
    if must:
        said.append(
            f"{missing:,} of {len(must):,} that must run did not" if missing
            else f"{'all ' if len(must) > 1 else ''}{text.plural(len(must), 'case')} that must run did"
        )  # fmt: skip
    if lacking:
        said.append(f"{text.plural(lacking, 'case asks', 'cases ask')} for what the subject does not offer")
    if open_cases:
        said.append(text.plural(open_cases, "planned case has no result", "planned cases have no result"))
    unplanted = sum(case.verdict is Verdict.NOT_RUN for case in controls)
    if unplanted:
        said.append(text.plural(unplanted, "planted fault was not run", "planted faults were not run"))
    if not open_cases and not unplanted:
        said.append("everything else planned has a result")
    return "; ".join(said) + "."


def lacks(case: CaseRecord) -> bool:
    """Whether a case asks for a function that its subject does not offer."""
    return case.verdict is Verdict.UNSUPPORTED and case.requirement == LACKS


def subject_line(body: Body) -> str:
    """The subjects with version and commit, in one line."""
    return ", ".join(
        " ".join(filter(None, (s.name, s.version, f"at {text.brief(s.commit)}" if s.commit else "")))
        for s in body.subjects
    )


def identity(body: Body) -> list[tuple[str, list[str]]]:
    """The short facts beside the verdict: what, where, with which software, judged by whom."""
    rows = [("Subject", [line for s in body.subjects for line in subject_lines(s)])]
    machines = {tuple(machine_lines(dict(e.gpu), dict(e.system))): None for e in body.environments}
    rows.append(("Where", [line for lines in machines for line in lines] or ["unknown"]))
    versions: dict[str, dict[str, None]] = defaultdict(dict)
    for e in body.environments:
        for name in ("torch", "triton", "cuda", "python"):
            if name in e.software and e.software[name].version:
                versions[name][str(e.software[name].version)] = None
    rows.append(
        ("With", [", ".join(f"{name} {' | '.join(found)}" for name, found in versions.items()) or "unknown"])
    )
    harness = body.header.harness
    dirty = ", with uncommitted changes" if harness.dirty else ""
    rows.append(
        ("Judge", [f"{harness.name} {harness.version}", f"{text.brief(harness.commit)}{dirty}".strip(", ")])
    )
    return rows


def subject_lines(subject: SubjectFacts) -> list[str]:
    """Name, version, commit and state of one subject."""
    state = f"uncommitted changes {text.brief(subject.diff_digest)}" if subject.dirty else "clean"
    commit = f"commit {text.brief(subject.commit)}, {state}" if subject.commit else "no commit known"
    backend = f"backend {subject.backend}" if subject.backend else ""
    offers = f"offers {', '.join(subject.offers)}" if subject.offers else "offers nothing"
    return list(filter(None, (f"{subject.name} {subject.version}".strip(), commit, backend, offers)))


def machine_lines(gpu: Mapping[str, str], system: Mapping[str, str]) -> list[str]:
    """A machine in two lines: its GPU or its processor, and what goes with it."""
    if gpu.get("name"):
        more = [
            f"SM {gpu['sm']}" if gpu.get("sm") else "",
            f"driver {gpu['driver']}" if gpu.get("driver") else "",
        ]
        return [gpu["name"], ", ".join(filter(None, more))]
    named = [system[name] for name in ("processor", "platform") if system.get(name)]
    return ["no GPU", *named]


def subject_facts(subject: SubjectFacts) -> list[tuple[str, str]]:
    """Everything recorded about a subject but its files, as rows."""
    rows = [
        ("origin", subject.origin),
        ("package", " ".join(filter(None, (subject.package, subject.version)))),
        ("commit", subject.commit or "unknown"),
        ("uncommitted changes", subject.diff_digest or "yes" if subject.dirty else "none"),
        ("backend that ran", subject.backend),
        ("kernels", "in Triton; a machine without a GPU interprets them" if subject.interpreted else ""),
        ("offers", ", ".join(subject.offers)),
        ("arithmetic", ", ".join(f"{carrier}: {used}" for carrier, used in subject.arithmetic.items())),
        ("capabilities", ", ".join(f"{k}: {text_of(v)}" for k, v in subject.capabilities.items())),
        ("deterministic", "yes" if subject.deterministic else "declares that it is not"),
        ("import error", subject.import_error),
    ]
    return [(name, value) for name, value in rows if value]


def text_of(value: Any) -> str:
    """A JSON value in a cell of a table."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


@dataclass(frozen=True)
class FailedCase:
    """A failing case as it is shown."""

    case_id: str
    reason: str
    command: str
    failing: tuple[Comparison, ...]
    compared: int
    launch: Mapping[str, str]


@dataclass(frozen=True)
class Cause:
    """A group of failing cases as it is shown: a few in full, commands for the others."""

    verdict: Verdict
    check: str
    tensor: str
    looks_like: str
    number: int
    shown: tuple[FailedCase, ...]
    rest: int
    commands: tuple[str, ...]


def cause(group: figures.FailureGroup, full: bool) -> Cause:
    """A failure group with its farthest case first."""
    ordered = sorted(group.cases, key=lambda c: -(figures.case_margin(c) or 0.0))
    shown, others = ordered[: SHOWN_PER_CAUSE if full else 1], ordered[SHOWN_PER_CAUSE if full else 1 :]
    return Cause(
        group.verdict,
        group.check,
        group.tensor,
        group.looks_like,
        len(ordered),
        tuple(failed_case(case) for case in shown),
        len(others),
        tuple(case.command or case.case_id for case in others[:COMMANDS_PER_CAUSE]),
    )


def failed_case(case: CaseRecord) -> FailedCase:
    """A failing case with the comparisons that failed, the farthest outside its budget first."""
    failing = sorted(
        (c for c in case.comparisons if not c.passed), key=lambda c: -figures.orderable(c.margin)
    )
    return FailedCase(
        case.case_id, case.reason, case.command, tuple(failing), len(case.comparisons), case.launch
    )


def findings(
    body: Body, judged: Sequence[CaseRecord], groups: Sequence[figures.FailureGroup]
) -> dict[str, Any]:
    """Failures by cause, the matrix, and what was never executed."""
    unexecuted = figures.never_executed(body.plan, body.cases)
    return {
        "failures": [cause(group, i < SHOWN_CAUSES) for i, group in enumerate(groups)],
        "failed": sum(len(group.cases) for group in groups),
        "executed": sum(case.verdict in EXECUTED for case in judged),
        "heat": figures.heat_map(body.cases, "check", figures.dense_axis(judged, body.plan), body.plan),
        "unexecuted": unexecuted,
        "unexecuted_levels": {(axis, level) for axis, level, _ in unexecuted},
    }


def error_tables(plan: Plan, cases: Sequence[CaseRecord]) -> dict[str, Any]:
    """Errors per tensor, their distributions, and errors over length."""
    rows = figures.tensor_rows(cases)
    names = list(dict.fromkeys(row.tensor for row in rows))
    tensors, best = figures.discrimination_matrix(rows)
    margin_charts = [charts.margin_histogram(name, rows) for name in names]
    step_charts = [charts.step_histogram(name, cases) for name in names]
    return {
        "rows": rows,
        "outputs": [row for row in rows if row.tensor in figures.TENSORS],
        "stages": [row for row in rows if row.tensor not in figures.TENSORS],
        "margin_charts": [chart for chart in margin_charts if chart],
        "step_charts": [chart for chart in step_charts if chart],
        "step_rows": figures.step_rows(cases),
        "over": charts.over_length(plan, cases),
        "bits": figures.held_rows(cases, figures.is_exact),
        "properties": figures.held_rows(cases, figures.is_property),
        "matrix_tensors": tensors,
        "matrix_names": list(dict.fromkeys(name for name, _ in best)),
        "matrix": best,
    }


def evidence(body: Body, skips: Sequence[Any]) -> dict[str, Any]:
    """Controls and wrong answers, the open ones first; skips."""
    dtypes, controls = figures.control_rows(body)
    return {
        "control_dtypes": dtypes,
        "controls": controls,
        "wrong_answers": figures.wrong_answer_groups(body),
        "skips": skips,
        "over_budget": {tally.requirement for tally in rederive.skip_tallies(body) if tally.over},
        "not_run": sum(skip.cases for _, skip in skips),
    }


def surroundings(body: Body) -> dict[str, Any]:
    """Environments, drift and launches."""
    by_section: dict[str, list[Any]] = defaultdict(list)
    for fact in figures.facts(body.environments):
        by_section[SECTION_WORDS[fact.section]].append((fact.name, list(dict.fromkeys(fact.values))))
    return {
        "environments": body.environments,
        "drift": figures.drift(body.environments),
        "gpus": Counter(case.gpu for case in body.cases if case.gpu and case.verdict in EXECUTED),
        "fact_sections": list(by_section.items()),
        "cover_rows": figures.cover_rows(body.plan.covers),
        "launches": figures.launches(body.cases),
    }


@dataclass(frozen=True)
class Group:
    """The cases of one subject and check as lines of text, which the script reads as its data."""

    subject: str
    check: str
    axes: tuple[str, ...]
    number: int
    lines: str


def register(body: Body, groups: Sequence[figures.FailureGroup], skips: Sequence[Any]) -> dict[str, Any]:
    """Every case as a line; and for each line the tightest figure of each tensor, as compact data."""
    notes = {case.case_id: f"F{i}" for i, group in enumerate(groups, 1) for case in group.cases}
    rules = {
        (verdict, s.requirement, s.value_seen, s.reason): f"N{i}" for i, (verdict, s) in enumerate(skips, 1)
    }
    grouped: dict[tuple[str, str, tuple[str, ...]], list[CaseRecord]] = defaultdict(list)
    for case in body.cases:
        grouped[case.subject, case.check, tuple(case.levels)].append(case)
    names: dict[tuple[str, str], int] = {}
    rows, left = [], MAX_FIGURES
    for members in grouped.values():
        for case in members:
            line = case_figures(case, names) if left > 0 else ""
            left -= line.count(";") + bool(line)
            rows.append(line)

    def lines(members: Sequence[CaseRecord]) -> str:
        return "\n".join(
            "\t".join(
                plain(field)
                for field in (
                    case.verdict,
                    margin_text(case),
                    notes.get(case.case_id)
                    or rules.get((case.verdict, case.requirement, case.value_seen, case.reason), ""),
                    case.regime,
                    str(case.seed),
                    *case.levels.values(),
                )
            )
            for case in members
        )

    return {
        "register": [
            Group(subject, check, axes, len(members), lines(members))
            for (subject, check, axes), members in grouped.items()
        ],
        "figures": script_json(
            {
                "names": [list(name) for name in names],
                "rows": rows,
                "axes": body.plan.axes,
                "given": {s.name: s.given for s in body.subjects if s.given},
            }
        ),
    }


def margin_text(case: CaseRecord) -> str:
    """The tightest margin of a case in the register; empty where nothing was compared."""
    tight = figures.case_margin(case)
    return "" if tight is None else text.margin(tight)


def plain(value: str) -> str:
    """Text without the characters that separate fields and lines of the register."""
    return "".join(character if character.isprintable() else "\ufffd" for character in value)


def case_figures(case: CaseRecord, names: dict[tuple[str, str], int]) -> str:
    """`name error margin;...`: for each tensor of a case its tightest comparison."""
    tight: dict[str, Comparison] = {}
    for c in case.comparisons:
        held = tight.get(c.tensor)
        if held is None or figures.orderable(c.margin) > figures.orderable(held.margin):
            tight[c.tensor] = c
    return ";".join(
        f"{names.setdefault((c.tensor, c.metric), len(names))} {text.figure(c.error)} {text.margin(c.margin)}"
        for c in tight.values()
    )


def contents(context: Mapping[str, Any], body: Body) -> list[tuple[str, str, int | None]]:
    """The sections with how many things are in them."""
    return [
        ("failures", "Failures", context["failed"]),
        ("matrix", "Matrix", len(context["heat"].cells)),
        ("errors", "Errors by tensor", sum(len(context[name]) for name in ("rows", "bits", "properties"))),
        ("noticed", "Would it be noticed?", len(body.controls) + len(body.discrimination)),
        ("not-run", "Not run, and why", context["not_run"]),
        ("waivers", "Waivers", len(body.waivers)),
        ("gates", "Gates", len(body.gates)),
        ("since", "Since the last", len(body.comparison.moved) if body.comparison else None),
        ("environment", "Environment", len(body.environments)),
        ("plan", "Plan", None),
        ("launches", "Launches", len(context["launches"])),
        ("subjects", "Subject and judge", None),
        ("cases", "Every case", len(body.cases)),
    ]


def render_diff(before: Receipt, after: Receipt, moved: Sequence[Moved]) -> str:
    """The page of a comparison of two receipts."""
    return (
        environment()
        .get_template("diff.html.j2")
        .render(
            before=before,
            after=after,
            subject_before=subject_line(before.body),
            subject_after=subject_line(after.body),
            moved=moved,
            worse=[m for m in moved if m.worse],
            other=[m for m in moved if not m.worse],
            words=text.OVERALL_WORDS,
            style=Markup(asset("page.css")),
        )
    )


def render_history(lines: Sequence[Line]) -> str:
    """The page of the margins of many receipts."""
    return (
        environment()
        .get_template("history.html.j2")
        .render(
            lines=lines,
            number=sum(len(line.runs) for line in lines),
            words=text.OVERALL_WORDS,
            style=Markup(asset("page.css")),
        )
    )
