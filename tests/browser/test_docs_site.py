"""The documentation as a site: it is whole, asks nobody else for anything, and can be searched."""

import inspect
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from lxml import html
from playwright.sync_api import Page, Request, expect, sync_playwright

import musterd
from musterd import testing
from musterd.workers import toolkit

pytest.importorskip("sphinx", reason="the extra docs is not installed")
pytest.importorskip("furo", reason="the extra docs is not installed")

BUILD_SECONDS_MAX = 280
pytestmark = pytest.mark.timeout(BUILD_SECONDS_MAX + 20)

ROOT = Path(__file__).parents[2]
CONF = Path("docs/site")
WIDTHS = (390, 1280)
# What a browser loads by itself; a link (<a href>) only leads somewhere.
LOADS = "//script/@src | //img/@src | //source/@srcset | //iframe/@src | //link/@href"


def build(root: Path, into: Path) -> "subprocess.CompletedProcess[str]":
    """Build the site as `make docs` does."""
    sphinx = [sys.executable, "-m", "sphinx", "-q", "-E", "-W", "--keep-going"]
    return subprocess.run(
        [*sphinx, "-c", CONF, "-d", into / "doctrees", ".", into / "site"],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=BUILD_SECONDS_MAX,
        check=False,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site of this tree."""
    folder = tmp_path_factory.mktemp("docs")
    done = build(ROOT, folder)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return folder / "site"


class Built:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.root = html.parse(path).getroot()
        self.ids = {*self.root.xpath("//@id"), *self.root.xpath("//a/@name")}


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Built]:
    return {path: Built(path) for path in site.rglob("*.html")}


def test_every_page_of_the_documentation_is_there(site: Path, pages: dict[Path, Built]) -> None:
    written = [path.relative_to(ROOT) for path in (ROOT / "docs").rglob("*.md")]
    assert len(written) > 40
    assert [each for each in written if site / each.with_suffix(".html") not in pages] == []


def test_every_link_leads_to_a_file_and_an_anchor(site: Path, pages: dict[Path, Built]) -> None:
    broken = []
    for path, page in pages.items():
        for link in page.root.xpath("//a/@href"):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            anchors = pages[target].ids if target in pages else set()
            if not target.is_file() or (parts.fragment and parts.fragment not in anchors):
                broken.append(f"{path.relative_to(site)}: {link}")
    assert not broken, broken


def test_no_page_loads_anything_from_elsewhere(site: Path, pages: dict[Path, Built]) -> None:
    foreign = []
    for path, page in pages.items():
        for link in page.root.xpath(LOADS):
            parts = urlsplit(link)
            if parts.scheme == "data" or link == "#":
                continue
            target = (path.parent / unquote(parts.path)).resolve()
            if parts.scheme or parts.netloc or not target.is_file():
                foreign.append(f"{path.relative_to(site)}: {link}")
    for sheet in site.rglob("*.css"):
        found = re.findall(r"@import.*|url\(['\"]?(?:https?:)?//.*?\)", sheet.read_text())
        foreign += [f"{sheet.name}: {each}" for each in found]
    assert not foreign, foreign


def test_every_public_name_is_in_the_reference(pages: dict[Path, Built], site: Path) -> None:
    reference = pages[site / "docs" / "api.html"]
    for module in (musterd, testing, toolkit):
        for name in module.__all__:
            if inspect.ismodule(getattr(module, name)):
                shown = f"module-{module.__name__}.{name}"
            else:
                shown = f"{module.__name__}.{name}"
            same = {f"musterd.{name}", shown}  # a toolkit's error may be one of musterd, too
            assert same & reference.ids or name == "__version__", f"{shown} is not in docs/api.md"


def test_whatever_is_in_the_reference_says_what_it_does(
    pages: dict[Path, Built], site: Path
) -> None:
    entries = pages[site / "docs" / "api.html"].root.xpath(
        "//dl[contains(@class, 'py') and not(contains(@class, 'attribute'))]"
    )
    assert len(entries) > 150
    silent = [entry.xpath("string(dt/@id)") for entry in entries if not entry.xpath("dd/p")]
    assert not silent, f"without a docstring: {silent}"


def test_what_is_broken_is_an_error(tmp_path: Path) -> None:
    """A site that is whole but for one link, one anchor, one file and one page."""
    shutil.copytree(ROOT / CONF, tmp_path / CONF)
    (tmp_path / "README.md").write_text("# In short\n")
    (tmp_path / "docs" / "index.md").write_text(
        "# All\n\n## Begin here\n\n- [In short](../README.md)\n- [Tutorial](tutorial.md)\n"
    )
    (tmp_path / "docs" / "tutorial.md").write_text(
        "# Tutorial\n\nSee [here](#begin), [there](#end), [a page](gone.md) and "
        "![a picture](images/gone.svg).\n\n## Begin\n"
    )
    (tmp_path / "docs" / "lonely.md").write_text("# Lonely\n")
    done = build(tmp_path, tmp_path)
    assert done.returncode != 0
    told = [line for line in done.stderr.splitlines() if f"{tmp_path}/docs/" in line]
    assert len(told) == 4, told
    for fault in ("'end'", "'gone.md'", "images/gone.svg", "lonely.md"):
        assert any(fault in line for line in told), (fault, told)


# -- in a browser -----------------------------------------------------------------------------


@pytest.fixture
def address(site: Path) -> Iterator[str]:
    """Serve the site on loopback."""

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(site)))
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def amiss() -> list[str]:
    """What a page asks others for, and each error of its scripts."""
    return []


@pytest.fixture
def tab(address: str, amiss: list[str]) -> Iterator[Page]:
    def note(request: Request) -> None:
        if not request.url.startswith((address, "data:")):
            amiss.append(request.url)

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=os.environ.get("MUSTERD_CHROMIUM", "/usr/bin/chromium")
        )
        page = browser.new_page(base_url=address)
        page.on("request", note)
        page.on("pageerror", lambda error: amiss.append(str(error)))
        yield page
        browser.close()


def test_it_fits_a_phone_and_a_desk_and_is_searched_without_anybody_else(
    tab: Page, amiss: list[str]
) -> None:
    tab.goto("/")
    expect(tab).to_have_url(re.compile("/docs/index.html$"))
    tab.wait_for_function("document.images[0]?.naturalWidth > 0")  # the picture is shown
    for width in WIDTHS:
        tab.set_viewport_size({"width": width, "height": 900})
        for name in ("index", "api", "performance"):
            tab.goto(f"/docs/{name}.html")
            assert tab.evaluate("document.documentElement.scrollWidth") <= width, (name, width)
    tab.get_by_placeholder("Search").fill("breaker half-open")
    tab.keyboard.press("Enter")
    found = tab.locator("#search-results li a", has_text="Resilience").first
    expect(found).to_be_visible()
    found.click()
    expect(tab.locator("h1")).to_contain_text("Resilience")
    assert amiss == []
