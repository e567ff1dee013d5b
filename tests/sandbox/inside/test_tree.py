"""Trees of files: what comes back from a directory, and what is left out of it."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo_agent.sandbox.inside import tree

TREE: tree.Tree = {"a": ("file", b"1"), "d/b.sh": ("exec", b"2\n"), "d/e/link": ("link", b"../../a")}


def test_tree_comes_back_from_bytes_and_from_a_directory(tmp_path: Path) -> None:
    assert tree.unpack(tree.pack({**TREE, "gone": None})) == {**TREE, "gone": None}
    tree.write(TREE, str(tmp_path))
    assert tree.read(str(tmp_path), 1 << 20, 10) == (TREE, [])


def test_difference_makes_the_new_tree_of_the_old() -> None:
    new: tree.Tree = {"a": ("exec", b"1"), "d/e/link": TREE["d/e/link"], "c": ("file", b"")}
    assert tree.changes(TREE, new) == {"a": ("exec", b"1"), "c": ("file", b""), "d/b.sh": None}
    assert tree.changed(TREE, tree.changes(TREE, new)) == new


def test_whatever_lies_there_is_named_or_kept_and_nothing_is_followed(tmp_path: Path) -> None:
    top = tmp_path / "top"
    top.mkdir()
    (tmp_path / "secret").write_text("secret")
    os.symlink(tmp_path / "secret", top / "absolute")
    os.symlink("../secret", top / "outside")
    os.symlink(tmp_path, top / "folder")
    os.symlink(b"\xff", top / "no text")
    os.symlink("loop", top / "loop")
    os.mkfifo(top / "fifo")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(top / "socket"))
    with open(top / "sparse", "wb") as file:
        file.truncate(1 << 40)
    for name in (b"new\nline", b"\xff", b"..evil", b"plain"):
        with open(os.fsencode(top) + b"/" + name, "wb") as file:
            file.write(b"x")
    os.link(tmp_path / "secret", top / "hard")
    os.chmod(top / "plain", 0o6755)
    (top / ".git").mkdir()
    (top / ".git" / "x").write_text("x")
    found, left_out = tree.read(str(top), 1 << 20, 100)
    assert found == {
        "..evil": ("file", b"x"),
        "hard": ("file", b"secret"),
        "loop": ("link", b"loop"),
        "plain": ("exec", b"x"),
    }
    reasons = dict(line.split(": ", 1) for line in left_out)
    assert reasons == {
        "'absolute'": "a link to an absolute path",
        "'outside'": "a link to outside",
        "'folder'": "a link to an absolute path",
        "'no text'": "a link to a name that is no text",
        "'fifo'": "a fifo",
        "'socket'": "a socket",
        "'sparse'": f"{1 << 40} bytes are too many",
        r"'new\nline'": "is not printable, or too long",
        r"'\udcff'": "is not printable, or too long",
    }


def test_what_is_too_much_is_left_out(tmp_path: Path) -> None:
    for name in "abcd":
        (tmp_path / name).write_bytes(b"x" * 5000)
    found, left_out = tree.read(str(tmp_path), 3 * 8192, 100)
    assert (sorted(found), left_out) == (["a", "b", "c"], ["'d': 5000 bytes are too many"])
    found, left_out = tree.read(str(tmp_path), 1 << 20, 2)
    assert (sorted(found), left_out[0]) == (["a", "b"], "'c': more than 2 files")


def test_what_is_kept_has_room_again_however_many_names_a_file_has(tmp_path: Path) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/b/c").touch()
    for number in range(5):
        os.link(tmp_path / "a/b/c", tmp_path / f"a/b/{number}")
        (tmp_path / f"d{number}").mkdir()
        os.link(tmp_path / "a/b/c", tmp_path / f"d{number}/x")
    found, left_out = tree.read(str(tmp_path), 1 << 20, 9)
    assert sorted(found) == ["a/b/0", "a/b/1", "a/b/2", "a/b/3", "a/b/4", "a/b/c"]
    assert tree.places(found) == 8
    assert left_out[0] == "'d0/x': more than 9 files"


def test_deep_directories_end_somewhere(tmp_path: Path) -> None:
    here = os.getcwd()
    try:
        os.chdir(tmp_path)
        for _ in range(100):
            os.mkdir("deep")
            os.chdir("deep")
    finally:
        os.chdir(here)
    found, left_out = tree.read(str(tmp_path), 1 << 20, 100)
    assert not found
    assert left_out[0].endswith("File name too long")


@pytest.mark.parametrize(
    "path", ["", "/a", "a//b", "../a", "a/../b", ".", "a/", "a\nb", "x" * 2000, ".git/a", "a/" * 70 + "a"]
)
def test_paths_that_a_tree_cannot_have(path: str) -> None:
    assert tree.path_problem(path)
    with pytest.raises(ValueError, match="is no file of a tree"):
        tree.unpack(tree.pack({path: ("file", b"")}))


@given(
    st.dictionaries(
        st.sampled_from(["a", "b/c", "b/d", "e"]), st.tuples(st.sampled_from(["file", "exec"]), st.binary(max_size=9))
    )
)
def test_any_tree_comes_back(files: tree.Tree) -> None:
    assert tree.unpack(tree.pack(files)) == files
