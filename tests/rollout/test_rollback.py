"""A checkpoint every five steps and a kill -9 at a later one: what no checkpoint covers is trained again as it was."""

from __future__ import annotations

import random
from collections import defaultdict
from contextlib import closing
from pathlib import Path

import pytest

from gspo_agent.rollout import schema
from tests.faults.judge import Judge
from tests.faults.scenario import MODES, Scenario
from tests.faults.subject import Subject
from tests.faults.zygote import Zygote

EVERY, STEPS = 5, 12
POINTS = ("lease.after", "learn.before", "learn.after", "commit.before", "commit.after", "publish.after")


@pytest.fixture
def folders(fast_path: Path) -> Path:
    (fast_path / "model").mkdir()
    (fast_path / "model" / "tokenizer.json").write_text("{}")
    return fast_path


def leases(journal: Path) -> dict[int, list[int]]:
    found: dict[int, list[int]] = defaultdict(list)
    with closing(schema.read_only(journal)) as connection:
        for step, group in connection.execute("SELECT step, group_id FROM leases ORDER BY step, position"):
            found[step].append(group)
    return found


@pytest.mark.parametrize(
    "seeds",
    [range(8), pytest.param(range(8, 300), marks=[pytest.mark.slow, pytest.mark.timeout(900)])],
    ids=["8", "300"],
)
def test_what_no_checkpoint_covers_is_trained_again_in_its_order_and_nothing_of_it_is_generated_again(
    folders: Path, zygote: Zygote, seeds: range
) -> None:
    retrained = 0
    for seed in seeds:
        draw = random.Random(seed)
        mode = draw.choice(MODES)
        scenario = Scenario(
            mode=mode, world="guess", checkpoint_every=EVERY, seed=seed, delay=0.0, chunk=64, journal_tokens=64
        )
        folder = folders / f"{seed}"
        folder.mkdir()
        (folder / "model").symlink_to(folders / "model")
        with Subject(folder, scenario, zygote) as subject:
            judge = Judge(subject)
            times = draw.randint(EVERY + 1, STEPS - 1)
            died = subject.begin(die_at=(draw.choice(POINTS), times)).wait(60)
            assert died == -9, subject.last_words()
            subject.bury()
            judge.look()
            before = leases(subject.journal)
            again = [step for step in before if step > subject.covered()]
            assert subject.begin(STEPS).wait(60) == 0, subject.last_words()
            subject.bury()
            judge.verdict()
            assert judge.losses == [], f"seed {seed}"
            assert {step: leases(subject.journal)[step] for step in before} == before
            groups = {group for step in again for group in before[step]}
            requests = [words[0].split(".") for words in subject.outside.read("tokens")]
            assert not [request for request in requests if request[1] == "2" and int(request[2]) in groups]
            retrained += len(again)
    assert retrained > len(seeds)
