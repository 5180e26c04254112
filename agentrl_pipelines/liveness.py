"""Which Dagster runs supervise a loop, and which of them only look as if they did.

A run that is killed with its machine, or by kill -9, stays STARTED in Dagster's storage. Each loop op
therefore tags its Dagster run with host, process id and that process's start time (ids are used again);
a tag that fits no living process marks a dead run.
"""

import os
import socket
import time
from datetime import datetime

import dagster as dg
import psutil

from agentrl_pipelines.state import Role, database, lock_expired_for

RUN_TAG, ROLE_TAG, LOOP_TAG = "agentrl/run", "agentrl/role", "agentrl/loop"
HOST_TAG, PID_TAG, STARTED_TAG = "agentrl/host", "agentrl/pid", "agentrl/pid-started"
#: Set on a Dagster run whose process ended with an error of its own, as against one that was killed.
FAILED_TAG = "agentrl/failed"

#: A launched run tags itself within seconds; one that has not after this long never came up.
LAUNCH_PATIENCE_S = 120.0
#: On another host the process cannot be seen: its role's lease in the database speaks for it.
LEASE_PATIENCE_S = 60.0
#: This many failures in a row without a new batch or version, and the run is failed for good.
MAX_FAILURES = 3

_ALIVE = [
    dg.DagsterRunStatus.QUEUED,
    dg.DagsterRunStatus.NOT_STARTED,
    dg.DagsterRunStatus.STARTING,
    dg.DagsterRunStatus.STARTED,
    dg.DagsterRunStatus.CANCELING,
]
_LOCK_OF: dict[Role, str] = {"rollout": "rollout", "training": "trainer"}


def loop_tags(run_id: str, role: Role) -> dict[str, str]:
    """Tags of a loop's Dagster run; LOOP_TAG is what dagster.yaml limits to one at a time."""
    return {RUN_TAG: run_id, ROLE_TAG: role, LOOP_TAG: f"{run_id}/{role}"}


def process_tags() -> dict[str, str]:
    started = psutil.Process().create_time()
    return {HOST_TAG: socket.gethostname(), PID_TAG: str(os.getpid()), STARTED_TAG: f"{started:.2f}"}


def _process_lives(pid: int, started: float) -> bool:
    try:
        process = psutil.Process(pid)
        return abs(process.create_time() - started) < 1.0 and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def why_dead(record: dg.RunRecord, run_id: str, role: Role) -> str | None:
    """The reason this Dagster run cannot be alive, or None when it may be."""
    run, tags = record.dagster_run, record.dagster_run.tags
    silent = time.time() - record.update_timestamp.timestamp()
    if PID_TAG not in tags:
        waiting = run.status in {dg.DagsterRunStatus.QUEUED, dg.DagsterRunStatus.NOT_STARTED}
        if silent > LAUNCH_PATIENCE_S and not waiting:
            return f"its process did not come up within {LAUNCH_PATIENCE_S:.0f} s"
        return None
    if tags[HOST_TAG] == socket.gethostname():
        pid = int(tags[PID_TAG])
        return None if _process_lives(pid, float(tags[STARTED_TAG])) else f"its process {pid} is gone"
    with database() as db:
        expired = lock_expired_for(db, f"{run_id}/{_LOCK_OF[role]}")
    if silent > LAUNCH_PATIENCE_S and expired is not None and expired > LEASE_PATIENCE_S:
        return f"{tags[HOST_TAG]} let the lease of {run_id} run out"
    return None


def live_loop(instance: dg.DagsterInstance, run_id: str, role: Role) -> str | None:
    """Id of the Dagster run that supervises this loop; dead ones met on the way are marked as failed."""
    filters = dg.RunsFilter(tags={RUN_TAG: run_id, ROLE_TAG: role}, statuses=_ALIVE)
    alive = None
    for record in instance.get_run_records(filters, limit=20):
        reason = why_dead(record, run_id, role)
        if reason is None:
            alive = record.dagster_run.run_id
        elif record.dagster_run.status == dg.DagsterRunStatus.CANCELING:
            instance.report_run_canceled(record.dagster_run, message=f"The run had ended: {reason}.")
        else:
            instance.report_run_failed(record.dagster_run, message=f"The run had ended: {reason}.")
    return alive


def loop_failures_since(instance: dg.DagsterInstance, run_id: str, role: Role, since: datetime) -> int:
    """How many Dagster runs of this loop failed of themselves after `since`; killed ones are not counted."""
    filters = dg.RunsFilter(
        tags={RUN_TAG: run_id, ROLE_TAG: role}, statuses=[dg.DagsterRunStatus.FAILURE], updated_after=since
    )
    return sum(FAILED_TAG in record.dagster_run.tags for record in instance.get_run_records(filters, limit=20))
