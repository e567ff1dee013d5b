from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict, deque, namedtuple
from enum import IntEnum
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo_agent.sandbox.inside import data

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
keys = st.none() | st.booleans() | st.integers() | st.text() | st.tuples(st.integers(), st.text())
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(keys, inner) | st.sets(st.integers() | st.text())
    ),
    max_leaves=20,
)


@given(values)
@settings(max_examples=80, deadline=None)
def test_data_comes_back_as_it_went(value: Any) -> None:
    back = data.loads(data.dumps(value))
    assert back == value
    assert repr(back) == repr(value) or isinstance(value, set | dict | list | tuple)


def test_special_numbers_keep_their_kind() -> None:
    back = data.loads(data.dumps([math.inf, -math.inf, math.nan, 2**200, -(10**5000), 1.0, True, 1 + 2j]))
    assert back[:2] == [math.inf, -math.inf]
    assert math.isnan(back[2])
    assert back[3:5] == [2**200, -(10**5000)]
    assert [type(item) for item in back[5:]] == [float, bool, complex]


class Liar(int):
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = int.__hash__


class Grade(IntEnum):
    GOOD = 1


def test_subclasses_become_their_base_data() -> None:
    point = namedtuple("point", "x y")
    given_values = [Liar(99), Grade.GOOD, Counter("aab"), OrderedDict(a=1), deque([1]), point(1, 2), range(2)]
    back = data.loads(data.dumps(given_values))
    assert back == [99, 1, {"a": 2, "b": 1}, {"a": 1}, [1], (1, 2), [0, 1]]
    assert [type(item) for item in back] == [int, int, dict, dict, list, tuple, list]


def test_dictionary_that_looks_like_a_tag_is_data() -> None:
    assert data.loads(data.dumps({"$set": [1]})) == {"$set": [1]}
    assert data.loads(data.dumps({1: "a", "1": "b"})) == {1: "a", "1": "b"}


@pytest.mark.parametrize("value", [object(), (n for n in [1]), len, [object()], {"a": object}])
def test_objects_are_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="is not plain data"):
        data.dumps(value)


def test_cycles_and_depth_are_refused() -> None:
    cycle: list[Any] = []
    cycle.append(cycle)
    with pytest.raises(ValueError, match="nested deeper than 200"):
        data.dumps(cycle)
    with pytest.raises(ValueError, match="nested too deeply"):
        data.loads("[" * 100_000 + "]" * 100_000)


@pytest.mark.parametrize(
    "text",
    [
        '{"$what": 1}',
        '{"$float": "1"}',
        '{"$int": 3}',
        "NaN",
        "{",
        '{"$dict": [[1]]}',
        '{"$set": [{}]}',
        '{"$tuple": 3}',
    ],
)
def test_what_nobody_honest_writes_is_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        data.loads(text)


def test_reader_refuses_depth_and_colliding_members() -> None:
    with pytest.raises(ValueError, match="nested deeper than 200"):
        data.loads("[" * 300 + "]" * 300)
    colliding = [*range(5000), *(n * (2**61 - 1) for n in range(1, 3000))]
    for text in ({"$set": colliding}, {"$dict": [[n, 0] for n in colliding]}):
        with pytest.raises(ValueError, match="collide"):
            data.loads(json.dumps({"a": [text]}))
    assert data.loads(data.dumps(set(range(5000)))) == set(range(5000))


def test_plain_json_is_itself() -> None:
    text = '{"a": [1, 2.5, null, true, "x"], "b": {}}'
    assert data.loads(text) == json.loads(text)
