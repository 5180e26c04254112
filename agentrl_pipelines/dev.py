"""The embedded stores and Dagster together, for as long as a command runs."""

import contextlib
import fcntl
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

from agentrl_pipelines.server import DagsterServer
from agentrl_runtime.errors import AgentRLError
from agentrl_runtime.local.endpoints import home
from agentrl_runtime.local.services import down, status, up
from agentrl_runtime.processes import sweep_orphans

Say = Callable[[str], None]

#: How often the stores and Dagster are looked after.
_CARE_S = 5.0


@contextlib.contextmanager
def terminated_as_interrupt() -> Iterator[None]:
    """SIGTERM ends the command as Ctrl-C does: by KeyboardInterrupt, so that everything is stopped."""

    def interrupt(number: int, _: object) -> NoReturn:
        raise KeyboardInterrupt(signal.Signals(number).name)

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _only_one(folder: Path) -> Iterator[None]:
    """One Dagster for a home: two daemons would start every loop twice."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (folder / "dagster.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise AgentRLError(
                f"`agentrl dev` or `agentrl demo` runs already on {folder}",
                mend="stop it, or set AGENTRL_HOME to another folder",
            ) from None
        yield


class House:
    """Stores and Dagster; `look_after` starts again what has died."""

    def __init__(self, folder: Path, dagster: DagsterServer, say: Say) -> None:
        self.folder, self.dagster = folder, dagster
        self._say = say
        self._looked = time.monotonic()

    def look_after(self, *, now: bool = False) -> None:
        if not now and time.monotonic() - self._looked < _CARE_S:
            return
        dead = [service.name for service in status(self.folder) if service.embedded and not service.ok]
        if dead:
            self._say(f"{' and '.join(dead)} went away; starting again")
            up(self.folder)
        for name in self.dagster.restart_dead():
            self._say(f"Dagster's {name} had ended; started again")
        self._looked = time.monotonic()


@contextlib.contextmanager
def open_house(say: Say, *, port: int | None = None) -> Iterator[House]:
    """Start the stores and Dagster, and stop all of it on the way out; leftovers of a killed command first."""
    folder = home()
    os.environ["AGENTRL_HOME"] = str(folder)
    with _only_one(folder):
        swept = sweep_orphans(folder)
        if swept:
            say(f"ended what a killed command had left behind: {', '.join(swept)}")
        try:
            up(folder)
            with DagsterServer(folder, port=port) as dagster:
                try:
                    yield House(folder, dagster, say)
                finally:
                    say("stopping …")
        finally:
            down(folder)


def stay(house: House) -> NoReturn:
    """Look after the house until KeyboardInterrupt."""
    while True:
        time.sleep(1.0)
        house.look_after()


def run_dev(port: int | None) -> int:
    def say(text: str) -> None:
        print(text, flush=True)

    with terminated_as_interrupt():
        try:
            say("starting the stores and Dagster …")
            with open_house(say, port=port) as house:
                say(f"UI: {house.dagster.graph}   (Ctrl-C stops everything)")
                stay(house)
        except KeyboardInterrupt:
            say("stopped")
    return 0
