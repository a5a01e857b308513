"""`make install`, `make uninstall` and the units, on a machine with a real systemd."""

import re
from pathlib import Path

from bed.host import Host

SOURCE = "/usr/src/musterd"  # in the machine
EXPOSURE_MAX = 3.0  # a score of `systemd-analyze security`, from 0 (safe) to 10
FILES_BETWEEN = 25  # files written or removed between two stops, since a run takes half a second


def test_the_units_are_clean_and_expose_little(host: Host) -> None:
    units = "musterd.service musterd-control.socket musterd-tasks.socket musterd@one.service"
    units += " musterd-web.service"
    sockets = "musterd-control@one.socket musterd-tasks@one.socket"
    done = host.run("systemd-analyze", "verify", *units.split(), *sockets.split())
    assert (done.stdout, done.stderr) == ("", "")
    users = ["musterd.service", "musterd-control.socket", "musterd-tasks.socket"]
    folder = "/usr/local/lib/systemd/user"
    verify = ["env", "XDG_RUNTIME_DIR=/run", "systemd-analyze", "--user", "verify"]
    done = host.run(*verify, *(f"{folder}/{name}" for name in users))
    assert (done.stdout, done.stderr) == ("", "")
    for unit in ("musterd.service", "musterd@one.service", "musterd-web.service"):
        said = host.run("systemd-analyze", "security", "--no-pager", unit).stdout
        exposure = re.search(r"Overall exposure level for \S+: ([0-9.]+)", said)
        assert exposure is not None, said
        assert float(exposure[1]) <= EXPOSURE_MAX, said


def test_commands_configuration_and_manual_are_in_place(host: Host) -> None:
    assert host.run("musterd", "--version", user="nobody").stdout.startswith("musterd")
    assert "no such file" in host.ctl("status", check=False).stderr.lower()
    assert host.run("id", "-un", "musterd").stdout == "musterd\n"
    assert host.run("stat", "-c", "%U %a", "/run/musterd").stdout == "musterd 755\n"
    host.run("env", "PYTHONPATH=/srv/bed", "musterd", "check-config", user="musterd")
    for section, page in ((8, "musterd"), (1, "musterctl"), (5, "musterd.toml")):
        host.run("man", "-w", str(section), page)
    assert "musterd" in host.run("journalctl", "--list-catalog").stdout


def test_a_wheel_is_installed_by_hand(host: Host) -> None:
    """The commands are those of the README. Dependencies are there already: no network here."""
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    (block,) = re.findall(r"^```\n(sudo apt-get install .*?)^```", readme, re.M | re.S)
    commands = block.replace("sudo ", "").splitlines()[1:]
    pip = "/opt/musterd/bin/pip --disable-pip-version-check"
    wheel = f"{pip} wheel --no-deps --no-build-isolation -w /root /usr/src/musterd"
    host.run("sh", "-euc", f"{wheel}; musterd uninstall; {pip} uninstall -y musterd")
    assert not host.file("/opt/musterd/bin/musterd").exists()
    host.run("sh", "-euc", "\n".join(["cd /root", "export PIP_NO_INDEX=1", *commands]))
    host.start()
    assert host.ctl("status").returncode == 0
    host.run("man", "-w", "1", "musterctl")
    host.run("sh", "-euc", "cd /root; musterd new mybot; test -s mybot/mybot.py")


def test_uninstall_leaves_nothing_that_runs_and_may_be_repeated(host: Host) -> None:
    host.configure({"jobs": {"worker": "bed_jobs:Jobs", "size": 1}}, "shop.toml")
    host.run("systemctl", "enable", "--now", "musterd", "musterd@shop", "musterd-web")
    program = "/opt/musterd/bin/musterd"
    said = host.run(program, "uninstall").stdout
    assert said.startswith("removed the service; kept /etc/musterd, /var/lib/musterd")
    assert host.daemon_processes() == []
    assert _traces(host) == []
    assert host.run(program, "uninstall").stdout == said
    host.run(program, "install")
    assert host.run(program, "install").stdout.endswith("systemctl enable --now musterd\n")
    host.start()
    assert host.ctl("submit", "jobs.add", "a=2", "b=3", "--wait").stdout.strip().endswith("5")


def test_what_runs_although_its_units_are_gone_is_stopped(host: Host) -> None:
    host.start()
    units = "/usr/local/lib/systemd/system"
    host.run("sh", "-c", f"rm -r {units}/musterd*; systemctl daemon-reload")
    assert host.show("musterd", "ActiveState") == "active"
    host.run("musterd", "uninstall")
    assert host.daemon_processes() == []
    assert _traces(host) == []


def test_what_was_stopped_at_any_step_is_finished_by_the_next_run(host: Host) -> None:
    """Stop at each call of a program of systemd, and at some files; a unit test does the rest."""
    script = (f"{SOURCE}/tests/system/bed_stopping.py", "/", "death", str(FILES_BETWEEN))
    said = host.run("/opt/musterd/bin/python", *script, timeout=300)
    stops = dict(line.split() for line in said.stdout.splitlines())
    assert int(stops["uninstall"]) > 5, stops
    assert int(stops["install"]) > 5, stops


def test_a_make_that_was_stopped_is_finished_by_the_next(host: Host) -> None:
    host.run("sh", "-c", "rm -r /opt/musterd/lib/python3*/site-packages/pip*")  # pip comes last
    host.run("make", "-C", SOURCE, "install", timeout=300)
    host.start()
    assert host.ctl("submit", "jobs.add", "a=2", "b=3", "--wait").stdout.strip().endswith("5")
    host.run("sh", "-euc", "musterd uninstall; rm -r /opt/musterd/bin/musterd /opt/musterd/lib")
    host.run("make", "-C", SOURCE, "uninstall")
    assert not host.file("/opt/musterd").exists()
    assert _traces(host) == []


def test_an_upgrade_removes_the_drop_in_that_hid_failed_reloads(host: Host) -> None:
    folder = "/usr/local/lib/systemd/system/musterd.service.d"
    host.write(f"{folder}/since-253.conf", "[Service]\nType=notify-reload\nExecReload=\n")
    host.run("systemctl", "daemon-reload")
    host.start()
    host.run("musterd", "install")
    assert host.show("musterd", "Type") == "notify"
    assert "--no-block reload" in host.show("musterd", "ExecReload")


def _traces(host: Host) -> list[str]:
    """Return what is left of an installation, without data, configuration and the tests' files."""
    places = ("/usr/local", "/etc/systemd/system", "/run/systemd")
    named = host.run("find", *places, "-name", "*musterd*").stdout.splitlines()
    ours = ("/etc/systemd/system/musterd.service.d", "/etc/systemd/system/musterd@.service.d")
    return [path for path in named if path not in ours]


def test_it_starts_as_its_own_user_and_says_how_it_is(host: Host) -> None:
    host.start()
    assert host.show("musterd", "ActiveState") == "active"
    assert host.show("musterd", "StatusText") == "2 of 2 workers, 0 busy; 0 tasks waiting, 0 done"
    owner = host.run("stat", "-c", "%U", f"/proc/{host.main_pid()}").stdout
    assert owner == "musterd\n"
    status = host.status()
    assert [pool["running"] for pool in status["pools"]] == [2]
    assert (status["containment"], status["containment_reason"]) == ("pidns", "")
    assert host.ctl("submit", "jobs.add", "a=2", "b=3", "--wait").stdout.strip().endswith("5")
