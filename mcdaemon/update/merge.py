"""What ostree's /etc merge will do to the files of a config, said before the drain, and put right where it can be.

The merge (rpm-ostree.md 5.3) drops a file that equals the booted image's default and is not in the new image, and keeps
an old one over the new image's: both happen to files that a daemon wrote (incident 4).
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mcdaemon.errors import Broken
from mcdaemon.host import etc_merge, files
from mcdaemon.host.files import Kind, Node
from mcdaemon.host.root import Root
from mcdaemon.update import commit
from mcdaemon.update.payload import Payload, Shelf

_ABSENT = Node(Kind.ABSENT)


@dataclass(frozen=True)
class MergeReport:
    """Managed paths by what the merge alone would make of them; the commit after it puts each right.

    :ivar dropped: would be gone in the new root.
    :ivar replaced: would be there with other content, mode or owner.
    :ivar kept: are to go, but would have been carried over.
    :ivar placeable: those of the dropped that can safely be put into the staged etc beforehand.
    """

    dropped: tuple[str, ...] = ()
    replaced: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    placeable: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        texts = (
            (self.dropped, "would have been dropped by ostree's /etc merge"),
            (self.replaced, "would have had other content or mode after ostree's /etc merge"),
            (self.kept, "would have been carried over by ostree's /etc merge"),
        )
        return [f"{path} {text}; it is put right before the reboot" for paths, text in texts for path in paths]

    def log(self, log: logging.Logger) -> None:
        for line in self.lines():
            log.info(line)


def predict(running: Root, target: Root, load: Payload, skips_special_files: bool) -> MergeReport:
    """Compare what the merge would leave in `target` with what the payload wants there.

    Raises Broken when the merge is going to fail as a whole, or to write outside of the new root: better known now than
    at finalization. `skips_special_files`: this libostree leaves FIFOs and sockets out, an older one fails on them.
    """
    present = etc_merge.scan(running.path / "etc")
    prediction = etc_merge.predict(
        etc_merge.scan(running.path / "usr/etc"),
        present,
        etc_merge.scan(target.path / "etc"),
        skips_special_files=skips_special_files,
    )
    if prediction.escapes:
        raise Broken(
            f"cannot finalize: in the new image a link leads out of /etc, and the merge would write through "
            f"it: {', '.join(prediction.escapes[:5])}",
            "repair the image",
        )
    if prediction.failure:
        odd = [
            path for path, node in present.items() if node.kind is Kind.OTHER and "non-regular" in prediction.failure
        ]
        hint = (
            f"FIFOs and sockets: {', '.join(odd[:5])}" if odd else "a file stands where the new image has a directory"
        )
        raise Broken(f"cannot finalize: {prediction.failure}", f"{hint}; move it away")
    _check_places(load, prediction.merged, running)
    dropped, replaced, kept = [], [], []
    for path, node in load.entries:
        if not path.startswith("/etc/"):
            continue
        merged = prediction.merged.get(path, _ABSENT)
        if node.kind is Kind.ABSENT:
            if merged.kind is not Kind.ABSENT:
                kept.append(path)
        elif merged.kind is Kind.ABSENT:
            # What is new in this update is not lost, it was never there.
            if _stands(running, path):
                dropped.append(path)
        elif merged != node and files.read_node(running, path) == node:
            replaced.append(path)  # what this update changes anyway is no loss
    # Where the running /etc has a link or a file on the way, a directory in the staged etc would make the merge fail.
    placeable = [path for path in dropped if all(present[at].kind is Kind.DIRECTORY for at in _parents(path))]
    return MergeReport(tuple(dropped), tuple(replaced), tuple(kept), tuple(placeable))


def _check_places(load: Payload, merged: etc_merge.Tree, running: Root) -> None:
    """Raises Broken when an entry could not be written into the merged root: before the drain, not after it."""
    going = {path for path, node in load.entries if node.kind is Kind.ABSENT}
    for path, node in load.entries:
        if node.kind is Kind.ABSENT or any(at in going for at in _parents(path)):
            continue
        if not path.startswith("/etc/") or any(merged.get(at, _ABSENT).kind is Kind.LINK for at in _parents(path)):
            _check_shared_place(path, node, running)
            continue
        obstacle = _obstacle(path, node, merged, going)
        if obstacle:
            raise Broken(
                f"cannot put {path} into the new root: {obstacle}", "move it away, or choose another path in the config"
            )


def _check_shared_place(path: str, node: Node, running: Root) -> None:
    """A place outside /etc, or behind a link: it is the same for the running root and the new one."""
    canonical = running.canonical(path)
    if not canonical.startswith(("/etc/", "/var/")):
        raise Broken(
            f"cannot put {path} into the new root: a link on the way leads to {canonical}, which no update can write",
            "repair the link, or choose another path in the config",
        )
    if node.kind is not Kind.DIRECTORY:
        files.check_place(running, path)


def _obstacle(path: str, node: Node, merged: etc_merge.Tree, going: set[str]) -> str:
    for at in _parents(path):
        if merged.get(at, _ABSENT).kind not in (Kind.ABSENT, Kind.DIRECTORY):
            return f"{at} is not a directory there"
    found = merged.get(path, _ABSENT).kind
    if node.kind is Kind.DIRECTORY:
        return "" if found in (Kind.ABSENT, Kind.DIRECTORY) else "something else stands there"
    if found is Kind.DIRECTORY and any(at.startswith(path + "/") and at not in going for at in merged):
        return "a directory with something in it stands there"
    return ""


def _parents(path: str) -> list[str]:
    """The directories above a path, from the one below the top of /etc (or of /) down."""
    parts = path.split("/")
    first = 3 if path.startswith("/etc/") else 2
    return ["/".join(parts[:end]) for end in range(first, len(parts))]


def _stands(root: Root, path: str) -> bool:
    return os.path.lexists(root.locate(path))


def pre_place(report: MergeReport, target: Root, load: Payload, payloads: Shelf) -> None:
    """Write what the merge would drop into the staged etc: the merge leaves it alone there, so that even a reboot that
    somebody else orders now ends with these files in place."""
    wanted = set(report.placeable)
    commit.apply(load, payloads, target, lambda path: path in wanted)


def snapshot(etc: Path) -> dict[str, str]:
    """What tells a later change of any path below /etc. Inode and change time are compared for being the same, never
    for being later: a clock may jump (STATE-22)."""
    found = {}
    for folder, folders, names in os.walk(etc):
        for name in [*folders, *names]:
            path = os.path.join(folder, name)
            try:
                info = os.lstat(path)
            except OSError:  # it went away while we looked
                continue
            # What happens in a directory shows in its entries.
            found[path] = f"{info.st_ino}" if stat.S_ISDIR(info.st_mode) else f"{info.st_ino}:{info.st_ctime_ns}"
    return found


def late_changes(before: Mapping[str, str], now: Mapping[str, str]) -> tuple[str, ...]:
    """Paths below /etc changed, made or removed after the merge: the new root has not these changes. For the log."""
    return tuple(sorted(path for path in {*before, *now} if before.get(path) != now.get(path)))
