"""Plans: stable ids, must-run cells, other SMs, selection."""

from __future__ import annotations

from dataclasses import replace

import pytest

from qualify.checks_table import CheckRow, Constraint, Options
from qualify.errors import UsageError
from qualify.plan import (
    CONTROLS_SUBJECT,
    Plan,
    PlannedSubject,
    case_from_id,
    plan_from_json,
    plan_to_json,
    select,
)
from qualify.planning import make_plan
from qualify.tables import Tables
from suites.selfcheck.spine.trivial import HERE, TABLES

MINE = PlannedSubject("mine", "mine.py", "mine.py")


def plan(tables: Tables = TABLES, seed: int = 0) -> Plan:
    """A plan of the tiny profile."""
    return make_plan(tables.validated(), "tiny", [MINE], seed=seed)


def with_row(**changes: object) -> Tables:
    """The trivial tables with a changed check."""
    return replace(TABLES, checks=(replace(TABLES.checks[0], **changes),))  # type: ignore[arg-type]


def test_ids_are_stable_and_unique() -> None:
    made = plan()
    assert len(made.by_id) == len(made.cases) == 12
    assert made.cases[0].case_id == "mine/double[sm:cpu,number:2,colour:red]ordinary#0"


def test_must_run_binds_the_profiles_own_sm_alone() -> None:
    must = [p.case for p in plan().cases if p.case.must_run]
    assert [(c.levels["sm"], c.levels["number"]) for c in must] == [("cpu", "2")]


def test_cells_of_other_sms_are_planned() -> None:
    assert {p.case.levels["sm"] for p in plan().cases} == {"cpu", "sm90"}


def test_seed_moves_every_case_and_the_digest() -> None:
    assert {p.case.seed for p in plan(seed=7).cases} == {7}
    assert plan(seed=7).digest != plan().digest == plan().digest


def test_an_interpreted_subject_gets_the_time_that_its_options_say() -> None:
    options = Options(interpreted=Options("each", axes={"number": ("2",)}, time_limit_s=70.0))
    slow = with_row(profiles={"tiny": options}).validated()
    made = make_plan(slow, "tiny", [replace(MINE, interpreted=True)])
    run = [p for p in made.cases if p.case.levels["sm"] == "cpu"]
    assert {(p.case.levels["number"], p.time_limit_s) for p in run} == {("2", 70.0)}
    others = [p for p in plan(slow).cases if p.case.levels["sm"] == "cpu"]
    assert {p.case.levels["number"] for p in others} == {"1", "2", "3", "4"}


def test_an_interpreted_subject_has_more_time_where_nothing_is_said() -> None:
    made = make_plan(TABLES, "tiny", [replace(MINE, interpreted=True)])
    assert {p.time_limit_s for p in made.cases} == {TABLES.profile("tiny").interpreted_limit_s}
    assert {p.time_limit_s for p in plan().cases} == {TABLES.profile("tiny").time_limit_s}


def test_plan_survives_json() -> None:
    made = plan()
    assert plan_from_json(plan_to_json(made)) == made


def test_constraint_on_an_sm_removes_a_level_there_only() -> None:
    rule = Constraint({"sm": ("cpu",), "number": ("4",)}, "too large for a CPU")
    made = plan(with_row(constraints=(rule,)))
    assert {p.case.levels["number"] for p in made.cases if p.case.levels["sm"] == "cpu"} == {"1", "2", "3"}
    assert "4" in {p.case.levels["number"] for p in made.cases if p.case.levels["sm"] == "sm90"}
    assert all(c.proof.complete for c in made.covers)


def test_impossible_must_run_cell_is_refused() -> None:
    rule = Constraint({"number": ("2",), "colour": ("red", "blue")}, "never")
    with pytest.raises(UsageError, match="must-run cell"):
        plan(with_row(constraints=(rule,)))


def test_controls_belong_to_no_subject_and_run_once() -> None:
    control = CheckRow(
        "faults",
        f"{HERE}:doubles",
        "the judge is judged",
        axes={"fault": ("one", "two")},
        strength="all",
        profiles={"tiny": Options()},
        control=True,
    )
    made = make_plan(
        replace(TABLES, checks=(*TABLES.checks, control)), "tiny", [MINE, PlannedSubject("other", "o.py")]
    )
    found = [p for p in made.cases if p.control and p.case.levels["sm"] == "cpu"]
    assert [p.case.subject for p in found] == [CONTROLS_SUBJECT] * 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"axes": {"number": ("9",)}, "must_run": ()}, "no level '9'"),
        ({"profiles": {"nightly": Options()}}, "no profile 'nightly'"),
        ({"must_run": ({"number": "9"},)}, "must-run cell"),
        ({"axes": {"sm": ("cpu",)}, "must_run": ()}, "added by the plan"),
        ({"profiles": {"tiny": Options(axes={"number": ("8",)})}}, "unknown level number:8"),
    ],
)
def test_contradicting_tables_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        plan(with_row(**changes))


def test_profile_without_cases_is_refused() -> None:
    with pytest.raises(UsageError, match="must have cases"):
        plan(replace(TABLES, checks=()))


def test_unknown_profile_is_refused() -> None:
    with pytest.raises(UsageError, match="profile must be one of tiny, got 'nightly'"):
        make_plan(TABLES, "nightly", [MINE])


def test_selection_takes_parts_and_wildcards() -> None:
    made = plan()
    assert len(select(made, [])) == 12
    assert select(made, ["number:2,colour:red"]) == {
        "mine/double[sm:cpu,number:2,colour:red]ordinary#0",
    } | {i for i in made.by_id if "sm90,number:2,colour:red" in i}
    assert all("[sm:cpu" in i and "blue" in i for i in select(made, ["sm:cpu*blue"]))


def test_empty_selection_is_refused() -> None:
    with pytest.raises(UsageError, match=r"got 'nothing\[like'"):
        select(plan(), ["number:2", "nothing[like"])


def test_case_comes_back_from_its_id() -> None:
    planned = plan().cases[3]
    again = case_from_id(TABLES, planned.case_id, 5.0)
    assert replace(again.case, must_run=planned.case.must_run) == planned.case
    assert (again.run, again.time_limit_s) == (planned.run, 5.0)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "mine/double",
        "mine/double[sm:cpu,number:2]ordinary#0",
        "mine/double[sm:cpu,number:77,colour:red]ordinary#0",
        "mine/triple[sm:cpu,number:2,colour:red]ordinary#0",
        "mine/double[sm:cpu,number:2,colour:red]odd#0",
        "mine/double[sm:cpu,number:2,colour:red]ordinary#x",
    ],
)
def test_foreign_id_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        case_from_id(TABLES, text, 5.0)
