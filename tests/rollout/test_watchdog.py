"""Stillness is told by stages that have work and do not move; the clock is a number here."""

from __future__ import annotations

from gspo_agent.rollout.watchdog import Remark, Watchdog, Work


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def dog() -> tuple[Watchdog, Clock]:
    clock = Clock()
    return Watchdog(60.0, clock), clock


def watch(dog: Watchdog, clock: Clock, seconds: int, *stages: Work, remarks: tuple[Remark, ...] = ()) -> list[str]:
    """Looks every two seconds for so long; all that was said."""
    said: list[str] = []
    for _ in range(seconds // 2):
        clock.now += 2
        said += dog.look(stages) + dog.hear(remarks)
    return said


TWO = Work("tools", {("3.0.0", 1.0), ("4.1.0", 2.0)}, "3.0.0 in tool search")


def test_a_stage_that_has_work_and_does_not_move_is_named_once_and_again_when_it_has_doubled() -> None:
    watchdog, clock = dog()
    said = watch(watchdog, clock, 61, TWO)
    assert said == []
    assert watch(watchdog, clock, 4, TWO) == ["tools: no progress for 60 s; 2 wait, such as 3.0.0 in tool search"]
    assert watch(watchdog, clock, 56, TWO) == []
    assert watch(watchdog, clock, 4, TWO) == ["tools: no progress for 120 s; 2 wait, such as 3.0.0 in tool search"]
    assert [(each.stage, each.waiting) for each in watchdog.still] == [("tools", 2)]


def test_a_stage_without_work_never_stands_still() -> None:
    watchdog, clock = dog()
    assert watch(watchdog, clock, 1000, Work("tools"), Work("tokens", count=5)) == []
    # Work that comes after a long idle time has its own time.
    assert watch(watchdog, clock, 60, TWO) == []


def test_who_leaves_is_progress_and_who_comes_is_not() -> None:
    watchdog, clock = dog()
    watch(watchdog, clock, 50, TWO)
    more = Work("tools", {*TWO.waiting, ("5.0.0", 3.0)}, TWO.example)
    assert len(watch(watchdog, clock, 20, more)) == 1
    fewer = Work("tools", {("5.0.0", 3.0)}, "5.0.0 in tool add")
    assert watch(watchdog, clock, 58, fewer) == []
    assert watchdog.still == ()


def test_a_count_that_changes_is_progress_though_the_same_wait() -> None:
    watchdog, clock = dog()
    for tokens in range(100):
        assert watch(watchdog, clock, 50, Work("tokens", {"1.0.0-1/"}, "1.0.0", tokens)) == []


def test_stillness_that_ended_is_told_anew_when_it_comes_back() -> None:
    watchdog, clock = dog()
    assert len(watch(watchdog, clock, 70, TWO)) == 1
    watch(watchdog, clock, 2, Work("tools"))
    assert watchdog.still == ()
    assert len(watch(watchdog, clock, 70, TWO)) == 1


def test_a_process_that_was_itself_suspended_accuses_nobody() -> None:
    watchdog, clock = dog()
    tokens = Work("tokens", {"1.0.0-1/"}, "1.0.0", 7)
    watch(watchdog, clock, 10, tokens)
    clock.now += 3600
    assert watchdog.look([tokens]) + watchdog.hear([Remark("episode", 3600, 60, "1.0.0 waits for ever")]) == []
    assert watchdog.still == ()
    assert watch(watchdog, clock, 40, tokens) == []
    assert len(watch(watchdog, clock, 20, tokens)) == 1


def test_a_remark_holds_from_its_least_size_on_and_is_repeated_when_it_has_doubled() -> None:
    watchdog, clock = dog()

    def flat(size: int) -> list[str]:
        return watch(watchdog, clock, 2, remarks=(Remark("flat", size, 8, f"{size} groups of equal rewards"),))

    assert flat(7) == []
    assert flat(8) == ["8 groups of equal rewards"]
    assert flat(15) == []
    assert watchdog.remarks == ("15 groups of equal rewards",)
    assert flat(16) == ["16 groups of equal rewards"]
    assert flat(0) == []
    assert flat(9) == ["9 groups of equal rewards"]
