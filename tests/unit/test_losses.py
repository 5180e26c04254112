"""Losses against a float64 reference written from the papers, token by token."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_runtime.errors import AgentRLError
from agentrl_runtime.training.losses import (
    Normalizer,
    TokenBatch,
    combine_metrics,
    compute_loss,
    row_statistics,
)


def config(**changes):
    values = {
        "loss_calculater": "GRPO",
        "epsilon": 0.2,
        "epsilon_higher": 0.08,
        "token_level_loss": True,
        "skip_length_normalization": False,
    }
    return SimpleNamespace(**(values | changes))


def token_batch(seed, lengths=(3, 5, 1, 4), masked=0.25, noise=0.4):
    rng = np.random.default_rng(seed)
    ids = np.repeat(np.arange(len(lengths)), lengths)
    rollout = -rng.exponential(1.0, len(ids))
    return TokenBatch(
        logprobs=torch.tensor(rollout + rng.normal(0, noise, len(ids)), dtype=torch.float32),
        rollout_logprobs=torch.tensor(rollout, dtype=torch.float32),
        advantages=torch.tensor(rng.normal(0, 1, len(ids)), dtype=torch.float32),
        loss_mask=torch.tensor(rng.random(len(ids)) > masked, dtype=torch.float32),
        sequence_ids=torch.tensor(ids),
        staleness=torch.tensor(rng.integers(0, 4, len(ids)), dtype=torch.float32),
    )


def part(batch, index):
    fields = {name: None if value is None else value[index] for name, value in vars(batch).items()}
    return TokenBatch(**fields)


def reference_loss(cfg, batch):
    """The published formulas with plain float64 arithmetic and loops."""
    logprobs, rollout, advantages = (
        getattr(batch, name).double().numpy() for name in ("logprobs", "rollout_logprobs", "advantages")
    )
    old = rollout if batch.proximal_logprobs is None else batch.proximal_logprobs.double().numpy()
    by_sequence = {}
    for t in range(len(logprobs)):
        if batch.loss_mask[t] == 0:
            continue
        if cfg.loss_calculater == "CrossEntropy":
            loss = -logprobs[t]
        else:
            ratio = math.exp(logprobs[t] - old[t])
            low, high = 1 - cfg.epsilon, 1 + cfg.epsilon + cfg.epsilon_higher
            loss = -min(ratio * advantages[t], min(max(ratio, low), high) * advantages[t])
        by_sequence.setdefault(int(batch.sequence_ids[t]), []).append(loss)
    groups = list(by_sequence.values())
    if not groups:
        return 0.0
    if cfg.loss_calculater == "CrossEntropy" or cfg.token_level_loss:
        return sum(map(sum, groups)) / sum(map(len, groups))
    each = [sum(group) if cfg.skip_length_normalization else sum(group) / len(group) for group in groups]
    return sum(each) / len(each)


CONFIGS = [
    config(),
    config(epsilon_higher=0.0),
    config(token_level_loss=False),
    config(token_level_loss=False, skip_length_normalization=True),
    config(loss_calculater="CrossEntropy"),
]


@pytest.mark.parametrize("cfg", CONFIGS)
@pytest.mark.parametrize("seed", range(5))
def test_equals_the_reference(cfg, seed):
    batch = token_batch(seed)
    assert float(compute_loss(cfg, batch).loss) == pytest.approx(reference_loss(cfg, batch), abs=1e-6)
    batch.proximal_logprobs = batch.logprobs + 0.1 * torch.randn(len(batch.logprobs))
    assert float(compute_loss(cfg, batch).loss) == pytest.approx(reference_loss(cfg, batch), abs=1e-6)


@pytest.mark.parametrize("cfg", CONFIGS)
def test_gradient_equals_finite_differences_of_the_reference(cfg):
    batch = token_batch(7)
    batch.logprobs.requires_grad_()
    compute_loss(cfg, batch).loss.backward()
    gradient = batch.logprobs.grad
    values = batch.logprobs.detach().double()
    for t in range(len(values)):
        step = torch.zeros_like(values)
        step[t] = 1e-6
        ends = [reference_loss(cfg, TokenBatch(**(vars(batch) | {"logprobs": values + s}))) for s in (step, -step)]
        assert float(gradient[t]) == pytest.approx((ends[0] - ends[1]) / 2e-6, abs=1e-5)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    owner=st.lists(st.integers(0, 2), min_size=4, max_size=4),
    which=st.integers(0, len(CONFIGS) - 1),
)
def test_micro_batches_add_up_to_the_whole(seed, owner, which):
    whole, cfg = token_batch(seed), CONFIGS[which]
    whole.logprobs.requires_grad_()
    trained = whole.loss_mask > 0
    normalizer = Normalizer(float(trained.sum()), float(len(whole.sequence_ids[trained].unique())))
    expected = compute_loss(cfg, whole)
    parts = [part(whole, torch.tensor(owner)[whole.sequence_ids] == o) for o in range(3)]
    results = [compute_loss(cfg, piece, normalizer=normalizer) for piece in parts]
    total = sum(result.loss for result in results)
    assert total.item() == pytest.approx(float(expected.loss), abs=1e-6)
    wanted, got = (torch.autograd.grad(loss, whole.logprobs, retain_graph=True)[0] for loss in (expected.loss, total))
    torch.testing.assert_close(got, wanted, atol=1e-7, rtol=1e-5)
    combined = combine_metrics([result.metrics for result in results])
    assert combined == pytest.approx(expected.metrics, abs=1e-5)


def test_a_clipped_token_has_no_gradient_and_stays_in_the_denominator():
    batch = TokenBatch(
        logprobs=torch.tensor([math.log(2.0), 0.0], requires_grad=True),
        rollout_logprobs=torch.zeros(2),
        advantages=torch.ones(2),
        loss_mask=torch.ones(2),
        sequence_ids=torch.zeros(2, dtype=torch.long),
    )
    result = compute_loss(config(), batch)
    result.loss.backward()
    assert float(result.loss) == pytest.approx(-(1.28 + 1.0) / 2)
    assert batch.logprobs.grad.tolist() == pytest.approx([0.0, -0.5])
    assert result.clipped.tolist() == [True, False]
    assert result.metrics["clipped_fraction"] == 0.5


def test_a_negative_advantage_is_clipped_below_only():
    batch = TokenBatch(
        logprobs=torch.tensor([math.log(0.5), math.log(2.0)]),
        rollout_logprobs=torch.zeros(2),
        advantages=-torch.ones(2),
        loss_mask=torch.ones(2),
        sequence_ids=torch.zeros(2, dtype=torch.long),
    )
    result = compute_loss(config(), batch)
    assert result.per_token.tolist() == pytest.approx([0.8, 2.0])
    assert result.clipped.tolist() == [True, False]


def test_prompt_tokens_are_neither_read_nor_counted():
    batch = token_batch(3)
    expected = compute_loss(config(), batch).loss
    for name in ("logprobs", "rollout_logprobs", "advantages"):
        getattr(batch, name)[batch.loss_mask == 0] = math.nan
    batch.logprobs.requires_grad_()
    result = compute_loss(config(), batch)
    result.loss.backward()
    assert float(result.loss) == float(expected)
    assert bool(torch.isfinite(batch.logprobs.grad).all())


def test_kl_estimates_are_those_of_the_definition():
    batch = token_batch(4)
    on = batch.loss_mask > 0
    change = (batch.logprobs - batch.rollout_logprobs)[on].double().numpy()
    metrics = compute_loss(config(), batch).metrics
    assert metrics["kl_k1"] == pytest.approx(-change.mean(), abs=1e-6)
    assert metrics["kl_k3"] == pytest.approx((np.exp(change) - 1 - change).mean(), abs=1e-6)
    assert metrics["ratio_max"] == pytest.approx(np.exp(change).max(), rel=1e-5)
    assert metrics["staleness_max"] == float(batch.staleness[on].max())
    assert metrics["tokens"] == float(on.sum())


def test_a_batch_without_trained_tokens_gives_zero_with_a_gradient():
    batch = part(token_batch(1), slice(0, 0))
    batch.logprobs.requires_grad_()
    for cfg in CONFIGS:
        result = compute_loss(cfg, batch, normalizer=Normalizer(10.0, 2.0))
        result.loss.backward()
        assert float(result.loss) == 0.0
    assert combine_metrics([result.metrics]) == {"tokens": 0}


@pytest.mark.parametrize("name", ["logprobs", "rollout_logprobs", "proximal_logprobs", "advantages"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_refused_by_name(name, value):
    batch = token_batch(2, masked=0.0)
    batch.proximal_logprobs = batch.rollout_logprobs.clone()
    getattr(batch, name)[4] = value
    with pytest.raises(AgentRLError, match=rf"^{name} is {value} at token 4 of sequence 1 "):
        compute_loss(config(), batch)


def test_other_shapes_and_losses_are_refused():
    batch = token_batch(2)
    with pytest.raises(AgentRLError, match="NOPE"):
        compute_loss(config(loss_calculater="NOPE"), batch)
    batch.advantages = batch.advantages[:-1]
    with pytest.raises(AgentRLError, match="advantages has the shape"):
        compute_loss(config(), batch)


def test_a_far_off_policy_token_stays_finite():
    batch = token_batch(2, masked=0.0)
    batch.rollout_logprobs[0], batch.advantages[0] = -500.0, -1.0
    assert math.isfinite(float(compute_loss(config(), batch).loss))


def test_row_statistics_by_sequence():
    batch = token_batch(5)
    batch.loss_mask[batch.sequence_ids == 2] = 0.0
    result = compute_loss(config(), batch)
    rows = row_statistics(batch, result, sequences=5)
    for sequence in range(4):
        on = (batch.sequence_ids == sequence) & (batch.loss_mask > 0)
        assert float(rows["tokens"][sequence]) == float(on.sum())
        if not bool(on.any()):
            continue
        assert float(rows["loss"][sequence]) == pytest.approx(float(result.per_token[on].mean()), abs=1e-6)
        assert float(rows["ratio_mean"][sequence]) == pytest.approx(float(result.ratio[on].mean()), abs=1e-6)
        assert float(rows["clipped_fraction"][sequence]) == pytest.approx(float(result.clipped[on].float().mean()))
        assert float(rows["staleness_mean"][sequence]) == pytest.approx(float(batch.staleness[on].mean()))
        assert float(rows["staleness_max"][sequence]) == float(batch.staleness[on].max())
    assert [float(values[2]) for values in rows.values()] == [0.0] * 6
    assert [float(values[4]) for values in rows.values()] == [0.0] * 6
