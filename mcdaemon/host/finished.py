"""What the text of a transaction that failed means for an update: rpm-ostree has no error codes (rpm-ostree.md 2.7)."""

from __future__ import annotations

import re

from mcdaemon.errors import Broken, Failure, Held, HoldReason, Transient

UNIT = "rpm-ostreed.service"


def _says(codes: str, *words: str) -> re.Pattern[str]:
    """Texts with one of the words, or one of the HTTP statuses said as such: digits alone are part of every digest."""
    names = "not found|forbidden|unauthorized|too many requests|bad gateway|service unavailable|gateway time-?out"
    status = rf"(?:status|http(?:/[\d.]+)?)[^\d\n]{{0,30}}\b(?:{codes})\b|\b(?:{codes}):? \(?(?:{names})"
    return re.compile("|".join([status, *map(re.escape, words)]), re.IGNORECASE)


_PASSING = _says(
    "500|502|503|504",
    "no such host",
    "timeout",
    "timed out",
    "deadline exceeded",
    "connection reset",
    "connection refused",
    "unexpected EOF",
    "broken pipe",
    "resolve host",
    "name resolution",
    "no route to host",
    "network is unreachable",
    "Bus owner changed",
    "cancelled",
)
_SPACE = re.compile("No space left on device|min-free-space|Disk quota exceeded")
_IMAGE = _says("404", "does not resolve to an image ID", "manifest unknown", "name unknown", "blob unknown")
_CREDENTIALS = _says("401|403", "unauthorized", "authentication required", "access to the resource is denied")
_PATIENCE = _says("429", "toomanyrequests")
_LOCAL = re.compile(
    "too many open files|cannot allocate memory|out of memory|resource temporarily unavailable|input/output error"
    "|read-only file ?system|bad file descriptor|killed by signal|SIGKILL|failed to fork|interrupted system call"
    "|skopeo proxy|ostree-finalize-staged.service|device or resource busy|stale file handle",
    re.IGNORECASE,
)
"""Trouble of this node and of this moment (rows 5, 7, 10; 2.11): it says nothing about the target."""
_MOVED = re.compile(
    "Expected staged base checksum|No pending staged deployment found|Staged deployment already unlocked"
)
"""Somebody else was faster (rows 39, 44 to 46): the next round looks afresh."""
_TARGET = re.compile(
    "Packages not found|Could not depsolve|No packages in transaction|Base packages|base packages would be replaced"
    "|Forbidden base package|Package .* not found|Multiple subdirectories found|Override already exists"
    "|No overrides for package|LockLayering=|unconfigured-state|ostree.bootable label|Image has architecture"
    "|refusing usage|rejected by policy|signature was required|Sanity-checking final rootfs|No enabled repositories"
    "|Old and new refs are equal|While checking against deployment timestamp|Failed to find kernel"
)
"""The target's own fault, whatever the node does (rows 13 to 31, 56 to 59)."""

LOCAL_TROUBLE = "local-trouble"
"""Code of a failure of the node's own that passes; not for ever: somebody has to look when it stays."""
NOT_UNDERSTOOD = "not-understood"
"""Code of a failure whose text is not known here: once may be chance, some times is the target's fault."""


def verdict(text: str, doing: str) -> Failure:
    """What `Finished(false, text)` means for us (rpm-ostree.md 7, 7.1). `doing`: for the sentence "cannot ..."."""
    sentence = f"cannot {doing}: {text}"
    if _SPACE.search(text):
        return Held(HoldReason.SPACE, sentence, "free space on the disk")
    if _IMAGE.search(text):
        return Held(HoldReason.IMAGE, sentence, "an image that was there when it was checked is gone")
    if _CREDENTIALS.search(text):
        return Held(HoldReason.CREDENTIALS, sentence, "see the pull secret")
    if _PATIENCE.search(text):
        return Held(HoldReason.REGISTRY, sentence)
    if _TARGET.search(text):
        return Broken(sentence, f"see `journalctl -u {UNIT}`")
    if _PASSING.search(text) or _MOVED.search(text):
        return Transient(sentence)
    return Transient(sentence, f"see `journalctl -u {UNIT}`", LOCAL_TROUBLE if _LOCAL.search(text) else NOT_UNDERSTOOD)
