"""`musterd install` and `uninstall` below a directory of their own."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from musterd.supervisor.__main__ import main
from musterd.supervisor.service import install

SYSTEMD = Path(__file__).parents[4] / "systemd"


def run(*words: str) -> str:
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    return done.output


def tree(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if not path.is_dir()}


@pytest.fixture(params=[252, 257])
def systemd_version(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[int]:
    """Put a systemctl into PATH that prints this version, and knows nothing else."""
    folder = tmp_path_factory.mktemp("bin")
    program = folder / "systemctl"
    program.write_text(f"#!/bin/sh\necho 'systemd {request.param} ({request.param}.1-1)'\n")
    program.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        yield request.param


@pytest.mark.usefixtures("systemd_version")
def test_everything_is_installed_and_only_the_configuration_stays(tmp_path: Path) -> None:
    said = run("install", "--root", str(tmp_path))
    assert f"wrote {tmp_path}/etc/musterd/musterd.toml" in said
    found = tree(tmp_path)
    assert {
        "etc/musterd/musterd.toml",
        "usr/local/bin/musterd",
        "usr/local/bin/musterctl",
        "usr/local/lib/systemd/system/musterd.service",
        "usr/local/lib/systemd/system/musterd@.service",
        "usr/local/lib/systemd/system/musterd-tasks.socket",
        "usr/local/lib/systemd/user/musterd.service",
        "usr/local/lib/systemd/catalog/musterd.catalog",
        "usr/local/lib/sysusers.d/musterd.conf",
        "usr/local/lib/tmpfiles.d/musterd.conf",
        "usr/local/lib/systemd/system/musterd-control.socket",
        "usr/local/lib/systemd/system/musterd-web.service",
        "usr/local/share/man/man1/musterctl.1",
        "usr/local/share/man/man5/musterd.toml.5",
        "usr/local/share/man/man8/musterd.8",
        "usr/local/share/bash-completion/completions/musterctl",
        "usr/local/share/fish/vendor_completions.d/musterctl.fish",
        "usr/local/share/zsh/site-functions/_musterctl",
    } <= found
    assert (tmp_path / "etc/musterd/musterd.d").is_dir()
    said = run("uninstall", "--root", str(tmp_path))
    assert f"kept {tmp_path}/etc/musterd and the user musterd" in said
    assert tree(tmp_path) == {"etc/musterd/musterd.toml"}
    assert not list(tmp_path.rglob("*.service.d"))
    again = run("uninstall", "--root", str(tmp_path))
    assert again == said


def test_drop_ins_of_earlier_versions_go_and_those_of_others_stay(tmp_path: Path) -> None:
    former = tmp_path / install.UNITS / "musterd.service.d" / "since-253.conf"
    former.parent.mkdir(parents=True)
    former.write_text("[Service]\nType=notify-reload\nExecReload=\n")
    run("install", "--root", str(tmp_path))
    assert not former.exists()
    foreign = former.with_name("site.conf")
    foreign.parent.mkdir(exist_ok=True)
    foreign.write_text("[Service]\nNice=5\n")
    former.write_text("[Service]\nType=notify-reload\n")
    said = run("uninstall", "--root", str(tmp_path))
    assert f"left {foreign.parent}: it holds files that musterd did not install" in said
    assert list(foreign.parent.iterdir()) == [foreign]


def test_what_the_package_ships_are_links_to_the_folders_of_the_project() -> None:
    """A copy of the project that has plain files instead of the links installs no units."""
    for link in (SYSTEMD.parent / "src/musterd/share").iterdir():
        assert link.is_symlink(), f"{link} is no symbolic link: git config core.symlinks"
        assert link.resolve(strict=True).is_relative_to(SYSTEMD.parent)


def test_a_configuration_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "etc/musterd/musterd.toml"
    path.parent.mkdir(parents=True)
    path.write_text("[supervisor]\n")
    assert f"kept {path}" in run("install", "--root", str(tmp_path))
    assert path.read_text() == "[supervisor]\n"


def test_what_is_in_the_way_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "usr/local/bin/musterd"
    path.parent.mkdir(parents=True)
    path.write_text("somebody else's")
    done = CliRunner().invoke(main, ["install", "--root", str(tmp_path)])
    assert done.exit_code == 1
    assert f"{path} is in the way" in done.output
    assert path.read_text() == "somebody else's"


def test_a_link_of_somebody_else_is_not_removed(tmp_path: Path) -> None:
    run("install", "--root", str(tmp_path))
    link = tmp_path / "usr/local/bin/musterctl"
    link.unlink()
    link.symlink_to("/usr/bin/true")
    run("uninstall", "--root", str(tmp_path))
    assert os.readlink(link) == "/usr/bin/true"


@pytest.mark.parametrize(
    ("version", "names"),
    [(252, set()), (253, set()), (254, {"since-254.conf"}), (262, {"since-254.conf"})],
)
def test_what_later_versions_of_systemd_know_is_added_for_them(
    version: int, names: set[str]
) -> None:
    added = [Path(item.path) for item in install.items(version) if ".service.d/" in item.path]
    assert {path.name for path in added} == names
    places = {path.parent.name for path in added}
    assert places == ({"musterd.service.d", "musterd@.service.d"} if names else set())


def test_no_systemd_is_told_that_a_reload_cannot_fail() -> None:
    """With Type=notify-reload, systemd hears only that a reload has ended, not how."""
    texts = [item.text for item in install.items(max(install.SINCE))]
    texts = [text for text in texts if "[Service]" in text]
    lines = [line for text in texts for line in text.splitlines()]
    assert "Type=notify-reload" not in lines
    reloads = [line for line in lines if line.startswith("ExecReload")]
    assert len(reloads) == 3, "of the system, of an instance, of a user"
    for line in reloads:
        assert re.fullmatch(r"ExecReload=\S+/musterctl -s \S+ --no-block reload", line)


def test_extras_that_are_named_anywhere_leave_out_none_that_are_usual() -> None:
    root = SYSTEMD.parent
    usual = re.search(r"^EXTRAS \?= (\S+)$", (root / "Makefile").read_text(), re.MULTILINE)
    assert usual is not None
    for page in (root / "README.md", *(root / "docs").glob("*.md")):
        for named in re.findall(r"EXTRAS=([\w,]+)", page.read_text()):
            assert named.startswith(f"{usual[1]},"), f"{page.name}: {named}"


def settings(path: Path) -> list[str]:
    return [line for line in path.read_text().splitlines() if line and not line.startswith("#")]


def test_the_template_differs_from_the_service_only_in_its_names() -> None:
    service = settings(SYSTEMD / "musterd.service")
    template = settings(SYSTEMD / "musterd@.service")
    own = [line for line in template if line.startswith("Environment=MUSTERD_SUPERVISOR__")]
    assert len(own) == 2
    changed = ("Description", "ExecStart=", "ExecReload=", "ExecStopPost=", "Sockets=", "Also=")
    changed += ("RuntimeDirectory=", "StateDirectory=", "LogsDirectory=")

    def rest(lines: list[str]) -> list[str]:
        return [line for line in lines if line not in own and not line.startswith(changed)]

    assert rest(service) == rest(template)


def test_the_units_of_a_user_live_by_the_same_rules() -> None:
    same = ("Restart", "StartLimit", "Watchdog", "Timeout", "KillMode", "OOMPolicy", "NotifyAccess")
    chosen = [
        [line for line in settings(SYSTEMD / name) if line.startswith(same)]
        for name in ("musterd.service", "user/musterd.service")
    ]
    assert chosen[0] == chosen[1]


def test_nothing_here_hides_the_package_of_the_same_name() -> None:
    assert not list(SYSTEMD.rglob("*.py"))
