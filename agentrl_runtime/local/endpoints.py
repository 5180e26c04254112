"""Where the two stores are: the environment first, else the embedded services."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl_runtime.errors import AgentRLError


@dataclass(frozen=True)
class Endpoints:
    """Connection strings of MongoDB and the object store; both carry passwords."""

    mongo_uri: str
    s3_url: str

    def __repr__(self) -> str:
        return f"Endpoints(mongo={public_address(self.mongo_uri)}, s3={public_address(self.s3_url)})"


def public_address(url: str) -> str:
    """The URL's host, port and path, without user and password."""
    return url.split("://", 1)[-1].rsplit("@", 1)[-1].split("?", 1)[0]


def home() -> Path:
    """The folder of everything local: services, caches, logs (AGENTRL_HOME, default ./.agentrl)."""
    return Path(os.environ.get("AGENTRL_HOME") or ".agentrl").absolute()


def state_file(folder: Path) -> Path:
    return folder / "services.json"


def read_state(folder: Path) -> dict[str, Any]:
    """What `agentrl up` recorded; empty when it was never run here. Raises AgentRLError when it is damaged."""
    path = state_file(folder)
    try:
        state: Any = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise AgentRLError(
            f"{path} cannot be read: {error.strerror}", mend="set AGENTRL_HOME to a folder of your own"
        ) from None
    except ValueError:
        state = None
    if not isinstance(state, dict) or not all(map(_is_service, state.values())):
        raise AgentRLError(
            f"{path} is damaged",
            mend="run `agentrl down`, move the file away, then `agentrl up`: it makes new keys and keeps the data",
        )
    return dict(state)


def _is_service(recorded: object) -> bool:
    """Whether it has the form in which `up` records a store, started or not."""
    if not isinstance(recorded, dict):
        return False
    started = isinstance(recorded.get("started"), int | float) if "pid" in recorded else True
    return started and isinstance(recorded.get("pid", 0), int) and isinstance(recorded.get("url", ""), str)


def resolve_endpoints() -> Endpoints:
    """Both connection strings, or AgentRLError when a store is neither named nor started."""
    state = read_state(home())
    mongo = os.environ.get("AGENTRL_MONGO_URI") or state.get("mongo", {}).get("url")
    s3 = os.environ.get("AGENTRL_S3_URL") or state.get("s3", {}).get("url")
    if not mongo or not s3:
        missing = "MongoDB" if not mongo else "the object store"
        raise AgentRLError(
            f"no address of {missing} is known",
            mend="run `agentrl up`, or set AGENTRL_MONGO_URI and AGENTRL_S3_URL",
        )
    return Endpoints(mongo_uri=mongo, s3_url=s3)
