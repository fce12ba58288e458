"""Stand-ins for sigstore: its modules with the names that securesystemslib calls, and no network.

A certificate here is the identity and issuer of a token; in place of Fulcio and Rekor a secret of the
stand-in vouches for certificate, text and signature together. What is real in the tests is
securesystemslib's SigstoreSigner, SigstoreKey and envelope.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest

SECRET = b"what Fulcio and Rekor know"
NAMES = (
    "sigstore",
    "sigstore.errors",
    "sigstore.models",
    "sigstore.oidc",
    "sigstore.sign",
    "sigstore.verify",
)
POLICY = "sigstore.verify.policy"
OFFLINE = "the network is down"


class RefusalError(Exception):
    """In place of `sigstore.errors.VerificationError`."""


@dataclass(frozen=True)
class Token:
    """In place of `sigstore.oidc.IdentityToken`: the raw token is identity and issuer, in two words."""

    raw: str

    @property
    def identity(self) -> str:
        return self.raw.split()[0]

    @property
    def federated_issuer(self) -> str:
        return self.raw.split()[1]


@dataclass(frozen=True)
class Bundle:
    value: dict[str, Any]

    def to_json(self) -> str:
        return json.dumps(self.value)

    @classmethod
    def from_json(cls, raw: str) -> Bundle:
        return cls(json.loads(raw))


@dataclass(frozen=True)
class Policy:
    """In place of `sigstore.verify.policy.Identity`."""

    identity: str
    issuer: str

    def verify(self, certificate: dict[str, str]) -> None:
        if certificate["issuer"] != self.issuer:
            raise RefusalError(f"OIDCIssuer does not match (got '{certificate['issuer']}')")
        if certificate["san"] != self.identity:
            raise RefusalError(f"SANs do not match; actual SANs: {certificate['san']}")


def vouched(data: bytes, certificate: dict[str, str]) -> str:
    told = json.dumps(certificate, sort_keys=True).encode() + b"\n" + data
    return base64.b64encode(hmac.new(SECRET, told, hashlib.sha256).digest()).decode()


@dataclass(frozen=True)
class Context:
    """In place of `sigstore.sign.SigningContext` and of the signer that it makes."""

    token: Token | None = None

    @classmethod
    def from_trust_config(cls, config: object) -> Context:
        return cls()

    @contextmanager
    def signer(self, token: Token) -> Iterator[Context]:
        yield Context(token)

    def sign_artifact(self, data: bytes) -> Bundle:
        assert self.token is not None
        certificate = {"san": self.token.identity, "issuer": self.token.federated_issuer}
        signature = {"signature": vouched(data, certificate)}
        return Bundle({"verificationMaterial": {"certificate": certificate}, "messageSignature": signature})


class Verifier:
    online = True

    @classmethod
    def production(cls) -> Verifier:
        if not cls.online:
            raise OSError(OFFLINE)
        return cls()

    def verify_artifact(self, data: bytes, bundle: Bundle, policy: Policy) -> None:
        certificate = bundle.value["verificationMaterial"]["certificate"]
        policy.verify(certificate)
        if bundle.value["messageSignature"]["signature"] != vouched(data, certificate):
            raise RefusalError("Signature is invalid for input")


class TrustConfig:
    @classmethod
    def production(cls) -> TrustConfig:
        return cls()


def install(monkeypatch: pytest.MonkeyPatch, raw: str | None) -> None:
    """Puts the stand-ins where sigstore would be, on a runner that offers this raw token (or none)."""
    for name in (*NAMES, POLICY):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    offered: dict[str, dict[str, Any]] = {
        "sigstore.errors": {"VerificationError": RefusalError},
        "sigstore.models": {"Bundle": Bundle, "ClientTrustConfig": TrustConfig},
        "sigstore.oidc": {"IdentityToken": Token, "Issuer": None, "detect_credential": lambda: raw},
        "sigstore.sign": {"SigningContext": Context},
        "sigstore.verify": {"Verifier": Verifier},
        POLICY: {"Identity": Policy},
    }
    for name, members in offered.items():
        for member, value in members.items():
            monkeypatch.setattr(sys.modules[name], member, value, raising=False)


def remove(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes every import of sigstore fail, as it does where the extra is absent."""
    for name in (*NAMES, POLICY):
        monkeypatch.setitem(sys.modules, name, None)
