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
    """What `agentrl up` recorded; empty when it was never run here."""
    try:
        state: dict[str, Any] = json.loads(state_file(folder).read_text())
    except FileNotFoundError:
        return {}
    except ValueError:
        raise AgentRLError(
            f"{state_file(folder)} is damaged", mend="restore it from a copy: it holds the stores' keys"
        ) from None
    return state


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
