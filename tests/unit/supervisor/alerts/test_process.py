"""Which events the process alerts of."""

from musterd.supervisor.alerts.process import is_alerted_here


def test_of_what_all_nodes_report_one_alerts() -> None:
    changed = {"event": "task.changed", "schedule": "kites"}
    assert is_alerted_here(changed)
    assert not is_alerted_here({**changed, "elsewhere": True})
    assert not is_alerted_here({"event": "task.started"})
