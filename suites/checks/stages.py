"""Stages that a subject shows: each rounding judged given the subject's own values before it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from qualify.case import Case, CheckOutput
from qualify.checks_table import CheckRow
from qualify.compare import compare_exact, holds
from qualify.problem import Problem
from qualify.records import Comparison
from qualify.regimes import build_problem
from qualify.subjects import Subject
from references.faulty_qdq import faulty_qdq
from references.qdq import qdq_state, qdq_w
from references.wrong_answers import WRONG_ANSWERS
from suites.checks.evidence import device_of, fresh, outcome_of, output_of
from suites.checks.rows import DTYPES, OP, levels, profiles

Tensor = torch.Tensor

PAIRS: Mapping[str, tuple[str, str]] = {"w": ("w", "w_q"), "state": ("state_raw", "state_q")}
"""Site -> the stages before and after its rounding."""

DERIVATION = "the rounding of the subject's own values: an earlier rounding cannot excuse a later fault"


def run(case: Case, subject: Subject) -> CheckOutput:
    """Judges `w_q` given the subject's own `w`, `state_q` given its own `state_raw`, and both against the op.

    Args:
        case: levels of `qualify.regimes.AXES`.
        subject: what is judged.
    """
    problem = build_problem(case.levels, case.regime, case.seed, device_of(case))
    assert subject.stages is not None
    p = fresh(problem)
    shown = subject.stages(p.q, p.k, p.v, p.g, p.beta, **p.options())
    comparisons = [
        holds(
            "stages.named",
            int(not isinstance(shown, Mapping)),
            1,
            f"stages must return a mapping of tensors, got {type(shown).__name__}",
        )
    ]
    if isinstance(shown, Mapping):
        comparisons += _rounded(shown, problem)
        comparisons += _belongs(shown, problem, subject)
    return output_of(comparisons, problem)


def _rounded(shown: Mapping[str, Any], problem: Problem) -> list[Comparison]:
    found = []
    for site, (before, after) in PAIRS.items():
        x, y = shown.get(before), shown.get(after)
        if not isinstance(x, Tensor) or not isinstance(y, Tensor) or not x.numel():
            continue
        own = _key_first(x, problem) if site == "state" else x
        target = _site(site, problem)(own)
        excluded = tuple(
            name for name, wrong in _wrong(site, problem).items() if not torch.equal(wrong(own), target)
        )
        actual = _key_first(y, problem) if site == "state" else y
        found.append(
            compare_exact(f"stage.{after}", target, actual, derivation=DERIVATION, excluded=excluded)
        )
    return found


def _key_first(states: Tensor, problem: Problem) -> Tensor:
    """States `[..., K, V]`, also when a subject shows them value-first as the caller asked for."""
    turned = (problem.v.shape[-1], problem.k.shape[-1])
    if turned[0] != turned[1] and tuple(states.shape[-2:]) == turned:
        return states.mT.contiguous()
    return states


def _site(site: str, problem: Problem) -> Callable[[Tensor], Tensor]:
    """The contract's rounding of a site, the identity where it is off."""
    state, w, block = problem.state_format, problem.w_format, problem.state_block_v
    if site == "state":
        return lambda x: x if state is None else qdq_state(x, block_v=block, fmt=state)
    return lambda x: x if w is None else qdq_w(x, fmt=w)


def _wrong(site: str, problem: Problem) -> dict[str, Callable[[Tensor], Tensor]]:
    """Wrong roundings of one group at a time: only those tell from the values alone."""
    fmt = problem.state_format if site == "state" else problem.w_format
    if fmt is None:
        return {}
    block = problem.state_block_v if site == "state" else None
    found: dict[str, Callable[[Tensor], Tensor]] = {}
    for name, wrong in WRONG_ANSWERS.items():
        rule = getattr(wrong.semantics, site)
        if name.startswith(f"{site}_") and rule.scope == "group" and not rule.is_contract and rule.active:
            found[name] = lambda x, rule=rule: faulty_qdq(x, rule, fmt, block)  # type: ignore[misc]
    return found


def _belongs(shown: Mapping[str, Any], problem: Problem, subject: Subject) -> list[Comparison]:
    """What the stages end with is what the op returns: they are not another computation."""
    states = shown.get("state_q")
    if not isinstance(states, Tensor) or not subject.deterministic or not problem.output_final_state:
        return []
    final = outcome_of(subject, problem.with_(do=None, dht=None))["final_state"]
    assert final is not None
    last = _key_first(states, problem)[:, :, -1] if states.dim() == 5 else states
    last = last.mT.contiguous() if problem.state_v_first else last
    if last.shape != final.shape or not last.numel():
        return []  # shown in an arrangement of the subject's own
    return [
        compare_exact(
            "stage.final_state", last, final, derivation="the last stage is the op's own final state"
        )
    ]


ROWS = (
    CheckRow(
        "op.stages",
        "suites.checks.stages:run",
        "a rounding is judged given its own input, so that noise before it excuses nothing",
        needs=("stages", *OP),
        axes=levels("dtype", "sites", "format", "block_v", "layout")
        | {
            "packing": ("single", "docs", "unequal"),
            "length": ("65", "129"),
            "heads": ("32x48", "60x40"),
            "gates": ("ordinary", "zero"),
            "grouping": ("hv1", "hv2"),
        },
        regimes=("random", "near_tie", "huge", "zero_tile"),
        must_run=tuple({"dtype": dtype, "sites": "both"} for dtype in DTYPES),
        profiles=profiles("each", "pairs", quick={"dtype": ("bf16",), "length": ("65",), "sites": ("both",)}),
    ),
)
