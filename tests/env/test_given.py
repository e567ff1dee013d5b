"""What an author still has of a task is written as its place in the task, and comes back as the same thing."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo_agent.env.given import Given
from gspo_agent.env.state import decode, encode

_TEXT = st.text(max_size=3) | st.just("a long text, " * 8) | st.just("another long text, " * 8)
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(0, 3) | st.floats(0, 1) | _TEXT,
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(max_size=2), children, max_size=4),
    max_leaves=20,
)
_TASKS = st.dictionaries(st.text(min_size=1, max_size=2), _JSON, min_size=1, max_size=4)


def parts(value: Any) -> list[Any]:
    """All containers in `value`, itself first, each once."""
    found, left = dict[int, Any](), [value]
    while left:
        part = left.pop(0)
        if isinstance(part, dict | list) and id(part) not in found:
            found[id(part)] = part
            left.extend(part.values() if isinstance(part, dict) else part)
    return list(found.values())


def shape(value: Any) -> Any:
    """The value with its types, and which containers are one and the same."""
    numbers: dict[int, int] = {}

    def walk(part: Any) -> Any:
        if not isinstance(part, dict | list):
            return type(part).__name__, repr(part)
        if id(part) in numbers:
            return numbers[id(part)]
        numbers[id(part)] = len(numbers)
        return [walk(item) for item in (part.items() if isinstance(part, dict) else part)]  # a pair is no container

    return walk(value)


def change(part: Any, draw: random.Random, others: list[Any]) -> None:
    """One thing that a tool might do to a part of the task."""
    keys = list(part) if isinstance(part, dict) else list(range(len(part)))
    new = draw.choice([1, True, 1.0, None, "x", [], {}, [1], draw.choice(others), copy.copy(draw.choice(others))])
    if keys and draw.random() < 0.3:
        taken = part.pop(draw.choice(keys))
        if isinstance(part, dict) and draw.random() < 0.5:
            part[draw.choice("abc")] = taken
    elif keys and draw.random() < 0.6:
        part[draw.choice(keys)] = new
    elif isinstance(part, list):
        part.append(new)
    else:
        part[draw.choice("abc")] = new


@settings(max_examples=150, deadline=None)
@given(_TASKS, st.integers(0, 2**32))
def test_an_author_may_do_anything_to_the_task_and_gets_it_back_in_another_process(task: Any, seed: int) -> None:
    draw = random.Random(seed)
    here = Given(task)
    found = parts(here.copy)
    for _ in range(draw.randint(0, 4)):
        change(draw.choice(found), draw, found)
    attributes = {"whole": here.copy, "some": draw.choice(found), "new": [draw.choice(found)]}
    written = json.dumps(encode(attributes, given=here))
    there = Given(json.loads(json.dumps(task)))
    assert shape(decode(json.loads(written), there)) == shape(attributes)


def test_what_is_unchanged_takes_the_room_of_its_place() -> None:
    task = {"rows": [{"text": "t" * 500}, {"text": "u" * 500}], "prompt": "p" * 500, "n": 7}
    here = Given(task)
    attributes = {"task": here.copy, "row": here.copy["rows"][1], "prompt": here.copy["prompt"], "n": 7}
    places = {"task": {"$task": []}, "row": {"$task": ["rows", 1]}, "prompt": {"$task": ["prompt"]}, "n": 7}
    assert encode(attributes, given=here) == places
    here.copy["rows"][0]["seen"] = True
    first = {"text": {"$task": ["rows", 0, "text"]}, "seen": True}
    rows = [first, {"$task": ["rows", 1]}]
    assert encode(here.copy, given=here) == {"rows": rows, "prompt": {"$task": ["prompt"]}, "n": 7}


@pytest.mark.parametrize("value", [True, 1.0, "1"])
def test_what_is_only_equal_is_changed(value: Any) -> None:
    here = Given({"rows": [1]})
    here.copy["rows"][0] = value
    assert json.dumps(encode(here.copy, given=here)) == json.dumps({"rows": [value]})
