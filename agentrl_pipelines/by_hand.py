"""What materialising an asset by hand does, where no loop of its run is at work."""

import asyncio
import time
from pathlib import Path

from agentrl_pipelines.evidence import the
from agentrl_pipelines.state import BY_HAND
from agentrl_runtime.configs import AgentTrainingConfig
from agentrl_runtime.databases import (
    EvalReport,
    PolicyVersion,
    Shard,
    StepLedger,
    TaskDataset,
    TrajectoryBatch,
    hold_lock,
)
from agentrl_runtime.errors import AgentRLError
from agentrl_runtime.ids import batch_id, eval_batch_id, kind_of, version_id
from agentrl_runtime.processes import ProcessTree
from agentrl_runtime.runs import config_of, get_run, set_run_state
from agentrl_runtime.storage import ObjectStore

_POLL_S = 0.5
#: A live loop holds its lease all the time: waiting longer tells nothing new.
_LOCK_WAIT_S = 2.0


def run_and_number(key: str, letter: str) -> tuple[str, int]:
    """`demo-1.b00007` -> ("demo-1", 7); AgentRLError when the key has another form."""
    kind = {"b": "batch", "v": "version"}[letter]
    head, _, number = key.rpartition(f".{letter}")
    if kind_of(key) != kind or not number.isdigit():
        raise AgentRLError(f"{key} names no {kind}", mend=f"use a key such as demo-1.{letter}00007")
    return head, int(number)


async def _imported(file: Path | None, dataset: str) -> None:
    from agentrl_runtime.rollout.task_files import import_task_file

    if file is not None:
        await import_task_file(file, dataset)
    elif await TaskDataset.get(dataset) is None:
        raise AgentRLError(f"dataset {dataset} is not imported", mend="materialise task_dataset of that partition")


async def sample_batch(key: str, policy_version: str, store: ObjectStore) -> tuple[TrajectoryBatch, bool]:
    """Sample one training batch with a server of its own; (batch, whether it was complete before).

    The key is the run's next batch, or one that was left unfinished. Raises AgentRLError for any other, and
    while the run's own rollout loop is at work.
    """
    from agentrl_runtime.rollout.batches import ensure_train_batch, task_ids_of
    from agentrl_runtime.rollout.engine import RolloutEngine
    from agentrl_runtime.rollout.math import QuestionSampler
    from agentrl_runtime.rollout.queue import give_back_all
    from agentrl_runtime.rollout.session import open_session
    from agentrl_runtime.training.policies import fetch_version

    run_id, number = run_and_number(key, "b")
    known = await TrajectoryBatch.get(key)
    if known is not None and known.status == "complete":
        return known, True
    config = config_of(await get_run(run_id))
    version = await _version_of(run_id, policy_version)
    async with hold_lock(f"{run_id}/rollout", holder=f"trajectories of {key}", wait=_LOCK_WAIT_S):
        newest = await TrajectoryBatch.find({"run_id": run_id, "split": "train"}).sort("-number").first_or_none()
        following = newest.number + 1 if newest else 0
        if known is None and number != following:
            raise AgentRLError(
                f"{key} is not the next batch of run {run_id}",
                mend=f"add and materialise the partition {batch_id(run_id, following)}",
            )
        await _imported(config.train_file, config.dataset_name)
        folder = await asyncio.to_thread(fetch_version, version, store)
        batch = await ensure_train_batch(config, number, await task_ids_of(config.dataset_name))
        await give_back_all(batch.id)
        async with open_session(config, store, folder) as session:
            await session.server.update_weights(folder, version.id)
            async with RolloutEngine(session, QuestionSampler).running() as engine:
                return await engine.complete(batch), False


async def _version_of(run_id: str, named: str) -> PolicyVersion:
    from agentrl_runtime.training.policies import latest_version

    if named:
        return await the(PolicyVersion, named, "policy version")
    latest = await latest_version(run_id)
    if latest is None:
        raise AgentRLError(f"run {run_id} has no policy version", mend="name one in the field policy_version")
    return latest


async def evaluate_version(key: str, store: ObjectStore) -> tuple[EvalReport, bool]:
    """Greedy evaluation with a server of its own; (report, whether it was there before).

    Raises AgentRLError when the run has no eval_file, or evaluates the version itself at the moment.
    """
    from agentrl_runtime.rollout.engine import RolloutEngine
    from agentrl_runtime.rollout.evaluation import evaluate
    from agentrl_runtime.rollout.math import QuestionSampler
    from agentrl_runtime.rollout.queue import give_back_all
    from agentrl_runtime.rollout.session import open_session
    from agentrl_runtime.training.policies import fetch_version

    known = await EvalReport.get(eval_batch_id(key))
    if known is not None:
        return known, True
    version = await the(PolicyVersion, key, "policy version")
    run = await get_run(version.run_id)
    config = config_of(run)
    if config.eval_file is None:
        raise AgentRLError(f"run {run.id} has no eval_file", mend="evaluate a run whose config names one")
    begun = await TrajectoryBatch.get(eval_batch_id(key))
    if begun is not None and begun.status == "sampling" and run.state == "running":
        raise AgentRLError(f"{key} is being evaluated by run {run.id}", mend="wait: its report appears by itself")
    await _imported(config.eval_file, config.eval_file.stem)
    folder = await asyncio.to_thread(fetch_version, version, store)
    await give_back_all(eval_batch_id(key))
    async with open_session(config, store, folder) as session:
        await session.server.update_weights(folder, version.id)
        async with RolloutEngine(session, QuestionSampler).running() as engine:
            return await evaluate(engine, version, config.eval_file.stem), False


async def continue_training(key: str, steps: int, config_path: Path, log_path: Path) -> PolicyVersion:
    """Train the key's run from its last version on the shards that wait, for about `steps` optimizer steps.

    The run must be paused or stopped, so that no loop is at it; it is so again afterwards. Raises AgentRLError
    when nothing waits to be trained, or when the key was not reached.
    """
    from agentrl_runtime.training.launch import start_trainer
    from agentrl_runtime.training.policies import latest_version

    run_id, number = run_and_number(key, "v")
    run = await get_run(run_id)
    if run.state not in {"paused", "stopped"} and run.reason != BY_HAND:
        raise AgentRLError(
            f"run {run_id} is {run.state}; {key} cannot be trained by hand",
            mend=f"`agentrl runs pause {run_id}` first" if run.state == "running" else "start a new run",
        )
    latest = await latest_version(run_id)
    following = latest.number + 1 if latest else 0
    if number < following:
        raise AgentRLError(f"{key} was never made", mend=f"the next version is {version_id(run_id, following)}")
    if latest is not None and await _waiting(latest) == 0:
        raise AgentRLError(
            f"no shard of run {run_id} waits to be trained",
            mend="materialise trajectories and then training_shard with in_stream for its next batch",
        )
    config = config_of(run)
    config.write_yaml(config_path)
    await set_run_state(run_id, "running", BY_HAND)
    try:
        tree = start_trainer(config_path, world_size=config.world_size, log_path=log_path)
        try:
            await _until_trained(tree, config, latest, steps)
            code = tree.poll()  # None: it is told to stop now, and commits what it has
        finally:
            await asyncio.to_thread(tree.stop)
    finally:
        now = await get_run(run_id)
        if now.state == "running":
            before = "paused" if run.reason == BY_HAND else run.state
            await set_run_state(run_id, before, "" if run.reason == BY_HAND else run.reason)
    if code:
        raise AgentRLError(f"the trainer ended with exit code {code}:\n{tree.last_lines()}", mend=f"read {log_path}")
    made = await PolicyVersion.get(key)
    if made is None:
        latest = await latest_version(run_id)
        raise AgentRLError(
            f"{key} was not reached: the run is at {latest.id if latest else 'no version'}",
            mend="allow more steps, or materialise the next version",
        )
    return made


async def _waiting(latest: PolicyVersion) -> int:
    return await Shard.find({"run_id": latest.run_id, "seq": {"$gte": latest.position.seq}}).count()


async def _until_trained(
    tree: ProcessTree, config: AgentTrainingConfig, begin: PolicyVersion | None, steps: int
) -> None:
    """Returns when the trainer ended, has made `steps` optimizer steps, or has nothing left to train."""
    from agentrl_runtime.training.policies import latest_version

    seen = begin.id if begin else None
    began_at = begin.last_step if begin else 0
    quiet = time.monotonic()
    while tree.poll() is None:
        await asyncio.sleep(_POLL_S)
        latest = await latest_version(config.run_id)
        if latest is None or latest.id == seen:
            if time.monotonic() - quiet > 600:
                raise AgentRLError(
                    f"the trainer of run {config.run_id} made no version in 10 minutes", mend=f"read {tree.log_path}"
                )
            continue
        seen, quiet = latest.id, time.monotonic()
        done = await StepLedger.find(
            {"run_id": config.run_id, "number": {"$gt": began_at}, "optimizer_step": True}
        ).count()
        if done >= steps or await _waiting(latest) == 0:
            return
