"""Mathematical problems in the field's own formats: {"id"?, "problem", "gold", ...}."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from gspo_agent.tasks.rows import BadRow, json_field, text_field

_BOXES = ("\\boxed", "\\fbox")
_DAPO_ASKS = re.compile(
    r"\ASolve the following math problem step by step\. The last line of your response should be of the form Answer: "
    r"\$Answer.*?the answer to the problem\.\s*"
    r"|\s*Remember to put your answer on its own line after \"Answer:\"\.\s*\Z",
    re.DOTALL,
)


def gsm8k(row: Mapping[str, Any]) -> dict[str, Any]:
    """question, answer (a worked solution that ends in `#### 72`)."""
    answer = text_field(row, "answer")
    _, marker, gold = answer.rpartition("####")
    gold = gold.strip()
    if not marker or not gold:
        raise BadRow("answer", "has no '#### result' at its end")
    return _with_id(row, {"problem": text_field(row, "question").strip(), "gold": gold})


def math(row: Mapping[str, Any]) -> dict[str, Any]:
    """problem, solution (with its result in \\boxed{}) or answer, level, type (or subject)."""
    problem = text_field(row, "problem").strip()
    gold = text_field(row, "answer").strip() if row.get("answer") else last_box(text_field(row, "solution"))
    if gold is None or not gold.strip():
        raise BadRow("solution", "has no \\boxed{result}")
    task = {"problem": problem, "gold": gold.strip()}
    for name, field in (("level", "level"), ("subject", "type"), ("subject", "subject")):
        if row.get(field) is not None:
            task[name] = str(row[field])
    return _with_id(row, task)


def aime(row: Mapping[str, Any]) -> dict[str, Any]:
    """problem (or question), answer: an integer from 0 to 999; field names in any case."""
    fields = {key.lower(): value for key, value in row.items()}
    answer = fields.get("answer")
    if answer is None or isinstance(answer, bool):
        raise BadRow("answer", "is missing")
    number = str(int(answer) if isinstance(answer, float) and answer.is_integer() else answer).strip()
    if not (number.isascii() and number.isdigit() and int(number) <= 999):
        raise BadRow("answer", f"is {answer!r}, not an integer from 0 to 999")
    return _with_id(fields, {"problem": text_field(fields, "problem", "question").strip(), "gold": str(int(number))})


def dapo(row: Mapping[str, Any]) -> dict[str, Any]:
    """prompt (messages, or their text), reward_model.ground_truth or solution (the result alone).

    What the prompt asks for the form of the answer is left out: the environment says its own.
    """
    prompt = row.get("prompt")
    if isinstance(prompt, list):
        if len(prompt) != 1 or not isinstance(prompt[0], Mapping):
            raise BadRow("prompt", f"has {len(prompt)} messages, not one with the problem")
        prompt = text_field(prompt[0], "content")
    elif prompt is not None:
        prompt = text_field(row, "prompt")
    problem = text_field(row, "problem") if prompt is None else _DAPO_ASKS.sub("", prompt)
    judged = json_field("reward_model", row.get("reward_model") or {})
    answers = {**row, **judged} if isinstance(judged, Mapping) else row
    task = {"problem": problem.strip(), "gold": text_field(answers, "ground_truth", "solution", "answer").strip()}
    extra = row.get("extra_info")
    if isinstance(extra, Mapping) and extra.get("index") is not None:
        return {"id": str(extra["index"]), **task}
    return _with_id(row, task)


def last_box(text: str) -> str | None:
    """What stands in the last `\\boxed{...}` (or `\\boxed 7`), braces balanced; None without a whole one."""
    start, command = max((text.rfind(command), command) for command in _BOXES)
    if start < 0:
        return None
    rest = text[start + len(command) :].lstrip()
    if not rest.startswith("{"):
        return rest.split("$")[0].split()[0] if rest.split("$")[0].split() else None
    depth = 0
    for position, character in enumerate(rest):
        escaped = position > 0 and rest[position - 1] == "\\" and rest[position - 2 : position - 1] != "\\"
        if character in "{}" and not escaped:
            depth += 1 if character == "{" else -1
            if depth == 0:
                return rest[1:position]
    return None


def _with_id(row: Mapping[str, Any], task: dict[str, Any]) -> dict[str, Any]:
    for name in ("unique_id", "id", "task_id"):
        if row.get(name) is not None:
            return {"id": str(row[name]), **task}
    return task
