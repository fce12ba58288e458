"""Signatures over receipts: a DSSE envelope around an in-toto test-result statement, by a key or an identity.

The statement (in-toto Statement v1, predicate `test-result/v0.1`) names what was tested as its subject and
the receipt, by the digest of its file, as its configuration. It allows nothing that the receipt does not:
only QUALIFIED is PASSED, waivers make it WARNED, everything else is FAILED. Keys come from files and need the
extra `sign`; identities are sigstore's (`reports.identities`).
"""

from __future__ import annotations

import importlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qualify.canonical import canonical_bytes, digest, digest_bytes
from qualify.records import FAILURES, Overall
from reports import identities
from reports.identities import Identity
from reports.model import Receipt, SubjectFacts
from reports.reading import ReceiptError, parse_json, read_bytes, short

PAYLOAD_TYPE = "application/vnd.in-toto+json"
STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "https://in-toto.io/attestation/test-result/v0.1"
MAX_ENVELOPE_BYTES = 16 * 2**20
RESULTS: Mapping[Overall, str] = {
    Overall.QUALIFIED: "PASSED",
    Overall.QUALIFIED_WITH_WAIVERS: "WARNED",
    Overall.NOT_QUALIFIED: "FAILED",
    Overall.INCOMPLETE: "FAILED",
}
INSTALL = "pip install 'gdn-qualify[sign]'"


@dataclass(frozen=True)
class Signed:
    """A statement whose signature was verified, and who made that."""

    statement: Mapping[str, Any]
    by: str


def make_key(private: Path, public: Path) -> None:
    """Writes a new ed25519 key pair as PEM, the private one readable by its owner alone.

    Raises:
        ReceiptError: a file exists already or cannot be written.
    """
    serialization = _cryptography()
    signer = _signers().CryptoSigner.generate_ed25519()
    pem = signer.private_bytes
    loaded = serialization.load_pem_private_key(pem, None)
    shown = loaded.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    for path, data, mode in ((private, pem, 0o600), (public, shown, 0o644)):
        try:
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        except OSError as error:
            raise ReceiptError(
                f"{path}: must be a new file, got {error.strerror}; choose another path"
            ) from error
        with os.fdopen(handle, "wb") as file:
            file.write(data)


def statement(receipt: Receipt, wheels: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The in-toto statement about a receipt.

    Args:
        receipt: read from its file.
        wheels: file name -> `sha256:` digest of what is released, named as the subject beside the commit.
    """
    header, cases = receipt.body.header, receipt.body.cases
    rules = {"policy": receipt.body.policy, "waivers": receipt.body.waiver_file}
    return {
        "_type": STATEMENT_TYPE,
        "subject": [
            *({"name": name, "digest": {"sha256": _hex(value)}} for name, value in (wheels or {}).items()),
            *(subject_of(s) for s in receipt.body.subjects),
        ],
        "predicateType": PREDICATE_TYPE,
        "predicate": {
            "result": RESULTS[header.verdict],
            "configuration": [
                {
                    "name": "receipt.json",
                    "digest": {"sha256": _hex(receipt.file_digest)},
                    "annotations": {
                        "id": receipt.id,
                        "verdict": str(header.verdict),
                        "profile": header.profile,
                    },
                },
                {"name": "plan", "digest": {"sha256": _hex(receipt.body.plan.digest)}},
                *({"name": n, "digest": {"sha256": _hex(file.digest)}} for n, file in rules.items() if file),
            ],
            "failedTests": [case.case_id for case in cases if case.verdict in FAILURES],
        },
    }


def subject_of(subject: SubjectFacts) -> dict[str, Any]:
    """A subject as in-toto names it: by its commit where that is all there is to it, else by its files."""
    name = f"{subject.name}@{subject.version}" if subject.version else subject.name
    digests = {"sha256": _hex(digest(dict(subject.files)))}
    if re.fullmatch(r"[0-9a-f]{40}", subject.commit) and not subject.dirty:
        digests["gitCommit"] = subject.commit
    return {"name": name, "digest": digests}


def sign(receipt: Receipt, key: Path | None, wheels: Sequence[Path] = ()) -> bytes:
    """The canonical JSON of a DSSE envelope around the statement about a receipt.

    Args:
        receipt: read from its file.
        key: a private key; None signs by sigstore with the identity that the CI runner offers.
        wheels: what is released.

    Raises:
        ReceiptError: an unreadable key or wheel; no identity, or no answer of sigstore.
    """
    digests = {wheel.name: digest_bytes(read_bytes(wheel, limit=2**32)) for wheel in wheels}
    envelope = _envelopes().Envelope(canonical_bytes(statement(receipt, digests)), PAYLOAD_TYPE, {})
    envelope.sign(_private(key) if key else identities.ambient())
    return canonical_bytes(envelope.to_dict()) + b"\n"


def verify_envelope(path: Path, trusted: Sequence[Path] | Identity) -> Signed:
    """The statement in an envelope that one of the keys, or the identity, signed.

    Args:
        path: the envelope.
        trusted: public keys, or an identity that sigstore certifies. A key never stands for an identity.

    Raises:
        ReceiptError: no envelope, no statement of ours, or no signature of whom is trusted.
    """
    data = read_bytes(path, MAX_ENVELOPE_BYTES)
    value = parse_json(data, str(path))
    envelope = _envelope(value, str(path))
    if canonical_bytes(envelope.to_dict()) + b"\n" != data or not _bare(envelope):
        raise ReceiptError(
            f"{path}: must be the canonical envelope that was written, got another text; it was edited"
        )
    by = _signer(envelope, trusted, str(path))
    made = parse_json(envelope.payload, f"{path} (payload)")
    if (
        envelope.payload_type != PAYLOAD_TYPE
        or not isinstance(made, dict)
        or made.get("_type") != STATEMENT_TYPE
        or made.get("predicateType") != PREDICATE_TYPE
    ):
        raise ReceiptError(
            f"{path}: must hold a test-result statement, got another payload; it signs something else"
        )
    return Signed(made, by)


def agrees(made: Mapping[str, Any], receipt: Receipt, wheels: Mapping[str, str]) -> str:
    """Why a signed statement does not speak of this receipt; empty when it does.

    Args:
        made: the verified statement.
        receipt: the receipt beside it.
        wheels: file name -> digest of what is about to be released; each must be a subject.
    """
    expected = statement(receipt, {})
    if made.get("predicate") != expected["predicate"]:
        return "the signed statement is about another receipt, or states another result"
    subjects = made.get("subject")
    if not isinstance(subjects, list) or any(s not in subjects for s in expected["subject"]):
        return "the signed statement does not name the receipt's subjects"
    for name, value in wheels.items():
        if {"sha256": _hex(value)} not in [s.get("digest") for s in subjects if isinstance(s, dict)]:
            return f"{name} is not what was signed for"
    return ""


def _bare(envelope: Any) -> bool:
    """Whether no signature has a field that nobody signed or checks."""
    return all(
        set(signature.unrecognized_fields) == ({identities.BUNDLE} if keyid == identities.KEYID else set())
        for keyid, signature in envelope.signatures.items()
    )


def _signer(envelope: Any, trusted: Sequence[Path] | Identity, name: str) -> str:
    """Who of the trusted signed an envelope."""
    if isinstance(trusted, Identity):
        identities.check(envelope, trusted, name)
        return str(trusted)
    try:
        keys = [(path, _public(path)) for path in trusted]
        accepted = envelope.verify([key for _, key in keys], 1)
    except Exception as error:
        raise ReceiptError(
            f"{name}: no given key signed it ({short(error)}); check the key, or do not trust it"
        ) from error
    return ", ".join(path.name for path, key in keys if key.keyid in accepted)


def _hex(value: str) -> str:
    return value.removeprefix("sha256:")


def _envelope(value: Any, name: str) -> Any:
    envelopes = _envelopes()
    try:
        return envelopes.Envelope.from_dict(json.loads(json.dumps(value)))
    except Exception as error:
        raise ReceiptError(
            f"{name}: must be a DSSE envelope, got something else ({short(error)}); check the path"
        ) from error


def _private(path: Path) -> Any:
    serialization = _cryptography()
    try:
        return _signers().CryptoSigner(serialization.load_pem_private_key(read_bytes(path, 2**16), None))
    except ReceiptError:
        raise
    except Exception as error:
        raise ReceiptError(
            f"{path}: must be an unencrypted PEM private key ({short(error)}); make one with keygen"
        ) from error


def _public(path: Path) -> Any:
    serialization = _cryptography()
    try:
        return _signers().SSlibKey.from_crypto(serialization.load_pem_public_key(read_bytes(path, 2**16)))
    except ReceiptError:
        raise
    except Exception as error:
        raise ReceiptError(f"{path}: must be a PEM public key ({short(error)}); use the .pub file") from error


def _cryptography() -> Any:
    try:
        from cryptography.hazmat.primitives import serialization
    except ImportError as error:
        raise ReceiptError(f"signing needs cryptography; {INSTALL}") from error
    return serialization


def _envelopes() -> Any:
    try:
        return importlib.import_module("securesystemslib.dsse")
    except ImportError as error:
        raise ReceiptError(f"signing needs securesystemslib; {INSTALL}") from error


def _signers() -> Any:
    try:
        return importlib.import_module("securesystemslib.signer")
    except ImportError as error:
        raise ReceiptError(f"signing needs securesystemslib; {INSTALL}") from error
