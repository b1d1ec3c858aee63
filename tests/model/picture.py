"""The picture of states and steps, drawn from the explored model: `python -m tests.model.picture` renews both of them,
`tests/model/steps.svg` and the text in the README.

A state of the picture is what `decide` goes by; an arrow is a step that was taken from it somewhere in the exploration,
with at most one disturbance, up to where it led in a calm world.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Optional
from xml.sax.saxutils import escape

from mcdaemon.decide import Decision, Observation, Staged, Step, decide
from tests.model import steps, world
from tests.model.explore import visited
from tests.model.facts import arrived, observation
from tests.model.node import BEFORE, KINDS, UP, Kind, Node

PROJECT = Path(__file__).resolve().parents[2]
SVG = PROJECT / "tests/model/steps.svg"
README = PROJECT / "README.md"
BEGIN, END = "<!-- states and steps: made by `make picture` -->\n", "<!-- end of states and steps -->\n"

REST, LIVE = "no update", "live"

Arrow = tuple[str, str, str]
"""State, step, state."""

ORDER = (
    REST, "begun", "OS staged", "staged", "verified", "drained", "finalized", "committed", "proved", "reboot asked for",
    "target booted", "validated", "old one booted", "written off", "live: begun", "live: drained", "live: applied",
)  # fmt: skip
"""From top to bottom; the last ones stand beside them."""


def state(kind: Kind, node: Node) -> str:
    """The name of the state in the picture."""
    u = node.update
    o = observation(kind, node._replace(desired=u.desired) if u is not None else node)  # whatever is wanted meanwhile
    if u is None or o.update is None:
        return REST
    if u.live:
        done = "applied" if u.applied else "drained" if u.drained else "begun"
        return "written off" if u.failure else f"live: {done}"
    if arrived(node):
        return "validated" if u.applied else "target booted"
    if u.failure:
        return "written off"
    if u.armed == BEFORE or u.applied:
        return "old one booted"
    if o.pending:
        done = "reboot asked for" if u.armed else "proved" if o.update.proved else ""
        return done or ("committed" if o.update.committed else "finalized")
    if o.staged is Staged.READY and o.update.verified:
        return "drained" if u.drained else "verified"
    return {Staged.READY: "staged", Staged.OS_ONLY: "OS staged"}.get(o.staged, "begun")


def arrows() -> tuple[Arrow, ...]:
    """All of them, in the order of the states."""
    found = set()
    for kind in KINDS:
        for node in visited(kind, decide, 1):
            if node.agent == UP and node.task is None and not node.going_down and not node.torn:
                o = observation(kind, node)
                arrow = _arrow(kind, node, o, decide(o))
                if arrow is not None:
                    found.add(arrow)
    names = [step.value for step in Step]
    return tuple(sorted(found, key=lambda a: (ORDER.index(a[0]), names.index(a[1]), ORDER.index(a[2]))))


def _arrow(kind: Kind, node: Node, o: Observation, decision: Decision) -> Optional[Arrow]:
    before, after = state(kind, node), node
    if decision.step in world.PATIENT or node.held or not node.images or node.asked:
        return None
    after = steps.begin(kind, node, o, decision)
    while after.agent != UP or after.task is not None or after.going_down:
        after = world.calm(kind, after, decide)[0][1]
    return before, decision.step.value, state(kind, after)


# -- text -------------------------------------------------------------------------------------------------------------


def text(found: Iterable[Arrow]) -> str:
    """One line for each state."""
    lines: dict[str, dict[str, list[str]]] = {}
    for before, step, after in found:
        lines.setdefault(before, {}).setdefault(step, []).append(after)
    width = max(map(len, lines))
    rows = (f"{before:{width}}  " + "; ".join(f"{step} -> {' or '.join(after)}" for step, after in steps.items())
            for before, steps in lines.items())  # fmt: skip
    return "".join(f"    {row}\n" for row in rows)


def in_readme(found: Iterable[Arrow]) -> str:
    """The README with the text of now."""
    before, _, rest = README.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{text(found)}\n{END}{after}"


# -- SVG --------------------------------------------------------------------------------------------------------------

WIDTH, HEIGHT, ROW, LANE, PORT = 130, 34, 62, 14, 12
LEFT, TOP, GAP = 240, 40, 220
HOME = (Step.CONFIRM.value, Step.DISCARD.value)
"""Steps that lead back to where no update is: on rails, or the picture would be all arrows."""

Points = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Box:
    """A rectangle with a text; `x` and `y` are its upper left corner."""

    x: float
    y: float
    width: float
    height: float
    text: str

    @property
    def right(self) -> float:
        return self.x + self.width

    @property
    def bottom(self) -> float:
        return self.y + self.height

    @property
    def middle(self) -> float:
        return self.y + self.height / 2


@dataclass
class Drawing:
    """Boxes of states, labels with the room that they take, and lines, whose last point has the arrow's head."""

    boxes: dict[str, Box]
    labels: list[Box] = field(default_factory=list)
    lines: list[Points] = field(default_factory=list)

    def size(self) -> tuple[float, float]:
        rims = [*self.boxes.values(), *self.labels]
        ends = [point for line in self.lines for point in line]
        right = max([box.right for box in rims] + [x for x, _y in ends])
        return right + 10, max(box.bottom for box in rims) + 10

    def label(self, x: float, y: float, words: str) -> None:
        """`y`: of the base line."""
        self.labels.append(Box(x, y - 10, 6.1 * len(words), 12, words))


def draw(found: Sequence[Arrow]) -> Drawing:
    """Updates that reboot in one column, live ones beside it; an arrow that passes a box by has a lane of its own."""
    drawing = Drawing(_boxes(found))
    together: dict[tuple[str, str], list[str]] = {}
    for before, step, after in found:
        if not (after == REST and step in HOME):
            together.setdefault((before, after), []).append(step)
    ports: dict[tuple[str, bool], int] = {}
    lanes = {False: 0, True: 0}
    for (before, after), words in together.items():
        one, other = drawing.boxes[before], drawing.boxes[after]
        if one.x == other.x and other.y - one.y == ROW:
            x = one.x + WIDTH / 2
            drawing.lines.append(((x, one.bottom), (x, other.y)))
            drawing.label(x + 6, (one.bottom + other.y) / 2 + 3, ", ".join(words))
            continue
        aside = after.startswith(LIVE)
        lanes[aside] += 1
        port = ports[before, aside] = ports.get((before, aside), -1) + 1
        _passing(drawing, one, other, (port, lanes[aside]), ", ".join(words))
    for beside in (False, True):
        for number, step in enumerate(HOME):
            joined = [before for before, taken, after in found
                      if (taken, after) == (step, REST) and before.startswith(LIVE) == beside]  # fmt: skip
            _rail(drawing, [drawing.boxes[name] for name in joined], number, step)
    return drawing


def _boxes(found: Iterable[Arrow]) -> dict[str, Box]:
    there = {name for before, _step, after in found for name in (before, after)}
    column = [name for name in ORDER if name in there and not name.startswith(LIVE)]
    beside = [name for name in ORDER if name in there and name.startswith(LIVE)]
    boxes = {name: Box(LEFT, TOP + row * ROW, WIDTH, HEIGHT, name) for row, name in enumerate(column)}
    for row, name in enumerate(beside):
        boxes[name] = Box(LEFT + WIDTH + GAP, TOP + (row + 2) * ROW, WIDTH, HEIGHT, name)
    return boxes


def _passing(drawing: Drawing, one: Box, other: Box, place: tuple[int, int], words: str) -> None:
    """Out of one side, along a lane, into the left side of the other box. `place`: port and lane."""
    port, lane = place
    out_right = other.x > one.x
    side = other.x - LANE * lane - (0 if out_right else 136)
    start, end = one.y + 6 + port * PORT, other.middle + (6 if one.y > other.y else -6)
    drawing.lines.append(((one.right if out_right else one.x, start), (side, start), (side, end), (other.x, end)))
    drawing.label(one.right + 48 if out_right else side + 4, start - 2, words)


def _rail(drawing: Drawing, joined: Sequence[Box], number: int, step: str) -> None:
    """A line up the right side of a column, which every state joins from which this step leads home."""
    if not joined:
        return
    home, last = drawing.boxes[REST], joined[-1]
    x = last.right + 12 + number * LANE
    if last.x == home.x:
        y = home.bottom - 4
        drawing.lines.append(((last.right, last.middle), (x, last.middle), (x, y), (home.right, y)))
    else:
        y, into = TOP - 10 - number * LANE, home.right - 20 - number * LANE
        drawing.lines.append(((last.right, last.middle), (x, last.middle), (x, y), (into, y), (into, home.y)))
    drawing.lines += [((box.right, box.middle), (x, box.middle)) for box in joined[:-1]]
    drawing.label(last.right + 12 + len(HOME) * LANE, last.middle + 3 + (PORT if number == 0 else -2) / 2, step)


def svg(found: Sequence[Arrow]) -> str:
    """The picture as a file."""
    drawing = draw(found)
    width, height = drawing.size()
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" font-family="sans-serif" '
        'font-size="11">',
        "<!-- made by `make picture` from the explored model; not by hand -->",
        '<defs><marker id="head" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0L8 4L0 8z" fill="#555"/></marker></defs>',
        f'<rect width="{width:.0f}" height="{height:.0f}" fill="#fff"/>',
    ]
    for line in drawing.lines:
        path = "L".join(f"{x:.0f} {y:.0f}" for x, y in line)
        out.append(f'<path d="M{path}" fill="none" stroke="#555" marker-end="url(#head)"/>')
    for box in drawing.boxes.values():
        out.append(
            f'<rect x="{box.x:.0f}" y="{box.y:.0f}" width="{box.width}" height="{box.height}" rx="6" '
            'fill="#eef4fb" stroke="#345"/>'
        )
        out.append(
            f'<text x="{box.x + box.width / 2:.0f}" y="{box.middle + 4:.0f}" text-anchor="middle">'
            f"{escape(box.text)}</text>"
        )
    for label in drawing.labels:
        out.append(f'<text x="{label.x:.0f}" y="{label.y + 10:.0f}" fill="#a33">{escape(label.text)}</text>')
    return "\n".join([*out, "</svg>", ""])


def main() -> None:
    """Renew both."""
    found = arrows()
    SVG.write_text(svg(found))
    README.write_text(in_readme(found))


if __name__ == "__main__":
    main()
