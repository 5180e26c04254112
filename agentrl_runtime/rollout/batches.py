"""Trajectory batches: which tasks are sampled together, and what came of it."""

from collections import Counter
from typing import Any

import numpy as np
from pymongo.errors import DuplicateKeyError

from agentrl_runtime import ids
from agentrl_runtime.configs import AgentTrainingConfig
from agentrl_runtime.databases import DispatchedSamplingTask, Task, TrajectoryBatch, now
from agentrl_runtime.errors import AgentRLError
from agentrl_runtime.rollout.queue import records_of

GREEDY_ATTEMPTS = 1


async def task_ids_of(dataset: str) -> list[str]:
    """The ids of a dataset's tasks in the order of their lines."""
    found = Task.get_pymongo_collection().find({"dataset": dataset}, {"_id": 1, "line": 1})
    return [item["_id"] for item in sorted([item async for item in found], key=lambda item: item["line"])]


def batch_tasks(task_ids: list[str], number: int, size: int, seed: int) -> tuple[int, list[str]]:
    """Epoch and tasks of training batch `number`: each epoch is a seeded order cut into batches of `size`."""
    if not task_ids:
        raise AgentRLError("the training dataset has no tasks", mend="import a task file: `agentrl tasks import`")
    per_epoch = -(-len(task_ids) // size)
    epoch, place = divmod(number, per_epoch)
    order = np.random.default_rng([seed, epoch]).permutation(len(task_ids))
    return epoch, [task_ids[index] for index in order[place * size : (place + 1) * size]]


async def ensure_train_batch(config: AgentTrainingConfig, number: int, task_ids: list[str]) -> TrajectoryBatch:
    """Training batch `number` of the run; the same one when it is there already. Its records are pushed by the
    engine that completes it."""
    epoch, chosen = batch_tasks(task_ids, number, config.prompts_per_batch, config.seed)
    batch = TrajectoryBatch(
        id=ids.batch_id(config.run_id, number),
        run_id=config.run_id,
        number=number,
        split="train",
        dataset=config.dataset_name,
        epoch=epoch,
        task_ids=chosen,
        expected_records=len(chosen) * config.num_generations,
    )
    return await _ensure(batch)


async def ensure_eval_batch(
    config: AgentTrainingConfig, version_id: str, number: int, dataset: str, task_ids: list[str]
) -> TrajectoryBatch:
    """The evaluation batch of a policy version: one greedy attempt at each task."""
    batch = TrajectoryBatch(
        id=ids.eval_batch_id(version_id),
        run_id=config.run_id,
        number=number,
        split="eval",
        dataset=dataset,
        epoch=0,
        task_ids=task_ids,
        expected_records=len(task_ids) * GREEDY_ATTEMPTS,
    )
    return await _ensure(batch)


async def _ensure(batch: TrajectoryBatch) -> TrajectoryBatch:
    try:
        await batch.insert()
    except DuplicateKeyError:
        found = await TrajectoryBatch.get(batch.id)
        assert found is not None
        return found
    return batch


async def finish_batch(batch: TrajectoryBatch) -> TrajectoryBatch:
    """Mark a batch complete with its statistics. Raises AgentRLError when records are missing."""
    records = await records_of(batch.id)
    if len(records) != batch.expected_records:
        raise AgentRLError(
            f"batch {batch.id} has {len(records)} finished records of {batch.expected_records}",
            mend="start the rollout process again: it pushes what is missing",
        )
    tokens, versions = await _tokens_and_versions(batch.id, {call for record in records for call in record.call_ids})
    scores = [record.score for record in records if record.score is not None]
    ended = now()
    batch.stats = {
        "records": len(records),
        "status": dict(Counter(record.status for record in records)),
        "mean_score": float(np.mean(scores)) if scores else None,
        "min_score": min(scores, default=None),
        "max_score": max(scores, default=None),
        "output_tokens": tokens,
        "versions": versions,
        "seconds": round((ended - batch.started).total_seconds(), 3),
    }
    batch.status, batch.ended = "complete", ended
    await TrajectoryBatch.get_pymongo_collection().update_one(
        {"_id": batch.id}, {"$set": {"status": "complete", "stats": batch.stats, "ended": ended}}
    )
    return batch


async def _tokens_and_versions(batch_id: str, call_ids: set[str]) -> tuple[int, list[str]]:
    spans = DispatchedSamplingTask.get_pymongo_collection().find({"batch_id": batch_id}, {"weight_spans": 1})
    tokens, versions = 0, set()
    async for call in spans:
        if call["_id"] not in call_ids:
            continue
        for span in call["weight_spans"]:
            tokens += span["end"] - span["start"]
            versions.add(span["version"])
    return tokens, sorted(versions)


def progress_line(batch: TrajectoryBatch) -> str:
    stats: dict[str, Any] = batch.stats
    score = stats["mean_score"]
    shown = "none" if score is None else f"{score:.3f}"
    return f"{batch.id}: {stats['records']} records, mean score {shown}, {stats['seconds']:.1f} s"
