"""The command line: plan, run, look up, repeat, render. Only this module prints."""

from __future__ import annotations

import errno
import importlib
import json
import os
import shlex
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import typer

from qualify import progress
from qualify.errors import Exit, UsageError
from qualify.execute import (
    RECEIPT_NAME,
    Run,
    alone_in,
    execute,
    prepare_folder,
    terminated_as_interrupted,
)
from qualify.harness import harness_facts
from qualify.interpreted import defines_kernels
from qualify.log import LOG_NAME
from qualify.plan import PLAN_NAME, Plan, PlannedSubject, case_from_id, select
from qualify.planning import make_plan
from qualify.probe import environment, machine_facts, visible_devices
from qualify.receipt import assemble, read_receipt_file, write_receipt
from qualify.records import Overall
from qualify.requirements import unmet
from qualify.subjects import describe, resolve_subject, subject_name
from qualify.tables import DEFAULT_TABLES, Tables, load_tables
from qualify.verdicts import EXITS

REPORT_COMMANDS = "reports.commands"
"""Its `register(app)` adds commands, its `publish(receipt_path)` writes what goes beside a receipt."""

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Qualify Gated DeltaNet kernels that round their state and W.",
)

ProfileOption = Annotated[str, typer.Option("--profile", "-p", help="A named part of the matrix.")]
SubjectOption = Annotated[
    list[str] | None,
    typer.Option("--subject", "-s", help="A .py file, a dotted module or an entry point; may be repeated."),
]
SelectOption = Annotated[
    list[str] | None, typer.Option("--select", "-k", help="Part of a case id, with * and ?; may be repeated.")
]
SeedOption = Annotated[int, typer.Option("--seed", help="Added to every seed of the tables.")]
TablesOption = Annotated[str, typer.Option("--tables", help="Where the tables are: package.module:NAME.")]
OutOption = Annotated[Path | None, typer.Option("--out", "-o", help="A new folder for the run.")]
ReceiptOption = Annotated[
    Path | None, typer.Option("--receipt", "-r", help="A receipt or a run's folder (default: the last run).")
]

DISK_ERRORS = frozenset({errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""What ends a run that had begun: nothing finished is lost, and the rest can be resumed."""

READER_LEFT = 128 + signal.SIGPIPE
"""The exit code where whoever read the output has left: no verdict, and no answer of `diff` or `gate`."""

RUNS_FOLDER = Path("runs")
LISTED = 40


@app.command()
def plan(
    profile: ProfileOption = "cpu",
    subject: SubjectOption = None,
    select_: SelectOption = None,
    seed: SeedOption = 0,
    tables: TablesOption = DEFAULT_TABLES,
    every: Annotated[bool, typer.Option("--all", help="List every case.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Show what would run here, what would not and why; runs nothing."""
    rows = load_tables(tables)
    made = _plan(rows, profile, subject or [], seed, tables)
    chosen = select(made, select_ or [])
    facts = machine_facts(on_cpu=made.profile.sm == "cpu")
    skips = {
        p.case_id: unmet({**p.case.levels, "regime": p.case.regime}, facts, rows.requirements)
        for p in made.cases
        if p.case_id in chosen
    }
    if as_json:
        typer.echo(
            json.dumps({"digest": made.digest, "cases": {k: v.reason if v else "" for k, v in skips.items()}})
        )
        return
    _print_plan(made, skips, every)


def _print_plan(made: Plan, skips: dict[str, Any], every: bool) -> None:
    runs = [case_id for case_id, skip in skips.items() if skip is None]
    typer.echo(f"profile {made.profile.name}: {made.profile.because}")
    typer.echo(
        f"{len(skips)} cases, {len(runs)} run here, {len(skips) - len(runs)} do not; plan {made.digest}"
    )
    for check, number in Counter(made.by_id[i].case.check for i in runs).items():
        typer.echo(f"  {number:5d}  {check}")
    for cover in made.covers:
        if cover.sm == made.profile.sm:
            p = cover.proof
            typer.echo(f"  cover  {cover.check}: {p.covered} of {p.possible} tuples of {p.strength}")
    for reason, number in Counter(skip.reason for skip in skips.values() if skip).items():
        typer.echo(f"  {number:5d}  skipped: {reason}")
    for case_id in runs if every else runs[:LISTED]:
        typer.echo(case_id)
    if not every and len(runs) > LISTED:
        typer.echo(f"... and {len(runs) - LISTED} more; --all lists them")


@app.command()
def run(
    profile: ProfileOption = "cpu",
    subject: SubjectOption = None,
    out: OutOption = None,
    select_: SelectOption = None,
    seed: SeedOption = 0,
    workers: Annotated[int | None, typer.Option("--workers", "-n", help="Processes that run cases.")] = None,
    shard: Annotated[str, typer.Option("--shard", help="This part of the plan, such as 2/8.")] = "1/1",
    resume: Annotated[bool, typer.Option("--resume", help="Run what is left in --out.")] = False,
    tables: TablesOption = DEFAULT_TABLES,
) -> None:
    """Run a profile on subjects and write the receipt; the exit code is the verdict."""
    if resume and out is None:
        raise UsageError("--resume needs the folder of the run, got none; name it with --out")
    rows = load_tables(tables)
    made = _plan(rows, profile, subject or [], seed, tables)
    raise typer.Exit(
        _run(made, rows, out or _fresh_folder(profile), select_ or [], workers, _shard(shard), resume)
    )


def _run(
    made: Plan,
    rows: Tables,
    folder: Path,
    patterns: Sequence[str],
    workers: int | None,
    shard: tuple[int, int],
    resume: bool,
) -> Exit:
    chosen = select(made, patterns)
    on_cpu = made.profile.sm == "cpu"
    devices = () if on_cpu else _places(_devices(), made)
    given = Run(
        folder=folder.absolute(),
        workers=_workers(workers, devices, made),
        devices=devices,
        facts=machine_facts(on_cpu=on_cpu),
        requirements=rows.requirements,
        selected=chosen,
        shard=shard,
        command=shlex.join(["qualify", *sys.argv[1:]]),
        harness=harness_facts(),
    )
    prepare_folder(given.folder, made, resume=resume)
    with alone_in(given.folder):
        with terminated_as_interrupted(), progress.watcher(len(made.cases) // shard[1]) as watcher:
            complete = execute(made, given, watcher)
        return _finish(given.folder, interrupted=not complete)


def _finish(folder: Path, *, interrupted: bool = False) -> Exit:
    """Assembles and writes the receipt of a folder, says what it says, and returns the exit code."""
    receipt = assemble(folder)
    path = write_receipt(folder, receipt)
    beside = _publish(path)
    header = receipt["body"]["header"]
    _summary(receipt["body"], interrupted)
    for written in [path, *beside]:
        typer.echo(f"wrote {_shown(written)}")
    return (
        Exit.INCOMPLETE
        if interrupted and header["verdict"] != Overall.NOT_QUALIFIED
        else EXITS[Overall(header["verdict"])]
    )


def _publish(path: Path) -> list[Path]:
    """What the reports put beside a receipt; none where they are not installed."""
    publish: Callable[[Path], list[Path]] | None = getattr(_report_commands(), "publish", None)
    if publish is None:
        return []
    try:
        return publish(path)
    except Exception as error:  # noqa: BLE001 - a page that fails must not change the verdict
        typer.echo(f"error: nothing was written beside {_shown(path)} ({describe(error)})", err=True)
        return []


@cache
def _register_reports() -> None:
    commands = _report_commands()
    if commands is not None:
        commands.register(app)


def _report_commands() -> Any:
    try:
        return importlib.import_module(REPORT_COMMANDS)
    except ModuleNotFoundError as error:
        if error.name in (REPORT_COMMANDS, REPORT_COMMANDS.partition(".")[0]):
            return None
        raise


def _summary(body: dict[str, Any], interrupted: bool) -> None:
    header, cases = body["header"], body["cases"]
    counts = Counter(str(case["verdict"]) for case in cases)
    typer.echo(", ".join(f"{number} {verdict}" for verdict, number in counts.most_common()))
    failed = [
        c for c in cases if c["verdict"] not in ("passed", "skipped", "unsupported", "excluded", "not_run")
    ]
    for case in failed[:LISTED]:
        typer.echo(f"{case['verdict']}: {case['case_id']}\n    {case['reason']}\n    {case['command']}")
    if len(failed) > LISTED:
        typer.echo(f"... and {len(failed) - LISTED} more")
    for reason in header["reasons"][:LISTED]:
        typer.echo(f"because: {reason}")
    typer.echo(f"{'interrupted; ' if interrupted else ''}{header['verdict']} in {header['duration_s']:.1f} s")


@app.command()
def env(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the machine as a receipt records it, broken packages included."""
    found = environment("here", thorough=True)
    found["facts"] = machine_facts()
    if as_json:
        typer.echo(json.dumps(found, indent=2, sort_keys=True))
        return
    for part in ("facts", "gpu", "system", "switches", "variables"):
        typer.echo(part)
        for name, value in found[part].items():
            typer.echo(f"  {name}: {value}")
    typer.echo("software")
    for name, row in found["software"].items():
        typer.echo(f"  {name}: {row['version'] or '-'}{' (' + row['reason'] + ')' if row['reason'] else ''}")


@app.command()
def explain(case_id: str, receipt: ReceiptOption = None) -> None:
    """Show budget, derivation, discrimination and command of a case of a receipt."""
    body = read_receipt_file(_receipt_path(receipt))["body"]
    case = next((c for c in body["cases"] if c["case_id"] == case_id), None)
    if case is None:
        raise UsageError(f"CASE_ID must be in the receipt, got {case_id!r}; `qualify plan` lists ids")
    for line in progress.explanation(case):
        typer.echo(line)


@app.command()
def rerun(
    case_id: str,
    subject: Annotated[str | None, typer.Option("--subject", "-s", help="Where the subject is.")] = None,
    tables: TablesOption = DEFAULT_TABLES,
    time_limit: Annotated[float, typer.Option("--time-limit", help="Seconds.")] = 600.0,
    out: OutOption = None,
) -> None:
    """Run one case again, whatever profile it came from, and explain it; exit code 0 if it passes."""
    rows = load_tables(tables)
    planned = case_from_id(rows, case_id, time_limit)
    spec = subject or planned.case.subject
    origin = "" if planned.control else resolve_subject(spec, rows.subjects)
    who = PlannedSubject(planned.case.subject, origin, spec)
    sm = planned.case.levels["sm"]
    profile = replace(rows.profiles[0], name="rerun", sm=sm, import_limit_s=time_limit, other_sms=())
    made = Plan(profile, tables, planned.case.seed, () if planned.control else (who,), (planned,))
    with tempfile.TemporaryDirectory() as temporary:
        folder = out or Path(temporary) / "rerun"
        given = Run(
            folder=folder.absolute(),
            workers=1,
            devices=_devices() if sm != "cpu" else (),
            facts=machine_facts(on_cpu=sm == "cpu"),
            requirements=rows.requirements,
            selected=frozenset([case_id]),
        )
        prepare_folder(given.folder, made)
        with terminated_as_interrupted():
            execute(made, given, progress.Silent())
        case = progress.only_case(given.folder / LOG_NAME, planned)
        output = (
            (given.folder / "output.txt").read_text(errors="replace") if case["verdict"] == "crash" else ""
        )
    for line in [*progress.explanation(case), *output.splitlines()[-LISTED:]]:
        typer.echo(line)
    raise typer.Exit(progress.exit_of(case))


@app.command()
def render(folder: Annotated[Path, typer.Argument(help="A run's folder, or a receipt.json.")]) -> None:
    """Write a run's receipt again from its log, or what goes beside a receipt; exits with the verdict."""
    if (folder / RECEIPT_NAME).is_file() and not (folder / PLAN_NAME).exists():
        folder = folder / RECEIPT_NAME  # of a merge: there is no log to write it from
    if folder.is_dir():
        raise typer.Exit(_finish(folder))
    body = read_receipt_file(folder)["body"]
    for written in _publish(folder):
        typer.echo(f"wrote {_shown(written)}")
    raise typer.Exit(EXITS[Overall(body["header"]["verdict"])])


def _plan(rows: Tables, profile: str, specs: Sequence[str], seed: int, path: str) -> Plan:
    subjects = [_planned_subject(rows, spec) for spec in specs or rows.default_subjects]
    names = [s.name for s in subjects]
    if len(set(names)) != len(names) or not names:
        raise UsageError(
            f"each subject must have a name of its own, got {', '.join(names) or 'none'}; rename one"
        )
    return make_plan(rows, profile, subjects, seed=seed, path=path)


def _planned_subject(rows: Tables, spec: str) -> PlannedSubject:
    origin = resolve_subject(spec, rows.subjects)
    return PlannedSubject(subject_name(spec), origin, spec, defines_kernels(origin))


def _devices() -> tuple[str, ...]:
    try:
        return tuple(visible_devices())
    except Exception:  # noqa: BLE001 - no driver, no NVML, no permission: then there is no GPU to use
        return ()


def _places(gpus: tuple[str, ...], made: Plan) -> tuple[str, ...]:
    """A GPU for each worker that may run: every GPU as often as the profile lets workers share one."""
    if not gpus:
        return ()
    cores = len(os.sched_getaffinity(0))
    return gpus * max(1, min(made.profile.workers_per_gpu, cores // len(gpus)))


def _workers(asked: int | None, devices: tuple[str, ...], made: Plan) -> int:
    """How many processes run cases: on GPUs one for each place that the profile gives.

    Raises:
        UsageError: none, or more than there are places.
    """
    if asked is not None and asked < 1:
        raise UsageError(
            f"--workers must be at least 1, got {asked}; leave it out for {made.profile.workers}"
        )
    if devices and asked is not None and asked > len(devices):
        raise UsageError(
            f"--workers must be at most {len(devices)} on the GPUs given, got {asked}; use fewer"
        )
    return asked or len(devices) or made.profile.workers


def _shard(text: str) -> tuple[int, int]:
    index, _, count = text.partition("/")
    if not (index.isdigit() and count.isdigit() and 1 <= int(index) <= int(count)):
        raise UsageError(f"--shard must read INDEX/COUNT, counted from 1, got {text!r}; write 1/4")
    return int(index) - 1, int(count)


def _fresh_folder(profile: str) -> Path:
    return RUNS_FOLDER / f"{profile}-{datetime.now(UTC):%Y%m%d-%H%M%S}"


def _receipt_path(given: Path | None) -> Path:
    """The receipt that a command is about: the one given, or that of the latest run.

    Raises:
        UsageError: there is none.
    """
    if given is not None:
        return given / RECEIPT_NAME if given.is_dir() else given
    found = sorted(RUNS_FOLDER.glob(f"*/{RECEIPT_NAME}"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise UsageError(f"a receipt must be given, got none and none under {RUNS_FOLDER}; use --receipt")
    return found[-1]


def _shown(path: Path) -> str:
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command and ends the process with its exit code; an error of the user's is one line."""
    _register_reports()
    try:
        code = app(args=list(arguments) if arguments is not None else None, standalone_mode=False)
    except typer.Exit as ended:
        code = ended.exit_code
    except typer.Abort:
        code = Exit.INCOMPLETE
    except KeyboardInterrupt:
        code = Exit.INCOMPLETE
        typer.echo("interrupted before the run began", err=True)
    except (BrokenPipeError, SystemExit):  # typer turns the first into the second
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = READER_LEFT
    except OSError as error:
        typer.echo(f"error: {error.strerror or error} ({error.filename or 'while writing'})", err=True)
        code = Exit.INCOMPLETE if error.errno in DISK_ERRORS else Exit.USAGE
    except Exception as error:
        text = error.format_message() if hasattr(error, "format_message") else str(error)
        if not isinstance(error, ValueError) and not hasattr(error, "format_message"):
            raise
        typer.echo(f"error: {text}", err=True)
        code = Exit.USAGE
    sys.exit(int(code or 0))
