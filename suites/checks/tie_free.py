"""Tie-free problems: inputs for which no correct implementation can round W or a carried state to another
code.

Rounding to a grid is discontinuous, so noise that is allowed moves a few codes by a whole step, and the
budget of a whole run has to be as wide as that. Here keys and values are adjusted until every element that
the op rounds sits well inside the cell of its code. The op is then smooth, its budget is that of its linear
algebra, and what is left to see is whether the rounding is there and is the right one.

The states that are adjusted are those that a later chunk reads; a sequence's final state is judged element by
element instead (`suites.checks.chunk`).
"""

from __future__ import annotations

import itertools
from dataclasses import fields

import torch

from qualify.problem import Problem
from references.formats import Grid, grid_named, round_to_grid, steps_at
from references.qdq import qdq_state, qdq_w

Tensor = torch.Tensor

TIE_FREE = "tie_free"
"""The regime's name."""

CHUNK = 64
ASIDE = 0.12
"""How far from its code, in steps, an element is placed: the rounding stays visible, the boundary far."""
BETA = 0.25
"""Write strengths are scaled down by this, or repeated writes would make W a small difference of large
terms."""
SMALLEST = 0.45
"""Elements are at least about this fraction of the root mean square of their group: smaller ones have finer
cells."""


def place_in_cells(y: Tensor, grid: Grid, group: tuple[int, ...]) -> Tensor:
    """The nearest values to `y` that are well inside cells that are wide enough.

    Args:
        y: values over their scale, fp64; each group's largest magnitude is the largest code.
        grid: the grid.
        group: the axes that share a scale.
    """
    size = y.abs()
    least = SMALLEST * y.square().mean(group, keepdim=True).sqrt()
    least = torch.ldexp(torch.ones_like(least), torch.frexp(least).exponent)  # the next power of two
    size = torch.where(size < least, least * (1.0 + size / least * 0.9), size)
    top = y.abs().amax(group, keepdim=True)
    code = round_to_grid(torch.minimum(size, 0.93 * top), grid)
    above = (size >= code) | (torch.frexp(code).mantissa == 0.5)
    placed = code + torch.where(above, ASIDE, -ASIDE) * steps_at(code, grid)
    return torch.where(y.abs() >= top, y, torch.where(y < 0, -placed, placed))


def tie_free(problem: Problem) -> Problem:
    """`problem` with keys and values adjusted so that nothing it rounds is near a boundary.

    Args:
        problem: one q/k head for each value head when the W site is on; no in-kernel activations; gates weak
            enough that a chunk's tokens span the key dimension.

    Raises:
        ValueError: the problem is of another kind.
    """
    if problem.w_format and problem.k.shape[2] != problem.v.shape[2]:
        raise ValueError(
            "a tie-free W needs as many q/k heads as value heads; choose grouping hv1 or another site"
        )
    scaled = problem.with_(beta=problem.beta * BETA)
    work = _Work(scaled)
    for sequence, (row, start, end) in enumerate(work.spans):
        state = work.entry(sequence)
        for begin in range(start, end, CHUNK):
            stop = min(begin + CHUNK, end)
            state = work.chunk(row, begin, stop, state, carried=stop < end)
    return scaled.with_(k=work.keys().to(problem.k.device), v=work.values().to(problem.v.device))


def may_flip(problem: Problem) -> bool:
    """Whether noise can still reach over the cells of the state's grid: int8 has even steps, fine for large
    codes."""
    return problem.state_format == "int8"


def _on_cpu(problem: Problem) -> Problem:
    values = {f.name: getattr(problem, f.name) for f in fields(problem)}
    return problem.with_(**{name: x.cpu() for name, x in values.items() if isinstance(x, Tensor)})


class _Work:
    """The chunk form in fp64 for every head of one sequence at a time, with inputs that change on the way.

    Always on the CPU: token after token is no work for a GPU, and a case is the same on every machine.
    """

    def __init__(self, problem: Problem) -> None:
        p = self.problem = _on_cpu(problem)
        self.ratio = p.v.shape[2] // p.k.shape[2]
        self.k, self.v = p.k.double(), p.v.double()
        self.g, self.beta = p.g.double(), p.beta.double()
        if p.cu_seqlens is None:
            self.spans = [(b, 0, p.k.shape[1]) for b in range(p.k.shape[0])]
        else:
            self.spans = [(0, a, b) for a, b in itertools.pairwise(p.cu_seqlens.tolist())]

    def keys(self) -> Tensor:
        return self.k.to(self.problem.carrier)

    def values(self) -> Tensor:
        return self.v.to(self.problem.carrier)

    def entry(self, sequence: int) -> Tensor:
        p = self.problem
        if p.initial_state is None:
            return self.k.new_zeros(p.v.shape[2], p.k.shape[3], p.v.shape[3])
        state = p.initial_state[sequence].double()
        return self._rounded(state.mT if p.state_v_first else state)

    def _rounded(self, state: Tensor) -> Tensor:
        p = self.problem
        if p.state_format is None:
            return state
        return qdq_state(state.float(), block_v=p.state_block_v, fmt=p.state_format).double()

    def chunk(self, row: int, begin: int, stop: int, state: Tensor, *, carried: bool) -> Tensor:
        span = slice(begin, stop)
        g, beta = self.g[row, span].mT, self.beta[row, span].mT  # [HV, C]
        total = g.cumsum(-1)
        decay = (total.unsqueeze(-1) - total.unsqueeze(-2)).tril().exp().tril()
        if self.problem.w_format:
            self.k[row, span] = self._placed_keys(row, span, decay, total, beta).transpose(0, 1)
        k = self.k[row, span].transpose(0, 1).repeat_interleave(self.ratio, 0)
        v = self.v[row, span].transpose(0, 1)
        lower = (beta.unsqueeze(-1) * (k @ k.mT) * decay).tril(-1)
        solve = torch.linalg.inv(torch.eye(stop - begin, dtype=k.dtype) + lower)
        w = (solve @ ((beta * total.exp()).unsqueeze(-1) * k)).to(self.problem.carrier)
        w = (qdq_w(w, fmt=self.problem.w_format) if self.problem.w_format else w).double()
        write = ((total[:, -1:] - total).exp().unsqueeze(-1) * k).mT  # [HV, K, C]
        spread = write @ solve * beta.unsqueeze(-2)  # [HV, K, C]: what the values add to the state
        kept = total[:, -1].exp().view(-1, 1, 1) * state - write @ (w @ state)
        new = kept + spread @ v
        if carried and self.problem.state_format:
            v = self._placed_values(v, spread, new)
            self.v[row, span] = v.transpose(0, 1)
            new = kept + spread @ v
        return self._rounded(new)

    def _placed_keys(self, row: int, span: slice, decay: Tensor, total: Tensor, beta: Tensor) -> Tensor:
        grid = grid_named(self.problem.w_format or "e4m3")
        keys = self.k[row, span].transpose(0, 1).clone()  # [H, C, K]
        w = torch.zeros_like(keys)
        eye = torch.eye(keys.shape[-1], dtype=keys.dtype)
        for t in range(keys.shape[1]):
            past = (decay[:, t, :t].unsqueeze(-1) * w[:, :t]).mT @ keys[:, :t]
            matrix = beta[:, t].view(-1, 1, 1) * (total[:, t].exp().view(-1, 1, 1) * eye - past)
            base = (matrix @ keys[:, t].unsqueeze(-1)).squeeze(-1)
            scale = base.abs().amax(-1, keepdim=True) / grid.largest
            placed = place_in_cells(base / scale, grid, (-1,)) * scale
            key = torch.linalg.solve(matrix, placed)
            key = key / key.norm(dim=-1, keepdim=True)
            keys[:, t] = key.to(torch.bfloat16).double()
            w[:, t] = (matrix @ keys[:, t].unsqueeze(-1)).squeeze(-1)
        return keys

    def _placed_values(self, v: Tensor, spread: Tensor, new: Tensor) -> Tensor:
        grid = grid_named(self.problem.state_format or "e4m3")
        placed = torch.empty_like(new)
        width = self.problem.state_block_v
        for left in range(0, new.shape[-1], width):
            tile = new[..., left : left + width]
            scale = tile.abs().amax((-2, -1), keepdim=True) / grid.largest
            placed[..., left : left + width] = place_in_cells(tile / scale, grid, (-2, -1)) * scale
        inverse: Tensor = torch.linalg.pinv(spread)
        return (v + inverse @ (placed - new)).to(torch.bfloat16).double()
