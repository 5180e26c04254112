"""Token-exact conversations: sampled ids are kept as they are, and only new text is encoded."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from agentrl_runtime.errors import AgentRLError

# A pair of surrogates is one character written in two halves; a half alone is no character.
_SURROGATES = re.compile("[\ud800-\udbff][\udc00-\udfff]|[\ud800-\udfff]")
_REPLACEMENT = "\ufffd"

Message = dict[str, Any]


@dataclass(frozen=True)
class _Prompt:
    """A prompt that was given out: the turns it stands for, the template's text of them, and its ids."""

    turns: list[str]
    text: str
    ids: list[int]


@dataclass(frozen=True)
class _Reply:
    """What was sampled after a prompt. `texts` are the spellings the template may give it, longest first."""

    prompt: _Prompt
    turns: list[str]  # the prompt's and the reply's own
    output_ids: list[int]
    texts: list[str]
    has_tool_calls: bool


class Conversation:
    """The token buffer of one record.

    A prompt that goes on from a remembered reply is: the ids of that reply's prompt, its sampled ids, and the ids
    of the text that the chat template writes after them. Where the template writes a remembered turn otherwise
    (thinking stripped, say), the conversation branches before that turn.

    `branches` counts the prompts after the first that do not go on from the latest reply their messages hold, because
    the template rewrites it or there is none. `replaced` counts the lone surrogates that U+FFFD stands for now; a
    message that comes again is not counted again.
    """

    def __init__(self, tokenizer: Any, tools: list[dict[str, Any]] | None = None) -> None:
        self.branches = 0
        self.replaced = 0
        self._tokenizer = tokenizer
        self._tools = tools
        self._special_ids = frozenset(tokenizer.all_special_ids)
        self._control = control_tokens(tokenizer)
        self._prompts: list[_Prompt] = []
        self._replies: list[_Reply] = []
        self._normal: dict[str, tuple[Message, str]] = {}

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """The ids to sample the next assistant message from.

        Raises AgentRLError for a message the template cannot render or a text model cannot take, naming it.
        """
        if not messages:
            raise AgentRLError("a conversation without messages", mend="give at least one message")
        normal = [self._normalised(message, index) for index, message in enumerate(messages)]
        turns = [turn for _, turn in normal]
        text = render(self._tokenizer, [message for message, _ in normal], self._tools)
        for prompt in reversed(self._prompts):
            if prompt.text == text and prompt.turns == turns:  # asked again
                return list(prompt.ids)
        prompt = _Prompt(turns, text, self._ids(turns, text))
        self._prompts.append(prompt)
        return list(prompt.ids)

    def add_reply(self, prompt_ids: Sequence[int], output_ids: Sequence[int], message: Message) -> None:
        """Remember that `output_ids`, sampled after `prompt_ids`, are the assistant's `message`.

        Raises AgentRLError when this conversation gave out no such prompt.
        """
        prompt_list, output = list(prompt_ids), list(output_ids)
        prompt = next((prompt for prompt in reversed(self._prompts) if prompt.ids == prompt_list), None)
        if prompt is None:
            raise AgentRLError(
                f"a reply to a prompt of {len(prompt_list)} tokens which this conversation did not give out",
                mend="pass the ids that prompt_ids returned, unchanged",
            )
        # What was sampled stands as it is, whatever it spells; only rendering it again can be refused.
        reply = _Cleaner(frozenset()).message(message, len(prompt.turns))
        turn = _turn(reply)
        texts = [self._decode(output)]
        if output and output[-1] in self._special_ids:
            # The template may not write the token that ended sampling.
            texts.append(self._decode(output[:-1]))
        plain = [token for token in output if token not in self._special_ids]
        if len(plain) + len(texts) - 1 < len(output):
            # Nor any special token before it: the message's content has none.
            texts.append(self._decode(plain))
        self._replies.append(_Reply(prompt, [*prompt.turns, turn], output, texts, bool(reply.get("tool_calls"))))

    def _ids(self, turns: list[str], text: str) -> list[int]:
        known = [reply for reply in reversed(self._replies) if reply.turns == turns[: len(reply.turns)]]
        known.sort(key=lambda reply: len(reply.turns), reverse=True)  # stable: of equals, the latest first
        for reply in known:
            end = _end_of_reply(text, reply)
            if end is not None:
                self.branches += len(reply.turns) < len(known[0].turns)
                return reply.prompt.ids + reply.output_ids + self._encode(text[end:])
        self.branches += bool(self._prompts)
        return self._encode(text)

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False) if text else []
        return ids

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def _normalised(self, message: Message, index: int) -> tuple[Message, str]:
        """The message in the one form that is rendered, and what makes it the same turn as another."""
        key = repr(message)
        if key not in self._normal:
            cleaner = _Cleaner(self._control)
            normal = cleaner.message(message, index)
            self.replaced += cleaner.replaced
            self._normal[key] = (normal, _turn(normal))
        return self._normal[key]


@lru_cache(maxsize=8)  # every conversation asks, and tokenizers collect them anew each time
def control_tokens(tokenizer: Any) -> frozenset[str]:
    """The texts that the tokenizer turns into special tokens, wherever they stand."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    return frozenset({str(token) for token in added if token.special} | set(tokenizer.all_special_tokens)) - {""}


def rendered_prompt(tokenizer: Any, messages: Sequence[Message], control: frozenset[str]) -> str:
    """The chat template's text of the messages with its generation prompt, as the first prompt of a conversation.

    Raises AgentRLError as `Conversation.prompt_ids` does.
    """
    cleaner = _Cleaner(control)
    return render(tokenizer, [cleaner.message(message, index) for index, message in enumerate(messages)])


def render(tokenizer: Any, messages: list[Message], tools: list[dict[str, Any]] | None = None) -> str:
    """The chat template's text of messages in their normal form.

    Raises AgentRLError when it cannot take them, or leaves their tool calls out.
    """
    roles = ", ".join(message["role"] for message in messages)
    calls = any("tool_calls" in message for message in messages)
    text, error = _applied(tokenizer, messages, tools)
    if text is None:
        raise AgentRLError(
            f"the chat template cannot render the messages ({roles}): {error}",
            mend="change the messages, or take a model whose chat template takes them",
        ) from error
    if calls:
        without = [{name: value for name, value in message.items() if name != "tool_calls"} for message in messages]
        if _applied(tokenizer, without, tools)[0] == text:
            raise AgentRLError(
                f"the chat template leaves out the tool calls of the messages ({roles})",
                mend="write the calls into the messages' content, or take a model whose chat template writes them",
            )
    return text


def _applied(
    tokenizer: Any, messages: list[Message], tools: list[dict[str, Any]] | None
) -> tuple[str, None] | tuple[None, Exception]:
    """The template's text, or why it gives none."""
    from jinja2 import TemplateError

    try:
        return tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False), None
    except (TemplateError, ValueError, TypeError) as error:
        return None, error


def _turn(message: Message) -> str:
    """Ids of calls and fields a template may ignore are left to the comparison of the rendered text."""
    calls = [call.get("function", call) for call in message.get("tool_calls", [])]
    return json.dumps(
        [message["role"], message["content"], [[call.get("name"), call.get("arguments")] for call in calls]],
        default=str,
    )


def _end_of_reply(text: str, reply: _Reply) -> int | None:
    """Where `text` goes on after the reply, or None when it does not write the prompt and the reply as they were."""
    start = len(reply.prompt.text)
    if not text.startswith(reply.prompt.text):
        return None
    for spelling in reply.texts:
        if text.startswith(spelling, start):
            return start + len(spelling)
    if reply.has_tool_calls:
        # Same calls, other spacing of their JSON: the template writes it from the parsed arguments.
        for spelling in reply.texts:
            end = _end_but_for_spaces(text, start, spelling)
            if end is not None:
                return end
    return None


def _end_but_for_spaces(text: str, start: int, spelling: str) -> int | None:
    place = start
    for character in spelling:
        if character.isspace():
            continue
        while place < len(text) and text[place].isspace():
            place += 1
        if place == len(text) or text[place] != character:
            return None
        place += 1
    # Spaces the reply ends with are not written again.
    tail = spelling[len(spelling.rstrip()) :]
    common = 0
    while common < len(tail) and text.startswith(tail[: common + 1], place):
        common += 1
    return place + common


class _Cleaner:
    """Brings a message into the form that templates get: text content, arguments as objects, valid Unicode.

    Text that spells one of the `control` tokens is refused: it would end the turn, or stand for an image.
    """

    def __init__(self, control: frozenset[str]) -> None:
        self.replaced = 0
        self._control = control

    def message(self, message: Message, index: int) -> Message:
        role = message.get("role")
        if not isinstance(role, str) or not role:
            raise AgentRLError(f"message {index} has no role", mend='give it a "role", such as "user"')
        where = f"message {index} ({role})"
        normal = {
            name: self._value(value)
            for name, value in message.items()
            if value is not None and name not in ("content", "tool_calls")
        }
        normal["content"] = self._text(_joined(message.get("content"), where))
        self._refuse_control(normal["content"], where)
        calls = message.get("tool_calls")
        if calls:
            normal["tool_calls"] = [
                self._call(call, f"{where}, tool call {number}") for number, call in enumerate(calls)
            ]
        return normal

    def _call(self, call: Any, where: str) -> dict[str, Any]:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise AgentRLError(f"{where} is not an object", mend='write {"function": {"name": ..., "arguments": ...}}')
        function = {**function, "arguments": _arguments(function.get("arguments"), where)}
        self._refuse_control(json.dumps(function, ensure_ascii=False, default=str), where)
        cleaned: dict[str, Any] = self._value({**call, "function": function} if "function" in call else function)
        return cleaned

    def _refuse_control(self, text: str, where: str) -> None:
        found = next((token for token in self._control if token in text), None)
        if found is not None:
            raise AgentRLError(
                f"{where}: the text holds {found!r}, which the tokenizer takes for a control token",
                mend="write it otherwise, with a space after its first character for instance",
            )

    def _value(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, dict):
            return {self._value(name): self._value(item) for name, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._value(item) for item in value]
        return value

    def _text(self, text: str) -> str:
        return text if text.isascii() else _SURROGATES.sub(self._character, text)

    def _character(self, match: re.Match[str]) -> str:
        if len(match[0]) == 2:
            return match[0].encode("utf-16-le", "surrogatepass").decode("utf-16-le")
        self.replaced += 1
        return _REPLACEMENT


def _joined(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise AgentRLError(f"{where}: content is a {type(content).__name__}", mend="write a string or text parts")
    texts = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            what = f'of type "{kind}"' if kind else f"a {type(part).__name__} without a type"
            raise AgentRLError(
                f"{where}: content part {number} is {what}, and only text reaches a text model",
                mend='write the part as {"type": "text", "text": "..."}, or leave it out',
            )
        texts.append(part["text"])
    return "".join(texts)


def _arguments(arguments: Any, where: str) -> dict[str, Any]:
    """The arguments as an object: templates write it as JSON, but would quote a string a second time."""
    if arguments is None or arguments == "":
        return {}
    value = arguments
    if isinstance(arguments, str):
        try:
            value = json.loads(arguments)
        except (ValueError, RecursionError):
            value = None
    if not isinstance(value, dict):
        raise AgentRLError(
            f"{where}: the arguments are not a JSON object: {arguments!r:.200}",
            mend="give an object, or keep the model's text as the message's content instead of a tool call",
        )
    return value
