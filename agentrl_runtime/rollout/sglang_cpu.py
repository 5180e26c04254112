"""Starts SGLang on a machine without GPU; runs in SGLang's own environment, so it imports nothing of ours.

SGLang's wheels assume CUDA kernels and torchvision, which do not load beside a CPU build of torch. Nothing on
the CPU path calls them, so importing them gives modules whose functions raise when called. SGLang starts
its scheduler by spawning, and a spawned child runs this file's top level again, so the patches are there too.
"""

import os
import sys

# Python puts a script's folder first on its path, where our math.py and queue.py would hide the standard ones.
_FOLDER = os.path.dirname(os.path.realpath(__file__))  # noqa: PTH120 - pathlib would import what is hidden
sys.path[:] = [entry for entry in sys.path if os.path.realpath(entry or ".") != _FOLDER]

import importlib.abc  # noqa: E402
import importlib.machinery  # noqa: E402
from collections.abc import Sequence  # noqa: E402
from types import ModuleType  # noqa: E402
from typing import Any  # noqa: E402

os.environ["SGLANG_USE_CPU_ENGINE"] = "1"


class _Absent(ModuleType):
    """A module that imports; what it holds raises when called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*_args: Any, **_kwargs: Any) -> Any:
            raise RuntimeError(f"{self.__name__}.{name} needs a CUDA build")

        return missing


class _AbsentFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname == "sgl_kernel":
            return importlib.machinery.ModuleSpec(fullname, self)
        if fullname.split(".")[0] == "torchvision":
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Absent(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def _patch() -> None:
    from transformers.utils import is_torchvision_available

    # Asked before the finder is in place, so that transformers remembers it as absent.
    is_torchvision_available()
    sys.meta_path.insert(0, _AbsentFinder())


_patch()

if __name__ == "__main__":
    from sglang.srt.entrypoints.http_server import launch_server  # type: ignore[import-not-found]
    from sglang.srt.server_args import prepare_server_args  # type: ignore[import-not-found]

    launch_server(prepare_server_args(sys.argv[1:]))
