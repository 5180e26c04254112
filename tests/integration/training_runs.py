"""Runs for the trainer's tests: a tiny model, shards of made-up rows, and trainers as real processes."""

import os
import random
import subprocess
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet

from agentrl_runtime.configs import AgentTrainingConfig
from agentrl_runtime.databases import PolicyVersion, Shard, StepLedger
from agentrl_runtime.ids import batch_id, derived_id
from agentrl_runtime.runs import ensure_run
from agentrl_runtime.storage import ObjectStore
from agentrl_runtime.training.launch import trainer_command
from agentrl_runtime.training.shards import row_order
from agentrl_runtime.training.tiny_model import make_tiny_model

PROMPT, REPLY, GROUP = 5, 4, 4


def tiny_model(folder: Path) -> Path:
    target = folder / "tiny"
    return target if target.exists() else make_tiny_model(target, seed=0)


def rl_config(folder: Path, **values: Any) -> AgentTrainingConfig:
    return AgentTrainingConfig(
        **{
            "run_id": f"run-{uuid.uuid4().hex[:8]}",
            "model_name_or_path": str(tiny_model(folder)),
            "output_dir": folder / "output",
            "dataset": "made-up",
            "learning_rate": 1e-3,
            "per_device_train_batch_size": 16,
            "max_policy_lag": 1000,
            **values,
        }
    )


def made_up_rows(count: int, seed: int, *, version: int = 0) -> list[dict[str, Any]]:
    """Rows of groups of four that share their prompt, as sampled by policy version `version`."""
    choose = random.Random(seed)
    rows = []
    for index in range(count):
        if index % GROUP == 0:
            prompt = [choose.randrange(4, 16) for _ in range(PROMPT)]
        reply = [choose.randrange(4, 16) for _ in range(REPLY)]
        advantage = choose.choice([-1.0, -0.5, 0.5, 1.0])
        rows.append(
            {
                "sample_id": derived_id("smp_", seed, index),
                "record_id": derived_id("rec_", seed, index),
                "task_id": derived_id("task_", seed, index // GROUP),
                "call_ids": [derived_id("call_", seed, index)],
                "input_ids": prompt + reply,
                "loss_mask": [0] * PROMPT + [1] * REPLY,
                "rollout_logprobs": [0.0] * PROMPT + [-2.5] * REPLY,
                "advantages": [0.0] * PROMPT + [advantage] * REPLY,
                "token_versions": [-1] * PROMPT + [version] * REPLY,
                "version_ids": [f"made-up.v{version:05d}"],
                "score": float(advantage > 0),
                "advantage": advantage,
            }
        )
    return rows


async def add_shard(store: ObjectStore, run_id: str, seq: int, rows: list[dict[str, Any]]) -> Shard:
    schema = pa.schema(
        [
            *((name, pa.string()) for name in ("sample_id", "record_id", "task_id")),
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
        metadata={"seq": str(seq)},
    )
    sink = pa.BufferOutputStream()
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows, schema=schema), sink)
    data = bytes(sink.getvalue())
    shard = Shard(
        id=store.put(data),
        run_id=run_id,
        batch_id=batch_id(run_id, seq),
        seq=seq,
        filter_spec={},
        filter_digest="",
        code_revision="test",
        rows=len(rows),
        tokens=sum(len(row["input_ids"]) for row in rows),
        size=len(data),
    )
    # The same rows of an earlier run, which is over: the order of rows depends on the shard's id.
    await Shard.find({"_id": shard.id}).delete()
    await shard.insert()
    return shard


async def make_run(store: ObjectStore, config: AgentTrainingConfig, shards: list[list[dict[str, Any]]]) -> list[Shard]:
    await ensure_run(config)
    return [await add_shard(store, config.run_id, seq, rows) for seq, rows in enumerate(shards, start=1)]


def start(config: AgentTrainingConfig) -> "subprocess.Popen[str]":
    """A trainer process; its stderr is a file beside its config, see `log_of`."""
    path = config.output_dir / f"{config.run_id}.yaml"
    config.write_yaml(path)
    with path.with_suffix(".log").open("a") as log:
        return subprocess.Popen(
            trainer_command(path, world_size=config.world_size),
            stderr=log,
            stdout=log,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )


def log_of(config: AgentTrainingConfig) -> str:
    return (config.output_dir / f"{config.run_id}.log").read_text()


def train(config: AgentTrainingConfig, *, code: int = 0) -> str:
    """Run a trainer to its end; returns its log."""
    process = start(config)
    try:
        assert process.wait(300) == code, log_of(config)
    finally:
        process.kill()
    return log_of(config)


async def versions_of(run_id: str) -> list[PolicyVersion]:
    return sorted(await PolicyVersion.find({"run_id": run_id}).to_list(), key=lambda version: version.number)


async def ledger_of(run_id: str) -> list[StepLedger]:
    return sorted(await StepLedger.find({"run_id": run_id}).to_list(), key=lambda step: step.number)


async def trained_counts(run_id: str, shards: list[Shard]) -> dict[tuple[str, int], Counter[int]]:
    """How often the committed steps took each row of each (shard, pass), from the ledger's ranges alone."""
    sizes = {shard.id: shard.rows for shard in shards}
    committed = {version.id for version in await versions_of(run_id)}
    counts: dict[tuple[str, int], Counter[int]] = {}
    for step in await ledger_of(run_id):
        assert step.version_id in committed
        order = row_order(sizes[step.shard_id], step.order_seed)
        taken = counts.setdefault((step.shard_id, step.pass_number), Counter())
        taken.update(int(row) for row in order[step.start : step.stop])
    return counts


def digests(version: PolicyVersion) -> dict[str, str]:
    return {file.name: file.sha256 for file in version.files}
