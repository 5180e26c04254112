# ruff: noqa: F722 - array shapes are written in the types
"""Log-probabilities of the trained tokens, without the logits of all tokens in memory at once.

torch is needed here at import: nothing that starts the command line imports this file.
"""

from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from agentrl_runtime.errors import AgentRLError

if TYPE_CHECKING:
    from agentrl_runtime.training.packing import MicroBatch

DEFAULT_CHUNK = 1024


def token_logprobs(
    hidden: Float[Tensor, "B N H"],
    lm_head_weight: Float[Tensor, "V H"],
    source_index: Int[Tensor, " tokens"],
    target_ids: Int[Tensor, " tokens"],
    chunk: int = DEFAULT_CHUNK,
    temperature: float = 1.0,
) -> Float[Tensor, " tokens"]:
    """log p(target | hidden at source), float32; `source_index` is b * N + n.

    Logits are divided by `temperature`: the policy that is trained is the one that samples.

    Logits exist for `chunk` tokens at a time and are computed again in the backward pass. With no target the
    result is empty and still carries (zero) gradients to `hidden` and the head, as collectives need.
    """
    if chunk < 1:
        raise AgentRLError(f"loss_seq_chunk_size is {chunk}", mend="use 1 or more")
    selected = hidden.flatten(0, 1)[source_index]
    pieces = [
        checkpoint(_chunk_logprobs, part, lm_head_weight, targets, temperature, use_reentrant=False)
        for part, targets in zip(selected.split(chunk), target_ids.split(chunk), strict=True)
    ]
    return torch.cat(pieces)


def _chunk_logprobs(hidden: Tensor, lm_head_weight: Tensor, target_ids: Tensor, temperature: float) -> Tensor:
    logits = (hidden @ lm_head_weight.T).float()
    if temperature != 1.0:
        logits = logits / temperature
    return logits.gather(-1, target_ids[:, None]).squeeze(-1) - logits.logsumexp(-1)


class PolicyForward(nn.Module):
    """The whole forward pass of the policy as one module: apply `fully_shard` to it as the root.

    The head is read inside this module's forward, where a sharded root has its full weights.
    Raises AgentRLError for a model whose attention is not SDPA or whose logits are more than a plain product.
    """

    def __init__(self, model: Any, chunk: int = DEFAULT_CHUNK, temperature: float = 1.0) -> None:
        super().__init__()
        attention = getattr(model.config, "_attn_implementation", None)
        if attention != "sdpa":
            raise AgentRLError(
                f"the model's attention is {attention!r}, which does not follow a boolean tree mask",
                mend='load the model with attn_implementation="sdpa"',
            )
        head = model.get_output_embeddings()
        for field in ("final_logit_softcapping", "logits_scaling", "logit_scale"):
            if getattr(model.config, field, None) not in (None, 1, 1.0):
                raise AgentRLError(f"the model's config sets {field}", mend="train a model without it")
        if head is None or getattr(head, "bias", None) is not None:
            raise AgentRLError("the model has no output head without bias", mend="use a causal language model")
        self.model = model
        self.chunk = chunk
        self.temperature = temperature

    def forward(
        self,
        input_ids: Int[Tensor, "B N"],
        position_ids: Int[Tensor, "B N"],
        attention_mask: Tensor,
        source_index: Int[Tensor, " tokens"],
        target_ids: Int[Tensor, " tokens"],
    ) -> Float[Tensor, " tokens"]:
        output = self.model.base_model(
            input_ids=input_ids, position_ids=position_ids, attention_mask=attention_mask, use_cache=False
        )
        head = self.model.get_output_embeddings()
        return token_logprobs(
            output.last_hidden_state, head.weight, source_index, target_ids, self.chunk, self.temperature
        )

    def of(self, batch: "MicroBatch") -> Float[Tensor, " tokens"]:
        """Log-probabilities of a micro-batch's trained tokens, in the order of its flat vectors."""
        logprobs: Tensor = self(
            batch.input_ids, batch.position_ids, batch.attention_mask, batch.source_index, batch.target_ids
        )
        return logprobs


def forward_logprobs(model: Any, batch: "MicroBatch", chunk: int = DEFAULT_CHUNK) -> Float[Tensor, " tokens"]:
    """The same for a plain causal language model that is not sharded."""
    return PolicyForward(model, chunk).of(batch)
