"""Bulk reads that lineage is made of: each is one or two indexed round trips, however many ids it is given."""

import asyncio
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from agentrl_runtime.databases import (
    DBRecordData,
    DispatchedSamplingTask,
    PolicyVersion,
    Record,
    Run,
    Shard,
    StepLedger,
    Task,
    TrajectoryBatch,
)
from agentrl_runtime.errors import AgentRLError
from agentrl_runtime.ids import kind_of
from agentrl_runtime.local.endpoints import home
from agentrl_runtime.storage import ObjectStore, sha256_of_file
from agentrl_runtime.training.shards import row_order

Document = dict[str, Any]
_MODELS: dict[str, Any] = {
    "task": Task,
    "record": Record,
    "call": DispatchedSamplingTask,
    "version": PolicyVersion,
    "batch": TrajectoryBatch,
    "step": StepLedger,
    "shard": Shard,
    "run": Run,
}
_MOST_NAMED = 5
_MOST_FOUND = 200
_LONGEST_ID = 200
_STATISTICS = ("loss", "ratio_mean", "clipped_fraction", "staleness_mean", "staleness_max", "tokens")


async def fetch(model: Any, query: Document, fields: Iterable[str] = ()) -> list[Document]:
    """Stored documents as mappings, with only `fields` when given."""
    found: list[Document] = await model.get_pymongo_collection().find(query, dict.fromkeys(fields, 1) or None).to_list()
    return found


async def by_id(model: Any, ids: Iterable[str], fields: Iterable[str] = ()) -> dict[str, Document]:
    wanted = list(dict.fromkeys(ids))
    return {item["_id"]: item for item in await fetch(model, {"_id": {"$in": wanted}}, fields)} if wanted else {}


async def resolve(text: str) -> tuple[str, str]:
    """(kind, whole id) of an id or of the unique beginning of one (a shard: at least 8 hex digits).

    Raises AgentRLError when nothing, or more than one thing, has it.
    """
    text = text.strip().split("@", 1)[0] if text.startswith("smp_") else text.strip()
    shown = text if text.isprintable() and 0 < len(text) <= _LONGEST_ID else repr(text[:_LONGEST_ID])
    places = _places(text) if 0 < len(text) <= _LONGEST_ID else []
    for kind, field, model in places:
        if await model.get_pymongo_collection().find_one({field: text}, {"_id": 1}) is not None:
            return kind, text
    found: list[tuple[str, str]] = []
    for kind, field, model in places:
        begins = {field: {"$regex": f"^{re.escape(text)}"}}
        cursor = model.get_pymongo_collection().find(begins, {field: 1}).limit(_MOST_FOUND)
        found += [(kind, name) for name in dict.fromkeys([item[field] async for item in cursor])]
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(name for _, name in found[:_MOST_NAMED]) + (", ..." if len(found) > _MOST_NAMED else "")
        count = len(found) if len(found) < _MOST_FOUND else f"{_MOST_FOUND} or more"
        raise AgentRLError(f"{shown} begins {count} ids: {names}", mend="give more of the id")
    raise AgentRLError(
        f"nothing has the id {shown}",
        mend="check it, and that AGENTRL_HOME or AGENTRL_MONGO_URI is right; `agentrl lineage runs` lists runs",
    )


def _places(text: str) -> list[tuple[str, str, Any]]:
    """(kind, field, collection) where an id of this form, or the beginning of one, can be."""
    kind = kind_of(text)
    if kind == "sample":
        return [("sample", "sample_id", DBRecordData)]
    places: list[tuple[str, str, Any]] = [(kind, "_id", _MODELS[kind])] if kind in _MODELS else []
    if kind != "shard" and re.fullmatch(r"[0-9a-f]{8,63}", text):
        places.append(("shard", "_id", Shard))
    if kind is None and (begun := re.fullmatch(r"[a-z0-9-]+\.([vbs])\d*", text)):
        name = {"v": "version", "b": "batch", "s": "step"}[begun[1]]
        places.append((name, "_id", _MODELS[name]))
    return places


@dataclass(frozen=True)
class Training:
    """One committed step that took a row; `statistics` is what training noted of it."""

    step: Document
    version: Document
    statistics: dict[str, float]
    left_out: str | None


async def trainings(store: ObjectStore, rows: Iterable[tuple[str, int]]) -> dict[tuple[str, int], list[Training]]:
    """The committed steps that took each (shard id, row), in order.

    A step takes places [start, stop) of its pass's seeded order; it counts when its policy version exists.
    """
    wanted = set(rows)
    shard_ids = sorted({shard for shard, _ in wanted})
    if not wanted:
        return {}
    steps, shards = await asyncio.gather(
        fetch(StepLedger, {"shard_id": {"$in": shard_ids}}), by_id(Shard, shard_ids, ["rows"])
    )
    versions = await by_id(PolicyVersion, (step["version_id"] for step in steps))
    places: dict[tuple[str, str], np.ndarray] = {}
    taken: list[tuple[tuple[str, int], Document, Document]] = []
    for step in sorted(steps, key=lambda step: (step["run_id"], step["number"])):
        version = versions.get(step["version_id"])
        if version is None or step["number"] > version["last_step"]:
            continue  # the work of a process that died before it committed
        key = (step["shard_id"], step["order_seed"])
        if key not in places:
            places[key] = row_order(shards[step["shard_id"]]["rows"], step["order_seed"])
        for row in places[key][step["start"] : step["stop"]].tolist():
            if (step["shard_id"], row) in wanted:
                taken.append(((step["shard_id"], row), step, version))
    notes = await asyncio.to_thread(_noted, store, taken)
    found: dict[tuple[str, int], list[Training]] = {}
    for (place, step, version), line in zip(taken, notes, strict=True):
        numbers = {name: line[name] for name in _STATISTICS if line.get(name) is not None}
        found.setdefault(place, []).append(Training(step, version, numbers, line.get("left_out")))
    return found


def _noted(store: ObjectStore, taken: Sequence[tuple[tuple[str, int], Document, Document]]) -> list[Document]:
    """The line of its version's statistics for each taken row, empty where the version has none."""
    by_version: dict[str, set[tuple[int, str, int]]] = {}
    for (shard, row), step, version in taken:
        if version["statistics_sha256"]:
            by_version.setdefault(version["statistics_sha256"], set()).add((step["number"], shard, row))
    lines: dict[tuple[int, str, int], Document] = {}
    for digest, keys in by_version.items():
        table = read_statistics(store, digest)
        names = zip(*(table.column(name).to_pylist() for name in ("step", "shard_id", "row")), strict=True)
        numbers = [number for number, key in enumerate(names) if key in keys]
        for line in table.take(numbers).to_pylist():
            lines[line["step"], line["shard_id"], line["row"]] = line
    return [lines.get((step["number"], shard, row), {}) for (shard, row), step, _ in taken]


def read_statistics(store: ObjectStore, digest: str) -> Any:
    """A version's statistics as a pyarrow table; blocks. Cached under AGENTRL_HOME, checked each time."""
    import pyarrow.parquet

    path = home() / "cache" / "statistics" / f"{digest}.parquet"
    if not path.exists() or sha256_of_file(path) != digest:
        store.get_file(digest, path)
    return pyarrow.parquet.read_table(path)


async def descendants(version_ids: Iterable[str]) -> dict[str, list[Document]]:
    """Run id -> its versions that are, or descend from, one of these, across runs; two round trips a generation.

    Within a run each version's parent is the one before it, so all later versions descend from the first.
    """
    first: dict[str, int] = {}
    reached: dict[str, list[Document]] = {}
    fields = ("run_id", "number", "parent", "final", "created")
    wave = list((await by_id(PolicyVersion, version_ids, fields)).values())
    while wave:
        for version in wave:
            first[version["run_id"]] = min(version["number"], first.get(version["run_id"], version["number"]))
        runs = {version["run_id"] for version in wave}
        later = await fetch(PolicyVersion, {"run_id": {"$in": sorted(runs)}}, fields)
        for run in runs:
            line = [item for item in later if item["run_id"] == run and item["number"] >= first[run]]
            reached[run] = sorted(line, key=lambda item: item["number"])
        parents = [item["_id"] for run in runs for item in reached[run]]
        children = await fetch(PolicyVersion, {"parent": {"$in": parents}}, fields)
        wave = [child for child in children if child["number"] < first.get(child["run_id"], child["number"] + 1)]
    return reached


async def stored(kind: str, name: str) -> Document:
    """The document of an id that `resolve` gave, as it is stored."""
    return (await by_id(_MODELS[kind], [name]))[name]
