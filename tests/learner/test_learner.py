from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gspo_agent.errors import ConfigError
from gspo_agent.learner.batch import Batch, make_batch
from gspo_agent.learner.learner import Learner, micro_batches
from gspo_agent.learner_config import GRPO, LearnerConfig
from gspo_agent.trajectory import Group, Segment, Trajectory
from tests.learner.models import qwen3, sampled_groups, saved_qwen3


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_qwen3(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def groups() -> list[Group]:
    """Sampled by the very weights at `model_path`, at temperature 1."""
    return sampled_groups(qwen3())


@pytest.fixture
def fresh(groups: list[Group]) -> Batch:
    return batch_of(groups)


def batch_of(groups: list[Group], step: int = 1, max_weight_lag: int | None = 8) -> Batch:
    return make_batch(groups, step=step, max_weight_lag=max_weight_lag, advantage_std=True)


def learner(
    model_path: Path, *, temperature: float = 1.0, total_steps: int = 10, seed: int = 0, **config: Any
) -> Learner:
    settings = {"lr": 1e-3, "device": "cpu", "mini_batches": 1} | config
    return Learner(
        LearnerConfig.model_validate(settings), model_path, temperature=temperature, total_steps=total_steps, seed=seed
    )


def parameters(learner: Learner) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in learner.model.parameters()]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_on_policy_every_log_s_is_below_1e_5_over_three_tool_turns(model_path: Path, temperature: float) -> None:
    batch = batch_of(sampled_groups(qwen3(), temperature=temperature, turns=3))
    metrics = learner(model_path, temperature=temperature).step(batch)
    assert metrics["log_s_at_zero_updates/max"] < 1e-5
    assert metrics["out_of_band_at_zero_updates"] == 0
    assert metrics["clip_frac/0"] == 0


def test_with_an_adapter_the_ratio_is_one_and_the_model_itself_stays_as_it_is(model_path: Path, fresh: Batch) -> None:
    made = learner(model_path, lora={"rank": 4}, weight_decay=0.1, lr=1e-2)
    before = {name: tensor.clone() for name, tensor in made.model.state_dict().items()}
    metrics = made.step(fresh)
    assert metrics["log_s_at_zero_updates/max"] < 1e-5
    assert metrics["updates"] == 1
    after = made.model.state_dict()
    assert {name for name in after if not torch.equal(after[name], before[name])} == {
        name for name in after if "lora_B" in name or "lora_A" in name
    }
    assert made.step(fresh)["log_s_at_zero_updates/max"] > 1e-3  # it has learned by now


def test_another_temperature_than_the_engines_shows_at_once(model_path: Path) -> None:
    batch = batch_of(sampled_groups(qwen3(), temperature=0.7))
    metrics = learner(model_path, temperature=1.0).step(batch)
    assert metrics["log_s_at_zero_updates/max"] > 1e-2
    assert metrics["out_of_band_at_zero_updates"] > 0.5


def test_at_a_low_temperature_every_single_ratio_is_one_from_the_first_token_on(model_path: Path) -> None:
    """Not only their mean: an engine that applies the temperature late, or not to the first token, shows in one."""
    batch = batch_of(sampled_groups(qwen3(), temperature=0.6, turns=3))
    metrics = learner(model_path, temperature=0.6).step(batch)
    assert metrics["logprob_diff_at_zero_updates/max"] < 1e-4
    firsts = batch.loss_mask & ~torch.nn.functional.pad(batch.loss_mask[:, :-1], (1, 0))
    assert int(firsts.sum()) == 3 * len(batch)
    late = replace(batch, rollout_logprobs=torch.where(firsts, batch.rollout_logprobs * 0.6, batch.rollout_logprobs))
    metrics = learner(model_path, temperature=0.6).step(late)
    assert metrics["logprob_diff_at_zero_updates/max"] > 0.1


@pytest.mark.parametrize("noise", [0.0, 0.01, 0.04])
def test_the_distance_of_the_engines_logprobs_is_measured_at_zero_updates_on_fresh_tokens(
    model_path: Path, fresh: Batch, noise: float
) -> None:
    """Whatever the later mini-batches have moved, and however far old tokens are."""
    signs = 1 - 2.0 * (torch.arange(fresh.inputs.shape[1]) % 2)
    old = torch.zeros_like(fresh.loss_mask)
    old[:, ::3] = True
    engine = replace(
        fresh,
        rollout_logprobs=fresh.rollout_logprobs + torch.where(old, 3.0, noise * signs),
        weight_lags=torch.where(old & fresh.loss_mask, 4, fresh.weight_lags),
    )
    metrics = learner(model_path, mini_batches=4, lr=1e-2).step(engine)
    assert metrics["logprob_diff_at_zero_updates/mean"] == pytest.approx(noise, abs=1e-4)
    assert metrics["logprob_diff/mean"] > 0.5


@pytest.mark.parametrize("loss", ["gspo", "gspo_token"])
def test_an_episode_of_three_turns_has_one_ratio_as_one_row_or_as_a_row_for_every_turn(
    model_path: Path, loss: str
) -> None:
    """A row for every turn, each after the history that it had: one trajectory still, with one ratio over all its
    tokens and one place in the mean; three trajectories would be something else."""
    whole = batch_of(sampled_groups(qwen3(), groups=2, size=3, turns=3))
    apart = []
    for row in range(len(whole)):
        mask = whole.loss_mask[row]
        begins = (mask & ~torch.nn.functional.pad(mask[:-1], (1, 0))).cumsum(0)
        apart += [(row, mask & (begins == turn)) for turn in (1, 2, 3)]
    rows, masks = torch.tensor([row for row, _ in apart]), torch.stack([mask for _, mask in apart])
    ends = torch.tensor([int(mask.nonzero()[-1]) + 1 for mask in masks])
    split = replace(
        whole,
        inputs=whole.inputs[rows],
        targets=whole.targets[rows],
        loss_mask=masks,
        rollout_logprobs=whole.rollout_logprobs[rows] * masks,
        weight_lags=whole.weight_lags[rows] * masks,
        advantages=whole.advantages[rows],
        trajectory_ids=whole.trajectory_ids[rows],
        lengths=ends,
    )
    options: Any = {"loss": {"name": loss, "clip_low": 0.5, "clip_high": 0.5}}

    def moved() -> Learner:
        """Away from the weights that sampled, so that the ratios are not one."""
        made = learner(model_path, **options)
        with torch.no_grad():
            for parameter in made.model.parameters():
                parameter.mul_(1.02)
        return made

    expected = gradients(moved(), whole)
    for tokens in (1 << 20, 1):
        made = moved()
        made.config = made.config.model_copy(update={"micro_batch_tokens": tokens})
        found = gradients(made, split)
        assert found[0] == pytest.approx(expected[0], abs=1e-6)
        for gradient, first in zip(found[1], expected[1], strict=True):
            torch.testing.assert_close(gradient, first, rtol=1e-4, atol=1e-6)
    three = gradients(moved(), replace(split, trajectory_ids=torch.arange(len(split))))
    assert abs(three[0] - expected[0]) > 1e-4
    assert moved().step(split)["trajectories"] == moved().step(whole)["trajectories"] == 6


def gradients(learner: Learner, part: Batch) -> tuple[float, list[torch.Tensor]]:
    loss, _, _ = learner._accumulate(part)
    found = [parameter.grad.clone() for parameter in learner.model.parameters() if parameter.grad is not None]
    learner.optimizer.zero_grad()
    return loss, found


@pytest.mark.parametrize("loss", ["gspo", "gspo_token", "grpo"])
def test_any_micro_batching_gives_the_gradient_of_the_whole(model_path: Path, fresh: Batch, loss: str) -> None:
    results = []
    for tokens in (1 << 20, 200, 1):
        made = learner(model_path, loss={"name": loss, "clip_low": 0.5, "clip_high": 0.5}, micro_batch_tokens=tokens)
        results.append(gradients(made, fresh))
    assert len(micro_batches(fresh, 200)) > 3
    for total, found in results[1:]:
        assert total == pytest.approx(results[0][0], abs=1e-6)
        for gradient, whole in zip(found, results[0][1], strict=True):
            torch.testing.assert_close(gradient, whole, rtol=1e-4, atol=1e-6)


def test_metrics_do_not_depend_on_micro_batching(model_path: Path, fresh: Batch) -> None:
    found = []
    for tokens in (1 << 20, 200):
        metrics = learner(model_path, micro_batch_tokens=tokens).step(fresh)
        metrics.pop("learner_cpu_seconds")
        found.append(metrics)
    assert found[0] == pytest.approx(found[1], abs=1e-5)


def test_micro_batches_hold_every_trainable_row_once_within_the_limit(fresh: Batch) -> None:
    for limit in (1, 150, 1000):
        parts = micro_batches(fresh, limit)
        assert sorted(int(number) for part in parts for number in part.trajectory_ids) == list(range(16))
        assert all(part.inputs.numel() <= limit or len(part) == 1 for part in parts)


def test_rows_of_one_trajectory_stay_in_one_micro_batch_and_count_once(model_path: Path, fresh: Batch) -> None:
    paired = replace(fresh, trajectory_ids=torch.arange(16) // 2)
    for part in micro_batches(paired, 1):
        assert len(part) == 2
        assert part.num_trajectories == 1
    metrics = learner(model_path, micro_batch_tokens=1).step(paired)
    assert metrics["trajectories"] == 8


def test_what_a_tool_wrote_has_no_gradient_of_its_own(model_path: Path, fresh: Batch) -> None:
    """The last environment tokens of a row are read by no sampled token: they change nothing."""
    groups = sampled_groups(qwen3(), groups=1)
    before = gradients(learner(model_path), batch_of(groups))
    for trajectory in groups[0].trajectories:
        trajectory.append(Segment([7, 8, 9], turn=3))
    after = gradients(learner(model_path), batch_of(groups))
    assert after[0] == pytest.approx(before[0], abs=1e-7)
    for gradient, first in zip(after[1], before[1], strict=True):
        torch.testing.assert_close(gradient, first, rtol=1e-4, atol=1e-6)


def test_mini_batches_part_the_trajectories_by_seed_and_step(model_path: Path, groups: list[Group]) -> None:
    def orders(seed: int, step: int) -> list[list[int]]:
        parts = learner(model_path, seed=seed, mini_batches=4)._mini_batches(batch_of(groups, step))
        return [part.trajectory_ids.tolist() for part in parts]

    first = orders(0, 1)
    assert sorted(number for part in first for number in part) == list(range(16))
    assert [len(part) for part in first] == [4, 4, 4, 4]
    assert orders(0, 1) == first
    assert orders(0, 2) != first
    assert orders(1, 1) != first


def test_more_mini_batches_than_trajectories_are_no_problem(model_path: Path) -> None:
    metrics = learner(model_path, mini_batches=8).step(batch_of(sampled_groups(qwen3(), groups=1, size=3)))
    assert metrics["updates"] == 3


def test_empty_trajectories_count_in_the_mean(model_path: Path, groups: list[Group]) -> None:
    """1/G with G of all trajectories: an empty one beside the others halves nothing and is not forgotten."""
    before = gradients(learner(model_path), batch_of(groups))
    lost = Group(99, {}, [Trajectory(99, index, 0, seed=0) for index in range(16)])
    after = gradients(learner(model_path), batch_of([*groups, lost]))
    for gradient, first in zip(after[1], before[1], strict=True):
        torch.testing.assert_close(gradient, first / 2, rtol=1e-4, atol=1e-7)
    metrics = learner(model_path).step(batch_of([*groups, lost]))
    assert metrics["empty_trajectories"] == metrics["empty_rows"] == 16


@pytest.mark.parametrize("batch", [lambda groups: batch_of([]), lambda groups: batch_of(groups, 50, 1)])
def test_nothing_to_train_changes_no_weight_and_gives_finite_metrics(
    model_path: Path, groups: list[Group], batch: Any
) -> None:
    made = learner(model_path, mini_batches=4, weight_decay=0.1)
    made.step(batch_of(groups))  # the optimiser now has momentum
    before = parameters(made)
    metrics = made.step(batch(groups))
    assert metrics["updates"] == metrics["loss"] == 0
    assert all(torch.equal(now, then) for now, then in zip(parameters(made), before, strict=True))


def test_tokens_over_the_age_limit_are_not_trained_and_a_mixed_row_is(model_path: Path) -> None:
    groups = sampled_groups(qwen3(), groups=2)
    for group in groups:
        for trajectory in group.trajectories:
            last = trajectory.segments.pop()
            trajectory.append(Segment(last.token_ids, "policy", last.logprobs, 2_000_003, last.turn))
    batch = batch_of(groups, step=4, max_weight_lag=2)
    assert batch.metrics["stale_tokens"] > 0
    assert set(batch.weight_lags[batch.loss_mask].tolist()) == {1}
    metrics = learner(model_path).step(batch)
    assert metrics["tokens"] == batch.metrics["trained_tokens"]
    mixed = learner(model_path).step(batch_of(groups, step=4, max_weight_lag=8))
    assert mixed["weight_lag/max"] == 4
    assert mixed["tokens"] > metrics["tokens"]


def test_zero_update_metrics_are_of_fresh_tokens_only(model_path: Path, groups: list[Group]) -> None:
    stale = learner(model_path).step(batch_of(groups, step=3))
    assert "log_s_at_zero_updates/max" not in stale
    assert stale["log_s/max"] < 1e-5


def test_a_gradient_that_is_not_finite_skips_the_update_and_is_counted(model_path: Path, fresh: Batch) -> None:
    made = learner(model_path, mini_batches=2)
    made.step(fresh)
    before, moments = parameters(made), made.optimizer.state_dict()["state"][0]["exp_avg"].clone()
    fresh.advantages[0] = float("nan")
    metrics = made.step(fresh)
    assert metrics["skipped_updates"] == made.skipped_updates == 1
    assert metrics["updates"] == 1
    now = parameters(made)
    assert all(tensor.isfinite().all() for tensor in now)
    assert any(not torch.equal(tensor, then) for tensor, then in zip(now, before, strict=True))
    assert not torch.equal(moments, made.optimizer.state_dict()["state"][0]["exp_avg"])


def test_no_gradient_is_carried_into_the_next_update(model_path: Path, fresh: Batch) -> None:
    made = learner(model_path, lr=1e-12)
    first = made.step(fresh)["grad_norm"]
    assert made.step(fresh)["grad_norm"] == pytest.approx(first, rel=1e-3)


def test_later_mini_batches_move_off_policy_and_are_counted_by_index(model_path: Path, fresh: Batch) -> None:
    metrics = learner(model_path, mini_batches=4, lr=1e-2).step(fresh)
    assert metrics["clip_frac/0"] == 0
    assert {f"clip_frac/{index}" for index in range(4)} <= metrics.keys()
    assert max(metrics[f"clip_frac/{index}"] for index in range(1, 4)) > 0
    assert metrics["log_s/max"] > 1e-3


def test_training_raises_the_reward_of_what_the_policy_samples(model_path: Path) -> None:
    """Reward: the share of even tokens. Ten on-policy steps move it from a half."""
    made = learner(model_path, mini_batches=2, lr=2e-2, loss={"name": "gspo", "clip_low": 0.1, "clip_high": 0.1})
    rewards = []
    for step in range(1, 11):
        batch = batch_of(sampled_groups(made.model, groups=3, size=6, turns=1, seed=step, max_turn=6), step=1)
        rewards.append(batch.metrics["reward/mean"])
        assert made.step(batch)["log_s_at_zero_updates/max"] < 1e-5
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.2


def test_the_linear_schedule_ends_at_a_tenth_and_depends_on_the_step_alone(model_path: Path, fresh: Batch) -> None:
    made = learner(model_path, lr=1.0, lr_schedule="linear", total_steps=10)
    assert made._set_lr(1) == 1.0
    assert made._set_lr(10) == pytest.approx(0.1)
    assert made._set_lr(99) == pytest.approx(0.1)
    assert learner(model_path, lr=1.0)._set_lr(7) == 1.0
    assert learner(model_path, lr=0.25, lr_schedule="linear", total_steps=1).step(fresh)["lr"] == 0.25


def test_the_gradient_is_clipped_to_the_norm_and_reported_before_it(model_path: Path, fresh: Batch) -> None:
    made = learner(model_path, max_grad_norm=1e-3)
    seen: list[float] = []

    def at_update(*_: Any) -> None:
        norms = [parameter.grad.norm() for parameter in made.model.parameters() if parameter.grad is not None]
        seen.append(float(torch.stack(norms).norm()))

    made.optimizer.register_step_pre_hook(at_update)
    assert made.step(fresh)["grad_norm"] > 1e-2
    assert seen == pytest.approx([1e-3], rel=1e-3)


def test_weights_are_the_current_ones_under_the_given_version(model_path: Path, fresh: Batch) -> None:
    made = learner(model_path)
    weights = made.weights(1_000_001, Path("somewhere"))
    made.step(fresh)
    assert (weights.version, weights.path) == (1_000_001, Path("somewhere"))
    twin = qwen3(seed=5)
    twin.load_state_dict(dict(weights.tensors()))
    ids = fresh.inputs[:2, :4]
    torch.testing.assert_close(twin(input_ids=ids).logits, made.model(input_ids=ids).logits)


def test_bfloat16_compute_keeps_float32_weights_logprobs_and_small_updates(model_path: Path, fresh: Batch) -> None:
    made = learner(model_path, dtype="bfloat16", lr=1e-6)
    before = parameters(made)
    metrics = made.step(fresh)
    assert all(tensor.dtype == torch.float32 for tensor in before)
    assert any(not torch.equal(now, then) for now, then in zip(parameters(made), before, strict=True))
    # The engine sampled in float32: its distance from bfloat16 products is what this metric is there to show.
    assert 1e-5 < metrics["log_s_at_zero_updates/max"] < 0.2


def test_every_configured_loss_reaches_its_function_with_its_own_options(model_path: Path, fresh: Batch) -> None:
    made = learner(model_path, loss=GRPO(name="grpo", clip_low=0.1))
    assert made._loss_options == {"clip_low": 0.1, "clip_high": 0.27}
    assert made.step(fresh)["clip_frac/0"] == 0


def test_a_model_that_cannot_be_loaded_and_a_device_that_is_not_there_are_named(
    model_path: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="nothing' cannot be loaded as a causal language model"):
        learner(tmp_path / "nothing")
    with pytest.raises(ConfigError, match=r"learner\.device 'abacus'"):
        learner(model_path, device="abacus")
