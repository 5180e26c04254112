"""Batched writes of calls and finished records: ordered, acknowledged, with back-pressure."""

import asyncio
import contextlib
from dataclasses import dataclass
from typing import Any

from pymongo import UpdateOne
from pymongo.errors import BulkWriteError

from agentrl_runtime.databases import DispatchedSamplingTask, Record, ignore_duplicates
from agentrl_runtime.errors import AgentRLError
from agentrl_runtime.storage.bodies import storable

_WINDOW_SECONDS = 0.03
_MOST_WAITING = 2048


class LeaseLost(AgentRLError):
    """Another holder has the record: what this one wrote does not count."""


@dataclass
class _Item:
    call: dict[str, Any] | None
    record_id: str
    lease_token: str
    fields: dict[str, Any]
    done: "asyncio.Future[None]"


class RecordWriter:
    """One writer a process. Calls are stored before the records that name them, in one flush or an earlier.

    `put` waits while the queue is full, so that a slow store slows the samplers rather than filling memory.
    """

    def __init__(self) -> None:
        self._queue: asyncio.Queue[_Item] = asyncio.Queue(_MOST_WAITING)
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "RecordWriter":
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._queue.join()
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def add_call(self, call: dict[str, Any]) -> "asyncio.Future[None]":
        """Queue a call (a document with `_id`); the future is done when it is stored."""
        return await self._put(call, call["record_id"], "", {})

    async def finish(self, record_id: str, lease_token: str, fields: dict[str, Any]) -> None:
        """Set fields of a leased record and return when it is stored.

        Raises LeaseLost when the record is no longer leased under this token; nothing is written then. Texts may
        come from a model or a tool: half surrogates in them become U+FFFD.
        """
        await (await self._put(None, record_id, lease_token, storable(fields)))

    async def _put(
        self, call: dict[str, Any] | None, record_id: str, token: str, fields: dict[str, Any]
    ) -> "asyncio.Future[None]":
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        await self._queue.put(_Item(call, record_id, token, fields, done))
        return done

    async def _run(self) -> None:
        while True:
            items = [await self._queue.get()]
            await asyncio.sleep(_WINDOW_SECONDS)
            while not self._queue.empty():
                items.append(self._queue.get_nowait())
            try:
                await self._flush_or_tell(items)
            finally:
                for _ in items:
                    self._queue.task_done()

    async def _flush_or_tell(self, items: list[_Item]) -> None:
        """Flush; where that fails, flush one by one, so that a document nobody can store fails alone."""
        try:
            await self._flush(items)
        except Exception as error:  # noqa: BLE001 - the waiter gets the error, whatever it is
            if len(items) > 1:
                for item in items:
                    await self._flush_or_tell([item])
            elif not items[0].done.done():
                items[0].done.set_exception(error)
                items[0].done.exception()  # a cancelled attempt does not ask for it

    async def _flush(self, items: list[_Item]) -> None:
        calls = [item.call for item in items if item.call is not None]
        if calls:
            try:
                await DispatchedSamplingTask.get_pymongo_collection().insert_many(calls, ordered=False)
            except BulkWriteError as error:
                ignore_duplicates(error)  # stored by a flush that failed further on
        finishes = [item for item in items if item.call is None]
        lost: set[str] = set()
        if finishes:
            records = Record.get_pymongo_collection()
            result = await records.bulk_write(
                [
                    UpdateOne({"_id": item.record_id, "lease_token": item.lease_token}, {"$set": item.fields})
                    for item in finishes
                ],
                ordered=False,
            )
            if result.matched_count != len(finishes):
                lost = await self._lost(finishes)
        for item in items:
            if item.done.done():
                continue
            if item.call is None and item.record_id in lost:
                item.done.set_exception(LeaseLost(f"record {item.record_id} was given to another sampler"))
            else:
                item.done.set_result(None)

    async def _lost(self, finishes: list[_Item]) -> set[str]:
        """Which of these records do not carry what was written: their lease had another token."""
        found = Record.get_pymongo_collection().find(
            {"_id": {"$in": [item.record_id for item in finishes]}}, {"last_token": 1}
        )
        tokens = {document["_id"]: document.get("last_token") async for document in found}
        return {item.record_id for item in finishes if tokens.get(item.record_id) != item.lease_token}
