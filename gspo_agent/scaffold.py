"""What `gspo-agent init-env NAME` writes: one environment and its test, which passes at once."""

from __future__ import annotations

import keyword
import re
import sys
from importlib.util import find_spec
from pathlib import Path

from gspo_agent.errors import ConfigError

_ENV = '''"""{title}: the user asks for a word backwards; the model may use a tool, and answers with the word."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from gspo_agent.env import ToolEnv, tool
from gspo_agent.errors import ToolError
from gspo_agent.messages import Message, assistant, call, tool_result, user

WORDS = ["apple", "bridge", "cloud", "dragon", "engine", "forest", "garden", "harbor", "island", "jungle"]


class {title}(ToolEnv):
    """Change the methods below. Each may be `async def`; attributes set in them survive a restart."""

    def prompt(self, task: dict[str, Any]) -> str:
        """What the model reads first."""
        self.calls = 0
        return _question(task["word"])

    @tool(timeout=5)
    def reverse(self, text: str) -> str:
        """Write a text backwards.

        Args:
            text: The text.
        """
        self.calls += 1
        if not text:
            raise ToolError("there is nothing to reverse")  # the model reads this and may try again
        return text[::-1]

    def score(self, task: dict[str, Any], answer: str) -> dict[str, float]:
        """Named parts of the reward; `rewards = {{ right = 1.0 }}` in the configuration weighs them."""
        return {{"right": float(answer.strip() == task["word"][::-1])}}

    @classmethod
    def tasks(cls, split: str, **options: Any) -> Sequence[dict[str, Any]]:
        """Tasks of "train" and "test", no word in both. A JSONL file in the configuration takes their place."""
        words = random.Random(0).sample(WORDS, len(WORDS))
        return [{{"word": word}} for word in (words[:7] if split == "train" else words[7:])]

    @classmethod
    def demonstration(
        cls, rng: random.Random, progress: float, **options: Any
    ) -> tuple[list[Message], list[dict[str, Any]]]:
        """What `model = "tiny"` is taught before it is trained; a model that can chat needs none.

        Half of these use the tool and half guess wrong. Which of the two pays is left to find out.
        """
        word = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(4, 7)))
        messages = [user(_question(word))]
        if rng.random() < 0.5:
            messages += [assistant("", [call("reverse", text=word)]), tool_result(word[::-1], name="reverse")]
            messages += [assistant(word[::-1])]
        else:
            messages += [assistant(word)]
        return messages, [cls.reverse.schema]


def _question(word: str) -> str:
    return f"Write {{word!r}} backwards. Answer with the word alone."
'''

_TEST = '''"""The test of {module}: run it with `pytest {test}`."""

from __future__ import annotations

from {module} import {title}

from gspo_agent.env import check_env
from gspo_agent.messages import assistant, call


def test_no_promise_of_the_contract_is_broken() -> None:
    assert check_env({title}) == []


def test_an_episode_with_the_tool_is_rewarded() -> None:
    env = {title}()
    env.reset(seed=0, options={{"task": {{"word": "apple"}}}})
    observation, reward, terminated, _, _ = env.step(assistant("", [call("reverse", text="apple")]))
    assert (observation[0]["content"], reward, terminated) == ("elppa", 0.0, False)
    _, reward, terminated, _, _ = env.step(assistant("elppa"))
    assert (reward, terminated) == (1.0, True)
    env.close()


def test_a_wrong_answer_is_not_rewarded() -> None:
    env = {title}()
    env.reset(seed=0, options={{"task": {{"word": "apple"}}}})
    assert env.step(assistant("apple"))[1] == 0.0
    env.close()
'''


def scaffold(name: str, directory: Path) -> list[Path]:
    """Writes `directory/NAME.py` and `directory/test_NAME.py`; returns both paths.

    "Web shop", "web-shop" and "WebShop" all make web_shop.py with the class WebShop. Raises ConfigError for a name that
    cannot be a module or hides one, and where a file exists already; then nothing is written.
    """
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+|[0-9]+", name)
    module, title = "_".join(words).lower(), "".join(word[:1].upper() + word[1:] for word in words)
    if not module.isidentifier() or keyword.iskeyword(module) or re.search(r"[^\w\s-]", name):
        raise ConfigError(f"{name!r} cannot be the name of a module; write letters, digits and '_', a letter first")
    if module in sys.stdlib_module_names or _elsewhere(module, directory):
        raise ConfigError(f"{module!r} is the name of an installed module, which the new file would hide; take another")
    texts = {f"{module}.py": _ENV, f"test_{module}.py": _TEST}
    paths = {directory / file: text for file, text in texts.items()}
    for path in paths:
        if path.exists():
            raise ConfigError(f"{path} exists; take another name or directory")
    directory.mkdir(parents=True, exist_ok=True)
    for path, text in paths.items():
        path.write_text(text.format(title=title, module=module, test=f"test_{module}.py"))
    return list(paths)


def _elsewhere(module: str, directory: Path) -> bool:
    spec = find_spec(module)
    return spec is not None and (spec.origin is None or Path(spec.origin).parent.resolve() != directory.resolve())
