"""Subjects: the implementations that are judged, loaded from a module, a file or an entry point.

A subject is a namespace. It offers some of::

    chunk_gated_delta_rule(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False,
        use_qk_l2norm_in_kernel=False, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False,
        state_v_first=False, cu_seqlens=None, *, use_gate_in_kernel=False, A_log=None, dt_bias=None,
        state_format=None, state_block_v=64, w_format=None) -> (o, final_state or None)
    qdq_state(state, *, block_v=64, fmt="e4m3")      qdq_w(w, *, fmt="e4m3")
    stages(...)             same arguments as the op; returns {stage name: tensor}
    LAUNCH_ROWS             names of launch configurations; force_launch_row(name) is a context manager
    BUILDS                  names of modules that list what is compiled for every architecture
    CAPABILITIES            devices, dtypes, formats, block_v, min_sm, features; absent: try everything
    ARITHMETIC              carrier -> precision of matmul operands: ieee, tf32, bf16, fp16; absent: usual
    DETERMINISTIC           False when repeated calls may differ
    recorded_launches()     a context manager that yields a dict, kernel -> launch configuration that ran
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from qualify.capabilities import carrier_name
from qualify.errors import UsageError
from qualify.interpreted import defines_kernels
from qualify.interpreter import correct_interpreter, interprets
from qualify.subject_files import import_file

USUAL_ARITHMETIC: Mapping[str, str] = {"fp32": "tf32", "bf16": "bf16", "fp16": "fp16"}
"""What a carrier's matmul operands are rounded to when the subject declares nothing."""

PRECISIONS: Mapping[str, str] = {"fp32": "ieee", "tf32x3": "ieee", "bf16x6": "ieee", "bf16x3": "tf32"}
"""Other names of precisions, Triton's among them: products of parts are as good as what they stand for."""


PRECISIONS_OF_PARTS = frozenset(p for p in PRECISIONS if "x" in p)
"""Those that multiply in parts."""


@dataclass(frozen=True)
class Subject:
    """An implementation under judgement; `None` where it does not offer a function.

    Attributes:
        name: how the subject is called in ids and receipts.
        origin: where it was loaded from (module, file or entry point), for a worker to load it again.
        capabilities: what it declares; an absent key means that everything is tried.
        arithmetic: carrier -> declared precision of matmul operands, completed with the usual one.
        split: carriers whose operands are multiplied in parts, which hold a bit or two less than a whole one.
        import_error: why it could not be loaded; then it offers nothing.
    """

    name: str
    origin: str
    chunk_gated_delta_rule: Callable[..., Any] | None = None
    qdq_state: Callable[..., Any] | None = None
    qdq_w: Callable[..., Any] | None = None
    stages: Callable[..., Any] | None = None
    launch_rows: tuple[str, ...] = ()
    builds: tuple[str, ...] = ()
    force_launch_row: Callable[[str], Any] | None = None
    capabilities: Mapping[str, Any] = field(default_factory=dict)
    arithmetic: Mapping[str, str] = field(default_factory=lambda: dict(USUAL_ARITHMETIC))
    split: frozenset[str] = frozenset()
    deterministic: bool = True
    recorded_launches: Callable[[], Any] | None = None
    import_error: str = ""
    module: ModuleType | None = field(default=None, compare=False, repr=False)


def subject_from_module(module: ModuleType | Any, name: str, origin: str = "") -> Subject:
    """Reads what a namespace offers into a `Subject`.

    Args:
        module: a module, or any object with the attributes named above.
        name: the subject's name.
        origin: where it can be loaded from again.
    """
    return Subject(
        name=name,
        origin=origin or name,
        chunk_gated_delta_rule=_taking(OPTIONS, _function(module, "chunk_gated_delta_rule")),
        qdq_state=_taking({"block_v": 64, "fmt": "e4m3"}, _function(module, "qdq_state")),
        qdq_w=_taking({"fmt": "e4m3"}, _function(module, "qdq_w")),
        stages=_taking(OPTIONS, _function(module, "stages")),
        launch_rows=tuple(map(str, getattr(module, "LAUNCH_ROWS", ()) or ())),
        builds=tuple(map(str, getattr(module, "BUILDS", ()) or ())),
        force_launch_row=_function(module, "force_launch_row"),
        capabilities=dict(getattr(module, "CAPABILITIES", {}) or {}),
        arithmetic={**USUAL_ARITHMETIC, **declared_arithmetic(module)},
        split=frozenset(c for c, named in _named_precisions(module).items() if named in PRECISIONS_OF_PARTS),
        deterministic=bool(getattr(module, "DETERMINISTIC", True)),
        recorded_launches=_function(module, "recorded_launches"),
        module=module if isinstance(module, ModuleType) else None,
    )


def _function(module: ModuleType | Any, name: str) -> Callable[..., Any] | None:
    found = getattr(module, name, None)
    return found if callable(found) else None


OPTIONS: Mapping[str, Any] = {
    "scale": None,
    "initial_state": None,
    "output_final_state": False,
    "use_qk_l2norm_in_kernel": False,
    "use_beta_sigmoid_in_kernel": False,
    "allow_neg_eigval": False,
    "state_v_first": False,
    "cu_seqlens": None,
    "use_gate_in_kernel": False,
    "A_log": None,
    "dt_bias": None,
    "state_format": None,
    "state_block_v": 64,
    "w_format": None,
}
"""The op's options and their defaults."""


def _taking(options: Mapping[str, Any], function: Callable[..., Any] | None) -> Callable[..., Any] | None:
    """A function for callers that name every option: one that it does not take is left out at its default and
    declined at any other value. A wrapper may show that it takes anything; then a call tells."""
    if function is None:
        return None
    shown = _shown_parameters(function)
    absent = set() if shown is None else {name for name in options if name not in shown}
    if shown is not None and not absent:
        return function

    @functools.wraps(function)
    def called(*tensors: Any, **given: Any) -> Any:
        while True:
            taken = {name: value for name, value in given.items() if name not in absent}
            for name in absent & given.keys():
                _declined_unless_default(name, given[name], options[name])
            try:
                return function(*tensors, **taken)
            except TypeError as error:
                name = _unexpected(error)
                if shown is not None or name not in options or name not in taken:
                    raise
                absent.add(name)

    return called


def _declined_unless_default(name: str, value: Any, default: Any) -> None:
    plain = isinstance(value, bool | int | float | str)
    if value is not default and not (plain and value == default):
        shown = repr(value) if plain else type(value).__name__
        raise NotImplementedError(
            f"{name} must stay at {default!r}, got {shown}: the function does not take it; add it"
        )


def _unexpected(error: TypeError) -> str:
    """The keyword that a call did not take, out of what Python says of it; empty for any other error."""
    found = re.search(r"got an unexpected keyword argument '(\w+)'", str(error))
    return found[1] if found else ""


def _shown_parameters(function: Callable[..., Any]) -> frozenset[str] | None:
    """The parameters of a signature; None where it takes any keyword or cannot be read."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return None
    return None if any(p.kind is p.VAR_KEYWORD for p in parameters.values()) else frozenset(parameters)


def declared_arithmetic(module: ModuleType | Any) -> dict[str, str]:
    """What a namespace declares as `ARITHMETIC`, carrier -> precision, in the spelling of the judge."""
    names = _named_precisions(module)
    return {carrier: PRECISIONS.get(precision, precision) for carrier, precision in names.items()}


def _named_precisions(module: ModuleType | Any) -> dict[str, str]:
    declared = dict(getattr(module, "ARITHMETIC", {}) or {})
    return {carrier_name(carrier): carrier_name(precision) for carrier, precision in declared.items()}


GROUP = "gdn_qualify.subjects"

OFFERS = ("chunk_gated_delta_rule", "qdq_state", "qdq_w", "stages", "launch_rows", "builds")
"""What a subject may offer and a check may need."""


def subject_name(spec: str) -> str:
    """The name of a subject in ids: its entry point, its module's dotted path, or its file's stem."""
    text = Path(spec).stem if _is_file(spec) else spec
    return re.sub(r"[^A-Za-z0-9_.-]", "_", text) or "_"


def resolve_subject(spec: str, known: Mapping[str, str]) -> str:
    """Where workers load a subject from: a `.py` file's absolute path, a dotted module, or an object in one
    (`module:object`).

    Nothing of the subject is imported here.

    Args:
        spec: a built-in name, an entry point's name, a `.py` file or a dotted module.
        known: built-in names and their modules.

    Raises:
        UsageError: there is no such subject.
    """
    if _is_file(spec):
        path = Path(spec).expanduser().absolute()
        if not path.is_file():
            raise UsageError(f"subject must be a file that exists, got {spec!r}; check the path")
        return str(path)
    if spec in known:
        return known[spec]
    for point in entry_points(group=GROUP):
        if point.name == spec:
            return point.value
    try:
        found = bool(spec) and importlib.util.find_spec(spec.partition(".")[0]) is not None
    except (ImportError, ValueError):
        found = False
    if not found:
        names = ", ".join(sorted({*known, *(p.name for p in entry_points(group=GROUP))}))
        raise UsageError(
            f"subject must be a .py file, a module or one of {names}, got {spec!r}; check its name"
        )
    return spec


def load_subject(name: str, origin: str) -> Subject:
    """Imports a subject; one that cannot be imported offers nothing and says why.

    Args:
        name: how ids call it.
        origin: what `resolve_subject` returned. Where it has Triton kernels and they are interpreted, the
            interpreter is made to round as a GPU does.
    """
    try:
        subject = _imported(name, origin)
    except BaseException as error:  # noqa: BLE001 - a foreign module may raise anything, SystemExit included
        return Subject(name=name, origin=origin, import_error=describe(error))
    if interprets() and ("triton" in sys.modules or defines_kernels(origin)):
        correct_interpreter()
    return subject


def _imported(name: str, origin: str) -> Subject:
    if _is_file(origin):
        return subject_from_module(import_file(origin), name, origin)
    dotted, _, attribute = origin.partition(":")
    module = importlib.import_module(dotted)
    named = functools.reduce(getattr, filter(None, attribute.split(".")), module)
    return replace(subject_from_module(named, name, origin), module=module)


def offers(subject: Subject) -> tuple[str, ...]:
    """What a subject offers, of `OFFERS`."""
    return tuple(name for name in OFFERS if getattr(subject, name))


def describe(error: BaseException) -> str:
    """An exception in one line: its type and the start of its message."""
    try:
        text = " ".join(str(error).split())
    except BaseException:  # noqa: BLE001 - an exception's own __str__ may fail
        text = "(its message could not be read)"
    return f"{type(error).__name__}: {text[:400]}" if text else type(error).__name__


def _is_file(spec: str) -> bool:
    return spec.endswith(".py")
