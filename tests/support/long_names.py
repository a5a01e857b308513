"""Made-up answers of a daemon with many pools, long names, and texts in several scripts."""

import time
from typing import Any

from musterd.supervisor.api import rpc
from musterd.supervisor.api.alerts import AlertsStatus, AlertStatus, OpenAlert
from musterd.supervisor.api.history import ChangeItem, ChangeList, HistoryItem, HistoryList
from musterd.supervisor.api.memory import (
    MachineFigures,
    MemoryStatus,
    PoolMemory,
    SourceStatus,
    WorkerMemory,
)
from musterd.supervisor.api.status import (
    BreakerList,
    BreakerStatus,
    FleetStatus,
    NodeStatus,
    PoolStatus,
    ScheduleList,
    ScheduleStatus,
    SessionList,
    SessionStatus,
    TaskFailure,
    TaskList,
    TaskStatus,
    WebStatus,
    WorkerStatus,
)
from musterd.supervisor.core.model.actions import Report

NOW = time.time()
G = 1024**3
SITES = (
    "www.aurora-kites-and-sails.example",
    "интернет-магазин-воздушных-змеев.example",
    "東京都渋谷区のショップ.example",
    "shop.example",
    "very-long-subdomain.of-a.very-long-shop-name.co.example",
)
POOLS = (
    "parser",
    "browser",
    "aurora-price-watch-parser",
    "aurora-price-watch-parser-night",
    "catalogue-importer-of-the-second-warehouse",
    *(f"worker-group-{number}" for number in range(12)),
)
METHODS = ("extract", "extract_all_prices_of_the_catalogue", "fetch", "извлечь_цены")
SCHEDULES = (
    "kites",
    "nightly-import-of-the-whole-catalogue",
    "nightly-import-of-the-whole-warehouse",
    "цены на воздушных змеев",
    "凧の価格を監視する",
    "aurora:https://www.aurora-kites-and-sails.example/kites/red/large?size=10&colour=crimson",
)
ERRORS = (
    TaskFailure(kind="error", type="ValueError", message="no price on the page"),
    TaskFailure(
        kind="error",
        type="aiohttp.client_exceptions.ClientConnectorCertificateError",
        message="Cannot connect to host www.aurora-kites-and-sails.example:443 ssl:True "
        "[SSLCertVerificationError: (1, '[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify "
        "failed: unable to get local issuer certificate (_ssl.c:992)')]",
        status=502,
    ),
    TaskFailure(kind="error", type="ОшибкаЦены", message="на странице не нашлось ни одной цены"),
    TaskFailure(
        kind="error", type="ValueError", message="ページに価格が見つかりませんでした。" * 6
    ),
    TaskFailure(kind="error", type="ValueError", message="x" * 300 + " after a long word"),
)
SUMMARIES = (
    "price 49.00 € → 39.00 €, title „Großer roter Drachen mit zwei Leinen“ → „Drachen“",
    "",
    "цена 4 900 ₽ → 3 900 ₽, наличие нет → есть, доставка завтра → сегодня, скидка нет → есть",
    "価格が四千九百円から三千九百円に下がりました。在庫があります。送料は無料です。今日中に発送します。",
)


def task_id(number: int) -> str:
    if number == 11:  # of a schedule
        return "@prices-of-kites-in-the-northern-region.18e94251987f11dd"
    return f"019a8b2c3d49f86d081e40{number:08x}"


def _worker(pool: str, number: int) -> WorkerStatus:
    name = f"{pool}/{number}"
    if pool == "browser" and number == 1:
        why = "exit code 1 after 0.2 s; another one is started in 4.1 s (7 failures in a row)"
        return WorkerStatus(name=name, state="BACKOFF", restarts=7, lost={"exit": 7}, reason=why)
    if pool == POOLS[3]:
        why = "cannot import musterd_aurora_shop.parsers.prices: No module named 'selectolaxx'"
        return WorkerStatus(name=name, state="FATAL", restarts=10, lost={"boot": 10}, reason=why)
    busy = number % 2 == 0
    return WorkerStatus(
        name=name,
        state="BUSY" if busy else "RUNNING",
        pid=1_900_000 + number,
        uptime_seconds=7512.0 * (number + 1),
        task_id=task_id(number) if busy else "",
        method=METHODS[number % len(METHODS)] if busy else "",
        task_seconds=72.0,
        restarts=number,
        lost={"oom": 1, "signal": 2} if number == 2 else {},
        tasks_done=1_204_331,
        memory_bytes=812 * 1024**2,
    )


def _pool(name: str) -> PoolStatus:
    workers = [_worker(name, number) for number in range(3)]
    running = sum(each.pid > 0 for each in workers)
    dead = not running
    return PoolStatus(
        name=name,
        state="FATAL" if dead else "RUNNING",
        size=3,
        running=running,
        busy=sum(bool(each.task_id) for each in workers),
        queued={"critical": 1, "high": 12, "normal": 104_331, "low": 0},
        waiting=52,
        succeeded=12_204_331,
        failed=331,
        cancelled=3,
        restarts=27,
        lost={"boot": 10} if dead else {},
        failures={"ClientConnectorCertificateError": 300, "ValueError": 31},
        reason=workers[0].reason if dead else "",
        halt="paused" if name == POOLS[2] else "",
        tasks=[f"{name}.{method}" for method in METHODS],
        workers=workers,
    )


def fleet() -> FleetStatus:
    return FleetStatus(
        version="0.1.0",
        pid=4242,
        uptime_seconds=7500,
        state="degraded",
        pools=[_pool(name) for name in POOLS],
        containment="reaper",
        containment_reason="no namespaces: /proc/sys/kernel/unprivileged_userns_clone is 0",
        problem="the store cannot write: /var/lib/musterd is full (ENOSPC): tasks are accepted in "
        "memory no more; free space, then musterctl status",
        web=WebStatus(state="up", address="http://127.0.0.1:9870/"),
        events=WebStatus(state="backoff", reason="address already in use: ipc:///run/musterd/e"),
    )


def quiet_fleet() -> FleetStatus:
    """Return a fleet of one pool, without anything to tell."""
    worker = WorkerStatus(name="parser/0", state="RUNNING", pid=4711, uptime_seconds=7500)
    pool = PoolStatus(name="parser", state="RUNNING", size=1, running=1, workers=[worker])
    return FleetStatus(version="0.1.0", pid=42, uptime_seconds=7500, state="running", pools=[pool])


def tasks(states: tuple[str, ...] = ("running", "queued", "succeeded", "failed")) -> TaskList:
    found = []
    for number in range(24):
        state = states[number % len(states)]
        failure = ERRORS[number // 4 % len(ERRORS)] if state == "failed" else None
        found.append(
            TaskStatus(
                id=task_id(number),
                name=f"{POOLS[number % 5]}.{METHODS[number % 4]}",
                state=state,
                priority="critical" if number % 5 == 0 else "normal",
                target=SITES[number % len(SITES)],
                attempt=number % 4,
                crashes=number % 2,
                worker=f"{POOLS[number % 5]}/0" if state == "running" else "",
                waits_for=f"breaker of {SITES[0]} is open for 24 s more"
                if state == "queued"
                else "",
                submitted_at=NOW - 100_000 * number,
                finished_at=NOW - 90_000 * number if failure else 0.0,
                run_seconds=0.4 if number % 3 else 0.0,
                failure=failure,
            )
        )
    return TaskList(tasks=found, more=True)


def _schedules() -> ScheduleList:
    states = ("active", "paused", "active", "unusable", "active", "disabled")
    found = [
        ScheduleStatus(
            name=name,
            state=states[number],
            task=f"{POOLS[number % 5]}.{METHODS[number % 4]}",
            when="*/5 7-19 * * mon-fri (Europe/Berlin)" if number % 2 else "every 5m",
            next_at=NOW + 300 if states[number] == "active" else 0.0,
            last_at=NOW - 86_400 * number if number else 0.0,
            last_task=task_id(number) if number else "",
            last_state=("", "succeeded", "failed", "succeeded", "succeeded", "expired")[number],
            runs=104_331 * number,
            skipped=number,
            skipped_why="QueueFull: no room for normal" if number == 1 else "",
            problem=f"schedule '{name}': there is no pool 'catalogue-importer-of-the-third-"
            "warehouse': add it to the configuration, or remove the schedule"
            if states[number] == "unusable"
            else "",
            failures=12 if number == 2 else 0,
            stale=number == 2,
        )
        for number, name in enumerate(SCHEDULES)
    ]
    return ScheduleList(schedules=found)


def _breakers() -> BreakerList:
    states = ("closed", "open", "half-open", "closed", "forced-open")
    return BreakerList(
        breakers=[
            BreakerStatus(
                target=site,
                state=states[number],
                open_seconds=7512.0 if states[number] == "open" else 0.0,
                failures=number * 3,
                reopenings=number,
                running=number,
                waiting=104_331 * number,
            )
            for number, site in enumerate(SITES)
        ]
    )


def _sessions() -> SessionList:
    return SessionList(
        sessions=[
            SessionStatus(name="shop"),
            SessionStatus(
                name="account-of-the-aurora-shop-in-the-second-region",
                kept=True,
                site=SITES[0],
                bytes=1234,
                login_seconds=7500.0,
                saved_seconds=241.0,
                running=1,
                waiting=104,
            ),
            SessionStatus(
                name="учётная-запись",
                kept=True,
                site=SITES[1],
                bytes=99_000,
                login_seconds=700_000.0,
                saved_seconds=600_000.0,
                login_failures=5,
                login_problem="LoginFailed: the page says 'пароль неверен, попробуйте ещё раз'",
                held_seconds=843.0,
                problem="it cannot be decrypted with sessions.key_file: forget it, and it logs in",
            ),
        ]
    )


def _alerts() -> AlertsStatus:
    return AlertsStatus(
        pid=4300,
        state="up",
        alerts=[
            AlertStatus(name="mail", destination="mailto://ops", state="idle", sent=3, sent_at=NOW),
            AlertStatus(
                name="telegram-of-the-people-on-call",
                destination="tgram://(hidden 1a2b3c)/-100200300400500/?format=markdown&preview=no",
                state="failing",
                sent=104,
                failures=12,
                lost=2,
                sent_at=NOW - 200_000,
                error="telegram-of-the-people-on-call: 502 Bad Gateway from api.telegram.example; "
                "tried again in 3m 10s",
                open=[
                    OpenAlert(
                        kind="breaker.open",
                        subject=SITES[1],
                        stage="told",
                        since=NOW - 4000,
                        text="open after 3 failures in a row: ОшибкаЦены на странице",
                    )
                ],
            ),
        ],
    )


def _memory() -> MemoryStatus:
    return MemoryStatus(
        enabled=True,
        level="warning",
        stage="half",
        share=0.71,
        source="the control group of musterd.service",
        warning=0.7,
        critical=0.85,
        sources=[
            SourceStatus(name="the machine's memory", total_bytes=24 * G, used_bytes=17 * G,
                         share=0.71),
            SourceStatus(name="memory.max of /system.slice/musterd.service/workers/browser",
                         total_bytes=8 * G, used_bytes=G, share=0.125),
        ],
        stalled_some=0.03,
        stalled_full=0.01,
        age_seconds=0.4,
        machine=MachineFigures(cpu_share=0.38, cpus=128, load=112.1, disk_used_bytes=41 * G,
                               disk_total_bytes=98 * G, disk_read_rate=104_857_600.0,
                               disk_write_rate=104_857_600.0, network_received_rate=1e8,
                               network_sent_rate=3e6, supervisor_rss_bytes=58 * 1024**2,
                               supervisor_cpu_share=0.012),
        pools=[
            PoolMemory(name=name, size=4, limit=2 if number == 4 else None,
                       held=2 if number == 4 else 0, recommended_workers=12,
                       footprint_bytes=730 * 1024**2, memory_bytes=3 * G, sacrifice=number == 1)
            for number, name in enumerate(POOLS)
        ],
        workers=[
            WorkerMemory(name=f"{name}/{number}", pid=1_900_000 + number,
                         memory_bytes=(812 - number) * 1024**2)
            for name in POOLS[:5]
            for number in range(2)
        ],
    )  # fmt: skip


def _changes() -> ChangeList:
    return ChangeList(
        changes=[
            ChangeItem(
                schedule=SCHEDULES[number],
                at=NOW - 1000,
                task=task_id(number),
                number=number + 2,
                digest="5f2c",
                summary=text,
                before={"price": "49.00 €", "text": "old words " * 20},
                after={"price": "39.00 €", "text": "new words " * 20},
            )
            for number, text in enumerate(SUMMARIES, 2)
        ]
    )


def _history() -> HistoryList:
    values: tuple[Any, ...] = (
        {"price": "49.00 €", "title": "Großer roter Drachen mit zwei Leinen und einem Schwanz"},
        {"цена": "4 900 ₽", "название": "Большой красный воздушный змей с двумя лентами"},
        "凧の価格は四千九百円です。" * 10,
        None,
    )
    return HistoryList(
        schedule=SCHEDULES[1],
        entries=[
            HistoryItem(number=number + 1, at=NOW - 5000, task=task_id(number), digest="5f2c",
                        value=value, cut=value is None, changed=number > 0, before=number)
            for number, value in enumerate(values)
        ],
    )  # fmt: skip


EVENTS = (
    Report("task.progress", level="debug", task=task_id(7), pool="parser", reason="50% цены"),
    Report("worker.ready", pool=POOLS[2], worker=f"{POOLS[2]}/0", seconds=0.213),
    Report(
        "worker.crashed",
        level="error",
        pool=POOLS[4],
        worker=f"{POOLS[4]}/11",
        seconds=7.2,
        cause="exit",
        reason="exited with code 1",
        output="Traceback (most recent call last):\n"
        '  File "/srv/aurora/lib/python3.11/site-packages/musterd_aurora_shop/parsers/prices.py", '
        "line 7, in extract\nОшибкаЦены: цена не найдена",
    ),
    Report(
        "task.failed",
        level="error",
        task=task_id(7),
        pool="parser",
        attempt=3,
        target=SITES[1],
        reason=f"{ERRORS[1].type}: {ERRORS[1].message}",
    ),
    Report("task.changed", schedule=SCHEDULES[5], summary=SUMMARIES[3], reason="x" * 200),
)


def nodes() -> list[NodeStatus]:
    return [
        NodeStatus(name="attic", state="alive", running=5, places=8, seen_seconds=0.8,
                   version="0.1.0", pools={"browser": 3, "parser": 5}),
        NodeStatus(name="scraper-17.eu-central-1.compute.internal", state="alive", running=50,
                   places=80, seen_seconds=0.8, version="0.1.0",
                   pools=dict.fromkeys(POOLS, 5)),
        NodeStatus(name="полка-с-серверами", state="lost", running=0, places=5,
                   seen_seconds=7500.0, version="0.1.0", pools={"parser": 5}),
        NodeStatus(name="shed", state="silent", running=2, places=8, seen_seconds=31.0,
                   version="0.1.0", pools={"parser": 5}),
    ]  # fmt: skip


def cluster() -> FleetStatus:
    return FleetStatus(
        version="0.1.0", pid=0, uptime_seconds=0.0, state="degraded", nodes=nodes(),
        pools=[_pool(name) for name in POOLS],
        problem="полка-с-серверами: lost, restart it or musterctl cluster forget NODE\n"
                "pool catalogue-importer-of-the-second-warehouse is stranded: 12 tasks wait, and "
                "no live node has it",
        database="db.scrapers.eu-central-1.rds.amazonaws.example:5432/tasks_of_the_fleet",
        answer_seconds=0.004, at_target=False,
    )  # fmt: skip


def answer(params: rpc.Params) -> object:
    """Return what the daemon answers."""
    match params:
        case rpc.ListTasks(state=""):
            return tasks()
        case rpc.ListTasks(state=state):
            return tasks((state,))
        case rpc.ListDead():
            return tasks(("failed",))
    return _ANSWERS[type(params)]()


_ANSWERS: dict[type[rpc.Params], Any] = {
    rpc.Status: fleet,
    rpc.ListSchedules: _schedules,
    rpc.ListBreakers: _breakers,
    rpc.ListSessions: _sessions,
    rpc.ListAlerts: _alerts,
    rpc.ShowMemory: _memory,
    rpc.ListChanges: _changes,
    rpc.ShowHistory: _history,
}
