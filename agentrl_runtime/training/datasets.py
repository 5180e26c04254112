"""Which rows the next optimizer step takes, and how a row becomes a training sequence.

A run's shards form one stream. A step takes rows [start, stop) of a seeded order of one shard in one pass, and
never rows of two shards; so a place in the stream is (shard, pass, row), and it says all that is done.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from agentrl_runtime.configs import AgentTrainingConfig
from agentrl_runtime.databases import LeftOut, Run, Shard, StreamPosition, TaskDataset
from agentrl_runtime.errors import AgentRLError
from agentrl_runtime.storage import ObjectStore
from agentrl_runtime.training.bridge import AsyncBridge
from agentrl_runtime.training.packing import TrainingSequence
from agentrl_runtime.training.shards import next_shard, read_rows, row_order

FIRST_SEQ = 1
POLL_SECONDS = 0.1
#: A waiting dataset gives `Wait` this often, so that the trainer can look at its other duties.
TURN_SECONDS = 1.0
TIED_STEP = "every advantage of the step is zero, so that it teaches nothing"

#: One Parquet row as a dict, its number in the shard, and the number of the version that trains on it.
ConvertRecordToData = Callable[[dict[str, Any], int, int], TrainingSequence]


@dataclass(frozen=True)
class StepPlan:
    """Rows [start, stop) of the order that `order_seed` gives; `after` is the place in the stream behind them."""

    shard_id: str
    seq: int
    rows: int
    pass_number: int
    order_seed: str
    start: int
    stop: int
    after: StreamPosition

    def row_numbers(self) -> np.ndarray:
        """The shard's row numbers that this step takes, in the order of the pass."""
        return row_order(self.rows, self.order_seed)[self.start : self.stop]


@dataclass(frozen=True)
class ShardDone:
    """A shard without rows: it is consumed, and there is nothing to train."""

    shard_id: str
    seq: int
    order_seed: str
    after: StreamPosition
    pass_number: int = 0
    start: int = 0
    stop: int = 0


@dataclass(frozen=True)
class Wait:
    """The next shard is not there yet."""


@dataclass(frozen=True)
class StreamShard:
    id: str
    seq: int
    rows: int


def plan_step(
    position: StreamPosition, shard: StreamShard | None, *, rows_per_step: int, passes: int | None, seed: int
) -> StepPlan | ShardDone | Wait:
    """The step at `position`. `shard` is the first in the stream whose `seq` is not below the position's.

    `passes` None goes over the shard for ever. Raises AgentRLError when the shard that the position is in the
    middle of is missing from the stream.
    """
    if shard is None:
        return Wait()
    if shard.seq != position.seq and (position.row or position.pass_number):
        raise AgentRLError(
            f"shard number {position.seq} of the stream is missing, and {position.row} of its rows are trained",
            mend="restore its document: the stream of a run has no gaps",
        )
    pass_number = position.pass_number
    order_seed = f"{seed}/{shard.id}/{pass_number}"
    if shard.rows == 0:
        return ShardDone(shard.id, shard.seq, order_seed, StreamPosition(seq=shard.seq + 1))
    stop = min(position.row + rows_per_step, shard.rows)
    if stop < shard.rows:
        after = StreamPosition(seq=shard.seq, pass_number=pass_number, row=stop)
    elif passes is None or pass_number + 1 < passes:
        after = StreamPosition(seq=shard.seq, pass_number=pass_number + 1)
    else:
        after = StreamPosition(seq=shard.seq + 1)
    return StepPlan(shard.id, shard.seq, shard.rows, pass_number, order_seed, position.row, stop, after)


def passes_of(config: AgentTrainingConfig) -> int | None:
    """Passes over each shard. In sft, `max_steps` alone ends the run where it is set."""
    return None if config.stage == "sft" and config.max_steps >= 0 else config.passes


async def shards_of_run(config: AgentTrainingConfig) -> int | None:
    """Shards after which the run ends; None where `max_steps` ends it.

    Raises AgentRLError when the training dataset, whose size says it, is not imported.
    """
    if config.max_steps >= 0:
        return None
    if config.stage == "sft":
        return 1
    dataset = await TaskDataset.get(config.dataset_name)
    if dataset is None:
        raise AgentRLError(
            f"dataset {config.dataset_name} is not imported, so the length of an epoch is not known",
            mend="run `agentrl tasks import FILE`, or set max_steps",
        )
    return math.ceil(dataset.tasks / config.prompts_per_batch) * config.num_train_epochs


class DBIterableDataset:
    """The steps of a run's stream from a position on: `(plan, rows)`, with `Wait` while a shard is not there yet.

    `rows` is a table of the rows that the plan takes, in its order. It ends when the run is no longer in state
    `running` or when `shards` shards are consumed; `run_state` tells which.
    """

    def __init__(
        self,
        config: AgentTrainingConfig,
        store: ObjectStore,
        bridge: AsyncBridge,
        *,
        position: StreamPosition,
        shards: int | None,
    ) -> None:
        self.config, self.store, self.bridge = config, store, bridge
        self.position = position
        self.shards = shards
        self.run_state = "running"
        self._state_due = 0.0
        self._shard: StreamShard | None = None
        self._table: tuple[str, pa.Table] | None = None

    @property
    def consumed_all(self) -> bool:
        """All shards of the run are behind the position."""
        return self.shards is not None and self.position.seq - FIRST_SEQ >= self.shards

    def __iter__(self) -> Iterator[tuple[StepPlan | ShardDone | Wait, pa.Table | None]]:
        turn_ends = time.monotonic() + TURN_SECONDS
        while True:
            self.bridge.run(self._look())
            if self.run_state != "running" or self.consumed_all:
                return
            plan = plan_step(
                self.position,
                self._shard,
                rows_per_step=self.config.rows_per_step,
                passes=passes_of(self.config),
                seed=self.config.seed,
            )
            if isinstance(plan, Wait):
                if time.monotonic() >= turn_ends:
                    turn_ends = time.monotonic() + TURN_SECONDS
                    yield plan, None
                time.sleep(POLL_SECONDS)
                continue
            self.position = plan.after
            yield plan, self._rows(plan) if isinstance(plan, StepPlan) else None
            turn_ends = time.monotonic() + TURN_SECONDS

    async def _look(self) -> None:
        if time.monotonic() >= self._state_due:
            self._state_due = time.monotonic() + TURN_SECONDS
            run = await Run.get(self.config.run_id)
            self.run_state = run.state if run is not None else "removed"
        if self._shard is None or self._shard.seq < self.position.seq:
            found = await next_shard(self.config.run_id, self.position.seq - 1)
            self._shard = _head(found) if found is not None else None

    def _rows(self, plan: StepPlan) -> pa.Table:
        if self._table is None or self._table[0] != plan.shard_id:
            table = read_rows(self.store, plan.shard_id)
            if table.num_rows != plan.rows:
                raise AgentRLError(
                    f"shard {plan.shard_id} has {table.num_rows} rows, its document says {plan.rows}",
                    mend="build the shard again from its batch",
                )
            self._table = (plan.shard_id, table)
        return self._table[1].take(pa.array(plan.row_numbers()))


def _head(shard: Shard) -> StreamShard:
    assert shard.seq is not None
    return StreamShard(shard.id, shard.seq, shard.rows)


def convert_record_to_data_func(row: dict[str, Any], number: int, policy_version: int) -> TrainingSequence:
    """The default conversion: tokens as stored, staleness counted in versions of this run.

    Tokens that no version sampled (prompts, demonstrations) have version -1 and staleness 0.
    """
    versions = row["token_versions"] or [-1] * len(row["input_ids"])
    return TrainingSequence(
        input_ids=row["input_ids"],
        loss_mask=row["loss_mask"],
        rollout_logprobs=row["rollout_logprobs"],
        advantages=row["advantages"],
        staleness=[policy_version - version if version >= 0 else 0 for version in versions],
        row=number,
        group=row["task_id"],
    )


def training_sequences(
    rows: pa.Table,
    numbers: list[int],
    *,
    policy_version: int,
    max_policy_lag: int,
    convert: ConvertRecordToData = convert_record_to_data_func,
) -> tuple[list[TrainingSequence], list[LeftOut]]:
    """The sequences of a step, and the rows that are left out with the reason.

    A row is left out when a trained token of it is too stale; all are when every advantage is zero.
    """
    sequences: list[TrainingSequence] = []
    left_out: list[LeftOut] = []
    for row, number in zip(rows.to_pylist(), numbers, strict=True):
        sequence = convert(row, number, policy_version)
        lag = max((s for s, kept in zip(sequence.staleness, sequence.loss_mask, strict=True) if kept), default=0)
        if lag > max_policy_lag:
            reason = f"row {number}: staleness {lag} is above max_policy_lag {max_policy_lag}"
            left_out.append(LeftOut(record_id=row["record_id"], reason=reason))
        else:
            sequences.append(sequence)
    if sequences and not any(_teaches(sequence) for sequence in sequences):
        # The gradient would be zero, but the optimizer's momentum would still move the weights.
        record_of = dict(zip(numbers, rows["record_id"].to_pylist(), strict=True))
        left_out += [LeftOut(record_id=record_of[s.row], reason=f"row {s.row}: {TIED_STEP}") for s in sequences]
        return [], left_out
    return sequences, left_out


def _teaches(sequence: TrainingSequence) -> bool:
    return any(a != 0 and kept for a, kept in zip(sequence.advantages, sequence.loss_mask, strict=True))
