"""Every kernel is compiled for every architecture without a GPU: registers, memory, instructions.

A kernel folder lists its `Build`s: one kernel with one launch row, one set of argument types and constexprs.
`compile_build` turns one of them into machine code for one SM, in this process. `compile_tier` does it for a
list in a child process, where Triton's interpreter is off and a compiler crash takes nothing down.

Compiling takes about a second each. What came out of it for the main builds is kept in `compiled.json`, each
record under a key: the digest of the kernel's source and of all that it calls, of its types, constants and
options, the SM and the versions of the compilers. Where the key is another one, the build is compiled; and
all are compiled where the smallest recorded one comes out otherwise now.

    python -m kernels.compile_tier kernels.qdq.builds kernels.gdn.builds --jobs 8      every build, judged
    python -m kernels.compile_tier kernels.qdq.builds --sm 80 --main --out FILE        the main ones, recorded
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from kernels.launch import LaunchRow, rows_of
from kernels.spills import allowance

SHARED_LIMIT_BYTES = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
"""SM -> the most shared memory that one block may ask for (CUDA programming guide, compute capabilities)."""

ARCHITECTURES = tuple(SHARED_LIMIT_BYTES)

RECORDED = Path(__file__).with_name("compiled.json")
"""What came out of compiling the main builds, by key."""

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
        not_on: SMs on which the host refuses what would launch it.
    """

    kernel: str
    row: str
    entry: str
    arguments: Mapping[str, str]
    constexprs: Mapping[str, Any]
    divisible: tuple[str, ...] = ()
    label: str = ""
    min_sm: int = 80
    not_on: tuple[int, ...] = ()

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
        key: digest of all that the result depends on.
    """

    name: str
    kernel: str
    row: str
    sm: int
    key: str = ""
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
    record = BuildRecord(build.name, build.kernel, build.row, sm, key_of(build, sm))
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


def key_of(build: Build, sm: int) -> str:
    """The digest of all that the outcome of `compile_build` depends on; of no use in the interpreter."""
    import triton

    source = ast_source(build)
    parts = (
        sorted(sources_of(source.fn).items()),
        sorted(source.signature.items()),
        sorted((place, str(value)) for place, value in source.constants.items()),
        sorted(source.attrs.items()),
        sorted(row_named(build).options().items()),
        (sm, triton.__version__, compiler_version(sm)),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def sources_of(kernel: Any) -> dict[str, str]:
    """The text of a kernel, of all device functions that it calls, and the global constants that they name.

    Triton's own key of a kernel depends on what was compiled before it, so it cannot be kept.
    """
    from triton import JITFunction
    from triton.language import constexpr

    found: dict[str, str] = {}
    left = [kernel]
    while left:
        function = left.pop()
        name = f"{function.fn.__module__}.{function.fn.__name__}"
        if name in found:
            continue
        found[name] = function.src
        for node in ast.walk(ast.parse(function.src)):
            value = function.fn.__globals__.get(node.id) if isinstance(node, ast.Name) else None
            if isinstance(value, JITFunction):
                left.append(value)
            elif isinstance(value, constexpr):
                found[f"{name}: {ast.unparse(node)}"] = str(value.value)
    return found


@cache
def compiler_version(sm: int) -> str:
    """The version of the assembler that Triton calls for an SM."""
    from triton.backends.nvidia.compiler import get_ptxas

    return str(get_ptxas(sm).version)


def fault(record: BuildRecord) -> str:
    """What is wrong with a build, in one line; empty when it can be launched and spills what it may."""
    if record.error:
        return f"a build must compile, got {record.error}"
    if record.shared_bytes > record.shared_limit_bytes:
        return (
            f"a block must fit {record.shared_limit_bytes} B of shared memory, got {record.shared_bytes}; "
            f"take smaller tiles or fewer stages"
        )
    allowed = allowance(record.row, record.sm, record.name)
    if record.stack_bytes > allowed.stack_bytes:
        return (
            f"a thread must not spill more than {allowed.stack_bytes} B, got {record.stack_bytes}; take "
            f"smaller tiles or more warps, or justify it in the table of spills"
        )
    return ""


def main_builds(builds: Iterable[Build]) -> list[Build]:
    """The first build of each row and conversion: builds are listed with the main shape first."""
    chosen: dict[tuple[str, Any], Build] = {}
    for build in builds:
        chosen.setdefault((build.row, build.constexprs.get("CONVERSION")), build)
    return list(chosen.values())


def compile_tier(
    *modules: str,
    sms: Iterable[int] = ARCHITECTURES,
    names: Iterable[str] | None = None,
    main_only: bool = False,
    recorded: Path | None = None,
    jobs: int = 1,
    timeout_s: float = 600.0,
) -> list[BuildRecord]:
    """Compiles the `BUILDS` of some modules for each SM that they are for, in a child process.

    Args:
        modules: dotted names of modules with `BUILDS`.
        sms: architectures, such as 90 for SM 9.0.
        names: only the builds with these names; None takes all.
        main_only: only the main build of each launch row and conversion.
        recorded: records of an earlier run, used where their keys are the same.
        jobs: how many processes compile.
        timeout_s: how long the child may take.

    Raises:
        RuntimeError: the child failed; its last lines are in the message.
        subprocess.TimeoutExpired: it took too long.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "builds.json"
        command = [sys.executable, "-m", "kernels.compile_tier", *modules, "--out", str(out)]
        command += [part for sm in sms for part in ("--sm", str(sm))]
        command += [part for name in names or () for part in ("--name", name)]
        command += ["--main"] if main_only else []
        command += ["--recorded", str(recorded)] if recorded else []
        command += ["--jobs", str(jobs)]
        environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        environment["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
        child = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
        )
        if child.returncode or not out.exists():
            tail = "\n".join((child.stderr or child.stdout).splitlines()[-5:])
            raise RuntimeError(
                f"compiling {', '.join(modules)} must end with 0, got {child.returncode}: {tail}"
            )
        return read_records(out)


def read_records(path: Path) -> list[BuildRecord]:
    """The records in a file; none where there is no file."""
    return [BuildRecord(**row) for row in json.loads(path.read_text())] if path.exists() else []


def write_records(path: Path, records: Iterable[BuildRecord]) -> None:
    """Writes records, one on a line, in an order of their own."""
    lines = [
        json.dumps(asdict(record), sort_keys=True) for record in sorted(records, key=lambda r: (r.name, r.sm))
    ]
    path.write_text("[\n" + ",\n".join(lines) + "\n]\n")


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
    """Compiles what the command line names; 1 when something is wrong with a build."""
    parser = argparse.ArgumentParser(prog="python -m kernels.compile_tier", description=__doc__)
    parser.add_argument("modules", nargs="+", help="modules with BUILDS")
    parser.add_argument("--sm", type=int, action="append", help="an architecture; default: all")
    parser.add_argument("--name", action="append", help="only this build; default: all")
    parser.add_argument("--main", action="store_true", help="only the main build of each row and conversion")
    parser.add_argument("--recorded", type=Path, help="take records from there where their keys are the same")
    parser.add_argument("--jobs", type=int, default=1, help="how many processes compile")
    parser.add_argument("--out", type=Path, help="write the records there as JSON, and end with 0")
    options = parser.parse_args(arguments)
    builds = [b for module in options.modules for b in builds_of(module)]
    builds = main_builds(builds) if options.main else builds
    wanted = [
        (build, sm)
        for build in builds
        if options.name is None or build.name in options.name
        for sm in options.sm or ARCHITECTURES
        if is_for(build, sm)
    ]
    known = {record.key: record for record in read_records(options.recorded)} if options.recorded else {}
    records = made(wanted, known, options.jobs)
    if options.out is not None:
        write_records(options.out, records)
        return 0
    for record in records:
        print(summary(record))
    return 1 if any(fault(record) for record in records) else 0


def is_for(build: Build, sm: int) -> bool:
    """Whether a build is for an SM, and so is its row."""
    row = row_named(build)
    return sm >= build.min_sm and row.sm[0] <= sm <= row.sm[1] and sm not in build.not_on


def made(
    wanted: Sequence[tuple[Build, int]], known: Mapping[str, BuildRecord], jobs: int
) -> list[BuildRecord]:
    """The records of builds in the order given: known by their keys, or compiled now."""
    keys = [key_of(build, sm) if known else "" for build, sm in wanted]
    found = {key: pair for key, pair in zip(keys, wanted, strict=True) if key in known}
    if found:
        smallest = min(found, key=lambda key: known[key].registers)
        known = known if compile_build(*found[smallest]) == known[smallest] else {}
    left = [pair for pair, key in zip(wanted, keys, strict=True) if key not in known]
    builds, sms = [build for build, _ in left], [sm for _, sm in left]
    if jobs > 1 and len(left) > 1:
        with ProcessPoolExecutor(min(jobs, len(left))) as pool:
            compiled = iter(list(pool.map(compile_build, builds, sms)))
    else:
        compiled = iter([compile_build(build, sm) for build, sm in left])
    return [known[key] if key in known else next(compiled) for key in keys]


def summary(record: BuildRecord) -> str:
    """One line about a record."""
    if record.error:
        return f"SM {record.sm} {record.name}: {record.error}"
    wrong = fault(record)
    return (
        f"SM {record.sm} {record.name}: {record.registers} registers, {record.stack_bytes} B stack, shared "
        f"{record.shared_bytes} of {record.shared_limit_bytes} B, {dict(record.of('fp8 conversion'))}, "
        f"{dict(record.of('global load'))}" + (f": {wrong}" if wrong else "")
    )


if __name__ == "__main__":
    sys.exit(main())
