"""Which module gets what: execution policies and site formats, resolved from one configuration.

A configuration has the shape of a ModelOpt one, with one key more:

    {"quant_cfg": [{"quantizer_name": "*gdn_state_quantizer",
                    "cfg": {"num_bits": (4, 3), "type": "dynamic", "axis": (0, 1)}}],
     "linear_attention": [{"module_name": "decoder.layers.*.self_attention",
                           "cfg": {"state": {"block_v": 64}}}]}

`quant_cfg` switches the sites of a module on, `linear_attention` says how they run. In both, later entries
win over earlier ones. The last execution rule that matches a module is its whole policy: what the rule leaves
out has its default, nothing is merged. Needs neither torch nor triton.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from kernels.options import BLOCK_V, CHUNK_SIZE
from kernels.quantizers import Sites, entries_from, sites_of

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class ExecutionPolicy:
    """How the sites of one module run; the defaults are the contract's.

    Attributes:
        schema_version: version of these fields.
        backend: the reference lineage that the op follows.
        chunk_size: tokens of a chunk.
        state_mode: where the state is rounded: at the borders of chunks.
        state_block_v: columns of a state tile with one scale.
        state_quantize_initial: whether the initial state is rounded too.
        solve_method: how the triangular system is solved.
    """

    schema_version: int = SCHEMA_VERSION
    backend: str = "fla"
    chunk_size: int = CHUNK_SIZE
    state_mode: str = "chunk"
    state_block_v: int = 64
    state_quantize_initial: bool = True
    solve_method: str = "exact"

    def __post_init__(self) -> None:
        for name, row in FIELDS.items():
            value = getattr(self, name)
            if not any(value == allowed and type(value) is type(allowed) for allowed in row.allowed):
                raise ValueError(
                    f"{row.path} must be one of {list(row.allowed)}, got {value!r}; {row.remedy}"
                )

    def to_config(self) -> dict[str, Any]:
        """The nested form that `policy_from_config` reads; every field is spelled out."""
        config: dict[str, Any] = {}
        for name, row in FIELDS.items():
            *outer, leaf = row.path.split(".")
            (config.setdefault(outer[0], {}) if outer else config)[leaf] = getattr(self, name)
        return config


@dataclass(frozen=True)
class Field:
    """A field of the policy: where it stands in a configuration, what it may be, and what to do otherwise."""

    path: str
    allowed: tuple[Any, ...]
    remedy: str


FIELDS: Mapping[str, Field] = {
    "schema_version": Field("schema_version", (1,), "this release knows version 1 only"),
    "backend": Field("backend", ("fla",), "leave it out"),
    "chunk_size": Field("chunk_size", (CHUNK_SIZE,), "rounding points belong to chunks of 64; leave it out"),
    "state_mode": Field("state.mode", ("chunk",), "only the borders of chunks are rounded; leave it out"),
    "state_block_v": Field("state.block_v", BLOCK_V, "choose the next smaller tile"),
    "state_quantize_initial": Field("state.quantize_initial", (True,), "a given state is rounded; leave out"),
    "solve_method": Field("solve.method", ("exact",), "approximate inverses are not supported; leave it out"),
}  # fmt: skip


def policy_from_config(config: Mapping[str, Any]) -> ExecutionPolicy:
    """Reads a nested policy; a field that is left out has its default.

    Raises:
        TypeError: not a mapping.
        ValueError: an unknown field, or a value that is not supported.
    """
    if not isinstance(config, Mapping):
        raise TypeError(
            f"cfg of a linear_attention rule must be a mapping, got {type(config).__name__}; write {{}}"
        )
    names = {row.path: name for name, row in FIELDS.items()}
    groups = {path.split(".")[0] for path in names if "." in path}
    values: dict[str, Any] = {}
    for key, value in config.items():
        inner = value if key in groups else {None: value}
        if not isinstance(inner, Mapping):
            raise TypeError(
                f"{key} must be a mapping, got {type(value).__name__}; write its fields inside it"
            )
        for leaf, setting in inner.items():
            path = key if leaf is None else f"{key}.{leaf}"
            if path not in names:
                raise ValueError(f"{path} must be one of {sorted(names)}, got an unknown field; remove it")
            values[names[path]] = setting
    return ExecutionPolicy(**values)


@dataclass(frozen=True)
class Rule:
    """One entry of `linear_attention`: a pattern of module names and the whole policy of those modules."""

    module_name: str
    policy: ExecutionPolicy


def rules_from(config: Iterable[Mapping[str, Any]]) -> tuple[Rule, ...]:
    """Reads `linear_attention`.

    Raises:
        TypeError: an entry is not a mapping.
        ValueError: an entry has other keys than `module_name` and `cfg`, or a field is wrong.
    """
    rules = []
    for entry in config:
        if not isinstance(entry, Mapping):
            raise TypeError(
                f"a linear_attention rule must be a mapping, got {type(entry).__name__}; see the guide"
            )
        if set(entry) - {"cfg"} != {"module_name"} or not isinstance(entry["module_name"], str):
            raise ValueError(
                f"a linear_attention rule must have the keys module_name (a pattern) and cfg, got "
                f"{sorted(entry)}; remove the others"
            )
        rules.append(Rule(entry["module_name"], policy_from_config(entry.get("cfg", {}))))
    return tuple(rules)


def policies_of(
    rules: Sequence[Rule], names: Sequence[str], before: Mapping[str, ExecutionPolicy] | None = None
) -> dict[str, ExecutionPolicy]:
    """Module name -> its policy: that of the last rule that matches, else the one before, else the default.

    Raises:
        ValueError: a rule matches no module.
    """
    for rule in rules:
        if not any(fnmatchcase(name, rule.module_name) for name in names):
            raise ValueError(
                f"module_name {rule.module_name!r} must match a supported module, got none of {list(names)}; "
                f"correct the pattern or remove the rule"
            )
    otherwise = dict.fromkeys(names, ExecutionPolicy()) | dict(before or {})
    return {
        name: next((r.policy for r in reversed(rules) if fnmatchcase(name, r.module_name)), otherwise[name])
        for name in names
    }


@dataclass(frozen=True)
class Resolved:
    """What one module really does: its sites and how they run. `OFF` is both sites off."""

    sites: Sites = field(default_factory=Sites)
    policy: ExecutionPolicy = field(default_factory=ExecutionPolicy)

    @property
    def off(self) -> bool:
        """Whether neither site rounds."""
        return self.sites.off

    def options(self) -> dict[str, Any]:
        """The keyword arguments that the fused op takes for it."""
        return {
            "state_format": self.sites.state,
            "state_block_v": self.policy.state_block_v,
            "w_format": self.sites.w,
        }

    def to_json(self) -> str:
        """This as one line of JSON, the grouping of scales included."""
        body = {"sites": asdict(self.sites), "scales": self.scales(), "policy": self.policy.to_config()}
        return json.dumps(body, sort_keys=True)

    def scales(self) -> dict[str, str]:
        """What shares one scale at each site."""
        return {
            "state": f"sequence, head, [K, {self.policy.state_block_v}] tile",
            "w": "token, head",
        }


OFF = Resolved()


def resolved_from_json(text: str) -> Resolved:
    """The inverse of `Resolved.to_json`.

    Raises:
        ValueError: not such a line, or a value that this release does not support.
    """
    try:
        body = json.loads(text)
        resolved = Resolved(Sites(**body["sites"]), policy_from_config(body["policy"]))
        scales = body["scales"]
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"a stored policy must be the JSON of a resolved policy, got {text!r:.80} ({error}); "
            f"convert the model again"
        ) from error
    if scales != resolved.scales():
        raise ValueError(
            f"the scales of a stored policy must be {resolved.scales()}, got {scales}; "
            f"it was written by another version, convert the model again"
        )
    return resolved


def resolve(
    config: Mapping[str, Any], names: Sequence[str], before: Mapping[str, Resolved] | None = None
) -> dict[str, Resolved]:
    """Module name -> what it does under a configuration.

    Args:
        config: `quant_cfg` and `linear_attention`, each a list and each optional; `algorithm` is ignored, it
            belongs to calibration.
        names: names of the supported modules of a model.
        before: what some of them do already, for a configuration that only changes something.

    Raises:
        TypeError, ValueError: the configuration is wrong, or an entry for this project matches nothing.
    """
    unknown = set(config) - {"quant_cfg", "linear_attention", "algorithm"}
    if unknown:
        raise ValueError(
            f"a configuration must have the keys quant_cfg and linear_attention, got {sorted(unknown)}; "
            f"remove them"
        )
    before = before or {}
    entries, rules = (
        entries_from(config.get("quant_cfg") or []),
        rules_from(config.get("linear_attention") or []),
    )
    sites = sites_of(entries, names, {name: r.sites for name, r in before.items()})
    policies = policies_of(rules, names, {name: r.policy for name, r in before.items()})
    return {name: Resolved(sites[name], policies[name]) for name in names}


def table(resolved: Mapping[str, Resolved], describe: Callable[[str], str] = lambda name: "") -> str:
    """The resolved policies of a model as lines of text, one a module.

    Args:
        resolved: module name -> policy.
        describe: what to put into the last column, such as the layout that was found.
    """
    head = ("module", "state", "block_v", "w", "layout")
    rows = [head] + [
        (name, r.sites.state or "off", str(r.policy.state_block_v), r.sites.w or "off", describe(name))
        for name, r in resolved.items()
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
