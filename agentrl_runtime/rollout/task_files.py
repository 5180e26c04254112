"""Task files (JSONL): validation that names every bad line, and import in bounded memory."""

import asyncio
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from agentrl_runtime.databases import Source, Task, TaskDataset, insert_new
from agentrl_runtime.errors import AgentRLError
from agentrl_runtime.ids import derived_id
from agentrl_runtime.rollout.task_lines import MAX_LINE_BYTES, LineProblem, ParsedLine, parse_line

_CHUNK = 1000
_SHOWN = 20
_BOM = b"\xef\xbb\xbf"
#: Called with (bytes read, bytes in all) now and then.
Progress = Callable[[int, int], None]


@dataclass
class TaskFileReport:
    """What a task file holds. `tasks` counts the good lines; `problems` has one entry for each bad line."""

    path: Path
    sha256: str = ""
    lines: int = 0
    blank: int = 0
    tasks: int = 0
    problems: list[LineProblem] = field(default_factory=list)


@dataclass(frozen=True)
class ImportResult:
    """`imported` tasks are new, `present` were there already, `skipped` lists the bad lines left out."""

    dataset: str
    file: str
    sha256: str
    imported: int
    present: int
    skipped: list[LineProblem]


class BadTaskFile(AgentRLError):
    """The file has bad lines; `report` lists them all."""

    def __init__(self, report: TaskFileReport) -> None:
        self.report = report
        shown = [f"\n  {problem}" for problem in report.problems[:_SHOWN]]
        if len(report.problems) > _SHOWN:
            shown.append(f"\n  and {len(report.problems) - _SHOWN} more")
        super().__init__(
            f"{report.path}: {len(report.problems)} of {report.lines} lines cannot be imported{''.join(shown)}",
            mend="mend these lines, or import the others with --skip-bad-lines; nothing was imported",
        )


def validate_task_file(path: Path, progress: Progress | None = None) -> TaskFileReport:
    """Read the file once and report every bad line.

    Memory grows with the number of ids and problems only. Raises AgentRLError when the file cannot be read.
    """
    report = TaskFileReport(path)
    hasher = hashlib.sha256()
    for line, item in _checked_lines(path, hasher, progress):
        report.lines = line
        if item is None:
            report.blank += 1
        elif isinstance(item, LineProblem):
            report.problems.append(item)
        else:
            report.tasks += 1
    report.sha256 = hasher.hexdigest()
    return report


async def import_task_file(
    path: Path,
    dataset: str,
    *,
    skip_bad_lines: bool = False,
    progress: Progress | None = None,
    task_class: type[Task] = Task,
) -> ImportResult:
    """Import the tasks of a file into a dataset; importing equal content again changes nothing.

    The whole file is checked before the first task is inserted: bad lines raise BadTaskFile (unless they are
    to be skipped), and a task id that the dataset has with other content raises AgentRLError.
    """
    path = Path(path)
    report = await asyncio.to_thread(validate_task_file, path)
    if report.problems and not skip_bad_lines:
        raise BadTaskFile(report)
    if report.tasks == 0:
        raise AgentRLError(f"{path} holds no task", mend='write one object a line, such as {"query": "2+2="}')
    known = await TaskDataset.get(dataset)
    if known is not None and known.sha256 == report.sha256:
        return ImportResult(dataset, path.name, report.sha256, 0, report.tasks, report.problems)
    if await Task.find_one({"dataset": dataset}, with_children=True) is not None:
        await _refuse_changed_tasks(path, dataset)
    imported = await _insert_tasks(path, dataset, report, progress, task_class)
    await _note_dataset(path, dataset, report.sha256)
    return ImportResult(dataset, path.name, report.sha256, imported, report.tasks - imported, report.problems)


def task_id(dataset: str, parsed: ParsedLine) -> str:
    return derived_id("task_", dataset, parsed.canonical())


def _checked_lines(
    path: Path, hasher: "hashlib._Hash", progress: Progress | None = None
) -> Iterator[tuple[int, ParsedLine | LineProblem | None]]:
    """(line number, fields or problem or None) of each line; ids that were seen before are a problem."""
    seen: dict[str, int] = {}
    for line, raw in _raw_lines(path, hasher, progress):
        item = _too_long(line) if raw is None else parse_line(raw, line, _names_unless_known)
        if isinstance(item, ParsedLine):
            key = item.key if item.key is not None else hashlib.sha256(item.canonical().encode()).hexdigest()
            first = seen.setdefault(key, line)
            if first != line:
                item = _double(line, first, item.key)
        yield line, item


def _raw_lines(path: Path, hasher: "hashlib._Hash", progress: Progress | None) -> Iterator[tuple[int, bytes | None]]:
    """(number, bytes) of each line without its end, None for a line too long to hold."""
    try:
        total, read, number = path.stat().st_size, 0, 0
        with path.open("rb") as file:
            while raw := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                whole: bytes | None = raw.removeprefix(_BOM) if number == 1 else raw
                hasher.update(raw)
                read += len(raw)
                while len(raw) > MAX_LINE_BYTES and not raw.endswith(b"\n"):
                    whole = None
                    if not (raw := file.readline(MAX_LINE_BYTES + 1)):
                        break
                    hasher.update(raw)
                    read += len(raw)
                if progress and number % _CHUNK == 0:
                    progress(read, total)
                yield number, whole.rstrip(b"\r\n") if whole is not None else None
        if progress:
            progress(read, total)
    except FileNotFoundError:
        raise AgentRLError(f"task file {path} does not exist", mend="check the path") from None
    except OSError as error:
        raise AgentRLError(f"task file {path} cannot be read: {error.strerror}", mend="check the path") from None


def _too_long(line: int) -> LineProblem:
    return LineProblem(
        line=line,
        field="",
        what=f"longer than {MAX_LINE_BYTES // 1_000_000} MB, more than a database document holds",
        mend="give large images as http(s) URLs",
    )


def _double(line: int, first: int, key: str | None) -> LineProblem:
    if key is None:
        return LineProblem(line=line, field="", what=f"is the same task as line {first}", mend="leave one of them out")
    return LineProblem(line=line, field="id", what=f"{key!r} is the id of line {first} already", mend="rename one")


def _names_unless_known(scorer: str) -> str | None:
    """None for a scorer that exists, else the names that do."""
    from agentrl_runtime.rollout.scorers import SCORERS

    return None if scorer in SCORERS else ", ".join(sorted(SCORERS))


def _good_chunks(
    path: Path, hasher: "hashlib._Hash", progress: Progress | None
) -> Iterator[list[tuple[int, ParsedLine]]]:
    good = ((line, item) for line, item in _checked_lines(path, hasher, progress) if isinstance(item, ParsedLine))
    while chunk := list(islice(good, _CHUNK)):
        yield chunk


async def _refuse_changed_tasks(path: Path, dataset: str) -> None:
    """Hold the file's ids against those of the dataset, which is read once and streamed."""

    def keys_of_file() -> dict[str, tuple[int, str]]:
        chunks = _good_chunks(path, hashlib.sha256(), None)
        return {i.key: (line, task_id(dataset, i)) for chunk in chunks for line, i in chunk if i.key is not None}

    keys = await asyncio.to_thread(keys_of_file)
    async for stored in Task.get_pymongo_collection().find({"dataset": dataset}, {"task_key": 1, "source": 1}):
        line, new = keys.get(stored["task_key"], (0, ""))
        if new and stored["_id"] != new:
            source = stored.get("source") or {}
            raise AgentRLError(
                f"{path}, line {line}: id {stored['task_key']!r} is in dataset {dataset} with other content "
                f"({stored['_id']} from {source.get('file', 'no file')} line {source.get('line', '?')}; "
                f"this line would be {new})",
                mend="give the changed task another id, or import the file under another --dataset name",
            )


async def _insert_tasks(
    path: Path, dataset: str, report: TaskFileReport, progress: Progress | None, task_class: type[Task]
) -> int:
    hasher = hashlib.sha256()
    chunks = _good_chunks(path, hasher, progress)
    imported = 0
    while chunk := await asyncio.to_thread(next, chunks, None):
        tasks = [_task(task_class, dataset, line, item, path.name, report.sha256) for line, item in chunk]
        imported += await insert_new(task_class, tasks)
    if hasher.hexdigest() != report.sha256:
        raise AgentRLError(
            f"{path} changed while it was imported; dataset {dataset} has tasks of both versions",
            mend="import the finished file under another --dataset name",
        )
    return imported


def _task(task_class: type[Task], dataset: str, line: int, item: ParsedLine, file: str, sha256: str) -> Task:
    name = task_id(dataset, item)
    return task_class(
        id=name,
        dataset=dataset,
        task_key=item.key if item.key is not None else name,
        **item.model_dump(exclude={"key"}),
        source=Source(file=file, sha256=sha256, line=line),
        line=line,
    )


async def _note_dataset(path: Path, dataset: str, sha256: str) -> None:
    """Last: a dataset that is noted is whole. `reported` is cleared so that the new state is shown."""
    tasks = await Task.get_pymongo_collection().count_documents({"dataset": dataset})
    values = {"file": path.name, "sha256": sha256, "tasks": tasks, "reported": False}
    fresh = TaskDataset(id=dataset, file=path.name, sha256=sha256, tasks=tasks)
    await TaskDataset.get_pymongo_collection().update_one(
        {"_id": dataset}, {"$set": values, "$setOnInsert": {"created": fresh.created}}, upsert=True
    )
