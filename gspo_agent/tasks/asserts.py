"""Asserts about one function, as calls with expected results; read, never run."""

from __future__ import annotations

import ast
import doctest
from typing import Any

from gspo_agent.sandbox.inside import data


def call_tests(source: str, names: set[str]) -> tuple[str, list[dict[str, Any]]] | None:
    """The called function and {"args", "expected"} for each assert of `source`, or None unless every statement is an
    assert that says exactly that: `f(literals) == literal`, `f(literals) is None` or a constant truth.

    `names`: the names the function may go by; empty: whatever name the asserts agree on.
    """
    try:
        statements = ast.parse(source).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    tests: list[dict[str, Any]] = []
    called = ""
    for statement in statements:
        if not isinstance(statement, ast.Assert):
            return None
        if isinstance(statement.test, ast.Constant) and statement.test.value is True:
            continue
        found = _comparison(statement.test)
        if found is None or (names and found[0] not in names) or (called and found[0] != called):
            return None
        called = found[0]
        tests.append(found[1])
    return (called, tests) if tests else None


def check_body(source: str) -> str | None:
    """The statements inside HumanEval's `check(candidate)`, or None where there is no such function."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == "check" and len(node.args.args) == 1:
            body = [statement for statement in node.body if not isinstance(statement, ast.Pass)]
            return "\n".join(ast.unparse(statement) for statement in body)
    return None


def doctest_tests(source: str, name: str) -> list[dict[str, Any]]:
    """Calls of `name` with literal arguments and results among the `>>>` examples of its docstring."""
    try:
        functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name == name]
        examples = doctest.DocTestParser().get_examples(ast.get_docstring(functions[-1]) or "")
    except (SyntaxError, ValueError, IndexError, RecursionError, MemoryError):
        return []
    found = [call_tests(f"assert {example.source.strip()} == {example.want.strip()}", {name}) for example in examples]
    return [test for tests in found if tests is not None for test in tests[1]]


def _comparison(test: ast.expr) -> tuple[str, dict[str, Any]] | None:
    if not (isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.left, ast.Call)):
        return None
    call, operator, right = test.left, test.ops[0], test.comparators[0]
    if not isinstance(call.func, ast.Name) or call.keywords:
        return None
    try:
        args = [_literal(argument) for argument in call.args]
        expected = _literal(right)
        encoded = {"args": data.encode(args), "expected": data.encode(expected)}
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None
    same = isinstance(operator, ast.Eq) or (isinstance(operator, ast.Is) and (expected is None or expected is True))
    return (call.func.id, encoded) if same else None


def _literal(node: ast.expr) -> Any:
    """`ast.literal_eval`, and set(...), frozenset(...), tuple(...), list(...) of a literal."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords and len(node.args) <= 1:
        kinds: dict[str, Any] = {"set": set, "frozenset": frozenset, "tuple": tuple, "list": list}
        if node.func.id in kinds:
            return kinds[node.func.id](*[_literal(argument) for argument in node.args])
    return ast.literal_eval(node)
