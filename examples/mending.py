"""Ten small repositories to mend, with demonstrations for `model = "tiny"`; see workspace_agent.toml."""

from pathlib import Path

from envs.code_sandbox import Workspace
from envs.code_sandbox.workspace import question
from gspo_agent.messages import assistant, call, tool_result, user
from gspo_agent.sandbox.inside import tree
from gspo_agent.tasks.rows import read_path
from rewards.patch import apply

FOLDER = Path(__file__).parent / "workspaces"
TASKS = [row for _, row in read_path(FOLDER / "tasks.jsonl")]


class Mending(Workspace):
    """The tasks of examples/workspaces. With so few, what is trained on is also what is measured."""

    def __init__(self):
        super().__init__(images=str(FOLDER))

    @classmethod
    def tasks(cls, split):
        return TASKS

    @classmethod
    def demonstration(cls, rng, progress):
        """The reference solution of one task, file by file."""
        task = rng.choice(TASKS)
        before, _ = tree.read(str(FOLDER / task["image"] / task["workdir"]), 1 << 20, 100)
        messages = [user(question(task, before))]
        for path, (_, content) in apply(before, task["patch"]).items():
            if before.get(path) != ("file", content):
                messages.append(assistant("", [call("write_file", path=path, content=content.decode())]))
                messages.append(tool_result("written", name="write_file"))
        declared = [cls.run, cls.read_file, cls.write_file, cls.edit_file, cls.bash, cls.submit]
        return [*messages, assistant("", [call("submit")])], [tool.schema for tool in declared]
