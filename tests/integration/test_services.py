"""The embedded stores: started once, owned, found again after every kind of death."""

import concurrent.futures
import contextlib
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pymongo
import pytest

from agentrl_runtime.errors import AgentRLError
from agentrl_runtime.local import services
from agentrl_runtime.local.endpoints import Endpoints, read_state
from agentrl_runtime.processes import guardians, started_at
from agentrl_runtime.storage import ObjectStore

_EXTERNAL = ("AGENTRL_MONGO_URI", "AGENTRL_S3_URL", "AGENTRL_MONGO_PORT", "AGENTRL_S3_PORT")


@pytest.fixture(autouse=True)
def nothing_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in _EXTERNAL:
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A home with stores of this module's own, which its tests kill and start again."""
    folder = tmp_path_factory.mktemp("own") / "home"
    with pytest.MonkeyPatch.context() as patch:
        for variable in _EXTERNAL:
            patch.delenv(variable, raising=False)
        services.up(folder)
        yield folder
        services.down(folder)


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "home"
    services.down(tmp_path / "home")


def database(endpoints: Endpoints) -> "contextlib.closing[pymongo.MongoClient[dict[str, Any]]]":
    return contextlib.closing(pymongo.MongoClient(endpoints.mongo_uri, serverSelectionTimeoutMS=5000))


def server_pid(folder: Path, name: str) -> int:
    """The server itself, below its guardian."""
    (server,) = psutil.Process(read_state(folder)[name]["pid"]).children()
    return server.pid


def agentrl(folder: Path, *arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "agentrl_runtime.cli", *arguments],
        env={**os.environ, "AGENTRL_HOME": str(folder), **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_up_again_starts_nothing(own: Path) -> None:
    before = read_state(own)
    endpoints = services.up(own)
    assert read_state(own) == before
    assert [item.ok for item in services.status(own)] == [True, True]
    assert "directConnection=true" in endpoints.mongo_uri
    assert "authSource=admin" in endpoints.mongo_uri


def test_the_state_is_for_its_owner_alone(own: Path) -> None:
    assert stat.S_IMODE(own.stat().st_mode) == 0o700
    assert stat.S_IMODE((own / "services.json").stat().st_mode) == 0o600
    endpoints = services.up(own)
    state = read_state(own)
    for secret in (state["mongo"]["password"], state["s3"]["secret"]):
        assert secret not in repr(endpoints)
        for item in services.status(own):
            assert secret not in repr(item)
        for log in (own / "logs").iterdir():
            assert secret not in log.read_text(errors="replace"), log.name
        for process in [psutil.Process(state[name]["pid"]) for name in ("mongo", "s3")]:
            for one in [process, *process.children(recursive=True)]:
                assert not any(secret in word for word in one.cmdline())


@pytest.mark.parametrize("victim", ["mongo", "s3"])
@pytest.mark.parametrize("whom", ["server", "guardian"])
def test_up_after_a_kill_restarts_the_dead_one_alone(own: Path, victim: str, whom: str) -> None:
    endpoints = services.up(own)
    digest = ObjectStore(endpoints.s3_url).put(f"kept {victim} {whom}".encode())
    with database(endpoints) as client:
        client["agentrl"]["kept"].replace_one({"_id": victim}, {"whom": whom}, upsert=True)
    before = read_state(own)

    os.kill(server_pid(own, victim) if whom == "server" else before[victim]["pid"], signal.SIGKILL)
    again = services.up(own)

    after = read_state(own)
    other = "s3" if victim == "mongo" else "mongo"
    assert after[other] == before[other]
    assert after[victim]["pid"] != before[victim]["pid"]
    # Whoever holds the old address finds the same store there.
    assert again == endpoints
    assert ObjectStore(again.s3_url).get(digest) == f"kept {victim} {whom}".encode()
    with database(again) as client:
        assert client["agentrl"]["kept"].find_one({"_id": victim}) == {"_id": victim, "whom": whom}


def test_a_reused_process_id_is_not_taken_for_the_server(own: Path) -> None:
    services.up(own)
    state = read_state(own)
    with subprocess.Popen(["sleep", "600"]) as bystander:
        try:
            state["s3"]["pid"] = bystander.pid
            (own / "services.json").write_text(json.dumps(state))
            assert [item.detail for item in services.status(own)] == ["answers", "not running"]
            services.up(own)
            assert [item.ok for item in services.status(own)] == [True, True]
            assert len(guardians(own, "service-s3")) == 1
            assert bystander.poll() is None
        finally:
            bystander.kill()


def test_the_database_wants_the_password(own: Path) -> None:
    endpoints = services.up(own)
    port = read_state(own)["mongo"]["port"]
    with (
        contextlib.closing(pymongo.MongoClient(f"mongodb://127.0.0.1:{port}/?directConnection=true")) as stranger,
        pytest.raises(pymongo.errors.OperationFailure),
    ):
        stranger["agentrl"]["kept"].find_one()
    assert ObjectStore(endpoints.s3_url).bucket == "agentrl"


def test_both_listen_on_loopback_only(own: Path) -> None:
    services.up(own)
    for name in ("mongo", "s3"):
        for connection in psutil.Process(server_pid(own, name)).net_connections("inet"):
            if connection.status == psutil.CONN_LISTEN:
                assert connection.laddr.ip in {"127.0.0.1", "::1"}, f"{name} listens on {connection.laddr}"


def test_two_at_once_start_one_of_each_and_down_ends_both(fresh: Path) -> None:
    with concurrent.futures.ThreadPoolExecutor() as pool:
        runs = list(pool.map(lambda _: agentrl(fresh, "up", "--json"), range(2)))
    assert [run.returncode for run in runs] == [0, 0], runs
    assert runs[0].stdout == runs[1].stdout
    assert all(len(guardians(fresh, f"service-{name}")) == 1 for name in ("mongo", "s3"))
    ids = [server_pid(fresh, name) for name in ("mongo", "s3")]
    assert json.loads(agentrl(fresh, "down", "--json").stdout) == {"stopped": ["s3", "mongo"]}
    assert [started_at(pid) for pid in ids] == [None, None]
    assert json.loads(agentrl(fresh, "down", "--json").stdout) == {"stopped": []}
    assert agentrl(fresh, "status", "--json").returncode == 1


def test_up_killed_halfway_is_made_good(fresh: Path) -> None:
    """Whatever a killed `up` had started is ended or taken over: one server has room on the data."""
    for delay in (0.6, 1.2, 2.0, 3.0):
        with subprocess.Popen(
            [sys.executable, "-m", "agentrl_runtime.cli", "up"],
            env={**os.environ, "AGENTRL_HOME": str(fresh)},
            stdout=subprocess.DEVNULL,
        ) as up:
            time.sleep(delay)
            up.kill()
    services.up(fresh)
    assert [item.ok for item in services.status(fresh)] == [True, True]
    assert all(len(guardians(fresh, f"service-{name}")) == 1 for name in ("mongo", "s3"))


def test_named_stores_are_used_and_nothing_is_started(own: Path, fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    endpoints = services.up(own)
    monkeypatch.setenv("AGENTRL_MONGO_URI", endpoints.mongo_uri)
    monkeypatch.setenv("AGENTRL_S3_URL", endpoints.s3_url)
    assert services.up(fresh) == endpoints
    assert read_state(fresh) == {}
    assert [(item.embedded, item.ok) for item in services.status(fresh)] == [(False, True), (False, True)]
    assert services.down(fresh) == []
    assert [item.ok for item in services.status(own)] == [True, True]


@pytest.mark.parametrize(
    ("variable", "value", "told"),
    [
        ("AGENTRL_MONGO_URI", "mongodb://127.0.0.1:1/agentrl", "MongoDB at 127.0.0.1:1/agentrl cannot be reached"),
        ("AGENTRL_MONGO_URI", "postgres://u:hidden@h/db", "AGENTRL_MONGO_URI is no MongoDB URI"),
        ("AGENTRL_MONGO_URI", "mongodb://u:hid/den@h/db", "AGENTRL_MONGO_URI is no MongoDB URI"),
        ("AGENTRL_S3_URL", "minio://key:hidden@127.0.0.1:1/agentrl", "object store at 127.0.0.1:1 cannot be used"),
        ("AGENTRL_S3_URL", "minio://127.0.0.1:1/agentrl", "lacks its host, key, secret or bucket"),
        ("AGENTRL_MONGO_PORT", "many", "AGENTRL_MONGO_PORT=many is no port number"),
        ("AGENTRL_S3_PORT", "70000", "AGENTRL_S3_PORT=70000 is no port number"),
    ],
)
def test_wrong_addresses_are_named(own: Path, fresh: Path, variable: str, value: str, told: str) -> None:
    endpoints = services.up(own)
    # The other store is a good one, so that nothing needs to be started before the error.
    other = {"AGENTRL_S3_URL": endpoints.s3_url} if "MONGO" in variable else {"AGENTRL_MONGO_URI": endpoints.mongo_uri}
    run = agentrl(fresh, "up", **other, **{variable: value})
    assert run.returncode == 1
    assert told in run.stderr
    assert "mend: " in run.stderr
    assert "Traceback" not in run.stderr
    assert "hid" not in run.stderr
    assert read_state(fresh) == {}


def test_wrong_keys_are_refused(own: Path, fresh: Path) -> None:
    state = read_state(own)
    mongo = state["mongo"]["url"].replace(state["mongo"]["password"], "wrong")
    run = agentrl(fresh, "up", "--json", AGENTRL_MONGO_URI=mongo, AGENTRL_S3_URL=state["s3"]["url"])
    assert run.returncode == 1
    assert "refused the user or password" in json.loads(run.stdout)["error"]
    s3 = state["s3"]["url"].replace(state["s3"]["secret"], "wrongwrongwrong")
    run = agentrl(fresh, "up", AGENTRL_MONGO_URI=state["mongo"]["url"], AGENTRL_S3_URL=s3)
    assert run.returncode == 1
    assert f"object store at {urlsplit(s3).netloc.rsplit('@')[-1]} refused the key" in run.stderr


def test_a_port_in_use_is_named(own: Path, fresh: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        run = agentrl(fresh, "up", AGENTRL_MONGO_URI=read_state(own)["mongo"]["url"], AGENTRL_S3_PORT=port)
    assert run.returncode == 1
    assert f"error: port {port} of AGENTRL_S3_PORT is in use" in run.stderr


def test_a_full_disk_is_told_before_the_start(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(1 << 40, 1 << 40, 5 << 20))
    with pytest.raises(AgentRLError, match=rf"only 5 MB are free at {fresh}") as caught:
        services.up(fresh)
    assert "AGENTRL_HOME" in caught.value.mend
    assert read_state(fresh) == {}


def test_a_server_that_dies_at_start_shows_its_log(own: Path, fresh: Path) -> None:
    services.up(own)
    fresh.mkdir()
    (fresh / "mongo").symlink_to(own / "mongo")  # the data of a running server
    with pytest.raises(AgentRLError, match="ended at start") as caught:
        services.up(fresh)
    assert len(caught.value.what.splitlines()) > 1
    assert str(fresh / "logs" / "mongo.log") in caught.value.mend


def test_a_home_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    run = agentrl(tmp_path / "file" / "home", "up")
    assert run.returncode == 1
    assert "AGENTRL_HOME" in run.stderr


@pytest.mark.parametrize("content", ["{half", "[]", "null", '{"mongo": 5}', '{"s3": {"pid": 1}}', '{"s3": {"url": 7}}'])
def test_a_damaged_state_is_not_overwritten(fresh: Path, content: str) -> None:
    fresh.mkdir(exist_ok=True)
    (fresh / "services.json").write_text(content)
    with pytest.raises(AgentRLError, match=r"services\.json is damaged"):
        services.up(fresh)
    with pytest.raises(AgentRLError, match=r"services\.json is damaged"):
        services.status(fresh)
    assert (fresh / "services.json").read_text() == content
    (fresh / "services.json").unlink()


def test_stores_whose_state_is_damaged_are_stopped_and_keep_their_data_under_new_keys(own: Path) -> None:
    def marks() -> Any:
        return pymongo.MongoClient(read_state(own)["mongo"]["url"]).get_default_database()["marks"]

    services.up(own)
    marks().insert_one({"_id": "before"})
    digest = ObjectStore(read_state(own)["s3"]["url"]).put(b"kept")
    old = read_state(own)
    (own / "services.json").write_text("{half")
    assert sorted(services.down(own)) == ["mongo", "s3"]
    (own / "services.json").unlink()
    services.up(own)
    new = read_state(own)
    assert new["mongo"]["password"] != old["mongo"]["password"]
    assert marks().find_one({"_id": "before"}) is not None
    assert ObjectStore(new["s3"]["url"]).get(digest) == b"kept"


def test_a_home_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for command in ("up", "down", "status"):
        run = agentrl(tmp_path / "file", command)
        assert run.returncode == 1 and "Traceback" not in run.stderr and "AGENTRL_HOME" in run.stderr


@pytest.mark.parametrize("bucket", ["b", "Upper", "a_b", "-ab"])
def test_a_bucket_name_that_s3_refuses(bucket: str) -> None:
    with pytest.raises(AgentRLError, match="names the bucket"):
        ObjectStore(f"minio://key:secret@127.0.0.1:1/{bucket}?secure=false")


def test_doctor_tells_what_is_wrong(own: Path, fresh: Path) -> None:
    services.up(own)
    good = {item["part"]: item["level"] for item in json.loads(agentrl(own, "doctor", "--json").stdout)}
    assert good["mongo"] == good["s3"] == good["home"] == good["processes"] == "ok"
    bad = agentrl(fresh, "doctor")
    assert bad.returncode == 1
    assert "FAIL  mongo" in bad.stdout
    assert "mend: " in bad.stdout
