"""The agent's own settings file: would the agent start with it, and know of the update, after a reboot?"""

from __future__ import annotations

import os
import posixpath
from pathlib import Path

from mcdaemon import settings, textfile
from mcdaemon.errors import Broken, Held, HoldReason, Irreconcilable, from_os_error
from mcdaemon.host.root import Root
from mcdaemon.machineconfig.model import MachineConfig
from mcdaemon.machineconfig.specs import ROOT, FileSpec
from mcdaemon.settings import Settings

_MOST_LINKS = 40
_OTHERS_WRITE = 0o022


def require_usable(root: Root, state_dir: str) -> None:
    """Raises Broken unless an agent that starts on `root` can use the settings there, and finds its state.

    `state_dir` is where the running agent keeps the record of the update.
    """
    found = _load(root)
    if found.state_dir != state_dir:
        raise Broken(
            f"cannot move the state of an update in flight: {root.path / settings.PATH[1:]} has the state_dir "
            f"{found.state_dir}, it is in {state_dir}",
            f"put state_dir back to {state_dir}, or restart mcdaemon while no update is in flight",
        )


def require_before_reboot(root: Root, state_dir: str, name: str) -> None:
    """Raises Held while the settings of the running `root`, which somebody may have changed since the agent started,
    would keep it from starting after the reboot into `name`, or after the way back."""
    try:
        require_usable(root, state_dir)
    except Broken as error:
        raise Held(
            HoldReason.SETTINGS,
            f"cannot reboot into {name}, the agent would not start again: {error.sentence}",
            error.hint or f"repair {settings.PATH}; the node works on meanwhile",
        ) from error


def _load(root: Root) -> Settings:
    """The settings of a root. Links are followed inside of it, and have to be root's like the file."""
    path = settings.PATH
    for _count in range(_MOST_LINKS):
        place = root.locate(path)
        try:
            status, is_link = place.lstat(), place.is_symlink()
            textfile.require_trusted(str(place), status)
            if not is_link:
                break
            path = posixpath.normpath(posixpath.join(posixpath.dirname(path), os.readlink(place)))
        except FileNotFoundError:
            break
        except OSError as error:
            raise from_os_error(error, "read the settings", place) from error
    else:
        raise Broken(f"cannot read the settings {root.path / settings.PATH[1:]}: too many links")
    if path == settings.PATH and not os.path.lexists(place):
        return Settings()
    return settings.load(str(place))


def check(config: MachineConfig, running: Settings, root: Root) -> None:
    """Settings that a config brings must not keep the agent from starting, from confirming, or from its configs.

    `root` is the running one. Raises Irreconcilable with the JSON pointer.
    """
    spec = next((spec for spec in config.files if spec.path == settings.PATH), None)
    if spec is None:
        return
    field = config.pointer("storage/files", "path", spec.path)
    _check_trust(config.name, spec, field)
    try:
        wanted = settings.parse(spec.content.decode("utf-8-sig"), settings.PATH)
    except UnicodeDecodeError as error:
        raise _refusal(config.name, field, "these settings cannot be used: they are not UTF-8 text") from error
    except Broken as error:
        raise _refusal(config.name, field, f"these settings cannot be used: {error.sentence}") from error
    if wanted.state_dir != running.state_dir:
        raise _refusal(
            config.name,
            field,
            f"cannot move the state of an update in flight from {running.state_dir} to {wanted.state_dir}",
            f"leave state_dir at {running.state_dir}",
        )
    source = wanted.source.directory.path
    if source != running.source.directory.path and not Path(root.locate(source)).is_dir():
        raise _refusal(
            config.name,
            field,
            f"source.directory.path: there is no directory {source} on this node, it would get no config any more",
            f"make it first, with the configs that are in {running.source.directory.path}",
        )


def _check_trust(name: str, spec: FileSpec, field: str) -> None:
    """As `textfile.require_trusted` will see it: a file that others can write is not read."""
    hint = "these settings name programs that root runs"
    if spec.mode & _OTHERS_WRITE:
        problem = f"the agent would not trust its settings with the mode {spec.mode:04o}: others than root can write"
        raise _refusal(name, f"{field}/mode", problem, hint)
    if spec.user != ROOT:
        problem = f"the agent would not trust its settings as the file of {spec.user}: it has to be root's"
        raise _refusal(name, f"{field}/user", problem, hint)


def _refusal(name: str, field: str, problem: str, hint: str = "") -> Irreconcilable:
    return Irreconcilable(f"cannot go to {name}: {field}: {problem}", field, hint)
