# ruff: noqa: F722 - array shapes are written in the types
"""Prefix trees of token sequences: shared context is computed once.

Nodes are stored in depth-first pre-order, so the subtree of node k is the run of nodes k..subtree_end[k]-1 and
the ancestors of q (with q itself) are the k with k <= q < subtree_end[k]. That one vector defines the whole
attention mask; a plain chain, or chains packed one after the other, are special cases of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int64


@dataclass(frozen=True)
class PrefixTree:
    """A forest over N nodes (tokens). `parent` is -1 at a root; `position_ids` is the depth."""

    input_ids: Int64[np.ndarray, " nodes"]
    position_ids: Int64[np.ndarray, " nodes"]
    subtree_end: Int64[np.ndarray, " nodes"]
    parent: Int64[np.ndarray, " nodes"]
    paths: tuple[Int64[np.ndarray, " length"], ...]

    def positions(self, sequence: int) -> Int64[np.ndarray, " length"]:
        """The nodes that hold the tokens of one sequence, from its first token to its last."""
        return self.paths[sequence]

    def __len__(self) -> int:
        return len(self.input_ids)


def prefix_order(sequences: Sequence[list[int]]) -> tuple[list[int], list[int]]:
    """Sequences in lexicographic order, and for each how many tokens it shares with the one before it.

    In this order, the tokens a sequence does not share are exactly the nodes that it adds to the tree.
    """
    order = sorted(range(len(sequences)), key=lambda index: sequences[index])
    shared = [0] * len(order)
    for rank in range(1, len(order)):
        before, after = sequences[order[rank - 1]], sequences[order[rank]]
        shared[rank] = _shared_prefix(np.asarray(before, dtype=np.int64), np.asarray(after, dtype=np.int64))
    return order, shared


def _shared_prefix(first: np.ndarray, second: np.ndarray) -> int:
    length = min(len(first), len(second))
    differs = np.flatnonzero(first[:length] != second[:length])
    return int(differs[0]) if len(differs) else length


def build_prefix_tree(sequences: list[list[int]]) -> PrefixTree:
    """One tree (a forest, where first tokens differ) over token id sequences of any number and length.

    Work is linear in the number of tokens, beside sorting the sequences; nothing recurses.
    """
    order, shared = prefix_order(sequences)
    width = sum(len(sequences[index]) for index in order) - sum(shared)
    input_ids = np.empty(width, dtype=np.int64)
    position_ids = np.empty(width, dtype=np.int64)
    parent = np.empty(width, dtype=np.int64)
    subtree_end = np.empty(width, dtype=np.int64)
    paths: list[np.ndarray] = [np.empty(0, dtype=np.int64)] * len(sequences)
    path, nodes = np.empty(0, dtype=np.int64), 0
    for index, common in zip(order, shared, strict=True):
        # Nodes of the path before that this sequence leaves can get no more descendants.
        subtree_end[path[common:]] = nodes
        added = len(sequences[index]) - common
        new = np.arange(nodes, nodes + added, dtype=np.int64)
        input_ids[new] = sequences[index][common:]
        position_ids[new] = np.arange(common, common + added)
        parent[new] = new - 1
        if added:
            parent[nodes] = path[common - 1] if common else -1
        path = np.concatenate([path[:common], new])
        paths[index] = path
        nodes += added
    subtree_end[path] = nodes
    return PrefixTree(input_ids, position_ids, subtree_end, parent, tuple(paths))


def attention_mask(tree: PrefixTree | np.ndarray) -> Bool[np.ndarray, "nodes nodes"]:
    """[q, k] is True where q attends to k: k is q or an ancestor of q. Takes a tree or its `subtree_end`."""
    end = tree.subtree_end if isinstance(tree, PrefixTree) else tree
    index = np.arange(len(end))
    return (index[None, :] <= index[:, None]) & (index[:, None] < end[None, :])
