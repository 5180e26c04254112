import math
from types import SimpleNamespace

import pytest

from agentrl_runtime.errors import AgentRLError
from agentrl_runtime.training.advantages import (
    BELOW_MINIMAL_ADVANTAGE,
    NO_SCORE,
    NON_POSITIVE_ADVANTAGE,
    ZERO_ADVANTAGE,
    ScoredRecord,
    assign_advantages,
    group_advantages,
)


def config(**changes):
    values = {
        "advantage_estimator": "group_norm",
        "minimal_advantage": None,
        "drop_zero_advantage": False,
        "skip_non_positive_advantage": False,
        "adv_scaling": 1.0,
    }
    return SimpleNamespace(**(values | changes))


@pytest.mark.parametrize("estimator", ["group_norm", "group_mean"])
@pytest.mark.parametrize("score", [0.0, 1.0, 0.1, -3.7, 1e12])
def test_equal_scores_have_exactly_zero_advantages(estimator, score):
    cfg = config(advantage_estimator=estimator)
    result = group_advantages(cfg, [score] * 3)
    assert result.advantages == [0.0] * 3 and result.reasons == [None] * 3
    cfg.drop_zero_advantage = True
    assert group_advantages(cfg, [score] * 3).reasons == [ZERO_ADVANTAGE] * 3


def test_group_norm_divides_by_the_population_deviation():
    result = group_advantages(config(), [1.0, 0.0, 0.0, 0.0])
    std = math.sqrt(0.1875)
    assert (result.mean, result.std, result.used) == (0.25, pytest.approx(std), 4)
    assert result.advantages == pytest.approx([0.75 / (std + 1e-6)] + [-0.25 / (std + 1e-6)] * 3)


def test_group_mean_keeps_the_scale():
    result = group_advantages(config(advantage_estimator="group_mean", adv_scaling=2.0), [3.0, 1.0])
    assert result.advantages == [2.0, -2.0]


def test_a_missing_score_leaves_the_statistics():
    result = group_advantages(config(), [1, None, 0, 1])
    others = group_advantages(config(), [1, 0, 1])
    assert (result.used, result.mean, result.std) == (3, others.mean, others.std)
    assert [result.advantages[i] for i in (0, 2, 3)] == others.advantages
    assert result.advantages[1] is None and result.reasons == [None, NO_SCORE, None, None]


def test_a_group_without_scores_is_left_out():
    result = group_advantages(config(), [None] * 4)
    assert (result.advantages, result.reasons) == ([None] * 4, [NO_SCORE] * 4)
    assert (result.mean, result.std, result.used) == (None, None, 0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_score_that_is_not_finite_is_refused_by_record(bad):
    with pytest.raises(AgentRLError, match="rec_b is"):
        group_advantages(config(), [0, bad, 1], ["rec_a", "rec_b", "rec_c"])


def test_a_short_group_uses_what_it_has():
    result = group_advantages(config(advantage_estimator="group_mean"), [1, 0, 1])
    assert result.advantages == pytest.approx([1 / 3, -2 / 3, 1 / 3])


@pytest.mark.parametrize("estimator", ["group_norm", "group_mean"])
def test_a_single_score_has_no_advantage(estimator):
    assert group_advantages(config(advantage_estimator=estimator), [1]).advantages == [0.0]
    assert group_advantages(config(advantage_estimator=estimator), [None, 5.0, None]).advantages[1] == 0.0


@pytest.mark.parametrize(
    ("changes", "reasons"),
    [
        ({"minimal_advantage": None}, [None, None, None]),
        ({"minimal_advantage": 0.0}, [None, None, None]),
        ({"minimal_advantage": 0.1}, [None, BELOW_MINIMAL_ADVANTAGE, None]),
        ({"minimal_advantage": 0.5}, [None, BELOW_MINIMAL_ADVANTAGE, None]),
        ({"minimal_advantage": 0.6}, [BELOW_MINIMAL_ADVANTAGE] * 3),
        ({"drop_zero_advantage": True}, [None, ZERO_ADVANTAGE, None]),
        ({"skip_non_positive_advantage": True}, [NON_POSITIVE_ADVANTAGE, NON_POSITIVE_ADVANTAGE, None]),
        (
            {"skip_non_positive_advantage": True, "drop_zero_advantage": True, "minimal_advantage": 0.1},
            [NON_POSITIVE_ADVANTAGE, ZERO_ADVANTAGE, None],
        ),
    ],
)
@pytest.mark.parametrize("scaling", [1.0, 10.0])
def test_filters_name_their_reason_whatever_the_scaling(changes, reasons, scaling):
    cfg = config(advantage_estimator="group_mean", adv_scaling=scaling, **changes)
    result = group_advantages(cfg, [0.0, 0.5, 1.0])
    assert result.reasons == reasons
    assert result.advantages == [-0.5 * scaling, 0.0, 0.5 * scaling]


def test_groups_are_by_batch_and_task_never_by_position():
    scores = {("b1", "t1"): [1, 0, 1], ("b1", "t2"): [0, 1, 0, 0], ("b2", "t1"): [1, 1], ("b2", "t2"): [None]}
    records = [
        ScoredRecord(f"rec_{batch}{task}{i}", batch, task, scores[batch, task][i])
        for i in range(4)
        for batch, task in scores
        if i < len(scores[batch, task])
    ]
    assigned = assign_advantages(config(), records)
    assert [given.record for given in assigned] == records
    for (batch, task), group in scores.items():
        got = [given for given in assigned if (given.record.batch_id, given.record.task_id) == (batch, task)]
        expected = group_advantages(config(), group)
        assert [given.advantage for given in got] == expected.advantages
        assert {given.group_used for given in got} == {expected.used}


def test_an_unknown_estimator_is_refused():
    with pytest.raises(AgentRLError, match="median"):
        group_advantages(config(advantage_estimator="median"), [1, 0])
