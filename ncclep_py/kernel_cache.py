"""Compiled code on disk, one file per entry, shared by every process of a user and safe without locks.

A file is a SHA-256 of what follows it, a line of JSON, and the code. It is written beside its place and renamed into it, so a reader sees all of
a file or none. A damaged file is the same as none.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

__all__ = ["KernelCache", "cache_folder", "digest_of"]

_LOG = logging.getLogger(__name__)
_FORMAT = "1"
_PACKAGE = Path(__file__).parent
_unwritable: set[Path] = set()   # warned of


@functools.cache
def digest_of(*patterns: str) -> str:
    """SHA-256 over the package's files of some patterns, by their place in the package."""
    digest = hashlib.sha256()
    for path in sorted({p for pattern in patterns for p in _PACKAGE.glob(pattern) if p.is_file()}):
        digest.update(f"{path.relative_to(_PACKAGE)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


def cache_folder() -> Path:
    """``NCCLEP_CACHE_DIR``, else ``~/.cache/ncclep_py``."""
    named = os.environ.get("NCCLEP_CACHE_DIR")
    return Path(named) if named else Path(os.path.expanduser("~"), ".cache", "ncclep_py")


class KernelCache:
    """A folder of entries, named by what they are and by a digest of everything that decides their content."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or cache_folder()

    @staticmethod
    def key(parts: Mapping[str, str]) -> str:
        """Digest of everything that decides an entry's content."""
        return hashlib.sha256(json.dumps([_FORMAT, sorted(parts.items())]).encode()).hexdigest()

    def path(self, name: str, key: str) -> Path:
        """Where an entry is kept."""
        return self.folder / f"{name}-{key[:32]}.bin"

    def load(self, name: str, key: str) -> tuple[dict, bytes] | None:
        """(metadata, code) of an entry; None if there is none or it is damaged."""
        path = self.path(name, key)
        try:
            stored = path.read_bytes()
        except OSError:
            return None
        digest, body = stored[:64], stored[64:]
        line, separator, code = body.partition(b"\n")
        if hashlib.sha256(body).hexdigest().encode() != digest or not separator:
            _LOG.warning("%s is damaged; compiling again", path)
            return None
        found = json.loads(line)
        return (found["metadata"], code) if found["key"] == key else None

    @staticmethod
    def metadata(path: Path) -> dict | None:
        """Metadata of the entry in a file; None if it is damaged."""
        stored = path.read_bytes()
        line, separator, _ = stored[64:].partition(b"\n")
        whole = separator and hashlib.sha256(stored[64:]).hexdigest().encode() == stored[:64]
        return json.loads(line)["metadata"] if whole else None

    def store(self, name: str, key: str, metadata: dict, code: bytes) -> bool:
        """Keep an entry; False, after a warning, where the folder cannot be written."""
        body = json.dumps({"key": key, "metadata": metadata}).encode() + b"\n" + code
        part = None
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            number, part = tempfile.mkstemp(prefix=f"{name}-", suffix=".part", dir=self.folder)
            with os.fdopen(number, "wb") as file:
                file.write(hashlib.sha256(body).hexdigest().encode() + body)
            os.replace(part, self.path(name, key))
        except OSError as e:
            if self.folder not in _unwritable:
                _LOG.warning("kernels are compiled again in every process: cannot write %s (%s); let NCCLEP_CACHE_DIR name a folder that can be "
                             "written", self.folder, e.strerror or e)
            _unwritable.add(self.folder)
            if part is not None and os.path.exists(part):
                os.unlink(part)
            return False
        return True
