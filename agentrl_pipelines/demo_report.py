"""What a demo ends with: a table of policy versions, the curve as PNG, report.json, and where to look next."""

import json
import os
import platform
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from agentrl_pipelines.demo_plan import DemoPlan
from agentrl_pipelines.demo_progress import VersionRow, version_rows
from agentrl_pipelines.dev import House
from agentrl_pipelines.plots import learning_curve, write_png
from agentrl_pipelines.state import database
from agentrl_runtime.errors import AgentRLError

#: The greedy measure on unseen tasks must rise by this much, from the first version to the last.
WANTED_GAIN = 0.05


def write_report(plan: DemoPlan, stages: dict[str, float], seconds: float, house: House) -> dict[str, Any]:
    """Write report.json and curve.png under AGENTRL_HOME/demo/RUN and return the report."""
    folder = house.folder / "demo" / plan.run_id
    with database() as db:
        rows = version_rows(db, plan.run_id)
        measured = [(row, _measure(db, plan, row)) for row in rows if row.accuracy is not None]
        sample = _trained_sample(db, rows[-1].version) if rows else None
    if len(measured) < 2:
        raise AgentRLError(
            f"run {plan.run_id} has {len(measured)} evaluations; improvement needs two",
            mend=f"read the logs in {house.folder / 'logs' / plan.run_id}",
        )
    (first, before), (last, after) = measured[0], measured[-1]
    values = {row.version: value for row, value in measured}
    curve = learning_curve(
        [(row.number, row.reward) for row in rows if row.reward is not None],
        [(row.number, value) for row, value in measured],
        title=f"{plan.run_id}: {before:.3f} to {after:.3f} on unseen tasks",
    )
    picture = write_png(curve, folder / "curve.png")
    report: dict[str, Any] = {
        "run": plan.run_id,
        "seed": plan.seed,
        "continued": plan.continued,
        "measured_on": plan.family or "greedy",
        "first": {"version": first.version, "value": before},
        "last": {"version": last.version, "value": after},
        "gain": after - before,
        "wanted_gain": WANTED_GAIN,
        "improved": after - before >= WANTED_GAIN,
        "seconds": seconds,
        "seconds_of_stages": stages,
        "versions": [row.as_dict() | {"measured": values.get(row.version)} for row in rows],
        "machine": {"cpus": os.cpu_count(), "python": platform.python_version(), "system": platform.system()},
        "curve": str(picture),
        "report": str(folder / "report.json"),
        "ui": house.dagster.link("checkpoint", last.version),
        "lineage_command": f"agentrl lineage trace {sample}" if sample else None,
    }
    _write_json(folder / "report.json", report)
    return report


def _trained_sample(db: Any, version: str) -> str | None:
    """A sample that the version's own steps trained on, one that moved the policy where there is one."""
    shard_ids = db["policy_versions"].find_one({"_id": version}, {"shard_ids": 1})["shard_ids"]
    own = {"shard_id": {"$in": shard_ids}}
    found = db["samples"].find_one(own | {"advantage": {"$ne": 0.0}}, {"sample_id": 1})
    found = found or db["samples"].find_one(own, {"sample_id": 1})
    return str(found["sample_id"]) if found else None


def _measure(db: Any, plan: DemoPlan, row: VersionRow) -> float:
    """Greedy accuracy on unseen tasks, or the mean score of the deciding family's."""
    if plan.family is None:
        return float(row.accuracy or 0.0)
    tasks = {task["_id"] for task in db["tasks"].find({"extra.dataset": plan.family}, {"_id": 1})}
    records = db["records"].find({"batch_id": f"{row.version}.eval"}, {"task_id": 1, "score": 1})
    scores = [float(record["score"] or 0.0) for record in records if record["task_id"] in tasks]
    return sum(scores) / len(scores) if scores else 0.0


def _write_json(path: Path, value: Any) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(value, indent=1) + "\n")
    partial.replace(path)


def print_report(report: dict[str, Any], console: Console) -> None:
    table = Table(title=f"policy versions of {report['run']}", title_justify="left", box=None, pad_edge=False)
    measured = f"{report['measured_on']}, unseen"
    for name in ("version", "step", "reward", measured, "staleness", "seconds"):
        table.add_column(name, justify="left" if name == "version" else "right", no_wrap=True)
    for row in report["versions"]:
        table.add_row(
            row["version"],
            str(row["step"]),
            _number(row["reward"]),
            _number(row["measured"]),
            _number(row["staleness"], 2),
            f"{row['seconds']:.1f}",
        )
    console.print(table)
    first, last = report["first"], report["last"]
    console.print(
        f"\n{measured}: {first['value']:.3f} ({first['version']}) -> {last['value']:.3f} "
        f"({last['version']}) in {report['seconds']:.0f} s",
        markup=False,
    )
    for name in ("curve", "report", "ui"):
        console.print(f"{name + ':':9} {report[name]}", markup=False)
    if report["lineage_command"]:
        console.print(f"lineage:  {report['lineage_command']}", markup=False)


def _number(value: float | None, digits: int = 3) -> str:
    return "" if value is None else f"{value:.{digits}f}"
