import dagster as dg

from agentrl_pipelines.checking import checks_of
from agentrl_pipelines.evidence import batch_evidence, the
from agentrl_pipelines.partitions import TRAJECTORY_BATCHES
from agentrl_pipelines.quality import Finding, check_batch
from agentrl_runtime.databases import TrajectoryBatch
from agentrl_runtime.storage import ObjectStore


async def examine(batch_id: str, _: ObjectStore) -> list[Finding]:
    return check_batch(await batch_evidence(await the(TrajectoryBatch, batch_id, "trajectory batch")))


@dg.definitions
def defs() -> dg.Definitions:
    return dg.Definitions(asset_checks=checks_of("trajectories", TRAJECTORY_BATCHES, examine))
