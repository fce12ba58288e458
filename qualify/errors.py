"""Errors that end a command with one line and an exit code."""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """What the command's exit code says."""

    QUALIFIED = 0
    NOT_QUALIFIED = 1
    USAGE = 2
    INCOMPLETE = 3


class UsageError(ValueError):
    """The command or its tables ask for something that cannot be: rule, value, remedy in one line."""
