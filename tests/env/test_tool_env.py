from __future__ import annotations

import asyncio
import json
import sqlite3
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from gspo_agent.env import CallLog, CallMeta, ToolEnv, call_id, tool
from gspo_agent.errors import EngineError, EnvError, SandboxError, StateLost, ToolError, Unscored
from gspo_agent.messages import Message, assistant, call, user


class Recording(CallLog):
    """Keeps what a journal would get; answers what it knows, as after a crash."""

    def __init__(self, known: dict[str, Any] | None = None) -> None:
        self.known = dict(known or {})
        self.metas: dict[str, CallMeta] = {}
        self.ran: list[str] = []

    async def run(self, call_id: str, function: Callable[[], Awaitable[Any]], meta: CallMeta) -> Any:
        self.metas[call_id] = meta
        if call_id not in self.known:
            self.ran.append(call_id)
            self.known[call_id] = json.loads(json.dumps(await function()))
        return self.known[call_id]


class Shop(ToolEnv):
    """The environment of the documentation, with an SQLite connection, which is tied to its thread."""

    def setup(self, task: dict[str, Any]) -> None:
        self.given: str | None = None
        self.order: list[str] = []
        self.db = sqlite3.connect(":memory:")

    def prompt(self, task: dict[str, Any]) -> str:
        return str(task.get("question", "?"))

    @tool(timeout=20)
    def query(self, sql: str) -> Any:
        """Run one SQL query."""
        return self.db.execute(sql).fetchall()

    @tool(final=True)
    def submit(self, answer: str) -> str:
        """Give the final answer."""
        if answer == "?":
            raise ToolError("think again")
        self.given = answer
        return "received"

    @tool
    async def note(self, text: str) -> dict[str, str]:
        """Write a note."""
        self.order.append(text)
        return {"noted": text}

    @tool
    def fail(self, how: str) -> None:
        """Fail."""
        raise {
            "tool": ToolError("try the other door"),
            "value": ValueError("bad value"),
            "exit": SystemExit(3),
            "env": EnvError("the world is gone"),
            "sandbox": SandboxError("no isolation"),
            "engine": EngineError("no engine"),
            "unscored": Unscored("no verdict"),
            "connection": ConnectionResetError("peer"),
            "timeout": TimeoutError("socket"),
        }[how]

    def score(self, task: dict[str, Any], answer: str) -> dict[str, float]:
        return {"right": float((self.given or answer) == task.get("gold")), "notes": len(self.order)}

    def close(self) -> None:
        self.db.close()


async def started(env: ToolEnv, **task: Any) -> ToolEnv:
    await env.areset(seed=5, options={"task": task})
    return env


def says(result: Any) -> list[tuple[str, str]]:
    return [(message["content"], message["outcome"]) for message in result[0]]


async def test_an_episode_with_tools_ends_by_its_final_tool() -> None:
    env = await started(Shop(rewards={"right": 2.0}), question="How many?", gold="1")
    env.episode_id = "4.0.0"
    observation, reward, terminated, truncated, info = await env.astep(assistant("", [call("query", sql="select 1")]))
    expected = {"role": "tool", "content": "[[1]]", "name": "query", "tool_call_id": "4.0.0/0/0", "outcome": "ok"}
    assert (observation, reward, terminated, truncated, info) == ([expected], 0.0, False, False, {})
    result = await env.astep(assistant("bye", [call("submit", answer="1")]))
    assert says(result) == [("received", "ok")]
    assert result[1:] == (2.0, True, False, {"components": {"right": 1.0, "notes": 0.0}})
    with pytest.raises(EnvError, match="step after its end"):
        await env.astep(assistant(""))
    assert await env.afinish("turns") == (0.0, {})
    await env.aclose()


async def test_a_message_without_a_call_is_the_answer() -> None:
    env = await started(Shop(), gold="42")
    assert (await env.astep(assistant("42")))[1:] == (1.0, True, False, {"components": {"right": 1.0, "notes": 0.0}})
    await env.aclose()


async def test_the_answer_is_what_the_model_wrote_last_and_nothing_that_a_tool_said() -> None:
    seen: list[str] = []

    class Heard(Shop):
        def score(self, task: dict[str, Any], answer: str) -> float:
            seen.append(answer)
            return 0.0

    for said in ("", "mine"):
        env = await started(Heard())
        (reply,), *_ = await env.astep(assistant("thinking aloud", [call("note", text="GOLD")]))
        assert "GOLD" in reply["content"]
        await env.astep(assistant(said))
        await env.aclose()
    env = await started(Heard())
    await env.astep(assistant("GOLD", [call("note", text="GOLD")]))
    await env.afinish("turns")
    await env.aclose()
    assert seen == ["", "mine", ""]


async def test_a_limit_of_the_runner_is_scored_without_an_answer() -> None:
    env = await started(Shop(), gold="")
    assert await env.afinish("turns") == (1.0, {"components": {"right": 1.0, "notes": 0.0}})
    await env.aclose()


async def test_what_is_wrong_with_a_call_is_told_to_the_model_and_the_episode_goes_on() -> None:
    env = await started(Shop())
    calls: list[Any] = [
        call("qury", sql="select 1"),
        call("query"),
        {"error": "no closing brace", "function": {"name": "query", "arguments": {}}},
        {"function": {"name": "query", "arguments": "select 1"}},
        {},
        {"id": "call_9", "function": {"name": "note", "arguments": {"text": "ok"}}},
    ]
    observation, _, terminated, _, _ = await env.astep({"role": "assistant", "content": "", "tool_calls": calls})
    assert [message["outcome"] for message in observation] == ["error"] * 5 + ["ok"]
    assert observation[0]["content"] == "Error: no tool 'qury'; did you mean 'query'?"
    assert observation[1]["content"] == "Error: wrong arguments for query: 'sql' is missing"
    assert observation[2]["content"] == "Error: the call could not be read: no closing brace"
    assert "arguments: " in observation[3]["content"]
    assert observation[4]["content"] == "Error: the call names no tool"
    assert (observation[5]["content"], observation[5]["tool_call_id"]) == ('{"noted": "ok"}', "call_9")
    assert not terminated
    await env.aclose()


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("tool", "try the other door"),
        ("value", "Error: ValueError: bad value"),
        ("exit", "Error: RuntimeError: SystemExit: 3"),
    ],
)
async def test_an_exception_in_a_tool_is_its_result(how: str, said: str) -> None:
    env = await started(Shop())
    assert says(await env.astep(assistant("", [call("fail", how=how)]))) == [(said, "error")]
    await env.aclose()


@pytest.mark.parametrize(
    ("how", "kind"),
    [
        ("env", EnvError),
        ("sandbox", SandboxError),
        ("engine", EngineError),
        ("unscored", Unscored),
        ("connection", EnvError),
        ("timeout", EnvError),
    ],
)
async def test_what_breaks_around_a_tool_fails_the_episode(how: str, kind: type[Exception]) -> None:
    env = await started(Shop())
    with pytest.raises(kind):
        await env.astep(assistant("", [call("fail", how=how)]))
    await env.aclose()


async def test_a_final_tool_that_fails_does_not_end_the_episode_and_one_that_succeeds_ends_the_message() -> None:
    env = await started(Shop())
    result = await env.astep(assistant("", [call("submit", answer="?")]))
    assert (says(result), result[2]) == ([("think again", "error")], False)
    result = await env.astep(assistant("", [call("submit", answer="1"), call("note", text="late")]))
    assert says(result)[1] == ("Not run: the call before it ended the episode.", "error")
    assert (env.order, result[2]) == ([], True)
    await env.aclose()


class Timed(ToolEnv):
    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()

    def setup(self, task: dict[str, Any]) -> None:
        self.log: list[str] = []

    def prompt(self, task: dict[str, Any]) -> str:
        return "?"

    @tool
    def write(self, text: str) -> None:
        """Write."""
        self.log.append(text)

    @tool(timeout=0.02)
    def hang(self) -> None:
        """Hang."""
        self.log.append("half done")
        self.go.wait(20)
        self.log.append("far too late")

    @tool(timeout=0.02)
    async def ahang(self) -> None:
        """Hang politely."""
        await asyncio.sleep(20)

    @tool(timeout=20)
    async def refused(self) -> None:
        """Its own timeout, not the deadline."""
        raise TimeoutError("connect")

    def score(self, task: dict[str, Any], answer: str) -> float:
        return float(len(self.log))

    def close(self) -> None:
        self.closed = True


async def test_a_synchronous_call_past_its_deadline_taints_and_its_half_done_work_is_not_in_the_state() -> None:
    env = Timed()
    await started(env)
    await env.astep(assistant("", [call("write", text="a")]))
    result = await env.astep(assistant("", [call("write", text="b"), call("hang"), call("write", text="c")]))
    assert says(result) == [
        ("", "ok"),
        ("Error: timed out after 0.02 s", "timeout"),
        ("Not run: a call before it timed out.", "error"),
    ]
    assert env.tainted
    state = env.get_state()
    for refused in (env.astep(assistant("")), env.afinish("turns"), env.areset()):
        with pytest.raises(EnvError):
            await refused
    fresh = Timed()
    fresh.set_state(json.loads(json.dumps(state)))
    assert fresh.log == ["a", "b"]
    fresh.call_log = log = Recording()
    fresh.episode_id = "e"
    await fresh.astep(assistant("", [call("write", text="d")]))
    assert log.ran == ["e/2/0"]
    assert (await fresh.astep(assistant("done")))[1] == 3.0
    await env.aclose()
    env.go.set()
    await fresh.aclose()


async def test_an_asynchronous_call_past_its_deadline_is_cancelled_and_taints_nothing() -> None:
    env = Timed()
    await started(env)
    assert says(await env.astep(assistant("", [call("ahang")]))) == [("Error: timed out after 0.02 s", "timeout")]
    assert not env.tainted
    with pytest.raises(EnvError, match=r"Timed\.refused: TimeoutError: connect"):
        await env.astep(assistant("", [call("refused")]))
    await env.aclose()


async def test_after_a_cancellation_the_state_is_unknown_rather_than_old() -> None:
    env = Timed()
    await started(env)
    await env.astep(assistant("", [call("hang")]))
    other = Timed()
    await started(other)

    class Waiting(Timed):
        @tool
        def wait(self) -> None:
            """Wait."""
            self.go.wait(20)

    waiting = Waiting()
    await started(waiting)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(waiting.astep(assistant("", [call("wait")])), 0.02)
    assert waiting.tainted
    assert waiting.get_state() is None
    env.go.set()
    waiting.go.set()
    for one in (env, other, waiting):
        await one.aclose()


class Parallel(ToolEnv):
    def setup(self, task: dict[str, Any]) -> None:
        self.barrier = threading.Barrier(2, timeout=20)
        self.abarrier = asyncio.Barrier(2)

    def prompt(self, task: dict[str, Any]) -> str:
        return "?"

    @tool(parallel=True)
    def meet(self, who: str) -> str:
        """Returns once two calls run at once."""
        self.barrier.wait()
        return f"{who} {call_id()}"

    @tool(parallel=True)
    async def ameet(self) -> str:
        """Returns once two calls run at once."""
        await self.abarrier.wait()
        return call_id()

    @tool(parallel=True)
    async def crash(self) -> None:
        """Crash."""
        raise SandboxError("gone")

    @tool
    async def alone(self) -> None:
        """Not parallel."""

    def score(self, task: dict[str, Any], answer: str) -> float:
        return 0.0


async def test_parallel_calls_of_one_message_run_at_once_and_answer_in_order() -> None:
    env = await started(Parallel())
    result = await env.astep(assistant("", [call("meet", who="a"), call("nope"), call("meet", who="b")]))
    assert [content for content, _ in says(result)] == ["a /0/0", says(result)[1][0], "b /0/2"]
    result = await asyncio.wait_for(env.astep(assistant("", [call("ameet"), call("ameet")])), 20)
    assert says(result) == [("/1/0", "ok"), ("/1/1", "ok")]


async def test_a_crash_among_parallel_calls_cancels_the_others() -> None:
    env = await started(Parallel())
    with pytest.raises(SandboxError):
        await asyncio.wait_for(env.astep(assistant("", [call("ameet"), call("crash")])), 20)


async def test_one_call_that_is_not_parallel_makes_all_run_one_after_another() -> None:
    env = await started(Parallel())
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(env.astep(assistant("", [call("ameet"), call("ameet"), call("alone")])), 0.05)


async def test_every_call_passes_through_the_log_and_recorded_ones_do_not_run_again() -> None:
    env = await started(Shop())
    env.episode_id, env.call_log = "7.1.0", Recording({"7.1.0/0/0": {"content": "from the record", "outcome": "ok"}})
    calls = [call("note", text="a"), call("note", text="b"), call("query", sql="select 2")]
    result = await env.astep(assistant("", calls))
    assert says(result)[0] == ("from the record", "ok")
    assert result[0][0]["name"] == "note"
    assert env.call_log.ran == ["7.1.0/0/1", "7.1.0/0/2"]
    assert env.order == ["b"]
    assert env.call_log.metas["7.1.0/0/2"].arguments == {"sql": "select 2"}
    await env.aclose()


class Secretive(ToolEnv):
    def __init__(self) -> None:
        super().__init__()
        self.api_key = "sk-12345"

    def prompt(self, task: dict[str, Any]) -> str:
        return "?"

    @tool(secrets=("password", "api_key"))
    async def login(self, who: str, password: str) -> str:
        """Log in."""
        if who == "x":
            raise ValueError(f"{self.api_key} rejected")
        return f"{who} with {password} and {self.api_key}"

    def score(self, task: dict[str, Any], answer: str) -> float:
        return 0.0


async def test_secret_values_reach_neither_journal_nor_model_nor_state() -> None:
    env = Secretive()
    await started(env)
    env.call_log = log = Recording()
    action = assistant(
        "", [call("login", who="bo hunter22", password="hunter22"), call("login", who="x", password="p")]
    )
    result = await env.astep(action)
    assert says(result) == [
        ("bo [redacted] with [redacted] and [redacted]", "ok"),
        ("Error: ValueError: [redacted] rejected", "error"),
    ]
    written = json.dumps([[meta.arguments for meta in log.metas.values()], log.known, env.get_state()])
    assert "hunter22" not in written
    assert "sk-12345" not in written
    assert log.metas["/0/1"].arguments == {"who": "x", "password": "[redacted]"}
    shown = env.redact(action)
    assert shown["tool_calls"][0]["function"]["arguments"]["password"] == "[redacted]"
    assert action["tool_calls"][0]["function"]["arguments"]["password"] == "hunter22"


class Flaky(ToolEnv):
    """Draws from np_random in a tool, changes bytes, arrays and its task."""

    def setup(self, task: dict[str, Any]) -> None:
        self.blob, self.grid, self.rows = b"\x00\xff", np.zeros((2, 2), np.float32), task["rows"]
        self.view = self.rows

    def prompt(self, task: dict[str, Any]) -> str:
        return "?"

    @tool
    def draw(self) -> str:
        """Draw."""
        self.blob += bytes([len(self.blob)])
        self.grid[0, 0] += 0.1
        self.rows.append(len(self.view))
        return f"{self.np_random.random()} {self.blob.hex()} {self.grid[0, 0]!r} {self.view}"

    def score(self, task: dict[str, Any], answer: str) -> float:
        return float(len(task["rows"]))


async def test_an_instance_rebuilt_at_any_turn_goes_on_like_its_uncut_twin() -> None:
    task = {"rows": [7]}
    uncut = Flaky()
    await uncut.areset(seed=11, options={"task": task})
    states, answers = [uncut.get_state()], []
    for _ in range(4):
        answers.append(says(await uncut.astep(assistant("", [call("draw")]))))
        states.append(uncut.get_state())
    assert uncut.state_problem is None
    for turn, state in enumerate(states):
        env = Flaky()
        env.set_state(json.loads(json.dumps(state)))
        assert env.tool_schemas == uncut.tool_schemas
        for expected in answers[turn:]:
            assert says(await env.astep(assistant("", [call("draw")]))) == expected
        assert env.get_state() == states[-1]
        assert (await env.astep(assistant("")))[1] == 1.0
    assert task == {"rows": [7]}  # the group's task is not this episode's to change


async def test_an_attribute_without_json_form_lowers_the_level_and_is_named() -> None:
    env = await started(Shop())
    assert env.get_state() is None
    assert (env.state_level, env.state_problem) == ("none", "self.db is a sqlite3.Connection")
    assert Shop.state_level == "state"
    await env.aclose()


async def test_what_init_set_is_state_only_once_it_is_bound_anew() -> None:
    class Counting(Flaky):
        def __init__(self) -> None:
            self.index, self.turns = {"big": 1}, 0

        @tool
        async def count(self) -> None:
            """Count."""
            self.turns += 1

    env = Counting()
    await env.areset(seed=0, options={"task": {"rows": []}})
    assert "turns" not in env.get_state()["attributes"]
    await env.astep(assistant("", [call("count")]))
    attributes = env.get_state()["attributes"]
    assert attributes["turns"] == 1
    assert "index" not in attributes


async def test_state_on_a_used_instance_leaves_nothing_behind() -> None:
    env = await started(Flaky(), rows=[])
    state = env.get_state()
    env.left_over = 1  # type: ignore[attr-defined]
    env.set_state(state)
    assert not hasattr(env, "left_over")


async def test_a_random_generator_of_another_kind_comes_back() -> None:
    env = await started(Flaky(), rows=[])
    env.np_random = np.random.Generator(np.random.MT19937(3))
    state = json.loads(json.dumps(env.get_state()))
    expected = env.np_random.random()
    fresh = Flaky()
    fresh.set_state(state)
    assert fresh.np_random.random() == expected


@pytest.mark.parametrize("hook", ["setup", "prompt", "tools", "score", "close"])
@pytest.mark.parametrize("asynchronous", [False, True])
async def test_an_exception_in_a_hook_names_the_hook(hook: str, asynchronous: bool) -> None:
    def broken(self: Any, *args: Any) -> Any:
        raise ToolError("from the wrong place") if hook == "score" else KeyError("gold")

    async def abroken(self: Any, *args: Any) -> Any:
        broken(self)

    kind: Any = type("Broken", (Flaky,), {hook: abroken if asynchronous else broken})
    env = kind()

    async def episode() -> None:
        await env.areset(seed=0, options={"task": {"rows": []}})
        await env.astep(assistant(""))
        await env.aclose()

    with pytest.raises(EnvError, match=rf"Broken\.{hook}: (KeyError: 'gold'|ToolError: from)"):
        await episode()


async def test_close_runs_once_per_setup_also_after_a_failed_one_and_does_not_hide_it() -> None:
    closed: list[str] = []

    class Opening(Flaky):
        def setup(self, task: dict[str, Any]) -> None:
            if task.get("bad"):
                raise ValueError("no database")
            self.db = "db"

        def close(self) -> None:
            closed.append(self.db)

    class More(Opening):
        async def close(self) -> None:  # type: ignore[override]
            closed.append("more")
            super().close()

    env = Opening()
    env.close()
    assert closed == []
    with pytest.raises(EnvError, match="no database"):
        await env.areset(options={"task": {"bad": True, "rows": []}})
    await env.aclose()
    assert closed == []
    for kind, expected in ((Opening, ["db"]), (More, ["more", "db"])):
        closed.clear()
        env = await started(kind(), rows=[])
        await env.areset(options={"task": {"rows": []}})
        assert closed == expected
        await env.aclose()
        await env.aclose()
        assert closed == expected * 2
        sync = kind()
        sync.reset(seed=0, options={"task": {"rows": []}})
        sync.close()
        sync.close()
        assert closed == expected * 3


async def test_a_tainted_instance_is_closed_once_its_call_ends_and_nobody_waits() -> None:
    env = Timed()
    await started(env)
    await env.astep(assistant("", [call("hang")]))
    await asyncio.wait_for(env.aclose(), 5)
    assert not hasattr(env, "closed")
    env.go.set()
    for _ in range(500):
        if hasattr(env, "closed"):
            break
        await asyncio.sleep(0.01)
    assert env.closed


async def test_tools_may_depend_on_the_task_and_come_back_with_the_state() -> None:
    def twice(number: int) -> int:
        """Double it."""
        return 2 * number

    class Choosing(Shop):
        def setup(self, task: dict[str, Any]) -> None:
            self.given, self.order, self.few = None, [], task["few"]

        async def tools(self) -> Any:
            return [self.submit, twice] if self.few else [*super().tools(), twice]

        def close(self) -> None: ...

    env = await started(Choosing(), few=True)
    assert [schema["function"]["name"] for schema in env.tool_schemas] == ["submit", "twice"]
    assert says(await env.astep(assistant("", [call("twice", number=4)]))) == [("8", "ok")]
    assert says(await env.astep(assistant("", [call("note", text="x")])))[0][1] == "error"
    fresh = Choosing()
    fresh.set_state(env.get_state())
    assert fresh.tool_schemas == env.tool_schemas
    assert len((await started(Choosing(), few=False)).tool_schemas) == 5


class Container(ToolEnv):
    """State that lives outside: only a handle is kept."""

    state_level = "handle"
    alive: dict[str, list[str]] = {"c1": []}  # noqa: RUF012

    def setup(self, task: dict[str, Any]) -> None:
        self.container = self.alive["c1"]
        self.lock = threading.Lock()

    def prompt(self, task: dict[str, Any]) -> str:
        return "?"

    @tool
    def put(self, text: str) -> str:
        """Put."""
        self.container.append(text)
        return f"{call_id()} {self.np_random.integers(1000)}"

    def score(self, task: dict[str, Any], answer: str) -> float:
        return float(len(self.container) == task["size"])

    def get_state(self) -> Any:
        return b"c1"

    def set_state(self, state: Any) -> None:
        if state.decode() not in self.alive:
            raise StateLost(f"container {state!r} is gone")
        self.container = self.alive[state.decode()]


async def test_an_authors_own_state_comes_back_with_turn_task_and_generator() -> None:
    env = await started(Container(), size=2)
    await env.astep(assistant("", [call("put", text="a")]))
    state = json.loads(json.dumps(env.get_state()))
    fresh = Container()
    fresh.set_state(state)
    expected = says(await env.astep(assistant("", [call("put", text="b")])))
    Container.alive["c1"].pop()
    assert says(await fresh.astep(assistant("", [call("put", text="b")]))) == expected
    assert expected[0][0].startswith("/1/0 ")
    assert (await fresh.astep(assistant("")))[1] == 1.0
    Container.alive.clear()
    with pytest.raises(StateLost, match="container b'c1' is gone"):
        Container().set_state(state)


async def test_super_inside_an_authors_state_gives_and_takes_the_attributes() -> None:
    class Extended(Flaky):
        def get_state(self) -> Any:
            return {"more": len(self.rows), "base": super().get_state()}

        def set_state(self, state: Any) -> None:
            super().set_state(state["base"])
            self.more = state["more"]

    env = await started(Extended(), rows=[1, 2])
    state = env.get_state()
    fresh: Any = Extended()
    fresh.set_state(json.loads(json.dumps(state)))
    assert (fresh.more, fresh.rows, fresh.blob) == (2, [1, 2], b"\x00\xff")


async def test_a_rebuilt_instance_has_what_its_episodes_share() -> None:
    class Sharing(Flaky):
        @classmethod
        def open_shared(cls, **options: Any) -> Any:
            return "index"

        @tool
        def look(self) -> Any:
            """Look."""
            return self.shared

    env = await started(Sharing(), rows=[])
    fresh = Sharing()
    fresh.set_state(env.get_state())
    assert says(await fresh.astep(assistant("", [call("look")]))) == [("index", "ok")]


async def test_two_tools_of_one_name_are_refused() -> None:
    class Doubled(Flaky):
        def tools(self) -> Any:
            return [self.draw, self.draw]

    with pytest.raises(EnvError, match="two tools are named 'draw'"):
        await started(Doubled(), rows=[])


def test_a_tool_cannot_take_the_name_of_a_hook() -> None:
    with pytest.raises(TypeError, match=r"Wrong\.close: environments have a 'close' of their own"):

        class Wrong(ToolEnv):
            @tool
            def close(self) -> None:  # type: ignore[override]
                """Close the browser."""


def test_an_override_that_is_no_tool_takes_the_tool_away() -> None:
    class Silent(Shop):
        note = None  # type: ignore[assignment]

    assert "note" not in Silent._declared
    assert list(Shop._declared) == ["query", "submit", "note", "fail"]


@pytest.mark.parametrize("prompt", ["text", [user("a"), user("b")]])
async def test_a_prompt_is_text_or_messages(prompt: Any) -> None:
    kind: Any = type("Prompting", (Flaky,), {"prompt": lambda self, task: prompt})
    messages, _ = await kind().areset(seed=0, options={"task": {"rows": []}})
    assert messages == ([user("text")] if prompt == "text" else prompt)


@pytest.mark.parametrize("prompt", [None, 7, [], ["text"], [{"role": "robot", "content": ""}]])
async def test_any_other_prompt_is_refused(prompt: Any) -> None:
    kind: Any = type("Prompting", (Flaky,), {"prompt": lambda self, task: prompt})
    with pytest.raises(EnvError, match=r"Prompting\.prompt returned .*; return text or a list of messages"):
        await kind().areset(seed=0, options={"task": {"rows": []}})


@pytest.mark.parametrize(
    ("result", "content"),
    [("é", "é"), (None, ""), (3, "3"), ({"a": [1, "ü"]}, '{"a": [1, "ü"]}'), ({1}, "{1}"), ("a\ud800b", "a?b")],
)
async def test_results_are_told_as_text_that_can_be_encoded(result: Any, content: str) -> None:
    class Giving(Flaky):
        @tool
        def give(self) -> Any:
            """Give."""
            return result

    env = await started(Giving(), rows=[])
    message: Message = (await env.astep(assistant("", [call("give")])))[0][0]
    assert message["content"] == content


async def test_a_score_that_changes_its_task_can_still_be_repeated() -> None:
    class Popping(Flaky):
        def score(self, task: dict[str, Any], answer: str) -> float:
            return float(task["rows"].pop())

    env = await started(Popping(), rows=[1, 2])
    assert await env._score("") == await env._score("") == (2.0, {"score": 2.0})


async def test_metrics_are_shown_and_part_of_the_state() -> None:
    class Measured(Flaky):
        @tool
        def measure(self) -> None:
            """Measure."""
            self.metrics["measured"] = self.metrics.get("measured", 0) + 1

    env = await started(Measured(), rows=[])
    await env.astep(assistant("", [call("measure")]))
    fresh = Measured()
    fresh.set_state(env.get_state())
    await fresh.astep(assistant("", [call("measure")]))
    assert (await fresh.astep(assistant("")))[4]["metrics"] == {"measured": 2}


async def test_what_episodes_share_is_opened_once_for_all_and_told_to_each() -> None:
    opened: list[Any] = []

    class Sharing(Flaky):
        @classmethod
        async def open_shared(cls, **options: Any) -> Any:
            await asyncio.sleep(0.01)
            opened.append(options)
            return {"index": len(opened)}

    envs = [Sharing() for _ in range(5)]
    await asyncio.gather(*(started(env, rows=[]) for env in envs))
    assert [env.shared for env in envs] == [{"index": 1}] * 5
    assert opened == [{}]
    assert "shared" not in envs[0].get_state()["attributes"]


class Talk(ToolEnv):
    """Asks back once, and says so in its state."""

    def __init__(self, said: Any = "Sure?") -> None:
        super().__init__()
        self.said = said

    def setup(self, task: dict[str, Any]) -> None:
        self.asked = False

    def prompt(self, task: dict[str, Any]) -> str:
        return "?"

    @tool
    def look(self) -> str:
        """Look."""
        return "seen"

    def reply(self, task: dict[str, Any], answer: str) -> Any:
        if self.asked or answer == task["gold"]:
            return None
        self.asked = True
        return self.said

    def score(self, task: dict[str, Any], answer: str) -> float:
        return float(answer == task["gold"])


async def test_a_message_without_a_call_may_be_answered_and_the_episode_goes_on() -> None:
    for said in ("Sure?", [user("Sure?")]):
        env = await started(Talk(said), gold="2")
        assert await env.astep(assistant("1")) == ([user("Sure?")], 0.0, False, False, {})
        again = Talk(said)
        again.set_state(json.loads(json.dumps(env.get_state())))
        await again.astep(assistant("", [call("look")]))  # no answer, and nothing is said to it
        assert (await again.astep(assistant("2")))[:3] == ([], 1.0, True)
        await env.aclose()
        await again.aclose()
    env = await started(Talk(), gold="2")
    assert (await env.astep(assistant("2")))[1:3] == (1.0, True)
    await env.aclose()
    env = await started(Talk(7), gold="2")
    with pytest.raises(EnvError, match=r"Talk.reply returned 7; return text or a list of messages"):
        await env.astep(assistant("1"))
    await env.aclose()
