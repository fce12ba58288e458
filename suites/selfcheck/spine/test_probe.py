"""The probe reads what it can and records why it could not read the rest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from qualify import probe


@pytest.fixture
def _broken_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A distribution whose import fails the way that a missing shared library does."""
    (tmp_path / "gdnbroken.py").write_text("raise OSError('libz3.so: cannot open shared object file')")
    info = tmp_path / "gdnbroken-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: gdnbroken\nVersion: 1.2\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(probe, "PACKAGES", {"gdnbroken": "gdnbroken", "nowhere-to-be-found": "nowhere"})


@pytest.mark.usefixtures("_broken_package")
def test_broken_package_has_version_and_reason() -> None:
    found = probe.software(thorough=True)
    assert found["gdnbroken"]["version"] == "1.2"
    assert "OSError: libz3.so" in found["gdnbroken"]["reason"]
    assert found["nowhere-to-be-found"] == {"version": None, "reason": "not installed"}


@pytest.mark.parametrize("error", [OSError("lib"), SystemExit(3), AttributeError(), RuntimeError("\x00")])
def test_any_exception_is_a_reason(error: BaseException) -> None:
    def read() -> None:
        raise error

    value, reason = probe.guarded(read)
    assert value is None
    assert type(error).__name__ in reason


def test_environment_is_json_and_names_every_variable_from_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    monkeypatch.setenv("SECRET_TOKEN", "hidden")
    found = probe.environment("gw0")
    assert json.loads(json.dumps(found)) == found
    assert found["variables"]["NVIDIA_TF32_OVERRIDE"] == "0"
    assert "hidden" not in json.dumps(found)


def test_machine_without_a_gpu_says_why() -> None:
    facts = probe.machine_facts(on_cpu=True)
    assert (facts["sm"], facts["sm_number"]) == ("cpu", "0")
    assert facts["gpu_reason"]


@pytest.mark.parametrize(
    ("text", "number", "level"),
    [("9.0", 90, "sm90"), ("8.6", 86, "sm86"), ("10.3", 103, "sm100"), ("12.1", 121, "sm120")],
)
def test_compute_capability_has_one_level(text: str, number: int, level: str) -> None:
    assert probe.sm_number(text) == number
    assert probe.sm_level(number) == level
