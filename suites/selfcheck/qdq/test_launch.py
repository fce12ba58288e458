"""Launch rows are looked up by fact, forced by name, and recorded when they run."""

from __future__ import annotations

import threading

import pytest

from kernels import launch
from kernels.launch import INTERPRETER, LaunchRow, force_launch_row, recorded_launches, row_for


def row(name: str, **options: object) -> LaunchRow:
    return LaunchRow("k", name, "for this test", **options)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_ROWS", {})
    monkeypatch.setattr(launch, "_CHOSEN", {})
    launch.register(
        [
            row("k:hopper", sm=(90, 99), where={"carrier": ("bf16", "fp16")}),
            row("k:slow", default=False),
            row("k:any"),
        ]
    )


def test_the_first_row_that_fits_is_chosen() -> None:
    assert row_for("k", 90, carrier="bf16").name == "k:hopper"
    assert row_for("k", 90, carrier="fp32").name == "k:any"
    assert row_for("k", 80, carrier="bf16").name == "k:any"
    assert row_for("k", INTERPRETER, carrier="bf16").name == "k:hopper"


def test_a_forced_row_holds_inside_in_every_thread_and_ends_outside() -> None:
    seen: list[str] = []
    with force_launch_row("k:slow"), recorded_launches() as ran:
        with force_launch_row("k:any"):
            assert row_for("k", 90, carrier="bf16").name == "k:any"
        thread = threading.Thread(target=lambda: seen.append(row_for("k", 90, carrier="bf16").name))
        thread.start()
        thread.join()
    assert seen == ["k:slow"]
    assert ran == {"k": "k:slow"}
    assert row_for("k", 90, carrier="bf16").name == "k:hopper"
    assert ran == {"k": "k:slow"}


def test_wrong_rows_and_names_are_refused() -> None:
    with pytest.raises(ValueError, match="power of two"):
        row("k:three", num_warps=3)
    with pytest.raises(ValueError, match="because"):
        LaunchRow("k", "k:why", "")
    with pytest.raises(ValueError, match="unique"):
        launch.register([row("k:any", num_warps=8)])
    with pytest.raises(ValueError, match="must be registered"), force_launch_row("k:none"):
        pass
    with pytest.raises(ValueError, match="no launch row"):
        row_for("other", 90)
    with force_launch_row("k:hopper"), pytest.raises(ValueError, match="must fit"):
        row_for("k", 80, carrier="bf16")


def test_a_row_cannot_be_changed_behind_the_table() -> None:
    (first, *_) = launch.rows_of("k")
    with pytest.raises(TypeError):
        first.where["carrier"] = ()  # type: ignore[index]
    assert first.options() == {"num_warps": 4, "num_stages": 2}
