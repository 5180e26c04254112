"""scripts/setup.sh: what it asks pip for, resuming, repairing, and refusing; pip itself is a stand-in."""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_FAKE_PYTHON = r"""#!/bin/bash
case "$*" in
  *_base_executable*) [ ! -e too-old ] && echo "$0" ;;
  *"-m venv "*)
    folder=${@: -1}
    mkdir -p "$folder/bin" && cp "$0" "$folder/bin/python" && echo "#!$PWD/$folder/bin/python" >"$folder/bin/pip"
    echo "venv $folder" >>calls ;;
  *version_info*) echo "(3, 11)" ;;
  *"pip install"*)
    echo "${0%/bin/python} $*" >>calls
    if [ -e slow ]; then touch started; sleep 600; fi
    if [[ -e no-cpu-build && "$*" = *+cpu* ]]; then exit 1; fi
    if [ -e full ]; then echo "No space left on device"; exit 1; fi ;;
esac
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with a stand-in Python that writes the commands it is given to `calls`."""
    shutil.copytree(_ROOT / "scripts", tmp_path / "scripts")
    shutil.copy(_ROOT / "pyproject.toml", tmp_path)
    for name, text in (("python3", _FAKE_PYTHON), ("nvidia-smi", "#!/bin/bash\n[ -e gpu ]\n")):
        program = tmp_path / "programs" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(text)
        program.chmod(0o755)
    return tmp_path


def setup(checkout: Path, **environment: str) -> "subprocess.CompletedProcess[str]":
    with start(checkout, **environment) as process:
        out, _ = process.communicate(timeout=60)
    return subprocess.CompletedProcess(process.args, process.returncode, out)


def start(checkout: Path, **environment: str) -> "subprocess.Popen[str]":
    kept = {name: value for name, value in os.environ.items() if name not in {"PYTHON", "TORCH_INDEX_URL"}}
    return subprocess.Popen(
        [checkout / "scripts" / "setup.sh"],
        env={**kept, "PATH": f"{checkout / 'programs'}:{os.environ['PATH']}", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # A test run in the background may have been given an ignored SIGINT, which a shell cannot trap.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def calls(checkout: Path) -> list[str]:
    """What was asked for since the last look."""
    file = checkout / "calls"
    found = file.read_text().splitlines() if file.exists() else []
    file.unlink(missing_ok=True)
    return found


def test_builds_both_and_has_nothing_to_do_the_second_time(checkout: Path) -> None:
    first = setup(checkout)
    assert first.returncode == 0, first.stdout
    assert "[setup] trainer: done in" in first.stdout
    assert "[setup] sglang: done in" in first.stdout
    asked = calls(checkout)
    assert [line for line in asked if line.startswith("venv")] == ["venv .venv", "venv .venv-sglang"]
    assert any(line.startswith(".venv ") and line.endswith("torch==2.13.0+cpu") for line in asked)
    assert asked[-1].endswith("--no-deps sglang==0.5.23")
    assert setup(checkout).stdout == ""
    assert calls(checkout) == []


def test_torch_where_no_cpu_build_is_found(checkout: Path) -> None:
    (checkout / "no-cpu-build").touch()
    assert setup(checkout).returncode == 0
    assert sum(line.endswith("install --progress-bar off torch==2.13.0") for line in calls(checkout)) == 2


def test_torch_from_a_named_index(checkout: Path) -> None:
    assert setup(checkout, TORCH_INDEX_URL="https://index.invalid/simple").returncode == 0
    asked = calls(checkout)
    assert sum(line.endswith("torch==2.13.0 --index-url https://index.invalid/simple") for line in asked) == 2
    assert not any("+cpu" in line for line in asked)


def test_a_gpu_takes_sglang_as_it_is(checkout: Path) -> None:
    (checkout / "gpu").touch()
    assert setup(checkout).returncode == 0
    asked = calls(checkout)
    assert not any("+cpu" in line for line in asked)
    assert asked[-1].endswith("install --progress-bar off sglang==0.5.23")


@pytest.mark.parametrize(
    ("file", "rebuilt"),
    [("pyproject.toml", ".venv "), ("scripts/requirements-sglang-cpu.txt", ".venv-sglang ")],
)
def test_a_change_is_installed_where_it_belongs(checkout: Path, file: str, rebuilt: str) -> None:
    setup(checkout)
    calls(checkout)
    with (checkout / file).open("a") as text:
        text.write("\n# changed\n")
    assert setup(checkout).returncode == 0
    asked = calls(checkout)
    assert asked
    assert all(line.startswith(rebuilt) for line in asked)


def test_a_failure_shows_its_words_and_the_next_run_goes_on(checkout: Path) -> None:
    (checkout / "full").touch()
    failed = setup(checkout)
    assert failed.returncode == 1
    assert "No space left on device" in failed.stdout
    assert "error: the set-up of trainer failed" in failed.stdout
    assert "mend: " in failed.stdout
    calls(checkout)
    (checkout / "full").unlink()
    assert setup(checkout).returncode == 0
    assert "venv .venv" not in calls(checkout)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_nothing_running(checkout: Path, number: signal.Signals) -> None:
    (checkout / "slow").touch()
    with start(checkout) as process:
        while not (checkout / "started").exists():
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(number)
        process.communicate(timeout=30)
    assert process.returncode == 128 + number
    (checkout / "slow").unlink()
    # A child left behind would hold the lock, and this would wait for it.
    assert "another set-up" not in setup(checkout).stdout


def test_a_broken_environment_is_made_anew(checkout: Path) -> None:
    setup(checkout)
    calls(checkout)
    (checkout / ".venv" / "bin" / "python").unlink()
    assert setup(checkout).returncode == 0
    asked = calls(checkout)
    assert asked[0] == "venv .venv"
    assert not any(".venv-sglang" in line for line in asked)


def test_a_moved_checkout_is_built_anew(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    setup(checkout)
    moved = tmp_path_factory.mktemp("moved") / "checkout"
    shutil.copytree(checkout, moved)
    calls(moved)
    assert setup(moved).returncode == 0
    assert [line for line in calls(moved) if line.startswith("venv")] == ["venv .venv", "venv .venv-sglang"]


def test_two_at_once_build_once(checkout: Path) -> None:
    with start(checkout) as one, start(checkout) as two:
        outputs = [process.communicate(timeout=60)[0] for process in (one, two)]
    assert (one.returncode, two.returncode) == (0, 0)
    assert sum("another set-up is running here" in out for out in outputs) == 1
    assert calls(checkout).count("venv .venv") == 1


@pytest.mark.parametrize("environment", [{}, {"PYTHON": "/no/such/python"}])
def test_without_a_fitting_python(checkout: Path, environment: dict[str, str]) -> None:
    (checkout / "too-old").touch()
    # Only what the script itself needs, so that no real Python is found.
    (checkout / "tools").mkdir()
    for tool in ("bash", "dirname", "mkdir"):
        (checkout / "tools" / tool).symlink_to(shutil.which(tool) or f"/usr/bin/{tool}")
    result = setup(checkout, PATH=f"{checkout / 'programs'}:{checkout / 'tools'}", **environment)
    assert result.returncode == 1
    assert "is not Python 3.11 or newer" in result.stdout
    assert "mend: install one and name it: PYTHON=python3.11 make setup" in result.stdout
