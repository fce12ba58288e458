"""The tables of the Megatron suite, for `qualify run --tables suites.megatron.tables:TABLES`."""

from __future__ import annotations

from itertools import product

from qualify.axes import SM_AXIS, Axis, Profile
from qualify.checks_table import CheckRow, Constraint, Options
from qualify.requirements import Requirement
from qualify.tables import Tables
from suites.megatron.faults import AMONG_RANKS, FAULTS
from suites.tables.axes import SMS

TP = ("1", "2", "4", "8")
SHARED = TP[1:]

SCOPE = {
    "pipeline-parallelism": "a policy is saved in the part of a checkpoint that the first stage writes",
    "dynamic-batching-inference": "Megatron's gated delta net refuses inference",
    "model-quality": "rounding is shown to act and to train, not to keep a model's quality",
}
"""What a receipt of this suite says nothing about, and why."""

AXES = (
    Axis(SM_AXIS, tuple(SMS), "machine", "every architecture has its own instructions"),
    Axis("tp", TP, "layout", "heads are split among ranks; each rank rounds its own"),
    Axis("sites", ("state", "w", "both"), "numerical", "a site may act alone or with the other"),
    Axis("recompute", ("full", "selective", "gdn_norm_out"), "numerical", "a forward pass that runs twice"),
    Axis("sequence", ("off", "on"), "layout", "tokens of norms are split among ranks too"),
    Axis("fault", tuple(FAULTS), "numerical", "an adapter can be wrong in more than one way"),
    Axis("scope", tuple(SCOPE), "numerical", "what is not qualified is said"),
)

REQUIREMENTS = (
    *(Requirement(f"on {sm}", {SM_AXIS: (sm,)}, "sm", "is", sm, f"the cell is about {sm}") for sm in SMS),
    *(
        Requirement(f"{tp} GPUs", {"tp": (tp,)}, "gpus", "at_least", tp, "every rank has a GPU of its own")
        for tp in TP
    ),
    *(
        Requirement(
            f"not qualified: {scope}", {"scope": (scope,)}, f"qualified {scope}", "is", "yes", because
        )
        for scope, because in SCOPE.items()
    ),
)

PROFILES = tuple(
    Profile(
        "megatron" if sm == "sm90" else f"megatron-{sm}",
        sm,
        "the adapters inside a Megatron training step",
        time_limit_s=500.0,
        import_limit_s=300.0,
        workers=1,
    )
    for sm in SMS
    if sm != "cpu"
)


def row(
    name: str,
    because: str,
    *,
    must_run: tuple[dict[str, str], ...] = ({"tp": "1"},),
    tp: tuple[str, ...] = TP,
    **axes: tuple[str, ...],
) -> CheckRow:
    """A check at every tensor-parallel size, of which size 1 must run where it is among them."""
    return CheckRow(
        f"megatron.{name}",
        "suites.megatron.checks:run",
        because,
        needs=("chunk_gated_delta_rule",),
        axes={"tp": tp, **axes},
        strength="all",
        must_run=must_run,
        constraints=(
            Constraint({"tp": ("1",), "sequence": ("on",)}, "one rank has no other to share tokens with"),
        ),
        profiles={profile.name: Options() for profile in PROFILES},
    )


def every(**axes: tuple[str, ...]) -> tuple[dict[str, str], ...]:
    """A must-run cell at size 1 for every level of one axis."""
    ((axis, levels),) = axes.items()
    return tuple({"tp": "1", axis: level} for level in levels)


SITES = ("state", "w", "both")
ALONE = tuple(name for name in FAULTS if name not in AMONG_RANKS)

CHECKS = (
    row(
        "sites",
        "a wrapper can leave rounding out of a layer, and nobody sees it in the loss",
        must_run=every(sites=SITES),
        sites=SITES,
        sequence=("off", "on"),
    ),
    row("off", "with both sites off a converted model is the original one"),
    row("checkpoint", "a policy that is lost on restore silently trains another model"),
    row(
        "recompute",
        "a recomputed forward pass must round to the same codes",
        must_run=every(recompute=("full", "selective")),
        recompute=("full", "selective", "gdn_norm_out"),
    ),
    row(
        "packed",
        "boundaries of packed sequences can get lost on the way to the op",
        must_run=({"tp": "1", "sites": "both"},),
        sites=("both",),
    ),
    row(
        "parallel",
        "ranks that share a layer must compute what one rank computes with the same weights",
        must_run=(),
        tp=SHARED,
        sites=SITES,
        sequence=("off", "on"),
    ),
    row(
        "reshard",
        "a checkpoint must mean the same model and the same policies to any number of ranks",
        must_run=(),
        tp=SHARED,
    ),
    row("refusals", "what cannot be rounded must be refused before anything changes"),
    row("modelopt", "users switch the sites on through ModelOpt's configuration"),
    CheckRow(
        "megatron.controls",
        "suites.megatron.checks:control",
        "a suite that passes a sabotaged adapter is worthless",
        axes={"tp": ("1", "2"), "fault": tuple(FAULTS)},
        strength="all",
        constraints=(
            Constraint({"tp": ("1",), "fault": AMONG_RANKS}, "it takes two ranks to differ"),
            Constraint({"tp": ("2",), "fault": ALONE}, "one rank shows it"),
        ),
        profiles={profile.name: Options() for profile in PROFILES},
        control=True,
    ),
    CheckRow(
        "megatron.scope",
        "suites.megatron.checks:out_of_scope",
        "what is not qualified must not look qualified",
        axes={"scope": tuple(SCOPE)},
        strength="all",
        profiles={profile.name: Options() for profile in PROFILES},
    ),
)

CELLS: tuple[tuple[str, dict[str, str]], ...] = tuple(
    (check.name.partition(".")[2], cell)
    for check in CHECKS
    if check.run.endswith(":run")
    for cell in (dict(zip(check.axes, levels, strict=True)) for levels in product(*check.axes.values()))
    if not (cell["tp"] == "1" and cell.get("sequence") == "on")
)
"""Scenario and levels of every valid cell of the checks that start processes."""

TABLES = Tables(
    axes=AXES,
    constraints=(),
    requirements=REQUIREMENTS,
    profiles=PROFILES,
    checks=CHECKS,
    subjects={"megatron": "suites.megatron.subject"},
    default_subjects=("megatron",),
    sweep="tp",
)
