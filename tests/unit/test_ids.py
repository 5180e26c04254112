"""Ids: derived from what they stand for, and recognised by their form."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl_runtime import ids


@given(
    st.lists(st.text(st.characters(exclude_characters="\x1f")), max_size=4),
    st.lists(st.text(st.characters(exclude_characters="\x1f")), max_size=4),
)
def test_derived_ids_are_equal_for_equal_parts_only(first: list[str], second: list[str]) -> None:
    same = ids.derived_id("rec_", *first, "end") == ids.derived_id("rec_", *second, "end")
    assert same == (first == second)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (ids.derived_id("task_", "x"), "task"),
        (ids.record_id("demo-1.b00001", "task_1", 2), "record"),
        (ids.call_id("rec_1", "token", 0), "call"),
        (ids.sample_id("rec_1", 0), "sample"),
        (ids.version_id("demo-1", 12), "version"),
        (ids.batch_id("demo-1", 7), "batch"),
        (ids.eval_batch_id("demo-1.v00012"), "batch"),
        (ids.step_id("demo-1", 123456), "step"),
        ("a" * 64, "shard"),
        ("demo-1", "run"),
        ("Demo 1", None),
        ("demo-1.v12", None),
        ("", None),
        ("demo-1\n", None),
    ],
)
def test_kind_of(text: str, kind: str | None) -> None:
    assert ids.kind_of(text) == kind


def test_numbers_are_padded_and_may_grow() -> None:
    assert ids.version_id("r", 12) == "r.v00012" and ids.version_id("r", 1234567) == "r.v1234567"
    assert ids.eval_batch_id("r.v00012") == "r.v00012.eval"


def test_a_second_lease_makes_calls_of_its_own() -> None:
    assert ids.call_id("rec_1", "first", 0) != ids.call_id("rec_1", "second", 0)
    assert ids.record_id("b", "t", 1) == ids.record_id("b", "t", 1) != ids.record_id("b", "t", 2)


@pytest.mark.parametrize("text", ["demo", "a-1", "0x"])
def test_run_ids(text: str) -> None:
    assert ids.is_run_id(text)


@pytest.mark.parametrize("text", ["", "-a", "A", "a.b", "a_b", "a b", "a\n"])
def test_no_run_ids(text: str) -> None:
    assert not ids.is_run_id(text)
