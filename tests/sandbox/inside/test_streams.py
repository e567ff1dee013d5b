from __future__ import annotations

import contextlib
import os

from gspo_agent.sandbox.inside.streams import Streams

LIMIT = 1 << 20


def test_what_is_written_while_an_output_is_passed_on_belongs_to_the_next_one() -> None:
    with contextlib.closing(Streams(shared=True)) as streams:
        for first, late, second in ((b"a", b"b", b"c"), (b"", b"b", b""), (b"a" * 50_000, b"b" * 50_000, b"c")):
            os.write(streams.stdout, first)
            assert streams.take(LIMIT) == first
            os.write(streams.stdout, late)
            streams.rewind(LIMIT)
            assert os.fstat(streams.stdout).st_size == 0
            os.write(streams.stdout, second)
            assert streams.take(LIMIT) == late + second
            streams.rewind(LIMIT)


def test_output_that_its_program_cuts_off_is_no_trouble() -> None:
    with contextlib.closing(Streams(shared=True)) as streams:
        os.write(streams.stdout, b"x" * 50_000)
        streams.take(LIMIT)
        os.ftruncate(streams.stdout, 7)
        streams.rewind(LIMIT)
        assert streams.take(LIMIT) == b""
