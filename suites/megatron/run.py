"""Qualifies the Megatron and ModelOpt adapters and writes a receipt.

    python -m suites.megatron.run --out DIR [further arguments of `qualify run`]

The same as `qualify run --tables suites.megatron.tables:TABLES --profile megatron --workers 1`. One worker
starts the ranks of each case, so that a case may use every GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from qualify.cli import main as qualify

TABLES = "suites.megatron.tables:TABLES"


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs `qualify run` with this suite's tables and ends the process with the verdict's exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    named = any(word.startswith(("--profile", "-p")) for word in given)
    profile = [] if named else ["--profile", "megatron"]
    sys.argv = ["qualify", "run", "--tables", TABLES, *profile, "--workers", "1", *given]
    qualify(sys.argv[1:])


if __name__ == "__main__":
    main()
