"""`agentrl tasks`: validate and import task files."""

import asyncio
import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from agentrl_runtime.rollout.task_files import Progress
    from agentrl_runtime.rollout.task_lines import LineProblem

app = typer.Typer(name="tasks", help="Validate and import task files (JSONL).", no_args_is_help=True)

FileArgument = Annotated[Path, typer.Argument(help="Task file: one JSON object a line.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.command("validate")
def validate(file: FileArgument, as_json: JsonOption = False) -> None:
    """Check every line; exit 1 when one is bad."""
    from agentrl_runtime.rollout.task_files import validate_task_file

    with _progress_bar(file, as_json) as progress:
        report = validate_task_file(file, progress)
    if as_json:
        values = {"file": str(file), "sha256": report.sha256, "lines": report.lines, "blank": report.blank}
        print(json.dumps({**values, "tasks": report.tasks, "problems": _dumped(report.problems)}))
    else:
        _print_problems(report.problems)
        print(f"{file}: {report.tasks} good, {len(report.problems)} bad, {report.blank} blank of {report.lines} lines")
    if report.problems or report.tasks == 0:
        raise typer.Exit(1)


@app.command("import")
def import_(
    file: FileArgument,
    dataset: Annotated[str | None, typer.Option(help="Name of the dataset; default: the file's stem.")] = None,
    skip_bad_lines: Annotated[bool, typer.Option(help="Import the good lines and list the bad ones.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Import a task file. A bad line stops it all, unless --skip-bad-lines; importing again changes nothing."""
    from agentrl_runtime.connections import open_stores
    from agentrl_runtime.rollout.task_files import ImportResult, import_task_file

    async def work() -> ImportResult:
        async with open_stores():
            with _progress_bar(file, as_json) as progress:
                return await import_task_file(
                    file, dataset or file.stem, skip_bad_lines=skip_bad_lines, progress=progress
                )

    result = asyncio.run(work())
    if as_json:
        values = {"dataset": result.dataset, "file": result.file, "sha256": result.sha256}
        counts = {"imported": result.imported, "present": result.present}
        print(json.dumps({**values, **counts, "skipped": _dumped(result.skipped)}))
        return
    _print_problems(result.skipped)
    print(
        f"dataset {result.dataset}: {result.imported} tasks imported, {result.present} there already, "
        f"{len(result.skipped)} bad lines skipped"
    )


def _dumped(problems: "list[LineProblem]") -> list[dict[str, object]]:
    return [problem.model_dump() for problem in problems]


def _print_problems(problems: "list[LineProblem]") -> None:
    for problem in problems:
        print(problem, file=sys.stderr)


@contextlib.contextmanager
def _progress_bar(file: Path, quiet: bool) -> "Iterator[Progress | None]":
    """A bar on a terminal, nothing elsewhere."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress as Bar

    with Bar(console=Console(stderr=True), transient=True) as bar:
        line = bar.add_task(file.name, total=None)
        yield lambda read, total: bar.update(line, completed=read, total=total)


def register(parent: typer.Typer) -> None:
    parent.add_typer(app)
