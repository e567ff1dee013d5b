"""Unified diffs, as `git diff` writes them, applied to a tree of files."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from gspo_agent.sandbox.inside.tree import File, Tree, path_problem

_HUNK = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_NOTHING = b"/dev/null"


class PatchError(ValueError):
    """A diff cannot be read, or does not fit the files; the message says where."""


@dataclass(slots=True)
class _Hunk:
    start: int
    old: list[bytes] = field(default_factory=list)
    new: list[bytes] = field(default_factory=list)


@dataclass(slots=True)
class _FilePatch:
    old: str | None = None
    new: str | None = None
    mode: str = ""
    hunks: list[_Hunk] = field(default_factory=list)


def apply(tree: Tree, patch: str) -> Tree:
    """The files after `patch`. A hunk may have moved, but its lines have to be there. Raises PatchError."""
    made = dict(tree)
    for change in _parse(patch):
        name = change.new or change.old
        if change.old is not None and change.old not in made:
            raise PatchError(f"{change.old}: there is no such file")
        if change.old is None and name in made:
            raise PatchError(f"{name}: the file is there already")
        kind, content = made.pop(change.old) if change.old is not None else ("file", b"")
        if change.new is not None:
            if problem := path_problem(change.new):
                raise PatchError(f"{change.new!r} {problem}")
            made[change.new] = _patched(change, kind, content)
    return made


def _patched(change: _FilePatch, kind: str, content: bytes) -> File:
    lines, moved = _lines(content), 0
    for hunk in change.hunks:
        place = _place(lines, hunk, max(hunk.start - 1, 0) + moved)
        if place is None:
            raise PatchError(f"{change.new}: the lines from {hunk.start} on are not as the diff has them")
        lines[place : place + len(hunk.old)] = hunk.new
        moved = place + len(hunk.new) - len(hunk.old) - max(hunk.start - 1, 0)
    kind = {"100755": "exec", "100644": "file", "120000": "link"}.get(change.mode, kind)
    return kind, b"".join(lines)


def _lines(content: bytes) -> list[bytes]:
    return re.findall(rb"[^\n]*\n|[^\n]+", content)


def _place(lines: list[bytes], hunk: _Hunk, near: int) -> int | None:
    places = range(len(lines) - len(hunk.old) + 1)
    fitting = [place for place in places if lines[place : place + len(hunk.old)] == hunk.old] if hunk.old else [near]
    return min(fitting, key=lambda place: abs(place - near), default=None)


def _parse(patch: str) -> Iterator[_FilePatch]:
    lines = _lines(patch.encode("utf-8", "surrogateescape"))
    change: _FilePatch | None = None
    position = 0
    while position < len(lines):
        line = lines[position].rstrip(b"\r\n")
        position += 1
        if line.startswith(b"diff --git "):
            if change:
                yield change
            change = _of_header(line)
        elif line.startswith(b"--- ") and lines[position : position + 1] and lines[position].startswith(b"+++ "):
            if change is None or change.hunks:  # a diff without git's own lines
                if change:
                    yield change
                change = _FilePatch()
            change.old, change.new = _name(line[4:]), _name(lines[position].rstrip(b"\r\n")[4:])
            position += 1
        elif change is None:
            continue  # what is said above a diff
        elif line.startswith(b"new file mode "):
            change.old, change.mode = None, line[14:].decode()
        elif line.startswith(b"deleted file mode "):
            change.new = None
        elif line.startswith(b"new mode "):
            change.mode = line[9:].decode()
        elif line.startswith(b"rename from "):
            change.old = line[12:].decode()
        elif line.startswith(b"rename to "):
            change.new = line[10:].decode()
        elif line.startswith((b"Binary files ", b"GIT binary patch", b"copy from ")):
            raise PatchError(f"{change.new}: {line.decode(errors='replace')!r} is no change of text")
        elif found := _HUNK.match(line):
            sizes = [int(size) if size else 1 for size in (found[2], found[4])]
            hunk, position = _hunk(lines, position, int(found[1]), *sizes)
            change.hunks.append(hunk)
    if change is None:
        raise PatchError("there is no diff in it")
    yield change


def _of_header(line: bytes) -> _FilePatch:
    """Both names are the same, but for what the lines below say."""
    name = line[len(b"diff --git ") :]
    half = name[: len(name) // 2]
    path = half[2:].decode("utf-8", "replace") if half.startswith(b"a/") else None
    return _FilePatch(path, path)


def _hunk(lines: list[bytes], position: int, start: int, num_old: int, num_new: int) -> tuple[_Hunk, int]:
    hunk = _Hunk(start + 1 if num_old == 0 else start)
    last: list[list[bytes]] = []
    while True:
        line = lines[position] if position < len(lines) else b""
        mark, text = line[:1], line[1:]
        if len(hunk.old) >= num_old and len(hunk.new) >= num_new and mark != b"\\":
            return hunk, position
        if mark == b"\\":  # No newline at end of file
            for side in last:
                side[-1] = side[-1].removesuffix(b"\n")
        elif mark in (b" ", b"-", b"+", b"\n"):
            text = text if text.endswith(b"\n") else text + b"\n"
            last = [hunk.old] * (mark != b"+") + [hunk.new] * (mark != b"-")
            for side in last:
                side.append(text)
        else:
            raise PatchError(f"line {position + 1} of the diff is not a part of its hunk")
        position += 1


def _name(text: bytes) -> str | None:
    path = text.split(b"\t")[0]
    if path == _NOTHING:
        return None
    return path[2:].decode("utf-8", "replace") if path[:2] in (b"a/", b"b/") else path.decode("utf-8", "replace")
