"""Scorers: values, the errors that name task and record, and the registry."""

import importlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from agentrl_runtime.errors import AgentRLError
from agentrl_runtime.rollout.scorers import (
    DEFAULT_SCORER,
    SCORERS,
    Score,
    checked_score,
    get_scorer,
    known_scorers,
    register_scorer,
)


@dataclass
class Item:
    answer: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    id: str = "task_7"


def value(scorer: str, answer: str, text: str) -> float:
    return get_scorer(scorer)(Item(answer), text).value


@pytest.fixture
def registry() -> Iterator[None]:
    before = dict(SCORERS)
    yield
    SCORERS.clear()
    SCORERS.update(before)


@pytest.mark.parametrize(
    ("answer", "text", "wanted"),
    [("051", "051", 1), ("051", " 051\n", 1), ("051", "51", 0), ("051", "0515", 0), ("", " ", 1), ("a", "", 0)],
)
def test_exact(answer: str, text: str, wanted: float) -> None:
    assert value("exact", answer, text) == wanted


@pytest.mark.parametrize(("text", "wanted"), [("It is Oslo.", 1), ("oslo", 0), ("", 0)])
def test_contains(text: str, wanted: float) -> None:
    assert value("contains", " Oslo ", text) == wanted


@pytest.mark.parametrize(
    ("answer", "text", "wanted"),
    [
        ("42", "42", 1.0),
        ("42", " 42\n", 1.0),
        ("42", "42.0", 1.0),
        ("42", "The answer is 42.", 0.6),
        ("42", "42 or 43", 0),
        ("42", "43, no: 42", 0.6),
        ("42", "", 0),
        ("42", "none", 0),
        ("42", "-42", 0),
        ("-42", "\u221242", 1.0),
        ("3", "10-3", 0.6),
        ("-3", "x = -3", 0.6),
        ("1000", "1,000", 1.0),
        ("1000", "1e3", 1.0),
        ("3", "1,2,3", 0.6),
        ("0.5", ".5", 1.0),
        ("#### 42", "42", 1.0),
        ("42", "$42", 0.6),
        ("0.3", "0.30000000000000004", 0),
        ("7", "1e99999999999999", 0),
    ],
)
def test_number(answer: str, text: str, wanted: float) -> None:
    assert value("number", answer, text) == wanted


def test_number_takes_long_texts() -> None:
    assert value("number", "7", "1" * 20_000 + "," * 20_000 + "-." * 20_000 + " 7") == 0.6


@pytest.mark.parametrize("scorer", ["exact", "number", "contains"])
def test_missing_answer_names_the_task(scorer: str) -> None:
    with pytest.raises(AgentRLError, match="task_7 has no answer"):
        get_scorer(scorer)(Item(), "42")


@pytest.mark.parametrize(("scorer", "answer"), [("number", "Oslo"), ("contains", " ")])
def test_unfit_answer_names_the_task(scorer: str, answer: str) -> None:
    with pytest.raises(AgentRLError, match="task_7"):
        get_scorer(scorer)(Item(answer), "42")


def test_unknown_scorer_lists_the_names() -> None:
    with pytest.raises(AgentRLError, match="contains, exact, number, reasoning_gym"):
        get_scorer("guess")


def test_registry(registry: None) -> None:
    @register_scorer("length")
    def length(task: Any, text: str) -> Score:
        return Score(float(len(text)))

    assert get_scorer("length")(Item(), "abc").value == 3
    assert "length" in known_scorers() and DEFAULT_SCORER in known_scorers()
    with pytest.raises(AgentRLError, match="'length' is registered twice"):
        register_scorer("length")(length)


@pytest.mark.parametrize(("value", "wanted"), [(True, 1.0), (False, 0.0), (2, 2.0), (0.5, 0.5), (np.float32(0.5), 0.5)])
def test_checked_score(value: object, wanted: float) -> None:
    checked = checked_score(value, "rec_1")
    assert checked == wanted and type(checked) is float


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, -math.inf, 1e200, -1e39, None, "1", 10**400, [1], np.float64("nan")]
)
def test_checked_score_names_the_record(value: object) -> None:
    with pytest.raises(AgentRLError, match="record rec_1"):
        checked_score(value, "rec_1")


class TestReasoningGym:
    """Entries go through JSON, as in a task file."""

    @pytest.fixture(autouse=True)
    def library(self) -> Any:
        return importlib.import_module("reasoning_gym")

    @pytest.mark.parametrize("name", ["leg_counting", "complex_arithmetic", "countdown", "rearc", "arc_agi"])
    def test_right_and_wrong(self, library: Any, name: str) -> None:
        entry = json.loads(json.dumps(library.create_dataset(name, size=1, seed=1)[0]))
        item = Item(extra={"dataset": name, "entry": entry})
        assert get_scorer("reasoning_gym")(item, entry["answer"]).value == 1
        assert get_scorer("reasoning_gym")(item, "nonsense").value < 0.5

    def test_metadata_beside_the_answer_will_do(self, library: Any) -> None:
        entry = json.loads(json.dumps(library.create_dataset("gcd", size=1, seed=1)[0]))
        item = Item(entry["answer"], extra={"source_dataset": "gcd", "metadata": entry["metadata"]})
        assert get_scorer("reasoning_gym")(item, entry["answer"]).value == 1
        assert get_scorer("reasoning_gym")(item, "0").value < 0.5

    @pytest.mark.parametrize(
        ("text", "value", "found"),
        [
            ("7 + 3 = 10", 1.0, "10"),
            ("The answer is 10.", 1.0, "10"),
            ("10", 1.0, "10"),
            ("10 = 7 + 3", 0.0, "3"),
            ("100", 2 / 3, "100"),  # the library's own part for an answer that holds the right one
            ("ten", 0.0, ""),
        ],
    )
    def test_the_last_number_may_be_the_answer(self, text: str, value: float, found: str) -> None:
        entry = {"question": "7 + 3 =", "answer": "10", "metadata": {}}
        item = Item(extra={"dataset": "chain_sum", "entry": entry, "extract": "last_number"})
        score = get_scorer("reasoning_gym")(item, text)
        assert score.value == pytest.approx(value) and score.detail["found"] == found

    def test_unknown_extraction_names_the_task(self) -> None:
        entry = {"question": "7 + 3 =", "answer": "10", "metadata": {}}
        item = Item(extra={"dataset": "chain_sum", "entry": entry, "extract": ["last"]})
        with pytest.raises(AgentRLError, match=r"task_7 has the extra \"extract\": \['last'\]"):
            get_scorer("reasoning_gym")(item, "10")

    @pytest.mark.parametrize(
        "extra",
        [{}, {"dataset": "leg_counting"}, {"dataset": "leg_counting", "entry": {}}, {"dataset": 1, "entry": {}}],
    )
    def test_missing_entry_names_the_task(self, extra: dict[str, Any]) -> None:
        with pytest.raises(AgentRLError, match="task_7"):
            get_scorer("reasoning_gym")(Item(extra=extra), "1")

    def test_unknown_dataset(self) -> None:
        with pytest.raises(AgentRLError, match=r"task_7: Dataset 'guess' not registered"):
            get_scorer("reasoning_gym")(Item(extra={"dataset": "guess", "entry": {"answer": "1"}}), "1")

    def test_entry_without_metadata(self) -> None:
        item = Item(extra={"dataset": "complex_arithmetic", "entry": {"question": "q", "answer": "1"}})
        with pytest.raises(AgentRLError, match=r"complex_arithmetic failed on task task_7: KeyError"):
            get_scorer("reasoning_gym")(item, "1")
