from __future__ import annotations

from pathlib import Path

import pytest

from gspo_agent import mounts


def test_a_network_file_system_is_told_by_its_mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not mounts.on_network(tmp_path)
    table = tmp_path / "mounts"
    table.write_text(f"/dev/vda / ext4 rw 0 0\nhost:/x {tmp_path} nfs4 rw 0 0\n/dev/vdb {tmp_path}/local ext4 rw 0 0\n")
    monkeypatch.setattr(mounts, "TABLE", table)
    assert mounts.on_network(tmp_path)
    assert mounts.on_network(tmp_path / "deeper")
    assert not mounts.on_network(tmp_path / "local")
    assert not mounts.on_network(Path("/elsewhere"))
    monkeypatch.setattr(mounts, "TABLE", tmp_path / "missing")
    assert not mounts.on_network(tmp_path)
