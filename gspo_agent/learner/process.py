"""LearnerProcess: the learner in a process of its own, so that it computes while this one goes on sampling.

Both ends pickle over one socket, one request at a time. The process ends when its parent does, however that ended: it
watches the socket's other end, also in the middle of a step. It ignores SIGINT, SIGTERM and SIGHUP, which a terminal
or a scheduler sends to the parent as well: what a cut means is the parent's decision.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.utils import logging as transformers_logging

from gspo_agent.engine.base import Weights
from gspo_agent.engine.sender import Sender
from gspo_agent.errors import GspoAgentError, LearnerError
from gspo_agent.learner.batch import Batch
from gspo_agent.learner.checkpoint import Saved
from gspo_agent.learner.learner import Learner
from gspo_agent.learner_config import LearnerConfig

T = TypeVar("T")
_CLOSE_SECONDS = 5.0


class LearnerProcess:
    """The calls of `Learner`, done elsewhere; all of them block. Raises LearnerError once the process has gone."""

    def __init__(self, config: LearnerConfig, model_path: str | Path, **how: Any) -> None:
        """Returns when the model is loaded; arguments and errors are those of `Learner`."""
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "gspo_agent.learner", str(theirs.fileno())]
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            env=os.environ | {"PYTHONPATH": path},
            process_group=0,  # Ctrl-C reaches the terminal's foreground group
        )
        theirs.close()
        self._connection = Connection(ours.detach())
        self._busy = threading.Lock()
        try:
            self._ask(Learner, config, model_path, **how)
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def step(self, batch: Batch) -> dict[str, float]:
        return self._ask(Learner.step, batch)

    def score(self, token_ids: Sequence[int], temperature: float) -> list[float]:
        return self._ask(Learner.score, token_ids, temperature)

    def save(self, root: Path, step: int) -> Saved:
        return self._ask(Learner.save, root, step)

    def export(self, root: Path, step: int) -> Path:
        return self._ask(Learner.export, root, step)

    def restore(self, path: Path, digest: str | None = None) -> int:
        return self._ask(Learner.restore, path, digest)

    def weights(self, version: int, path: Path | None = None) -> Weights:
        """The current weights as `version`; the tensors are a copy, made when they are asked for."""
        self._ask(_hold, version)
        return Weights(version, path, lambda: self._tensors(version), self.send)

    def send(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """As `Learner.send`; in the middle of a step it waits for its end."""
        return self._ask(Learner.send, function, *arguments)

    def _tensors(self, version: int) -> Iterator[tuple[str, Tensor]]:
        return ((name, torch.from_numpy(array)) for name, array in self.send(_arrays, version))

    def close(self) -> None:
        """Ends the process, in the middle of a step if need be."""
        # Killed, because a thread that waits for its answer keeps the socket open; there is nothing it would lose.
        self._process.kill()
        self._process.wait()
        self._connection.close()

    def _ask(self, function: Callable[..., T], *arguments: Any, **how: Any) -> T:
        with self._busy:
            try:
                self._connection.send_bytes(pickle.dumps((function, arguments, how), pickle.HIGHEST_PROTOCOL))
                done, outcome = pickle.loads(self._connection.recv_bytes())
            except (EOFError, OSError):
                raise LearnerError(
                    f"the learner's process (pid {self.pid}) ended with status {self._status()}; see what it wrote and "
                    "the machine's memory, and run the same command again: it goes on after the last committed step"
                ) from None
        if not done:
            raise outcome
        result: T = outcome
        return result

    def _status(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(_CLOSE_SECONDS)
        return None


def _hold(learner: Learner, version: int) -> None:
    learner.weights(version)


def _arrays(sender: Sender, version: int) -> list[tuple[str, NDArray[Any]]]:
    return [(name, tensor.cpu().numpy()) for name, tensor in sender.named(version)]


def serve(descriptor: int) -> None:
    """What `gspo_agent.learner.__main__` does with its end of the socket, until the other one is closed."""
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        _obey(Connection(descriptor))


def _obey(connection: Connection) -> None:
    """Obeys until the other end is closed. The first request makes the learner."""
    learner: tuple[Learner, ...] = ()
    while True:
        try:
            function, arguments, how = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        try:
            outcome = function(*learner, *arguments, **how)
            if function is Learner:
                learner, outcome = (outcome,), None
            answer = True, outcome
        except GspoAgentError as error:
            answer = False, error
        except Exception as error:
            answer = False, LearnerError(f"{type(error).__name__}: {error}")
        connection.send_bytes(pickle.dumps(answer, pickle.HIGHEST_PROTOCOL))
