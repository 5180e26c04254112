from datetime import UTC

import dagster as dg

from agentrl_pipelines.metadata import lineage_command
from agentrl_pipelines.state import database
from agentrl_runtime.errors import AgentRLError


@dg.sensor(
    minimum_interval_seconds=5,
    default_status=dg.DefaultSensorStatus.RUNNING,
    description="Emits served_policy for each policy version that a server has loaded.",
)
def report_served(context: dg.SensorEvaluationContext) -> dg.SkipReason:
    """A version is marked after its event is stored: a crash in between repeats the event, never loses it."""
    try:
        with database() as db:
            versions = db["policy_versions"]
            served = versions.find(
                {"served_reported": False, "served": {"$ne": None}}, {"run_id": 1, "number": 1, "served": 1}
            ).limit(50)
            waiting = sorted(served, key=lambda version: version["served"])
            for version in waiting:
                context.instance.report_runless_asset_event(
                    dg.AssetMaterialization(
                        "served_policy",
                        metadata={
                            "policy_version": version["_id"],
                            "number": version["number"],
                            "run": version["run_id"],
                            "served": dg.MetadataValue.timestamp(version["served"].astimezone(UTC)),
                            "lineage": lineage_command(version["_id"]),
                        },
                        tags={"dagster/data_version": version["_id"]},
                    )
                )
                versions.update_one({"_id": version["_id"]}, {"$set": {"served_reported": True}})
    except AgentRLError as error:
        return dg.SkipReason(str(error))
    return dg.SkipReason(f"{len(waiting)} versions reported as served" if waiting else "no version newly served")
