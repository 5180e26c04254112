"""The code location `agentrl`: every asset, check, sensor and job under `defs`, with the stores they use."""

from pathlib import Path

import dagster as dg

from agentrl_pipelines.loop import rollout_loop, training_loop
from agentrl_pipelines.resources import Stores


@dg.definitions
def defs() -> dg.Definitions:
    return dg.Definitions.merge(
        dg.load_from_defs_folder(path_within_project=Path(__file__).parent),
        dg.Definitions(
            jobs=[rollout_loop, training_loop], resources={"stores": Stores()}, executor=dg.in_process_executor
        ),
    )
