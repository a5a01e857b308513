"""Chaos on real daemons: what was acknowledged ends once, and within its limits."""

import os

import pytest
from chaos_run import Chaos, Figures
from nodes import nodes_of
from postgres import servers

from support.daemon import short_folders


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    given = request.config.getoption("--chaos-cluster-seed", None)
    seed = int.from_bytes(os.urandom(4), "big") if given is None else int(given)
    print(f"\nthe plan again: --chaos-cluster-seed {seed}")
    return seed


def test_what_was_acknowledged_ends_once_while_everything_is_killed(
    seed: int, chaos_tasks: int
) -> None:
    with (
        short_folders() as folder,
        servers(wal_writer_delay="500ms") as server,
        nodes_of(server, folder, "chaos") as nodes,
    ):
        figures = Chaos(server, nodes, seed, chaos_tasks).run()
        place = server.folder
    assert figures.tasks == chaos_tasks
    assert not place.exists()
    show(figures)


def show(figures: Figures) -> None:
    record = figures.record
    rows: list[tuple[str, object]] = [
        ("acknowledged tasks, each ended once", figures.tasks),
        ("seconds", round(figures.seconds)),
        *sorted(figures.strikes.items()),
        ("attempts granted", record.grants),
        ("nodes that others took over from", figures.reaped),
        ("nodes that found their lease over", figures.fenced),
        *((f"ended: {state}", number) for state, number in sorted(record.final.items())),
        *((f"most claims at once: {name}", n) for name, n in sorted(record.most.items())),
        *((f"most claims at once: {name}", n) for name, n in record.most_in_class.items()),
        *((f"of the rate's burst: {name}", f"{x:.2f}") for name, x in record.fastest.items()),
        ("lanes passed: site was locked", record.busy),
        ("lanes passed: not woken yet", record.asleep),
    ]
    for what, value in rows:
        print(f"{what:<40} {value}")
