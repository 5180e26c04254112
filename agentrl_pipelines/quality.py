"""Few checks, each of them about something that has ruined a training run."""

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from agentrl_pipelines.evidence import BatchEvidence, EvalEvidence, ShardEvidence, VersionEvidence

#: More truncated records than this share and the policy is learning where its replies are cut off.
MAX_TRUNCATED_SHARE = 0.25
#: More failed evaluation records than this share and the accuracy is not a measurement.
MAX_FAILED_SHARE = 0.05


@dataclass(frozen=True)
class Finding:
    """What one check found; `error` findings mean wrong data, `warn` findings a run worth a look."""

    check: str
    passed: bool
    description: str
    severity: Literal["error", "warn"] = "error"
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Check:
    name: str
    asset: str
    description: str


CHECKS = (
    Check("calls_are_whole", "trajectories", "Each call's token ids, logprobs and weight versions cover each other."),
    Check("groups_teach", "trajectories", "Some task of the batch has attempts with different scores."),
    Check("truncation", "trajectories", "At most a quarter of the records end by length."),
    Check("tokens_match", "training_shard", "Each row's ids are exactly what its calls were given and sampled."),
    Check("no_duplicates", "training_shard", "No sample is in the shard twice."),
    Check("metrics_are_finite", "checkpoint", "No metric of the version's steps is NaN or infinite."),
    Check("staleness", "checkpoint", "No token is older than max_policy_lag policy versions."),
    Check("evaluation_is_whole", "eval_report", "At most one in twenty evaluation records failed."),
)


def check_batch(evidence: BatchEvidence) -> list[Finding]:
    groups, flat = len(evidence.groups), evidence.flat_groups
    compared = sum(1 for scores in evidence.groups.values() if len(scores) > 1)
    return [
        Finding(
            "calls_are_whole",
            evidence.broken_calls == 0,
            f"{evidence.broken_calls} of {evidence.calls} calls do not fit together",
        ),
        Finding(
            "groups_teach",
            compared == 0 or flat < compared,
            f"{flat} of {compared} groups have one score only",
            severity="warn",
            metadata={"groups": groups, "zero_variance_groups": flat},
        ),
        Finding(
            "truncation",
            evidence.truncated_share <= MAX_TRUNCATED_SHARE,
            f"{evidence.truncated_share:.1%} of the records were cut off at max_new_tokens",
            severity="warn",
            metadata={"truncated_share": evidence.truncated_share},
        ),
    ]


def check_shard(evidence: ShardEvidence) -> list[Finding]:
    mismatched = evidence.mismatched_rows
    return [
        Finding(
            "tokens_match",
            not mismatched,
            f"{len(mismatched)} of {evidence.rows_checked} rows differ from their calls"
            + (f", the first is {mismatched[0]}" if mismatched else ""),
            metadata={"rows_checked": evidence.rows_checked, "token_mismatches": len(mismatched)},
        ),
        Finding("no_duplicates", evidence.duplicate_samples == 0, f"{evidence.duplicate_samples} samples appear twice"),
    ]


def check_version(evidence: VersionEvidence) -> list[Finding]:
    bad = sorted(
        f"{step.id}: {name}"
        for step in evidence.steps
        for name, value in step.metrics.items()
        if not math.isfinite(value)
    )
    bad += sorted(name for name, value in evidence.version.metrics.items() if not math.isfinite(value))
    stale = max((step.metrics.get("staleness_max", 0.0) for step in evidence.steps), default=0.0)
    stale = max(stale, evidence.version.metrics.get("staleness_max", 0.0))
    bound = int(evidence.run.config["max_policy_lag"])
    return [
        Finding(
            "metrics_are_finite",
            not bad,
            f"not finite: {', '.join(bad[:5])}" if bad else f"{len(evidence.steps)} steps, all metrics finite",
        ),
        Finding(
            "staleness",
            stale <= bound,
            f"oldest token is {stale:g} policy versions old; max_policy_lag is {bound}",
            metadata={"staleness_max": stale, "max_policy_lag": bound},
        ),
    ]


def check_eval(evidence: EvalEvidence) -> list[Finding]:
    report = evidence.report
    share = report.failed / report.records if report.records else 1.0
    return [
        Finding(
            "evaluation_is_whole",
            share <= MAX_FAILED_SHARE,
            f"{report.failed} of {report.records} evaluation records failed",
        )
    ]
