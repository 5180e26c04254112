"""Supervised fine-tuning data: the demonstrations of a task file, as the one batch and shard of an sft run."""

import asyncio
from typing import Any

from pymongo.errors import DuplicateKeyError

from agentrl_runtime.configs import AgentTrainingConfig
from agentrl_runtime.databases import Record, Run, Shard, Task, TrajectoryBatch, find_documents, insert_new, now
from agentrl_runtime.errors import AgentRLError
from agentrl_runtime.ids import batch_id, record_id
from agentrl_runtime.rollout.task_files import import_task_file
from agentrl_runtime.storage import ObjectStore
from agentrl_runtime.training.segments import demonstration_ids
from agentrl_runtime.training.shards import FilterSpec, build_shard

NO_DEMONSTRATION = "the task has no demonstration"
HAS_IMAGES = "the task has images, which the text trainer cannot take"
_CHUNK = 1000


async def ensure_demonstration_shard(
    config: AgentTrainingConfig, run: Run, store: ObjectStore, tokenizer: Any
) -> Shard:
    """The shard of batch RUN.b00000, which holds one row for each task of the dataset with a demonstration.

    Imports `train_file` first when it is given; doing it all again gives the same shard. Tasks without a
    demonstration, with images, with messages that a sampler would refuse, or with a prompt longer than
    max_prompt_tokens are left out with the reason.
    Raises AgentRLError when the dataset has no task, or no demonstration at all.
    """
    dataset = config.dataset_name
    if config.train_file is not None:
        await import_task_file(config.train_file, dataset)
    name = batch_id(run.id, 0)
    batch = await TrajectoryBatch.get(name)
    if batch is None or batch.status != "complete":
        batch = await _make_batch(config, run, dataset, tokenizer)
    return await build_shard(store, run, batch, FilterSpec.from_config(config), tokenizer=tokenizer)


async def _make_batch(config: AgentTrainingConfig, run: Run, dataset: str, tokenizer: Any) -> TrajectoryBatch:
    tasks = await find_documents(Task, {"dataset": dataset})
    tasks.sort(key=lambda task: (task.line, task.id))
    if not tasks:
        raise AgentRLError(f"dataset {dataset} has no tasks", mend="import a task file: `agentrl tasks import FILE`")
    if all(task.demonstration is None for task in tasks):
        raise AgentRLError(
            f"no task of dataset {dataset} has a demonstration",
            mend='stage sft trains on the field "demonstration" of the task file',
        )
    records = await asyncio.to_thread(_records, config, run.id, batch_id(run.id, 0), tasks, tokenizer)
    for start in range(0, len(records), _CHUNK):
        await insert_new(Record, records[start : start + _CHUNK])
    batch = TrajectoryBatch(
        id=batch_id(run.id, 0),
        run_id=run.id,
        number=0,
        split="train",
        dataset=dataset,
        epoch=0,
        task_ids=[task.id for task in tasks],
        expected_records=len(records),
        status="complete",
        stats={
            "records": len(records),
            "demonstrations": sum(1 for record in records if record.status == "completed"),
        },
        ended=now(),
    )
    try:
        # Last: a batch that is there and complete has all its records.
        await batch.insert()
    except DuplicateKeyError:
        found = await TrajectoryBatch.get(batch.id)
        return found or batch
    return batch


def _records(config: AgentTrainingConfig, run_id: str, batch: str, tasks: list[Task], tokenizer: Any) -> list[Record]:
    reasons = _reasons_to_leave_out(config, tasks, tokenizer)
    return [
        Record(
            id=record_id(batch, task.id, 0),
            run_id=run_id,
            batch_id=batch,
            task_id=task.id,
            attempt=0,
            split="train",
            origin="demonstration",
            status="cancelled" if task.id in reasons else "completed",
            reason=reasons.get(task.id, ""),
            ended=now(),
        )
        for task in tasks
    ]


def _reasons_to_leave_out(config: AgentTrainingConfig, tasks: list[Task], tokenizer: Any) -> dict[str, str]:
    """Task id -> why it gives no row."""
    reasons = {task.id: HAS_IMAGES for task in tasks if task.images}
    reasons |= {task.id: NO_DEMONSTRATION for task in tasks if task.demonstration is None}
    rest = [task for task in tasks if task.id not in reasons]
    ids = demonstration_ids(
        tokenizer, [task.prompt_messages() for task in rest], [task.demonstration or "" for task in rest]
    )
    most = config.max_prompt_tokens
    for task, found in zip(rest, ids, strict=True):
        if isinstance(found, str):
            reasons[task.id] = found
        elif len(found[0]) > most:
            reasons[task.id] = f"prompt of {len(found[0])} tokens is longer than max_prompt_tokens {most}"
    return reasons
