"""Scrapes of a real fleet: the metrics tell what happened, by every name that others rely on."""

import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as parse_openmetrics,
)
from prometheus_client.parser import text_string_to_metric_families as parse

from musterd import TaskFailed
from musterd.supervisor.web.feed import FRESH_SECONDS
from support.daemon import Muster, Musters
from support.waiting import Waiting

ROOT = Path(__file__).resolve().parents[2]
CLUSTER = "musterd_cluster_"  # of nodes of a cluster: tests/cluster/test_seen.py
WORK = """
from musterd import Worker, task
from musterd.workers.toolkit import breaker, bulkhead, retry

failures = [ConnectionError()]

@bulkhead("narrow", limit=1, timeout=0)
@retry(base=0)
def _asked(number):
    if failures:
        raise failures.pop()
    return number

@bulkhead("narrow", limit=1, timeout=0)
def _full():
    _asked(0)

@breaker("down", failures=1)
def _down():
    raise ConnectionError

class Work(Worker):
    @task
    def count(self, ctx, number: int) -> int:
        ctx.metrics.counter("promos_found", site="a").inc(number)
        ctx.metrics.gauge("tabs").set(number)
        return number

    @task(max_retries=0)
    def fail(self, ctx) -> None:
        raise ValueError("no")

    @task(max_retries=0)
    def tools(self, ctx) -> int:
        for function in (_full, _down, _down):
            try:
                function()
            except Exception:
                pass
        return _asked(ctx.attempt)

    @task(max_retries=0, target="url")
    def unreachable(self, ctx, url: str) -> None:
        raise ConnectionError(url)
"""
# A name in an expression of PromQL: `musterd_up`, not a label or a recorded `musterd:x`.
NAME = re.compile(r"(?<![\w:])((?:musterd|process)_[a-z0-9_]+)(?![\w:])")


class Scraped:
    def __init__(self, daemon: Muster, url: str) -> None:
        self.daemon = daemon
        self.url = url

    def get(self, path: str = "/metrics", **headers: str) -> tuple[str, str]:
        connection = http.client.HTTPConnection(self.url.removeprefix("http://"), timeout=20)
        try:
            connection.request("GET", path, headers=headers)
            answer = connection.getresponse()
            assert answer.status == 200
            return answer.read().decode(), answer.headers["content-type"]
        finally:
            connection.close()

    def samples(self) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        return {
            (each.name, tuple(sorted(each.labels.items()))): each.value
            for family in parse(self.get()[0])
            for each in family.samples
        }

    def value(self, name: str, **labels: str) -> float:
        return self.samples()[name, tuple(sorted(labels.items()))]


@pytest.fixture(scope="module")
def scraped(module_muster: Musters, waiting: Waiting) -> Iterator[Scraped]:
    """Make a fleet in which everything that has a metric has happened once."""
    pools = {"work": {"worker": "work:Work", "size": 2}}
    schedule = {"nightly": {"task": "work.count", "args": {"number": 0}, "cron": "0 3 * * *"}}
    daemon = module_muster(
        pools,
        start=False,
        http__listen="127.0.0.1:0",
        breaker__failures=1,
        schedule__nightly=schedule["nightly"],
    )
    Path(daemon.folder, "work.py").write_text(WORK)
    daemon.start()
    with daemon.client() as client:
        handles = [client.submit("work.count", {"number": n}) for n in range(20)]
        handles.append(client.submit("work.fail"))
        client.submit("work.tools").result(timeout=30)
        url = "http://down.example/"
        handles.append(client.submit("work.unreachable", {"url": url}, target="down.example"))
        for handle in handles:
            with contextlib.suppress(TaskFailed):
                handle.result(timeout=30)
    url = waiting("the web process is up", lambda: daemon.status().web.address)
    yield Scraped(daemon, url)
    daemon.close()


def test_what_happened_is_told(scraped: Scraped) -> None:
    told = scraped.samples()
    work = ("pool", "work")
    assert told["musterd_up", ()] == 1
    assert told["musterd_tasks_submitted_total", (work,)] == 23
    assert told["musterd_tasks_finished_total", (work, ("state", "succeeded"))] == 21
    assert told["musterd_tasks_finished_total", (work, ("state", "failed"))] == 2
    assert told["musterd_task_attempts_failed_total", (work, ("type", "ValueError"))] == 1
    assert told["musterd_task_run_seconds_count", (work,)] == 23
    assert told["musterd_task_wait_seconds_count", (work,)] == 23
    assert told["musterd_task_run_seconds_sum", (work,)] > 0
    assert told["musterd_custom_promos_found_total", (work, ("site", "a"))] == sum(range(20))
    assert ("musterd_custom_tabs", (work,)) in told
    assert told["musterd_breakers", (("state", "open"),)] == 1
    assert told["musterd_breaker_state", (("state", "open"), ("target", "down.example"))] == 1
    assert told["musterd_breaker_failures_total", (("target", "down.example"),)] == 1
    assert told["musterd_breaker_transitions_total", (("state", "open"),)] == 1
    assert told["musterd_schedule_next_run_timestamp_seconds", (("schedule", "nightly"),)] > 0
    assert told["musterd_store_commit_seconds_count", ()] > 0
    assert told["musterd_store_bytes", ()] > 0
    assert told["musterd_loop_turn_seconds_count", ()] > 0
    assert told["musterd_supervisor_cpu_seconds_total", ()] > 0
    assert told["musterd_workers", (work, ("state", "RUNNING"))] == 2
    each = [told["musterd_worker_tasks_total", (("worker", f"work/{n}"),)] for n in range(2)]
    assert sum(each) == 23


def test_the_newer_format_is_spoken_where_it_is_asked_for(scraped: Scraped) -> None:
    text, kind = scraped.get(Accept="application/openmetrics-text; version=1.0.0")
    assert kind.startswith("application/openmetrics-text")
    names = {family.name for family in parse_openmetrics(text)}
    assert "musterd_tasks_finished" in names


def test_every_name_in_rules_and_dashboard_is_scraped(scraped: Scraped) -> None:
    scraped.get("/healthz")
    scraped.get()
    told = {name for name, _ in scraped.samples()}
    rules = yaml.safe_load((ROOT / "etc" / "prometheus-rules.yml").read_text())
    expressions = [rule["expr"] for group in rules["groups"] for rule in group["rules"]]
    dashboard = json.loads((ROOT / "etc" / "grafana-dashboard.json").read_text())
    expressions += [t["expr"] for panel in dashboard["panels"] for t in panel.get("targets", [])]
    variables = dashboard["templating"]["list"]
    expressions += [v["query"]["query"] for v in variables if isinstance(v["query"], dict)]
    used = {name for expression in expressions for name in NAME.findall(expression)}
    used -= {name for name in used if name.startswith(CLUSTER)}
    assert len(used) > 40
    if not Path("/proc/pressure").exists():
        used.discard("musterd_system_pressure_seconds_total")
    assert not used - told
    recorded = {rule["record"] for g in rules["groups"] for rule in g["rules"] if "record" in rule}
    assert set(re.findall(r"musterd:[a-z0-9_:]+", " ".join(expressions))) <= recorded


def test_every_name_is_in_the_documentation(scraped: Scraped) -> None:
    text = (ROOT / "docs" / "monitoring.md").read_text()
    documented = set(re.findall(r"`((?:musterd|process)_[a-z0-9_]+)", text))
    documented -= {name for name in documented if name.startswith(CLUSTER)}
    families = {family.name for family in parse(scraped.get()[0])}
    told = {name for name, _ in scraped.samples()} | families
    ours = {name for name in families if name.startswith("musterd_")}
    ours = {n for n in ours if not n.startswith(("musterd_custom_promos", "musterd_custom_tabs"))}
    assert not {n for n in ours if n not in documented and f"{n}_total" not in documented}
    example = {"musterd_custom_", "musterd_custom_promos_found_total"}
    pressure = {"musterd_system_pressure_seconds_total"}
    assert not documented - told - example - pressure


def test_promtool_finds_nothing_to_say_about_the_names(scraped: Scraped) -> None:
    found = shutil.which("promtool", path=f"{Path(sys.executable).parent}:/usr/bin:/usr/local/bin")
    if found is None:
        pytest.skip("there is no promtool: `make test` fetches it on Debian")
    text, _ = scraped.get()
    done = subprocess.run(
        [found, "check", "metrics"], input=text, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_supervisor_that_does_not_answer_is_told_as_down_with_the_machine(
    scraped: Scraped, waiting: Waiting
) -> None:
    os.kill(scraped.daemon.pid, signal.SIGSTOP)
    try:
        waiting("it is down", lambda: scraped.value("musterd_up") == 0)
        told = scraped.samples()
        assert told["musterd_system_cpus", ()] >= 1
        assert told["musterd_web_unanswered_total", ()] >= 1
        assert ("musterd_store_bytes", ()) not in told
    finally:
        os.kill(scraped.daemon.pid, signal.SIGCONT)
    waiting("it is up", lambda: scraped.value("musterd_up") == 1)


def test_a_crowd_of_scrapers_is_one_question(scraped: Scraped) -> None:
    before = scraped.value("musterd_web_questions_total")
    began = time.monotonic()
    for _ in range(5):
        connections = [
            http.client.HTTPConnection(scraped.url.removeprefix("http://"), timeout=20)
            for _ in range(8)
        ]
        for each in connections:
            each.request("GET", "/metrics")
        for each in connections:
            assert each.getresponse().read()
            each.close()
    asked = scraped.value("musterd_web_questions_total") - before
    took = time.monotonic() - began
    assert asked <= 2 + 2 * took / FRESH_SECONDS  # not 40


def test_what_the_toolkit_does_is_counted(scraped: Scraped) -> None:
    pool = {"pool": "work"}
    assert scraped.value("musterd_custom_toolkit_retries_total", function="_asked", **pool) == 1
    calls = "musterd_custom_toolkit_bulkhead_calls_total"
    assert scraped.value(calls, bulkhead="narrow", **pool) == 2
    refused = "musterd_custom_toolkit_bulkhead_refused_total"
    assert scraped.value(refused, bulkhead="narrow", **pool) == 1
    assert scraped.value("musterd_custom_toolkit_breaker_open", breaker="down", **pool) == 1
    changes = "musterd_custom_toolkit_breaker_changes_total"
    assert scraped.value(changes, breaker="down", state="open", **pool) == 1
    assert (
        scraped.value("musterd_custom_toolkit_breaker_refused_total", breaker="down", **pool) == 1
    )


def test_every_cause_of_a_loss_has_a_sample_before_the_first_loss(scraped: Scraped) -> None:
    told = scraped.samples()
    for cause in ("boot", "exit", "signal", "oom", "hung", "unhealthy"):
        assert told["musterd_worker_losses_total", (("cause", cause), ("pool", "work"))] == 0
