"""One real SGLang server a test session, on the tiny model."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from agentrl_runtime.configs import AgentTrainingConfig
from agentrl_runtime.connections import open_stores
from agentrl_runtime.local.endpoints import Endpoints
from agentrl_runtime.training.inference import InferenceManager
from agentrl_runtime.training.tiny_model import make_tiny_model


@dataclass(frozen=True)
class Served:
    """A running server, its manager, and two model folders of one architecture; it starts on the first."""

    manager: InferenceManager
    folder: Path
    other_folder: Path


def tiny_config(run_id: str, **values: object) -> AgentTrainingConfig:
    """A config whose server the tiny model fits."""
    fitting: dict[str, object] = {
        "model_name_or_path": "model",
        "dataset": run_id,
        "max_new_tokens": 4,
        "max_prompt_tokens": 40,
        "inf_context_length": 128,
        "target_concurrency": 64,
        "max_concurrent_samples_per_process": 64,
    }
    return AgentTrainingConfig(run_id=run_id, **{**fitting, **values})


@pytest.fixture(scope="session")
async def sglang(services: Endpoints, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    folder = make_tiny_model(tmp_path_factory.mktemp("model") / "a", seed=1)
    other = make_tiny_model(tmp_path_factory.mktemp("model") / "b", seed=2)
    async with open_stores() as store, InferenceManager(tiny_config("server"), store) as manager:
        await manager.start(folder, "server.v00000")
        yield Served(manager, folder, other)
