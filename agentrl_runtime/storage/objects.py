"""Content-addressed objects: bytes go in under their SHA-256 and are checked against it on the way out."""

import hashlib
import io
import os
import re
import tempfile
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import urllib3
from minio import Minio
from minio.error import S3Error

from agentrl_runtime.errors import AgentRLError

_CHUNK = 1 << 20
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")


def sha256_of_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class ObjectStore:
    """A bucket of immutable objects named by the SHA-256 of their bytes; all calls block.

    `url` is `minio://key:secret@host:port/bucket?secure=false`.
    """

    def __init__(self, url: str) -> None:
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            raise AgentRLError(
                "the object store's URL has no valid port", mend="use minio://key:secret@host:port/bucket?secure=false"
            ) from None
        if not parts.hostname or not parts.username or not parts.password or len(parts.path) < 2:
            raise AgentRLError(
                "the object store's URL lacks its host, key, secret or bucket",
                mend="use minio://key:secret@host:port/bucket?secure=false",
            )
        if not _BUCKET.fullmatch(parts.path.strip("/")):
            raise AgentRLError(
                f"the object store's URL names the bucket {parts.path.strip('/')!r:.100}",
                mend="use 3 to 63 lower-case letters, digits, dots and hyphens, a letter or digit at both ends",
            )
        secure = parse_qs(parts.query).get("secure", [""])[0].lower() in {"1", "true", "yes"}
        self.address = f"{parts.hostname}:{port}" if port else parts.hostname
        self.bucket = parts.path.strip("/")
        self._client = Minio(
            self.address,
            access_key=unquote(parts.username),
            secret_key=unquote(parts.password),
            secure=secure,
            region="us-east-1",
            http_client=urllib3.PoolManager(
                timeout=urllib3.Timeout(connect=5, read=60),
                maxsize=16,
                retries=urllib3.Retry(total=5, backoff_factor=0.2, status_forcelist=[500, 502, 503, 504]),
            ),
        )

    @staticmethod
    def key(digest: str) -> str:
        return f"sha256/{digest[:2]}/{digest}"

    def ensure_bucket(self) -> None:
        try:
            if not self._client.bucket_exists(self.bucket):
                self._client.make_bucket(self.bucket)
        except (S3Error, urllib3.exceptions.HTTPError, OSError) as error:
            raise self._problem(error) from None

    def check_writable(self) -> None:
        """Put one small object; AgentRLError says why it cannot be stored."""
        try:
            self._client.put_object(self.bucket, "probe", io.BytesIO(b"ok"), 2)
        except (S3Error, urllib3.exceptions.HTTPError, OSError) as error:
            raise self._problem(error) from None

    def put(self, data: bytes) -> str:
        """Store bytes, return their SHA-256; nothing is sent when they are there already."""
        digest = hashlib.sha256(data).hexdigest()
        try:
            if not self.has(digest):
                self._client.put_object(self.bucket, self.key(digest), io.BytesIO(data), len(data))
        except (S3Error, urllib3.exceptions.HTTPError, OSError) as error:
            raise self._problem(error) from None
        return digest

    def put_file(self, path: Path) -> tuple[str, int]:
        """Store a file, return its SHA-256 and its size in bytes."""
        digest, size = sha256_of_file(path), path.stat().st_size
        try:
            if not self.has(digest):
                self._client.fput_object(self.bucket, self.key(digest), str(path), num_parallel_uploads=3)
        except (S3Error, urllib3.exceptions.HTTPError) as error:
            raise self._problem(error) from None
        return digest, size

    def has(self, digest: str) -> bool:
        try:
            self._client.stat_object(self.bucket, self.key(digest))
        except S3Error as error:
            if error.code in {"NoSuchKey", "NoSuchObject"}:
                return False
            raise
        return True

    def get(self, digest: str) -> bytes:
        """The bytes of this SHA-256; AgentRLError when they are missing or not what was stored."""
        try:
            response = self._client.get_object(self.bucket, self.key(digest))
            try:
                data: bytes = response.read()
            finally:
                response.close()
                response.release_conn()
        except (S3Error, urllib3.exceptions.HTTPError, OSError) as error:
            raise self._problem(error, digest) from None
        if hashlib.sha256(data).hexdigest() != digest:
            raise self._corrupt(digest)
        return data

    def get_file(self, digest: str, path: Path) -> None:
        """Write the object to `path`, which appears only when whole and checked."""
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        hasher = hashlib.sha256()
        try:
            with os.fdopen(handle, "wb") as file:
                response = self._client.get_object(self.bucket, self.key(digest))
                try:
                    for chunk in response.stream(_CHUNK):
                        hasher.update(chunk)
                        file.write(chunk)
                finally:
                    response.close()
                    response.release_conn()
            if hasher.hexdigest() != digest:
                raise self._corrupt(digest)
            Path(name).replace(path)
        except (S3Error, urllib3.exceptions.HTTPError) as error:
            raise self._problem(error, digest) from None
        finally:
            Path(name).unlink(missing_ok=True)

    def _corrupt(self, digest: str) -> AgentRLError:
        return AgentRLError(
            f"object {digest} in bucket {self.bucket} does not have the bytes it was stored with",
            mend="restore it from a replica or a backup; nothing was read from it",
        )

    def _problem(self, error: Any, digest: str = "") -> AgentRLError:
        if isinstance(error, S3Error) and error.code in {
            "AccessDenied",
            "InvalidAccessKeyId",
            "SignatureDoesNotMatch",
        }:
            return AgentRLError(f"object store at {self.address} refused the key", mend="check AGENTRL_S3_URL")
        if isinstance(error, S3Error) and error.code in {"NoSuchKey", "NoSuchObject"}:
            return AgentRLError(
                f"object {digest} is not in bucket {self.bucket} at {self.address}",
                mend="check that the object store belongs to this database",
            )
        reason = error.code if isinstance(error, S3Error) else f"{type(error).__name__}"
        return AgentRLError(
            f"object store at {self.address} cannot be used: {reason}",
            mend="run `agentrl up`, or check AGENTRL_S3_URL; `agentrl doctor` tells more",
        )
