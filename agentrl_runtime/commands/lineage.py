"""`agentrl lineage`: trace, impact, show, worst, runs and audit."""

import asyncio
import dataclasses
import json
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

if TYPE_CHECKING:
    from agentrl_runtime.storage import ObjectStore

T = TypeVar("T")
app = typer.Typer(
    name="lineage", help="Trace every trained token to its dataset line and every checkpoint.", no_args_is_help=True
)

IdArgument = Annotated[str, typer.Argument(help="Any id, or its unique beginning (a shard: 8 digits or more).")]
AllOption = Annotated[bool, typer.Option("--all", help="List every child, however many.")]
LimitOption = Annotated[int, typer.Option(min=1, help="Children shown of each node.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command("trace")
def trace_(id: IdArgument, all_: AllOption = False, limit: LimitOption = 20, as_json: JsonOption = False) -> None:
    """What it came from: checkpoint, step, shard, sample, record, call, task, line of the file."""
    from agentrl_runtime.lineage.queries import trace

    _print_tree(_with_store(lambda store: trace(store, id, None if all_ else limit)), as_json)


@app.command("impact")
def impact_(id: IdArgument, all_: AllOption = False, limit: LimitOption = 20, as_json: JsonOption = False) -> None:
    """What it went into: records, samples, shards, steps, and every policy version that it reached."""
    from agentrl_runtime.lineage.queries import impact

    _print_tree(_with_store(lambda store: impact(store, id, None if all_ else limit)), as_json)


@app.command()
def show(id: IdArgument, as_json: JsonOption = False) -> None:
    """One thing in full: a record, call or sample with its tokens, any other as stored."""
    from agentrl_runtime.lineage.render import render_record

    found = _with_store(lambda store: _shown(store, id))
    if isinstance(found, dict):
        print(json.dumps(found, default=str, ensure_ascii=True, indent=None if as_json else 2))
    else:
        print(json.dumps(dataclasses.asdict(found)) if as_json else render_record(found), end="\n" if as_json else "")


async def _shown(store: "ObjectStore", text: str) -> Any:
    """A RecordDetail for what belongs to a record, else the stored document."""
    from agentrl_runtime.databases import DBRecordData, DispatchedSamplingTask
    from agentrl_runtime.lineage.queries import resolve, show_record
    from agentrl_runtime.lineage.reading import stored

    kind, name = await resolve(text)
    if kind == "record":
        return await show_record(store, name)
    if kind == "call":
        call = await DispatchedSamplingTask.get(name)
        assert call is not None
        return await show_record(store, call.record_id)
    if kind == "sample":
        sample = await DBRecordData.find_one({"sample_id": name})
        assert sample is not None
        return await show_record(store, sample.record_id)
    return await stored(kind, name)


@app.command()
def worst(
    run: Annotated[str | None, typer.Option(help="Run id; the newest run when not given.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Records shown.")] = 10,
    as_json: JsonOption = False,
) -> None:
    """The lowest-scored training records of a run, with their replies and ids."""
    from agentrl_runtime.lineage.queries import RecordDetail, worst_records
    from agentrl_runtime.lineage.render import render_record
    from agentrl_runtime.runs import run_or_newest

    async def work(store: "ObjectStore") -> tuple[str, list[RecordDetail]]:
        name = (await run_or_newest(run)).id
        return name, await worst_records(store, name, limit)

    name, found = _with_store(work)
    if as_json:
        print(json.dumps([dataclasses.asdict(detail) for detail in found]))
        return
    print("\n".join(render_record(detail) for detail in found) or f"run {name} has no scored record")


@app.command()
def runs(as_json: JsonOption = False) -> None:
    """All runs, newest first."""
    from agentrl_runtime.databases import Run

    found = _with_store(lambda _: Run.find_all().to_list())
    found.sort(key=lambda run: run.created, reverse=True)
    if as_json:
        names = ("id", "state", "reason", "config_digest", "code_revision")
        print(json.dumps([{name: getattr(run, name) for name in names} for run in found]))
        return
    for run in found:
        print(f"{run.id:24} {run.state:9} {run.config.get('stage', ''):4} {run.created:%Y-%m-%d %H:%M} {run.reason}")
    if not found:
        print("no runs yet")


@app.command()
def audit(
    run: Annotated[str | None, typer.Argument(help="Run id; the newest run when not given.")] = None,
    logprobs: Annotated[
        int, typer.Option(min=0, help="Also recompute the logprobs of this many samples with their recorded policy.")
    ] = 0,
    as_json: JsonOption = False,
) -> None:
    """Check that each row was trained exactly once, as sampled, and traces to its line; exit 1 if not."""
    from agentrl_runtime.lineage.audit import AuditReport, audit_run
    from agentrl_runtime.lineage.recompute import LogprobReport, recompute_logprobs
    from agentrl_runtime.runs import run_or_newest

    async def work(store: "ObjectStore") -> tuple[AuditReport, LogprobReport | None]:
        name = (await run_or_newest(run)).id
        report = await audit_run(name, store)
        return report, await recompute_logprobs(name, store, limit=logprobs) if logprobs else None

    report, recomputed = _with_store(work)
    if as_json:
        values = dataclasses.asdict(report)
        print(json.dumps({**values, "logprobs": dataclasses.asdict(recomputed) if recomputed else None}))
    else:
        print(report)
        if recomputed:
            print(recomputed)
    if report.violations:
        raise typer.Exit(1)


def _with_store(work: "Callable[[ObjectStore], Awaitable[T]]") -> T:
    async def opened() -> T:
        from agentrl_runtime.connections import open_stores

        async with open_stores() as store:
            return await work(store)

    return asyncio.run(opened())


def _print_tree(node: Any, as_json: bool) -> None:
    from agentrl_runtime.lineage.render import render_tree

    print(json.dumps(node.as_dict(), default=str) if as_json else render_tree(node), end="\n" if as_json else "")


def register(parent: typer.Typer) -> None:
    parent.add_typer(app)
