"""Server: one SGLang server of this machine: what it is started with, its processes, its log."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from enum import StrEnum
from pathlib import Path

from gspo_agent.background import off_loop
from gspo_agent.engine import keeper
from gspo_agent.errors import EngineError, written
from gspo_agent.serving_config import ServersConfig

_WINDOW_SECONDS = 3600.0  # in which restarts are counted
_LONGEST_BACK_OFF = 60.0
_LONGEST_DIRECTORY = 80  # of the 107 bytes that the path of a socket may have
_TAIL_LINES, _TAIL_BYTES = 20, 20_000


class Condition(StrEnum):
    STARTING = "starting"
    """It is not ready yet."""
    READY = "ready"
    DOWN = "down"
    """It ended, and is started again after a while."""
    GIVEN_UP = "given up"


class Server:
    """One server: its processes and what is known of it."""

    def __init__(self, number: int, config: ServersConfig, model: Path, log: Path, port: int, gpus: Sequence[str]):
        self.number, self.log, self.gpus = number, log, list(gpus)
        reached = "127.0.0.1" if config.host in ("0.0.0.0", "::") else config.host
        self.url = f"http://{reached}:{port}"
        self.command = command(config, model, port)
        self.condition, self.problem, self.since = Condition.STARTING, "", time.monotonic()
        self.restarts: deque[float] = deque()
        self.proven = False
        """It was ready once: what it is started with works."""
        self._address, self._env = (config.host, port), config.env
        self._process: subprocess.Popen[bytes] | None = None
        self._lifeline: socket.socket | None = None
        self._temporary = Path()
        self._begun = 0
        """Where in the log its present life begins."""

    @property
    def name(self) -> str:
        return f"server {self.number} ({self.url})"

    @property
    def pid(self) -> int | None:
        """Of its keeper, whose process group it is."""
        return None if self._process is None else self._process.pid

    def enter(self, condition: Condition, problem: str = "") -> None:
        self.condition, self.problem, self.since = condition, problem, time.monotonic()

    def start(self) -> asyncio.Future[int]:
        """Starts its processes; the future has the exit status when the last of them is gone. Raises EngineError where
        its port is taken."""
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(self._address)
            except OSError as error:
                raise EngineError(f"port {self._address[1]} cannot be had ({error.strerror})") from None
        temporary = self._temporary = temporary_directory(self.log.with_suffix(".tmp"))
        env = os.environ | {"TMPDIR": str(temporary)} | self._env
        if self.gpus:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(self.gpus)
        ours, theirs = socket.socketpair()
        with theirs, written(self.log), self.log.open("ab") as log:
            log.write(f"\n--- {time.strftime('%Y-%m-%d %H:%M:%S')}: {' '.join(self.command)}\n".encode())
            log.flush()
            self._begun, self._lifeline = log.tell(), ours
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-S",
                    "-E",
                    keeper.__file__,
                    str(theirs.fileno()),
                    str(self._temporary),
                    *self.command,
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=env,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        return asyncio.ensure_future(off_loop(self._process.wait))

    def end(self) -> None:
        """Its keeper kills all of its processes."""
        if self._lifeline is not None:
            self._lifeline.close()

    def sweep(self) -> None:
        """Ends what a keeper leaves that was killed itself."""
        if self._process is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            shutil.rmtree(self._temporary, ignore_errors=True)

    def tail(self) -> str:
        """The last lines that its present life wrote."""
        try:
            with self.log.open("rb") as log:
                log.seek(max(self._begun, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
                lines = log.read().decode(errors="replace").splitlines()
        except OSError as error:
            return f"{self.log} cannot be read: {error}"
        return "\n".join(lines[-_TAIL_LINES:])

    def next_restart(self, most: int, back_off: float) -> float | None:
        """Seconds until it is started again; None where that was done too often."""
        now = time.monotonic()
        while self.restarts and now - self.restarts[0] > _WINDOW_SECONDS:
            self.restarts.popleft()
        if len(self.restarts) >= most:
            return None
        self.restarts.append(now)
        return float(min(back_off * 2 ** (len(self.restarts) - 1), _LONGEST_BACK_OFF))


def temporary_directory(directory: Path) -> Path:
    """An empty one for a server's temporary files: this, or one of the system's where its path is too long for the
    sockets that a server has among them."""
    directory = directory.resolve()
    if len(os.fsencode(directory)) > _LONGEST_DIRECTORY:
        return Path(tempfile.mkdtemp(prefix="gspo-server-"))
    with written(directory):
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir()
    return directory


def command(config: ServersConfig, model: Path, port: int) -> list[str]:
    """
    >>> command(ServersConfig(args={"quantization": "fp8", "enable_x": True}), Path("m"), 30000)[3:]
    ['--model-path', 'm', ..., '--quantization', 'fp8', '--enable-x']
    """
    line = [os.path.expanduser(config.python) or sys.executable, "-m", config.module]
    line += ["--model-path", str(model), "--host", config.host, "--port", str(port)]
    line += ["--tp-size", str(config.tp), "--dp-size", str(config.dp)]
    for name, value in config.args.items():
        if value is False:
            continue
        line.append("--" + name.replace("_", "-"))
        if value is not True:
            values = value if isinstance(value, list) else [value]
            line += [json.dumps(one) if isinstance(one, dict) else str(one) for one in values]
    return line
