"""The picture of states and steps: as the model is now, whole, and readable."""

from __future__ import annotations

import itertools
import xml.etree.ElementTree as ElementTree

from mcdaemon.decide import Step
from tests.model import picture
from tests.model.picture import Box
from tests.model.world import PATIENT

ARROWS = picture.arrows()
DRAWING = picture.draw(ARROWS)
RENEW = "run `make picture`"


def overlap(one: Box, other: Box) -> bool:
    beside = one.right <= other.x or other.right <= one.x
    return not (beside or one.bottom <= other.y or other.bottom <= one.y)


def test_the_readme_and_the_drawing_show_the_model_of_now() -> None:
    assert picture.README.read_text() == picture.in_readme(ARROWS), RENEW
    assert picture.SVG.read_text() == picture.svg(ARROWS), RENEW


def test_a_change_of_the_policy_changes_both() -> None:
    fewer = tuple(arrow for arrow in ARROWS if arrow[1] != Step.VERIFY_ROOT.value)
    assert picture.svg(fewer) != picture.svg(ARROWS)
    assert picture.text(fewer) != picture.text(ARROWS)


def test_every_step_with_an_effect_and_every_state_is_in_it() -> None:
    assert {step for _before, step, _after in ARROWS} == {step.value for step in set(Step) - PATIENT}
    assert set(DRAWING.boxes) == set(picture.ORDER)
    drawn = {text.text for text in ElementTree.fromstring(picture.svg(ARROWS)).iter() if text.text}
    assert drawn >= set(picture.ORDER)


def test_no_box_and_no_label_lies_on_another_and_no_line_crosses_a_box() -> None:
    shown = [*DRAWING.boxes.values(), *DRAWING.labels]
    for one, other in itertools.combinations(shown, 2):
        assert not overlap(one, other), (one, other)
    width, height = DRAWING.size()
    for box in shown:
        assert box.x >= 0 and box.y >= 0 and box.right <= width and box.bottom <= height, box
    for line in DRAWING.lines:
        for (x, y), (to_x, to_y) in zip(line, line[1:]):
            stretch = Box(min(x, to_x), min(y, to_y), abs(to_x - x), abs(to_y - y), "")
            crossed = [box.text for box in DRAWING.boxes.values() if overlap(stretch, box)]
            assert not crossed, (line, crossed)
