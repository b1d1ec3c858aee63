"""Package repositories: directories of RPM files that the booted /etc/yum.repos.d names.

Not dnf: there is no metadata, no mirror list, no HTTP. A ``baseurl`` is a directory's path or a file:// URL.
"""

from __future__ import annotations

import configparser
import urllib.parse
from dataclasses import dataclass
from pathlib import Path

from tests.stand.rpmostreed import rpm
from tests.stand.rpmostreed.errors import FAILED, MethodError, OperationFailed
from tests.stand.rpmostreed.rpm import Package

REPOS_FOLDER = Path("/etc/yum.repos.d")


@dataclass(frozen=True)
class Repository:
    """One section of a .repo file."""

    name: str
    description: str
    urls: tuple[str, ...]
    enabled: bool
    skip_if_unavailable: bool


def read(folder: Path = REPOS_FOLDER) -> list[Repository]:
    """All repositories, by file and section. Raises OperationFailed on a file that cannot be parsed."""
    found = []
    for path in sorted(folder.glob("*.repo")):
        parser = configparser.ConfigParser(interpolation=None, strict=False)
        try:
            parser.read_string(path.read_text())
        except (configparser.Error, UnicodeDecodeError) as error:
            raise OperationFailed(f"Loading repository configuration: {path}: {error}") from error
        for name in parser.sections():
            section = parser[name]
            found.append(
                Repository(
                    name,
                    section.get("name", name),
                    tuple(section.get("baseurl", "").replace(",", " ").split()),
                    _true(section.get("enabled", "1")),
                    _true(section.get("skip_if_unavailable", "0")),
                )
            )
    return found


def available(folder: Path = REPOS_FOLDER) -> list[Package]:
    """The packages of all enabled repositories. Raises OperationFailed where one is not there."""
    packages: list[Package] = []
    for repository in read(folder):
        if not repository.enabled:
            continue
        for url in repository.urls:
            place = _directory(repository.name, url)
            if place.is_dir():
                packages += rpm.query([str(path) for path in sorted(place.rglob("*.rpm"))], repository.name)
            elif not repository.skip_if_unavailable:
                raise OperationFailed(
                    f"Updating rpm-md repo '{repository.name}': cannot update repo '{repository.name}': Cannot "
                    f"download repomd.xml: Cannot download repodata/repomd.xml: All mirrors were tried; Last error: "
                    f"Curl error (37): Couldn't read a file:// file for file://{place}/repodata/repomd.xml "
                    f"[Couldn't open file {place}/repodata/repomd.xml]"
                )
    return packages


def modify(name: str, settings: dict[str, str], folder: Path = REPOS_FOLDER) -> None:
    """ModifyYumRepo: sets ``enabled`` of one repository. Raises OperationFailed."""
    if set(settings) != {"enabled"} or settings["enabled"] not in ("0", "1"):
        raise OperationFailed("Only 'enabled' is allowed to be changed, to 0 or 1")
    for path in sorted(folder.glob("*.repo")):
        lines = path.read_text().splitlines()
        if f"[{name}]" not in lines:
            continue
        start = lines.index(f"[{name}]") + 1
        end = next((index for index in range(start, len(lines)) if lines[index].startswith("[")), len(lines))
        section = [line for line in lines[start:end] if not line.replace(" ", "").startswith("enabled=")]
        path.write_text("\n".join([*lines[:start], f"enabled={settings['enabled']}", *section, *lines[end:]]) + "\n")
        return
    raise OperationFailed(f"Yum repo '{name}' not found")


def check_enabled(folder: Path = REPOS_FOLDER) -> None:
    """Raises OperationFailed where no repository is enabled, as RefreshMd does."""
    if not any(repository.enabled for repository in read(folder)):
        raise OperationFailed("No enabled repositories")


def _directory(name: str, url: str) -> Path:
    parsed = urllib.parse.urlsplit(url)
    if parsed.scheme not in ("", "file"):
        raise OperationFailed(f"Updating rpm-md repo '{name}': stand: {url} is not a local directory")
    return Path(urllib.parse.unquote(parsed.path))


def _true(text: str) -> bool:
    return text.strip().lower() in ("1", "true", "yes", "on")


def listing() -> list[Repository]:
    """ListRepos. Raises MethodError where a file cannot be parsed."""
    try:
        return read()
    except OperationFailed as error:
        raise MethodError(FAILED, str(error)) from error
