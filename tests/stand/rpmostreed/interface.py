"""The introspection data of rpm-ostreed's objects (rpm-ostree.md 1.2 to 1.5)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tests.stand.introspection import Gio

BUS_NAME = "org.projectatomic.rpmostree1"
BASE_PATH = "/org/projectatomic/rpmostree1"
SYSROOT_PATH = BASE_PATH + "/Sysroot"
SYSROOT = BUS_NAME + ".Sysroot"
OS = BUS_NAME + ".OS"
EXPERIMENTAL = BUS_NAME + ".OSExperimental"
TRANSACTION = BUS_NAME + ".Transaction"
OBJECT_MANAGER = "org.freedesktop.DBus.ObjectManager"
PROPERTIES = "org.freedesktop.DBus.Properties"

_Member = tuple[str, str, str]  # name, "arg:type …" in, "arg:type …" out

_SYSROOT_METHODS: tuple[_Member, ...] = (
    ("RegisterClient", "options:a{sv}", ""),
    ("UnregisterClient", "options:a{sv}", ""),
    ("Reload", "", ""),
    ("ReloadConfig", "", ""),
    ("GetOS", "name:s", "object_path:o"),
)
_SYSROOT_PROPERTIES = (
    ("Booted", "o"),
    ("Path", "s"),
    ("ActiveTransaction", "(sss)"),
    ("ActiveTransactionPath", "s"),
    ("AutomaticUpdatePolicy", "s"),
    ("Deployments", "aa{sv}"),
)
_ADDRESS = "transaction_address:s"
_OPTIONS = "options:a{sv}"
_DIFF = "result:a(sua{sv})"
OS_METHODS: tuple[_Member, ...] = (
    ("AutomaticUpdateTrigger", _OPTIONS, f"enabled:b {_ADDRESS}"),
    ("GetDeploymentsRpmDiff", "deployid0:s deployid1:s", _DIFF),
    ("Deploy", f"revision:s {_OPTIONS}", _ADDRESS),
    ("GetCachedDeployRpmDiff", "revision:s packages:as", f"{_DIFF} details:a{{sv}}"),
    ("DownloadDeployRpmDiff", "revision:s packages:as", _ADDRESS),
    ("Upgrade", _OPTIONS, _ADDRESS),
    ("GetCachedUpdateRpmDiff", "deployid:s", f"{_DIFF} details:a{{sv}}"),
    ("DownloadUpdateRpmDiff", "", _ADDRESS),
    ("Rollback", _OPTIONS, _ADDRESS),
    ("ClearRollbackTarget", _OPTIONS, _ADDRESS),
    ("Rebase", f"{_OPTIONS} refspec:s packages:as", _ADDRESS),
    ("GetCachedRebaseRpmDiff", "refspec:s packages:as", f"{_DIFF} details:a{{sv}}"),
    ("DownloadRebaseRpmDiff", "refspec:s packages:as", _ADDRESS),
    ("PkgChange", f"{_OPTIONS} packages_added:as packages_removed:as", _ADDRESS),
    ("SetInitramfsState", f"regenerate:b args:as {_OPTIONS}", _ADDRESS),
    ("InitramfsEtc", f"track:as untrack:as untrack_all:b force_sync:b {_OPTIONS}", _ADDRESS),
    (
        "KernelArgs",
        f"existing_kernel_args:s kernel_args_added:as kernel_args_replaced:as kernel_args_removed:as {_OPTIONS}",
        _ADDRESS,
    ),
    ("GetDeploymentBootConfig", "deployid:s is_pending:b", "bootconfig:a{sv}"),
    ("Cleanup", "elements:as", _ADDRESS),
    ("RefreshMd", _OPTIONS, _ADDRESS),
    ("ModifyYumRepo", "repo_id:s settings:a{ss}", _ADDRESS),
    ("ListRepos", "", "repos:aa{sv}"),
    ("UpdateDeployment", f"modifiers:a{{sv}} {_OPTIONS}", _ADDRESS),
    ("FinalizeDeployment", _OPTIONS, _ADDRESS),
    ("WhatProvides", "provides:as", "packages:aa{sv}"),
    ("GetPackages", "names:as", "packages:aa{sv}"),
    ("Search", "names:as", "packages:aa{sv}"),
)
# Methods whose calls may carry file descriptors.
_WITH_DESCRIPTORS = frozenset({"Deploy", "Upgrade", "Rebase", "PkgChange", "UpdateDeployment"})
_OS_PROPERTIES = (
    ("BootedDeployment", "a{sv}"),
    ("DefaultDeployment", "a{sv}"),
    ("RollbackDeployment", "a{sv}"),
    ("CachedUpdate", "a{sv}"),
    ("HasCachedUpdateRpmDiff", "b"),
    ("Name", "s"),
)
_EXPERIMENTAL_METHODS: tuple[_Member, ...] = (
    ("Moo", "is_utf8:b", "result:s"),
    ("LiveFs", _OPTIONS, _ADDRESS),
    ("DownloadPackages", "queries:as source:s", ""),
)
_TRANSACTION_METHODS: tuple[_Member, ...] = (("Start", "", "started:b"), ("Cancel", "", ""))
_TRANSACTION_PROPERTIES = (("Title", "s"), ("InitiatingClientDescription", "s"))
_TRANSACTION_SIGNALS = (
    ("Finished", "success:b error_message:s"),
    ("Message", "text:s"),
    ("TaskBegin", "text:s"),
    ("TaskEnd", "text:s"),
    ("PercentProgress", "text:s percentage:u"),
    ("DownloadProgress", "time:(tt) outstanding:(uu) metadata:(uuu) delta:(uuut) content:(uu) transfer:(tt)"),
    ("SignatureProgress", "signature:av commit:s"),
    ("ProgressEnd", ""),
)
_MANAGER_METHODS: tuple[_Member, ...] = (("GetManagedObjects", "", "objects:a{oa{sa{sv}}}"),)
_MANAGER_SIGNALS = (
    ("InterfacesAdded", "object_path:o interfaces:a{sa{sv}}"),
    ("InterfacesRemoved", "object_path:o interfaces:as"),
)


def _arguments(text: str, direction: str) -> str:
    way = f' direction="{direction}"' if direction else ""
    pairs = (item.split(":", 1) for item in text.split())
    return "".join(f'<arg name="{name}" type="{kind}"{way}/>' for name, kind in pairs)


def _interface(
    name: str,
    methods: Iterable[_Member] = (),
    properties: Iterable[tuple[str, str]] = (),
    signals: Iterable[tuple[str, str]] = (),
) -> str:
    parts = [f'<interface name="{name}">']
    for method, inputs, outputs in methods:
        annotation = '<annotation name="org.gtk.GDBus.C.UnixFD" value="true"/>' if method in _WITH_DESCRIPTORS else ""
        parts.append(
            f'<method name="{method}">{annotation}{_arguments(inputs, "in")}{_arguments(outputs, "out")}</method>'
        )
    parts += [f'<property name="{prop}" type="{kind}" access="read"/>' for prop, kind in properties]
    parts += [f'<signal name="{signal}">{_arguments(arguments, "")}</signal>' for signal, arguments in signals]
    return "".join(parts) + "</interface>"


XML = (
    "<node>"
    + "".join(
        (
            _interface(SYSROOT, _SYSROOT_METHODS, _SYSROOT_PROPERTIES),
            _interface(OS, OS_METHODS, _OS_PROPERTIES),
            _interface(EXPERIMENTAL, _EXPERIMENTAL_METHODS),
            _interface(TRANSACTION, _TRANSACTION_METHODS, _TRANSACTION_PROPERTIES, _TRANSACTION_SIGNALS),
            _interface(OBJECT_MANAGER, _MANAGER_METHODS, (), _MANAGER_SIGNALS),
        )
    )
    + "</node>"
)
_NODE = Gio.DBusNodeInfo.new_for_xml(XML)


def info(name: str) -> Any:
    """The Gio.DBusInterfaceInfo of one interface."""
    return _NODE.lookup_interface(name)


def property_types(name: str) -> dict[str, str]:
    """The properties of an interface and their types."""
    return {prop.name: prop.signature for prop in info(name).properties}


def os_path(osname: str) -> str:
    """The object path of a stateroot (RO:rs/daemon.rs:generate_object_path)."""
    escaped = []
    for byte in osname.encode():
        char = chr(byte)
        if char == "_" or (char.isascii() and char.isalnum()):
            escaped.append(char)
        elif char in "/-":
            escaped.append("_")
        else:
            escaped.append(f"_{byte:02x}")
    return f"{BASE_PATH}/{''.join(escaped)}"
