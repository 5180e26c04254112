"""A trainer that is killed at any moment, again and again, ends where one that is never killed ends."""

import asyncio
import os
import random
import signal
from pathlib import Path

import pytest
from training_runs import (
    digests,
    ledger_of,
    log_of,
    made_up_rows,
    make_run,
    rl_config,
    start,
    train,
    trained_counts,
    versions_of,
)

from agentrl_runtime.databases import Run
from agentrl_runtime.storage import ObjectStore

KILLS = 5


@pytest.mark.parametrize("world_size", [1])
async def test_killed_runs_train_each_row_once_and_end_bit_for_bit_the_same(
    store: ObjectStore, tmp_path: Path, world_size: int
) -> None:
    rows = [made_up_rows(count, seed=count) for count in (48, 40, 0, 16, 56)]
    values = {"max_trained_count": 2, "max_steps": 22, "save_steps": 3, "world_size": world_size}
    calm, killed = rl_config(tmp_path, **values), rl_config(tmp_path, **values)
    await make_run(store, calm, rows)
    train(calm)

    shards = await make_run(store, killed, rows)
    moments = random.Random(7)
    kills = 0
    while kills < KILLS:
        process = start(killed)
        before = log_of(killed).count(" loss ")
        more = moments.randrange(0, 6)
        while process.poll() is None and log_of(killed).count(" loss ") < before + more:
            await asyncio.sleep(0.02)
        await asyncio.sleep(moments.random() * 0.3)
        if process.poll() is not None:
            break
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        kills += 1
    train(killed)
    assert kills >= 3, "the run ended before it could be killed"

    run = await Run.get(killed.run_id)
    assert run is not None and run.state == "finished"
    counts = await trained_counts(killed.run_id, shards)
    for shard in shards:
        for number in range(2 if shard.rows else 1):
            assert counts[shard.id, number] == dict.fromkeys(range(shard.rows), 1)
    steps, expected = await ledger_of(killed.run_id), await ledger_of(calm.run_id)
    assert [(s.number, s.seq, s.pass_number, s.start, s.stop) for s in steps] == [
        (s.number, s.seq, s.pass_number, s.start, s.stop) for s in expected
    ]
    ends = [(await versions_of(config.run_id))[-1] for config in (killed, calm)]
    names = ("model.safetensors", "optimizer.safetensors")
    assert [digests(ends[0])[name] for name in names] == [digests(ends[1])[name] for name in names]
