"""Submissions that try to decide their own verdict, to see what they must not, or to keep the judge from judging.

Each names every verdict that is right; "pass" stands for an honest look-alike, or for an attempt that came to nothing
and says so. None of them is ever to be run unconfined.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

WRONG, ERROR, COMPILE, PASS = "wrong_answer", "runtime_error", "compile_error", "pass"
TIME, MEMORY, OUTPUT = "time_limit", "memory_limit", "output_limit"


@dataclass(frozen=True)
class Submission:
    """One case."""

    kind: str
    code: str
    tests: list[dict[str, Any]]
    right: tuple[str, ...]
    compare: str | None = None
    slow: bool = False


SUMS = [{"args": [2, 3], "expected": 5}, {"args": [-1, 1], "expected": 0}, {"args": [10, 5], "expected": 15}]
THREE = "import solution\ndef test(): assert solution.answer(1, 2) == 3\n"
# The answering half of the conversation, as a program can find it in its callers.
HALF = """
import json, sys, time
def half():
    frame = sys._getframe()
    while "questions" not in frame.f_locals:
        frame = frame.f_back
    return frame.f_locals["questions"]
def say(text):
    half().answer(text.encode("utf-8", "surrogatepass"))
    time.sleep(60)
"""


def stdio(code: str, *right: str, expected: str = "6\n", tests: int = 1, **more: Any) -> Submission:
    return Submission("stdio", code, [{"stdin": "3\n1 2 3\n", "stdout": expected}] * tests, right, **more)


def call(code: str, *right: str, tests: list[dict[str, Any]] = SUMS, **more: Any) -> Submission:
    return Submission("call", code, tests, right, **more)


def file(code: str, *right: str, tests: str = THREE, **more: Any) -> Submission:
    return Submission("testfile", code, [{"test_file": tests}], right, **more)


def said(text: str, expected: Any = 5) -> Submission:
    """An answer that is written by hand."""
    return call(f"{HALF}def f(a, b): say({text})", ERROR, TIME, tests=[{"args": [2, 3], "expected": expected}])


def prints_none(code: str, what: str = "none") -> Submission:
    """The attempt comes to nothing, or the program would not print what is expected."""
    return stdio(code, PASS, expected=f"{what}\n")


VERDICTS = {
    "exits as what does not compile": stdio("import os; print(6, flush=True); os._exit(122)", COMPILE, ERROR),
    "exits as what is out of memory": stdio("import os; print(6, flush=True); os._exit(121)", MEMORY, ERROR),
    "kills itself after the answer": stdio(
        "import os, signal; print(6, flush=True); os.kill(os.getpid(), signal.SIGTERM)", ERROR
    ),
    "adds to the answer at exit": stdio("import atexit; atexit.register(print, 7); print(6)", WRONG),
    "answers in a thread that outlives the answer": stdio(
        "import threading, time\ndef w():\n    while True: time.sleep(0.01)\n"
        "threading.Thread(target=w, daemon=True).start(); print(6)", PASS,
    ),
    "answers by a child that it waits for": stdio(
        "import os\nif os.fork() == 0:\n    print(6, flush=True); os._exit(0)\nos.wait()", PASS
    ),
    "takes back its answer": stdio("import os; print(6, flush=True); os.ftruncate(1, 0)", WRONG),
    "writes the answer over its input": stdio(
        "import os\ntry: os.write(os.open('/proc/self/fd/0', os.O_RDWR), b'6')\nexcept OSError: print('refused')",
        PASS, expected="refused\n",
    ),
    "leaves the answer for the next test": stdio(
        "import os\nplaces = ['/box', '/box/work', '/box/tmp', '/dev/shm', '.', os.environ.get('TMPDIR', '.')]\n"
        "print([p for p in places if os.path.exists(p + '/left')])\nfor place in places:\n"
        "    try: open(place + '/left', 'w').close()\n    except OSError: pass", PASS, expected="[]\n", tests=3,
    ),
    "says that it is an int": call(
        "class E:\n    __class__ = property(lambda s: int)\n    def __eq__(s, o): return True\n    __hash__ = None\n"
        "def f(a, b): return E()", ERROR,
    ),
    "is made anew by its reader": call(
        "class E:\n    def __reduce__(s): return eval, ('5',)\n    __reduce_ex__ = lambda s, p: s.__reduce__()\n"
        "def f(a, b): return E()", ERROR,
    ),
    "is a float, a text and a dictionary with ways of their own": call(
        "class F(float):\n    __eq__ = __le__ = __ge__ = lambda s, o: True\n    __hash__ = float.__hash__\n"
        "    __float__ = __abs__ = __sub__ = __rsub__ = lambda *a: 0.0\n"
        "class S(str):\n    __eq__ = lambda s, o: True\n    __hash__ = str.__hash__\n    __str__ = lambda s: '5'\n"
        "class D(dict):\n    __eq__ = lambda s, o: True\n    items = lambda s: [('x', 5)]\n"
        "def f(a, b): return [F(7), S('7'), D(x=7)][b % 3]",
        WRONG,
        tests=[{"args": [1, 0], "expected": 5.5}, {"args": [1, 1], "expected": "5"},
               {"args": [1, 2], "expected": {"x": 5}}],
    ),
    "true is not one": call("def f(a, b): return True", WRONG, tests=[{"args": [1, 0], "expected": 1}]),
    "not a number for a number": call("def f(a, b): return float('nan')", WRONG),
    "a number that is near everything": call(
        "def f(a, b): return float('inf')", WRONG, tests=[{"args": [1, 0], "expected": 1e308}]
    ),
    "an iterator of the answer": call("def f(a, b): return iter([a + b])", ERROR),
    "an integer of a million digits": call("def f(a, b): return 1 << 4_000_000", WRONG),
    "an honest integer beyond every float, for a complex one": call(
        "def f(a, b): return 10 ** 400", WRONG, tests=[{"args": [1, 0], "expected": {"$complex": [1, 2]}}]
    ),
    "honest integers for complex ones": call(
        "def f(a, b): return a", PASS, tests=[{"args": [2, 0], "expected": {"$complex": [2, 1e-17]}}]
    ),
    "an error in half a letter": call("def f(a, b): raise ValueError('\\ud800')", ERROR),
    "an error that ends its reader": call(
        "import os\nclass E(Exception):\n    def __str__(s): os._exit(0)\ndef f(a, b): raise E", ERROR
    ),
    "an error that never ends": call(
        "class E(Exception):\n    def __str__(s):\n        while True: pass\ndef f(a, b): raise E", TIME
    ),
    "hand-written: a complex number of integers": said("'{\"value\":{\"$complex\":[1' + '0' * 400 + ',0]}}'"),
    "hand-written: no object": said("'5'"),
    "hand-written: a deep list": said("'{\"value\":' + '[' * 100_000 + ']' * 100_000 + '}'"),
    "hand-written: a status of its own": said("'{\"status\":\"pass\",\"verdict\":\"pass\",\"error\":\"\"}'"),
    "hand-written: no infrastructure": said("'{\"status\":\"infra_error\",\"error\":\"lost\"}'"),
    "hand-written: half a letter": said("'{\"status\":\"runtime_error\",\"error\":\"\\\\ud800\"}'"),
    "hand-written: members that share a hash": said(
        "'{\"value\":{\"$set\":' + json.dumps([*range(20_000)] + [(2**61 - 1) * i for i in range(1, 19_000)]) + '}}'"
    ),
    "hand-written: keys that share a hash": said(
        "'{\"value\":{\"$dict\":' + json.dumps([[i, 0] for i in [*range(20_000)] + "
        "[(2**61 - 1) * i for i in range(1, 19_000)]]) + '}}'"
    ),
    "members that share a hash, in any order": call(
        "def f(a, b): return [(2**61 - 1) * i for i in range(1, 30_001)]", WRONG,
        tests=[{"args": [1, 0], "expected": list(range(30_000))}], compare="unordered",
    ),
    "honest members in any order": call(
        "def f(a, b): return [3, 1, 2.0, 1]", PASS, tests=[{"args": [1, 0], "expected": [1, 1, 2, 3]}],
        compare="unordered",
    ),
    "the wrong member twice": call(
        "def f(a, b): return [3, 3, 2, 1]", WRONG, tests=[{"args": [1, 0], "expected": [1, 1, 2, 3]}],
        compare="unordered",
    ),
    "questions are read by another thread": call(
        f"{HALF}import threading\ndef ahead(q):\n    while (m := q.next()) is not None: q.answer(b'{{\"value\":5}}')\n"
        "def f(a, b):\n    threading.Thread(target=ahead, args=(half(),), daemon=True).start()\n"
        "    time.sleep(0.1)\n    return a + b + 1", WRONG, ERROR, TIME,
    ),
    "answers twice, by a child": call("import os\ndef f(a, b):\n    os.fork()\n    return a + b + 1", WRONG, ERROR),
    "closes the channel": call("import os\ndef f(a, b):\n    os.closerange(0, 100)\n    return a + b", ERROR),
    "its own encoder": call(
        "import sys\ndef f(a, b):\n    for m in list(sys.modules.values()):\n"
        "        if hasattr(m, 'MAX_DEPTH'): m.encode = lambda *a: 5\n    return 0", WRONG,
    ),
}  # fmt: skip

SECRETS = {
    "expected output in its own memory": stdio(
        "import gc, re\nword = re.compile(b'HIDDE[N]-EXPECTE[D]-[0-9]+')\nfound = []\n"
        "try:\n    memory = open('/proc/self/mem', 'rb', 0)\n    for line in open('/proc/self/maps'):\n"
        "        low, high = (int(x, 16) for x in line.split()[0].split('-'))\n"
        "        if 'r' not in line.split()[1] or high - low > 1 << 26: continue\n"
        "        try:\n            memory.seek(low); found += word.findall(memory.read(high - low))\n"
        "        except (OSError, ValueError, OverflowError): pass\nexcept OSError: pass\n"
        "for o in gc.get_objects(): found += word.findall(repr(o).encode()) if type(o) in (list, dict, tuple) else []\n"
        "print(found[0].decode() if found else 'none')", WRONG, TIME, expected="HIDDEN-EXPECTED-4711\n",
    ),
    "memory, descriptors and variables of the supervisor": prints_none(
        "import os\nfound = []\nfor pid in ('1', str(os.getppid()), 'self/task/1'):\n"
        "    for name in ('mem', 'environ', 'maps', 'fd', 'cwd', 'root', 'auxv', 'stack'):\n"
        "        path = f'/proc/{pid}/{name}'\n"
        "        try:\n            found += os.listdir(path) if name == 'fd' else [open(path, 'rb').read(1)]\n"
        "        except OSError: pass\nprint(found or 'none')"
    ),
    "the kernel's side of the machine": prints_none(
        "import os\nfound = [p for p in ('/proc/sys', '/proc/kallsyms', '/proc/kcore', '/proc/meminfo', "
        "'/proc/net/unix', '/sys', '/dev/kmsg', '/run', '/var', '/home', '/etc/hosts', '/etc/resolv.conf') "
        "if os.path.exists(p)]\nprint(found or 'none')"
    ),
    "the name of the machine": prints_none("import os; print(os.uname().nodename)", "sandbox"),
    "devices of its own": prints_none(
        "import os\nfound = []\nfor kind, major, minor in ((0o020666, 1, 1), (0o020666, 5, 0), (0o060666, 8, 0)):\n"
        "    try: os.mknod('d', kind, os.makedev(major, minor)); found.append(major)\n    except OSError: pass\n"
        "try: os.mknod('w', 0o020666, 0); found += [open('w', 'rb').read(1)]\nexcept OSError: pass\n"
        "print(found or 'none')"
    ),
}  # fmt: skip

EXHAUSTION = {
    "inodes": stdio(
        "import os\ntry:\n    for i in range(10_000): os.mkdir(str(i))\nexcept OSError: pass\nprint(6)", PASS, tests=2,
    ),
    "disk": stdio(
        "for i in range(99):\n    with open(str(i), 'wb') as f: f.write(bytes(4 << 20))", ERROR, MEMORY, OUTPUT
    ),
    "descriptors": stdio("import os\nwhile True: os.pipe()", ERROR),
    "names of links": stdio(
        "import os\nopen('a', 'w').close()\nfor i in range(3000): os.link('a', str(i))", WRONG, ERROR
    ),
    "stops itself": stdio(
        "import os, signal; print(6, flush=True); os.kill(os.getpid(), signal.SIGSTOP)", TIME, slow=True
    ),
    "children that sleep": stdio(
        "import os, signal, time\nfor s in range(1, 65):\n    try: signal.signal(s, signal.SIG_IGN)\n"
        "    except (OSError, ValueError): pass\nfor _ in range(8):\n    if os.fork() == 0:\n        os.setsid()\n"
        "        while True:\n            try: time.sleep(60)\n            except BaseException: pass\nprint(6)",
        PASS,
    ),
    "children that make children": stdio(
        "import os\nprint(6, flush=True)\nif os.fork() == 0:\n    os.setsid()\n    while True:\n"
        "        try:\n            if os.fork(): os._exit(0)\n        except OSError: pass", PASS,
    ),
    "memory of many processes": stdio(
        "import os, time\nfor _ in range(6):\n    if os.fork() == 0: break\nx = b'x' * (40 << 20)\ntime.sleep(60)",
        MEMORY, ERROR,
    ),
    "memory that is mapped and shared": stdio(
        "import mmap\nm = mmap.mmap(-1, 400 << 20)\nfor i in range(0, len(m), 4096): m[i] = 1\nprint(6)", MEMORY, ERROR,
    ),
    "backtracking": stdio("import re; re.match('(a+)+$', 'a' * 40 + 'b')", TIME),
    "an archive of zeros": stdio(
        "import zlib, bz2\nd = zlib.compressobj(9)\nz = b''.join(d.compress(bytes(1 << 20)) for _ in range(600))\n"
        "z += d.flush(); zlib.decompress(z)", MEMORY, ERROR, TIME,
    ),
    "a pickle of itself": stdio(
        "import pickle\npickle.loads(b'(' + b'(lp0\\n' * 10 + b'cbuiltins\\neval\\n(S\"[0]*10**10\"\\ntR.')",
        ERROR, MEMORY,
    ),
    "a literal of its parser": stdio("(" * 100_000, COMPILE, MEMORY, ERROR),
    "a parser's memory": stdio("-" * 200_000 + "1", COMPILE, MEMORY, ERROR, TIME),
    "a limit that it raises": stdio(
        "import resource as r\nfor k in (r.RLIMIT_NPROC, r.RLIMIT_AS, r.RLIMIT_FSIZE, r.RLIMIT_NOFILE):\n"
        "    try: r.setrlimit(k, (r.RLIM_INFINITY, r.RLIM_INFINITY)); print('raised')\n"
        "    except (OSError, ValueError): pass\nprint(6)", PASS,
    ),
    "a processor of its own": stdio(
        "import os\nfor f in (lambda: os.sched_setaffinity(0, {0}), lambda: os.nice(-5), lambda: os.setpriority(0, 0, "
        "-9)):\n    try: f(); print('got')\n    except OSError: pass\nprint(6)", PASS,
    ),
    "more output than is kept, in a call": call(
        "def f(a, b):\n    print('x' * (20 << 20))\n    return 0", ERROR, WRONG
    ),
}  # fmt: skip

FILES = {
    "is not there when the tests are imported": file(
        "Counter = None", ERROR, tests="from solution import Counter\nc = Counter()\ndef test(): assert c.x == 3"
    ),
    "is no list of parameters": file(
        "CASES = 5", ERROR,
        tests="import pytest, solution\n@pytest.mark.parametrize('x', solution.CASES)\ndef test(x): assert x",
    ),
    "is a list of other parameters": file(
        "CASES = [(1, 2, 3)]", ERROR,
        tests="import pytest, solution\n@pytest.mark.parametrize('x, y', solution.CASES)\ndef test(x, y): assert x",
    ),
    "is no number when the tests are imported": file(
        "class N: pass\nSIZE = N()", ERROR, tests="import solution\nx = [0] * solution.SIZE\ndef test(): assert x"
    ),
    "has no attribute when the tests are imported": file(
        "table = 5", ERROR, tests="from solution import table\nx = table.rows\ndef test(): assert x"
    ),
    "honest values when the tests are imported": file(
        "SIZE = 3\nCASES = [(1, 2)]\nclass C: x = 3", PASS,
        tests="import pytest\nfrom solution import C, CASES, SIZE\nx, c = [0] * SIZE, C()\n"
        "@pytest.mark.parametrize('a, b', CASES)\ndef test(a, b): assert len(x) == c.x == a + b",
    ),
    "prints more than the tests keep": file(
        "def answer(*_):\n    print('y' * (9 << 20)); return 7", WRONG, OUTPUT, ERROR,
        tests="import solution\ndef test():\n    for _ in range(3): solution.answer()\n"
        "    assert solution.answer() == 3", slow=True,
    ),
    "a number that takes its reader a minute": file(
        "from decimal import Decimal\ndef answer(*_): return Decimal('1e999999999')", TIME, MEMORY, WRONG, ERROR,
        tests="import solution\ndef test(): assert int(solution.answer()) == 3", slow=True,
    ),
    "calls back without an end": file(
        "def answer(f, *_): return f(f)", ERROR, TIME,
        tests="import solution\ndef back(f): return solution.answer(f)\ndef test(): assert solution.answer(back) == 3",
    ),
    "raises a group of interrupts": file(
        "def answer(*_): raise BaseExceptionGroup('x', [KeyboardInterrupt(), SystemExit(0)])", ERROR
    ),
    "raises under a name in half a letter": file("def answer(*_): raise type('A\\ud800', (Exception,), {})", ERROR),
    "a text with ways of its own": file(
        "class S(str):\n    __eq__ = lambda s, o: True\n    __hash__ = str.__hash__\n    lower = lambda s: S('zz')\n"
        "    __contains__ = lambda s, o: True\ndef answer(*_): return S('zz')", WRONG,
        tests="from solution import answer\ndef test(): assert answer() == 'abc'\n"
        "def test_in(): assert 'abc' in answer()\ndef test_lower(): assert answer().lower() == 'abc'",
    ),
}  # fmt: skip
SUBMISSIONS = {**VERDICTS, **SECRETS, **EXHAUSTION, **FILES}
