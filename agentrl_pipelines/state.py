"""Small synchronous reads of the database, for sensors and progress: no Beanie, no index creation, one client."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any, Literal

from pymongo import MongoClient
from pymongo.database import Database
from pymongo.errors import PyMongoError

from agentrl_runtime.errors import AgentRLError
from agentrl_runtime.local.endpoints import resolve_endpoints

Role = Literal["rollout", "training"]

#: Reason of a running run that somebody trains by hand: no sensor starts its loops meanwhile.
BY_HAND = "trained by hand"


@lru_cache(maxsize=2)
def _client(mongo_uri: str) -> MongoClient[dict[str, Any]]:
    return MongoClient(mongo_uri, tz_aware=True, serverSelectionTimeoutMS=5000, maxPoolSize=4, appname="agentrl")


@contextmanager
def database() -> Iterator[Database[dict[str, Any]]]:
    """The database that `agentrl up` or the environment gives; AgentRLError when it does not answer."""
    uri = resolve_endpoints().mongo_uri
    try:
        yield _client(uri).get_default_database("agentrl")
    except PyMongoError as error:
        reason = str(error).split(",", 1)[0]
        raise AgentRLError(f"MongoDB cannot be reached: {reason}", mend="run `agentrl up`") from None


def runs_needing(db: Database[dict[str, Any]], role: Role) -> list[dict[str, Any]]:
    """Runs that want a loop of this role: id, stage and creation time, oldest first.

    Those are the running ones, and finished ones of the last day whose loop was killed before its last work:
    the evaluation of the final version, or reports to Dagster. Stage sft needs no rollout loop.
    """
    fields = {"config.stage": 1, "config.eval_file": 1, "created": 1, "state": 1}
    recent = {"$gte": datetime.now(UTC) - timedelta(days=1)}
    wanted: list[dict[str, Any]] = [
        {"state": "running", "reason": {"$ne": BY_HAND}},
        {"state": "finished", "ended": recent},
    ]
    found = []
    for query in wanted:
        for run in db["runs"].find(query, fields):
            stage = run["config"]["stage"]
            if role == "rollout" and stage == "sft":
                continue
            if run["state"] == "running" or _has_loose_ends(db, run, role):
                found.append({"id": run["_id"], "stage": stage, "created": run["created"]})
    return sorted(found, key=lambda run: (run["created"], run["id"]))


def _has_loose_ends(db: Database[dict[str, Any]], run: dict[str, Any], role: Role) -> bool:
    unreported = {"run_id": run["_id"], "reported": False}
    batches = {**unreported, "split": "train", "status": "complete"}
    sampled = [("trajectory_batches", batches), ("shards", unreported), ("eval_reports", unreported)]
    trained = [("policy_versions", unreported)]
    looked_at = sampled if role == "rollout" else trained
    if run["config"]["stage"] == "sft":
        looked_at = [*sampled, *trained]
    if any(db[name].find_one(query, {"_id": 1}) for name, query in looked_at):
        return True
    evaluates = role == "rollout" and run["config"].get("eval_file") is not None
    return evaluates and not final_is_evaluated(db, run["_id"])


def final_is_evaluated(db: Database[dict[str, Any]], run_id: str) -> bool:
    last = db["policy_versions"].find_one({"run_id": run_id, "final": True}, {"_id": 1})
    return last is not None and db["eval_reports"].find_one({"version_id": last["_id"]}, {"_id": 1}) is not None


def last_progress(db: Database[dict[str, Any]], run: dict[str, Any]) -> datetime:
    """When the run last produced a policy version or a complete batch; its creation when it has neither."""
    moments = [run["created"]]
    versions = db["policy_versions"].find({"run_id": run["id"]}, {"created": 1}).sort("number", -1).limit(1)
    moments += [version["created"] for version in versions]
    batches = db["trajectory_batches"].find({"run_id": run["id"], "status": "complete"}, {"ended": 1})
    moments += [batch["ended"] for batch in batches if batch.get("ended")]
    return max(moments)


def lock_expired_for(db: Database[dict[str, Any]], name: str) -> float | None:
    """Seconds since the lease ran out (negative while it is held); None when nobody ever held it."""
    lock = db["locks"].find_one({"_id": name}, {"expires": 1})
    return (datetime.now(UTC) - lock["expires"]).total_seconds() if lock else None


def fail_run(db: Database[dict[str, Any]], run_id: str, reason: str) -> None:
    """Fail a run that is still running; one that ended meanwhile keeps its state."""
    db["runs"].update_one(
        {"_id": run_id, "state": "running"},
        {"$set": {"state": "failed", "reason": reason, "ended": datetime.now(UTC)}},
    )
