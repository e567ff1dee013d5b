"""A real SGLang server on the CPU, in a process tree of its own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Self

PYTHON = os.environ.get("SGLANG_PYTHON", "")
"""The interpreter of the environment that has SGLang."""
_STAND_IN = Path(__file__).parent / "stand_in"
_READY_SECONDS = 400


class RealServer:
    """Serves a model directory; `with` ends the whole process tree."""

    def __init__(self, model: Path, log: Path, *options: str) -> None:
        self.port = _free_port()
        self.url, self.log = f"http://127.0.0.1:{self.port}", log
        command = [
            PYTHON, "-m", "sglang.launch_server", "--model-path", str(model), "--device", "cpu",
            "--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--dtype", "float32",
            "--host", "127.0.0.1", "--port", str(self.port), "--mem-fraction-static", "0.1",
            "--max-total-tokens", "65536", *options,
        ]  # fmt: skip
        temporary = log.with_suffix(".tmp")  # killed, it leaves files there
        temporary.mkdir()
        environment = os.environ | {
            "PYTHONPATH": str(_STAND_IN), "SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
            "TMPDIR": str(temporary),
        }  # fmt: skip
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )

    def wait(self) -> None:
        """Returns when it answers with tokens."""
        until = time.monotonic() + _READY_SECONDS
        while True:
            if self._process.poll() is not None:
                raise RuntimeError(f"SGLang ended with {self._process.returncode}:\n{self.tail()}")
            try:
                with urllib.request.urlopen(f"{self.url}/health_generate", timeout=20) as answer:
                    if answer.status == 200:
                        return
            except (urllib.error.URLError, OSError):
                pass
            if time.monotonic() > until:
                raise RuntimeError(f"SGLang is not ready after {_READY_SECONDS} s:\n{self.tail()}")
            time.sleep(1)

    def kill(self) -> None:
        """kill -9 of every process of it."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        self._process.wait()

    def tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-30:])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.kill()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
