"""`agentrl demo` with everything in it killed once in mid-loop: it goes on, and no row is trained twice or missed."""

import asyncio
import itertools
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from pymongo import MongoClient
from pymongo.database import Database

from agentrl_pipelines.demo_configs import ASSETS, addition_rl, addition_sft
from agentrl_runtime.configs import AgentTrainingConfig
from agentrl_runtime.connections import open_stores
from agentrl_runtime.local.endpoints import read_state
from agentrl_runtime.local.services import down, up
from agentrl_runtime.runs import ensure_run

AGENTRL = [sys.executable, "-m", "agentrl_runtime.cli"]
STEPS = 22
#: What is killed once two more steps are there, and words of its command line.
VICTIMS = [
    ("trainer", ["agentrl_runtime.main", "demo-1/training.yaml"]),
    ("sampler", ["agentrl_runtime.sampling"]),
    ("SGLang", ["sglang_cpu.py"]),
    ("MongoDB-protocol store", ["secantus", "--storage-path"]),
    ("S3 store", ["weed", "mini"]),
    ("Dagster's daemon", ["dagster._daemon"]),
    ("Dagster's code server", ["dagster", "api", "grpc"]),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("AGENTRL_HOME", str(tmp_path / "home"))
    yield tmp_path / "home"
    down(tmp_path / "home")


def small(config: AgentTrainingConfig, tasks: Path, held_out: Path, **changes: Any) -> AgentTrainingConfig:
    files = {"train_file": tasks, "eval_file": held_out if config.eval_file else None}
    return AgentTrainingConfig.model_validate({**config.model_dump(), **files, **changes})


async def begin_small_runs(folder: Path) -> None:
    """The runs of an addition demo that was begun with few tasks and steps; the demo continues them."""
    tasks, held_out = folder / "few.jsonl", folder / "held_out.jsonl"
    tasks.write_text("".join((ASSETS / "addition_train.jsonl").read_text().splitlines(keepends=True)[:256]))
    held_out.write_text("".join((ASSETS / "addition_eval.jsonl").read_text().splitlines(keepends=True)[:8]))
    base, output = folder / "models" / "tiny-0", folder / "output" / "demo-1"
    sft = addition_sft("demo-1-sft", base, 0, output)
    rl = addition_rl("demo-1", "demo-1-sft.latest", base, 0, output)
    async with open_stores():
        await ensure_run(small(sft, tasks, held_out, max_steps=96, save_steps=32))
        few = {"prompts_per_batch": 8, "per_device_train_batch_size": 32, "max_steps": STEPS, "eval_every": 100}
        few["learning_rate"] = 1e-4  # an untrained policy that is pushed about gives equal scores, and no step
        await ensure_run(small(rl, tasks, held_out, **few))


class Demo:
    """The command in the background, and how far its output says it is."""

    def __init__(self, folder: Path, log: Path) -> None:
        self.folder, self.log = folder, log
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                [*AGENTRL, "demo", "--exit"], stdout=file, stderr=file, start_new_session=True
            )

    def steps(self) -> int:
        found = re.findall(r"demo-1\.v\d+ +step (\d+)", self.log.read_text())
        return max(map(int, found), default=0)

    def wait_for(self, true: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not true():
            assert self.process.poll() is None, f"the demo ended:\n{self.log.read_text()[-3000:]}"
            assert time.monotonic() < deadline, f"it hangs:\n{self.log.read_text()[-3000:]}"
            time.sleep(0.2)


def pids_of(folder: Path, words: list[str]) -> list[int]:
    """Processes of this home with all of these words in their command line, their guardians apart."""
    found = []
    for process in psutil.process_iter():
        try:
            line = process.cmdline()
            ours = process.environ().get("AGENTRL_TREE", "").startswith(f"{folder}:")
        except psutil.Error:
            continue
        guardian = any(Path(word).name == "guard.py" for word in line[:4])
        if ours and not guardian and all(any(word in item for item in line) for word in words):
            found.append(process.pid)
    return found


@pytest.mark.timeout(1500)
def test_everything_killed_once(folder: Path, tmp_path: Path) -> None:
    up(folder)
    asyncio.run(begin_small_runs(folder))
    demo = Demo(folder, tmp_path / "first.log")
    for number, (name, words) in enumerate(VICTIMS, 1):
        demo.wait_for(lambda due=2 * number: demo.steps() >= due, 240)  # type: ignore[misc]
        # It may be on its way back: the one killed before may have taken it along.
        demo.wait_for(lambda words=words: bool(pids_of(folder, words)), 120)  # type: ignore[misc]
        print(f"at step {demo.steps()}: kill -9 of {name}", flush=True)
        for pid in pids_of(folder, words):
            os.kill(pid, 9)
    demo.wait_for(lambda: demo.steps() >= 2 * len(VICTIMS) + 2, 240)
    os.kill(demo.process.pid, 9)
    demo.process.wait()

    again = Demo(folder, tmp_path / "second.log")
    again.process.wait(300)
    text = again.log.read_text()
    assert "continuing demo-1 (seed 0)" in text and "interrupted" not in text, text[-3000:]
    report = json.loads((folder / "demo" / "demo-1" / "report.json").read_text())
    assert report["last"]["version"] == f"demo-1.v{len(report['versions']) - 1:05d}"

    up(folder)
    with MongoClient(read_state(folder)["mongo"]["url"]) as client:
        database = client.get_default_database()
        assert_each_row_once(database, "demo-1-sft", steps=96)
        assert_each_row_once(database, "demo-1", steps=STEPS)
    audit = subprocess.run([*AGENTRL, "lineage", "audit", "demo-1"], capture_output=True, text=True)
    assert audit.returncode == 0, audit.stdout + audit.stderr


def assert_each_row_once(database: Database[dict[str, Any]], run: str, *, steps: int) -> None:
    """The committed ledger covers its stream of shards from the first row on, without overlap or hole."""
    versions = list(database["policy_versions"].find({"run_id": run}).sort("number", 1))
    assert [version["number"] for version in versions] == list(range(len(versions))) and versions[-1]["final"]
    assert [version["parent"] for version in versions[1:]] == [version["_id"] for version in versions[:-1]]
    committed = {version["_id"] for version in versions}
    ledger = [step for step in database["step_ledger"].find({"run_id": run}) if step["version_id"] in committed]
    ledger.sort(key=lambda step: step["number"])
    assert [step["number"] for step in ledger] == list(range(1, len(ledger) + 1))
    assert sum(step["optimizer_step"] for step in ledger) == steps

    shards = {shard["seq"]: shard for shard in database["shards"].find({"run_id": run, "seq": {"$type": "int"}})}
    assert sorted(shards) == list(range(1, len(shards) + 1))
    assert len({shard["batch_id"] for shard in shards.values()}) == len(shards)
    last_pass = (ledger[-1]["seq"], ledger[-1]["pass_number"])
    place = {}
    for (seq, turn), parts in itertools.groupby(ledger, key=lambda step: (step["seq"], step["pass_number"])):
        assert (seq, turn) not in place, f"shard {seq} is left and taken up again"
        end = 0
        for part in parts:
            assert part["shard_id"] == shards[seq]["_id"] and part["start"] == end
            end = part["stop"]
        place[seq, turn] = end
        assert end == shards[seq]["rows"] or (seq, turn) == last_pass
    if run == "demo-1":
        assert list(place) == [(seq, 0) for seq in range(1, len(place) + 1)]
        trained = [shards[seq]["batch_id"] for seq, _ in place]
        rows = database["samples"].count_documents({"batch_id": {"$in": trained}})
        assert rows == sum(step["stop"] - step["start"] for step in ledger) == 32 * len(ledger)
    else:
        assert list(place) == [(1, turn) for turn in range(len(place))]
