from __future__ import annotations

from enum import Enum
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field

from gspo_agent.errors import ToolError
from gspo_agent.tools import Tool, tool


class Unit(Enum):
    METRE = "m"
    FOOT = "ft"


class Point(BaseModel):
    title: str
    x: float = 0.0


class Bench:
    @tool
    def measure(
        self,
        what: str,
        unit: Unit,
        times: Annotated[int, Field(ge=1, le=9)] = 1,
        mode: Literal["fast", "exact"] | None = None,
        points: list[Point] | None = None,
    ) -> str:
        """Measure something.

        Takes a while.

        Args:
            what: The thing,
                described well.
            unit (Unit): Metres or feet.
            times: How often.

        Returns:
            text that is not for the model.
        """
        return f"{what} {unit.value} {times}"

    @tool(final=True, timeout=2.5, idempotent=True, parallel=False, secrets=("pin",))
    async def leave(self, pin: str) -> str:
        """Leave."""
        return pin

    @tool
    def nothing(self) -> None: ...


def test_schema_is_read_from_signature_and_docstring() -> None:
    function = Bench.measure.schema["function"]
    assert function["name"] == "measure"
    assert function["description"] == "Measure something.\n\nTakes a while."
    properties = function["parameters"]["properties"]
    assert properties["what"] == {"type": "string", "description": "The thing, described well."}
    assert properties["unit"]["description"] == "Metres or feet."
    assert properties["times"] == {
        "type": "integer",
        "minimum": 1,
        "maximum": 9,
        "default": 1,
        "description": "How often.",
    }
    assert function["parameters"]["required"] == ["what", "unit"]
    assert set(function["parameters"]["$defs"]["Point"]["properties"]) == {
        "title",
        "x",
    }  # a property, not pydantic's title
    assert "self" not in properties


def test_a_tool_without_parameters_has_an_empty_object_schema() -> None:
    assert Bench.nothing.schema["function"]["parameters"] == {"type": "object", "properties": {}}
    assert Bench.nothing.validate({}) == {}


def test_flags_are_attributes_and_the_method_stays_a_method() -> None:
    leave = Bench.leave
    assert (leave.final, leave.timeout, leave.idempotent, leave.parallel) == (True, 2.5, True, False)
    assert (leave.secrets, leave.is_async, Bench.measure.is_async) == (("pin",), True, False)
    assert Bench().measure("desk", Unit.FOOT, times=2) == "desk ft 2"


def test_valid_arguments_are_converted_and_defaults_left_to_the_function() -> None:
    assert Bench.measure.validate({"what": "desk", "unit": "m"}) == {"what": "desk", "unit": Unit.METRE}
    given = Bench.measure.validate({"what": "d", "unit": "ft", "times": "3", "points": [{"title": "a"}]})
    assert (given["times"], given["points"]) == (3, [Point(title="a")])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"unit": "m"}, "'what' is missing"),
        ({"what": "d", "unit": "m", "tims": 2}, r"unknown argument 'tims' \(known: what, unit, times, mode, points\)"),
        ({"what": 5, "unit": "m"}, r"what: Input should be a valid string \(given 5\)"),
        ({"what": "d", "unit": "m", "times": 0}, "times: .*greater than or equal to 1"),
        ({"what": "d", "unit": "inch"}, "unit: Input should be 'm' or 'ft'"),
        ({"what": "d", "unit": "m", "points": [{"x": 1}]}, "'points.0.title' is missing"),
        (["d", "m"], r"arguments: .*dictionary.*\(given \['d', 'm'\]\)"),
        (None, "arguments: "),
        ({"what": ["x" * 500], "unit": "m"}, r"given \['x{60,80}\.\.\."),
    ],
)
def test_wrong_arguments_tell_the_model_what_to_write(arguments: Any, said: str) -> None:
    with pytest.raises(ToolError, match=said) as raised:
        Bench.measure.validate(arguments)
    assert str(raised.value).startswith("wrong arguments for measure: ")
    assert "pydantic" not in str(raised.value)


def test_every_problem_of_one_call_is_named() -> None:
    with pytest.raises(ToolError, match=r"'what' is missing.*'unit' is missing.*unknown argument 'x'"):
        Bench.measure.validate({"x": 1})


def test_parameter_names_may_be_those_of_pydantic_models() -> None:
    @tool
    def odd(json: str, schema: str, copy: int, model_fields: int) -> str:
        """Odd."""
        return json

    given = {"json": "a", "schema": "b", "copy": 1, "model_fields": 2}
    assert odd.validate(given) == given


def test_names_that_no_model_can_write_are_refused() -> None:
    with pytest.raises(TypeError, match="'<lambda>': a name has at most 64"):
        Tool(lambda: 0).schema  # noqa: B018


def test_signatures_that_cannot_be_described_are_refused_by_name() -> None:
    def bare(x): ...  # type: ignore[no-untyped-def]

    def rest(*args: int) -> None: ...

    def unknown(x: Nowhere) -> None: ...  # type: ignore[name-defined]  # noqa: F821

    def opaque(x: object_without_schema) -> None: ...  # type: ignore[valid-type]

    for function, said in [
        (bare, "tool bare: parameter 'x' needs a type annotation, as in `x: str`"),
        (rest, "tool rest: parameter .*args.* has no name of its own"),
        (unknown, "tool unknown: its annotations cannot be read: name 'Nowhere' is not defined"),
        (opaque, "tool opaque: its annotations cannot be read"),
    ]:
        with pytest.raises(TypeError, match=said):
            Tool(function).schema  # noqa: B018


class Opaque: ...


object_without_schema = Opaque


def test_wrong_flags_are_refused_where_they_are_written() -> None:
    with pytest.raises(TypeError, match="write a tuple of names"):
        tool(secrets="pin")(lambda: None)
    with pytest.raises(ValueError, match="timeout=0 is not a positive number"):
        tool(timeout=0)(lambda: None)


def test_validating_builds_no_model_again() -> None:
    adapter = Bench.measure._adapter
    Bench.measure.validate({"what": "d", "unit": "m"})
    assert Bench.measure._adapter is adapter
    assert Bench.measure.schema is Bench.measure.schema
