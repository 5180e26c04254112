"""Tree-packed log-probabilities and gradients against separate sequences, on a tiny random Qwen3."""

import random
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from agentrl_runtime.errors import AgentRLError
from agentrl_runtime.training.logprobs import PolicyForward, forward_logprobs, token_logprobs
from agentrl_runtime.training.losses import TokenBatch, compute_loss
from agentrl_runtime.training.packing import (
    TrainingSequence,
    count_normalizer,
    empty_micro_batch,
    pack_sequences,
)
from agentrl_runtime.training.tiny_model import make_tiny_model


def tiny_qwen3(attention="sdpa"):
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=True,
        initializer_range=0.3,
        attn_implementation=attention,
    )
    return Qwen3ForCausalLM(config)


def training_sequences():
    """Three groups of four attempts; two turns each, the second of which branches off a shared first."""
    rng = random.Random(3)
    sequences = []
    for group in range(3):
        prompt = [rng.randrange(40) for _ in range(5 + group)]
        first = [rng.randrange(40) for _ in range(4)]
        for attempt in range(4):
            reply = [*first[: 4 - attempt % 2], *(rng.randrange(40) for _ in range(attempt))]
            tool, last = [1, 2], [rng.randrange(40) for _ in range(3)]
            ids = [*prompt, *reply, *tool, *last]
            mask = [0] * len(prompt) + [1] * len(reply) + [0, 0] + [1] * len(last)
            values = [rng.uniform(-4, -1) for _ in ids]
            advantages = [rng.choice([-1.0, 0.5])] * len(ids)
            row = len(sequences)
            sequences.append(TrainingSequence(ids, mask, values, advantages, [1] * len(ids), row, f"g{group}"))
    return sequences


def separate_logprobs(model, sequences):
    """(row, position) -> log-probability, one plain causal forward pass a sequence."""
    found = {}
    for sequence in sequences:
        ids = torch.tensor([sequence.input_ids])
        logprobs = model(input_ids=ids, use_cache=False).logits[0].log_softmax(-1)
        for t, trained in enumerate(sequence.loss_mask):
            if trained:
                found[sequence.row, t] = logprobs[t - 1, sequence.input_ids[t]]
    return found


def gradients(model):
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(("max_tokens", "budget"), [(4096, 4096), (40, 80), (20, 20)])
def test_packed_trees_equal_separate_sequences(max_tokens, budget):
    model, sequences = tiny_qwen3(), training_sequences()
    config = SimpleNamespace(
        loss_calculater="GRPO",
        epsilon=0.2,
        epsilon_higher=0.0,
        token_level_loss=True,
        skip_length_normalization=False,
    )
    separate = separate_logprobs(model, sequences)
    keys = list(separate)
    reference = TokenBatch(
        logprobs=torch.stack([separate[key] for key in keys]),
        rollout_logprobs=torch.tensor([sequences[row].rollout_logprobs[t] for row, t in keys]),
        advantages=torch.tensor([sequences[row].advantages[t] for row, t in keys]),
        loss_mask=torch.ones(len(keys)),
        sequence_ids=torch.tensor([row for row, _ in keys]),
    )
    expected = compute_loss(config, reference)
    expected.loss.backward()
    wanted = gradients(model)
    model.zero_grad()

    total, normalizer = 0.0, count_normalizer(sequences)
    for batch in pack_sequences(sequences, max_tokens=max_tokens, token_budget=budget):
        logprobs = forward_logprobs(model, batch, chunk=7)
        for row in range(len(batch.rows)):
            mine = logprobs[batch.sequence_ids == row].detach()
            theirs = torch.stack([separate[key].detach() for key in keys if key[0] == batch.rows[row]])
            torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)
        tokens = TokenBatch(logprobs, batch.rollout_logprobs, batch.advantages, batch.loss_mask, batch.sequence_ids)
        result = compute_loss(config, tokens, normalizer=normalizer)
        result.loss.backward()
        total += float(result.loss.detach())
    assert total == pytest.approx(float(expected.loss.detach()), abs=1e-5)
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, wanted[name], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("chunk", "temperature"), [(1, 1.0), (3, 0.7), (16, 1.3), (100, 1.0)])
def test_chunks_change_neither_value_nor_gradient(chunk, temperature):
    torch.manual_seed(1)
    hidden, weight = torch.randn(2, 9, 8, requires_grad=True), torch.randn(11, 8, requires_grad=True)
    source, target = torch.randint(0, 18, (16,)), torch.randint(0, 11, (16,))
    scale = torch.randn(16)
    plain = (hidden @ weight.T / temperature).log_softmax(-1).flatten(0, 1)[source].gather(-1, target[:, None])[:, 0]
    chunked = token_logprobs(hidden, weight, source, target, chunk, temperature)
    assert chunked.dtype == torch.float32
    torch.testing.assert_close(chunked, plain)
    wanted = torch.autograd.grad((plain * scale).sum(), (hidden, weight))
    got = torch.autograd.grad((chunked * scale).sum(), (hidden, weight))
    torch.testing.assert_close(got, wanted)


def test_an_empty_micro_batch_reaches_every_parameter_with_zero():
    model = tiny_qwen3()
    logprobs = PolicyForward(model).of(empty_micro_batch())
    assert logprobs.shape == (0,)
    logprobs.sum().backward()
    assert all(float(gradient.abs().sum()) == 0.0 for gradient in gradients(model).values())


def test_what_would_be_silently_wrong_is_refused():
    with pytest.raises(AgentRLError, match="eager"):
        PolicyForward(tiny_qwen3("eager"))
    with pytest.raises(AgentRLError, match="loss_seq_chunk_size is 0"):
        PolicyForward(tiny_qwen3(), chunk=0).of(empty_micro_batch())
    model = tiny_qwen3()
    model.config.final_logit_softcapping = 30.0
    with pytest.raises(AgentRLError, match="final_logit_softcapping"):
        PolicyForward(model)


def test_the_tiny_model_is_a_plain_hugging_face_folder(tmp_path):
    folders = [make_tiny_model(tmp_path / name, seed) for name, seed in (("a", 0), ("b", 0), ("c", 1))]
    tokenizer = AutoTokenizer.from_pretrained(folders[0])
    messages = [{"role": "user", "content": "12+34="}]
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == "12+34="
    ids = tokenizer.encode("12+34=")
    assert tokenizer.convert_ids_to_tokens(ids) == list("12+34=")
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == "12+34="
    assert tokenizer.unk_token_id in tokenizer.encode("x")
    a, b, c = (AutoModelForCausalLM.from_pretrained(folder) for folder in folders)
    assert a.dtype == torch.float32 and 350_000 < a.num_parameters() < 450_000
    same, other = (torch.equal(a.lm_head.weight, m.lm_head.weight) for m in (b, c))
    assert same and not other
    assert a.config.eos_token_id == tokenizer.eos_token_id < a.config.vocab_size == len(tokenizer)
