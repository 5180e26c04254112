"""The trainer as a process on the real stores: what it publishes, and what it refuses."""

import io
import json
import math
import signal
import time
from pathlib import Path

import pyarrow.parquet
import pytest
from training_runs import (
    add_shard,
    digests,
    ledger_of,
    log_of,
    made_up_rows,
    make_run,
    rl_config,
    start,
    tiny_model,
    train,
    trained_counts,
    versions_of,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentrl_runtime.databases import Run, StreamPosition
from agentrl_runtime.runs import set_run_state
from agentrl_runtime.storage import ObjectStore
from agentrl_runtime.training.datasets import FIRST_SEQ
from agentrl_runtime.training.policies import TRAINER_FILES, fetch_version, resolve_model


async def test_sft_publishes_versions_that_load_and_rl_starts_from_the_last(store: ObjectStore, tmp_path: Path) -> None:
    tasks = tmp_path / "sums.jsonl"
    lines = [{"id": f"{a}-{b}", "query": f"{a}+{b}=", "demonstration": str(a + b)} for a in range(5) for b in range(10)]
    tasks.write_text("\n".join(json.dumps(line) for line in lines))
    config = rl_config(
        tmp_path,
        stage="sft",
        loss_calculater="CrossEntropy",
        train_file=tasks,
        dataset=None,
        num_train_epochs=2,
        save_steps=3,
    )
    train(config)

    run = await Run.get(config.run_id)
    assert run is not None and run.state == "finished"
    versions = await versions_of(config.run_id)
    # 50 rows by 16 are 4 steps a pass; 8 steps in all, saved every third and at the end.
    assert [(v.first_step, v.last_step, v.final) for v in versions] == [
        (0, 0, False),
        (0, 3, False),
        (3, 6, False),
        (6, 8, True),
    ]
    assert versions[-1].position == StreamPosition(seq=FIRST_SEQ + 1)
    steps = await ledger_of(config.run_id)
    assert [(s.pass_number, s.start, s.stop) for s in steps[:5]] == [
        (0, 0, 16), (0, 16, 32), (0, 32, 48), (0, 48, 50), (1, 0, 16),
    ]  # fmt: skip
    assert steps[-1].metrics["loss"] < steps[0].metrics["loss"]

    assert versions[-1].statistics_sha256 is not None
    rows = pyarrow.parquet.read_table(io.BytesIO(store.get(versions[-1].statistics_sha256))).to_pylist()
    assert len(rows) == 18 and all(math.isfinite(row["loss"]) and row["tokens"] > 0 for row in rows)

    resolved = await resolve_model(f"{config.run_id}.latest", store)
    assert not TRAINER_FILES & {path.name for path in resolved.folder.iterdir()}
    _, report = AutoModelForCausalLM.from_pretrained(resolved.folder, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert AutoTokenizer.from_pretrained(resolved.folder)("1+1=")["input_ids"]

    following = rl_config(tmp_path, model_name_or_path=f"{config.run_id}.latest", max_steps=1)
    await make_run(store, following, [made_up_rows(16, seed=1)])
    train(following)
    root = (await versions_of(following.run_id))[0]
    assert root.parent == versions[-1].id and root.origin == ""
    assert digests(root)["model.safetensors"] == digests(versions[-1])["model.safetensors"]


async def test_two_ranks_train_what_one_does(store: ObjectStore, tmp_path: Path) -> None:
    shards = [made_up_rows(30, seed=2), made_up_rows(10, seed=3)]
    one = rl_config(tmp_path, max_steps=3, per_device_train_batch_size=16)
    two = rl_config(tmp_path, max_steps=3, per_device_train_batch_size=8, world_size=2)
    for config in (one, two):
        await make_run(store, config, shards)
        train(config)
    for step, other in zip(await ledger_of(one.run_id), await ledger_of(two.run_id), strict=True):
        assert (step.start, step.stop, step.metrics["tokens"]) == (other.start, other.stop, other.metrics["tokens"])
        for name in ("loss", "grad_norm", "kl_k3"):
            assert step.metrics[name] == pytest.approx(other.metrics[name], rel=1e-3, abs=1e-5)


async def test_stale_rows_and_empty_shards_are_consumed_and_written_down(store: ObjectStore, tmp_path: Path) -> None:
    config = rl_config(tmp_path, max_steps=2, max_policy_lag=0)
    fresh, stale = made_up_rows(8, seed=4, version=1), made_up_rows(8, seed=5, version=0)
    shards = await make_run(
        store, config, [made_up_rows(16, seed=6, version=0), [], made_up_rows(16, seed=7, version=0), fresh + stale]
    )
    log = train(config)
    steps = await ledger_of(config.run_id)
    assert [(s.seq, s.optimizer_step, len(s.left_out)) for s in steps] == [
        (1, True, 0), (2, False, 0), (3, False, 16), (4, True, 8),
    ]  # fmt: skip
    assert {entry.record_id for entry in steps[-1].left_out} == {row["record_id"] for row in stale}
    assert "staleness 1 is above max_policy_lag 0" in steps[-1].left_out[0].reason and "none of the 16 rows" in log
    versions = await versions_of(config.run_id)
    assert versions[-1].final and versions[-1].shard_ids == [shard.id for shard in shards[1:]]
    assert versions[-1].statistics_sha256 is not None
    rows = pyarrow.parquet.read_table(io.BytesIO(store.get(versions[-1].statistics_sha256))).to_pylist()
    assert sum(row["left_out"] is not None for row in rows) == 24 and len(rows) == 32


async def test_nan_stops_the_run_and_commits_nothing_of_the_step(store: ObjectStore, tmp_path: Path) -> None:
    config = rl_config(tmp_path, max_steps=5)
    bad = made_up_rows(16, seed=9)
    bad[3]["advantages"][-1] = math.nan
    await make_run(store, config, [made_up_rows(16, seed=8), bad])
    log = train(config, code=1)
    run = await Run.get(config.run_id)
    assert run is not None and run.state == "failed"
    assert f"{config.run_id}.s00002" in run.reason and "advantages is nan" in run.reason and "row" in run.reason
    assert "error: " in log
    assert [v.last_step for v in await versions_of(config.run_id)] == [0, 1]
    assert [s.number for s in await ledger_of(config.run_id)] == [1]


async def test_a_second_trainer_is_refused(store: ObjectStore, tmp_path: Path) -> None:
    config = rl_config(tmp_path, max_steps=100)
    await make_run(store, config, [])
    first = start(config)
    try:
        while not await versions_of(config.run_id):
            time.sleep(0.2)
        log = train(config, code=1)
        assert f"{config.run_id}/trainer is held by" in log
        assert first.poll() is None
    finally:
        first.send_signal(signal.SIGTERM)
        assert first.wait(60) == 0, log_of(config)


async def test_sigterm_and_pause_commit_what_is_done(store: ObjectStore, tmp_path: Path) -> None:
    config = rl_config(tmp_path, max_steps=100, save_steps=50)
    shards = await make_run(store, config, [made_up_rows(32, seed=10)])
    first = start(config)
    while "rows 16-32" not in log_of(config):
        assert first.poll() is None, log_of(config)
        time.sleep(0.1)
    first.send_signal(signal.SIGTERM)
    assert first.wait(60) == 0, log_of(config)
    assert [(v.last_step, v.final) for v in await versions_of(config.run_id)] == [(0, False), (2, False)]

    shards.append(await add_shard(store, config.run_id, 2, made_up_rows(16, seed=11)))
    second = start(config)
    while "rows 0-16 loss" not in log_of(config).split("stops at")[-1]:
        assert second.poll() is None, log_of(config)
        time.sleep(0.1)
    await set_run_state(config.run_id, "paused")
    assert second.wait(60) == 0, log_of(config)
    assert [v.last_step for v in await versions_of(config.run_id)] == [0, 2, 3]
    counts = await trained_counts(config.run_id, shards)
    assert all(set(taken.values()) == {1} for taken in counts.values())
    assert "is paused" in train(config, code=1)


async def test_damaged_checkpoints_and_wrong_models_are_refused_by_name(store: ObjectStore, tmp_path: Path) -> None:
    config = rl_config(tmp_path, max_steps=2)
    await make_run(store, config, [made_up_rows(16, seed=12), made_up_rows(16, seed=13)])
    train(config.model_copy(update={"model_name_or_path": str(tmp_path / "nowhere")}), code=1)
    following = rl_config(tmp_path, model_name_or_path=str(tmp_path / "nowhere"))
    assert "nowhere is no folder and no policy version" in train(following, code=1)

    first = start(config := rl_config(tmp_path, max_steps=2))
    await make_run(store, config, [made_up_rows(16, seed=14)])
    while len(await versions_of(config.run_id)) < 2:
        time.sleep(0.1)
    first.kill()
    first.wait()
    version = (await versions_of(config.run_id))[-1]
    digest = digests(version)["optimizer.safetensors"]
    damaged = b"x" + store.get(digest)[1:]
    store._client.put_object(store.bucket, store.key(digest), io.BytesIO(damaged), len(damaged))
    log = train(config, code=1)
    assert f"policy version {version.id}: optimizer.safetensors" in log and "does not have the bytes" in log
    assert fetch_version(version, store).joinpath("model.safetensors").is_file()
    assert tiny_model(tmp_path).is_dir()
