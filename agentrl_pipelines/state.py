"""Small synchronous reads of the database, for sensors and progress: no Beanie, no index creation, one client."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

from pymongo import MongoClient
from pymongo.database import Database
from pymongo.errors import PyMongoError

from agentrl_runtime.errors import AgentRLError
from agentrl_runtime.local.endpoints import resolve_endpoints

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


def running_runs(db: Database[dict[str, Any]]) -> list[dict[str, Any]]:
    """Runs in state running: id, stage and creation time, oldest first."""
    found = db["runs"].find({"state": "running", "reason": {"$ne": BY_HAND}}, {"config.stage": 1, "created": 1})
    return sorted(
        ({"id": run["_id"], "stage": run["config"]["stage"], "created": run["created"]} for run in found),
        key=lambda run: (run["created"], run["id"]),
    )


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
