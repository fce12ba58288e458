"""Random single edits of a JSON value, and random damage to text: what an attacker or a bad disk does."""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

Place = tuple[str | int, ...]


def places(value: Any, at: Place = ()) -> Iterator[Place]:
    """Every place in a value, its own left out."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*at, key)
        yield from places(inner, (*at, key))


def get(value: Any, place: Place) -> Any:
    """What stands at a place."""
    for step in place:
        value = value[step]
    return value


def edited(value: Any, rng: random.Random, candidates: list[Place]) -> tuple[Any, str]:
    """A copy with one edit, and what was edited."""
    made = copy.deepcopy(value)
    place = rng.choice(candidates)
    holder, key, old = get(made, place[:-1]), place[-1], get(made, place)
    kind = rng.choice(("change", "change", "change", "delete", "add"))
    if kind == "delete":
        del holder[key]
    elif kind == "add" and isinstance(holder, dict):
        holder[f"{key}_more"] = old
    elif kind == "add":
        holder.insert(int(key), copy.deepcopy(old))
    else:
        holder[key] = _other(old, rng)
    return made, f"{kind} {'/'.join(map(str, place))}"


def _other(old: Any, rng: random.Random) -> Any:
    """Another value of the same type where there is one."""
    if isinstance(old, bool):
        return not old
    if isinstance(old, int):
        return old + rng.choice((-1, 1, 1000))
    if isinstance(old, float):
        return old * rng.choice((0.5, 0.999999, 2.0)) + 1e-12
    if isinstance(old, str):
        at = rng.randrange(len(old) + 1)
        return old[:at] + rng.choice("x0<\u2028") + old[at:]
    if isinstance(old, list):
        return [*old[1:], *old[:1]] if len(old) > 1 and old[0] != old[1] else [*old, "x"]
    if isinstance(old, dict):
        return {**old, "x": "y"}
    return "x"


def damaged(data: bytes, rng: random.Random) -> bytes:
    """Bytes with a few random flips, cuts, repetitions or foreign pieces."""
    made = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(made) + 1)
        kind = rng.randrange(5)
        if kind == 0 and at < len(made):
            made[at] = rng.randrange(256)
        elif kind == 1:
            del made[at : at + rng.randint(1, 40)]
        elif kind == 2:
            made[at:at] = made[at : at + rng.randint(1, 40)]
        elif kind == 3:
            made[at:at] = rng.choice(PIECES)
        else:
            del made[at:]
    return bytes(made)


def respelled(data: bytes, rng: random.Random) -> bytes:
    """JSON bytes that say the same in other words, or almost: space, escapes, numbers, order, keys twice."""
    kind = rng.randrange(8)
    if kind == 0:
        return data + rng.choice((b"\n", b" ", b"\r\n", b"\t\n"))
    if kind == 1:
        return rng.choice((b" ", b"\n", b"\xef\xbb\xbf")) + data
    if kind == 2:
        return data.rstrip(b"\n")
    if kind == 3:
        return _at_one(data, rb"[,:\[{]", lambda m: m[0] + rng.choice((b" ", b"\n", b"\t")), rng)
    if kind == 4:
        return _at_one(data, rb"[A-Za-z0-9]", lambda m: b"\\u00%02x" % m[0][0], rng)
    if kind == 5:
        tails = (b".0", b"e0", b"E+0", b"0e-1", b".00")
        return _at_one(data, rb"(?<=:)-?[0-9]+(?=[,}])", lambda m: m[0] + rng.choice(tails), rng)
    value = json.loads(data)
    holder = rng.choice(
        [v for v in [value, *(get(value, p) for p in places(value))] if v and type(v) is dict]
    )
    first = next(iter(holder))
    if kind == 6:
        holder[first] = holder.pop(first)
        return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode() + b"\n"
    own = json.dumps(holder, separators=(",", ":"), ensure_ascii=False).encode()
    twice = b"{" + json.dumps(first).encode() + b":null," + own[1:]
    return data.replace(own, twice, 1)


def _at_one(
    data: bytes, pattern: bytes, change: Callable[[re.Match[bytes]], bytes], rng: random.Random
) -> bytes:
    """Bytes in which one of the places that match is changed, if there is one."""
    places = list(re.finditer(pattern, data))
    if not places:
        return data
    found = rng.choice(places)
    return data[: found.start()] + change(found) + data[found.end() :]


PIECES = (
    b"1e999", b"NaN", b"-0.0", b"[" * 50, b"{" * 50, b'"', b"\\u0000", b"\xff", b"\n", b"[[waiver]]\n",
    b"= 2027-01-31",
    b"<script>alert(1)</script>", b"9" * 400, b"true", b"null", b"'''", b"*" * 60,
    b"0x" + b"f" * 5000, b"a." * 400, b"\r", b"\xef\xbb\xbf", b"inf", b"\n[waiver.x]\n", b"\xd9\xa3",
)  # fmt: skip
