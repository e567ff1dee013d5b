from __future__ import annotations

import json
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo_agent.env.generator import GeneratorEncoder, decode_generator
from gspo_agent.env.state import NotEncodable, decode, encode

_ATOMS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**200), 2**200)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.builds(np.float32, st.floats(width=32, allow_nan=False))
)
_KEYS = (
    st.text() | st.integers() | st.sampled_from(["$ref", "$tuple", "$int", "$"]) | st.tuples(st.integers(), st.text())
)
_VALUES = st.recursive(
    _ATOMS,
    lambda inner: st.lists(inner) | st.dictionaries(_KEYS, inner) | st.tuples(inner, inner) | st.sets(st.integers()),
    max_leaves=12,
)


def through_json(value: Any) -> Any:
    return decode(json.loads(json.dumps(encode(value), allow_nan=False)))


def same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(x, y) for x, y in zip(a.values(), b.values(), strict=True))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


@given(_VALUES)
def test_every_value_comes_back_with_its_type(value: Any) -> None:
    assert same(through_json(value), value)


@given(_VALUES)
def test_every_form_can_be_written_by_a_json_of_64_bits_and_utf8(value: Any) -> None:
    orjson.dumps(encode(value))


@pytest.mark.parametrize("number", [2**63 - 1, -(2**63), 2**64, 2**127])
def test_integers_of_any_size_come_back(number: int) -> None:
    assert decode(orjson.loads(orjson.dumps(encode([number])))) == [number]


def test_plain_json_is_left_as_it_is() -> None:
    value = {"a": [1, 2.5, None, True, "x"], "b": {"c": {}}}
    assert encode(value) == value


@pytest.mark.parametrize(
    "array", [np.arange(6, dtype=np.int16).reshape(2, 3), np.zeros(0), np.array(["ab", "c"]), np.eye(3)[::2]]
)
def test_arrays_keep_dtype_shape_and_bits_and_can_be_written(array: Any) -> None:
    back = through_json(array)
    assert (back.dtype, back.shape) == (array.dtype, array.shape)
    assert (back == array).all()
    assert back.flags.writeable


def test_floats_that_json_lacks_come_back() -> None:
    back = through_json([float("inf"), -float("inf"), float("nan")])
    assert back[:2] == [float("inf"), -float("inf")]
    assert back[2] != back[2]


@pytest.mark.parametrize("bits", [np.random.PCG64, np.random.MT19937])
def test_a_generator_comes_back_wherever_it_stands(bits: Any) -> None:
    encoder, generator = GeneratorEncoder(), np.random.Generator(bits(7))
    assert encoder.encode(None, None) is None
    for drawn in (0, 1, 0, 3):
        generator.random(drawn)
        again, seed = decode_generator(encoder.encode(generator, 7))
        assert again is not None
        assert seed == -1
        assert encode(again.bit_generator.state) == encode(generator.bit_generator.state)
    assert encoder.encode(None, None) is None


def test_a_generator_that_nobody_asked_for_is_its_seed() -> None:
    encoder = GeneratorEncoder()
    data = encoder.encode(None, 7)
    assert encoder.encode(None, 7) is data
    assert decode_generator(data) == (None, 7)
    assert decode_generator(encoder.encode(None, None)) == (None, None)


def test_a_shared_container_is_still_shared_and_a_cycle_still_closed() -> None:
    cart: list[Any] = [1]
    back = through_json({"cart": cart, "user": {"cart": cart}, "pair": (cart, cart)})
    assert back["cart"] is back["user"]["cart"] is back["pair"][0] is back["pair"][1]
    cart.append(cart)
    back = through_json(cart)
    assert back[1] is back


@given(_VALUES, st.lists(st.integers()))
def test_sharing_survives_beside_anything(value: Any, shared: list[int]) -> None:
    back = through_json([shared, value, shared, (shared, {1: shared})])
    assert back[0] is back[2] is back[3][0] is back[3][1][1]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"a": [1, {"db": object()}]}, r"self\.a\[1\]\.db is a builtins\.object"),
        ({"f": {1: print}}, r"self\.f\[1\] is a builtins\.builtin_function_or_method"),
        ({"x": np.array([object()])}, r"self\.x is a numpy array of object"),
    ],
)
def test_what_has_no_json_form_is_named_with_its_place(value: Any, said: str) -> None:
    with pytest.raises(NotEncodable, match=said):
        encode(value, "self")


@pytest.mark.parametrize("text", ["\ud800", "é\udfff", "plain", "ü"])
def test_every_text_has_a_form_that_utf8_can_hold(text: str) -> None:
    json.dumps(encode({"a": text}), ensure_ascii=False).encode()
    assert through_json([text]) == [text]


def test_nesting_beyond_reason_is_named_and_no_crash() -> None:
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(NotEncodable, match="nested more than 200 deep"):
        encode(deep, "self")


def test_a_subclass_is_not_taken_for_its_base() -> None:
    class Odd(dict[str, int]): ...

    with pytest.raises(NotEncodable, match="Odd"):
        encode(Odd())
