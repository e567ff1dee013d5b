"""Runs untrusted code, isolated; the one way in."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal, Self, TypeVar

from gspo_agent.errors import SandboxError
from gspo_agent.sandbox.channel import Channel, JobLost
from gspo_agent.sandbox.forkserver import ForkServer, choose
from gspo_agent.sandbox.image import sites as image_sites
from gspo_agent.sandbox.inside import data
from gspo_agent.sandbox.limits import SandboxLimits
from gspo_agent.sandbox.pressure import KILLED, is_suspect
from gspo_agent.sandbox.results import CallResult, RunResult
from gspo_agent.sandbox.session import Session
from gspo_agent.sandbox.settings import Backend, SandboxSettings
from gspo_agent.sandbox.testfile import TestFile, TestFileResult, converse, pytest_packages
from gspo_agent.waiting import aside

Result = TypeVar("Result", RunResult, CallResult)
_DEFAULT = SandboxLimits()
_AUTO = SandboxSettings()
_ATTEMPTS = 2
_MAX_SERVERS = 16


class _Turns(asyncio.Semaphore):
    """Waiting for one is no time of the episode that it is for."""

    async def acquire(self) -> Literal[True]:
        if not self.locked():
            return await super().acquire()
        with aside("tools"):
            return await super().acquire()


class Sandbox:
    """Isolated execution of untrusted Python.

    Covered: the network, the host's files and processes, other jobs, privileges, and the limits of SandboxLimits; when
    a result is there, no process of its run is left. Not covered: bugs of the kernel, side channels, and what code
    learns about the machine from its own CPU. Nothing is run without isolation, unless the settings say "unsafe".

    After a run its supervisor waits a few seconds for the next one, which then costs half as much CPU; there are never
    more of them than jobs may run at once, and each holds about 1.6 MiB (`python -m tests.benchmarks.sandbox`).

    Waiting for a turn (about two jobs per processor run at once; idle sessions are not counted) uses up no limit, and
    is no time of the episode that it is for.

        sandbox = await Sandbox.open()
        result = await sandbox.run("print(input()[::-1])", stdin="abc")
    """

    def __init__(self, settings: SandboxSettings = _AUTO, *, max_running: int | None = None) -> None:
        """Starts nothing; the first job does. What isolates is chosen then, and no later server is weaker.

        Args:
            max_running: jobs at once; None: two per processor.
        """
        self._settings = settings
        self._max_running = max_running or 2 * len(os.sched_getaffinity(0))
        self._turns: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]
        self._turns = weakref.WeakKeyDictionary()
        self._servers: dict[str, ForkServer] = {}
        self._starting = threading.Lock()
        self._closed = False

    @classmethod
    async def open(cls, settings: SandboxSettings = _AUTO, *, max_running: int | None = None) -> Self:
        """A sandbox whose isolation has been proven; SandboxError names the failed probe and the remedy."""
        sandbox = cls(settings, max_running=max_running)
        sandbox.server()
        return sandbox

    @property
    def backend(self) -> Backend:
        """What isolates; "auto" before the first job."""
        return self._settings.backend

    def server(self, *, testing: bool = False, image: str = "") -> ForkServer:
        """The fork server, started (again) when there is none; takes about 0.1 s then.

        Args:
            testing: the one that has pytest.
            image: the one that has the packages of an image, and pytest.
        """
        if self._closed:
            raise SandboxError("the sandbox is closed")
        key = image or ("pytest" if testing else "")
        with self._starting:
            server = self._servers.pop(key, None)
            if server is None or not server.alive:
                if server is not None:
                    server.close()
                server = self._start(testing, image)
            self._servers[key] = server  # the last one used is the last one
            self._spare()
            return server

    def servers(self) -> list[ForkServer]:
        """Those that were started and not closed since."""
        return list(self._servers.values())

    def _start(self, testing: bool, image: str) -> ForkServer:
        settings, sites = self._settings, self._sites(image)
        if image and settings.backend == "container":
            settings = replace(settings, image=image)
        server = choose(settings, pytest_packages() if testing or image else (), sites)
        self._settings = replace(self._settings, backend=server.backend)
        return server

    def _sites(self, image: str) -> list[str] | None:
        if not image:
            return []
        return None if self._settings.backend == "container" else image_sites(image)

    def _spare(self) -> None:
        """Closes the servers whose last use is longest ago, of more than _MAX_SERVERS; none that has a job."""
        idle = [key for key, server in list(self._servers.items())[:-1] if not server.busy]
        for key in idle[: max(0, len(self._servers) - _MAX_SERVERS)]:
            self._servers.pop(key).close()

    def channel(self, *, testing: bool = False, image: str = "") -> Channel:
        """A channel to a new job, of another server where that has just died; JobLost where it dies as well."""
        for _ in range(_ATTEMPTS):
            server = self.server(testing=testing, image=image)
            try:
                return Channel(server.spawn())
            except OSError:
                server.close()
        raise JobLost

    def turn(self) -> asyncio.Semaphore:
        """`async with` it: waits until one of the jobs that may run at once, in the running event loop, has ended."""
        loop = asyncio.get_running_loop()
        turns = self._turns.get(loop)
        if turns is None:
            turns = self._turns[loop] = _Turns(self._max_running)
        return turns

    async def run(self, code: str, *, stdin: bytes | str = b"", limits: SandboxLimits = _DEFAULT) -> RunResult:
        """Runs `code` as a program of its own, to its end or to a limit."""
        return (await self.run_many(code, [stdin], limits=limits))[0]

    async def run_many(
        self,
        code: str,
        stdins: Sequence[bytes | str],
        *,
        limits: SandboxLimits = _DEFAULT,
        stop: Callable[[RunResult], bool] | None = None,
        deadline_s: float | None = None,
    ) -> list[RunResult]:
        """Runs one program on many inputs, in a fresh process (and on a fresh disk) for each.

        `stop` sees each result as it comes; once it returns True, or `deadline_s` after the first began, the remaining
        inputs are left out of the list.
        """
        inputs = [_bytes(stdin) for stdin in stdins]
        return await self._job({"kind": "run"}, code, inputs, limits, _run_result, _LOST_RUN, stop, deadline_s)

    async def call_many(
        self,
        code: str,
        function: str,
        args_list: Iterable[Sequence[Any]],
        *,
        cls: str | None = None,
        limits: SandboxLimits = _DEFAULT,
        stop: Callable[[CallResult], bool] | None = None,
        deadline_s: float | None = None,
    ) -> list[CallResult]:
        """Calls `function` (of a new object of class `cls` each time) with each list of arguments.

        Arguments and results are plain data (see `inside.data`). One process serves all calls until it dies; limits
        are those of one call; `stop` and `deadline_s` as in `run_many`. TypeError when an argument is not plain data.
        """
        inputs = [data.dumps(list(args)) for args in args_list]
        request = {"kind": "call", "function": function, "cls": cls}
        return await self._job(request, code, inputs, limits, _call_result, _LOST_CALL, stop, deadline_s)

    async def test_file(
        self,
        code: str,
        tests: str,
        *,
        module: str = "solution",
        limits: SandboxLimits = _DEFAULT,
        deadline_s: float | None = None,
    ) -> TestFileResult:
        """Runs a pytest or unittest file whose `import solution` finds the module `code`; see `test`."""
        return await self.test(TestFile.of(code, tests, module), limits=limits, deadline_s=deadline_s)

    async def test(
        self, file: TestFile, *, limits: SandboxLimits = _DEFAULT, deadline_s: float | None = None, image: str = ""
    ) -> TestFileResult:
        """Runs a test file and what it tests, each in a job of its own.

        What the tests know never enters the solution's job. `limits` are those of one test, `deadline_s` that of all.
        """
        result = TestFileResult("infra_error", {})
        async with self.turn():
            try:
                async with asyncio.timeout(deadline_s):
                    for _ in range(_ATTEMPTS):
                        with (
                            contextlib.suppress(JobLost),
                            self.channel(testing=True, image=image) as tester,
                            self.channel(testing=True, image=image) as solution,
                        ):
                            result = await converse(tester, solution, file, limits)
                            if not is_suspect(result.limit, result.cpu_s, limits.cpu_s):
                                break
            except TimeoutError:
                result = TestFileResult("time_limit", {})
        return result

    async def session(self, limits: SandboxLimits = _DEFAULT) -> Session:
        """A persistent interpreter; `limits` hold for each cell, those of disk and processes for all of it."""
        return await Session.open(self, limits)

    async def close(self) -> None:
        """Ends the fork servers and every job and session in it."""
        self.close_now()

    def close_now(self) -> None:
        self._closed = True
        for server in self.servers():
            server.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _job(
        self,
        request: dict[str, Any],
        code: str,
        inputs: list[bytes],
        limits: SandboxLimits,
        parse: Callable[[dict[str, Any], list[bytes]], Result],
        lost: Result,
        stop: Callable[[Result], bool] | None,
        deadline_s: float | None,
    ) -> list[Result]:
        """One result for each input. What a dying fork server took with it is tried once more, then it is `lost`. So is
        what was killed, or passed a limit of the clock while the machine was short of something; then that counts."""
        header = {**request, "limits": limits.as_dict()}
        source = code.encode("utf-8", "surrogatepass")
        results: list[Result] = []
        if not inputs:
            return results
        async with self.turn():
            try:
                async with asyncio.timeout(deadline_s):
                    for attempt in range(_ATTEMPTS):
                        with contextlib.suppress(JobLost), contextlib.ExitStack() as job:
                            asked = (header, source, *inputs[len(results) :])
                            channel, answer, blobs = await self._ask(job, limits, asked, again=attempt > 0)
                            while True:
                                suspect = is_suspect(answer["status"], answer.get("cpu_s", 0.0), limits.cpu_s)
                                if answer["status"] == "infra_error" or (suspect and attempt == 0):
                                    break
                                results.append(parse(answer, blobs))
                                if len(results) == len(inputs) and answer.get("stays"):
                                    job.pop_all()
                                    self._keep(channel)
                                if (stop and stop(results[-1])) or len(results) == len(inputs):
                                    return results
                                answer, blobs = await channel.receive(_patience(limits))
            except TimeoutError:
                return results
        return results + [lost] * (len(inputs) - len(results))

    async def _ask(
        self, job: contextlib.ExitStack, limits: SandboxLimits, asked: tuple[Any, ...], *, again: bool
    ) -> tuple[Channel, dict[str, Any], list[bytes]]:
        """Of a supervisor that waits for a job, or of a new one: its channel, which `job` closes, and its first answer.

        A supervisor may have ended while it waited; who was to have it loses nothing by that.
        """
        waiting = None if again else self.server().idle()
        if waiting:
            channel = job.enter_context(Channel(waiting))
            with contextlib.suppress(JobLost):
                await channel.send(*asked)
                return channel, *await channel.receive(_patience(limits))
            channel.close()
        channel = job.enter_context(self.channel())
        await channel.send(*asked)
        return channel, *await channel.receive(_patience(limits))

    def _keep(self, channel: Channel) -> None:
        """For the next job: its supervisor waits for one."""
        server, connection = self._servers.get(""), channel.detach()
        if server and connection:
            server.keep(connection, self._max_running)
        else:
            channel.close()


def _patience(limits: SandboxLimits) -> float:
    """Seconds for one answer before a job counts as lost: the supervisor stops it at four wall limits at the latest."""
    return 5 * limits.wall_s + 60


def _bytes(stdin: bytes | str) -> bytes:
    return stdin.encode("utf-8", "surrogateescape") if isinstance(stdin, str) else stdin


def _run_result(header: dict[str, Any], blobs: list[bytes]) -> RunResult:
    stdout, stderr = blobs
    return RunResult(stdout, stderr, _status(header), header["cpu_s"], header["wall_s"], header["exit_code"])


def _call_result(header: dict[str, Any], blobs: list[bytes]) -> CallResult:
    """The answer is the word of untrusted code: whatever is not exactly an answer is a runtime error of that code."""
    status, value, error = _status(header), None, ""
    if status == "ok":
        try:
            said = json.loads(blobs[0])
            if "value" in said:
                value = data.decode(said["value"])
            else:
                status = said["status"] if said["status"] in ("compile_error", "memory_limit") else "runtime_error"
                error = str(said["error"])
        except (ValueError, KeyError, TypeError, RecursionError) as problem:
            status, error = "runtime_error", f"unreadable answer: {problem}"
    return CallResult(status, value, error, header["cpu_s"], header["wall_s"])


def _status(header: dict[str, Any]) -> Any:
    """By now whoever was killed has been killed twice, which only the code itself can count on."""
    return "runtime_error" if header["status"] == KILLED else header["status"]


_LOST_RUN = RunResult(b"", b"", "infra_error", 0.0, 0.0, None)
_LOST_CALL = CallResult("infra_error", None, "the job was lost", 0.0, 0.0)

_shared: Sandbox | None = None
_shared_settings = _AUTO
_sharing = threading.Lock()


def shared_sandbox() -> Sandbox:
    """The process's own sandbox, started at its first job; it ends with the process."""
    global _shared
    with _sharing:
        if _shared is None or _shared._closed:
            _shared = Sandbox(_shared_settings)
        return _shared


def share(settings: SandboxSettings) -> None:
    """Makes `settings` those of the process's own sandbox; another one that is there is closed."""
    global _shared, _shared_settings
    with _sharing:
        if settings != _shared_settings and _shared is not None:
            _shared.close_now()
            _shared = None
        _shared_settings = settings


def marks() -> dict[str, float]:
    """What an episode's record has to say about the process's own sandbox."""
    return {"unsafe_sandbox": 1.0} if _shared_settings.backend == "unsafe" else {}
