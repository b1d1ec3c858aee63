"""The power is cut at the calls of the agent, on a block device that really loses what was not synced.

One run of the agent for each scenario; each disk that a power cut at one of its calls would leave is kept. An even
spread of them is looked at as it lies, a smaller one is booted, and goes on until it rests. With MCDAEMON_CRASH=all
every one is looked at, and booted twice: with the same config desired, and with the old one.
"""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from tests.crash.everywhere import ground
from tests.crash.killing import Variant
from tests.crash.powercut import Ready, Run, make_image, problems_after, run_with_cuts, torn
from tests.crash.scenarios import Ground, scenario
from tests.crash.tracer import require_permission
from tests.field.evidence import ARCHIVE
from tests.stand.node import Node

pytestmark = pytest.mark.stand

ALL = os.environ.get("MCDAEMON_CRASH") == "all"
SCENARIOS = ("files", "staged", "live")

Record = Callable[[str, object], None]
SHARES = 3
LOOKS = 12
MOST = 10_000 if ALL else 40
# One that is withdrawn early on is undone; one that stays gets there, wherever the cut was.
VARIANTS = (Variant.WITHDRAWN, Variant.STAYS, Variant.STAYS)

_FORGETFUL = b"""\
import os, stat
_fsync = os.fsync
os.fsync = lambda fd: _fsync(fd) if stat.S_ISDIR(os.fstat(fd).st_mode) else None
"""

Cutting = Callable[[str], tuple[Ready, Run]]


@pytest.fixture(scope="module")
def cutting() -> Iterator[Cutting]:
    """The runs of the scenarios, each made once, from one disk. Fails where tracing is not permitted."""
    require_permission()
    made: dict[str, tuple[Ready, Run]] = {}
    with ground() as place:
        disk, _at_rest = scenario("files").make_disk(place)
        image = make_image(disk)

        def get(name: str) -> tuple[Ready, Run]:
            if name not in made:
                ready = Ready(scenario(name), place, image)
                made[name] = ready, run_with_cuts(ready, MOST)
            return made[name]

        yield get


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", SCENARIOS)
def test_no_power_cut_leaves_a_torn_file_or_a_journal_that_cannot_be_read(
    cutting: Cutting, name: str, record_property: Record
) -> None:
    _ready, run = cutting(name)
    said = f"power cuts, {name}: {run.stops} calls, {run.disks} different disks, {len(run.cuts)} kept"
    record_property("numbers", said)
    assert len(run.cuts) > LOOKS
    looked = run.cuts if ALL else [run.share(index, LOOKS) for index in range(LOOKS)]
    assert [problem for cut in looked for problem in torn(cut)] == []


def forget_file_syncs(_ground: Ground, node: Node) -> None:
    """From now on the node's agent syncs directories only."""
    archive = io.BytesIO(node.machine.read_bytes(ARCHIVE))
    with zipfile.ZipFile(archive) as old:
        entries = {name: old.read(name) for name in old.namelist() if name != "__main__.pyc"}
    entries["__main__.py"] = _FORGETFUL + entries["__main__.py"]
    changed = io.BytesIO()
    with zipfile.ZipFile(changed, "w") as new:
        for name, content in entries.items():
            new.writestr(name, content)
    node.machine.write(ARCHIVE, changed.getvalue(), 0o755)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_an_agent_that_forgets_to_sync_its_files_is_found_out(cutting: Cutting) -> None:
    ready, _run = cutting("live")
    forgetful = replace(ready.scenario, name="forgetful", more=forget_file_syncs)
    run = run_with_cuts(Ready(forgetful, ready.ground, ready.image), MOST)
    problems = [problem for cut in run.cuts for problem in torn(cut)]
    assert any("the journal cannot be read" in problem for problem in problems)


@pytest.mark.skipif(ALL, reason="all of them are booted")
@pytest.mark.timeout(120)
@pytest.mark.parametrize("share", range(SHARES), ids=lambda share: f"{share + 1}of{SHARES}")
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_node_whose_power_was_cut_ends_in_exactly_the_target_or_exactly_as_it_was(
    cutting: Cutting, name: str, share: int
) -> None:
    """STATE-01."""
    ready, run = cutting(name)
    cut = run.share(share, SHARES)
    print(f"{name}: cut at {cut}")
    assert problems_after(cut, ready, VARIANTS[share]) == []


@pytest.mark.skipif(not ALL, reason="takes an hour: set MCDAEMON_CRASH=all")
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("variant", [Variant.STAYS, Variant.WITHDRAWN], ids=lambda variant: variant.value)
@pytest.mark.parametrize("name", SCENARIOS)
def test_every_node_whose_power_was_cut_ends_in_exactly_the_target_or_exactly_as_it_was(
    cutting: Cutting, name: str, variant: Variant, record_property: Record
) -> None:
    ready, run = cutting(name)
    problems = [problem for cut in run.cuts for problem in problems_after(cut, ready, variant)]
    record_property("numbers", f"{name}, {variant.value}: {len(run.cuts)} power cuts, {len(problems)} problems")
    assert problems == []
