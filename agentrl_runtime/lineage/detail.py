"""One record in full: prompt, reply, every sampled token with its logprob and policy version, and its training."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from agentrl_runtime.databases import (
    DBRecordData,
    DispatchedSamplingTask,
    PolicyVersion,
    Record,
    Task,
    TrajectoryBatch,
)
from agentrl_runtime.errors import AgentRLError
from agentrl_runtime.lineage.facts import training_node
from agentrl_runtime.lineage.nodes import Node
from agentrl_runtime.lineage.reading import Document, by_id, fetch, trainings
from agentrl_runtime.storage import ObjectStore
from agentrl_runtime.storage.bodies import unpack_messages, unpack_tokens
from agentrl_runtime.training.segments import token_versions

_TOKENIZER_FILE = "tokenizer.json"


@dataclass
class TokenDetail:
    """One sampled token. `text` is None when the version that sampled it has no tokenizer file."""

    id: int
    text: str | None
    logprob: float
    version: int


@dataclass
class CallDetail:
    id: str
    turn: int
    prompt: list[dict[str, Any]]
    prompt_tokens: int
    text: str
    finish: str
    tokens: list[TokenDetail]


@dataclass
class RecordDetail:
    id: str
    run: str
    batch: str
    status: str
    reason: str
    score: float | None
    score_detail: dict[str, Any]
    task: str
    task_line: str
    query: str
    answer: str | None
    calls: list[CallDetail] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)
    steps: list[Node] = field(default_factory=list)


async def show_record(store: ObjectStore, record_id: str, *, tokens: bool = True) -> RecordDetail:
    """Everything about one record. Raises AgentRLError when there is none of this id."""
    found = await by_id(Record, [record_id])
    if record_id not in found:
        raise AgentRLError(f"there is no record {record_id}", mend="`agentrl lineage worst --run RUN` lists some")
    details = await _details(store, [found[record_id]], tokens=tokens, trained=True)
    return details[0]


async def worst_records(store: ObjectStore, run_id: str, limit: int = 10) -> list[RecordDetail]:
    """The lowest-scored training records of a run, lowest first, with their replies but not their tokens."""
    batches = await fetch(TrajectoryBatch, {"run_id": run_id, "split": "train"}, ["_id"])
    query = {"batch_id": {"$in": [batch["_id"] for batch in batches]}, "score": {"$ne": None}}
    cursor = Record.get_pymongo_collection().find(query).sort([("score", 1), ("_id", 1)]).limit(limit)
    return await _details(store, await cursor.to_list(), tokens=False, trained=False)


async def _details(
    store: ObjectStore, records: Sequence[Document], *, tokens: bool, trained: bool
) -> list[RecordDetail]:
    wanted = [call for record in records for call in record["call_ids"]]
    calls, tasks, samples = await asyncio.gather(
        by_id(DispatchedSamplingTask, wanted),
        by_id(Task, (record["task_id"] for record in records)),
        fetch(DBRecordData, {"record_id": {"$in": [record["_id"] for record in records]}}),
    )
    pieces = await _tokenizers(store, calls.values()) if tokens else {}
    taken = await trainings(store, ((s["shard_id"], s["row"]) for s in samples)) if trained else {}
    made = []
    for record in records:
        detail = _record_detail(record, tasks.get(record["task_id"]) or {})
        for name in record["call_ids"]:
            if name in calls:
                detail.calls.append(await asyncio.to_thread(_call_detail, store, calls[name], pieces, tokens))
        for sample in samples:
            if sample["record_id"] == record["_id"]:
                names = ("sample_id", "shard_id", "row", "advantage", "trained_tokens", "group")
                detail.samples.append({name: sample[name] for name in names})
                detail.steps += [training_node(found) for found in taken.get((sample["shard_id"], sample["row"]), [])]
        made.append(detail)
    return made


def _record_detail(record: Document, task: Document) -> RecordDetail:
    source = task.get("source") or {}
    messages = task.get("messages") or []
    return RecordDetail(
        id=record["_id"],
        run=record["run_id"],
        batch=record["batch_id"],
        status=record["status"],
        reason=record["reason"],
        score=record["score"],
        score_detail=record["score_detail"],
        task=record["task_id"],
        task_line=f"{source['file']}:{source['line']}" if source else "",
        query=task.get("query") or "\n".join(str(message.get("content")) for message in messages),
        answer=task.get("answer"),
    )


def _call_detail(store: ObjectStore, call: Document, pieces: dict[str, Any], tokens: bool) -> CallDetail:
    detail = CallDetail(
        id=call["_id"],
        turn=call["turn"],
        prompt=unpack_messages(store, call["request"]),
        prompt_tokens=len(call["prompt_ids"] or []),
        text=call["text"],
        finish=call["finish_reason"],
        tokens=[],
    )
    if tokens:
        prompt, output, logprobs = unpack_tokens(store, call)
        versions, names = token_versions(call["_id"], call["weight_spans"], len(output))
        tokenizer = pieces.get(names[0]) if names else None
        detail.prompt_tokens = len(prompt)
        detail.tokens = [
            TokenDetail(token, tokenizer.decode([token], skip_special_tokens=False) if tokenizer else None, value, by)
            for token, value, by in zip(output, logprobs, versions, strict=True)
        ]
    return detail


async def _tokenizers(store: ObjectStore, calls: Any) -> dict[str, Any]:
    """The tokenizer of each policy version that sampled one of the calls, where it has a tokenizer.json."""
    from tokenizers import Tokenizer

    names = {span["version"] for call in calls for span in call["weight_spans"]}
    digests = {
        version["_id"]: file["sha256"]
        for version in (await by_id(PolicyVersion, names, ["files"])).values()
        for file in version["files"]
        if file["name"] == _TOKENIZER_FILE
    }
    loaded = {
        digest: Tokenizer.from_buffer(await asyncio.to_thread(store.get, digest)) for digest in set(digests.values())
    }
    return {version: loaded[digest] for version, digest in digests.items()}
