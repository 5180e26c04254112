"""Process trees that end whole: with their owner, on request, or when their root ends."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from agentrl_runtime.errors import AgentRLError

#: Every process of a tree carries `AGENTRL_TREE=<guardian pid>:<its start time>:<folder>:<name>`.
_MARK = "AGENTRL_TREE"
_GUARD = Path(__file__).with_name("guard.py")


@dataclass
class ProcessTree:
    """A command under its guardian; `pid` is the guardian's."""

    name: str
    popen: "subprocess.Popen[bytes]"
    log_path: Path
    grace_s: float

    @property
    def pid(self) -> int:
        return self.popen.pid

    def poll(self) -> int | None:
        """The command's exit code (128 + n when signal n ended it), or None while the tree runs."""
        return self.popen.poll()

    def wait(self, timeout: float | None = None) -> int:
        return self.popen.wait(timeout)

    def stop(self, grace_s: float | None = None) -> int:
        """TERM, grace, KILL for the whole tree; returns the command's exit code."""
        if self.popen.poll() is None:
            self.popen.send_signal(signal.SIGTERM)
        try:
            return self.popen.wait((grace_s or self.grace_s) + 5)
        except subprocess.TimeoutExpired:
            kill_tree(self.pid)
            return self.popen.wait()

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
    `env` replaces the environment. Raises AgentRLError when the log folder cannot be written.
    """
    from agentrl_runtime.local.endpoints import home

    try:
        log_path.parent.mkdir(parents=True, exist_ok=True)
        log = log_path.open("ab")
    except OSError as error:
        raise AgentRLError(f"cannot write the log {log_path}: {error.strerror}", mend="check the folder") from None
    guard = [sys.executable, "-S", str(_GUARD), "--grace", str(grace_s), "--parent", str(os.getpid())]
    if not owner_pid_death_kills:
        guard.append("--keep-without-parent")
    marked = {**(os.environ if env is None else env), _MARK: f"{home()}:{name}"}
    with log:
        popen = subprocess.Popen(
            [*guard, "--", *argv],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=marked,
            cwd=cwd,
            start_new_session=True,
        )
    return ProcessTree(name=name, popen=popen, log_path=log_path, grace_s=grace_s)


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
    """When a live process began (it tells a reused pid from the old one), or None."""
    import psutil

    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.NoSuchProcess:
        return None


def stray_processes(folder: Path) -> dict[int, str]:
    """Processes of this home's trees whose guardian is dead: pid -> tree name."""
    import psutil

    prefix = f"{folder}:"
    marked: dict[int, tuple[str, psutil.Process]] = {}
    for process in psutil.process_iter():
        try:
            mark = process.environ().get(_MARK, "")
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
        if mark.startswith(prefix):
            marked[process.pid] = (mark.removeprefix(prefix), process)
    strays: dict[int, str] = {}
    for pid, (name, process) in marked.items():
        try:
            lineage = [process, *process.parents()]
            guarded = any(str(_GUARD) in item.cmdline() for item in lineage if item.pid in marked)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        if not guarded:
            strays[pid] = name
    return strays


def sweep_orphans(folder: Path) -> list[str]:
    """KILL what dead guardians left behind; returns the names of the trees, for the person to read."""
    swept: set[str] = set()
    for _ in range(50):
        strays = {pid: name for pid, name in stray_processes(folder).items() if pid != os.getpid()}
        if not strays:
            break
        for pid, name in strays.items():
            swept.add(name)
            kill_tree(pid)
        time.sleep(0.1)
    return sorted(swept)
