"""Process trees end whole, whoever is killed first."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from agentrl_runtime import guard
from agentrl_runtime.errors import AgentRLError
from agentrl_runtime.processes import ProcessTree, start_tree, started_at, stray_processes, sweep_orphans

#: Starts a grandchild in a session of its own that ignores TERM, writes both ids, then sleeps.
_FAMILY = """
import os, signal, subprocess, sys, time
code = "import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True); time.sleep(600)"
young = subprocess.Popen(
    [sys.executable, "-c", code],
    start_new_session=True, stdout=subprocess.PIPE)
young.stdout.readline()
with open(sys.argv[1] + ".part", "w") as file:
    file.write(f"{os.getpid()} {young.pid}")
os.rename(sys.argv[1] + ".part", sys.argv[1])
time.sleep(600)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An AGENTRL_HOME that the test leaves without processes."""
    monkeypatch.setenv("AGENTRL_HOME", str(tmp_path / "home"))
    yield tmp_path / "home"
    sweep_orphans(tmp_path / "home")


def wait_until(true: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    return started_at(pid) is not None


def family(folder: Path, **options: float | bool) -> tuple[ProcessTree, list[int]]:
    """A started tree, and the ids of its command and of the grandchild."""
    ids = folder.parent / "ids"
    tree = start_tree(
        [sys.executable, "-c", _FAMILY, str(ids)],
        name="family",
        log_path=folder / "logs" / "family.log",
        **{"grace_s": 0.3, **options},  # type: ignore[arg-type]
    )
    wait_until(ids.exists)
    return tree, [int(word) for word in ids.read_text().split()]


@pytest.mark.parametrize(
    ("code", "expected"),
    [("raise SystemExit(0)", 0), ("raise SystemExit(7)", 7), ("import os; os.kill(os.getpid(), 11)", 139)],
)
def test_exit_code_is_the_commands(folder: Path, code: str, expected: int) -> None:
    tree = start_tree([sys.executable, "-c", code], name="one", log_path=folder / "one.log")
    assert tree.wait(30) == expected
    assert tree.poll() == expected


def test_a_command_that_ends_before_its_guardian_looks(folder: Path) -> None:
    slow = (
        "import sys, subprocess, time; sys.path.insert(0, sys.argv.pop(1)); import guard\n"
        "class Slow(subprocess.Popen):\n"
        "    def __init__(self, *args, **options):\n"
        "        super().__init__(*args, **options); time.sleep(0.5)\n"
        "guard.subprocess.Popen = Slow\n"
        "raise SystemExit(guard.main())"
    )
    rooms = str(Path(guard.__file__).parent)
    command = [sys.executable, "-c", slow, rooms, "--parent", str(os.getpid()), "--", "/bin/sh", "-c", "exit 7"]
    assert subprocess.run(command, timeout=20).returncode == 7


def test_exit_code_survives_a_stop(folder: Path) -> None:
    code = (
        "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(3)); print('ready', flush=True);time.sleep(60)"
    )
    tree = start_tree([sys.executable, "-c", code], name="one", log_path=folder / "one.log")
    wait_until(lambda: tree.last_lines() == "ready")
    assert tree.poll() is None
    assert tree.stop() == 3


def test_stop_ends_the_whole_tree(folder: Path) -> None:
    tree, ids = family(folder)
    assert tree.stop() == 128 + signal.SIGTERM
    assert not any(map(alive, ids))


def test_leftovers_end_with_the_command(folder: Path) -> None:
    tree, (command, young) = family(folder)
    os.kill(command, signal.SIGKILL)
    assert tree.wait(30) == 128 + signal.SIGKILL
    assert not alive(young)


def test_a_killed_guardian_takes_its_tree_along(folder: Path) -> None:
    tree, ids = family(folder)
    os.kill(tree.pid, signal.SIGKILL)
    assert tree.wait(30) == 128 + signal.SIGKILL
    wait_until(lambda: not any(map(alive, ids)))


def test_a_killed_guardian_without_an_owner_is_swept_up(folder: Path) -> None:
    tree, (command, young) = family(folder)
    os.kill(tree.pid, signal.SIGKILL)
    wait_until(lambda: not alive(command))
    assert stray_processes(folder) == {young: "family"}
    assert stray_processes(folder.with_name("another")) == {}
    assert sweep_orphans(folder, "another tree") == []
    assert sweep_orphans(folder) == ["family"]
    assert not alive(young)


def test_the_next_tree_of_the_name_clears_the_place(folder: Path) -> None:
    tree, (_, young) = family(folder)
    os.kill(tree.pid, signal.SIGKILL)
    tree.popen.wait(30)
    again = start_tree([sys.executable, "-c", ""], name="family", log_path=folder / "again.log")
    assert not alive(young)
    assert again.wait(30) == 0


def test_living_trees_are_never_strays(folder: Path) -> None:
    tree, ids = family(folder)
    assert sweep_orphans(folder) == []
    assert all(map(alive, ids))
    tree.stop()


@pytest.mark.parametrize("keeps", [False, True])
def test_a_killed_owner(folder: Path, keeps: bool) -> None:
    """The tree ends with its owner, or outlives it where that was asked for."""
    code = f"""
import sys, time
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_processes import family
tree, ids = family(Path({str(folder)!r}), owner_pid_death_kills={not keeps})
print(tree.pid, *ids, flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        guardian, *ids = map(int, owner.stdout.readline().split())
        owner.kill()
    if keeps:
        time.sleep(1)
        assert all(map(alive, [guardian, *ids]))
        psutil.Process(guardian).terminate()
    wait_until(lambda: not any(map(alive, [guardian, *ids])))


def test_a_missing_command_is_told_in_the_log(folder: Path) -> None:
    tree = start_tree(["/no/such/program"], name="none", log_path=folder / "none.log")
    assert tree.wait(30) == 127
    assert "cannot start /no/such/program: No such file or directory" in tree.last_lines()


def test_a_log_that_cannot_be_written(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(AgentRLError, match="cannot write the log"):
        start_tree(["true"], name="none", log_path=tmp_path / "file" / "x.log")
