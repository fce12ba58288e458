"""Good: written out sequence by sequence, and differentiated by autograd alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from suites.subjects.eager import Call, EagerGDN

Tensor = torch.Tensor

CHUNK = 64


@dataclass
class Sequence:
    """One sequence, heads first: q, k `[HV, T, K]`, v `[HV, T, V]`, g, beta `[HV, T]`."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor

    def tokens(self, start: int, end: int) -> Sequence:
        """A span of tokens."""
        return Sequence(*(x[:, start:end] for x in vars(self).values()))


class Plain(EagerGDN):
    """The chunk form in autograd; each rounding passes its gradient by `y.detach() + (x - x.detach())`."""

    compute: torch.dtype = torch.float32

    def rule(self, call: Call) -> tuple[Tensor, Tensor]:
        """`o` and the final states, one sequence after the other."""
        B, T, H, K = call.k.shape
        HV, V = call.v.shape[2:]
        flat = {
            name: self.heads_first(getattr(call, name), HV // H if name in "qk" else 1)
            for name in ("q", "k", "v", "g", "beta")
        }
        outputs, finals = [], []
        for number, (start, end) in enumerate(self.boundaries(call.cu_seqlens, B, T)):
            state = torch.zeros(HV, K, V, dtype=self.compute, device=call.k.device)
            if call.h0 is not None:
                given = call.h0[number].to(self.compute)
                state = given.mT if call.state_v_first else given
            sequence = Sequence(**{name: x[:, start:end] for name, x in flat.items()})
            o, final = self.sequence(sequence, state, call)
            outputs.append(o)
            finals.append(final.mT if call.state_v_first else final)
        o = torch.cat(outputs, 1).transpose(0, 1).reshape(B, T, HV, V).to(call.v.dtype)
        return o, torch.stack(finals).float().contiguous()

    def heads_first(self, x: Tensor, times: int) -> Tensor:
        """`[B, T, H, ...]` as `[H * times, B * T, ...]` in the compute dtype."""
        return x.flatten(0, 1).transpose(0, 1).to(self.compute).repeat_interleave(times, 0)

    def sequence(self, s: Sequence, state: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        """`o` `[HV, T, V]` and the final state of one sequence."""
        state, outputs = self.rounded_state(state, call), []
        for start in range(0, s.k.shape[1], CHUNK):
            o, state = self.chunk(s.tokens(start, start + CHUNK), state, call)
            state = self.rounded_state(state, call)
            outputs.append(o)
        return torch.cat(outputs, 1) if outputs else s.v, state

    def chunk(self, s: Sequence, state: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        """`o` and the outgoing state of one chunk, not yet rounded."""
        total = s.g.cumsum(1)
        size = total.shape[1]
        below = torch.ones(size, size, dtype=torch.bool, device=total.device).tril()
        gap = self.decay((total[:, :, None] - total[:, None, :]).masked_fill(~below, -torch.inf))
        lower = (s.beta[..., None] * (s.k @ s.k.mT) * gap).tril(-1)
        right = torch.cat([s.beta[..., None] * s.v, (s.beta * self.decay(total))[..., None] * s.k], -1)
        solved, values = self.solved(lower, right), s.v.shape[-1]
        u, w = solved[..., :values], solved[..., values:]
        w = self.rounded_w(w.to(call.k.dtype), call).to(self.compute)
        new = u - w @ state
        scores = call.scale * (s.q @ s.k.mT) * gap
        o = (call.scale * self.decay(total))[..., None] * (s.q @ state) + scores @ new
        kept = self.decay(total[:, -1:] - total)[..., None] * s.k
        return o, self.decay(total[:, -1])[:, None, None] * state + kept.mT @ new

    def solved(self, lower: Tensor, right: Tensor) -> Tensor:
        """`(I + L)^-1 right`, without the inverse."""
        eye = torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device)
        found: Tensor = torch.linalg.solve_triangular(eye + lower, right, upper=False, unitriangular=True)
        return found

    def rounded_state(self, state: Tensor, call: Call) -> Tensor:
        """The state site."""
        fmt, width = call.state_format, call.state_block_v
        if fmt is None:
            return state
        return detached(state, lambda x: self.qdq.state_values(x.float(), width, fmt))

    def rounded_w(self, w: Tensor, call: Call) -> Tensor:
        """The W site."""
        fmt = call.w_format
        return w if fmt is None else detached(w, lambda x: self.qdq.w_values(x, fmt))


def detached(x: Tensor, values: Callable[[Tensor], Tensor]) -> Tensor:
    """`values(x)` with the gradient of `x`; the sum is exact, since one of its terms is zero."""
    kept = x.detach()
    return values(kept).to(x.dtype) + (x - kept)


class PlainInDouble(Plain):
    """The same with everything inside in fp64."""

    compute = torch.float64


class PlainInPowersOfTwo(Plain):
    """The same with gates in units of log 2: dg is multiplied by ln 2 and by log2 e on its way back."""

    def chunk(self, s: Sequence, state: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        """As the chunk form, of scaled gates."""
        return super().chunk(replace(s, g=s.g * math.log2(math.e)), state, call)

    def decay(self, G: Tensor) -> Tensor:
        """`2^G`."""
        return torch.exp2(G)


class TokenByToken(Plain):
    """The recurrence, token by token, where W has no site; the state is rounded every 64 tokens."""

    def chunk(self, s: Sequence, state: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        """As the chunk form, without it."""
        if call.w_format is not None:
            return super().chunk(s, state, call)
        outputs = []
        for q, k, v, g, beta in zip(*(x.unbind(1) for x in vars(s).values()), strict=True):
            state = g.exp()[:, None, None] * state
            wrong = v - (k[:, None, :] @ state).squeeze(1)
            state = state + k[:, :, None] * (beta[:, None] * wrong)[:, None, :]
            outputs.append(call.scale * (q[:, None, :] @ state).squeeze(1))
        return torch.stack(outputs, 1), state
