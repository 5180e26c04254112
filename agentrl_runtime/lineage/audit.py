"""The exactly-once audit: what the ledger, the shards and the calls of a run say must agree."""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from agentrl_runtime.databases import (
    DBRecordData,
    DispatchedSamplingTask,
    PolicyVersion,
    Run,
    Shard,
    StepLedger,
    StreamPosition,
    Task,
)
from agentrl_runtime.lineage.reading import Document, by_id, fetch, read_statistics
from agentrl_runtime.runs import config_of, get_run
from agentrl_runtime.storage import ObjectStore
from agentrl_runtime.training.rows import CALL_FIELDS, call_tokens
from agentrl_runtime.training.segments import segments_of_calls
from agentrl_runtime.training.shards import read_rows

FIRST_SEQ = 1


@dataclass
class AuditReport:
    """What was checked, and one sentence for each violation; no violation: the run holds.

    `rows` counts rows times passes; `uncommitted_steps` are of work that no version covers, which is no
    violation: they do not count, and the trainer removes them when it starts.
    """

    run_id: str
    versions: int = 0
    steps: int = 0
    shards: int = 0
    rows: int = 0
    left_out_rows: int = 0
    samples: int = 0
    calls: int = 0
    sampled_tokens: int = 0
    uncommitted_steps: int = 0
    violations: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        verdict = "holds" if not self.violations else f"has {len(self.violations)} violations"
        lines = [
            f"run {self.run_id} {verdict}: {self.versions} versions, {self.steps} steps, {self.rows} rows taken from "
            f"{self.shards} shards, {self.left_out_rows} of them left out by the trainer",
            f"{self.samples} samples traced to a line of a task file; {self.sampled_tokens} sampled tokens of "
            f"{self.calls} calls are as the server gave them",
        ]
        if self.uncommitted_steps:
            lines.append(f"{self.uncommitted_steps} steps are not committed and do not count")
        return "\n".join([*lines, *(f"violation: {violation}" for violation in self.violations)])


async def audit_run(run_id: str, store: ObjectStore) -> AuditReport:
    """Check a run from its documents and shards alone.

    Versions and steps form a chain without gaps; over each shard of the stream and each pass, committed steps
    take every row once up to the trainer's position and none beyond; each sample traces to a task with its
    file and line; the tokens of each row are those of its calls. Raises AgentRLError for an unknown run.
    """
    run = await get_run(run_id)
    report = AuditReport(run_id)
    versions, ledger, shards = await asyncio.gather(
        fetch(PolicyVersion, {"run_id": run_id}),
        fetch(StepLedger, {"run_id": run_id}),
        fetch(Shard, {"run_id": run_id, "seq": {"$type": "int"}}),
    )
    versions.sort(key=lambda version: version["number"])
    shards.sort(key=lambda shard: shard["seq"])
    last = versions[-1]["last_step"] if versions else 0
    steps = sorted((step for step in ledger if step["number"] <= last), key=lambda step: step["number"])
    report.versions, report.steps = len(versions), len(steps)
    report.uncommitted_steps = len(ledger) - len(steps)
    report.violations += _chain_problems(versions, steps)
    report.violations += _stream_problems(shards)
    position = StreamPosition(**versions[-1]["position"]) if versions else StreamPosition()
    _check_coverage(report, run, shards, steps, position)
    await asyncio.to_thread(_check_statistics, report, store, versions, steps)
    await _check_shards(report, store, [shard for shard in shards if shard["seq"] <= position.seq])
    return report


def _chain_problems(versions: list[Document], steps: list[Document]) -> list[str]:
    """Versions count from 0 and each begins where its parent ends; steps count from 1 and belong to theirs."""
    problems = []
    for number, version in enumerate(versions):
        if version["number"] != number:
            problems.append(f"{version['_id']} stands where version {number} should be")
        elif number and version["parent"] != versions[number - 1]["_id"]:
            problems.append(f"{version['_id']} has parent {version['parent']}, not the version before it")
        elif number and version["first_step"] != versions[number - 1]["last_step"]:
            problems.append(f"{version['_id']} begins after step {version['first_step']}, not where its parent ends")
    numbers = [step["number"] for step in steps]
    last = versions[-1]["last_step"] if versions else 0
    if missing := sorted(set(range(1, last + 1)) - set(numbers)):
        problems.append(f"{len(missing)} steps of committed versions are missing, number {missing[0]} the first")
    bounds = {version["_id"]: (version["first_step"], version["last_step"]) for version in versions}
    for step in steps:
        first, end = bounds.get(step["version_id"], (0, 0))
        if not first < step["number"] <= end:
            problems.append(f"step {step['_id']} names {step['version_id']}, which does not hold it")
    return problems


def _stream_problems(shards: list[Document]) -> list[str]:
    seqs = [shard["seq"] for shard in shards]
    problems = []
    if seqs != list(range(FIRST_SEQ, FIRST_SEQ + len(seqs))):
        problems.append(f"the stream's shards are numbered {seqs[:20]}, not from {FIRST_SEQ} without gaps")
    batches: dict[str, str] = {}
    for shard in shards:
        other = batches.setdefault(shard["batch_id"], shard["_id"])
        if other != shard["_id"]:
            problems.append(f"batch {shard['batch_id']} is in the stream twice: {other[:12]} and {shard['_id'][:12]}")
    return problems


def _check_coverage(
    report: AuditReport, run: Run, shards: list[Document], steps: list[Document], position: StreamPosition
) -> None:
    """Each pass over each shard is covered once, up to the position and not beyond."""
    config = config_of(run)
    endless = config.stage == "sft" and config.max_steps >= 0
    known = {shard["_id"] for shard in shards}
    passes: dict[tuple[str, int], list[Document]] = {}
    for step in steps:
        if step["shard_id"] not in known:
            report.violations.append(f"step {step['_id']} trained on shard {step['shard_id'][:12]}, not in the stream")
        else:
            passes.setdefault((step["shard_id"], step["pass_number"]), []).append(step)
    for shard in shards:
        taken = sorted(number for name, number in passes if name == shard["_id"])
        report.shards += bool(taken)
        done = config.passes if not endless else (taken[-1] + 1 if taken else 1)
        if shard["rows"] == 0:
            done = 1
        if shard["seq"] > position.seq:
            want = {}
        elif shard["seq"] == position.seq:
            want = dict.fromkeys(range(position.pass_number), shard["rows"])
            if position.row:
                want[position.pass_number] = position.row
        else:
            want = dict.fromkeys(range(done), shard["rows"])
        for number in sorted(set(taken) | set(want)):
            found = passes.get((shard["_id"], number), [])
            name = f"shard {shard['_id'][:12]} (number {shard['seq']}), pass {number}"
            report.violations += _pass_problems(name, found, want.get(number), shard["rows"])
            report.rows += sum(step["stop"] - step["start"] for step in found)


def _pass_problems(name: str, steps: list[Document], want: int | None, rows: int) -> list[str]:
    """`want` rows must be taken, each once; None: the position is before this pass, so none may be."""
    if want is None:
        return [f"{name}: step {step['_id']} took rows that the position says are untouched" for step in steps]
    problems = []
    if len({step["order_seed"] for step in steps}) > 1:
        problems.append(f"{name}: its steps have different orders")
    end = 0
    for step in sorted(steps, key=lambda step: (step["start"], step["stop"])):
        if step["start"] < end:
            problems.append(f"{name}: step {step['_id']} took places {step['start']} to {min(end, step['stop'])} again")
        elif step["start"] > end:
            problems.append(f"{name}: places {end} to {step['start']} were skipped before step {step['_id']}")
        end = max(end, step["stop"])
    if end != want:
        problems.append(f"{name}: {end} of {rows} rows were taken, the position says {want}")
    if not steps and rows == 0:
        problems.append(f"{name}: the empty shard was passed without an entry in the ledger")
    return problems


def _check_statistics(report: AuditReport, store: ObjectStore, versions: list[Document], steps: list[Document]) -> None:
    """A version's statistics have one line for each row its steps took."""
    for version in versions:
        if not version["statistics_sha256"]:
            continue
        own = [step for step in steps if step["version_id"] == version["_id"]]
        want = sum(step["stop"] - step["start"] for step in own)
        table = read_statistics(store, version["statistics_sha256"])
        if table.num_rows != want:
            report.violations.append(f"{version['_id']} has statistics of {table.num_rows} rows, its steps took {want}")
        report.left_out_rows += sum(reason is not None for reason in table.column("left_out").to_pylist())


async def _check_shards(report: AuditReport, store: ObjectStore, shards: list[Document]) -> None:
    place_of: dict[str, str] = {}
    for shard in shards:
        table = await asyncio.to_thread(read_rows, store, shard["_id"])
        rows = table.to_pylist()
        for row in rows:
            other = place_of.setdefault(row["sample_id"], shard["_id"])
            if other != shard["_id"]:
                report.violations.append(f"sample {row['sample_id']} is in two shards of the stream")
        report.samples += len(rows)
        index = await fetch(DBRecordData, {"shard_id": shard["_id"]}, ("sample_id", "row"))
        if {(item["sample_id"], item["row"]) for item in index} != {
            (row["sample_id"], number) for number, row in enumerate(rows)
        }:
            report.violations.append(f"shard {shard['_id'][:12]}: the index of samples differs from its rows")
        if len(rows) != shard["rows"]:
            report.violations.append(f"shard {shard['_id'][:12]}: {len(rows)} rows, its document says {shard['rows']}")
        await _check_tasks(report, rows)
        await _check_tokens(report, store, rows)


async def _check_tasks(report: AuditReport, rows: Iterable[dict[str, Any]]) -> None:
    tasks = await by_id(Task, (row["task_id"] for row in rows), ["source"])
    for row in rows:
        source = tasks.get(row["task_id"], {}).get("source") or {}
        if not source.get("file") or not source.get("line"):
            report.violations.append(f"sample {row['sample_id']}: task {row['task_id']} has no line of a task file")


async def _check_tokens(report: AuditReport, store: ObjectStore, rows: list[dict[str, Any]]) -> None:
    """Each row is what its calls make: ids, mask and policy versions, with nothing tokenised again."""
    calls = await by_id(DispatchedSamplingTask, (call for row in rows for call in row["call_ids"]), CALL_FIELDS)

    def check() -> None:
        seen: dict[str, str] = {}
        for row in rows:
            missing = [call for call in row["call_ids"] if call not in calls]
            if missing:
                report.violations.append(f"sample {row['sample_id']}: call {missing[0]} is not in the database")
            elif row["call_ids"]:
                tokens = [call_tokens(store, calls[call]) for call in row["call_ids"]]
                segments = segments_of_calls(tokens)
                same = len(segments) == 1 and (
                    (segments[0].input_ids, segments[0].loss_mask, segments[0].versions)
                    == (row["input_ids"], row["loss_mask"], row["token_versions"])
                )
                if not same:
                    report.violations.append(f"sample {row['sample_id']}: its tokens are not those of its calls")
                report.sampled_tokens += sum(len(call.output_ids) for call in tokens)
            for call in row["call_ids"]:
                if seen.setdefault(call, row["sample_id"]) != row["sample_id"]:
                    report.violations.append(f"call {call} is in samples {seen[call]} and {row['sample_id']}")
        report.calls += len(seen)

    await asyncio.to_thread(check)
