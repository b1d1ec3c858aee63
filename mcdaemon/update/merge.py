"""What ostree's /etc merge will do to the files of a config, said before the drain, and put right where it can be.

The merge (rpm-ostree.md 5.3) drops a file that equals the booted image's default and is not in the new image, and keeps
an old one over the new image's: both happen to files that a daemon wrote (incident 4).
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path

from mcdaemon.errors import Broken
from mcdaemon.host import etc_merge, files
from mcdaemon.host.files import Kind, Node
from mcdaemon.host.root import Root
from mcdaemon.update import commit
from mcdaemon.update.payload import Payload, Shelf

_ABSENT = Node(Kind.ABSENT)
_SKIPS_SPECIAL_FILES = (2024, 2)  # ostree pull request 3143


@dataclass(frozen=True)
class MergeReport:
    """Managed paths by what the merge alone would make of them; the commit after it puts each right.

    :ivar dropped: would be gone in the new root.
    :ivar replaced: would be there with other content, mode or owner.
    :ivar kept: are to go, but would have been carried over.
    """

    dropped: tuple[str, ...] = ()
    replaced: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()

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


def predict(running: Root, target: Root, load: Payload, libostree: tuple[int, int]) -> MergeReport:
    """Compare what the merge would leave in `target` with what the payload wants there.

    Raises Broken when the merge is going to fail as a whole, or to write outside of the new root: better known now than
    at finalization. `libostree`: its version decides what happens to FIFOs.
    """
    prediction = etc_merge.predict(
        etc_merge.scan(running.path / "usr/etc"),
        etc_merge.scan(running.path / "etc"),
        etc_merge.scan(target.path / "etc"),
        skips_special_files=libostree >= _SKIPS_SPECIAL_FILES,
    )
    if prediction.escapes:
        raise Broken(
            f"cannot finalize: in the new image a link leads out of /etc, and the merge would write through "
            f"it: {', '.join(prediction.escapes[:5])}",
            "repair the image",
        )
    if prediction.failure:
        raise Broken(
            f"cannot finalize: {prediction.failure}", "a file stands where the new image has a directory; move it away"
        )
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
    return MergeReport(tuple(dropped), tuple(replaced), tuple(kept))


def _stands(root: Root, path: str) -> bool:
    return os.path.lexists(root.locate(path))


def pre_place(report: MergeReport, target: Root, load: Payload, payloads: Shelf) -> None:
    """Write what the merge would drop into the staged etc: the merge leaves it alone there, so that even a reboot that
    somebody else orders now ends with these files in place."""
    wanted = set(report.dropped)
    commit.apply(load, payloads, target, lambda path: path in wanted)


def late_changes(etc: Path, since: float) -> tuple[str, ...]:
    """Files below /etc changed after the merge: the new root will not have these changes. For the log."""
    found = []
    for folder, _folders, names in os.walk(etc):
        for name in names:
            path = os.path.join(folder, name)
            try:
                if os.lstat(path).st_ctime > since:
                    found.append(path)
            except OSError:  # it went away while we looked
                continue
    return tuple(sorted(found))
