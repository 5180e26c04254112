"""Checks of every part that the product stands on, each with its mend."""

import os
import shutil
import stat
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from agentrl_runtime.errors import AgentRLError
from agentrl_runtime.local.endpoints import state_file
from agentrl_runtime.local.services import status
from agentrl_runtime.processes import stray_processes

REPOSITORY = Path(__file__).parents[2]
SGLANG_VERSION = "0.5.23"


@dataclass
class Finding:
    part: str
    level: Literal["ok", "warn", "fail"]
    detail: str
    mend: str = ""


def examine(folder: Path) -> list[Finding]:
    return [
        _python(),
        *_packages(),
        _sglang(),
        _accelerator(),
        *_machine(folder),
        _modes(folder),
        *_stores(folder),
        _strays(folder),
    ]


def sglang_python() -> Path:
    """The interpreter of SGLang's environment (AGENTRL_SGLANG_PYTHON, default .venv-sglang)."""
    named = os.environ.get("AGENTRL_SGLANG_PYTHON")
    return Path(named) if named else REPOSITORY / ".venv-sglang" / "bin" / "python"


def _python() -> Finding:
    version = ".".join(str(part) for part in sys.version_info[:3])
    return Finding("python", "ok", version)


def _packages() -> list[Finding]:
    findings = []
    for line in metadata.requires("agentrl-pipelines") or []:
        if ";" in line or "==" not in line:
            continue
        name, wanted = line.split("==", 1)
        try:
            found = metadata.version(name).split("+")[0]
        except metadata.PackageNotFoundError:
            findings.append(Finding(name, "fail", "is not installed", "run `make setup`"))
            continue
        if found != wanted.strip():
            findings.append(Finding(name, "warn", f"is {found}, tested with {wanted}", "run `make setup`"))
    return findings or [Finding("packages", "ok", "all at the tested versions")]


def _sglang() -> Finding:
    python = sglang_python()
    if not python.exists():
        return Finding("sglang", "fail", f"{python} does not exist", "run `make setup`")
    # Read the folder's metadata: importing SGLang takes half a minute.
    found = sorted((python.parent.parent / "lib").glob("python3.*/site-packages/sglang-*.dist-info"))
    version = found[-1].name.removeprefix("sglang-").removesuffix(".dist-info") if found else "not installed"
    if version != SGLANG_VERSION:
        return Finding("sglang", "fail", f"{version} in {python.parent.parent}", "run `make setup`")
    return Finding("sglang", "ok", version)


def _accelerator() -> Finding:
    try:
        answer = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return Finding("accelerator", "ok", "no NVIDIA GPU: everything runs on the CPU")
    if answer.returncode != 0:
        return Finding("accelerator", "warn", "nvidia-smi fails", "check the driver; the CPU is used meanwhile")
    return Finding("accelerator", "ok", f"{len(answer.stdout.splitlines())} NVIDIA GPU")


def _machine(folder: Path) -> list[Finding]:
    import psutil

    place = folder if folder.exists() else folder.parent
    free, memory = shutil.disk_usage(place).free >> 30, psutil.virtual_memory().available >> 30
    disk = Finding("disk", "ok", f"{free} GB free at {place}")
    if free < 2:
        disk = Finding("disk", "fail", f"{free} GB free at {place}", "free some space or move AGENTRL_HOME")
    ram = Finding("memory", "ok", f"{memory} GB available")
    if memory < 6:
        ram = Finding("memory", "warn", f"{memory} GB available; the demo takes 6", "end other programs")
    return [disk, ram]


def _modes(folder: Path) -> Finding:
    if not folder.exists():
        return Finding("home", "ok", f"{folder} is made by `agentrl up`")
    for path, wanted in ((folder, 0o700), (state_file(folder), 0o600)):
        if path.exists() and stat.S_IMODE(path.stat().st_mode) != wanted:
            return Finding("home", "fail", f"{path} can be read by others", f"chmod {wanted:o} {path}")
    return Finding("home", "ok", str(folder))


def _stores(folder: Path) -> list[Finding]:
    try:
        found = status(folder)
    except AgentRLError as error:
        return [Finding("stores", "fail", error.what, error.mend)]
    return [
        Finding(
            item.name, "ok" if item.ok else "fail", f"{item.address} {item.detail}", "" if item.ok else "`agentrl up`"
        )
        for item in found
    ]


def _strays(folder: Path) -> Finding:
    strays = stray_processes(folder)
    if not strays:
        return Finding("processes", "ok", "no leftovers")
    named = ", ".join(f"{pid} ({name})" for pid, name in strays.items())
    return Finding("processes", "warn", f"left over by a killed run: {named}", f"kill -9 {' '.join(map(str, strays))}")
