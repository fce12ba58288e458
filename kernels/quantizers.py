"""Quantizer entries, read as the two sites of a module: which format, or off.

An entry names quantizers by a pattern and gives a `cfg`, an `enable`, or both, with ModelOpt's meaning: a
`cfg` replaces everything that earlier entries said and switches on; `enable` alone only switches. The names
are `<module>.gdn_state_quantizer` and `<module>.gdn_w_quantizer`. Needs neither torch nor triton.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

from kernels.options import check_format


@dataclass(frozen=True)
class Sites:
    """The format of each site of a module; None is off."""

    state: str | None = None
    w: str | None = None

    def __post_init__(self) -> None:
        for site, fmt in (("state", self.state), ("w", self.w)):
            if fmt is not None:
                check_format(site, fmt)

    @property
    def off(self) -> bool:
        """Whether neither site rounds."""
        return self.state is None and self.w is None


@dataclass(frozen=True)
class SiteQuantizer:
    """How a site appears among quantizers.

    Attributes:
        quantizer: the attribute's name on the module.
        axis: the axes along which scales differ, as ModelOpt counts them: a state is `[N, HV, K, V]`, in
            which each tile has a scale besides; W is `[B, T, HV, K]`.
        formats: `num_bits` -> format.
    """

    quantizer: str
    axis: tuple[int, ...]
    formats: Mapping[Any, str]


SITES: Mapping[str, SiteQuantizer] = {
    "state": SiteQuantizer("gdn_state_quantizer", (0, 1), {(4, 3): "e4m3", 8: "int8"}),
    "w": SiteQuantizer("gdn_w_quantizer", (0, 1, 2), {(4, 3): "e4m3"}),
}


@dataclass(frozen=True)
class Attribute:
    """A quantizer attribute: the values that a site allows, why no others, and its default in ModelOpt."""

    allowed: tuple[Any, ...]
    because: str
    default: Any


ATTRIBUTES: Mapping[str, Attribute] = {
    "type": Attribute(("dynamic",), "scales are taken from the values themselves in each call", "static"),
    "fake_quant": Attribute((True,), "rounding is emulated, nothing is stored compressed", True),
    "unsigned": Attribute((False,), "codes are signed", False),
    "pass_through_bwd": Attribute((True,), "the gradient is the identity", True),
    "block_sizes": Attribute((None,), "tiles are given by state.block_v in linear_attention", None),
    "bias": Attribute((None,), "the grids are symmetric", None),
    "rotate": Attribute((False, None), "no rotation is applied", False),
    "calibrator": Attribute(("max", None), "a dynamic scale is not calibrated", "max"),
    "backend": Attribute((None,), "the fused op rounds by itself", None),
    "backend_extra_args": Attribute((None, {}), "the fused op rounds by itself", None),
    "learn_amax": Attribute((False,), "scales are detached", False),
    "use_constant_amax": Attribute((False,), "scales are dynamic", False),
    "constant_amax": Attribute((None,), "scales are dynamic", None),
}
IGNORED = ("enable", "effective_bits", "trt_high_precision_dtype")
"""Attributes that say nothing about rounding."""


@dataclass(frozen=True)
class Entry:
    """One entry of `quant_cfg`; `cfg` None only switches."""

    pattern: str
    cfg: Any
    enable: bool


def entries_from(config: Iterable[Mapping[str, Any]]) -> tuple[Entry, ...]:
    """Reads `quant_cfg` in its list form.

    Raises:
        TypeError: not a list of mappings.
        ValueError: an entry without a name, or with neither `cfg` nor `enable`.
    """
    if isinstance(config, Mapping | str):
        raise TypeError(
            f"quant_cfg must be a list of entries, got {type(config).__name__}; write one entry a quantizer"
        )
    entries = []
    for row in config:
        if not isinstance(row, Mapping):
            raise TypeError(
                f"an entry of quant_cfg must be a mapping, got {type(row).__name__}; see the guide"
            )
        if not isinstance(row.get("quantizer_name"), str) or ("cfg" not in row and "enable" not in row):
            raise ValueError(
                f"an entry of quant_cfg must have quantizer_name and cfg or enable, got {sorted(row)}; "
                f"complete it"
            )
        entries.append(Entry(row["quantizer_name"], row.get("cfg"), bool(row.get("enable", True))))
    return tuple(entries)


def names_a_site(pattern: str) -> bool:
    """Whether a pattern names this project's quantizers, rather than covering them along with all others."""
    return "gdn" in pattern


def sites_of(
    entries: Sequence[Entry], names: Sequence[str], before: Mapping[str, Sites] | None = None
) -> dict[str, Sites]:
    """Module name -> its sites after all entries.

    An entry that does not name these quantizers, such as `*`, can switch them off, never on.

    Args:
        entries: in the order in which they act.
        names: names of the modules.
        before: what some modules do already; the others start with both sites off.

    Raises:
        ValueError: an entry that names them matches none, or asks for what a site cannot do.
    """
    quantizers = {f"{name}.{row.quantizer}": (name, site) for name in names for site, row in SITES.items()}
    started = {
        full: getattr((before or {}).get(name, Sites()), site) for full, (name, site) in quantizers.items()
    }
    formats: dict[str, str] = {
        full: fmt or default_format(quantizers[full][1]) for full, fmt in started.items()
    }
    enabled = {full: fmt is not None for full, fmt in started.items()}
    for entry in entries:
        matched = [full for full in quantizers if fnmatch(full, entry.pattern)]
        if names_a_site(entry.pattern) and not matched:
            raise ValueError(f"quantizer_name {entry.pattern!r} must match a quantizer, got none of "
                             f"{list(quantizers)}; correct the pattern")  # fmt: skip
        for full in matched:
            if names_a_site(entry.pattern):
                enabled[full] = entry.enable
                if entry.cfg is not None:
                    formats[full] = format_of(quantizers[full][1], entry.cfg)
            elif not entry.enable:
                enabled[full] = False
    found = {full: formats[full] if on else None for full, on in enabled.items()}
    return {
        name: Sites(**{site: found[f"{name}.{row.quantizer}"] for site, row in SITES.items()})
        for name in names
    }


def default_format(site: str) -> str:
    """The format of a site that is switched on without a `cfg`."""
    return next(iter(SITES[site].formats.values()))


def format_of(site: str, cfg: Any) -> str:
    """The format that the attributes of a quantizer mean at a site.

    Raises:
        TypeError: not a mapping (a list would be several quantizers in a row).
        ValueError: an attribute that the site does not support.
    """
    row = SITES[site]
    if not isinstance(cfg, Mapping):
        raise TypeError(
            f"cfg of {row.quantizer} must be a mapping, got {type(cfg).__name__}; give one set of attributes"
        )
    known = {"num_bits", "axis", "narrow_range", *ATTRIBUTES, *IGNORED}
    unknown = sorted(set(cfg) - known)
    if unknown:
        raise ValueError(
            f"attributes of {row.quantizer} must be among {sorted(known)}, got {unknown}; remove them"
        )
    for name, attribute in ATTRIBUTES.items():
        value = plain(cfg.get(name, attribute.default))
        if value not in attribute.allowed:
            raise ValueError(f"{name} of {row.quantizer} must be {attribute.allowed[0]!r}, got {value!r}: "
                             f"{attribute.because}; set it so")  # fmt: skip
    bits, axis = plain(cfg.get("num_bits", 8)), plain(cfg.get("axis"))
    if bits not in row.formats:
        raise ValueError(
            f"num_bits of {row.quantizer} must be one of {list(row.formats)}, got {bits!r}; choose one"
        )
    if axis != row.axis:
        raise ValueError(
            f"axis of {row.quantizer} must be {row.axis}, got {axis!r}: other groups cannot share a scale; "
            f"set it so"
        )
    if row.formats[bits] == "int8" and not cfg.get("narrow_range", False):
        raise ValueError(
            f"narrow_range of {row.quantizer} must be True with 8 bits, got False: codes go from -127 to "
            f"127; set it so"
        )
    return row.formats[bits]


def plain(value: Any) -> Any:
    """Lists as tuples, and a disabled rotation as False."""
    if isinstance(value, list):
        return tuple(value)
    if isinstance(value, Mapping) and value.get("enable") is False:
        return False
    return value
