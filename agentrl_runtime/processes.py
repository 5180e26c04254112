"""Process trees that end whole: with their owner, on request, or when their root ends."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl_runtime.errors import AgentRLError

if TYPE_CHECKING:
    import psutil

#: Every process of a tree carries `AGENTRL_TREE=<AGENTRL_HOME>:<name>` in its environment.
_MARK = "AGENTRL_TREE"
_GUARD = Path(__file__).with_name("guard.py")


@dataclass
class ProcessTree:
    """A command under its guardian; `pid` is the guardian's."""

    name: str
    popen: "subprocess.Popen[bytes]"
    log_path: Path
    grace_s: float
    folder: Path

    @property
    def pid(self) -> int:
        return self.popen.pid

    def poll(self) -> int | None:
        """The command's exit code (128 + n when signal n ended it), or None while the tree runs."""
        return None if self.popen.poll() is None else self._ended()

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, as of `poll`; raises subprocess.TimeoutExpired."""
        self.popen.wait(timeout)
        return self._ended()

    def stop(self, grace_s: float | None = None) -> int:
        """TERM, grace, KILL for the whole tree; returns the command's exit code."""
        if self.popen.poll() is None:
            self.popen.send_signal(signal.SIGTERM)
        try:
            return self.wait((self.grace_s if grace_s is None else grace_s) + 5)
        except subprocess.TimeoutExpired:
            kill_tree(self.pid)
            return self.wait()

    def _ended(self) -> int:
        code = self.popen.returncode
        if code < 0:
            # The guardian itself was killed: the command died with it, but not what the command had started.
            sweep_orphans(self.folder, self.name)
        return 128 - code if code < 0 else code

    def last_lines(self, count: int = 15) -> str:
        return last_lines(self.log_path, count)


def last_lines(path: Path, count: int = 15) -> str:
    """The end of a log file, read from its last 64 KB."""
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 65536))
            return "\n".join(file.read().decode(errors="replace").splitlines()[-count:])
    except FileNotFoundError:
        return ""


def start_tree(
    argv: Sequence[str],
    *,
    name: str,
    log_path: Path,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    grace_s: float = 20.0,
    owner_pid_death_kills: bool = True,
) -> ProcessTree:
    """Start `argv` under a guardian, output appended to `log_path`.

    The tree ends when this process dies, unless `owner_pid_death_kills` is false: then it outlives it.
    `env` replaces the environment. What an earlier tree of this name left behind, its guardian killed, is
    killed first: it would work against the new one. Raises AgentRLError when the log cannot be written.
    """
    environment = os.environ if env is None else env
    folder = Path(environment.get("AGENTRL_HOME") or ".agentrl").absolute()
    sweep_orphans(folder, name)
    try:
        log_path.parent.mkdir(parents=True, exist_ok=True)
        log = log_path.open("ab")
    except OSError as error:
        raise AgentRLError(f"cannot write the log {log_path}: {error.strerror}", mend="check the folder") from None
    guard = [sys.executable, "-I", "-S", str(_GUARD), "--grace", str(grace_s), "--parent", str(os.getpid())]
    if not owner_pid_death_kills:
        guard.append("--keep-without-parent")
    with log:
        popen = subprocess.Popen(
            [*guard, "--", *argv],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**environment, _MARK: f"{folder}:{name}"},
            cwd=cwd,
            start_new_session=True,
        )
    return ProcessTree(name, popen, log_path, grace_s, folder)


def kill_tree(pid: int) -> None:
    """KILL a process and everything below it."""
    import psutil

    try:
        root = psutil.Process(pid)
        victims = [*root.children(recursive=True), root]
    except psutil.NoSuchProcess:
        return
    for victim in victims:
        try:
            victim.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(victims, timeout=10)


def started_at(pid: int) -> float | None:
    """Seconds from boot to when a live process began (it tells a reused pid from the old one), or None.

    Counted from boot because the wall clock may be set while the process runs.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] == "Z" else int(fields[19]) / os.sysconf("SC_CLK_TCK")


def guardians(folder: Path, name: str) -> list[int]:
    """Process ids of the live guardians of this home's trees of that name."""
    return [process.pid for process, tree in _marked(folder) if tree == name and _is_guardian(process)]


def stray_processes(folder: Path) -> dict[int, str]:
    """Processes of this home's trees whose guardian is dead: pid -> tree name."""
    import psutil

    strays: dict[int, str] = {}
    for process, name in _marked(folder):
        try:
            guarded = any(_is_guardian(item) for item in [process, *process.parents()])
            if not guarded and process.status() != psutil.STATUS_ZOMBIE:
                strays[process.pid] = name
        except psutil.Error:
            continue
    strays.pop(os.getpid(), None)
    return strays


def sweep_orphans(folder: Path, only: str | None = None) -> list[str]:
    """KILL what dead guardians left behind (of the tree named `only`); returns the trees' names.

    Raises AgentRLError when a process survives KILL for ten seconds.
    """
    swept: set[str] = set()
    for _ in range(100):
        strays = {pid: name for pid, name in stray_processes(folder).items() if only in (None, name)}
        if not strays:
            return sorted(swept)
        for pid, name in strays.items():
            swept.add(name)
            kill_tree(pid)
        time.sleep(0.1)
    raise AgentRLError(f"processes {', '.join(map(str, strays))} cannot be killed", mend="end them as their owner")


def _marked(folder: Path) -> "Iterator[tuple[psutil.Process, str]]":
    """Every process of this home's trees with the name of its tree."""
    import psutil

    prefix = f"{folder}:"
    for process in psutil.process_iter():
        try:
            mark = process.environ().get(_MARK, "")
        except (psutil.Error, OSError):
            continue
        if mark.startswith(prefix):
            yield process, mark.removeprefix(prefix)


def _is_guardian(process: "psutil.Process") -> bool:
    import psutil

    try:
        # By name: a guardian of another checkout that shares the home counts too.
        command = process.cmdline()
        named = "--parent" in command and any(Path(word).name == _GUARD.name for word in command[:4])
        return named and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
