"""Samplers: what an agent subclasses to turn a task into a scored record."""

import asyncio
import contextlib
import functools
import time
from abc import ABC, abstractmethod
from types import TracebackType
from typing import TYPE_CHECKING, Any

from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_exponential

from agentrl_runtime import ids
from agentrl_runtime.configs import AgentTrainingConfig, sampling_fault
from agentrl_runtime.databases import Record, Task, TrajectoryBatch, now
from agentrl_runtime.errors import AgentRLError
from agentrl_runtime.rollout.queue import MAX_TRIES, claim, kept_alive
from agentrl_runtime.rollout.scorers import checked_score
from agentrl_runtime.rollout.session import SamplingSession, attached_session
from agentrl_runtime.rollout.tokens import Conversation
from agentrl_runtime.rollout.writer import LeaseLost
from agentrl_runtime.storage.bodies import INLINE_BYTES, pack_messages, pack_tokens
from agentrl_runtime.training.inference import ServerUnavailable, output_of

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletion

_CALL_SECONDS = 600.0
#: Shorter calls are stored inline, whatever their tokens are.
_SHORT_CALL_TOKENS = 4096


class NoTaskAvailableError(AgentRLError):
    """There is no record to claim."""


class RecordFailed(AgentRLError):
    """The attempt cannot succeed and is not to be made again; the reason is stored with the record."""


class AsyncSampler(ABC):
    """One attempt at one task.

    Subclasses write `run`, which calls `create_chat_completions` as often as the agent needs, and
    `evaluate_record`, which scores the outcome. As an async context manager a sampler gives its record back
    when `run` raises, and stores the score when it does not. The scheduler hands over a claimed record; a sampler
    made from a config alone claims one of the run's queued records, and uses the rollout process's server.
    """

    session: SamplingSession
    record: Record
    task: Task
    conversation: Conversation

    def __init__(
        self,
        config: AgentTrainingConfig,
        *,
        session: SamplingSession | None = None,
        record: Record | None = None,
        task: Task | None = None,
    ) -> None:
        self.config = config
        self._given = (session, record, task) if session and record and task else None
        self._own = contextlib.AsyncExitStack()
        self.messages: list[dict[str, Any]] = []
        self.finish_status = ""  # why the last call ended: stop, length or abort
        self._call_ids: list[str] = []
        self._stored: list[asyncio.Future[None]] = []

    @abstractmethod
    async def run(self) -> None:
        """Make the attempt."""

    @abstractmethod
    async def evaluate_record(self, record: Record) -> float:
        """The score of the finished attempt; details go to `record.score_detail`."""

    async def __aenter__(self) -> "AsyncSampler":
        if self._given is not None:
            self.session, self.record, self.task = self._given
        else:
            try:
                self.session = await self._own.enter_async_context(attached_session(self.config))
                self.record, self.task = await _claim_one(self.config)
                await self._own.enter_async_context(kept_alive([self.record], self.config.lease_seconds))
            except BaseException:
                await self._own.aclose()
                raise
        if self.record.lease_token is None:
            raise NoTaskAvailableError(f"record {self.record.id} is not claimed", mend="claim it from the queue")
        self.conversation = Conversation(self.session.tokenizer)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> bool:
        async with self._own:
            with contextlib.suppress(LeaseLost):  # then the other holder makes the attempt
                if error is None:
                    error = await self._score()
                if isinstance(error, asyncio.CancelledError):
                    await self._give_back(count=False)
                elif isinstance(error, Exception) and not isinstance(error, LeaseLost):
                    await self._failed(error)
        return error is None or isinstance(error, Exception)

    async def _score(self) -> Exception | None:
        """Store the finished attempt with its score; an error of the scoring is returned."""
        try:
            score = checked_score(await self.evaluate_record(self.record), self.record.id)
            status = "truncated" if self.finish_status == "length" else "completed"
            await self._finish({"status": status, "score": score, "score_detail": self.record.score_detail})
        except LeaseLost:
            raise
        except Exception as error:  # noqa: BLE001 - scoring is the user's code: what it raises fails the attempt
            return error
        return None

    async def _failed(self, error: Exception) -> None:
        again = isinstance(error, ServerUnavailable) or not isinstance(error, AgentRLError)
        reason = error.what if isinstance(error, AgentRLError) else f"{type(error).__name__}: {error}"
        if self.session.server.failed is not None:
            await self._give_back(count=False, reason=reason)
        elif again and self.config.resample_error_records and self.record.tries < MAX_TRIES:
            await self._give_back(count=True, reason=reason)
        else:
            await self._finish({"status": "failed", "reason": reason[:2000], "score": None})

    async def _give_back(self, *, count: bool, reason: str = "") -> None:
        tries = self.record.tries if count else self.record.tries - 1
        fields = {
            "status": "queued",
            "lease_token": None,
            "lease_expires": None,
            "tries": tries,
            "reason": reason[:2000],
        }
        await self.session.writer.finish(self.record.id, self._token, {**fields, "last_token": self._token})

    async def _finish(self, fields: dict[str, Any]) -> None:
        # A record names only calls that are stored.
        await asyncio.gather(*self._stored)
        ending = {"call_ids": self._call_ids, "ended": now(), "lease_token": None, "last_token": self._token}
        await self.session.writer.finish(self.record.id, self._token, {"reason": "", **fields, **ending})

    @property
    def _token(self) -> str:
        assert self.record.lease_token is not None
        return self.record.lease_token

    async def create_chat_completions(
        self, messages: list[dict[str, Any]], *, timeout: float = _CALL_SECONDS, **sampling: Any
    ) -> "ChatCompletion":
        """One model call on these messages; `sampling` overrides SGLang's sampling parameters.

        The ids that the server sampled, their log-probabilities and the policy versions that sampled them are
        stored. A restarting server is waited for. Raises RecordFailed when the prompt is too long, or when the
        task has images, and AgentRLError for an argument that is no sampling parameter.
        """
        if fault := sampling_fault(sampling):
            raise AgentRLError(f"create_chat_completions: {fault}", mend="leave the argument out")
        if self.task.images:
            raise RecordFailed(f"task {self.task.id} has images, and the policy reads text only")
        prompt_ids = self.conversation.prompt_ids(messages)
        if len(prompt_ids) > self.config.max_prompt_tokens:
            raise RecordFailed(
                f"the prompt has {len(prompt_ids)} tokens, max_prompt_tokens is {self.config.max_prompt_tokens}"
            )
        if len(self._call_ids) >= self.config.max_turns:
            raise RecordFailed(f"the agent makes more calls than max_turns ({self.config.max_turns})")
        parameters = {**self.session.sampling_params(self.record.split), **sampling}
        call_id = ids.call_id(self.record.id, self._token, len(self._call_ids))
        body = {
            "input_ids": prompt_ids,
            "sampling_params": parameters,
            "return_logprob": True,
            "logprob_start_len": -1,
        }
        if not self._call_ids and self.record.split == "train" and self.config.num_generations > 1:
            await self.session.prompts.ready(prompt_ids, timeout)
        started = now()
        async with self.session.calls_in_flight:
            answer = await self._generate(body, timeout)
        output_ids, logprobs, spans, self.finish_status = output_of(answer)
        if self.finish_status == "abort":
            raise ServerUnavailable(f"call {call_id} was aborted by the server")
        text = str(self.session.tokenizer.decode(output_ids, skip_special_tokens=True))
        reply = {"role": "assistant", "content": text}
        self.conversation.add_reply(prompt_ids, output_ids, reply)
        self.messages = [*messages, reply]
        fields = await self._packed(messages, parameters, prompt_ids, output_ids, logprobs)
        self._call_ids.append(call_id)
        stored = await self.session.writer.add_call(
            {
                "_id": call_id,
                "run_id": self.record.run_id,
                "batch_id": self.record.batch_id,
                "record_id": self.record.id,
                "task_id": self.record.task_id,
                "turn": len(self._call_ids) - 1,
                "service_id": self.session.server.service_id,
                **fields,
                "weight_spans": spans,
                "text": text,
                "finish_reason": self.finish_status,
                "status": "completed",
                "reason": "",
                "started": started,
                "ended": now(),
            }
        )
        self._stored.append(stored)
        return _completion(call_id, text, self.finish_status, len(prompt_ids), len(output_ids))

    async def _packed(
        self,
        messages: list[dict[str, Any]],
        parameters: dict[str, Any],
        prompt_ids: list[int],
        output_ids: list[int],
        logprobs: list[float],
    ) -> dict[str, Any]:
        """The request and token fields of a call; what is large goes to the object store."""
        store, enable_oss = self.session.store, self.config.enable_oss
        stored = functools.partial(pack_messages, store, messages, enable_oss)
        tokens = functools.partial(pack_tokens, store, prompt_ids, output_ids, logprobs, enable_oss)
        if len(prompt_ids) + len(output_ids) < _SHORT_CALL_TOKENS and len(repr(messages)) < INLINE_BYTES // 6:
            packed = {**stored(), **tokens()}  # nothing large: no thread is worth its while
        else:
            packed = {**await asyncio.to_thread(stored), **await asyncio.to_thread(tokens)}
        names = ("messages", "messages_sha256")
        request = {name: packed.pop(name) for name in names if name in packed}
        if self.conversation.replaced:
            request["half_surrogates_replaced"] = self.conversation.replaced
        return {"request": {**request, "sampling_params": parameters}, **packed}

    async def _generate(self, body: dict[str, Any], timeout: float) -> dict[str, Any]:
        async for attempt in AsyncRetrying(
            stop=stop_after_attempt(4),
            wait=wait_exponential(0.5, max=10),
            retry=retry_if_exception_type(ServerUnavailable),
            reraise=True,
        ):
            with attempt:
                return await self.session.server.generate(body, timeout=timeout)
        raise AssertionError("AsyncRetrying ends by returning or raising")


async def _claim_one(config: AgentTrainingConfig) -> tuple[Record, Task]:
    """A record of one of the run's unfinished batches, with its task; raises NoTaskAvailableError."""
    batches = await TrajectoryBatch.find({"run_id": config.run_id, "status": "sampling"}).to_list()
    for batch in sorted(batches, key=lambda batch: batch.number):
        for record in await claim(batch.id, 1, config.lease_seconds):
            task = await Task.get(record.task_id, with_children=True)
            if task is None:
                raise AgentRLError(f"record {record.id} names task {record.task_id}, which is not in the database")
            return record, task
    raise NoTaskAvailableError(
        f"run {config.run_id} has no queued record", mend="its rollout process queues them batch by batch: try again"
    )


def _completion(call_id: str, text: str, finish: str, prompt_tokens: int, output_tokens: int) -> "ChatCompletion":
    from openai.types.chat import ChatCompletion  # takes a second: the session imports it while the server starts

    return ChatCompletion.model_validate(
        {
            "id": call_id,
            "object": "chat.completion",
            "created": int(time.time()),
            "model": "policy",
            "choices": [
                {
                    "index": 0,
                    "finish_reason": "length" if finish == "length" else "stop",
                    "message": {"role": "assistant", "content": text},
                }
            ],
            "usage": {
                "prompt_tokens": prompt_tokens,
                "completion_tokens": output_tokens,
                "total_tokens": prompt_tokens + output_tokens,
            },
        }
    )
