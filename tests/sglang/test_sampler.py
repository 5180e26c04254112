"""Attempts on the real server and stores: what is stored, what is given back, and what fails with which reason."""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Served, tiny_config
from synthetic import fresh
from test_inference import kill_server

from agentrl_runtime import ids
from agentrl_runtime.configs import AgentTrainingConfig
from agentrl_runtime.databases import (
    DispatchedSamplingTask,
    FileDigest,
    PolicyVersion,
    Record,
    Run,
    StreamPosition,
    Task,
    TrajectoryBatch,
    now,
)
from agentrl_runtime.rollout.batches import ensure_train_batch, task_ids_of
from agentrl_runtime.rollout.engine import RolloutEngine
from agentrl_runtime.rollout.evaluation import evaluate
from agentrl_runtime.rollout.math import QuestionSampler
from agentrl_runtime.rollout.queue import give_back_all, push_batch
from agentrl_runtime.rollout.sampler import AsyncSampler, NoTaskAvailableError, RecordFailed
from agentrl_runtime.rollout.session import SamplingSession, load_tokenizer
from agentrl_runtime.rollout.task_files import import_task_file
from agentrl_runtime.rollout.writer import LeaseLost, RecordWriter
from agentrl_runtime.runs import ensure_run
from agentrl_runtime.storage import ObjectStore
from agentrl_runtime.storage.bodies import unpack_messages, unpack_tokens
from agentrl_runtime.training.shards import FilterSpec, build_shard, read_rows


class Bench:
    """A run with imported tasks, its session on the shared server, and the version it serves."""

    def __init__(self, run: Run, session: SamplingSession, task_ids: list[str]) -> None:
        self.run, self.session, self.task_ids = run, session, task_ids
        self.config = session.config
        self.version = ids.version_id(run.id, 0)

    async def batch(self, number: int = 0) -> TrajectoryBatch:
        return await ensure_train_batch(self.config, number, self.task_ids)

    async def complete(self, sampler_class: type[AsyncSampler] = QuestionSampler) -> list[Record]:
        async with RolloutEngine(self.session, sampler_class).running() as engine:
            batch = await engine.complete(await self.batch())
        assert batch.status == "complete" and batch.stats["records"] == batch.expected_records
        return await Record.find({"batch_id": batch.id}).to_list()

    async def calls(self) -> list[DispatchedSamplingTask]:
        return await DispatchedSamplingTask.find({"run_id": self.run.id}).to_list()


@contextlib.asynccontextmanager
async def bench(
    store: ObjectStore, sglang: Served, tmp_path: Path, *, tasks: int = 4, lines: str = "", **values: Any
) -> AsyncIterator[Bench]:
    fitting: dict[str, Any] = {"num_generations": 2, "prompts_per_batch": tasks}
    config: AgentTrainingConfig = tiny_config(fresh("run"), **{**fitting, **values})
    run = await ensure_run(config)
    path = tmp_path / f"{run.id}.jsonl"
    path.write_text(lines or "\n".join(f'{{"query": "{n}+{n}=", "answer": "{2 * n}"}}' for n in range(tasks)))
    await import_task_file(path, config.dataset_name)
    version = ids.version_id(run.id, 0)
    await sglang.manager.update_weights(sglang.folder, version)
    tokenizer = load_tokenizer(sglang.folder)
    async with RecordWriter() as writer:
        session = SamplingSession(config, store, tokenizer, sglang.manager, writer, asyncio.Semaphore(64))
        yield Bench(run, session, await task_ids_of(config.dataset_name))


async def test_a_batch_stores_exact_tokens_and_becomes_a_shard(
    store: ObjectStore, sglang: Served, tmp_path: Path
) -> None:
    async with bench(store, sglang, tmp_path) as b:
        records = await b.complete()
        assert len(records) == 8 and {record.status for record in records} <= {"completed", "truncated"}
        calls = {call.id: call for call in await b.calls()}
        assert sorted(calls) == sorted(call for record in records for call in record.call_ids)
        tasks = {task.id: task for task in await Task.find({"dataset": b.config.dataset_name}).to_list()}
        for call in calls.values():
            prompt, output, logprobs = unpack_tokens(store, call)
            assert prompt == b.session.tokenizer.encode(tasks[call.task_id].query, add_special_tokens=False)
            assert 1 <= len(output) == len(logprobs) <= 4 and call.finish_reason in {"stop", "length"}
            assert [(s.version, s.start, s.end) for s in call.weight_spans] == [(b.version, 0, len(output))]
            assert call.service_id == sglang.manager.service_id and call.started <= call.ended
        batch = await TrajectoryBatch.get(ids.batch_id(b.run.id, 0))
        assert batch is not None and batch.stats["versions"] == [b.version]
        shard = await build_shard(store, b.run, batch, FilterSpec())
        rows = read_rows(store, shard.id).to_pylist()
        assert {row["record_id"] for row in rows} == {record.id for record in records} and shard.seq == 1


async def test_a_prompt_of_many_attempts_is_read_once(
    store: ObjectStore, sglang: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = "+".join(["1"] * 25) + "="
    answers: list[tuple[int, dict[str, Any]]] = []
    generate = sglang.manager.generate

    async def noted(body: dict[str, Any], *, timeout: float) -> dict[str, Any]:
        answer = await generate(body, timeout=timeout)
        answers.append((body["sampling_params"]["max_new_tokens"], answer["meta_info"]))
        return answer

    monkeypatch.setattr(sglang.manager, "generate", noted)
    lines = f'{{"query": "{long}", "answer": "25"}}\n{{"query": "1+1=", "answer": "2"}}'
    async with bench(store, sglang, tmp_path, tasks=2, lines=lines, num_generations=6, max_prompt_tokens=64) as b:
        assert len(await b.complete()) == 12
    ahead = [meta for new_tokens, meta in answers if new_tokens == 0]
    calls = [meta for new_tokens, meta in answers if new_tokens and meta["prompt_tokens"] >= len(long)]
    assert [meta["prompt_tokens"] for meta in ahead] == [len(long)] and len(answers) == 13
    assert len(calls) == 6 and all(meta["cached_tokens"] >= len(long) - 1 for meta in calls)


@pytest.mark.parametrize("error", [RuntimeError("tool said \ud800"), RecordFailed("tool said \ud800")])
async def test_half_a_surrogate_in_a_reason_is_stored_as_a_replacement(
    store: ObjectStore, sglang: Served, tmp_path: Path, error: Exception
) -> None:
    def fail(_: AsyncSampler) -> None:
        raise error

    async with bench(store, sglang, tmp_path, tasks=2) as b:
        records = await b.complete(sampler_of(fail))
        assert {record.status for record in records} == {"failed"}
        assert all("tool said \ufffd" in record.reason for record in records)


async def test_the_older_batch_is_begun_first(store: ObjectStore, sglang: Served, tmp_path: Path) -> None:
    begun: list[str] = []
    noting = sampler_of(lambda sampler: begun.append(sampler.record.batch_id))
    async with bench(store, sglang, tmp_path, tasks=6, max_concurrent_samples_per_process=5) as b:
        batches = [await b.batch(number) for number in range(3)]
        async with RolloutEngine(b.session, noting).running() as engine:
            done = await asyncio.gather(*(engine.complete(batch) for batch in batches))
    assert [batch.status for batch in done] == ["complete"] * 3
    assert begun == [batch.id for batch in batches for _ in range(12)]


async def test_two_engines_share_a_batch_without_doubles(store: ObjectStore, sglang: Served, tmp_path: Path) -> None:
    async with bench(store, sglang, tmp_path, tasks=16, max_concurrent_samples_per_process=3) as b:
        batch = await b.batch()
        engines = [RolloutEngine(b.session, QuestionSampler) for _ in range(2)]
        async with engines[0].running(), engines[1].running():
            await asyncio.gather(*(engine.complete(batch) for engine in engines))
        records = await Record.find({"batch_id": batch.id}).to_list()
        assert len(records) == 32 and all(record.tries == 1 and len(record.call_ids) == 1 for record in records)
        assert len(await b.calls()) == 32


async def test_new_weights_between_turns_are_noted(store: ObjectStore, sglang: Served, tmp_path: Path) -> None:
    class TwoTurns(AsyncSampler):
        async def run(self) -> None:
            await self.create_chat_completions(self.task.prompt_messages(), ignore_eos=True)
            await self.session.server.update_weights(sglang.other_folder, ids.version_id(self.record.run_id, 1))
            await self.create_chat_completions([*self.messages, {"role": "user", "content": "1+1="}])

        async def evaluate_record(self, record: Record) -> float:
            return float(len(self.messages))

    async with bench(store, sglang, tmp_path, tasks=1, num_generations=1, max_turns=2) as b:
        (record,) = await b.complete(TwoTurns)
        first, second = sorted(await b.calls(), key=lambda call: call.turn)
        assert record.call_ids == [first.id, second.id] and record.score == 4.0
        assert [call.weight_spans[0].version for call in (first, second)] == [b.version, f"{b.run.id}.v00001"]
        so_far = [*(first.prompt_ids or []), *(first.output_ids or [])]
        assert (second.prompt_ids or [])[: len(so_far)] == so_far


async def test_records_survive_a_killed_server(store: ObjectStore, sglang: Served, tmp_path: Path) -> None:
    slow = {"temperature": 1.0, "ignore_eos": True}
    async with bench(store, sglang, tmp_path, tasks=32, max_new_tokens=80, preferred_sampling_params=slow) as b:
        restarts = sglang.manager.restarts
        working = asyncio.create_task(b.complete())
        while sglang.manager.in_flight < 60:
            await asyncio.sleep(0.01)
        kill_server(sglang.manager)
        records = await working
        assert sglang.manager.restarts == restarts + 1
        assert len(records) == 64 and {record.status for record in records} <= {"completed", "truncated"}
        assert {span.version for call in await b.calls() for span in call.weight_spans} == {b.version}


async def test_a_batch_goes_on_where_a_dead_process_left_it(store: ObjectStore, sglang: Served, tmp_path: Path) -> None:
    async with bench(store, sglang, tmp_path, tasks=8) as b:
        batch = await b.batch()
        dead = await push_batch(batch, keep=6, lease_seconds=60)
        async with RolloutEngine(b.session, QuestionSampler).running() as engine:
            working = asyncio.create_task(engine.complete(batch))
            while await Record.find({"batch_id": batch.id, "call_ids": {"$ne": []}}).count() < 10:
                await asyncio.sleep(0.02)
            working.cancel()
        done = {record.id: record.call_ids for record in await Record.find({"call_ids": {"$ne": []}}).to_list()}
        assert await give_back_all(batch.id) == 6
        records = {record.id: record for record in await b.complete()}
        assert len(records) == 16 and {record.id for record in dead} <= records.keys()
        assert all(records[name].call_ids == call_ids for name, call_ids in done.items() if name in records)
        assert len(await b.calls()) == 16 and all(record.tries == 1 for record in records.values())
        with pytest.raises(LeaseLost):
            await b.session.writer.finish(dead[0].id, str(dead[0].lease_token), {"score": 9.0})


def sampler_of(run: Callable[[AsyncSampler], Any] | None = None, score: Any = 1.0) -> type[AsyncSampler]:
    class Made(AsyncSampler):
        async def run(self) -> None:
            if run is not None:
                run(self)
            await self.create_chat_completions(self.task.prompt_messages())

        async def evaluate_record(self, record: Record) -> float:
            return score  # type: ignore[no-any-return]

    return Made


def broken(_sampler: AsyncSampler) -> None:
    raise KeyError("tool")


@pytest.mark.parametrize(
    ("line", "sampler", "reason", "tries"),
    [
        ('{"query": "%s"}' % ("1" * 41), sampler_of(), "the prompt has 41 tokens, max_prompt_tokens is 40", 1),
        ('{"query": "1", "images": ["https://example.org/a.png"]}', sampler_of(), "has images", 1),
        ('{"query": "1"}', sampler_of(score=float("nan")), "rec_.*no number of at most", 1),
        ('{"query": "1"}', sampler_of(score="good"), "rec_.*no number of at most", 1),
        ('{"query": "1"}', sampler_of(broken), "KeyError: 'tool'", 3),
        ('{"query": "1", "scorer": "exact"}', QuestionSampler, "task_.*has no answer", 1),
    ],
)
async def test_attempts_that_cannot_succeed_say_why(
    store: ObjectStore,
    sglang: Served,
    tmp_path: Path,
    line: str,
    sampler: type[AsyncSampler],
    reason: str,
    tries: int,
) -> None:
    async with bench(store, sglang, tmp_path, tasks=1, lines=line, num_generations=1) as b:
        (record,) = await b.complete(sampler)
        assert record.status == "failed" and record.score is None and record.tries == tries
        assert re.search(reason, record.reason)


async def test_large_messages_go_to_the_object_store_and_half_surrogates_are_replaced(
    store: ObjectStore, sglang: Served, tmp_path: Path
) -> None:
    class Long(AsyncSampler):
        async def run(self) -> None:
            note = {"role": "user", "content": "1", "note": "x" * 70000 + "\ud800"}
            await self.create_chat_completions([note, {"role": "user", "content": "\udc00"}])

        async def evaluate_record(self, record: Record) -> float:
            return 0.0

    async with bench(store, sglang, tmp_path, tasks=1, num_generations=1) as b:
        await b.complete(Long)
        (call,) = await b.calls()
        assert "messages" not in call.request and call.request["half_surrogates_replaced"] == 2
        messages = unpack_messages(store, call.request)
        assert messages[0]["note"][-1] == messages[1]["content"] == "\ufffd"


async def test_one_unstorable_call_fails_alone(store: ObjectStore, sglang: Served, tmp_path: Path) -> None:
    async with bench(store, sglang, tmp_path, tasks=1, num_generations=2) as b:
        (one, two) = await push_batch(await b.batch(), keep=2, lease_seconds=60)
        good = await b.session.writer.add_call({"_id": fresh("call_"), "record_id": one.id, "run_id": b.run.id})
        bad = await b.session.writer.add_call({"_id": fresh("call_"), "record_id": two.id, "text": "\ud800"})
        await good
        with pytest.raises(UnicodeEncodeError):
            await bad
        await DispatchedSamplingTask.get_pymongo_collection().delete_one({"record_id": one.id})


async def test_a_sampler_made_from_a_config_claims_a_record(
    store: ObjectStore, sglang: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bench(store, sglang, tmp_path, tasks=1, num_generations=1) as b:
        await commit_version(b, store, sglang.folder)
        batch = await b.batch()
        await push_batch(batch)
        monkeypatch.setattr(sglang.manager, "config", b.config)
        await sglang.manager._register("ready")
        async with QuestionSampler(b.config) as sampler:
            assert sampler.record.batch_id == batch.id and sampler.task.query == "0+0="
            await sampler.run()
    # The sampler had a database client of its own.
    from agentrl_runtime.connections import open_stores

    async with open_stores():
        record = await Record.find_one({"batch_id": batch.id})
        assert record is not None and record.status in {"completed", "truncated"} and record.score is not None
        with pytest.raises(NoTaskAvailableError):
            async with QuestionSampler(b.config):
                pass


async def commit_version(b: Bench, store: ObjectStore, folder: Path) -> PolicyVersion:
    files = []
    for path in sorted(folder.iterdir()):
        digest, size = store.put_file(path)
        files.append(FileDigest(name=path.name, sha256=digest, size=size))
    version = PolicyVersion(
        id=b.version,
        run_id=b.run.id,
        number=0,
        parent=None,
        first_step=0,
        last_step=0,
        shard_ids=[],
        position=StreamPosition(seq=1),
        config_digest=b.run.config_digest,
        code_revision="test",
        files=files,
        statistics_sha256=None,
        created=now(),
    )
    await version.insert()
    return version


async def test_evaluation_is_greedy_and_made_once(store: ObjectStore, sglang: Served, tmp_path: Path) -> None:
    async with bench(store, sglang, tmp_path, tasks=6) as b:
        version = await commit_version(b, store, sglang.folder)
        async with RolloutEngine(b.session, QuestionSampler).running() as engine:
            report = await evaluate(engine, version, b.config.dataset_name)
            again = await evaluate(engine, version, b.config.dataset_name)
        assert report.id == again.id == f"{b.version}.eval" and report.records == 6 and report.failed == 0
        calls = await b.calls()
        assert len(calls) == 6 and {call.request["sampling_params"]["temperature"] for call in calls} == {0.0}
