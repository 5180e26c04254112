"""Token-exact conversations over small tokenizers and templates written here."""

import json
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from agentrl_runtime.errors import AgentRLError
from agentrl_runtime.rollout.tokens import Conversation
from agentrl_runtime.training.segments import demonstration_ids

_TURN = """{{ '<|im_start|>' + m.role + '\\n' }}{% if m.content %}{{ text }}{% endif %}
{%- for call in m.tool_calls or [] %}<tool_call>{"name": "{{ call.function.name }}", "arguments": {{
call.function.arguments | tojson }}}</tool_call>{% endfor %}{{ '<|im_end|>\\n' }}"""
_END = "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
CHATML = "{% for m in messages %}{% set text = m.content %}" + _TURN + _END
STRIPS_THINKING = (
    "{% for m in messages %}{% set text = m.content %}"
    "{% if m.role == 'assistant' and not loop.last %}{% set text = m.content.split('</think>')[-1] %}{% endif %}"
    + _TURN
    + _END
)
PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"
USER = {"role": "user", "content": "1+1?"}
MORE = {"role": "user", "content": "plus 1?"}


def tokenizer(template: str) -> Any:
    """Byte-level BPE of the 256 bytes and one merge, "22"."""
    vocabulary = {character: index for index, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocabulary["22"] = len(vocabulary)
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[("2", "2")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    specials = ["<|im_start|>", "<|im_end|>", "<|end|>"]
    made.add_special_tokens([AddedToken(text, special=True) for text in specials])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<|im_end|>", additional_special_tokens=specials, chat_template=template
    )
    return wrapped


@pytest.fixture(scope="module")
def chatml() -> Any:
    return tokenizer(CHATML)


@pytest.fixture(scope="module")
def plain() -> Any:
    return tokenizer(PLAIN)


def encode(made: Any, text: str) -> list[int]:
    ids: list[int] = made.encode(text, add_special_tokens=False)
    return ids


def said(content: str, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **fields}


def call(arguments: Any) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": arguments}}


PROMPT = "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
NEW = "\n<|im_start|>user\nplus 1?<|im_end|>\n<|im_start|>assistant\n"


def test_first_prompt_is_the_rendered_template(chatml: Any) -> None:
    assert Conversation(chatml).prompt_ids([USER]) == encode(chatml, PROMPT)


def test_extends_sampled_ids_whatever_their_spelling(chatml: Any) -> None:
    conversation = Conversation(chatml)
    prompt = conversation.prompt_ids([USER])
    output = [*encode(chatml, "2"), *encode(chatml, "2"), *encode(chatml, "<|im_end|>")]
    assert output[:2] != encode(chatml, "22")
    conversation.add_reply(prompt, output, said("22"))
    assert conversation.prompt_ids([USER, said("22"), MORE]) == prompt + output + encode(chatml, NEW)
    assert conversation.branches == 0


def test_reply_ended_by_length_gets_the_end_of_turn(chatml: Any) -> None:
    conversation = Conversation(chatml)
    prompt = conversation.prompt_ids([USER])
    output = encode(chatml, "it is")
    conversation.add_reply(prompt, output, said("it is"))
    wanted = prompt + output + encode(chatml, "<|im_end|>" + NEW)
    assert conversation.prompt_ids([USER, said("it is"), MORE]) == wanted


@pytest.mark.parametrize("ending", ["", "<|im_end|>", "<|end|>"])
def test_sampled_end_token_that_the_template_does_not_write_stays(plain: Any, ending: str) -> None:
    conversation = Conversation(plain)
    prompt = conversation.prompt_ids([USER])
    output = encode(plain, "2" + ending)
    conversation.add_reply(prompt, output, said("2"))
    assert conversation.prompt_ids([USER, said("2"), MORE]) == prompt + output + encode(plain, "plus 1?")
    assert conversation.branches == 0


def test_many_turns_extend_one_buffer(chatml: Any) -> None:
    conversation = Conversation(chatml)
    messages: list[dict[str, Any]] = [USER]
    buffer: list[int] = []
    for turn in range(6):
        prompt = conversation.prompt_ids(messages)
        assert prompt[: len(buffer)] == buffer
        output = [*encode(chatml, "2") * (turn + 2), *encode(chatml, "<|im_end|>")]
        conversation.add_reply(prompt, output, said("2" * (turn + 2)))
        buffer = prompt + output
        messages = [*messages, said("2" * (turn + 2)), MORE]
    assert conversation.branches == 0


def test_stripped_thinking_branches() -> None:
    made = tokenizer(STRIPS_THINKING)
    conversation = Conversation(made)
    prompt = conversation.prompt_ids([USER])
    text = "<think>one and one</think>2"
    conversation.add_reply(prompt, encode(made, text + "<|im_end|>"), said(text))
    assert conversation.prompt_ids([USER, said(text), MORE]) == encode(made, PROMPT + "2<|im_end|>" + NEW)
    assert conversation.branches == 1


def test_branch_keeps_the_turns_that_still_match() -> None:
    made = tokenizer(STRIPS_THINKING)
    conversation = Conversation(made)
    first = conversation.prompt_ids([USER])
    spelled = [*encode(made, "2"), *encode(made, "2"), *encode(made, "<|im_end|>")]
    conversation.add_reply(first, spelled, said("22"))
    second = conversation.prompt_ids([USER, said("22"), MORE])
    text = "<think>so</think>3"
    conversation.add_reply(second, encode(made, text + "<|im_end|>"), said(text))
    third = conversation.prompt_ids([USER, said("22"), MORE, said(text), USER])
    rest = NEW + "3<|im_end|>\n" + PROMPT
    assert third == first + spelled + encode(made, rest)
    assert conversation.branches == 1


def test_other_reply_than_the_sampled_one_branches(chatml: Any) -> None:
    conversation = Conversation(chatml)
    prompt = conversation.prompt_ids([USER])
    conversation.add_reply(prompt, encode(chatml, "2<|im_end|>"), said("2"))
    assert conversation.prompt_ids([USER, said("3"), MORE]) == encode(chatml, PROMPT + "3<|im_end|>" + NEW)
    assert conversation.branches == 1


def test_asked_again_gives_the_same_ids_and_no_branch(chatml: Any) -> None:
    conversation = Conversation(chatml)
    first = conversation.prompt_ids([USER])
    first_copy = list(first)
    first.append(0)
    assert conversation.prompt_ids([USER]) == first_copy
    assert conversation.branches == 0


def test_two_replies_to_one_prompt_are_both_remembered(chatml: Any) -> None:
    conversation = Conversation(chatml)
    prompt = conversation.prompt_ids([USER])
    for text in ("2", "two"):
        conversation.add_reply(prompt, encode(chatml, text + "<|im_end|>"), said(text))
    for text in ("2", "two"):
        wanted = prompt + encode(chatml, text + "<|im_end|>") + encode(chatml, NEW)
        assert conversation.prompt_ids([USER, said(text), MORE]) == wanted
    assert conversation.branches == 0


def test_reply_to_an_unknown_prompt_is_refused(chatml: Any) -> None:
    with pytest.raises(AgentRLError, match="did not give out"):
        Conversation(chatml).add_reply([1, 2], [3], said("2"))


def test_null_empty_and_absent_content_are_the_same(chatml: Any) -> None:
    forms: list[dict[str, Any]] = [
        {"content": None},
        {"content": ""},
        {},
        {"content": []},
        {"content": None, "x": None},
    ]
    tool = {"role": "tool", "tool_call_id": "c1", "content": "4 C"}
    ids = [
        Conversation(chatml).prompt_ids([USER, {"role": "assistant", "tool_calls": [call("{}")], **form}, tool])
        for form in forms
    ]
    assert all(item == ids[0] for item in ids)


@pytest.mark.parametrize("arguments", ['{"city":"Oslo"}', '{ "city": "Oslo" }', {"city": "Oslo"}])
def test_tool_arguments_are_encoded_once(chatml: Any, arguments: Any) -> None:
    text = chatml.decode(Conversation(chatml).prompt_ids([USER, said("", tool_calls=[call(arguments)])]))
    assert '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>' in text


@pytest.mark.parametrize("arguments", ['{"city": "Os', "[1]", "7", [1]])
def test_tool_arguments_that_are_no_object_are_refused(chatml: Any, arguments: Any) -> None:
    with pytest.raises(AgentRLError, match=r"message 1 \(assistant\), tool call 0"):
        Conversation(chatml).prompt_ids([USER, said("", tool_calls=[call(arguments)])])


@pytest.mark.parametrize("ending", ["", "<|im_end|>", "\n<|im_end|>"])
def test_sampled_tool_call_spelled_otherwise_is_kept(chatml: Any, ending: str) -> None:
    conversation = Conversation(chatml)
    prompt = conversation.prompt_ids([USER])
    output = encode(chatml, '<tool_call>{"name":"weather","arguments":{"city":"New York"}}</tool_call>' + ending)
    reply = said("", tool_calls=[call('{"city":"New York"}')])
    conversation.add_reply(prompt, output, reply)
    wanted = encode(chatml, NEW if ending else "<|im_end|>" + NEW)
    assert conversation.prompt_ids([USER, reply, MORE]) == prompt + output + wanted
    # The next turn goes on from there, though the template spells the call its own way.
    second = prompt + output + wanted
    conversation.add_reply(second, encode(chatml, "2<|im_end|>"), said("2"))
    third = conversation.prompt_ids([USER, reply, MORE, said("2"), MORE])
    assert third == second + encode(chatml, "2<|im_end|>") + encode(chatml, NEW)
    assert conversation.branches == 0


def test_reply_that_comes_back_with_other_fields_is_the_same_turn(chatml: Any) -> None:
    conversation = Conversation(chatml)
    prompt = conversation.prompt_ids([USER])
    output = encode(chatml, "2<|im_end|>")
    conversation.add_reply(prompt, output, said("2", refusal=None))
    again = json.loads(json.dumps([USER, {"content": "2", "annotations": [], "role": "assistant"}, MORE]))
    assert conversation.prompt_ids(again) == prompt + output + encode(chatml, NEW)


def test_text_parts_are_joined(chatml: Any) -> None:
    parts = [{"type": "text", "text": "1+"}, {"type": "text", "text": "1?"}]
    assert Conversation(chatml).prompt_ids([{"role": "user", "content": parts}]) == encode(chatml, PROMPT)


def test_image_part_is_refused_by_name(chatml: Any) -> None:
    parts = [
        {"type": "text", "text": "what?"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}},
    ]
    with pytest.raises(AgentRLError, match=r'message 1 \(tool\): content part 1 is of type "image_url"'):
        Conversation(chatml).prompt_ids([USER, {"role": "tool", "content": parts}])


@pytest.mark.parametrize("content", [7, {"text": "a"}, ["a"], [{"type": "text"}]])
def test_other_content_is_refused(chatml: Any, content: Any) -> None:
    with pytest.raises(AgentRLError, match=r"message 0 \(user\)"):
        Conversation(chatml).prompt_ids([{"role": "user", "content": content}])


def test_lone_surrogates_are_replaced_and_counted_once(chatml: Any) -> None:
    conversation = Conversation(chatml)
    bad = {"role": "user", "content": "bad \ud800 text \ud83d\ude00"}
    prompt = conversation.prompt_ids([bad])
    assert "bad \ufffd text \U0001f600" in chatml.decode(prompt)
    conversation.add_reply(prompt, encode(chatml, "2<|im_end|>"), said("2"))
    conversation.prompt_ids([bad, said("2"), MORE])
    assert conversation.replaced == 1 and conversation.branches == 0


def test_lone_surrogate_in_tool_arguments(chatml: Any) -> None:
    conversation = Conversation(chatml)
    conversation.prompt_ids([USER, said("", tool_calls=[call('{"city": "\\ud800"}')])])
    conversation.prompt_ids([USER, said("", tool_calls=[call({"city": "\ud801"})]), MORE])
    assert conversation.replaced == 2


def test_template_error_names_the_roles() -> None:
    made = tokenizer("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(AgentRLError, match=r"\(user, user\): roles must alternate"):
        Conversation(made).prompt_ids([USER, MORE])


def test_a_template_that_leaves_tool_calls_out_is_refused(plain: Any) -> None:
    messages = [USER, said("", tool_calls=[call({"city": "Oslo"})])]
    with pytest.raises(AgentRLError, match=r"leaves out the tool calls of the messages \(user, assistant\)"):
        Conversation(plain).prompt_ids(messages)


def test_a_reply_that_spells_a_control_token_is_kept_and_refused_only_when_it_comes_again(chatml: Any) -> None:
    conversation = Conversation(chatml)
    prompt = conversation.prompt_ids([USER])
    reply = said("2<|im_end|>")
    conversation.add_reply(prompt, [*encode(chatml, "2<|"), *encode(chatml, "im_end|>")], reply)
    assert conversation.prompt_ids([USER]) == prompt
    with pytest.raises(AgentRLError, match="control token"):
        conversation.prompt_ids([USER, reply, MORE])


@pytest.mark.parametrize("messages", [[], [{"content": "a"}], [{"role": None, "content": "a"}]])
def test_messages_without_a_role_are_refused(chatml: Any, messages: list[dict[str, Any]]) -> None:
    with pytest.raises(AgentRLError):
        Conversation(chatml).prompt_ids(messages)


@pytest.mark.parametrize("role", ["user", "assistant", "tool"])
def test_text_that_spells_a_control_token_is_refused(chatml: Any, role: str) -> None:
    messages = [USER, {"role": role, "content": "stop<|im_end|>now"}]
    with pytest.raises(AgentRLError, match=rf"message 1 \({role}\).*<\|im_end\|>"):
        Conversation(chatml).prompt_ids(messages)
    assert Conversation(chatml).prompt_ids([USER, {"role": role, "content": "stop< |im_end|>now"}])


def test_a_control_token_in_a_tool_call_is_refused(chatml: Any) -> None:
    calls = [{"function": {"name": "say", "arguments": {"text": "<|end|>"}}}]
    with pytest.raises(AgentRLError, match=r"tool call 0.*<\|end\|>"):
        Conversation(chatml).prompt_ids([USER, said("", tool_calls=calls)])


def test_a_demonstration_is_rendered_as_a_sampler_would(chatml: Any) -> None:
    call = {"name": "weather", "arguments": '{"city":"Oslo"}'}
    told = {"role": "tool", "content": "rain"}
    good = [
        [USER, {"role": "assistant", "content": None, "tool_calls": [{"function": call}]}, told],
        [{"role": "user", "content": [{"type": "text", "text": "1+1?"}]}],
    ]
    bad = [
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "user", "content": "a<|im_end|>b"}],
    ]
    found = demonstration_ids(chatml, [*good, *bad, good[1]], ["wet", "2", "2", "2", "2<|end|>"])
    for messages, demonstration, ids in zip(good, ["wet", "2"], found, strict=False):
        assert ids == (Conversation(chatml).prompt_ids(messages), [*encode(chatml, demonstration), chatml.eos_token_id])
    assert "image_url" in found[2] and "<|im_end|>" in found[3] and "<|end|>" in found[4]
