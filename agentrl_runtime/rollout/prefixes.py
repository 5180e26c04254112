"""Prompts that many calls share: read by the server once, before the calls begin."""

import asyncio
import sys
from collections import OrderedDict

from agentrl_runtime.training.inference import InferenceManager, ServerUnavailable

#: A shorter prompt costs less to read again than the request that would save it.
LEAST_TOKENS = 32
_MOST_KNOWN = 4096


class SharedPrompts:
    """Lets the first of several attempts at a task have its prompt read, and the others wait for that.

    Attempts at one task reach the server together. It finds no prefix of theirs in its cache then, and would read
    the same prompt once for each. New weights or a restart empty the cache, and the next attempt reads again.
    """

    def __init__(self, server: InferenceManager) -> None:
        self._server = server
        self._known: OrderedDict[tuple[str, int, tuple[int, ...]], asyncio.Task[None]] = OrderedDict()

    async def ready(self, prompt_ids: list[int], timeout: float) -> None:
        """Returns when the server has read the prompt, or cannot: then the call itself will tell why."""
        if len(prompt_ids) < LEAST_TOKENS:
            return
        key = (self._server.weight_version, self._server.restarts, tuple(prompt_ids))
        reading = self._known.get(key)
        if reading is None:
            reading = self._known[key] = asyncio.create_task(self._read(prompt_ids, timeout))
            while len(self._known) > _MOST_KNOWN:
                self._known.popitem(last=False)
        # One of the waiting attempts may be cancelled; the others still need the answer.
        await asyncio.shield(reading)

    async def _read(self, prompt_ids: list[int], timeout: float) -> None:
        body = {"input_ids": prompt_ids, "sampling_params": {"max_new_tokens": 0, "temperature": 0.0}}
        try:
            await self._server.generate(body, timeout=timeout)
        except ServerUnavailable as error:
            print(f"a prompt was not read ahead: {error.what}", file=sys.stderr, flush=True)
