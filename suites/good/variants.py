"""Good: the eager implementation with one part done in another, equally correct way."""

from __future__ import annotations

import math
from typing import ClassVar

import torch

from suites.subjects.eager import Call, EagerGDN, EagerQDQ, Notes, tf32

Tensor = torch.Tensor

LOG2_E = math.log2(math.e)


class Ieee(EagerGDN):
    """Every matmul operand stays fp32."""

    precision: ClassVar[dict[torch.dtype, str]] = dict.fromkeys(EagerGDN.precision, "ieee")


class TruncatedTf32(EagerGDN):
    """TF32 operands are cut, as tensor cores do with fp32 registers."""

    def operand(self, x: Tensor, n: Notes) -> Tensor:
        """The upper 19 bits."""
        if self.precision[n.carrier] != "tf32":
            return super().operand(x, n)
        cut = (x.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)
        return torch.where(torch.isfinite(x), cut, x)


class OtherPath(EagerGDN):
    """fp32 carriers: what is called with both sites off is another kernel, in full fp32."""

    def operand(self, x: Tensor, n: Notes) -> Tensor:
        """Rounded where a site is on."""
        off = n.options.state_format is None and n.options.w_format is None
        return x if off and n.carrier == torch.float32 else super().operand(x, n)


class OwnTotals(EagerGDN):
    """Gates are added up in a tree, and once more for the chunk as a whole."""

    def cumulate(self, g: Tensor, n: Notes) -> Tensor:
        """Each step adds what is twice as far away (Hillis and Steele)."""
        distance = 1
        while distance < g.shape[-1]:
            g = g + torch.nn.functional.pad(g[..., :-distance], (distance, 0))
            distance *= 2
        return g

    def total(self, n: Notes) -> Tensor:
        """A reduction, from the end."""
        return torch.stack(n.g.flip(-1).unbind(-1)).cumsum(0)[-1]


class OwnTotalsIeee(OwnTotals, Ieee):
    """The same where nothing else hides it."""


class Substitution(EagerGDN):
    """The system is solved for each right side, and its inverse never made."""

    def inverse(self, lower: Tensor, n: Notes) -> Tensor:
        """The system itself."""
        return lower + torch.eye(n.at.C, dtype=lower.dtype, device=lower.device)

    def solve(self, n: Notes, right: Tensor) -> Tensor:
        """By forward substitution."""
        found: Tensor = torch.linalg.solve_triangular(n.inverse, right, upper=False, unitriangular=True)
        return found

    def solve_adjoint(self, n: Notes, right: Tensor) -> Tensor:
        """By backward substitution."""
        found: Tensor = torch.linalg.solve_triangular(n.inverse.mT, right, upper=True, unitriangular=True)
        return found


class ExplicitInverse(EagerGDN):
    """The inverse comes from a general factorisation with pivots."""

    def inverse(self, lower: Tensor, n: Notes) -> Tensor:
        """Blind to the triangle, so rounding errors fill the upper one."""
        eye = torch.eye(n.at.C, dtype=lower.dtype, device=lower.device)
        found: Tensor = torch.linalg.inv(eye + lower)
        return found


class Merged(EagerGDN):
    """Blocks of 16 rows are inverted by substitution and merged in pairs, as GPU kernels do."""

    def inverse(self, lower: Tensor, n: Notes) -> Tensor:
        """Merges until one block is left; `[[A, 0], [B, C]]` has the inverse `[[A', 0], [-C' B A', C']]`."""
        rows = lower.shape[-1]
        size = max(16, 1 << (rows - 1).bit_length())
        system = torch.eye(size, dtype=lower.dtype, device=lower.device).expand(*lower.shape[:-2], -1, -1)
        system = system.clone()
        system[..., :rows, :rows] += lower
        found = torch.zeros_like(system)
        for i in range(0, size, 16):
            block = system[..., i : i + 16, i : i + 16]
            eye = torch.eye(16, dtype=lower.dtype, device=lower.device).expand_as(block)
            found[..., i : i + 16, i : i + 16] = torch.linalg.solve_triangular(
                block, eye, upper=False, unitriangular=True
            )
        width = 16
        while width < size:
            for i in range(0, size, 2 * width):
                upper, below = slice(i, i + width), slice(i + width, i + 2 * width)
                found[..., below, upper] = -(
                    found[..., below, below] @ system[..., below, upper] @ found[..., upper, upper]
                )
            width *= 2
        return found[..., :rows, :rows]


class InverseAdjoint(EagerGDN):
    """The adjoint of the solve goes through the inverse: only the rounded W is saved.

    With `T = (I + L)^-1` and `U, W = T R`: `dL = -T^T (dU R_U^T + dW R_W^T) T^T`.
    """

    def through_solve(self, n: Notes) -> None:
        """The part that passes L is replaced; the rest is the same."""
        super().through_solve(n)
        decayed = self.decay(n.G)[..., None] * n.k
        sides = self.dot(n.dvn, (n.beta[..., None] * n.v).mT, n)
        sides = sides + self.dot(n.dw, (n.beta[..., None] * decayed).mT, n)
        dlower = -self.dot(self.dot(n.inverse.mT, self.store(sides, n), n), n.inverse.mT, n).tril(-1)
        self.replace_system(n, dlower)

    def replace_system(self, n: Notes, dlower: Tensor) -> None:
        """Takes the terms of the old `dlower` out of the gradients and puts the new one's in."""
        change = (dlower - n.dlower) * n.gam
        n.dbeta = n.dbeta + (change * n.kk).sum(-1)
        scaled = change * n.beta[..., None]
        n.dk = n.dk + self.dot(scaled, n.k, n) + self.dot(scaled.mT, n.k, n)
        flow = (dlower - n.dlower) * n.lower
        n.dcum = n.dcum + flow.sum(-1) - flow.sum(-2)
        n.dlower = dlower


class StateCopies(EagerGDN):
    """bf16 carriers keep the states between chunks as bf16 copies for the readout and the backward."""

    def copies(self, n: Notes) -> Tensor:
        """What the carrier holds of the states; the carried state stays fp32."""
        return n.states.bfloat16().to(self.work) if n.carrier == torch.bfloat16 else n.states

    def read(self, n: Notes) -> Tensor:
        """Reads the copies."""
        return super().read(Notes(**{**vars(n), "states": self.copies(n)}))

    def states_for_backward(self, n: Notes) -> Tensor:
        """The copies."""
        return self.copies(n)

    def store(self, x: Tensor, n: Notes) -> Tensor:
        """Intermediates in the carrier."""
        return x.bfloat16().float() if n.carrier == torch.bfloat16 else super().store(x, n)


class ReversedSums(EagerGDN):
    """Every sum of a matmul runs from the end."""

    def dot(self, a: Tensor, b: Tensor, n: Notes) -> Tensor:
        """The same products in the opposite order."""
        return super().dot(a.flip(-1), b.flip(-2), n)


class SplitSums(EagerGDN):
    """Matmuls are split into slices of 16 that are added pairwise."""

    def dot(self, a: Tensor, b: Tensor, n: Notes) -> Tensor:
        """Every second slice first."""
        starts = range(0, a.shape[-1], 16)
        slices = [super(SplitSums, self).dot(a[..., i : i + 16], b[..., i : i + 16, :], n) for i in starts]
        even, odd = slices[::2], slices[1::2]
        total = sum(even[1:], even[0]) if even else super().dot(a, b, n)
        return total + sum(odd[1:], odd[0]) if odd else total


class OtherStrides(EagerGDN):
    """Outputs and gradients are views of larger, transposed memory."""

    def leave(self, x: Tensor) -> Tensor:
        """The same values, not contiguous."""
        shape = [*x.shape]
        shape[1], shape[2] = shape[2], shape[1]
        shape[-1] += 5
        larger = torch.full(shape, torch.nan, dtype=x.dtype, device=x.device)
        view = larger[..., :-5].transpose(1, 2) if x.dim() == 4 else larger.transpose(1, 2)[:, :-5]
        return view.copy_(x) if view.shape == x.shape else x

    def scatter(self, y: Tensor, like: Tensor, n: Notes) -> Tensor:
        """Tokens of `o` and of every gradient, not contiguous."""
        return self.leave(super().scatter(y, like, n))


class Recomputed(EagerGDN):
    """The backward keeps nothing and runs the forward again."""

    def rule(self, call: Call) -> tuple[Tensor, Tensor]:
        """Through activation checkpointing."""
        from torch.utils.checkpoint import checkpoint

        found: tuple[Tensor, Tensor] = checkpoint(super().rule, call, use_reentrant=False)
        return found


class BinaryExponentials(EagerGDN):
    """Decays are powers of two of gates in units of log 2, as GPU kernels compute them."""

    def decay(self, G: Tensor) -> Tensor:
        """`2^(G log2 e)`."""
        return torch.exp2(G * LOG2_E)


class CarrierGroups(EagerGDN):
    """Each value head's dq and dk is rounded to the carrier before the group is summed."""

    def scatter(self, y: Tensor, like: Tensor, n: Notes) -> Tensor:
        """The rounding is the carrier's, the sum is fp32."""
        grouped = like.dim() == 4 and like.shape[2] != n.HV
        return super().scatter(y.to(like.dtype).to(self.work) if grouped else y, like, n)


class WholeChunks(EagerGDN):
    """Sequences are padded to whole chunks, packed one behind the other, and cut again."""

    def rule(self, call: Call) -> tuple[Tensor, Tensor]:
        """The padding has no decay and writes nothing."""
        B, T = call.k.shape[:2]
        spans = self.boundaries(call.cu_seqlens, B, T)
        ends = [0]
        source, target = [], []
        for start, end in spans:
            source += list(range(start, end))
            target += list(range(ends[-1], ends[-1] + end - start))
            ends.append(ends[-1] + -(-(end - start) // 64) * 64)
        there = torch.tensor(target, device=call.k.device, dtype=torch.int64)
        here = torch.tensor(source, device=call.k.device, dtype=torch.int64)
        tokens = ("q", "k", "v", "g", "beta")
        padded = {
            name: torch.zeros(ends[-1], *x.shape[2:], dtype=x.dtype, device=x.device)
            .index_copy(0, there, x.flatten(0, 1)[here])
            .unsqueeze(0)
            for name in tokens
            for x in (getattr(call, name),)
        }
        packed = Call(**{**vars(call), **padded, "cu_seqlens": torch.tensor(ends)})
        o, final = super().rule(packed)
        return o[0, there].reshape(call.v.shape), final


class CastCodes(EagerQDQ):
    """Codes of E4M3 come from the framework's own cast."""

    def nearest(self, y: Tensor, step: Tensor) -> Tensor:
        """A cast there and back; integers by rounding."""
        if bool((step == 1.0).all()):
            return super().nearest(y, step)
        return y.to(torch.float8_e4m3fn).float()


class Cast(EagerGDN):
    """The grid is the framework's."""

    qdq = CastCodes()


class Unordered(EagerGDN):
    """Sums are taken in an order that changes from call to call, and the subject says so."""

    calls = 0

    def prepare(self, call: Call) -> None:
        """Another turn."""
        super().prepare(call)
        self.calls += 1

    def dot(self, a: Tensor, b: Tensor, n: Notes) -> Tensor:
        """Every second call runs backwards."""
        return super().dot(a.flip(-1), b.flip(-2), n) if self.calls % 2 else super().dot(a, b, n)


class Tf32Everywhere(EagerGDN):
    """16-bit carriers too keep intermediates to TF32."""

    def operand(self, x: Tensor, n: Notes) -> Tensor:
        """Eleven bits."""
        return tf32(x)


class OnePass(EagerGDN):
    """What the forward saved is given back by the first backward, and a second one is refused."""

    def through_solve(self, n: Notes) -> None:
        """As ever, once."""
        if "spent" in vars(n):
            raise RuntimeError("a backward pass must be the only one of its forward, got a second; run both")
        super().through_solve(n)
        n.spent = True
