"""Diffs against trees, compared with what git makes of them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo_agent.sandbox.inside import tree
from rewards.patch import PatchError, apply

OLD = {
    "a.txt": ("file", b"".join(b"%d\n" % n for n in range(30))),
    "d/b.txt": ("exec", b"x\ny"),
    "gone": ("file", b"z\n"),
}


def git_diff(old: tree.Tree, new: tree.Tree, folder: Path) -> str:
    def git(*arguments: str) -> str:
        line = ["git", "--git-dir", str(folder / "git"), "--work-tree", ".", *arguments]
        return subprocess.run(line, cwd=folder / "files", capture_output=True, text=True, check=True).stdout

    for number, files in enumerate((old, new)):
        shutil.rmtree(folder / "files", ignore_errors=True)
        (folder / "files").mkdir()
        tree.write(files, str(folder / "files"))
        if number == 0:
            git("init", "-q")
        git("add", "--all")
        if number == 0:
            git("-c", "user.name=x", "-c", "user.email=x@x", "commit", "-q", "-m", "x")
    return git("diff", "--cached", "-M")


@pytest.mark.skipif(shutil.which("git") is None, reason="no git")
def test_what_git_says_is_what_is_done(tmp_path: Path) -> None:
    lines = OLD["a.txt"][1].replace(b"3\n", b"three\n", 1).replace(b"25\n", b"", 1) + b"end"
    new = {
        "a.txt": ("file", lines),
        "d/b.txt": ("file", b"x\nz\n"),
        "moved": ("file", b"z\n"),
        "n/new.py": ("exec", b"print()\n"),
        "link": ("link", b"a.txt"),
        "empty": ("file", b""),
    }
    assert apply(OLD, git_diff(OLD, new, tmp_path)) == new


_LINES = st.lists(st.sampled_from(["a\n", "b\n", "c\r\n", "\n", "d"]), max_size=12).map(lambda lines: "".join(lines))


@given(_LINES, _LINES)
@settings(max_examples=100)
def test_any_two_texts(before: str, after: str) -> None:
    import difflib

    def lines(text: str) -> list[str]:
        return [line + "\n" for line in text.split("\n")[:-1]] + (
            [text.split("\n")[-1]] if text.split("\n")[-1] else []
        )

    said = []
    for line in difflib.unified_diff(lines(before), lines(after), "a/f", "b/f"):
        said += [line] if line.endswith("\n") else [line + "\n", "\\ No newline at end of file\n"]
    tree_before = {"f": ("file", before.encode())}
    if said:
        assert apply(tree_before, "".join(said)) == {"f": ("file", after.encode())}


def test_hunk_that_has_moved_still_fits() -> None:
    patch = "--- a/a.txt\n+++ b/a.txt\n@@ -3,3 +3,3 @@\n 20\n-21\n+x\n 22\n"
    assert b"20\nx\n22\n" in apply(OLD, patch)["a.txt"][1]


@pytest.mark.parametrize(
    ("patch", "message"),
    [
        ("", "no diff"),
        ("--- a/a.txt\n+++ b/a.txt\n@@ -1,2 +1,2 @@\n 0\n-2\n+x\n", "a.txt: the lines from 1 on are not as"),
        ("--- a/a.txt\n+++ b/a.txt\n@@ -1,2 +1,2 @@\n 0\n", "is not a part of its hunk"),
        ("--- a/none\n+++ b/none\n@@ -1 +1 @@\n-a\n+b\n", "none: there is no such file"),
        ("--- /dev/null\n+++ b/gone\n@@ -0,0 +1 @@\n+b\n", "gone: the file is there already"),
        ("--- /dev/null\n+++ b/../up\n@@ -0,0 +1 @@\n+b\n", r"'\.\./up' has an empty part"),
        ("diff --git a/x b/x\nBinary files a/x and b/x differ\n", "is no change of text"),
    ],
)
def test_unusable_diffs_say_where(patch: str, message: str) -> None:
    with pytest.raises(PatchError, match=message):
        apply(OLD, patch)
