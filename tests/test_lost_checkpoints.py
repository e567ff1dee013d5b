"""Checkpoints that are damaged, gone, or cannot be read here: what a start then goes on from."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from gspo_agent import trainer
from gspo_agent.config import Config
from gspo_agent.errors import JournalError
from gspo_agent.learner import checkpoint
from gspo_agent.monitor.screen import Screen
from gspo_agent.rollout.audit import audit
from tests.test_trainer import cache, config, leases  # noqa: F401 (a fixture)


class Recorded(Screen):
    """Keeps its notes."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.notes: list[str] = []

    def note(self, text: str, style: str = "") -> None:
        super().note(text, style)
        self.notes.append(text)


def damage(path: Path) -> None:
    weights = next(path.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1])


def weights_of(path: Path) -> bytes:
    return next(path.glob("*.safetensors")).read_bytes()


@pytest.mark.parametrize("harm", [shutil.rmtree, damage])
async def test_an_older_checkpoint_is_gone_on_from_where_the_newest_cannot_be_read(tmp_path: Path, harm: Any) -> None:
    """The steps after it are trained again on the same groups: nothing is generated for them."""
    kept = ("evaluation.episodes=0", "run.keep_checkpoints=2")
    run = await trainer.train_async(config(tmp_path / "run", "run.steps=4", *kept))
    before, sampled = leases(run), audit(run.journal).sampled_tokens
    harm(run.checkpoints / "step-4")
    again = config(tmp_path / "run", "run.steps=4", *kept)
    screen = Recorded(again)
    await trainer.train_async(again, screen=screen)
    said = "\n".join(screen.notes)
    assert re.search(r"checkpoint \S+step-4 ", said)
    assert "going on from step-3 instead: what came after step 3 is trained again" in said
    assert leases(run) == before
    assert [step for step, _ in run.steps()] == [1, 2, 3, 4]
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["step-3", "step-4"]
    result = audit(run.journal)
    assert result.breaches == ()
    assert run.status().groups["consumed"] == 8
    # What is in flight goes on meanwhile; the groups of step 4 have what they had.
    assert result.sampled_tokens >= sampled


async def test_a_run_that_lost_every_checkpoint_trains_all_its_steps_again_from_the_journal(tmp_path: Path) -> None:
    kept = ("evaluation.episodes=0", "run.keep_checkpoints=2")
    run = await trainer.train_async(config(tmp_path / "run", *kept))
    before, settled = leases(run), run.status().groups["consumed"]
    sampled, weights = audit(run.journal).sampled_tokens, weights_of(run.checkpoints / "step-2")
    shutil.rmtree(run.checkpoints / "step-2")
    damage(run.checkpoints / "step-1")
    again = config(tmp_path / "run", *kept)
    screen = Recorded(again)
    await trainer.train_async(again, screen=screen)
    said = "\n".join(screen.notes)
    assert re.search(r"(?s)step-2 does not exist.*step-1 is not what was saved", said)
    assert "going on from the model that the run began with: every step is trained again" in said
    assert (leases(run), [step for step, _ in run.steps()]) == (before, [1, 2])
    result = audit(run.journal)
    assert (result.breaches, result.rollbacks, result.lives) == ((), ((2, 0),), 2)
    assert run.status().groups["consumed"] == settled
    assert result.sampled_tokens >= sampled
    assert weights_of(run.checkpoints / "step-2") == weights


async def test_a_run_that_lost_every_checkpoint_and_its_first_episodes_is_refused(tmp_path: Path) -> None:
    kept = ("evaluation.episodes=0", "run.keep_steps=0")
    run = await trainer.train_async(config(tmp_path / "run", *kept))
    shutil.rmtree(run.checkpoints / "step-2")
    steps = run.steps()
    with pytest.raises(JournalError, match=r"step-2 does not exist.*no other checkpoint .*, and the episodes of steps"):
        await trainer.train_async(config(tmp_path / "run", *kept, "run.steps=3"))
    assert run.steps() == steps


async def test_a_checkpoint_that_is_whole_and_cannot_be_read_here_is_no_reason_to_begin_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = await trainer.train_async(config(tmp_path / "run", "evaluation.episodes=0", "run.keep_checkpoints=2"))
    shutil.rmtree(run.checkpoints / "step-2")
    steps = run.steps()
    monkeypatch.setattr(checkpoint, "_STATE", "where-another-version-has-it.pt")
    with pytest.raises(JournalError, match=r"step-1 cannot be read: .*another-version.*; no other checkpoint"):
        await trainer.train_async(config(tmp_path / "run", "evaluation.episodes=0", "run.steps=3"))
    assert run.steps() == steps
