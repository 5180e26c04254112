import dagster as dg
from pydantic import Field

from agentrl_pipelines.by_hand import sample_batch
from agentrl_pipelines.partitions import TRAJECTORY_BATCHES
from agentrl_pipelines.reporting import mark_reported, report_of_batch
from agentrl_pipelines.resources import Stores
from agentrl_runtime.storage import ObjectStore


class SamplingConfig(dg.Config):
    policy_version: str = Field(
        default="", description="Policy version that samples, such as demo-1.v00012; empty: the run's newest."
    )


@dg.asset(
    partitions_def=TRAJECTORY_BATCHES,
    deps=[dg.AssetDep("task_dataset", partition_mapping=dg.AllPartitionMapping())],
    group_name="loop",
    kinds={"sglang", "mongodb"},
    description="The records sampled together. While a run is running its loop adds them; by hand, the next batch "
    "of a paused run is sampled with a server of its own. A complete batch is never sampled again.",
)
def trajectories(context: dg.AssetExecutionContext, config: SamplingConfig, stores: Stores) -> dg.MaterializeResult:
    async def work(store: ObjectStore) -> dg.MaterializeResult:
        batch, known = await sample_batch(context.partition_key, config.policy_version, store)
        if known:
            context.log.info(f"{batch.id} is complete already; its records stay as they are")
        report = await report_of_batch(batch)
        await mark_reported(batch)
        return report.materialize_result()

    return stores.call(work)
