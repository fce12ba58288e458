"""Commands about receipts, added to the command line: verify, sign, diff, merge, gate, history, export."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Annotated

import typer

from qualify.errors import Exit
from qualify.records import Overall
from qualify.tables import load_tables
from qualify.toml_file import read_toml
from qualify.verdicts import EXITS
from reports import changes, exports, gating, history, identities, merge, page, signing, text, verify
from reports.identities import Identity
from reports.model import Receipt, load
from reports.parts import write_file, write_receipt
from reports.reading import ReceiptError

PAGE, ENVELOPE = "receipt.html", "receipt.dsse.json"
BESIDE: dict[str, Callable[[Receipt], str]] = {
    "junit.xml": exports.junit,
    "ctrf.json": exports.ctrf,
    "summary.md": exports.markdown,
}
LISTED = 60

ReceiptArgument = Annotated[Path, typer.Argument(help="A receipt.json (or receipt.json.gz), or its folder.")]
OutOption = Annotated[Path | None, typer.Option("--out", "-o", help="Where to write.")]
KeyOption = Annotated[
    list[Path] | None, typer.Option("--key", help="A public key that is trusted; may be repeated.")
]
WheelOption = Annotated[list[Path] | None, typer.Option("--wheel", help="What is released; may be repeated.")]
TodayOption = Annotated[
    str, typer.Option("--today", help="The day that waivers are judged on (default: today).")
]


def register(app: typer.Typer) -> None:
    """Adds the commands to the command line."""
    for command in (verify_, sign, keygen, diff, merge_, gate, history_, export):
        app.command(name=command.__name__.rstrip("_"))(command)


def publish(path: Path) -> list[Path]:
    """Writes the page, JUnit XML, CTRF and the Markdown summary beside a receipt, and returns their paths.

    Raises:
        ReceiptError: the file is no receipt, or the folder cannot be written.
    """
    receipt = load(path)
    made = {PAGE: page.render(receipt, verify.disagreement(receipt.body))}
    made |= {name: write(receipt) for name, write in BESIDE.items()}
    for name, content in made.items():
        write_file(path.with_name(name), content)
    return [path.with_name(name) for name in made]


def verify_(
    receipt: ReceiptArgument,
    envelope: Annotated[
        Path | None, typer.Option("--envelope", help="The signature (default: the one beside it).")
    ] = None,
    key: KeyOption = None,
    sigstore_identity: Annotated[
        str, typer.Option("--sigstore-identity", help="Who must have signed, as sigstore certifies.")
    ] = "",
    sigstore_issuer: Annotated[
        str, typer.Option("--sigstore-issuer", help="The URL of the OpenID issuer of that identity.")
    ] = "",
    wheel: WheelOption = None,
    policy: Annotated[
        Path | None, typer.Option("--policy", help="The policy that must have been applied, in TOML.")
    ] = None,
    waivers: Annotated[
        Path | None, typer.Option("--waivers", help="The waivers that must have been applied, in TOML.")
    ] = None,
    tables: Annotated[
        str, typer.Option("--tables", help="Tables that the plan must follow from, such as suites.tables.")
    ] = "",
    shown: Annotated[
        Path | None, typer.Option("--page", help="A page that must show this receipt and nothing else.")
    ] = None,
) -> None:
    """Check a receipt offline: digests, schema, cover, the verdict derived again; with --key its signature.

    With --policy and --waivers, that these very files were applied; with --tables, that the plan is the one
    that your tables make; with --page, that the page is its own. With --sigstore-identity the signature is
    sigstore's, whose trust root needs the network.
    Exit code 0: it holds, whatever its verdict. 1: it does not.
    """
    path = _file(receipt)
    trusted = _trusted(key or [], sigstore_identity, sigstore_issuer)
    if not path.is_file():
        raise ReceiptError(f"{path}: must be a receipt, got nothing; check the path")
    beside = path.with_name(ENVELOPE)
    if envelope is None and (trusted or wheel):
        envelope = beside
    result = verify.verify(
        path,
        envelope,
        trusted,
        wheel or [],
        policy=read_toml(policy) if policy else None,
        waivers=read_toml(waivers) if waivers else None,
        tables=load_tables(tables) if tables else None,
        shown=shown,
    )
    for finding in result.findings:
        _say(f"{'ok     ' if finding.passed else 'FAILED '} {finding.step}: {finding.found}")
    if envelope is None:
        _say("note    no signature was checked; give whom you trust with --key or --sigstore-identity")
    if result.receipt is not None and policy is None:
        applied = result.receipt.body.policy
        what = (
            f"{applied.name} ({applied.digest}) was applied; --policy compares it with yours"
            if applied
            else ""
        )
        _say(f"note    {what or 'no policy was applied; `qualify gate` applies one'}")
    if result.receipt is not None:
        _say(f"{'verified' if result.passed else 'NOT VERIFIED'}: {result.receipt.body.header.verdict}")
    raise typer.Exit(Exit.QUALIFIED if result.passed else Exit.NOT_QUALIFIED)


def sign(
    receipt: ReceiptArgument,
    key: Annotated[Path | None, typer.Option("--key", help="An ed25519 private key in PEM.")] = None,
    sigstore: Annotated[
        bool, typer.Option("--sigstore", help="Sign as the identity that the CI runner offers, instead.")
    ] = False,
    wheel: WheelOption = None,
    out: OutOption = None,
) -> None:
    """Sign a receipt: DSSE around an in-toto test result. A receipt that does not hold is refused."""
    if (key is None) is not sigstore:
        raise ReceiptError("who signs must be given once, by --key or by --sigstore; give one of the two")
    path = _file(receipt)
    result = verify.verify(path)
    wrong = [f"{f.step}: {f.found}" for f in result.findings if not f.passed]
    if result.receipt is None or wrong:
        raise ReceiptError(f"{path}: only a receipt that holds is signed, got: {wrong[0]}")
    target = out or path.with_name(ENVELOPE)
    write_file(target, signing.sign(result.receipt, key, wheel or []))
    _say(f"wrote {target}")


def keygen(
    private: Annotated[Path, typer.Argument(help="A new file; the public key goes to the same name + .pub")],
) -> None:
    """Make an ed25519 key pair in PEM files."""
    public = private.with_name(private.name + ".pub")
    signing.make_key(private, public)
    _say(f"wrote {private} (keep it secret) and {public}")


def diff(
    before: Annotated[Path, typer.Argument(help="The earlier receipt.")],
    after: Annotated[Path, typer.Argument(help="The later receipt.")],
    html: Annotated[Path | None, typer.Option("--html", help="Write a page too.")] = None,
) -> None:
    """Show what moved between two receipts. Exit code 1 when something is worse."""
    old, new = load(_file(before)), load(_file(after))
    moved = changes.compare(old, new).moved
    worse = [m for m in moved if m.worse]
    for m in (*worse[:LISTED], *[m for m in moved if not m.worse][:LISTED]):
        _say(f"{'worse' if m.worse else 'moved'}  {m.kind}: {m.what}: {m.before} -> {m.after}")
    if len(moved) > 2 * LISTED:
        _say(f"... {len(moved):,} in all; --html shows them")
    if html:
        write_file(html, page.render_diff(old, new, moved))
        _say(f"wrote {html}")
    _say(f"{text.plural(len(moved), 'thing')} moved, {len(worse):,} for the worse")
    raise typer.Exit(Exit.NOT_QUALIFIED if worse else Exit.QUALIFIED)


def merge_(
    shards: Annotated[list[Path], typer.Argument(help="The receipt of every shard, or their folders.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="A new folder for the receipt of the whole run.")],
) -> None:
    """Merge the receipts of all shards of a run into one. The exit code is the verdict."""
    body = merge.merge([_file(path) for path in shards])
    path = out / "receipt.json"
    if path.exists():
        raise ReceiptError(f"{out}: must hold no receipt yet, got one; choose a new folder")
    _folder(out)
    write_receipt(path, body)
    _finish(path, body["header"]["verdict"], body["header"]["reasons"])


def gate(
    receipt: ReceiptArgument,
    policy: Annotated[Path, typer.Option("--policy", help="The rules, in TOML.")],
    baseline: Annotated[
        Path | None, typer.Option("--baseline", help="An earlier receipt to compare with.")
    ] = None,
    waivers: Annotated[
        Path | None, typer.Option("--waivers", help="Waivers to apply first, in TOML.")
    ] = None,
    policy_digest: Annotated[
        str, typer.Option("--policy-digest", help="What the policy's SHA-256 must be, as sha256:...")
    ] = "",
    waivers_digest: Annotated[
        str, typer.Option("--waivers-digest", help="What that of the waivers must be, likewise.")
    ] = "",
    out: OutOption = None,
    today: TodayOption = "",
) -> None:
    """Apply a policy (and waivers) to a receipt and store every result in it. Exit code 0: every rule passed.

    The receipt is replaced, unless --out names another file; sign afterwards.
    """
    path = _file(receipt)
    day = _day(today)
    rules = read_toml(policy, policy_digest)
    if waivers_digest and not waivers:
        raise ReceiptError("--waivers-digest must go with a file, got none; name it with --waivers")
    excused = read_toml(waivers, waivers_digest) if waivers else None
    found = load(path)
    raw = gating.waived(found, excused, day) if excused else found.raw
    earlier = load(_file(baseline)) if baseline else None
    body, results = gating.gated(raw, rules, earlier, found.id, day)
    target = out or path.with_name(path.name.removesuffix(".gz"))
    write_receipt(target, body)
    for result in results:
        told = f"{result.rule}: {result.value}, asked: {result.limit}"
        because = f" ({result.because})" if result.because else ""
        _say(f"{'ok    ' if result.passed else 'FAILED'} {told}{because}")
    _finish(target, body["header"]["verdict"], body["header"]["reasons"], leave=False)
    raise typer.Exit(Exit.QUALIFIED if all(r.passed for r in results) else Exit.NOT_QUALIFIED)


def history_(
    folder: Annotated[Path, typer.Argument(help="A folder of receipts, searched to the bottom.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The page.")] = Path("history.html"),
) -> None:
    """Show the margins of many receipts over time, as small multiples and as a table."""
    runs, left_out = history.read_runs(folder)
    for why in left_out:
        _say(f"left out: {why}", err=True)
    if not runs:
        raise ReceiptError(f"{folder}: must hold a receipt, got none; give the folder of earlier runs")
    for run in runs:
        tight = text.margin(max(run.margins.values())) if run.margins else "-"
        _say(
            f"{run.time}  {run.profile:8}  {run.verdict:24}  {run.failed:4} failed  tightest {tight:>7}  "
            f"{run.id[:19]}  {run.subject}"
        )
    write_file(out, page.render_history(history.lines(runs)))
    _say(f"wrote {out}")


def export(
    receipt: ReceiptArgument,
    html: Annotated[Path | None, typer.Option("--html", help="The page.")] = None,
    junit: Annotated[Path | None, typer.Option("--junit", help="JUnit XML.")] = None,
    ctrf: Annotated[Path | None, typer.Option("--ctrf", help="CTRF JSON.")] = None,
    markdown: Annotated[
        Path | None, typer.Option("--markdown", help="A summary for the page of a job.")
    ] = None,
) -> None:
    """Write a receipt in other forms, each where you say."""
    found = load(_file(receipt))
    wanted: list[tuple[Path | None, Callable[[Receipt], str]]] = [
        (html, lambda r: page.render(r, verify.disagreement(r.body))),
        (junit, exports.junit),
        (ctrf, exports.ctrf),
        (markdown, exports.markdown),
    ]
    if not any(path for path, _ in wanted):
        raise ReceiptError("a form must be asked for, got none; use --html, --junit, --ctrf or --markdown")
    for path, write in wanted:
        if path:
            write_file(path, write(found))
            _say(f"wrote {path}")


def _finish(path: Path, verdict: str, reasons: list[str], *, leave: bool = True) -> None:
    """Publishes a new receipt and says what it says; the exit code is its verdict."""
    for written in [path, *(publish(path) if path.name == "receipt.json" else [])]:
        _say(f"wrote {written}")
    for reason in reasons[:LISTED]:
        _say(f"because: {reason}")
    _say(verdict)
    if leave:
        raise typer.Exit(EXITS[Overall(verdict)])


def _file(path: Path) -> Path:
    """The receipt in a folder, packed or not."""
    if not path.is_dir():
        return path
    plain, packed = path / "receipt.json", path / "receipt.json.gz"
    return packed if packed.is_file() and not plain.exists() else plain


def _trusted(keys: Sequence[Path], identity: str, issuer: str) -> Sequence[Path] | Identity:
    """Whom the caller trusts; without the extra an identity cannot be checked, and nothing begins."""
    if not identity and not issuer:
        return keys
    trusted = Identity(identity, issuer)
    if keys:
        raise ReceiptError("one must be trusted, got a key and an identity; verify twice, once with each")
    identities.require("sigstore.verify")
    return trusted


def _folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ReceiptError(
            f"{path}: could not be made ({error.strerror or error}); choose another folder"
        ) from error


def _day(given: str) -> date:
    try:
        return date.fromisoformat(given) if given else datetime.now(UTC).date()
    except ValueError:
        raise ReceiptError(
            f"--today must be a day like 2026-11-30, got {text.shown(given, 80)!r}; mend it"
        ) from None


def _say(line: str, *, err: bool = False) -> None:
    typer.echo(text.shown(line), err=err)
