"""The rows of a shard, read from the records and calls of one batch, and why other records are left out."""

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agentrl_runtime.databases import (
    FINAL_STATUSES,
    DispatchedSamplingTask,
    Record,
    Task,
    TrajectoryBatch,
    find_documents,
)
from agentrl_runtime.errors import AgentRLError
from agentrl_runtime.ids import sample_id
from agentrl_runtime.storage import ObjectStore
from agentrl_runtime.storage.bodies import unpack_tokens
from agentrl_runtime.training.advantages import ScoredRecord, assign_advantages
from agentrl_runtime.training.segments import (
    CallTokens,
    Segment,
    demonstration_ids,
    demonstration_segment,
    segments_of_calls,
    token_versions,
)

if TYPE_CHECKING:
    from agentrl_runtime.training.shards import FilterSpec

TRUNCATED = "truncated"
NO_SAMPLED_TOKENS = "no sampled tokens"
DEMONSTRATION_ADVANTAGE = 1.0
CALL_FIELDS = (
    "prompt_ids",
    "output_ids",
    "output_logprobs",
    "tokens_sha256",
    "weight_spans",
    "finish_reason",
    "status",
)


@dataclass
class Row:
    """One training sample before it is written."""

    sample_id: str
    record_id: str
    task_id: str
    score: float | None
    advantage: float
    group: dict[str, Any]
    segment: Segment


@dataclass
class CollectedRows:
    """Rows in the shard's order, and (record id, reason) of every record that gives none."""

    rows: list[Row]
    left_out: list[tuple[str, str]]


async def collect_rows(store: ObjectStore, batch: TrajectoryBatch, spec: "FilterSpec", tokenizer: Any) -> CollectedRows:
    """Read the batch in two or three round trips and make its rows, sorted by task, attempt and segment."""
    records = await _final_records(batch)
    if any(record["origin"] == "demonstration" for record in records):
        segments, left_out = await _demonstrations(batch, records, tokenizer)
        advantages = dict.fromkeys(segments, (DEMONSTRATION_ADVANTAGE, dict[str, Any]()))
    else:
        calls = await _calls_of(batch, records)
        segments = await asyncio.to_thread(_sampled_segments, store, records, calls)
        advantages, left_out = _advantages(batch.id, records, calls, spec)
    rows: list[Row] = []
    for record in records:
        key = record["_id"]
        if key in left_out:
            continue
        longest = max((len(segment.input_ids) for segment in segments[key]), default=0)
        if longest == 0:
            left_out[key] = NO_SAMPLED_TOKENS
        elif spec.max_tokens is not None and longest > spec.max_tokens:
            left_out[key] = f"row of {longest} tokens is longer than max_tokens {spec.max_tokens}"
        else:
            advantage, group = advantages[key]
            rows += [
                Row(sample_id(key, number), key, record["task_id"], record["score"], advantage, group, segment)
                for number, segment in enumerate(segments[key])
            ]
    return CollectedRows(rows, sorted(left_out.items()))


async def _final_records(batch: TrajectoryBatch) -> list[dict[str, Any]]:
    fields = ("task_id", "attempt", "origin", "status", "reason", "score", "call_ids")
    cursor = Record.get_pymongo_collection().find({"batch_id": batch.id}, dict.fromkeys(fields, 1))
    records = await cursor.to_list()
    unfinished = [record["_id"] for record in records if record["status"] not in FINAL_STATUSES]
    if unfinished:
        raise AgentRLError(
            f"batch {batch.id} has {len(unfinished)} unfinished records, {unfinished[0]} among them",
            mend="wait until the batch is complete; `agentrl sample` goes on with it",
        )
    place = {task: number for number, task in enumerate(batch.task_ids)}
    end = len(place)
    return sorted(records, key=lambda r: (place.get(r["task_id"], end), r["task_id"], r["attempt"], r["_id"]))


async def _calls_of(batch: TrajectoryBatch, records: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The calls that the records name; those of a lease that was lost are named by none."""
    # By batch, not by a list of ids: on the embedded server such a list costs a millisecond an id.
    cursor = DispatchedSamplingTask.get_pymongo_collection().find({"batch_id": batch.id}, dict.fromkeys(CALL_FIELDS, 1))
    wanted = {call for record in records for call in record["call_ids"]}
    calls = {call["_id"]: call for call in await cursor.to_list() if call["_id"] in wanted}
    for record in records:
        missing = [call for call in record["call_ids"] if call not in calls]
        if missing:
            raise AgentRLError(
                f"record {record['_id']} names call {missing[0]}, which is not in the database",
                mend="restore the calls collection: a shard is built from every call or not at all",
            )
    return calls


def _sampled_segments(
    store: ObjectStore, records: list[dict[str, Any]], calls: dict[str, dict[str, Any]]
) -> dict[str, list[Segment]]:
    """Segments of each record; blocks where tokens lie in the object store."""
    return {
        record["_id"]: segments_of_calls(
            call_tokens(store, calls[call])
            for call in record["call_ids"]
            if record["status"] in ("completed", "truncated") and calls[call]["status"] == "completed"
        )
        for record in records
    }


def call_tokens(store: ObjectStore, call: dict[str, Any]) -> CallTokens:
    """What a stored call (with at least CALL_FIELDS) sampled; AgentRLError when its arrays do not fit together."""
    prompt, output, logprobs = unpack_tokens(store, call)
    if len(logprobs) != len(output):
        raise AgentRLError(
            f"call {call['_id']} has {len(output)} output tokens but {len(logprobs)} logprobs",
            mend="its record cannot be trained: sample it again",
        )
    versions, names = token_versions(call["_id"], call["weight_spans"], len(output))
    return CallTokens(call["_id"], prompt, output, logprobs, versions, names)


def _advantages(
    batch_id: str, records: list[dict[str, Any]], calls: dict[str, dict[str, Any]], spec: "FilterSpec"
) -> tuple[dict[str, tuple[float, dict[str, Any]]], dict[str, str]]:
    """(advantage, group) of each record to train, and the reasons of the others.

    A failed attempt has no score and leaves its group's statistics; a truncated one was scored and stays in
    them also where `drop_truncated` leaves it out, so that dropping it changes no other advantage.
    """
    done = [record for record in records if record["status"] in ("completed", "truncated")]
    left_out = {
        record["_id"]: f"{record['status']}: {record['reason']}" if record["reason"] else record["status"]
        for record in records
        if record["status"] not in ("completed", "truncated")
    }
    scored = [ScoredRecord(r["_id"], batch_id, r["task_id"], r["score"]) for r in done]
    advantages: dict[str, tuple[float, dict[str, Any]]] = {}
    for record, result in zip(done, assign_advantages(spec, scored), strict=True):
        if result.reason is not None or result.advantage is None:
            left_out[record["_id"]] = result.reason or "no advantage"
        elif spec.drop_truncated and _is_truncated(record, calls):
            left_out[record["_id"]] = TRUNCATED
        else:
            group = {
                "estimator": spec.advantage_estimator,
                "mean": result.group_mean,
                "std": result.group_std,
                "scores_used": result.group_used,
            }
            advantages[record["_id"]] = (result.advantage, group)
    return advantages, left_out


def _is_truncated(record: dict[str, Any], calls: dict[str, dict[str, Any]]) -> bool:
    last = calls[record["call_ids"][-1]] if record["call_ids"] else None
    return record["status"] == "truncated" or (last is not None and last["finish_reason"] == "length")


async def _demonstrations(
    batch: TrajectoryBatch, records: list[dict[str, Any]], tokenizer: Any
) -> tuple[dict[str, list[Segment]], dict[str, str]]:
    if tokenizer is None:
        raise AgentRLError("demonstrations need a tokenizer", mend="pass the one of the model that is trained")
    left_out = {r["_id"]: r["reason"] or r["status"] for r in records if r["status"] != "completed"}
    tasks = {task.id: task for task in await find_documents(Task, {"dataset": batch.dataset})}
    segments = await asyncio.to_thread(_demonstration_segments, records, left_out, tasks, tokenizer)
    return segments, left_out


def _demonstration_segments(
    records: list[dict[str, Any]], left_out: dict[str, str], tasks: dict[str, Task], tokenizer: Any
) -> dict[str, list[Segment]]:
    kept = [record for record in records if record["_id"] not in left_out]
    prompts, demonstrations = [], []
    for record in kept:
        task = tasks.get(record["task_id"])
        if task is None or task.demonstration is None:
            raise AgentRLError(
                f"record {record['_id']} is a demonstration of task {record['task_id']}, which has none",
                mend="import the task file again: tasks are never changed once imported",
            )
        prompts.append(task.prompt_messages())
        demonstrations.append(task.demonstration)
    segments: dict[str, list[Segment]] = {}
    for record, ids in zip(kept, demonstration_ids(tokenizer, prompts, demonstrations), strict=True):
        if isinstance(ids, str):
            raise AgentRLError(
                f"record {record['_id']} is a demonstration that this tokenizer cannot take: {ids}",
                mend="build the shard with the tokenizer of the run",
            )
        segments[record["_id"]] = [demonstration_segment(*ids)]
    return segments
