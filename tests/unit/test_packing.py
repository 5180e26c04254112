from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_runtime.errors import AgentRLError
from agentrl_runtime.training.losses import Normalizer
from agentrl_runtime.training.packing import (
    TrainingSequence,
    count_normalizer,
    empty_micro_batch,
    pack_sequences,
    split_over_ranks,
)


def sequence(prompt, reply, row, group="g"):
    length = len(prompt) + len(reply)
    return TrainingSequence(
        input_ids=[*prompt, *reply],
        loss_mask=[0] * len(prompt) + [1] * len(reply),
        rollout_logprobs=[-(row + i / 1000) for i in range(length)],
        advantages=[float(row)] * length,
        staleness=[row % 3] * length,
        row=row,
        group=group,
    )


@st.composite
def sequence_lists(draw):
    tokens = st.integers(1, 3)
    count = draw(st.integers(1, 14))
    return [
        sequence(
            draw(st.lists(tokens, min_size=1, max_size=6)),
            draw(st.lists(tokens, min_size=0, max_size=5)),
            row,
            f"g{draw(st.integers(0, 3))}",
        )
        for row in range(count)
    ]


def wanted_targets(sequences):
    """(row, position, context, target, logprob, advantage, staleness) of every trained token."""
    return Counter(
        (s.row, t, tuple(s.input_ids[: t + 1]), np.float32(s.rollout_logprobs[t]), s.advantages[t], s.staleness[t])
        for s in sequences
        for t in range(len(s.input_ids))
        if s.loss_mask[t]
    )


def packed_targets(batches):
    """The same, read off the tensors: the context is what the source token attends to."""
    found = Counter()
    for batch in batches:
        width = batch.input_ids.shape[1]
        for i in range(len(batch.target_ids)):
            b, n = divmod(int(batch.source_index[i]), width)
            seen = batch.attention_mask[b, 0, n].nonzero().flatten()
            assert batch.position_ids[b, seen].tolist() == list(range(len(seen)))
            context = (*batch.input_ids[b, seen].tolist(), int(batch.target_ids[i]))
            row = batch.rows[int(batch.sequence_ids[i])]
            values = (batch.rollout_logprobs[i].numpy()[()], float(batch.advantages[i]), int(batch.staleness[i]))
            found[(row, len(seen), context, *values)] += 1
    return found


@settings(max_examples=150, deadline=None)
@given(sequences=sequence_lists(), max_tokens=st.integers(11, 40), budget=st.integers(11, 120))
def test_every_trained_token_appears_once_with_its_own_context(sequences, max_tokens, budget):
    batches = pack_sequences(sequences, max_tokens=max_tokens, token_budget=budget)
    assert packed_targets(batches) == wanted_targets(sequences)
    assert sorted(row for batch in batches for row in batch.rows) == list(range(len(sequences)))
    for batch in batches:
        count, width = batch.input_ids.shape
        assert width <= max_tokens and (count * width <= budget or count == 1)
        assert bool(batch.attention_mask.diagonal(dim1=-2, dim2=-1).all())


@settings(max_examples=100, deadline=None)
@given(sequences=sequence_lists(), world=st.integers(1, 4))
def test_ranks_share_the_work_once_in_equal_numbers_of_micro_batches(sequences, world):
    ranks = [split_over_ranks(sequences, world, rank, max_tokens=20, token_budget=40) for rank in range(world)]
    assert packed_targets([batch for batches in ranks for batch in batches]) == wanted_targets(sequences)
    assert len({len(batches) for batches in ranks}) == 1


def test_a_group_shares_its_prompt_and_a_merged_token_has_a_target_for_each_sequence():
    prompt = [5, 6, 7]
    [batch] = pack_sequences([sequence(prompt, [1, 2], 0), sequence(prompt, [1, 3], 1)], max_tokens=16)
    assert batch.input_ids.tolist() == [[5, 6, 7, 1, 2, 3]]
    assert batch.source_index.tolist() == [2, 3, 2, 3]
    assert batch.target_ids.tolist() == [1, 2, 1, 3]
    assert batch.sequence_ids.tolist() == [0, 0, 1, 1]


def test_groups_never_share_nodes():
    [batch] = pack_sequences([sequence([5], [1], 0, "a"), sequence([5], [1], 1, "b")], max_tokens=16)
    assert int(batch.input_ids.numel()) == 4


def test_a_group_too_wide_for_one_tree_becomes_several():
    sequences = [sequence([9] * 10, [row] * 5, row) for row in range(8)]
    batches = pack_sequences(sequences, max_tokens=20, token_budget=20)
    assert [tuple(batch.input_ids.shape) for batch in batches] == [(1, 20)] * 4
    assert packed_targets(batches) == wanted_targets(sequences)


def test_many_short_trees_do_not_pay_for_a_long_one():
    sequences = [sequence([1] * 900, [2] * 100, 0, "long")]
    sequences += [sequence([1] * 6, [2] * 4, row, f"short{row}") for row in range(1, 3001)]
    batches = pack_sequences(sequences, max_tokens=1024, token_budget=8192)
    assert [batch.input_ids.shape[1] for batch in batches] == [1000] + [10] * (len(batches) - 1)
    assert len(batches) == 5
    assert sum(batch.attention_mask.numel() for batch in batches) < 1000**2 + 3000 * 10 * 10 + 1


def test_ranks_are_balanced_and_a_single_group_is_cut():
    sequences = [sequence([9] * 8, [row] * 50, row) for row in range(8)]
    tokens = [
        sum(batch.input_ids.numel() for batch in split_over_ranks(sequences, 2, rank, max_tokens=1000))
        for rank in range(2)
    ]
    assert tokens == [208, 208]


def test_an_idle_rank_gets_empty_micro_batches():
    busy, idle = (split_over_ranks([sequence([1], [2], 0)], 2, rank, max_tokens=16) for rank in range(2))
    assert len(busy) == len(idle) == 1
    assert (len(busy[0].target_ids), len(idle[0].target_ids)) == (1, 0)
    assert idle[0].rows == [] and idle[0].attention_mask.tolist() == [[[[True]]]]
    assert empty_micro_batch().loss_mask.sum() == 0


def test_the_normalizer_counts_trained_tokens_and_sequences():
    sequences = [sequence([1], [2, 3], 0), sequence([1, 2], [], 1), sequence([1], [2], 2)]
    assert count_normalizer(sequences) == Normalizer(tokens=3.0, sequences=2.0)


def test_to_moves_every_tensor():
    [batch] = pack_sequences([sequence([1], [2], 0)], max_tokens=16)
    moved = batch.to("meta")
    assert all(value.device.type == "meta" for value in vars(moved).values() if isinstance(value, torch.Tensor))
    assert moved.rows == [0]


def broken(**changes):
    return TrainingSequence(**(vars(sequence([1, 2], [3], 4, "t1")) | changes))


@pytest.mark.parametrize(
    ("bad", "what"),
    [
        (sequence([1] * 20, [2], 4, "t1"), "has 21 tokens, more than max_tokens = 16"),
        (broken(loss_mask=[1, 0, 1]), "loss_mask is 1 at position 0"),
        (broken(rollout_logprobs=[0.0]), "rollout_logprobs has 1 entries for 3 tokens"),
        (sequence([], [], 4, "t1"), "has no tokens"),
    ],
)
def test_bad_rows_are_refused_by_name(bad, what):
    with pytest.raises(AgentRLError, match=rf"^row 4 \(group t1\):? ?{what}"):
        pack_sequences([sequence([1], [2], 0), bad], max_tokens=16)
