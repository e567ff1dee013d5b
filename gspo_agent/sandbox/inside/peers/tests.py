"""The side of the tests: pytest runs a file whose imports of the solution find proxies of another program's objects.

This side is trusted, and what it holds of its own is out of the solution's reach: the solution may call functions that
it was given, and look at public attributes of objects whose classes the tests' files define, and that is all.
"""

from __future__ import annotations

import ast
import builtins
import importlib.machinery
import inspect
import io
import json
import os
import re
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any

from .. import tree
from ..dialogue import Questions
from .classes import ARITHMETIC, NUMBERS, ORDER, SPECIALS
from .peer import Lost, Peer
from .proxies import RemoteModule, RemoteType, Unsupported, is_remote

_RECURSION = 3000  # pytest's own frames are below those of a test
_OPTIONS = (
    "-q", "-c", "/dev/null", "--rootdir=.", "--confcutdir=.", "--tb=short",
    "-p", "no:cacheprovider", "-p", "no:faulthandler", "-p", "no:junitxml", "-p", "no:pastebin", "-p", "no:stepwise",
)  # fmt: skip
_ITERATION = ("__iter__", "__next__")
_TEXT = 4000


def run_tests(questions: Questions) -> None:
    """The first question is which modules are the solution's, which file is run, and all files of the tests; the last
    answer says what came of each test."""
    opening = questions.next()
    if opening is None:
        return
    import pytest

    pytest.hookimpl(wrapper=True, tryfirst=True)(_Record.pytest_runtest_makereport)
    pytest.hookimpl(tryfirst=True)(_Record.pytest_pyfunc_call)
    head, _, packed = opening.partition(b"\n")
    wanted, files = json.loads(head), tree.changed({}, tree.unpack(packed))
    tree.write(files, ".")
    sources = [files[path][1] for path in files if path == wanted["file"] or path.endswith("conftest.py")]
    peer = _Tester(questions, wanted["modules"], wanted["own"], b"\n".join(sources).decode("utf-8", "replace"))
    record = _Record(peer)
    sys.setrecursionlimit(_RECURSION)
    sys.meta_path.insert(0, _Finder(peer))
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    try:
        pytest.main([*_OPTIONS, wanted["file"]], plugins=[record])
    except BaseException as error:
        record.broken = error  # before there were tests
    questions.answer(json.dumps({"report": record.report()}).encode() + b"\n")


class _Tester(Peer):
    strict = True

    def __init__(self, questions: Questions, modules: list[str], own: dict[str, str], source: str) -> None:
        super().__init__(self._to_solution, self._from_solution)
        self.questions, self.modules = questions, frozenset(modules)
        self.own = own
        """Modules inside of those that are not the solution's, and the directory of each."""
        self.here = os.getcwd()
        self.words = set(re.findall(r"\w+", source))
        self.bound = _bound(source)
        self.derived: set[int] = set()
        """Objects of the solution that came of arithmetic with data."""
        self.item = 0
        """The test that runs now, counted from 1."""
        self.lost: str | None = None
        """The limit that the solution passed, or how else it ended."""
        self.failed_load: BaseException | None = None
        self.loaded = False
        """Whether a module of the solution was."""

    def _to_solution(self, message: bytes) -> None:
        if self.lost:
            raise Lost(f"the solution has ended: {self.lost}")
        self.questions.answer(json.dumps({"item": self.item}).encode() + b"\n" + message)

    def _from_solution(self) -> bytes:
        raw = self.questions.next()
        if raw is None:
            os._exit(1)
        head, _, rest = raw.partition(b"\n")
        said = json.loads(head)
        out, rest = rest[: said["out"]], rest[said["out"] :]
        error, body = rest[: said["err"]], rest[said["err"] :]
        sys.stdout.write(out.decode("utf-8", "replace"))
        sys.stderr.write(error.decode("utf-8", "replace"))
        if said["status"] != "ok":
            self.lost = said["status"]
            raise Lost(f"the solution has ended: {self.lost}")
        return body

    def ask(self, operation: str, *arguments: Any) -> Any:
        try:
            return super().ask(operation, *arguments)
        except Lost:
            self.lost = self.lost or "runtime_error"
            raise

    def raised(self, error: Any) -> BaseException:
        if isinstance(error, KeyboardInterrupt | GeneratorExit):
            return RuntimeError(f"{type(error).__name__} in the solution")
        return super().raised(error)

    def may_apply(self, proxy: Any, special: str, operands: tuple[Any, ...]) -> Any:
        """An object that was returned where data is expected would say that it is just that: it never hears of data in
        a comparison, and in arithmetic only where the tests know its class by name. What came of that is no number."""
        plain = not all(map(is_remote, operands))
        if special in NUMBERS and proxy.__remote__[1] in self.derived:
            raise TypeError(f"{type(proxy).__name__!r} was computed with data and is no number")
        if plain and special == "__contains__" and not type(proxy).__remote_named__:
            return any(item is operands[0] or item == operands[0] for item in proxy)
        refused = special in ORDER or (special in ARITHMETIC and not type(proxy).__remote_named__)
        return NotImplemented if plain and refused else True

    def applied(self, special: str, operands: tuple[Any, ...], result: Any) -> Any:
        if special not in ARITHMETIC or all(map(is_remote, operands)):
            return result
        if not is_remote(result):
            return NotImplemented
        if not special.startswith("__i"):  # x += 1 is still x
            self.derived.add(result.__remote__[1])
        return result

    def named(self, name: str, value: Any) -> Any:
        if isinstance(value, RemoteType) and name in self.words:
            value.__remote_named__ = True
        return value

    def own_module(self, name: str) -> types.ModuleType | None:
        """Also one of the solution's that leads there: asked for it, the solution would name another."""
        leads = any(own == name or own.startswith(f"{name}.") for own in self.own)
        return importlib.import_module(name) if leads else None

    def starred(self, names: Any) -> Any:
        """What the tests mention and have not from elsewhere: `abs` of the solution would judge its own results."""
        wanted = [name for name in names if name in self.words - self.bound]
        for name in wanted:
            if hasattr(builtins, name):
                raise ImportError(f"the solution defines {name!r}, which is built in", name=min(self.modules))
        return wanted

    def unsupported(self, what: str) -> None:
        raise Unsupported(f"from outside of the solution, tests cannot {what}")

    def load(self, name: str) -> Any:
        """A module of the solution; ImportError where there is none of this name, or where it does not load."""
        try:
            module = self.ask("load", name)
        except Lost:
            raise
        except BaseException as error:
            self.failed_load = error
            raise ImportError(f"the solution does not load: {type(error).__name__}: {error}") from error
        if not is_remote(module):
            raise ModuleNotFoundError(f"the solution has no module {name!r}", name=name)
        self.loaded = True
        return module

    def is_to_blame(self, error: BaseException) -> bool:
        """Whether what a test file raises when it is imported comes from the solution, is a name that it lacks, or may
        be what its values bring about: a right solution's would not."""
        if "__remote_trace__" in vars(error) or (self.loaded and _is_of_values(error)):
            return True
        return isinstance(error, ImportError) and (error.name or "").partition(".")[0] in self.modules

    def perform(self, operation: str, *arguments: Any) -> Any:
        if operation == "input":
            return input(str(*arguments))
        if operation == "read":
            return sys.stdin.read(*map(int, arguments))
        if operation == "readline":
            return sys.stdin.readline()
        if operation in ("repr", "str") and not self._may(operation, *arguments):
            return f"<{type(arguments[0]).__name__}>"
        if not self._may(operation, *arguments):
            raise AttributeError(f"the solution may not do this ({operation}) to an object of the tests")
        return super().perform(operation, *arguments)

    def _may(self, operation: str, target: Any, name: Any = "", *rest: Any) -> bool:
        match operation:
            case "call":  # not `operator.attrgetter`, whose instance was given as a key
                return callable(target) and (not isinstance(target, type) or self._is_own(target))
            case "equal" | "await":
                return True
            case "get" | "method":
                return self._is_public(target, name)
            case "set" | "delete":
                return self._is_own(type(target)) and self._is_public(target, name)
            case "special" if name in _ITERATION and isinstance(target, Iterator):
                return True
            case "special":
                return name in SPECIALS and (self._is_open(target) or _is_mock(target))
            case "item" | "plain" | "copy" | "deepcopy" | "repr" | "str":
                return self._is_open(target)
        return False

    def _is_public(self, target: Any, name: Any) -> bool:
        if not isinstance(name, str) or name.startswith("_"):
            return False
        if _is_mock(target):
            return not hasattr(type(target), name)  # its methods say how it was called
        return self._is_open(target)

    def _is_open(self, target: Any) -> bool:
        """Whether the solution may look into an object of this side: what a test file makes for it."""
        kind = target if isinstance(target, type) else type(target)
        unittest = sys.modules.get("unittest")
        if kind.__name__.startswith("Test") or (unittest and issubclass(kind, unittest.TestCase)):
            return False
        return self._is_own(kind) or kind in (io.StringIO, io.BytesIO)

    def _is_own(self, kind: type) -> bool:
        """Whether a file of the tests defines the class."""
        file = vars(sys.modules.get(kind.__module__, object)).get("__file__")
        return isinstance(file, str) and file.startswith(f"{self.here}/") and not is_remote(kind)

    def _pack(self, value: Any) -> Any:
        if isinstance(value, types.ModuleType | types.FrameType | types.TracebackType) and not is_remote(value):
            self.unsupported(f"pass a {type(value).__name__} to the solution")
        return super()._pack(value)


def _is_test(item: Any) -> bool:
    """Whether a collected test is the function that the file has under its name: a decorator may be the solution's, and
    give back another one."""
    function = getattr(item.obj, "__func__", item.obj)
    if is_remote(item.obj) or is_remote(getattr(item, "cls", None)) or type(function) is not types.FunctionType:
        return False
    return bool(function.__name__ == getattr(item, "originalname", item.name))


def _is_mock(value: Any) -> bool:
    mock = sys.modules.get("unittest.mock")
    return mock is not None and isinstance(value, mock.NonCallableMock)


def _bound(source: str) -> set[str]:
    """Names that a test file imports by name or defines."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return set()
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    return found


class _Finder:
    """Finds the solution's modules, before anything on the path could, but for those in it that are the tests' own."""

    def __init__(self, peer: _Tester) -> None:
        self.peer = peer

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> Any:
        if name.partition(".")[0] not in self.peer.modules:
            return None
        if name in self.peer.own:
            return importlib.machinery.PathFinder.find_spec(name, [f"{self.peer.here}/{self.peer.own[name]}"])
        if any(name.startswith(f"{package}.") for package in self.peer.own):
            return None  # it lies in a package that was found so, whose path leads on
        return importlib.machinery.ModuleSpec(name, self)  # type: ignore[arg-type]

    def create_module(self, spec: Any) -> RemoteModule:
        return RemoteModule(spec.name)

    def exec_module(self, module: Any) -> None:
        found = self.peer.load(module.__name__)
        vars(module)["__remote__"] = found.__remote__
        if self.peer.ask("is package", found):
            module.__path__ = []


class _Record:
    """A pytest plugin that keeps what came of each test; it reads no exit status and no output."""

    def __init__(self, peer: _Tester) -> None:
        self.peer = peer
        self.lookup_error: Any = getattr(sys.modules["_pytest.fixtures"], "FixtureLookupError", None)
        self.items: list[str] = []
        self.passed: dict[str, set[str]] = {}
        self.failures: dict[str, dict[str, str]] = {}
        self.seconds: dict[str, float] = {}
        self.refused: str | None = None
        """What the tests did that cannot be done from outside."""
        self.barred: str | None = None
        """Why nothing that the tests say can be believed."""
        self.broken: BaseException | None = None
        """What the test file itself raised."""

    def pytest_plugin_registered(self, plugin: object) -> None:
        if is_remote(plugin):
            self.barred = f"a module of the solution cannot be a plugin of pytest: {vars(plugin)['__name__']}"

    def pytest_collection_finish(self, session: Any) -> None:
        self.items = [item.nodeid for item in session.items]
        for item in session.items:
            if not _is_test(item):
                text = "it is no function of the test file, but what the solution has made of one"
                self.failures[item.nodeid] = {"class": "runtime_error", "error": "", "text": text}

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.peer.item += 1

    def pytest_pyfunc_call(self, pyfuncitem: Any) -> bool | None:
        """Asynchronous tests need no plugin."""
        if not inspect.iscoroutinefunction(pyfuncitem.obj):
            return None
        import asyncio

        wanted = inspect.signature(pyfuncitem.obj).parameters
        asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in wanted}))
        return True

    def pytest_exception_interact(self, node: Any, call: Any, report: Any) -> None:
        if report.when == "collect" and call.excinfo is not None:
            error = call.excinfo.value
            self.broken = self.broken or error.__cause__ or error
            self.hear(error)

    def hear(self, error: BaseException | None) -> None:
        if isinstance(error, Unsupported):
            self.refused = self.refused or str(error)

    def pytest_runtest_makereport(self, item: Any, call: Any) -> Any:
        report = yield
        self.note(item.nodeid, call, report)
        return report

    def note(self, nodeid: str, call: Any, report: Any) -> None:
        self.seconds[nodeid] = self.seconds.get(nodeid, 0.0) + report.duration
        if report.outcome == "passed" and not hasattr(report, "wasxfail"):
            self.passed.setdefault(nodeid, set()).add(report.when)
        else:
            self.failures.setdefault(nodeid, self.failure(call.excinfo and call.excinfo.value, report))

    def failure(self, error: BaseException | None, report: Any) -> dict[str, str]:
        self.hear(error)
        said = {"class": "wrong_answer", "error": "", "text": report.longreprtext[-_TEXT:]}
        if self.peer.lost and isinstance(error, Lost):
            return {**said, "class": self.peer.lost}
        if isinstance(error, Unsupported) or (self.lookup_error and isinstance(error, self.lookup_error)):
            return {**said, "class": "task_error"}
        if report.outcome == "skipped" or hasattr(report, "wasxfail"):
            return {**said, "error": "skipped"}
        trace = vars(error).get("__remote_trace__") if error is not None else None
        if trace is not None:
            return {"class": "runtime_error", "error": type(error).__name__, "text": trace or said["text"]}
        return said

    def report(self) -> dict[str, Any]:
        """What the judge outside goes by."""
        everything = {"setup", "call", "teardown"}
        failed: Any = self.peer.failed_load
        load = failed and {
            "error": type(failed).__name__,
            "text": vars(failed).get("__remote_trace__", ""),
            "syntax": isinstance(failed, SyntaxError),
        }
        return {
            "tests": [
                {"id": name, "class": "pass"} if self.passed.get(name) == everything and name not in self.failures
                else {"class": self.peer.lost or "wrong_answer", "error": "", "text": ""}
                | self.failures.get(name, {}) | {"id": name}
                for name in self.items
            ],
            "seconds": [self.seconds.get(name, 0.0) for name in self.items],
            "lost": self.peer.lost,
            "refused": self.barred or self.refused,
            "barred": self.barred,
            "load": load,
            "broken": self.broken and f"{type(self.broken).__name__}: {self.broken}"[:_TEXT],
            "blamed": self.broken is not None and self.peer.is_to_blame(self.broken),
        }  # fmt: skip


def _is_of_values(error: BaseException) -> bool:
    """Whether it is what a value brings about that is another one than was expected, and no fault of a program's text:
    an unknown name, or one that an installed module lacks."""
    if isinstance(error, AttributeError):
        return is_remote(error.obj) or not isinstance(error.obj, types.ModuleType)
    # Failed: what pytest says of parameters that do not fit.
    failed = sys.modules["_pytest.outcomes"].Failed
    return isinstance(error, TypeError | ValueError | LookupError | ArithmeticError | AssertionError | failed)
