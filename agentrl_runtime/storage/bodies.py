"""Token arrays of a model call: inline in its document up to 64 KB, else in the object store."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from agentrl_runtime.errors import AgentRLError
from agentrl_runtime.storage.objects import ObjectStore

INLINE_BYTES = 64 * 1024
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
