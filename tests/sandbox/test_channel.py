from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from gspo_agent.sandbox.channel import Channel, JobLost
from gspo_agent.sandbox.inside import frames


async def test_frames_arrive_whole_however_they_are_cut() -> None:
    near, far = socket.socketpair()
    sent = [({"status": "ok"}, [b"", b"one"]), ({}, [b"x" * 1000]), ({}, [])]
    data = b"".join(frames.pack(header, *blobs) for header, blobs in sent)
    with far, Channel(near) as channel:
        receiving = asyncio.create_task(_receive(channel, len(sent)))
        for start in range(0, len(data), 7):
            far.sendall(data[start : start + 7])
            await asyncio.sleep(0)
        assert await receiving == sent


async def _receive(channel: Channel, count: int) -> list[tuple[dict[str, Any], list[bytes]]]:
    return [await channel.receive(5) for _ in range(count)]


async def test_job_that_says_nothing_in_time_is_lost() -> None:
    near, far = socket.socketpair()
    with far, Channel(near) as channel:
        far.sendall(frames.pack({"status": "ok"})[:-1])
        with pytest.raises(JobLost):
            await channel.receive(0.02)


async def test_deadline_is_the_last_frames_own_however_it_compares_with_those_before() -> None:
    near, far = socket.socketpair()
    with far, Channel(near) as channel:
        for timeout_s in (0.05, 60):
            far.sendall(frames.pack({}))
            assert await channel.receive(timeout_s) == ({}, [])
        late = asyncio.create_task(channel.receive(60))
        await asyncio.sleep(0.1)  # past the deadline of the first
        far.sendall(frames.pack({"status": "late"}))
        assert await late == ({"status": "late"}, [])
        async with asyncio.timeout(5):
            with pytest.raises(JobLost):
                await channel.receive(0.02)


async def test_what_a_job_said_before_it_was_lost_is_received() -> None:
    near, far = socket.socketpair()
    with Channel(near) as channel:
        with far:
            far.sendall(frames.pack({"status": "ok"}))
        assert await channel.receive(5) == ({"status": "ok"}, [])
        with pytest.raises(JobLost):
            await channel.receive(5)
