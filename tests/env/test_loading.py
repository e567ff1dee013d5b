from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium
import pytest

from gspo_agent.config import EnvConfig
from gspo_agent.env import EnvFactory, TextEnv, ToolEnv, load_env, tool
from gspo_agent.errors import ConfigError, EnvError


class Stall(ToolEnv):
    def __init__(self, price: int = 1, *, fruit: str = "fig") -> None:
        super().__init__()
        if price < 0:
            raise ValueError("a price is positive")
        self.price, self.fruit = price, fruit

    def prompt(self, task: dict[str, Any]) -> str:
        return f"{self.fruit} {self.price}"

    @tool
    def look(self) -> str:
        """Look."""
        return self.fruit

    def score(self, task: dict[str, Any], answer: str) -> dict[str, float]:
        return {"right": 1.0, "style": 0.5}

    @classmethod
    def tasks(cls, split: str, *, fruit: str = "fig", **options: Any) -> list[dict[str, Any]]:
        return [{"fruit": fruit, "split": split, "others": sorted(options)}]

    @classmethod
    def demonstration(cls, rng: random.Random, progress: float, **options: Any) -> Any:
        return [{"role": "user", "content": str(options)}], [cls.look.schema]


def make_stall(price: int = 1) -> Stall:
    return Stall(price)


HERE = __name__


def test_a_class_a_function_and_an_entry_point_are_found_by_name() -> None:
    assert load_env(f"{HERE}:Stall") is Stall
    assert load_env(f"{HERE}:make_stall") is make_stall
    assert load_env("gspo_agent/Calculator-v0").__name__ == "Calculator"


@pytest.mark.parametrize(
    ("id", "said"),
    [
        ("gspo_agent/Calculater-v0", "did you mean 'gspo_agent/Calculator-v0'"),
        ("calculator", "did you mean 'gspo_agent/Calculator-v0'"),
        ("zzzzzz", "known here: gspo_agent/.*or write module:Class"),
        (f"{HERE}:Stal", "has no 'Stal'; did you mean 'Stall'"),
        (f"{HERE}:HERE", "which makes no environment"),
        ("no_such_module:Shop", "no module 'no_such_module' in .* or on sys.path; write module:Class"),
        ("gspo_agent.nowhere:Shop", "no module 'gspo_agent.nowhere'"),
        (f"{HERE}:random", "which makes no environment"),
    ],
)
def test_a_wrong_id_is_named_with_the_remedy(id: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_env(id)


def test_a_module_that_breaks_while_it_is_imported_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "breaks_on_import.py").write_text("import not_installed_anywhere")
    (tmp_path / "raises_on_import.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        ConfigError, match="importing breaks_on_import failed: No module named 'not_installed_anywhere'"
    ):
        load_env("breaks_on_import:Shop")
    with pytest.raises(ConfigError, match="importing raises_on_import failed: ZeroDivisionError"):
        load_env("raises_on_import:Shop")


_SCRIPT = """
import sys
sys.path[:] = [path for path in sys.path if path not in ("", {here!r})]
from gspo_agent.env import load_env
from gspo_agent.errors import ConfigError
try:
    print("loaded", load_env({id!r}))
except ConfigError as error:
    print("refused", error)
"""


def run_in(directory: Path, id: str, *, first: bool = False) -> str:
    script = _SCRIPT.format(here=str(directory), id=id)
    if first:
        script = f"import sys; sys.path.insert(0, {str(directory)!r})\n" + script.replace("sys.path[:]", "ignored")
    ran = subprocess.run([sys.executable, "-c", script], cwd=directory, capture_output=True, text=True, timeout=100)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_a_file_in_the_working_directory_needs_no_installation(tmp_path: Path) -> None:
    (tmp_path / "corner_shop.py").write_text("from gspo_agent.env import ToolEnv\nclass Corner(ToolEnv): ...\n")
    assert "loaded <class 'corner_shop.Corner'>" in run_in(tmp_path, "corner_shop:Corner")


@pytest.mark.parametrize("content", ["", "class Calculator: ..."])
def test_a_users_own_envs_folder_is_named_where_it_hides_ours(content: str, tmp_path: Path) -> None:
    (tmp_path / "envs").mkdir()
    (tmp_path / "envs" / "__init__.py").touch()
    if content:
        (tmp_path / "envs" / "calculator.py").write_text(content)
    said = run_in(tmp_path, "gspo_agent/Calculator-v0", first=True)
    assert "refused gspo_agent/Calculator-v0 is envs.calculator:Calculator" in said
    assert f"`import envs` finds {tmp_path / 'envs'}, which is not part of gspo_agent" in said
    assert "rename that folder" in said


async def test_a_factory_makes_fresh_instances_with_options_and_weights() -> None:
    factory = EnvFactory(EnvConfig(id=f"{HERE}:Stall", options={"price": 3, "fruit": "kiwi"}, rewards={"right": 2.0}))
    first, second = factory.create(), factory.create()
    assert first is not second
    assert factory.env_type is Stall
    assert (await first.areset(seed=0))[0][0]["content"] == "kiwi 3"
    assert (await first.astep({"role": "assistant", "content": "x"}))[1] == 2.0
    assert factory.tasks("test") == [{"fruit": "kiwi", "split": "test", "others": ["price"]}]
    messages, schemas = factory.demonstration(random.Random(0), 0.5)
    assert "kiwi" in messages[0]["content"]
    assert schemas == [Stall.look.schema]


def test_a_class_of_the_callers_takes_the_place_of_the_id() -> None:
    assert isinstance(EnvFactory(EnvConfig(id="anything"), Stall).create(), Stall)
    assert isinstance(EnvFactory(EnvConfig(id="x", options={"price": 2}), make_stall).create(), Stall)


@pytest.mark.parametrize(
    ("options", "said"),
    [({"pric": 3}, "unknown option 'pric'; did you mean 'price'"), ({"zzz": 1}, "known here: fruit, price")],
)
def test_a_wrong_option_is_named_before_anything_runs(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        EnvFactory(EnvConfig(id=f"{HERE}:Stall", options=options))


def test_what_the_constructor_raises_names_the_environment() -> None:
    factory = EnvFactory(EnvConfig(id=f"{HERE}:Stall", options={"price": -1}))
    with pytest.raises(EnvError, match="Stall: constructor: ValueError: a price is positive"):
        factory.create()


@pytest.mark.parametrize(
    ("weights", "said"), [({"rihgt": 1.0}, "did you mean 'right'"), ({"zzz": 1.0}, "it gave 'right', 'style'")]
)
async def test_a_weight_without_a_component_is_no_silent_zero(weights: dict[str, float], said: str) -> None:
    env = EnvFactory(EnvConfig(id=f"{HERE}:Stall", rewards=weights)).create()
    await env.areset(seed=0)
    with pytest.raises(EnvError, match=said):
        await env.astep({"role": "assistant", "content": ""})


def test_a_class_that_is_no_environment_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"random\.Random, which is no gymnasium\.Env"):
        EnvFactory(EnvConfig(id="random:Random"))


def test_an_environment_without_demonstrations_says_what_a_cold_start_needs() -> None:
    class Silent(ToolEnv): ...

    with pytest.raises(
        ConfigError, match=r"a cold start needs its classmethod demonstration.*set model to a directory or hub name"
    ):
        EnvFactory(EnvConfig(id="x"), Silent).demonstration(random.Random(0), 0.0)


def test_registered_ids_reach_the_class_with_their_arguments_and_without_the_wrappers_of_make() -> None:
    gymnasium.register("gspo_test/Stall-v3", entry_point=f"{HERE}:Stall", kwargs={"price": 9}, max_episode_steps=2)
    try:
        env = EnvFactory(EnvConfig(id="gspo_test/Stall-v3", options={"fruit": "plum"})).create()
        assert isinstance(env, Stall)
        assert (env.price, env.fruit) == (9, "plum")
        assert isinstance(EnvFactory(EnvConfig(id=f"{HERE}:gspo_test/Stall-v3")).create(), Stall)
    finally:
        del gymnasium.registry["gspo_test/Stall-v3"]


def test_importing_the_framework_registers_every_installed_id_and_imports_no_environment() -> None:
    script = (
        "import sys, gymnasium, gspo_agent.env; "
        "print(sorted(id for id in gymnasium.registry if id.startswith('gspo_agent/')), 'envs' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, timeout=100)
    names = ("Calculator", "CodeSandbox", "MathVerifier", "Workspace")
    ids = [f"gspo_agent/{name}-v0" for name in names]
    assert ran.stdout.strip() == f"{ids} False", ran.stderr


async def test_a_factory_opens_what_is_shared_once_with_its_own_options_and_closes_it() -> None:
    log: list[Any] = []

    class Sharing(Stall):
        @classmethod
        def open_shared(cls, *, fruit: str = "fig") -> Any:
            log.append(f"open {fruit}")
            return fruit

        @classmethod
        async def close_shared(cls, shared: Any) -> None:
            log.append(f"close {shared}")

    plum = EnvFactory(EnvConfig(id="x", options={"fruit": "plum", "price": 2}), Sharing)
    lime = EnvFactory(EnvConfig(id="x", options={"fruit": "lime"}), Sharing)
    await plum.open()
    for factory, fruit in ((plum, "plum"), (lime, "lime"), (plum, "plum")):
        env: Any = factory.create()
        await env.areset(seed=0)
        assert env.shared == fruit
    await plum.aclose()
    await plum.aclose()
    await lime.aclose()
    assert log == ["open plum", "open lime", "close plum", "close lime"]


async def test_a_failed_opening_is_told_and_tried_again() -> None:
    tries: list[int] = []

    class Opening(Stall):
        @classmethod
        def open_shared(cls, **options: Any) -> Any:
            tries.append(1)
            if len(tries) == 1:
                raise OSError("no index")
            return "index"

    factory = EnvFactory(EnvConfig(id="x"), Opening)
    with pytest.raises(EnvError, match=r"Opening\.open_shared: OSError: no index"):
        await factory.create().areset(seed=0)
    env: Any = factory.create()
    await env.areset(seed=0)
    assert env.shared == "index"


def test_a_plain_gymnasium_environment_comes_back_wrapped_with_seeds_for_tasks() -> None:
    factory = EnvFactory(EnvConfig(id="tests.env.test_wrapper:Parrot"))
    assert isinstance(factory.create(), TextEnv)
    train, test = factory.tasks("train"), factory.tasks("test")
    assert isinstance(train, list) is False
    assert not {task["seed"] for task in train[:1000]} & {task["seed"] for task in test[:1000]}  # type: ignore[index]
    with pytest.raises(ConfigError, match="`rewards` needs named components"):
        EnvFactory(EnvConfig(id="tests.env.test_wrapper:Parrot", rewards={"right": 1.0}))
