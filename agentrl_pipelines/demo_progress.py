"""What a run has done so far, read from the database, and lines about it for the terminal."""

import re
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

from pymongo.database import Database
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from agentrl_runtime.local.endpoints import home
from agentrl_runtime.processes import last_lines

#: Without a terminal, a line at least this often: silence looks like a hang.
HEARTBEAT_S = 10.0


@dataclass(frozen=True)
class VersionRow:
    """One line of the table of policy versions."""

    version: str
    number: int
    step: int
    reward: float | None
    accuracy: float | None
    score: float | None
    staleness: float | None
    seconds: float
    final: bool

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def batch_means(db: Database[dict[str, Any]], run_id: str) -> dict[str, float]:
    """Mean score of each complete training batch of the run."""
    batches = db["trajectory_batches"].find({"run_id": run_id, "split": "train", "status": "complete"}, {"stats": 1})
    return {b["_id"]: mean for b in batches if (mean := b.get("stats", {}).get("mean_score")) is not None}


def version_rows(db: Database[dict[str, Any]], run_id: str, after: int = -1) -> list[VersionRow]:
    """The run's committed versions with a number above `after`, in order."""
    fields = {"number": 1, "last_step": 1, "shard_ids": 1, "metrics": 1, "seconds": 1, "final": 1}
    found = list(db["policy_versions"].find({"run_id": run_id, "number": {"$gt": after}}, fields))
    if not found:
        return []
    shard_ids = [shard for version in found for shard in version["shard_ids"]]
    batch_of = {s["_id"]: s["batch_id"] for s in db["shards"].find({"_id": {"$in": shard_ids}}, {"batch_id": 1})}
    means = batch_means(db, run_id)
    evals = {e["version_id"]: e for e in db["eval_reports"].find({"run_id": run_id})}
    rows = []
    for version in sorted(found, key=lambda item: item["number"]):
        rewards = [means[batch_of[s]] for s in version["shard_ids"] if batch_of.get(s) in means]
        report = evals.get(version["_id"])
        rows.append(
            VersionRow(
                version=version["_id"],
                number=version["number"],
                step=version["last_step"],
                reward=sum(rewards) / len(rewards) if rewards else None,
                accuracy=report["accuracy"] if report else None,
                score=report["mean_score"] if report else None,
                staleness=version["metrics"].get("staleness_mean"),
                seconds=version["seconds"],
                final=bool(version.get("final")),
            )
        )
    return rows


def what_happens(db: Database[dict[str, Any]], run_id: str) -> str:
    """One line on what the run is at, for the moments in which no version appears."""
    newest = list(db["trajectory_batches"].find({"run_id": run_id}, {"status": 1, "expected_records": 1, "started": 1}))
    services = [
        f"server {service['status']}" + (f" ({service['reason']})" if service.get("reason") else "")
        for service in db["inference_services"].find({"run_id": run_id}, {"status": 1, "reason": 1})
        if service["status"] not in {"stopped"}
    ]
    sampling = sorted(
        (batch for batch in newest if batch["status"] == "sampling"), key=lambda batch: batch["started"], reverse=True
    )
    parts = services[-1:]
    for batch in sampling[:2]:
        waiting = db["records"].count_documents({"batch_id": batch["_id"], "status": {"$in": ["queued", "leased"]}})
        parts.append(f"{batch['_id']} {batch['expected_records'] - waiting}/{batch['expected_records']} records")
    return ", ".join(parts) or ("training" if logged_step(run_id) else "its processes are starting")


def describe(row: VersionRow) -> str:
    parts = [f"{row.version}  step {row.step}"]
    if row.reward is not None:
        parts.append(f"reward {row.reward:.3f}")
    if row.reward is not None and row.staleness is not None:
        parts.append(f"staleness {row.staleness:.2f}")
    parts.append(f"{row.seconds:.1f} s")
    return "  ".join(parts)


def new_evaluations(db: Database[dict[str, Any]], run_id: str, shown: set[str]) -> list[str]:
    """A line for each evaluation of the run that is not in `shown` yet; they are entered there."""
    found = db["eval_reports"].find({"run_id": run_id, "_id": {"$nin": sorted(shown)}})
    reports = sorted(found, key=lambda report: report["version_id"])
    shown.update(report["_id"] for report in reports)
    return [
        f"{report['version_id']}  greedy on {report['records']} unseen tasks: "
        f"accuracy {report['accuracy']:.3f}, mean score {report['mean_score']:.3f}"
        for report in reports
    ]


class Terminal:
    """Progress on a terminal as a bar with lines above it; elsewhere as plain lines and a heartbeat."""

    def __init__(self, *, to_stderr: bool) -> None:
        self.console = Console(stderr=to_stderr, highlight=False, soft_wrap=True)
        self._live = (sys.stderr if to_stderr else sys.stdout).isatty()
        self._spoke = time.monotonic()
        self._bar: Progress | None = None
        self._task: Any = None
        self._seen: tuple[int, int] = (0, 0)

    def say(self, text: str) -> None:
        (self._bar.console if self._bar else self.console).print(text, markup=False)
        self._spoke = time.monotonic()

    def begin(self, title: str, total: int) -> None:
        self.end()
        self._seen = (0, total)
        if self._live:
            columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
            self._bar = Progress(*columns, console=self.console)
            self._bar.start()
            self._task = self._bar.add_task(title, total=total)
        else:
            self.say(title)

    def step(self, done: int) -> None:
        # Entries of the ledger without an optimizer step are counted too.
        done = min(done, self._seen[1])
        self._seen = (done, self._seen[1])
        if self._bar is not None:
            self._bar.update(self._task, completed=done)

    def quiet_too_long(self) -> bool:
        return not self._live and time.monotonic() - self._spoke >= HEARTBEAT_S

    def heartbeat(self, what: str) -> None:
        done, total = self._seen
        self.say(f"  … step {done} of {total}: {what}")

    def end(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def logged_step(run_id: str) -> int:
    """The newest step in the trainer's log: between two versions only the log knows it. 0 when there is none."""
    found = re.findall(rf"{re.escape(run_id)}\.s(\d+) ", last_lines(home() / "logs" / run_id / "training.log", 40))
    return int(found[-1]) if found else 0
