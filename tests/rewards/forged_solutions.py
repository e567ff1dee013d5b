"""Code that is no solution and tries to pass all the same: name: (code, tests that a right solution passes)."""

from __future__ import annotations

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
    "gives back another function of the tests": (
        "kept = []\ndef mark(f): kept.append(f); return kept[0]",
        "import solution\n@solution.mark\ndef helper(): pass\n@solution.mark\ndef test(): assert 1 == 2",
    ),
}
