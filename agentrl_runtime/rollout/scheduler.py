"""The rollout process of a run: keeps the server at the newest policy, samples batches, evaluates."""

import asyncio
import contextlib
import math
from pathlib import Path
from typing import Literal

from beanie.odm.queries.find import FindMany

from agentrl_runtime.configs import AgentTrainingConfig
from agentrl_runtime.connections import open_stores
from agentrl_runtime.databases import (
    Lease,
    PolicyVersion,
    Run,
    Shard,
    StepLedger,
    TaskDataset,
    TrajectoryBatch,
    hold_lock,
    now,
)
from agentrl_runtime.errors import AgentRLError
from agentrl_runtime.rollout.batches import batch_tasks, ensure_train_batch, progress_line, task_ids_of
from agentrl_runtime.rollout.datasets import SizedTasks, store_tasks
from agentrl_runtime.rollout.engine import RolloutEngine
from agentrl_runtime.rollout.evaluation import evaluate
from agentrl_runtime.rollout.queue import give_back_all
from agentrl_runtime.rollout.sampler import AsyncSampler
from agentrl_runtime.rollout.session import SamplingSession, open_session
from agentrl_runtime.rollout.task_files import import_task_file
from agentrl_runtime.runs import ensure_run, get_run
from agentrl_runtime.storage import ObjectStore
from agentrl_runtime.training.inference import ServerUnavailable
from agentrl_runtime.training.policies import fetch_version, latest_version, model_if_ready
from agentrl_runtime.training.shards import FilterSpec, build_shard

_POLL_SECONDS = 0.2
_STATE_SECONDS = 1.0
_LOOK_AGAIN_SECONDS = 2.0
#: Complete batches looked at when a dead process may have left one without its shard.
_RECENT_BATCHES = 32


def may_start_batch(
    config: AgentTrainingConfig, *, unconsumed: int, versions_behind: int, steps_done: int, rows: int
) -> bool:
    """Whether a batch sampled now is trained within `max_policy_lag` versions, and is needed at all.

    `unconsumed` counts shards and batches under way before it, `versions_behind` the published versions that the
    server does not serve yet, `rows` the records of a batch.
    """
    steps_per_shard = math.ceil(rows / config.rows_per_step) * config.passes
    lag = versions_behind + math.ceil(unconsumed * steps_per_shard / config.save_steps)
    if lag > config.max_policy_lag and unconsumed + versions_behind > 0:
        return False
    return config.max_steps < 0 or steps_done + unconsumed * steps_per_shard < config.max_steps


async def _optimizer_steps(run_id: str) -> int:
    """Committed steps that changed the weights: an empty shard's ledger entry is none."""
    return await StepLedger.find({"run_id": run_id, "optimizer_step": True}).count()


class SamplingScheduler:
    """Samples a dataset for a run until the trainer ends it.

    `dataset` is any sequence of `Task`; without it the run's `train_file` (or imported `dataset`) is taken.
    Only one scheduler works for a run at a time; the lock of a dead one is free after its time to live.
    """

    def __init__(
        self,
        config: AgentTrainingConfig,
        sampler_class: type[AsyncSampler],
        dataset: SizedTasks | None = None,
        split: Literal["train"] = "train",
    ) -> None:
        self.config, self.sampler_class, self.dataset, self.split = config, sampler_class, dataset, split
        self._served: PolicyVersion | None = None
        self._evaluated: set[str] = set()
        self._counted = ""  # the version that _optimizer_steps was counted for
        self._optimizer_steps = 0
        self._under_way: dict[asyncio.Task[None], int] = {}
        self._latest: PolicyVersion | None = None
        self._changed = asyncio.Event()  # what _may_start looks at

    def run(self) -> None:
        """Sample until the run is over; blocks. Raises AgentRLError when it cannot go on."""
        asyncio.run(self.main())

    async def main(self) -> None:
        async with open_stores(self.config) as store:
            run = await ensure_run(self.config)
            async with hold_lock(f"{run.id}/rollout", holder="a rollout process") as lease:
                await self._import_datasets()
                folder = await self._starting_folder(store)
                async with open_session(self.config, store, folder) as session:
                    engine = RolloutEngine(session, self.sampler_class)
                    async with engine.running():
                        await self._work(run, session, engine, lease)

    async def _import_datasets(self) -> None:
        config = self.config
        if self.dataset is not None:
            await store_tasks(self.dataset, config.dataset_name)
        elif config.train_file is not None:
            await import_task_file(config.train_file, config.dataset_name)
        elif await TaskDataset.get(config.dataset_name) is None:
            raise AgentRLError(
                f"dataset {config.dataset_name} is not imported", mend="`agentrl tasks import FILE`, or set train_file"
            )
        if config.eval_file is not None:
            await import_task_file(config.eval_file, config.eval_file.stem)

    async def _starting_folder(self, store: ObjectStore) -> Path:
        """A folder that the server can start from; its weights are replaced by the run's first version.

        The tokenizer's folder does when it has weights: the server then starts while the model that the run
        begins with is still being trained.
        """
        named = Path(self.config.processor_name) if self.config.processor_name else None
        if named is not None and (named / "config.json").is_file() and list(named.glob("*.safetensors")):
            return named
        while (model := await model_if_ready(self.config.model_name_or_path, store)) is None:
            await asyncio.sleep(_STATE_SECONDS)
        return model.folder

    async def _work(self, run: Run, session: SamplingSession, engine: RolloutEngine, lease: Lease) -> None:
        async def stop_when_lost() -> None:
            await lease.lost.wait()
            lease.check()

        async with asyncio.TaskGroup() as group:
            helpers = [group.create_task(stop_when_lost()), group.create_task(self._produce(run, session, engine))]
            await self._follow(session, engine)
            for helper in helpers:
                helper.cancel()

    async def _follow(self, session: SamplingSession, engine: RolloutEngine) -> None:
        """Serve each new version and evaluate it when due; returns when the run is over and evaluated."""
        checked = 0.0
        loop = asyncio.get_running_loop()
        while True:
            state = "running"
            if loop.time() - checked > _STATE_SECONDS:
                checked, state = loop.time(), (await get_run(self.config.run_id)).state
            latest = await latest_version(self.config.run_id)
            if latest is not None:
                if self._latest is None or self._latest.number != latest.number:
                    self._latest = latest
                    self._changed.set()
                due = self._evaluation_due(latest)
                if self._served is None or self._served.number != latest.number:
                    await self._serve(session, latest)
                if due and self.config.eval_file is not None and latest.id not in self._evaluated:
                    self._evaluated.add(latest.id)
                    report = await evaluate(engine, latest, self.config.eval_file.stem)
                    print(f"{latest.id}: accuracy {report.accuracy:.3f} on {report.records} unseen tasks", flush=True)
            if state != "running":
                return
            await asyncio.sleep(_POLL_SECONDS)

    def _evaluation_due(self, latest: PolicyVersion) -> bool:
        if self._served is None or latest.final:
            return latest.number == 0 or latest.final or latest.number % self.config.eval_every == 0
        every = self.config.eval_every
        return latest.number // every > self._served.number // every

    async def _serve(self, session: SamplingSession, version: PolicyVersion) -> None:
        folder = await asyncio.to_thread(fetch_version, version, session.store)
        while True:
            try:
                await session.server.update_weights(folder, version.id)
                break
            except ServerUnavailable:
                if session.server.failed is not None:
                    raise
                await asyncio.sleep(_POLL_SECONDS)
        await PolicyVersion.get_pymongo_collection().update_one({"_id": version.id}, {"$set": {"served": now()}})
        self._served = version
        self._changed.set()

    async def _produce(self, run: Run, session: SamplingSession, engine: RolloutEngine) -> None:
        """Start batches as the bound on staleness lets them, those of a dead process first."""
        task_ids = await task_ids_of(self.config.dataset_name)
        _, first_tasks = batch_tasks(task_ids, 0, self.config.prompts_per_batch, self.config.seed)
        rows = len(first_tasks) * self.config.num_generations
        per_epoch = -(-len(task_ids) // self.config.prompts_per_batch)
        total = None if self.config.max_steps >= 0 else per_epoch * self.config.num_train_epochs
        while self._served is None:
            await self._next_change()
        async with asyncio.TaskGroup() as group:
            number = 0
            for batch in await self._left_over():
                self._start(group, run, session, engine, batch)
            newest = await self._newest_batch()
            if newest is not None:
                number = newest.number + 1
            while total is None or number < total:
                if await self._may_start(rows):
                    batch = await ensure_train_batch(self.config, number, task_ids)
                    self._start(group, run, session, engine, batch)
                    number += 1
                else:
                    await self._next_change()

    async def _next_change(self) -> None:
        """Returns when a version came or is served, or a batch ended; looks again after a while in any case."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), _LOOK_AGAIN_SECONDS)
        self._changed.clear()

    async def _may_start(self, rows: int) -> bool:
        latest = self._latest
        assert self._served is not None and latest is not None
        if self._counted != latest.id:
            self._counted, self._optimizer_steps = latest.id, await _optimizer_steps(self.config.run_id)
        waiting = await Shard.find({"run_id": self.config.run_id, "seq": {"$gte": latest.position.seq}}).count()
        return may_start_batch(
            self.config,
            unconsumed=waiting + len(self._under_way),
            versions_behind=latest.number - self._served.number,
            steps_done=self._optimizer_steps,
            rows=rows,
        )

    def _start(
        self,
        group: asyncio.TaskGroup,
        run: Run,
        session: SamplingSession,
        engine: RolloutEngine,
        batch: TrajectoryBatch,
    ) -> None:
        async def sample() -> None:
            finished = batch if batch.status == "complete" else await engine.complete(batch)
            shard = await build_shard(session.store, run, finished, FilterSpec.from_config(self.config))
            print(f"{progress_line(finished)}, {shard.rows} rows in shard {shard.id[:12]}", flush=True)

        worker = group.create_task(sample())
        self._under_way[worker] = batch.number
        worker.add_done_callback(self._end)

    def _end(self, worker: asyncio.Task[None]) -> None:
        del self._under_way[worker]
        self._changed.set()

    async def _left_over(self) -> list[TrajectoryBatch]:
        """Batches that a dead process left unfinished, or complete without a shard, oldest first."""
        found = await self._train_batches().limit(_RECENT_BATCHES).to_list()
        left = []
        for batch in reversed(found):
            if batch.status == "sampling":
                await give_back_all(batch.id)  # its leases died with the process
                left.append(batch)
            elif await Shard.find_one({"batch_id": batch.id}) is None:
                left.append(batch)
        return left

    async def _newest_batch(self) -> TrajectoryBatch | None:
        return await self._train_batches().first_or_none()

    def _train_batches(self) -> FindMany[TrajectoryBatch]:
        return TrajectoryBatch.find({"run_id": self.config.run_id, "split": "train"}).sort("-number")
