"""Signatures by an identity instead of a key: sigstore certifies who ran the job, and logs it in public.

Signing asks the CI runner for its token, Fulcio for a certificate and Rekor for a log entry; the envelope
keeps all three as a sigstore bundle. Verification reads the bundle, and sigstore refreshes its trust root.
The DSSE key id is a constant: who signed is in the certificate, nowhere else. Needs the extra `sigstore`.
"""

from __future__ import annotations

import base64
import importlib
from dataclasses import dataclass
from typing import Any

from reports.reading import ReceiptError, short

KEYID = "sigstore"
BUNDLE = "bundle"
INSTALL = "pip install 'gdn-qualify[sigstore]'"
MAX_CAUSE = 400


@dataclass(frozen=True)
class Identity:
    """Who a certificate must name, and which OpenID issuer must have said so.

    Raises:
        ReceiptError: one of them is empty; sigstore would take any issuer for an empty one.
    """

    name: str
    issuer: str

    def __post_init__(self) -> None:
        if not self.name or not self.issuer:
            raise ReceiptError(
                "an identity is worth its issuer; give both --sigstore-identity and --sigstore-issuer"
            )

    def __str__(self) -> str:
        return f"{self.name} ({self.issuer})"


class AmbientSigner:
    """Signs as the identity that the CI runner offers; a signer as securesystemslib's envelopes expect it."""

    def __init__(self, signer: Any) -> None:
        self._signer = signer

    def sign(self, payload: bytes) -> Any:
        """The signature over a payload, its bundle beside it.

        Raises:
            ReceiptError: Fulcio or Rekor did not answer, or refused.
        """
        try:
            made = self._signer.sign(payload)
        except Exception as error:
            raise ReceiptError(
                f"sigstore did not sign ({short(error, MAX_CAUSE)}); try again, or sign with --key"
            ) from error
        # An envelope holds signatures as hex, and SigstoreSigner makes base64.
        made.signature = base64.b64decode(made.signature).hex()
        return made


def ambient() -> AmbientSigner:
    """A signer with the identity of the CI runner.

    Raises:
        ReceiptError: the extra is missing, or there is no such identity.
    """
    oidc, signers = require("sigstore.oidc"), require("securesystemslib.signer")
    remedy = "allow the job `id-token: write`, or sign with --key"
    try:
        found = oidc.detect_credential()
        token = oidc.IdentityToken(found) if found else None
    except Exception as error:
        raise ReceiptError(
            f"the CI runner gave no usable identity ({short(error, MAX_CAUSE)}); {remedy}"
        ) from error
    if token is None:
        raise ReceiptError(f"--sigstore must run where a CI runner offers an identity, got none; {remedy}")
    return AmbientSigner(
        signers.SigstoreSigner(token, _key(Identity(token.identity, token.federated_issuer)))
    )


def check(envelope: Any, identity: Identity, name: str) -> None:
    """Refuses an envelope that the identity did not sign.

    Args:
        envelope: of securesystemslib.
        identity: who is trusted.
        name: of the file, for messages.

    Raises:
        ReceiptError: no signature by sigstore, one of another identity or over another text, or one that
            could not be checked.
    """
    require("sigstore.verify")
    signature = envelope.signatures.get(KEYID)
    if signature is None:
        raise ReceiptError(f"{name}: must be signed by sigstore, got no such signature; was it a key?")
    _agrees_with_its_bundle(signature, name)
    failed = require("securesystemslib.exceptions")
    try:
        _key(identity).verify_signature(signature, envelope.pae())
    except failed.VerificationError as error:  # kin of the next, for whatever kept it from an answer
        cause = short(repr(error.__cause__ or error), MAX_CAUSE)
        raise ReceiptError(
            f"{name}: sigstore could not check it ({cause}); was it edited, or is there no network?"
        ) from error
    except failed.UnverifiedSignatureError as error:
        cause = short(error.__cause__ or error, MAX_CAUSE)
        raise ReceiptError(
            f"{name}: {identity} did not sign it ({cause}); check identity and issuer, or do not trust it"
        ) from error


def require(module: str) -> Any:
    """A module of the extra.

    Raises:
        ReceiptError: the extra is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ReceiptError(f"sigstore must be installed, got none ({short(error)}); {INSTALL}") from error


def _agrees_with_its_bundle(signature: Any, name: str) -> None:
    """Only the bundle is verified, so the signature that the envelope shows must be the bundle's."""
    shown = base64.b64encode(bytes.fromhex(signature.signature)).decode()
    bundle = signature.unrecognized_fields.get(BUNDLE)
    message = bundle.get("messageSignature") if isinstance(bundle, dict) else None
    if not isinstance(message, dict) or message.get("signature") != shown:
        raise ReceiptError(f"{name}: must show the signature of its sigstore bundle; it was edited")


def _key(identity: Identity) -> Any:
    key = require("securesystemslib.signer").SigstoreKey
    shown = {"identity": identity.name, "issuer": identity.issuer}
    return key(KEYID, key.DEFAULT_KEY_TYPE, key.DEFAULT_SCHEME, shown)
