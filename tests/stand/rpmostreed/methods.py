"""What each method of the OS interface does: a transaction's operation, or an answer at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, Optional

from tests.stand.introspection import GLib
from tests.stand.rpmostreed import bootloader, deploy, repositories
from tests.stand.rpmostreed.deploy import Request
from tests.stand.rpmostreed.errors import FAILED, MethodError
from tests.stand.rpmostreed.options import Options
from tests.stand.rpmostreed.sysroot import Sysroot, identity
from tests.stand.rpmostreed.work import Work

DEPLOY_TITLE = "new-deployment"
_NO_OPTIONS = GLib.Variant("a{sv}", {})


@dataclass(frozen=True)
class Plan:
    """A transaction to be: its first title and what it does."""

    title: str
    operation: Callable[[Work], None]


@dataclass(frozen=True)
class Arguments:
    """A method's parameters, the descriptors that came with it (Gio.UnixFDList or None), and what planning needs."""

    osname: str
    values: Any
    passed: Any
    policy: str
    sysroot: Sysroot

    def options(self, index: int) -> Options:
        return Options(self.values.get_child_value(index))

    def __getitem__(self, index: int) -> Any:
        return self.values.get_child_value(index).unpack()


def plan(osname: str, method: str, parameters: Any, passed: Any, policy: str, sysroot: Sysroot) -> Optional[Plan]:
    """The transaction for a method call; None where it needs none (an automatic update that is off).

    Raises MethodError for calls that are refused at once."""
    return _PLANNERS[method](Arguments(osname, parameters, passed, policy, sysroot))


def _deploy(request: Request) -> Plan:
    return Plan(DEPLOY_TITLE, lambda work: deploy.run(work, request))


def _update_deployment(given: Arguments) -> Plan:
    modifiers, options = given.options(0), given.options(1)
    plain = not (
        modifiers.text("set-refspec") or modifiers.text("set-revision") is not None or options.boolean("no-pull-base")
    )
    return _deploy(Request(modifiers, options, given.passed, upgrade=plain))


def _deploy_revision(given: Arguments) -> Plan:
    return _deploy(Request(Options.of(set_revision=GLib.Variant("s", given[0])), given.options(1)))


def _upgrade(given: Arguments) -> Plan:
    return _deploy(Request(Options.of(), given.options(0), upgrade=True))


def _rebase(given: Arguments) -> Plan:
    revision = given.options(0).text("revision")
    modifiers = Options.of(
        set_refspec=GLib.Variant("s", given[1]),
        set_revision=GLib.Variant("s", revision) if revision is not None else None,
    )
    return _deploy(Request(modifiers, given.options(0)))


def _package_change(given: Arguments) -> Plan:
    modifiers = Options.of(
        install_packages=GLib.Variant("as", given[1]), uninstall_packages=GLib.Variant("as", given[2])
    )
    return _deploy(Request(modifiers, given.options(0), no_pull_base_default=True))


def _automatic_update(given: Arguments) -> Optional[Plan]:
    options = given.options(0)
    booted = given.sysroot.booted
    if booted is None or booted.get_osname() != given.osname:
        raise MethodError(FAILED, f"Cannot trigger auto-update for offline OS '{given.osname}'")
    mode = options.text("mode") or "auto"
    mode = given.policy if mode == "auto" else mode
    if mode == "none":
        return None
    if mode == "check":
        return Plan("automatic (check)", lambda work: work.output.message("stand: nothing is checked"))
    if mode not in ("stage", "apply"):
        raise MethodError(FAILED, f"Invalid AutomaticUpdateTrigger mode: '{mode}'")
    flags = Options.of(
        reboot=GLib.Variant("b", mode == "apply"),
        lock_finalization=GLib.Variant("b", options.boolean("lock-finalization")),
        initiating_command_line=GLib.Variant("s", "automatic (stage)"),
    )
    return _deploy(Request(Options.of(), flags, upgrade=True))


def _kernel_arguments(given: Arguments) -> Plan:
    existing, added, replaced, removed = (given[index] for index in range(4))
    options = given.options(4)
    return Plan("kargs", lambda work: bootloader.kernel_arguments(work, existing, added, replaced, removed, options))


def _initramfs_state(given: Arguments) -> Plan:
    return Plan("initramfs", lambda work: bootloader.initramfs_state(work, given[0], given[1], given.options(2)))


def _initramfs_etc(given: Arguments) -> Plan:
    return Plan(
        "initramfs-etc",
        lambda work: bootloader.initramfs_etc(work, given[0], given[1], (given[2], given[3]), given.options(4)),
    )


def _rollback(given: Arguments) -> Plan:
    return Plan("rollback", lambda work: bootloader.rollback(work, given.options(0)))


def _cleanup(given: Arguments) -> Plan:
    bootloader.check_cleanup(given[0])
    return Plan("cleanup", lambda work: bootloader.cleanup(work, given[0]))


def _finalize(given: Arguments) -> Plan:
    return Plan("finalize-deployment", lambda work: bootloader.finalize(work, given.options(0)))


def _refresh_metadata(given: Arguments) -> Plan:
    def refresh(work: Work) -> None:
        repositories.check_enabled()
        for package in repositories.available():
            work.output.message(f"rpm-md: {package.nevra} ({package.repository})")

    return Plan("refresh-md (force)" if given.options(0).boolean("force") else "refresh-md", refresh)


def _modify_repository(given: Arguments) -> Plan:
    return Plan("modify-yum-repo", lambda work: repositories.modify(given[0], given[1]))


def _package_diff(_given: Arguments) -> Plan:
    return Plan("package-diff", lambda work: work.output.message("stand: no package differences are computed"))


_PLANNERS: dict[str, Callable[[Arguments], Optional[Plan]]] = {
    "UpdateDeployment": _update_deployment,
    "Deploy": _deploy_revision,
    "Upgrade": _upgrade,
    "Rebase": _rebase,
    "PkgChange": _package_change,
    "AutomaticUpdateTrigger": _automatic_update,
    "KernelArgs": _kernel_arguments,
    "SetInitramfsState": _initramfs_state,
    "InitramfsEtc": _initramfs_etc,
    "Rollback": _rollback,
    "ClearRollbackTarget": lambda given: Plan("clear-rollback", bootloader.clear_rollback_target),
    "Cleanup": _cleanup,
    "FinalizeDeployment": _finalize,
    "RefreshMd": _refresh_metadata,
    "ModifyYumRepo": _modify_repository,
    "DownloadDeployRpmDiff": _package_diff,
    "DownloadUpdateRpmDiff": _package_diff,
    "DownloadRebaseRpmDiff": _package_diff,
}


def _boot_config(sysroot: Sysroot, osname: str, parameters: Any) -> Any:
    index, pending = parameters.unpack()
    return GLib.Variant("(a{sv})", (bootloader.boot_config(sysroot, osname, index, pending),))


def _deployments_diff(sysroot: Sysroot, _osname: str, parameters: Any) -> Any:
    known = [identity(item) for item in sysroot.deployments]
    for wanted in parameters.unpack():
        if wanted and wanted not in known:
            raise MethodError(FAILED, f"Invalid deployment id {wanted}")
    return GLib.Variant("(a(sua{sv}))", ([],))


def _cached_diff(_sysroot: Sysroot, _osname: str, _parameters: Any) -> Any:
    return GLib.Variant("(a(sua{sv})a{sv})", ([], {}))


def _list_repositories(_sysroot: Sysroot, _osname: str, _parameters: Any) -> Any:
    found = [
        {
            "id": GLib.Variant("s", one.name),
            "description": GLib.Variant("s", one.description),
            "is-devel": GLib.Variant("b", one.name.endswith(("-debuginfo", "-debug"))),
            "is-source": GLib.Variant("b", one.name.endswith("-source")),
            "is-enabled": GLib.Variant("b", one.enabled),
        }
        for one in repositories.listing()
    ]
    return GLib.Variant("(aa{sv})", (found,))


def _packages(_sysroot: Sysroot, _osname: str, parameters: Any) -> Any:
    requests: list[str] = parameters.unpack()[0]
    found = []
    for package in repositories.available():
        for request in [name for name in requests if package.answers(name)]:
            nevra, name, epoch, version, release, arch = package.fields
            found.append(
                {
                    "key": GLib.Variant("s", request),
                    "name": GLib.Variant("s", name),
                    "epoch": GLib.Variant("t", epoch),
                    "version": GLib.Variant("s", version),
                    "arch": GLib.Variant("s", arch),
                    "nevra": GLib.Variant("s", nevra),
                    "evr": GLib.Variant("s", f"{version}-{release}"),
                    "summary": GLib.Variant("s", ""),
                    "reponame": GLib.Variant("s", package.repository),
                }
            )
    return GLib.Variant("(aa{sv})", (found,))


QUERIES: dict[str, Callable[[Sysroot, str, Any], Any]] = {
    "GetDeploymentBootConfig": _boot_config,
    "GetDeploymentsRpmDiff": _deployments_diff,
    "GetCachedDeployRpmDiff": _cached_diff,
    "GetCachedUpdateRpmDiff": _cached_diff,
    "GetCachedRebaseRpmDiff": _cached_diff,
    "ListRepos": _list_repositories,
    "WhatProvides": _packages,
    "GetPackages": _packages,
    "Search": _packages,
}


def cow(is_utf8: bool) -> str:
    """Moo: proof of life."""
    return "🐄\n" if is_utf8 else "(__)\n"
