"""Every state of the disk that a power cut may leave, by the rules of fsync and rename (see `lossydisk`).

The real steps are recorded with strace, operation by operation. After each one, what a power cut may leave is laid out
as a tree, and the real recovery runs in it. Then: the journal can be read and says the truth, no file is torn, and the
node ends in exactly the old or exactly the new config with nothing left. With MCDAEMON_CRASH=all more states of each
prefix are tried, and all ways on from each of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.crash import offline
from tests.crash.examination import Counterexample, examine, recorded

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: mounts, owners"),
    pytest.mark.usefixtures("quiet"),
]

ALL = os.environ.get("MCDAEMON_CRASH") == "all"
MOST = 48 if ALL else 4
SEED = 20261130

Record = Callable[[str, object], None]


@pytest.fixture
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Thousands of recoveries say thousands of sentences."""
    caplog.set_level("CRITICAL")


@pytest.fixture
def scratch() -> Iterator[Path]:
    """In memory: the states are many, and none of them has to survive anything."""
    with TemporaryDirectory(dir="/dev/shm", prefix="mcdaemon-disk-") as folder:
        yield Path(folder)


@pytest.mark.timeout(3600 if ALL else 120)
@pytest.mark.parametrize("story", offline.STORIES)
def test_whatever_a_power_cut_leaves_is_exactly_old_or_exactly_new_in_the_end(
    story: str, scratch: Path, record_property: Record
) -> None:
    """STATE-01."""
    numbers = examine(recorded(story, scratch), MOST, ALL, SEED)
    record_property("numbers", f"disk, {story}: {numbers}; seed {SEED}")
    assert numbers.prefixes == numbers.operations + 1 > 200 and numbers.states > 150


@pytest.mark.timeout(3600 if ALL else 120)
@pytest.mark.parametrize("story", ["update", "live-taken-back"])
def test_it_is_so_where_var_is_a_file_system_of_its_own(
    story: str, scratch: Path, record_property: Record
) -> None:
    numbers = examine(recorded(story, scratch, var_apart=True), MOST, ALL, SEED)
    record_property("numbers", f"disk, {story}, /var apart: {numbers}; seed {SEED}")
    assert numbers.states > 150


@pytest.mark.parametrize("fault", offline.FAULTS)
@pytest.mark.parametrize("story", ["update", "live-taken-back"])
def test_the_lack_of_a_sync_is_found(story: str, fault: str, scratch: Path) -> None:
    with pytest.raises(Counterexample) as caught:
        examine(recorded(story, scratch, fault), 8, False, SEED)
    print(str(caught.value)[:300])
