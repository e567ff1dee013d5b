"""Takes the command line of `docker run` and does here, without a daemon and an image, what can be done of it.

Run by root in a mount namespace of its own: the mounts are made, and the command runs as the given user in an
imitation of a container's default confinement. The image is the machine itself. Unknown flags are an error, as for
docker.
"""

from __future__ import annotations

import argparse
import os
import subprocess
from pathlib import Path

from tests.sandbox import confinement


def arguments(command: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in ("name", "network", "cap-drop", "security-opt", "user", "pids-limit", "memory", "memory-swap"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--tmpfs", required=True)
    parser.add_argument("--entrypoint", required=True)
    parser.add_argument("--mount", action="append", default=[])
    parser.add_argument("--env", action="append", default=[])
    parser.add_argument("--rm", action="store_true")
    parser.add_argument("--read-only", action="store_true")
    parser.add_argument("image")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    return parser.parse_args(command)


def main(command: list[str]) -> None:
    verb, *rest = command
    assert verb == "run", verb
    wanted = arguments(rest)
    if wanted.image == "missing":
        raise SystemExit("docker: Error response from daemon: No such image: missing")
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/run"], check=True)
    for mount in wanted.mount:
        fields = dict(part.partition("=")[::2] for part in mount.split(","))
        source, target = Path(fields["src"]), Path(fields["dst"])
        (target if source.is_dir() else target.parent).mkdir(parents=True, exist_ok=True)
        if not source.is_dir():
            target.touch()
        subprocess.run(["mount", "--bind", source, target], check=True)
        if "readonly" in fields:
            subprocess.run(["mount", "-o", "remount,bind,ro", target], check=True)
    assert wanted.user == f"{confinement.NOBODY}:{confinement.NOBODY}"
    confinement.confine("restricted")
    environment = {"PATH": "/usr/bin:/bin", "SECRET_OF_THE_IMAGE": "x", **dict(v.split("=", 1) for v in wanted.env)}
    os.execvpe(wanted.entrypoint, [wanted.entrypoint, *wanted.command], environment)


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
