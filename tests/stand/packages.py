"""Small real RPM files for layering and for extensions images, built by rpmbuild and cached by their content."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from tests.stand.images import File

RPMBUILD_TIMEOUT = 60.0


@dataclass(frozen=True)
class Package:
    """A noarch package; `files` by absolute path. `requires` and `provides` are as in a spec file."""

    name: str
    version: str = "1.0"
    release: str = "1"
    files: Mapping[str, File] = field(default_factory=lambda: MappingProxyType({}))
    requires: Sequence[str] = ()
    provides: Sequence[str] = ()

    @property
    def nevra(self) -> str:
        return f"{self.name}-{self.version}-{self.release}.noarch"

    @property
    def key(self) -> str:
        """Identity of the content, for the cache."""
        text = repr((self.nevra, tuple(self.requires), tuple(self.provides), sorted(self.files.items())))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def build(package: Package, cache: Path) -> Path:
    """The RPM file, named NEVRA.rpm, in a folder of `cache` of its own; built only when it is not there.

    Raises subprocess.CalledProcessError with rpmbuild's own words in stderr.
    """
    done = cache / package.key / f"{package.nevra}.rpm"
    if done.exists():
        return done
    done.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="stand-rpm-") as scratch:
        top = Path(scratch)
        _write_sources(package, top)
        argv = ["rpmbuild", "-bb", "--quiet", "--define", f"_topdir {top}", "--target", "noarch", str(top / "it.spec")]
        environment = {**os.environ, "SOURCE_DATE_EPOCH": "1704067200", "LC_ALL": "C", "HOME": scratch}
        subprocess.run(
            argv,
            check=True,
            timeout=RPMBUILD_TIMEOUT,
            capture_output=True,
            text=True,
            env=environment,
            stdin=subprocess.DEVNULL,
        )
        built = top / "RPMS" / "noarch" / done.name
        part = done.with_suffix(f".{os.getpid()}.part")
        shutil.copyfile(built, part)
        part.replace(done)
    return done


def repository(packages: Sequence[Package], folder: Path, cache: Path) -> Path:
    """A directory of RPM files, as the stand-in rpm-ostreed takes for a repository (it reads no repodata)."""
    folder.mkdir(parents=True, exist_ok=True)
    for package in packages:
        built = build(package, cache)
        shutil.copyfile(built, folder / built.name)
    return folder


def _write_sources(package: Package, top: Path) -> None:
    sources = top / "SOURCES"
    sources.mkdir()
    install, listed = [], []
    for number, (path, entry) in enumerate(sorted(package.files.items())):
        (sources / str(number)).write_bytes(entry.content)
        install.append(f"install -D -m {entry.mode:04o} %{{_sourcedir}}/{number} '%{{buildroot}}{path}'")
        listed.append(f'%attr({entry.mode:04o}, {entry.uid}, {entry.gid}) "{path}"')
    (top / "it.spec").write_text(
        _SPEC.format(
            name=package.name,
            version=package.version,
            release=package.release,
            relations="\n".join(
                [f"Requires: {one}" for one in package.requires] + [f"Provides: {one}" for one in package.provides]
            ),
            install="\n".join(install),
            files="\n".join(listed),
        )
    )


# No debug packages, no scripts that rewrite files, a payload that every rpm2cpio reads, and nothing of this machine.
_SPEC = """\
%global debug_package %{{nil}}
%global __os_install_post %{{nil}}
%global _binary_payload w6.gzdio
%global _buildhost stand
%global use_source_date_epoch_as_buildtime 1
%global clamp_mtime_to_source_date_epoch 1
AutoReqProv: no
Name: {name}
Version: {version}
Release: {release}
Summary: {name} for the stand
License: Apache-2.0
BuildArch: noarch
{relations}

%description
{name} for the stand.

%install
mkdir -p %{{buildroot}}
{install}

%files
{files}
"""
