"""Other services: several instances, a user's own, an upgraded one, one with browsers, none."""

from typing import Any

import pytest

from bed.host import Host
from support.waiting import Waiting


def test_several_instances_run_beside_each_other(host: Host, waiting: Waiting) -> None:
    pools = {"jobs": {"worker": "bed_jobs:Jobs", "size": 1}}
    for name in ("red", "blue"):
        host.configure(pools, f"{name}.toml")
        host.run("systemctl", "enable", "--now", f"musterd@{name}")
    host.start()
    pids = {host.main_pid(f"musterd@{name}") for name in ("red", "blue")} | {host.main_pid()}
    assert len(pids) == 3
    for name in ("red", "blue"):
        control = f"/run/musterd-{name}/control.sock"
        submit = ("submit", "jobs.add", "a=1", "b=2", "--wait")
        assert host.ctl("-s", control, *submit).stdout.strip().endswith("3")
        assert host.file(f"/var/lib/musterd-{name}/store.db").exists()
        host.run("systemctl", "reload", f"musterd@{name}")
    host.run("systemctl", "restart", "musterd@red")
    assert host.main_pid("musterd@blue") in pids
    host.run("systemctl", "stop", "musterd@red", "musterd@blue")
    waiting("its socket is gone", lambda: not host.file("/run/musterd-red/tasks.sock").exists())
    assert host.ctl("status").returncode == 0


def test_a_user_has_a_service_of_its_own(host: Host, waiting: Waiting) -> None:
    host.run("useradd", "--create-home", "alice")
    uid = host.run("id", "-u", "alice").stdout.strip()
    host.run("loginctl", "enable-linger", "alice")
    host.run("systemctl", "start", f"user@{uid}.service")
    path = "/home/alice/.config/musterd/musterd.toml"
    host.write(path, host.file("/etc/musterd/musterd.toml").read_text())
    host.run("chown", "-R", "alice:", "/home/alice")
    session = ("env", f"XDG_RUNTIME_DIR=/run/user/{uid}", "HOME=/home/alice")

    def as_alice(*words: str, **options: Any) -> Any:
        return host.run(*session, *words, user="alice", **options)

    as_alice("systemctl", "--user", "set-environment", "PYTHONPATH=/srv/bed")
    as_alice("systemctl", "--user", "enable", "--now", "musterd")
    shown = as_alice("systemctl", "--user", "show", "-p", "StatusText", "--value", "musterd").stdout
    assert shown.startswith("2 of 2 workers")
    assert as_alice("musterctl", "status").returncode == 0
    said = as_alice("musterctl", "submit", "jobs.add", "a=1", "b=2", "--wait").stdout
    assert said.strip().endswith("3")
    assert host.file("/home/alice/.local/state/musterd/store.db").exists()
    as_alice("systemctl", "--user", "reload", "musterd")
    as_alice("systemctl", "--user", "restart", "musterd")
    as_alice("systemctl", "--user", "stop", "musterd")
    tasks = host.file(f"/run/user/{uid}/musterd/tasks.sock")
    waiting("its socket is gone", lambda: not tasks.exists())


def test_an_upgrade_keeps_queued_tasks_and_the_configuration(host: Host, waiting: Waiting) -> None:
    host.run("systemctl", "enable", "--now", "musterd")
    host.ctl("pause", "jobs")
    queued = [host.submit("jobs.add", f"a={number}", "b=1") for number in range(5)]
    before = host.file("/etc/musterd/musterd.toml").read_text()
    pid = host.main_pid()
    submitter = host.submitter()
    source = "/usr/src/musterd"
    for name in ("pyproject.toml", "src/musterd/__init__.py"):
        host.run("sed", "-i", "s/0\\.1\\.0/0.1.1/", f"{source}/{name}")
    said = host.run("make", "-C", source, "install").stdout
    assert "kept /etc/musterd/musterd.toml" in said
    assert "restarted the running services" in said
    assert host.main_pid() not in (0, pid)
    assert host.status()["version"] == "0.1.1"
    assert host.file("/etc/musterd/musterd.toml").read_text() == before
    host.ctl("resume", "jobs")
    waiting("they end", lambda: all(host.task(id_)["state"] == "succeeded" for id_ in queued))
    found = submitter.finish()
    assert (found["refused"], found["wrong"]) == ([], 0), "clients wait meanwhile"


def test_uninstalling_leaves_data_and_configuration_only(host: Host) -> None:
    host.configure({"jobs": {"worker": "bed_jobs:Jobs", "size": 1}}, "red.toml")
    host.run("systemctl", "enable", "--now", "musterd", "musterd@red")
    host.submit("jobs.add", "a=1", "b=2")
    said = host.run("make", "-C", "/usr/src/musterd", "uninstall").stdout
    folders = ("musterd", "musterd-keys", "musterd-red", "musterd-red-keys")
    data = ", ".join(f"/var/lib/{name}" for name in folders)
    logs = "/var/log/musterd, /var/log/musterd-red"
    assert f"kept /etc/musterd, {data}, {logs} and the user musterd" in said, said
    assert not host.daemon_processes()
    left = host.run("find", "/usr/local", "/opt/musterd", "-name", "*muster*", check=False)
    assert left.stdout == ""
    wanted = host.run("find", "/etc/systemd/system", "-name", "musterd*", "-type", "l")
    assert wanted.stdout == "", "what was enabled"
    assert host.file("/var/lib/musterd/store.db").exists()
    assert host.file("/etc/musterd/musterd.toml").exists()
    assert host.show("musterd", "LoadState") == "not-found"
    host.run("make", "-C", "/usr/src/musterd", "uninstall")  # a second time is no error


def test_browsers_run_in_their_own_sandbox_inside_the_hardened_unit(
    host: Host, waiting: Waiting
) -> None:
    host.configure(
        {
            "browser": {
                "worker": "musterd.workers.browser:BrowserWorker",
                "size": 1,
                "options": {"backend": "cdp"},  # needs nothing but Chromium
            }
        }
    )
    if not host.file("/usr/lib/chromium/chromium").exists():
        pytest.skip("there is no Chromium here")
    host.write("/srv/www/index.html", "<title>shop</title><h1>promo <b>42</b></h1>")
    serve = "systemd-run python3 -m http.server --bind 127.0.0.1 --directory /srv/www 8000"
    host.run(*serve.split())
    host.drop_in("[Service]\nRestartSec=3s\nWatchdogSec=5s\n")
    host.start()
    assert host.show("musterd", "StatusText").startswith("1 of 1 workers")
    page = "url=http://127.0.0.1:8000/index.html"
    waiting(
        "the page is served",
        lambda: host.run("bash", "-c", ": < /dev/tcp/127.0.0.1/8000", check=False).returncode == 0,
    )
    said = host.ctl("submit", "browser.render", page, "--wait").stdout
    assert "promo" in said, said
    zygotes = [pid for pid, line in host.processes() if "--type=zygote" in line]
    assert not any("--no-sandbox" in line for line in host.daemon_processes())
    pid = host.main_pid()
    network = host.run("readlink", f"/proc/{pid}/ns/net").stdout
    seen = [host.run("readlink", f"/proc/{zygote}/ns/net").stdout for zygote in zygotes]
    assert any(each != network for each in seen), "the sandbox leaves renderers no network"
    for signal in ("-STOP", "-KILL"):  # the first is noticed by the watchdog
        host.run("kill", signal, str(host.main_pid()))
        waiting("no browser is left", lambda: not host.daemon_processes())
        waiting("it is back", lambda: host.show("musterd", "ActiveState") == "active")
        assert "promo" in host.ctl("submit", "browser.render", page, "--wait").stdout
