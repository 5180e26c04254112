"""Shards on the real stores: which token is trained where, reasons, exact bytes, and places in the stream."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from synthetic import Attempt, Call, config_of, fresh, make_batch, make_run, single_call_attempts

from agentrl_runtime.databases import DBRecordData, DispatchedSamplingTask, Record, Shard, Task
from agentrl_runtime.errors import AgentRLError
from agentrl_runtime.ids import record_id
from agentrl_runtime.local.endpoints import home
from agentrl_runtime.rollout.task_files import import_task_file
from agentrl_runtime.runs import ensure_run
from agentrl_runtime.storage import ObjectStore
from agentrl_runtime.training.demonstrations import NO_DEMONSTRATION, ensure_demonstration_shard
from agentrl_runtime.training.shards import FilterSpec, build_shard, next_shard, read_rows

SPEC = FilterSpec()


async def test_single_call_records_become_rows(store: ObjectStore, tmp_path: Path) -> None:
    run, _, tasks = await make_run(tmp_path)
    batch = await make_batch(store, run, 0, tasks, single_call_attempts([[1, 0], [0.5, 0.5]]))
    shard = await build_shard(store, run, batch, SPEC)
    rows = read_rows(store, shard.id).to_pylist()
    assert [(row["task_id"], row["score"]) for row in rows] == [
        (tasks[0].id, 1.0), (tasks[0].id, 0.0), (tasks[1].id, 0.5), (tasks[1].id, 0.5),
    ]  # fmt: skip
    assert [round(row["advantage"], 3) for row in rows] == [1.0, -1.0, 0.0, 0.0]
    first = rows[0]
    assert first["input_ids"] == [1, 2, 3, 10, 20, 0]
    assert first["loss_mask"] == [0, 0, 0, 1, 1, 1]
    assert first["rollout_logprobs"] == [0, 0, 0, -0.5, -0.625, -0.75]
    assert first["token_versions"] == [-1, -1, -1, 0, 0, 0] and first["version_ids"] == [f"{run.id}.v00000"]
    assert first["advantages"][:3] == [0, 0, 0] and first["advantages"][3] == pytest.approx(1.0, abs=1e-4)
    assert (shard.seq, shard.rows, shard.tokens, shard.left_out) == (1, 4, 24, [])
    assert shard.stats["trained_tokens"] == 12 and shard.stats["score_mean"] == 0.5
    assert sum(shard.stats["score_histogram"]["counts"]) == 4
    samples = await DBRecordData.find({"shard_id": shard.id}).sort("row").to_list()
    assert [sample.sample_id for sample in samples] == [row["sample_id"] for row in rows]
    assert samples[0].group["scores_used"] == 2 and samples[0].group["mean"] == 0.5


async def test_building_again_gives_the_same_shard_and_refilters_stay_out_of_the_stream(
    store: ObjectStore, tmp_path: Path
) -> None:
    run, _, tasks = await make_run(tmp_path)
    batch = await make_batch(store, run, 0, tasks, single_call_attempts([[1, 0], [1, 1]]))
    shards = await asyncio.gather(*(build_shard(store, run, batch, SPEC) for _ in range(3)))
    assert {shard.id for shard in shards} == {shards[0].id} and {shard.seq for shard in shards} == {1}
    strict = FilterSpec(drop_zero_advantage=True)
    again = await build_shard(store, run, batch, strict)
    assert again.seq is None and again.rows == 2 and again.id != shards[0].id
    assert {item.reason for item in again.left_out} == {"zero_advantage"} and len(again.left_out) == 2
    assert await DBRecordData.find({"shard_id": shards[0].id}).count() == 4
    assert (await build_shard(store, run, batch, SPEC)).seq == 1


async def test_a_preview_enters_the_stream_later(store: ObjectStore, tmp_path: Path) -> None:
    run, _, tasks = await make_run(tmp_path)
    batch = await make_batch(store, run, 0, tasks, single_call_attempts([[1, 0]]))
    assert (await build_shard(store, run, batch, SPEC, in_stream=False)).seq is None
    assert await next_shard(run.id, 0) is None
    assert (await build_shard(store, run, batch, SPEC)).seq == 1


async def test_the_stream_has_no_gaps_when_built_at_once(store: ObjectStore, tmp_path: Path) -> None:
    run, _, tasks = await make_run(tmp_path)
    batches = [await make_batch(store, run, n, tasks, single_call_attempts([[1, 0]])) for n in range(6)]
    await asyncio.gather(*(build_shard(store, run, batch, SPEC) for batch in batches))
    seen, after = [], -1
    while (shard := await next_shard(run.id, after)) is not None:
        seen.append((shard.seq, shard.batch_id))
        after = shard.seq or 0
    assert [seq for seq, _ in seen] == [1, 2, 3, 4, 5, 6] and len({batch for _, batch in seen}) == 6


async def test_two_filters_at_once_give_one_shard_of_the_stream(store: ObjectStore, tmp_path: Path) -> None:
    run, _, tasks = await make_run(tmp_path)
    batch = await make_batch(store, run, 0, tasks, single_call_attempts([[1, 0], [1, 1]]))
    specs = [SPEC, FilterSpec(drop_zero_advantage=True), FilterSpec(skip_non_positive_advantage=True)]
    shards = await asyncio.gather(*(build_shard(store, run, batch, spec) for spec in specs))
    assert sorted(str(shard.seq) for shard in shards) == ["1", "None", "None"]


async def test_every_record_left_out_has_a_reason(store: ObjectStore, tmp_path: Path) -> None:
    run, _, tasks = await make_run(tmp_path, tasks=3)
    reply = [Call([1], [2, 3])]
    attempts = [
        Attempt(0, 0, 1.0, reply),
        Attempt(0, 1, None, reply),
        Attempt(0, 2, 0.0, [Call([1], [4, 4], finish="length")], status="truncated"),
        Attempt(0, 3, None, [], status="failed", reason="server went away"),
        Attempt(1, 0, None, reply),
        Attempt(1, 1, None, [], status="cancelled"),
        Attempt(2, 0, 1.0, []),
        Attempt(2, 1, 0.0, [Call(list(range(50)), [1])]),
    ]
    batch = await make_batch(store, run, 0, tasks, attempts)
    shard = await build_shard(store, run, batch, FilterSpec(drop_truncated=True, max_tokens=40))
    reasons = {item.record_id: item.reason for item in shard.left_out}
    name = {(a.task, a.attempt): record_id(batch.id, tasks[a.task].id, a.attempt) for a in attempts}
    assert reasons == {
        name[0, 1]: "no score",
        name[0, 2]: "truncated",
        name[0, 3]: "failed: server went away",
        name[1, 0]: "no score",
        name[1, 1]: "cancelled",
        name[2, 0]: "no sampled tokens",
        name[2, 1]: "row of 51 tokens is longer than max_tokens 40",
    }
    assert shard.rows == 1 and shard.rows + len(shard.left_out) == len(attempts)
    # The missing score leaves the group's statistics; the truncated attempt stays in them.
    assert read_rows(store, shard.id).column("advantage").to_pylist()[0] == pytest.approx(1.0, abs=1e-4)


async def test_an_empty_shard_is_valid_and_its_own(store: ObjectStore, tmp_path: Path) -> None:
    run, _, tasks = await make_run(tmp_path)
    spec = FilterSpec(drop_zero_advantage=True)
    first = await build_shard(store, run, await make_batch(store, run, 0, tasks, single_call_attempts([[1, 1]])), spec)
    second = await build_shard(store, run, await make_batch(store, run, 1, tasks, single_call_attempts([[1, 1]])), spec)
    assert (first.rows, second.rows, first.seq, second.seq) == (0, 0, 1, 2) and first.id != second.id
    assert read_rows(store, first.id).num_rows == 0


async def test_many_turns_train_each_sampled_token_once(store: ObjectStore, tmp_path: Path) -> None:
    run, _, tasks = await make_run(tmp_path, tasks=1)
    calls = [
        Call([1, 2], [10, 11], spans=[(0, 0, 1), (1, 1, 2)]),
        Call([1, 2, 10, 11, 3], [12, 13], spans=[(1, 0, 2)]),
        Call([1, 2, 3], [14]),  # history was rewritten: a branch
        Call([1, 2, 10, 11, 3, 12, 13, 4], [15], spans=[(2, 0, 1)]),  # goes on in the first row
    ]
    batch = await make_batch(store, run, 0, tasks, [Attempt(0, 0, 1.0, calls)])
    shard = await build_shard(store, run, batch, SPEC)
    rows = read_rows(store, shard.id).to_pylist()
    assert [row["input_ids"] for row in rows] == [[1, 2, 10, 11, 3, 12, 13, 4, 15], [1, 2, 3, 14]]
    assert [row["loss_mask"] for row in rows] == [[0, 0, 1, 1, 0, 1, 1, 0, 1], [0, 0, 0, 1]]
    assert rows[0]["token_versions"] == [-1, -1, 0, 1, -1, 1, 1, -1, 2]
    assert [len(row["call_ids"]) for row in rows] == [3, 1] and len({row["sample_id"] for row in rows}) == 2
    assert shard.stats["records"] == 1 and shard.stats["trained_tokens"] == 6


async def test_large_calls_are_read_back_from_the_object_store(store: ObjectStore, tmp_path: Path) -> None:
    run, _, tasks = await make_run(tmp_path, tasks=1)
    prompt, output = list(range(9000)), list(range(5000))
    batch = await make_batch(store, run, 0, tasks, [Attempt(0, 0, 1.0, [Call(prompt, output)])])
    call = await DispatchedSamplingTask.find_one(
        {"batch_id": batch.id, "record_id": record_id(batch.id, tasks[0].id, 0)}
    )
    assert call is not None and call.prompt_ids is None and call.tokens_sha256
    row = read_rows(store, (await build_shard(store, run, batch, SPEC)).id).to_pylist()[0]
    assert row["input_ids"] == [*prompt, *output] and sum(row["loss_mask"]) == 5000


@pytest.mark.parametrize("spans", [[(0, 0, 1)], [(0, 0, 1), (1, 2, 3)], [(0, 0, 3), (1, 2, 3)], [(0, 0, 4)]])
async def test_weight_spans_that_do_not_fit_are_refused(store: ObjectStore, tmp_path: Path, spans: Any) -> None:
    run, _, tasks = await make_run(tmp_path, tasks=1)
    batch = await make_batch(store, run, 0, tasks, [Attempt(0, 0, 1.0, [Call([1], [2, 3, 4], spans=spans)])])
    with pytest.raises(AgentRLError, match="call_"):
        await build_shard(store, run, batch, SPEC)


async def test_unfinished_records_missing_calls_and_bad_scores_are_refused(store: ObjectStore, tmp_path: Path) -> None:
    run, _, tasks = await make_run(tmp_path, tasks=1)
    batch = await make_batch(store, run, 0, tasks, single_call_attempts([[1, 0]]))
    name = record_id(batch.id, tasks[0].id, 0)
    records = Record.get_pymongo_collection()
    for change in (
        {"status": "leased"},
        {"status": "completed", "score": float("nan")},
        {"score": 1.0, "call_ids": ["call_x"]},
    ):
        await records.update_one({"_id": name}, {"$set": change})
        with pytest.raises(AgentRLError, match="rec_"):
            await build_shard(store, run, batch, SPEC)
    assert await Shard.find({"run_id": run.id}).count() == 0


async def test_a_damaged_cache_is_fetched_again(store: ObjectStore, tmp_path: Path) -> None:
    run, _, tasks = await make_run(tmp_path)
    batch = await make_batch(store, run, 0, tasks, single_call_attempts([[1, 0]]))
    shard = await build_shard(store, run, batch, SPEC)
    whole = read_rows(store, shard.id)
    path = home() / "cache" / "shards" / f"{shard.id}.parquet"
    path.write_bytes(path.read_bytes()[:-3])
    assert read_rows(store, shard.id).equals(whole)


class Tokenizer:
    """A character a token; the prompt ends with 99, eos is 0."""

    eos_token_id = 0
    all_special_tokens = ("\0",)

    def apply_chat_template(self, messages: list[dict[str, str]], **_: object) -> str:
        return "".join(message["content"] for message in messages) + chr(99)

    def __call__(self, texts: list[str], **_: object) -> dict[str, list[list[int]]]:
        return {"input_ids": [[ord(character) for character in text] for text in texts]}


async def test_demonstrations_become_one_shard(store: ObjectStore, tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    lines = [
        '{"query": "ab", "demonstration": "xy"}',
        '{"query": "c"}',
        '{"query": "%s", "demonstration": "z"}' % ("q" * 90),
    ]
    path.write_text("\n".join(lines))
    name = fresh("sft")
    config = config_of(name, stage="sft", loss_calculater="CrossEntropy", train_file=path, max_prompt_tokens=50)
    run = await ensure_run(config)
    shard = await ensure_demonstration_shard(config, run, store, Tokenizer())
    assert (await ensure_demonstration_shard(config, run, store, Tokenizer())).id == shard.id
    rows = read_rows(store, shard.id).to_pylist()
    assert [row["input_ids"] for row in rows] == [[97, 98, 99, 120, 121, 0]]
    assert rows[0]["loss_mask"] == [0, 0, 0, 1, 1, 1] and rows[0]["score"] is None and rows[0]["call_ids"] == []
    assert rows[0]["token_versions"] == [-1] * 6 and rows[0]["advantage"] == 1.0
    assert sorted(item.reason for item in shard.left_out) == [
        "prompt of 91 tokens is longer than max_prompt_tokens 50", NO_DEMONSTRATION,
    ]  # fmt: skip
    assert (shard.seq, shard.batch_id) == (1, f"{run.id}.b00000")


async def test_a_dataset_without_demonstrations_is_refused(store: ObjectStore, tmp_path: Path) -> None:
    config = config_of(fresh("sft"), stage="sft", loss_calculater="CrossEntropy")
    run = await ensure_run(config)
    with pytest.raises(AgentRLError, match="has no tasks"):
        await ensure_demonstration_shard(config, run, store, Tokenizer())
    path = tmp_path / "d.jsonl"
    path.write_text('{"query": "a"}')
    await import_task_file(path, run.id)
    with pytest.raises(AgentRLError, match="demonstration"):
        await ensure_demonstration_shard(config, run, store, Tokenizer())
    assert await Task.find({"dataset": run.id}).count() == 1
