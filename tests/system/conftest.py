"""Machines with a real systemd and musterd installed; skipped where no machine can be made."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import bed
from bed.host import Host

HERE = Path(__file__).parent

SOURCE = HERE.parents[1]
INSTALL = "make -C /usr/src/musterd install EXTRAS=sessions,systemd,web"


# The first test of a session waits for the installation.
IMAGE_TIMEOUT_SECONDS = 1000


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("system").addoption(
        "--tree", type=Path, help="files of the system to boot (default: this machine's)"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.timeout(IMAGE_TIMEOUT_SECONDS))


@pytest.fixture(scope="session")
def tree(request: pytest.FixtureRequest) -> Path:
    """Return the directory with the system that machines are made of: / is this machine."""
    return request.config.getoption("--tree", None) or Path("/")


@pytest.fixture(scope="session")
def image(tree: Path) -> Iterator[bed.Image]:
    """Make the system with `make install` done on top."""
    if reason := bed.missing(tree):
        pytest.skip(f"no machine can be booted here: {reason}")
    shop = bed.Workshop()
    try:
        yield bed.Image(shop, SOURCE, INSTALL, tree)
    finally:
        shop.close()
    assert bed.left_of(shop) == []


@pytest.fixture
def host(image: bed.Image, request: pytest.FixtureRequest) -> Iterator[Host]:
    """Boot a machine for one test, which takes half a second."""
    made = Host(image)
    try:
        made.furnish()
        yield made
        if getattr(request.node, "failed_call", False):
            print(made.journal("-o", "short-monotonic", "-n", "150"))
            print(made.run("systemctl", "status", "musterd*", check=False).stdout)
    finally:
        made.down()
