"""Every configuration under examples/ loads, and names environments and tasks that exist."""

from __future__ import annotations

from pathlib import Path

import pytest

from gspo_agent.assembly import env_factories, open_sources
from gspo_agent.config import Config

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.toml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_loads_and_has_tasks_in_both_splits(path: Path) -> None:
    config = Config.load(path)
    factories = env_factories(config)
    for split in ("train", config.evaluation.split):
        for source in open_sources(config, factories, split):
            assert source.tasks.task(0)
