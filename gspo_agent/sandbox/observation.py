"""Program output as text that a model may read."""

from __future__ import annotations

import re

_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def readable(data: bytes, max_bytes: int = 8192) -> str:
    """Head and tail with the number of bytes left out between them; no terminal escapes or control characters."""
    if len(data) > max_bytes:
        half = max_bytes // 2
        left_out = len(data) - 2 * half
        return f"{_clean(data[:half])}\n... {left_out} bytes left out ...\n{_clean(data[-half:])}"
    return _clean(data)


def _clean(data: bytes) -> str:
    text = data.decode("utf-8", "replace").replace("\r\n", "\n")
    return _CONTROLS.sub("", _ESCAPES.sub("", text))
