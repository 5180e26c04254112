"""The two long-lived loops: each supervises one process of the runtime and reports what it produces.

The processes run whether or not Dagster keeps up: a report is an observation and never a step of the loop.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import dagster as dg
from pymongo.errors import PyMongoError

from agentrl_pipelines.liveness import FAILED_TAG, process_tags
from agentrl_pipelines.reporting import Emit, emitter, report_all, report_rollouts, report_training
from agentrl_pipelines.state import Role
from agentrl_runtime.configs import AgentTrainingConfig
from agentrl_runtime.connections import open_stores
from agentrl_runtime.local.endpoints import home
from agentrl_runtime.processes import ProcessTree, last_lines
from agentrl_runtime.runs import config_of, get_run, set_run_state
from agentrl_runtime.storage import ObjectStore

_POLL_S = 1.0
_LOG_LINES = 30

Reporter = Callable[[str, ObjectStore, dg.DagsterInstance, Emit], Awaitable[list[str]]]


class LoopConfig(dg.Config):
    run_id: str


def log_path_of(run_id: str, name: str) -> Path:
    return home() / "logs" / run_id / f"{name}.log"


def write_config(config: AgentTrainingConfig, name: str) -> Path:
    """The config as the file that the runtime's entry points take; it holds no connection string."""
    path = home() / "runs" / config.run_id / f"{name}.yaml"
    config.write_yaml(path)
    return path


def supervise(
    context: dg.OpExecutionContext,
    run_id: str,
    *,
    role: Role,
    start: Callable[[AgentTrainingConfig, Path, Path], ProcessTree],
    reporter: Callable[[AgentTrainingConfig], Reporter],
) -> None:
    """Run the role's process to its end, reporting as it goes; an interruption stops the whole tree.

    Raises dagster.Failure with the last lines of the log when the process ends with an error.
    """
    instance = context.instance
    instance.add_run_tags(context.run_id, process_tags())
    log_path = log_path_of(run_id, role)
    with asyncio.Runner() as runner:
        stores = open_stores()
        store = runner.run(_opened(stores))
        try:
            config = runner.run(_resumed(run_id))
            report = reporter(config)
            tree = start(config, write_config(config, role), log_path)
            context.log.info(f"{role} process {tree.pid} of run {run_id} writes {log_path}")
            try:
                code = _follow(
                    context, tree, lambda: runner.run(_report(report, run_id, store, instance, emitter(context)))
                )
            except BaseException:
                if _cancelled_by_user(context):
                    reason = f"the Dagster run of its {role} loop was cancelled"
                    runner.run(_pause(run_id, reason))
                raise
            finally:
                tree.stop()
        finally:
            runner.run(_closed(stores))
    if code != 0:
        instance.add_run_tags(context.run_id, {FAILED_TAG: f"exit {code}"})
        raise dg.Failure(
            f"the {role} process of run {run_id} ended with exit code {code}:\n{last_lines(log_path, _LOG_LINES)}",
            metadata={"log": dg.MetadataValue.path(str(log_path)), "exit_code": code},
        )


async def _opened(stores: AbstractAsyncContextManager[ObjectStore]) -> ObjectStore:
    return await stores.__aenter__()


async def _closed(stores: AbstractAsyncContextManager[ObjectStore]) -> None:
    await stores.__aexit__(None, None, None)


async def _resumed(run_id: str) -> AgentTrainingConfig:
    """The run's config; launching a loop of a paused run by hand makes it run again."""
    run = await get_run(run_id)
    if run.state == "paused":
        await set_run_state(run_id, "running")
    return config_of(run)


async def _pause(run_id: str, reason: str) -> None:
    if (await get_run(run_id)).state == "running":
        await set_run_state(run_id, "paused", reason)


async def _report(
    reporter: Reporter, run_id: str, store: ObjectStore, instance: dg.DagsterInstance, emit: Emit
) -> list[str]:
    return await reporter(run_id, store, instance, emit)


def _cancelled_by_user(context: dg.OpExecutionContext) -> bool:
    """A run terminated in the UI is CANCELING; one interrupted because Dagster goes down is not."""
    run = context.instance.get_run_by_id(context.run_id)
    return run is not None and run.status == dg.DagsterRunStatus.CANCELING


def _follow(context: dg.OpExecutionContext, tree: ProcessTree, report: Callable[[], list[str]]) -> int:
    """Report every second until the process has ended and everything it left is reported; its exit code.

    While the process lives, a database that does not answer delays the reports and nothing else.
    """
    while True:
        code = tree.poll()
        began = time.monotonic()
        try:
            done = report()
        except PyMongoError as error:
            if code is not None:
                raise
            done = []
            context.log.warning(f"reports wait for the database: {str(error).split(',', 1)[0]}")
        if done:
            context.log.info(f"reported {len(done)}: {', '.join(done[:5])}{' …' if len(done) > 5 else ''}")
        elif code is not None:
            return code
        if code is None:
            time.sleep(max(0.0, _POLL_S - (time.monotonic() - began)))


def _start_rollout(config: AgentTrainingConfig, config_path: Path, log_path: Path) -> ProcessTree:
    from agentrl_runtime.rollout.launch import start_rollout

    return start_rollout(config_path, log_path)


def _start_trainer(config: AgentTrainingConfig, config_path: Path, log_path: Path) -> ProcessTree:
    from agentrl_runtime.training.launch import start_trainer

    return start_trainer(config_path, world_size=config.world_size, log_path=log_path)


@dg.op(description="Samples trajectory batches and evaluates policy versions until the run ends.")
def rollout(context: dg.OpExecutionContext, config: LoopConfig) -> None:
    supervise(context, config.run_id, role="rollout", start=_start_rollout, reporter=lambda _: report_rollouts)


@dg.op(description="Trains on the run's shards in order and publishes policy versions until the run ends.")
def training(context: dg.OpExecutionContext, config: LoopConfig) -> None:
    # Without a rollout loop beside it (stage sft) the trainer's loop reports the batch and the shard too.
    supervise(
        context,
        config.run_id,
        role="training",
        start=_start_trainer,
        reporter=lambda run: report_all if run.stage == "sft" else report_training,
    )


@dg.job(description="Keeps one run's sampling alive. The sensor keep_rollout starts it; cancel it to stop sampling.")
def rollout_loop() -> None:
    rollout()


@dg.job(description="Keeps one run's trainer alive. The sensor keep_training starts it; cancel it to stop training.")
def training_loop() -> None:
    training()
