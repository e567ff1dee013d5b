"""What all episodes of an environment share, and what a run clears away before it begins."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Collection
from typing import Any

import pytest

from gspo_agent.config import EnvConfig
from gspo_agent.env import EnvFactory, ToolEnv
from gspo_agent.errors import EnvError


class Pool(ToolEnv):
    def __init__(self, size: int = 1) -> None:
        super().__init__()

    def prompt(self, task: dict[str, Any]) -> str:
        return "?"

    def score(self, task: dict[str, Any], answer: str) -> float:
        return 0.0

    @classmethod
    def open_shared(cls, **options: Any) -> Any:
        return "pool"


@pytest.mark.parametrize("asynchronous", [True, False])
async def test_nobody_waits_for_ever_for_what_is_shared_to_close(
    asynchronous: bool, caplog: pytest.LogCaptureFixture
) -> None:
    go = threading.Event()

    async def hang(cls: Any, shared: Any) -> None:
        await asyncio.sleep(3600)

    def stick(cls: Any, shared: Any) -> None:
        go.wait()

    kind: Any = type("Hanging", (Pool,), {"close_shared": classmethod(hang if asynchronous else stick)})
    factory = EnvFactory(EnvConfig(id="pool"), kind)
    await factory.open()
    await factory.aclose(seconds=0.01)
    go.set()
    assert "Hanging.close_shared took longer than 0.01 s; it is left to itself" in caplog.text
    await factory.aclose()


@pytest.mark.parametrize("asynchronous", [True, False])
async def test_leftovers_are_destroyed_with_the_options_that_the_hook_takes(asynchronous: bool) -> None:
    seen: list[Any] = []

    def note(cls: Any, run_id: str, living: Collection[str], *, size: int = 0) -> None:
        seen.append((run_id, living, size, threading.current_thread() is threading.main_thread()))

    async def anote(cls: Any, run_id: str, living: Collection[str], *, size: int = 0) -> None:
        note(cls, run_id, living, size=size)

    kind: Any = type("Tidy", (Pool,), {"destroy_leftovers": classmethod(anote if asynchronous else note)})
    await EnvFactory(EnvConfig(id="pool", options={"size": 3}), kind).destroy_leftovers("r", ["1.0.0"])
    assert seen == [("r", ["1.0.0"], 3, asynchronous)]
    await EnvFactory(EnvConfig(id="pool"), Pool).destroy_leftovers("r", [])


async def test_leftovers_that_cannot_be_destroyed_are_told() -> None:
    class Untidy(Pool):
        @classmethod
        def destroy_leftovers(cls, run_id: str, living: Collection[str], **options: Any) -> None:
            raise OSError("no daemon")

    with pytest.raises(EnvError, match="pool: destroy_leftovers: OSError: no daemon"):
        await EnvFactory(EnvConfig(id="pool"), Untidy).destroy_leftovers("r", [])


@pytest.mark.parametrize("asynchronous", [True, False])
async def test_a_run_does_not_wait_for_ever_for_leftovers(asynchronous: bool, caplog: pytest.LogCaptureFixture) -> None:
    go = threading.Event()

    async def hang(cls: Any, run_id: str, living: Collection[str]) -> None:
        await asyncio.sleep(3600)

    def stick(cls: Any, run_id: str, living: Collection[str]) -> None:
        go.wait()

    kind: Any = type("Hanging", (Pool,), {"destroy_leftovers": classmethod(hang if asynchronous else stick)})
    async with asyncio.timeout(20):
        await EnvFactory(EnvConfig(id="pool"), kind).destroy_leftovers("r", [], seconds=0.01)
    go.set()
    assert "pool: destroy_leftovers takes longer than 0.01 s; the run begins without it" in caplog.text


async def test_a_timeout_of_the_hook_itself_is_its_fault() -> None:
    class Late(Pool):
        @classmethod
        async def destroy_leftovers(cls, run_id: str, living: Collection[str], **options: Any) -> None:
            async with asyncio.timeout(0):
                await asyncio.sleep(3600)

    with pytest.raises(EnvError, match="pool: destroy_leftovers: TimeoutError"):
        await EnvFactory(EnvConfig(id="pool"), Late).destroy_leftovers("r", [])
