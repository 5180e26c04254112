"""Policy versions as folders: find one by its reference and bring its files here."""

import asyncio
import contextlib
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from agentrl_runtime.databases import FileDigest, PolicyVersion, Run
from agentrl_runtime.errors import AgentRLError
from agentrl_runtime.ids import kind_of
from agentrl_runtime.local.endpoints import home
from agentrl_runtime.storage import ObjectStore, sha256_of_file

OPTIMIZER_FILE = "optimizer.safetensors"
STATE_FILE = "trainer_state.json"
#: Only a trainer that resumes needs these; a model folder does not hold them.
TRAINER_FILES = frozenset({OPTIMIZER_FILE, STATE_FILE})
#: Versions of one run whose folders are kept on this machine; the object store keeps all.
CACHED_VERSIONS = 4


@dataclass(frozen=True)
class ResolvedModel:
    """A folder that from_pretrained and an inference server can load; `version` when it is one of ours."""

    folder: Path
    version: PolicyVersion | None


async def latest_version(run_id: str) -> PolicyVersion | None:
    return await PolicyVersion.find({"run_id": run_id}).sort("-number").first_or_none()


async def find_version(reference: str) -> PolicyVersion | None:
    """The policy version that `RUN.vNNNNN` or `RUN.latest` names, None for anything else.

    Raises AgentRLError when the name has that form and there is no such version.
    """
    if reference.endswith(".latest") and kind_of(reference.removesuffix(".latest")) == "run":
        run_id = reference.removesuffix(".latest")
        found = await latest_version(run_id)
        if found is None:
            raise AgentRLError(f"run {run_id} has no policy version", mend="train it first: `agentrl train`")
        return found
    if kind_of(reference) != "version":
        return None
    found = await PolicyVersion.get(reference)
    if found is None:
        raise AgentRLError(
            f"there is no policy version {reference}", mend="`agentrl runs list` shows the latest of each run"
        )
    return found


async def resolve_model(reference: str, store: ObjectStore) -> ResolvedModel:
    """The model of a local folder, a policy version id, or `RUN.latest`.

    Raises AgentRLError when there is no such folder or version, or the folder has no config.json.
    """
    version = await find_version(reference)
    if version is not None:
        return ResolvedModel(await asyncio.to_thread(fetch_version, version, store), version)
    folder = Path(reference).expanduser()
    if not folder.is_dir():
        raise AgentRLError(
            f"model_name_or_path: {reference} is no folder and no policy version",
            mend="give a Hugging Face model folder, a policy version id such as demo-1.v00003, or RUN.latest",
        )
    if not (folder / "config.json").is_file():
        raise AgentRLError(
            f"model_name_or_path: folder {reference} has no config.json",
            mend="give the folder that save_pretrained wrote",
        )
    return ResolvedModel(folder.resolve(), None)


async def model_if_ready(reference: str, store: ObjectStore) -> ResolvedModel | None:
    """Like `resolve_model`, but None while the run of a `RUN.latest` goes on without its final version.

    Raises AgentRLError when that run does not exist, or failed.
    """
    run_id = reference.removesuffix(".latest")
    if run_id == reference or kind_of(run_id) != "run":
        return await resolve_model(reference, store)
    run = await Run.get(run_id)
    if run is None:
        raise AgentRLError(
            f"model_name_or_path: {reference}: there is no run {run_id}",
            mend="start that run first, or name a folder or a policy version",
        )
    if run.state == "failed":
        raise AgentRLError(
            f"model_name_or_path: {reference}: run {run_id} failed: {run.reason}",
            mend="mend and resume that run, or name one of its policy versions",
        )
    version = await latest_version(run_id)
    if run.state in {"running", "paused"} and (version is None or not version.final):
        return None
    return await resolve_model(reference, store)


def model_files(version: PolicyVersion) -> list[FileDigest]:
    """Weights, config and tokenizer files: what a server loads."""
    return [file for file in version.files if file.name not in TRAINER_FILES]


def version_folder(version_id: str) -> Path:
    """Where the files of a version are cached on this machine."""
    return home() / "cache" / "policies" / version_id


def fetch_version(version: PolicyVersion, store: ObjectStore, *, verify: bool = False) -> Path:
    """The folder with the version's weights, config and tokenizer files; blocks while it downloads.

    Bytes that are fetched are checked against their digests, and the folder appears only when it is whole.
    A folder that is there already is checked by file sizes, or by digests with `verify`.
    Raises AgentRLError naming the version and the file that is missing or damaged in the store.
    """
    folder = version_folder(version.id)
    if _is_whole(folder, model_files(version), verify):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{version.id}."))
    try:
        for file in model_files(version):
            fetch_file(version, file, store, work / file.name)
        install_folder(work, folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return folder


def fetch_file(version: PolicyVersion, file: FileDigest, store: ObjectStore, path: Path) -> None:
    """Download one file of a version. Raises AgentRLError naming both when its bytes are not right."""
    try:
        store.get_file(file.sha256, path)
    except AgentRLError as error:
        raise AgentRLError(f"policy version {version.id}: {file.name}: {error.what}", mend=error.mend) from None


def install_folder(work: Path, folder: Path) -> None:
    """Put the whole folder `work` at `folder` in one move; the move of another process counts as well."""
    while True:
        try:
            work.rename(folder)
            return
        except OSError:
            if not folder.exists():
                raise
        # What stands there is of another writer or damaged: `work` is checked, so it takes the place.
        aside = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}.old."))
        with contextlib.suppress(FileNotFoundError):  # another process moved it first
            folder.rename(aside / folder.name)
        shutil.rmtree(aside, ignore_errors=True)


def prune_cache(run_id: str, newest: int) -> None:
    """Remove this run's cached folders but for the newest few; the object store keeps every version."""
    folder = home() / "cache" / "policies"
    for path in folder.glob(f"{run_id}.v*"):
        number = path.name.removeprefix(f"{run_id}.v")
        if number.isdigit() and int(number) <= newest - CACHED_VERSIONS:
            shutil.rmtree(path, ignore_errors=True)


def _is_whole(folder: Path, files: list[FileDigest], verify: bool) -> bool:
    for file in files:
        path = folder / file.name
        if not path.is_file() or path.stat().st_size != file.size:
            return False
        if verify and sha256_of_file(path) != file.sha256:
            return False
    return folder.is_dir()
