"""What a row of the journal cannot hold inline: environment states and per-token side data, as bytes with a name."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from gspo_agent.env.plain_json import changes
from gspo_agent.trajectory import Segment

INLINE_BYTES = 64 * 1024
"""A larger state, or any per-token side data, is kept as a content-addressed file."""

LoadBlob = Callable[[str], bytes]
NO_BLOBS: Mapping[str, bytes] = {}


@dataclass(frozen=True, slots=True)
class State:
    """An environment's state as bytes; those of a blob are read when they are asked for."""

    form: str
    """"json" or "bytes": what `get_state` returned."""
    inline: bytes | None
    blob: str | None = None
    load: LoadBlob | None = None

    @classmethod
    def of(cls, value: Any) -> State:
        """Raises TypeError where the value is neither bytes nor JSON, or has a number that JSON has not."""
        if isinstance(value, bytes | bytearray):
            return cls("bytes", bytes(value))
        data = orjson.dumps(value)
        if b"null" in data and orjson.loads(data) != value:  # in C, unlike the search for the place
            for part, line in changes(value, "state"):
                if isinstance(part, float):
                    raise TypeError(line)
        return cls("json", data)

    @property
    def data(self) -> bytes:
        if self.inline is not None:
            return self.inline
        if self.blob is None or self.load is None:
            raise ValueError("a state without bytes")
        return self.load(self.blob)

    @property
    def value(self) -> Any:
        """What `set_state` gets."""
        return self.data if self.form == "bytes" else orjson.loads(self.data)


class Same:
    """Says that the environment's state is still the one of the event before."""


SAME = Same()


def put_state(state: State | Same | None, data: dict[str, Any]) -> tuple[bytes | None, str | None, Mapping[str, bytes]]:
    """Notes the state in a row's `data`; returns (inline bytes, blob digest, blobs to write first)."""
    if state is None:
        return None, None, NO_BLOBS
    if isinstance(state, Same):
        data["state"] = "same"
        return None, None, NO_BLOBS
    data["state"] = state.form
    content = state.data
    if len(content) <= INLINE_BYTES:
        return content, None, NO_BLOBS
    digest = hashlib.sha256(content).hexdigest()
    return None, digest, {digest: content}


def get_state(form: str | None, inline: bytes | None, blob: str | None, load: LoadBlob) -> State | Same | None:
    """The inverse of `put_state`."""
    if form is None:
        return None
    if form == "same":
        return SAME
    return State(form, inline, blob, load)


def put_extras(segments: Sequence[Segment]) -> tuple[str | None, Mapping[str, bytes]]:
    """All side data of some segments as one blob: (digest, blobs to write first)."""
    if not any([segment.extras for segment in segments]):  # noqa: C419 (mostly one: a generator costs more)
        return None, NO_BLOBS
    buffer = io.BytesIO()
    arrays = {f"{n}/{name}": values for n, s in enumerate(segments) for name, values in s.extras.items()}
    np.savez(buffer, **arrays)  # type: ignore[arg-type]
    data = buffer.getvalue()
    digest = hashlib.sha256(data).hexdigest()
    return digest, {digest: data}


def get_extras(data: bytes, num_segments: int) -> list[dict[str, NDArray[Any]]]:
    extras: list[dict[str, NDArray[Any]]] = [{} for _ in range(num_segments)]
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        for key in arrays.files:
            number, _, name = key.partition("/")
            extras[int(number)][name] = arrays[key]
    return extras


def float32_bytes(values: NDArray[np.float32] | None) -> bytes:
    return b"" if values is None else values.tobytes()
