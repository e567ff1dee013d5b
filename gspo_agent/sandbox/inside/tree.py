"""A tree of files as plain data: what a workspace is, before and after the programs that may do anything to it.

Only regular files and links that stay inside are kept, and of a mode only whether it is executable; directories are
where files are. Whatever else a program leaves (devices, fifos, sockets, names that are no text) is named and left out.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import posixpath
import stat
from collections.abc import Iterator, Mapping

from .frames import LENGTH

File = tuple[str, bytes]
"""("file" | "exec" | "link", content or target)."""
Tree = dict[str, File]
"""By path, relative, with "/" between its parts."""
Changes = dict[str, File | None]
"""None: there is no such file any more."""

_MAX_PATH, _MAX_DEPTH = 1024, 64
_PAGE = 4096
_MODES = {"file": 0o644, "exec": 0o755}
_LEFT_OUT = {
    stat.S_IFIFO: "a fifo",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
_HIDDEN = frozenset({".git", "__pycache__", ".pytest_cache"})
"""A repository's history may hold the solution; the others are made again by whoever wants them."""


def path_problem(path: str) -> str | None:
    """Why this cannot be the path of a file in a tree."""
    parts = path.split("/")
    if not path or path.startswith("/"):
        return "is not a relative path"
    if any(part in ("", ".", "..") for part in parts):
        return "has an empty part, '.' or '..'"
    if not path.isprintable() or len(path.encode("utf-8", "replace")) > _MAX_PATH or len(parts) > _MAX_DEPTH:
        return "is not printable, or too long"
    if not _HIDDEN.isdisjoint(parts):
        return f"lies in {', '.join(sorted(_HIDDEN.intersection(parts)))}"
    return None


def link_problem(path: str, target: str) -> str | None:
    """Why a link at `path` is not kept; it may lead only to what is in the tree."""
    if target.startswith("/"):
        return "a link to an absolute path"
    end = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
    return "a link to outside" if end.split("/")[0] == ".." else None


def pack(tree: Mapping[str, File | None]) -> bytes:
    """[u32 length of the index][index][contents]."""
    index = [[path, file[0], len(file[1])] if file else [path, None, 0] for path, file in tree.items()]
    head = json.dumps(index).encode()
    return b"".join([LENGTH.pack(len(head)), head, *(file[1] for file in tree.values() if file)])


def unpack(packed: bytes) -> Changes:
    """ValueError for what no `pack` would have written."""
    (length,) = LENGTH.unpack_from(packed)
    position = LENGTH.size + length
    tree: Changes = {}
    for path, kind, size in json.loads(packed[LENGTH.size : position]):
        if path_problem(path) or kind not in ("file", "exec", "link", None) or position + size > len(packed):
            raise ValueError(f"{path!r} {kind!r} is no file of a tree")
        tree[path] = (kind, packed[position : position + size]) if kind else None
        position += size
    return tree


def changes(old: Tree, new: Tree) -> Changes:
    """What makes `new` of `old`."""
    found: Changes = {path: file for path, file in new.items() if old.get(path) != file}
    return found | {path: None for path in old if path not in new}


def changed(tree: Tree, by: Changes) -> Tree:
    """A new tree."""
    return {path: file for path, file in {**tree, **by}.items() if file is not None}


def pages(tree: Tree) -> int:
    """Bytes that it takes on a disk in memory."""
    return sum(_rounded(len(content)) for _, content in tree.values())


def places(tree: Tree) -> int:
    """Files and the directories they are in, which a disk in memory counts alike."""
    return len({place for path in tree for place in _places(path)})


def _places(path: str) -> Iterator[str]:
    """The path and the directories above it."""
    while path:
        yield path
        path = path.rpartition("/")[0]


def _rounded(size: int) -> int:
    return -(-size // _PAGE) * _PAGE


def write(tree: Mapping[str, File | None], directory: str) -> None:
    """Into an empty directory. Links come last, so that no file is written through one."""
    for path, file in sorted(tree.items(), key=lambda entry: entry[1] is not None and entry[1][0] == "link"):
        if file is None:
            continue
        place = f"{directory}/{path}"
        os.makedirs(os.path.dirname(place), exist_ok=True)
        kind, content = file
        if kind == "link":
            os.symlink(content, place)
            continue
        fd = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, _MODES[kind])
        try:
            view = memoryview(content)
            while view:
                view = view[os.write(fd, view) :]
        finally:
            os.close(fd)


def read(directory: str, max_bytes: int, max_files: int) -> tuple[Tree, list[str]]:
    """Every file below, and what was left out with the reason; nothing is followed, waited for, or read past a limit.

    Nothing may be running in it. OSError when `directory` itself cannot be opened.
    """
    tree: Tree = {}
    left_out: list[str] = []
    held = 0
    taken: set[str] = set()  # as many as there would be, were each name of a file one of its own
    top = _directory(directory)
    try:
        for folder, name, path in _entries(top, "", left_out):
            more = {*_places(path)} - taken
            full = f"more than {max_files} files" if len(taken) + len(more) > max_files else None
            file = path_problem(path) or full or _file(folder, name, path, max_bytes - held)
            if isinstance(file, tuple):
                tree[path] = file
                taken |= more
                held += _rounded(len(file[1]))
            elif name not in _HIDDEN:
                left_out.append(f"{path!r:.200}: {file}")
    finally:
        os.close(top)
    return tree, left_out


def _entries(folder: int, above: str, left_out: list[str]) -> Iterator[tuple[int, str, str]]:
    """(an open directory, a name in it, the path from the top) of all but directories, in a fixed order."""
    with os.scandir(folder) as found:
        entries = sorted(found, key=lambda entry: entry.name)
    for entry in entries:
        path = above + entry.name
        if not entry.is_dir(follow_symlinks=False):
            yield folder, entry.name, path
        elif entry.name not in _HIDDEN:
            try:
                if path.count("/") >= _MAX_DEPTH:
                    raise OSError(errno.ENAMETOOLONG, "too deep")
                inner = _directory(entry.name, folder)
            except OSError as error:
                left_out.append(f"{path!r:.200}: {os.strerror(error.errno or 0)}")
                continue
            try:
                yield from _entries(inner, f"{path}/", left_out)
            finally:
                os.close(inner)


def _directory(name: str, parent: int | None = None) -> int:
    return os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)


def _file(folder: int, name: str, path: str, room: int) -> File | str:
    """Its content, or why it is left out."""
    try:
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
        kind = stat.S_IFMT(status.st_mode)
        if kind == stat.S_IFLNK:
            target = os.readlink(name, dir_fd=folder)
            return link_problem(path, target) or ("link", target.encode())
        if kind != stat.S_IFREG:
            return _LEFT_OUT.get(kind, "no file")
        if _rounded(status.st_size) > room:
            return f"{status.st_size} bytes are too many"
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, dir_fd=folder)
        with open(fd, "rb") as opened:
            content = opened.read(room) if stat.S_ISREG(os.fstat(fd).st_mode) else b""
    except UnicodeEncodeError:
        return "a link to a name that is no text"
    except OSError as error:
        return os.strerror(error.errno or 0)
    return ("exec" if status.st_mode & stat.S_IXUSR else "file", content)


def commit(directory: str) -> str:
    """The commit that a repository's working directory is at; without one, "" ."""
    try:
        with open(f"{directory}/.git/HEAD") as file:
            head = file.read().strip()
        if not head.startswith("ref: "):
            return head
        name = head.removeprefix("ref: ")
        with contextlib.suppress(OSError), open(f"{directory}/.git/{name}") as file:
            return file.read().strip()
        with open(f"{directory}/.git/packed-refs") as file:
            return next((line.split()[0] for line in file if line.rstrip().endswith(f" {name}")), "")
    except (OSError, ValueError):
        return ""
