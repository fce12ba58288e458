"""Relations between runs of one subject: two ways to ask for the same thing give the same answer.

Both ways have their own rounding errors, so each pair is held within a budget from the noise of the oracle,
in the same metrics as the whole op. Where the two runs do the same arithmetic the difference is far
smaller; where nothing that is used has changed (causality in the past, another document's values) it is zero.

The state site is on only where a relation cuts nothing but chunk boundaries; W keeps its site, since its
rows are rounded one by one. A flip that one of the two runs has and the other has not is part of the noise.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from qualify.case import Case, CheckOutput
from qualify.checks_table import CheckRow
from qualify.compare import Limits, compare_budget, holds
from qualify.problem import Outcome, Problem
from qualify.records import Comparison
from qualify.subjects import Subject
from suites.checks.evidence import (
    Evidence,
    WrongResultError,
    dtype_of,
    evidence_of,
    outcome_of,
    output_of,
)
from suites.checks.rows import OP, levels, profiles
from suites.oracle import activated

Tensor = torch.Tensor
Run = Callable[[Problem], Outcome]


@dataclass(frozen=True)
class Relation:
    """Another way to ask for the outcome of a problem.

    Attributes:
        levels: what the problem must be like, over the levels of the case.
        other: runs the subject the other way and puts the pieces together.
        because: what goes wrong when the two disagree.
        same_bits: whether the two ways do the same arithmetic on the same numbers for a kernel of any kind.
    """

    levels: Mapping[str, str]
    other: Callable[[Run, Problem], Outcome]
    because: str


def run(case: Case, subject: Subject) -> CheckOutput:
    """Runs a subject in two ways and compares the outcomes.

    Args:
        case: the axis `relation` names a row of `RELATIONS`; further axes as in `qualify.regimes.AXES`.
        subject: what is judged.
    """
    relation = RELATIONS[case.levels["relation"]]
    evidence = evidence_of(case, subject, **relation.levels)
    problem = evidence.problem
    ran: list[Problem] = []

    def run_one(other: Problem) -> Outcome:
        ran.append(other)
        return outcome_of(subject, other)

    try:
        straight = run_one(problem)
        comparisons = compare_outcomes(
            evidence, straight, relation.other(run_one, problem), case.levels["relation"]
        )
    except WrongResultError as error:
        comparisons = [error.comparison]
    return output_of(comparisons, *ran)


def compare_outcomes(evidence: Evidence, one: Outcome, two: Outcome, relation: str) -> list[Comparison]:
    """Holds the difference of two outcomes within the budget of each tensor.

    Args:
        evidence: budgets of the problem; the reference is `one`, so that both runs may use them.
        one, two: outcomes of the same subject.
        relation: what relates them.
    """
    comparisons = []
    for name, expected in evidence.tensors().items():
        a, b = (_present(x[name], expected, dtype_of(evidence.problem, name)) for x in (one, two))
        if not bool(torch.isfinite(a).all()):
            comparisons.append(holds(f"{name}.finite", 1, 1, f"{relation}: the first run is not finite"))
            continue
        found = compare_budget(
            name,
            a.detach().double(),
            b,
            _doubled(evidence.limits[name]),
            evidence.layouts[name],
            dtype=dtype_of(evidence.problem, name),
            kind="relation",
        )
        comparisons.append(found)
    return comparisons


TWO_ERRORS = 1.5
"""Two runs each have an error of their own; independent ones differ by the root of two."""


def _doubled(limits: Limits) -> Limits:
    return Limits(
        total=TWO_ERRORS * limits.total,
        head=TWO_ERRORS * limits.head,
        block=TWO_ERRORS * limits.block,
        element=TWO_ERRORS * limits.element,
        derivation=f"{TWO_ERRORS:g} x ({limits.derivation}), for the errors of two runs",
    )


def _present(x: Tensor | None, expected: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros_like(expected, dtype=dtype) if x is None else x


def _bounds(problem: Problem) -> list[int]:
    assert problem.cu_seqlens is not None
    return [int(n) for n in problem.cu_seqlens.tolist()]


def _slice_tokens(problem: Problem, start: int, end: int, **changes: object) -> Problem:
    """The tokens of one span as a problem of its own, not packed."""
    parts = {name: getattr(problem, name)[:, start:end] for name in ("q", "k", "v", "g", "beta")}
    do = None if problem.do is None else problem.do[:, start:end]
    return problem.with_(**parts, do=do, cu_seqlens=None, **changes)


_TOKENS = ("o", "dq", "dk", "dv", "dg", "dbeta")
_STATES = ("final_state", "dh0")


def _joined(pieces: list[Outcome], axis: int, state_axis: int | None = None) -> Outcome:
    """Outcomes of pieces side by side: token tensors along `axis`, states along `state_axis`."""
    tensors: dict[str, Tensor | None] = {}
    for name in pieces[0].tensors:
        at = state_axis if name in _STATES else axis
        found = [x for p in pieces if (x := p[name]) is not None]
        tensors[name] = torch.cat(found, at) if at is not None and len(found) == len(pieces) else None
    return Outcome(tensors)


def _separate(run: Run, problem: Problem) -> Outcome:
    """Every document by itself."""
    bounds = _bounds(problem)
    pieces = []
    for i, (start, end) in enumerate(itertools.pairwise(bounds)):
        initial = None if problem.initial_state is None else problem.initial_state[i : i + 1]
        dht = None if problem.dht is None else problem.dht[i : i + 1]
        pieces.append(run(_slice_tokens(problem, start, end, initial_state=initial, dht=dht)))
    return _joined(pieces, 1, 0)


def _split_at(cut: int) -> Callable[[Run, Problem], Outcome]:
    """Two runs, the state handed over forward and its gradient backward."""

    def other(run: Run, problem: Problem) -> Outcome:
        tokens = problem.k.shape[1]
        first = _slice_tokens(problem, 0, cut).with_(dht=None, do=None)
        middle = run(first.with_(output_final_state=True))["final_state"]
        late = run(_slice_tokens(problem, cut, tokens, initial_state=middle))
        do = None if problem.do is None else problem.do[:, :cut]
        early = run(first.with_(do=do, dht=late["dh0"], output_final_state=True))
        tensors = _joined([early, late], 1).tensors
        tensors |= {"final_state": late["final_state"], "dh0": early["dh0"]}
        return Outcome(tensors)

    return other


def _repeated_heads(run: Run, problem: Problem) -> Outcome:
    """q and k repeated to the value heads, their gradients summed again in fp64."""
    ratio = problem.v.shape[2] // problem.k.shape[2]
    q, k = (x.repeat_interleave(ratio, 2) for x in (problem.q, problem.k))
    found = run(problem.with_(q=q, k=k))
    tensors = dict(found.tensors)
    for name in ("dq", "dk"):
        x = tensors[name]
        if x is not None:
            tensors[name] = x.double().reshape(*x.shape[:2], -1, ratio, x.shape[3]).sum(3).to(x.dtype)
    return Outcome(tensors)


def _other_order(run: Run, problem: Problem) -> Outcome:
    """The sequences of a batch in reverse."""
    found = run(_map(problem, lambda x: x.flip(0)))
    return Outcome({name: None if x is None else x.flip(0) for name, x in found.tensors.items()})


def _other_documents(run: Run, problem: Problem) -> Outcome:
    """The documents of a pack in reverse."""
    bounds = _bounds(problem)
    spans = list(itertools.pairwise(bounds))
    there = torch.cat([torch.arange(a, b) for a, b in reversed(spans)]).to(problem.k.device)
    back = torch.argsort(there)
    lengths = torch.tensor([b - a for a, b in reversed(spans)], device=there.device)
    cu = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(problem.cu_seqlens)
    moved = _map(problem, lambda x: x.index_select(1, there), lambda x: x.flip(0)).with_(cu_seqlens=cu)
    found = run(moved)
    return Outcome(
        {
            name: None if x is None else (x.flip(0) if name in _STATES else x.index_select(1, back))
            for name, x in found.tensors.items()
        }
    )


def _map(
    problem: Problem, tokens: Callable[[Tensor], Tensor], states: Callable[[Tensor], Tensor] | None = None
) -> Problem:
    changes = {n: tokens(getattr(problem, n)) for n in ("q", "k", "v", "g", "beta")}
    if problem.do is not None:
        changes["do"] = tokens(problem.do)
    for name in ("initial_state", "dht"):
        x = getattr(problem, name)
        if x is not None:
            changes[name] = (states or tokens)(x)
    return problem.with_(**changes)


def _padded(run: Run, problem: Problem) -> Outcome:
    """Tokens that write nothing, decay nothing and are not looked at, at the end of every sequence."""
    extra = 9
    tokens = problem.k.shape[1]

    def pad(x: Tensor, value: float = 0.0) -> Tensor:
        tail = torch.full((x.shape[0], extra, *x.shape[2:]), value, dtype=x.dtype, device=x.device)
        return torch.cat([x, tail], 1)

    longer = problem.with_(
        q=pad(problem.q, 0.25),
        k=pad(problem.k, 0.25),
        v=pad(problem.v, 0.5),
        g=pad(problem.g),
        beta=pad(problem.beta),
        do=None if problem.do is None else pad(problem.do),
    )
    found = run(longer)
    return Outcome({n: x if x is None or n in _STATES else x[:, :tokens] for n, x in found.tensors.items()})


def _other_layout(run: Run, problem: Problem) -> Outcome:
    """States in the other layout."""

    def turned(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.mT.contiguous()

    found = run(
        problem.with_(
            initial_state=turned(problem.initial_state),
            dht=turned(problem.dht),
            state_v_first=not problem.state_v_first,
        )
    )
    return Outcome({n: turned(x) if n in _STATES else x for n, x in found.tensors.items()})


def _contiguous(run: Run, problem: Problem) -> Outcome:
    """Contiguous copies of every input and incoming gradient."""
    return run(_map(problem, lambda x: x.contiguous()))


def _future(run: Run, problem: Problem) -> Outcome:
    """Everything from a token inside the second chunk on replaced; what comes before must not notice.

    The replaced part of the outcome, and the gradients that depend on it, are taken from an unchanged run.
    """
    cut = 77

    def changed(x: Tensor) -> Tensor:
        return torch.cat([x[:, :cut], x[:, cut:].flip(1)], 1)

    before, after = run(problem), run(_map(problem, changed, lambda x: x))
    tensors = dict(before.tensors)
    for name in ("o", "dq"):
        old, new = before[name], after[name]
        if old is not None and new is not None:
            tensors[name] = torch.cat([new[:, :cut], old[:, cut:]], 1)
    return Outcome(tensors)


def _outside(run: Run, problem: Problem) -> Outcome:
    """Gates, normalisation and sigmoid outside of the op, differentiated by hand over."""
    leaves = {n: leaf.detach().double().requires_grad_() for n, leaf in problem.leaves().items()}
    with torch.enable_grad():
        active = dict(zip(("dq", "dk", "dg", "dbeta"), activated(problem, leaves), strict=True))
    dtypes = {"dq": problem.carrier, "dk": problem.carrier, "dg": torch.float32, "dbeta": torch.float32}
    given = {n: x.detach().to(dtypes[n]) for n, x in active.items()}
    found = run(
        problem.with_(
            q=given["dq"],
            k=given["dk"],
            g=given["dg"],
            beta=given["dbeta"],
            use_qk_l2norm_in_kernel=False,
            use_beta_sigmoid_in_kernel=False,
            allow_neg_eigval=False,
            use_gate_in_kernel=False,
            A_log=None,
            dt_bias=None,
        )
    )
    tensors = {n: found[n] for n in ("o", "final_state", "dv", "dh0")}
    behind = [n for n in leaves if n not in ("dv", "dh0")]
    outputs = {n: x for n, x in active.items() if found[n] is not None}
    upstream = [found[n].double() for n in outputs]  # type: ignore[union-attr]
    grads = torch.autograd.grad(list(outputs.values()), [leaves[n] for n in behind], upstream)
    return Outcome(tensors | {n: x.to(problem.leaves()[n].dtype) for n, x in zip(behind, grads, strict=True)})


def _half_gradients(run: Run, problem: Problem) -> Outcome:
    """Gradients of output and final state taken apart and added: the backward is linear in them."""
    parts = [run(problem.with_(dht=None)), run(problem.with_(do=None))]
    tensors: dict[str, Tensor | None] = {n: parts[0][n] for n in ("o", "final_state")}
    for name in parts[0].tensors:
        a, b = (p[name] for p in parts)
        if name not in tensors:
            tensors[name] = a if b is None else b if a is None else (a.double() + b.double()).to(a.dtype)
    return Outcome(tensors)


_FUSED = {"packing": "batch", "sites": "both"}
_DENSE = {"packing": "single", "length": "145", "sites": "both"}

RELATIONS: Mapping[str, Relation] = MappingProxyType(
    {
        "separate": Relation(
            {"packing": "unequal", "sites": "both"}, _separate, "state or gradient passes a packing boundary"
        ),
        "separate_docs": Relation(
            {"packing": "docs", "sites": "both"}, _separate, "boundaries off the chunk grid are mistaken"
        ),
        "split_64": Relation(
            _DENSE, _split_at(64), "a handed-over state or its gradient is not the one carried"
        ),
        "split_128": Relation(
            _DENSE, _split_at(128), "a handed-over state or its gradient is not the one carried"
        ),
        "split_anywhere": Relation(
            {"packing": "single", "length": "145", "sites": "none"},
            _split_at(41),
            "chunks counted from another start change the answer",
        ),
        "repeated_heads": Relation(
            {"grouping": "hv4", "packing": "single", "sites": "both"},
            _repeated_heads,
            "a value head reads another q/k head",
        ),
        "batch_order": Relation(
            {"packing": "batch", "sites": "both"}, _other_order, "sequences of a batch see one another"
        ),
        "document_order": Relation(
            {"packing": "docs", "sites": "both"}, _other_documents, "documents of a pack see one another"
        ),
        "padding": Relation(
            {"packing": "batch", "sites": "both"}, _padded, "tokens that write nothing change something"
        ),
        "layout": Relation(
            {"packing": "batch", "sites": "both"}, _other_layout, "one of the two layouts is mistaken"
        ),
        "views": Relation(
            {"strides": "views", "gradients": "strided", "packing": "batch", "sites": "both"},
            _contiguous,
            "strides are ignored",
        ),
        "causality": Relation(_DENSE, _future, "a token sees what comes after it"),
        "norm_outside": Relation(
            _FUSED | {"fused": "norm"}, _outside, "the inner normalisation is another one"
        ),
        "sigmoid_outside": Relation(
            _FUSED | {"fused": "sigmoid"}, _outside, "the inner sigmoid is another one"
        ),
        "negative_outside": Relation(
            _FUSED | {"fused": "neg"}, _outside, "the doubled sigmoid is another one"
        ),
        "gate_outside": Relation(_FUSED | {"fused": "gate"}, _outside, "the inner gate is another one"),
        "linear_gradient": Relation(
            {"packing": "single", "sites": "both"},
            _half_gradients,
            "an incoming gradient is ignored or counted twice",
        ),
    }
)
"""Name -> relation."""


ROWS = (
    CheckRow(
        "op.relations",
        "suites.checks.relations:run",
        "two ways to ask for the same thing agree",
        needs=OP,
        axes=levels("dtype", "format")
        | {
            "relation": tuple(RELATIONS),
            "heads": ("16x16", "32x48"),
            "gates": ("zero", "ordinary", "mixed"),
            "block_v": ("16", "32"),
            "length": ("145",),
        },
        regimes=("random",),
        must_run=tuple({"relation": relation} for relation in RELATIONS),
        profiles=profiles("pairs", "pairs", quick={"dtype": ("bf16",)}),
    ),
)
