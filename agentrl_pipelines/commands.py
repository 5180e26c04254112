"""`agentrl dev` and `agentrl demo`; Dagster is imported when one of them runs."""

from pathlib import Path
from typing import Annotated

import typer

JsonOption = Annotated[
    bool, typer.Option("--json", help="Print the report as one JSON object; progress goes to stderr.")
]


def dev(port: Annotated[int | None, typer.Option(help="Port of the web UI; default: a free one.")] = None) -> None:
    """Start the stores, Dagster's web UI and its daemon; Ctrl-C stops them all."""
    from agentrl_pipelines.dev import run_dev

    raise typer.Exit(run_dev(port))


def demo(
    seed: Annotated[int, typer.Option(min=0, help="Seed of model, task order and sampling.")] = 0,
    exit_: Annotated[
        bool, typer.Option("--exit", help="Stop everything at the end; exit code 0 only if the policy improved.")
    ] = False,
    real: Annotated[bool, typer.Option("--real", help="Train a real chat model on published tasks.")] = False,
    model: Annotated[Path | None, typer.Option(help="Model folder for --real.")] = None,
    tasks: Annotated[
        Path | None, typer.Option(help="Task file (JSONL) for --real; its last fifth is held out.")
    ] = None,
    eval_tasks: Annotated[
        Path | None, typer.Option(help="Held-out task file (JSONL); then --tasks is trained whole.")
    ] = None,
    port: Annotated[int | None, typer.Option(help="Port of the web UI; default: a free one.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Run the whole loop: sample, curate, train, serve, evaluate; an unfinished demo is continued."""
    from agentrl_pipelines.demo import run_demo
    from agentrl_pipelines.demo_plan import DemoOptions

    options = DemoOptions(seed=seed, real=real, model=model, tasks=tasks, eval_tasks=eval_tasks)
    raise typer.Exit(run_demo(options, stop_at_end=exit_, as_json=as_json, port=port))


def register(root: typer.Typer) -> None:
    root.command("dev")(dev)
    root.command("demo")(demo)
