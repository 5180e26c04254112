# ruff: noqa: F722 - array shapes are written in the types
"""From training sequences to micro-batches of prefix trees.

The sequences of one group form one tree. Trees stand one after the other in a bin (one row of the batch), and
bins of like width are padded together to one micro-batch [B, N].
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from agentrl_runtime.errors import AgentRLError
from agentrl_runtime.training.losses import Normalizer
from agentrl_runtime.training.prefix_tree import attention_mask, build_prefix_tree, prefix_order

DEFAULT_TOKEN_BUDGET = 8192
# A tree is cut for balance only where it weighs more than this share of a rank's part.
SPLIT_ABOVE = 1.25


@dataclass(frozen=True)
class TrainingSequence:
    """One row of a shard. The lists have one entry a token; those off `loss_mask` are not read."""

    input_ids: list[int]
    loss_mask: list[int]
    rollout_logprobs: list[float]
    advantages: list[float]
    staleness: list[int]
    row: int
    group: str


@dataclass
class MicroBatch:
    """Tensors for one forward pass.

    `attention_mask` is True where a query may look; a pad looks at itself alone, so that its softmax is finite.
    The flat vectors have one entry a trained token. `source_index` is b * N + n of the token before it, whose
    hidden state predicts it; `sequence_ids` are dense, and `rows[sequence_id]` is the row of the shard.
    """

    input_ids: Int[Tensor, "B N"]
    position_ids: Int[Tensor, "B N"]
    attention_mask: Bool[Tensor, "B 1 N N"]
    source_index: Int[Tensor, " tokens"]
    target_ids: Int[Tensor, " tokens"]
    rollout_logprobs: Float[Tensor, " tokens"]
    advantages: Float[Tensor, " tokens"]
    loss_mask: Float[Tensor, " tokens"]
    sequence_ids: Int[Tensor, " tokens"]
    staleness: Float[Tensor, " tokens"]
    rows: list[int]

    def to(self, device: torch.device | str) -> "MicroBatch":
        moved: dict[str, Any] = {
            name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        return replace(self, **moved)


@dataclass(frozen=True)
class _Tree:
    """Sequences that will form one tree, and how many nodes it has."""

    sequences: list[TrainingSequence]
    width: int


def count_normalizer(sequences: Iterable[TrainingSequence]) -> Normalizer:
    """Denominators of the loss over these sequences: give it the global batch."""
    counts = [sum(1 for value in sequence.loss_mask if value) for sequence in sequences]
    return Normalizer(tokens=float(sum(counts)), sequences=float(sum(1 for count in counts if count)))


def pack_sequences(
    sequences: Sequence[TrainingSequence], *, max_tokens: int, token_budget: int = DEFAULT_TOKEN_BUDGET
) -> list[MicroBatch]:
    """Micro-batches in which every trained token of every sequence appears once.

    No bin is wider than `max_tokens`; B * N stays within `token_budget` except where a single bin is wider. A
    group whose tree is wider than `max_tokens` becomes several trees, each computing the shared context again.
    Raises AgentRLError for a sequence longer than `max_tokens`, for lists of different lengths, and for a
    trained token at position 0, which nothing predicts.
    """
    trees = _group_trees(sequences, max_tokens)
    return [_micro_batch(bins, width) for bins, width in _plan(trees, token_budget)]


def split_over_ranks(
    sequences: Sequence[TrainingSequence],
    world: int,
    rank: int,
    *,
    max_tokens: int,
    token_budget: int = DEFAULT_TOKEN_BUDGET,
) -> list[MicroBatch]:
    """The micro-batches of one of `world` ranks; every rank calls it with the same global list.

    Trees go to the rank with the fewest tokens. All ranks get the same number of micro-batches, because their
    collectives must match: empty ones, which train nothing, fill up.
    """
    trees = _balance(_group_trees(sequences, max_tokens), world)
    loads = [0] * world
    parts: list[list[_Tree]] = [[] for _ in range(world)]
    for tree in sorted(trees, key=lambda tree: -tree.width):
        lightest = loads.index(min(loads))
        loads[lightest] += tree.width
        parts[lightest].append(tree)
    plans = [_plan(part, token_budget) for part in parts]
    batches = [_micro_batch(bins, width) for bins, width in plans[rank]]
    return batches + [empty_micro_batch() for _ in range(max(map(len, plans)) - len(batches))]


def empty_micro_batch() -> MicroBatch:
    """One pad token and no targets: runs the same modules and adds nothing to the loss."""
    return _micro_batch([[]], 1)


def _group_trees(sequences: Sequence[TrainingSequence], max_tokens: int) -> list[_Tree]:
    groups: dict[str, list[TrainingSequence]] = {}
    for sequence in sequences:
        _check(sequence, max_tokens)
        groups.setdefault(sequence.group, []).append(sequence)
    return [tree for group in groups.values() for tree in _trees_within(group, max_tokens)]


def _trees_within(group: list[TrainingSequence], max_tokens: int) -> list[_Tree]:
    """The group's sequences in prefix order, a new tree begun where the next sequence would not fit."""
    order, shared = prefix_order([sequence.input_ids for sequence in group])
    trees: list[_Tree] = []
    members: list[TrainingSequence] = []
    width = 0
    for index, common in zip(order, shared, strict=True):
        sequence = group[index]
        added = len(sequence.input_ids) - common
        if members and width + added > max_tokens:
            trees.append(_Tree(members, width))
            members, width, added = [], 0, len(sequence.input_ids)
        members.append(sequence)
        width += added
    return [*trees, _Tree(members, width)] if members else trees


def _balance(trees: list[_Tree], world: int) -> list[_Tree]:
    """Cuts trees that would by themselves outweigh a rank's fair part, down to single sequences."""
    share = SPLIT_ABOVE * sum(tree.width for tree in trees) / world
    done: list[_Tree] = []
    pending = list(trees)
    while pending:
        tree = pending.pop()
        if world == 1 or len(tree.sequences) == 1 or tree.width <= share:
            done.append(tree)
            continue
        half = len(tree.sequences) // 2
        for part in (tree.sequences[:half], tree.sequences[half:]):
            _, shared = prefix_order([sequence.input_ids for sequence in part])
            pending.append(_Tree(part, sum(len(sequence.input_ids) for sequence in part) - sum(shared)))
    return done


def _plan(trees: list[_Tree], token_budget: int) -> list[tuple[list[list[_Tree]], int]]:
    """Micro-batches as (bins, width): each as wide as its widest tree.

    Only trees of at least half that width open a bin; smaller ones fill what is left in it, and then make
    micro-batches of their own width. So many short trees never pay for the square of a long one's width.
    """
    remaining = sorted(trees, key=lambda tree: -tree.width)
    plan: list[tuple[list[list[_Tree]], int]] = []
    while remaining:
        width = remaining[0].width
        most_bins = max(1, token_budget // width)
        bins: list[list[_Tree]] = []
        free: list[int] = []
        first_open = 0  # bins before it have no room for anything that is left
        left: list[_Tree] = []
        smallest = remaining[-1].width
        for tree in remaining:
            while first_open < len(bins) and free[first_open] < smallest:
                first_open += 1
            fitting = next((i for i in range(first_open, len(bins)) if free[i] >= tree.width), None)
            if fitting is not None:
                bins[fitting].append(tree)
                free[fitting] -= tree.width
            elif len(bins) < most_bins and 2 * tree.width >= width:
                bins.append([tree])
                free.append(width - tree.width)
            else:
                left.append(tree)
        plan.append((bins, width))
        remaining = left
    return plan


def _micro_batch(bins: list[list[_Tree]], width: int) -> MicroBatch:
    shape = (len(bins), width)
    input_ids, position_ids = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    # A pad is a tree of one node: it looks at itself alone.
    subtree_end = np.tile(np.arange(1, width + 1, dtype=np.int64), (len(bins), 1))
    rows: list[int] = []
    columns: dict[str, list[np.ndarray]] = {
        name: [np.empty(0)]
        for name in (
            "source_index",
            "target_ids",
            "rollout_logprobs",
            "advantages",
            "sequence_ids",
            "staleness",
        )
    }
    for b, trees in enumerate(bins):
        start = 0
        for planned in trees:
            tree = build_prefix_tree([sequence.input_ids for sequence in planned.sequences])
            stop = start + len(tree)
            input_ids[b, start:stop] = tree.input_ids
            position_ids[b, start:stop] = tree.position_ids
            subtree_end[b, start:stop] = tree.subtree_end + start
            for i, sequence in enumerate(planned.sequences):
                trained = np.flatnonzero(np.asarray(sequence.loss_mask))
                columns["source_index"].append(tree.positions(i)[trained - 1] + start + b * width)
                columns["target_ids"].append(np.asarray(sequence.input_ids)[trained])
                columns["rollout_logprobs"].append(np.asarray(sequence.rollout_logprobs)[trained])
                columns["advantages"].append(np.asarray(sequence.advantages)[trained])
                columns["staleness"].append(np.asarray(sequence.staleness)[trained])
                columns["sequence_ids"].append(np.full(len(trained), len(rows)))
                rows.append(sequence.row)
            start = stop
    flat = {name: np.concatenate(values) for name, values in columns.items()}
    mask = np.stack([attention_mask(row) for row in subtree_end])[:, None]

    def ids(name: str) -> Tensor:
        return torch.from_numpy(flat[name].astype(np.int64))

    def values(name: str) -> Tensor:
        return torch.from_numpy(flat[name].astype(np.float32))

    return MicroBatch(
        input_ids=torch.from_numpy(input_ids),
        position_ids=torch.from_numpy(position_ids),
        attention_mask=torch.from_numpy(mask),
        source_index=ids("source_index"),
        target_ids=ids("target_ids"),
        rollout_logprobs=values("rollout_logprobs"),
        advantages=values("advantages"),
        loss_mask=torch.ones(len(flat["target_ids"])),
        sequence_ids=ids("sequence_ids"),
        staleness=values("staleness"),
        rows=rows,
    )


def _check(sequence: TrainingSequence, max_tokens: int) -> None:
    length = len(sequence.input_ids)
    name = f"row {sequence.row} (group {sequence.group})"
    for field in ("loss_mask", "rollout_logprobs", "advantages", "staleness"):
        if len(getattr(sequence, field)) != length:
            raise AgentRLError(
                f"{name}: {field} has {len(getattr(sequence, field))} entries for {length} tokens",
                mend="build the shard again: each list has one entry a token",
            )
    if length == 0:
        raise AgentRLError(f"{name} has no tokens", mend="leave the record out of the shard")
    if length > max_tokens:
        raise AgentRLError(
            f"{name} has {length} tokens, more than max_tokens = {max_tokens}",
            mend="raise max_tokens, or leave out records that long",
        )
    if sequence.loss_mask[0]:
        raise AgentRLError(
            f"{name}: loss_mask is 1 at position 0, and no token before it predicts it",
            mend="begin every sequence with at least one prompt token",
        )
