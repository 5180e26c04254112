"""Works through the records of batches: claim, attempt, keep the leases alive, give back what is lost."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

from agentrl_runtime.databases import Record, Split, Task, TrajectoryBatch, find_documents
from agentrl_runtime.errors import AgentRLError
from agentrl_runtime.rollout.batches import finish_batch
from agentrl_runtime.rollout.queue import claim, give_back_expired, kept_alive, push_batch, unfinished
from agentrl_runtime.rollout.sampler import AsyncSampler
from agentrl_runtime.rollout.session import SamplingSession

_POLL_SECONDS = 0.25
_LOOK_AGAIN_SECONDS = 1.0
#: Places that get free within this time are filled by one claim.
_WINDOW_SECONDS = 0.05


class RolloutEngine:
    """Runs the attempts of several batches within max_concurrent_samples_per_process."""

    def __init__(self, session: SamplingSession, sampler_class: type[AsyncSampler]) -> None:
        self.session, self.sampler_class = session, sampler_class
        self._free = session.config.max_concurrent_samples_per_process
        self._attempts: dict[asyncio.Task[None], Record] = {}
        self._tasks: dict[str, Task] = {}
        self._freed = asyncio.Event()
        self._turns: dict[Split, asyncio.Lock] = {"train": asyncio.Lock(), "eval": asyncio.Lock()}

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["RolloutEngine"]:
        """Keeps the leases alive; on the way out, unfinished attempts are given back."""
        async with kept_alive(self._attempts.values(), self.session.config.lease_seconds):
            try:
                yield self
            finally:
                attempts = list(self._attempts)
                for attempt in attempts:
                    attempt.cancel()
                await asyncio.gather(*attempts, return_exceptions=True)

    async def complete(self, batch: TrajectoryBatch) -> TrajectoryBatch:
        """Push the batch's records where they are missing, attempt every one, then mark it complete.

        Batches of a split are begun in the order in which they come: the trainer waits for the oldest. Several
        samplers may work on one batch; whoever sees it done marks it. Raises the error of a server that cannot be
        brought back.
        """
        async with self._turns[batch.split]:
            mine = await self._begin_all(batch)
        loop = asyncio.get_running_loop()
        next_look = loop.time() + _LOOK_AGAIN_SECONDS
        while True:
            if mine:
                done, mine = await asyncio.wait(mine, timeout=_LOOK_AGAIN_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                for attempt in done:
                    attempt.result()
            elif not await unfinished(batch.id):
                return await finish_batch(batch)
            else:
                await give_back_expired(batch.id)
                await asyncio.sleep(_POLL_SECONDS)
            # Attempts that failed, here or elsewhere, are queued again. They are looked for after a while, not at
            # each record's end.
            if self._free > 0 and (not mine or loop.time() >= next_look):
                next_look = loop.time() + _LOOK_AGAIN_SECONDS
                mine |= (await self._claim_and_begin(batch))[0]

    async def _begin_all(self, batch: TrajectoryBatch) -> "set[asyncio.Task[None]]":
        """Begin attempts as places get free, until nothing of the batch is queued."""
        self._raise_if_server_failed()
        pushed, _ = await self._reserved(lambda free: self._push(batch, free))
        mine = {self._begin(record) for record in pushed}
        queued = len(pushed) < batch.expected_records
        while queued:
            while self._free == 0:
                self._freed.clear()
                await self._freed.wait()
                await asyncio.sleep(_WINDOW_SECONDS)
            begun, queued = await self._claim_and_begin(batch)
            mine |= begun
        return mine

    async def _claim_and_begin(self, batch: TrajectoryBatch) -> "tuple[set[asyncio.Task[None]], bool]":
        """Attempts that are begun in all free places, and whether there may be more to claim."""
        self._raise_if_server_failed()
        claimed, wanted = await self._reserved(lambda free: self._claim(batch, free))
        return {self._begin(record) for record in claimed}, len(claimed) == wanted

    def _begin(self, record: Record) -> "asyncio.Task[None]":
        attempt = asyncio.create_task(self._attempt(record))
        self._attempts[attempt] = record
        attempt.add_done_callback(self._end)
        return attempt

    def _end(self, attempt: "asyncio.Task[None]") -> None:
        del self._attempts[attempt]
        self._free += 1
        self._freed.set()

    def _raise_if_server_failed(self) -> None:
        if self.session.server.failed is not None:
            raise self.session.server.failed

    async def _reserved(self, get: Callable[[int], Awaitable[list[Record]]]) -> tuple[list[Record], int]:
        """What `get` leases with all the free places, the tasks loaded, and how many places those were.

        The places that it leaves are free again.
        """
        # Reserve first: two batches claim at once and must not go over the limit together.
        wanted, self._free = self._free, 0
        leased: list[Record] = []
        try:
            leased = await get(wanted)
            missing = {record.task_id for record in leased} - self._tasks.keys()
            if missing:
                found = await find_documents(Task, {"_id": {"$in": sorted(missing)}})
                self._tasks.update({task.id: task for task in found})
        finally:
            self._free += wanted - len(leased)
            if self._free > 0:
                self._freed.set()
        return leased, wanted

    async def _push(self, batch: TrajectoryBatch, free: int) -> list[Record]:
        return await push_batch(batch, keep=free, lease_seconds=self.session.config.lease_seconds)

    async def _claim(self, batch: TrajectoryBatch, free: int) -> list[Record]:
        return await claim(batch.id, free, self.session.config.lease_seconds)

    async def _attempt(self, record: Record) -> None:
        task = self._tasks.get(record.task_id)
        if task is None:
            raise AgentRLError(f"record {record.id} names task {record.task_id}, which is not in the database")
        async with self.sampler_class(self.session.config, session=self.session, record=record, task=task) as sampler:
            await sampler.run()
