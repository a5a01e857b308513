"""A worker that starts while its supervisor dies ends silently."""

import socket
from typing import NoReturn

import pytest

from musterd.supervisor.processes import forkserver
from musterd.supervisor.processes.init import EXIT_NOT_STARTED, REAPER


def _never() -> NoReturn:
    raise AssertionError("nobody is there to call it")


def test_a_worker_whose_supervisor_is_gone_ends_without_an_error(
    capfd: pytest.CaptureFixture[str],
) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.close()  # as the death of the supervisor does
    with theirs:
        setup = forkserver.ForkServerSetup(
            "jobs", "no.such:Worker", b"\x80", "workers.sock", REAPER
        )
        born = forkserver._ForkServer(theirs, setup, -1, None)
        assert born._work(1, -1, _never) == EXIT_NOT_STARTED
    assert capfd.readouterr().err == ""
