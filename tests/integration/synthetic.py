"""A small run written by hand: tasks, records, calls, shards, steps and versions, without server or trainer."""

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet

from agentrl_runtime.configs import AgentTrainingConfig
from agentrl_runtime.databases import (
    DispatchedSamplingTask,
    FileDigest,
    PolicyVersion,
    Record,
    Run,
    Shard,
    StepLedger,
    StreamPosition,
    Task,
    TrajectoryBatch,
    WeightSpan,
    now,
)
from agentrl_runtime.ids import batch_id, call_id, record_id, step_id, version_id
from agentrl_runtime.rollout.batches import finish_batch
from agentrl_runtime.rollout.task_files import import_task_file
from agentrl_runtime.runs import ensure_run
from agentrl_runtime.storage import ObjectStore
from agentrl_runtime.storage.bodies import pack_tokens
from agentrl_runtime.training.shards import read_rows, row_order


def fresh(name: str) -> str:
    """A name no other test of the session has."""
    return f"{name}-{uuid.uuid4().hex[:8]}"


def config_of(run_id: str, **values: object) -> AgentTrainingConfig:
    return AgentTrainingConfig(run_id=run_id, model_name_or_path="model", dataset=run_id, **values)


@dataclass
class Call:
    """One call: `prompt` and `output` ids; `spans` defaults to version 0 over the whole output."""

    prompt: list[int]
    output: list[int]
    spans: list[tuple[int, int, int]] | None = None  # (version number, start, end)
    finish: str = "stop"


@dataclass
class Attempt:
    task: int
    attempt: int
    score: float | None
    calls: list[Call] = field(default_factory=list)
    status: str = "completed"
    reason: str = ""


async def make_run(tmp_path: Path, tasks: int = 2, **values: object) -> tuple[Run, AgentTrainingConfig, list[Task]]:
    config = config_of(fresh("run"), **values)
    run = await ensure_run(config)
    path = tmp_path / f"{run.id}.jsonl"
    path.write_text("\n".join(f'{{"id": "t{n}", "query": "{n}+{n}=", "answer": "{2 * n}"}}' for n in range(tasks)))
    await import_task_file(path, run.id)
    found = await Task.find({"dataset": run.id}).to_list()
    return run, config, sorted(found, key=lambda task: task.line)


async def make_batch(
    store: ObjectStore, run: Run, number: int, tasks: Sequence[Task], attempts: Sequence[Attempt], *, oss: bool = True
) -> TrajectoryBatch:
    batch = TrajectoryBatch(
        id=batch_id(run.id, number),
        run_id=run.id,
        number=number,
        split="train",
        dataset=run.id,
        epoch=0,
        task_ids=[task.id for task in tasks],
        expected_records=len(attempts),
    )
    await batch.insert()
    for attempt in attempts:
        await _insert_attempt(store, run, batch, tasks[attempt.task].id, attempt, oss)
    return await finish_batch(batch)


async def _insert_attempt(
    store: ObjectStore, run: Run, batch: TrajectoryBatch, task_id: str, attempt: Attempt, oss: bool
) -> None:
    name = record_id(batch.id, task_id, attempt.attempt)
    calls = []
    for turn, call in enumerate(attempt.calls):
        spans = call.spans if call.spans is not None else [(0, 0, len(call.output))]
        calls.append(
            DispatchedSamplingTask(
                id=call_id(name, "lease", turn),
                run_id=run.id,
                batch_id=batch.id,
                record_id=name,
                task_id=task_id,
                turn=turn,
                service_id="svc_test",
                request={"messages": [{"role": "user", "content": "?"}]},
                **pack_tokens(
                    store, call.prompt, call.output, [-0.5 - 0.125 * n for n in range(len(call.output))], oss
                ),
                weight_spans=[
                    WeightSpan(version=version_id(run.id, version), start=start, end=end)
                    for version, start, end in spans
                ],
                text=" ".join(map(str, call.output)),
                finish_reason=call.finish,
                started=now(),
                ended=now(),
            )
        )
    if calls:
        await DispatchedSamplingTask.insert_many(calls)
    await Record(
        id=name,
        run_id=run.id,
        batch_id=batch.id,
        task_id=task_id,
        attempt=attempt.attempt,
        split="train",
        status=attempt.status,
        reason=attempt.reason,
        score=attempt.score,
        call_ids=[call.id for call in calls],
        ended=now(),
    ).insert()


def single_call_attempts(scores: Sequence[Sequence[float | None]]) -> list[Attempt]:
    """Attempts of each task with these scores; tokens differ between attempts."""
    return [
        Attempt(task, attempt, score, [Call([1, 2, task + 3], [10 + attempt, 20 + task, 0])])
        for task, group in enumerate(scores)
        for attempt, score in enumerate(group)
    ]


async def train(
    store: ObjectStore,
    run: Run,
    shards: Sequence[Shard],
    rows_per_step: int,
    *,
    parent: str | None = None,
    stale: frozenset[int] = frozenset(),
) -> list[PolicyVersion]:
    """Versions 0 (root) and one for each step over the shards, committed as the trainer does it."""
    versions = [await _commit(run, 0, parent, [], StreamPosition(), None)]
    number = 0
    for shard in shards:
        assert shard.seq is not None
        seed = f"0/{shard.id}/0"
        table = read_rows(store, shard.id)
        order = row_order(shard.rows, seed)
        for start in range(0, shard.rows, rows_per_step):
            stop = min(start + rows_per_step, shard.rows)
            number += 1
            step = make_step(run, number, shard, seed, start, stop)
            await step.insert()
            done = stop == shard.rows
            position = StreamPosition(seq=shard.seq + 1) if done else StreamPosition(seq=shard.seq, row=stop)
            statistics = make_statistics(table, shard.id, order[start:stop].tolist(), number, stale)
            versions.append(await _commit(run, number, versions[-1].id, [shard.id], position, store.put(statistics)))
    return versions


def make_step(run: Run, number: int, shard: Shard, seed: str, start: int, stop: int) -> StepLedger:
    return StepLedger(
        id=step_id(run.id, number),
        run_id=run.id,
        number=number,
        version_id=version_id(run.id, number),
        shard_id=shard.id,
        seq=shard.seq,
        pass_number=0,
        order_seed=seed,
        start=start,
        stop=stop,
        optimizer_step=True,
        metrics={"loss": 0.25},
    )


def make_statistics(table: pa.Table, shard_id: str, rows: list[int], step: int, stale: frozenset[int]) -> bytes:
    """One line a row, as the trainer writes them; rows in `stale` are left out."""
    taken = table.take(rows)
    numbers = {"loss": 0.25, "ratio_mean": 1.5, "clipped_fraction": 0.0, "staleness_mean": 1.0, "staleness_max": 1.0}
    columns = {
        "step": [step] * len(rows),
        "shard_id": [shard_id] * len(rows),
        "row": rows,
        "sample_id": taken["sample_id"].to_pylist(),
        "record_id": taken["record_id"].to_pylist(),
        "advantage": taken["advantage"].to_pylist(),
        **{name: [None if row in stale else value for row in rows] for name, value in numbers.items()},
        "tokens": [None if row in stale else 3.0 for row in rows],
        "left_out": ["too stale" if row in stale else None for row in rows],
    }
    sink = pa.BufferOutputStream()
    pyarrow.parquet.write_table(pa.table(columns), sink)
    return bytes(sink.getvalue())


async def _commit(
    run: Run, number: int, parent: str | None, shards: list[str], position: StreamPosition, statistics: str | None
) -> PolicyVersion:
    version = PolicyVersion(
        id=version_id(run.id, number),
        run_id=run.id,
        number=number,
        parent=parent,
        origin="" if parent else "model",
        first_step=max(0, number - 1),
        last_step=number,
        shard_ids=shards,
        position=position,
        config_digest=run.config_digest,
        code_revision="test",
        files=[FileDigest(name="config.json", sha256="0" * 64, size=2)],
        statistics_sha256=statistics,
    )
    await version.insert()
    return version
