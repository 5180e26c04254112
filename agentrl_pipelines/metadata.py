"""Evidence as Dagster metadata: numbers become plots over partitions, tables and pictures show in the UI."""

from typing import Any

import dagster as dg

from agentrl_pipelines.evidence import BatchEvidence, EvalEvidence, RecordLine, ShardEvidence, VersionEvidence
from agentrl_pipelines.plots import learning_curve, markdown_picture, score_histogram
from agentrl_runtime.databases import TaskDataset

#: Pictures of the curve are drawn for every this many policy versions (and for the last).
CURVE_EVERY = 5

SHARD_COLUMNS = dg.TableSchema(
    columns=[
        dg.TableColumn("sample_id", "string", description="smp_<24 hex>"),
        dg.TableColumn("record_id", "string", description="The trajectory it was made from."),
        dg.TableColumn("task_id", "string", description="The task that was attempted."),
        dg.TableColumn("call_ids", "list<string>", description="Model calls, in order of turns."),
        dg.TableColumn("input_ids", "list<int32>", description="Token ids as sampled; never tokenised again."),
        dg.TableColumn("loss_mask", "list<uint8>", description="1 where the policy sampled the token."),
        dg.TableColumn("rollout_logprobs", "list<float32>", description="Behaviour logprob of each token."),
        dg.TableColumn("advantages", "list<float32>", description="Advantage of each token."),
        dg.TableColumn("token_versions", "list<int32>", description="Policy version that sampled it, else -1."),
        dg.TableColumn("score", "double", description="Score of the record."),
        dg.TableColumn("advantage", "double", description="Advantage of the sample in its group."),
    ]
)


def lineage_command(key: str) -> dg.MetadataValue:
    return dg.MetadataValue.md(f"`agentrl lineage trace {key}`")


def record_table(lines: list[RecordLine]) -> dg.MetadataValue:
    return dg.MetadataValue.table(
        [
            dg.TableRecord(
                {
                    "record": line.record_id,
                    "task": line.task_key,
                    "query": line.query,
                    "reply": line.reply,
                    "expected": line.expected,
                    "score": line.score,
                }
            )
            for line in lines
        ],
        schema=dg.TableSchema(
            columns=[dg.TableColumn(name, "string") for name in ("record", "task", "query", "reply", "expected")]
            + [dg.TableColumn("score", "float")]
        ),
    )


def counts_table(counts: dict[str, int], of: str, number: str) -> dg.MetadataValue:
    return dg.MetadataValue.table(
        [dg.TableRecord({of: name, number: count}) for name, count in sorted(counts.items())],
        schema=dg.TableSchema(columns=[dg.TableColumn(of, "string"), dg.TableColumn(number, "int")]),
    )


def dataset_metadata(dataset: TaskDataset) -> dict[str, Any]:
    return {"tasks": dataset.tasks, "file": dataset.file, "sha256": dataset.sha256}


def batch_metadata(evidence: BatchEvidence) -> dict[str, Any]:
    batch = evidence.batch
    values: dict[str, Any] = {
        "records": sum(evidence.statuses.values()),
        "tasks": len(batch.task_ids),
        "seconds": round(evidence.seconds, 3),
        "output_tokens": evidence.output_tokens,
        "truncated_share": round(evidence.truncated_share, 4),
        "zero_variance_groups": evidence.flat_groups,
        "dataset": batch.dataset,
        "run": batch.run_id,
        "lineage": lineage_command(batch.id),
    }
    if evidence.calls:
        values["tokens_per_second"] = round(evidence.output_tokens / max(evidence.seconds, 1e-3), 1)
        values["sampled_by"] = counts_table(evidence.sampled_by, "policy version", "tokens")
    if evidence.scores:
        title = f"{batch.id}: mean score {evidence.mean_score:.3f}"
        values |= {
            "reward": round(evidence.mean_score or 0.0, 5),
            "reward_histogram": dg.MetadataValue.md(
                markdown_picture(score_histogram(evidence.scores, title=title), "scores")
            ),
            "best_records": record_table(evidence.best),
            "worst_records": record_table(evidence.worst),
        }
    failed = {name: count for name, count in evidence.statuses.items() if name in {"failed", "cancelled"}}
    if failed:
        values["failed_records"] = counts_table(failed, "status", "records")
    return values


def shard_metadata(evidence: ShardEvidence) -> dict[str, Any]:
    shard = evidence.shard
    values: dict[str, Any] = {
        "rows": shard.rows,
        "tokens": shard.tokens,
        "size_bytes": shard.size,
        "left_out": len(shard.left_out),
        "token_mismatches": len(evidence.mismatched_rows),
        "shard": shard.id,
        "filter_digest": shard.filter_digest,
        "filter": dg.MetadataValue.json(shard.filter_spec),
        "dagster/column_schema": SHARD_COLUMNS,
        "lineage": lineage_command(shard.id),
    }
    if shard.seq is not None:
        values["stream_place"] = shard.seq
    if evidence.reasons:
        values["left_out_reasons"] = counts_table(evidence.reasons, "reason", "records")
    if evidence.advantages:
        values["advantage_max"] = round(max(evidence.advantages), 5)
        values["advantage_min"] = round(min(evidence.advantages), 5)
    return values


def version_metadata(evidence: VersionEvidence, accuracies: list[tuple[float, float]]) -> dict[str, Any]:
    version = evidence.version
    values: dict[str, Any] = {
        "steps": version.last_step - version.first_step,
        "step": version.last_step,
        "seconds": round(version.seconds, 3),
        "parent": version.parent or version.origin,
        "run": version.run_id,
        "config_digest": version.config_digest,
        "code_revision": version.code_revision,
        "shards": dg.MetadataValue.json(version.shard_ids),
        "files": dg.MetadataValue.table(
            [dg.TableRecord({"file": f.name, "bytes": f.size, "sha256": f.sha256}) for f in version.files],
            schema=dg.TableSchema(
                columns=[
                    dg.TableColumn("file", "string"),
                    dg.TableColumn("bytes", "int"),
                    dg.TableColumn("sha256", "string"),
                ]
            ),
        ),
        "lineage": lineage_command(version.id),
    }
    values |= {name: float(value) for name, value in version.metrics.items() if name not in values}
    if evidence.reward is not None:
        values["reward"] = round(evidence.reward, 5)
    if evidence.rewards and (version.final or version.number % CURVE_EVERY == 0):
        picture = learning_curve(evidence.rewards, accuracies, title=f"{version.run_id} up to v{version.number}")
        values["reward_curve"] = dg.MetadataValue.md(markdown_picture(picture, "reward curve"))
    return values


def eval_metadata(evidence: EvalEvidence, rewards: list[tuple[float, float]]) -> dict[str, Any]:
    report = evidence.report
    picture = learning_curve(rewards, evidence.curve, title=f"{report.run_id}: greedy accuracy {report.accuracy:.3f}")
    return {
        "accuracy": round(report.accuracy, 5),
        "mean_score": round(report.mean_score, 5),
        "records": report.records,
        "failed": report.failed,
        "seconds": round(report.seconds, 3),
        "dataset": report.dataset,
        "accuracy_curve": dg.MetadataValue.md(markdown_picture(picture, "accuracy curve")),
        "worst_records": record_table(evidence.worst),
        "lineage": lineage_command(report.version_id),
    }
