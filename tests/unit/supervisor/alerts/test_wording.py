"""Messages about changes: the line for a phone, the diff where there is room, templates."""

import pytest

from musterd.supervisor.alerts.changes import Change
from musterd.supervisor.alerts.rules import Line, Message
from musterd.supervisor.alerts.settings import Destination
from musterd.supervisor.alerts.wording import Room, as_data, severity, texts

KITES = Change(
    "kites",
    2,
    0.0,
    "@kites.1",
    summary="price 49.00 € → 39.00 €",
    before={"price": "49.00 €"},
    after={"price": "39.00 €"},
    url="https://shop.example/kites",
)
OLD = "\n".join(f"kite {number}" for number in range(50))
TEXT = Change("boats", 5, 0.0, summary="+1 −1 lines: boat", before=OLD, after=OLD + "\nboat")


def message(*changes: Change, **fields: object) -> Message:
    return Message("me", 1, 0.0, changes=list(changes), **fields)  # type: ignore[arg-type]


def test_one_change_is_the_title() -> None:
    [text] = texts(message(KITES), "vps1", Destination(), Room())
    assert text.title == "kites: price 49.00 € → 39.00 €"
    assert text.body.endswith(", musterd on vps1")
    assert severity(message(KITES)) == "info"


def test_a_change_without_a_summary_names_its_run() -> None:
    [text] = texts(message(Change("kites", task="@kites.1")), "vps1", Destination(), Room())
    assert text.title == "kites: another result: musterctl task @kites.1"
    [text] = texts(message(Change("kites", number=3)), "vps1", Destination(), Room())
    assert text.title == "kites: another result: musterctl history kites"


def test_a_text_has_its_diff_as_far_as_there_is_room() -> None:
    [text] = texts(message(TEXT), "vps1", Destination(), Room())
    assert text.body.endswith("\n kite 48\n kite 49\n+boat")
    [text] = texts(message(TEXT), "vps1", Destination(), Room(body=85))
    assert len(text.body) <= 85
    assert text.body.endswith(" more lines")
    of_field = Change("boats", 5, before={"text": OLD, "n": 1}, after={"text": "x", "n": 2})
    [text] = texts(message(of_field), "vps1", Destination(), Room())
    assert "\n\ntext:\n@@" in text.body
    assert '"n"' not in text.body


def test_control_characters_of_a_site_do_not_reach_a_service() -> None:
    evil = "\x1b]0;a\x07\x00 \u202eb\r"
    change = Change("kites", 5, 0.0, before=OLD + evil, after=evil + OLD, summary=evil)
    stale = Line("watch.stale", "kites", f"HTTP 503 {evil}\nsecond line")
    for template in (Destination(), Destination(title="{before}", body="{before} {diff}")):
        [text] = texts(message(change, began=[stale]), "vps1", template, Room())
        assert text.title.isprintable()
        assert text.body.replace("\n", "").isprintable()
        assert "second line" in text.body or template.body


def test_several_changes_have_a_line_each() -> None:
    [text] = texts(message(KITES, TEXT, KITES), "vps1", Destination(), Room())
    assert text.title == "3 changes: kites, boats"
    lines = text.body.split("\n")
    assert [line.partition(" [")[0] for line in lines[:3]] == [
        "kites: price 49.00 € → 39.00 €",
        "boats: +1 −1 lines: boat",
        "kites: price 49.00 € → 39.00 €",
    ]
    assert "\n\nboats:\n@@" in text.body


def test_changes_and_incidents_may_share_a_message() -> None:
    mixed = message(KITES, began=[Line("breaker.open", "site.example")])
    [text] = texts(mixed, "vps1", Destination(), Room())
    assert text.title == "musterd on vps1: 1 changes, 1 alerts"
    assert "kites: price" in text.body
    assert "breaker.open site.example" in text.body


@pytest.mark.parametrize("room", [Room(0, 160), Room(0, 1000), Room(30, 200), Room(250, 2000)])
def test_lines_that_do_not_fit_come_in_further_parts(room: Room) -> None:
    many = [Change(f"site{number}", 2, summary="price 1 → 2") for number in range(50)]
    parts = texts(message(*many), "vps1", Destination(), room)
    assert sum(part.lines for part in parts) == 50
    assert all(len(part.body) <= room.body for part in parts)
    if room.title:
        assert all(len(part.title) <= room.title for part in parts)
    else:  # the title is a line of the body
        assert all(len(part.title) + 2 + len(part.body) <= room.body for part in parts)
    whole = "\n".join(part.body for part in parts)
    assert [f"site{number}: price 1 → 2" in whole for number in range(50)] == [True] * 50
    assert parts[-1].title.endswith(f" ({len(parts)}/{len(parts)})")


def test_what_is_left_of_a_message_when_some_lines_have_arrived() -> None:
    mixed = message(KITES, TEXT, began=[Line("a", "")], ended=[Line("b", "")])
    assert mixed.without(1).changes == [TEXT]
    assert mixed.without(1).began
    assert (mixed.without(3).changes, mixed.without(3).began) == ([], [])
    assert mixed.without(3).ended


def test_a_message_that_may_come_twice_says_so() -> None:
    [text] = texts(message(KITES, again=True), "vps1", Destination(), Room())
    assert text.title == "kites: price 49.00 € → 39.00 € (again)"
    assert as_data(message(KITES, again=True), "vps1", Destination())["again"] is True


def test_templates_are_filled_for_each_change() -> None:
    given = Destination(
        title="{summary} on {host}", body="{schedule} {before} {after} {url} {number} {event}{{}}"
    )
    [text] = texts(message(KITES), "vps1", given, Room())
    assert text.title == "price 49.00 € → 39.00 € on vps1"
    assert text.body == (
        'kites {"price": "49.00 €"} {"price": "39.00 €"} https://shop.example/kites 2 '
        "task.changed{}"
    )
    [text] = texts(message(KITES, TEXT), "vps1", given, Room())
    assert text.title == "price 49.00 € → 39.00 € on vps1 (+1 more)"
    assert "\nboats kite 0\n" in text.body
    stale = Message("me", 1, 0.0, [Line("watch.stale", "kites", "3 runs in a row failed")])
    [text] = texts(stale, "vps1", Destination(title="{schedule}: {summary}", body="{at}"), Room())
    assert text.title.startswith("kites: its runs fail")
    assert text.title.endswith("3 runs in a row failed")


def test_sites_that_fail_and_recover_are_titled_by_their_names() -> None:
    stale = Message("me", 1, 0.0, [Line("watch.stale", "kites", "3 runs in a row failed")])
    over = Message("me", 2, 0.0, ended=[Line("watch.stale", "kites", "", 10.0, 70.0)])
    back = Message("me", 3, 0.0, [Line("watch.recovered", "kites")])
    titles = [texts(each, "vps1", Destination(), Room())[0].title for each in (stale, over, back)]
    assert titles == [
        "kites: its runs fail",
        "kites: its runs succeed again",
        "kites: its runs succeed again",
    ]


def test_programs_get_before_after_fields_and_diff() -> None:
    [told] = as_data(message(KITES), "vps1", Destination())["changes"]
    assert told["fields"] == {"price": {"before": "49.00 €", "after": "39.00 €"}}
    assert (told["before"], told["after"]) == ({"price": "49.00 €"}, {"price": "39.00 €"})
    assert '+  "price": "39.00 €"' in told["diff"]
