"""Where something came from: from a checkpoint, step, shard or sample up to the lines of the task file."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from agentrl_runtime.databases import (
    DBRecordData,
    DispatchedSamplingTask,
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
    version_node,
)
from agentrl_runtime.lineage.nodes import Node, cut
from agentrl_runtime.lineage.reading import Document, by_id, fetch, resolve
from agentrl_runtime.storage import ObjectStore
from agentrl_runtime.training.shards import read_rows, row_order

DEFAULT_LIMIT = 20
_CALL_FIELDS = ("turn", "weight_spans", "service_id", "finish_reason", "status", "started", "text", "record_id")


async def trace(store: ObjectStore, text: str, limit: int | None = DEFAULT_LIMIT) -> Node:
    """The tree of what made the thing with this id, up to the task file; at most `limit` children a node.

    Raises AgentRLError when nothing has the id.
    """
    kind, name = await resolve(text)
    return await _TRACERS[kind](store, name, limit)


async def _of_task(store: ObjectStore, name: str, limit: int | None) -> Node:
    return task_node((await by_id(Task, [name]))[name], name)


async def _of_record(store: ObjectStore, name: str, limit: int | None) -> Node:
    return (await _records([name], limit))[name]


async def _of_call(store: ObjectStore, name: str, limit: int | None) -> Node:
    call = (await by_id(DispatchedSamplingTask, [name], _CALL_FIELDS))[name]
    node = call_node(call)
    record = (await _records([call["record_id"]], limit)).get(call["record_id"])
    if record is not None:
        record.children = [child for child in record.children if child.kind != "call"]
        node.children.append(record)
    node.children += await _versions_of_spans([call])
    return node


async def _of_sample(store: ObjectStore, name: str, limit: int | None) -> Node:
    """A sample can be a row of several shards (re-filters): each is a child, beside the one record behind them."""
    samples = await fetch(DBRecordData, {"sample_id": name})
    shards = await by_id(Shard, (sample["shard_id"] for sample in samples))
    samples.sort(key=lambda sample: (shards[sample["shard_id"]]["seq"] is None, sample["shard_id"]))
    node = (await _samples(store, samples[:1], limit))[0]
    node.children = [*(shard_node(shards[sample["shard_id"]]) for sample in samples), *node.children]
    return node


async def _of_shard(store: ObjectStore, name: str, limit: int | None) -> Node:
    shard = (await by_id(Shard, [name]))[name]
    samples = await fetch(DBRecordData, {"shard_id": name})
    samples.sort(key=lambda sample: sample["row"])
    shown, more = cut(samples, limit)
    batches, nodes = await asyncio.gather(by_id(TrajectoryBatch, [shard["batch_id"]]), _samples(store, shown, limit))
    node = shard_node(shard)
    node.children = [*map(batch_node, batches.values()), *nodes]
    node.more = more
    return node


async def _of_batch(store: ObjectStore, name: str, limit: int | None) -> Node:
    batch = (await by_id(TrajectoryBatch, [name]))[name]
    shown, more = cut(batch["task_ids"], limit)
    tasks = await by_id(Task, shown)
    node = batch_node(batch)
    node.children = [task_node(tasks.get(task), task) for task in shown]
    node.more = more
    return node


async def _of_step(store: ObjectStore, name: str, limit: int | None) -> Node:
    return (await _steps(store, list((await by_id(StepLedger, [name])).values()), limit))[0]


async def _of_version(store: ObjectStore, name: str, limit: int | None) -> Node:
    version = (await by_id(PolicyVersion, [name]))[name]
    steps, parents = await asyncio.gather(
        fetch(StepLedger, {"version_id": name, "number": {"$lte": version["last_step"]}}),
        by_id(PolicyVersion, [version["parent"]] if version["parent"] else []),
    )
    steps.sort(key=lambda step: step["number"])
    shown, more = cut(steps, limit)
    node = version_node(version)
    # A version of many steps shows fewer rows of each, so that the tree stays readable.
    rows = limit if limit is None or len(shown) < 2 else max(3, limit // len(shown))
    node.children = [*map(version_node, parents.values()), *await _steps(store, shown, rows)]
    node.more = more
    return node


async def _of_run(store: ObjectStore, name: str, limit: int | None) -> Node:
    run = (await by_id(Run, [name]))[name]
    versions = sorted(await fetch(PolicyVersion, {"run_id": name}), key=lambda item: -item["number"])
    shown, more = cut(versions, limit)
    node = run_node(run)
    node.children = [version_node(version) for version in shown]
    node.more = more
    return node


async def _steps(store: ObjectStore, steps: Sequence[Document], limit: int | None) -> list[Node]:
    """Each step with the samples it took, in the order it took them."""
    shards = await by_id(Shard, (step["shard_id"] for step in steps))
    taken = []
    for step in steps:
        order = row_order(shards[step["shard_id"]]["rows"], step["order_seed"])[step["start"] : step["stop"]].tolist()
        taken.append(cut(order, limit))
    wanted = [(step["shard_id"], row) for step, (rows, _) in zip(steps, taken, strict=True) for row in rows]
    rows_of: dict[str, list[int]] = {}
    for shard, row in wanted:
        rows_of.setdefault(shard, []).append(row)
    places = [{"shard_id": shard, "row": {"$in": rows}} for shard, rows in rows_of.items()]
    samples = await fetch(DBRecordData, {"$or": places} if len(places) > 1 else places[0]) if places else []
    by_place = {(sample["shard_id"], sample["row"]): sample for sample in samples}
    found = [place for place in wanted if place in by_place]
    nodes = await _samples(store, [by_place[place] for place in dict.fromkeys(found)], limit)
    node_of = dict(zip(dict.fromkeys(found), nodes, strict=True))
    made = []
    for step, (rows, more) in zip(steps, taken, strict=True):
        node = step_node(step)
        node.children = [node_of[step["shard_id"], row] for row in rows if (step["shard_id"], row) in node_of]
        node.more = more
        made.append(node)
    return made


async def _samples(store: ObjectStore, samples: Sequence[Document], limit: int | None) -> list[Node]:
    """Each sample with its record, the calls that are in its row, and its task."""
    calls_of: dict[str, list[str]] = {}
    for shard in dict.fromkeys(sample["shard_id"] for sample in samples):
        column = (await asyncio.to_thread(read_rows, store, shard)).column("call_ids")
        for sample in samples:
            if sample["shard_id"] == shard:
                calls_of[sample["_id"]] = column[sample["row"]].as_py()
    records = await _records([sample["record_id"] for sample in samples], None)
    nodes = []
    for sample in samples:
        node = sample_node(sample)
        if (whole := records.get(sample["record_id"])) is not None:
            inside = calls_of[sample["_id"]]
            calls = [child for child in whole.children if child.kind == "call" and child.id in inside]
            shown, more = cut(calls, limit)
            others = [child for child in whole.children if child.kind != "call"]
            node.children.append(Node(whole.kind, whole.id, whole.label, whole.facts, [*shown, *others], more))
        nodes.append(node)
    return nodes


async def _records(ids: Sequence[str], limit: int | None) -> dict[str, Node]:
    """Each record with its calls and its task."""
    records = await by_id(Record, ids)
    wanted = [call for record in records.values() for call in cut(record["call_ids"], limit)[0]]
    calls, tasks = await asyncio.gather(
        by_id(DispatchedSamplingTask, wanted, _CALL_FIELDS),
        by_id(Task, (record["task_id"] for record in records.values())),
    )
    nodes = {}
    for name, record in records.items():
        node = record_node(record)
        shown, node.more = cut(record["call_ids"], limit)
        node.children = [call_node(calls[call]) for call in shown if call in calls]
        node.children.append(task_node(tasks.get(record["task_id"]), record["task_id"]))
        nodes[name] = node
    return nodes


async def _versions_of_spans(calls: Sequence[Document]) -> list[Node]:
    names = [span["version"] for call in calls for span in call["weight_spans"]]
    return [version_node(version) for version in (await by_id(PolicyVersion, names)).values()]


_TRACERS: dict[str, Callable[[ObjectStore, str, int | None], Awaitable[Node]]] = {
    "task": _of_task,
    "record": _of_record,
    "call": _of_call,
    "sample": _of_sample,
    "shard": _of_shard,
    "batch": _of_batch,
    "step": _of_step,
    "version": _of_version,
    "run": _of_run,
}
