"""A run changes hands: preempted, moved to another machine and directory, and never in two hands at once."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.judge import Judge
from tests.faults.scenario import Scenario
from tests.faults.subject import Subject
from tests.faults.zygote import Zygote

LOCKED, CUT = 1, 130


@pytest.fixture
def subject(fast_path: Path, zygote: Zygote) -> Iterator[Subject]:
    (fast_path / "model").mkdir()
    (fast_path / "model" / "tokenizer.json").write_text("{}")
    with Subject(fast_path, Scenario(grace=1.0, checkpoint_every=3), zygote) as subject:
        yield subject


def refused(subject: Subject, **more: object) -> str:
    """What a further process with the same command says before it ends."""
    life = subject.fork(1, **more)
    assert life.wait(20) == LOCKED, subject.last_words()
    return subject.last_words().rpartition("RunLocked")[2]


def nothing_lost(subject: Subject, judge: Judge) -> None:
    judge.finish()
    judge.verdict()
    assert judge.losses == []
    assert judge.counts["steps"]


def test_a_preempted_run_goes_on_under_another_host_name_and_path(subject: Subject) -> None:
    judge = Judge(subject)
    subject.alive()
    subject.hear("step")
    stopped = subject.stop_a_tool()  # it would hold a patient process for ever
    assert subject.life is not None
    subject.life.send(signal.SIGTERM)
    subject.life.send(signal.SIGCONT)
    time.sleep(0.2)
    assert not subject.life.over, "within the grace it waits for its tools"
    subject.life.kill()  # the scheduler's patience was shorter than the grace
    subject.hits.add(stopped)
    subject.bury()
    judge.look()

    subject.move()
    subject.host = "elsewhere"
    assert "seen" in refused(subject), "the dead one's lease still holds for another host"
    subject.expire()
    nothing_lost(subject, judge)


def test_a_run_that_had_its_grace_is_free_for_every_host_at_once(subject: Subject) -> None:
    judge = Judge(subject)
    subject.alive()
    subject.hear("step")
    assert subject.life is not None
    subject.life.send(signal.SIGTERM)
    assert subject.life.wait(10) == CUT
    subject.bury()
    judge.look()
    assert judge.counts["tokens sampled again after a kill"] == 0

    subject.move()
    subject.host = "elsewhere"
    nothing_lost(subject, judge)


def test_nobody_is_let_in_beside_a_living_process(subject: Subject) -> None:
    judge = Judge(subject)
    subject.alive()
    assert "belongs to a running process" in refused(subject)
    # File locks reach no other machine on many file systems; the lease does.
    assert "seen" in refused(subject, host="elsewhere", lockless=True)
    nothing_lost(subject, judge)


def test_a_process_that_was_given_up_for_dead_writes_nothing_more(subject: Subject) -> None:
    judge = Judge(subject)
    old = subject.alive()
    subject.hear("step")
    old.send(signal.SIGSTOP)
    subject.expire()
    judge.look()
    subject.life, subject.started = None, False
    subject.begin(host="elsewhere", lockless=True)
    subject.alive()
    old.send(signal.SIGCONT)
    assert old.wait(20) == LOCKED
    assert "has taken this run over" in subject.log.read_text()
    subject.host = "elsewhere"
    nothing_lost(subject, judge)
