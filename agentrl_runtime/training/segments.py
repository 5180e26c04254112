"""From model calls, or a demonstration, to token sequences in which each sampled token stands once."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentrl_runtime.errors import AgentRLError
from agentrl_runtime.rollout.tokens import control_tokens, rendered_prompt

NOT_SAMPLED = -1


@dataclass
class CallTokens:
    """One model call: what the server saw and what it sampled. `versions` has a policy version per output token."""

    call_id: str
    prompt_ids: list[int]
    output_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    version_ids: list[str]


@dataclass
class Segment:
    """One training row. The arrays have equal length T; logprobs are 0 and versions -1 where not sampled."""

    call_ids: list[str] = field(default_factory=list)
    input_ids: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    version_ids: list[str] = field(default_factory=list)

    @property
    def trained_tokens(self) -> int:
        return sum(self.loss_mask)

    def add_context(self, ids: Sequence[int]) -> None:
        self.input_ids += ids
        self.loss_mask += [0] * len(ids)
        self.logprobs += [0.0] * len(ids)
        self.versions += [NOT_SAMPLED] * len(ids)

    def add_output(self, call: CallTokens) -> None:
        self.call_ids.append(call.call_id)
        self.input_ids += call.output_ids
        self.loss_mask += [1] * len(call.output_ids)
        self.logprobs += call.logprobs
        self.versions += call.versions
        self.version_ids += [name for name in call.version_ids if name not in self.version_ids]


def token_versions(call_id: str, spans: Iterable[Any], length: int) -> tuple[list[int], list[str]]:
    """The policy version number of each of `length` output tokens, and the version ids in order.

    Spans are mappings with `version`, `start`, `end`. Raises AgentRLError when they do not cover the output once.
    """
    numbers: list[int] = []
    names: list[str] = []
    ordered = sorted(spans, key=lambda span: (span["start"], span["end"]))
    fits = all(span["start"] <= span["end"] for span in ordered)
    for span in ordered:
        fits = fits and span["start"] == len(numbers)
        numbers += [version_number(span["version"])] * (span["end"] - span["start"])
        if span["end"] > span["start"] and span["version"] not in names:
            names.append(span["version"])
    if not fits or len(numbers) != length:
        places = ", ".join(f"[{span['start']}, {span['end']})" for span in ordered) or "none"
        raise AgentRLError(
            f"call {call_id} has {length} output tokens, but its weight spans are {places}",
            mend="the sampler must note the policy version of every sampled token, each once",
        )
    return numbers, names


def version_number(version_id: str) -> int:
    """`demo-1.v00012` -> 12."""
    number = version_id.rsplit(".v", 1)[-1]
    if not number.isdigit():
        raise AgentRLError(f"{version_id!r} is no policy version id", mend="it must look like RUN.v00012")
    return int(number)


def segments_of_calls(calls: Iterable[CallTokens]) -> list[Segment]:
    """The rows of one record, from its calls in order.

    A call whose prompt begins with all the tokens of a row so far goes on in that row (the longest such row);
    any other call opens a new one, with its prompt as context. So every sampled token is trained in one row.
    """
    segments: list[Segment] = []
    for call in calls:
        if not call.output_ids:
            continue
        begun = [
            segment
            for segment in segments
            if len(segment.input_ids) <= len(call.prompt_ids)
            and call.prompt_ids[: len(segment.input_ids)] == segment.input_ids
        ]
        segment = max(begun, key=lambda segment: len(segment.input_ids), default=None)
        if segment is None:
            segment = Segment()
            segments.append(segment)
        segment.add_context(call.prompt_ids[len(segment.input_ids) :])
        segment.add_output(call)
    return segments


def demonstration_segment(prompt_ids: Sequence[int], demonstration_ids: Sequence[int]) -> Segment:
    """Prompt as context, loss on the demonstration; nothing was sampled, so versions stay -1."""
    segment = Segment()
    segment.add_context(prompt_ids)
    segment.add_context(demonstration_ids)
    segment.loss_mask[len(prompt_ids) :] = [1] * len(demonstration_ids)
    return segment


def demonstration_ids(
    tokenizer: Any, prompts: Sequence[list[dict[str, Any]]], demonstrations: Sequence[str]
) -> list[tuple[list[int], list[int]] | str]:
    """(prompt, demonstration + eos) of each as token ids, or why it has none.

    A prompt is what the sampler would send: the chat template of the messages in their normal form.
    """
    if tokenizer.eos_token_id is None:
        raise AgentRLError("the tokenizer has no eos token", mend="set eos_token in its tokenizer_config.json")
    control = control_tokens(tokenizer)
    texts: dict[int, str] = {}
    found: list[tuple[list[int], list[int]] | str] = []
    for place, (messages, demonstration) in enumerate(zip(prompts, demonstrations, strict=True)):
        spelled = next((token for token in control if token in demonstration), None)
        if spelled is not None:
            found.append(f"the demonstration holds {spelled!r}, which the tokenizer takes for a control token")
            continue
        try:
            texts[place] = rendered_prompt(tokenizer, messages, control)
            found.append("")
        except AgentRLError as error:
            found.append(error.what)
    if texts:
        rendered = tokenizer(list(texts.values()), add_special_tokens=False)["input_ids"]
        replies = tokenizer([demonstrations[place] for place in texts], add_special_tokens=False)["input_ids"]
        for place, prompt, reply in zip(texts, rendered, replies, strict=True):
            found[place] = (list(prompt), [*reply, tokenizer.eos_token_id])
    return found
