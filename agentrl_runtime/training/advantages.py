"""Group-relative advantages, and the named reasons why a record is left out of training."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agentrl_runtime.errors import AgentRLError

STD_EPSILON = 1e-6

NO_SCORE = "no score"
ZERO_ADVANTAGE = "zero_advantage"
BELOW_MINIMAL_ADVANTAGE = "below_minimal_advantage"
NON_POSITIVE_ADVANTAGE = "non_positive_advantage"


@dataclass(frozen=True)
class ScoredRecord:
    """One attempt at a task. `score` is None where scoring failed or never happened."""

    record_id: str
    batch_id: str
    task_id: str
    score: float | None


@dataclass(frozen=True)
class AdvantageResult:
    """One group. Entry i of `advantages` and `reasons` is for score i.

    An advantage is None only where the score is missing; a record is trained where its reason is None.
    `mean` and `std` (population) are over the `used` scores, None where there are none.
    """

    advantages: list[float | None]
    mean: float | None
    std: float | None
    used: int
    reasons: list[str | None]


@dataclass(frozen=True)
class RecordAdvantage:
    """What one record got: trained with `advantage` where `reason` is None, else left out because of it."""

    record: ScoredRecord
    advantage: float | None
    reason: str | None
    group_mean: float | None
    group_std: float | None
    group_used: int


def group_advantages(
    config: Any, scores: Sequence[float | None], record_ids: Sequence[str] | None = None
) -> AdvantageResult:
    """Advantages of the attempts at one task within one batch.

    group_norm: (s - mean) / (std + 1e-6) (GRPO, Shao et al. 2024); group_mean: s - mean (Dr. GRPO, Liu et
    al. 2025). Missing scores leave the statistics; a single score has the advantage 0. The filters look at
    the estimate itself; `adv_scaling` is applied after them, so that it never changes who is trained.
    Raises AgentRLError for a score of NaN or infinity, naming the record, and for an unknown estimator.
    """
    if config.advantage_estimator not in ("group_norm", "group_mean"):
        raise AgentRLError(
            f"advantage_estimator: {config.advantage_estimator!r} is not an estimator",
            mend="use group_norm or group_mean",
        )
    for position, score in enumerate(scores):
        if score is not None and not math.isfinite(score):
            name = record_ids[position] if record_ids is not None else f"attempt {position} of the group"
            raise AgentRLError(
                f"the score of {name} is {float(score)}",
                mend="mend its scorer, which must give a finite number",
            )
    present = [float(score) for score in scores if score is not None]
    if not present:
        missing = len(scores)
        return AdvantageResult([None] * missing, None, None, 0, [NO_SCORE] * missing)
    mean = math.fsum(present) / len(present)
    std = math.sqrt(math.fsum((score - mean) ** 2 for score in present) / len(present))
    advantages: list[float | None] = []
    reasons: list[str | None] = []
    for score in scores:
        if score is None:
            advantages.append(None)
            reasons.append(NO_SCORE)
            continue
        advantage = _deviation(float(score), mean, present)
        if config.advantage_estimator == "group_norm":
            advantage /= std + STD_EPSILON
        advantages.append(advantage * config.adv_scaling)
        reasons.append(_reason_to_leave_out(config, advantage))
    return AdvantageResult(advantages, mean, std, len(present), reasons)


def _deviation(score: float, mean: float, present: list[float]) -> float:
    """score - mean, exactly 0 where only rounding of the mean stands between them."""
    scale = max(abs(value) for value in present)
    deviation = score - mean
    return 0.0 if abs(deviation) <= 1e-12 * scale else deviation


def _reason_to_leave_out(config: Any, advantage: float) -> str | None:
    if config.drop_zero_advantage and advantage == 0.0:
        return ZERO_ADVANTAGE
    if config.minimal_advantage is not None and abs(advantage) < config.minimal_advantage:
        return BELOW_MINIMAL_ADVANTAGE
    if config.skip_non_positive_advantage and advantage <= 0.0:
        return NON_POSITIVE_ADVANTAGE
    return None


def assign_advantages(config: Any, records: Sequence[ScoredRecord]) -> list[RecordAdvantage]:
    """Advantages of all records, in their order; a group is the records of one task within one batch.

    Groups may be short or interleaved: nothing depends on the position of a record in the list.
    """
    groups: dict[tuple[str, str], list[int]] = {}
    for index, record in enumerate(records):
        groups.setdefault((record.batch_id, record.task_id), []).append(index)
    assigned: dict[int, RecordAdvantage] = {}
    for members in groups.values():
        group = [records[index] for index in members]
        result = group_advantages(config, [record.score for record in group], [record.record_id for record in group])
        for index, advantage, reason in zip(members, result.advantages, result.reasons, strict=True):
            assigned[index] = RecordAdvantage(records[index], advantage, reason, result.mean, result.std, result.used)
    return [assigned[index] for index in range(len(records))]
