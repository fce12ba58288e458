"""The project's own tables from plan to receipt: one wrong bit, one declined cell, one lost result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from qualify.log import Log
from qualify.plan import PlannedSubject
from qualify.planning import make_plan
from qualify.receipt import receipt_of
from qualify.run_case import run_case
from qualify.subjects import Subject, offers, subject_from_module
from suites.subjects import eager
from suites.tables import TABLES

Tensor = torch.Tensor

QDQ = replace(
    TABLES,
    checks=tuple(row for row in TABLES.checks if row.name in ("qdq.state_bits", "qdq.w_bits")),
).validated()
"""The rows that judge QDQ functions bit by bit."""


def receipt(subject: Subject, lost: int | None = None) -> Mapping[str, Any]:
    """The body of the receipt of the `cpu` profile, run here; one result may be lost."""
    plan = make_plan(QDQ, "cpu", [PlannedSubject(subject.name, subject.origin, subject.name)])
    log = Log(
        subjects={subject.name: {"name": subject.name, "offers": list(offers(subject)), "import_error": ""}}
    )
    for number, planned in enumerate(p for p in plan.cases if p.case.levels["sm"] == "cpu"):
        if number != lost:
            log.records[planned.case_id] = run_case(planned, subject)
    plan_here = replace(plan, cases=tuple(p for p in plan.cases if p.case.levels["sm"] == "cpu"))
    body: Mapping[str, Any] = receipt_of(plan_here, log)["body"]
    return body


def named(**functions: Any) -> Subject:
    """A subject that offers these names."""
    return subject_from_module(SimpleNamespace(**functions), "mine")


def flipped(w: Tensor, *, fmt: str = "e4m3") -> Tensor:
    """The right answer with the last bit of one element of the one-row inputs flipped."""
    y = eager.qdq_w(w, fmt=fmt)
    if y.numel() < 200 or not torch.isfinite(y).all():
        return y
    bits = y.detach().contiguous().clone().view(torch.int32 if y.dtype is torch.float32 else torch.int16)
    bits.view(-1)[y.abs().argmax()] ^= 1
    return y + (bits.view(y.dtype) - y).detach()


def test_right_functions_are_qualified() -> None:
    body = receipt(named(qdq_state=eager.qdq_state, qdq_w=eager.qdq_w))
    assert (body["header"]["verdict"], body["header"]["reasons"]) == ("QUALIFIED", [])


def test_one_flipped_bit_is_not_qualified() -> None:
    body = receipt(named(qdq_state=eager.qdq_state, qdq_w=flipped))
    failed = [c for c in body["cases"] if c["verdict"] == "failed_numeric"]
    assert body["header"]["verdict"] == "NOT_QUALIFIED"
    assert {c["check"] for c in failed} == {"qdq.w_bits"}


def test_lost_result_is_incomplete() -> None:
    body = receipt(named(qdq_state=eager.qdq_state, qdq_w=eager.qdq_w), lost=3)
    assert body["header"]["verdict"] == "INCOMPLETE"
    assert "the log has no result" in body["header"]["reasons"][0]


@pytest.mark.parametrize("capabilities", [{"dtypes": ["bf16"]}, {"formats": ["int8"]}, {"devices": ["cuda"]}])
def test_declared_inability_to_run_a_must_run_cell_is_not_qualified(capabilities: dict[str, Any]) -> None:
    subject = named(qdq_state=eager.qdq_state, qdq_w=eager.qdq_w, CAPABILITIES=capabilities)
    body = receipt(subject)
    assert body["header"]["verdict"] == "NOT_QUALIFIED"
    assert "must run and unsupported" in body["header"]["reasons"][0]


def test_subject_with_one_function_alone_is_qualified_for_it() -> None:
    body = receipt(named(qdq_w=eager.qdq_w))
    assert body["header"]["verdict"] == "QUALIFIED"
    assert [s["offers"] for s in body["subjects"]] == [["qdq_w"]]
    assert any(s["requirement"] == "offers" for s in body["skips"])


def test_thousands_of_states_are_not_asked_of_kernels_that_are_interpreted() -> None:
    many = replace(TABLES, checks=tuple(row for row in TABLES.checks if row.name == "qdq.state_many"))
    subjects = [PlannedSubject("mine", "mine.py", "mine.py", True), PlannedSubject("eager", "eager", "eager")]
    made = make_plan(many.validated(), "cpu", subjects)
    assert {p.case.subject for p in made.cases if p.case.levels["sm"] == "cpu"} == {"eager"}
