"""docs/operations.md agrees with the program, the journal's catalog and the examples."""

import re
from pathlib import Path

import pytest

from musterd.supervisor.alerts.kinds import KINDS, USUAL
from musterd.supervisor.config.load import load
from musterd.supervisor.log.log import MESSAGES
from musterd.supervisor.log.message_ids import MESSAGE_IDS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "operations.md").read_text()
CATALOG = (ROOT / "systemd" / "musterd.catalog").read_text()
SHIPPED = ROOT / "etc" / "musterd.toml"
EXAMPLES = ROOT / "etc" / "examples"
MIB = 2**20
# The store itself tells these, before there is a fleet.
OF_THE_STORE = {"store.corrupt", "store.migrated"}
# MiB that the page plans with: supervisor and two fork servers, a parser, a browser.
BASE, PARSER, BROWSER = 60, 19, 346
# The share of a machine's memory that the kernel leaves, and the MiB that other programs take.
USABLE, OTHERS = 0.94, 200


def rows() -> dict[str, str]:
    """Return the commands that the page has for each message."""
    found: dict[str, str] = {}
    for names, _, commands in re.findall(
        r"^\| (`[a-z][a-z.`, _]+) \| (.+) \| (.+) \|$", PAGE, re.M
    ):
        found |= dict.fromkeys(re.findall(r"`(\w+\.\w+)`", names), commands)
    return found


def explained(event: str) -> str:
    """Return the catalog's text about an event."""
    return CATALOG.partition(f"-- {MESSAGE_IDS[event]}\n")[2].partition("\n-- ")[0]


@pytest.mark.parametrize("event", MESSAGE_IDS)
def test_every_message_of_the_catalog_has_a_row_with_a_command_of_it(event: str) -> None:
    assert event in rows(), f"no row for {event}"
    ours = set(
        re.findall(r"\b((?:musterctl|journalctl|systemctl|musterd|df) [\w-]+)", rows()[event])
    )
    theirs = set(
        re.findall(r"\b((?:musterctl|journalctl|systemctl|musterd|df) [\w-]+)", explained(event))
    )
    assert ours & theirs, f"{event}: {ours} here, {theirs} in the catalog"


def test_every_alert_that_is_usual_or_lasts_has_a_row() -> None:
    lasting = [name for name, kind in KINDS.items() if kind.lasts]
    assert [name for name in (*USUAL, *lasting) if name not in rows()] == []


def test_every_alert_of_prometheus_has_a_row_with_a_command() -> None:
    rules = (ROOT / "etc" / "prometheus-rules.yml").read_text()
    told = dict(re.findall(r"^\| `(Musterd\w+)` \| .+ \| (.+) \|$", PAGE, re.MULTILINE))
    assert list(told) == re.findall(r"- alert: (\w+)", rules)
    assert [name for name, commands in told.items() if "`" not in commands] == []


def test_every_message_in_the_table_exists() -> None:
    assert [name for name in rows() if name not in {*MESSAGES, *KINDS, *OF_THE_STORE}] == []


def test_the_commands_of_the_page_exist() -> None:
    from musterd.supervisor.__main__ import main as musterd
    from musterd.supervisor.ctl.app import cli as musterctl

    for name, group in (("musterd", musterd), ("musterctl", musterctl)):
        used = re.findall(rf"(?:^|`|; ){name} ([a-z][a-z-]*)", PAGE, re.MULTILINE)
        assert used
        assert [command for command in used if command not in group.commands] == []


def test_links_of_the_page_lead_somewhere() -> None:
    anchors = {
        re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")
        for heading in re.findall(r"^#+ (.+)$", PAGE, re.MULTILINE)
    }
    for file, anchor in re.findall(r"\]\(([^)#:]*)#?([^)]*)\)", PAGE):
        if file:
            assert (ROOT / "docs" / file).exists(), file
        else:
            assert anchor in anchors, anchor


# -- machines of 1, 2, 4 and 8 GB -------------------------------------------------------------


def machines() -> list[tuple[str, ...]]:
    """Return the rows of the table: size in GB, file, parsers, browsers, max_memory, planned."""
    row = r"^\| (\d) GB \| `(\w+\.toml)` \| ([\d to]+) \| ([\d to]+)\D* \| (\w+) \| .+ \|"
    row += r" ([\d.]+ \w+) \|$"
    return re.findall(row, PAGE, re.MULTILINE)


def test_the_table_has_every_example() -> None:
    assert [row[1] for row in machines()] == sorted(path.name for path in EXAMPLES.iterdir())


@pytest.mark.parametrize("row", machines(), ids=lambda row: row[1])
@pytest.mark.parametrize("beside", [[], [SHIPPED]], ids=["alone", "as drop-in"])
def test_an_example_is_what_the_table_says(row: tuple[str, ...], beside: list[Path]) -> None:
    gigabytes, name, parsers, browsers, max_memory, planned = row
    config = load([*beside, EXAMPLES / name], None, [], {}).config
    parser, browser = config.pools["parser"], config.pools["browser"]

    def bounds(text: str) -> tuple[int, int]:
        numbers = [int(number) for number in text.split(" to ")]
        return numbers[0], numbers[-1]

    assert (parser.min or parser.size, parser.max or parser.size) == bounds(parsers)
    assert (browser.min or browser.size, browser.max or browser.size) == bounds(browsers)
    assert browser.max_memory_bytes == int(max_memory.removesuffix("M")) * MIB
    assert (browser.options["backend"], browser.sacrifice, parser.sacrifice) == ("cdp", True, False)

    need = BASE + PARSER * bounds(parsers)[1] + BROWSER * bounds(browsers)[1]
    number, unit = planned.split()
    told = float(number) * (1024 if unit == "GiB" else 1)
    assert told == pytest.approx(need, rel=0.02)
    warned = int(gigabytes) * 1024 * USABLE * config.memory.warning
    assert need + OTHERS <= warned, "it would be made smaller at once"
