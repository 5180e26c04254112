"""Beanie plumbing: the model registry and the connection."""

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar, cast

import beanie
from beanie import init_beanie
from pymongo import AsyncMongoClient
from pymongo.errors import BulkWriteError, ConfigurationError, OperationFailure, PyMongoError

from agentrl_runtime.errors import AgentRLError

if TYPE_CHECKING:

    class Document(beanie.Document):
        id: Any  # our ids are strings, which Beanie takes but does not declare

else:
    Document = beanie.Document

ModelT = TypeVar("ModelT", bound=type[Document])
DocumentT = TypeVar("DocumentT", bound=Document)
_DUPLICATE_KEY = 11000
_registry: dict[str, type[Document]] = {}


def now() -> datetime:
    """The client's clock, in UTC and cut to the millisecond that MongoDB keeps."""
    moment = datetime.now(UTC)
    return moment.replace(microsecond=moment.microsecond // 1000 * 1000)


def register_new_model(model: ModelT) -> ModelT:
    """Class decorator: makes a document class known to `init_databases`.

    Raises AgentRLError when another class of that name is registered already.
    """
    known = _registry.get(model.__name__)
    if known is not None and (known.__module__, known.__qualname__) != (model.__module__, model.__qualname__):
        raise AgentRLError(
            f"two document classes are called {model.__name__}: {known.__module__} and {model.__module__}",
            mend="rename one: the name is stored with each document",
        )
    _registry[model.__name__] = model
    return model


async def init_databases(mongo_uri: str) -> AsyncMongoClient:
    """Connect, create the indexes of every registered model, and return the client (close it when done).

    The database is the URI's path, `agentrl` when it has none. Raises AgentRLError when the server is
    unreachable or refuses the credentials; the password is in no message.
    """
    client: AsyncMongoClient = AsyncMongoClient(
        mongo_uri, tz_aware=True, serverSelectionTimeoutMS=8000, maxPoolSize=16, appname="agentrl", journal=True
    )
    address = mongo_uri.rsplit("@", 1)[-1].split("?", 1)[0].removeprefix("mongodb://")
    try:
        database = client.get_default_database("agentrl")
        await init_beanie(database=database, document_models=list(_registry.values()))
    except OperationFailure as error:
        await client.close()
        if error.code in {13, 18}:
            raise AgentRLError(
                f"MongoDB at {address} refused the user or password", mend="check AGENTRL_MONGO_URI"
            ) from None
        raise
    except (ConfigurationError, PyMongoError) as error:
        await client.close()
        reason = str(error).split(",", 1)[0]
        raise AgentRLError(
            f"MongoDB at {address} cannot be reached: {reason}",
            mend="run `agentrl up`, or check AGENTRL_MONGO_URI; `agentrl doctor` tells more",
        ) from None
    return client


async def find_documents(model: type[DocumentT], query: dict[str, Any]) -> list[DocumentT]:
    """The documents of a root class and its subclasses, each as its own class.

    `find(..., with_children=True)` would join the query to one on the class by `$and`, for which the embedded
    server uses no index. A root class's collection holds nothing else, so the query alone is enough.
    """
    from beanie.odm.utils.parsing import parse_obj

    found = model.get_pymongo_collection().find(query)
    return [cast(DocumentT, parse_obj(model, item)) async for item in found]


async def insert_new(model: type[DocumentT], documents: list[DocumentT]) -> int:
    """Insert those whose id is not there yet, in one round trip; returns how many were new."""
    if not documents:
        return 0
    try:
        await model.insert_many(documents, ordered=False)
    except BulkWriteError as error:
        return len(documents) - ignore_duplicates(error)
    return len(documents)


def ignore_duplicates(error: BulkWriteError) -> int:
    """Raise the error unless each of its problems is a document that is there already; returns how many are."""
    problems = error.details["writeErrors"]
    if any(item.get("code") != _DUPLICATE_KEY for item in problems):
        raise error
    return len(problems)
