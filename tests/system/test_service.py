"""The life of the service under a real systemd: start, reload, stop, and failures."""

import time

import pytest

from bed.host import Host
from support.waiting import Waiting

RELOADS = 5  # failed reloads, each followed by a good one: the order of systemd's messages varies


def restarted(host: Host, before: int) -> bool:
    """Tell whether another supervisor is up."""
    state, pid = host.properties("musterd", "ActiveState", "MainPID")
    return bool(state == "active" and int(pid) not in (0, before))


def test_one_bad_pool_does_not_keep_the_others_from_being_ready(host: Host) -> None:
    host.configure(
        {
            "jobs": {"worker": "bed_jobs:Jobs", "size": 2},
            "absent": {"worker": "no_such_module:Worker", "size": 1},
            "broken": {
                "worker": "bed_jobs:Broken",
                "size": 1,
                "restart": {"base": "10ms", "limit": 3, "pause_after": 100},
            },
        }
    )
    host.start()
    text = host.show("musterd", "StatusText")
    assert text.startswith("degraded: absent is FATAL; broken is FATAL; 2 of 4 workers"), text
    assert host.ctl("submit", "jobs.add", "a=1", "b=1", "--wait").stdout.strip().endswith("2")


def test_a_slow_start_is_waited_for(host: Host) -> None:
    host.drop_in("[Service]\nTimeoutStartSec=6s\n")
    env = {"BED_OPEN_SECONDS": "7"}
    host.configure({"slow": {"worker": "bed_jobs:Slow", "size": 1, "env": env}})
    began = time.monotonic()
    host.start()
    assert time.monotonic() - began > 7
    assert host.show("musterd", "StatusText").startswith("1 of 1 workers")


def test_reload_takes_over_the_configuration_or_fails_with_the_reason(host: Host) -> None:
    host.start()
    pid = host.main_pid()
    host.configure({"jobs": {"worker": "bed_jobs:Jobs", "size": 3}})
    host.run("systemctl", "reload", "musterd")
    assert host.show("musterd", "ActiveState") == "active"
    assert len(host.status()["pools"][0]["workers"]) == 3
    for _ in range(RELOADS):
        host.configure({"jobs": {"worker": "bed_jobs:Jobs", "size": "many"}})
        done = host.run("systemctl", "reload", "musterd", check=False)
        assert done.returncode == 1
        assert "journalctl" in done.stderr  # where to look for the reason
        status = host.run("systemctl", "status", "--full", "--no-pager", "musterd").stdout
        assert "'pools.jobs.size': value \"many\" is not an integer" in status
        assert (host.show("musterd", "ActiveState"), host.main_pid()) == ("active", pid)
        assert len(host.status()["pools"][0]["workers"]) == 3
        host.configure({"jobs": {"worker": "bed_jobs:Jobs", "size": 3}})
        host.run("systemctl", "reload", "musterd")
    journal = host.journal("-u", "musterd")
    assert journal.count("the configuration is wrong") == RELOADS


def test_a_reload_that_nobody_answers_fails(host: Host) -> None:
    host.drop_in("[Service]\nTimeoutStartSec=2s\nWatchdogSec=0\n")
    host.start()
    pid = host.main_pid()
    host.run("kill", "-STOP", str(pid))
    assert host.run("systemctl", "reload", "musterd", check=False).returncode == 1
    host.run("kill", "-CONT", str(pid))
    host.run("systemctl", "reload", "musterd")
    assert (host.show("musterd", "ActiveState"), host.main_pid()) == ("active", pid)


def test_a_supervisor_that_hangs_is_restarted_and_nothing_is_lost(
    host: Host, waiting: Waiting
) -> None:
    host.drop_in("[Service]\nWatchdogSec=4s\n")
    host.start()
    began = time.monotonic()
    host.submit("jobs.litter", "seconds=300")
    waiting("it runs", lambda: any("sleep 54321" in line for line in host.daemon_processes()))
    queued = [host.submit("jobs.nap", "seconds=0.01") for _ in range(5)]
    pid = host.main_pid()
    waiting("the watchdog would have struck", lambda: time.monotonic() - began > 5)
    assert (host.main_pid(), host.show("musterd", "NRestarts")) == (pid, "0"), "it is fed"
    host.run("kill", "-STOP", str(pid))
    waiting("systemd has restarted it", lambda: restarted(host, pid))
    assert "Watchdog timeout" in host.journal("-u", "musterd")
    assert "Fatal Python error: Aborted" in host.journal("-u", "musterd")  # the place where it hung
    waiting("they end", lambda: all(host.task(id_)["state"] == "succeeded" for id_ in queued))
    # The task that ran is run again. The processes of its first run are gone.
    waiting("one is left", lambda: _count(host, "sleep 54321") == 1)
    assert _count(host, "musterd: supervisor") == 1


def test_a_killed_supervisor_leaves_nothing_and_loses_nothing(host: Host, waiting: Waiting) -> None:
    host.drop_in("[Service]\nRestartSec=3s\n")
    host.start()
    host.submit("jobs.litter", "seconds=300")
    waiting("it runs", lambda: any("sleep 54321" in line for line in host.daemon_processes()))
    queued = [host.submit("jobs.nap", "seconds=0.01") for _ in range(5)]
    pid = host.main_pid()
    host.run("kill", "-KILL", str(pid))
    waiting("all of it is gone", lambda: not host.daemon_processes())
    waiting("systemd has restarted it", lambda: restarted(host, pid))
    waiting("they end", lambda: all(host.task(id_)["state"] == "succeeded" for id_ in queued))


def test_a_stop_waits_for_a_long_task(host: Host, waiting: Waiting) -> None:
    """The task takes longer than systemd alone would wait."""
    host.drop_in("[Service]\nTimeoutStopSec=1s\n")
    host.start()
    go_on = "/var/lib/musterd/go-on"
    task_id = host.submit("jobs.until", f"path={go_on}")
    _until_running(host, task_id)
    host.run("systemctl", "stop", "--no-block", "musterd")
    time.sleep(3)
    assert host.show("musterd", "ActiveState") == "deactivating"
    host.file(go_on).touch()
    waiting("it stops", lambda: host.show("musterd", "ActiveState") == "inactive")
    assert host.show("musterd", "Result") == "success"
    host.start()
    assert host.task(task_id)["state"] == "succeeded"
    assert host.task(task_id)["attempt"] == 1


def test_a_stop_past_its_budget_interrupts_the_task_and_keeps_it(host: Host) -> None:
    host.drop_in("[Service]\nTimeoutStopSec=1s\n")
    host.configure({"jobs": {"worker": "bed_jobs:Jobs", "size": 1}}, supervisor__drain_timeout="2s")
    host.start()
    task_id = host.submit("jobs.litter", "seconds=300")
    _until_running(host, task_id)
    began = time.monotonic()
    host.run("systemctl", "stop", "musterd")
    assert time.monotonic() - began > 2
    assert host.show("musterd", "Result") == "success"
    assert not host.daemon_processes()
    host.start()
    assert host.task(task_id)["state"] in ("queued", "running")


def test_a_stop_is_a_stop_although_clients_wait(host: Host, waiting: Waiting) -> None:
    host.start()
    submitter = host.submitter()
    host.run("systemctl", "stop", "musterd")
    for socket in ("musterd-tasks.socket", "musterd-control.socket"):
        waiting(
            "nobody can bring it back",
            lambda each=socket: host.show(each, "ActiveState") == "inactive",
        )
    assert host.show("musterd", "ActiveState") == "inactive"
    host.start()
    found = submitter.finish()
    assert (found["refused"], found["wrong"]) == ([], 0)


@pytest.mark.parametrize("how", ["restart", "kill", "socket alone"])
def test_clients_wait_over_a_restart_and_no_submit_fails(
    host: Host, how: str, waiting: Waiting
) -> None:
    if how == "socket alone":  # the first client starts the service
        host.run("systemctl", "start", "musterd-tasks.socket", "musterd-control.socket")
        assert host.show("musterd", "ActiveState") == "inactive"
    else:
        host.start()
    submitter = host.submitter()
    waiting("it is up", lambda: host.show("musterd", "ActiveState") == "active")
    for number in range(2):
        pid = host.main_pid()
        if how == "kill":
            host.run("kill", "-KILL", str(pid))
        else:
            go_on = f"/var/lib/musterd/{number}"
            long = host.submit("jobs.until", f"path={go_on}")
            _until_running(host, long)
            host.run("systemctl", "restart", "--no-block", "musterd")
            waiting("it drains", lambda: host.show("musterd", "ActiveState") == "deactivating")
            host.file(go_on).touch()
        waiting("another one is up", lambda before=pid: restarted(host, before))
        assert host.ctl("status").returncode == 0
    found = submitter.finish()
    assert found["sent"] > 20, found
    assert (found["refused"], found["wrong"]) == ([], 0)


def test_workers_have_control_groups_of_their_own_where_namespaces_are_refused(
    host: Host, waiting: Waiting
) -> None:
    host.drop_in("[Service]\nRestrictNamespaces=yes\n")
    host.start()
    status = host.status()
    assert status["containment"] == "cgroup"
    assert "PID namespaces are refused here" in status["containment_reason"]
    host.submit("jobs.litter", "seconds=300")
    waiting("it runs", lambda: _count(host, "sleep 54321") == 1)
    host.run("systemctl", "stop", "musterd", "--no-block")
    host.run("systemctl", "kill", "--kill-whom=main", "musterd")  # a second signal ends the drain
    waiting("all of it is gone", lambda: not host.daemon_processes())


def test_without_the_socket_units_the_daemon_makes_its_sockets(host: Host) -> None:
    host.run("systemctl", "mask", "musterd-control.socket", "musterd-tasks.socket")
    host.start()
    assert host.ctl("submit", "jobs.add", "a=1", "b=1", "--wait").stdout.strip().endswith("2")
    host.run("systemctl", "restart", "musterd")
    assert host.ctl("status").returncode == 0
    host.run("systemctl", "stop", "musterd")
    assert not list(host.file("/run/musterd").glob("*.sock"))


def test_musterctl_waits_over_a_restart(host: Host, waiting: Waiting) -> None:
    host.drop_in("[Service]\nRestartSec=1s\n")
    host.start()
    pid = host.main_pid()
    host.run("kill", "-KILL", str(pid))
    assert host.ctl("--timeout", "30", "pid").stdout.strip() not in ("", str(pid))


def test_what_cannot_start_is_not_started_over_and_over(host: Host, waiting: Waiting) -> None:
    host.configure({"jobs": {"worker": "bed_jobs:Jobs", "size": "many"}})
    assert host.run("systemctl", "start", "musterd", check=False).returncode != 0
    assert host.show("musterd", "ExecMainStatus") == "78"
    assert "pools.jobs.size" in host.journal("-u", "musterd")
    assert host.show("musterd", "NRestarts") == "0"
    # A client that waits gets the service started again and again, but not forever.
    host.run("systemctl", "start", "musterd-control.socket", check=False)
    assert host.ctl("--timeout", "60", "pid", check=False).returncode != 0
    waiting(
        "given up", lambda: host.show("musterd-control.socket", "Result").endswith("limit-hit"), 60
    )


def _until_running(host: Host, task_id: str) -> None:
    deadline = time.monotonic() + 30
    while host.task(task_id)["state"] != "running":
        assert time.monotonic() < deadline, host.task(task_id)


def _count(host: Host, mark: str) -> int:
    return sum(mark in line for line in host.daemon_processes())
