"""`agentrl train`, `agentrl sample`, and `agentrl runs`: start runs, list them, and move their state."""

import asyncio
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentrl_runtime.errors import AgentRLError

if TYPE_CHECKING:
    from agentrl_runtime.processes import ProcessTree
    from agentrl_runtime.runs import RunState

app = typer.Typer(name="runs", help="List runs, and stop, pause or resume one.", no_args_is_help=True)

#: Flags for single config fields are passed on: `agentrl train --config FILE --learning_rate 1e-5`.
PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}
ConfigOption = Annotated[Path, typer.Option("--config", help="YAML file with the run's config.")]
RunArgument = Annotated[str, typer.Argument(help="Run id.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def train(context: typer.Context, config: ConfigOption, as_json: JsonOption = False) -> None:
    """Train a run in the foreground, from its latest policy version on; Ctrl-C finishes the step and commits."""
    from agentrl_runtime.main import parse_arguments
    from agentrl_runtime.training.launch import start_trainer

    resolved = parse_arguments(["--config", str(config), *context.args])
    asyncio.run(_ensure_run(resolved))
    log_path = _log_path(resolved, "trainer")
    tree = start_trainer(config, world_size=resolved.world_size, log_path=log_path, arguments=context.args)
    _follow(tree, quiet=as_json)
    _print_run(asyncio.run(_describe(resolved.run_id)), as_json)


def sample(context: typer.Context, config: ConfigOption, as_json: JsonOption = False) -> None:
    """Sample for a run in the foreground until it ends; Ctrl-C gives unfinished records back."""
    from agentrl_runtime.main import parse_arguments
    from agentrl_runtime.rollout.launch import start_rollout

    resolved = parse_arguments(["--config", str(config), *context.args])
    asyncio.run(_ensure_run(resolved))
    if context.args:
        config = resolved.output_dir / f"{resolved.run_id}.yaml"
        resolved.write_yaml(config)
    tree = start_rollout(config, log_path=_log_path(resolved, "rollout"))
    _follow(tree, quiet=as_json)
    _print_run(asyncio.run(_describe(resolved.run_id)), as_json)


@app.command("list")
def list_(as_json: JsonOption = False) -> None:
    """All runs, newest first, with their latest policy version."""

    async def work() -> list[dict[str, Any]]:
        from agentrl_runtime.connections import open_stores
        from agentrl_runtime.databases import Run

        async with open_stores():
            runs = await Run.find_all().to_list()
            return [await _summary(run) for run in sorted(runs, key=lambda run: run.created, reverse=True)]

    found = asyncio.run(work())
    if as_json:
        print(json.dumps(found))
        return
    for run in found:
        print(f"{run['run']:24} {run['state']:9} {run['stage']:4} {run['latest'] or '-':32} {run['reason']}".rstrip())
    if not found:
        print("no runs yet; `agentrl train --config FILE` starts one")


@app.command()
def stop(run: RunArgument, as_json: JsonOption = False) -> None:
    """End a run: its processes finish what they do, commit and exit."""
    _move(run, {"running", "paused"}, "stopped", as_json)


@app.command()
def pause(run: RunArgument, as_json: JsonOption = False) -> None:
    """Let a run rest: its processes finish what they do, commit and exit until it is resumed."""
    _move(run, {"running"}, "paused", as_json)


@app.command()
def resume(run: RunArgument, as_json: JsonOption = False) -> None:
    """Let a paused, stopped or failed run go on from its latest policy version."""
    _move(run, {"paused", "stopped", "failed"}, "running", as_json)


def _move(run_id: str, allowed: set[str], state: "RunState", as_json: bool) -> None:
    async def work() -> dict[str, Any]:
        from agentrl_runtime.connections import open_stores
        from agentrl_runtime.runs import get_run, set_run_state

        async with open_stores():
            run = await get_run(run_id)
            if run.state not in allowed:
                raise AgentRLError(
                    f"run {run_id} is {run.state}", mend=f"this needs a run that is {' or '.join(sorted(allowed))}"
                )
            await set_run_state(run_id, state)
            return await _summary(await get_run(run_id))

    _print_run(asyncio.run(work()), as_json)


async def _ensure_run(config: Any) -> None:
    from agentrl_runtime.connections import open_stores
    from agentrl_runtime.runs import ensure_run

    async with open_stores(config):
        await ensure_run(config)


async def _describe(run_id: str) -> dict[str, Any]:
    from agentrl_runtime.connections import open_stores
    from agentrl_runtime.runs import get_run

    async with open_stores():
        return await _summary(await get_run(run_id))


async def _summary(run: Any) -> dict[str, Any]:
    from agentrl_runtime.training.policies import latest_version

    version = await latest_version(run.id)
    return {
        "run": run.id,
        "state": run.state,
        "reason": run.reason,
        "stage": run.config["stage"],
        "latest": version.id if version else None,
        "steps": version.last_step if version else 0,
        "created": run.created.isoformat(),
    }


def _print_run(run: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(run))
    else:
        print(f"run {run['run']} is {run['state']}, latest version {run['latest'] or 'none'}, {run['steps']} steps")


def _log_path(config: Any, name: str) -> Path:
    return Path(config.output_dir) / config.run_id / f"{name}.log"


def _follow(tree: "ProcessTree", *, quiet: bool) -> None:
    """Print the process's log as it grows, until it ends. Ctrl-C stops it in order."""
    start = tree.log_path.stat().st_size if tree.log_path.exists() else 0
    with tree.log_path.open(errors="replace") as log:
        log.seek(start)
        try:
            while True:
                code = tree.poll()
                text = log.read()
                if text and not quiet:
                    print(text, end="", flush=True)
                if code is not None:
                    break
                time.sleep(0.2)
        except KeyboardInterrupt:
            code = tree.stop()
    if code != 0:
        last = [line for line in tree.last_lines(40).splitlines() if line.startswith("error: ")]
        raise AgentRLError(
            last[-1].removeprefix("error: ") if last else f"the {tree.name} process ended with code {code}",
            mend=f"see {tree.log_path}",
        )


def register(root: typer.Typer) -> None:
    root.command("train", context_settings=PASS_ON)(train)
    root.command("sample", context_settings=PASS_ON)(sample)
    root.add_typer(app)
