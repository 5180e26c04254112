import dagster as dg

from agentrl_pipelines.by_hand import evaluate_version
from agentrl_pipelines.partitions import POLICY_VERSIONS
from agentrl_pipelines.reporting import mark_reported, report_of_eval
from agentrl_pipelines.resources import Stores
from agentrl_runtime.storage import ObjectStore


@dg.asset(
    partitions_def=POLICY_VERSIONS,
    deps=["checkpoint"],
    group_name="loop",
    kinds={"sglang", "mongodb"},
    description="Greedy evaluation of one policy version on the run's unseen tasks, with a server of its own when "
    "materialised by hand. A version that has its report keeps it.",
)
def eval_report(context: dg.AssetExecutionContext, stores: Stores) -> dg.MaterializeResult:
    async def work(store: ObjectStore) -> dg.MaterializeResult:
        evaluation, known = await evaluate_version(context.partition_key, store)
        if known:
            context.log.info(f"{context.partition_key} is evaluated already")
        report = await report_of_eval(evaluation)
        await mark_reported(evaluation)
        return report.materialize_result()

    return stores.call(work)
