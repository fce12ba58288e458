"""Interpreted kernels compute with narrow floats as on a GPU: a natural one passes, one that cuts fails."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from qualify.case import Case
from qualify.interpreter import FLOATS, convert_bits
from qualify.subjects import Subject, load_subject
from suites.checks import qdq

NARROW = ["bf16", "fp16", "fp8e4nv", "fp8e5"]
BITS = {1: torch.uint8, 2: torch.uint16}

NATURAL = """
import torch, triton, triton.language as tl

@triton.jit
def rows(x_ptr, y_ptr, K, B: tl.constexpr):
    place = tl.program_id(0) * K + tl.arange(0, B)
    inside = tl.arange(0, B) < K
    x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
    amax = tl.max(tl.where(x == x, tl.abs(x), float("inf")), 0)
    quotient = tl.div_rn(amax, 448.0)
    scale = tl.where(quotient < 2.0**-126, 1.0, quotient)
    code = tl.div_rn(x, tl.zeros_like(x) + scale).to(tl.float8e4nv).to(tl.float32)
    y = tl.where(amax == float("inf"), float("nan"), code * scale)
    tl.store(y_ptr + place, y.to(y_ptr.dtype.element_ty)CUT, mask=inside)

class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w):
        x = w.contiguous()
        y = torch.empty_like(x)
        if x.numel():
            rows[(x.numel() // x.shape[-1],)](x, y, x.shape[-1], triton.next_power_of_2(x.shape[-1]))
        return y

    @staticmethod
    def backward(ctx, dy):
        return dy

def qdq_w(w, *, fmt="e4m3"):
    return Rounded.apply(w)
"""

TOWARDS_ZERO = ', fp_downcast_rounding="rtz"'


def natural(folder: Path, *, cut: bool) -> Subject:
    text = NATURAL.replace("element_ty)CUT", f"element_ty{TOWARDS_ZERO if cut else ''})")
    path = folder / f"natural_{cut}.py"
    path.write_text(text)
    return load_subject(path.stem, str(path))


@pytest.mark.parametrize("name", NARROW)
def test_every_narrow_number_is_widened_to_itself(name: str) -> None:
    dtype = FLOATS[name]
    every = torch.arange(2 ** (8 * dtype.itemsize), dtype=torch.int32).to(BITS[dtype.itemsize])
    bits = convert_bits(every.numpy(), name, "fp32")
    expected = every.view(dtype).float().numpy()
    np.testing.assert_array_equal(bits.view(np.float32), expected)


@pytest.mark.parametrize("name", NARROW)
def test_numbers_are_rounded_to_nearest_even_and_cut_on_request(name: str) -> None:
    dtype = FLOATS[name]
    every = (
        torch.arange(2 ** (8 * dtype.itemsize), dtype=torch.int32)
        .to(BITS[dtype.itemsize])
        .view(dtype)
        .float()
    )
    every = torch.unique(every[torch.isfinite(every)])
    low, high = every[:-1], every[1:]
    middle = (low.double() + high.double()).div(2).float()
    wide = torch.cat([middle, torch.nextafter(middle, low), torch.nextafter(middle, high)])
    rounded = convert_bits(wide.numpy(), "fp32", name)
    even = torch.from_numpy(rounded[: len(low)].astype(np.int64)) % 2 == 0
    assert bool(even.all())
    values = torch.from_numpy(rounded).view(dtype).float()
    n = len(low)
    assert torch.equal(values[n : 2 * n], low)
    assert torch.equal(values[2 * n :], high)
    cut = torch.from_numpy(convert_bits(wide.numpy(), "fp32", name, cut=True)).view(dtype).float()
    assert torch.equal(cut[:n].abs(), torch.minimum(low.abs(), high.abs()))


def test_fp8_stays_within_its_range_and_keeps_nan() -> None:
    x = np.array([1e9, -1e9, 464.0, np.inf, np.nan], dtype=np.float32)
    for name, largest in (("fp8e4nv", 448.0), ("fp8e5", 57344.0)):
        y = torch.from_numpy(convert_bits(x, "fp32", name)).view(FLOATS[name]).float()
        assert y[:2].tolist() == [largest, -largest]
        assert float(y[3]) == largest
        assert bool(y[4].isnan())


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of the infinities of a poisoned row
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_a_kernel_that_casts_as_kernels_do_passes_and_one_that_cuts_fails(dtype: str, tmp_path: Path) -> None:
    case = Case("qdq.w_bits", {"sm": "cpu", "dtype": dtype, "sites": "w"}, "grid", 0, "natural")
    found = qdq.run_w_bits(case, natural(tmp_path, cut=False))
    assert [c.tensor for c in found.comparisons if not c.passed] == []
    if dtype != "fp32":
        wrong = qdq.run_w_bits(case, natural(tmp_path, cut=True))
        assert [c.tensor for c in wrong.comparisons if not c.passed]


def test_sums_products_and_dots_of_bf16_are_those_of_numbers(tmp_path: Path) -> None:
    path = tmp_path / "arithmetic.py"
    path.write_text(
        "import triton, triton.language as tl\n"
        "@triton.jit\n"
        "def kernel(x_ptr, y_ptr, d_ptr):\n"
        "    i, j = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]\n"
        "    x = tl.load(x_ptr + 16 * i + j)\n"
        "    tl.store(y_ptr + 16 * i + j, tl.where(x > 0, x * x - x, -x))\n"
        "    tl.store(d_ptr + 16 * i + j, tl.dot(x, tl.trans(x)))\n"
    )
    loaded = load_subject("arithmetic", str(path))
    assert loaded.module is not None
    x = torch.randn(16, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    y, d = torch.empty_like(x), torch.empty(16, 16)
    loaded.module.kernel[(1,)](x, y, d)
    assert torch.equal(y, torch.where(x > 0, x * x - x, -x))
    assert torch.allclose(d, x.float() @ x.float().T, atol=1e-5)
