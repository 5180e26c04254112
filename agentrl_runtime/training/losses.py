# ruff: noqa: F722 - array shapes are written in the types
"""Losses over flat token tensors: the same for padded batches, packed sequences and prefix trees.

Everything is computed in float32 log space. A global batch is cut into micro-batches and ranks, so the
denominators can be handed in: with one `Normalizer` for the whole batch, the losses of its parts add up to
the loss of the whole.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from agentrl_runtime.errors import AgentRLError

# exp(20) = 4.9e8: far outside any clip range, and still finite after a product with an advantage.
MAX_LOG_RATIO = 20.0


@dataclass
class TokenBatch:
    """Tokens of any number of sequences, one after the other in any order.

    `loss_mask` is 1 for trained tokens; the others (prompts, tool results) are neither read nor counted.
    `sequence_ids` says which sampled response a token belongs to. `proximal_logprobs` is the policy at the
    start of the update, where that differs from the sampler; `staleness` counts policy versions.
    """

    logprobs: Float[Tensor, " tokens"]
    rollout_logprobs: Float[Tensor, " tokens"]
    advantages: Float[Tensor, " tokens"]
    loss_mask: Float[Tensor, " tokens"]
    sequence_ids: Int[Tensor, " tokens"]
    proximal_logprobs: Float[Tensor, " tokens"] | None = None
    staleness: Float[Tensor, " tokens"] | None = None


@dataclass(frozen=True)
class Normalizer:
    """Counts over the global batch: trained tokens, and sequences with at least one of them."""

    tokens: float
    sequences: float


@dataclass
class LossResult:
    """`loss` carries the gradient; `per_token` (0 off the mask), `ratio` and `clipped` are detached."""

    loss: Float[Tensor, ""]
    per_token: Float[Tensor, " tokens"]
    ratio: Float[Tensor, " tokens"]
    clipped: Bool[Tensor, " tokens"]
    metrics: dict[str, float]


def compute_loss(config: Any, batch: TokenBatch, *, normalizer: Normalizer | None = None) -> LossResult:
    """The loss that `config.loss_calculater` names, over the tokens of `batch`.

    With `normalizer` the sums are divided by the global counts it holds, else by the batch's own. Where
    data-parallel ranks average gradients, multiply the loss by their number.
    Raises AgentRLError for shapes that differ, for NaN or infinity at a trained token, and for an unknown loss.
    """
    _check_shapes(batch)
    trained = batch.loss_mask > 0
    _check_finite("logprobs", batch.logprobs, trained, batch)
    logprobs = torch.where(trained, batch.logprobs.float(), 0.0)

    if config.loss_calculater == "CrossEntropy":
        losses, ratio = -logprobs, torch.ones_like(logprobs)
        clipped = torch.zeros_like(trained)
        reduced = _token_mean(losses, trained, normalizer)
    elif config.loss_calculater == "GRPO":
        losses, ratio, clipped = _clipped_surrogate(config, batch, logprobs, trained)
        reduced = _reduce(config, losses, trained, batch.sequence_ids, normalizer)
    else:
        raise AgentRLError(
            f"loss_calculater: {config.loss_calculater!r} is not a loss",
            mend="use CrossEntropy or GRPO",
        )
    ratio = ratio.detach()
    metrics = _metrics(config, batch, logprobs.detach(), ratio, clipped, trained)
    per_token = torch.where(trained, losses.detach(), 0.0)
    return LossResult(loss=reduced, per_token=per_token, ratio=ratio, clipped=clipped, metrics=metrics)


def _clipped_surrogate(
    config: Any, batch: TokenBatch, logprobs: Tensor, trained: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """-min(r A, clip(r, 1 - eps, 1 + eps + eps_higher) A), r = pi / pi_old, a token at a time.

    The clipped surrogate of PPO (Schulman et al. 2017, eq. 7) with the group-relative advantages of GRPO
    (Shao et al. 2024, eq. 3) and the raised upper bound of DAPO (Yu et al. 2025, eq. 8). A token whose
    gradient the clip takes away stays in the denominator.
    """
    if batch.proximal_logprobs is not None:
        old, name = batch.proximal_logprobs, "proximal_logprobs"
    else:
        old, name = batch.rollout_logprobs, "rollout_logprobs"
    _check_finite("rollout_logprobs", batch.rollout_logprobs, trained, batch)
    _check_finite(name, old, trained, batch)
    _check_finite("advantages", batch.advantages, trained, batch)
    advantages = torch.where(trained, batch.advantages.float(), 0.0)
    log_ratio = logprobs - torch.where(trained, old.float(), 0.0)
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    bounded = ratio.clamp(1.0 - config.epsilon, 1.0 + config.epsilon + config.epsilon_higher)
    unclipped_objective, clipped_objective = ratio * advantages, bounded * advantages
    losses = -torch.minimum(unclipped_objective, clipped_objective)
    clipped = (clipped_objective < unclipped_objective) & trained
    return losses, ratio, clipped


def _reduce(
    config: Any, losses: Tensor, trained: Tensor, sequence_ids: Tensor, normalizer: Normalizer | None
) -> Tensor:
    """One number from per-token losses.

    `token_level_loss`: mean over all tokens (DAPO). Else the mean over sequences of each sequence's mean (GRPO
    as published), or with `skip_length_normalization` of its sum (Dr. GRPO, Liu et al. 2025).
    """
    if config.token_level_loss:
        return _token_mean(losses, trained, normalizer)
    ids, dense = torch.unique(sequence_ids, return_inverse=True)
    sums = losses.new_zeros(len(ids)).index_add(0, dense, torch.where(trained, losses, 0.0))
    lengths = losses.new_zeros(len(ids)).index_add(0, dense, trained.float())
    if not config.skip_length_normalization:
        sums = sums / lengths.clamp(min=1.0)
    sequences = normalizer.sequences if normalizer else float((lengths > 0).sum())
    return sums.sum() / max(sequences, 1.0)


def _token_mean(losses: Tensor, trained: Tensor, normalizer: Normalizer | None) -> Tensor:
    tokens = normalizer.tokens if normalizer else float(trained.sum())
    return torch.where(trained, losses, 0.0).sum() / max(tokens, 1.0)


def _metrics(
    config: Any, batch: TokenBatch, logprobs: Tensor, ratio: Tensor, clipped: Tensor, trained: Tensor
) -> dict[str, float]:
    """Means and extremes over the trained tokens. k1 and k3 estimate KL(sampler || policy) (Schulman 2020)."""
    metrics = {"tokens": float(trained.sum())}
    if not bool(trained.any()):
        return metrics
    if batch.staleness is not None:
        staleness = batch.staleness[trained].float()
        metrics["staleness_mean"], metrics["staleness_max"] = float(staleness.mean()), float(staleness.max())
    if config.loss_calculater == "CrossEntropy":
        return metrics
    ratio = ratio[trained]
    metrics["ratio_mean"] = float(ratio.mean())
    metrics["ratio_max"], metrics["ratio_min"] = float(ratio.max()), float(ratio.min())
    metrics["clipped_fraction"] = float(clipped[trained].float().mean())
    change = (logprobs - batch.rollout_logprobs.float())[trained].clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    metrics["kl_k1"] = float(-change.mean())
    metrics["kl_k3"] = float((torch.expm1(change) - change).mean())
    return metrics


def combine_metrics(parts: Sequence[dict[str, float]]) -> dict[str, float]:
    """Metrics of a whole batch from those of its parts: sums, extremes, and means weighted by tokens."""
    parts = [part for part in parts if part["tokens"] > 0]
    tokens = sum(part["tokens"] for part in parts)
    combined = {"tokens": tokens}
    for name in dict.fromkeys(name for part in parts for name in part if name != "tokens"):
        having = [part for part in parts if name in part]
        if name.endswith("_max"):
            combined[name] = max(part[name] for part in having)
        elif name.endswith("_min"):
            combined[name] = min(part[name] for part in having)
        else:
            weight = sum(part["tokens"] for part in having)
            combined[name] = sum(part[name] * part["tokens"] for part in having) / weight
    return combined


def row_statistics(
    batch: TokenBatch, result: LossResult, sequences: int | None = None
) -> dict[str, Float[Tensor, " sequences"]]:
    """For the ledger: loss, ratio_mean, clipped_fraction, staleness_mean, staleness_max, tokens by sequence.

    `sequence_ids` must be dense (0..sequences-1; by default as many as the largest id says). Means are over a
    sequence's trained tokens, and 0 where it has none.
    """
    trained = batch.loss_mask > 0
    if sequences is None:
        sequences = int(batch.sequence_ids.max()) + 1 if batch.sequence_ids.numel() else 0
    ids = batch.sequence_ids[trained]
    empty = torch.zeros(sequences, dtype=torch.float32, device=batch.logprobs.device)
    tokens = empty.index_add(0, ids, torch.ones_like(ids, dtype=torch.float32))
    staleness = torch.zeros_like(batch.loss_mask) if batch.staleness is None else batch.staleness

    def mean(values: Tensor) -> Tensor:
        return empty.index_add(0, ids, values[trained].float()) / tokens.clamp(min=1.0)

    return {
        "loss": mean(result.per_token),
        "ratio_mean": mean(result.ratio),
        "clipped_fraction": mean(result.clipped),
        "staleness_mean": mean(staleness),
        "staleness_max": empty.scatter_reduce(0, ids, staleness[trained].float(), "amax"),
        "tokens": tokens,
    }


def _check_shapes(batch: TokenBatch) -> None:
    count = batch.logprobs.shape
    for name, value in vars(batch).items():
        if value is not None and (value.shape != count or value.dim() != 1):
            raise AgentRLError(
                f"TokenBatch.{name} has the shape {tuple(value.shape)}, logprobs has {tuple(count)}",
                mend="give every field one value a token, flat",
            )


def _check_finite(name: str, values: Tensor, trained: Tensor, batch: TokenBatch) -> None:
    bad = ~torch.isfinite(values) & trained
    if bool(bad.any()):
        at = int(bad.nonzero()[0])
        raise AgentRLError(
            f"{name} is {float(values[at])} at token {at} of sequence {int(batch.sequence_ids[at])} "
            f"({int(bad.sum())} of {int(trained.sum())} trained tokens are not finite)",
            mend="stop here: look at the sequence in the ledger, and at the learning rate if the policy made it",
        )
