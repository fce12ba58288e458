"""The published JSON schema, compiled into functions: 100,000 comparisons are checked in about a second.

Knows the keywords that `qualify/receipt.schema.json` uses and refuses a schema with any other, so that no
rule of the published schema is silently left out. (`jsonschema` gives the same answers a hundred times
slower; a test holds the two together.)
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from reports.reading import ReceiptError, short

Check = Callable[[Any, str], None]

SCHEMA_FILE = Path(__file__).parent.parent / "qualify" / "receipt.schema.json"

TYPES: Mapping[str, Callable[[Any], bool]] = {
    "object": lambda v: type(v) is dict,
    "array": lambda v: type(v) is list,
    "string": lambda v: type(v) is str,
    "integer": lambda v: type(v) is int or (type(v) is float and v.is_integer()),
    "number": lambda v: type(v) is int or type(v) is float,
    "boolean": lambda v: type(v) is bool,
    "null": lambda v: v is None,
}
ANNOTATIONS = frozenset(
    {"$schema", "$id", "$defs", "$comment", "title", "description", "examples", "default", "format"}
)


@cache
def published() -> Check:
    """The check of the published schema of receipts."""
    return compiled(json.loads(SCHEMA_FILE.read_text(encoding="utf-8")))


def compiled(schema: Mapping[str, Any]) -> Check:
    """A function that raises a ReceiptError for a value that the schema does not allow.

    Raises:
        ValueError: a keyword that is not known here.
    """
    return _Compiler(schema).check(schema)


class _Compiler:
    def __init__(self, root: Mapping[str, Any]) -> None:
        self.root = root
        self.made: dict[str, Check] = {}

    def check(self, schema: Any) -> Check:
        if schema is True:
            return lambda value, where: None
        if schema is False:
            return lambda value, where: _fail(where, "nothing at all", value)
        parts = [
            KEYWORDS[word](self, argument, schema)
            for word, argument in schema.items()
            if _known(word) and word in KEYWORDS
        ]
        if len(parts) == 1:
            return parts[0]

        def every(value: Any, where: str) -> None:
            for part in parts:
                part(value, where)

        return every

    def reference(self, path: str, _: Any) -> Check:
        def late(value: Any, where: str) -> None:
            if path not in self.made:
                self.made[path] = self.check(self._resolve(path))
            self.made[path](value, where)

        return late

    def _resolve(self, path: str) -> Any:
        node: Any = self.root
        for step in path.removeprefix("#/").split("/") if path != "#" else ():
            node = node[step]
        return node

    def type(self, names: str | Sequence[str], _: Any) -> Check:
        wanted = [names] if isinstance(names, str) else list(names)
        tests = [TYPES[name] for name in wanted]
        rule = " or ".join(wanted)

        def check(value: Any, where: str) -> None:
            for test in tests:
                if test(value):
                    return
            _fail(where, rule, value)

        return check

    def properties(self, named: Mapping[str, Any], _: Any) -> Check:
        checks = {name: self.check(inner) for name, inner in named.items()}

        def check(value: Any, where: str) -> None:
            if type(value) is dict:
                for name, item in value.items():
                    inner = checks.get(name)
                    if inner is not None:
                        inner(item, name)

        return check

    def additional(self, allowed: Any, schema: Mapping[str, Any]) -> Check:
        known = frozenset(schema.get("properties", {}))
        inner = None if allowed is False else self.check(allowed)

        def check(value: Any, where: str) -> None:
            if type(value) is dict:
                for name, item in value.items():
                    if name not in known:
                        if inner is None:
                            _fail(where, "without unknown keys", name)
                        else:
                            inner(item, where)

        return check

    def names(self, inner_schema: Any, _: Any) -> Check:
        inner = self.check(inner_schema)

        def check(value: Any, where: str) -> None:
            if type(value) is dict:
                for name in value:
                    inner(name, f"a key of {where}")

        return check

    def required(self, names: Sequence[str], _: Any) -> Check:
        def check(value: Any, where: str) -> None:
            if type(value) is dict:
                for name in names:
                    if name not in value:
                        _fail(where, f"an object with `{name}`", list(value))

        return check

    def items(self, inner_schema: Any, _: Any) -> Check:
        inner = self.check(inner_schema)

        def check(value: Any, where: str) -> None:
            if type(value) is list:
                for item in value:
                    inner(item, where)

        return check

    def enum(self, allowed: Sequence[Any], _: Any) -> Check:
        def check(value: Any, where: str) -> None:
            if not any(type(value) is type(one) and value == one for one in allowed):
                _fail(where, f"one of {', '.join(map(str, allowed))}", value)

        return check

    def const(self, wanted: Any, schema: Any) -> Check:
        return self.enum([wanted], schema)

    def pattern(self, expression: str, _: Any) -> Check:
        search = re.compile(expression).search
        return _limit(str, lambda v: search(v) is not None, f"text like {expression}")

    def any_of(self, schemas: Sequence[Any], _: Any) -> Check:
        checks = [self.check(inner) for inner in schemas]

        def check(value: Any, where: str) -> None:
            for one in checks:
                try:
                    one(value, where)
                    return
                except ReceiptError:
                    continue
            _fail(where, "one of the shapes that are allowed here", value)

        return check


def _limit(kind: Any, holds: Callable[[Any], bool], rule: str) -> Check:
    def check(value: Any, where: str) -> None:
        if isinstance(value, kind) and not isinstance(value, bool) and not holds(value):
            _fail(where, rule, value)

    return check


KEYWORDS: Mapping[str, Callable[[_Compiler, Any, Any], Check]] = {
    "$ref": _Compiler.reference,
    "type": _Compiler.type,
    "properties": _Compiler.properties,
    "additionalProperties": _Compiler.additional,
    "propertyNames": _Compiler.names,
    "required": _Compiler.required,
    "items": _Compiler.items,
    "enum": _Compiler.enum,
    "const": _Compiler.const,
    "pattern": _Compiler.pattern,
    "anyOf": _Compiler.any_of,
    "minimum": lambda c, n, s: _limit((int, float), lambda v: v >= n, f"at least {n}"),
    "maximum": lambda c, n, s: _limit((int, float), lambda v: v <= n, f"at most {n}"),
    "exclusiveMinimum": lambda c, n, s: _limit((int, float), lambda v: v > n, f"more than {n}"),
    "minLength": lambda c, n, s: _limit(str, lambda v: len(v) >= n, f"at least {n} characters"),
    "maxLength": lambda c, n, s: _limit(str, lambda v: len(v) <= n, f"at most {n} characters"),
    "minItems": lambda c, n, s: _limit(list, lambda v: len(v) >= n, f"at least {n} items"),
    "maxItems": lambda c, n, s: _limit(list, lambda v: len(v) <= n, f"at most {n} items"),
}


def _known(word: str) -> bool:
    if word not in KEYWORDS and word not in ANNOTATIONS:
        raise ValueError(
            f"the schema must use keywords that are compiled here, got {word!r}; add it to KEYWORDS"
        )
    return True


def _fail(where: str, rule: str, value: Any) -> None:
    raise ReceiptError(f"{where}: must be {rule}, got {short(repr(value))}; the schema does not allow it")
