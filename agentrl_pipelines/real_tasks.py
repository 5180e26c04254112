"""Task files of `make demo-real`: two families of reasoning_gym, or the user's own file with a part held out."""

import hashlib
import json
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl_runtime.errors import AgentRLError

#: The family whose held-out score decides whether the policy improved: one sum or difference of two digits.
EASIER = "chain_sum"
_FAMILIES: dict[str, dict[str, Any]] = {
    EASIER: {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1, "allow_negation": False},
    "gcd": {"min_numbers": 2, "max_numbers": 2, "min_value": 2, "max_value": 20},
}
#: At most: there are about two hundred sums and differences of two digits.
_TRAIN = {EASIER: 256, "gcd": 64}
_HELD_OUT = {EASIER: 40, "gcd": 16}
_INSTRUCTION = "Answer with only the number."


@dataclass(frozen=True)
class TaskFiles:
    train: Path
    evaluation: Path


def _entries(family: str, count: int, seed: int, unlike: set[str]) -> list[dict[str, Any]]:
    """Distinct questions of the family, none of them in `unlike`."""
    from importlib import import_module

    found: dict[str, dict[str, Any]] = {}
    data = import_module("reasoning_gym").create_dataset(family, seed=seed, size=count * 40, **_FAMILIES[family])
    for entry in data:
        if entry["question"] not in unlike:
            found.setdefault(entry["question"], entry)
        if len(found) == count:
            break
    return list(found.values())


def _task(family: str, entry: dict[str, Any]) -> dict[str, Any]:
    question = entry["question"]
    key = hashlib.sha256(question.encode()).hexdigest()[:12]
    return {
        "id": f"{family}-{key}",
        "query": f"{question}\n{_INSTRUCTION}",
        "answer": entry["answer"],
        "scorer": "reasoning_gym",
        "extra": {"dataset": family, "entry": entry, "extract": "last_number"},
    }


def write_lines(path: Path, lines: Iterable[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text("".join(f"{line}\n" for line in lines))
    partial.replace(path)
    return path


def reasoning_gym_files(folder: Path, seed: int) -> TaskFiles:
    """Write both files; no question is in both. The same seed writes the same bytes."""
    train: list[dict[str, Any]] = []
    evaluation: list[dict[str, Any]] = []
    for family in _FAMILIES:
        held_out = _entries(family, _HELD_OUT[family], 7919 + seed, set())
        evaluation += [_task(family, entry) for entry in held_out]
        unlike = {entry["question"] for entry in held_out}
        train += [_task(family, entry) for entry in _entries(family, _TRAIN[family], seed, unlike)]
    random.Random(seed).shuffle(train)
    return TaskFiles(
        write_lines(folder / f"reasoning_gym_train_{seed}.jsonl", map(json.dumps, train)),
        write_lines(folder / f"reasoning_gym_eval_{seed}.jsonl", map(json.dumps, evaluation)),
    )


def split_file(tasks: Path, folder: Path) -> TaskFiles:
    """The user's file: its first four fifths to train on, its last fifth (one line at least) held out."""
    if not tasks.is_file():
        raise AgentRLError(f"task file {tasks} does not exist", mend="check the path given to --tasks")
    lines = [line for line in tasks.read_text().splitlines() if line.strip()]
    if len(lines) < 5:
        raise AgentRLError(f"task file {tasks} has {len(lines)} tasks", mend="give five or more, or --eval-tasks too")
    cut = len(lines) - max(1, len(lines) // 5)
    return TaskFiles(
        write_lines(folder / f"{tasks.stem}_train.jsonl", lines[:cut]),
        write_lines(folder / f"{tasks.stem}_heldout.jsonl", lines[cut:]),
    )
