"""The backend `container`: the fork server of `landlock`, started in a container that has nothing else.

The container sees three things of the host: the harness, packages that jobs may import, and the socket by which its
server is reached; jobs see none of them. It has no network, no capability and no root, and its root directory is
read-only. Descriptors pass through the socket, so the daemon has to be this machine's, and runtimes with a kernel of
their own (gVisor, Kata) can't be used.
"""

from __future__ import annotations

import os
import select
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from gspo_agent.sandbox.limits import SandboxLimits
from gspo_agent.sandbox.probe import NotIsolated
from gspo_agent.sandbox.settings import SandboxSettings

CODE, PACKAGES, _CONTROL = "/run/gspo/code", "/run/gspo/packages", "/run/gspo/control"
_CALL = (
    "import os, socket; s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); "
    f"s.connect('{_CONTROL}/socket'); os.dup2(s.fileno(), 0); s.close(); "
)
_NOBODY = 65534
_PROCESSES = 4096
_START_S = 600.0  # the image may have to be fetched
_TICK_MS = 200
_REMEDY = "look whether {command} run {image} {python} --version works for this user; Python 3.11 or newer is needed"


def command(
    settings: SandboxSettings, name: str, control: Path, packages: Sequence[str], interpreter: Sequence[str]
) -> list[str]:
    """The command line that starts the container and, in it, the interpreter with its arguments."""
    jobs = 2 * len(os.sched_getaffinity(0))
    memory = (jobs + 2) * SandboxLimits().memory_bytes  # with what lies in /tmp
    code = Path(__file__).parent / "inside"
    mounts = [f"type=bind,src={control},dst={_CONTROL}", f"type=bind,src={code},dst={CODE}/inside,readonly"]
    mounts += [f"type=bind,src={path},dst={PACKAGES}/{os.path.basename(path)},readonly" for path in packages]
    options = {
        "--name": name,
        "--network": "none",
        "--cap-drop": "ALL",
        "--security-opt": "no-new-privileges",
        "--user": f"{_NOBODY}:{_NOBODY}",
        "--pids-limit": str(_PROCESSES),
        "--memory": str(memory),
        "--memory-swap": str(memory),
        "--tmpfs": f"/tmp:rw,nosuid,nodev,mode=1777,size={memory // 2}",
        "--entrypoint": settings.python or "python3",
    }
    flags = [part for option in options.items() for part in option]
    flags += [part for mount in mounts for part in ("--mount", mount)]
    environment = ("PYTHONHASHSEED=0", "MALLOC_ARENA_MAX=1", "LANG=C.UTF-8")
    flags += [part for variable in environment for part in ("--env", variable)]
    arguments = [*interpreter[:-1], _CALL + interpreter[-1]]
    return [settings.command, "run", "--rm", "--read-only", *flags, settings.image, *arguments]


def start(
    settings: SandboxSettings, packages: Sequence[str], interpreter: Sequence[str]
) -> tuple[socket.socket, subprocess.Popen[bytes], list[str]]:
    """The control socket, the command that runs while the container does, and one that removes it.

    Waits until the container has called. `interpreter`: arguments, the last of which is code that finds the control
    socket as descriptor 0.
    """
    name = f"gspo-sandbox-{os.urandom(8).hex()}"
    with tempfile.TemporaryDirectory() as private, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        control = Path(private) / "control"
        control.mkdir()
        control.chmod(0o711)
        listener.bind(str(control / "socket"))
        (control / "socket").chmod(0o666)
        listener.listen(1)
        try:
            process = subprocess.Popen(
                command(settings, name, control, packages, interpreter),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise NotIsolated("container", str(error), f"install {settings.command}, or set sandbox.command") from None
        try:
            return _accept(listener, process, settings), process, [settings.command, "rm", "--force", name]
        except BaseException:
            process.kill()
            process.wait()
            assert process.stderr is not None
            process.stderr.close()
            raise


def _accept(listener: socket.socket, process: subprocess.Popen[bytes], settings: SandboxSettings) -> socket.socket:
    waiting = select.poll()
    waiting.register(listener, select.POLLIN)
    deadline = time.monotonic() + _START_S
    while not waiting.poll(_TICK_MS):
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            assert process.stderr is not None
            lines = process.stderr.read().decode(errors="replace").strip().splitlines()
            said = lines[-1] if lines else f"no answer within {_START_S:g} s"
            python = settings.python or "python3"
            remedy = _REMEDY.format(command=settings.command, image=settings.image, python=python)
            raise NotIsolated("container", f"{settings.command} run: {said}", remedy)
    control, _ = listener.accept()
    return control
