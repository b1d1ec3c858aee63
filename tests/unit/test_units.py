"""Unit names, [Install] sections and what a config's units mean, without a root."""

from __future__ import annotations

from typing import Optional

import pytest

from mcdaemon.errors import Irreconcilable
from mcdaemon.host.files import Entry, Kind
from mcdaemon.host.unit_install import DIRECTORY, Form, form_of, install_links, links_of, parse_install
from mcdaemon.host.units import Unit, UnitFile, expected_nodes

WANTED = b"[Install]\nWantedBy=multi-user.target\n"
LINK = f"{DIRECTORY}/multi-user.target.wants/a.service"


def nothing(name: str) -> Optional[UnitFile]:
    return None


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("a.service", Form.PLAIN),
        ("a-b:c_d.e\\x2df.mount", Form.PLAIN),
        ("a@.socket", Form.TEMPLATE),
        ("a@b.timer", Form.INSTANCE),
        ("a@b@c.path", Form.INSTANCE),
        ("a@-.service", Form.INSTANCE),
        ("@b.service", None),
        ("a", None),
        ("a.conf", None),
        (".service", None),
        ("ä.service", None),
        ("a b.service", None),
        ("a/b.service", None),
        ("../a.service", None),
        ("a.service\n", None),
        ("", None),
        ("a" * 247 + ".service", Form.PLAIN),
        ("a" * 248 + ".service", None),
    ],
)
def test_a_name_is_a_unit_name_where_systemd_takes_it(name: str, form: Optional[Form]) -> None:
    assert form_of(name) is form


def test_links_lead_to_where_the_file_is() -> None:
    text = WANTED.decode()
    assert install_links("a.service", text) == ((LINK, f"{DIRECTORY}/a.service"),)
    assert install_links("a.service", text, "/usr/lib/systemd/system/a.service") == (
        (LINK, "/usr/lib/systemd/system/a.service"),
    )


def test_upheld_by_makes_a_link_as_systemd_254_does() -> None:
    assert install_links("a.service", "[Install]\nUpheldBy=b.service\n") == (
        (f"{DIRECTORY}/b.service.upholds/a.service", f"{DIRECTORY}/a.service"),
    )


def test_a_specifier_that_depends_on_the_machine_is_left_out_with_a_note() -> None:
    links = links_of("a.service", "/x/a.service", ["[Install]\nWantedBy=%H.target b.target\nAlias=%m.service\n"])
    assert [path for path, _ in links.links] == [f"{DIRECTORY}/b.target.wants/a.service"]
    assert links.notes == (
        "a.service cannot have the alias '%m.service'",
        "a.service cannot be enabled for '%H.target'",
    )


def test_a_lone_percent_at_the_end_does_not_stop_anything() -> None:
    assert install_links("a.service", "[Install]\nWantedBy=b.target c%\nAlias=%\n") == (
        (f"{DIRECTORY}/b.target.wants/a.service", f"{DIRECTORY}/a.service"),
    )


def test_a_unit_without_an_install_section_is_noted() -> None:
    expectation = expected_nodes([Unit("a.service", b"[Service]\n", True)], nothing)
    assert expectation.notes == (
        "a.service cannot be enabled: its [Install] section asks for nothing that can be done",
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n\n",
        "\\",
        "[Install",
        "[Install]",
        "=",
        "[Install]\n=x\nWantedBy",
        "[Install]\n[",
        "\0",
        "[Install]\nWantedBy=\\",
    ],
)
def test_text_that_is_hardly_a_unit_file_makes_no_links_and_no_error(text: str) -> None:
    assert install_links("a.service", text) == ()


def test_default_instance_means_nothing_outside_a_template() -> None:
    text = "[Install]\nWantedBy=a.target\nDefaultInstance=x\n"
    assert parse_install("a.service", [text]).default_instance == ""
    assert parse_install("a@b.service", [text]).default_instance == ""
    assert parse_install("a@.service", [text]).default_instance == "x"


def test_files_dropins_and_masks_have_the_mode_of_the_mcd() -> None:
    entries = expected_nodes(
        [Unit("a.service", b"x", dropins=(("10-a.conf", b"y"),)), Unit("b.service", mask=True)], nothing
    ).entries
    assert entries == {
        f"{DIRECTORY}/a.service": Entry.file(b"x", 0o644),
        f"{DIRECTORY}/a.service.d/10-a.conf": Entry.file(b"y", 0o644),
        f"{DIRECTORY}/b.service": Entry.link("/dev/null"),
    }


@pytest.mark.parametrize("content", [None, b""])
def test_a_dropin_without_content_is_absent(content: Optional[bytes]) -> None:
    entries = expected_nodes([Unit("a.service", dropins=(("x.conf", content),))], nothing).entries
    assert entries == {f"{DIRECTORY}/a.service.d/x.conf": Entry.absent()}


def test_an_empty_unit_file_is_not_written_because_it_would_mask_the_unit() -> None:
    assert expected_nodes([Unit("a.service", b"")], nothing).entries == {}


def test_enablement_that_is_not_given_leaves_the_links_alone() -> None:
    entries = expected_nodes([Unit("a.service", WANTED, None)], nothing, found=lambda name: [LINK]).entries
    assert set(entries) == {f"{DIRECTORY}/a.service"}


def test_a_disabled_unit_has_no_links_and_neither_has_what_goes_with_it() -> None:
    text = b"[Install]\nWantedBy=multi-user.target\nAlso=b.service\n"
    other = Unit("b.service", b"[Install]\nWantedBy=b.target\n", None)
    entries = expected_nodes([Unit("a.service", text, False), other], nothing).entries
    absent = {path for path, entry in entries.items() if entry.node.kind is Kind.ABSENT}
    assert absent == {LINK, f"{DIRECTORY}/b.target.wants/b.service"}


@pytest.mark.parametrize("order", [1, -1])
def test_what_a_unit_says_of_itself_wins_over_the_also_of_another(order: int) -> None:
    link = f"{DIRECTORY}/b.target.wants/b.service"
    other = b"[Install]\nWantedBy=b.target\n"
    units = [Unit("a.service", WANTED + b"Also=b.service\n", False), Unit("b.service", other, True)]
    assert expected_nodes(units[::order], nothing).entries[link].node.kind is Kind.LINK
    units = [Unit("a.service", WANTED + b"Also=b.service\n", True), Unit("b.service", other, False)]
    assert expected_nodes(units[::order], nothing).entries[link].node.kind is Kind.ABSENT


def test_units_that_name_each_other_in_also_come_to_an_end() -> None:
    units = [Unit(f"{name}.service", WANTED + b"Also=a.service b.service c.service\n", True) for name in "abc"]
    assert len(expected_nodes(units, nothing).entries) == 6


def test_a_unit_file_wins_over_an_alias_of_the_same_name() -> None:
    units = [Unit("a.service", b"x"), Unit("b.service", b"[Install]\nAlias=a.service\n", True)]
    expectation = expected_nodes(units, nothing)
    assert expectation.entries[f"{DIRECTORY}/a.service"].node.kind is Kind.FILE
    assert expectation.notes == (f"{DIRECTORY}/a.service is a file of the config, so no link is made there",)


def test_the_first_of_two_units_with_the_same_alias_gets_it() -> None:
    text = b"[Install]\nAlias=c.service\n"
    expectation = expected_nodes([Unit("a.service", text, True), Unit("b.service", text, True)], nothing)
    assert expectation.entries[f"{DIRECTORY}/c.service"].node.target == f"{DIRECTORY}/a.service"
    assert expectation.notes == (f"{DIRECTORY}/c.service is claimed by two units; it leads to {DIRECTORY}/a.service",)


def test_dropins_of_the_config_add_to_a_unit_of_the_image() -> None:
    def vendor(name: str) -> Optional[UnitFile]:
        return UnitFile(name, f"/usr/lib/systemd/system/{name}", ("[Service]\n",)) if name == "a.service" else None

    unit = Unit("a.service", enabled=True, dropins=(("x.conf", WANTED),))
    entries = expected_nodes([unit], vendor).entries
    assert entries[LINK].node.target == "/usr/lib/systemd/system/a.service"


@pytest.mark.parametrize("name", ["ä.service", "a", "../../etc/passwd", "a/b.service", "a.service.d"])
def test_a_name_that_systemd_does_not_take_is_refused_by_name(name: str) -> None:
    with pytest.raises(Irreconcilable, match="cannot manage the unit") as caught:
        expected_nodes([Unit(name, b"x")], nothing)
    assert name in caught.value.sentence or repr(name) in caught.value.sentence


@pytest.mark.parametrize("name", ["../x.conf", "x", ".x.conf", "a/b.conf", "x.conf\n", ".conf", ""])
def test_a_dropin_that_systemd_would_not_read_is_refused_by_name(name: str) -> None:
    with pytest.raises(Irreconcilable, match="cannot manage the drop-in"):
        expected_nodes([Unit("a.service", dropins=((name, b"x"),))], nothing)


def test_the_content_of_a_unit_is_in_no_repr() -> None:
    unit = Unit("a.service", b"Environment=TOKEN=canary", dropins=(("x.conf", b"canary"),))
    assert "canary" not in repr(unit)
    assert "canary" not in repr(expected_nodes([unit], nothing))
