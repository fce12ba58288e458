"""Eager: Gated DeltaNet with both rounding sites in plain torch and low precision, as a GPU kernel does it.

Matmul operands are rounded to the declared precision, sums are kept in fp32, W is materialised in the
carrier, and the backward is written by hand. Nothing here is shared with the oracles or with the kernels.
Every step is a small method, so that a variant (correct, or a planted fault) overrides one of them.

Source of the arithmetic: the chunk form of the contract (WY representation of the gated delta rule).
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F  # noqa: N812

Tensor = torch.Tensor

CARRIER_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BLOCK_V = (16, 32, 64, 128)
LARGEST = {"e4m3": 448.0, "int8": 127.0}
SMALLEST_NORMAL = 2.0**-126


class EagerQDQ:
    """Rounding to a grid and back, one scale per group, with an identity gradient."""

    def largest(self, fmt: str) -> float:
        """The largest code of a format."""
        return LARGEST[fmt]

    def amax(self, x: Tensor, dim: tuple[int, ...]) -> Tensor:
        """The largest magnitude of each group; a NaN anywhere in the group makes it NaN."""
        return x.abs().amax(dim, keepdim=True)

    def scale_of(self, amax: Tensor, fmt: str) -> Tensor:
        """The scale of each group: IEEE quotient, and exactly 1 where that is below the normal range."""
        quotient = amax / torch.full_like(amax, self.largest(fmt))
        return torch.where(quotient < SMALLEST_NORMAL, torch.ones_like(quotient), quotient)

    def divide(self, x: Tensor, scale: Tensor) -> Tensor:
        """`x / scale` in fp32."""
        return x / scale

    def saturate(self, y: Tensor, fmt: str) -> Tensor:
        """`y` kept within the largest code."""
        largest = self.largest(fmt)
        return y.clamp(-largest, largest)

    def nearest(self, y: Tensor, step: Tensor) -> Tensor:
        """The multiple of `step` (a power of two) nearest to `y`, ties to even."""
        return torch.round(y / step) * step

    def step(self, y: Tensor, fmt: str) -> Tensor:
        """The distance between grid values around each `y`."""
        if fmt == "int8":
            return torch.ones_like(y)
        exponent = (torch.frexp(y).exponent - 1).clamp_min(-6) - 3
        return ((exponent + 127) << 23).view(torch.float32)  # a power of two, made from its bits

    def code(self, x: Tensor, scale: Tensor, fmt: str) -> Tensor:
        """The grid value of each `x / scale`."""
        y = self.saturate(self.divide(x, scale), fmt)
        return self.nearest(y, self.step(y, fmt))

    def poison(self, y: Tensor, scale: Tensor) -> Tensor:
        """NaN throughout every group whose amax is not finite."""
        return torch.where(torch.isfinite(scale), y, torch.full_like(y, torch.nan))

    def groups(self, x: Tensor, dim: tuple[int, ...], fmt: str) -> Tensor:
        """`x` rounded to the grid and back in fp32, one scale for each group that spans `dim`."""
        if x.numel() == 0:
            return x
        x = x.float()
        scale = self.scale_of(self.amax(x, dim), fmt)
        return self.poison(self.code(x, scale, fmt) * scale, scale)

    def state_values(self, state: Tensor, block_v: int, fmt: str) -> Tensor:
        """`state` `[..., K, V]` rounded with one scale per `[K, block_v]` tile, in its own dtype."""
        v = state.shape[-1]
        tiles = -(-v // block_v) if v else 0
        padded = F.pad(state.float(), (0, tiles * block_v - v))
        tiled = padded.reshape(*padded.shape[:-1], tiles, block_v) if tiles else padded
        rounded = self.groups(tiled, (-3, -1), fmt).flatten(-2) if tiles else padded
        return rounded[..., :v].to(state.dtype)

    def w_values(self, w: Tensor, fmt: str) -> Tensor:
        """`w` `[..., K]` rounded with one scale per row, in its own dtype."""
        return self.groups(w, (-1,), fmt).to(w.dtype)

    def gradient(self, dy: Tensor, x: Tensor, values: Callable[[Tensor], Tensor]) -> Tensor:
        """The gradient that goes on to the input: exactly the incoming one."""
        return dy

    def straight_through(self, x: Tensor, values: Callable[[Tensor], Tensor]) -> Tensor:
        """`values(x)` with `gradient` as its backward."""
        return cast(Tensor, _StraightThrough.apply(x, self, values))  # type: ignore[no-untyped-call]


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, qdq: EagerQDQ, values: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.qdq, ctx.values = qdq, values
        ctx.save_for_backward(x)
        y = values(x)
        return y.clone() if y.data_ptr() == x.data_ptr() else y

    @staticmethod
    def backward(ctx: Any, *dy: Tensor) -> Any:
        return ctx.qdq.gradient(dy[0], ctx.saved_tensors[0], ctx.values), None, None


class Call(SimpleNamespace):
    """The arguments of one call."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    h0: Tensor | None
    A_log: Tensor | None
    dt_bias: Tensor | None
    cu_seqlens: Tensor | None
    scale: float
    state_v_first: bool
    l2norm: bool
    gate: bool
    sigmoid: bool
    negative: bool
    state_format: str | None
    state_block_v: int
    w_format: str | None


class Place(SimpleNamespace):
    """Where each token of each chunk comes from, `[N, chunks, C]`."""

    index: Tensor
    valid: Tensor
    whole: Tensor
    N: int
    C: int
    chunks: int


class Notes(SimpleNamespace):
    """What the forward hands to the backward; letters as in the contract, `d` before a gradient."""

    options: Call
    carrier: torch.dtype
    B: int
    T: int
    HV: int
    K: int
    V: int
    at: Place
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    G: Tensor
    G_last: Tensor
    gam: Tensor
    kk: Tensor
    lower: Tensor
    inverse: Tensor
    u: Tensor
    w: Tensor
    wq: Tensor
    p: Tensor
    kd: Tensor
    raws: list[Tensor]
    states: Tensor
    vn: Tensor
    final: Tensor
    o: Tensor
    do: Tensor
    dvn: Tensor
    dstates: Tensor
    dh0: Tensor
    dw: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    dg: Tensor
    dbeta: Tensor
    dcum: Tensor
    dlower: Tensor


class EagerGDN:
    """The op in eager torch. A variant overrides one method or one field.

    Inside, a token tensor is `[chunks, M, C, D]` with `M` = sequences x value heads, sequences padded with
    zero tokens; a state is `[M, K, V]`. `n` is the namespace that the forward hands to the backward.
    """

    chunk_size = 64
    work: torch.dtype = torch.float32
    precision: ClassVar[dict[torch.dtype, str]] = {
        torch.float32: "tf32",
        torch.bfloat16: "bf16",
        torch.float16: "fp16",
    }
    qdq: EagerQDQ = EagerQDQ()

    # ---- what a subject offers -------------------------------------------------------------------------

    def qdq_state(self, state: Tensor, *, block_v: int = 64, fmt: str = "e4m3") -> Tensor:
        """`state` `[..., K, V]` rounded per `[K, block_v]` tile; the gradient is the identity."""
        _require(
            fmt in LARGEST, f"fmt must be one of {sorted(LARGEST)}, got {fmt!r}; choose a supported grid"
        )
        _require_block_v(block_v)
        _require(
            state.dtype in CARRIER_DTYPES, f"state must be fp32, bf16 or fp16, got {state.dtype}; cast it"
        )
        _require(state.dim() >= 2, f"state must be [..., K, V], got shape {tuple(state.shape)}; add axes")
        return self.qdq.straight_through(state, lambda x: self.qdq.state_values(x, block_v, fmt))

    def qdq_w(self, w: Tensor, *, fmt: str = "e4m3") -> Tensor:
        """`w` `[..., K]` rounded per row; the gradient is the identity."""
        _require(fmt == "e4m3", f"fmt of the W site must be e4m3, got {fmt!r}; choose e4m3")
        _require(w.dtype in CARRIER_DTYPES, f"w must be fp32, bf16 or fp16, got {w.dtype}; cast it")
        _require(w.dim() >= 1, f"w must be [..., K], got shape {tuple(w.shape)}; add an axis")
        return self.qdq.straight_through(w, lambda x: self.qdq.w_values(x, fmt))

    def chunk_gated_delta_rule(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        scale: float | None = None,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        use_beta_sigmoid_in_kernel: bool = False,
        allow_neg_eigval: bool = False,
        state_v_first: bool = False,
        cu_seqlens: Tensor | None = None,
        *,
        use_gate_in_kernel: bool = False,
        A_log: Tensor | None = None,
        dt_bias: Tensor | None = None,
        state_format: str | None = None,
        state_block_v: int = 64,
        w_format: str | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Gated DeltaNet, `(o, final_state or None)`; arguments as FLA's, plus three for the sites."""
        call = Call(
            q=q,
            k=k,
            v=v,
            g=g,
            beta=beta,
            h0=initial_state,
            A_log=A_log,
            dt_bias=dt_bias,
            scale=q.shape[-1] ** -0.5 if scale is None else scale,
            cu_seqlens=cu_seqlens,
            state_v_first=state_v_first,
            l2norm=use_qk_l2norm_in_kernel,
            gate=use_gate_in_kernel,
            sigmoid=use_beta_sigmoid_in_kernel,
            negative=allow_neg_eigval,
            state_format=state_format,
            state_block_v=state_block_v,
            w_format=w_format,
        )
        self.prepare(call)
        o, final_state = self.rule(call)
        return o, final_state if output_final_state else None

    def rule(self, call: Call) -> tuple[Tensor, Tensor]:
        """`o` and the final state of a call whose activations are taken care of, differentiable by hand."""
        results = _Rule.apply(call.q, call.k, call.v, call.g, call.beta, call.h0, self, call)  # type: ignore[no-untyped-call]
        return cast(tuple[Tensor, Tensor], results)

    def stages(self, *tensors: Any, **options: Any) -> dict[str, Tensor]:
        """The intermediate tensors of a call with the op's arguments.

        Returns:
            `w`, `w_q` `[B, T, HV, K]` in the carrier, before and after the W site; `state_raw`, `state_q`
            `[N, HV, chunks + 1, K, V]` fp32, the state before and after the state site: entry 0 on entry of
            the first chunk, entry `c + 1` after chunk `c`. A sequence with fewer chunks than the longest
            repeats its final state.
        """
        showing = _Showing(self)
        with torch.no_grad():
            showing.chunk_gated_delta_rule(*tensors, **options)
        return showing.shown

    # ---- preparation -----------------------------------------------------------------------------------

    def prepare(self, call: Call) -> None:
        """Checks a call and folds normalisation, gate and sigmoid into its tensors, under autograd."""
        self.refuse(call)
        if call.l2norm:
            call.q, call.k = self.normalise(call.q), self.normalise(call.k)
        if call.gate and call.A_log is not None:
            call.g = self.gate(call.g, call.A_log, call.dt_bias)
        if call.sigmoid:
            call.beta = self.strength(call.beta, call.negative)

    def refuse(self, call: Call) -> None:
        """Raises ValueError or TypeError for everything that the contract refuses."""
        _refuse_tokens(call)
        _refuse_state(call)
        _refuse_options(call)

    def normalise(self, x: Tensor) -> Tensor:
        """Rows of unit length, in the carrier."""
        y = x.float()
        return (y * (y.square().sum(-1, keepdim=True) + 1e-6).rsqrt()).to(x.dtype)

    def gate(self, g: Tensor, A_log: Tensor, dt_bias: Tensor | None) -> Tensor:
        """`-exp(A_log) * softplus(g + dt_bias)` in fp32."""
        shifted = g.float() if dt_bias is None else g.float() + dt_bias.float().reshape(-1)
        return -A_log.float().reshape(-1).exp() * F.softplus(shifted)

    def strength(self, beta: Tensor, allow_neg_eigval: bool) -> Tensor:
        """`sigmoid(beta)`, twice that with negative eigenvalues, in fp32."""
        return beta.float().sigmoid() * (2.0 if allow_neg_eigval else 1.0)

    def boundaries(self, cu_seqlens: Tensor | None, B: int, T: int) -> list[tuple[int, int]]:
        """Start and end of every sequence in the flattened tokens."""
        if cu_seqlens is None:
            return [(b * T, (b + 1) * T) for b in range(B)]
        ends = [int(x) for x in cu_seqlens.tolist()]
        return list(itertools.pairwise(ends))

    def place(self, spans: list[tuple[int, int]], device: torch.device) -> Place:
        """Where each token of each chunk comes from.

        Returns:
            `index`, `valid` `[N, chunks, C]`: position among the flattened tokens, and whether there is one;
            `whole` `[N, chunks]`: whether the chunk holds any token.
        """
        longest = max((b - a for a, b in spans), default=0)
        C = max(1, min(self.chunk_size, longest))
        chunks = -(-longest // C)
        starts = torch.tensor([a for a, _ in spans], device=device).view(-1, 1, 1)
        lengths = torch.tensor([b - a for a, b in spans], device=device).view(-1, 1, 1)
        inside = torch.arange(chunks * C, device=device).view(1, chunks, C)
        valid = inside < lengths
        index = torch.where(valid, starts + inside, torch.zeros_like(inside))
        return Place(index=index, valid=valid, whole=valid.any(-1), N=len(spans), C=C, chunks=chunks)

    def gather(self, x: Tensor, n: Notes) -> Tensor:
        """Tokens `[B, T, H, ...]` as chunks `[chunks, M, C, ...]` in working precision, heads repeated."""
        flat = x.detach().reshape(-1, *x.shape[2:]).to(self.work)
        if flat.shape[1] != n.HV:
            flat = flat.repeat_interleave(n.HV // flat.shape[1], 1)
        if flat.shape[0] == 0:
            flat = flat.new_zeros(1, *flat.shape[1:])
        mask = n.at.valid.view(*n.at.valid.shape, *[1] * (flat.dim() - 1))
        picked = torch.where(mask, flat[n.at.index], flat.new_zeros(()))  # [N, chunks, C, HV, ...]
        return picked.transpose(2, 3).transpose(0, 1).flatten(1, 2).contiguous()

    def scatter(self, y: Tensor, like: Tensor, n: Notes) -> Tensor:
        """The inverse of `gather`: chunks back to `like`'s tokens and dtype, repeated heads summed."""
        chunks = (
            y.reshape(y.shape[0], n.at.N, n.HV, *y.shape[2:]).transpose(0, 1).transpose(2, 3)
        )  # [N, chunks, C, HV, ...]
        out = y.new_zeros(like.shape[0] * like.shape[1], *chunks.shape[3:])
        out[n.at.index[n.at.valid]] = chunks[n.at.valid]
        if like.shape[2] != n.HV:
            group = n.HV // like.shape[2]
            out = self.sum_group(out.reshape(len(out), like.shape[2], group, *out.shape[2:]))
        return out.reshape(like.shape).to(like.dtype)

    def sum_group(self, per_value_head: Tensor) -> Tensor:
        """Gradients summed over each head's value heads: `[tokens, H, group, ...]` to `[tokens, H, ...]`."""
        return per_value_head.sum(2)

    # ---- precision -------------------------------------------------------------------------------------

    def operand(self, x: Tensor, n: Notes) -> Tensor:
        """A matmul operand as the hardware reads it."""
        kind = self.precision[n.carrier]
        if kind == "ieee" or self.work == torch.float64:
            return x
        if kind == "bf16":
            return x.to(torch.bfloat16).float()
        # fp16 operands of an intermediate may leave fp16's range: 11 bits, exponents of fp32
        return tf32(x)

    def dot(self, a: Tensor, b: Tensor, n: Notes) -> Tensor:
        """`a @ b` with rounded operands and the working precision's sums."""
        return self.operand(a, n) @ self.operand(b, n)

    def store(self, x: Tensor, n: Notes) -> Tensor:
        """A stored intermediate: rounded like an operand."""
        return self.operand(x, n)

    # ---- forward ---------------------------------------------------------------------------------------

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        h0: Tensor | None,
        options: Call,
    ) -> Notes:
        """Everything up to `o` and the final state; the result holds what the backward needs."""
        B, T, _, K = k.shape
        HV, V = v.shape[2:]
        n = Notes(options=options, carrier=k.dtype, B=B, T=T, HV=HV, K=K, V=V)
        n.at = self.place(self.boundaries(options.cu_seqlens, B, T), k.device)
        n.q, n.k, n.v = (self.gather(x, n) for x in (q, k, v))
        n.g, n.beta = self.gather(g, n), self.gather(beta, n)
        n.G = self.cumulate(n.g, n)
        n.G_last = self.total(n)
        n.gam = self.relative_decay(n.G, n)
        n.lower = self.interaction(n)
        n.inverse = self.inverse(n.lower, n)
        n.u = self.store(self.solve(n, n.beta[..., None] * n.v), n)
        n.w = self.solve(n, (n.beta * self.decay(n.G))[..., None] * n.k).to(n.carrier)
        n.wq = self.round_w(n.w, n).to(self.work)
        n.w = n.w.to(self.work)
        n.p = self.attention(n)
        n.kd = self.to_end(n)[..., None] * n.k
        self.scan(self.entry(h0, n), n)
        n.o = self.read(n)
        return n

    def cumulate(self, g: Tensor, n: Notes) -> Tensor:
        """The running sum of g inside each chunk."""
        return g.cumsum(-1)

    def total(self, n: Notes) -> Tensor:
        """The sum of all gates of each chunk, `[chunks, M]`."""
        return n.G[..., -1]

    def decay(self, G: Tensor) -> Tensor:
        """The decay of a natural logarithm."""
        return G.exp()

    def relative_decay(self, G: Tensor, n: Notes) -> Tensor:
        """`exp(G_i - G_j)` for `i >= j`, zero elsewhere; masked before the exponential."""
        difference = G[..., :, None] - G[..., None, :]
        keep = torch.ones(n.at.C, n.at.C, dtype=torch.bool, device=G.device).tril()
        return self.decay(difference.masked_fill(~keep, -torch.inf))

    def to_end(self, n: Notes) -> Tensor:
        """`exp(G_last - G)` of every token."""
        return self.decay(n.G_last[..., None] - n.G)

    def over_chunk(self, n: Notes) -> Tensor:
        """`exp(G_last)` of every chunk, `[chunks, M]`."""
        return self.decay(n.G_last)

    def interaction(self, n: Notes) -> Tensor:
        """`L = tril(beta_i (k_i . k_j) Gam_ij, -1)`."""
        n.kk = self.dot(n.k, n.k.mT, n)
        return (n.beta[..., None] * n.kk * n.gam).tril(-1)

    def inverse(self, lower: Tensor, n: Notes) -> Tensor:
        """`(I + L)^-1`, by substitution."""
        eye = torch.eye(n.at.C, dtype=lower.dtype, device=lower.device)
        inverse: Tensor = torch.linalg.solve_triangular(
            eye + lower, eye.expand_as(lower), upper=False, unitriangular=True
        )
        return inverse

    def solve(self, n: Notes, right: Tensor) -> Tensor:
        """`(I + L)^-1 right`."""
        return self.dot(n.inverse, right, n)

    def solve_adjoint(self, n: Notes, right: Tensor) -> Tensor:
        """`(I + L)^-T right`."""
        return self.dot(n.inverse.mT, right, n)

    def attention(self, n: Notes) -> Tensor:
        """`tril(scale Q K^T Gam)`."""
        return n.options.scale * self.dot(n.q, n.k.mT, n) * n.gam

    def round_w(self, w: Tensor, n: Notes) -> Tensor:
        """The W site."""
        return w if n.options.w_format is None else self.qdq.w_values(w, n.options.w_format)

    def round_state(self, state: Tensor, where: str, n: Notes) -> Tensor:
        """The state site; `where` is `initial` or the chunk that has just been written, `0`, `1`, ..."""
        if n.options.state_format is None:
            return state
        rounded = self.qdq.state_values(state.float(), n.options.state_block_v, n.options.state_format)
        return rounded.to(self.work)

    def entry(self, h0: Tensor | None, n: Notes) -> Tensor:
        """The state given to the first chunk, `[M, K, V]`, not yet rounded."""
        if h0 is None:
            return torch.zeros(n.at.N * n.HV, n.K, n.V, dtype=self.work, device=n.k.device)
        state = h0.detach().to(self.work).flatten(0, 1)
        return state.mT if n.options.state_v_first else state

    def scan(self, state: Tensor, n: Notes) -> None:
        """Passes the state over the chunks; leaves `states` (on entry, rounded), `vn` and `final` in `n`."""
        n.raws = [state]
        state = self.round_state(state, "initial", n)
        states, news = [], []
        for c in range(n.at.chunks):
            states.append(state)
            news.append(self.corrected(state, c, n))
            raw = self.update(state, news[-1], c, n)
            rounded = self.round_state(raw, str(c), n)
            n.raws.append(torch.where(self.alive(c, n), raw, n.raws[-1]))
            state = torch.where(self.alive(c, n), rounded, state)
        n.states = torch.stack(states) if states else state.new_zeros(0, *state.shape)
        n.vn = torch.stack(news) if news else n.u
        n.final = state

    def alive(self, c: int, n: Notes) -> Tensor:
        """Whether each `[M, 1, 1]` sequence has tokens in chunk `c`."""
        return n.at.whole[:, c].repeat_interleave(n.HV).view(-1, 1, 1)

    def corrected(self, state: Tensor, c: int, n: Notes) -> Tensor:
        """`V' = U - W S` of one chunk."""
        return self.store(n.u[c] - self.dot(n.wq[c], state, n), n)

    def update(self, state: Tensor, vn: Tensor, c: int, n: Notes) -> Tensor:
        """`S' = exp(G_last) S + (exp(G_last - G) K)^T V'` of one chunk."""
        return self.over_chunk(n)[c][:, None, None] * state + self.dot(n.kd[c].mT, vn, n)

    def read(self, n: Notes) -> Tensor:
        """`O = scale exp(G) Q S + tril(scale Q K^T Gam) V'`."""
        carried = (n.options.scale * self.decay(n.G))[..., None] * self.dot(n.q, n.states, n)
        return carried + self.dot(n.p, n.vn, n)

    # ---- backward --------------------------------------------------------------------------------------

    def backward(self, n: Notes, do: Tensor, dht: Tensor) -> None:
        """All gradients, linearised at the rounded W and states; left in `n` as `dq`, ..., `dh0`."""
        n.do = do
        self.scan_back(self.incoming(dht, n), n)
        n.dw = self.gradient_of_w(n)
        self.through_solve(n)
        self.through_attention(n)
        self.through_decay_to_end(n)
        n.dg = self.uncumulate(n.dcum, n)

    def incoming(self, dht: Tensor, n: Notes) -> Tensor:
        """The gradient of the final state as it enters the reverse scan."""
        return dht

    def scan_back(self, ds: Tensor, n: Notes) -> None:
        """Passes the state's gradient backwards; leaves `dvn`, `dstates` (after each chunk) and `dh0`."""
        dvn: list[Tensor] = [n.vn] * n.at.chunks
        dstates: list[Tensor] = [n.vn] * n.at.chunks
        for c in reversed(range(n.at.chunks)):
            dstates[c] = torch.where(self.alive(c, n), ds, torch.zeros_like(ds))
            dvn[c] = self.store(self.dot(n.p[c].mT, n.do[c], n) + self.dot(n.kd[c], dstates[c], n), n)
            ds = torch.where(self.alive(c, n), self.state_gradient(ds, dvn[c], c, n), ds)
        n.dvn = torch.stack(dvn) if dvn else n.vn
        n.dstates = torch.stack(dstates) if dstates else n.states
        n.dh0 = ds

    def state_gradient(self, ds: Tensor, dvn: Tensor, c: int, n: Notes) -> Tensor:
        """The gradient of the state on entry of a chunk from that on its exit."""
        read = (n.options.scale * self.decay(n.G[c]))[..., None] * n.q[c]
        return (
            self.over_chunk(n)[c][:, None, None] * ds
            + self.dot(read.mT, n.do[c], n)
            - self.dot(n.wq[c].mT, dvn, n)
        )

    def states_for_backward(self, n: Notes) -> Tensor:
        """The states that the backward is linearised at: the rounded ones."""
        return n.states

    def w_for_adjoint(self, n: Notes) -> Tensor:
        """The W that the adjoint of the solve uses: the unrounded one."""
        return n.w

    def gradient_of_w(self, n: Notes) -> Tensor:
        """`dW = -dV' S^T`, straight through the W site."""
        return self.store(-self.dot(n.dvn, self.states_for_backward(n).mT, n), n)

    def through_solve(self, n: Notes) -> None:
        """The adjoint of `U, W = (I + L)^-1 (beta V, beta exp(G) K)`; starts dv, dk, dbeta, dcum."""
        du, dw = self.solve_adjoint(n, n.dvn), self.solve_adjoint(n, n.dw)
        decayed = self.decay(n.G)[..., None] * n.k
        n.dv = n.beta[..., None] * du
        n.dbeta = (du * n.v).sum(-1) + (dw * decayed).sum(-1)
        n.dk = (n.beta * self.decay(n.G))[..., None] * dw
        n.dcum = n.beta * (dw * decayed).sum(-1)
        n.dlower = -(self.dot(du, n.u.mT, n) + self.dot(dw, self.w_for_adjoint(n).mT, n)).tril(-1)
        per_pair = n.dlower * n.gam
        n.dbeta = n.dbeta + (per_pair * n.kk).sum(-1)
        scaled = per_pair * n.beta[..., None]
        n.dk = n.dk + self.dot(scaled, n.k, n) + self.dot(scaled.mT, n.k, n)
        flow = n.dlower * n.lower
        n.dcum = n.dcum + flow.sum(-1) - flow.sum(-2)

    def through_attention(self, n: Notes) -> None:
        """The readout's part of dq, dk and dcum."""
        scale = n.options.scale
        dp = self.dot(n.do, n.vn.mT, n).tril()
        pair = dp * n.gam * scale
        carried = (scale * self.decay(n.G))[..., None] * self.dot(n.do, self.states_for_backward(n).mT, n)
        n.dq = carried + self.dot(pair, n.k, n)
        n.dk = n.dk + self.dot(pair.mT, n.q, n)
        flow = dp * n.p
        n.dcum = n.dcum + (carried * n.q).sum(-1) + flow.sum(-1) - flow.sum(-2)

    def through_decay_to_end(self, n: Notes) -> None:
        """The state update's part of dk and dcum, the last row's among them."""
        dkd = self.dot(n.vn, n.dstates.mT, n)
        n.dk = n.dk + self.to_end(n)[..., None] * dkd
        flow = (dkd * n.kd).sum(-1)
        carried = self.over_chunk(n) * (self.states_for_backward(n) * n.dstates).sum((-2, -1))
        n.dcum = n.dcum - flow
        n.dcum[..., -1] += carried + flow.sum(-1)

    def uncumulate(self, dcum: Tensor, n: Notes) -> Tensor:
        """The adjoint of the running sum."""
        return dcum.flip(-1).cumsum(-1).flip(-1)

    # ---- results ---------------------------------------------------------------------------------------

    def outputs(self, n: Notes, v: Tensor) -> tuple[Tensor, Tensor]:
        """`o` in the carrier and the final state in fp32, in the caller's layouts."""
        final = n.final.reshape(n.at.N, n.HV, n.K, n.V)
        final = final.mT if n.options.state_v_first else final
        return self.scatter(n.o, v, n), self.leave(final.float().contiguous())

    def leave(self, x: Tensor) -> Tensor:
        """An output or gradient on its way to the caller."""
        return x

    def results(
        self, n: Notes, inputs: tuple[Tensor | None, ...]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        """The six gradients in the caller's layouts and dtypes."""
        q, k, v, g, beta, h0 = inputs
        given = [
            self.leave(self.scatter(y, x, n))
            for y, x in ((n.dq, q), (n.dk, k), (n.dv, v), (n.dg, g), (n.dbeta, beta))
            if x is not None
        ]
        if h0 is None:
            return given[0], given[1], given[2], given[3], given[4], None
        dh0 = n.dh0.reshape(n.at.N, n.HV, n.K, n.V)
        dh0 = (dh0.mT if n.options.state_v_first else dh0).float().contiguous()
        return given[0], given[1], given[2], given[3], given[4], self.leave(dh0)


class _Rule(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        h0: Tensor | None,
        gdn: EagerGDN,
        options: Call,
    ) -> tuple[Tensor, Tensor]:
        n = gdn.forward(q, k, v, g, beta, h0, options)
        ctx.n, ctx.gdn = n, gdn
        ctx.save_for_backward(q, k, v, g, beta, h0)
        return gdn.outputs(n, v)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, do: Tensor, dht: Tensor) -> Any:
        n, gdn = ctx.n, ctx.gdn
        dstate = dht.to(gdn.work).flatten(0, 1)
        gdn.backward(n, gdn.gather(do, n), dstate.mT if n.options.state_v_first else dstate)
        return *gdn.results(n, ctx.saved_tensors), None, None


class _Showing:
    """Runs a variant once and keeps its intermediates in `shown`."""

    def __init__(self, of: EagerGDN) -> None:
        self.of = copy.copy(of)
        self.shown: dict[str, Tensor] = {}
        forward = self.of.forward

        def keep(*inputs: Any) -> Notes:
            n = forward(*inputs)
            like = torch.empty(n.B, n.T, n.HV, n.K, dtype=n.carrier, device=n.w.device)
            self.shown.update(w=self.of.scatter(n.w, like, n), w_q=self.of.scatter(n.wq, like, n))
            rounded = [*n.states, n.final]
            for name, states in (("state_raw", n.raws), ("state_q", rounded)):
                whole = torch.stack(states).reshape(-1, n.at.N, n.HV, n.K, n.V).movedim(0, 2)
                self.shown[name] = whole.float()
            return n

        self.of.forward = keep  # type: ignore[method-assign,assignment]
        self.chunk_gated_delta_rule = self.of.chunk_gated_delta_rule


def tf32(x: Tensor) -> Tensor:
    """fp32 values rounded to 11 significant bits, ties to even, as TF32 tensor cores read them."""
    bits = x.contiguous().view(torch.int32)
    rounded = ((bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32)
    return torch.where(torch.isfinite(x), rounded, x)


def _refuse_tokens(call: Call) -> None:
    """Refuses wrong shapes, dtypes and devices of q, k, v, g and beta."""
    for name in ("q", "k", "v"):
        x = getattr(call, name)
        _require(x.dim() == 4, f"{name} must have 4 axes, got {x.dim()}; reshape it")
        _require_type(
            x.dtype in CARRIER_DTYPES and x.dtype == call.k.dtype,
            f"q, k, v must share one of fp32, bf16, fp16, got {name} {x.dtype}; cast it",
        )
    B, T, H, K = call.k.shape
    HV = call.v.shape[2]
    _require(
        call.q.shape == call.k.shape, f"q must be {(B, T, H, K)} as k, got {tuple(call.q.shape)}; match them"
    )
    _require(call.v.shape[:2] == (B, T), f"v must start with {(B, T)}, got {tuple(call.v.shape)}; match them")
    _require(
        HV >= H and HV % H == 0, f"value heads must be a multiple of {H} heads, got {HV}; choose a multiple"
    )
    for name in ("g", "beta"):
        x = getattr(call, name)
        _require(x.shape == (B, T, HV), f"{name} must be {(B, T, HV)}, got {tuple(x.shape)}; reshape it")
        _require_type(x.is_floating_point(), f"{name} must be floating point, got {x.dtype}; cast it")
    for name in ("q", "v", "g", "beta", "h0", "cu_seqlens", "A_log", "dt_bias"):
        x = getattr(call, name)
        _require(
            x is None or x.device == call.k.device, f"{name} must be on {call.k.device}, as k; move it there"
        )


def _refuse_state(call: Call) -> None:
    """Refuses wrong boundaries and a wrong initial state."""
    B, T, _, K = call.k.shape
    HV, V = call.v.shape[2:]
    N = _sequences(call.cu_seqlens, B, T)
    if call.h0 is None:
        return
    shape = (N, HV, V, K) if call.state_v_first else (N, HV, K, V)
    _require(
        call.h0.shape == shape, f"initial_state must be {shape}, got {tuple(call.h0.shape)}; check its layout"
    )
    _require_type(call.h0.dtype == torch.float32, f"initial_state must be fp32, got {call.h0.dtype}; cast it")


def _refuse_options(call: Call) -> None:
    """Refuses unsupported formats and contradictory options."""
    _require(
        call.state_format in (None, *LARGEST),
        f"state_format must be e4m3, int8 or None, got {call.state_format!r}; choose one",
    )
    _require(
        call.w_format in (None, "e4m3"), f"w_format must be e4m3 or None, got {call.w_format!r}; choose one"
    )
    _require_block_v(call.state_block_v)
    _require(
        call.sigmoid or not call.negative,
        "allow_neg_eigval needs use_beta_sigmoid_in_kernel, got it alone; set both or neither",
    )
    _require(not call.gate or call.A_log is not None, "use_gate_in_kernel needs A_log, got None; pass it")
    for name in ("A_log", "dt_bias"):
        x, heads = getattr(call, name), call.v.shape[2]
        _require(
            not call.gate or x is None or x.numel() == heads,
            f"{name} must hold {heads} numbers, got {None if x is None else tuple(x.shape)}; reshape it",
        )


def _sequences(cu_seqlens: Tensor | None, B: int, T: int) -> int:
    if cu_seqlens is None:
        return B
    _require_type(
        cu_seqlens.dtype in (torch.int32, torch.int64) and cu_seqlens.dim() == 1,
        f"cu_seqlens must be a vector of integers, got {cu_seqlens.dtype}, {cu_seqlens.dim()} axes; cast it",
    )
    ends = [int(x) for x in cu_seqlens.tolist()]
    _require(B == 1, f"packed sequences need a batch of 1, got {B}; flatten the batch into the tokens")
    _require(len(ends) >= 2, f"cu_seqlens must hold at least 2 boundaries, got {len(ends)}; add them")
    _require(ends[0] == 0, f"cu_seqlens must start at 0, got {ends[0]}; prepend it")
    _require(ends[-1] == T, f"cu_seqlens must end at T = {T}, got {ends[-1]}; append it")
    _require(
        all(a <= b for a, b in itertools.pairwise(ends)), f"cu_seqlens must not decrease, got {ends}; sort it"
    )
    return len(ends) - 1


def _require_block_v(block_v: int) -> None:
    _require(
        block_v in BLOCK_V, f"block_v must be one of {BLOCK_V}, got {block_v}; choose the next smaller tile"
    )


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)


def _require_type(holds: bool, message: str) -> None:
    if not holds:
        raise TypeError(message)


EAGER = EagerGDN()
chunk_gated_delta_rule = EAGER.chunk_gated_delta_rule
qdq_state = EAGER.qdq_state
qdq_w = EAGER.qdq_w
stages = EAGER.stages
