"""kill -9 at random moments, each time followed by the same command: the run ends, and the books are right."""

from __future__ import annotations

import random
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import orjson
import pytest

from gspo_agent.rollout.audit import audit
from gspo_agent.rollout.ledger import read_status, read_steps
from gspo_agent.trajectory import weight_version
from tests.faults.judge import Judge
from tests.faults.scenario import Scenario
from tests.faults.subject import Subject
from tests.faults.world import ESSAY_TOKENS
from tests.faults.zygote import Zygote
from tests.rollout.scene import sampled_again
from tests.rollout.victim import OUTSIDE

ROOT = Path(__file__).parent.parent.parent


def start(path: Path, steps: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.rollout.victim", str(path), str(steps)]
    victim = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert victim.stdout is not None
    assert victim.stdout.readline() == "started\n"
    return victim


@pytest.mark.parametrize(
    ("kills", "steps"), [(4, 6), pytest.param(30, 40, marks=[pytest.mark.slow, pytest.mark.timeout(300)])]
)
def test_kills_at_random_moments_lose_nothing_and_train_nothing_twice(fast_path: Path, kills: int, steps: int) -> None:
    draw = random.Random(kills)
    path = fast_path / "journal.sqlite"
    continued = 0
    for _ in range(kills):
        with start(path, steps) as victim:
            time.sleep(draw.uniform(0.0, 0.35))
            victim.kill()
        continued += read_status(path).slots.get("running", 0)
    with start(path, steps) as victim:
        assert victim.wait(60) == 0
    assert continued > 0

    status = read_status(path)
    records = read_steps(path)
    assert [step for step, _ in records] == list(range(1, steps + 1))
    trained = [group for _, metrics in records for group in metrics["groups"]]
    assert len(trained) == len(set(trained)) == 2 * steps == status.groups["consumed"]
    assert not status.failures
    assert not sampled_again(path)
    assert audit(path).breaches == ()

    connection = sqlite3.connect(path)
    (taken,) = connection.execute("SELECT sum(cursor) FROM cursors").fetchone()
    assert taken == sum(status.groups.values())
    assert connection.execute("SELECT count(DISTINCT cursor) FROM groups").fetchone() == (taken,)
    versions: dict[int, set[int]] = {}
    for slot, data in connection.execute("SELECT slot, data FROM events WHERE kind = 'sampled'"):
        versions.setdefault(slot, set()).update(span[1] for span in orjson.loads(data)[2])
    connection.close()
    lives = {version // weight_version(1, 0) for seen in versions.values() for version in seen}
    assert lives <= set(range(1, status.owner.life + 1))
    assert any(len({v // weight_version(1, 0) for v in seen}) > 1 for seen in versions.values())

    calls = Counter((fast_path / OUTSIDE).read_text().split())
    assert calls
    assert [name for name, number in calls.items() if number > 1] == []


def test_a_kill_in_a_generation_of_twenty_thousand_tokens_costs_no_more_than_journal_tokens(
    fast_path: Path, zygote: Zygote
) -> None:
    (fast_path / "model").mkdir()
    (fast_path / "model" / "tokenizer.json").write_text("{}")
    draw = random.Random(0)
    scenario = Scenario(
        world="essay", journal_tokens=256, turn_tokens=2 * ESSAY_TOKENS, group_size=2, chunk=16, delay=0.0005,
        over_provision=1.0,
    )  # fmt: skip
    with Subject(fast_path, scenario, zygote) as subject:
        judge = Judge(subject)
        for _ in range(5):
            subject.alive()
            time.sleep(draw.uniform(0.05, 0.3))
            subject.kill()
            judge.look()
        judge.finish()
        judge.verdict()
        sampled = {int(words[1]) // 256 for words in subject.outside.read("tokens")}
    assert judge.losses == []
    assert len(sampled) > ESSAY_TOKENS // 256
    assert 0 < judge.counts["most lost of an episode"] <= 256
    assert judge.counts["twins compared"] >= 4
    print(
        f"5 kills in generations of {ESSAY_TOKENS} tokens: {judge.counts['tokens sampled again after a kill']} tokens "
        f"sampled again in all, {judge.counts['most lost of an episode']} of one request at most"
    )
