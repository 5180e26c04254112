import dagster as dg

from agentrl_pipelines.checking import checks_of
from agentrl_pipelines.evidence import shard_evidence
from agentrl_pipelines.partitions import TRAJECTORY_BATCHES
from agentrl_pipelines.quality import Finding, check_shard
from agentrl_runtime.databases import Shard
from agentrl_runtime.errors import AgentRLError
from agentrl_runtime.storage import ObjectStore


async def examine(batch_id: str, store: ObjectStore) -> list[Finding]:
    """The newest shard of the batch."""
    shards = await Shard.find(Shard.batch_id == batch_id).to_list()
    if not shards:
        raise AgentRLError(f"batch {batch_id} has no shard", mend="materialise training_shard of this partition")
    return check_shard(await shard_evidence(max(shards, key=lambda shard: shard.created), store))


@dg.definitions
def defs() -> dg.Definitions:
    return dg.Definitions(asset_checks=checks_of("training_shard", TRAJECTORY_BATCHES, examine))
