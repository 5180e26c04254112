"""Writes assets/addition_train.jsonl and assets/addition_eval.jsonl: the demo's two-digit additions.

The answer is written with its digits reversed (ones first), so that each digit follows from the digits of one
column and one carry. `demonstration` is the reply of a sloppy teacher, who forgets to carry from the ones to
the tens most of the time: supervised training on it leaves reinforcement learning something to mend.
Pairs for evaluation never appear in the training file.
"""

import json
import random
from pathlib import Path
from typing import Any

SEED = 20
EVAL_PAIRS = 500
TRAIN_PAIRS = 4096
FORGETS_CARRY = 0.7
ASSETS = Path(__file__).resolve().parent.parent / "assets"


def true_answer(a: int, b: int) -> str:
    return str(a + b)[::-1]


def sloppy_answer(a: int, b: int, rng: random.Random) -> str:
    """The teacher's reply: right but for the carry out of the ones, which is forgotten 70 % of the time."""
    carry = (a % 10 + b % 10) // 10
    if carry and rng.random() < FORGETS_CARRY:
        carry = 0
    return str((a // 10 + b // 10 + carry) * 10 + (a + b) % 10)[::-1]


def task(a: int, b: int) -> dict[str, Any]:
    return {"id": f"add-{a}-{b}", "query": f"{a}+{b}=", "answer": true_answer(a, b), "scorer": "exact"}


def write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def main() -> None:
    rng = random.Random(SEED)
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    rng.shuffle(pairs)
    held_out, trained = pairs[:EVAL_PAIRS], pairs[EVAL_PAIRS : EVAL_PAIRS + TRAIN_PAIRS]
    write_lines(ASSETS / "addition_eval.jsonl", [task(a, b) for a, b in held_out])
    write_lines(
        ASSETS / "addition_train.jsonl",
        [{**task(a, b), "demonstration": sloppy_answer(a, b, rng)} for a, b in trained],
    )


if __name__ == "__main__":
    main()
