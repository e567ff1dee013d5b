from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from examples.stock import Stock
from gspo_agent.config import EnvConfig
from gspo_agent.env import Env, EnvFactory, ToolEnv, check_env, tool
from gspo_agent.messages import Message, assistant, call, user
from tests.env.test_wrapper import Counter, Parrot

ROOT = Path(__file__).parent.parent.parent


def test_the_smallest_environment_has_at_most_20_lines_and_breaks_no_promise() -> None:
    assert len((ROOT / "examples" / "stock.py").read_text().splitlines()) <= 20
    assert check_env(Stock) == []


@pytest.mark.parametrize(
    "env",
    [
        "examples.stock:Stock",
        Stock,
        Stock(),
        EnvFactory(EnvConfig(id="examples.stock:Stock")),
        lambda: Stock(),
        Counter,
        Parrot,
    ],
)
def test_whatever_makes_a_sound_environment_can_be_given(env: Any) -> None:
    assert check_env(env) == []


class ManyBreaches(ToolEnv):
    metadata = {"modes": []}  # noqa: RUF012
    state_level = "sometimes"  # type: ignore[assignment]
    drawn = 0

    def sample_task(self) -> dict[str, Any]:
        return {}

    def prompt(self, task: dict[str, Any]) -> list[Message]:
        return [user(f"number {random.random()}")]

    @tool
    def bare(self, x): ...  # type: ignore[no-untyped-def]

    @tool(final=True, parallel=True)
    def silent(self) -> None: ...

    def tools(self) -> Any:
        return [self.silent]

    def score(self, task: dict[str, Any], answer: str) -> float:
        ManyBreaches.drawn += 1
        return float(ManyBreaches.drawn)

    def get_state(self) -> Any:
        return {"handle": {1, 2}}

    @classmethod
    def tasks(cls, split: str, **options: Any) -> Any:
        return [{"n": 1}, {"array": np.zeros(2)}, "a row"]

    @classmethod
    def demonstration(cls, rng: random.Random, progress: float, **options: Any) -> Any:
        return [user("x"), assistant("", [call("dig")]), user("y")], [cls.silent.schema]

    def close(self) -> None:
        raise OSError("cannot close")


def test_an_environment_with_many_breaches_has_each_of_them_named() -> None:
    breaches = check_env(ManyBreaches)
    expected = [
        'metadata: lacks "render_modes"',
        "state_level: 'sometimes' is none of",
        "state: get_state and set_state belong together",
        "tool bare: parameter 'x' needs a type annotation",
        "tool silent: has no docstring",
        "tool silent: is final and parallel",
        "tasks: row 1 of 'train' is not JSON",
        "tasks: row 2 of 'train' is a str, not a dict",
        "demonstration: does not end with an assistant message",
        "demonstration: calls 'dig', which its schemas do not have",
        "reset: two instances with the same seed begin differently",
        "step: the same action from the same start is answered differently",
        "score: two calls with the same task and answer differ",
        "close: ManyBreaches.close: OSError: cannot close",
    ]
    for line in expected:
        assert sum(breach.startswith(line) for breach in breaches) == 1, (line, breaches)
    assert len(breaches) == len(expected), breaches


class Plain(Env):
    """One promise of a plain Env is broken at a time, by a subclass."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        return [user("?")], {}

    def step(self, action: Message) -> Any:
        return [], 0.0, True, False, {}


def plain(**methods: Any) -> Any:
    return type("Broken", (Plain,), methods)


def shop(**methods: Any) -> Any:
    return type("Broken", (Stock,), methods)


def reset_returning(*result: Any) -> Any:
    def reset(self: Any, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        Plain.reset(self, seed=seed)
        return result

    return reset


def unseeded(self: Any, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
    return [user("?")], {}


def step_returning(*result: Any) -> Any:
    return lambda self, action: result


class InPlace(Stock):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    @tool
    def count(self) -> int:
        """Count."""
        self.seen.append(1)
        return len(self.seen)

    @tool
    def zero(self) -> int:
        """Count again; called last."""
        return len(self.seen)


class Moody(Stock):
    @tool
    def count(self) -> str:
        """Count."""
        return str(random.random())


class Leaky(Stock):
    def prompt(self, task: dict[str, Any]) -> str:
        self.key = "sk-1"
        return "?"

    @tool(secrets=("key", "nowhere"))
    def count(self) -> int:
        """Count."""
        return 1


class Fragile(Stock):
    @tool
    def count(self) -> int:
        """Count."""
        raise ConnectionResetError("peer")


class Forgetful(Stock):
    def set_state(self, state: Any) -> None:
        super().set_state({**state, "apples": 0})

    def get_state(self) -> Any:
        return super().get_state()


class Demonstrating(Stock):
    @classmethod
    def demonstration(cls, rng: random.Random, progress: float, **options: Any) -> Any:
        return [user("x"), assistant("", [call("count", what="pears")]), assistant("3")], [cls.count.schema]


def draws_itself(self: Any, task: Any) -> str:
    return str(random.random())


class Forum(Env):
    """Keeps its state itself; what is in it after a turn differs from one subclass to the other."""

    later: Any = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.kept: dict[str, Any] = {"posts": [{"mean": 0.5, "by": None}]}
        return [user("?")], {}

    def step(self, action: Message) -> Any:
        self.kept["posts"][0]["mean"] = self.later
        return [user("!")], 0.0, False, False, {}

    def get_state(self) -> Any:
        return self.kept

    def set_state(self, state: Any) -> None:
        self.kept = state


def forum(later: Any) -> Any:
    return type("Broken", (Forum,), {"later": later})


async def swallows(self: Any, action: Any) -> Any:
    return [user("hm")], 0.0, False, False, {}


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (type("Empty", (Env,), {}), "step: neither step nor astep is overridden"),
        (type("Empty", (Env,), {}), "reset: neither reset nor areset is overridden"),
        (type("Empty", (ToolEnv,), {}), r"prompt: is missing; write def prompt\(self, task\)"),
        (type("Empty", (ToolEnv,), {}), r"score: is missing; write def score\(self, task, answer\)"),
        (dict, "constructor: made a dict, which is no gymnasium.Env"),
        (lambda: 1 / 0, "constructor: raised ZeroDivisionError"),
        (plain(reset=unseeded), r"reset: does not seed np_random; call super\(\)\.reset\(seed=seed\)"),
        (plain(reset=reset_returning("hello", {})), "reset: the observation 'hello' is no list of messages"),
        (plain(reset=reset_returning([], {})), "reset: the observation is empty"),
        (plain(reset=reset_returning([user("x")], None)), "reset: info is None, not a dict"),
        (plain(reset=reset_returning([user("x")], {"a": np.zeros(1)})), "reset: info is not JSON"),
        (plain(reset=reset_returning([{**user("x"), "meta": object()}], {})), "reset: the observation is not JSON"),
        (plain(reset=reset_returning(1)), "reset: raised ValueError"),
        (plain(step=step_returning([], 0.0, True, {})), r"step: returned .*, not observation, reward, terminated"),
        (plain(step=step_returning("x", 0.0, True, False, {})), "step: the observation 'x' is no list of messages"),
        (plain(step=step_returning([], float("nan"), True, False, {})), "step: the reward is nan"),
        (plain(step=step_returning([], "1", True, False, {})), "step: the reward is '1', not a finite number"),
        (plain(step=step_returning([], 0.0, 1, False, {})), "step: terminated is 1, not a bool"),
        (plain(step=step_returning([], 0.0, False, True, {})), "step: truncates at the first step"),
        (plain(step=step_returning([], 0.0, False, False, {})), "step: the observation is empty, and the"),
        (plain(step=step_returning([], 0.0, True, False, {"components": {"a": "b"}})), r"step: info\['components'\]"),
        (plain(step=lambda self, action: {}["gold"]), r"step: Broken\.step: KeyError: 'gold'"),
        (plain(get_state=lambda self: {1: 2}, set_state=lambda self, state: None), "state: get_state is neither JSON"),
        (forum(float("nan")), r"state: get_state .*: state\['posts'\]\[0\]\['mean'\] is nan, which comes back as None"),
        (forum((1, 2)), r"state: get_state .*\['mean'\] is \(1, 2\), which comes back as \[1, 2\]"),
        (forum({3: 4}), r"state: get_state .*\['mean'\] has the key 3, a int and no text"),
        (forum(np.float64(1.5)), r"state: get_state .*\['mean'\] is np.float64\(1.5\), a float64: Type is not JSON"),
        (forum({1, 2}), r"state: get_state .*\['mean'\] is \{1, 2\}, a set"),
        (shop(prompt=lambda self, task: task["no"]), r"reset: Broken\.prompt: KeyError: 'no'"),
        (shop(sample_task=Env.sample_task), r"reset: has no task of its own .*; write sample_task"),
        (shop(prompt=draws_itself), "reset: two instances with the same seed begin differently"),
        (shop(score=lambda self, task, answer: random.random()), "score: two calls with the same task and answer"),
        (shop(score=lambda self, task, answer: float("inf")), r"step: .*score: component 'score' is inf"),
        (shop(score=lambda self, task, answer: "good"), r"step: .*'good', a str; return a number"),
        (shop(astep=swallows), "step: an unknown tool and an unreadable call are not both answered"),
        (shop(tasks=classmethod(lambda cls, split, **options: [])), "tasks: 'train' is empty"),
        (shop(tasks=classmethod(lambda cls, split, **options: 1 / 0)), "tasks: raised ZeroDivisionError"),
        (InPlace, r"state: an instance rebuilt from get_state answers zero with \['0'\] instead of \['1'\]"),
        (Moody, r"state: two instances at one state answer count differently; draw from self\.np_random"),
        (Leaky, "state: holds the secret 'key'; set it in __init__"),
        (Leaky, "tool count: secrets names 'nowhere', neither its argument nor an attribute"),
        (Fragile, r"tool count: .*Fragile\.count: ConnectionResetError: peer"),
        (Forgetful, r"state: set_state\(get_state\(\)\) on a fresh instance gives another state"),
        (Demonstrating, "demonstration: wrong arguments for count: unknown argument 'what'"),
        (shop(setup=lambda self, task: setattr(self, "db", object())), r"state: self\.db is a builtins\.object"),
        (shop(observation_space=property(lambda self: 3, lambda self, value: None)), "gymnasium: .*observation space"),
    ],
)  # fmt: skip
def test_each_breach_is_named_with_its_place_and_the_remedy(kind: Any, said: str) -> None:
    breaches = check_env(kind)
    assert any(re.search(f"^{said}", breach) for breach in breaches), breaches


def test_a_state_that_comes_back_as_it_was_is_sound_and_so_are_numbers_of_numpy_in_an_info() -> None:
    assert check_env(forum([0.5, None, 2**64 - 1, "\u00e9", {}])) == []
    means = {"metrics": {"mean": np.float64(1.5)}}
    assert check_env(plain(step=lambda self, action: ([], 0.0, True, False, json.loads(json.dumps(means))))) == []
    assert check_env(plain(step=lambda self, action: ([], 0.0, True, False, {"metrics": dict(means["metrics"])}))) == []


def test_a_shared_info_is_found_by_gymnasiums_own_checker() -> None:
    info: dict[str, Any] = {}
    kind = plain(step=lambda self, action: ([], 0.0, True, False, info), reset=reset_returning([user("x")], info))
    assert any("share an object" in breach for breach in check_env(kind))


class TextChat:
    """A chat of characters: `<role>content\\n`. Reads back what it wrote."""

    bridge = True
    rewrites = False

    def open(self, messages: list[Message], tools: list[dict[str, Any]]) -> list[int]:
        return [ord(c) for message in messages for c in f"<{message['role']}>{message['content']}\n"] + [1]

    def extend(self, token_ids: Any, turn_start: int, messages: list[Message], tools: list[dict[str, Any]]) -> Any:
        return [10] if self.bridge else None

    def parse(self, turn_ids: Any, tools: list[dict[str, Any]]) -> Message:
        text = "".join(map(chr, turn_ids))
        return json.loads(text)  # type: ignore[no-any-return]

    def conversation(self, messages: list[Message], tools: list[dict[str, Any]]) -> tuple[list[int], list[bool]]:
        prompt = self.open(messages[:-1], tools)
        if self.rewrites:
            prompt[0] += 1
        turn = [ord(c) for c in json.dumps(messages[-1])]
        return prompt + turn, [False] * len(prompt) + [True] * len(turn)


class NoBridge(TextChat):
    bridge = False


class Rewrites(TextChat):
    rewrites = True


class Mishears(TextChat):
    def parse(self, turn_ids: Any, tools: list[dict[str, Any]]) -> Message:
        return assistant("")


@pytest.mark.parametrize(
    ("chat", "said"),
    [
        (NoBridge(), "chat: nothing can follow a call of 'up': the template has no bridge"),
        (Rewrites(), "chat: the prompt changes once a call of 'up' follows it"),
        (Mishears(), "chat: a call of 'up' is read back as"),
    ],
)
def test_a_template_that_cannot_say_what_the_environment_needs_is_named(chat: Any, said: str) -> None:
    assert any(breach.startswith(said) for breach in check_env(Counter, chat))


def test_a_sound_template_has_no_breach() -> None:
    assert check_env(Counter, TextChat()) == []


def test_gymnasium_environments_that_are_no_text_are_named() -> None:
    assert any("is no text; wrap the environment" in breach for breach in check_env(gymnasium.make("CartPole-v1")))
