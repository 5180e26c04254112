"""What the samplers of one process share: tokenizer, server, writer, stores."""

import asyncio
import contextlib
import importlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl_runtime.configs import AgentTrainingConfig
from agentrl_runtime.connections import open_stores
from agentrl_runtime.errors import AgentRLError
from agentrl_runtime.rollout.prefixes import SharedPrompts
from agentrl_runtime.rollout.writer import RecordWriter
from agentrl_runtime.storage import ObjectStore
from agentrl_runtime.training.inference import InferenceManager
from agentrl_runtime.training.policies import fetch_version, latest_version

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass
class SamplingSession:
    """Shared by every sampler of a process."""

    config: AgentTrainingConfig
    store: ObjectStore
    tokenizer: "PreTrainedTokenizerBase"
    server: InferenceManager
    writer: RecordWriter
    calls_in_flight: asyncio.Semaphore
    prompts: SharedPrompts = field(init=False)

    def __post_init__(self) -> None:
        self.prompts = SharedPrompts(self.server)

    def sampling_params(self, split: str) -> dict[str, Any]:
        """SGLang's parameters of a call: as configured in training, greedy in evaluation."""
        chosen = {"temperature": 0.0} if split == "eval" else dict(self.config.preferred_sampling_params)
        return {"max_new_tokens": self.config.max_new_tokens, "skip_special_tokens": True, **chosen}


def load_tokenizer(folder: Path) -> "PreTrainedTokenizerBase":
    """The folder's tokenizer; AgentRLError when it has none or no chat template."""
    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(str(folder))
    except (OSError, ValueError) as error:
        raise AgentRLError(
            f"folder {folder} has no tokenizer: {error}", mend="set processor_name to a folder that has one"
        ) from None
    if not tokenizer.chat_template:
        raise AgentRLError(f"the tokenizer in {folder} has no chat template", mend="use a chat model's tokenizer")
    return tokenizer


@contextlib.asynccontextmanager
async def open_session(
    config: AgentTrainingConfig, store: ObjectStore, folder: Path, *, attach: bool = False
) -> AsyncIterator[SamplingSession]:
    """A session with the tokenizer of `folder`, on a server that is started on its weights and stopped on the
    way out; with `attach` on the server of the run's rollout process.
    """
    async with RecordWriter() as writer, InferenceManager(config, store) as server:
        starting = asyncio.create_task(server.attach() if attach else server.start(folder))
        try:
            # While the server starts: both take seconds.
            tokenizer = await asyncio.to_thread(load_tokenizer, folder)
            await asyncio.to_thread(importlib.import_module, "openai.types.chat")
            await starting
        finally:
            starting.cancel()
        yield SamplingSession(config, store, tokenizer, server, writer, asyncio.Semaphore(config.target_concurrency))


@contextlib.asynccontextmanager
async def attached_session(config: AgentTrainingConfig) -> AsyncIterator[SamplingSession]:
    """A session of its own that uses the server of the run's rollout process.

    Raises AgentRLError when the run has no policy version or no ready server.
    """
    async with open_stores(config) as store:
        version = await latest_version(config.run_id)
        if version is None:
            raise AgentRLError(f"run {config.run_id} has no policy version", mend="start its trainer")
        folder = await asyncio.to_thread(fetch_version, version, store)
        async with open_session(config, store, folder, attach=True) as session:
            yield session
