"""Which rows a step takes: every row once a pass, from any position on, and no step over two shards."""

from collections import Counter

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl_runtime.databases import StreamPosition
from agentrl_runtime.errors import AgentRLError
from agentrl_runtime.training.datasets import (
    FIRST_SEQ,
    ShardDone,
    StepPlan,
    StreamShard,
    Wait,
    plan_step,
    training_sequences,
)


def stream(sizes: list[int]) -> list[StreamShard]:
    return [StreamShard(f"shard-{seq}", seq, rows) for seq, rows in enumerate(sizes, start=FIRST_SEQ)]


def steps(
    shards: list[StreamShard], position: StreamPosition, rows_per_step: int, passes: int
) -> list[StepPlan | ShardDone]:
    """All steps from a position to the end of the stream."""
    found: list[StepPlan | ShardDone] = []
    while True:
        shard = next((shard for shard in shards if shard.seq >= position.seq), None)
        plan = plan_step(position, shard, rows_per_step=rows_per_step, passes=passes, seed=3)
        if isinstance(plan, Wait):
            return found
        found.append(plan)
        position = plan.after


SIZES = st.lists(st.integers(0, 40), min_size=1, max_size=4)


@given(SIZES, st.integers(1, 17), st.integers(1, 3))
def test_every_row_is_taken_once_a_pass(sizes: list[int], rows_per_step: int, passes: int) -> None:
    shards = stream(sizes)
    counts: Counter[tuple[str, int, int]] = Counter()
    for plan in steps(shards, StreamPosition(), rows_per_step, passes):
        if isinstance(plan, StepPlan):
            numbers = plan.row_numbers()
            assert 1 <= len(numbers) <= rows_per_step
            counts.update((plan.shard_id, plan.pass_number, int(number)) for number in numbers)
    expected = {(shard.id, p, row) for shard in shards for p in range(passes) for row in range(shard.rows)}
    assert counts == dict.fromkeys(expected, 1)


@given(SIZES, st.integers(1, 17), st.integers(1, 3), st.data())
def test_going_on_from_any_position_takes_the_rest(
    sizes: list[int], rows_per_step: int, passes: int, data: st.DataObject
) -> None:
    shards = stream(sizes)
    whole = steps(shards, StreamPosition(), rows_per_step, passes)
    done = data.draw(st.integers(1, len(whole)))
    assert steps(shards, whole[done - 1].after, rows_per_step, passes) == whole[done:]


def test_an_empty_shard_is_consumed_and_a_missing_one_is_waited_for() -> None:
    done = plan_step(StreamPosition(seq=1), StreamShard("s", 1, 0), rows_per_step=4, passes=2, seed=0)
    assert isinstance(done, ShardDone) and done.after == StreamPosition(seq=2) and done.start == done.stop
    assert plan_step(StreamPosition(seq=2), None, rows_per_step=4, passes=1, seed=0) == Wait()


def test_without_a_number_of_passes_the_shard_is_gone_over_for_ever() -> None:
    position, shard = StreamPosition(seq=1), StreamShard("s", 1, 4)
    for pass_number in range(5):
        plan = plan_step(position, shard, rows_per_step=4, passes=None, seed=0)
        assert isinstance(plan, StepPlan) and plan.order_seed == f"0/s/{pass_number}"
        position = plan.after


def test_a_half_trained_shard_that_is_gone_is_an_error() -> None:
    with pytest.raises(AgentRLError, match="shard number 3 of the stream is missing"):
        plan_step(StreamPosition(seq=3, row=8), StreamShard("s", 4, 16), rows_per_step=8, passes=1, seed=0)


@pytest.mark.parametrize(("lag", "kept"), [(0, 1), (2, 2), (3, 3)])
def test_rows_with_a_too_stale_trained_token_are_left_out(lag: int, kept: int) -> None:
    def row(versions: list[int]) -> dict[str, object]:
        length = len(versions)
        return {
            "record_id": f"rec_{versions[-1]}",
            "task_id": "t",
            "input_ids": [1] * length,
            "loss_mask": [int(version >= 0) for version in versions],
            "rollout_logprobs": [0.0] * length,
            "advantages": [1.0] * length,
            "token_versions": versions,
        }

    # One fresh, one whose oldest token lags by 2, one by 3.
    rows = pa.Table.from_pylist([row([-1, 5, 5]), row([-1, 3, 5]), row([-1, 4, 2])])
    sequences, left_out = training_sequences(rows, [7, 8, 9], policy_version=5, max_policy_lag=lag)
    assert [sequence.row for sequence in sequences] == [7, 8, 9][:kept]
    assert len(left_out) == 3 - kept
    assert sequences[0].staleness == [0, 0, 0]
    if left_out:
        assert left_out[-1].record_id == "rec_2" and "row 9: staleness 3" in left_out[-1].reason


@pytest.mark.parametrize(("advantages", "kept"), [([0.0, 0.0], 0), ([0.0, -0.5], 2)])
def test_a_step_whose_advantages_are_all_zero_is_left_out(advantages: list[float], kept: int) -> None:
    """AdamW's momentum would move the weights, although nothing was learned."""
    rows = pa.Table.from_pylist(
        [
            {
                "record_id": f"rec_{number}",
                "task_id": "t",
                "input_ids": [1, 2],
                "loss_mask": [0, 1],
                "rollout_logprobs": [0.0, -1.0],
                "advantages": [9.0, advantage],  # what is not trained does not count
                "token_versions": [-1, 0],
            }
            for number, advantage in enumerate(advantages)
        ]
    )
    sequences, left_out = training_sequences(rows, [4, 2], policy_version=0, max_policy_lag=0)
    assert len(sequences) == kept
    if not kept:
        assert [item.record_id for item in left_out] == ["rec_0", "rec_1"]
        assert "row 4" in left_out[0].reason and "advantage" in left_out[0].reason
