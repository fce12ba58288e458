"""Judging without tolerance: a problem on which every correct implementation gives the same bits."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property

import torch

from qualify.compare import Layout, compare_exact, layout_of
from qualify.problem import Outcome, Problem
from qualify.records import Comparison
from qualify.subjects import Subject
from references.wrong_answers import WRONG_ANSWERS, setting_of
from suites.checks.evidence import WrongResultError, dtype_of, outcome_of
from suites.oracle import expected

Tensor = torch.Tensor

Part = Callable[[Tensor], Tensor]
"""Takes the part of a tensor that is judged."""

KEPT = 24
"""Problems whose wrong answers are kept in a process."""

_naming: ContextVar[bool] = ContextVar("naming", default=True)


@contextmanager
def unnamed() -> Iterator[None]:
    """Within it, comparisons pass and fail as ever but name no wrong answer; a name costs an oracle run."""
    token = _naming.set(False)
    try:
        yield
    finally:
        _naming.reset(token)


@dataclass(eq=False)
class Exact:
    """A problem, what every correct implementation returns for it, and what wrong ones return.

    Attributes:
        problem: never handed to a subject itself.
        parts: the tensors that are judged, each with the part of it that is.
        derivation: why there is no tolerance.
        wrong: names of the wrong answers that it may exclude; None is all that apply.
        room: by tensor, how far fp32 factors that are no powers of two may move each element.
    """

    problem: Problem
    parts: dict[str, Part | None]
    derivation: str
    wrong: tuple[str, ...] | None = None
    room: Mapping[str, Tensor] = field(default_factory=dict)
    _answers: dict[str, dict[str, Tensor]] = field(default_factory=dict)

    @cached_property
    def expected(self) -> dict[str, Tensor]:
        """The judged parts by name, in the dtypes of the contract."""
        return self._parts_of(expected(self.problem))

    def _parts_of(self, outcome: Outcome) -> dict[str, Tensor]:
        found = {}
        for name, part in self.parts.items():
            x = outcome[name]
            if x is not None:
                x = x.to(dtype_of(self.problem, name))
                found[name] = part(x) if part is not None else x
        return {name: x for name, x in found.items() if x.numel()}

    def candidates(self) -> list[str]:
        """The wrong answers that can show on this problem."""
        p = self.problem
        setting = setting_of(
            p.q,
            p.k,
            p.v,
            p.g,
            p.beta,
            p.initial_state,
            do=p.do,
            dht=p.dht if p.output_final_state else None,
            cu_seqlens=p.cu_seqlens,
            state_format=p.state_format,
            w_format=p.w_format,
            state_block_v=p.state_block_v,
        )
        names = WRONG_ANSWERS if self.wrong is None else self.wrong
        wrong = (WRONG_ANSWERS[name] for name in names)
        return [w.name for w in wrong if not self.parts.keys().isdisjoint(w.touches) and w.applies(setting)]

    def answer(self, name: str) -> dict[str, Tensor]:
        """The judged parts of a wrong answer; what it does not touch is as expected."""
        if name not in self._answers:
            wrong = WRONG_ANSWERS[name]
            touched = self.parts.keys() & set(wrong.touches)
            backward = touched & self.problem.leaves().keys()
            problem = self.problem if backward else self.problem.with_(do=None, dht=None)
            found = expected(problem, semantics=wrong.semantics, gradients=backward)
            own = self._parts_of(Outcome({t: found[t] for t in touched}))
            self._answers[name] = {**self.expected, **own}
        return self._answers[name]

    def judge(self, outcome: Outcome, prefix: str = "") -> list[Comparison]:
        """Holds the judged parts of an outcome against the expected bits.

        Args:
            outcome: of a subject.
            prefix: put before the tensors' names.
        """
        wholes = {name for name, part in self.parts.items() if part is None}
        comparisons = []
        for name, target in self.expected.items():
            actual: object = outcome[name]
            part = self.parts[name]
            if actual is None and not bool(target.any()):
                actual = torch.zeros_like(target)  # autograd gives nothing where nothing arrives
            elif part is not None and isinstance(actual, Tensor):
                actual = _taken(part, actual)
            layout = layout_of(name, self.problem.cu_seqlens, dims=target.dim()) if name in wholes else None
            comparisons.append(self._compare(prefix + name, name, target, actual, layout))
        if all(c.passed for c in comparisons) or not _naming.get():
            return comparisons
        return [_named(c, self._resembled(outcome)) for c in comparisons]

    def _compare(
        self, shown: str, name: str, target: Tensor, actual: object, layout: Layout | None
    ) -> Comparison:
        wrong = self.candidates_kept if _naming.get() else []
        excluded = tuple(w for w in wrong if self._differs(name, self.answer(w), target))
        if name in self.room and isinstance(actual, Tensor) and not self._beyond(name, actual, target):
            actual = target
        return compare_exact(
            shown, target, actual, layout=layout, derivation=self.derivation, excluded=excluded
        )

    def _differs(self, name: str, answer: dict[str, Tensor], target: Tensor) -> bool:
        return name in answer and self._beyond(name, answer[name], target)

    def _beyond(self, name: str, x: Tensor, target: Tensor) -> bool:
        """Whether any element is further from its target than the tensor's room, or of another kind."""
        alike = (x.shape, x.dtype, x.device) == (target.shape, target.dtype, target.device)
        if name not in self.room or not alike:
            return not alike or not torch.equal(x, target)
        return not bool(((x.double() - target.double()).abs() <= self.room[name]).all())

    @cached_property
    def candidates_kept(self) -> list[str]:
        """`candidates`, once."""
        return self.candidates()

    def _resembled(self, outcome: Outcome) -> str | None:
        try:
            actual = self._parts_of(outcome)
        except (RuntimeError, IndexError, TypeError):
            return None
        for name in self.candidates_kept:
            answer = self.answer(name)
            if actual.keys() == answer.keys() and not any(
                self._beyond(t, actual[t], answer[t]) for t in actual
            ):
                return name
        return None


def _taken(part: Part, actual: Tensor) -> object:
    try:
        return part(actual)
    except (RuntimeError, IndexError):
        return actual  # of a shape that has no such part: the comparison says so


def _named(comparison: Comparison, name: str | None) -> Comparison:
    if comparison.passed or name is None:
        return comparison
    fields = {f: getattr(comparison, f) for f in comparison.__dataclass_fields__}
    return Comparison(**{**fields, "looks_like": name})


_kept: OrderedDict[Hashable, Exact] = OrderedDict()


def remembered(key: Hashable, make: Callable[[], Exact]) -> Exact:
    """The exact problem of a key, made once and kept while it is among the last `KEPT` that were used."""
    exact = _kept.pop(key) if key in _kept else make()
    _kept[key] = exact
    while len(_kept) > KEPT:
        _kept.popitem(last=False)
    return exact


def judged(subject: Subject, exacts: Sequence[tuple[str, Exact]]) -> list[Comparison]:
    """Runs a subject on some exact problems, each with a prefix for its tensors' names."""
    comparisons: list[Comparison] = []
    for prefix, exact in exacts:
        try:
            comparisons += exact.judge(outcome_of(subject, exact.problem), prefix)
        except WrongResultError as error:
            comparisons.append(error.comparison)
    return comparisons
