"""What the loops tell Dagster about a run, on real stores and an instance of its own."""

from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest
from synthetic import make_batch, make_run, single_call_attempts, train

from agentrl_pipelines.evidence import shard_evidence
from agentrl_pipelines.keepers import keep
from agentrl_pipelines.liveness import RUN_TAG
from agentrl_pipelines.quality import check_shard
from agentrl_pipelines.reporting import report_rollouts, report_training
from agentrl_pipelines.state import Role, database, runs_needing
from agentrl_runtime.databases import (
    DispatchedSamplingTask,
    EvalReport,
    PolicyVersion,
    Run,
    Shard,
    StepLedger,
    TrajectoryBatch,
)
from agentrl_runtime.runs import set_run_state
from agentrl_runtime.storage import ObjectStore
from agentrl_runtime.training.shards import FilterSpec, build_shard


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.ephemeral() as opened:
        yield opened


async def _short_run(store: ObjectStore, folder: Path) -> tuple[Run, TrajectoryBatch, Shard, list[PolicyVersion]]:
    run, config, tasks = await make_run(folder)
    batch = await make_batch(store, run, 0, tasks, single_call_attempts([[1.0, 0.0], [1.0, 1.0]]))
    shard = await build_shard(store, run, batch, FilterSpec.from_config(config))
    versions = await train(store, run, [shard], rows_per_step=2)
    return run, batch, shard, versions


def _events(instance: dg.DagsterInstance, asset: str) -> list[dg.AssetMaterialization]:
    records = instance.fetch_materializations(dg.AssetKey(asset), limit=50, ascending=True).records
    return [record.asset_materialization for record in records if record.asset_materialization]


async def test_a_run_is_reported_once_and_whole(
    store: ObjectStore, tmp_path: Path, instance: dg.DagsterInstance
) -> None:
    run, batch, shard, versions = await _short_run(store, tmp_path)
    await EvalReport(
        id=f"{versions[0].id}.eval",
        run_id=run.id,
        version_id=versions[0].id,
        dataset="unseen",
        records=10,
        mean_score=0.7,
        accuracy=0.7,
        failed=0,
        seconds=1.0,
    ).insert()
    emit = instance.report_runless_asset_event
    reported = await report_rollouts(run.id, store, instance, emit)
    reported += await report_training(run.id, store, instance, emit)
    made = {batch.id, shard.id, f"{versions[0].id}.eval", *(v.id for v in versions)}
    assert made <= set(reported)

    assert set(instance.get_dynamic_partitions("trajectory_batch")) == {batch.id}
    assert set(instance.get_dynamic_partitions("policy_version")) == {version.id for version in versions}
    (trajectories,) = _events(instance, "trajectories")
    assert trajectories.metadata["reward"].value == pytest.approx(0.75)
    assert trajectories.metadata["zero_variance_groups"].value == 1
    assert "data:image/png;base64," in str(trajectories.metadata["reward_histogram"].value)
    (curated,) = _events(instance, "training_shard")
    assert (curated.metadata["shard"].value, curated.metadata["token_mismatches"].value) == (shard.id, 0)
    assert [event.partition for event in _events(instance, "checkpoint")] == [version.id for version in versions]
    (evaluated,) = _events(instance, "eval_report")
    assert evaluated.metadata["accuracy"].value == pytest.approx(0.7)

    # Datasets belong to no run: those of other tests may still be waiting for their report.
    assert not made & set(await report_rollouts(run.id, store, instance, emit))
    assert await report_training(run.id, store, instance, emit) == []


async def test_checks_are_stored_with_what_they_judge(
    store: ObjectStore, tmp_path: Path, instance: dg.DagsterInstance
) -> None:
    run, _, _, versions = await _short_run(store, tmp_path)
    await StepLedger.get_pymongo_collection().update_one(
        {"version_id": versions[-1].id}, {"$set": {"metrics.loss": float("nan")}}
    )
    await report_rollouts(run.id, store, instance, instance.report_runless_asset_event)
    await report_training(run.id, store, instance, instance.report_runless_asset_event)

    def passed(asset: str, check: str) -> bool:
        key = dg.AssetCheckKey(dg.AssetKey(asset), check)
        (record,) = instance.event_log_storage.get_asset_check_execution_history(key, limit=1)
        evaluation = record.evaluation
        assert evaluation is not None
        return evaluation.passed

    assert passed("trajectories", "calls_are_whole")
    assert passed("training_shard", "tokens_match")
    assert not passed("checkpoint", "metrics_are_finite")


async def test_a_token_that_differs_from_its_call_is_found(store: ObjectStore, tmp_path: Path) -> None:
    _, _, shard, _ = await _short_run(store, tmp_path)
    assert all(finding.passed for finding in check_shard(await shard_evidence(shard, store)))
    call = await DispatchedSamplingTask.find_one({"run_id": shard.run_id})
    assert call is not None and call.output_ids is not None
    await DispatchedSamplingTask.get_pymongo_collection().update_one(
        {"_id": call.id}, {"$set": {"output_ids": [9, *call.output_ids[1:]]}}
    )
    tokens_match, no_duplicates = check_shard(await shard_evidence(shard, store))
    assert (tokens_match.check, tokens_match.passed) == ("tokens_match", False)
    assert tokens_match.metadata["token_mismatches"] == 1 and no_duplicates.passed


async def test_sensors_ask_for_the_loops_of_running_runs_only(
    store: ObjectStore, tmp_path: Path, instance: dg.DagsterInstance
) -> None:
    run, _, _ = await make_run(tmp_path)

    def asked() -> set[str]:
        requests = [*keep(instance, "rollout", "rollout")]
        return {request.tags[RUN_TAG] for request in requests if isinstance(request, dg.RunRequest)}

    assert run.id in asked()
    await set_run_state(run.id, "paused")
    assert run.id not in asked()


async def test_a_finished_run_keeps_its_loop_until_all_is_evaluated_and_reported(
    store: ObjectStore, tmp_path: Path, instance: dg.DagsterInstance
) -> None:
    run, _, _, versions = await _short_run(store, tmp_path)
    await Run.get_pymongo_collection().update_one({"_id": run.id}, {"$set": {"config.eval_file": "unseen.jsonl"}})
    await PolicyVersion.get_pymongo_collection().update_one({"_id": versions[-1].id}, {"$set": {"final": True}})
    await set_run_state(run.id, "finished")

    def needs(role: Role) -> bool:
        with database() as db:
            return run.id in {needing["id"] for needing in runs_needing(db, role)}

    assert needs("rollout") and needs("training")
    await report_training(run.id, store, instance, instance.report_runless_asset_event)
    assert not needs("training")
    await report_rollouts(run.id, store, instance, instance.report_runless_asset_event)
    assert needs("rollout"), "the final version is not evaluated"
    await EvalReport(
        id=f"{versions[-1].id}.eval",
        run_id=run.id,
        version_id=versions[-1].id,
        dataset="unseen",
        records=10,
        mean_score=0.7,
        accuracy=0.7,
        failed=0,
        seconds=1.0,
        reported=True,
    ).insert()
    assert not needs("rollout")
