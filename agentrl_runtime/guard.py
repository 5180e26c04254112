"""The guardian of one process tree: `python guard.py --grace S [--keep-without-parent] -- COMMAND...`

It runs the command, adopts whatever the command's children leave behind, and ends the whole tree (TERM,
grace, KILL) when it is told to, when its parent dies, or when the command ends. It imports nothing but the
standard library, so that it starts in milliseconds.
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
from types import FrameType

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def descendants(root: int) -> list[int]:
    """Process ids of everything below `root`, read from /proc."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError, ValueError):
            fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            if fields[0] != "Z":
                parents.setdefault(int(fields[1]), []).append(int(entry.name))
    found: list[int] = []
    waiting = [root]
    while waiting:
        for child in parents.get(waiting.pop(), []):
            found.append(child)
            waiting.append(child)
    return found


def _signal_all(pids: list[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def end_tree(grace: float) -> None:
    """TERM to every descendant of this process, then KILL to what is left after `grace` seconds."""
    _signal_all(descendants(os.getpid()), signal.SIGTERM)
    deadline = time.monotonic() + grace
    while time.monotonic() < deadline:
        _reap()
        if not descendants(os.getpid()):
            return
        time.sleep(0.05)
    while left := descendants(os.getpid()):
        _signal_all(left, signal.SIGKILL)
        time.sleep(0.05)
        _reap()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--grace", type=float, default=20.0)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--keep-without-parent", action="store_true")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    command = options.command[1:] if options.command[:1] == ["--"] else options.command

    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    asked: list[int] = []

    def ask(number: int, _frame: FrameType | None) -> None:
        asked.append(number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, ask)

    def child_setup() -> None:
        # The command dies with its guardian even when the guardian is killed outright.
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        for default in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(default, signal.SIG_DFL)

    try:
        child = subprocess.Popen(command, preexec_fn=child_setup)
    except OSError as error:
        print(f"cannot start {command[0]}: {error.strerror}", file=sys.stderr)
        return 127
    # The parent is polled, not only signalled: PDEATHSIG fires when the *thread* that started us ends,
    # which happens in every thread pool.
    orphaned = False
    while child.poll() is None and not asked and not orphaned:
        time.sleep(0.1)
        orphaned = not options.keep_without_parent and os.getppid() != options.parent
    code = child.returncode
    end_tree(options.grace)
    if code is None:
        code = child.poll()
    return 128 - code if code is not None and code < 0 else (code if code is not None else 143)


if __name__ == "__main__":
    sys.exit(main())
