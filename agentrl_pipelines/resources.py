"""The runtime's stores as a Dagster resource."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import dagster as dg

from agentrl_runtime.connections import open_stores
from agentrl_runtime.errors import AgentRLError
from agentrl_runtime.storage import ObjectStore

T = TypeVar("T")


class Stores(dg.ConfigurableResource):
    """The database and the object store that `agentrl up` started or the environment names.

    It has no fields: connection strings carry passwords, and a resource's config is shown in the UI.
    """

    def call(self, work: Callable[[ObjectStore], Awaitable[T]]) -> T:
        """Run `work` with both stores open. An AgentRLError becomes a failure that is not tried again."""

        async def opened() -> T:
            async with open_stores() as store:
                return await work(store)

        try:
            return asyncio.run(opened())
        except AgentRLError as error:
            raise dg.Failure(str(error), allow_retries=False) from None
