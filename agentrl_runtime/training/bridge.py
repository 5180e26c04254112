"""Asynchronous code (the database, lock renewal) beside training, which blocks its thread for seconds."""

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Self, TypeVar

T = TypeVar("T")


class AsyncBridge:
    """An event loop in a thread of its own. What is entered stays open, and runs on, until the bridge closes."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="async-bridge", daemon=True)
        self._stack = contextlib.AsyncExitStack()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.run(self._stack.aclose())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(timeout=10)
            self._loop.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run to the end in the loop, and give its result or raise its error here."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def enter(self, manager: contextlib.AbstractAsyncContextManager[T]) -> T:
        return self.run(self._stack.enter_async_context(manager))
