"""Right solutions and the test files that they pass, by what they do: name: (code, tests)."""

from __future__ import annotations

HONEST = {
    "containers change in place and keep their identity": (
        """
def fill(items, seen):
    items.sort(); items.append(items[0]); seen["n"] = len(items); return items
def clear(data, members, inner): data[:] = b"xy"; members.add(3); inner[0].append(1); inner.append(inner[0])
""",
        """
from solution import clear, fill
def test_lists():
    items, seen = [3, 1], {}
    assert fill(items, seen) is items
    assert items == [1, 3, 1] and seen == {"n": 3}
def test_others():
    data, members, inner = bytearray(b"a"), {1}, [[]]
    clear(data, members, inner)
    assert data == b"xy" and members == {1, 3} and inner == [[1], [1]] and inner[0] is inner[1]
""",
    ),
    "classes, operators, properties, subclasses": (
        """
import functools
@functools.total_ordering
class Money:
    rate = 2
    def __init__(self, n): self.n = n
    def __eq__(self, other): return isinstance(other, Money) and self.n == other.n
    def __lt__(self, other): return self.n < other.n
    def __hash__(self): return hash(self.n)
    def __add__(self, other): return Money(self.n + (other.n if isinstance(other, Money) else other))
    __radd__ = __add__
    def __repr__(self): return f"Money({self.n})"
    def __bool__(self): return self.n > 0
    def __contains__(self, n): return n == self.n
    def __getitem__(self, key): return key * self.n
    def __setitem__(self, key, value): self.n = key + value
    def __call__(self, x, *, y=0): return x + y + self.n
    @property
    def double(self): return 2 * self.n
    @double.setter
    def double(self, value): self.n = value // 2
    @classmethod
    def zero(cls): return cls(0)
    @staticmethod
    def name(): return "money"
class Gold(Money): pass
""",
        """
import pytest
import solution
from solution import Gold, Money
def test_operators():
    a, b = Money(1), Money(2)
    assert a + b == Money(3) and a + 1 == Money(2) and sum([a, b], 0) == Money(3)
    assert a < b and b >= a and max(a, b) is b and sorted([b, a]) == [a, b]
    assert a != b and a != 1 and not (a == 1)
    assert len({Money(1), Money(1), b}) == 2 and {a: "x"}[Money(1)] == "x"
    assert 1 in a and 2 not in a and a[5] == 5
    a[1] = 2
    assert a.n == 3 and a(1, y=2) == 6 and str(a) == "Money(3)" and f"{a}" == "Money(3)"
    assert a and not Money.zero() and Money.name() == "money"
def test_attributes():
    a = Money(1)
    a.double = 10
    assert a.n == 5 and a.double == 10 and a.rate == 2 and vars(a) == {"n": 5}
    Money.rate = 3
    assert a.rate == 3 and hasattr(a, "double") and not hasattr(a, "missing")
    del a.n
    with pytest.raises(AttributeError):
        a.n
def test_types():
    g = Gold(1)
    assert isinstance(g, Gold) and isinstance(g, Money) and not isinstance(Money(1), Gold)
    assert issubclass(Gold, Money) and type(g) is Gold and type(g).__name__ == "Gold" and callable(g)
    assert g.zero().n == 0 and solution.Gold is Gold
""",
    ),
    "exceptions": (
        """
import json
class Bad(ValueError):
    def __init__(self, what, code): super().__init__(f"bad {what}"); self.code = code
class Worse(Bad): pass
def fail(kind):
    if kind == "bad": raise Worse("thing", 7)
    if kind == "json": json.loads("{")
    if kind == "exit": raise SystemExit(3)
    raise {"key": KeyError, "zero": ZeroDivisionError, "os": FileNotFoundError}[kind](kind)
def guarded(call):
    try: return call()
    except LookupError as error: return f"{type(error).__name__}: {error}"
""",
        """
import json
import pytest
import unittest
from solution import Bad, Worse, fail, guarded
def test_own():
    with pytest.raises(Bad, match="^bad thing$") as caught:
        fail("bad")
    assert caught.value.code == 7 and caught.value.args == ("bad thing",) and caught.type is Worse
    with pytest.raises(ValueError):
        fail("bad")
@pytest.mark.parametrize("kind, expected", [("json", json.JSONDecodeError), ("exit", SystemExit), ("key", KeyError),
                                            ("zero", ZeroDivisionError), ("os", FileNotFoundError)])
def test_known(kind, expected):
    with pytest.raises(expected):
        fail(kind)
class Mine(Exception): pass
def test_of_callbacks():
    def wrong(): raise IndexError("i")
    def mine(): raise Mine("m")
    assert guarded(wrong) == "IndexError: i"
    with pytest.raises(Mine, match="m"):
        guarded(mine)
class TestCase(unittest.TestCase):
    def test_unittest(self):
        with self.assertRaises(Bad) as caught:
            fail("bad")
        self.assertEqual(str(caught.exception), "bad thing")
        self.assertRaises(KeyError, fail, "key")
        for n in range(2):
            with self.subTest(n=n):
                self.assertEqual(n, n)
""",
    ),
    "callbacks, mocks, iterators, context managers": (
        """
import time
from contextlib import contextmanager
def apply(f, items): return [f(x) for x in items]
def count(n):
    for i in range(n): yield i
def total(items): return sum(items)
def compose(*fs):
    def composed(x):
        for f in fs: x = f(x)
        return x
    return composed
def notify(target, n):
    target.send(n); target.last = n; return target.name
def now(): return time_source()
def time_source(): return time.time()
@contextmanager
def opened(log):
    log.append("in")
    yield len(log)
    log.append("out")
def locked(lock):
    with lock: pass
def read(file): return [line.strip() for line in file]
def by(key, items): return sorted(items, key=key)
""",
        """
import io, operator
from unittest import mock
import solution
def test_functions():
    assert solution.apply(lambda x: x * 2, [1, 2]) == [2, 4]
    assert solution.apply(str.upper, ["a"]) == ["A"]
    assert solution.apply(int, ["1"]) == [1]
    assert solution.compose(lambda x: x + 1, operator.neg)(3) == -4
    assert solution.by(operator.itemgetter(1), [(1, 2), (2, 1)]) == [(2, 1), (1, 2)]
def test_iterators():
    assert list(solution.count(3)) == [0, 1, 2]
    g = solution.count(5)
    assert next(g) == 0 and next(g) == 1
    assert solution.total(x for x in [1, 2]) == 3
    assert [a + b for a, b in zip(solution.count(2), solution.count(2))] == [0, 2]
def test_mocks():
    f = mock.Mock(return_value=5)
    assert solution.apply(f, [1, 2]) == [5, 5]
    f.assert_called_with(2)
    assert f.call_count == 2
    with mock.patch("solution.time_source", return_value=12):
        assert solution.now() == 12
    assert solution.now() > 1000
def test_objects_of_the_tests(monkeypatch):
    class Target:
        name = "t"
        def __init__(self): self.got = []
        def send(self, n): self.got.append(n)
    target = Target()
    assert solution.notify(target, 3) == "t" and target.got == [3] and target.last == 3
    monkeypatch.setattr(solution, "time_source", lambda: 4)
    assert solution.now() == 4
def test_context():
    log = []
    with solution.opened(log) as n:
        assert n == 1
    lock = mock.MagicMock()
    solution.locked(lock)
    lock.__enter__.assert_called_once()
    assert solution.read(io.StringIO("a\\nb\\n")) == ["a", "b"]
""",
    ),
    "data of the standard library, named tuples, enumerations, data classes": (
        """
import enum
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass, field
from datetime import date, datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from typing import NamedTuple
class Color(enum.Enum):
    RED = 1
    BLUE = 2
class Level(enum.IntEnum):
    LOW = 1
Point = namedtuple("Point", "x y")
class Pair(NamedTuple):
    a: int
    b: str = "b"
@dataclass(order=True)
class Item:
    name: str
    tags: list = field(default_factory=list)
def data():
    d = defaultdict(list); d["a"].append(1)
    return [Counter("aab"), OrderedDict(a=1), d, deque([1, 2]), date(2020, 1, 2), datetime(2020, 1, 2, 3),
            timedelta(days=1), Decimal("1.5"), Fraction(1, 3), {1, 2}, frozenset({1}), b"x", 1j, range(3), None, 2.5]
def same(x): return x
""",
        """
import pytest
from collections import Counter, OrderedDict, deque
from datetime import date, datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from solution import Color, Item, Level, Pair, Point, data, same
def test_data():
    assert data() == [Counter("aab"), OrderedDict(a=1), {"a": [1]}, deque([1, 2]), date(2020, 1, 2),
                      datetime(2020, 1, 2, 3), timedelta(days=1), Decimal("1.5"), Fraction(1, 3), {1, 2},
                      frozenset({1}), b"x", 1j, range(3), None, 2.5]
    assert same(float("inf")) == float("inf") and same(10**30) == 10**30 and same((1, [2, (3,)])) == (1, [2, (3,)])
    assert same(0.1 + 0.2) == pytest.approx(0.3)
    loop = [1]; loop.append(loop)
    assert same(loop) is loop
def test_enumerations():
    assert Color.RED is Color.RED and Color.RED != Color.BLUE and Color(1) is Color.RED and Color["BLUE"].value == 2
    assert [c.name for c in Color] == ["RED", "BLUE"] and len(Color) == 2 and Color.RED in Color
    assert Level.LOW == 1 and Level.LOW < 2 and isinstance(Level.LOW, int) and Level.LOW.name == "LOW"
    assert {Color.RED: 1}[Color.RED] == 1 and same(Color.RED) is Color.RED
def test_tuples():
    p = Point(1, 2)
    assert p == (1, 2) and p.x == 1 and isinstance(p, Point) and p._replace(x=5) == Point(5, 2) and p[1] == 2
    assert Pair(1) == (1, "b") and Pair(1).b == "b"
    x, y = p
    assert (x, y) == (1, 2) and repr(p) == "Point(x=1, y=2)"
def test_data_classes():
    a = Item("a", [1])
    assert a == Item("a", [1]) and a != Item("b") and a < Item("b") and repr(a) == "Item(name='a', tags=[1])"
    assert a.tags == [1]
""",
    ),
    "what is printed, async functions, imports of every form": (
        """
import sys, asyncio, threading
from concurrent.futures import ThreadPoolExecutor
__version__ = "1.0"
LIMIT = 10
def hello(name): print("hello", name); print("oops", file=sys.stderr); return LIMIT
async def fetch(n):
    await asyncio.sleep(0)
    return n + 1
async def twice(f): return await f(1) + await f(2)
def many(f, items):
    with ThreadPoolExecutor(2) as pool: return list(pool.map(f, items))
def documented():
    "It is."
if __name__ == "__main__":
    raise SystemExit("not here")
""",
        """
import asyncio, importlib, pytest, unittest
import solution as s
from solution import *
from solution import __version__
def test_prints(capsys):
    assert hello("you") == 10
    out = capsys.readouterr()
    assert out.out == "hello you\\n" and out.err == "oops\\n"
def test_async():
    assert asyncio.run(s.fetch(1)) == 2
    async def add(n): return n
    assert asyncio.run(s.twice(add)) == 3
@pytest.mark.asyncio
async def test_alone(capsys):
    assert await s.fetch(3) == 4
    hello("you")
    assert capsys.readouterr().out == "hello you\\n"
class TestAsync(unittest.IsolatedAsyncioTestCase):
    async def test_it(self):
        self.assertEqual(await s.fetch(2), 3)
def test_threads():
    assert many(lambda x: x + 1, [1, 2, 3]) == [2, 3, 4]
def test_module():
    assert __version__ == "1.0" and LIMIT == 10 and importlib.import_module("solution") is s
    assert s.documented.__doc__ == "It is." and s.hello.__name__ == "hello"
    s.LIMIT = 11
    assert s.hello("x") == 11
    importlib.reload(s)
    assert s.hello("x") == 10
""",
    ),
    "standard input": (
        """
import sys
def ask(): return [input("name: "), sys.stdin.readline(), [line.strip() for line in sys.stdin]]
def once(): return int(input())
def run(cb): return cb("abc"), len("abc")
""",
        """
import io, pytest
import solution
def test_stdin(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("Ann\\nx\\na\\nb\\n"))
    assert solution.ask() == ["Ann", "x\\n", ["a", "b"]]
    assert capsys.readouterr().out == "name: "
def test_input(monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: "7")
    assert solution.once() == 7
def test_builtin():
    assert solution.run(len) == (3, 3)
def test_none():
    with pytest.raises(OSError):
        solution.once()
""",
    ),
    "methods shadowed by attributes, subclasses of containers, copies": (
        """
import copy
class Stack(list):
    def push(self, x): self.append(x)
    def peek(self): return self[-1]
class Node:
    def __init__(self, value, next=None): self.value, self.next = value, next
class Tree:
    def __init__(self): self.items = []
    def size(self): return len(self.items)
    def __iter__(self): return iter(self.items)
    def __len__(self): return len(self.items)
    def insert(self, *xs): self.items.extend(xs); return self
def chain(n): return Node(n, chain(n - 1)) if n else None
def values(node):
    out = []
    while node: out.append(node.value); node = node.next
    return out
""",
        """
import copy
from solution import Node, Stack, Tree, chain, values
def test_list():
    s = Stack([1])
    s.push(2)
    assert s == [1, 2] and s.peek() == 2 and len(s) == 2 and list(s) == [1, 2] and s[0] == 1 and 2 in s
def test_nodes():
    n = chain(3)
    assert n.value == 3 and n.next.next.value == 1 and n.next.next.next is None
    n.next = Node(9)
    assert values(n) == [3, 9]
def test_tree():
    t = Tree().insert(1, 2)
    assert t.size() == 2 and list(t) == [1, 2] and len(t) == 2 and 1 in t
    c = copy.deepcopy(t)
    c.insert(3)
    assert c.size() == 3 and t.size() == 2
""",
    ),
    "lazy results and bare objects": (
        """
MISSING = object()
def lines(text): return map(str.strip, text.splitlines())
def numbered(items): return enumerate(items, 1)
def pairs(items): return zip(items, reversed(items))
def get(table, key, default=MISSING): return table.get(key, default)
def is_missing(value): return value is MISSING
""",
        """
from solution import MISSING, get, is_missing, lines, numbered, pairs
def test_lazy():
    assert list(lines(" a \\nb")) == ["a", "b"]
    assert [n for n, _ in numbered("xy")] == [1, 2] and next(lines("c")) == "c"
    assert list(pairs([1, 2])) == [(1, 2), (2, 1)]
def test_object():
    assert get({}, 1) is MISSING and is_missing(get({}, 1)) and get({1: 2}, 1) == 2
    mine = object()
    assert get({}, 1, mine) is mine and not is_missing(mine)
""",
    ),
}
