"""Checkpoints hold all that training needs, and ranks together train what one process does."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.multiprocessing.spawn import start_processes
from transformers import AutoModelForCausalLM

from agentrl_runtime.configs import AgentTrainingConfig
from agentrl_runtime.databases import StreamPosition
from agentrl_runtime.errors import AgentRLError
from agentrl_runtime.training import learner as learner_module
from agentrl_runtime.training.checkpoint import (
    full_weights,
    load_optimizer,
    read_state,
    restore_rng,
    save_checkpoint,
)
from agentrl_runtime.training.learner import Learner, TrainingDiverged, load_policy
from agentrl_runtime.training.logprobs import forward_logprobs
from agentrl_runtime.training.packing import TrainingSequence, pack_sequences
from agentrl_runtime.training.parallel import Ranks, start_ranks, stop_ranks
from agentrl_runtime.training.policies import OPTIMIZER_FILE, STATE_FILE
from agentrl_runtime.training.tiny_model import make_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), seed=1)


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    yield start_ranks()
    stop_ranks()


def config_of(folder: Path, **values: Any) -> AgentTrainingConfig:
    return AgentTrainingConfig(model_name_or_path=str(folder), learning_rate=1e-3, **values)


def made_up_sequences(count: int, seed: int) -> list[TrainingSequence]:
    generator = torch.Generator().manual_seed(seed)

    def sequence(row: int) -> TrainingSequence:
        length = 6 + row % 4
        return TrainingSequence(
            input_ids=torch.randint(4, 16, (length,), generator=generator).tolist(),
            loss_mask=[0] * 3 + [1] * (length - 3),
            rollout_logprobs=[-2.5] * length,
            advantages=[1.0 if row % 3 else -1.0] * length,
            staleness=[0] * length,
            row=row,
            group=str(row // 2),
        )

    return [sequence(row) for row in range(count)]


def make_learner(folder: Path, config: AgentTrainingConfig, ranks: Ranks) -> Learner:
    model, compute_dtype = load_policy(folder, config)
    return Learner(model, config, ranks, compute_dtype=compute_dtype)


def take_steps(learner: Learner, first: int, last: int) -> None:
    for number in range(first, last + 1):
        learner.step(made_up_sequences(9, seed=number), number=number)


def test_resuming_from_a_checkpoint_is_bit_for_bit_going_on(folder: Path, tmp_path: Path, ranks: Ranks) -> None:
    config = config_of(folder, warmup_steps=3)
    learner = make_learner(folder, config, ranks)
    take_steps(learner, 1, 2)
    position = StreamPosition(seq=2, row=5)
    save_checkpoint(learner, tmp_path, source=folder, position=position, counts=(2, 3))
    take_steps(learner, 3, 4)

    state = read_state(tmp_path / STATE_FILE)
    assert (state.position, state.optimizer_steps, state.ledger_steps) == (position, 2, 3)
    resumed = make_learner(tmp_path, config, ranks)
    load_optimizer(resumed, tmp_path / OPTIMIZER_FILE)
    restore_rng(state, ranks, config.seed)
    take_steps(resumed, 3, 4)
    ours, theirs = full_weights(learner.model), full_weights(resumed.model)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_the_saved_folder_is_the_trained_model_with_its_head_tied(folder: Path, tmp_path: Path, ranks: Ranks) -> None:
    learner = make_learner(folder, config_of(folder), ranks)
    take_steps(learner, 1, 2)
    save_checkpoint(learner, tmp_path, source=folder, position=StreamPosition(), counts=(2, 2))
    names = load_file(tmp_path / "model.safetensors")
    assert "lm_head.weight" not in names and all(value.dtype == torch.float32 for value in names.values())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    (batch,) = pack_sequences(made_up_sequences(4, seed=5), max_tokens=64)
    with torch.no_grad():
        assert torch.equal(forward_logprobs(loaded, batch), learner.policy.of(batch))


def test_bfloat16_computes_in_half_and_keeps_float32_weights(folder: Path, ranks: Ranks) -> None:
    learner = make_learner(folder, config_of(folder, model_init_kwargs={"dtype": "bfloat16"}), ranks)
    exact = make_learner(folder, config_of(folder), ranks)
    results = [each.step(made_up_sequences(9, seed=1), number=1).metrics["loss"] for each in (learner, exact)]
    assert results[0] != results[1] and results[0] == pytest.approx(results[1], abs=0.02)
    assert all(value.dtype == torch.float32 for value in full_weights(learner.model).values())


def test_a_damaged_or_foreign_optimizer_is_refused_by_name(folder: Path, tmp_path: Path, ranks: Ranks) -> None:
    learner = make_learner(folder, config_of(folder), ranks)
    path = tmp_path / OPTIMIZER_FILE
    path.write_bytes(b"not safetensors")
    with pytest.raises(AgentRLError, match=r"optimizer.safetensors is not readable"):
        load_optimizer(learner, path)
    save_checkpoint(learner, tmp_path, source=folder, position=StreamPosition(), counts=(0, 0))
    load_optimizer(learner, path)  # of a model that took no step yet


def test_missing_weights_are_not_replaced_by_random_ones(folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    weights = load_file(folder / "model.safetensors")
    weights.pop("model.norm.weight")
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(AgentRLError, match=r"do not hold model\.norm\.weight"):
        load_policy(tmp_path, config_of(tmp_path))


@pytest.mark.parametrize("field", ["rollout_logprobs", "advantages"])
def test_nan_names_the_rows_and_changes_nothing(folder: Path, ranks: Ranks, field: str) -> None:
    learner = make_learner(folder, config_of(folder), ranks)
    before = full_weights(learner.model)
    sequences = made_up_sequences(3, seed=1)
    getattr(sequences[2], field)[-1] = float("nan")
    with pytest.raises(TrainingDiverged, match=f"{field} is nan"):
        learner.step(sequences, number=1)
    after = full_weights(learner.model)
    assert all(torch.equal(before[name], after[name]) for name in before)


def _train_on_rank(rank: int, world: int, folder: Path, work: Path, bad: bool) -> None:
    torch.set_num_threads(1)
    # With the usual 1e-8, Adam turns rounding differences of near-zero gradients into whole steps.
    learner_module.ADAM_EPS = 1e-3
    ranks = start_ranks(store=dist.FileStore(str(work / "group"), world), rank=rank, world=world)
    learner = make_learner(folder, config_of(folder), ranks)
    sequences = [made_up_sequences(9, seed=number) for number in (1, 2, 3)]
    if bad:
        sequences[1][4].advantages[-1] = float("inf")
    try:
        for number, batch in enumerate(sequences, start=1):
            learner.step(batch, number=number)
    except TrainingDiverged as error:
        (work / f"error-{rank}").write_text(error.what)
    save_checkpoint(learner, work if rank == 0 else None, source=folder, position=StreamPosition(), counts=(3, 3))
    stop_ranks()


def train_on(world: int, folder: Path, work: Path, *, bad: bool = False) -> None:
    work.mkdir()
    # Not forked: a fork of a process whose torch has worked already may wait for ever on its threads' locks.
    start_processes(_train_on_rank, args=(world, folder, work, bad), nprocs=world, start_method="spawn")


def test_two_ranks_give_the_parameters_of_one(folder: Path, tmp_path: Path) -> None:
    for world in (1, 2):
        train_on(world, folder, tmp_path / str(world))
    for name in ("model.safetensors", OPTIMIZER_FILE):
        one, two = load_file(tmp_path / "1" / name), load_file(tmp_path / "2" / name)
        assert one.keys() == two.keys()
        for key in one:
            torch.testing.assert_close(one[key], two[key], rtol=0, atol=1e-5)


def test_every_rank_stops_when_one_meets_infinity(folder: Path, tmp_path: Path) -> None:
    train_on(2, folder, tmp_path / "bad", bad=True)
    texts = [(tmp_path / "bad" / f"error-{rank}").read_text() for rank in (0, 1)]
    assert texts[0] == texts[1] and "advantages is inf" in texts[0]
