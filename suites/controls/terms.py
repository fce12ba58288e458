"""Faults in the terms of forward and backward that have nothing to do with rounding."""

from __future__ import annotations

import torch

from suites.controls.control import Control
from suites.subjects.eager import Call, EagerGDN, Notes

Tensor = torch.Tensor


def _dht_ignored(self: EagerGDN, dht: Tensor, n: Notes) -> Tensor:
    return torch.zeros_like(dht)


def _dh0_zero(self: EagerGDN, ds: Tensor, n: Notes) -> None:
    EagerGDN.scan_back(self, ds, n)
    n.dh0 = torch.zeros_like(n.dh0)


def _dh0_of_first_exit(self: EagerGDN, ds: Tensor, n: Notes) -> None:
    EagerGDN.scan_back(self, ds, n)
    n.dh0 = n.dstates[0] if n.at.chunks else n.dh0


def _no_write_in_state_gradient(self: EagerGDN, ds: Tensor, dvn: Tensor, c: int, n: Notes) -> Tensor:
    return EagerGDN.state_gradient(self, ds, torch.zeros_like(dvn), c, n)


def _dk_without_update(self: EagerGDN, n: Notes) -> None:
    dk = n.dk
    EagerGDN.through_decay_to_end(self, n)
    n.dk = dk


def _dg_without_carry(self: EagerGDN, n: Notes) -> None:
    carried = self.over_chunk(n) * (self.states_for_backward(n) * n.dstates).sum((-2, -1))
    EagerGDN.through_decay_to_end(self, n)
    n.dcum[..., -1] -= carried


def _dg_on_missing_row(self: EagerGDN, n: Notes) -> None:
    before = n.dcum[..., -1].clone()
    EagerGDN.through_decay_to_end(self, n)
    partial = (~n.at.valid[..., -1]).T.repeat_interleave(n.HV, 1)
    n.dcum[..., -1] = torch.where(partial, before, n.dcum[..., -1])


def _dbeta_without_w(self: EagerGDN, n: Notes) -> None:
    EagerGDN.through_solve(self, n)
    dw = self.solve_adjoint(n, n.dw)
    n.dbeta = n.dbeta - (dw * self.decay(n.G)[..., None] * n.k).sum(-1)


def _one_triangle_of_dk(self: EagerGDN, n: Notes) -> None:
    EagerGDN.through_solve(self, n)
    scaled = n.dlower * n.gam * n.beta[..., None]
    n.dk = n.dk - self.dot(scaled.mT, n.k, n)


def _dq_unscaled(self: EagerGDN, n: Notes) -> None:
    EagerGDN.through_attention(self, n)
    n.dq = n.dq / n.options.scale


def _diagonal_missing(self: EagerGDN, n: Notes) -> Tensor:
    return EagerGDN.attention(self, n).tril(-1)


def _blocks_not_joined(self: EagerGDN, n: Notes) -> Tensor:
    lower = EagerGDN.interaction(self, n)
    first = torch.arange(16, n.at.C, 16, device=lower.device)
    lower[..., first, first - 1] = 0.0
    return lower


def _two_terms(self: EagerGDN, lower: Tensor, n: Notes) -> Tensor:
    eye = torch.eye(n.at.C, dtype=lower.dtype, device=lower.device)
    return eye - lower + lower @ lower


def _first_term_lost(self: EagerGDN, n: Notes) -> Tensor:
    o = EagerGDN.read(self, n)
    o[..., 16:32, :] = self.dot(n.p, n.vn, n)[..., 16:32, :]
    return o


def _scale_of_normalised(self: EagerGDN, call: Call) -> tuple[Tensor, Tensor]:
    if call.l2norm:
        call.scale = call.q.shape[-1] ** -0.5
    return EagerGDN.rule(self, call)


TERMS = (
    Control(
        "dht_ignored",
        "terms",
        "the backward state pass starts from zero",
        {"incoming": _dht_ignored},
        looks=("probe_state", "exact"),
    ),
    Control(
        "dh0_zero",
        "state",
        "the initial state's gradient is allocated and never written",
        {"scan_back": _dh0_zero},
        looks=("probe_state", "exact"),
    ),
    Control(
        "dh0_of_first_exit",
        "state",
        "the initial state's gradient is stored before the first chunk is passed",
        {"scan_back": _dh0_of_first_exit},
        looks=("exact",),
    ),
    Control(
        "state_gradient_without_write",
        "terms",
        "the state's gradient has no term from V'",
        {"state_gradient": _no_write_in_state_gradient},
        looks=("exact",),
    ),
    Control(
        "dk_without_update",
        "terms",
        "one of two contributions of a loop over keys is lost",
        {"through_decay_to_end": _dk_without_update},
        looks=("exact",),
    ),
    Control(
        "dk_one_triangle",
        "device",
        "the dot of a transposed operand is dropped by the compiler",
        {"through_solve": _one_triangle_of_dk},
        looks=("plain",),
    ),
    Control(
        "dg_without_carry",
        "terms",
        "dg has no term from the carried state",
        {"through_decay_to_end": _dg_without_carry},
        looks=("exact", "plain"),
    ),
    Control(
        "dg_on_missing_row",
        "packing",
        "the closing gate's gradient goes to a row that a partial chunk does not have",
        {"through_decay_to_end": _dg_on_missing_row},
        looks=("exact", "plain"),
    ),
    Control(
        "dbeta_without_w",
        "terms",
        "dbeta has no term from W",
        {"through_solve": _dbeta_without_w},
        looks=("exact",),
    ),
    Control(
        "dq_unscaled",
        "terms",
        "the scale is missing in dq",
        {"through_attention": _dq_unscaled},
        looks=("exact",),
    ),
    Control(
        "readout_without_own_token",
        "terms",
        "the causal mask is off by one",
        {"attention": _diagonal_missing},
        looks=("exact",),
    ),
    Control(
        "system_mask_off_by_one",
        "terms",
        "the mask of the system is off by one where two blocks of 16 rows meet",
        {"interaction": _blocks_not_joined},
        tier="whole",
        looks=("plain",),
    ),
    Control(
        "series_of_two_terms",
        "terms",
        "the solve is a series that is cut after its second power",
        {"inverse": _two_terms},
        looks=("repeated",),
    ),
    Control(
        "first_of_two_dots_lost",
        "device",
        "of two dots chained in one accumulator the first is lost, for one block of rows",
        {"read": _first_term_lost},
        looks=("exact",),
    ),
    Control(
        "scale_of_normalised_by_default",
        "terms",
        "the path with the fused normalisation takes the default scale, whatever is given",
        {"rule": _scale_of_normalised},
        tier="whole",
        looks=("given_scale",),
    ),
)
"""Every gradient is judged by itself."""
