"""States as bytes: what an environment gave is what a later life gets, or it is refused by its place."""

from __future__ import annotations

import math
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo_agent.rollout.state import State

plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(st.characters(codec="utf-8")),
    lambda parts: st.lists(parts, max_size=3) | st.dictionaries(st.text(st.characters(codec="utf-8")), parts),
)


@given(plain)
def test_no_number_is_lost_on_the_way(value: Any) -> None:
    back = orjson.loads(orjson.dumps(value))
    if back == value:
        assert State.of(value).value == value
    else:
        with pytest.raises(TypeError, match=r"^state.* is (nan|-?inf), which comes back as None"):
            State.of(value)


@pytest.mark.parametrize("lost", [math.nan, math.inf, -math.inf])
def test_a_number_that_json_has_not_is_refused_by_its_place(lost: float) -> None:
    for value, place in (
        (lost, "state is"),
        ({"means": [None, 0.5, {"a": lost}]}, r"state\['means'\]\[2\]\['a'\] is"),
        ({"pair": (1, 2), "mean": lost}, r"state\['mean'\] is"),
    ):
        with pytest.raises(TypeError, match=f"^{place} {lost}, which comes back as None"):
            State.of(value)
    assert State.of({"null": None, "text": "null", "pair": (1, 2)}).value == {
        "null": None,
        "text": "null",
        "pair": [1, 2],
    }
