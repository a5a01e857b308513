"""Metrics for Prometheus: names, kinds, bounds."""

import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.core import Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as parse_openmetrics,
)
from prometheus_client.parser import text_string_to_metric_families as parse
from prometheus_client.registry import Collector

from musterd.supervisor.api.cluster import (
    ClusterFigures,
    ClusterNode,
    ClusterQueue,
    ClusterStatus,
)
from musterd.supervisor.api.metrics import (
    BreakerFigures,
    FleetFigures,
    PoolFigures,
    ScheduleFigures,
    Times,
    WorkerFigures,
)
from musterd.supervisor.api.status import MetricStatus
from musterd.supervisor.core.model.counters import Histogram
from musterd.supervisor.views.metrics import _times
from musterd.supervisor.web.metrics import WORKERS_MAX, custom_metrics, custom_name, fleet_metrics
from musterd.supervisor.web.system import system_metrics

ROOT = Path(__file__).resolve().parents[4]
GRAFANA = "grafana-dashboard.json"
NONE = Times([], 0)


def pool(name: str = "jobs", **given: Any) -> PoolFigures:
    defaults: dict[str, Any] = {
        "submitted": 7,
        "rejected": 1,
        "finished": {"succeeded": 4, "failed": 1, "cancelled": 0, "expired": 0},
        "retried": 2,
        "failures": {"SiteTimeout": 3},
        "run_times": NONE,
        "wait_times": NONE,
        "queued": {"critical": 0, "high": 1, "normal": 0, "low": 0},
        "waiting": 0,
        "running": 1,
        "queue_size": 100,
        "size": 2,
        "fatal": False,
        "busy": 1,
        "restarts": 1,
        "lost": {"boot": 0, "oom": 1},
        "recycled": 0,
        "orphans": 0,
        "workers": [
            WorkerFigures("jobs/0", "BUSY", 3, 1, 1000),
            WorkerFigures("jobs/1", "RUNNING", 2, 0, 500),
        ],
        "metrics": [],
        "metrics_dropped": 0,
    }
    return PoolFigures(name=name, **{**defaults, **given})


def fleet(*pools: PoolFigures, **given: Any) -> FleetFigures:
    defaults: dict[str, Any] = {
        "version": "1.2",
        "python": "3.11",
        "pid": 42,
        "started_at": 1000.5,
        "state": "running",
        "problem": "",
        "breakers": [BreakerFigures('si"te\n\\', "open", 0, 5, 7)],
        "breaker_states": {"closed": 3, "open": 1},
        "breaker_transitions": {"open": 2},
        "schedules": [ScheduleFigures("nightly", 3, 1, 2000.0)],
        "memory_share": 0.4,
        "memory_warning": 0.7,
        "memory_critical": 0.85,
        "memory_level": "normal",
        "commit_times": NONE,
        "store_bytes": 4096,
        "turn_times": NONE,
        "slow_turns": 0,
    }
    return FleetFigures(pools=list(pools) or [pool()], **{**defaults, **given})


class Given(Collector):
    def __init__(self, families: Any) -> None:
        self.families = list(families)

    def collect(self) -> list[Metric]:
        return self.families


def samples(families: Any) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Return values by name and labels, as a scraper reads them; fail where one is there twice."""
    text = generate_latest(Given(families)).decode()
    found: dict[Any, float] = {}
    for family in parse(text):
        for each in family.samples:
            key = (each.name, tuple(sorted(each.labels.items())))
            assert key not in found, f"twice: {key}"
            found[key] = each.value
    return found


def value(families: Any, name: str, **labels: str) -> float:
    return samples(families)[name, tuple(sorted(labels.items()))]


def test_a_fleet_is_told_by_names_of_the_convention() -> None:
    told = list(fleet_metrics(fleet()))
    assert value(told, "musterd_tasks_submitted_total", pool="jobs") == 7
    assert value(told, "musterd_tasks_finished_total", pool="jobs", state="failed") == 1
    assert value(told, "musterd_task_attempts_failed_total", pool="jobs", type="SiteTimeout") == 3
    assert value(told, "musterd_queue_tasks", pool="jobs", priority="high") == 1
    assert value(told, "musterd_workers", pool="jobs", state="BUSY") == 1
    assert value(told, "musterd_workers", pool="jobs", state="FATAL") == 0
    assert value(told, "musterd_worker_losses_total", pool="jobs", cause="oom") == 1
    assert value(told, "musterd_worker_losses_total", pool="jobs", cause="boot") == 0
    assert value(told, "musterd_pool_utilization_ratio", pool="jobs") == 0.5
    assert value(told, "musterd_pool_memory_bytes", pool="jobs") == 1500
    assert value(told, "musterd_worker_memory_bytes", worker="jobs/0") == 1000
    assert value(told, "musterd_breakers", state="open") == 1
    assert value(told, "musterd_breaker_transitions_total", state="open") == 2
    assert value(told, "musterd_breaker_transitions_total", state="closed") == 0
    assert value(told, "musterd_breaker_waiting_tasks", target='si"te\n\\') == 5
    assert value(told, "musterd_breaker_failures_total", target='si"te\n\\') == 7
    assert value(told, "musterd_schedule_runs_total", schedule="nightly") == 3
    assert value(told, "musterd_state", state="running") == 1
    assert value(told, "musterd_store_bytes") == 4096
    for name, _ in samples(told):
        assert name.startswith("musterd_")


def test_the_newer_format_takes_it_as_well() -> None:
    times = Histogram()
    times.add(1_000_000)
    busy = pool(run_times=_times(times), metrics=[MetricStatus(name="a", value=1.0)])
    text = generate_openmetrics(Given(fleet_metrics(fleet(busy)))).decode()
    assert len(list(parse_openmetrics(text))) > 20


def test_durations_are_in_the_bucket_that_holds_them() -> None:
    times = Histogram()
    for duration_ns in (1_000, 900_000, 1_100_000, 3_000_000_000, 10**15):
        times.add(duration_ns)
    told = list(fleet_metrics(fleet(pool(run_times=_times(times)))))

    def below(bound: str) -> float:
        return value(told, "musterd_task_run_seconds_bucket", pool="jobs", le=bound)

    assert below("1.6384e-05") == 1
    assert below("0.001048576") == 2
    assert below("0.002097152") == 3
    assert below("4.294967296") == 4
    assert below("274.877906944") == 4
    assert below("+Inf") == value(told, "musterd_task_run_seconds_count", pool="jobs") == 5
    total = value(told, "musterd_task_run_seconds_sum", pool="jobs")
    assert total == pytest.approx(3.002001 + 10**6)


@pytest.mark.parametrize("duration_ns", [0, 1, 2**63, 2**64 - 1])
def test_no_duration_is_too_long_to_count(duration_ns: int) -> None:
    times = Histogram()
    times.add(duration_ns)
    assert times.count == 1


def test_very_many_workers_are_added_up() -> None:
    workers = [WorkerFigures(f"jobs/{n}", "RUNNING", 1, 0, 10) for n in range(WORKERS_MAX + 40)]
    told = list(fleet_metrics(fleet(pool(workers=workers))))
    assert value(told, "musterd_worker_memory_bytes", worker="other") == 400
    assert value(told, "musterd_worker_tasks_total", worker="other") == 40
    assert sum(name == "musterd_worker_tasks_total" for name, _ in samples(told)) == WORKERS_MAX + 1
    assert value(told, "musterd_workers", pool="jobs", state="RUNNING") == WORKERS_MAX + 40


# -- metrics of handlers ----------------------------------------------------------------------


def custom(*metrics: MetricStatus, more: tuple[MetricStatus, ...] = ()) -> Any:
    pools = [pool(metrics=list(metrics), metrics_dropped=2), pool("others", metrics=list(more))]
    return samples(custom_metrics(pools))


def counted(name: str, number: float = 1.0, *, gauge: bool = False, **labels: str) -> MetricStatus:
    return MetricStatus(name=name, value=number, labels=labels, gauge=gauge)


def test_what_handlers_count_is_told_with_its_pool() -> None:
    told = custom(counted("promos_found", 3, site="a"), counted("tabs", 2, gauge=True))
    key = (("pool", "jobs"), ("site", "a"))
    assert told["musterd_custom_promos_found_total", key] == 3
    assert told["musterd_custom_tabs", (("pool", "jobs"),)] == 2
    assert told["musterd_custom_dropped_total", (("pool", "jobs"),)] == 2


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("a-b c", "musterd_custom_a_b_c"),
        ("requests_total", "musterd_custom_requests"),
        ("x_sum", "musterd_custom_x"),
        ("_total", "musterd_custom_unnamed"),
        ("", "musterd_custom_unnamed"),
        ("é", "musterd_custom__"),
    ],
)
def test_a_name_that_prometheus_would_not_take_is_made_one(given: str, told: str) -> None:
    assert custom_name(given) == told


def test_names_that_become_the_same_are_one() -> None:
    told = custom(counted("a-b", 1), counted("a_b", 2))
    assert told["musterd_custom_a_b_total", (("pool", "jobs"),)] == 3


def test_a_name_is_of_one_kind_and_the_other_is_counted_as_dropped() -> None:
    told = custom(counted("a", 1), more=(counted("a", 5, gauge=True),))
    assert told["musterd_custom_a_total", (("pool", "jobs"),)] == 1
    assert ("musterd_custom_a", (("pool", "others"),)) not in told
    assert told["musterd_custom_dropped_total", (("pool", "others"),)] == 1


def test_a_label_cannot_take_the_place_of_the_pool() -> None:
    metric = MetricStatus(name="a", value=1.0, labels={"pool": "x", "9": "y", "__z": "z", "": "e"})
    ((_, labels),) = [key for key in custom(metric) if key[0] == "musterd_custom_a_total"]
    assert dict(labels)["pool"] == "jobs"
    assert set(dict(labels).values()) == {"jobs", "x", "y", "z", "e"}


def test_the_machine_is_told() -> None:
    told = samples(system_metrics("/"))
    assert told["musterd_system_cpus", ()] >= 1
    assert told["musterd_system_memory_size_bytes", ()] > 0
    assert told["musterd_system_disk_size_bytes", ()] > 0
    assert ("musterd_system_cpu_seconds_total", (("mode", "idle"),)) in told


# -- the cluster ----------------------------------------------------------------------------------


def clustered(**status: Any) -> FleetFigures:
    counts = ("ends", "fenced", "reaped", "failed_calls", "submitted", "refused", "told")
    cluster = ClusterFigures(
        status=ClusterStatus(**{"node": "shed", "state": "away", **status}),
        claims=3,
        attempts=40,
        claim_buckets=[0] * 20 + [2, 1],
        claim_ns=3_000_000,
        **{name: number for number, name in enumerate(counts)},
    )
    return fleet(cluster=cluster)


def test_a_machine_without_a_cluster_tells_nothing_of_one() -> None:
    assert not [each.name for each in fleet_metrics(fleet()) if "cluster" in each.name]


def test_a_node_of_a_cluster_tells_of_itself() -> None:
    told = list(fleet_metrics(clustered(lease_seconds=20.5, away_seconds=3.0, attempts=7)))
    assert value(told, "musterd_cluster_state", state="away") == 1
    assert value(told, "musterd_cluster_state", state="member") == 0
    assert value(told, "musterd_cluster_lease_seconds") == 20.5
    assert value(told, "musterd_cluster_away_seconds") == 3
    assert value(told, "musterd_cluster_attempts") == 7
    assert value(told, "musterd_cluster_claims_total") == 3
    assert value(told, "musterd_cluster_claimed_attempts_total") == 40
    assert value(told, "musterd_cluster_fenced_results_total") == 1
    assert value(told, "musterd_cluster_reaped_nodes_total") == 2
    assert value(told, "musterd_cluster_claim_seconds_count") == 3
    assert value(told, "musterd_cluster_claim_seconds_sum") == 0.003
    # Nothing was seen yet: 0 would be a lie.
    assert not [each.name for each in told if each.name == "musterd_cluster_dead_tuples"]


def test_a_node_of_a_cluster_tells_of_the_whole_cluster() -> None:
    nodes = [ClusterNode(name=name, state=name) for name in ("alive", "silent")]
    queue = [ClusterQueue(pool="p", priority="high", state="queued", tasks=9)]
    told = list(
        fleet_metrics(clustered(seen_seconds=4.0, dead_tuples=12, nodes=nodes, queue=queue))
    )
    assert value(told, "musterd_cluster_nodes", state="alive") == 1
    assert value(told, "musterd_cluster_nodes", state="gone") == 0
    assert value(told, "musterd_cluster_dead_tuples") == 12
    assert value(told, "musterd_cluster_seen_age_seconds") == 4
    labels = {"pool": "p", "priority": "high", "state": "queued"}
    assert value(told, "musterd_cluster_queue_tasks", **labels) == 9


def test_every_metric_of_a_cluster_is_documented_and_every_one_in_rules_and_panels_exists() -> None:
    told = samples(fleet_metrics(clustered(seen_seconds=4.0)))
    names = {name for name, _ in told if name.startswith("musterd_cluster_")}
    names |= {"musterd_cluster_queue_tasks"}  # no samples here
    page = (ROOT / "docs" / "monitoring.md").read_text()
    documented = set(re.findall(r"`(musterd_cluster_[a-z0-9_]+)`", page))
    ends = re.compile(r"_(bucket|count|sum)$")
    assert {ends.sub("", name) for name in names} == documented
    texts = [(ROOT / "etc" / name).read_text() for name in ("prometheus-rules.yml", GRAFANA)]
    used = set(re.findall(r"musterd_cluster_[a-z0-9_]+", " ".join(texts)))
    assert len(used) > 10
    assert used <= names
