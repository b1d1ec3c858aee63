"""Stands in for certifi inside the zipapp: the authorities are the host's, never a list of our own.

requests imports certifi and asks it for a file at import. The real one, inside an archive, writes its bundle to /tmp
for that on every start; and a node trusts what its administrator put into the system's bundle, no more and no less.
"""

import os

# RHEL, RHEL CoreOS and Fedora CoreOS; then Debian. Where neither exists, an error names the first.
_BUNDLES = ("/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem", "/etc/ssl/certs/ca-certificates.crt")


def where() -> str:
    """The path of the host's bundle of certificate authorities (PEM)."""
    return next((path for path in _BUNDLES if os.path.exists(path)), _BUNDLES[0])


def contents() -> str:
    """The text of that bundle. Raises OSError where it cannot be read."""
    with open(where(), encoding="ascii", errors="replace") as bundle:
        return bundle.read()
