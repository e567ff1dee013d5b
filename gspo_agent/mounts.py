"""What is mounted where."""

from __future__ import annotations

import os
from pathlib import Path

TABLE = Path("/proc/self/mounts")
_NETWORK = ("nfs", "cifs", "smb", "lustre", "gpfs", "beegfs", "ceph", "9p", "afs", "fuse.sshfs", "fuse.gluster")


def on_network(directory: Path) -> bool:
    """Whether it lies on a file system that several hosts may mount; False where that cannot be told."""
    try:
        table = TABLE.read_text().splitlines()
    except OSError:
        return False
    best, kind = "", ""
    where = os.path.realpath(directory)
    for line in table:
        _, point, name, *_ = line.split(" ")
        point = point.replace("\\040", " ")
        inside = where == point or where.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, kind = point, name
    return kind.startswith(_NETWORK)
