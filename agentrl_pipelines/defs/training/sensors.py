from collections.abc import Iterator

import dagster as dg

from agentrl_pipelines.keepers import keep
from agentrl_pipelines.loop import training_loop


@dg.sensor(
    job=training_loop,
    minimum_interval_seconds=5,
    default_status=dg.DefaultSensorStatus.RUNNING,
    description="Keeps a training loop beside every running run.",
)
def keep_training(context: dg.SensorEvaluationContext) -> Iterator[dg.RunRequest | dg.SkipReason]:
    yield from keep(context.instance, "training", "training")
