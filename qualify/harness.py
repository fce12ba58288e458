"""What a receipt says of the judge itself."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

from qualify.canonical import digest, digest_bytes
from qualify.probe import guarded
from qualify.subject_facts import commit_of

PACKAGES = ("qualify", "references", "suites")


def harness_facts() -> dict[str, Any]:
    """Name, version, commit and a digest over the files that judge: oracles, checks, tables and the spine."""
    version, _ = guarded(lambda: importlib.metadata.version("gdn-qualify"))
    root = Path(__file__).parent.parent
    commit, dirty, _ = commit_of(root)
    return {
        "name": "gdn-qualify",
        "version": version or "0.1.0 (not installed)",
        "commit": commit,
        "dirty": dirty,
        "digest": digest(
            {
                str(path.relative_to(root)): digest_bytes(path.read_bytes())
                for package in PACKAGES
                for path in sorted((root / package).rglob("*.py"))
            }
        ),
    }
