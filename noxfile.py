"""Sessions: `nox -s tests`, `lint`, `docs`, `qualify-cpu`, and one for each GPU that is qualified.

Inside a container that has everything, `nox --no-venv -s qualify-h100` uses it as it is. Arguments after `--`
go to pytest or to `qualify run`.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

import nox
from nox.virtualenv import PassthroughEnv

nox.options.sessions = ["tests", "lint"]
nox.options.error_on_missing_interpreters = False

CPU = "constraints/cpu.txt"
CUDA = "constraints/cuda.txt"


@dataclass(frozen=True)
class Gpu:
    """What a GPU session needs: a profile and the compute capabilities that it is for."""

    profile: str
    major: int
    minor: int | None = None

    def fits(self, capability: tuple[int, int]) -> bool:
        """Whether a GPU of this compute capability is what the session is about."""
        return capability[0] == self.major and self.minor in (None, capability[1])


GPUS: Mapping[str, Gpu] = {
    "qualify-sm86": Gpu("sm86", 8, 6),
    "qualify-sm89": Gpu("sm89", 8, 9),
    "qualify-h100": Gpu("h100", 9, 0),
    "qualify-b200": Gpu("b200", 10),
    "qualify-megatron": Gpu("megatron", 9, 0),
}


@nox.session
def tests(session: nox.Session) -> None:
    """Run the tests, the Triton kernels in the interpreter; coverage of `kernels/` must stay above 90 %."""
    install(session, ".[test,sign]", constraints=CPU)
    arguments = session.posargs or ["-n", "2", "--dist", "worksteal", "--cov=kernels", "--cov-fail-under=90"]
    session.run("python", "-m", "pytest", *arguments, env={"OMP_NUM_THREADS": "1"})


@nox.session
def lint(session: nox.Session) -> None:
    """Check style, types and who imports whom."""
    install(session, ".[lint,test,sign]", constraints=CPU)
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")
    session.run("mypy")
    session.run("lint-imports")


@nox.session(name="compile-tier")
def compile_tier(session: nox.Session) -> None:
    """Compile every kernel with every launch row for every architecture; each must fit and not spill.

    `-- --main --out kernels/compiled.json` renews the record of the main builds that `qualify` reads.
    """
    install(session, ".", constraints=CPU)
    jobs = str(len(os.sched_getaffinity(0)))
    modules = ("kernels.qdq.builds", "kernels.gdn.builds")
    session.run("python", "-m", "kernels.compile_tier", *modules, "--jobs", jobs, *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation; a warning is an error, and no optional package may be needed."""
    install(session, ".[docs,sign]", constraints=CPU)
    session.run(
        "sphinx-build", "-W", "--keep-going", "-b", "html", "docs", "docs/_build/html", *session.posargs
    )


@nox.session
def controls(session: nox.Session) -> None:
    """Tally planted faults caught and correct implementations passed, over 50 seeds."""
    install(session, ".[test,sign]", constraints=CPU)
    session.run("python", "-m", "suites.selfcheck.tally", *(session.posargs or ["--seeds", "50"]))


@nox.session
def bench(session: nox.Session) -> None:
    """Print the benchmark tables of a GPU, and write them under `runs/bench`."""
    found = gpus()
    if not found:
        session.error("bench needs a GPU, found none; run it on a GPU machine")
    install(session, ".[fla]", constraints=CUDA)
    session.run("python", "-m", "kernels.bench.qdq", "--out", "runs/bench", *session.posargs)
    session.run("python", "-m", "kernels.bench.gdn", "--out", "runs/bench", *session.posargs)


@nox.session(name="qualify-cpu")
def qualify_cpu(session: nox.Session) -> None:
    """Qualify the QDQ kernels, interpreted, and the eager subject on a machine without a GPU.

    The fused op takes minutes in the interpreter: `qualify run --profile cpu --subject kernels`.
    """
    install(session, ".[sign]", constraints=CPU)
    qualify(session, "cpu", "kernels.qdq", "eager")


@nox.session(name="qualify-sm86")
def qualify_sm86(session: nox.Session) -> None:
    """Qualify the kernels on an SM 8.6 GPU."""
    qualify_gpu(session)


@nox.session(name="qualify-sm89")
def qualify_sm89(session: nox.Session) -> None:
    """Qualify the kernels on an SM 8.9 GPU."""
    qualify_gpu(session)


@nox.session(name="qualify-h100")
def qualify_h100(session: nox.Session) -> None:
    """Qualify the kernels on an SM 9.0 GPU."""
    qualify_gpu(session)


@nox.session(name="qualify-b200")
def qualify_b200(session: nox.Session) -> None:
    """Qualify the kernels on an SM 10.x GPU."""
    qualify_gpu(session)


@nox.session(name="qualify-megatron")
def qualify_megatron(session: nox.Session) -> None:
    """Qualify the adapters inside a Megatron training step, on as many SM 9.0 GPUs as there are."""
    needed_gpu(session)
    install(session, ".[megatron,modelopt,fla,sign]", constraints=CUDA)
    session.run("python", "-m", "suites.megatron.run", *session.posargs)


def qualify_gpu(session: nox.Session) -> None:
    """Installs what is pinned and qualifies the kernels on the session's GPU."""
    needed = needed_gpu(session)
    install(session, ".[sign]", constraints=CUDA)
    qualify(session, needed.profile, "kernels")


def needed_gpu(session: nox.Session) -> Gpu:
    """What the session needs; on other hardware it ends at once and says what it found."""
    needed = GPUS[session.name]
    found = gpus()
    if not found or not all(needed.fits(capability) for _, capability in found):
        wanted = f"SM {needed.major}.{'x' if needed.minor is None else needed.minor}"
        seen = ", ".join(f"{name} (SM {major}.{minor})" for name, (major, minor) in found) or "no GPU"
        session.error(f"{session.name} needs GPUs of {wanted}, found {seen}; run the session for that GPU")
    return needed


def qualify(session: nox.Session, profile: str, *subjects: str) -> None:
    """Runs `qualify run`; subjects given after `--` replace the session's."""
    named = any(argument.startswith(("--subject", "-s")) for argument in session.posargs)
    chosen = [] if named else [word for subject in subjects for word in ("--subject", subject)]
    session.run("python", "-m", "qualify", "run", "--profile", profile, *chosen, *session.posargs)


def install(session: nox.Session, *packages: str, constraints: str) -> None:
    """Installs into the session's environment; with `--no-venv` everything is there already."""
    if not isinstance(session.virtualenv, PassthroughEnv):
        session.install("-c", constraints, *packages)


def gpus() -> list[tuple[str, tuple[int, int]]]:
    """Name and compute capability of every GPU of this machine, asked of the driver alone."""
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=name,compute_cap", "--format=csv,noheader"]
        lines = subprocess.run(query, capture_output=True, text=True, timeout=60, check=False).stdout
        rows = [line.rpartition(",") for line in lines.splitlines() if line.count(".") and "," in line]
        return [(name.strip(), capability_of(text)) for name, _, text in rows]
    return gpus_of_driver()


def capability_of(text: str) -> tuple[int, int]:
    """(9, 0) for ` 9.0`."""
    major, _, minor = text.strip().partition(".")
    return int(major), int(minor)


def gpus_of_driver() -> list[tuple[str, tuple[int, int]]]:
    """The same from the CUDA driver's library, where there is no `nvidia-smi`."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    number, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(number)):
        return []
    found = []
    for device in range(number.value):
        name = ctypes.create_string_buffer(100)
        driver.cuDeviceGetName(name, 100, device)
        driver.cuDeviceGetAttribute(ctypes.byref(major), 75, device)
        driver.cuDeviceGetAttribute(ctypes.byref(minor), 76, device)
        found.append((name.value.decode(), (major.value, minor.value)))
    return found
