from __future__ import annotations

import re
import types
import warnings

import pytest

from gspo_agent.sandbox.inside import repl

_CELLS = (
    "1 + 1", "print(x)\n", "f(x)\n\n", "x", "...", "1,", "1 # c", "# c", "", " ", "'a' 'b'", "f'{x}'", "'é'", "1_000",
    " 1", "\t1", "\f1", "1\r\n", "1\r2", "\ufeff1", "a\0b", "*a", "*a, 1", "(yield)", "yield 1", "(await x)", "await x",
    "import math", "pass", "del x", "return", "x y", "1 +", "(", ")", "'", "'''a", "!", "x and", "01", "1__0", "1 is 1",
    "(1)(2)", "f(**a, *b)", "f(a for a in b, c)", "1if x else 2", "1if x else 2; y", "[0x1for x in (1, 2)]; y", "'\\d'",
    "'\\d'; y", "x = '\\d'", "(x := 1)", "lambda: 1", "x; y", "x = 1", "if x: 1", "f(x=1)", "(" * 300 + ")" * 300,
)  # fmt: skip


@pytest.mark.parametrize("cell", _CELLS)
def test_expression_is_compiled_the_same_without_its_tree(cell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    direct = _compiled(cell)
    monkeypatch.setattr(repl, "_EXPRESSION", re.compile(b"(?!)"))
    assert direct == _compiled(cell)


def _compiled(cell: str) -> tuple[object, list[str]]:
    found: tuple[types.CodeType | None, types.CodeType | None] | tuple[object, ...]
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            found = repl._compile(cell.encode(), "<cell 1>")
        except SyntaxError as error:
            found = (*error.args, error.__context__)
        except ValueError as error:
            found = error.args
    return found, [str(warning.message) for warning in warned]
