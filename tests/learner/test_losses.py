from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from gspo_agent.learner.losses import LOSSES, LossOutput, sequence_geo, token_tis
from gspo_agent.learner.tally import Tally
from tests.learner.oracles import CASES, LOSS_CASES, loss_call, tensor

CLIP_METRICS = {
    "clip_low_seq_frac": "clip_frac_low_seq",
    "clip_high_seq_frac": "clip_frac_high_seq",
    "clip_seq_frac": "clip_frac_seq",
    "clip_low_tok_frac": "clip_frac_low_tok",
    "clip_high_tok_frac": "clip_frac_high_tok",
    "clip_tok_frac": "clip_frac_tok",
}


def run(name: str, **changes: Any) -> tuple[LossOutput, Tensor]:
    """An oracle case by this code: (output, gradient)."""
    loss, tensors, options = loss_call(CASES[name])
    output = LOSSES[loss](**(tensors | changes), **options)
    (gradient,) = torch.autograd.grad(output.loss, changes.get("logprobs", tensors["logprobs"]))
    return output, gradient


def random_batch(rows: int = 6, length: int = 9, seed: int = 0) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    old = -torch.rand(rows, length, generator=draw, dtype=torch.float64) * 3
    noise = 4e-4 * torch.randn(rows, length, generator=draw, dtype=torch.float64)
    mask = torch.rand(rows, length, generator=draw) < 0.7
    mask[0] = False
    advantages = torch.randn(rows, generator=draw, dtype=torch.float64)
    return {
        "logprobs": (old + noise).requires_grad_(),
        "old_logprobs": old,
        "loss_mask": mask,
        "advantages": advantages,
    }


def gradient_of(name: str, batch: dict[str, Tensor], **options: Any) -> Tensor:
    return torch.autograd.grad(LOSSES[name](**batch, **options).loss, batch["logprobs"])[0]


@pytest.mark.parametrize("name", LOSS_CASES)
def test_every_oracle_case_holds_in_loss_gradient_and_clip_fractions(name: str) -> None:
    output, gradient = run(name)
    expected = CASES[name]["expected"]
    scale = max(1.0, abs(expected["loss"]))  # 1e-9 relative where exp(20) is expected
    assert abs(float(output.loss.detach()) - expected["loss"]) <= 1e-9 * scale
    torch.testing.assert_close(gradient, tensor(expected["grad_logp"]), rtol=0, atol=1e-9)
    for oracle, metric in CLIP_METRICS.items():
        if oracle in expected:
            assert output.metrics[metric] == pytest.approx(expected[oracle], abs=1e-9), oracle


@pytest.mark.parametrize(
    "name", [name for name in LOSS_CASES if len(CASES[name]["expected"].get("seq_ratio", [])) == 1]
)
def test_log_s_is_the_log_of_the_oracle_ratio(name: str) -> None:
    output, _ = run(name)
    expected = math.log(CASES[name]["expected"]["seq_ratio"][0])
    if "log_clamp" in CASES[name]["config"]:
        assert output.metrics["log_s/max"] == pytest.approx(800)  # the metric shows what the clamp hides
    else:
        assert output.metrics["log_s/mean"] == pytest.approx(expected, abs=1e-9)
        assert output.metrics["log_s/max"] == pytest.approx(abs(expected), abs=1e-9)


def test_scoring_every_token_under_one_version_is_not_what_the_loss_does() -> None:
    output, _ = run("mixed_versions")
    for wrong in CASES["mixed_versions"]["wrong"]["seq_ratio"].values():
        assert abs(output.metrics["log_s/mean"] - math.log(wrong[0])) > 1e-4


def test_bfloat16_logprobs_would_lose_the_ratio_and_float64_keeps_it() -> None:
    case = CASES["bf16_logprobs"]
    output, _ = run("bf16_logprobs")
    rounded, _ = run(
        "bf16_logprobs",
        logprobs=tensor(case["inputs"]["logp"]).bfloat16().requires_grad_(),
        old_logprobs=tensor(case["inputs"]["behav_logp"]).bfloat16(),
    )
    assert math.exp(rounded.metrics["log_s/mean"]) == case["wrong"]["seq_ratio"][0]
    assert output.metrics["log_s/mean"] > 9e-5


def test_float32_logprobs_of_a_long_row_keep_a_small_log_s() -> None:
    draw = torch.Generator().manual_seed(0)
    old = -torch.rand(1, 32768, generator=draw) * 4
    new = (old + 1e-5).requires_grad_()
    exact = (new.detach().double() - old.double()).mean()
    output = LOSSES["gspo"](new, old, torch.ones(1, 32768), torch.ones(1))
    assert output.loss.dtype == torch.float64
    assert output.metrics["log_s/mean"] == pytest.approx(float(exact), abs=1e-15)


def test_micro_batches_with_the_global_count_sum_to_the_whole_and_their_mean_does_not() -> None:
    case = CASES["microbatch_3_1"]
    _, whole, options = loss_call(case)
    parts, tally = [], None
    for rows, expected in zip((slice(0, 3), slice(3, 4)), case["expected"]["per_microbatch_loss"], strict=True):
        part = {name: value[rows] for name, value in whole.items()}
        output = LOSSES["gspo"](**part, **options, num_trajectories=4)
        assert float(output.loss.detach()) == pytest.approx(expected, abs=1e-9)
        parts.append(output.loss)
        tally = output.tally if tally is None else tally + output.tally
    total = torch.stack(parts).sum()
    assert float(total.detach()) == pytest.approx(case["expected"]["loss"], abs=1e-9)
    assert abs(float(total.detach()) - case["wrong"]["loss"]) > 0.3
    gradient = torch.autograd.grad(total, whole["logprobs"])[0]
    torch.testing.assert_close(gradient, tensor(case["expected"]["grad_logp"]), rtol=0, atol=1e-9)
    assert isinstance(tally, Tally)
    assert tally.metrics() == pytest.approx(LOSSES["gspo"](**whole, **options).metrics)


@pytest.mark.parametrize("aggregation", ["trajectory", "token"])
@pytest.mark.parametrize("name", LOSSES)
def test_any_split_into_micro_batches_equals_the_whole_batch(name: str, aggregation: str) -> None:
    batch = random_batch()
    counts = {"num_trajectories": 6, "num_tokens": int(batch["loss_mask"].sum()), "aggregation": aggregation}
    whole = LOSSES[name](**batch, aggregation=aggregation)
    for split in ([1, 5], [2, 2, 2], [1] * 6):
        outputs = [
            LOSSES[name](**dict(zip(batch, part, strict=True)), **counts)
            for part in zip(*(value.split(split) for value in batch.values()), strict=True)
        ]
        total = torch.stack([output.loss for output in outputs]).sum()
        torch.testing.assert_close(total, whole.loss, rtol=0, atol=1e-14)
        merged = outputs[0].tally
        for output in outputs[1:]:
            merged = merged + output.tally
        assert merged.metrics() == pytest.approx(whole.metrics, abs=1e-14)


@pytest.mark.parametrize("name", LOSSES)
def test_what_the_mask_excludes_changes_nothing_not_even_as_nan(name: str) -> None:
    batch = random_batch()
    before = LOSSES[name](**batch)
    gradient = gradient_of(name, batch)
    hole = ~batch["loss_mask"]
    spoiled = {
        "logprobs": batch["logprobs"].detach().masked_fill(hole, float("nan")).requires_grad_(),
        "old_logprobs": batch["old_logprobs"].masked_fill(hole, float("inf")),
        "loss_mask": batch["loss_mask"],
        "advantages": batch["advantages"][:, None].expand(hole.shape).masked_fill(hole, float("nan")),
    }
    after = LOSSES[name](**spoiled)
    assert float(after.loss.detach()) == float(before.loss.detach())
    torch.testing.assert_close(gradient_of(name, spoiled), gradient, rtol=0, atol=0)
    assert after.metrics == before.metrics


@pytest.mark.parametrize("name", LOSSES)
def test_padding_of_any_side_and_amount_changes_nothing(name: str) -> None:
    batch = random_batch()
    expected = LOSSES[name](**batch).loss
    for left, right in ((3, 0), (0, 4), (2, 5)):
        padded = {
            key: value if value.dim() == 1 else torch.nn.functional.pad(value, (left, right))
            for key, value in batch.items()
        }
        torch.testing.assert_close(LOSSES[name](**padded).loss, expected, rtol=0, atol=1e-15)


@pytest.mark.parametrize("name", LOSSES)
def test_rows_of_one_trajectory_are_pooled(name: str) -> None:
    """The ratio is exp of the pooled sum over the pooled count, and the trajectory counts once."""
    batch = random_batch(rows=3, length=8, seed=1)
    halves = {key: value if value.dim() == 1 else value.view(6, 4) for key, value in batch.items()}
    halves["advantages"] = batch["advantages"].repeat_interleave(2)
    ids = torch.tensor([7, 7, 2, 2, 9, 9])
    pooled = LOSSES[name](**halves, trajectory_ids=ids)
    whole = LOSSES[name](**batch)
    torch.testing.assert_close(pooled.loss, whole.loss, rtol=0, atol=1e-15)
    assert pooled.metrics == pytest.approx(whole.metrics, abs=1e-14)
    apart = LOSSES[name](**halves)
    assert abs(float((apart.loss - whole.loss).detach())) > 1e-6


@pytest.mark.parametrize("lengths", [(10, 1000), (1, 37), (3000, 2), (5, 5)])
@pytest.mark.parametrize("name", ["gspo", "gspo_token"])
def test_a_row_counts_once_whatever_its_length(name: str, lengths: tuple[int, int]) -> None:
    """Two rows of 10 and 1000 tokens with the same ratio weigh the same."""
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    old = torch.full(mask.shape, -1.0, dtype=torch.float64)
    new = (old + 1e-4).requires_grad_()
    output = LOSSES[name](new, old, mask, tensor([1.0, 1.0]))
    (gradient,) = torch.autograd.grad(output.loss, new)
    assert float(output.loss.detach()) == pytest.approx(-math.exp(1e-4), abs=1e-12)
    assert float(gradient[0].sum()) == pytest.approx(float(gradient[1].sum()), abs=1e-12)


def test_gspo_and_grpo_have_the_same_gradient_where_nothing_has_moved() -> None:
    batch = random_batch()
    batch["logprobs"] = batch["old_logprobs"].clone().requires_grad_()
    torch.testing.assert_close(gradient_of("gspo", batch), gradient_of("grpo", batch), rtol=0, atol=1e-15)


def test_a_descent_step_raises_tokens_of_good_trajectories_and_lowers_those_of_bad_ones() -> None:
    batch = random_batch()
    gradient = gradient_of("gspo", batch, clip_low=0.5, clip_high=0.5)
    sign = -batch["advantages"].sign()[:, None] * batch["loss_mask"]
    torch.testing.assert_close(gradient.sign(), sign.double(), rtol=0, atol=0)


def test_the_gradient_is_the_derivative_of_the_loss_inside_the_band() -> None:
    batch = random_batch()
    for name in ("gspo", "grpo", "sapo"):
        options = {} if name == "sapo" else {"clip_low": 0.5, "clip_high": 0.5}

        def loss(logprobs: Tensor, name: str = name, options: dict[str, float] = options) -> Tensor:
            return LOSSES[name](**(batch | {"logprobs": logprobs}), **options).loss

        assert torch.autograd.gradcheck(loss, batch["logprobs"])


def test_a_saturated_ratio_has_no_gradient_per_token_either() -> None:
    _, tensors, _ = loss_call(CASES["huge_log_ratio_neg_adv_clamped"])
    for name in ("gspo", "gspo_token", "grpo"):
        torch.testing.assert_close(gradient_of(name, tensors), torch.zeros(1, 2, dtype=torch.float64))


@pytest.mark.parametrize("name", LOSSES)
def test_an_all_masked_batch_has_loss_zero_with_its_graph_and_no_nan_in_the_metrics(name: str) -> None:
    batch = random_batch()
    batch["loss_mask"] = torch.zeros_like(batch["loss_mask"])
    output = LOSSES[name](**batch)
    assert float(output.loss.detach()) == 0.0
    assert not gradient_of(name, batch).any()
    assert all(math.isfinite(value) for value in output.metrics.values())
    assert output.metrics["empty_trajectories"] == 6


def test_a_token_without_a_logprob_is_neutral_and_counted() -> None:
    batch = random_batch()
    place = tuple(batch["loss_mask"].nonzero()[0])
    lost = batch | {"old_logprobs": batch["old_logprobs"].index_put(place, tensor(float("nan")))}
    without = batch | {"loss_mask": batch["loss_mask"].index_put(place, torch.tensor(False))}
    torch.testing.assert_close(gradient_of("gspo", lost), gradient_of("gspo", without), rtol=0, atol=0)
    assert LOSSES["gspo"](**lost).metrics["no_logprob_tokens"] == 1


def test_the_dual_clip_bounds_bad_trajectories_only() -> None:
    new = torch.zeros(2, 1, dtype=torch.float64, requires_grad=True)
    output = LOSSES["gspo"](
        new, new.detach() - math.log(5), torch.ones(2, 1), tensor([1.0, -1.0]), clip_high=9.0, dual_clip=3.0
    )
    (gradient,) = torch.autograd.grad(output.loss, new)
    assert gradient.flatten().tolist() == pytest.approx([-2.5, 0.0])
    assert output.metrics["dual_clip_frac_seq"] == 0.5


def test_metrics_do_not_carry_a_graph() -> None:
    tally = LOSSES["gspo"](**random_batch()).tally
    assert not any(value.requires_grad for value in (*tally.sums.values(), *tally.peaks.values()))


def test_the_correction_weights_of_the_oracles() -> None:
    given = CASES["decoupled_token_tis"]["inputs"]
    proximal, rollout, mask = tensor(given["prox_logp"]), tensor(given["behav_logp"]), tensor(given["mask"]).bool()
    expected = tensor(CASES["decoupled_token_tis"]["expected"]["tis_weight"])
    torch.testing.assert_close(token_tis(proximal, rollout), expected, rtol=0, atol=1e-9)
    assert float(token_tis(rollout + 5, rollout).max()) == 2.0
    weight = CASES["decoupled_geo_weight"]["expected"]["weight"]
    torch.testing.assert_close(
        sequence_geo(proximal, rollout, mask), torch.full_like(proximal, weight), rtol=0, atol=1e-9
    )


def test_kl_is_reported_apart_from_the_policy_loss() -> None:
    output, _ = run("kl_k3")
    expected = CASES["kl_k3"]["expected"]
    assert output.metrics["ref_kl"] == pytest.approx(expected["kl"], abs=1e-9)


def test_bad_input_is_named() -> None:
    batch = random_batch()
    with pytest.raises(ValueError, match=r"old_logprobs has shape \[6, 8\]; here it must be \[6, 9\]"):
        LOSSES["gspo"](**(batch | {"old_logprobs": batch["old_logprobs"][:, 1:]}))
    with pytest.raises(ValueError, match=r"advantages has shape \[5\]"):
        LOSSES["gspo"](**(batch | {"advantages": batch["advantages"][1:]}))
    with pytest.raises(ValueError, match="aggregation 'rows'"):
        LOSSES["grpo"](**batch, aggregation="rows")
    with pytest.raises(ValueError, match="needs ref_logprobs"):
        LOSSES["gspo"](**batch, kl_coef=0.1)
    with pytest.raises(ValueError, match=r"clip_low -0\.1"):
        LOSSES["grpo"](**batch, clip_low=-0.1)
    with pytest.raises(TypeError, match="clip_hgih"):
        LOSSES["gspo"](**batch, clip_hgih=0.1)
