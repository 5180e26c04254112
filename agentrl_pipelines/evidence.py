"""What the documents say about one batch, shard, version or evaluation: read once, used by metadata and checks."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

from agentrl_runtime.databases import (
    DispatchedSamplingTask,
    EvalReport,
    PolicyVersion,
    Record,
    Run,
    Shard,
    StepLedger,
    Task,
    TrajectoryBatch,
    find_documents,
)
from agentrl_runtime.errors import AgentRLError
from agentrl_runtime.storage import ObjectStore

#: Records shown in the tables of best and worst.
TABLE_ROWS = 5


@dataclass(frozen=True)
class RecordLine:
    """One record as a table shows it."""

    record_id: str
    task_key: str
    query: str
    reply: str
    expected: str
    score: float


@dataclass(frozen=True)
class BatchEvidence:
    batch: TrajectoryBatch
    scores: list[float]  # of scored records, in record order
    groups: dict[str, list[float]]  # task id -> scores of its attempts
    statuses: dict[str, int]
    calls: int
    output_tokens: int
    broken_calls: int  # calls whose ids, logprobs and weight spans do not cover each other
    sampled_by: dict[str, int]  # policy version id -> output tokens
    best: list[RecordLine]
    worst: list[RecordLine]

    @property
    def mean_score(self) -> float | None:
        return sum(self.scores) / len(self.scores) if self.scores else None

    @property
    def seconds(self) -> float:
        return (self.batch.ended - self.batch.started).total_seconds() if self.batch.ended else 0.0

    @property
    def truncated_share(self) -> float:
        done = sum(self.statuses.values())
        return self.statuses.get("truncated", 0) / done if done else 0.0

    @property
    def flat_groups(self) -> int:
        """Groups of two or more attempts that all got one score: they teach nothing."""
        return sum(1 for scores in self.groups.values() if len(scores) > 1 and max(scores) == min(scores))


@dataclass(frozen=True)
class ShardEvidence:
    shard: Shard
    reasons: dict[str, int]  # why records are left out -> how many
    rows_checked: int
    mismatched_rows: list[str]  # sample ids whose tokens are not what their calls sampled
    duplicate_samples: int
    advantages: list[float]


@dataclass(frozen=True)
class VersionEvidence:
    version: PolicyVersion
    run: Run
    steps: list[StepLedger]
    rewards: list[tuple[float, float]] = field(default_factory=list)  # (version number, mean score it trained on)

    @property
    def reward(self) -> float | None:
        return self.rewards[-1][1] if self.rewards and self.rewards[-1][0] == self.version.number else None


@dataclass(frozen=True)
class EvalEvidence:
    report: EvalReport
    number: int  # of the policy version
    curve: list[tuple[float, float]]  # (version number, accuracy) of the run so far
    worst: list[RecordLine]


async def the(document: Any, key: str, what: str) -> Any:
    """The document of this id; AgentRLError when there is none."""
    found = await document.get(key)
    if found is None:
        raise AgentRLError(f"there is no {what} {key}", mend="`agentrl lineage show ID` tells what an id names")
    return found


async def batch_evidence(batch: TrajectoryBatch) -> BatchEvidence:
    records = await find_documents(Record, {"batch_id": batch.id})
    statuses: dict[str, int] = {}
    groups: dict[str, list[float]] = {}
    for record in records:
        statuses[record.status] = statuses.get(record.status, 0) + 1
        if record.score is not None:
            groups.setdefault(record.task_id, []).append(record.score)
    scored = sorted((record for record in records if record.score is not None), key=lambda r: (r.score, r.id))
    best, worst = await asyncio.gather(_lines(list(reversed(scored[-TABLE_ROWS:]))), _lines(scored[:TABLE_ROWS]))
    calls = output_tokens = broken = 0
    sampled_by: dict[str, int] = {}
    fields = {"output_ids": 1, "output_logprobs": 1, "tokens_sha256": 1, "weight_spans": 1, "status": 1}
    cursor = DispatchedSamplingTask.get_pymongo_collection().find(
        {"record_id": {"$in": [record.id for record in records]}}, fields
    )
    async for call in cursor:
        calls += 1
        spans = call.get("weight_spans") or []
        covered = sum(span["end"] - span["start"] for span in spans)
        for span in spans:
            sampled_by[span["version"]] = sampled_by.get(span["version"], 0) + span["end"] - span["start"]
        output_tokens += covered
        if call["status"] != "completed" or call.get("tokens_sha256"):
            continue
        lengths = {len(call.get("output_ids") or []), len(call.get("output_logprobs") or []), covered}
        broken += len(lengths) > 1
    return BatchEvidence(
        batch=batch,
        scores=[float(r.score) for r in records if r.score is not None],
        groups=groups,
        statuses=statuses,
        calls=calls,
        output_tokens=output_tokens,
        broken_calls=broken,
        sampled_by=sampled_by,
        best=best,
        worst=worst,
    )


async def _lines(records: list[Record]) -> list[RecordLine]:
    tasks = {task.id: task for task in await find_documents(Task, {"_id": {"$in": [r.task_id for r in records]}})}
    last_calls = [record.call_ids[-1] for record in records if record.call_ids]
    cursor = DispatchedSamplingTask.get_pymongo_collection().find({"_id": {"$in": last_calls}}, {"text": 1})
    replies = {call["_id"]: call["text"] async for call in cursor}
    lines = []
    for record in records:
        task = tasks.get(record.task_id)
        lines.append(
            RecordLine(
                record_id=record.id,
                task_key=task.task_key if task else record.task_id,
                query=_short(task.query or str(task.prompt_messages()[-1]["content"])) if task else "",
                reply=_short(replies.get(record.call_ids[-1], "") if record.call_ids else ""),
                expected=_short(task.answer or "") if task else "",
                score=float(record.score or 0.0),
            )
        )
    return lines


def _short(text: str, length: int = 160) -> str:
    text = " ".join(text.split())
    return text if len(text) <= length else text[: length - 1] + "…"


async def shard_evidence(shard: Shard, store: ObjectStore) -> ShardEvidence:
    """Reads the rows back from the object store and holds them against the calls that sampled them."""
    from agentrl_runtime.training.shards import read_rows

    reasons: dict[str, int] = {}
    for item in shard.left_out:
        reasons[item.reason] = reasons.get(item.reason, 0) + 1
    if shard.rows == 0:
        return ShardEvidence(shard, reasons, 0, [], 0, [])
    table = await asyncio.to_thread(read_rows, store, shard.id)
    columns = table.select(["sample_id", "call_ids", "input_ids", "loss_mask", "advantage"]).to_pydict()
    wanted = [call for ids in columns["call_ids"] for call in ids]
    cursor = DispatchedSamplingTask.get_pymongo_collection().find(
        {"_id": {"$in": wanted}}, {"prompt_ids": 1, "output_ids": 1, "tokens_sha256": 1}
    )
    calls = {call["_id"]: call async for call in cursor}
    checked, mismatched = 0, []
    rows = zip(columns["sample_id"], columns["call_ids"], columns["input_ids"], columns["loss_mask"], strict=True)
    for sample_id, call_ids, input_ids, loss_mask in rows:
        inline = [calls[call] for call in call_ids if call in calls and not calls[call].get("tokens_sha256")]
        if not call_ids or (len(inline) < len(call_ids) and all(call in calls for call in call_ids)):
            continue  # a demonstration has no calls; large calls keep their tokens in the object store
        checked += 1
        if len(inline) < len(call_ids) or not all(_call_is_in(call, input_ids, loss_mask) for call in inline):
            mismatched.append(sample_id)
    return ShardEvidence(
        shard=shard,
        reasons=reasons,
        rows_checked=checked,
        mismatched_rows=mismatched,
        duplicate_samples=len(columns["sample_id"]) - len(set(columns["sample_id"])),
        advantages=[float(value) for value in columns["advantage"]],
    )


def _call_is_in(call: dict[str, Any], input_ids: list[int], loss_mask: list[int]) -> bool:
    """A row extends the conversation of its calls: each call's prompt and output are a prefix of it."""
    prompt, output = call["prompt_ids"] or [], call["output_ids"] or []
    end = len(prompt) + len(output)
    return input_ids[:end] == [*prompt, *output] and all(loss_mask[len(prompt) : end])


async def version_evidence(version: PolicyVersion) -> VersionEvidence:
    run = await the(Run, version.run_id, "run")
    steps = await StepLedger.find(StepLedger.version_id == version.id).sort("number").to_list()
    return VersionEvidence(
        version=version, run=run, steps=steps, rewards=await reward_curve(version.run_id, version.number)
    )


async def reward_curve(run_id: str, up_to: int | None = None) -> list[tuple[float, float]]:
    """(version number, mean score of the batches it trained on) of each version up to `up_to`."""
    versions = (
        await PolicyVersion.get_pymongo_collection().find({"run_id": run_id}, {"number": 1, "shard_ids": 1}).to_list()
    )
    wanted = sorted((v["number"], v["shard_ids"]) for v in versions if up_to is None or v["number"] <= up_to)
    batch_of = {
        shard["_id"]: shard["batch_id"]
        for shard in await Shard.get_pymongo_collection().find({"run_id": run_id}, {"batch_id": 1}).to_list()
    }
    means = {
        batch["_id"]: mean
        for batch in await TrajectoryBatch.get_pymongo_collection().find({"run_id": run_id}, {"stats": 1}).to_list()
        if (mean := batch.get("stats", {}).get("mean_score")) is not None
    }
    curve = []
    for number, shard_ids in wanted:
        scores = [means[batch_of[shard]] for shard in shard_ids if batch_of.get(shard) in means]
        if scores:
            curve.append((float(number), float(sum(scores) / len(scores))))
    return curve


async def accuracy_curve(run_id: str, up_to: int | None = None) -> list[tuple[float, float]]:
    """(version number, greedy accuracy on unseen tasks) of each evaluated version up to `up_to`."""
    reports = await EvalReport.find(EvalReport.run_id == run_id).to_list()
    points = sorted((float(report.version_id.rsplit(".v", 1)[-1]), report.accuracy) for report in reports)
    return [point for point in points if up_to is None or point[0] <= up_to]


async def eval_evidence(report: EvalReport) -> EvalEvidence:
    number = int(report.version_id.rsplit(".v", 1)[-1])
    records = await find_documents(Record, {"batch_id": report.id})
    scored = sorted((record for record in records if record.score is not None), key=lambda r: (r.score, r.id))
    return EvalEvidence(
        report=report,
        number=number,
        curve=await accuracy_curve(report.run_id, number),
        worst=await _lines(scored[:TABLE_ROWS]),
    )
