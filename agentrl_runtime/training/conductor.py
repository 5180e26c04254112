"""Rank 0's part of training: it talks to the database and the store, and tells all ranks what to do next."""

import logging
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa

from agentrl_runtime.configs import AgentTrainingConfig
from agentrl_runtime.connections import open_stores
from agentrl_runtime.databases import LeftOut, PolicyVersion, Run, StepLedger, hold_lock
from agentrl_runtime.errors import AgentRLError
from agentrl_runtime.ids import step_id, version_id
from agentrl_runtime.runs import ensure_run, get_run, set_run_state
from agentrl_runtime.training.bridge import AsyncBridge
from agentrl_runtime.training.commit import (
    VersionDraft,
    commit_root,
    insert_version,
    recover,
    statistics_table,
    store_files,
)
from agentrl_runtime.training.datasets import DBIterableDataset, ShardDone, StepPlan, Wait, shards_of_run
from agentrl_runtime.training.demonstrations import ensure_demonstration_shard
from agentrl_runtime.training.learner import StepResult
from agentrl_runtime.training.losses import combine_metrics
from agentrl_runtime.training.messages import Idle, Learn, Message, Save, Start
from agentrl_runtime.training.packing import TrainingSequence
from agentrl_runtime.training.policies import (
    OPTIMIZER_FILE,
    STATE_FILE,
    TRAINER_FILES,
    ResolvedModel,
    fetch_file,
    fetch_version,
    install_folder,
    model_if_ready,
    prune_cache,
    version_folder,
)

log = logging.getLogger("agentrl.trainer")

LOCK_TTL_SECONDS = 15.0
#: Entries that wait for a commit are published after this long without a new shard: the sampler may be waiting
#: for the trainer to consume what it has, and would otherwise wait for ever. Without a lag it always is; with one,
#: only when shards give fewer steps than their batches promised.
QUIET_COMMIT_SECONDS = 5.0
LAGGING_QUIET_COMMIT_SECONDS = 60.0


class Conductor:
    """Holds the trainer's lock of a run and commits its versions; `messages` is what every rank carries out."""

    def __init__(self, config: AgentTrainingConfig, bridge: AsyncBridge, stop: threading.Event) -> None:
        self.config, self.bridge, self.stop = config, bridge, stop
        self.store = bridge.enter(open_stores(config))
        self.run: Run = bridge.run(ensure_run(config))
        self.pending: list[StepLedger] = []
        self.statistics: list[pa.Table] = []
        self.optimizer_steps = 0
        self.saved_at_step = 0
        self.final = False
        self._learn_began = 0.0

    # --- beginning ---

    def messages(self) -> Iterator[Message]:
        """From the run's latest version to its end, or until the run or this process is to stop."""
        if self.run.state == "finished":
            log.info("run %s is finished already", self.run.id)
            return
        self._require_running()
        lock = f"{self.run.id}/trainer"
        self.lease = self.bridge.enter(
            hold_lock(lock, holder="a trainer", ttl=LOCK_TTL_SECONDS, wait=LOCK_TTL_SECONDS + 3)
        )
        found = self.bridge.run(recover(self.run.id))
        version = found if found is not None else self._commit_root()
        if version is None:
            return
        self.version = version
        if version.final:
            self.bridge.run(set_run_state(self.run.id, "finished"))
            return
        self.folder = fetch_version(version, self.store, verify=True)
        shards = self._prepare_data()
        self.dataset = DBIterableDataset(self.config, self.store, self.bridge, position=version.position, shards=shards)
        with tempfile.TemporaryDirectory(prefix="agentrl-resume-") as work:
            yield Start(str(self.folder), self._fetch_resume(Path(work)))
        log.info("run %s goes on from %s", self.run.id, version.id)
        yield from self._train()

    def _require_running(self) -> None:
        if self.run.state != "running":
            raise AgentRLError(
                f"run {self.run.id} is {self.run.state}{f': {self.run.reason}' if self.run.reason else ''}",
                mend=f"`agentrl runs resume {self.run.id}` lets it go on",
            )

    def _commit_root(self) -> PolicyVersion | None:
        """Version 0; None when the process or the run is to stop while its model is still being trained."""
        reference = self.config.model_name_or_path
        waiting = False
        while (start := self.bridge.run(self._model_or_fail(reference))) is None:
            if not waiting:
                log.info("waiting for the final version of %s", reference)
                waiting = True
            if self.stop.wait(0.5) or self.bridge.run(get_run(self.run.id)).state != "running":
                return None
        processor = self.config.processor_name
        tokenizer = Path(processor).expanduser() if processor else start.folder
        if not tokenizer.is_dir():
            raise AgentRLError(f"processor_name: {processor} is no folder", mend="give a folder with a tokenizer")
        return self.bridge.run(commit_root(self.run, self.config, start, tokenizer, self.store, self.lease))

    async def _model_or_fail(self, reference: str) -> ResolvedModel | None:
        try:
            return await model_if_ready(reference, self.store)
        except AgentRLError as error:
            await set_run_state(self.run.id, "failed", error.what)
            raise

    def _prepare_data(self) -> int | None:
        if self.config.stage == "sft":
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(self.folder)
            self.bridge.run(ensure_demonstration_shard(self.config, self.run, self.store, tokenizer))
        return self.bridge.run(shards_of_run(self.config))

    def _fetch_resume(self, work: Path) -> str | None:
        files = {file.name: file for file in self.version.files}
        if OPTIMIZER_FILE not in files:
            return None
        for name in (OPTIMIZER_FILE, STATE_FILE):
            fetch_file(self.version, files[name], self.store, work / name)
        return str(work)

    def resumed(self, optimizer_steps: int) -> None:
        self.optimizer_steps = self.saved_at_step = optimizer_steps

    # --- the loop ---

    def _train(self) -> Iterator[Message]:
        quiet_since = time.monotonic()
        if not self._all_done():
            for plan, rows in self.dataset:
                self.lease.check()
                if isinstance(plan, Wait):
                    if self.pending and time.monotonic() - quiet_since > self._patience():
                        yield self._save()
                    else:
                        yield Idle()
                elif isinstance(plan, ShardDone):
                    self._note(plan, {}, [], optimizer_step=False)
                    log.info("shard %d has no rows: consumed without a step", plan.seq)
                else:
                    assert rows is not None
                    yield self._learn(plan, rows)
                if not isinstance(plan, Wait):
                    quiet_since = time.monotonic()
                if self.stop.is_set() or self._all_done():
                    break
                if self.optimizer_steps - self.saved_at_step >= self.config.save_steps:
                    yield self._save()
        yield from self._end()

    def _patience(self) -> float:
        """Seconds without a shard after which less than `save_steps` is committed."""
        short = any(not entry.optimizer_step for entry in self.pending)
        return QUIET_COMMIT_SECONDS if short or not self.config.max_policy_lag else LAGGING_QUIET_COMMIT_SECONDS

    def _all_done(self) -> bool:
        reached = 0 <= self.config.max_steps <= self.optimizer_steps
        return reached or self.dataset.consumed_all

    def _end(self) -> Iterator[Message]:
        if not self._all_done():
            if self.pending:
                yield self._save()
            log.info("run %s stops at %s; it can go on from there", self.run.id, self.version.id)
            return
        self.final = True
        if self.pending:
            yield self._save()
        else:
            self.bridge.run(_mark_final(self.version.id))
        self.bridge.run(set_run_state(self.run.id, "finished"))
        log.info("run %s is finished with %s", self.run.id, self.version.id)

    def _learn(self, plan: StepPlan, rows: pa.Table) -> Learn:
        self._plan, self._learn_began = plan, time.monotonic()
        return Learn(
            name=step_id(self.run.id, self._next_number()),
            step=self.optimizer_steps + 1,
            version=self.version.number,
            shard_id=plan.shard_id,
            numbers=[int(number) for number in plan.row_numbers()],
            rows=rows,
        )

    def _save(self) -> Save:
        return Save(self.dataset.position, self.optimizer_steps, self._next_number() - 1)

    def _next_number(self) -> int:
        return self.version.last_step + len(self.pending) + 1

    # --- what the ranks did ---

    def learned(
        self, message: Learn, sequences: Sequence[TrainingSequence], left_out: list[LeftOut], result: StepResult | None
    ) -> None:
        """Enter a step into the ledger; `result` None: no row was left to train."""
        seconds = time.monotonic() - self._learn_began
        scores = [score for score in message.rows["score"].to_pylist() if score is not None]
        metrics = {"rows": float(len(sequences)), "left_out": float(len(left_out)), "seconds": seconds}
        if scores:
            metrics["score_mean"] = sum(scores) / len(scores)
        if result is not None:
            self.optimizer_steps += 1
            metrics |= result.metrics
        plan = self._plan
        self._note(plan, metrics, left_out, optimizer_step=result is not None)
        self.statistics.append(statistics_table(self.pending[-1].number, message, sequences, left_out, result))
        if result is None:
            log.warning("%s: none of the %d rows is trained: %s", message.name, len(left_out), left_out[0].reason)
        else:
            log.info(
                "%s shard %d rows %d-%d loss %.4f grad %.3f in %.2f s%s",
                *(message.name, plan.seq, plan.start, plan.stop, metrics["loss"], metrics["grad_norm"], seconds),
                f", {len(left_out)} rows left out" if left_out else "",
            )

    def failed(self, message: Learn, error: AgentRLError) -> AgentRLError:
        """Stop the run for good; nothing of the step is committed."""
        reason = f"{message.name}: shard {message.shard_id[:12]}, {error.what}"
        self.bridge.run(set_run_state(self.run.id, "failed", reason))
        return AgentRLError(reason, mend=error.mend)

    def _note(
        self, plan: StepPlan | ShardDone, metrics: dict[str, float], left_out: list[LeftOut], *, optimizer_step: bool
    ) -> None:
        number = self._next_number()
        self.pending.append(
            StepLedger(
                id=step_id(self.run.id, number),
                run_id=self.run.id,
                number=number,
                version_id=version_id(self.run.id, self.version.number + 1),
                shard_id=plan.shard_id,
                seq=plan.seq,
                pass_number=plan.pass_number,
                order_seed=plan.order_seed,
                start=plan.start,
                stop=plan.stop,
                optimizer_step=optimizer_step,
                left_out=left_out,
                metrics=metrics,
            )
        )

    @property
    def model_folder(self) -> Path:
        """The cached folder of the latest version."""
        return version_folder(self.version.id)

    def work_folder(self) -> Path:
        """An empty folder beside where the version's folder will be."""
        parent = version_folder("").parent
        parent.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(dir=parent, prefix=f".{self.run.id}."))

    def saved(self, message: Save, folder: Path) -> None:
        """Publish the files of `folder` with all pending steps, and keep its model files in the local cache."""
        began = time.monotonic()
        number = self.version.number + 1
        draft = VersionDraft(
            number=number,
            parent=self.version.id,
            first_step=self.version.last_step,
            last_step=message.ledger_steps,
            position=message.position,
            metrics=_version_metrics(self.pending),
            seconds=sum(step.metrics.get("seconds", 0.0) for step in self.pending),
            final=self.final,
        )
        try:
            self.version = self.bridge.run(self._publish(draft, folder))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        self.pending, self.statistics = [], []
        self.saved_at_step = message.optimizer_steps
        prune_cache(self.run.id, number)
        log.info("%s committed in %.2f s", self.version.id, time.monotonic() - began)

    async def _publish(self, draft: VersionDraft, folder: Path) -> PolicyVersion:
        files, statistics = await store_files(folder, self.statistics, self.store)
        for name in TRAINER_FILES:
            (folder / name).unlink()
        # In its place before the commit: whoever sees the version finds its folder.
        install_folder(folder, version_folder(version_id(self.run.id, draft.number)))
        return await insert_version(self.run, draft, files, statistics, self.pending, self.lease)


def _version_metrics(steps: list[StepLedger]) -> dict[str, float]:
    """Of all steps together: sums of counts and times, extremes, and means weighted by tokens."""
    metrics = combine_metrics([{"tokens": 0.0, **step.metrics} for step in steps])
    for name in ("rows", "left_out", "seconds"):
        metrics[name] = sum(step.metrics.get(name, 0.0) for step in steps)
    metrics["optimizer_steps"] = float(sum(step.optimizer_step for step in steps))
    return metrics


async def _mark_final(version: str) -> None:
    await PolicyVersion.get_pymongo_collection().update_one({"_id": version}, {"$set": {"final": True}})
