"""Lineage both ways over a small run: which steps and versions a line of the task file reached, and the audit."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
from synthetic import Attempt, Call, config_of, fresh, make_batch, make_run, make_step, single_call_attempts, train
from typer.testing import CliRunner

from agentrl_runtime.commands.lineage import app
from agentrl_runtime.databases import (
    DBRecordData,
    DispatchedSamplingTask,
    FileDigest,
    PolicyVersion,
    Run,
    Shard,
    StepLedger,
    Task,
    TrajectoryBatch,
)
from agentrl_runtime.errors import AgentRLError
from agentrl_runtime.ids import record_id, version_id
from agentrl_runtime.lineage.audit import audit_run
from agentrl_runtime.lineage.nodes import Node
from agentrl_runtime.lineage.queries import impact, resolve, show_record, trace, worst_records
from agentrl_runtime.lineage.recompute import recompute_logprobs
from agentrl_runtime.lineage.render import render_record, render_tree
from agentrl_runtime.local.endpoints import Endpoints
from agentrl_runtime.runs import ensure_run
from agentrl_runtime.storage import ObjectStore
from agentrl_runtime.training.shards import FilterSpec, build_shard, read_rows, row_order
from agentrl_runtime.training.tiny_model import make_tiny_model


@dataclass
class Trained:
    run: Run
    tasks: list[Task]
    batches: list[TrajectoryBatch]
    shards: list[Shard]
    versions: list[PolicyVersion]

    def step_of(self, shard: int, row: int, rows_per_step: int = 3) -> int:
        """The number of the step that took a row, counted by hand."""
        order = row_order(self.shards[shard].rows, f"0/{self.shards[shard].id}/0").tolist()
        before = sum(-(-self.shards[n].rows // rows_per_step) for n in range(shard))
        return before + order.index(row) // rows_per_step + 1


@pytest.fixture
async def trained(store: ObjectStore, tmp_path: Path) -> Trained:
    """Two batches of two tasks with four attempts each: 16 rows in steps of three, so six versions after the root."""
    run, _, tasks = await make_run(tmp_path)
    batches = [
        await make_batch(store, run, n, tasks, single_call_attempts([[1, 0, 0, 1], [0, 1, 0, 0]])) for n in (0, 1)
    ]
    shards = [await build_shard(store, run, batch, FilterSpec()) for batch in batches]
    versions = await train(store, run, shards, 3)
    return Trained(run, tasks, batches, shards, versions)


def only(node: Node, kind: str) -> list[Node]:
    return [found for found in node.walk() if found.kind == kind]


async def test_impact_of_a_sample_names_its_step_and_every_later_version(store: ObjectStore, trained: Trained) -> None:
    rows = read_rows(store, trained.shards[1].id).to_pylist()
    for row in (0, 5, 7):
        tree = await impact(store, rows[row]["sample_id"], None)
        number = trained.step_of(1, row)
        steps = only(tree, "step")
        assert [step.id for step in steps] == [f"{trained.run.id}.s{number:05d}"]
        assert steps[0].facts["ratio_mean"] == 1.5 and steps[0].facts["loss"] == 0.25
        assert [node.id for node in only(tree, "version")] == [version_id(trained.run.id, n) for n in range(number, 7)]


async def test_trace_of_a_version_reaches_the_lines(store: ObjectStore, trained: Trained) -> None:
    tree = await trace(store, trained.versions[1].id)
    assert [node.id for node in only(tree, "step")] == [f"{trained.run.id}.s00001"]
    samples = only(tree, "sample")
    order = row_order(8, f"0/{trained.shards[0].id}/0")[:3].tolist()
    assert [sample.facts["row"] for sample in samples] == order
    lines = only(tree, "line")
    assert len(lines) == 3 and {line.facts["file"] for line in lines} == {f"{trained.run.id}.jsonl"}
    assert {line.facts["line"] for line in lines} <= {1, 2}


async def test_trace_works_from_every_kind_of_id(store: ObjectStore, trained: Trained) -> None:
    row = read_rows(store, trained.shards[0].id).to_pylist()[0]
    ids = {
        "sample": row["sample_id"], "record": row["record_id"], "call": row["call_ids"][0], "task": row["task_id"],
        "shard": trained.shards[0].id, "batch": trained.batches[0].id, "step": f"{trained.run.id}.s00002",
        "version": trained.versions[2].id, "run": trained.run.id,
    }  # fmt: skip
    for kind, name in ids.items():
        up, down = await trace(store, name), await impact(store, name)
        assert (up.kind, up.id, down.kind, down.id) == (kind, name, kind, name)
        if kind != "run":
            assert only(up, "line"), kind
        assert only(down, "reached")[0].facts["versions"] == {"version": 5, "step": 5, "run": 7}.get(
            kind, only(down, "reached")[0].facts["versions"]
        )
        assert only(down, "version"), kind
        assert render_tree(up) and render_tree(down)
        json.dumps([up.as_dict(), down.as_dict()])


async def test_impact_of_a_task_goes_through_all_its_records(store: ObjectStore, trained: Trained) -> None:
    tree = await impact(store, trained.tasks[0].id, None)
    assert len(only(tree, "record")) == 8 and len(only(tree, "sample")) == 8 and len(only(tree, "step")) == 8
    first = min(trained.step_of(0, row) for row in range(4))
    assert only(tree, "reached")[0].facts["versions"] == 7 - first
    short = await impact(store, trained.tasks[0].id, 3)
    assert len(only(short, "record")) == 3 and short.more == 5
    assert "and 5 more (--all lists them)" in render_tree(short)
    assert only(short, "reached")[0].facts["versions"] == 7 - first


async def test_impact_crosses_into_runs_that_started_from_a_version(store: ObjectStore, trained: Trained) -> None:
    child = await ensure_run(config_of(fresh("child")))
    await train(store, child, [], 1, parent=trained.versions[5].id)
    tree = await impact(store, trained.versions[4].id)
    reached = only(tree, "reached")[0]
    assert {node.id: node.facts["first"] for node in reached.children} == {
        trained.run.id: trained.versions[4].id, child.id: f"{child.id}.v00000",
    }  # fmt: skip
    assert reached.facts == {"versions": 4, "runs": 2}
    assert only(await impact(store, trained.versions[6].id), "reached")[0].facts == {"versions": 1, "runs": 1}


async def test_uncommitted_steps_and_rows_left_out_do_not_count(store: ObjectStore, tmp_path: Path) -> None:
    run, _, tasks = await make_run(tmp_path)
    batch = await make_batch(store, run, 0, tasks, single_call_attempts([[1, 0], [0, 1]]))
    shard = await build_shard(store, run, batch, FilterSpec())
    await make_step(run, 1, shard, "0/x/0", 0, 4).insert()
    rows = read_rows(store, shard.id).to_pylist()
    tree = await impact(store, rows[2]["sample_id"])
    assert not only(tree, "step") and only(tree, "reached")[0].facts["versions"] == 0
    await StepLedger.find({"run_id": run.id}).delete()
    await train(store, run, [shard], 4, stale=frozenset({2}))
    stale, fine = await impact(store, rows[2]["sample_id"]), await impact(store, rows[1]["sample_id"])
    assert "left out: too stale" in only(stale, "step")[0].label
    assert only(stale, "reached")[0].facts["versions"] == 0 and only(fine, "reached")[0].facts["versions"] == 1


async def test_ids_can_be_shortened_while_unique(store: ObjectStore, trained: Trained) -> None:
    shard = trained.shards[0].id
    assert await resolve(shard[:10]) == ("shard", shard)
    sample = read_rows(store, shard).column("sample_id")[0].as_py()
    assert await resolve(sample[:16]) == ("sample", sample)
    assert await resolve(f"{sample}@{shard[:12]}") == ("sample", sample)
    with pytest.raises(AgentRLError, match="begins"):
        await resolve(f"{trained.run.id}.v0000")
    for text in ("smp_nothing", "no-such-run", "0123456789abcdef", "x.v00001", "(.*"):
        with pytest.raises(AgentRLError, match="nothing has the id"):
            await resolve(text)


async def test_a_record_is_shown_with_its_tokens_and_steps(store: ObjectStore, trained: Trained) -> None:
    name = record_id(trained.batches[0].id, trained.tasks[0].id, 0)
    calls = DispatchedSamplingTask.get_pymongo_collection()
    await calls.update_one({"record_id": name}, {"$set": {"text": "\x1b[31mred\x07"}})
    detail = await show_record(store, name)
    assert [token.id for token in detail.calls[0].tokens] == [10, 20, 0]
    assert [token.logprob for token in detail.calls[0].tokens] == [-0.5, -0.625, -0.75]
    assert len(detail.steps) == 1 and detail.samples[0]["advantage"] == pytest.approx(1.0, abs=1e-3)
    text = render_record(detail)
    assert "\x1b[31m" not in text and "\x07" not in text and "red" in text and "0+0=" in text
    assert f"{trained.run.id}.jsonl:1" in text


async def test_worst_records_come_lowest_first(store: ObjectStore, trained: Trained) -> None:
    found = await worst_records(store, trained.run.id, 12)
    assert [detail.score for detail in found] == [0.0] * 10 + [1.0] * 2
    assert all(detail.calls[0].text for detail in found)


async def test_the_audit_holds_for_a_whole_run(store: ObjectStore, trained: Trained) -> None:
    report = await audit_run(trained.run.id, store)
    assert report.violations == []
    assert (report.versions, report.steps, report.rows, report.shards, report.samples) == (7, 6, 16, 2, 16)
    assert (report.calls, report.sampled_tokens) == (16, 48)


async def test_the_audit_holds_in_the_middle_of_a_shard_and_with_an_empty_one(
    store: ObjectStore, tmp_path: Path
) -> None:
    run, _, tasks = await make_run(tmp_path)
    spec = FilterSpec(drop_zero_advantage=True)
    batch = await make_batch(store, run, 0, tasks, single_call_attempts([[1, 0], [0, 1]]))
    await train(store, run, [await build_shard(store, run, batch, spec)], 3)
    tied = await make_batch(store, run, 1, tasks, single_call_attempts([[1, 1]]))
    assert (await build_shard(store, run, tied, spec)).seq == 2
    assert (await audit_run(run.id, store)).violations == []
    await PolicyVersion.find({"run_id": run.id, "number": 2}).delete()  # killed before the second commit
    report = await audit_run(run.id, store)
    assert report.violations == [] and report.uncommitted_steps == 1 and report.rows == 3


@pytest.mark.parametrize(
    ("breakage", "words"),
    [
        ("twice", "again"),
        ("skipped", "skipped"),
        ("missing step", "missing"),
        ("beyond", "untouched"),
        ("output", "not those of its calls"),
        ("call", "not in the database"),
        ("task", "no line of a task file"),
        ("index", "index of samples"),
        ("parent", "has parent"),
        ("stream", "without gaps"),
    ],
)
async def test_the_audit_finds_what_is_wrong(store: ObjectStore, trained: Trained, breakage: str, words: str) -> None:
    run = trained.run.id
    second = {"_id": f"{run}.s00002"}
    steps, calls = StepLedger.get_pymongo_collection(), DispatchedSamplingTask.get_pymongo_collection()
    shards, versions = Shard.get_pymongo_collection(), PolicyVersion.get_pymongo_collection()
    if breakage == "twice":
        await steps.update_one(second, {"$set": {"start": 2}})
    elif breakage == "skipped":
        await steps.update_one(second, {"$set": {"start": 4}})
    elif breakage == "missing step":
        await steps.delete_one(second)
    elif breakage == "beyond":
        await versions.update_one(
            {"_id": f"{run}.v00006"}, {"$set": {"position": {"seq": 2, "pass_number": 0, "row": 0}}}
        )
    elif breakage == "output":
        await calls.update_one(
            {"run_id": run, "batch_id": trained.batches[0].id}, {"$set": {"output_ids": [10, 21, 0]}}
        )
    elif breakage == "call":
        await calls.delete_one({"run_id": run})
    elif breakage == "task":
        await Task.get_pymongo_collection().update_one({"_id": trained.tasks[0].id}, {"$set": {"source": None}})
    elif breakage == "index":
        await DBRecordData.get_pymongo_collection().delete_one({"shard_id": trained.shards[0].id})
    elif breakage == "parent":
        await versions.update_one({"_id": f"{run}.v00003"}, {"$set": {"parent": f"{run}.v00001"}})
    else:
        await shards.update_one({"_id": trained.shards[1].id}, {"$set": {"seq": 3}})
    report = await audit_run(run, store)
    assert any(words in violation for violation in report.violations), report.violations


async def test_many_turn_rows_pass_the_audit_and_trace_to_their_own_calls(store: ObjectStore, tmp_path: Path) -> None:
    run, _, tasks = await make_run(tmp_path, tasks=1)
    calls = [Call([1], [10]), Call([1, 10, 2], [11]), Call([1, 9], [12])]
    batch = await make_batch(store, run, 0, tasks, [Attempt(0, 0, 1.0, calls), Attempt(0, 1, 0.0, calls[:1])])
    shard = await build_shard(store, run, batch, FilterSpec())
    await train(store, run, [shard], 2)
    assert (await audit_run(run.id, store)).violations == []
    rows = read_rows(store, shard.id).to_pylist()
    assert len(rows) == 3
    branch = rows[1]
    assert [node.id for node in only(await trace(store, branch["sample_id"]), "call")] == branch["call_ids"]
    down = await impact(store, branch["call_ids"][0])
    assert [node.id for node in only(down, "sample")] == [branch["sample_id"]]


async def test_logprobs_are_recomputed_with_the_recorded_policy(store: ObjectStore, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    folder = make_tiny_model(tmp_path / "model", 0)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    run, _, tasks = await make_run(tmp_path)
    batch = await make_batch(store, run, 0, tasks, single_call_attempts([[1, 0], [0, 1]]))
    for call in await DispatchedSamplingTask.find({"batch_id": batch.id}).to_list():
        prompt, output = [4, 5, 6], [7, 8, 1]
        with torch.inference_mode():
            scores = torch.log_softmax(model(torch.tensor([prompt + output])).logits[0].float(), dim=-1)
        call.prompt_ids, call.output_ids = prompt, output
        call.output_logprobs = [scores[2 + place, token].item() for place, token in enumerate(output)]
        await call.save()
    shard = await build_shard(store, run, batch, FilterSpec())
    (root,) = await train(store, run, [], 1)
    root.files = [
        FileDigest(name=path.name, sha256=store.put_file(path)[0], size=path.stat().st_size)
        for path in folder.iterdir()
    ]
    await root.save()
    report = await recompute_logprobs(run.id, store, limit=3)
    assert (report.samples, report.tokens) == (3, 9) and report.max_difference < 1e-4
    name = read_rows(store, shard.id).column("sample_id")[0].as_py()
    assert (await recompute_logprobs(run.id, store, [name])).samples == 1
    with pytest.raises(AgentRLError, match="no sampled rows"):
        await recompute_logprobs(run.id, store, ["smp_other"])


async def test_unknown_run_is_refused(store: ObjectStore) -> None:
    with pytest.raises(AgentRLError, match="no run"):
        await audit_run("nowhere", store)


def test_commands(services: Endpoints, trained: Trained) -> None:
    run = CliRunner()
    name = trained.run.id
    record = record_id(trained.batches[0].id, trained.tasks[0].id, 0)
    for line in (
        f"trace {trained.versions[1].id}",
        f"impact {trained.tasks[0].id}",
        f"trace {trained.batches[0].id}",
        f"impact {trained.batches[0].id}",
        f"trace {trained.shards[0].id}",
        f"impact {trained.shards[0].id}",
        f"show {trained.shards[0].id[:12]}",
        f"show {record}",
        f"show {name}",
        "runs",
        "worst --limit 1",
        f"worst --run {name} --limit 2",
        "audit",
        f"audit {name}",
    ):
        words = line.split()
        plain, as_json = run.invoke(app, words), run.invoke(app, [*words, "--json"])
        assert plain.exit_code == 0 and plain.stdout, (words, plain.exception)
        assert json.loads(as_json.stdout) is not None
    for nothing in ("", "a" * 5000, "a\nb", "smp_$"):
        refused = run.invoke(app, ["trace", nothing])
        assert isinstance(refused.exception, AgentRLError) and len(refused.exception.what) < 300
        assert "\n" not in refused.exception.what
    assert isinstance(run.invoke(app, ["audit", ""]).exception, AgentRLError)
    missing = run.invoke(app, ["trace", "smp_nothing"])
    assert missing.exit_code == 1 and isinstance(missing.exception, AgentRLError)
