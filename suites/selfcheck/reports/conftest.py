"""Receipts and keys that several tests read, made once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from qualify.packing import unpacked
from reports.model import Receipt, from_json, load
from reports.signing import make_key, sign
from suites.selfcheck.reports import synthetic


@pytest.fixture(scope="session")
def sound() -> dict[str, Any]:
    """A qualified receipt of 60 cases, as it is written."""
    return synthetic.receipt(60)


@pytest.fixture(scope="session")
def sound_body(sound: dict[str, Any]) -> dict[str, Any]:
    """Its body with every case whole."""
    return unpacked(sound["body"])


@pytest.fixture(scope="session")
def failing() -> dict[str, Any]:
    """A receipt with three failing cases and a planted fault that was missed."""
    return synthetic.receipt(60, failures=3, missed=1, metrics=synthetic.METRICS)


@pytest.fixture(scope="session")
def failing_body(failing: dict[str, Any]) -> dict[str, Any]:
    """Its body with every case whole."""
    return unpacked(failing["body"])


@pytest.fixture(scope="session")
def sound_receipt(sound: dict[str, Any]) -> Receipt:
    return from_json(sound)


@pytest.fixture(scope="session")
def failing_receipt(failing: dict[str, Any]) -> Receipt:
    return from_json(failing)


@pytest.fixture(scope="session")
def signed(tmp_path_factory: pytest.TempPathFactory, sound: dict[str, Any]) -> Path:
    """A folder with `receipt.json`, its envelope and the key pair `key`, `key.pub`."""
    pytest.importorskip("securesystemslib", reason="the extra `sign` is not installed")
    folder = tmp_path_factory.mktemp("signed")
    path = synthetic.write(folder / "receipt.json", sound)
    make_key(folder / "key", folder / "key.pub")
    (folder / "receipt.dsse.json").write_bytes(sign(load(path), folder / "key"))
    return folder
