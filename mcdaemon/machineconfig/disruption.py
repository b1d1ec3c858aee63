"""What has to be done on a node so that a change takes effect: node disruption policies (mcd.md 3.7.1).

Unlike the MCD's, the list of actions has no doubles and a fixed order: what a policy lists first is done first, units
are loaded anew before anything is restarted, and where several orders are possible the names decide.
"""

from __future__ import annotations

import enum
import graphlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Optional

from mcdaemon.errors import Broken
from mcdaemon.machineconfig.diff import Difference
from mcdaemon.machineconfig.model import MachineConfig

CRIO = "crio.service"
_SERVICE = re.compile(
    r"[A-Za-z0-9:_.\\@-]+\.(service|socket|device|mount|automount|swap|target|path|timer|snapshot|slice|scope)"
)
_MAX_ENTRIES = 50
_MAX_ACTIONS = 10


class ActionKind(enum.Enum):
    """The API's action types, in the order in which they are done. Special: reload CRI-O for registries.conf."""

    NONE = "None"
    DRAIN = "Drain"
    DAEMON_RELOAD = "DaemonReload"
    RESTART = "Restart"
    RELOAD = "Reload"
    SPECIAL = "Special"
    REBOOT = "Reboot"


@dataclass(frozen=True)
class Action:
    """One thing to do; `unit` is set for Restart and Reload only."""

    kind: ActionKind
    unit: str = ""

    def __str__(self) -> str:
        return f"{self.kind.value} {self.unit}" if self.unit else self.kind.value


NONE = Action(ActionKind.NONE)
DRAIN = Action(ActionKind.DRAIN)
DAEMON_RELOAD = Action(ActionKind.DAEMON_RELOAD)
SPECIAL = Action(ActionKind.SPECIAL)
REBOOT = Action(ActionKind.REBOOT)
_RELOAD_CRIO = Action(ActionKind.RELOAD, CRIO)
_RESTART_CRIO = Action(ActionKind.RESTART, CRIO)
_RESTART_TRUST = Action(ActionKind.RESTART, "coreos-update-ca-trust.service")
_RESTART_KUBELET = Action(ActionKind.RESTART, "kubelet.service")
_RESTART_IRI = Action(ActionKind.RESTART, "iri-registry.service")

Actions = tuple[Action, ...]


@dataclass(frozen=True)
class Policy:
    """Actions by file path (or directory), by unit name, and for ssh keys and passwords. What is not listed reboots."""

    files: Mapping[str, Actions] = field(default_factory=dict)
    units: Mapping[str, Actions] = field(default_factory=dict)
    ssh_keys: Actions = (NONE,)

    def for_path(self, path: str) -> Optional[Actions]:
        """The actions for the path, or for the closest directory around it that has some; None: no policy (H.5)."""
        matches = [entry for entry in self.files if path == entry or path.startswith(entry.rstrip("/") + "/")]
        return self.files[max(matches, key=lambda entry: len(entry.rstrip("/")))] if matches else None

    def merged(self, other: Policy) -> Policy:
        """This policy with the entries of `other` replacing or added (apihelpers.go:MergeClusterPolicies)."""
        return Policy({**self.files, **other.files}, {**self.units, **other.units}, other.ssh_keys)


DEFAULT = Policy(
    files=MappingProxyType(
        {
            "/var/lib/kubelet/config.json": (NONE,),
            "/etc/machine-config-daemon/no-reboot/containers-gpg.pub": (_RELOAD_CRIO,),
            "/etc/containers/policy.json": (_RELOAD_CRIO,),
            "/etc/containers/registries.conf": (SPECIAL,),
            "/etc/containers/registries.d": (_RELOAD_CRIO,),
            "/etc/crio/policies": (_RELOAD_CRIO,),
            "/etc/nmstate/openshift": (NONE,),
            "/etc/pki/ca-trust/source/anchors/openshift-config-user-ca-bundle.crt": (_RESTART_TRUST, _RESTART_CRIO),
            "/etc/kubernetes/credential-providers": (_RESTART_KUBELET,),
            "/etc/systemd/system/kubelet.service.d/40-kubelet-crio-image-credential-provider.conf": (
                DAEMON_RELOAD,
                _RESTART_KUBELET,
            ),
            "/etc/iri-registry": (_RESTART_IRI,),
            "/usr/local/bin/load-registry-image.sh": (_RESTART_IRI,),
            "/etc/pki/ca-trust/source/anchors/iri-root-ca.crt": (_RESTART_TRUST,),
        }
    ),
    units=MappingProxyType({"iri-registry.service": (DAEMON_RELOAD, _RESTART_IRI)}),
)


def actions(
    difference: Difference, old: Optional[MachineConfig], new: MachineConfig, policy: Policy = DEFAULT
) -> Actions:
    """What to do for `difference`, never empty: (None,) for nothing to do, (Reboot,) alone when that is needed.

    `old` and `new` are for rules that look into a file (registries.conf); none of those is followed yet.
    """
    if difference.system:
        return (REBOOT,)
    lists: list[Actions] = []
    for path in sorted(difference.files):
        lists.append(policy.for_path(path) or (REBOOT,))
    for name in sorted(difference.units):
        lists.append(policy.units.get(name) or (REBOOT,))
    if difference.users:
        lists.append(policy.ssh_keys or (NONE,))
    wanted = {action for chain in lists for action in chain}
    if REBOOT in wanted:
        return (REBOOT,)
    wanted.discard(NONE)
    for kind, unit in [(action.kind, action.unit) for action in wanted]:
        # A restart reads everything that a reload would (UNIT-13).
        if kind is ActionKind.RESTART:
            wanted.discard(Action(ActionKind.RELOAD, unit))
    return _in_order(wanted, lists) or (NONE,)


def reboots(wanted: Iterable[Action]) -> bool:
    """Whether the actions are a reboot."""
    return REBOOT in tuple(wanted)


def drains(wanted: Iterable[Action]) -> bool:
    """Whether workloads have to leave first (mcd.md 3.8).

    A changed registries.conf (Special) counts as one that needs it: which changes are safe is not looked at yet.
    """
    return any(action.kind in (ActionKind.REBOOT, ActionKind.DRAIN, ActionKind.SPECIAL) for action in wanted)


def _in_order(wanted: set[Action], lists: Sequence[Actions]) -> Actions:
    """Each policy's own order kept, DaemonReload before what it is for, the rest by kind and name."""
    graph: dict[Action, set[Action]] = {action: set() for action in wanted}
    for chain in lists:
        kept = [action for action in chain if action in wanted]
        for before, after in zip(kept, kept[1:]):
            if before != after:
                graph[after].add(before)
    for action in wanted:
        if action.kind in (ActionKind.RESTART, ActionKind.RELOAD, ActionKind.SPECIAL):
            graph[action] |= wanted & {DAEMON_RELOAD}
    # Never after something else, whatever a policy's list says: it would come too late for that.
    graph.get(DAEMON_RELOAD, set()).intersection_update({DRAIN})
    sorter = graphlib.TopologicalSorter(graph)
    try:
        sorter.prepare()
    except graphlib.CycleError:
        # Two policies that want opposite orders: none is right, so the fixed one is as good as any.
        return tuple(sorted(wanted, key=_rank))
    ordered: list[Action] = []
    while sorter.is_active():
        ready = sorted(sorter.get_ready(), key=_rank)
        ordered.extend(ready)
        sorter.done(*ready)
    return tuple(ordered)


def _rank(action: Action) -> tuple[int, str]:
    return list(ActionKind).index(action.kind), action.unit


def read_policy(document: object, where: str) -> Policy:
    """The defaults with the entries of a `nodeDisruptionPolicy` (files, units, sshkey), as in MachineConfiguration.

    Raises Broken with the place of the first thing that is wrong.
    """
    top = _mapping(document, where, ("files", "units", "sshkey"))
    files: dict[str, Actions] = {}
    units: dict[str, Actions] = {}
    for index, entry in enumerate(_entries(top.get("files"), f"{where}: files")):
        place = f"{where}: files[{index}]"
        item = _mapping(entry, place, ("path", "actions"))
        path = item.get("path")
        if not isinstance(path, str) or not path.startswith("/") or any(p in (".", "..") for p in path.split("/")):
            raise Broken(f"cannot use {place}.path: expected an absolute path")
        files[path] = _actions(item.get("actions"), f"{place}.actions")
    for index, entry in enumerate(_entries(top.get("units"), f"{where}: units")):
        place = f"{where}: units[{index}]"
        item = _mapping(entry, place, ("name", "actions"))
        units[_unit_name(item.get("name"), f"{place}.name")] = _actions(item.get("actions"), f"{place}.actions")
    ssh_keys = DEFAULT.ssh_keys
    if top.get("sshkey") is not None:
        place = f"{where}: sshkey"
        ssh_keys = _actions(_mapping(top["sshkey"], place, ("actions",)).get("actions"), f"{place}.actions")
    return DEFAULT.merged(Policy(files, units, ssh_keys))


def _actions(value: object, place: str) -> Actions:
    entries = _entries(value, place, _MAX_ACTIONS)
    found = tuple(_action(entry, f"{place}[{index}]") for index, entry in enumerate(entries))
    if not found:
        raise Broken(f"cannot use {place}: at least one action is needed", "None says that nothing has to be done")
    if len(found) > 1 and (REBOOT in found or NONE in found):
        raise Broken(f"cannot use {place}: Reboot and None have to stand alone")
    return found


def _action(value: object, place: str) -> Action:
    item = _mapping(value, place, ("type", "reload", "restart"))
    kinds = {kind.value: kind for kind in ActionKind if kind is not ActionKind.SPECIAL}
    name = item.get("type")
    if not isinstance(name, str) or name not in kinds:
        raise Broken(f"cannot use {place}.type: expected one of {', '.join(sorted(kinds))}")
    kind = kinds[name]
    for key, of in (("reload", ActionKind.RELOAD), ("restart", ActionKind.RESTART)):
        if item.get(key) is not None and kind is not of:
            raise Broken(f"cannot use {place}.{key}: it does not belong to the type {name}")
    if kind not in (ActionKind.RELOAD, ActionKind.RESTART):
        return Action(kind)
    key = name.lower()
    target = _mapping(item.get(key), f"{place}.{key}", ("serviceName",)).get("serviceName")
    return Action(kind, _unit_name(target, f"{place}.{key}.serviceName"))


def _unit_name(value: object, place: str) -> str:
    if not isinstance(value, str) or not _SERVICE.fullmatch(value):
        raise Broken(f"cannot use {place}: expected the full name of a systemd unit, such as {CRIO}")
    return value


def _mapping(value: object, place: str, known: Sequence[str]) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise Broken(f"cannot use {place}: expected a mapping with {', '.join(known)}")
    for key in value:
        if key not in known:
            raise Broken(f"cannot use {place}: unknown key {str(key)[:80]!r}", f"known are {', '.join(known)}")
    return value


def _entries(value: object, place: str, limit: int = _MAX_ENTRIES) -> Sequence[object]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise Broken(f"cannot use {place}: expected a list")
    if len(value) > limit:
        raise Broken(f"cannot use {place}: {len(value)} entries, at most {limit} are allowed")
    return value
