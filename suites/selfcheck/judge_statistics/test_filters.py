"""Claims about matched filters."""

from __future__ import annotations

import pytest
import torch

from qualify.budgets import Noise, measure_noise
from qualify.compare import layout_of
from qualify.filters import Projection, compare_filters, project

Tensor = torch.Tensor
SHAPE = (1, 200, 4, 16)
LAYOUT = {"o": layout_of("o")}


def setting(effect: float, seed: int = 0) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Noise]]:
    """An answer, a wrong answer `effect` sigma away in every element, and noise of one sigma."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    expected = draw(*SHAPE)
    wrong = expected + effect * 1e-2 * draw(*SHAPE)
    noise = measure_noise(expected, expected + 1e-2 * draw(6, *SHAPE), dtype=torch.float32)
    return {"o": expected}, {"o": wrong}, {"o": noise}


def filter_of(effect: float) -> tuple[Projection, dict[str, Tensor], dict[str, Tensor], dict[str, Noise]]:
    expected, wrong, noise = setting(effect)
    generator = torch.Generator().manual_seed(9)
    noisy = [
        {
            "o": wrong["o"]
            - expected["o"]
            + 1e-2 * torch.randn(SHAPE, generator=generator, dtype=torch.float64)
        }
        for _ in range(2)
    ]
    found = project("fault", expected, wrong, noise, LAYOUT, noisy)
    assert found is not None
    return found, expected, wrong, noise


def noisy_error(seed: int) -> Tensor:
    return 1e-2 * torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("effect", [0.3, 1.0, 10.0])
def test_a_fault_below_the_noise_is_told_from_it(effect: float) -> None:
    projection, expected, wrong, noise = filter_of(effect)
    assert projection.telling
    for seed in range(100, 120):
        sound, faulty = noisy_error(seed), noisy_error(seed) + wrong["o"] - expected["o"]
        passed = compare_filters([projection], {"o": sound}, noise)
        failed = compare_filters([projection], {"o": faulty}, noise)
        assert passed.passed
        assert passed.excluded == ("fault",)
        assert not failed.passed
        assert failed.looks_like == "fault"
        assert failed.excluded == ()


def test_a_fault_that_noise_buries_is_neither_accused_nor_excluded() -> None:
    projection, expected, wrong, noise = filter_of(0.02)
    assert not projection.telling
    found = compare_filters([projection], {"o": wrong["o"] - expected["o"]}, noise)
    assert found.passed
    assert found.excluded == ()
    assert found.discrimination["fault"] < 1.0


def test_one_wild_chunk_of_one_head_does_not_decide() -> None:
    projection, expected, wrong, _ = filter_of(1.0)
    error = noisy_error(7)
    departure = wrong["o"] - expected["o"]
    error[:, :64, 1] += 50.0 * departure[:, :64, 1]
    assert abs(projection.of({"o": error})) < 0.3


def test_one_chunk_of_one_head_decides_no_more_where_several_tensors_show_it() -> None:
    expected, wrong, noise = setting(0.5)
    departure = wrong["o"] - expected["o"]
    departure[:, :64, 1] *= 10.0  # most of the information
    flipped = torch.zeros_like(departure)
    flipped[:, :64, 1] = departure[:, :64, 1]

    def share(*names: str) -> float:
        found = project(
            "fault",
            dict.fromkeys(names, expected["o"]),
            dict.fromkeys(names, expected["o"] + departure),
            dict.fromkeys(names, noise["o"]),
            dict.fromkeys(names, LAYOUT["o"]),
            [dict.fromkeys(names, departure)],
        )
        assert found is not None
        return found.of(dict.fromkeys(names, flipped))

    assert share("o", "dq", "dv", "dbeta") == pytest.approx(share("o"), abs=0.01)


def test_an_unrelated_error_is_not_taken_for_a_named_one() -> None:
    projection, _, _, noise = filter_of(1.0)
    unrelated = 30.0 * noisy_error(77)
    found = compare_filters([projection], {"o": unrelated}, noise)
    assert found.looks_like is None


def test_a_wrong_answer_that_changes_nothing_has_no_filter() -> None:
    expected, _, noise = setting(1.0)
    assert project("none", expected, dict(expected), noise, LAYOUT, [{"o": expected["o"] * 0}]) is None
