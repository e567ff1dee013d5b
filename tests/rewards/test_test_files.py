"""Test files: what honest solutions may do, and what hostile ones do in vain."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest

from gspo_agent.sandbox import Sandbox, SandboxLimits
from rewards.unit_tests import Verdict, judge

TIGHT = SandboxLimits(cpu_s=1.0, wall_s=5.0, memory_bytes=128 << 20)


async def judged(code: str, tests: str, sandbox: Sandbox, limits: SandboxLimits = TIGHT, **more: Any) -> Verdict:
    return await judge(code, [{"test_file": tests, **more}], kind="testfile", limits=limits, sandbox=sandbox)


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
}


@pytest.mark.parametrize("name", HONEST)
async def test_right_solution_passes(name: str, sandbox: Sandbox) -> None:
    code, tests = HONEST[name]
    verdict = await judged(code, tests, sandbox)
    assert verdict.verdict == "pass", "\n".join([verdict.reason, *(test.error for test in verdict.tests)])


# The test is passed by a right solution; the code is none and tries to pass it all the same.
LIAR = """
class Liar:
    def _yes(self, *_): return True
    def _me(self, *_): return self
    def _zero(self, *_): return 0.0
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = __bool__ = _yes
    startswith = endswith = isdigit = isupper = issubset = issuperset = isdisjoint = _yes
    __add__ = __radd__ = __mul__ = __rmul__ = __and__ = __or__ = _me
    __sub__ = __rsub__ = __abs__ = __mod__ = __rmod__ = __truediv__ = __rtruediv__ = __floordiv__ = _zero
    def __hash__(self): return hash(3)
    def __iter__(self): yield self
    def __len__(self): return 3
    def __getattr__(self, name): return self
    def __call__(self, *a, **k): return self
def answer(*_): return Liar()
"""
PEER = """
import sys
def peer():
    frame = sys._getframe()
    while frame:
        for value in list(frame.f_locals.values()):
            if type(value).__name__ == "_Host":
                return value
        frame = frame.f_back
def try_all(*attempts):
    got = []
    for attempt in attempts:
        try: got.append(attempt())
        except Exception: pass
    return got
"""
IS_3 = "import solution\ndef test(): assert solution.answer(1, 2) == 3"
CALLBACK = "import solution\nSECRET = 35711\ndef test():\n    assert solution.answer(lambda: 0) == SECRET"
# What a callback of the tests leads to.
WALK = """
def find(value, depth=0):
    if value == 35711 or depth > 4: return value if value == 35711 else None
    if isinstance(value, dict): value = list(value.values())
    for item in value if isinstance(value, (list, tuple)) else []:
        if (found := find(item, depth + 1)) is not None: return found
"""
LIES = """
import math, pytest, unittest
from solution import answer
def test_equal(): assert answer() == 3
def test_equal_the_other_way_round(): assert 3 == answer()
def test_different_from_nothing(): assert not answer() != 3
def test_near(): assert abs(answer() - 3.5) < 1e-6
def test_near_the_other_way_round(): assert 1e-6 > abs(3.5 - answer())
def test_approximately(): assert answer() == pytest.approx(3.5)
def test_close(): assert math.isclose(answer(), 3.5)
def test_between(): assert 3 <= answer() <= 3
def test_contains(): assert 3 in answer()
def test_is_contained(): assert answer() in (3, 4)
def test_is_a_key(): assert {3: 1}[answer()] == 1
def test_is_a_member(): assert {answer()} == {3}
def test_starts(): assert answer().startswith("ab")
def test_is_a_subset(): assert answer().issubset({1, 2})
def test_is_a_superset(): assert {1, 2} <= answer()
def test_is_divisible(): assert answer() % 7 == 0
def test_is_sorted(): assert sorted(answer()) == [1, 2, 3]
def test_is_true(): assert answer() is True
def test_is_none(): assert answer() is None
def test_is_text(): assert isinstance(answer(), str)
class TestCase(unittest.TestCase):
    def test_almost(self): self.assertAlmostEqual(answer(), 3.5)
    def test_in(self): self.assertIn(3, answer())
    def test_count(self): self.assertCountEqual(answer(), [1, 2, 3])
    def test_equal(self): self.assertEqual(answer(), 3)
    def test_list(self): self.assertListEqual(answer(), [1, 2, 3])
    def test_greater(self): self.assertGreater(answer(), 3)
    def test_not_none(self): self.assertIsNone(answer())
"""
FORGED = {
    "near everything in two steps, by a class that the tests know": (
        "class Near:\n    def __sub__(s, o): return s\n    __rsub__ = __sub__\n    def __abs__(s): return 0.0\n"
        "def answer(*_): return Near()",
        "from solution import Near, answer\ndef test(): assert abs(answer() - 3.5) < 1e-6",
    ),
    "an int with answers of its own": (
        "class Int(int):\n    def __eq__(s, o): return True\n    def __sub__(s, o): return 0\n    __rsub__ = __sub__\n"
        "    def __hash__(s): return 3\ndef answer(*_): return Int(7)",
        IS_3,
    ),
    "a list with answers of its own": (
        "class List(list):\n    def __eq__(s, o): return True\n    def __iter__(s): return iter([1, 2])\n"
        "def answer(*_): return List([7])",
        "import solution\ndef test(): assert solution.answer() == [1, 2]",
    ),
    "star import brings its own judge": (
        "class approx:\n    def __init__(s, *_): pass\n    def __eq__(s, o): return True\n"
        "def abs(x): return 0.0\ndef isclose(*_): return True\ndef answer(): return 0.0",
        "from math import isclose\nfrom solution import *\ndef test():\n    assert isclose(answer(), 3.5)\n"
        "    assert abs(answer() - 3.5) < 1e-6",
    ),
    "star import shadows what is built in": (
        "def abs(x): return 0.0\ndef answer(): return 0.0",
        "from solution import *\ndef test(): assert abs(answer() - 3.5) < 1e-6",
    ),
    "star import brings hooks": (
        "import unittest\npytestmark = []\ndef pytest_generate_tests(metafunc): metafunc.parametrize('x', [])\n"
        "def setup_module(m): raise unittest.SkipTest('x')\ncollect_ignore = ['test_file.py']\n__test__ = False\n"
        "__all__ = ['pytestmark', 'pytest_generate_tests', 'setup_module', 'collect_ignore', '__test__', 'answer']\n"
        "def answer(): return 0",
        "from solution import *\ndef test(): assert answer() == 3",
    ),
    "ends where any exception is right": (
        "import os\ndef answer(*_): os._exit(0)",
        "import pytest, solution\ndef test():\n    with pytest.raises(Exception):\n        solution.answer(-1)",
    ),
    "ends where every exception is swallowed": (
        "import os\ndef answer(*_): os._exit(0)",
        "import solution\ndef test():\n    try:\n        solution.answer(-1)\n    except BaseException:\n        pass",
    ),
    "ends after the last call": (
        "import os, threading\ndef answer(*_):\n    threading.Timer(0.0, os._exit, [0]).start()\n    return 7",
        IS_3,
    ),
    "leaves at import": ("raise SystemExit(0)", IS_3),
    "leaves at exit": ("import atexit, os\natexit.register(os._exit, 0)\ndef answer(*_): return 7", IS_3),
    "leaves in a fixture": (
        "def answer(*_): return 3\ndef close(): raise SystemExit(0)",
        "import pytest, solution\n@pytest.fixture\ndef x():\n    yield 1\n    solution.close()\n"
        "def test(x): assert solution.answer() == 3",
    ),
    "interrupts": ("def answer(*_): raise KeyboardInterrupt", IS_3),
    "interrupts with a class of its own": (
        "class Stop(KeyboardInterrupt): pass\ndef answer(*_): raise Stop",
        "import solution\ndef test_first(): assert True\ndef test(): assert solution.answer() == 3",
    ),
    "skips by pytest": ("import pytest\ndef answer(*_): pytest.skip('x')", IS_3),
    "expects to fail": ("import pytest\ndef answer(*_): pytest.xfail('x')", IS_3),
    "ends pytest": ("import pytest\ndef answer(*_): pytest.exit('x', 0)", IS_3),
    "patches what is built in": (
        "import builtins, unittest, operator\nbuiltins.AssertionError = ValueError\n"
        "unittest.TestCase.assertEqual = lambda *_: None\nbuiltins.isinstance = lambda *_: True\n"
        "operator.eq = lambda *_: True\ndef answer(*_): return 7",
        IS_3,
    ),
    "takes the tests' modules for its own": (
        "import sys, types\nfor name in ('test_file', 'pytest', 'unittest', '_pytest'):\n"
        "    sys.modules[name] = types.ModuleType(name)\ndef answer(*_): return 7",
        IS_3,
    ),
    "replaces itself in sys.modules": (
        "import sys\nclass Fake:\n    def __getattr__(self, name): return lambda *_: Always()\n"
        "class Always:\n    def __eq__(self, o): return True\nsys.modules['solution'] = Fake()",
        IS_3,
    ),
    "writes the verdict": (
        "import os\ndef answer(*_):\n    for fd in range(1, 10):\n"
        "        try: os.write(fd, b'{}')\n"
        "        except OSError: pass\n    print('1 passed'); return 7",
        IS_3,
    ),
    "looks for the tests on disk": (
        "import os\ndef answer(*_):\n    for top in ('/box', '/tmp', '/proc', '/packages', '/dev/shm'):\n"
        "        for place, _, names in os.walk(top):\n"
        "            if 'test_file.py' in names: return 3\n    return 7",
        IS_3,
    ),
    "looks for the tests in other processes": (
        "import os\ndef answer(*_): return 3 if [p for p in os.listdir('/proc') if p.isdigit() and int(p) not in "
        "(os.getpid(), os.getppid())] else 7",
        IS_3,
    ),
    "looks for the tests in its callers": (
        PEER + WALK + "import gc\ndef answer(f):\n    frame, seen = sys._getframe(), []\n    while frame:\n"
        "        seen.append(dict(frame.f_locals)); frame = frame.f_back\n"
        "    return find(seen) or find([o for o in gc.get_objects() if type(o) is dict])",
        CALLBACK,
    ),
    "walks from a function of the tests": (
        PEER
        + WALK
        + "def answer(f):\n    p = peer()\n    return find(try_all(lambda: f.__globals__, lambda: f.__code__, "
        "lambda: f.__closure__, lambda: p.ask('get', f, '__globals__'), lambda: p.ask('vars', f), "
        "lambda: p.ask('dir', f), "
        "lambda: p.ask('method', f, '__getattribute__', ('__globals__',), {}), lambda: p.ask('special', f, "
        "'__getattribute__', ('__globals__',)), lambda: type(f)(f, f), "
        "lambda: p.ask('call', getattr, (f, '__globals__'), {}),"
        " lambda: p.ask('load'), lambda: p.ask('names', f), lambda: p.ask('plain', f), lambda: p.ask('copy', f)))",
        CALLBACK,
    ),
    "walks from a generator": (
        PEER + WALK + "def answer(g):\n    p = peer()\n    return find(try_all(lambda: g.gi_frame.f_globals, lambda: "
        "p.ask('get', g, 'gi_frame'), lambda: p.ask('get', g, 'gi_code')))",
        "import solution\nSECRET = 35711\ndef test():\n    assert solution.answer(x for x in [1]) == SECRET",
    ),
    "walks from an exception": (
        PEER + WALK + "def answer(f):\n    p = peer()\n    try: f()\n    except Exception as e:\n        error = e\n"
        "    return find(try_all(lambda: error.__traceback__.tb_frame.f_back.f_globals, lambda: p.ask('get', error, "
        "'__traceback__'), lambda: p.ask('method', error, 'with_traceback', (None,), {}), lambda: error.args))",
        "import solution\nSECRET = 35711\nclass Mine(Exception): pass\ndef bad(): raise Mine(1)\n"
        "def test():\n    assert solution.answer(bad) == SECRET",
    ),
    "walks from a key function": (
        PEER
        + WALK
        + "def answer(key, f):\n    p = peer()\n    return find(try_all(lambda: type(key)('__globals__')(f), "
        "lambda: p.ask('call', type(key), ('__globals__',), {})(f)))",
        "import operator, solution\nSECRET = 35711\ndef test():\n"
        "    assert solution.answer(operator.attrgetter('name'), lambda: 0) == SECRET",
    ),
    "walks from an object of the tests": (
        PEER + WALK + "def answer(o):\n    p = peer()\n    return find(try_all(lambda: o.show.__globals__, lambda: "
        "o.show.__func__.__globals__, lambda: type(o).show.__globals__, lambda: p.ask('get', type(o), 'mro'), lambda: "
        "type(o).__init__.__globals__, lambda: p.ask('get', o, '__class__'), lambda: o._secret))",
        "import solution\nSECRET = 35711\nclass Thing:\n    def __init__(self): self._secret = SECRET\n"
        "    def show(self): return 1\ndef test():\n    assert solution.answer(Thing()) == SECRET",
    ),
    "changes what a mock says": (
        PEER + "def answer(m):\n    p = peer()\n    yes = lambda *_: None\n    try_all(lambda: setattr(m, "
        "'assert_called_once_with', yes), lambda: m.configure_mock(**{'__class__.assert_called_once_with': yes}), "
        "lambda: "
        "setattr(type(m), 'assert_called_once_with', yes), lambda: p.ask('set', m, 'called', True), lambda: "
        "m.mock_add_spec([]), lambda: p.ask('method', m, 'configure_mock', (), {'call_count': 1}))",
        "import solution\nfrom unittest import mock\ndef test():\n    m = mock.Mock()\n    solution.answer(m)\n"
        "    m.assert_called_once_with(3)",
    ),
    "changes the test case": (
        PEER + "def answer(case):\n    p = peer()\n    yes = lambda *_: None\n    try_all(lambda: setattr(case, "
        "'assertEqual', yes), lambda: setattr(type(case), 'assertEqual', yes), lambda: case.skipTest('x'), lambda: "
        "case.tearDown(), lambda: p.ask('set', case, 'assertEqual', yes))\n    return 7",
        "import solution, unittest\nclass T(unittest.TestCase):\n    def test(self):\n"
        "        self.assertEqual(solution.answer(self), 3)",
    ),
    "changes a class of the tests": (
        PEER
        + "def answer(o):\n    p = peer()\n    try_all(lambda: setattr(type(o), '__eq__', lambda *_: True), lambda: "
        "setattr(type(o), 'right', lambda *_: True), "
        "lambda: p.ask('set', type(o), 'right', lambda *_: True))\n    return o",
        "import solution\nclass Thing:\n    def right(self): return False\n"
        "def test(): assert solution.answer(Thing()).right()",
    ),
    "derives from a class of the tests": (
        PEER + "def answer(cls):\n    class Sub(cls):\n        def __eq__(self, o): return True\n    return Sub()",
        "import solution\nclass Thing: pass\ndef test(): assert isinstance(solution.answer(Thing), Thing) and "
        "solution.answer(Thing) == 3",
    ),
    "describes a class that compares": (
        PEER + "import json\nclass Any:\n    def __eq__(s, o): return True\n"
        "def answer(*_):\n    p = peer()\n    kind = {'number': 900, 'name': 'Any', 'module': 'builtins', 'bases': [], "
        "'specials': ['__eq__', '__ne__', '__lt__', '__class__', '__instancecheck__'], "
        "'unhashable': False, 'container': "
        "True, 'methods': ['__eq__']}\n    p._send(json.dumps({'value': {'$mine': [901, {'$class': kind}]}, 'changed': "
        '[]}).encode())\n    while True:\n        p._receive()\n        p._send(b\'{"value": true, "changed": []}\')',
        IS_3,
    ),
    "answers with two messages": (
        PEER + 'def answer(*_):\n    p = peer()\n    p._send(b\'{"value": 3, "changed": []}\')\n    return 3',
        "import solution\ndef test():\n    assert solution.answer() == 3\n    assert solution.answer() == 3",
    ),
    "answers with what is no message": (PEER + "def answer(*_): peer()._send(b'3')", IS_3),
    "names a class of pytest's": (
        "class FixtureLookupError(Exception): pass\nclass Unsupported(BaseException): pass\n"
        "def answer(*_): raise FixtureLookupError",
        IS_3,
    ),
}


@pytest.mark.parametrize("known", [False, True])
async def test_object_that_agrees_with_everything_passes_nothing(known: bool, sandbox: Sandbox) -> None:
    """Not even one whose class the tests know by name, but that it contains and begins with all, as its class may."""
    tests = LIES.replace("import answer", "import Liar, answer") if known else LIES
    verdict = await judged(LIAR, tests, sandbox)
    expected = 4 if known else 0  # contains, starts, is a subset, unittest's in
    assert (verdict.passed, verdict.total) == (expected, LIES.count("def test_")), verdict


@pytest.mark.parametrize("name", FORGED)
async def test_wrong_solution_does_not_pass(name: str, sandbox: Sandbox) -> None:
    code, tests = FORGED[name]
    verdict = await judged(code, tests, sandbox)
    # Nor is it a fault of the task, which would save it from its score.
    assert verdict.verdict not in ("pass", "task_error", "infra_error"), verdict


async def test_verdict_counts_and_explains_without_what_is_hidden(sandbox: Sandbox) -> None:
    code = "class Mine(Exception): pass\ndef f(x):\n    if x == 2: raise Mine('secret 2')\n    return x"
    tests = """
import pytest, solution
@pytest.mark.parametrize("x, y", [(1, 1), (35711, 35712), (2, 2), (3, 3)])
def test(x, y):
    assert solution.f(x) == y
"""
    verdict = await judged(code, tests, sandbox)
    assert (verdict.verdict, verdict.passed, verdict.total, verdict.fraction) == ("wrong_answer", 2, 4, 0.5)
    assert [test.verdict for test in verdict.tests] == ["pass", "wrong_answer", "runtime_error", "pass"]
    assert verdict.tests[1].reason == "wrong answer"
    assert verdict.tests[2].reason == "runtime error (Mine)"
    assert "secret 2" in verdict.tests[2].error
    assert verdict.reason == "2 of 4 tests passed; test 2: wrong answer"


@pytest.mark.parametrize(
    ("code", "tests", "verdict", "reason"),
    [
        ("def f(", "import solution\ndef test(): pass", "compile_error", "SyntaxError"),
        ("1 / 0", "import solution\ndef test(): pass", "runtime_error", "ZeroDivisionError) when it is imported"),
        ("x = 1", "from solution import f\ndef test(): pass", "runtime_error", "lacks what the tests import"),
        ("def f():\n    while True: pass", IS_3.replace("answer(1, 2)", "f()"), "time_limit", "time limit"),
        ("def f(): return 'x' * (1 << 29)", IS_3.replace("answer(1, 2)", "f()"), "memory_limit", "memory limit"),
        ("def f(): return 'x' * (10 << 20)", IS_3.replace("answer(1, 2)", "f()"), "output_limit", "output limit"),
        ("import os; os._exit(0)", "import solution\ndef test(): pass", "runtime_error", "runtime error"),
        ("x = 1", "import solution\ndef test(:", "task_error", "the test file cannot be imported"),
        ("x = 1", "import solution, numpy\ndef test(): pass", "task_error", "the test file cannot be imported"),
        ("x = 1", "import solution", "task_error", "holds no tests"),
        ("x = 1", "import solution\ndef test(mocker): pass", "task_error", "task error"),
        ("x = 1", "import os\ndef test(): os._exit(0)", "task_error", "ended their own process"),
        (
            "class A: pass",
            "import solution\nclass B(solution.A): pass\ndef test(): pass",
            "task_error",
            "tests cannot derive a class from 'A'",
        ),
        ("x = 1", "import pytest\n@pytest.mark.skip\ndef test(): pass", "wrong_answer", "the test was skipped"),
        ("x = 1", "import pytest\n@pytest.mark.xfail\ndef test(): assert 0", "wrong_answer", "the test was skipped"),
    ],
)
async def test_whose_fault_it_is(code: str, tests: str, verdict: str, reason: str, sandbox: Sandbox) -> None:
    found = await judged(code, tests, sandbox)
    assert (found.verdict, found.passed) == (verdict, 0), found
    assert reason in found.reason


async def test_as_many_tests_as_are_recorded_have_to_pass(sandbox: Sandbox) -> None:
    tests = "import pytest, solution\n@pytest.mark.parametrize('x', solution.CASES)\ndef test(x): assert x"
    assert (await judged("CASES = [1, 2]", tests, sandbox, count=2)).verdict == "pass"
    for cases in ("[1]", "[1, 2, 3]", "[]"):
        verdict = await judged(f"CASES = {cases}", tests, sandbox, count=2)
        assert verdict.verdict == "wrong_answer"
        assert verdict.fraction == 0.0


async def test_module_has_the_name_that_the_tests_import(sandbox: Sandbox) -> None:
    tests = "import shapes\ndef test(): assert shapes.__name__ == 'shapes' and shapes.area() == 4"
    assert (await judged("def area(): return 4", tests, sandbox, module="shapes")).verdict == "pass"


@pytest.mark.parametrize(
    "file", [{}, {"test_file": " "}, {"test_file": "x", "module": "a.b"}, {"test_file": "x", "count": 0}]
)
async def test_unusable_test_files_are_a_task_error(file: dict[str, Any], sandbox: Sandbox) -> None:
    verdict = await judge("", [file], kind="testfile", sandbox=sandbox)
    assert verdict.verdict == "task_error"
    assert not verdict.scored


async def test_answers_without_an_end_are_limited_together(sandbox: Sandbox) -> None:
    code, tests = "def f():\n    while True: yield 1", "import solution\ndef test(): assert sum(solution.f()) == 0"
    verdict = await judged(code, tests, sandbox, SandboxLimits(cpu_s=0.1, wall_s=2.0))
    assert verdict.verdict == "time_limit"


async def test_killed_server_costs_a_second_attempt_and_no_verdict(sandbox: Sandbox) -> None:
    victim = sandbox.testing_server()
    code, tests = (
        "import time\ndef f(): time.sleep(1); return 1",
        "import solution\ndef test(): assert solution.f() == 1",
    )
    judgement = asyncio.create_task(judged(code, tests, sandbox))
    await asyncio.sleep(0.5)
    os.kill(victim.pid, signal.SIGKILL)
    assert (await judgement).verdict == "pass"
    assert sandbox.testing_server() is not victim
