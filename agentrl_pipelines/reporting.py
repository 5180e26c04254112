"""Documents that Dagster has not heard of yet -> materialisations, check results and partitions.

A document counts as reported only after its events are stored, so that a crash in between reports it again
rather than never; a second materialisation of the same partition does no harm.
"""

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

import dagster as dg
from beanie import Document

from agentrl_pipelines.evidence import (
    accuracy_curve,
    batch_evidence,
    eval_evidence,
    reward_curve,
    shard_evidence,
    version_evidence,
)
from agentrl_pipelines.metadata import (
    batch_metadata,
    dataset_metadata,
    eval_metadata,
    shard_metadata,
    version_metadata,
)
from agentrl_pipelines.partitions import DATASETS, POLICY_VERSIONS, TRAJECTORY_BATCHES
from agentrl_pipelines.quality import Finding, check_batch, check_eval, check_shard, check_version
from agentrl_runtime.databases import EvalReport, PolicyVersion, Shard, TaskDataset, TrajectoryBatch
from agentrl_runtime.storage import ObjectStore

AssetEvent = dg.AssetMaterialization | dg.AssetCheckEvaluation
Emit = Callable[[AssetEvent], None]


def emitter(context: dg.OpExecutionContext | dg.AssetExecutionContext) -> Emit:
    """Log events to the context's run; it takes check evaluations too, though its type does not say so."""

    def emit(event: AssetEvent) -> None:
        context.log_event(event)  # type: ignore[arg-type]

    return emit


SEVERITIES = {"error": dg.AssetCheckSeverity.ERROR, "warn": dg.AssetCheckSeverity.WARN}


@dataclass(frozen=True)
class Report:
    """What one document has to say: where, with which metadata, and what its checks found."""

    asset: str
    partitions_def: dg.DynamicPartitionsDefinition
    partition: str
    metadata: dict[str, Any]
    findings: list[Finding]
    data_version: str

    def materialize_result(self) -> dg.MaterializeResult:
        """What an asset returns when it is materialised by hand; its checks run as steps of their own."""
        return dg.MaterializeResult(metadata=self.metadata, data_version=dg.DataVersion(self.data_version))

    def events(self) -> Iterable[AssetEvent]:
        yield dg.AssetMaterialization(
            asset_key=self.asset,
            partition=self.partition,
            metadata=self.metadata,
            tags={"dagster/data_version": self.data_version},
        )
        for finding in self.findings:
            yield dg.AssetCheckEvaluation(
                asset_key=dg.AssetKey(self.asset),
                check_name=finding.check,
                passed=finding.passed,
                severity=SEVERITIES[finding.severity],
                description=finding.description,
                metadata=finding.metadata,
                partition=self.partition,
            )


async def report_of_dataset(dataset: TaskDataset) -> Report:
    return Report("task_dataset", DATASETS, dataset.id, dataset_metadata(dataset), [], dataset.sha256)


async def report_of_batch(batch: TrajectoryBatch) -> Report:
    evidence = await batch_evidence(batch)
    return Report(
        "trajectories", TRAJECTORY_BATCHES, batch.id, batch_metadata(evidence), check_batch(evidence), batch.id
    )


async def report_of_shard(shard: Shard, store: ObjectStore) -> Report:
    evidence = await shard_evidence(shard, store)
    return Report(
        "training_shard", TRAJECTORY_BATCHES, shard.batch_id, shard_metadata(evidence), check_shard(evidence), shard.id
    )


async def report_of_version(version: PolicyVersion) -> Report:
    evidence = await version_evidence(version)
    metadata = version_metadata(evidence, await accuracy_curve(version.run_id, version.number))
    weights = next((file.sha256 for file in version.files if file.name.endswith(".safetensors")), version.id)
    return Report("checkpoint", POLICY_VERSIONS, version.id, metadata, check_version(evidence), weights)


async def report_of_eval(report: EvalReport) -> Report:
    evidence = await eval_evidence(report)
    metadata = eval_metadata(evidence, await reward_curve(report.run_id, evidence.number))
    return Report("eval_report", POLICY_VERSIONS, report.version_id, metadata, check_eval(evidence), report.id)


async def mark_reported(document: Document) -> None:
    await type(document).get_pymongo_collection().update_one({"_id": document.id}, {"$set": {"reported": True}})


async def _emit(report: Report, document: Document, instance: dg.DagsterInstance, emit: Emit) -> None:
    name = str(report.partitions_def.name)
    if not instance.has_dynamic_partition(name, report.partition):
        instance.add_dynamic_partitions(name, [report.partition])
    for event in report.events():
        emit(event)
    await mark_reported(document)


async def report_rollouts(run_id: str, store: ObjectStore, instance: dg.DagsterInstance, emit: Emit) -> list[str]:
    """Report datasets, complete batches, shards and evaluations of the run; returns the ids reported.

    One call takes at most 20 documents of a kind, so that a stop request never waits long.
    """
    unreported = {"run_id": run_id, "reported": False}
    batches = {**unreported, "split": "train", "status": "complete"}
    done: list[str] = []

    async def each(documents: list[Any], make: Callable[[Any], Awaitable[Report]]) -> None:
        for document in documents:
            await _emit(await make(document), document, instance, emit)
            done.append(document.id)

    await each(await TaskDataset.find({"reported": False}).limit(20).to_list(), report_of_dataset)
    await each(await TrajectoryBatch.find(batches).sort("number").limit(20).to_list(), report_of_batch)
    await each(
        await Shard.find(unreported).sort("seq").limit(20).to_list(), lambda shard: report_of_shard(shard, store)
    )
    await each(await EvalReport.find(unreported).sort("version_id").limit(20).to_list(), report_of_eval)
    return done


async def report_training(run_id: str, store: ObjectStore, instance: dg.DagsterInstance, emit: Emit) -> list[str]:
    """Report the run's policy versions, and its shards where no rollout loop runs beside (stage sft)."""
    done: list[str] = []
    versions = await PolicyVersion.find({"run_id": run_id, "reported": False}).sort("number").limit(20).to_list()
    for version in versions:
        await _emit(await report_of_version(version), version, instance, emit)
        done.append(version.id)
    return done


async def report_all(run_id: str, store: ObjectStore, instance: dg.DagsterInstance, emit: Emit) -> list[str]:
    return [
        *await report_rollouts(run_id, store, instance, emit),
        *await report_training(run_id, store, instance, emit),
    ]
