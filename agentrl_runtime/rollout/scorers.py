"""Scorers: from a task and the text of the final answer to a number. `@register_scorer(NAME)` adds one."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import Decimal
from functools import lru_cache
from importlib import import_module
from typing import Any, Protocol

from agentrl_runtime.errors import AgentRLError

DEFAULT_SCORER = "exact"
LARGEST_SCORE = 1e12  # statistics of a group square scores, in places in float32
WORDY_NUMBER = 0.6  # the right number, with other text around it

# A sign after a word or a bracket is an operator: "10-3" ends with the number 3.
_NUMBER = re.compile(
    r"(?:(?<![\w)\].])[-+])?"
    r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
    r"(?:[eE][-+]?[0-9]{1,4}(?![0-9]))?"
)


class ScoredTask(Protocol):
    """What scorers read of a Task."""

    id: str
    answer: str | None
    extra: dict[str, Any]


@dataclass(frozen=True)
class Score:
    """`detail` says how the value came about; it holds what JSON can."""

    value: float
    detail: dict[str, Any] = field(default_factory=dict)


Scorer = Callable[[Any, str], Score]
SCORERS: dict[str, Scorer] = {}


def register_scorer(name: str) -> Callable[[Scorer], Scorer]:
    """Makes the decorated function the scorer of this name. Raises AgentRLError when the name is taken."""

    def register(scorer: Scorer) -> Scorer:
        if name in SCORERS:
            raise AgentRLError(f"scorer {name!r} is registered twice", mend="give one of the two another name")
        SCORERS[name] = scorer
        return scorer

    return register


def known_scorers() -> list[str]:
    return sorted(SCORERS)


def get_scorer(name: str) -> Scorer:
    """Raises AgentRLError, which lists the known names, for any other."""
    if name not in SCORERS:
        raise AgentRLError(
            f"unknown scorer {name!r}", mend=f"take one of {', '.join(known_scorers())}, or register your own"
        )
    return SCORERS[name]


def checked_score(value: object, record_id: str) -> float:
    """The value as a float of at most LARGEST_SCORE in size; a bool counts as 0 or 1.

    Raises AgentRLError, which names the record.
    """
    number = math.nan
    if isinstance(value, bool | int | float) or hasattr(value, "__float__"):
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
    if not abs(number) <= LARGEST_SCORE:
        raise AgentRLError(
            f"record {record_id} was scored {value!r:.100}, which is no number of at most {LARGEST_SCORE:g} in size",
            mend="let the scorer return such a number for every text",
        )
    return number


@register_scorer("exact")
def exact(task: ScoredTask, text: str) -> Score:
    """1 when text and answer are equal but for outer white space, else 0."""
    answer = _answer(task, "exact").strip()
    return Score(float(text.strip() == answer), {"scorer": "exact", "answer": answer})


@register_scorer("contains")
def contains(task: ScoredTask, text: str) -> Score:
    """1 when the answer stands somewhere in the text, else 0."""
    answer = _answer(task, "contains").strip()
    if not answer:
        raise AgentRLError(
            f"task {task.id} has a blank answer, which every text contains", mend='give it an "answer" with text'
        )
    return Score(float(answer in text), {"scorer": "contains", "answer": answer})


@register_scorer("number")
def number(task: ScoredTask, text: str) -> Score:
    """1 when the text is the answer's number and nothing else, 0.6 when its last number is, else 0.

    Numbers are compared by value: 1,000.0 is 1e3.
    """
    answer = _answer(task, "number")
    wanted = _numbers(answer)
    if not wanted:
        raise AgentRLError(
            f"task {task.id} has the answer {answer!r:.100}, without a number", mend='take scorer "exact" or "contains"'
        )
    found = _numbers(text)
    detail = {"scorer": "number", "answer": wanted[-1], "found": found[-1] if found else None}
    if not found or _value(found[-1]) != _value(wanted[-1]):
        return Score(0.0, detail)
    return Score(1.0 if found[-1] == _plain(text) else WORDY_NUMBER, detail)


@register_scorer("reasoning_gym")
def reasoning_gym(task: ScoredTask, text: str) -> Score:
    """The published verifier of a Reasoning Gym dataset.

    The task's extra holds "dataset" and "entry" as the library gives them, or "source_dataset" and "metadata"
    beside the task's own answer. With "extract": "last_number" the verifier gets the last number of the text
    alone, or nothing when there is none; else it gets the whole text.
    """
    name, entry = task.extra.get("dataset"), task.extra.get("entry")
    if entry is None and "metadata" in task.extra:
        name, entry = task.extra.get("source_dataset"), {"metadata": task.extra["metadata"]}
        entry |= {"question": getattr(task, "query", ""), "answer": _answer(task, "reasoning_gym")}
    if not isinstance(name, str) or not isinstance(entry, dict) or "answer" not in entry:
        raise AgentRLError(
            f'task {task.id} has no "extra" of the form {{"dataset": NAME, "entry": {{"question", "answer", ...}}}}',
            mend="write the entry as reasoning_gym gives it, with its metadata",
        )
    extract = task.extra.get("extract")
    if extract is not None and extract != "last_number":
        raise AgentRLError(
            f'task {task.id} has the extra "extract": {extract!r:.100}', mend='use "last_number", or leave it away'
        )
    detail: dict[str, Any] = {"scorer": "reasoning_gym", "dataset": name}
    if extract:
        text = detail["found"] = next(reversed(_numbers(text)), "")
    verify = _verifier(name, task.id)
    if name in _TUPLE_DATASETS:
        entry = {**entry, "metadata": _with_tuples(entry.get("metadata"))}
    try:
        value = verify(answer=text, entry=entry)
    except Exception as error:
        raise AgentRLError(
            f"reasoning_gym's verifier of {name} failed on task {task.id}: {type(error).__name__}: {error}",
            mend="see that the entry is whole, with its metadata",
        ) from error
    return Score(float(value), detail)


# These compare grids as tuples, which JSON gives back as lists.
_TUPLE_DATASETS = frozenset({"arc_agi", "rearc"})


def _with_tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_tuples(item) for key, item in value.items()}
    return tuple(_with_tuples(item) for item in value) if isinstance(value, list) else value


@lru_cache(maxsize=256)
def _known_verifier(name: str) -> Callable[..., float]:
    verify: Callable[..., float] = import_module("reasoning_gym").get_score_answer_fn(name)
    return verify


def _verifier(name: str, task_id: str) -> Callable[..., float]:
    try:
        return _known_verifier(name)
    except ImportError as error:
        raise AgentRLError(
            f"task {task_id} needs the library reasoning_gym: {error}", mend="install reasoning-gym"
        ) from error
    except ValueError as error:
        raise AgentRLError(
            f"task {task_id}: {error}", mend="take the name of a dataset of the installed reasoning_gym"
        ) from error


def _answer(task: ScoredTask, scorer: str) -> str:
    if task.answer is None:
        raise AgentRLError(
            f"task {task.id} has no answer, which scorer {scorer!r} needs",
            mend='add "answer" to its line, or name another scorer',
        )
    return task.answer


def _plain(text: str) -> str:
    return text.replace("\u2212", "-").strip()


def _numbers(text: str) -> list[str]:
    return _NUMBER.findall(_plain(text))


def _value(number: str) -> Decimal:
    return Decimal(number.replace(",", ""))
