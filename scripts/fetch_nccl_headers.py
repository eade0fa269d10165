"""Fetch NCCL's headers, for compiling the device functions against several releases.

Each release is downloaded as a wheel by pip, its include folder is kept as OUT/VERSION/include and the wheel is deleted.
A release that is already in OUT is left alone; one that is installed is copied without a download.

Run: python scripts/fetch_nccl_headers.py 2.30.7 2.31.2 --out ~/.cache/ncclep_py/nccl-headers
Prints the include folders joined by ':', the form of NCCLEP_TEST_NCCL_HEADERS.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PREFIX = "nvidia/nccl/include/"


def from_installed(package: str, version: str, include: Path) -> bool:
    """Copy the headers of the installed wheel if it is this version."""
    try:
        found = importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    source = Path(str(found.locate_file(PREFIX)))
    if found.version != version or not (source / "nccl.h").is_file():
        return False
    shutil.copytree(source, include)
    return True


def from_wheel(wheel: Path, include: Path) -> None:
    """Unpack the headers of a wheel into `include`."""
    with zipfile.ZipFile(wheel) as archive:
        members = [name for name in archive.namelist() if name.startswith(PREFIX) and not name.endswith("/")]
        if not members:
            raise RuntimeError(f"{wheel.name} holds no {PREFIX}")
        for name in members:
            target = include / name[len(PREFIX) :]
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(archive.read(name))


def download(package: str, version: str, folder: Path) -> Path:
    """The wheel of this version, downloaded by pip into `folder`; not through pip's cache, which would keep 300 MB."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir", "--only-binary=:all:", "-d", str(folder)]
    subprocess.run([*command, f"{package}=={version}"], check=True, stdout=sys.stderr)
    return next(folder.glob("*.whl"))


def fetch(package: str, version: str, out: Path) -> Path:
    """The include folder of this version under `out`, filled if need be; appears complete or not at all."""
    include = out / version / "include"
    if (include / "nccl.h").is_file():
        return include
    include.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out) as scratch:
        staged = Path(scratch) / "include"
        if not from_installed(package, version, staged):
            from_wheel(download(package, version, Path(scratch)), staged)
        os.rename(staged, include)
    return include


def main() -> None:
    """Fetch the versions named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="+", metavar="VERSION")
    parser.add_argument("--out", type=Path, required=True, help="folder that receives VERSION/include")
    parser.add_argument("--package", default="nvidia-nccl-cu12", help="wheel to take the headers from (default: %(default)s)")
    options = parser.parse_args()
    out = options.out.expanduser().resolve()
    print(":".join(str(fetch(options.package, version, out)) for version in options.versions))


if __name__ == "__main__":
    main()
