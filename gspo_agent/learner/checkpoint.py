"""Checkpoints: a transformers directory that any tool can load, or an adapter's as PEFT has it, which names the model
that it is of; and the optimiser's state beside it.

A directory named `step-N` is whole: it is written under another name, synced to the disk and renamed. Its digest goes
into the journal with the step, and is compared before a byte of it is trusted.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from gspo_agent.engine.adapter import CONFIG_FILE as ADAPTER_CONFIG
from gspo_agent.engine.adapter import is_adapter, load_adapter, save_adapter
from gspo_agent.engine.model import load_model
from gspo_agent.errors import CheckpointLost, ConfigError, JournalError, boundary

if TYPE_CHECKING:
    from gspo_agent.learner.learner import Learner

_STATE = "learner.pt"
_TEMPORARY = ".unfinished-"
_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack"}


@dataclass(frozen=True, slots=True)
class Saved:
    name: str
    """"step-12" """
    path: Path
    digest: str


def save(learner: Learner, root: Path, step: int) -> Saved:
    """Writes `root/step-N`, durable when it returns; one that exists (a step that is done again) is replaced.

    Raises JournalError where it cannot be written; the step is not committed then, and is done again.
    """
    name = f"step-{step}"
    final, temporary = root / name, root / f"{_TEMPORARY}{name}"
    # On a full disk torch and safetensors raise errors of their own.
    remedy = "; see free space and permissions, and run the same command again"
    with boundary(JournalError, f"checkpoint {final} cannot be written{remedy}"):
        digest = _write(learner, root, step, temporary)
        _discard(final)
        temporary.rename(final)
        _sync(root)
    return Saved(name, final, digest)


def export(learner: Learner, root: Path, step: int) -> Path:
    """Writes `root/step-N` without what only the learner needs, for engines to load; whole where it exists, and no more
    durable than the operating system makes it, since a step that was committed can be exported again.

    Raises JournalError where it cannot be written.
    """
    final, temporary = root / f"step-{step}", root / f"{_TEMPORARY}step-{step}"
    remedy = "; see free space and permissions, and run the same command again"
    with boundary(JournalError, f"weights {final} cannot be written{remedy}"):
        root.mkdir(exist_ok=True)
        _discard(temporary)
        _write_model(learner, temporary)
        if learner.config.lora is None:
            _copy_tokenizer(learner.model_path, temporary)
        _discard(final)
        temporary.rename(final)
    return final


def _write(learner: Learner, root: Path, step: int, temporary: Path) -> str:
    root.mkdir(exist_ok=True)  # but not the run's directory, where that has been moved away
    _discard(temporary)
    _write_model(learner, temporary)
    learner.model.config.save_pretrained(temporary)
    _copy_tokenizer(learner.model_path, temporary)
    state = {"step": step, "optimizer": learner.optimizer.state_dict(), "skipped_updates": learner.skipped_updates}
    torch.save(state, temporary / _STATE)
    digest = directory_digest(temporary)
    for path in _files(temporary):
        _sync(path)
    _sync(temporary)
    return digest


def _write_model(learner: Learner, directory: Path) -> None:
    """What is trained: the model, or its adapter."""
    lora, base = learner.config.lora, learner.model_path
    if lora is None:
        learner.model.save_pretrained(directory)
    else:
        directory.mkdir()
        save_adapter(learner.model, lora, str(base.resolve() if base.is_dir() else base), directory)


def restore(learner: Learner, path: Path, digest: str | None = None) -> int:
    """Puts a checkpoint's weights and optimiser state into `learner`; returns its step.

    Raises CheckpointLost if the directory is missing, damaged, or not the one that `digest` names, and leaves `learner`
    as it was; JournalError if it is whole and cannot be read all the same.
    """
    if not path.is_dir():
        raise CheckpointLost(f"checkpoint {path} does not exist, but the journal names it; restore it from a copy")
    with boundary(JournalError, f"checkpoint {path} cannot be read"):
        if digest is not None and (found := directory_digest(path)) != digest:
            raise CheckpointLost(
                f"checkpoint {path} is not what was saved: its files hash to {found[:12]}, the journal says "
                f"{digest[:12]}; restore it from a copy"
            )
        state = torch.load(path / _STATE, map_location="cpu", weights_only=True)
        if learner.config.lora is None:
            model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
            learner.model.load_state_dict(model.state_dict())
        else:
            load_adapter(learner.model, path)
        learner.optimizer.load_state_dict(state["optimizer"])
        learner.skipped_updates = state["skipped_updates"]
    return int(state["step"])


def merge(adapter: Path | None, out: Path) -> Path:
    """Writes a whole model: that of an adapter's checkpoint, with the adapter merged into it.

    Raises ConfigError for what is no adapter's, and JournalError where nothing can be written.
    """
    if adapter is None or not is_adapter(adapter):
        raise ConfigError(f"{adapter or 'the run'} has no adapter: it was not trained with learner.lora")
    if out.exists():
        raise ConfigError(f"{out} exists; give a directory that does not")
    model = load_model(adapter)
    with boundary(JournalError, f"model {out} cannot be written; see free space and permissions"):
        temporary = out.with_name(f"{_TEMPORARY}{out.name}")
        _discard(temporary)
        model.save_pretrained(temporary)
        _copy_tokenizer(adapter, temporary, leave=(ADAPTER_CONFIG,))
        temporary.rename(out)
    return out


def prune(root: Path, keep: int, keep_names: Collection[str] = ()) -> list[str]:
    """Deletes all but the newest `keep` checkpoints and those named, and what a kill left unfinished; returns the names
    of the deleted checkpoints. Raises JournalError where one cannot be deleted."""
    if not root.is_dir():
        return []
    names = {keep_names} if isinstance(keep_names, str) else set(keep_names)
    with boundary(
        JournalError, f"an old checkpoint in {root} cannot be deleted; see permissions, and whether it is gone"
    ):
        for leftover in root.glob(f"{_TEMPORARY}*"):
            shutil.rmtree(leftover)
        steps = saved_steps(root)
        old = [f"step-{step}" for step in steps[: max(0, len(steps) - keep)]]
        deleted = [name for name in old if name not in names]
        for name in deleted:
            _discard(root / name)
    return deleted


def saved_steps(root: Path) -> list[int]:
    """The steps of the checkpoints that are there, the oldest first."""
    if not root.is_dir():
        return []
    return sorted(int(match[1]) for path in root.iterdir() if (match := re.fullmatch(r"step-(\d+)", path.name)))


def directory_digest(path: Path) -> str:
    """sha256 over the names, sizes and contents of all files below `path`."""
    total = hashlib.sha256()
    for file in _files(path):
        total.update(f"{file.relative_to(path).as_posix()}\0{file.stat().st_size}\0".encode())
        with file.open("rb") as stream:
            total.update(hashlib.file_digest(stream, "sha256").digest())
    return total.hexdigest()


def _files(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.is_file())


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _discard(path: Path) -> None:
    """Deletes a directory so that a kill half-way leaves nothing that looks whole."""
    if not path.exists():
        return
    if not path.name.startswith(_TEMPORARY):
        aside = path.with_name(f"{_TEMPORARY}deleted-{path.name}")
        _discard(aside)
        path = path.rename(aside)
    shutil.rmtree(path)


def _copy_tokenizer(model_path: Path, target: Path, leave: Collection[str] = ()) -> None:
    """Tokenizer, chat template and whatever else the model's directory holds beside its weights."""
    if not model_path.is_dir():  # a hub name
        AutoTokenizer.from_pretrained(str(model_path)).save_pretrained(target)
        return
    for file in model_path.iterdir():
        beside_weights = file.suffix not in _WEIGHTS and not file.name.endswith(".index.json")
        if file.is_file() and beside_weights and file.name not in leave and not (target / file.name).exists():
            shutil.copyfile(file, target / file.name)
