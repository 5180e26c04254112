"""`agentrl tasks import` against the real database."""

import json
from pathlib import Path

import pytest
from synthetic import fresh
from typer.testing import CliRunner

from agentrl_runtime.commands.tasks import app
from agentrl_runtime.databases import Task, TaskDataset
from agentrl_runtime.errors import AgentRLError
from agentrl_runtime.local.endpoints import Endpoints
from agentrl_runtime.rollout.task_files import BadTaskFile, import_task_file
from agentrl_runtime.storage import ObjectStore

GOOD = '{"id": "a", "query": "1+1=", "answer": "2", "level": 3}\n\n{"query": "2+2="}\n'
BAD = GOOD + '{"id": "a", "query": "again"}\nnothing\n'


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tasks.jsonl"


async def test_import_is_idempotent_and_keeps_the_source(store: ObjectStore, path: Path) -> None:
    path.write_text(GOOD)
    name = fresh("set")
    first = await import_task_file(path, name)
    second = await import_task_file(path, name)
    assert (first.imported, first.present, second.imported, second.present) == (2, 0, 0, 2)
    tasks = sorted(await Task.find({"dataset": name}).to_list(), key=lambda task: task.line)
    assert [(task.line, task.query, task.answer) for task in tasks] == [(1, "1+1=", "2"), (3, "2+2=", None)]
    assert tasks[0].extra == {"level": 3} and tasks[0].task_key == "a" and tasks[1].task_key == tasks[1].id
    assert tasks[1].source is not None
    assert (tasks[1].source.file, tasks[1].source.line, tasks[1].source.sha256) == ("tasks.jsonl", 3, first.sha256)
    dataset = await TaskDataset.get(name)
    assert dataset is not None and (dataset.tasks, dataset.sha256) == (2, first.sha256)


async def test_a_grown_file_adds_its_new_tasks(store: ObjectStore, path: Path) -> None:
    name = fresh("set")
    path.write_text(GOOD)
    await import_task_file(path, name)
    path.write_text(GOOD + '{"query": "3+3="}\n')
    result = await import_task_file(path, name)
    assert (result.imported, result.present) == (1, 2)
    assert (await TaskDataset.get(name)).tasks == 3  # type: ignore[union-attr]


async def test_an_import_that_was_cut_off_is_completed(store: ObjectStore, path: Path) -> None:
    name = fresh("set")
    path.write_text(GOOD)
    await import_task_file(path, name)
    await Task.find_one({"dataset": name, "line": 3}).delete()
    await TaskDataset.find_one({"_id": name}).delete()
    assert (await import_task_file(path, name)).imported == 1
    assert await Task.find({"dataset": name}).count() == 2


async def test_a_changed_task_is_refused_and_both_are_named(store: ObjectStore, path: Path) -> None:
    name = fresh("set")
    path.write_text(GOOD)
    await import_task_file(path, name)
    old = await Task.find_one({"dataset": name, "task_key": "a"})
    path.write_text('{"query": "new"}\n{"id": "a", "query": "1+1=", "answer": "3"}\n')
    with pytest.raises(AgentRLError, match=r"line 2: id 'a' .* tasks.jsonl line 1") as error:
        await import_task_file(path, name)
    assert old is not None and old.id in error.value.what
    assert await Task.find({"dataset": name}).count() == 2


async def test_bad_lines_stop_everything_unless_skipped(store: ObjectStore, path: Path) -> None:
    name = fresh("set")
    path.write_text(BAD)
    with pytest.raises(BadTaskFile, match="2 of 5 lines") as error:
        await import_task_file(path, name)
    assert [problem.line for problem in error.value.report.problems] == [4, 5]
    assert await Task.find({"dataset": name}).count() == 0
    result = await import_task_file(path, name, skip_bad_lines=True)
    assert result.imported == 2 and [problem.line for problem in result.skipped] == [4, 5]


async def test_a_file_without_tasks_is_refused(store: ObjectStore, path: Path) -> None:
    path.write_text("\n\n")
    with pytest.raises(AgentRLError, match="holds no task"):
        await import_task_file(path, fresh("set"))


async def test_many_tasks_go_in_by_chunks(store: ObjectStore, path: Path) -> None:
    name = fresh("set")
    path.write_text("".join(f'{{"query": "{number}"}}\n' for number in range(2500)))
    assert (await import_task_file(path, name)).imported == 2500
    assert (await import_task_file(path, name)).present == 2500


def test_the_import_command(services: Endpoints, path: Path) -> None:
    path.write_text(BAD)
    name = fresh("set")
    run = CliRunner()
    refused = run.invoke(app, ["import", str(path), "--dataset", name])
    assert refused.exit_code == 1 and isinstance(refused.exception, BadTaskFile)
    skipped = run.invoke(app, ["import", str(path), "--dataset", name, "--skip-bad-lines", "--json"])
    assert skipped.exit_code == 0, skipped.exception
    values = json.loads(skipped.stdout)
    assert values["imported"] == 2 and [problem["line"] for problem in values["skipped"]] == [4, 5]
