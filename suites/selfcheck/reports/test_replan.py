"""A plan that was shrunk with everything that follows from it is seen by who has the tables."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qualify.log import read_log
from qualify.plan import PlannedSubject
from qualify.planning import make_plan
from qualify.receipt import receipt_of
from qualify.tables import Tables, load_tables
from reports.model import Body
from reports.parts import rebuilt, write_receipt
from reports.reading import reader
from reports.verify import plan_digest, verify

Raw = dict[str, Any]


@pytest.fixture(scope="module")
def tables() -> Tables:
    return load_tables()


@pytest.fixture(scope="module")
def planned(tables: Tables, tmp_path_factory: pytest.TempPathFactory) -> Raw:
    """The body of a receipt of which nothing was run yet."""
    made = make_plan(tables, "quick", [PlannedSubject("eager", "suites.subjects.eager", "eager")])
    body: Raw = receipt_of(made, read_log(tmp_path_factory.mktemp("plan") / "log.jsonl"))["body"]
    return body


def found(body: Raw, folder: Path, tables: Tables) -> dict[str, str]:
    write_receipt(folder / "receipt.json", body)
    result = verify(folder / "receipt.json", tables=tables)
    return {f.step: f.found for f in result.findings if not f.passed}


def test_a_plan_of_the_tables_is_theirs(planned: Raw, tables: Tables, tmp_path: Path) -> None:
    assert "the tables given" not in found(planned, tmp_path, tables)


def drop_a_case(body: Raw) -> None:
    del body["cases"][0]


def drop_a_planted_fault(body: Raw) -> None:
    fault = next(c for c in body["cases"] if "fault" in c["levels"])["levels"]["fault"]
    body["cases"] = [c for c in body["cases"] if c["levels"].get("fault") != fault]


def call_cells_meaningless(body: Raw) -> None:
    row = {
        "name": "n",
        "because": "b",
        "removed": 0,
        "check": "",
        "forbid": {"dtype": ["bf16"], "sm": ["sm90"]},
    }
    body["plan"]["constraints"].append(row)


def invent_a_requirement(body: Raw) -> None:
    row = {
        "name": "a quiet night",
        "when": {},
        "fact": "noise",
        "test": "is",
        "value": "none",
        "because": "x",
    }
    body["plan"]["requirements"].append(row)


def allow_every_skip(body: Raw) -> None:
    body["plan"]["skip_budgets"] = [{"requirement": "*", "share": 1.0, "because": "why not"}]


def take_no_fault_for_a_control(body: Raw) -> None:
    for row in body["plan"]["checks"]:
        row["control"] = False


def let_anything_not_run(body: Raw) -> None:
    for case in body["cases"]:
        case["must_run"] = False


STORIES: list[Callable[[Raw], None]] = [
    drop_a_case,
    drop_a_planted_fault,
    call_cells_meaningless,
    invent_a_requirement,
    allow_every_skip,
    take_no_fault_for_a_control,
    let_anything_not_run,
]


@pytest.mark.parametrize("tell", STORIES)
def test_a_plan_that_was_made_smaller_is_not_that_of_the_tables(
    planned: Raw, tables: Tables, tmp_path: Path, tell: Callable[[Raw], None]
) -> None:
    body = copy.deepcopy(planned)
    tell(body)
    cases = reader(Body)(body, "body").cases
    plan = body["plan"]
    plan |= {"cases": len(cases), "must_run": sum(c.must_run for c in cases)}
    plan["digest"] = plan_digest(plan["profile"], plan["axes"], cases)
    assert "the tables make another" in found(rebuilt(body), tmp_path, tables)["the tables given"]
