"""When a batch may start, and which tasks it takes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl_runtime.configs import AgentTrainingConfig
from agentrl_runtime.errors import AgentRLError
from agentrl_runtime.rollout.batches import batch_tasks
from agentrl_runtime.rollout.scheduler import may_start_batch


def config(**values: object) -> AgentTrainingConfig:
    return AgentTrainingConfig(model_name_or_path="model", per_device_train_batch_size=8, **values)


def may_start(
    config: AgentTrainingConfig, unconsumed: int, behind: int = 0, steps_done: int = 0, rows: int = 8
) -> bool:
    return may_start_batch(config, unconsumed=unconsumed, versions_behind=behind, steps_done=steps_done, rows=rows)


@pytest.mark.parametrize(
    ("lag", "unconsumed", "behind", "may"),
    [
        (0, 0, 0, True),  # on-policy: sampling and training take turns
        (0, 1, 0, False),
        (0, 0, 1, False),  # the new weights are not served yet
        (1, 1, 0, True),
        (1, 2, 0, False),
        (1, 1, 1, False),
        (1, 0, 1, True),
        (3, 2, 1, True),
        (3, 3, 1, False),
    ],
)
def test_the_bound_on_staleness(lag: int, unconsumed: int, behind: int, may: bool) -> None:
    assert may_start(config(max_policy_lag=lag), unconsumed, behind) is may


def test_a_shard_of_many_steps_counts_its_versions() -> None:
    assert may_start(config(max_policy_lag=2), 1, rows=16)
    assert not may_start(config(max_policy_lag=2), 1, rows=24)
    assert may_start(config(max_policy_lag=1, save_steps=4), 4)
    assert not may_start(config(max_policy_lag=1, save_steps=4), 5)


def test_the_first_batch_starts_however_many_versions_it_makes() -> None:
    assert may_start(config(max_policy_lag=0), 0, rows=800)


def test_no_more_batches_than_max_steps_needs() -> None:
    limited = config(max_policy_lag=9, max_steps=5)
    assert may_start(limited, 1, steps_done=3) and not may_start(limited, 1, steps_done=4)


@given(st.integers(1, 40), st.integers(1, 12), st.integers(0, 5))
def test_an_epoch_takes_each_task_once_in_a_seeded_order(tasks: int, size: int, seed: int) -> None:
    names = [f"task_{number}" for number in range(tasks)]
    per_epoch = -(-tasks // size)
    for epoch in range(2):
        batches = [batch_tasks(names, epoch * per_epoch + place, size, seed) for place in range(per_epoch)]
        assert {found for found, _ in batches} == {epoch}
        assert sorted(task for _, chosen in batches for task in chosen) == sorted(names)
        assert batches == [batch_tasks(names, epoch * per_epoch + place, size, seed) for place in range(per_epoch)]


def test_a_dataset_without_tasks_is_refused() -> None:
    with pytest.raises(AgentRLError, match="no tasks"):
        batch_tasks([], 0, 4, 0)
