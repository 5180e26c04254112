"""Where something went: from a task line, record, call or sample down to every policy version it reached."""

import asyncio
from collections.abc import Sequence
from typing import Any

from agentrl_runtime.databases import (
    DBRecordData,
    DispatchedSamplingTask,
    EvalReport,
    PolicyVersion,
    Record,
    Run,
    Shard,
    StepLedger,
    Task,
    TrajectoryBatch,
)
from agentrl_runtime.lineage.facts import (
    batch_node,
    call_node,
    record_node,
    run_node,
    sample_node,
    shard_node,
    step_node,
    task_node,
    training_node,
    version_node,
)
from agentrl_runtime.lineage.nodes import Node, cut, known
from agentrl_runtime.lineage.reading import Document, Training, by_id, descendants, fetch, resolve, trainings
from agentrl_runtime.lineage.upstream import DEFAULT_LIMIT
from agentrl_runtime.storage import ObjectStore
from agentrl_runtime.training.shards import read_rows


async def impact(store: ObjectStore, text: str, limit: int | None = DEFAULT_LIMIT) -> Node:
    """The tree of what the thing with this id went into, ending in every policy version that it reached.

    The child of kind `reached` has the versions by run, those of other runs that started from them included.
    Raises AgentRLError when nothing has the id.
    """
    kind, name = await resolve(text)
    if kind == "task":
        node = task_node((await by_id(Task, [name]))[name], name)
        node.children = []
        return await _through_records(store, node, await fetch(Record, {"task_id": name}), limit)
    if kind == "record":
        record = (await by_id(Record, [name]))[name]
        return await _through_samples(store, record_node(record), await fetch(DBRecordData, {"record_id": name}), limit)
    if kind == "call":
        return await _of_call(store, name, limit)
    if kind == "sample":
        samples = await fetch(DBRecordData, {"sample_id": name})
        return await _through_samples(store, sample_node(samples[0]), samples, limit)
    if kind == "batch":
        return await _of_batch(name, limit)
    if kind == "shard":
        shard = (await by_id(Shard, [name]))[name]
        return await _through_shards(shard_node(shard), [shard], limit, named=True)
    if kind == "step":
        step = (await by_id(StepLedger, [name]))[name]
        # A ledger entry without an optimizer step changed no version.
        versions = await by_id(PolicyVersion, [step["version_id"]] if step["optimizer_step"] else [])
        return await _with_reach(step_node(step), versions, limit)
    if kind == "version":
        return await _of_version(name, limit)
    run = (await by_id(Run, [name]))[name]
    versions = {version["_id"]: version for version in await fetch(PolicyVersion, {"run_id": name})}
    return await _with_reach(run_node(run), versions, limit)


async def _through_records(store: ObjectStore, node: Node, records: list[Document], limit: int | None) -> Node:
    """Records, lowest score first, each with its samples and the steps that trained on them."""
    records.sort(key=lambda record: (record["score"] is None, record["score"], record["_id"]))
    samples = await fetch(DBRecordData, {"record_id": {"$in": [record["_id"] for record in records]}})
    taken = await trainings(store, ((sample["shard_id"], sample["row"]) for sample in samples))
    shown, node.more = cut(records, limit)
    for record in shown:
        child = record_node(record)
        own = [sample for sample in samples if sample["record_id"] == record["_id"]]
        child.children = [_trained_sample(sample, taken) for sample in own]
        node.children.append(child)
    return await _with_reach(node, _versions(taken), limit)


async def _through_samples(store: ObjectStore, node: Node, samples: list[Document], limit: int | None) -> Node:
    samples.sort(key=lambda sample: (sample["shard_id"], sample["row"]))
    taken = await trainings(store, ((sample["shard_id"], sample["row"]) for sample in samples))
    shown, node.more = cut(samples, limit)
    node.children = [_trained_sample(sample, taken) for sample in shown]
    return await _with_reach(node, _versions(taken), limit)


def _trained_sample(sample: Document, taken: dict[tuple[str, int], list[Training]]) -> Node:
    node = sample_node(sample)
    node.children = [training_node(training) for training in taken.get((sample["shard_id"], sample["row"]), [])]
    return node


def _versions(taken: dict[tuple[str, int], list[Training]]) -> dict[str, Document]:
    """The versions made by steps that trained on a row; a step that left it out does not count."""
    return {
        training.version["_id"]: training.version
        for found in taken.values()
        for training in found
        if training.left_out is None
    }


async def _of_call(store: ObjectStore, name: str, limit: int | None) -> Node:
    """The rows of the call's record that hold the call."""
    call = (await by_id(DispatchedSamplingTask, [name]))[name]
    samples = []
    for sample in await fetch(DBRecordData, {"record_id": call["record_id"]}):
        table = await asyncio.to_thread(read_rows, store, sample["shard_id"])
        if name in table.column("call_ids")[sample["row"]].as_py():
            samples.append(sample)
    return await _through_samples(store, call_node(call), samples, limit)


async def _of_batch(name: str, limit: int | None) -> Node:
    batch = (await by_id(TrajectoryBatch, [name]))[name]
    node = batch_node(batch)
    reports = await fetch(EvalReport, {"_id": name})
    node.children = [_report_node(report) for report in reports]
    return await _through_shards(node, await fetch(Shard, {"batch_id": name}), limit)


async def _through_shards(node: Node, shards: list[Document], limit: int | None, *, named: bool = False) -> Node:
    """Shards with the committed steps over them; `named`: the node is the one shard itself."""
    steps = await fetch(StepLedger, {"shard_id": {"$in": [shard["_id"] for shard in shards]}})
    versions = await by_id(PolicyVersion, (step["version_id"] for step in steps))
    committed = [step for step in steps if step["version_id"] in versions]
    committed.sort(key=lambda step: (step["run_id"], step["number"]))
    for shard in shards:
        place = node if named else shard_node(shard)
        shown, place.more = cut([step for step in committed if step["shard_id"] == shard["_id"]], limit)
        for step in shown:
            child = step_node(step)
            child.label += f", made {step['version_id']}"
            place.children.append(child)
        if not named:
            node.children.append(place)
    trained = {step["version_id"] for step in committed if step["optimizer_step"]}
    return await _with_reach(node, {name: versions[name] for name in trained}, limit)


async def _of_version(name: str, limit: int | None) -> Node:
    version = (await by_id(PolicyVersion, [name]))[name]
    node = version_node(version)
    node.children = [_report_node(report) for report in await fetch(EvalReport, {"version_id": name})]
    return await _with_reach(node, {name: version}, limit)


def _report_node(report: Document) -> Node:
    facts = known(accuracy=report["accuracy"], mean_score=report["mean_score"], records=report["records"])
    return Node("evaluation", report["_id"], f"on {report['dataset']}", facts)


async def _with_reach(node: Node, versions: dict[str, Document], limit: int | None) -> Node:
    """Add the versions that are, or descend from, these: one child for each run."""
    reached = await descendants(versions)
    total = sum(len(found) for found in reached.values())
    label = f"{total} policy versions of {len(reached)} runs" if total else "no policy version"
    below = [_reached_run(run, found, versions, limit) for run, found in sorted(reached.items())]
    node.children.append(Node("reached", "", label, {"versions": total, "runs": len(reached)}, below))
    return node


def _reached_run(run: str, found: Sequence[Document], direct: dict[str, Any], limit: int | None) -> Node:
    shown, more = cut(found, limit)
    children = [
        Node("version", version["_id"], "directly" if version["_id"] in direct else "by descent") for version in shown
    ]
    label = f"{len(found)} versions, {found[0]['_id']} to {found[-1]['_id']}"
    return Node("run", run, label, {"first": found[0]["_id"], "last": found[-1]["_id"]}, children, more)
