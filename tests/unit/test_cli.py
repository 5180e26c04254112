"""The `agentrl` command as a whole: quick, helpful, and honest about errors."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

_HEAVY = ("torch", "transformers", "dagster", "beanie", "pymongo", "pyarrow", "numpy", "matplotlib", "minio", "aiohttp")


def agentrl(*arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    kept = {name: value for name, value in os.environ.items() if not name.startswith("AGENTRL_")}
    return subprocess.run(
        [sys.executable, "-m", "agentrl_runtime.cli", *arguments],
        env={**kept, "COLUMNS": "120", **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_help_imports_nothing_heavy() -> None:
    code = "import sys, agentrl_runtime.cli as cli; cli.build_app(); print(*sys.modules)"
    loaded = set(
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    )
    assert not loaded.intersection(_HEAVY)


def test_every_command_is_there_and_has_help() -> None:
    root = agentrl("--help")
    assert root.returncode == 0
    assert root.stderr == ""
    for command in ("up", "down", "status", "doctor", "demo", "dev", "train", "sample", "tasks", "runs", "lineage"):
        assert f" {command} " in root.stdout
    for command in ("up", "down", "status", "doctor"):
        assert "--json" in agentrl(command, "--help").stdout


def test_a_known_problem_is_one_line_and_its_mend(tmp_path: Path) -> None:
    (tmp_path / "services.json").write_text("{")
    told = agentrl("status", AGENTRL_HOME=str(tmp_path))
    assert told.returncode == 1
    assert told.stdout == ""
    first, second = told.stderr.splitlines()
    assert first == f"error: {tmp_path / 'services.json'} is damaged"
    assert second.startswith("mend: ")
    asked = agentrl("status", "--json", AGENTRL_HOME=str(tmp_path))
    assert asked.returncode == 1
    assert json.loads(asked.stdout) == {
        "error": first.removeprefix("error: "),
        "mend": second.removeprefix("mend: "),
    }


@pytest.mark.parametrize("arguments", [["no-such-command"], ["up", "--no-such-option"]])
def test_wrong_usage_exits_with_2(arguments: list[str]) -> None:
    told = agentrl(*arguments)
    assert told.returncode == 2
    assert "Traceback" not in told.stderr


def test_status_of_a_home_that_was_never_started(tmp_path: Path) -> None:
    told = agentrl("status", "--json", AGENTRL_HOME=str(tmp_path / "none"))
    assert told.returncode == 1
    assert [(item["name"], item["ok"], item["detail"]) for item in json.loads(told.stdout)] == [
        ("mongo", False, "never started here"),
        ("s3", False, "never started here"),
    ]
    assert not (tmp_path / "none").exists()


def test_a_broken_plug_in_leaves_the_other_commands(tmp_path: Path) -> None:
    package = tmp_path / "broken-1.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1\n")
    (package / "entry_points.txt").write_text("[agentrl.commands]\nbroken = no_such_module:register\n")
    told = agentrl("down", "--json", PYTHONPATH=str(tmp_path), AGENTRL_HOME=str(tmp_path / "none"))
    assert told.returncode == 0
    assert json.loads(told.stdout) == {"stopped": []}
    assert "warning: the commands of broken are left out: No module named 'no_such_module'" in told.stderr
