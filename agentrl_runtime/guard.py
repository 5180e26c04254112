"""The guardian of one process tree: `python guard.py --parent PID [--grace S] [--keep-without-parent] -- COMMAND...`

It runs the command, adopts whatever the command's children leave behind, and ends the whole tree (TERM,
grace, KILL) when it is told to, when its parent dies, or when the command ends. It exits with the command's
code, 128 + n when signal n ended it. It imports nothing but the standard library, so that it starts in
milliseconds.
"""

import argparse
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_ENDINGS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
_LAST_THREADS_SECONDS = 10.0
_WATCHED = {signal.SIGCHLD, *_ENDINGS}


class Guardian:
    """Starts one command and outlives it and all that it started."""

    def __init__(self, command: list[str]) -> None:
        self.libc = ctypes.CDLL(None, use_errno=True)
        # Orphans of the tree, also those in sessions of their own, become our children.
        self.libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        # Blocked signals wait until sigtimedwait takes them: none is lost between two looks.
        signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
        self.own_pid = os.getpid()
        # Held for good: a Popen that is let go takes the exit code of a child that has already ended with it.
        self.popen = subprocess.Popen(command, preexec_fn=self._in_child)
        self.child = self.popen.pid
        self.code: int | None = None

    def _in_child(self) -> None:
        # The command dies with its guardian even when the guardian is killed outright.
        self.libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != self.own_pid:
            os._exit(128 + signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _WATCHED)

    def watch(self, parent: int | None) -> None:
        """Return when the command has ended, an ending signal has come, or `parent` has died."""
        # The parent is polled: PDEATHSIG would fire when the *thread* that started us ends, which happens in
        # every thread pool.
        while self.code is None and (parent is None or os.getppid() == parent):
            received = signal.sigtimedwait(_WATCHED, 0.2)
            self.reap()
            if received is not None and received.si_signo in _ENDINGS:
                return

    def reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid == self.child:
                    self.code = os.waitstatus_to_exitcode(status)

    def end_tree(self, grace: float) -> None:
        """TERM to everything below this process, then KILL to what is left after `grace` seconds."""
        _send(descendants(self.own_pid), signal.SIGTERM)
        deadline = time.monotonic() + grace
        while left := descendants(self.own_pid):
            if time.monotonic() >= deadline:
                _send(left, signal.SIGKILL)
            time.sleep(0.05)
            self.reap()
        # A command counts as dead when its first thread is, but gives its exit code only after its last one.
        deadline = time.monotonic() + _LAST_THREADS_SECONDS
        self.reap()
        while self.code is None and time.monotonic() < deadline:
            time.sleep(0.01)
            self.reap()


def descendants(root: int) -> list[int]:
    """Process ids of everything alive below `root`, read from /proc."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError, ValueError):
            fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            if fields[0] != "Z":
                children.setdefault(int(fields[1]), []).append(int(entry.name))
    found: list[int] = []
    waiting = [root]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


def _send(pids: list[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--grace", type=float, default=20.0)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--keep-without-parent", action="store_true")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    try:
        guardian = Guardian(command)
    except OSError as error:
        print(f"cannot start {command[0]}: {error.strerror}", file=sys.stderr)
        return 127
    guardian.watch(None if options.keep_without_parent else options.parent)
    guardian.end_tree(options.grace)
    code = guardian.code if guardian.code is not None else -signal.SIGKILL
    return 128 - code if code < 0 else code


if __name__ == "__main__":
    # Not sys.exit: nothing is left to clean up, and the interpreter must not wait for the child again.
    sys.stderr.flush()
    os._exit(main())
