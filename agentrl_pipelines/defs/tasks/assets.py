from pathlib import Path

import dagster as dg
from pydantic import Field

from agentrl_pipelines.evidence import the
from agentrl_pipelines.partitions import DATASETS
from agentrl_pipelines.reporting import mark_reported, report_of_dataset
from agentrl_pipelines.resources import Stores
from agentrl_runtime.databases import TaskDataset
from agentrl_runtime.storage import ObjectStore


class ImportConfig(dg.Config):
    path: str = Field(description="Task file (JSONL) to import; one task a line: id, query, answer, scorer.")
    skip_bad_lines: bool = Field(
        default=False, description="Import the good lines and list the bad ones; otherwise a bad line stops it all."
    )


@dg.asset(
    partitions_def=DATASETS,
    group_name="loop",
    kinds={"mongodb"},
    description="One imported task file. Importing the same content again changes nothing.",
)
def task_dataset(context: dg.AssetExecutionContext, config: ImportConfig, stores: Stores) -> dg.MaterializeResult:
    from agentrl_runtime.rollout.task_files import import_task_file

    name = context.partition_key

    async def work(_: ObjectStore) -> dg.MaterializeResult:
        result = await import_task_file(Path(config.path), name, skip_bad_lines=config.skip_bad_lines)
        context.log.info(f"{config.path}: {result}")
        dataset = await the(TaskDataset, name, "dataset")
        report = await report_of_dataset(dataset)
        await mark_reported(dataset)
        return report.materialize_result()

    return stores.call(work)
