"""Where the desired config comes from. Each source answers with a `Desired`, or None when nothing is asked for."""

from __future__ import annotations

from dataclasses import dataclass

from mcdaemon.machineconfig.model import MachineConfig


@dataclass(frozen=True)
class Desired:
    """What the node should be. `place` says where that is written.

    `release_image` is the OS image of the release, "" where none is named; `overridden_by` names the MachineConfig
    whose osImageURL hides it, "" where none does.
    """

    config: MachineConfig
    release_image: str = ""
    overridden_by: str = ""
    place: str = ""
