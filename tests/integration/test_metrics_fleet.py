"""Metrics of real workers, as `musterctl status --json` shows them."""

import json
from pathlib import Path

WORKERS = """
import threading
from musterd import Worker, task
from musterd.workers.metrics import metrics

metrics.counter("imported").inc()      # in the fork server: not once more in each worker

class Promos(Worker):
    @task(max_retries=0)
    def find(self, ctx, count: int, site: str = "shop") -> None:
        ctx.metrics.counter("promos_found", site=site).inc(count)
        ctx.metrics.gauge("last").set(count)
        thread = threading.Thread(target=ctx.metrics.counter("threads").inc)
        thread.start()
        thread.join()
        if count == 0:
            raise LookupError("none")
        if count == 13:
            ctx.metrics.counter("Bad Name")
"""


def test_counters_of_all_workers_are_added_up_and_failures_told_apart(muster, waiting):
    daemon = muster({"promos": {"worker": "promos:Promos", "size": 2}}, start=False)
    Path(daemon.folder, "promos.py").write_text(WORKERS)
    daemon.start()
    counts = [1, 2, 3, 4, 0, 0, 13]
    with daemon.client() as client:
        handles = [client.submit("promos.find", {"count": count}) for count in counts]
        handles += [client.submit("promos.find", {"count": 5, "site": "other"})]
        for handle in handles:
            waiting("it ends", lambda handle=handle: handle.status().state != "running")
        waiting("all have ended", lambda: daemon.pool("promos").failed == 3)
        waiting("all have ended", lambda: daemon.pool("promos").succeeded == 5)
    (pool,) = json.loads(daemon.ctl("--json", "status").stdout)["pools"]
    found = {
        (each["name"], each["labels"].get("site", "")): each["value"] for each in pool["metrics"]
    }
    assert found["promos_found", "shop"] == sum(counts)
    assert found["promos_found", "other"] == 5
    assert found["threads", ""] == len(handles)
    assert ("imported", "") not in found
    assert [each["gauge"] for each in pool["metrics"] if each["name"] == "last"] == [True]
    assert pool["failures"] == {"LookupError": 2, "ValueError": 1}
    assert "attempts failed: 2 LookupError, 1 ValueError" in daemon.ctl("status").stdout
