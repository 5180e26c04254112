"""Shards: immutable, content-addressed Parquet of training samples made from one batch and one filter spec."""

import asyncio
import hashlib
import json
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
from pydantic import BaseModel, ConfigDict
from pymongo.errors import DuplicateKeyError

from agentrl_runtime.configs import AgentTrainingConfig
from agentrl_runtime.databases import DBRecordData, LeftOut, Run, Shard, TrajectoryBatch, insert_new
from agentrl_runtime.errors import AgentRLError
from agentrl_runtime.local.endpoints import home
from agentrl_runtime.runs import code_revision
from agentrl_runtime.storage import ObjectStore
from agentrl_runtime.storage.objects import sha256_of_file
from agentrl_runtime.training.rows import Row, collect_rows

if TYPE_CHECKING:
    import pyarrow

_SEQ_ATTEMPTS = 100
HISTOGRAM_BINS = 10


class FilterSpec(BaseModel):
    """What decides which records of a batch are trained, and with what advantage."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    advantage_estimator: Literal["group_norm", "group_mean"] = "group_norm"
    adv_scaling: float = 1.0
    minimal_advantage: float | None = None
    drop_zero_advantage: bool = False
    skip_non_positive_advantage: bool = False
    drop_truncated: bool = False
    max_tokens: int | None = None  # a record with a longer row is left out: the trainer could not hold it

    @classmethod
    def from_config(cls, config: AgentTrainingConfig) -> Self:
        return cls(**{name: getattr(config, name) for name in cls.model_fields})

    def digest(self) -> str:
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


async def build_shard(
    store: ObjectStore,
    run: Run,
    batch: TrajectoryBatch,
    spec: FilterSpec,
    *,
    in_stream: bool = True,
    tokenizer: Any = None,
) -> Shard:
    """The shard of this batch under this filter spec; building it again gives the same document.

    With `in_stream` the first shard of a batch gets the next `seq` of the run's stream, which the trainer
    follows; a later one (a re-filter) has seq None. Demonstration records need `tokenizer`. Raises
    AgentRLError when records of the batch are unfinished, a score is not finite, or a call is missing.
    """
    collected = await collect_rows(store, batch, spec, tokenizer)
    rows = collected.rows
    data = await asyncio.to_thread(_parquet_bytes, rows, run.id, batch.id, spec)
    shard = Shard(
        id=await asyncio.to_thread(store.put, data),
        run_id=run.id,
        batch_id=batch.id,
        seq=None,
        filter_spec=spec.model_dump(mode="json"),
        filter_digest=spec.digest(),
        code_revision=code_revision(),
        rows=len(rows),
        tokens=sum(len(row.segment.input_ids) for row in rows),
        size=len(data),
        left_out=[LeftOut(record_id=record, reason=reason) for record, reason in collected.left_out],
        stats=_statistics(rows, len(collected.left_out)),
    )
    # The index goes in first: a shard that is there has all its samples.
    await _insert_samples(shard, rows)
    return await _enter_stream(shard, in_stream)


async def _insert_samples(shard: Shard, rows: list[Row]) -> None:
    samples = [
        DBRecordData(
            id=f"{row.sample_id}@{shard.id[:12]}",
            sample_id=row.sample_id,
            record_id=row.record_id,
            task_id=row.task_id,
            batch_id=shard.batch_id,
            shard_id=shard.id,
            row=number,
            tokens=len(row.segment.input_ids),
            trained_tokens=row.segment.trained_tokens,
            score=row.score,
            advantage=row.advantage,
            group=row.group,
        )
        for number, row in enumerate(rows)
    ]
    await insert_new(DBRecordData, samples)


async def _enter_stream(shard: Shard, in_stream: bool) -> Shard:
    """Insert the shard, or find it; unique indexes on (run, seq) and on the batch settle every race."""
    shards = Shard.get_pymongo_collection()
    numbered = {"seq": {"$type": "int"}}
    for _ in range(_SEQ_ATTEMPTS):
        found = await Shard.get(shard.id)
        if found is not None and (found.seq is not None or not in_stream):
            return found
        shard.seq = None
        if in_stream and await shards.find_one({"batch_id": shard.batch_id, **numbered}, {"_id": 1}) is None:
            last = await shards.find_one({"run_id": shard.run_id, **numbered}, {"seq": 1}, sort=[("seq", -1)])
            shard.seq = last["seq"] + 1 if last else 1
        elif found is not None:
            return found
        try:
            if found is None:
                await shard.insert()
            else:
                await shards.update_one({"_id": shard.id, "seq": None}, {"$set": {"seq": shard.seq}})
        except DuplicateKeyError:
            continue
        if (stored := await Shard.get(shard.id)) is not None:
            return stored
    raise AgentRLError(
        f"shard {shard.id[:12]} of batch {shard.batch_id} found no place in the stream of {shard.run_id}",
        mend="other processes insert shards all the time: stop all but one rollout process of the run",
    )


async def next_shard(run_id: str, after_seq: int) -> Shard | None:
    """The stream's first shard with seq > `after_seq`, or None while there is none. The first seq is 1."""
    return await Shard.find_one({"run_id": run_id, "seq": {"$type": "int", "$gt": after_seq}}, sort=[("seq", 1)])


def read_rows(store: ObjectStore, shard_id: str) -> "pyarrow.Table":
    """The rows of a shard; blocks. Fetched once into AGENTRL_HOME/cache/shards, digest checked each time.

    Columns: sample_id, record_id, task_id; call_ids list<string>; input_ids list<int32> [T], loss_mask
    list<uint8> [T], rollout_logprobs and advantages list<float32> [T] (0 where not trained), token_versions
    list<int32> [T] (policy version number, -1 where not sampled); version_ids list<string>; score; advantage.
    """
    import pyarrow.parquet

    path = home() / "cache" / "shards" / f"{shard_id}.parquet"
    if not path.exists() or sha256_of_file(path) != shard_id:
        store.get_file(shard_id, path)
    return pyarrow.parquet.read_table(path, memory_map=False)


def row_order(rows: int, order_seed: str) -> np.ndarray:
    """A permutation of range(rows): entry i is the row at place i of the pass with this seed.

    Ranks raw 64-bit words of PCG64, whose stream NumPy keeps for ever (its own `permutation` may change),
    so that a ledger entry names the same rows on every machine.
    """
    seed = int.from_bytes(hashlib.sha256(order_seed.encode()).digest()[:16], "little")
    return np.argsort(np.random.PCG64(seed).random_raw(rows), kind="stable")


def _schema(run_id: str, batch_id: str, spec: FilterSpec) -> "pyarrow.Schema":
    import pyarrow as pa

    return pa.schema(
        [
            ("sample_id", pa.string()),
            ("record_id", pa.string()),
            ("task_id", pa.string()),
            ("call_ids", pa.list_(pa.string())),
            ("input_ids", pa.list_(pa.int32())),
            ("loss_mask", pa.list_(pa.uint8())),
            ("rollout_logprobs", pa.list_(pa.float32())),
            ("advantages", pa.list_(pa.float32())),
            ("token_versions", pa.list_(pa.int32())),
            ("version_ids", pa.list_(pa.string())),
            ("score", pa.float64()),
            ("advantage", pa.float64()),
        ],
        # Names the batch and the spec, so that no two of them share a shard, not even an empty one.
        metadata={
            "agentrl.format": "1",
            "agentrl.run_id": run_id,
            "agentrl.batch_id": batch_id,
            "agentrl.filter_spec": json.dumps(spec.model_dump(mode="json"), sort_keys=True),
        },
    )


def _parquet_bytes(rows: list[Row], run_id: str, batch_id: str, spec: FilterSpec) -> bytes:
    """Equal rows give equal bytes: fixed order and writer options, and no time in the file."""
    import pyarrow as pa
    import pyarrow.parquet

    columns = {
        "sample_id": [row.sample_id for row in rows],
        "record_id": [row.record_id for row in rows],
        "task_id": [row.task_id for row in rows],
        "call_ids": [row.segment.call_ids for row in rows],
        "input_ids": [row.segment.input_ids for row in rows],
        "loss_mask": [row.segment.loss_mask for row in rows],
        "rollout_logprobs": [row.segment.logprobs for row in rows],
        "advantages": [[row.advantage * trained for trained in row.segment.loss_mask] for row in rows],
        "token_versions": [row.segment.versions for row in rows],
        "version_ids": [row.segment.version_ids for row in rows],
        "score": [row.score for row in rows],
        "advantage": [row.advantage for row in rows],
    }
    table = pa.table(columns, schema=_schema(run_id, batch_id, spec))
    sink = pa.BufferOutputStream()
    pyarrow.parquet.write_table(
        table, sink, version="2.6", compression="zstd", compression_level=3, row_group_size=4096, use_dictionary=True
    )
    return bytes(sink.getvalue())


def _statistics(rows: list[Row], left_out: int) -> dict[str, Any]:
    """Counts, and the scores of the records in the shard (a record of many rows counts once)."""
    scores = list({row.record_id: row.score for row in rows if row.score is not None}.values())
    values: dict[str, Any] = {
        "rows": len(rows),
        "records": len({row.record_id for row in rows}),
        "tasks": len({row.task_id for row in rows}),
        "left_out": left_out,
        "tokens": sum(len(row.segment.input_ids) for row in rows),
        "trained_tokens": sum(row.segment.trained_tokens for row in rows),
    }
    if scores:
        counts, edges = np.histogram(scores, bins=HISTOGRAM_BINS)
        values |= {
            "score_mean": float(np.mean(scores)),
            "score_min": min(scores),
            "score_max": max(scores),
            "score_histogram": {"edges": edges.tolist(), "counts": counts.tolist()},
        }
    return values
