from typing import Literal

import dagster as dg
from pydantic import Field

from agentrl_pipelines.evidence import the
from agentrl_pipelines.partitions import TRAJECTORY_BATCHES
from agentrl_pipelines.reporting import mark_reported, report_of_shard
from agentrl_pipelines.resources import Stores
from agentrl_runtime.databases import Shard, TrajectoryBatch
from agentrl_runtime.errors import AgentRLError
from agentrl_runtime.runs import config_of, get_run
from agentrl_runtime.storage import ObjectStore


class CurationConfig(dg.Config):
    """The filter of the shard; a field left out keeps the value of the run's config."""

    advantage_estimator: Literal["run", "group_norm", "group_mean"] = Field(
        default="run", description="Scores to advantages: (s - mean) / std, or s - mean; `run`: as the run has it."
    )
    adv_scaling: float | None = Field(default=None, description="Factor on every advantage.")
    minimal_advantage: float | None = Field(default=None, description="Leave out samples with a smaller |advantage|.")
    drop_zero_advantage: bool | None = Field(default=None, description="Leave out samples whose advantage is zero.")
    skip_non_positive_advantage: bool | None = Field(default=None, description="Leave out samples with advantage <= 0.")
    drop_truncated: bool | None = Field(default=None, description="Leave out records that were cut off by length.")
    in_stream: bool = Field(
        default=False,
        description="Let the run train on it, unless another shard of the batch is in its stream already; "
        "otherwise the shard lies beside, to be named.",
    )

    def changes(self) -> dict[str, object]:
        values = self.model_dump(exclude={"in_stream"}, exclude_none=True)
        if self.advantage_estimator == "run":
            del values["advantage_estimator"]
        return values


@dg.asset(
    partitions_def=TRAJECTORY_BATCHES,
    deps=["trajectories"],
    group_name="loop",
    kinds={"parquet", "s3"},
    description="The training samples of one trajectory batch under one filter. A new filter makes a new shard "
    "beside the old one; no shard is ever changed.",
)
def training_shard(context: dg.AssetExecutionContext, config: CurationConfig, stores: Stores) -> dg.MaterializeResult:
    async def work(store: ObjectStore) -> dg.MaterializeResult:
        from agentrl_runtime.training.shards import FilterSpec, build_shard

        batch = await the(TrajectoryBatch, context.partition_key, "trajectory batch")
        if batch.status != "complete":
            raise AgentRLError(f"batch {batch.id} is still being sampled", mend="wait until it is complete")
        run = await get_run(batch.run_id)
        standing = FilterSpec.from_config(config_of(run))
        spec = FilterSpec(**{**standing.model_dump(), **config.changes()})
        known = await Shard.find(Shard.batch_id == batch.id).to_list()
        shard = await build_shard(store, run, batch, spec, in_stream=config.in_stream)
        found = "is there already" if shard.id in {other.id for other in known} else "is new"
        context.log.info(f"shard {shard.id} {found}; the batch has {len({shard.id, *(s.id for s in known)})}")
        report = await report_of_shard(shard, store)
        await mark_reported(shard)
        return report.materialize_result()

    return stores.call(work)
