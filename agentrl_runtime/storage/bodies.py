"""Token arrays of a model call: inline in its document up to 64 KB, else in the object store."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from agentrl_runtime.errors import AgentRLError
from agentrl_runtime.storage.objects import ObjectStore

INLINE_BYTES = 64 * 1024
#: A document holds 16 MB; arrays grow about twofold when stored as documents.
MOST_INLINE_BYTES = 6 << 20
_MAGIC = b"agentrl-tokens-1"


def pack_tokens(
    store: ObjectStore,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    output_logprobs: Sequence[float],
    enable_oss: bool,
) -> dict[str, Any]:
    """The token fields of a DispatchedSamplingTask; blocks while large arrays go to the object store.

    Arrays above 64 KB together (4 bytes an id, 8 a logprob) are stored as one object under `tokens_sha256`,
    unless `enable_oss` is False. Raises AgentRLError when there is not one logprob for each output token.
    """
    if len(output_logprobs) != len(output_ids):
        raise AgentRLError(
            f"a model call has {len(output_ids)} output tokens but {len(output_logprobs)} logprobs",
            mend="ask the server for the logprob of every sampled token (return_logprob)",
        )
    size = 4 * (len(prompt_ids) + len(output_ids)) + 8 * len(output_logprobs)
    if not enable_oss and size > MOST_INLINE_BYTES:
        raise AgentRLError(
            f"the tokens of a call have {size >> 20} MB, more than a document holds", mend="set enable_oss"
        )
    if size <= INLINE_BYTES or not enable_oss:
        return {
            "prompt_ids": list(prompt_ids),
            "output_ids": list(output_ids),
            "output_logprobs": [float(value) for value in output_logprobs],
            "tokens_sha256": None,
        }
    body = b"".join(
        (
            _MAGIC,
            np.array([len(prompt_ids), len(output_ids)], dtype="<u8").tobytes(),
            np.asarray(prompt_ids, dtype="<i4").tobytes(),
            np.asarray(output_ids, dtype="<i4").tobytes(),
            np.asarray(output_logprobs, dtype="<f8").tobytes(),
        )
    )
    return {"prompt_ids": None, "output_ids": None, "output_logprobs": None, "tokens_sha256": store.put(body)}


def pack_messages(store: ObjectStore, messages: list[dict[str, Any]], enable_oss: bool) -> dict[str, Any]:
    """The messages of a call for its `request`: inline up to 64 KB, else as JSON under `messages_sha256`.

    Half surrogates, which no store takes, become U+FFFD. Blocks while they go to the object store. Raises
    AgentRLError when they are larger than a document may be and `enable_oss` is False.
    """
    clean = storable(messages)
    body = json.dumps(clean, ensure_ascii=False, default=str).encode()
    if len(body) <= INLINE_BYTES:
        return {"messages": clean}
    if enable_oss:
        return {"messages_sha256": store.put(body)}
    if len(body) > MOST_INLINE_BYTES:
        raise AgentRLError(
            f"the messages of a call have {len(body) >> 20} MB, more than a document holds", mend="set enable_oss"
        )
    return {"messages": clean}


def unpack_messages(store: ObjectStore, request: dict[str, Any]) -> list[dict[str, Any]]:
    """The messages of a call's `request`; blocks while reading from the object store."""
    digest = request.get("messages_sha256")
    found: list[dict[str, Any]] = json.loads(store.get(digest)) if digest else request.get("messages") or []
    return found


def storable(value: Any) -> Any:
    """The value with half surrogates, which no store takes, as U+FFFD in every text of it."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {storable(name): storable(item) for name, item in value.items()}
    return [storable(item) for item in value] if isinstance(value, list | tuple) else value


def unpack_tokens(store: ObjectStore, call: Any) -> tuple[list[int], list[int], list[float]]:
    """(prompt ids, output ids, output logprobs) of a call: a DispatchedSamplingTask or its stored mapping.

    Blocks while reading from the object store, where the digest is checked.
    """
    fields = call if isinstance(call, dict) else dict(call)
    digest = fields.get("tokens_sha256")
    if digest is None:
        prompt, output, logprobs = (fields.get(name) for name in ("prompt_ids", "output_ids", "output_logprobs"))
        return list(prompt or []), list(output or []), list(logprobs or [])
    body = store.get(digest)
    start = len(_MAGIC) + 16
    if not body.startswith(_MAGIC) or len(body) < start:
        raise _not_tokens(digest)
    prompts, outputs = (int(count) for count in np.frombuffer(body, dtype="<u8", count=2, offset=len(_MAGIC)))
    if len(body) != start + 4 * (prompts + outputs) + 8 * outputs:
        raise _not_tokens(digest)
    ids = np.frombuffer(body, dtype="<i4", count=prompts + outputs, offset=start).tolist()
    values = np.frombuffer(body, dtype="<f8", count=outputs, offset=start + 4 * (prompts + outputs)).tolist()
    return ids[:prompts], ids[prompts:], values


def _not_tokens(digest: str) -> AgentRLError:
    return AgentRLError(
        f"object {digest} does not hold the tokens of a model call",
        mend="check that the object store belongs to this database",
    )
