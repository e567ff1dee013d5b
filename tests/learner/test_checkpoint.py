from __future__ import annotations

import os
import resource
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from gspo_agent.errors import CheckpointLost, ConfigError, JournalError
from gspo_agent.learner import checkpoint
from gspo_agent.learner.batch import Batch, make_batch
from gspo_agent.learner.learner import Learner
from gspo_agent.learner_config import LearnerConfig, LoRAConfig
from tests.learner.models import qwen3, sampled_groups, saved_qwen3


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_qwen3(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def batches() -> list[Batch]:
    groups = sampled_groups(qwen3(), groups=2)
    return [make_batch(groups, step=step, max_weight_lag=None, advantage_std=True) for step in (1, 2, 3)]


def learner(model_path: Path, lora: LoRAConfig | None = None) -> Learner:
    config = LearnerConfig(lr=1e-2, lr_schedule="linear", mini_batches=2, device="cpu", lora=lora)
    return Learner(config, model_path, temperature=1.0, total_steps=3, seed=0)


def same(one: Learner, other: Learner) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True))


@pytest.mark.parametrize("lora", [None, LoRAConfig(rank=4)])
def test_a_restored_learner_goes_on_as_if_it_had_never_stopped(
    model_path: Path, batches: list[Batch], tmp_path: Path, lora: LoRAConfig | None
) -> None:
    uncut = learner(model_path, lora)
    uncut.step(batches[0])
    uncut.step(batches[1])
    saved = checkpoint.save(uncut, tmp_path, 2)
    resumed = learner(model_path, lora)
    assert not same(resumed, uncut)
    assert checkpoint.restore(resumed, saved.path, saved.digest) == 2
    assert same(resumed, uncut)
    assert uncut.step(batches[2])["loss"] == resumed.step(batches[2])["loss"]
    assert same(resumed, uncut)


def test_a_checkpoint_is_a_transformers_directory_with_the_models_own_tokenizer(
    model_path: Path, tmp_path: Path
) -> None:
    made = learner(model_path)
    saved = checkpoint.save(made, tmp_path, 7)
    assert (saved.name, saved.path) == ("step-7", tmp_path / "step-7")
    loaded = AutoModelForCausalLM.from_pretrained(saved.path)
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), made.model.parameters(), strict=True))
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (saved.path / name).read_text() == (model_path / name).read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["step-7"]


def test_a_checkpoint_of_an_adapter_holds_the_adapter_names_its_model_and_merges_into_a_whole_one(
    model_path: Path, batches: list[Batch], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(model_path, run / "model")
    made = learner(run / "model", LoRAConfig(rank=4))
    made.step(batches[0])
    (run / "checkpoints").mkdir()
    path = checkpoint.save(made, run / "checkpoints", 3).path
    names = {"adapter_config.json", "adapter_model.safetensors", "config.json", "learner.pt", "tokenizer.json"}
    assert {found.name for found in path.iterdir()} >= names
    assert not (path / "model.safetensors").exists()
    published = checkpoint.export(made, run / "weights", 3)
    assert {found.name for found in published.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}

    moved = (tmp_path / "run").rename(tmp_path / "moved")
    merged = checkpoint.merge(moved / "checkpoints" / "step-3", tmp_path / "out")
    ids = batches[0].inputs[:1]
    with torch.no_grad():
        whole = AutoModelForCausalLM.from_pretrained(merged)(input_ids=ids).logits
        assert torch.allclose(whole, made.model(input_ids=ids).logits, atol=1e-4)
        assert not torch.allclose(whole, qwen3()(input_ids=ids).logits, atol=1e-2)
    assert (merged / "tokenizer.json").exists()
    assert not (merged / "adapter_config.json").exists()
    with pytest.raises(ConfigError, match="out exists"):
        checkpoint.merge(moved / "checkpoints" / "step-3", merged)
    with pytest.raises(ConfigError, match="out has no adapter"):
        checkpoint.merge(merged, tmp_path / "again")


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def test_exported_weights_load_without_the_learner_and_replace_those_of_an_earlier_life(
    model_path: Path, batches: list[Batch], tmp_path: Path
) -> None:
    made = learner(model_path)
    root = tmp_path / "weights"
    for _ in range(2):
        made.step(batches[0])
        path = checkpoint.export(made, root, 4)
    assert [found.name for found in root.iterdir()] == ["step-4"]
    assert not list(path.glob("*.pt"))
    loaded = AutoModelForCausalLM.from_pretrained(path)
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), made.model.parameters(), strict=True))
    with pytest.raises(JournalError, match=r"weights .*step-5 cannot be written.*see free space and permissions"):
        checkpoint.export(made, tmp_path / "gone" / "weights", 5)


@pytest.mark.parametrize("name", ["model.safetensors", "learner.pt", "config.json", "tokenizer.json"])
@pytest.mark.parametrize("harm", [damage, lambda path: path.unlink(), lambda path: path.write_bytes(b"")])
def test_any_harm_to_any_file_is_refused_by_name_before_it_is_used(
    model_path: Path, tmp_path: Path, name: str, harm: object
) -> None:
    made = learner(model_path)
    saved = checkpoint.save(made, tmp_path, 1)
    harm(saved.path / name)  # type: ignore[operator]
    with pytest.raises(CheckpointLost, match="step-1 is not what was saved"):
        checkpoint.restore(made, saved.path, saved.digest)


def test_an_added_file_or_another_checkpoint_is_refused_too(model_path: Path, tmp_path: Path) -> None:
    made = learner(model_path)
    saved = checkpoint.save(made, tmp_path, 1)
    other = checkpoint.save(learner(model_path), tmp_path / "other", 2)
    (saved.path / "tokenizer.json").rename(saved.path / "tokenizer.jsom")
    assert checkpoint.directory_digest(saved.path) != saved.digest
    (saved.path / "tokenizer.jsom").rename(saved.path / "tokenizer.json")
    (saved.path / "extra").write_text("")
    with pytest.raises(CheckpointLost, match="is not what was saved"):
        checkpoint.restore(made, saved.path, saved.digest)
    with pytest.raises(CheckpointLost, match=f"says {saved.digest[:12]}"):
        checkpoint.restore(made, other.path, saved.digest)


def test_a_missing_checkpoint_and_one_that_cannot_be_read_are_named(model_path: Path, tmp_path: Path) -> None:
    made = learner(model_path)
    with pytest.raises(CheckpointLost, match="step-4 does not exist"):
        checkpoint.restore(made, tmp_path / "step-4", "00")
    saved = checkpoint.save(made, tmp_path, 5)
    (saved.path / "learner.pt").write_bytes(b"torn")
    with pytest.raises(JournalError, match="step-5 cannot be read"):
        checkpoint.restore(made, saved.path)
    whole = checkpoint.directory_digest(saved.path)
    with pytest.raises(JournalError, match="step-5 cannot be read") as unreadable:
        checkpoint.restore(made, saved.path, whole)
    assert type(unreadable.value) is JournalError


def test_saving_a_step_again_replaces_it_and_clears_what_a_kill_left(
    model_path: Path, batches: list[Batch], tmp_path: Path
) -> None:
    made = learner(model_path)
    first = checkpoint.save(made, tmp_path, 1)
    shutil.copytree(first.path, tmp_path / ".unfinished-step-1")
    (tmp_path / ".unfinished-step-1" / "half").write_text("torn")
    made.step(batches[0])
    again = checkpoint.save(made, tmp_path, 1)
    assert again.path == first.path
    assert again.digest != first.digest
    assert not (again.path / "half").exists()
    assert checkpoint.directory_digest(again.path) == again.digest
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]


def test_a_kill_at_any_point_of_saving_leaves_no_torn_step(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every file operation of `save` is made to fail once, in turn; what is called step-2 is always whole."""
    made = learner(model_path)
    checkpoint.save(made, tmp_path, 1)
    digest = checkpoint.save(made, tmp_path / "whole", 2).digest
    operations = ["os.fsync", "shutil.copyfile", "torch.save", "pathlib.Path.rename"]
    for operation in operations:
        with monkeypatch.context() as patch:

            def killed(*args: object, **kwargs: object) -> None:
                raise KeyboardInterrupt

            patch.setattr(operation, killed)
            with pytest.raises(KeyboardInterrupt):
                checkpoint.save(made, tmp_path, 2)
        assert not (tmp_path / "step-2").exists()
        checkpoint.prune(tmp_path, 2)
        assert {path.name for path in tmp_path.iterdir()} == {"step-1", "whole"}
    assert checkpoint.save(made, tmp_path, 2).digest == digest


def test_files_and_directory_are_on_the_disk_before_the_rename_and_the_name_after_it(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def recorded_fsync(handle: int) -> None:
        order.append(Path(os.readlink(f"/proc/self/fd/{handle}")).name)
        fsync(handle)

    def recorded_rename(path: Path, target: Path) -> Path:
        order.append("rename")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(Path, "rename", recorded_rename)
    saved = checkpoint.save(learner(model_path), tmp_path, 1)
    before, after = order[: order.index("rename")], order[order.index("rename") + 1 :]
    assert {path.name for path in saved.path.iterdir()} < set(before)
    assert before[-1] == ".unfinished-step-1"
    assert after == [tmp_path.name]


def test_pruning_keeps_the_newest_and_those_named_and_clears_what_a_kill_left(tmp_path: Path) -> None:
    for name in ("step-1", "step-2", "step-9", "step-10", ".unfinished-step-11", ".unfinished-deleted-step-0", "notes"):
        (tmp_path / name).mkdir()
    assert checkpoint.prune(tmp_path, 2, ["step-1"]) == ["step-2"]
    assert {path.name for path in tmp_path.iterdir()} == {"step-1", "step-9", "step-10", "notes"}
    assert checkpoint.prune(tmp_path, 1, "step-1") == ["step-9"]
    assert checkpoint.prune(tmp_path / "nowhere", 2) == []


def test_what_somebody_else_deletes_or_moves_is_named_and_no_directory_is_made_anew(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "step-1").mkdir()
    (tmp_path / "step-2").mkdir()
    monkeypatch.setattr(checkpoint.shutil, "rmtree", lambda path: (_ for _ in ()).throw(FileNotFoundError(path)))
    with pytest.raises(JournalError, match=r"an old checkpoint in .* cannot be deleted; see permissions"):
        checkpoint.prune(tmp_path, 1)
    with pytest.raises(JournalError, match=r"step-3 cannot be written"):
        checkpoint.save(learner(model_path), tmp_path / "moved away" / "checkpoints", 3)
    assert not (tmp_path / "moved away").exists()


@pytest.mark.parametrize("kibibytes", [0, 8, 64])
def test_a_disk_that_is_full_is_named_and_leaves_no_checkpoint(
    model_path: Path, tmp_path: Path, kibibytes: int
) -> None:
    made = learner(model_path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (kibibytes * 1024, before[1]))
    try:
        with pytest.raises(JournalError, match=r"step-1 cannot be written; see free space and permissions"):
            checkpoint.save(made, tmp_path, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not (tmp_path / "step-1").exists()
    assert checkpoint.save(made, tmp_path, 1).path.exists()
