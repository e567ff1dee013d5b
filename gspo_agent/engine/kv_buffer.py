"""The keys and values of the running batch, as a transformers cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

_STEPS_BETWEEN_SHIFTS = 64


class KVBuffer(Cache):
    """One row per request, every row ending at the same column `end`: what left padding looks like to a model.

    A model is shown a window, rows [first, last) and the columns [end - width, end), of which it writes the last few.
    Decoding shows it all running rows and one new column; a prefill shows it a few new rows and as many columns as
    are not known yet. A finished row costs one copy, a decoding step copies nothing. The window behaves as any cache
    of that length would, so the model makes its own masks from a [rows, width] padding mask.
    """

    def __init__(self, num_layers: int) -> None:
        self.rows = self.columns = self.end = 0
        self.window = (0, 0, 0)
        self.new_columns = 0
        self._own = [KVLayer(self) for _ in range(num_layers)]
        super().__init__(layers=list(self._own))

    def show(self, first: int, last: int, width: int, new_columns: int) -> None:
        """Chooses the window of the next forward pass, which computes its last `new_columns`."""
        self.window, self.new_columns = (first, last, width), new_columns

    def reserve(self, rows: int, width: int, *, live_rows: int, live_width: int) -> None:
        """Makes room for `rows` rows, windows of `width` columns and one more step.

        The first `live_rows` rows keep their last `live_width` columns.
        """
        if rows <= self.rows and width <= self.end < self.columns:
            return
        width = max(width, live_width)
        rows = max(self.rows, 1 << (rows - 1).bit_length())
        columns = max(self.columns, -(-(width + _STEPS_BETWEEN_SHIFTS) // 64) * 64)
        for layer in self._own:
            layer.relocate(rows, columns, width, live_rows, live_width)
        self.rows, self.columns, self.end = rows, columns, width

    def read(self, row: int, length: int) -> list[Tensor]:
        """Copies of a row's last `length` columns: per layer keys, then values, [heads, length, dim]."""
        start = self.end - length
        return [tensor[row, :, start : self.end].clone() for tensor in self._tensors()]

    def write(self, row: int, length: int, tensors: Sequence[Tensor], count: int) -> None:
        """Fills the first `count` of a row's last `length` columns from the beginning of what `read` returned."""
        start = self.end - length
        for own, tensor in zip(self._tensors(), tensors, strict=True):
            own[row, :, start : start + count] = tensor[:, :count]

    def move(self, sources: list[int], targets: list[int], width: int) -> None:
        """Overwrites the last `width` columns of the target rows with those of the source rows."""
        start = self.end - width
        for tensor in self._tensors():
            tensor[targets, :, start : self.end] = tensor[sources, :, start : self.end]

    def clear(self) -> None:
        """Forgets everything, memory included."""
        self.rows = self.columns = self.end = 0
        for layer in self._own:
            layer.reset()

    def _tensors(self) -> list[Tensor]:
        # Layers that share another layer's keys never write their own.
        return [tensor for layer in self._own for tensor in layer.tensors]


class KVLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer of a KVBuffer, made at its first write."""

    def __init__(self, buffer: KVBuffer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.buffer = buffer
        self.tensors: list[Tensor] = []
        """Keys and values, [rows, heads, columns, dim] each."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        # Zeros, since what is masked is still multiplied, by zero, and must be finite.
        self.tensors = [
            states.new_zeros(self.buffer.rows, states.shape[1], self.buffer.columns, states.shape[3])
            for states in (key_states, value_states)
        ]
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        (first, last, width), end = self.buffer.window, self.buffer.end
        new = key_states.shape[2]
        keys, values = (tensor[first:last, :, end - width : end] for tensor in self.tensors)
        keys[:, :, -new:] = key_states
        values[:, :, -new:] = value_states
        return keys, values

    def relocate(self, rows: int, columns: int, end: int, live_rows: int, live_width: int) -> None:
        """Moves the last columns of the live rows to where they end at column `end`, in a larger tensor if needed."""
        old_end = self.buffer.end
        for position, old in enumerate(self.tensors):
            live = old[:live_rows, :, old_end - live_width : old_end]
            if (rows, columns) == (old.shape[0], old.shape[2]):
                new, live = old, live.clone()
            else:
                new = old.new_zeros(rows, old.shape[1], columns, old.shape[3])
            new[:live_rows, :, end - live_width : end] = live
            self.tensors[position] = new

    def reset(self) -> None:
        self.tensors = []
        self.is_initialized = False

    def get_seq_length(self) -> int:
        """Columns of the window that were known before the forward pass."""
        return self.buffer.window[2] - self.buffer.new_columns

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.buffer.window[2], 0

    def get_max_length(self) -> int:
        return -1
