"""The work queue: records of a batch, claimed in bulk by leases that expire."""

import asyncio
import contextlib
import sys
import uuid
from collections.abc import AsyncIterator, Iterable
from datetime import timedelta

from pymongo.errors import PyMongoError

from agentrl_runtime import ids
from agentrl_runtime.databases import FINAL_STATUSES, Record, TrajectoryBatch, find_documents, insert_new, now

MAX_TRIES = 3


async def push_batch(batch: TrajectoryBatch, *, keep: int = 0, lease_seconds: float = 0.0) -> list[Record]:
    """Queue the records of a batch, the first `keep` of them leased to the caller; returns those.

    Pushing it again adds what is missing only. A record that is leased from its birth costs one insert where
    a claim costs an update more.
    """
    token = uuid.uuid4().hex
    kept = {
        "status": "leased",
        "lease_token": token,
        "lease_expires": now() + timedelta(seconds=lease_seconds),
        "fence": 1,
        "tries": 1,
    }
    attempts = [(task, attempt) for task in batch.task_ids for attempt in range(batch.attempts)]
    records = [
        Record(
            id=ids.record_id(batch.id, task, attempt),
            run_id=batch.run_id,
            batch_id=batch.id,
            task_id=task,
            attempt=attempt,
            split=batch.split,
            **(kept if place < keep else {}),
        )
        for place, (task, attempt) in enumerate(attempts)
    ]
    if await insert_new(Record, records) == len(records):
        return records[:keep]
    return await _leased(batch.id, token)


async def claim(batch_id: str, limit: int, lease_seconds: float) -> list[Record]:
    """Lease up to `limit` queued records of a batch: three round trips however many there are.

    Two claimers at once get disjoint records: each update names `queued` as the state to change.
    """
    records = Record.get_pymongo_collection()
    found = records.find({"batch_id": batch_id, "status": "queued"}, {"_id": 1}).limit(limit)
    candidates = [item["_id"] async for item in found]
    if not candidates:
        return []
    token = uuid.uuid4().hex
    await records.update_many(
        {"_id": {"$in": candidates}, "status": "queued"},
        {
            "$set": {
                "status": "leased",
                "lease_token": token,
                "lease_expires": now() + timedelta(seconds=lease_seconds),
            },
            "$inc": {"fence": 1, "tries": 1},
        },
    )
    return await _leased(batch_id, token)


async def _leased(batch_id: str, token: str) -> list[Record]:
    # The batch and status have an index; the token needs none of its own, which every claim and finish would pay.
    return await find_documents(Record, {"batch_id": batch_id, "status": "leased", "lease_token": token})


async def renew(batch_ids: Iterable[str], tokens: Iterable[str], lease_seconds: float) -> None:
    """Prolong the leases of these tokens in these batches."""
    await Record.get_pymongo_collection().update_many(
        {
            "batch_id": {"$in": sorted(batch_ids)},
            "status": "leased",
            "lease_token": {"$in": sorted(tokens)},
        },
        {"$set": {"lease_expires": now() + timedelta(seconds=lease_seconds)}},
    )


@contextlib.asynccontextmanager
async def kept_alive(records: Iterable[Record], lease_seconds: float) -> AsyncIterator[None]:
    """Prolongs the leases of these records (a collection that may change meanwhile) three times per lease."""

    async def work() -> None:
        while True:
            await asyncio.sleep(lease_seconds / 3)
            held = [(record.batch_id, record.lease_token) for record in records if record.lease_token]
            try:
                if held:
                    await renew({batch for batch, _ in held}, {token for _, token in held}, lease_seconds)
            except PyMongoError as error:
                print(f"leases are not prolonged: {str(error).split(',', 1)[0]}", file=sys.stderr, flush=True)

    task = asyncio.create_task(work())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def give_back_expired(batch_id: str) -> int:
    """Queue again what a silent holder had leased; returns how many."""
    result = await Record.get_pymongo_collection().update_many(
        {"batch_id": batch_id, "status": "leased", "lease_expires": {"$lt": now()}},
        {"$set": {"status": "queued", "lease_token": None, "lease_expires": None}},
    )
    return result.modified_count


async def give_back_all(batch_id: str) -> int:
    """Queue again every leased record of a batch: only for who knows that the holders are dead."""
    result = await Record.get_pymongo_collection().update_many(
        {"batch_id": batch_id, "status": "leased"},
        {"$set": {"status": "queued", "lease_token": None, "lease_expires": None}, "$inc": {"tries": -1}},
    )
    return result.modified_count


async def unfinished(batch_id: str) -> int:
    """Records of the batch that are queued or leased."""
    waiting = {"batch_id": batch_id, "status": {"$in": ["queued", "leased"]}}
    return await Record.get_pymongo_collection().count_documents(waiting)


async def records_of(batch_id: str) -> list[Record]:
    """The finished records of a batch."""
    return await find_documents(Record, {"batch_id": batch_id, "status": {"$in": list(FINAL_STATUSES)}})
