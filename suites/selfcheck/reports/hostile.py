"""A receipt in which every text is an attack: on HTML, on scripts, on XML, on Markdown, on terminals."""

from __future__ import annotations

import json
from typing import Any

from qualify.canonical import canonical_bytes, digest
from qualify.packing import SCHEMA, SCHEMA_VERSION
from suites.selfcheck.reports import synthetic

ATTACKS = (
    "<script>window.owned=1</script>",
    "</script><script>window.owned=1</script>",
    "</style><img src=x onerror=window.owned=1>",
    '" onmouseover="window.owned=1" x="',
    "'><svg onload=window.owned=1>",
    "{{ 7*7 }}{% raw %}",
    "]]><!--",
    "javascript:window.owned=1",
    "\u202e\u2028\u0000\x1b[31m\r\n\t",
    "| [x](https://example.invalid) `` ``` @all <b>",
)
KEPT = frozenset(
    {
        "verdict",
        "failure",
        "kind",
        "id",
        "digest",
        "time",
        "expires",
        "day",
        "state",
        "requirement",
        "value_seen",
        "sm",
    }
)
"""Texts that have a closed set of values or that other parts refer to."""


WAIVER = {
    "pattern": "p",
    "owner": "o",
    "issue": "i",
    "reason": "r",
    "expires": "2027-01-31",
    "state": "unused",
    "scope": {"driver": "1"},
    "cases": [],
}
FILE = {"name": "f.toml", "digest": "sha256:" + "0" * 64, "day": "2026-11-30"}
MOVED = {"kind": "k", "what": "w", "before": "b", "after": "a", "worse": True}


def body() -> dict[str, Any]:
    """A body as it is written with an attack on every text that is free, keys included."""
    made = json.loads(canonical_bytes(synthetic.receipt(24, failures=2, missed=1)["body"]))
    made["header"]["reasons"] = ["a reason"]
    made["waivers"] = [dict(WAIVER)]
    made["waiver_file"], made["policy"] = dict(FILE), {**FILE, "rules": {"verdict": ["QUALIFIED"]}}
    made["gates"] = [{"rule": "r", "value": "v", "limit": "l", "passed": False, "because": "b"}]
    made["comparison"] = {"baseline_id": "b", "baseline_time": "t", "moved": [dict(MOVED)]}
    made["manifest"] = {"file": "x"}
    attacked: dict[str, Any] = _attacked(made, [0])
    return attacked


def receipt() -> dict[str, Any]:
    """A sealed receipt around `body`."""
    attacked = body()
    return {"schema": SCHEMA, "schema_version": SCHEMA_VERSION, "id": digest(attacked), "body": attacked}


def _attacked_id(case_id: str, turn: int) -> str:
    """An id that still is one, with attacks on the subject, a level and the regime."""
    attack = ATTACKS[turn % len(ATTACKS)].translate({ord(c): None for c in "[]#,/"})
    head, _, rest = case_id.partition("[")
    cell, _, tail = rest.partition("]")
    return f"{attack}{head}[{cell}{attack}]{attack}{tail}"


def _attacked(value: Any, turn: list[int], name: str = "") -> Any:
    if isinstance(value, str) and name not in KEPT and value not in ("NaN", "Infinity", "-Infinity"):
        turn[0] += 1
        if name == "case_id":
            return _attacked_id(value, turn[0])
        return value + ATTACKS[turn[0] % len(ATTACKS)]
    if isinstance(value, list):
        return [_attacked(item, turn, name) for item in value]
    if isinstance(value, dict):
        free = name in (
            "files",
            "launch",
            "levels",
            "axes",
            "scope",
            "manifest",
            "variables",
            "gpu",
            "software",
        )
        return {
            (
                key + ATTACKS[len(key) % len(ATTACKS)] if free and key not in KEPT | {"dtype"} else key
            ): _attacked(item, turn, key)
            for key, item in value.items()
        }
    return value
