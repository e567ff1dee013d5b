"""Weights that SGLangServer takes."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def weights(tmp_path: Path) -> str:
    (tmp_path / "model.safetensors").touch()
    return str(tmp_path)
