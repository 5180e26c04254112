"""The policy under training: one optimizer step over the rows it is given, on all ranks together."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from agentrl_runtime.configs import AgentTrainingConfig
from agentrl_runtime.errors import AgentRLError
from agentrl_runtime.training.logprobs import PolicyForward
from agentrl_runtime.training.losses import Normalizer, TokenBatch, combine_metrics, compute_loss, row_statistics
from agentrl_runtime.training.packing import MicroBatch, TrainingSequence, count_normalizer, split_over_ranks
from agentrl_runtime.training.parallel import (
    Ranks,
    gather_json,
    gradient_norm,
    scale_gradients,
    shard_policy,
    sum_over_ranks,
)

#: What `row_statistics` tells of each row, in the order of the columns of StepResult.statistics.
STATISTICS = ("loss", "ratio_mean", "clipped_fraction", "staleness_mean", "staleness_max", "tokens")
ADAM_EPS = 1e-8


class TrainingDiverged(AgentRLError):
    """A loss or a gradient is NaN or infinite: nothing of the step was applied."""


@dataclass(frozen=True)
class StepResult:
    """`statistics` has one line for each sequence given, in their order, and the columns STATISTICS."""

    metrics: dict[str, float]
    statistics: Tensor


def load_policy(folder: Path, config: AgentTrainingConfig) -> tuple[Any, torch.dtype]:
    """The causal language model of a folder in float32, and the dtype that `model_init_kwargs` asks for.

    Raises AgentRLError when the folder does not load as one, or its weights do not fit it.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    arguments = dict(config.model_init_kwargs)
    asked = str(arguments.pop("dtype", arguments.pop("torch_dtype", "auto"))).removeprefix("torch.")
    on_gpu = torch.cuda.is_available()
    dtypes = {
        "auto": torch.bfloat16 if on_gpu else torch.float32,
        "float32": torch.float32,
        "bfloat16": torch.bfloat16,
    }
    if asked not in dtypes:
        raise AgentRLError(f"model_init_kwargs: dtype is {asked}", mend=f"use one of {', '.join(dtypes)}")
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, **{"attn_implementation": "sdpa", **arguments}, dtype=torch.float32, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise AgentRLError(
            f"model folder {folder} does not load: {str(error).splitlines()[0]}",
            mend="give a folder with config.json and safetensors weights of a causal language model",
        ) from None
    model, report = loaded
    missing = sorted(report["missing_keys"])
    if missing or report["mismatched_keys"]:
        names = missing or [str(key) for key in report["mismatched_keys"]]
        raise AgentRLError(
            f"model folder {folder}: weights do not hold {names[0]} (and {len(names) - 1} more) as its config says",
            mend="restore the folder: training from random weights by accident is refused",
        )
    return model, dtypes[asked]


class Learner:
    """Model and optimizer over all ranks; every rank makes the same calls in the same order."""

    def __init__(self, model: Any, config: AgentTrainingConfig, ranks: Ranks, *, compute_dtype: torch.dtype) -> None:
        self.config, self.ranks = config, ranks
        model.train()
        model.requires_grad_(True)
        # Demonstrations were sampled by nobody.
        temperature = config.sampling_temperature if config.stage == "rl" else 1.0
        self.policy = PolicyForward(model, config.loss_seq_chunk_size, temperature)
        shard_policy(self.policy, ranks, compute_dtype=compute_dtype)
        self.optimizer = build_optimizer(model, config)

    @property
    def model(self) -> Any:
        return self.policy.model

    def step(self, sequences: Sequence[TrainingSequence], *, number: int) -> StepResult:
        """One optimizer step, the `number`th from 1, over the global batch that every rank is given.

        Raises TrainingDiverged on every rank, before anything is applied, naming the rows.
        """
        batches = split_over_ranks(
            sequences,
            self.ranks.world,
            self.ranks.rank,
            max_tokens=self.config.max_tokens,
            token_budget=self.config.microbatch_tokens,
        )
        normalizer = count_normalizer(sequences)
        line_of = {sequence.row: line for line, sequence in enumerate(sequences)}
        statistics = torch.zeros(len(sequences), len(STATISTICS))
        parts: list[dict[str, float]] = []
        problems: list[str] = []
        loss = 0.0
        self.optimizer.zero_grad(set_to_none=True)
        for batch in batches:
            metrics, problem = self._micro_step(batch, normalizer, statistics, line_of)
            loss += metrics.pop("loss")
            parts.append(metrics)
            problems += [problem] if problem else []

        everyone = gather_json({"parts": parts, "problems": problems, "loss": loss}, self.ranks)
        problems = [problem for rank in everyone for problem in rank["problems"]]
        if problems:
            raise TrainingDiverged(problems[0], mend=_DIVERGED_MEND)
        metrics = combine_metrics([part for rank in everyone for part in rank["parts"]])
        metrics["loss"] = sum(rank["loss"] for rank in everyone)
        metrics["grad_norm"] = self._clip(sequences)
        metrics["learning_rate"] = self._apply(number)
        return StepResult(metrics, sum_over_ranks(statistics, self.ranks))

    def _micro_step(
        self, batch: MicroBatch, normalizer: Normalizer, statistics: Tensor, line_of: dict[int, int]
    ) -> tuple[dict[str, float], str]:
        """Forward and backward of one micro-batch; fills the lines of its rows.

        A problem is returned, not raised: the backward pass must run on this rank as on the others, whose
        collectives wait for it.
        """
        batch = batch.to(self.ranks.device)
        logprobs = self.policy.of(batch)
        tokens = TokenBatch(
            logprobs=logprobs,
            rollout_logprobs=batch.rollout_logprobs,
            advantages=batch.advantages,
            loss_mask=batch.loss_mask,
            sequence_ids=batch.sequence_ids,
            staleness=batch.staleness,
        )
        try:
            result = compute_loss(self.config, tokens, normalizer=normalizer)
        except AgentRLError as error:
            logprobs.sum().mul(0.0).backward()
            bad = ~torch.isfinite(logprobs.detach())
            ids = batch.sequence_ids[bad].unique().tolist() if bool(bad.any()) else range(len(batch.rows))
            return {"loss": 0.0, "tokens": 0.0}, f"{_rows_text([batch.rows[i] for i in ids])}: {error.what}"
        # FSDP averages gradients over the ranks; the loss is a sum over them.
        (result.loss * self.ranks.world).backward()
        if batch.rows:
            columns = row_statistics(tokens, result, len(batch.rows))
            lines = [line_of[row] for row in batch.rows]
            statistics[lines] = torch.stack([columns[name] for name in STATISTICS], dim=1).detach().cpu()
        return {"loss": float(result.loss.detach()), **result.metrics}, ""

    def _clip(self, sequences: Sequence[TrainingSequence]) -> float:
        parameters = list(self.policy.parameters())
        norm = gradient_norm(parameters, self.ranks)
        if not norm < float("inf"):
            rows = _rows_text([sequence.row for sequence in sequences])
            raise TrainingDiverged(f"{rows}: the gradient's norm is {norm}", mend=_DIVERGED_MEND)
        if norm > self.config.max_grad_norm:
            scale_gradients(parameters, self.config.max_grad_norm / (norm + 1e-6))
        return norm

    def _apply(self, number: int) -> float:
        """AdamW at the rate of this step: a linear rise over `warmup_steps`, then constant."""
        warm = min(1.0, number / self.config.warmup_steps) if self.config.warmup_steps else 1.0
        rate = self.config.learning_rate * warm
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        return rate


_DIVERGED_MEND = "look at these rows with `agentrl lineage show`; lower learning_rate if the policy made it"


def build_optimizer(model: nn.Module, config: AgentTrainingConfig) -> torch.optim.AdamW:
    """AdamW; weight decay on matrices alone, not on norms and biases."""
    parameters = list(model.parameters())
    return torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ],
        lr=config.learning_rate,
        betas=config.adam_betas,
        eps=ADAM_EPS,
        fused=True,  # one pass over memory, on CPU and GPU alike
    )


def _rows_text(rows: Sequence[int]) -> str:
    shown = ", ".join(str(row) for row in sorted(rows)[:8])
    return f"row {shown}" if len(rows) == 1 else f"rows {shown}{' ...' if len(rows) > 8 else ''} ({len(rows)})"
