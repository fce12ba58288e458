"""What the contract refuses: every such call must raise, and none may be accepted in silence."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from qualify.case import Case, CheckOutput
from qualify.checks_table import CheckRow
from qualify.compare import holds
from qualify.problem import CARRIERS, Problem
from qualify.records import Comparison
from qualify.regimes import build_problem
from qualify.subjects import Subject
from suites.checks.evidence import device_of, output_of
from suites.checks.rows import DTYPES, OP, profiles

Change = Callable[[Problem], Problem]

TOKENS = 33


def _boundaries(*ends: int, dtype: torch.dtype = torch.int64) -> Change:
    def change(problem: Problem) -> Problem:
        n = len(ends) - 1
        state = problem.initial_state
        initial = None if state is None else state[:1].repeat(max(n, 1), 1, 1, 1)
        ends_on_device = torch.tensor(ends, device=problem.k.device).to(dtype)
        return problem.with_(cu_seqlens=ends_on_device, initial_state=initial)

    return change


def _with(**changes: Any) -> Change:
    return lambda problem: problem.with_(**changes)


def _state(make: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    def change(problem: Problem) -> Problem:
        assert problem.initial_state is not None
        return problem.with_(initial_state=make(problem.initial_state))

    return change


def _cast(dtype: torch.dtype, *names: str) -> Change:
    return lambda problem: problem.with_(**{name: getattr(problem, name).to(dtype) for name in names})


def _of_another_carrier(name: str) -> Change:
    def change(problem: Problem) -> Problem:
        other = torch.bfloat16 if problem.k.dtype == torch.float32 else torch.float32
        return _cast(other, name)(problem)

    return change


def _batch_of_two(problem: Problem) -> Problem:
    twice = {
        n: getattr(problem, n).repeat(2, *[1] * (getattr(problem, n).dim() - 1))
        for n in ("q", "k", "v", "g", "beta")
    }
    return _boundaries(0, 20, TOKENS)(problem).with_(**twice)


REFUSED: Mapping[str, tuple[Change, str]] = MappingProxyType(
    {
        "unknown_state_format": (_with(state_format="e3m4"), "a format that is not supported"),
        "static_scale": (_with(state_format="e4m3_static"), "scales are dynamic"),
        "int8_w": (_with(w_format="int8"), "the W site knows e4m3 alone"),
        "unknown_w_format": (_with(w_format="fp4"), "a format that is not supported"),
        "block_v_48": (_with(state_block_v=48), "a tile width outside its set"),
        "block_v_0": (_with(state_block_v=0), "a tile width outside its set"),
        "block_v_256": (_with(state_block_v=256), "a tile width outside its set"),
        "boundaries_start_late": (_boundaries(3, TOKENS), "cu_seqlens that does not start at 0"),
        "boundaries_end_early": (_boundaries(0, TOKENS - 5), "cu_seqlens that does not end at T"),
        "boundaries_end_late": (_boundaries(0, 8, TOKENS + 4), "cu_seqlens that does not end at T"),
        "boundaries_decrease": (_boundaries(0, 20, 10, TOKENS), "cu_seqlens that decreases"),
        "boundaries_in_floats": (
            _boundaries(0, 20, TOKENS, dtype=torch.float32),
            "cu_seqlens that is not integer",
        ),
        "boundaries_with_batch": (_batch_of_two, "packed sequences with B > 1"),
        "initial_state_of_too_many": (_state(lambda s: s.repeat(2, 1, 1, 1)), "more states than sequences"),
        "initial_state_of_other_layout": (_state(lambda s: s.mT.contiguous()), "a state of the wrong shape"),
        "initial_state_of_fewer_heads": (
            _state(lambda s: s[:, :1].contiguous()),
            "a state of the wrong shape",
        ),
        "q_of_other_width": (lambda p: p.with_(q=p.q[..., :-8].contiguous()), "q and k of different K"),
        "v_of_fewer_tokens": (lambda p: p.with_(v=p.v[:, :-3].contiguous()), "v of another T"),
        "g_of_fewer_heads": (lambda p: p.with_(g=p.g[..., :-1].contiguous()), "g of another HV"),
        "beta_of_fewer_tokens": (lambda p: p.with_(beta=p.beta[:, :-3].contiguous()), "beta of another T"),
        "beta_of_one_head": (lambda p: p.with_(beta=p.beta[..., :1].contiguous()), "beta of another HV"),
        "g_of_every_channel": (
            lambda p: p.with_(g=p.g[..., None].repeat(1, 1, 1, p.k.shape[3])),
            "a decay for each key channel, which is another op's",
        ),
        "q_of_another_carrier": (_of_another_carrier("q"), "q, k and v that do not share a dtype"),
        "v_of_another_carrier": (_of_another_carrier("v"), "q, k and v that do not share a dtype"),
        "tokens_in_integers": (_cast(torch.int32, "q", "k", "v"), "q, k and v that are not floating point"),
        "heads_do_not_divide": (
            lambda p: p.with_(
                v=p.v[:, :, :3].contiguous(),
                g=p.g[..., :3].contiguous(),
                beta=p.beta[..., :3].contiguous(),
                initial_state=None,
            ),
            "HV that is not a multiple of H",
        ),
        "negative_without_sigmoid": (
            _with(allow_neg_eigval=True),
            "negative eigenvalues without the sigmoid",
        ),
        "gate_without_a_log": (_with(use_gate_in_kernel=True), "the fused gate without A_log"),
    }
)
"""Name -> how a good call is spoilt, and the rule that it breaks. Gates and states in integers and a gate's
parameter for all heads are not asked for: whoever takes them has one thing to make of them."""


def run_op(case: Case, subject: Subject) -> CheckOutput:
    """Judges that the op raises for everything that the contract refuses.

    Args:
        case: level of dtype.
        subject: what is judged.
    """
    levels = {"grouping": "hv2", "heads": "32x48", "length": str(TOKENS), "dtype": case.levels["dtype"]}
    problem = build_problem(levels, "random", case.seed, device_of(case))
    op = subject.chunk_gated_delta_rule
    assert op is not None
    comparisons = []
    for name, (spoil, rule) in REFUSED.items():
        p = spoil(problem)
        comparisons.append(_refused(name, rule, lambda p=p: op(p.q, p.k, p.v, p.g, p.beta, **p.options())))  # type: ignore[misc]
    return output_of(comparisons, problem)


def run_qdq(case: Case, subject: Subject) -> CheckOutput:
    """Judges that the QDQ functions raise for unknown formats and tiles.

    Args:
        case: level of dtype.
        subject: what is judged.
    """
    x = torch.ones(8, 48, dtype=CARRIERS[case.levels["dtype"]], device=device_of(case))
    state, w = subject.qdq_state, subject.qdq_w
    assert state is not None
    calls: dict[str, tuple[str, Callable[[], object]]] = {
        "unknown_format": ("a format that is not supported", lambda: state(x, block_v=16, fmt="e3m4")),
        "block_v_48": ("a tile width outside its set", lambda: state(x, block_v=48, fmt="e4m3")),
        "block_v_0": ("a tile width outside its set", lambda: state(x, block_v=0, fmt="e4m3")),
    }
    if w is not None:
        calls["int8_w"] = ("the W site knows e4m3 alone", lambda: w(x, fmt="int8"))
        calls["unknown_w_format"] = ("a format that is not supported", lambda: w(x, fmt="e3m4"))
    return CheckOutput(tuple(_refused(name, rule, call) for name, (rule, call) in calls.items()))


def _refused(name: str, rule: str, call: Callable[[], object]) -> Comparison:
    try:
        call()
    except Exception:  # noqa: BLE001 - a foreign subject refuses with whatever it likes
        accepted = 0
    else:
        accepted = 1
    return holds(
        f"refused.{name}", accepted, 1, f"accepted: {rule}", derivation=f"the contract refuses: {rule}"
    )


ROWS = (
    CheckRow(
        "op.refusals",
        "suites.checks.refusals:run_op",
        "a call outside the contract that goes through gives numbers that mean nothing",
        needs=OP,
        axes={"dtype": DTYPES},
        regimes=("random",),
        strength="each",
        must_run=({"dtype": "bf16"},),
        profiles=profiles("each", "each", quick={"dtype": ("bf16",)}),
    ),
    CheckRow(
        "qdq.refusals",
        "suites.checks.refusals:run_qdq",
        "a format or a tile that is not supported must not be replaced by another in silence",
        needs=("qdq_state",),
        axes={"dtype": DTYPES},
        regimes=("random",),
        strength="each",
        profiles=profiles("each", "each", quick={"dtype": ("bf16",)}),
    ),
)
