"""Every kernel is compiled for every architecture without a GPU: registers, memory, instructions.

A kernel folder lists its `Build`s: one kernel with one launch row, one set of argument types and constexprs.
`compile_build` turns one of them into machine code for one SM, in this process. `compile_tier` does it for a
list in a child process, where Triton's interpreter is off and a compiler crash takes nothing down.

    python -m kernels.compile_tier kernels.qdq.builds --sm 80 --sm 90
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from kernels.launch import LaunchRow, rows_of

SHARED_LIMIT_BYTES = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
"""SM -> the most shared memory that one block may ask for (CUDA programming guide, compute capabilities)."""

ARCHITECTURES = tuple(SHARED_LIMIT_BYTES)

FAMILIES = {
    "fp8 conversion": r"cvt\.[\w.]*e4m3[\w.]*",
    "global load": r"ld\.global[\w.]*|cp\.async\.[\w.]*",
    "global store": r"st\.global[\w.]*",
    "fp32 division": r"div\.[\w.]*f32",
    "matrix product": r"(?:wgmma|mma|tcgen05)\.[\w.]*",
    "flush to zero": r"[\w.]*\.ftz[\w.]*",
}
"""What is counted in the PTX: family -> the instructions that belong to it."""


@dataclass(frozen=True)
class Build:
    """One kernel, one launch row, one specialisation.

    Attributes:
        kernel: the kernel's name in the launch table.
        row: the launch row's name.
        entry: `module:function` of the `triton.jit` kernel.
        arguments: run-time argument -> Triton type (`*bf16`, `i32`, `fp32`).
        constexprs: the other arguments -> their values (1 for an integer that the launcher specialises).
        divisible: arguments (pointers included) that are multiples of 16, as the launcher would find.
        label: what tells this specialisation from the others of the kernel.
        min_sm: the first SM that it is for.
    """

    kernel: str
    row: str
    entry: str
    arguments: Mapping[str, str]
    constexprs: Mapping[str, Any]
    divisible: tuple[str, ...] = ()
    label: str = ""
    min_sm: int = 80

    @property
    def name(self) -> str:
        """`row[label]`, unique among the builds of a module."""
        return f"{self.row}[{self.label}]"


@dataclass(frozen=True)
class BuildRecord:
    """What came out of compiling a build for an SM; `error` is empty when machine code did.

    Attributes:
        registers: of one thread.
        stack_bytes: of one thread; not 0 when values were spilled to memory.
        shared_bytes: of one block, against the architecture's `shared_limit_bytes`.
        instructions: family -> PTX instruction -> how often it appears.
    """

    name: str
    kernel: str
    row: str
    sm: int
    registers: int = 0
    stack_bytes: int = 0
    shared_bytes: int = 0
    shared_limit_bytes: int = 0
    instructions: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    error: str = ""

    @property
    def launchable(self) -> bool:
        """Whether there is machine code and a block of it fits the architecture's shared memory."""
        return not self.error and self.shared_bytes <= self.shared_limit_bytes

    def of(self, family: str) -> Mapping[str, int]:
        """The instructions of one family with their counts."""
        return self.instructions.get(family, {})


def compile_build(build: Build, sm: int) -> BuildRecord:
    """Compiles one build for one SM, here and now; an error of the compiler is in the record.

    Raises:
        ValueError: an unknown SM or row.
        RuntimeError: this process runs Triton's interpreter, in which nothing can be compiled.
    """
    import triton

    if triton.knobs.runtime.interpret:
        raise RuntimeError(
            "compile_build needs a process without TRITON_INTERPRET, got one with it; use compile_tier"
        )
    if sm not in SHARED_LIMIT_BYTES:
        raise ValueError(
            f"sm must be one of {ARCHITECTURES}, got {sm}; add its shared memory limit to the table"
        )
    record = BuildRecord(build.name, build.kernel, build.row, sm)
    row = row_named(build)
    try:
        compiled = triton.compile(
            ast_source(build), target=target_of(sm), options={**row.options(), "enable_fp_fusion": True}
        )
        usage = resource_usage(compiled.asm["cubin"])
    except Exception as error:  # noqa: BLE001  a compiler may raise anything, and what it raised is the result
        return replace(record, error=f"{type(error).__name__}: {first_line(str(error))}")
    return replace(
        record,
        registers=usage["REG"],
        stack_bytes=usage["STACK"],
        shared_bytes=int(compiled.metadata.shared),
        shared_limit_bytes=SHARED_LIMIT_BYTES[sm],
        instructions=count_instructions(compiled.asm["ptx"]),
    )


def compile_tier(
    module: str,
    sms: Iterable[int] = ARCHITECTURES,
    names: Iterable[str] | None = None,
    timeout_s: float = 600.0,
) -> list[BuildRecord]:
    """Compiles the `BUILDS` of a module for each SM that they are for, in a child process.

    Args:
        module: dotted name of a module with `BUILDS`.
        sms: architectures, such as 90 for SM 9.0.
        names: only the builds with these names; None takes all.
        timeout_s: how long the child may take.

    Raises:
        RuntimeError: the child failed; its last lines are in the message.
        subprocess.TimeoutExpired: it took too long.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "builds.json"
        command = [sys.executable, "-m", "kernels.compile_tier", module, "--out", str(out)]
        command += [part for sm in sms for part in ("--sm", str(sm))]
        command += [part for name in names or () for part in ("--name", name)]
        environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        environment["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
        child = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
        )
        if child.returncode or not out.exists():
            tail = "\n".join((child.stderr or child.stdout).splitlines()[-5:])
            raise RuntimeError(f"compiling {module} must end with 0, got {child.returncode}: {tail}")
        return [BuildRecord(**row) for row in json.loads(out.read_text())]


def row_named(build: Build) -> LaunchRow:
    """The launch row that a build names.

    Raises:
        ValueError: it is not registered for that kernel.
    """
    for row in rows_of(build.kernel):
        if row.name == build.row:
            return row
    raise ValueError(
        f"build {build.name} must name a row of {build.kernel!r}, got {build.row!r}; register it"
    )


def target_of(sm: int) -> Any:
    """Triton's name for an architecture."""
    from triton.backends.compiler import GPUTarget

    return GPUTarget("cuda", sm, 32)


def ast_source(build: Build) -> Any:
    """Triton's source object for a build."""
    from triton.compiler import ASTSource

    module, _, function = build.entry.partition(":")
    kernel = getattr(importlib.import_module(module), function)
    places = {name: (index,) for index, name in enumerate(kernel.arg_names)}
    attributes = {places[name]: [["tt.divisibility", 16]] for name in build.divisible}
    signature = {name: build.arguments.get(name, "constexpr") for name in kernel.arg_names}
    return ASTSource(kernel, signature, dict(build.constexprs), attributes)


def resource_usage(cubin: bytes) -> dict[str, int]:
    """Registers (`REG`), stack (`STACK`) and more of the one kernel in a binary, read by `cuobjdump`."""
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        text = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    return {key: int(value) for key, value in re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", text)}


def count_instructions(ptx: str) -> dict[str, dict[str, int]]:
    """Family -> instruction -> count, for the families of `FAMILIES`."""
    opcodes = Counter(re.findall(r"(?:^|[{;])\s*(?:@!?%\w+\s+)?([a-z]\w*(?:\.\w+)+)\b", ptx, re.MULTILINE))
    return {
        family: {code: n for code, n in sorted(opcodes.items()) if re.fullmatch(pattern, code)}
        for family, pattern in FAMILIES.items()
    }


def first_line(text: str) -> str:
    """The first line of a message that is not empty."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "no message")


def builds_of(module: str) -> tuple[Build, ...]:
    """The `BUILDS` of a module.

    Raises:
        ValueError: it has none, or two of one name.
    """
    builds = tuple(getattr(importlib.import_module(module), "BUILDS", ()))
    if not builds:
        raise ValueError(f"module {module} must define BUILDS, got none; list its builds there")
    twice = [name for name, n in Counter(b.name for b in builds).items() if n > 1]
    if twice:
        raise ValueError(f"build names must be unique, got {twice[0]!r} twice; tell them apart by label")
    return builds


def main(arguments: Sequence[str] | None = None) -> int:
    """Compiles what the command line names; 1 when something cannot be launched."""
    parser = argparse.ArgumentParser(prog="python -m kernels.compile_tier", description=__doc__)
    parser.add_argument("module", help="a module with BUILDS")
    parser.add_argument("--sm", type=int, action="append", help="an architecture; default: all")
    parser.add_argument("--name", action="append", help="only this build; default: all")
    parser.add_argument("--out", type=Path, help="write the records there as JSON, and end with 0")
    options = parser.parse_args(arguments)
    builds = [b for b in builds_of(options.module) if options.name is None or b.name in options.name]
    records = [
        compile_build(build, sm)
        for build in builds
        for sm in options.sm or ARCHITECTURES
        if sm >= build.min_sm
        and row_named(build).fits(sm, {k: v[0] for k, v in row_named(build).where.items()})
    ]
    if options.out is not None:
        options.out.write_text(json.dumps([asdict(record) for record in records], indent=1))
        return 0
    for record in records:
        print(summary(record))
    return 0 if all(record.launchable for record in records) else 1


def summary(record: BuildRecord) -> str:
    """One line about a record."""
    if record.error:
        return f"SM {record.sm} {record.name}: {record.error}"
    return (
        f"SM {record.sm} {record.name}: {record.registers} registers, {record.stack_bytes} B stack, shared "
        f"{record.shared_bytes} of {record.shared_limit_bytes} B, {dict(record.of('fp8 conversion'))}, "
        f"{dict(record.of('global load'))}"
    )


if __name__ == "__main__":
    sys.exit(main())
