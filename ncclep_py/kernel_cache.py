"""Compiled code on disk, one file per entry, shared by every process of a user and safe without locks.

A file is a SHA-256 of what follows it, a line of JSON, and the code. It is written beside its place and renamed into it, so a reader sees all of
a file or none. A damaged file is the same as none.

The folder is bounded: whoever stores an entry deletes those used longest ago once all together are larger than ``NCCLEP_CACHE_MB`` (512 unless set;
0: no bound), but none used within the last hour, so that processes that start together do not delete each other's. Who looks for an entry that
was just deleted compiles it again.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import re
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

__all__ = ["KernelCache", "cache_bytes", "cache_folder", "digest_of"]

_LOG = logging.getLogger(__name__)
_FORMAT = "1"
DEFAULT_MB = 512
KEPT_SECONDS = 3600
"""An entry used since stays, whatever the bound; files left behind by processes that died while they wrote are deleted when they are older."""
USED_SECONDS = KEPT_SECONDS / 2
"""An entry's time of last use is this exact, so that reading mostly does not write."""
_OURS = re.compile(r".+-[0-9a-f]{32}\.bin|.+\.part")
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


def cache_bytes() -> int:
    """The bound on all entries together, from ``NCCLEP_CACHE_MB``; 0 for none."""
    named = os.environ.get("NCCLEP_CACHE_MB") or str(DEFAULT_MB)
    if not named.isdecimal():
        raise ValueError(f"NCCLEP_CACHE_MB must be a number of megabytes, or 0 for no bound, got {named!r}")
    return int(named) * 1_000_000


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
        self._use(path)
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
        self.trim()
        return True

    def trim(self) -> None:
        """Delete what was used longest ago until the rest is within the bound. Several processes may do so at once."""
        most, now, total = cache_bytes(), time.time(), 0
        entries = []
        for file in list(os.scandir(self.folder)):
            try:
                if not _OURS.fullmatch(file.name) or not file.is_file(follow_symlinks=False):
                    continue
                found = file.stat(follow_symlinks=False)
            except OSError:   # another process deleted it
                continue
            total += found.st_size
            entries.append((found.st_mtime, found.st_size, file.path))
        for used, size, path in sorted(entries):
            abandoned = path.endswith(".part") and now - used > KEPT_SECONDS
            if not abandoned and (not most or total <= most or now - used <= KEPT_SECONDS or path.endswith(".part")):
                continue
            with contextlib.suppress(OSError):
                os.unlink(path)
            total -= size

    @staticmethod
    def _use(path: Path) -> None:
        """Note that an entry was used, unless that is known well enough or the folder cannot be written."""
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > USED_SECONDS:
                os.utime(path)
