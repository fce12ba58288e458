"""The QDQ kernels compile for every architecture, with the instructions that the contract needs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernels import compile_tier as tier
from kernels.compile_tier import ARCHITECTURES, Build, BuildRecord, builds_of
from kernels.launch import rows_of
from kernels.qdq.builds import BUILDS
from suites.selfcheck.qdq import broken_builds

MODULE = "kernels.qdq.builds"
NAMES = (
    "qdq_rows:e4096-w4[bf16,native]",
    "qdq_rows:e4096-w4[bf16,portable]",
    "qdq_tiles:w8[K128,bv64,fp32,e4m3,native]",
    "qdq_tiles:w8[K128,bv64,fp32,int8,portable]",
)


@pytest.fixture(scope="module")
def records() -> dict[tuple[str, int], BuildRecord]:
    return {(r.name, r.sm): r for r in tier.compile_tier(MODULE, names=NAMES)}


def test_every_architecture_gets_machine_code(records: dict[tuple[str, int], BuildRecord]) -> None:
    portable = {sm for name, sm in records if "portable" in name}
    native = {sm for name, sm in records if "native" in name}
    assert portable == set(ARCHITECTURES)
    assert native == {sm for sm in ARCHITECTURES if sm >= 90}
    assert all(r.launchable and r.registers > 0 for r in records.values()), [
        r.error for r in records.values() if not r.launchable
    ]


def test_nothing_is_spilled_and_loads_are_16_bytes_wide(
    records: dict[tuple[str, int], BuildRecord],
) -> None:
    assert {r.stack_bytes for r in records.values()} == {0}
    assert {frozenset(r.of("global load")) for r in records.values()} == {frozenset({"ld.global.v4.b32"})}
    assert {frozenset(r.of("global store")) for r in records.values()} == {frozenset({"st.global.v4.b32"})}


def test_division_is_ieee_and_subnormals_are_kept(records: dict[tuple[str, int], BuildRecord]) -> None:
    assert {frozenset(r.of("fp32 division")) for r in records.values()} == {frozenset({"div.rn.f32"})}
    assert {frozenset(r.of("flush to zero")) for r in records.values()} == {frozenset()}


def test_native_code_converts_from_fp32_and_portable_code_does_not(
    records: dict[tuple[str, int], BuildRecord],
) -> None:
    for (name, _), record in records.items():
        found = set(record.of("fp8 conversion"))
        if "native" in name:
            assert "cvt.rn.satfinite.e4m3x2.f32" in found
            assert not [code for code in found if code.endswith("e4m3x2.f16x2")]
        else:
            assert found == set()


def test_builds_cover_every_row_that_a_gpu_can_use() -> None:
    expected = {row.name for kernel in ("qdq_rows", "qdq_tiles") for row in rows_of(kernel)}
    assert {b.row for b in BUILDS} == expected - {"qdq_rows:interpreter"}


def child(code: str) -> str:
    """Runs code where Triton compiles, and returns what it prints."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout


def test_a_kernel_that_does_not_compile_is_a_record_and_not_an_exception() -> None:
    records = {r.name: r for r in tier.compile_tier("suites.selfcheck.qdq.broken_builds", sms=[80])}
    assert "CompilationError" in records["qdq_rows:e4096-w4[no such function]"].error
    assert not records["qdq_rows:e4096-w4[no such function]"].launchable
    assert records["qdq_rows:e4096-w4[too early for native]"].error


def test_a_child_that_dies_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="must end with 0"):
        tier.compile_tier("kernels.no_such_module")


def test_command_line_prints_each_record_and_fails_with_the_worst(tmp_path: Path) -> None:
    printed = child(
        "import sys; from kernels.compile_tier import main; "
        f"sys.exit(main(['{MODULE}', '--sm', '86', '--name', '{NAMES[1]}']))"
    )
    assert printed.startswith("SM 86 qdq_rows:e4096-w4[bf16,portable]: ")
    assert "ld.global.v4.b32" in printed


def test_records_round_trip_and_shared_memory_is_held_against_the_limit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = BuildRecord(
        "a",
        "k",
        "r",
        86,
        registers=40,
        shared_bytes=101_377,
        shared_limit_bytes=101_376,
        instructions={"fp32 division": {"div.rn.f32": 1}},
    )
    assert not made.launchable
    monkeypatch.setattr(tier, "compile_build", lambda build, sm: made)
    out = tmp_path / "records.json"
    assert tier.main([MODULE, "--sm", "86", "--out", str(out)]) == 0
    assert BuildRecord(**json.loads(out.read_text())[0]) == made
    assert tier.main([MODULE, "--sm", "86"]) == 1
    assert "shared 101377 of 101376 B" in capsys.readouterr().out
    monkeypatch.setattr(
        tier, "compile_build", lambda build, sm: BuildRecord("a", "k", "r", 86, error="Oops: x")
    )
    assert tier.main([MODULE, "--sm", "86"]) == 1
    assert "SM 86 a: Oops: x" in capsys.readouterr().out


def test_instructions_are_counted_by_family() -> None:
    ptx = """
        @%p1 ld.global.v4.b32 { %r1 }, [ %rd1 + 0 ];
        { cvt.rn.satfinite.e4m3x2.f32 lo, %r2, %r3; cvt.rn.f16x2.e4m3x2 a, b; }
        div.rn.f32 %r4, %r5, %r6;
        add.ftz.f32 %r4, %r5, %r6;
    """
    counted = tier.count_instructions(ptx)
    assert counted["global load"] == {"ld.global.v4.b32": 1}
    assert counted["fp8 conversion"] == {"cvt.rn.f16x2.e4m3x2": 1, "cvt.rn.satfinite.e4m3x2.f32": 1}
    assert counted["fp32 division"] == {"div.rn.f32": 1}
    assert counted["flush to zero"] == {"add.ftz.f32": 1}


def test_what_cannot_be_compiled_is_refused() -> None:
    build: Build = BUILDS[0]
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET"):
        tier.compile_build(build, 90)
    with pytest.raises(ValueError, match="must define BUILDS"):
        builds_of("kernels.options")
    with pytest.raises(ValueError, match="must name a row"):
        tier.row_named(broken_builds.UNREGISTERED)
    with pytest.raises(ValueError, match="unique"):
        builds_of("suites.selfcheck.qdq.twin_builds")
