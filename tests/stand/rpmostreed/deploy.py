"""The deploy transaction behind UpdateDeployment, Deploy, Upgrade, Rebase and PkgChange (rpm-ostree.md 1.9 to 1.12).

The order of steps is rpm-ostree's (RO:daemon/rpmostreed-transaction-types.cxx:deploy_transaction_execute); the
numbers in comments are those of rpm-ostree.md 1.11.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Optional

from tests.stand import ostree_refs
from tests.stand.imageproxy import ImageProxy
from tests.stand.introspection import GLib
from tests.stand.ostree_import import Importer, ImportFailed, Watcher
from tests.stand.rpmostreed import basepackages, layering, pkgcache, rpm
from tests.stand.rpmostreed.errors import Cancelled, OperationFailed
from tests.stand.rpmostreed.options import Options, names
from tests.stand.rpmostreed.origin import Origin
from tests.stand.rpmostreed.work import Work

DRIVER_FILE = Path("/run/rpm-ostree/update-driver.gv")
_CHECKSUM = re.compile(r"[0-9a-f]{64}")
_DESCRIPTOR_ARRAYS = (
    "install-local-packages",
    "install-fileoverride-local-packages",
    "override-replace-local-packages",
)


@dataclass(frozen=True)
class Request:
    """One deploy request: both dictionaries, the flags that a method sets by default, and the Gio.UnixFDList (or None)
    that came with the call, which closes its descriptors when it goes."""

    modifiers: Options
    options: Options
    passed: Any = None
    no_pull_base_default: bool = False
    upgrade: bool = False

    def flag(self, name: str) -> bool:
        default = self.no_pull_base_default if name == "no-pull-base" else False
        return self.options.boolean(name, default)

    @property
    def descriptors(self) -> tuple[int, ...]:
        return tuple(self.passed.peek_fds()) if self.passed is not None else ()

    @property
    def refspec(self) -> str:
        return self.modifiers.text("set-refspec") or ""

    @property
    def revision(self) -> Optional[str]:
        return self.modifiers.text("set-revision")

    @property
    def overrides(self) -> bool:
        return any(self.modifiers.texts(f"override-{kind}-packages") for kind in ("remove", "reset", "replace"))


@dataclass
class _Progress:
    """What a running request has come to: the new origin, the base, and whether anything changed."""

    origin: Origin
    base: str
    changed: bool = False


def run(work: Work, request: Request) -> None:
    """Executes a deploy request. Raises OperationFailed; nothing is deployed then."""
    _check(request)  # 1
    line = work.retitle(request.options, _title(request))  # 2
    if _register_driver(work, request):  # 3
        return
    if work.faults.flag("no_op"):
        work.output.message("No upgrade available.")
        return
    merge = work.merge_deployment()  # 5
    state = _Progress(work.sysroot.origin(merge), work.sysroot.base(merge.get_csum()))
    _set_refspec(work, request, state)  # 7
    _set_revision(request, state)  # 8
    _drop(request, state)  # 9, 11
    _change_packages(work, request, state)  # 11, 12
    _import_local(work, request, state)  # 13
    if not work.faults.flag("ignore_resets"):
        _change_overrides(request, state)  # 14
    if not request.flag("no-pull-base"):
        _pull_base(work, request, state)  # 16
    _remove_base_packages(work, request, state)  # 17
    layers = layering.plan(work, state.base, state.origin, request.flag("cache-only"))  # 18
    state.changed |= _layers_changed(work, merge, layers)
    if _nothing_to_do(work, request, state):  # 19
        return
    previous = list(work.sysroot.origin(merge).packages)
    for text in layering.describe(layers, previous):
        work.output.message(text)
    if request.flag("dry-run"):  # 20
        work.output.message("Exiting because of '--dry-run' option")
        return
    if request.flag("download-only"):  # 21, 22
        layering.fetch(work, layers)
        work.output.message("Update downloaded." if state.changed else "No changes.")
        return
    commit = layering.assemble(work, layers)  # 23
    work.stage(
        commit, state.origin, work.sysroot.kernel_arguments(merge).split(), request.flag("lock-finalization"), line
    )
    if request.flag("reboot"):  # 26
        work.reboot()


def _check(request: Request) -> None:
    expected = sum(len(request.modifiers.handles(key)) for key in _DESCRIPTOR_ARRAYS)
    expected += request.modifiers.handle("ex-local-repo-remote") is not None
    refspec_or_revision = bool(request.refspec)  # the quirk of 1.11: set-revision is read later
    rules = (
        (expected != len(request.descriptors), f"Expected {expected} fds but received {len(request.descriptors)}"),
        (request.flag("skip-purge") and not request.refspec, "Can't specify skip-purge if not setting a new refspec"),
        (
            request.flag("no-pull-base") and refspec_or_revision,
            "Can't specify no-pull-base if setting a new refspec or revision",
        ),
        (request.flag("cache-only") and request.flag("download-only"), "Can't specify cache-only and download-only"),
        (request.flag("dry-run") and request.flag("download-only"), "Can't specify dry-run and download-only"),
        (
            bool(request.modifiers.texts("override-replace-packages")),
            "Non-local replacement overrides not implemented yet",
        ),
        (
            request.flag("no-overrides") and request.overrides,
            "Can't specify no-overrides if setting override modifiers",
        ),
        (
            request.modifiers.handle("ex-local-repo-remote") is not None and not request.refspec,
            "Missing ref for transient local rebases",
        ),
        (request.flag("apply-live") and request.flag("reboot"), "Cannot specify `apply-live` and `reboot`"),
        (bool(request.modifiers.texts("install-fileoverride-packages")), "Non-local fileoverrides not implemented"),
        *((bool(request.modifiers.handles(key)), f"stand: {key} is not supported") for key in _DESCRIPTOR_ARRAYS[1:]),
        (request.modifiers.handle("ex-local-repo-remote") is not None, "stand: ex-local-repo-remote is not supported"),
        (request.modifiers.text("treefile") is not None, "stand: treefile is not supported"),
        (request.flag("apply-live"), "stand: apply-live is not supported"),
    )
    for broken, text in rules:
        if broken:
            raise OperationFailed(text)


def _title(request: Request) -> str:
    modifiers = request.modifiers
    installs, uninstalls = modifiers.texts("install-packages"), modifiers.texts("uninstall-packages")
    if request.refspec:
        title = "rebase"
    elif request.revision is not None:
        title = "deploy"
    elif not request.flag("no-pull-base"):
        title = "upgrade"
    elif request.overrides:
        title = "override"
    else:
        title = "install" if installs or modifiers.handles("install-local-packages") else "uninstall"
    for option, text in (("cache-only", "cache only"), ("download-only", "download only")):
        title += f" ({text})" if request.flag(option) else ""
    for kind, count in (
        ("uninstall", len(uninstalls)),
        ("install", len(installs)),
        ("localinstall", len(modifiers.handles("install-local-packages"))),
    ):
        title += f"; {kind}: {count}" if count else ""
    return title


def _register_driver(work: Work, request: Request) -> bool:
    """Records the update driver; True where that is all (1.9)."""
    driver = request.options.text("register-driver")
    if driver is None:
        return False
    if not work.client.unit:
        raise OperationFailed("could not find caller systemd unit")
    record = GLib.Variant(
        "a{sv}", {"driver-name": GLib.Variant("s", driver), "driver-sd-unit": GLib.Variant("s", work.client.unit)}
    )
    DRIVER_FILE.parent.mkdir(parents=True, exist_ok=True)
    DRIVER_FILE.write_bytes(record.get_data_as_bytes().get_data())
    if request.revision != "":
        return False
    work.output.message("Empty string revision found; registering update driver only")
    return True


def _set_refspec(work: Work, request: Request, state: _Progress) -> None:
    if not request.refspec:
        return
    if state.origin.unconfigured_state:
        state.origin = replace(state.origin, unconfigured_state="")
    if request.refspec in (state.origin.image, state.origin.refspec):
        raise OperationFailed(f"Old and new refs are equal: {request.refspec}")
    state.origin = replace(state.origin, custom_url="", custom_description="", override_commit="")
    if ostree_refs.is_image(request.refspec):
        state.origin = replace(state.origin, image=request.refspec, refspec="")
    else:
        state.origin = replace(state.origin, image="", refspec=request.refspec)
    custom = request.options.pair("custom-origin")
    if custom is None:
        return
    if not custom[1]:
        raise OperationFailed("Invalid custom-origin")
    pinned = "@sha256:" in request.refspec or _CHECKSUM.fullmatch(request.refspec)
    if not pinned:
        raise OperationFailed("custom-origin requires a checksum or a digest-pinned container reference")
    state.origin = replace(state.origin, custom_url=custom[0], custom_description=custom[1])


def _set_revision(request: Request, state: _Progress) -> None:
    if not request.refspec and state.origin.unconfigured_state:
        raise OperationFailed(f"origin unconfigured-state: {state.origin.unconfigured_state}")
    revision = request.revision
    if revision and state.origin.image:
        try:
            ostree_refs.parse(state.origin.image).with_digest(revision)
        except ValueError as error:
            raise OperationFailed(str(error)) from error
        if not re.fullmatch(r"sha256:[0-9a-f]{64}", revision):
            raise OperationFailed(f"invalid digest: {revision}")
    state.origin = replace(state.origin, override_commit=revision or "")


def _drop(request: Request, state: _Progress) -> None:
    before = state.origin
    if request.flag("no-initramfs"):
        state.origin = replace(state.origin, regenerate_initramfs=False, initramfs_args=(), initramfs_etc=())
    if request.flag("no-layering"):
        state.origin = replace(state.origin, packages=(), local_packages=())
    if request.flag("no-overrides"):
        state.origin = replace(state.origin, removed=())
    state.changed |= state.origin != before


def _change_packages(work: Work, request: Request, state: _Progress) -> None:
    idempotent = request.flag("idempotent-layering")
    for name in request.modifiers.texts("uninstall-packages"):
        local = [
            item
            for item in state.origin.local_packages
            if item.rpartition(":")[2] == name or item.rpartition(":")[2].startswith(f"{name}-")
        ]
        if name in state.origin.packages:
            state.origin = replace(state.origin, packages=_without(state.origin.packages, [name]))
        elif local:
            state.origin = replace(state.origin, local_packages=_without(state.origin.local_packages, local))
        elif not idempotent:
            raise OperationFailed(f"Package/capability '{name}' is not currently requested")
        else:
            continue
        state.changed = True
    for name in request.modifiers.texts("install-packages"):
        if name in state.origin.packages:
            if not idempotent:
                raise OperationFailed(f"Package/capability '{name}' is already requested")
            continue
        if not request.flag("allow-inactive") and not (state.origin.image and work.profile.skip_base_check):
            _check_not_in_base(work, state, name)
        state.origin = replace(state.origin, packages=(*state.origin.packages, name))
        state.changed = True


def _check_not_in_base(work: Work, state: _Progress, name: str) -> None:
    installed = basepackages.read(work.sysroot.repo, state.base)
    gone = [one for one in installed if one in state.origin.removed]
    providers = [one.nevra for key, one in installed.items() if one.answers(name) and key not in gone]
    if providers:
        raise OperationFailed(
            f'"{name}" is already provided by: {", ".join(providers)}. Use --allow-inactive to explicitly require it.'
        )


def _import_local(work: Work, request: Request, state: _Progress) -> None:
    for index in request.modifiers.handles("install-local-packages"):
        with tempfile.NamedTemporaryFile(dir="/var/tmp", suffix=".rpm") as copy:
            with open(request.descriptors[index], "rb", closefd=False) as source:
                shutil.copyfileobj(source, copy)
            copy.flush()
            package = rpm.query([copy.name], "local")[0]
            if package.nevra in state.origin.local_nevras:
                if not request.flag("idempotent-layering"):
                    raise OperationFailed(f"Package '{package.nevra}' is already layered")
                continue
            pkgcache.unpack(work.sysroot.repo, package)
        checksum = work.sysroot.resolve(package.ref)
        state.origin = replace(
            state.origin, local_packages=(*state.origin.local_packages, f"{checksum}:{package.nevra}")
        )
        state.changed = True


def _change_overrides(request: Request, state: _Progress) -> None:
    for name in request.modifiers.texts("override-reset-packages"):
        if name not in state.origin.removed:
            raise OperationFailed(f"No overrides for package '{name}'")
        state.origin = replace(state.origin, removed=_without(state.origin.removed, [name]))
        state.changed = True
    for name in request.modifiers.texts("override-remove-packages"):
        if name in state.origin.removed:
            raise OperationFailed(f"Override already exists for package '{name}'")


def _remove_base_packages(work: Work, request: Request, state: _Progress) -> None:
    removals = names(request.modifiers.texts("override-remove-packages"))
    if not removals:
        return
    installed = basepackages.read(work.sysroot.repo, state.base)
    for name in removals:
        if not any(name in (one.name, one.nevra) for one in installed.values()):
            raise OperationFailed(f'Package "{name}" not found')
    state.origin = replace(state.origin, removed=(*state.origin.removed, *removals))
    state.changed = True


def _pull_base(work: Work, request: Request, state: _Progress) -> None:
    if state.origin.image:
        commit = pull_image(work, state.origin)
    else:
        commit = _pull_ostree(work, state.origin, request.flag("cache-only"))
    work.reach("after-pull")
    state.changed |= commit != state.base
    state.base = commit


def pull_image(work: Work, source: Origin) -> str:
    """Imports the image of ``source`` (at its override digest, if any) and returns the merge commit."""
    proxies: list[ImageProxy] = []

    def kill(*_: object) -> None:
        for proxy in proxies:
            proxy.kill()

    output = work.output
    watcher = Watcher(
        message=output.message, task=output.task_begin, done=output.task_end, step=work.reach, started=proxies.append
    )
    handler = work.cancellable.connect(kill)
    try:
        reference = ostree_refs.parse(source.image)
        if source.override_commit:
            reference = reference.with_digest(source.override_commit)
        return Importer(work.sysroot.repo, reference, work.profile.skip_known_digest, watcher).run().commit
    except ImportFailed as error:
        if work.cancellable.is_cancelled():
            raise Cancelled from error
        raise OperationFailed(str(error)) from error
    finally:
        work.cancellable.disconnect(handler)


def _pull_ostree(work: Work, source: Origin, cache_only: bool) -> str:
    wanted = source.override_commit or source.refspec
    remote, colon, ref = source.refspec.partition(":")
    if colon and not cache_only:
        work.sysroot.repo.pull(remote, [source.override_commit or ref], 0, None, work.cancellable)
    _, commit = work.sysroot.repo.resolve_rev(wanted, False)
    return str(commit)


def _layers_changed(work: Work, merge: Any, layers: layering.Layers) -> bool:
    before = work.sysroot.metadata(merge.get_csum()).unpack().get("rpmostree.state-sha512", "")
    return bool(before != layers.state)


def _nothing_to_do(work: Work, request: Request, state: _Progress) -> bool:
    if state.changed or request.refspec:
        return False
    if request.flag("download-only"):
        work.output.message("No changes.")
    elif request.upgrade:
        work.output.message("No upgrade available.")
    else:
        work.output.message("No change.")
    return True


def _without(items: Sequence[str], gone: Sequence[str]) -> tuple[str, ...]:
    return tuple(item for item in items if item not in gone)
