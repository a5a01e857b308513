"""URLs of clusters as people see them: no part of a password, however the URL is written."""

import pytest

from musterd.ipc.errors import ConfigurationError
from musterd.ipc.wire.direct import URL_CHARS_MAX, is_url, place


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://db.example/tasks", "db.example:5432/tasks"),
        ("postgres://ann@db.example:6543/tasks", "db.example:6543/tasks"),
        ("postgresql://ann:hunter2@db.example/tasks?sslmode=require", "db.example:5432/tasks"),
        ("postgresql://ann:hunter2@[::1]:5433/tasks", "[::1]:5433/tasks"),
        ("postgresql://ann:hunter2@[::1]/tasks", "[::1]:5432/tasks"),
        ("postgresql://a:hunter2@one:5432,two:5433/tasks", "one:5432,two:5433/tasks"),
        ("postgresql://a:hunter2@/tasks?host=/run/pg&port=5433", "/run/pg:5433/tasks"),
        ("postgresql://?host=db.example&password=hunter2&dbname=tasks", "db.example:5432/tasks"),
        ("postgresql://ann:hun%2Fter%402@db.example/tasks", "db.example:5432/tasks"),
        ("postgresql://", "localhost:5432/"),
    ],
)
def test_only_host_port_and_name_are_shown(url: str, shown: str) -> None:
    assert is_url(url)
    assert place(url) == shown


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://ann:hun/ter2@db.example/tasks",
        "postgresql://ann:hunter@2@db.example/tasks",
        "postgresql://ann:hun#ter2@db.example/tasks",
        "postgresql://ann:hunter2@db.example:hunter2/tasks",
        "postgresql://ann:hunter2",
        "postgresql://ann:hun?ter2@db.example/tasks",
        "postgresql://ann:1234?hunter2@db.example/tasks",
        "postgresql://ann:hunter2@db.example/" + "x" * URL_CHARS_MAX,
    ],
)
def test_a_url_that_cannot_be_read_shows_nothing(url: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        place(url)
    assert "hun" not in str(error.value)
    assert "ter2" not in str(error.value)


@pytest.mark.parametrize("path", [None, "/run/musterd/tasks.sock", "postgresql:", b"postgresql://"])
def test_other_things_are_no_urls(path: object) -> None:
    assert not is_url(path)
