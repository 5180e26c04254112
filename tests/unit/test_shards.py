"""Segments and seeded orders: every sampled token stands in one row, and an order is the same everywhere."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl_runtime.errors import AgentRLError
from agentrl_runtime.storage.bodies import pack_tokens, unpack_tokens
from agentrl_runtime.training.segments import (
    CallTokens,
    demonstration_segment,
    segments_of_calls,
    token_versions,
    version_number,
)
from agentrl_runtime.training.shards import row_order

ORDER_OF_EIGHT = [0, 6, 4, 2, 5, 3, 7, 1]


class MemoryStore:
    """The two calls of the object store that bodies use."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}

    def put(self, data: bytes) -> str:
        self.objects[str(len(self.objects))] = data
        return str(len(self.objects) - 1)

    def get(self, digest: str) -> bytes:
        return self.objects[digest]


def call(number: int, prompt: list[int], output: list[int]) -> CallTokens:
    return CallTokens(
        f"call_{number}", prompt, output, [-1.0] * len(output), [number] * len(output), [f"r.v{number:05d}"]
    )


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 2), max_size=5), st.lists(st.integers(0, 2), max_size=3), st.booleans()))
)
def test_each_sampled_token_is_trained_in_one_row(turns: list[tuple[list[int], list[int], bool]]) -> None:
    calls: list[CallTokens] = []
    for number, (prompt, output, goes_on) in enumerate(turns):
        before = calls[-1].prompt_ids + calls[-1].output_ids if calls and goes_on else []
        calls.append(call(number, before + prompt, output))
    segments = segments_of_calls(calls)
    placed = [name for segment in segments for name in segment.call_ids]
    assert sorted(placed) == sorted(item.call_id for item in calls if item.output_ids)
    assert sum(segment.trained_tokens for segment in segments) == sum(len(item.output_ids) for item in calls)
    by_name = {item.call_id: item for item in calls}
    for segment in segments:
        lengths = {len(values) for values in (segment.input_ids, segment.loss_mask, segment.logprobs, segment.versions)}
        assert len(lengths) == 1
        assert all(
            (version >= 0) == bool(mask) for version, mask in zip(segment.versions, segment.loss_mask, strict=True)
        )
        for name in segment.call_ids:
            whole = by_name[name].prompt_ids + by_name[name].output_ids
            assert segment.input_ids[: len(whole)] == whole
            assert all(segment.loss_mask[len(by_name[name].prompt_ids) : len(whole)])


def test_a_conversation_that_goes_on_is_one_row() -> None:
    segments = segments_of_calls([call(0, [1], [2]), call(1, [1, 2, 3], [4])])
    assert [segment.input_ids for segment in segments] == [[1, 2, 3, 4]]
    assert segments[0].loss_mask == [0, 1, 0, 1] and segments[0].version_ids == ["r.v00000", "r.v00001"]


def test_a_demonstration_is_trained_after_its_prompt() -> None:
    segment = demonstration_segment([5, 6], [7, 0])
    assert (segment.input_ids, segment.loss_mask, segment.versions) == ([5, 6, 7, 0], [0, 0, 1, 1], [-1] * 4)


def test_versions_of_tokens_in_any_order_of_spans() -> None:
    spans = [{"version": "a.v00003", "start": 2, "end": 3}, {"version": "a.v00002", "start": 0, "end": 2}]
    assert token_versions("call_1", spans, 3) == ([2, 2, 3], ["a.v00002", "a.v00003"])
    assert token_versions("call_1", [], 0) == ([], [])


@pytest.mark.parametrize(
    "spans", [[], [(0, 2)], [(0, 4)], [(0, 2), (1, 3)], [(1, 3)], [(2, 0), (0, 3)], [(0, 2), (0, 2)]]
)
def test_spans_that_do_not_cover_the_output_once_are_refused(spans: list[tuple[int, int]]) -> None:
    with pytest.raises(AgentRLError, match="call_1"):
        token_versions("call_1", [{"version": "a.v00001", "start": a, "end": b} for a, b in spans], 3)


def test_a_version_without_number_is_refused() -> None:
    assert version_number("demo-1.v00012") == 12
    with pytest.raises(AgentRLError, match="default"):
        version_number("default")


@given(st.integers(0, 300), st.text())
def test_an_order_holds_each_row_once(rows: int, seed: str) -> None:
    assert sorted(row_order(rows, seed).tolist()) == list(range(rows))


def test_an_order_never_changes() -> None:
    """Ledgers written long ago name rows by it."""
    assert row_order(8, "0/abc/0").tolist() == ORDER_OF_EIGHT
    assert row_order(8, "0/abc/1").tolist() != ORDER_OF_EIGHT


@pytest.mark.parametrize(
    ("prompt", "output", "oss", "inline"), [(10, 5, True, True), (9000, 5000, True, False), (9000, 5000, False, True)]
)
def test_tokens_come_back_exactly(prompt: int, output: int, oss: bool, inline: bool) -> None:
    store = MemoryStore()
    ids, reply, logprobs = list(range(prompt)), list(range(output)), [-1 / (n + 3) for n in range(output)]
    fields = pack_tokens(store, ids, reply, logprobs, oss)  # type: ignore[arg-type]
    assert (fields["tokens_sha256"] is None) == inline
    assert unpack_tokens(store, fields) == (ids, reply, logprobs)  # type: ignore[arg-type]


def test_a_logprob_for_each_token_is_demanded() -> None:
    with pytest.raises(AgentRLError, match="2 output tokens but 1 logprobs"):
        pack_tokens(MemoryStore(), [1], [2, 3], [-0.1], True)  # type: ignore[arg-type]


@pytest.mark.parametrize("body", [b"", b"something else", b"agentrl-tokens-1" + bytes(16) + b"x"])
def test_an_object_of_other_content_is_refused(body: bytes) -> None:
    store = MemoryStore()
    with pytest.raises(AgentRLError, match="does not hold the tokens"):
        unpack_tokens(store, {"tokens_sha256": store.put(body)})  # type: ignore[arg-type]
