"""What may be asked of a rounding site, as tables: formats, tiles, conversions. Needs no torch or triton."""

from __future__ import annotations

from dataclasses import dataclass

from kernels.launch import INTERPRETER

CHUNK_SIZE = 64
"""Tokens of one chunk; the state is rounded at its borders."""

BLOCK_V = (16, 32, 64, 128)
"""Widths of a `[K, block_v]` state tile that has one scale."""


@dataclass(frozen=True)
class Format:
    """A grid that a site can round to.

    Attributes:
        largest_code: the code that the largest magnitude of a group is scaled to.
        sites: where the contract allows it.
        conversions: the ways in which a kernel can compute a code.
    """

    largest_code: float
    sites: tuple[str, ...]
    conversions: tuple[str, ...]


@dataclass(frozen=True)
class Conversion:
    """A way to compute the code of a value, and where it gives the contract's code in every bit.

    Attributes:
        min_sm: the first SM on which it does; `interpreter`: whether it does in Triton's interpreter.
        because: why not elsewhere.
    """

    min_sm: int
    interpreter: bool
    because: str


FORMATS = {
    "e4m3": Format(448.0, sites=("state", "w"), conversions=("native", "portable")),
    "int8": Format(127.0, sites=("state",), conversions=("portable",)),
}

CONVERSIONS = {
    "native": Conversion(
        min_sm=90,
        interpreter=False,
        because="SM 8.9 converts through fp16 and rounds twice, older ones lack the instruction, and the "
        "interpreter loses carries, ties and subnormals",
    ),
    "portable": Conversion(min_sm=80, interpreter=True, because="fp32 addition and integer arithmetic only"),
}
"""In order of preference."""


def check_format(site: str, fmt: str) -> Format:
    """The format's row.

    Raises:
        ValueError: no such format, or not at this site.
    """
    allowed = [name for name, row in FORMATS.items() if site in row.sites]
    if fmt not in allowed:
        raise ValueError(
            f"the format of the {site} site must be one of {allowed}, got {fmt!r}; choose one of them"
        )
    return FORMATS[fmt]


def check_block_v(block_v: int) -> int:
    """The tile width itself.

    Raises:
        ValueError: not one of `BLOCK_V`.
    """
    if isinstance(block_v, bool) or block_v not in BLOCK_V:
        raise ValueError(f"block_v must be one of {BLOCK_V}, got {block_v!r}; choose the next smaller tile")
    return block_v


def conversions_on(sm: int, fmt: str = "e4m3") -> tuple[str, ...]:
    """The conversions that give the contract's codes on an SM (`INTERPRETER` included), best first."""
    return tuple(
        name
        for name, row in CONVERSIONS.items()
        if name in FORMATS[fmt].conversions and (row.interpreter if sm == INTERPRETER else sm >= row.min_sm)
    )


def choose_conversion(sm: int, fmt: str, conversion: str | None = None) -> str:
    """The conversion asked for, or the best one.

    Raises:
        ValueError: it does not exist, or not for this format or here.
    """
    selectable = conversions_on(sm, fmt)
    if conversion is None and selectable:
        return selectable[0]
    if conversion not in selectable:
        here = "in the interpreter" if sm == INTERPRETER else f"on SM {sm / 10}"
        why = f" ({CONVERSIONS[conversion].because})" if conversion in CONVERSIONS else ""
        raise ValueError(
            f"the {fmt} conversion {here} must be one of {list(selectable)}, got {conversion!r}{why}; "
            f"leave conversion out to take the best one"
        )
    return conversion
