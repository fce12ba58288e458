"""Profiles: the named parts of the matrix."""

from __future__ import annotations

from qualify.axes import Profile
from suites.tables.axes import GPU_SMS, SMS


def _gpu(name: str, sm: str, because: str) -> Profile:
    others = tuple(other for other in GPU_SMS if other != sm)
    return Profile(
        name, sm, because, other_sms=others, time_limit_s=180.0, import_limit_s=300.0, workers_per_gpu=16
    )


PROFILES: tuple[Profile, ...] = (
    Profile(
        "quick",
        "cpu",
        "a verdict within seconds, for the edit-and-run loop; no evidence for a release",
        time_limit_s=10.0,
        import_limit_s=15.0,
        wrong_answers=False,
    ),
    Profile(
        "cpu",
        "cpu",
        "everything that a machine without a GPU can show",
        other_sms=tuple(sm for sm in SMS if sm != "cpu"),
        time_limit_s=20.0,
        import_limit_s=30.0,
    ),
    _gpu("sm86", "sm86", "Ampere without data-centre memory: the portable conversion"),
    _gpu("sm89", "sm89", "Ada: the portable conversion, since its native one rounds twice"),
    _gpu("h100", "sm90", "Hopper: release evidence"),
    _gpu("b200", "sm100", "Blackwell: release evidence"),
)

GPU_PROFILES = tuple(profile.name for profile in PROFILES if profile.sm != "cpu")
"""Names of the profiles that need a GPU; check rows that treat them alike name them with this."""
