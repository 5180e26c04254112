import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_runtime.training.prefix_tree import attention_mask, build_prefix_tree

token_lists = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=9)


@settings(max_examples=300, deadline=None)
@given(token_lists)
def test_every_sequence_sees_exactly_itself(sequences):
    tree = build_prefix_tree(sequences)
    prefixes = {tuple(sequence[: i + 1]) for sequence in sequences for i in range(len(sequence))}
    assert len(tree) == len(prefixes)
    mask = attention_mask(tree)
    for i, sequence in enumerate(sequences):
        path = tree.positions(i)
        assert tree.input_ids[path].tolist() == sequence
        assert tree.position_ids[path].tolist() == list(range(len(sequence)))
        assert tree.parent[path].tolist() == [-1, *path[:-1].tolist()]
        for depth, node in enumerate(path):
            assert np.flatnonzero(mask[node]).tolist() == path[: depth + 1].tolist()


@settings(max_examples=200, deadline=None)
@given(token_lists)
def test_nodes_are_in_pre_order(sequences):
    tree = build_prefix_tree(sequences)
    children = {node: [] for node in range(-1, len(tree))}
    for node, parent in enumerate(tree.parent.tolist()):
        children[parent].append(node)

    def descend(node):
        return [node] + [below for child in children[node] for below in descend(child)]

    assert descend(-1)[1:] == list(range(len(tree)))
    for node in range(len(tree)):
        assert descend(node) == list(range(node, int(tree.subtree_end[node])))


def test_a_known_tree():
    tree = build_prefix_tree([[1, 2, 3], [1, 2, 4, 5], [1, 2], [6]])
    assert tree.input_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert tree.position_ids.tolist() == [0, 1, 2, 2, 3, 0]
    assert tree.subtree_end.tolist() == [5, 5, 3, 5, 5, 6]
    assert tree.parent.tolist() == [-1, 0, 1, 1, 3, -1]
    assert tree.positions(2).tolist() == [0, 1]


def test_the_mask_follows_from_one_vector():
    tree = build_prefix_tree([[1, 2, 3], [1, 4]])
    assert np.array_equal(attention_mask(tree.subtree_end), attention_mask(tree))


@pytest.mark.parametrize("sequences", [[], [[]], [[], [1]]])
def test_nothing_makes_an_empty_tree(sequences):
    tree = build_prefix_tree(sequences)
    assert len(tree) == sum(map(len, sequences))
    assert all(len(tree.positions(i)) == len(sequence) for i, sequence in enumerate(sequences))


def test_long_sequences_do_not_recurse():
    trunk = list(range(100_000))
    tree = build_prefix_tree([[*trunk, 7], trunk, [*trunk[:50_000], 1, 2]])
    assert len(tree) == 100_003
    assert int(tree.subtree_end[0]) == 100_003
    assert int(tree.parent[tree.positions(2)[50_000]]) == 49_999
