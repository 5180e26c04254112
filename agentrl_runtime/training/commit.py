"""Publishing policy versions: files first, then the ledger, and the version's document last.

Inserting the PolicyVersion is the commit. Ledger entries behind the last committed version belong to work that
was lost with its process; they are removed at the next start, and the work is done again from the version's
position. So no row is trained twice and none is skipped, whenever a process dies.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
from pymongo.errors import BulkWriteError, DuplicateKeyError

from agentrl_runtime.configs import AgentTrainingConfig
from agentrl_runtime.databases import (
    FileDigest,
    Lease,
    LeftOut,
    PolicyVersion,
    Run,
    StepLedger,
    StreamPosition,
)
from agentrl_runtime.errors import AgentRLError
from agentrl_runtime.ids import version_id
from agentrl_runtime.runs import code_revision
from agentrl_runtime.storage import ObjectStore
from agentrl_runtime.training.checkpoint import side_files, weight_files
from agentrl_runtime.training.datasets import FIRST_SEQ
from agentrl_runtime.training.learner import STATISTICS, StepResult
from agentrl_runtime.training.messages import Learn
from agentrl_runtime.training.packing import TrainingSequence
from agentrl_runtime.training.policies import ResolvedModel, latest_version, model_files

_UPLOADS_AT_ONCE = 8


@dataclass(frozen=True)
class VersionDraft:
    """A policy version that is ready but for its files and the commit."""

    number: int
    parent: str | None
    first_step: int
    last_step: int
    position: StreamPosition
    metrics: dict[str, float]
    seconds: float
    final: bool


class AnotherTrainer(AgentRLError):
    """Another process committed this run's next version or steps: this one must not go on."""


async def recover(run_id: str) -> PolicyVersion | None:
    """The latest committed version, after removing ledger entries that no version covers."""
    latest = await latest_version(run_id)
    last_step = latest.last_step if latest is not None else 0
    await StepLedger.get_pymongo_collection().delete_many({"run_id": run_id, "number": {"$gt": last_step}})
    return latest


async def commit_root(
    run: Run, config: AgentTrainingConfig, start: ResolvedModel, tokenizer: Path, store: ObjectStore, lease: Lease
) -> PolicyVersion:
    """Version 0: the model that the run starts from, and the tokenizer files of the folder `tokenizer`.

    Content that the store has is not sent again; a parent version's files are not even read.
    """
    if start.version is not None and tokenizer == start.folder:
        files = model_files(start.version)
    else:
        sides = {path.name: path for path in side_files(start.folder)}
        if tokenizer != start.folder:
            sides |= {path.name: path for path in side_files(tokenizer) if path.name not in _OF_THE_MODEL}
        files = await upload([*weight_files(start.folder), *sides.values()], store)
    draft = VersionDraft(
        number=0,
        parent=start.version.id if start.version else None,
        first_step=0,
        last_step=0,
        position=StreamPosition(seq=FIRST_SEQ),
        metrics={},
        seconds=0.0,
        final=False,
    )
    origin = "" if start.version else config.model_name_or_path
    return await insert_version(run, draft, files, None, [], lease, origin=origin)


#: Files that a tokenizer folder must not replace.
_OF_THE_MODEL = frozenset({"config.json", "generation_config.json"})


async def store_files(folder: Path, statistics: Sequence[pa.Table], store: ObjectStore) -> tuple[list[FileDigest], str]:
    """Send the files of a version and its row statistics; nothing refers to them yet."""
    table = pa.concat_tables([STATISTICS_SCHEMA.empty_table(), *statistics])
    files, digest = await asyncio.gather(
        upload(sorted(folder.iterdir()), store), asyncio.to_thread(store.put, _parquet(table))
    )
    return files, digest


async def upload(paths: Sequence[Path], store: ObjectStore) -> list[FileDigest]:
    """Store files by content, several at a time; the digests come in the order of the paths."""
    gate = asyncio.Semaphore(_UPLOADS_AT_ONCE)

    async def one(path: Path) -> FileDigest:
        async with gate:
            digest, size = await asyncio.to_thread(store.put_file, path)
        return FileDigest(name=path.name, sha256=digest, size=size)

    return list(await asyncio.gather(*(one(path) for path in paths)))


async def insert_version(
    run: Run,
    draft: VersionDraft,
    files: list[FileDigest],
    statistics_sha256: str | None,
    steps: Sequence[StepLedger],
    lease: Lease,
    *,
    origin: str = "",
) -> PolicyVersion:
    """The commit: the ledger entries of the version's steps, then the version itself.

    Raises LockLost or AnotherTrainer, with no version inserted, when another trainer took over.
    """
    version = PolicyVersion(
        id=version_id(run.id, draft.number),
        run_id=run.id,
        number=draft.number,
        parent=draft.parent,
        origin=origin,
        first_step=draft.first_step,
        last_step=draft.last_step,
        shard_ids=list(dict.fromkeys(step.shard_id for step in steps)),
        position=draft.position,
        config_digest=run.config_digest,
        code_revision=code_revision(),
        files=files,
        statistics_sha256=statistics_sha256,
        metrics=draft.metrics,
        seconds=draft.seconds,
        final=draft.final,
    )
    lease.check()
    try:
        if steps:
            # In order: of two trainers that commit the same steps, one stops at the first of them.
            await StepLedger.insert_many(list(steps), ordered=True)
        lease.check()
        await version.insert()
    except (DuplicateKeyError, BulkWriteError) as error:
        if isinstance(error, BulkWriteError) and any(e.get("code") != 11000 for e in error.details["writeErrors"]):
            raise
        raise AnotherTrainer(
            f"{version.id} or its steps exist already: another trainer commits to run {run.id}",
            mend="leave one trainer running; this one committed nothing and stops",
        ) from None
    return version


#: One line for each row of each step: what training did with it, or why it was left out.
STATISTICS_SCHEMA = pa.schema(
    [
        ("step", pa.int64()),
        ("shard_id", pa.string()),
        ("row", pa.int64()),
        ("sample_id", pa.string()),
        ("record_id", pa.string()),
        ("advantage", pa.float64()),
        *((name, pa.float32()) for name in STATISTICS),
        ("left_out", pa.string()),
    ]
)


def statistics_table(
    number: int,
    message: Learn,
    sequences: Sequence[TrainingSequence],
    left_out: Sequence[LeftOut],
    result: StepResult | None,
) -> pa.Table:
    """The lines of one step, in the order of its rows."""
    trained = {sequence.row: line for line, sequence in enumerate(sequences)}
    reasons = {entry.record_id: entry.reason for entry in left_out}
    values = result.statistics.tolist() if result is not None else []
    blank = [None] * len(STATISTICS)
    lines = [values[trained[row]] if row in trained and values else blank for row in message.numbers]
    columns = {name: message.rows[name].to_pylist() for name in ("sample_id", "record_id", "advantage")}
    return pa.table(
        {
            "step": [number] * len(lines),
            "shard_id": [message.shard_id] * len(lines),
            "row": message.numbers,
            **columns,
            **{name: [line[column] for line in lines] for column, name in enumerate(STATISTICS)},
            "left_out": [
                None if row in trained else reasons[record]
                for row, record in zip(message.numbers, columns["record_id"], strict=True)
            ],
        },
        schema=STATISTICS_SCHEMA,
    )


def _parquet(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    pyarrow.parquet.write_table(table, sink, compression="zstd")
    return bytes(sink.getvalue())
