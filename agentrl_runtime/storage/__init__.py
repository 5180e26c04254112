"""The object store."""

from agentrl_runtime.storage.objects import ObjectStore, sha256_of_file

__all__ = ["ObjectStore", "sha256_of_file"]
