"""@tool: a signature and its docstring become the schema that the model reads and the check of what it writes."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import Annotated, Any, NotRequired, Required, cast, get_type_hints, overload

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError
from typing_extensions import TypedDict

from gspo_agent.errors import ToolError

_SECTION = re.compile(r"^(args|arguments|parameters|returns?|raises|yields|examples?|notes?):\s*$", re.IGNORECASE)
_PARAMETER = re.compile(r"^\*{0,2}(\w+)\s*(?:\([^)]*\))?:\s*(.*)$")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")
_SHOWN = 80


class Tool:
    """One function that the model may call.

    On an instance the name is still the plain method (`env.add(1, 2)` runs it); on the class it is the Tool.

    >>> class Shop(ToolEnv):
    ...     @tool(timeout=5)
    ...     def query(self, sql: str) -> str:
    ...         "Run one SQL query."
    >>> Shop.query.schema["function"]["name"]
    'query'
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        final: bool = False,
        timeout: float | None = None,
        idempotent: bool = False,
        parallel: bool = False,
        secrets: Iterable[str] = (),
    ) -> None:
        if isinstance(secrets, str):
            raise TypeError(f"tool {function.__name__}: secrets={secrets!r} is one string; write a tuple of names")
        if timeout is not None and not timeout > 0:
            raise ValueError(f"tool {function.__name__}: timeout={timeout!r} is not a positive number of seconds")
        self.function = function
        self.name = function.__name__
        self.final, self.timeout, self.idempotent, self.parallel = final, timeout, idempotent, parallel
        self.secrets = tuple(secrets)
        self.is_async = inspect.iscoroutinefunction(function)
        self.is_method = False
        self.__doc__ = function.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self.is_method = True

    @overload
    def __get__(self, instance: None, owner: type) -> Tool: ...
    @overload
    def __get__(self, instance: object, owner: type) -> Callable[..., Any]: ...
    def __get__(self, instance: object, owner: type) -> Any:
        return self if instance is None else self.function.__get__(instance, owner)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<tool {self.function.__qualname__}>"

    @cached_property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        """What the model fills in, by name. Raises TypeError where a parameter has no type or no name."""
        parameters = dict(inspect.signature(self.function).parameters)
        if self.is_method:
            parameters.pop(next(iter(parameters)))
        for name, parameter in parameters.items():
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                raise TypeError(
                    f"tool {self.name}: parameter {parameter} has no name of its own; spell the parameters out"
                )
            if parameter.annotation is parameter.empty:
                raise TypeError(f"tool {self.name}: parameter {name!r} needs a type annotation, as in `{name}: str`")
        return parameters

    @cached_property
    def schema(self) -> dict[str, Any]:
        """The OpenAI function schema. Raises TypeError where the signature cannot be described."""
        if not _NAME.fullmatch(self.name):
            raise TypeError(f"tool {self.name!r}: a name has at most 64 letters, digits, '_' and '-'")
        parameters = _without_titles(self._adapter.json_schema())
        parameters.pop("additionalProperties", None)
        parameters.setdefault("properties", {})
        parameters.pop("description", None)
        description = _describe(self.function.__doc__)[0]
        return {
            "type": "function",
            "function": {"name": self.name, "description": description, "parameters": parameters},
        }

    def validate(self, arguments: Any) -> dict[str, Any]:
        """The keyword arguments to call with. Raises ToolError, which says what to write instead."""
        try:
            return self._adapter.validate_python(arguments)
        except ValidationError as error:
            problems = "; ".join(self._explain(problem) for problem in error.errors(include_url=False))
            raise ToolError(f"wrong arguments for {self.name}: {problems}") from None

    @cached_property
    def _adapter(self) -> TypeAdapter[dict[str, Any]]:
        descriptions = _describe(self.function.__doc__)[1]
        try:
            hints = get_type_hints(self.function, include_extras=True)
            fields = {
                name: _field(parameter, hints[name], descriptions.get(name))
                for name, parameter in self.parameters.items()
            }
            # Called through Any: for a type checker a TypedDict is literal.
            kind = cast(Any, TypedDict)(f"{self.name}_arguments", fields)
            kind.__pydantic_config__ = ConfigDict(extra="forbid", arbitrary_types_allowed=False)
            return TypeAdapter(kind)
        except (NameError, PydanticUserError) as error:
            first = str(error).splitlines()[0]
            raise TypeError(f"tool {self.name}: its annotations cannot be read: {first}") from None

    def _explain(self, problem: Any) -> str:
        place = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "extra_forbidden":
            return f"unknown argument {place!r} (known: {', '.join(self.parameters) or 'none'})"
        if problem["type"] == "missing":
            return f"{place!r} is missing"
        given = repr(problem["input"])
        given = given if len(given) <= _SHOWN else given[:_SHOWN] + "..."
        return f"{place or 'arguments'}: {problem['msg']} (given {given})"


@overload
def tool(function: Callable[..., Any], /) -> Tool: ...
@overload
def tool(
    *,
    final: bool = False,
    timeout: float | None = None,
    idempotent: bool = False,
    parallel: bool = False,
    secrets: Iterable[str] = (),
) -> Callable[[Callable[..., Any]], Tool]: ...
def tool(
    function: Callable[..., Any] | None = None,
    /,
    *,
    final: bool = False,
    timeout: float | None = None,
    idempotent: bool = False,
    parallel: bool = False,
    secrets: Iterable[str] = (),
) -> Tool | Callable[[Callable[..., Any]], Tool]:
    """Makes a method (sync or async) callable by the model.

    Args:
        final: A call that succeeds ends the episode.
        timeout: Seconds; past it the model is told "timed out".
        idempotent: May run again when a crash left it without a result.
        parallel: Changes no state, so calls of one message may run at once.
        secrets: Names of arguments, or of the environment's attributes, whose values stay out of records and results.
    """

    def decorate(function: Callable[..., Any]) -> Tool:
        return Tool(function, final=final, timeout=timeout, idempotent=idempotent, parallel=parallel, secrets=secrets)

    return decorate if function is None else decorate(function)


def _field(parameter: inspect.Parameter, hint: Any, description: str | None) -> Any:
    extra: dict[str, Any] = {}
    required = parameter.default is parameter.empty
    if not required and _is_json(parameter.default):
        extra["default"] = parameter.default
    hint = Annotated[hint, Field(description=description, json_schema_extra=extra or None)]
    # A default stays the function's own: an argument that was not written is not passed.
    return Required[hint] if required else NotRequired[hint]


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def _describe(docstring: str | None) -> tuple[str, dict[str, str]]:
    """The text before the first section, and the descriptions under "Args:"."""
    lines = inspect.cleandoc(docstring or "").splitlines()
    sections = [number for number, line in enumerate(lines) if _SECTION.match(line)]
    text = "\n".join(lines[: sections[0]] if sections else lines).strip()
    parameters: dict[str, str] = {}
    for start in sections:
        if not lines[start].lower().startswith(("args", "arguments", "parameters")):
            continue
        name, margin = "", None
        for line in lines[start + 1 :]:
            if line and not line[0].isspace():
                break
            indent = len(line) - len(line.lstrip())
            margin = indent if margin is None and line.strip() else margin
            match = _PARAMETER.match(line.strip())
            if match and indent == margin:
                name = match[1]
                parameters[name] = match[2]
            elif name and line.strip():
                parameters[name] += " " + line.strip()
    return text, parameters


def _without_titles(schema: Any) -> Any:
    """Pydantic's titles repeat the names and cost prompt tokens; a property called "title" stays."""
    if isinstance(schema, list):
        return [_without_titles(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: {name: _without_titles(item) for name, item in value.items()}
        if key in ("properties", "$defs")
        else value
        if key in ("default", "enum", "const", "examples")
        else _without_titles(value)
        for key, value in schema.items()
        if key != "title"
    }
