"""Users of a root: who they are, their ssh keys, their password hashes.

Names are looked up in the root's own files, never through the running system's NSS: a deployment that is to boot can
have other numbers (rpm-ostree layers system users into it). On RHCOS and FCOS, users of the image are in
/usr/lib/passwd and /usr/lib/group (nss-altfiles), local ones in /etc.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, Optional

from mcdaemon.errors import Broken, Transient, from_os_error
from mcdaemon.host.files import Entry, Kind, read_file, read_node, write_file
from mcdaemon.host.root import Root, open_parent

# The fragment that Ignition and the MCD use; sshd on RHCOS reads every file of authorized_keys.d.
KEYS_FILE = ".ssh/authorized_keys.d/ignition"

# No password matches it, and keys still work; what the MCD sets where a config has no hash.
NO_PASSWORD = "*"

_PASSWD = ("/etc/passwd", "/usr/lib/passwd")
_GROUP = ("/etc/group", "/usr/lib/group")
_SHADOW = "/etc/shadow"
_SHADOW_MODE = 0o000
_SECONDS_PER_DAY = 86400


class Account(NamedTuple):
    """A user of a root; `home` is a path of that root."""

    uid: int
    gid: int
    home: str


def lookup_user(root: Root, name: str) -> Account:
    """Find a user by name. Raises Broken (code "no-such-user") where the root has none, or where it cannot be read."""
    for fields in _records(root, _PASSWD, name, 6):
        with contextlib.suppress(ValueError):
            return Account(int(fields[2]), int(fields[3]), fields[5])
    raise Broken(f"cannot find the user {name!r} in {root.path}", _where(_PASSWD), "no-such-user")


def lookup_group(root: Root, name: str) -> int:
    """The id of a group. Raises Broken (code "no-such-group") where the root has none, or where it cannot be read."""
    for fields in _records(root, _GROUP, name, 3):
        with contextlib.suppress(ValueError):
            return int(fields[2])
    raise Broken(f"cannot find the group {name!r} in {root.path}", _where(_GROUP), "no-such-group")


def authorized_keys_nodes(root: Root, user: str, keys: Iterable[str]) -> Mapping[str, Entry]:
    """What makes these keys the ones of a user: ~/.ssh/authorized_keys.d/ignition and the directories to it.

    No keys make an empty file, as in the MCD (mcd.md 3.11). The user's own ~/.ssh/authorized_keys is not touched. A
    home that does not exist is made, too: a parent made by the way would be root's, and sshd would refuse it
    (USER-03). Raises Broken as lookup_user, and for a key that is more than one line.
    """
    account = lookup_user(root, user)
    lines = []
    for number, key in enumerate(keys):
        if "\n" in key.strip() or "\0" in key:
            raise Broken(f"cannot use ssh key {number} of {user!r}: it is not one line")
        lines.append(key.strip() + "\n")
    path = f"{account.home.rstrip('/')}/{KEYS_FILE}"
    directory = Entry.directory(0o700, account.uid, account.gid)
    nodes = {} if read_node(root, account.home).kind is Kind.DIRECTORY else {account.home: directory}
    for parent in (os.path.dirname(os.path.dirname(path)), os.path.dirname(path)):
        nodes[parent] = directory
    nodes[path] = Entry.file("".join(lines).encode(), 0o600, account.uid, account.gid)
    return nodes


def set_password_hash(root: Root, user: str, password_hash: Optional[str], today: Optional[int] = None) -> bool:
    """Set the password hash of a user in the root's /etc/shadow; None means NO_PASSWORD. False where it was that.

    Nothing is written then (USER-05). Owner and mode of the file stay. An empty hash, which would let everybody in
    (mcd.md 3.11), is refused. `today` is the day of the change since 1970. Raises Broken for a user that the root
    does not have and for a hash that is none, Transient while another program changes the file.
    """
    text = NO_PASSWORD if password_hash is None else password_hash
    if not text or any(character in text for character in ":\n\0") or not text.isascii():
        raise Broken(f"cannot set the password of {user!r}: what is given is not a password hash", "see crypt(5)")
    lookup_user(root, user)
    day = int(time.time()) // _SECONDS_PER_DAY if today is None else today
    with _password_lock(root):
        node = read_node(root, _SHADOW)
        lines = (read_file(root, _SHADOW) or b"").decode("utf-8", "surrogateescape").splitlines()
        changed = _with_hash(lines, user, text, day)
        if changed == lines:
            return False
        mode, uid, gid = (node.mode, node.uid, node.gid) if node.kind is Kind.FILE else (_SHADOW_MODE, 0, 0)
        content = "".join(line + "\n" for line in changed).encode("utf-8", "surrogateescape")
        write_file(root, _SHADOW, content, mode, uid, gid)
    return True


def password_hash(root: Root, user: str) -> Optional[str]:
    """The hash of a user in the root's /etc/shadow, None where it has no line. A secret, for undo records only."""
    found = [fields[1] for fields in _records(root, (_SHADOW,), user, 2)]
    return found[0] if found else None


def has_password_hash(root: Root, user: str, password_hash: Optional[str]) -> bool:
    """True where a user's hash in the root's /etc/shadow is this one. Raises Broken where the file cannot be read."""
    wanted = NO_PASSWORD if password_hash is None else password_hash
    found = [fields[1] for fields in _records(root, (_SHADOW,), user, 2)]
    return found[:1] == [wanted]


def _with_hash(lines: list[str], user: str, text: str, day: int) -> list[str]:
    changed = []
    seen = False
    for line in lines:
        fields = line.split(":")
        if fields[0] == user and not seen:
            seen = True
            if len(fields) < 2 or fields[1] != text:
                line = ":".join([user, text, str(day), *(fields[3:] or ["0", "99999", "7", "", "", ""])])
        changed.append(line)
    return changed if seen else [*changed, f"{user}:{text}:{day}:0:99999:7:::"]


def _records(root: Root, paths: Iterable[str], name: str, least: int) -> Iterator[list[str]]:
    for path in paths:
        content = read_file(root, path)
        for line in (content or b"").decode("utf-8", "surrogateescape").splitlines():
            fields = line.split(":")
            if fields[0] == name and len(fields) >= least:
                yield fields


def _where(paths: Iterable[str]) -> str:
    return f"neither {' nor '.join(paths)} has it; only users of the target root can own files"


@contextlib.contextmanager
def _password_lock(root: Root) -> Iterator[None]:
    """The lock that passwd, usermod and systemd-sysusers take, lckpwdf(3)."""
    with open_parent(root, "/etc/.pwd.lock") as place:
        if place is None:
            raise Broken(f"cannot change passwords in {root.path}: it has no /etc")
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            descriptor = os.open(place.name, flags, 0o600, dir_fd=place.fd)
        except OSError as error:
            raise from_os_error(error, "lock", "/etc/.pwd.lock") from error
        try:
            _lock(descriptor)
            yield
        finally:
            os.close(descriptor)


def _lock(descriptor: int) -> None:
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise Transient("cannot change passwords: another program holds /etc/.pwd.lock") from error
