"""robots.txt is read for one agent, and costs little whatever a site writes into it."""

import time

import pytest
from protego import Protego

from musterd.workers.pages.robots import ROBOTS_BYTES_MAX, without_others

AGENT = "musterd/0.1 (+https://bot.example)"
PAGES = ("https://shop.example/", "https://shop.example/a", "https://shop.example/b/1")
GROUPS = (
    "User-agent: *\nDisallow: /a",
    "User-agent: musterd\nDisallow: /b\n\nUser-agent: *\nDisallow: /",
    "User-agent: one\nUser-Agent: MUSTERD # ours\nDisallow: /b\nUser-agent: two\nDisallow: /",
    "user agent one\nDisallow: /\nuser-agent: musterd*\nAllow: /b\nDisallow: /a",
    "User-agent: sterd\nDisallow: /\n\nUser-agent: bot\nDisallow: /a",
    "User-agent: must\nDisallow: /\nUser-agent: musterd\nDisallow: /b",
    "User-agent: other\nDisallow: /",
    "User-agent:\nDisallow: /",
)


@pytest.mark.parametrize("text", GROUPS)
def test_other_agents_do_not_change_what_is_allowed(text: str) -> None:
    whole, own = Protego.parse(text), Protego.parse(without_others(text, AGENT))
    for page in PAGES:
        assert own.can_fetch(page, AGENT) == whole.can_fetch(page, AGENT), page
    assert own.crawl_delay(AGENT) == whole.crawl_delay(AGENT)


def test_thousands_of_agents_with_thousands_of_rules_are_few_rules() -> None:
    """Protego would make 200 million rules of these 500 KiB, and take a quarter of an hour."""
    parts = [AGENT[:length] for length in range(1, len(AGENT))]
    agents = "".join(f"User-agent: {each}\n" for each in (*parts, *range(12_000)))
    rules = "".join(f"Allow:/{number}\n" for number in range(20_000))
    text = without_others(agents + rules, AGENT)
    assert len(agents + rules) < ROBOTS_BYTES_MAX
    names = {line.partition(" ")[2] for line in text.splitlines() if line.startswith("User")}
    assert names == {AGENT[:-1].lower(), "-"}
    begun = time.process_time()
    assert Protego.parse(text).can_fetch(PAGES[1], AGENT)
    assert time.process_time() - begun < 60
