from pathlib import Path

import pytest

from gspo_agent.monitor.curve import band_title, draw, sparkline


def test_the_band_is_named_beside_the_papers() -> None:
    assert (
        band_title({"name": "gspo", "clip_low": 3e-4, "clip_high": 4e-4}) == "gspo, band 0.0003 / 0.0004 (the paper's)"
    )
    assert "(the paper's: 0.0003 / 0.0004)" in band_title({"name": "gspo", "clip_low": 0.003, "clip_high": 0.004})


@pytest.mark.parametrize("steps", [[], [(1, {"pass_rate": 0.2, "clip_frac/0": 0.0, "clip_frac/1": 0.5})]])
def test_a_curve_is_drawn_from_any_number_of_steps(tmp_path: Path, steps: list[tuple[int, dict[str, float]]]) -> None:
    draw(tmp_path / "curve.png", steps, [(0, {"pass_rate": 0.1})], "title")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["curve.png"]


def test_a_sparkline_has_one_block_a_value_and_stays_in_range() -> None:
    assert sparkline([0.0, 0.5, 1.0, 2.0, -1.0]) == "▁▅██▁"
