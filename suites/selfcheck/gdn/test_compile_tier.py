"""The compile tier judges what was compiled, and believes a record only of what would come out the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kernels import spills
from kernels.compile_tier import (
    ARCHITECTURES,
    BuildRecord,
    compile_tier,
    fault,
    main_builds,
    read_records,
    write_records,
)
from kernels.gdn.builds import BUILDS
from kernels.gdn.launch_table import LAUNCH_ROWS
from kernels.spills import SPILLS, Spill, allowance
from qualify.receipt import compiled_row
from qualify.records import CaseRecord, Verdict
from qualify.verdicts import of_comparisons
from suites.checks.compile_tier import TARGETS, judged
from suites.subjects.kernels import LAUNCH_ROWS as ALL_ROWS

GOOD = BuildRecord(
    "gdn_x:w4[bf16,K128,native]",
    "gdn_x",
    "gdn_x:w4",
    90,
    key="0",
    registers=128,
    shared_bytes=232_448,
    shared_limit_bytes=232_448,
    instructions={"fp8 conversion": {"cvt.rn.satfinite.e4m3x2.f32": 4}},
)

FAULTY = {
    "spills": (replace(GOOD, stack_bytes=8), "must not spill more than 0 B, got 8; take"),
    "does not fit": (
        replace(GOOD, shared_bytes=232_452),
        "must fit 232448 B of shared memory, got 232452; take",
    ),
    "does not compile": (replace(GOOD, error="RuntimeError: PassManager"), "must compile, got RuntimeError"),
}


def test_a_build_that_fits_and_does_not_spill_passes_and_tells_its_conversion() -> None:
    comparison = judged(GOOD)
    assert of_comparisons([comparison]) == (Verdict.PASSED, "")
    record = CaseRecord(
        "id",
        "build.launch_rows",
        "kernels",
        {"target": "sm90"},
        "none",
        0,
        Verdict.PASSED,
        comparisons=(comparison,),
    )
    assert compiled_row(record, comparison) == {
        "kernel": "gdn_x",
        "sm": "9.0",
        "variant": "w4[bf16,K128,native]",
        "registers": 128,
        "spills": 0,
        "shared_bytes": 232_448,
        "conversion": "cvt.rn.satfinite.e4m3x2.f32",
        "passed": True,
        "because": "",
    }


@pytest.mark.parametrize("what", FAULTY)
def test_a_build_that_cannot_be_used_fails_the_case_of_its_sm(what: str) -> None:
    record, message = FAULTY[what]
    verdict, reason = of_comparisons([judged(GOOD), judged(record)])
    assert verdict is Verdict.ERROR
    assert message in reason
    assert message in fault(record)


def test_a_justified_spill_passes_up_to_its_limit_on_its_architectures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(spills, "SPILLS", (Spill("gdn_x:w4", 64, "smaller tiles take longer", (90, 99)),))
    assert judged(replace(GOOD, stack_bytes=64)).passed
    assert not judged(replace(GOOD, stack_bytes=72)).passed
    assert not judged(replace(GOOD, stack_bytes=8, sm=80)).passed


def test_every_justified_spill_belongs_to_a_row_and_has_a_reason() -> None:
    assert {spill.row for spill in SPILLS} <= set(ALL_ROWS)
    assert all(spill.because and spill.stack_bytes > 0 for spill in SPILLS)
    for spill in SPILLS:
        assert allowance(spill.row, spill.sm[0], f"{spill.row}[{spill.build}]") is spill, (
            "an entry that is hidden by an earlier one"
        )


def test_main_builds_hold_every_row_for_every_architecture_that_it_is_for() -> None:
    chosen = main_builds(BUILDS)
    assert {build.row for build in chosen} == set(LAUNCH_ROWS)
    assert len(chosen) < len(BUILDS)
    assert tuple(TARGETS.values()) == ARCHITECTURES


MODULE = "kernels.qdq.builds"
NAMES = ("qdq_tiles:w1[K16,bv64,fp32,int8,portable]", "qdq_rows:e4096-w4[bf16,portable]")


def compiled(recorded: Path | None) -> list[BuildRecord]:
    return compile_tier(MODULE, sms=[80], names=NAMES, recorded=recorded)


def test_records_are_used_while_nothing_changed_and_one_of_them_comes_out_again(tmp_path: Path) -> None:
    path = tmp_path / "recorded.json"
    assert read_records(path) == []
    smallest, largest = sorted(compiled(path), key=lambda record: record.registers)
    assert smallest.registers < largest.registers
    assert smallest.key != largest.key

    marked = replace(largest, registers=254)
    write_records(path, [smallest, marked])
    assert {r.registers for r in compiled(path)} == {smallest.registers, 254}

    write_records(path, [replace(smallest, registers=1), marked])
    assert {r.registers for r in compiled(path)} == {smallest.registers, largest.registers}

    write_records(path, [smallest, replace(marked, key="of another source")])
    assert {r.registers for r in compiled(path)} == {smallest.registers, largest.registers}
