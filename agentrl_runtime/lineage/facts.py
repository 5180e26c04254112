"""What a node tells of each kind of document."""

from typing import Any

from agentrl_runtime.lineage.nodes import Node, known
from agentrl_runtime.lineage.reading import Document, Training

_LABEL = 72


def shortened(text: str, length: int = _LABEL) -> str:
    text = " ".join(text.split())
    return text if len(text) <= length else text[: length - 1] + "…"


def task_node(task: Document | None, task_id: str) -> Node:
    """A task and, below it, the line of the file it was read from."""
    if task is None:
        return Node("task", task_id, "is not in the database")
    asked = task.get("query") or next(
        (str(m.get("content")) for m in reversed(task.get("messages") or []) if m.get("role") == "user"), ""
    )
    facts = known(dataset=task["dataset"], key=task["task_key"], answer=task["answer"], scorer=task["scorer"])
    node = Node("task", task_id, shortened(asked), facts)
    if source := task.get("source"):
        facts = {"file": source["file"], "line": source["line"], "sha256": source["sha256"]}
        node.children.append(Node("line", f"{source['file']}:{source['line']}", "line of the task file", facts))
    return node


def record_node(record: Document) -> Node:
    facts = known(
        score=record["score"],
        status=record["status"],
        reason=record["reason"],
        attempt=record["attempt"],
        origin=record["origin"],
        batch=record["batch_id"],
        calls=len(record["call_ids"]),
    )
    return Node("record", record["_id"], f"attempt {record['attempt']} at {record['task_id']}", facts)


def call_node(call: Document) -> Node:
    facts = known(
        turn=call["turn"],
        sampled_by=[f"{s['version']}[{s['start']}:{s['end']}]" for s in call["weight_spans"]],
        service=call["service_id"],
        finish=call["finish_reason"],
        status=call["status"],
        started=call["started"].isoformat(),
    )
    return Node("call", call["_id"], shortened(call["text"]), facts)


def sample_node(sample: Document) -> Node:
    facts = known(
        advantage=sample["advantage"],
        score=sample["score"],
        trained_tokens=sample["trained_tokens"],
        tokens=sample["tokens"],
        group=sample["group"],
        shard=sample["shard_id"],
        row=sample["row"],
    )
    label = f"row {sample['row']} of shard {sample['shard_id'][:12]}"
    return Node("sample", sample["sample_id"], label, facts)


def shard_node(shard: Document) -> Node:
    facts = known(
        seq=shard["seq"],
        rows=shard["rows"],
        tokens=shard["tokens"],
        left_out=len(shard["left_out"]),
        filters={name: value for name, value in shard["filter_spec"].items() if value not in (None, False)},
        code=shard["code_revision"],
    )
    place = f"number {shard['seq']} of the stream" if shard["seq"] is not None else "not in the stream"
    return Node("shard", shard["_id"], f"{place}, batch {shard['batch_id']}", facts)


def batch_node(batch: Document) -> Node:
    facts = known(dataset=batch["dataset"], split=batch["split"], epoch=batch["epoch"], status=batch["status"])
    # The statistics have a status too: how many records ended how.
    facts |= known(**{{"status": "outcomes"}.get(name, name): value for name, value in batch["stats"].items()})
    return Node("batch", batch["_id"], f"{batch['expected_records']} records of {len(batch['task_ids'])} tasks", facts)


def step_node(step: Document) -> Node:
    facts: dict[str, Any] = {"shard": step["shard_id"], "pass": step["pass_number"], **step["metrics"]}
    return Node("step", step["_id"], f"places {step['start']} to {step['stop']} of the pass", facts)


def training_node(training: Training) -> Node:
    """What one step did with one row."""
    label = f"left out: {training.left_out}" if training.left_out else f"made {training.version['_id']}"
    facts = {"version": training.version["_id"], "pass": training.step["pass_number"], **training.statistics}
    return Node("step", training.step["_id"], label, facts)


def version_node(version: Document) -> Node:
    facts = known(
        parent=version["parent"],
        origin=version["origin"],
        steps=version["last_step"] - version["first_step"],
        config=version["config_digest"][:12],
        code=version["code_revision"],
        final=version["final"] or None,
        created=version["created"].isoformat(),
        **version["metrics"],
    )
    return Node("version", version["_id"], f"steps {version['first_step']} to {version['last_step']}", facts)


def run_node(run: Document) -> Node:
    facts = known(state=run["state"], reason=run["reason"], config=run["config_digest"][:12], code=run["code_revision"])
    return Node("run", run["_id"], f"{run['config'].get('stage')} of {run['config'].get('model_name_or_path')}", facts)
