"""The shipped rules for Prometheus and the dashboard for Grafana, without a daemon."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "etc" / "prometheus-rules.yml"
DASHBOARD = ROOT / "etc" / "grafana-dashboard.json"

# Series that Prometheus sees, and the alerts that it has to raise.
CASES = """
rule_files: [{rules}]
evaluation_interval: 1m
tests:
  - interval: 1m
    input_series:
      - {{series: 'musterd_up{{instance="a"}}', values: '1 1 1 0x20'}}
      - {{series: 'musterd_pool_fatal{{instance="a", pool="p"}}', values: '0x5 1x20'}}
      - {{series: 'musterd_workers{{instance="a", pool="q", state="FATAL"}}', values: '1x30'}}
      - {{series: 'musterd_workers{{instance="a", pool="r", state="RUNNING"}}', values: '1x30'}}
      - {{series: 'musterd_workers_wanted{{instance="a", pool="r"}}', values: '2x30'}}
      - {{series: 'musterd_queue_tasks{{instance="a", pool="r", priority="low"}}', values: '95x30'}}
      - {{series: 'musterd_tasks_waiting{{instance="a", pool="r"}}', values: '0x30'}}
      - {{series: 'musterd_queue_limit_tasks{{instance="a", pool="r"}}', values: '100x30'}}
      - series: 'musterd_breaker_state{{instance="a", target="s", state="open"}}'
        values: '1x30'
      - series: 'musterd_breaker_state{{instance="a", target="t", state="closed"}}'
        values: '1x30'
      - series: 'musterd_tasks_finished_total{{instance="a", pool="r", state="failed"}}'
        values: '0+60x30'
      - series: 'musterd_tasks_finished_total{{instance="a", pool="r", state="succeeded"}}'
        values: '0+20x30'
      - {{series: 'musterd_cluster_state{{instance="b", state="lease over"}}', values: '1x30'}}
      - {{series: 'musterd_cluster_state{{instance="b", state="member"}}', values: '0x30'}}
      - {{series: 'musterd_cluster_state{{instance="c", state="member"}}', values: '1x30'}}
      - {{series: 'musterd_cluster_reaped_nodes_total{{instance="c"}}', values: '0x20 1x10'}}
      - {{series: 'musterd_cluster_reaped_nodes_total{{instance="b"}}', values: '0x30'}}
      - series: 'musterd_cluster_oldest_snapshot_seconds{{instance="b", job="m"}}'
        values: '0x9 360x21'
      - series: 'musterd_cluster_oldest_snapshot_seconds{{instance="c", job="m"}}'
        values: '360x30'
      - series: 'musterd_cluster_dead_tuples{{instance="b", job="m"}}'
        values: '200000x30'
      - series: 'musterd_cluster_oldest_snapshot_seconds{{instance="d", job="n"}}'
        values: '360x30'
      - series: 'musterd_cluster_dead_tuples{{instance="d", job="n"}}'
        values: '20x30'
    promql_expr_test:
      - expr: musterd:success:ratio_rate5m
        eval_time: 10m
        exp_samples:
          - {{labels: 'musterd:success:ratio_rate5m{{instance="a", pool="r"}}', value: 0.25}}
    alert_rule_test:
{alerts}
"""
EXPECTED = {
    "MusterdDown": ["instance: a"],
    "MusterdPoolFatal": ["instance: a, pool: p", "instance: a, pool: q"],
    "MusterdWorkersMissing": ["instance: a, pool: r"],
    "MusterdQueueFull": ["instance: a, pool: r"],
    "MusterdTasksFailing": ["instance: a, pool: r"],
    "MusterdBreakerOpen": ["instance: a, state: open, target: s"],
    "MusterdClusterUnreachable": ["instance: b, state: lease over"],
    "MusterdClusterNodeLost": ["instance: c"],
    "MusterdClusterVacuumStalled": ["job: m"],
    "MusterdStoreFailing": [],
    "MusterdMemoryCritical": [],
}


def promtool(*arguments: str) -> "subprocess.CompletedProcess[str]":
    found = shutil.which("promtool", path=f"{Path(sys.executable).parent}:/usr/bin:/usr/local/bin")
    if found is None:
        pytest.skip("there is no promtool: `make test` fetches it on Debian")
    return subprocess.run(
        [found, *arguments], capture_output=True, text=True, timeout=60, check=False
    )


def test_promtool_takes_the_rules() -> None:
    done = promtool("check", "rules", str(RULES))
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_rules_fire_when_they_should_and_not_else(tmp_path: Path) -> None:
    rules = yaml.safe_load(RULES.read_text())
    alerts = []
    for name, found in EXPECTED.items():
        (rule,) = [r for g in rules["groups"] for r in g["rules"] if r.get("alert") == name]
        # Compare only what fires and for what: the texts change too often to be repeated here.
        rule.pop("annotations", None)
        severity = rule["labels"]["severity"]
        expected = "".join(
            f"          - {{exp_labels: {{severity: {severity}, {each}}}}}\n" for each in found
        )
        alerts.append(
            f"      - alertname: {name}\n        eval_time: 25m\n        exp_alerts:"
            + (f"\n{expected}" if found else " []\n")
        )
    bare = tmp_path / "rules.yml"
    bare.write_text(yaml.safe_dump(rules))
    cases = tmp_path / "cases.yml"
    cases.write_text(CASES.format(rules=bare, alerts="".join(alerts)))
    done = promtool("test", "rules", str(cases))
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_says_what_it_is_about_and_how_bad() -> None:
    rules = [r for g in yaml.safe_load(RULES.read_text())["groups"] for r in g["rules"]]
    for rule in rules:
        if "alert" in rule:
            assert rule["labels"]["severity"] in ("warning", "critical"), rule["alert"]
            assert "$labels" in rule["annotations"]["summary"], rule["alert"]


def test_the_dashboard_is_whole_and_no_panel_covers_another() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) > 20
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])
        }
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells
        if panel["type"] != "row":
            assert all(target["expr"] for target in panel["targets"])
