import dagster as dg
from pydantic import Field

from agentrl_pipelines.by_hand import continue_training, run_and_number
from agentrl_pipelines.loop import log_path_of
from agentrl_pipelines.partitions import POLICY_VERSIONS
from agentrl_pipelines.reporting import emitter, mark_reported, report_of_version, report_training
from agentrl_pipelines.resources import Stores
from agentrl_runtime.databases import PolicyVersion
from agentrl_runtime.local.endpoints import home
from agentrl_runtime.storage import ObjectStore


class TrainingConfig(dg.Config):
    steps: int = Field(default=1, ge=1, description="Stop after about this many optimizer steps.")


@dg.asset(
    partitions_def=POLICY_VERSIONS,
    deps=[dg.AssetDep("training_shard", partition_mapping=dg.AllPartitionMapping())],
    group_name="loop",
    kinds={"pytorch", "safetensors"},
    description="One published checkpoint with its ledger. While a run is running its loop adds them; by hand, a "
    "paused run is trained on from its last version on the shards that wait.",
)
def checkpoint(context: dg.AssetExecutionContext, config: TrainingConfig, stores: Stores) -> dg.MaterializeResult:
    key = context.partition_key

    async def work(store: ObjectStore) -> dg.MaterializeResult:
        version = await PolicyVersion.get(key)
        if version is not None:
            context.log.info(f"{key} is published already; it stays as it is")
        else:
            run_id, _ = run_and_number(key, "v")
            config_path = home() / "runs" / run_id / "by-hand.yaml"
            version = await continue_training(key, config.steps, config_path, log_path_of(run_id, "training"))
        report = await report_of_version(version)
        await mark_reported(version)
        others = await report_training(version.run_id, store, context.instance, emitter(context))
        if others:
            context.log.info(f"also made: {', '.join(others)}")
        return report.materialize_result()

    return stores.call(work)
