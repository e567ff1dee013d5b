"""The one-file example says the same as the framework."""

from __future__ import annotations

import importlib.util
import random
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from gspo_agent.learner.advantages import group_advantages
from gspo_agent.learner.losses import LOSSES

PATH = Path(__file__).parents[2] / "examples" / "one_file_gspo.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("one_file_gspo", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["one_file_gspo"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_its_loss_and_gradient_are_the_frameworks(example: ModuleType) -> None:
    torch.manual_seed(0)
    old = -torch.rand(12, 9, dtype=torch.float64)
    logprobs = (old + 2e-3 * torch.randn(12, 9, dtype=torch.float64)).requires_grad_()
    mask = torch.rand(12, 9) < 0.6
    mask[:, 0] = True
    advantages = torch.randn(12, dtype=torch.float64)
    loss, clip_fraction = example.gspo_loss(logprobs, old, mask, advantages)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    output = LOSSES["gspo"](logprobs, old, mask, advantages, clip_low=3e-4, clip_high=4e-4)
    (expected,) = torch.autograd.grad(output.loss, logprobs)
    assert torch.allclose(loss, output.loss, rtol=0, atol=1e-12)
    assert torch.allclose(gradient, expected, rtol=0, atol=1e-12)
    assert 0 < clip_fraction < 1
    assert clip_fraction == pytest.approx((gradient.abs().sum(1) == 0).double().mean().item())


def test_its_advantages_are_the_frameworks_and_equal_rewards_teach_nothing(example: ModuleType) -> None:
    episodes = [
        example.Episode(example.Task("", "", ""), [], [], [], reward=reward)
        for reward in [1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0] + [1.0] * 8
    ]
    rows = example.group_advantages(episodes)
    assert [advantage for _, advantage in rows] == pytest.approx(group_advantages([1, 0, 0, 1, 0, 0, 0, 0]).tolist())


def test_its_tool_reads_sums_and_runs_nothing(example: ModuleType) -> None:
    assert example.calculate("(12 + 34) * 56") == "2576"
    for text in ("__import__('os')", "2 ** 9", "1 +", "9" * 200 + "+1", "(" * 90, "1.5 + 1", "True + 1", ""):
        assert example.calculate(text) == "Error: invalid syntax"


def test_an_episode_is_read_as_it_is_written(example: ModuleType) -> None:
    rng = random.Random(1)
    task = example.draw_task(rng, held_out=True)
    episode = example.Episode(task, [], [], [])
    while (result := example.step(episode, example.CALL % task.expression, rng)) == example.FAILED:
        pass
    assert result == task.gold
    assert example.step(episode, example.ANSWER % task.gold, rng) is None
    assert (episode.reward, episode.done) == (1.0, True)
    assert episode.outcomes[-2:] == ["call", "answer"]


@pytest.mark.slow
def test_it_runs_from_cold_start_to_the_last_evaluation_and_its_logprobs_are_those_it_sampled_with(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"DEMONSTRATIONS": 400, "COLD_STEPS": 40, "STEPS": 2, "GROUPS": 4}.items():
        monkeypatch.setattr(example, name, value)
    threads = torch.get_num_threads()
    try:
        example.main(seed=0)
    finally:
        torch.set_num_threads(threads)
    assert "held out, after:" in capsys.readouterr().out

    model, tokenizer = example.cold_start(0)
    rng = random.Random(0)
    episodes = example.run_episodes(model, tokenizer, [example.draw_task(rng, False) for _ in range(8)], rng)
    for episode in episodes:
        ids = torch.tensor([episode.token_ids])
        logprobs = model(ids[:, :-1]).logits[0].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        mask = torch.tensor(episode.sampled[1:])
        assert mask.any()
        assert torch.allclose(logprobs[mask], torch.tensor(episode.logprobs[1:])[mask], atol=1e-4)
