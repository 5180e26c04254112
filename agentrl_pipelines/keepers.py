"""What the keep sensors do at a tick: one loop for each running run, never two."""

from collections.abc import Iterator

import dagster as dg

from agentrl_pipelines.liveness import MAX_FAILURES, live_loop, loop_failures_since, loop_tags
from agentrl_pipelines.state import Role, database, fail_run, last_progress, runs_needing
from agentrl_runtime.errors import AgentRLError


def keep(instance: dg.DagsterInstance, role: Role, op_name: str) -> Iterator[dg.RunRequest | dg.SkipReason]:
    """A run request for each run that needs a loop of this role and has none.

    A loop that failed MAX_FAILURES times since the run last made a batch or a version fails its run.
    """
    try:
        with database() as db:
            for run in runs_needing(db, role):
                if live_loop(instance, run["id"], role):
                    continue
                failures = loop_failures_since(instance, run["id"], role, last_progress(db, run))
                if failures >= MAX_FAILURES:
                    fail_run(db, run["id"], f"its {role} process failed {failures} times without progress")
                    continue
                yield dg.RunRequest(
                    tags=loop_tags(run["id"], role),
                    run_config=dg.RunConfig(ops={op_name: {"config": {"run_id": run["id"]}}}),
                )
    except AgentRLError as error:
        yield dg.SkipReason(str(error))
