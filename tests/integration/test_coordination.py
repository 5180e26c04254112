"""Locks and counters on the real database."""

import asyncio
import socket
import subprocess
from datetime import timedelta
from typing import Any

import pytest
from pymongo.errors import AutoReconnect
from synthetic import fresh

from agentrl_runtime.databases import (
    DistributedLock,
    LockLost,
    add_to_counter,
    hold_lock,
    init_databases,
    now,
    read_counter,
    register_new_model,
)
from agentrl_runtime.errors import AgentRLError
from agentrl_runtime.local.endpoints import Endpoints
from agentrl_runtime.storage import ObjectStore


async def test_one_holder_at_a_time(store: ObjectStore) -> None:
    name, inside, most = fresh("lock"), 0, 0

    async def work(number: int) -> int:
        nonlocal inside, most
        async with hold_lock(name, holder=f"worker {number}", ttl=2.0, wait=60.0) as lease:
            inside += 1
            most = max(most, inside)
            await asyncio.sleep(0.02)
            inside -= 1
            return lease.fence

    fences = await asyncio.gather(*(work(number) for number in range(4)))
    assert most == 1 and sorted(fences) == [1, 2, 3, 4]


async def test_waiting_too_long_names_the_holder(store: ObjectStore) -> None:
    name = fresh("lock")
    async with hold_lock(name, holder="the first"):
        with pytest.raises(AgentRLError, match="held by the first"):
            async with hold_lock(name, holder="the second", wait=0.1):
                raise AssertionError("two holders")


async def test_a_dead_holder_is_followed_and_its_lease_is_lost(store: ObjectStore) -> None:
    name = fresh("lock")
    async with hold_lock(name, holder="slow", ttl=0.6) as lease:
        lease.check()
        # What a holder that was frozen for longer than its lease finds when it wakes.
        stolen = {"token": "other", "holder": "quick"}
        await DistributedLock.get_pymongo_collection().update_one({"_id": name}, {"$set": stolen, "$inc": {"fence": 1}})
        await asyncio.wait_for(lease.lost.wait(), 10)
        with pytest.raises(LockLost, match="took it over"):
            lease.check()
    kept = await DistributedLock.get(name)
    assert kept is not None and (kept.token, kept.fence) == ("other", 2)


class AwayDatabase:
    """The locks' collection, whose updates fail while `away`."""

    def __init__(self) -> None:
        self.collection = DistributedLock.get_pymongo_collection()
        self.away = False
        self.failed = 0

    async def update_one(self, *arguments: Any, **options: Any) -> Any:
        if self.away:
            self.failed += 1
            raise AutoReconnect("the database is away")
        return await self.collection.update_one(*arguments, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.collection, name)


@pytest.fixture
def away(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> AwayDatabase:
    database = AwayDatabase()
    monkeypatch.setattr(DistributedLock, "get_pymongo_collection", lambda *_: database)
    return database


async def test_a_lease_outlives_a_database_that_is_away_for_a_while(away: AwayDatabase) -> None:
    name = fresh("lock")
    async with hold_lock(name, holder="patient", ttl=3.0) as lease:
        away.away = True
        while away.failed < 2:
            await asyncio.sleep(0.05)
        away.away = False
        before = await DistributedLock.get(name)
        await asyncio.sleep(1.5)
        after = await DistributedLock.get(name)
        assert before is not None and after is not None and after.expires > before.expires
        lease.check()


async def test_a_lease_that_ran_out_with_the_database_away_is_lost(away: AwayDatabase) -> None:
    async with hold_lock(fresh("lock"), holder="cut off", ttl=0.6) as lease:
        away.away = True
        await asyncio.wait_for(lease.lost.wait(), 10)
        with pytest.raises(LockLost, match="ran out"):
            lease.check()


async def test_a_lease_that_ran_out_is_taken_with_a_higher_fence(store: ObjectStore) -> None:
    name = fresh("lock")
    async with hold_lock(name, holder="first") as first:
        pass
    async with hold_lock(name, holder="second", wait=1.0) as second:
        assert second.fence == first.fence + 1


async def test_a_killed_holder_on_this_machine_is_not_waited_for(store: ObjectStore) -> None:
    name, later = fresh("lock"), now() + timedelta(hours=1)
    ended = subprocess.Popen(["true"])
    ended.wait()
    for number, process in enumerate((f"{socket.gethostname()}:{ended.pid}:1.00", f"{socket.gethostname()}:1:1e9"), 1):
        lock = {"token": "dead", "holder": "killed", "process": process, "expires": later, "fence": number * 10}
        await DistributedLock.get_pymongo_collection().update_one({"_id": name}, {"$set": lock}, upsert=True)
        async with hold_lock(name, holder="next", wait=0.0) as lease:
            assert lease.fence == number * 10 + 1
    elsewhere = {"token": "lives", "process": f"another-host:{ended.pid}:1.00", "expires": later}
    await DistributedLock.get_pymongo_collection().update_one({"_id": name}, {"$set": elsewhere})
    with pytest.raises(AgentRLError, match="another-host"):
        async with hold_lock(name, holder="next", wait=0.0):
            raise AssertionError("two holders")


async def test_counters_lose_nothing(store: ObjectStore) -> None:
    name = fresh("counter")
    assert await read_counter(name) == 0
    await add_to_counter(name, 0)
    await asyncio.gather(*(add_to_counter(name, amount) for amount in range(1, 21)))
    assert await read_counter(name) == 210


async def test_an_unreachable_database_is_named_without_its_password() -> None:
    with pytest.raises(AgentRLError, match=r"127\.0\.0\.1:1") as error:
        await init_databases("mongodb://user:hunter2@127.0.0.1:1/agentrl?serverSelectionTimeoutMS=300")
    assert "hunter2" not in str(error.value)


async def test_wrong_credentials_are_refused_without_the_password(services: Endpoints) -> None:
    address = services.mongo_uri.rsplit("@", 1)[-1]
    with pytest.raises(AgentRLError) as error:
        await init_databases(f"mongodb://agentrl:hunter2@{address}")
    assert "hunter2" not in str(error.value)


def test_two_models_of_one_name_are_refused() -> None:
    impostor = type("Task", (DistributedLock,), {"__module__": "elsewhere", "__annotations__": {}})
    with pytest.raises(AgentRLError, match="called Task"):
        register_new_model(impostor)
