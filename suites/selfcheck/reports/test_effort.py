"""A small file cannot make its verifier work without end."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from reports import cover
from reports.model import from_json, seal
from reports.verify import disagreement, verify
from suites.selfcheck.reports import synthetic

Body = dict[str, Any]
MANY = 800


def count_tuples_of_twenty_axes(body: Body) -> None:
    levels = {f"axis{i}": [f"level{j}" for j in range(9)] for i in range(40)}
    body["plan"]["checks"][0]["axes"] |= levels
    body["plan"]["covers"][0] |= {"axes": list(levels), "strength": 20}


def count_tuples_of_a_thousand_axes(body: Body) -> None:
    levels = {f"axis{i}": ["a"] for i in range(1000)}
    body["plan"]["checks"][0]["axes"] |= levels
    body["plan"]["covers"][0] |= {"axes": list(levels), "strength": 500}


def prove_a_thousand_times(body: Body) -> None:
    body["plan"]["covers"] *= 300
    body["plan"]["constraints"] *= 70_000


def colour_a_graph(body: Body) -> None:
    """Whether a tuple can be completed is as hard as giving 12 neighbours 11 colours."""
    colours = [f"c{i}" for i in range(11)]
    levels = {f"axis{i}": colours for i in range(12)}
    check = body["plan"]["checks"][0]
    check["axes"] |= levels
    body["plan"]["constraints"] = [
        {
            "name": "n",
            "because": "b",
            "removed": 0,
            "check": check["name"],
            "forbid": {f"axis{i}": [c], f"axis{j}": [c]},
        }
        for i in range(12)
        for j in range(i)
        for c in colours
    ]


def ask_about_wrong_answers(body: Body) -> None:
    body["plan"]["wrong_answers"] = [
        {"name": f"w{i}", "because": "b", "sites": [], "formats": []} for i in range(MANY)
    ]
    passed = next(c for c in body["cases"] if c["verdict"] == "passed" and c["check"].startswith("op"))
    add(body, passed, lambda i: {"case_id": f"kernels/{passed['check']}[dtype:d{i}]normal#0"})


def waive_everything(body: Body) -> None:
    waiver = {"owner": "o", "issue": "i", "reason": "r", "expires": "2027-01-31", "state": "unused"}
    body["waivers"] = [{**waiver, "pattern": "*a" * 500 + str(i)} for i in range(1000)]
    body["waiver_file"] = {"name": "w", "digest": "sha256:" + "0" * 64, "day": "2026-11-30"}
    passed = next(c for c in body["cases"] if c["verdict"] == "passed")
    add(body, passed, lambda i: {"case_id": f"kernels/op[x:{'a' * 300}{i}]normal#0"})


def skip_each_by_a_rule_of_its_own(body: Body) -> None:
    skipped = next(c for c in body["cases"] if c["verdict"] == "skipped")
    add(body, skipped, lambda i: {"case_id": f"kernels/op[x:{i}]normal#0", "requirement": f"r{i}"}, 20_000)


def limit_every_level(body: Body) -> None:
    rules = {"max_skipped": {f"axis{i}": {"level": 1} for i in range(20_000)}}
    body["policy"] = {"name": "p", "digest": "sha256:" + "0" * 64, "day": "2026-11-30", "rules": rules}
    body["gates"] = [{"rule": f"r{i}", "value": "0", "limit": "1", "passed": True} for i in range(20_000)]


def add(body: Body, like: Body, change: Callable[[int], Body], number: int = MANY) -> None:
    derived = ("check", "subject", "levels", "regime", "seed", "command")
    kept = {name: value for name, value in like.items() if name not in derived}
    body["cases"] += [{**kept, **change(i)} for i in range(number)]


SIZE, COVER, POLICY = "its size is that of a receipt", "the cover, counted again", "the policy, applied again"
DEMANDS: dict[Callable[[Body], None], str] = {
    count_tuples_of_twenty_axes: SIZE,
    count_tuples_of_a_thousand_axes: SIZE,
    prove_a_thousand_times: SIZE,
    colour_a_graph: COVER,
    ask_about_wrong_answers: SIZE,
    waive_everything: SIZE,
    skip_each_by_a_rule_of_its_own: SIZE,
    limit_every_level: POLICY,
}


@pytest.mark.parametrize("demand", DEMANDS)
def test_a_receipt_that_asks_for_endless_work_is_refused_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, demand: Callable[[Body], None]
) -> None:
    monkeypatch.setattr(cover, "MAX_STEPS", cover.MAX_STEPS // 10)
    body = synthetic.body(60)
    demand(body)
    path = synthetic.write(tmp_path / "receipt.json", seal(body))
    start = time.process_time()
    assert DEMANDS[demand] in [f.step for f in verify(path).findings if not f.passed]
    assert time.process_time() - start < 20


@pytest.mark.parametrize("demand", [d for d, step in DEMANDS.items() if step == SIZE])
def test_its_page_says_so_and_does_not_judge_it(demand: Callable[[Body], None]) -> None:
    body = synthetic.body(60)
    demand(body)
    assert "steps" in disagreement(from_json(seal(body)).body)
