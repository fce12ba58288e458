"""Profiles: the named parts of the matrix."""

from __future__ import annotations

from qualify.axes import Profile, SkipBudget
from qualify.skips import ANY
from qualify.verdicts import LACKS
from suites.tables.axes import GPU_SMS, SMS

NATIVE_FROM = 90
"""The first SM with a conversion from fp32 to E4M3 that rounds once, times ten."""


def _skips(sm: str) -> tuple[SkipBudget, ...]:
    native = sm != "cpu" and int(sm.removeprefix("sm")) >= NATIVE_FROM
    elsewhere = "the cells of other machines are planned to be seen, not to be run here"
    declined = "who declines more than three quarters of a profile has not been qualified for it"
    return (
        SkipBudget(f"on {sm}", 0.0, "these cells are what the profile is about"),
        *(SkipBudget(f"on {other}", 1.0, elsewhere) for other in SMS if other != sm),
        SkipBudget(
            "native conversion",
            0.0 if native else 1.0,
            "the SM of the profile has it" if native else "the SM of the profile has none that rounds once",
        ),
        SkipBudget(
            LACKS, 1.0, "a subject is qualified for what it offers, and its receipt says what that is"
        ),
        SkipBudget("capabilities", 0.75, declined),
        SkipBudget("refused", 0.75, declined),
        SkipBudget(ANY, 0.05, "a machine that lacks more is not the one that the profile is about"),
    )


def _gpu(name: str, sm: str, because: str) -> Profile:
    others = tuple(other for other in GPU_SMS if other != sm)
    return Profile(
        name,
        sm,
        because,
        other_sms=others,
        time_limit_s=180.0,
        import_limit_s=300.0,
        workers_per_gpu=16,
        skip_budgets=_skips(sm),
    )


PROFILES: tuple[Profile, ...] = (
    Profile(
        "quick",
        "cpu",
        "a verdict within seconds, for the edit-and-run loop; no evidence for a release",
        time_limit_s=10.0,
        import_limit_s=15.0,
        wrong_answers=False,
        skip_budgets=_skips("cpu"),
    ),
    Profile(
        "cpu",
        "cpu",
        "everything that a machine without a GPU can show",
        other_sms=tuple(sm for sm in SMS if sm != "cpu"),
        time_limit_s=20.0,
        import_limit_s=30.0,
        skip_budgets=_skips("cpu"),
    ),
    _gpu("sm86", "sm86", "Ampere without data-centre memory: the portable conversion"),
    _gpu("sm89", "sm89", "Ada: the portable conversion, since its native one rounds twice"),
    _gpu("h100", "sm90", "Hopper: release evidence"),
    _gpu("b200", "sm100", "Blackwell: release evidence"),
)

GPU_PROFILES = tuple(profile.name for profile in PROFILES if profile.sm != "cpu")
"""Names of the profiles that need a GPU; check rows that treat them alike name them with this."""
