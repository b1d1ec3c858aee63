"""The node disruption policy from a local file, where there is no cluster to ask."""

from __future__ import annotations

from mcdaemon import textfile
from mcdaemon.document import Malformed, read_yaml
from mcdaemon.errors import Broken
from mcdaemon.machineconfig import disruption

_MAX_BYTES = 1024 * 1024


def load_policy(path: str) -> disruption.Policy:
    """The built-in policy with the entries of the YAML file at `path`; "" for the built-in one alone.

    Raises Broken with the place of what is wrong; a file that is named and missing is an error, too.
    """
    if not path:
        return disruption.DEFAULT
    try:
        documents = read_yaml(textfile.read(path, _MAX_BYTES))
    except FileNotFoundError as error:
        raise Broken(f"cannot read {path}: no such file", "correct disruption.policy_file in the settings") from error
    except Malformed as error:
        raise Broken(f"cannot use {path}: {error}") from error
    if len(documents) != 1:
        raise Broken(f"cannot use {path}: expected one document, found {len(documents)}")
    return disruption.read_policy(documents[0].data, path)
