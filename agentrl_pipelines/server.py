"""Dagster as child processes: one code server that the web server and the daemon share.

`dagster dev` puts two more processes between us and these three; started directly they cost less CPU and
each is watched and stopped by itself.
"""

import os
import shutil
import socket
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import quote

from agentrl_runtime.errors import AgentRLError
from agentrl_runtime.processes import ProcessTree, start_tree

REPOSITORY = Path(__file__).resolve().parent.parent
GROUPS = ("loop", "serving")
_START_S = 120.0


def dagster_home(home: Path) -> Path:
    """AGENTRL_HOME/dagster with the repository's dagster.yaml in it."""
    folder = home / "dagster"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    shutil.copyfile(REPOSITORY / "dagster_home" / "dagster.yaml", folder / "dagster.yaml")
    return folder


def free_port(wanted: int | None = None) -> int:
    """`wanted`, or a port that the system picks; AgentRLError when `wanted` is taken."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", wanted or 0))
        except OSError:
            raise AgentRLError(f"port {wanted} is in use", mend="choose another with --port, or leave it out") from None
        return int(probe.getsockname()[1])


class DagsterServer:
    """Code server, web server and daemon on one DAGSTER_HOME; a context manager that stops all three."""

    def __init__(self, home: Path, *, port: int | None = None, daemon: bool = True) -> None:
        self.home = home.resolve()
        self.folder = dagster_home(self.home)
        self.port = free_port(port)
        self.url = f"http://127.0.0.1:{self.port}"
        self._daemon = daemon
        self._sockets = Path(tempfile.mkdtemp(prefix="agentrl-"))  # 0700: whoever reaches the socket runs code
        self._trees: dict[str, ProcessTree] = {}

    def __enter__(self) -> Self:
        try:
            self._start("code-server")
            self._await("code-server", self._code_server_answers)
            self._start("webserver")
            if self._daemon:
                self._start("daemon")
            self._await("webserver", self._webserver_answers)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def stop(self) -> None:
        # The daemon first, so that no loop is started again while the others go; the code server holds the runs.
        for name in ("daemon", "webserver", "code-server"):
            tree = self._trees.pop(name, None)
            if tree is not None:
                tree.stop()
        shutil.rmtree(self._sockets, ignore_errors=True)

    def restart_dead(self) -> list[str]:
        """Start again what has ended by itself; the names of those."""
        dead = [name for name, tree in self._trees.items() if tree.poll() is not None]
        for name in dead:
            self._trees[name].stop()
            if name == "code-server":
                self._socket.unlink(missing_ok=True)
            self._start(name)
        return dead

    @property
    def graph(self) -> str:
        """Address of the asset graph with its groups opened."""
        return f"{self.url}/asset-groups?expanded=" + quote(",".join(f"global@global:{name}" for name in GROUPS))

    def link(self, asset: str, partition: str | None = None) -> str:
        """Address of an asset's page in the UI, at a partition when one is given."""
        query = f"?view=partitions&partition={quote(partition)}" if partition else ""
        return f"{self.url}/assets/{asset}{query}"

    @property
    def _socket(self) -> Path:
        return self._sockets / "code.sock"

    def _log(self, name: str) -> Path:
        return self.home / "logs" / f"dagster-{name}.log"

    def _start(self, name: str) -> None:
        workspace = self.folder / "workspace.yaml"
        if name == "code-server":
            workspace.write_text(
                f"load_from:\n  - grpc_server:\n      socket: {self._socket}\n      location_name: agentrl\n"
            )
        module = [sys.executable, "-m"]
        arguments = {
            "code-server": [
                *module, "dagster", "api", "grpc", "--socket", str(self._socket), "--location-name", "agentrl",
                "--module-name", "agentrl_pipelines.definitions", "--use-python-environment-entry-point",
                "--log-level", "warning",
            ],
            "webserver": [
                *module, "dagster_webserver", "--host", "127.0.0.1", "--port", str(self.port),
                "--workspace", str(workspace), "--dagster-log-level", "warning", "--uvicorn-log-level", "warning",
            ],
            "daemon": [
                *module, "dagster._daemon", "run", "--workspace", str(workspace), "--log-level", "warning",
            ],
        }[name]  # fmt: skip
        environment = {
            **os.environ,
            "DAGSTER_HOME": str(self.folder),
            "AGENTRL_HOME": str(self.home),
            "PYTHONUNBUFFERED": "1",
        }
        # A loop op needs the trainer's grace and its own to stop its tree before ours ends.
        self._trees[name] = start_tree(
            arguments, name=f"dagster-{name}", log_path=self._log(name), env=environment, cwd=REPOSITORY, grace_s=60
        )

    def _await(self, name: str, ready: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _START_S
        while not ready():
            code = self._trees[name].poll()
            if code is not None:
                raise AgentRLError(
                    f"Dagster's {name} ended with exit code {code} while starting",
                    mend=f"read {self._log(name)}",
                )
            if time.monotonic() > deadline:
                raise AgentRLError(
                    f"Dagster's {name} did not answer within {_START_S:.0f} s", mend=f"read {self._log(name)}"
                )
            time.sleep(0.1)

    def _code_server_answers(self) -> bool:
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(str(self._socket))
            except OSError:
                return False
        return True

    def _webserver_answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/server_info", timeout=2) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False
