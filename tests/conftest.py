"""Shared fixtures: the embedded services, started once a test session in a folder of their own."""

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")

from agentrl_runtime.local.endpoints import Endpoints
from agentrl_runtime.local.services import down, up
from agentrl_runtime.storage import ObjectStore


@pytest.fixture(scope="session")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoints]:
    """Both stores under a temporary AGENTRL_HOME; every test of the session shares them."""
    folder: Path = tmp_path_factory.mktemp("home") / ".agentrl"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AGENTRL_HOME", str(folder))
        endpoints = up(folder)
        try:
            yield endpoints
        finally:
            down(folder)


@pytest.fixture
async def store(services: Endpoints) -> AsyncIterator[ObjectStore]:
    """The object store, with the documents initialised for the running test."""
    from agentrl_runtime.connections import open_stores

    async with open_stores() as opened:
        yield opened
