"""Where musterctl finds the cluster, and that it keeps the password to itself."""

import subprocess
import sys
from pathlib import Path

import pytest

from musterd.supervisor import ctl
from musterd.supervisor.ctl.app import Settings
from musterd.supervisor.ctl.cluster_link import ClusterUnusable, find_url

URL = "postgresql://u:hunter2@db.example/x"


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MUSTERD_CLUSTER_URL", raising=False)


def config(folder: Path, text: str) -> Path:
    path = folder / "musterd.toml"
    path.write_text(text)
    path.chmod(0o600)
    return path


def secret(folder: Path, text: str) -> str:
    path = folder / "url"
    path.write_text(text)
    path.chmod(0o600)
    return str(path)


def test_the_nearest_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = config(tmp_path, '[cluster]\nurl = "postgresql://config@db/x"')
    by_config = Settings(config=(str(given),))
    assert find_url(by_config) == "postgresql://config@db/x"
    monkeypatch.setenv("MUSTERD_CLUSTER_URL", "postgresql://env@db/x")
    assert find_url(Settings()) == "postgresql://env@db/x"
    assert find_url(by_config) == "postgresql://config@db/x"
    file = secret(tmp_path, "postgresql://file@db/x\n")
    assert find_url(Settings(config=by_config.config, url_file=file)) == "postgresql://file@db/x"
    named = "postgresql://line@db/x"
    assert find_url(Settings(url=named, url_file=file)) == named


def test_the_configuration_gives_it_by_file_or_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = secret(tmp_path, URL)
    given = config(tmp_path, f'[cluster]\nurl_file = "{file}"')
    assert find_url(Settings(config=(str(given),))) == URL
    monkeypatch.setenv("SHOP_DATABASE", URL)
    given = config(tmp_path, '[cluster]\nurl_secret = "SHOP_DATABASE"')
    assert find_url(Settings(config=(str(given),))) == URL


def test_what_is_wrong_elsewhere_in_the_configuration_does_not_matter(tmp_path: Path) -> None:
    given = config(tmp_path, '[store]\nnonsense = 1\n[cluster]\nurl = "postgresql://u@db/x"')
    assert find_url(Settings(config=(str(given),))) == "postgresql://u@db/x"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no .cluster. in"),
        ('[cluster]\nurl = "http://x"', "not a URL of PostgreSQL"),
        ('[cluster]\nurl_file = "/nowhere/url"', "url_file /nowhere/url is missing or empty"),
        ('[cluster]\nurl_secret = "NOBODYS"', "NOBODYS.*--url-file"),
        ('[cluster]\nurl = "postgresql://u@h/x"\nurl_file = "/x"', "remove one of them"),
    ],
)
def test_a_cluster_that_is_not_configured_is_refused(tmp_path: Path, text: str, words: str) -> None:
    given = config(tmp_path, text)
    with pytest.raises(ClusterUnusable, match=words):
        find_url(Settings(config=(str(given),)))


@pytest.mark.parametrize(
    "url",
    [
        URL,
        "postgresql://u@db/x?password=hunter2",
        "host=db user=u password=hunter2",
        "postgresql://u@db/x?sslpassword=hunter2",
        "postgresql://u:hunter2@[::1/x",
        "postgresql://u:hunter2@db:port/x",
    ],
)
def test_no_password_is_taken_from_the_command_line_or_shown(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ctl.main(["cluster", "nodes", "--url", url]) == 78
    assert ctl.main(["--json", "--cluster", "--url", url, "status"]) == 78
    said = capsys.readouterr()
    assert "hunter2" not in said.out + said.err
    assert "--url" in said.err


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://u:hunter2@127.0.0.1:1/x",
        "postgresql://u:hun@ter2@127.0.0.1:1/x",
        "postgresql://u:hun/ter2@127.0.0.1:1/x",
        "postgresql://u:hunter2@nowhere.invalid/x",
        "postgresql://u:hunter2@127.0.0.1:port/x",
        "host=127.0.0.1 port=1 password=hunter2",
        "nonsense hunter2",
    ],
)
def test_no_part_of_a_password_is_in_an_error(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = ctl.main(["cluster", "nodes", "--url-file", secret(tmp_path, url)])
    assert code in (69, 78)
    said = capsys.readouterr()
    assert "hun" not in said.out + said.err, said.err
    assert "ter2" not in said.out + said.err, said.err


@pytest.mark.parametrize(
    "words",
    [
        *(["cluster", each] for each in ("migrate", "nodes", "show", "adopt")),
        *(["cluster", each, "shed"] for each in ("drain", "forget", "apply")),
        *(["--cluster", each] for each in ("status", "tasks", "events", "top")),
    ],
)
def test_without_the_extra_its_name_is_told(words: list[str]) -> None:
    code = (
        "import sys; sys.modules['psycopg'] = None; from musterd.supervisor import ctl;"
        "sys.exit(ctl.main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, check=False
    )
    told = "musterctl: psycopg is not installed: pip install 'musterd[cluster]'\n"
    assert (done.returncode, done.stderr) == (78, told)


def test_a_file_that_was_named_is_told_as_it_was_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert ctl.main(["cluster", "nodes", "--url-file", "/nowhere/url"]) == 78
    assert "--url-file /nowhere/url is missing or empty" in capsys.readouterr().err
