from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from gspo_agent.config import EnvConfig
from gspo_agent.env import EnvFactory
from gspo_agent.errors import ConfigError
from gspo_agent.scaffold import scaffold


def test_the_new_environment_passes_its_own_test_at_once(tmp_path: Path) -> None:
    written = scaffold("Web-shop2", tmp_path / "new")
    assert [path.name for path in written] == ["web_shop2.py", "test_web_shop2.py"]
    command = [sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "no:asyncio", str(written[1])]
    ran = subprocess.run(command, cwd=written[1].parent, env=os.environ, capture_output=True, text=True, timeout=100)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "3 passed" in ran.stdout


def test_a_small_model_can_begin_with_the_new_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scaffold("corner shop", tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    factory = EnvFactory(EnvConfig(id="corner_shop:CornerShop"))
    shown = [factory.demonstration(random.Random(seed), 0.5)[0] for seed in range(20)]
    assert {len(messages) for messages in shown} == {2, 4}  # a guess; the tool


@pytest.mark.parametrize("name", ["WebShop", "web shop", "web_shop", "web-shop"])
def test_every_way_to_write_a_name_gives_one_module_and_class(name: str, tmp_path: Path) -> None:
    module, _ = scaffold(name, tmp_path)
    assert module.name == "web_shop.py"
    assert "class WebShop(ToolEnv):" in module.read_text()


@pytest.mark.parametrize("name", ["", "2fast", "class", "a/b", "../up", "json", "pytest", "é!"])
def test_a_name_that_is_no_module_or_hides_one_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="name"):
        scaffold(name, tmp_path)
    assert not list(tmp_path.iterdir())


def test_nothing_is_overwritten_and_nothing_half_written(tmp_path: Path) -> None:
    (tmp_path / "test_shop_floor.py").write_text("mine")
    with pytest.raises(ConfigError, match="exists"):
        scaffold("shop_floor", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["test_shop_floor.py"]
    assert (tmp_path / "test_shop_floor.py").read_text() == "mine"
