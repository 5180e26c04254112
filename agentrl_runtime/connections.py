"""Open both stores from a config, the environment, or the embedded services."""

import contextlib
from collections.abc import AsyncIterator

from agentrl_runtime.configs import AgentTrainingConfig
from agentrl_runtime.databases import init_databases
from agentrl_runtime.local.endpoints import Endpoints, resolve_endpoints
from agentrl_runtime.storage import ObjectStore


def endpoints_of(config: AgentTrainingConfig | None = None) -> Endpoints:
    """The config's connection strings where it has both, else what the environment or `agentrl up` gives."""
    mongo = config.db_connection_string if config else None
    s3 = config.oss_connection_string if config else None
    if mongo and s3:
        return Endpoints(mongo_uri=mongo, s3_url=s3)
    found = resolve_endpoints()
    return Endpoints(mongo_uri=mongo or found.mongo_uri, s3_url=s3 or found.s3_url)


@contextlib.asynccontextmanager
async def open_stores(config: AgentTrainingConfig | None = None) -> AsyncIterator[ObjectStore]:
    """Initialise the documents and yield the object store; the database client is closed on the way out."""
    endpoints = endpoints_of(config)
    client = await init_databases(endpoints.mongo_uri)
    try:
        store = ObjectStore(endpoints.s3_url)
        store.ensure_bucket()
        yield store
    finally:
        await client.close()
