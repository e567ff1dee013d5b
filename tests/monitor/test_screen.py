import io
import time

import pytest
from rich.console import Console

from gspo_agent.config import Config
from gspo_agent.monitor import screen as screen_room
from gspo_agent.monitor.screen import Screen

CONFIG = Config.parse({"model": "tiny", "env": [{"id": "a:B"}], "run": {"dir": "runs/x"}})


def test_names_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    with Screen(CONFIG) as screen:
        screen.note("runs/[/x] shop:Parrot: [bold]")
    assert capsys.readouterr().out == "runs/[/x] shop:Parrot: [bold]\n"


def lines(*steps: dict[str, float]) -> list[str]:
    out = io.StringIO()
    screen = Screen(CONFIG, Console(file=out, width=1000))
    for number, metrics in enumerate(steps, 1):
        screen.step(number, metrics)
    return out.getvalue().splitlines()


def test_a_step_without_any_advantage_says_that_nothing_was_learned() -> None:
    one, some, none = lines(
        {"groups": 4, "groups_without_advantage": 0, "groups/filtered": 1},
        {"groups": 4, "groups_without_advantage": 3, "groups/filtered": 2},
        {"groups": 4, "groups_without_advantage": 4, "groups/filtered": 12},
    )
    assert "1 group of equal rewards left out" in one
    assert "2 groups of equal rewards left out" in some
    assert "nothing learned: in every group all rewards are equal" in none


def test_an_evaluation_names_what_failed() -> None:
    out = io.StringIO()
    Screen(CONFIG, Console(file=out, width=1000)).evaluation(
        0, {"episodes": 0.0, "count/verdict/equal:num": 3.0}, ["EnvError: no key", "EnvError: other"]
    )
    assert "verdict/equal:num 3" in out.getvalue()
    assert "2 failed and are in no rate, the first with EnvError: no key" in out.getvalue()


def test_a_long_silence_on_a_pipe_is_broken_by_what_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screen_room, "_SECONDS_OF_SILENCE", 0.05)
    out = io.StringIO()
    with Screen(CONFIG, Console(file=out, width=1000)) as screen:
        screen.phase("waiting for groups")
        screen.watch(lambda: "4 episodes in flight", lambda: {"tokens": 0}, lambda: "tools: no progress for 312 s")
        end = time.monotonic() + 20
        while not out.getvalue() and time.monotonic() < end:
            time.sleep(0.01)
    first = out.getvalue().splitlines()[0]
    assert first.startswith("waiting for groups (")
    assert first.endswith("WARNING: tools: no progress for 312 s  4 episodes in flight")


def test_a_terminal_shows_what_stands_still_as_long_as_it_does() -> None:
    still = ["tools: no progress for 312 s"]
    screen = Screen(CONFIG, Console(file=io.StringIO(), width=1000, force_terminal=True))
    screen.watch(lambda: "", lambda: {"tokens": 0}, lambda: "; ".join(still))
    assert "WARNING: tools: no progress for 312 s" in screen._line().plain
    still.clear()
    assert "WARNING" not in screen._line().plain
