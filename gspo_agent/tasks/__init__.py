"""Where tasks come from: JSONL files, the field's own formats, procedural generators, the environment itself."""

from gspo_agent.tasks.procedural import entry_of, score_answer
from gspo_agent.tasks.source import FORMATS, TaskSource

__all__ = ["FORMATS", "TaskSource", "entry_of", "score_answer"]
