"""Real users and groups call the control socket of a real daemon."""

import grp
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="changes its uid and groups")

STRANGER, OPERATOR, WATCHER = 54321, 54322, 54323
# Two groups that exist on every Debian and have no members.
CONTROL, VIEW = "games", "news"

# Another user may be unable to read the interpreter, so the uid changes after the imports.
AS_USER = """
import os, sys, musterd.supervisor.ctl as ctl, musterd.supervisor.ctl.top
uid, groups = int(sys.argv[1]), [int(word) for word in sys.argv[2].split(",") if word]
os.setgroups(groups)
os.setresgid(uid, uid, uid)
os.setresuid(uid, uid, uid)
sys.exit(ctl.main(sys.argv[3:]))
"""


def gid(group: str) -> int:
    return grp.getgrnam(group).gr_gid


def musterctl(daemon, uid: int, group: str, *words: str) -> "subprocess.CompletedProcess[str]":
    groups = str(gid(group)) if group else ""
    return subprocess.run(
        [sys.executable, "-c", AS_USER, str(uid), groups, "-s", daemon.control_socket, *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.fixture
def daemon(jobs, short_folder):
    made = jobs(start=False, supervisor__control_group=CONTROL, supervisor__view_group=VIEW)
    for folder in (short_folder, made.folder):  # so that other users can reach the socket
        folder.chmod(0o755)
    return made.start()


def test_the_file_lets_in_whom_the_groups_may_need(daemon):
    found = Path(daemon.control_socket).stat()
    assert (stat.S_IMODE(found.st_mode), found.st_gid) == (0o666, gid(CONTROL))


def test_an_operator_may_do_everything(daemon):
    for words in (["status"], ["stop", "jobs/0"], ["start", "jobs/0"], ["tasks"], ["tail"]):
        done = musterctl(daemon, OPERATOR, CONTROL, *words)
        assert done.returncode == 0, (words, done.stderr)


def test_a_watcher_may_look_and_nothing_else(daemon):
    for words in (
        *(["status"], ["top"], ["memory"], ["events"], ["pid"], ["version"]),
        *(["breaker"], ["schedule"], ["pid", "jobs"], ["events", "jobs"]),
    ):
        done = musterctl(daemon, WATCHER, VIEW, *words)
        assert done.returncode == 0, (words, done.stderr)
    before = daemon.pool("jobs").workers
    for words in (
        *(["stop", "jobs"], ["scale", "jobs", "9"], ["shutdown"], ["signal", "KILL", "all"]),
        *(["tasks"], ["task", "x"], ["submit", "jobs.echo"], ["tail"], ["reread"], ["drain"]),
        *(["reload"], ["breaker", "open", "a"], ["cache", "clear"], ["dead"], ["purge", "--all"]),
        *(["schedule", "remove", "x"], ["sessions", "reset", "x"], ["sessions", "forget", "x"]),
        ["task", "x", "--save", "there"],
    ):
        done = musterctl(daemon, WATCHER, VIEW, *words)
        assert done.returncode == 1, (words, done.stdout, done.stderr)
        assert f"uid {WATCHER} is in group {VIEW}, which may only look" in done.stderr
    assert [each.pid for each in daemon.pool("jobs").workers] == [each.pid for each in before]


def test_a_stranger_is_told_whom_to_ask(daemon):
    for words in (["status"], ["stop", "jobs"], ["events", "-f"]):
        done = musterctl(daemon, STRANGER, "", *words)
        assert done.returncode == 1, (words, done.stderr)
        assert done.stderr == (
            f"musterctl: not allowed: uid {STRANGER} is not root, not the daemon's own user and "
            f"not in group {CONTROL} or {VIEW}: use sudo or become a member of the daemon's "
            "control_group\n"
        )


def test_without_a_view_group_the_file_itself_keeps_strangers_out(jobs, short_folder):
    daemon = jobs(start=False, supervisor__control_group=CONTROL)
    for folder in (short_folder, daemon.folder):
        folder.chmod(0o755)
    daemon.start()
    assert stat.S_IMODE(Path(daemon.control_socket).stat().st_mode) == 0o660
    done = musterctl(daemon, STRANGER, "", "status")
    assert done.returncode == 4
    assert f"uid {STRANGER} may not open it: use sudo" in done.stderr
    assert musterctl(daemon, OPERATOR, CONTROL, "status").returncode == 0


def test_a_view_group_that_is_not_there_is_a_mistake_of_the_configuration(jobs):
    daemon = jobs(start=False, supervisor__view_group="nosuchgroup")
    daemon.start(wait=False)
    assert daemon.process.wait(30) == 78
    assert "supervisor.view_group = 'nosuchgroup': there is no such group" in daemon.log()
