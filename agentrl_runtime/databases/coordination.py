"""Locks that expire and counters that only grow, shared by every process of a run."""

import asyncio
import contextlib
import os
import socket
import sys
import uuid
from collections.abc import AsyncIterator
from datetime import datetime, timedelta

from pymongo.errors import DuplicateKeyError, PyMongoError

from agentrl_runtime.databases.base import Document, now, register_new_model
from agentrl_runtime.errors import AgentRLError
from agentrl_runtime.processes import started_at


class LockLost(AgentRLError):
    """The lease ran out; another holder may have it."""


@register_new_model
class DistributedLock(Document):
    """A lease: whoever's `token` is stored holds it until `expires`. `fence` grows with every holder.

    `process` is the holder's host:pid:start, which tells on the same machine whether it is still there.
    """

    id: str
    token: str
    holder: str
    process: str = ""
    expires: datetime
    fence: int

    class Settings:
        name = "locks"


@register_new_model
class DistributedCounter(Document):
    id: str
    value: int = 0

    class Settings:
        name = "counters"


async def add_to_counter(name: str, amount: int = 1) -> None:
    """Add atomically, creating the counter at zero when it is not there."""
    await DistributedCounter.get_pymongo_collection().update_one(
        {"_id": name}, {"$inc": {"value": amount}}, upsert=True
    )


async def read_counter(name: str) -> int:
    found = await DistributedCounter.get(name)
    return found.value if found else 0


class Lease:
    """A held lock; `fence` is its fencing token. `lost` is set when it ran out or has another holder."""

    def __init__(self, name: str, token: str, fence: int) -> None:
        self.name, self.token, self.fence = name, token, fence
        self.lost = asyncio.Event()

    def check(self) -> None:
        """Raise LockLost when the lease is no longer ours."""
        if self.lost.is_set():
            raise LockLost(
                f"lock {self.name} ran out, or another process took it over",
                mend="see that the database answers and that one process works for the run",
            )


def _this_process() -> str:
    pid = os.getpid()
    return f"{socket.gethostname()}:{pid}:{started_at(pid) or 0.0:.2f}"


def _is_gone(process: str) -> bool:
    """Whether the holder ran on this machine and is dead: nobody waits for its lease to run out after a kill.

    A wrong verdict (machines that share a name) is harmless: the loser finds its lease lost before it commits.
    """
    host, _, place = process.partition(":")
    if host != socket.gethostname() or not place:
        return False
    pid, _, started = place.partition(":")
    alive = started_at(int(pid))
    return alive is None or abs(alive - float(started)) >= 1.0


async def _try_take(name: str, token: str, holder: str, ttl: float) -> int | None:
    locks = DistributedLock.get_pymongo_collection()
    ours = {"token": token, "holder": holder, "process": _this_process(), "expires": now() + timedelta(seconds=ttl)}
    found = await locks.find_one({"_id": name})
    if found is None:
        try:
            await locks.insert_one({"_id": name, **ours, "fence": 1})
        except DuplicateKeyError:
            return None
        return 1
    if found["expires"] >= now() and not _is_gone(found.get("process", "")):
        return None
    taken = await locks.update_one(
        {"_id": name, "token": found["token"], "expires": found["expires"]}, {"$set": ours, "$inc": {"fence": 1}}
    )
    return int(found["fence"]) + 1 if taken.modified_count else None


@contextlib.asynccontextmanager
async def hold_lock(name: str, *, holder: str, ttl: float = 15.0, wait: float = 30.0) -> AsyncIterator[Lease]:
    """Hold the lock, renewing it three times per `ttl` seconds.

    A dead holder blocks for `ttl` at most, and not at all when it ran on this machine.

    Raises AgentRLError when another holder keeps it for `wait` seconds.
    """
    token = uuid.uuid4().hex
    deadline = asyncio.get_running_loop().time() + wait
    while (fence := await _try_take(name, token, holder, ttl)) is None:
        if asyncio.get_running_loop().time() > deadline:
            other = await DistributedLock.get(name)
            raise AgentRLError(
                f"{name} is held by {f'{other.holder} ({other.process})' if other else 'another process'}",
                mend="wait for it to end or stop it; a dead holder's lock is free within a minute",
            )
        await asyncio.sleep(min(1.0, ttl / 5))
    lease = Lease(name, token, fence)
    renewal = asyncio.create_task(_renew(lease, ttl))
    try:
        yield lease
    finally:
        renewal.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await renewal
        # Expire it rather than delete it: the fence must go on growing.
        try:
            await DistributedLock.get_pymongo_collection().update_one(
                {"_id": name, "token": token}, {"$set": {"expires": datetime.fromtimestamp(0, tz=now().tzinfo)}}
            )
        except PyMongoError as error:
            print(f"{name} is left to run out: {str(error).split(',', 1)[0]}", file=sys.stderr, flush=True)


async def _renew(lease: Lease, ttl: float) -> None:
    """Outlives a database that is away for a while; gives the lease up when it ran out meanwhile."""
    locks = DistributedLock.get_pymongo_collection()
    clock = asyncio.get_running_loop().time
    renewed = clock()
    while not lease.lost.is_set():
        await asyncio.sleep(ttl / 3)
        asked = clock()
        try:
            result = await locks.update_one(
                {"_id": lease.name, "token": lease.token}, {"$set": {"expires": now() + timedelta(seconds=ttl)}}
            )
        except PyMongoError as error:
            print(f"{lease.name} is not renewed: {str(error).split(',', 1)[0]}", file=sys.stderr, flush=True)
            if clock() - renewed > ttl:
                lease.lost.set()
            continue
        renewed = asked
        if result.matched_count == 0:
            lease.lost.set()
