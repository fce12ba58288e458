"""Signatures by a CI runner's identity: who signed is said; no other identity, issuer, text or key passes.

Stand-ins take the place of sigstore's services (`standins`); nothing here speaks with the public ones.
"""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from qualify.canonical import canonical_bytes
from reports import commands
from reports.identities import Identity
from reports.model import load
from reports.reading import ReceiptError
from reports.signing import make_key, sign
from reports.verify import verify
from suites.selfcheck.reports import standins, synthetic

NAME = "https://github.com/us/kernels/.github/workflows/qualify.yml@refs/tags/v1"
ISSUER = "https://token.actions.githubusercontent.com"
US = Identity(NAME, ISSUER)


@pytest.fixture
def certified(signed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of `signed` with an envelope that NAME signed, on a runner that offers NAME."""
    standins.install(monkeypatch, f"{NAME} {ISSUER}")
    folder = shutil.copytree(signed, tmp_path / "certified")
    (folder / "receipt.dsse.json").write_bytes(sign(load(folder / "receipt.json"), None))
    return folder


def told(folder: Path, trusted: Identity | list[Path]) -> str:
    """What verification says of the signature; empty when it passed."""
    result = verify(folder / "receipt.json", folder / "receipt.dsse.json", trusted)
    assert [f.step for f in result.findings if not f.passed] in ([], ["the signature"])
    return "" if result.passed else result.findings[-1].found


def call(*arguments: object) -> tuple[int, str, BaseException | None]:
    app = typer.Typer()
    commands.register(app)
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    return result.exit_code, result.output, result.exception


def flags(name: str = NAME, issuer: str = ISSUER) -> list[str]:
    return ["--sigstore-identity", name, "--sigstore-issuer", issuer]


def test_the_commands_sign_and_say_who_signed(certified: Path) -> None:
    (certified / "receipt.dsse.json").unlink()
    assert call("sign", certified, "--sigstore")[0] == 0
    code, said, _ = call("verify", certified, *flags())
    assert code == 0
    assert f"by {NAME} ({ISSUER}), over this very file" in said


@pytest.mark.parametrize(
    ("trusted", "because"),
    [
        (Identity(NAME.replace("v1", "v2"), ISSUER), f"actual SANs: {NAME}"),
        (Identity(NAME, "https://elsewhere.example"), f"got '{ISSUER}'"),
    ],
)
def test_another_identity_or_issuer_is_refused(certified: Path, trusted: Identity, because: str) -> None:
    found = told(certified, trusted)
    assert f"{trusted} did not sign it" in found
    assert because in found
    code, said, _ = call("verify", certified, *flags(trusted.name, trusted.issuer))
    assert code == 1
    assert "NOT VERIFIED" in said


def edit_the_payload(envelope: dict[str, Any]) -> None:
    payload = base64.b64decode(envelope["payload"]).replace(b"PASSED", b"WARNED")
    envelope["payload"] = base64.b64encode(payload).decode()


def edit_the_type(envelope: dict[str, Any]) -> None:
    envelope["payloadType"] = "text/plain"


def edit_the_shown_signature(envelope: dict[str, Any]) -> None:
    envelope["signatures"][0]["sig"] = base64.b64encode(b"another").decode()


def edit_both_signatures(envelope: dict[str, Any]) -> None:
    edit_the_shown_signature(envelope)
    first = envelope["signatures"][0]
    first["bundle"]["messageSignature"]["signature"] = first["sig"]


def claim_another_certificate(envelope: dict[str, Any]) -> None:
    envelope["signatures"][0]["bundle"]["verificationMaterial"]["certificate"]["san"] = "them"


def drop_the_bundle(envelope: dict[str, Any]) -> None:
    del envelope["signatures"][0]["bundle"]


def empty_the_bundle(envelope: dict[str, Any]) -> None:
    envelope["signatures"][0]["bundle"] = []


def add_a_field(envelope: dict[str, Any]) -> None:
    envelope["signatures"][0]["note"] = "reviewed"


def name_another_signer(envelope: dict[str, Any]) -> None:
    envelope["signatures"][0]["keyid"] = "0" * 64


EDITS = (
    edit_the_payload,
    edit_the_type,
    edit_the_shown_signature,
    edit_both_signatures,
    claim_another_certificate,
    drop_the_bundle,
    empty_the_bundle,
    add_a_field,
    name_another_signer,
)


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)
def test_an_edited_envelope_is_refused(certified: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    path = certified / "receipt.dsse.json"
    envelope = json.loads(path.read_bytes())
    assert told(certified, US) == ""
    edit(envelope)
    path.write_bytes(canonical_bytes(envelope) + b"\n")
    assert told(certified, US) != ""


def test_an_envelope_about_another_receipt_is_refused(certified: Path) -> None:
    synthetic.write(certified / "receipt.json", synthetic.receipt(61))
    assert "another receipt" in told(certified, US)


def test_a_key_does_not_pass_for_an_identity_nor_an_identity_for_a_key(signed: Path, certified: Path) -> None:
    assert "must be signed by sigstore" in told(signed, US)
    assert "no given key signed it" in told(certified, [certified / "key.pub"])


@pytest.mark.parametrize("bundled", [False, True])
def test_a_key_that_calls_itself_sigstore_is_refused(certified: Path, signed: Path, bundled: bool) -> None:
    envelope = json.loads((signed / "receipt.dsse.json").read_bytes())
    first = envelope["signatures"][0]
    first["keyid"] = "sigstore"
    if bundled:
        first["bundle"] = {"messageSignature": {"signature": first["sig"]}}
    (certified / "receipt.dsse.json").write_bytes(canonical_bytes(envelope) + b"\n")
    assert told(certified, US) != ""
    assert told(certified, [certified / "key.pub"]) != ""


def test_only_the_key_that_signed_is_named(signed: Path, tmp_path: Path) -> None:
    make_key(tmp_path / "other", tmp_path / "other.pub")
    keys = [tmp_path / "other.pub", signed / "key.pub"]
    found = verify(signed / "receipt.json", signed / "receipt.dsse.json", keys).findings[-1].found
    assert found == "by key.pub, over this very file"


def test_without_a_network_the_signature_is_not_taken(
    certified: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standins.Verifier, "online", False)
    found = told(certified, US)
    assert standins.OFFLINE in found
    assert "is there no network?" in found


def test_signing_where_no_identity_is_offered_is_one_line(
    sound_receipt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("securesystemslib", reason="the extra `sign` is not installed")
    standins.install(monkeypatch, None)
    with pytest.raises(ReceiptError, match="got none; allow the job `id-token: write`"):
        sign(sound_receipt, None)


def test_a_service_that_does_not_answer_is_one_line(certified: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: standins.Context, data: bytes) -> standins.Bundle:
        raise OSError(standins.OFFLINE)

    monkeypatch.setattr(standins.Context, "sign_artifact", refuse)
    with pytest.raises(ReceiptError, match=f"sigstore did not sign \\({standins.OFFLINE}\\)"):
        sign(load(certified / "receipt.json"), None)


def test_without_the_extra_the_remedy_is_one_line(certified: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    standins.remove(monkeypatch)
    for line in (["sign", certified, "--sigstore"], ["verify", certified, *flags()]):
        _, said, error = call(*line)
        assert said == ""
        assert isinstance(error, ReceiptError)
        assert "pip install 'gdn-qualify[sigstore]'" in str(error)
        assert len(str(error).splitlines()) == 1
    assert "pip install 'gdn-qualify[sigstore]'" in told(certified, US)


@pytest.mark.parametrize(
    ("line", "remedy"),
    [
        (["sign"], "give one of the two"),
        (["sign", "--sigstore", "--key", "key"], "give one of the two"),
        (["verify", "--sigstore-identity", NAME], "give both"),
        (["verify", "--sigstore-issuer", ISSUER], "give both"),
        (["verify", "--key", "key.pub", *flags()], "verify twice"),
    ],
)
def test_a_call_that_leaves_open_who_signs_is_refused(certified: Path, line: list[str], remedy: str) -> None:
    _, _, error = call(line[0], certified, *line[1:])
    assert isinstance(error, ReceiptError)
    assert remedy in str(error)


def test_reports_are_imported_without_sigstore_and_a_wrong_call_is_exit_code_2(signed: Path) -> None:
    """In a process of its own, through the real command."""
    program = (
        "import sys; sys.modules['sigstore'] = None; from qualify.cli import main; "
        f"main(['verify', {str(signed)!r}, *{flags()!r}])"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert len(ended.stderr.strip().splitlines()) == 1
    assert "gdn-qualify[sigstore]" in ended.stderr


def test_the_standins_have_the_names_of_the_real_thing() -> None:
    pytest.importorskip("sigstore", reason="the extra `sigstore` is not installed")
    from sigstore import errors, models, oidc, sign, verify
    from sigstore.verify import policy

    assert callable(models.Bundle.from_json)
    assert callable(models.Bundle.to_json)
    assert callable(models.ClientTrustConfig.production)
    assert callable(sign.SigningContext.from_trust_config)
    assert callable(sign.SigningContext.signer)
    assert callable(sign.Signer.sign_artifact)
    assert callable(verify.Verifier.production)
    assert callable(verify.Verifier.verify_artifact)
    assert callable(oidc.detect_credential)
    assert {"identity", "federated_issuer"} <= set(dir(oidc.IdentityToken))
    assert issubclass(errors.VerificationError, Exception)
    assert policy.Identity(identity=NAME, issuer=ISSUER)
