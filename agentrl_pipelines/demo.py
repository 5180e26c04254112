"""`agentrl demo`: the whole loop with a small policy, or with a real chat model; one code path for both."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

from agentrl_pipelines.demo_plan import DemoOptions, DemoPlan, pause_other_demos, plan_demo
from agentrl_pipelines.demo_progress import Terminal, describe, logged_step, new_evaluations, version_rows, what_happens
from agentrl_pipelines.demo_report import print_report, write_report
from agentrl_pipelines.dev import House, open_house, stay, terminated_as_interrupt
from agentrl_pipelines.state import database, final_is_evaluated
from agentrl_runtime.configs import AgentTrainingConfig
from agentrl_runtime.connections import open_stores
from agentrl_runtime.errors import AgentRLError
from agentrl_runtime.local.endpoints import home
from agentrl_runtime.runs import config_of, ensure_run, get_run, set_run_state

#: The rollout process evaluates the last version after the trainer has ended.
_LAST_EVALUATION_S = 300.0
_REPORTS_S = 60.0
_POLL_S = 1.0
#: The database may be away this long (it is started again) before the demo gives up.
_DATABASE_PATIENCE_S = 60.0


def run_demo(options: DemoOptions, *, stop_at_end: bool, as_json: bool, port: int | None) -> int:
    """Exit code: 0 done (with `stop_at_end` only if the policy improved), 1 not, 130 when interrupted."""
    terminal = Terminal(to_stderr=as_json)
    finished = False
    with terminated_as_interrupt():
        try:
            options.check()
            terminal.say("starting the stores and Dagster …")
            with open_house(terminal.say, port=port) as house:
                terminal.say(f"UI: {house.dagster.graph}")
                report = _train(options, house, terminal)
                finished = True
                if as_json:
                    print(json.dumps(report), flush=True)
                else:
                    print_report(report, terminal.console)
                if not stop_at_end:
                    terminal.say("the UI stays up; Ctrl-C stops everything")
                    stay(house)
        except KeyboardInterrupt as signal:
            terminal.end()
            if finished:
                return 0
            terminal.say(f"interrupted by {signal}; the same command continues where it stopped")
            return 130
        finally:
            terminal.end()
    if not report["improved"]:
        terminal.say(f"the policy did not improve by {report['wanted_gain']}: {report['gain']:+.3f}")
        return 1
    return 0


def _train(options: DemoOptions, house: House, terminal: Terminal) -> dict[str, Any]:
    began = time.monotonic()
    plan, configs = asyncio.run(_begin(options, house.folder, terminal))
    stages: dict[str, float] = {}
    for config in configs:
        at = time.monotonic()
        _follow(config, house, terminal)
        stages[config.run_id] = round(time.monotonic() - at, 1)
    _wait_for_reports(plan.run_id, house, terminal)
    return write_report(plan, stages, round(time.monotonic() - began, 1), house)


async def _begin(options: DemoOptions, folder: Path, terminal: Terminal) -> tuple[DemoPlan, list[AgentTrainingConfig]]:
    """Make the runs of the plan, or take up those of an unfinished demo with the configs they began with."""
    async with open_stores():
        plan = await plan_demo(options, folder, terminal.say)
        verb = "continuing" if plan.continued else "beginning"
        terminal.say(f"{verb} {plan.run_id} (seed {plan.seed})")
        for other in await pause_other_demos({run_id for run_id, _ in plan.stages}):
            terminal.say(f"paused {other}, which was not finished")
        configs = []
        for run_id, make in plan.stages:
            try:
                run = await get_run(run_id)
            except AgentRLError:
                run = await ensure_run(make())
            if run.state == "paused":
                await set_run_state(run_id, "running")
            configs.append(config_of(run))
        return plan, configs


def _follow(config: AgentTrainingConfig, house: House, terminal: Terminal) -> None:
    """Show the run's progress until it is finished and its last version is evaluated.

    Raises AgentRLError with the reason when the run fails, or is paused or stopped by somebody.
    """
    run_id = config.run_id
    terminal.begin(f"{run_id}: {config.stage}", max(config.max_steps, 1))
    seen, last_answer, finished_at = -1, time.monotonic(), 0.0
    shown: set[str] = set()
    while True:
        house.look_after()
        try:
            with database() as db:
                run = db["runs"].find_one({"_id": run_id}, {"state": 1, "reason": 1}) or {}
                rows = version_rows(db, run_id, after=seen)
                evaluations = new_evaluations(db, run_id, shown)
                happening = what_happens(db, run_id) if terminal.quiet_too_long() else ""
                evaluated = config.stage == "sft" or final_is_evaluated(db, run_id)
        except AgentRLError:
            if time.monotonic() - last_answer > _DATABASE_PATIENCE_S:
                raise
            house.look_after(now=True)
            time.sleep(_POLL_S)
            continue
        last_answer = time.monotonic()
        for row in rows:
            seen = row.number
            terminal.say(describe(row))
        for line in evaluations:
            terminal.say(line)
        terminal.step(max([row.step for row in rows] + [logged_step(run_id)]))
        if happening:
            terminal.heartbeat(happening)
        state = run.get("state")
        if state == "finished":
            finished_at = finished_at or time.monotonic()
            if evaluated:
                break
            if time.monotonic() - finished_at > _LAST_EVALUATION_S:
                raise AgentRLError(
                    f"run {run_id} is finished, but its last version was not evaluated",
                    mend=f"read {home() / 'logs' / run_id / 'rollout.log'}",
                )
        elif state != "running":
            raise AgentRLError(
                f"run {run_id} is {state}: {run.get('reason') or 'no reason given'}",
                mend=f"read the logs in {home() / 'logs' / run_id}",
            )
        time.sleep(_POLL_S)
    terminal.end()


def _wait_for_reports(run_id: str, house: House, terminal: Terminal) -> None:
    """Let Dagster hear of the last documents, so that the UI shows what the report says."""
    deadline = time.monotonic() + _REPORTS_S
    unreported = {"run_id": run_id, "reported": False}
    while time.monotonic() < deadline:
        house.look_after()
        with database() as db:
            waiting = [
                name
                for name in ("shards", "policy_versions", "eval_reports")
                if db[name].find_one(unreported, {"_id": 1})
            ]
        if not waiting:
            return
        time.sleep(_POLL_S)
    terminal.say(f"Dagster has not reported all of {', '.join(waiting)} yet; it goes on")
