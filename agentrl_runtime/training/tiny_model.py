"""A tiny policy for the demo and the tests: a 0.4M-parameter Qwen3 over single characters, with random weights."""

from pathlib import Path

CHARACTERS = "0123456789+="
PAD, EOS, UNKNOWN, START = "<pad>", "<eos>", "<unk>", "<bos>"
# Messages one after the other: prompts are exactly the characters of the task.
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
MAX_LENGTH = 128
# At the usual 0.02 supervised training of so small a model is slow to start; at 0.09 it starts soonest, but
# reinforcement learning then mends the carry several times slower.
INITIALIZER_RANGE = 0.04


def make_tiny_model(folder: Path, seed: int) -> Path:
    """Writes model, tokenizer and generation config to `folder` in Hugging Face format (float32).

    The same seed gives the same weights. Transformers and SGLang load the folder without custom code.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = _vocabulary()
    config = Qwen3Config(
        vocab_size=len(vocabulary),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_LENGTH,
        initializer_range=INITIALIZER_RANGE,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=vocabulary[EOS],
        pad_token_id=vocabulary[PAD],
        dtype="float32",
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    _save_tokenizer(folder, vocabulary)
    return folder


def _vocabulary() -> dict[str, int]:
    return {token: index for index, token in enumerate([PAD, EOS, UNKNOWN, START, *CHARACTERS])}


def _save_tokenizer(folder: Path, vocabulary: dict[str, int]) -> None:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS,
        pad_token=PAD,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_LENGTH,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    wrapped.save_pretrained(folder)
