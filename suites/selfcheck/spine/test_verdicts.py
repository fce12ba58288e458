"""Verdicts: a failure outranks a gap, and nothing is green by absence."""

from __future__ import annotations

from dataclasses import replace

import pytest

from qualify.errors import Exit
from qualify.exclusions import exclusions, places_of
from qualify.records import CaseRecord, Comparison, Overall, Verdict
from qualify.tables import WrongAnswerRow
from qualify.verdicts import EXITS, Exclusion, SubjectOffer, judge, of_comparisons

GOOD = Comparison("o", "budget", "rel_l2", 0.5, 1.0, "derived")
BAD = Comparison("dq", "budget", "rel_l2", 2.0, 1.0, "derived", looks_like="state_off", because="too far")
NAN = Comparison("dk", "budget", "rel_l2", float("nan"), 1.0, "d", failure=Verdict.FAILED_NONFINITE)
SHAPE = Comparison("dv", "property", "shape", 1.0, 0.0, "d", failure=Verdict.FAILED_SHAPE)
OFFER = SubjectOffer("mine", ("chunk_gated_delta_rule",))


def record(number: int = 0, verdict: Verdict = Verdict.PASSED, **more: object) -> CaseRecord:
    """A record of the subject `mine`."""
    made = CaseRecord(
        case_id=f"mine/op[]random#{number}",
        check="op",
        subject="mine",
        levels={"dtype": "bf16", "sites": "both", "format": "e4m3"},
        regime="random",
        seed=number,
        verdict=verdict,
        reason="" if verdict is Verdict.PASSED else "because",
        comparisons=(GOOD,) if verdict is Verdict.PASSED else (),
    )
    return replace(made, **more)  # type: ignore[arg-type]


def overall(*records: CaseRecord, **more: object) -> Overall:
    """The verdict over some records, all of them planned."""
    options = {"planned": len(records), "subjects": [OFFER], **more}
    return judge(records, **options).overall  # type: ignore[arg-type]


def test_worst_comparison_names_the_verdict() -> None:
    assert of_comparisons([GOOD, BAD, NAN]) == (
        Verdict.FAILED_NONFINITE,
        "dk: rel_l2 is nan, allowed 1; 1 more comparisons fail",
    )
    assert of_comparisons([BAD, SHAPE])[0] is Verdict.FAILED_SHAPE
    assert "looks like: state_off" in of_comparisons([GOOD, BAD])[1]


def test_no_comparison_is_an_error() -> None:
    assert of_comparisons([])[0] is Verdict.ERROR


def test_all_passed_is_qualified() -> None:
    assert overall(record(0, must_run=True), record(1)) is Overall.QUALIFIED


@pytest.mark.parametrize(
    "verdict",
    [
        Verdict.FAILED_NUMERIC,
        Verdict.FAILED_SHAPE,
        Verdict.FAILED_NONFINITE,
        Verdict.FAILED_NONDETERMINISTIC,
        Verdict.ERROR,
        Verdict.CRASH,
        Verdict.HANG,
        Verdict.STALE_WAIVER,
    ],
)
def test_failure_outranks_a_gap(verdict: Verdict) -> None:
    assert overall(record(0), record(1, verdict), record(2, Verdict.NOT_RUN)) is Overall.NOT_QUALIFIED


@pytest.mark.parametrize("verdict", [Verdict.NOT_RUN, Verdict.EXCLUDED])
def test_case_without_a_result_is_incomplete(verdict: Verdict) -> None:
    assert overall(record(0), record(1, verdict)) is Overall.INCOMPLETE


def test_fewer_records_than_planned_is_incomplete() -> None:
    assert overall(record(0), planned=2) is Overall.INCOMPLETE


def test_skip_is_a_result_unless_it_must_run() -> None:
    assert overall(record(0), record(1, Verdict.SKIPPED)) is Overall.QUALIFIED
    assert overall(record(0), record(1, Verdict.SKIPPED, must_run=True)) is Overall.INCOMPLETE


def test_nothing_executed_is_incomplete() -> None:
    assert overall(record(0, Verdict.SKIPPED)) is Overall.INCOMPLETE
    assert overall() is Overall.INCOMPLETE


def test_declined_must_run_case_is_not_qualified() -> None:
    declined = record(1, Verdict.UNSUPPORTED, must_run=True, requirement="capabilities")
    assert overall(record(0), declined) is Overall.NOT_QUALIFIED
    assert overall(record(0), replace(declined, requirement="refused")) is Overall.NOT_QUALIFIED
    assert overall(record(0), replace(declined, must_run=False)) is Overall.QUALIFIED


def test_function_that_a_subject_lacks_does_not_fail_it() -> None:
    lacking = record(1, Verdict.UNSUPPORTED, must_run=True, requirement="offers")
    assert overall(record(0), lacking) is Overall.QUALIFIED


@pytest.mark.parametrize(
    "offer",
    [
        SubjectOffer("mine", ()),
        SubjectOffer("mine", ("stages",)),
        SubjectOffer("mine", ("qdq_w",), "ImportError"),
    ],
)
def test_subject_that_offers_nothing_is_not_qualified(offer: SubjectOffer) -> None:
    assert overall(record(0), subjects=[offer]) is Overall.NOT_QUALIFIED


@pytest.mark.parametrize(
    "verdict", [Verdict.FAILED_NUMERIC, Verdict.ERROR, Verdict.UNSUPPORTED, Verdict.NOT_RUN, Verdict.CRASH]
)
def test_control_that_is_not_caught_is_incomplete(verdict: Verdict) -> None:
    control = record(1, verdict, check="controls", subject="controls")
    assert overall(record(0), control, control_checks=frozenset({"controls"})) is Overall.INCOMPLETE


def test_missed_control_does_not_excuse_a_failure() -> None:
    control = record(1, Verdict.FAILED_NUMERIC, check="controls", subject="controls")
    failed = record(0, Verdict.FAILED_NUMERIC)
    assert overall(failed, control, control_checks=frozenset({"controls"})) is Overall.NOT_QUALIFIED


def test_hole_in_the_cover_is_incomplete() -> None:
    assert overall(record(0), uncovered=["3 of 4"]) is Overall.INCOMPLETE


def test_wrong_answer_that_nothing_excludes_is_incomplete() -> None:
    open_ = Exclusion("mine", "state_off", "bf16", "state", "e4m3")
    closed = replace(open_, evidence=(("id", "o", "filter", 5.0),))
    assert overall(record(0), exclusions=[open_, closed]) is Overall.INCOMPLETE
    assert overall(record(0), exclusions=[closed]) is Overall.QUALIFIED


def test_waiver_shows_in_the_verdict() -> None:
    assert overall(record(0), record(1, Verdict.WAIVED)) is Overall.QUALIFIED_WITH_WAIVERS


def test_exit_codes_are_those_published() -> None:
    assert {str(k): int(v) for k, v in EXITS.items()} == {
        "QUALIFIED": 0,
        "QUALIFIED_WITH_WAIVERS": 0,
        "NOT_QUALIFIED": 1,
        "INCOMPLETE": 3,
    }
    assert int(Exit.USAGE) == 2


ROWS = (
    WrongAnswerRow("state_off", "off", sites=("state",)),
    WrongAnswerRow("w_off", "off", sites=("w",)),
    WrongAnswerRow("state_e4m3", "other format", sites=("state",), formats=("int8",)),
    WrongAnswerRow("dht_ignored", "ignored"),
    WrongAnswerRow("w_amax", "in bf16", sites=("w",), dtypes=("fp32",)),
)


def asked(*records: CaseRecord) -> dict[tuple[str, str, str, str], bool]:
    """(wrong answer, dtype, site, format) that had to be excluded -> whether it was."""
    found = exclusions(records, ROWS, ["mine"], frozenset({"op"}))
    return {(e.wrong_answer, e.dtype, e.site, e.format): bool(e.evidence) for e in found}


def test_what_was_executed_decides_what_must_be_excluded() -> None:
    int8 = {"dtype": "fp32", "sites": "state", "format": "int8"}
    assert asked(record(0), record(1, Verdict.FAILED_NUMERIC, levels=int8)) == {
        ("state_off", "bf16", "state", "e4m3"): False,
        ("state_off", "fp32", "state", "int8"): False,
        ("w_off", "bf16", "w", "e4m3"): False,
        ("state_e4m3", "fp32", "state", "int8"): False,
        ("dht_ignored", "bf16", "", ""): False,
        ("dht_ignored", "fp32", "", ""): False,
    }


def test_skipped_cases_ask_for_nothing() -> None:
    assert asked(record(0, Verdict.SKIPPED), record(1, Verdict.UNSUPPORTED)) == {}


def test_evidence_counts_where_it_was_gathered() -> None:
    excluding = replace(GOOD, excluded=("w_off",), discrimination={"state_off": 1.5, "dht_ignored": 0.9})
    found = asked(record(0, comparisons=(excluding,)))
    assert found[("state_off", "bf16", "state", "e4m3")]
    assert found[("w_off", "bf16", "w", "e4m3")]
    assert not found[("dht_ignored", "bf16", "", "")]
    other = {"dtype": "fp16", "sites": "none"}
    elsewhere = asked(record(0), record(1, comparisons=(excluding,), levels=other))
    assert not elsewhere[("state_off", "bf16", "state", "e4m3")]


def test_failed_case_is_no_evidence() -> None:
    excluding = replace(GOOD, excluded=("state_off",))
    failed = record(0, Verdict.FAILED_NUMERIC, comparisons=(excluding, BAD))
    assert not asked(failed)[("state_off", "bf16", "state", "e4m3")]


def test_sites_off_is_a_place_of_its_own() -> None:
    assert list(places_of({"dtype": "fp32", "sites": "none"})) == [("fp32", "", "")]
