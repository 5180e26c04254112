from collections.abc import Iterator

import dagster as dg

from agentrl_pipelines.keepers import keep
from agentrl_pipelines.loop import rollout_loop


@dg.sensor(
    job=rollout_loop,
    minimum_interval_seconds=5,
    default_status=dg.DefaultSensorStatus.RUNNING,
    description="Keeps a rollout loop beside every running rl run.",
)
def keep_rollout(context: dg.SensorEvaluationContext) -> Iterator[dg.RunRequest | dg.SkipReason]:
    yield from keep(context.instance, "rollout", "rollout")
