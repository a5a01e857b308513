"""The parameters, results and names that control.sock and musterctl share."""

import json
import subprocess
import sys
from typing import Any

import msgspec
import pytest

from musterd.ipc.wire.messages import (
    AS_CONFIGURED,
    NEVER_NS,
    Failure,
    Rejection,
    TaskSpec,
    TaskView,
)
from musterd.supervisor.api import convert, envelope, rpc
from musterd.supervisor.api.rpc import RpcError
from musterd.supervisor.api.status import (
    WHOLE_POOL,
    FleetStatus,
    PoolStatus,
    ScheduleStatus,
    TaskStatus,
    WorkerStatus,
    expand,
    select,
    task_status,
)

SLOTS = {"parser": [0, 1, 2], "browser": [0], "parked": []}


def test_every_parameter_struct_belongs_to_one_method() -> None:
    assert len(rpc.METHOD_OF) == len(rpc.METHODS)


def test_a_request_survives_the_wire() -> None:
    params = rpc.SubmitTask(name="a.b", id="1", args={"x": [1, None, "ü"]}, delay=1.5)
    request = envelope.decode_request(envelope.encode_request(3, params))
    assert (request.id, request.method) == (3, "tasks.submit")
    assert envelope.decode_params(request.method, request.params) == params


def test_a_submit_becomes_a_task() -> None:
    params = rpc.SubmitTask(
        name="parser.fetch",
        id="7",
        args={"url": "x"},
        priority="high",
        target="site.example",
        timeout=1.5,
        max_retries=2,
        delay=1e-12,
    )
    assert convert.task_spec(params) == TaskSpec(
        id="7",
        name="parser.fetch",
        args=msgspec.msgpack.encode({"url": "x"}),
        priority=1,
        target="site.example",
        timeout_ns=1_500_000_000,
        max_retries=2,
        delay_ns=1,  # not 0, which would mean that no delay was given
        expires_ns=0,
    )


def test_an_integer_that_no_worker_can_be_sent_is_refused() -> None:
    with pytest.raises(RpcError) as caught:
        convert.task_spec(rpc.SubmitTask(name="a.b", id="1", args={"number": 2**70}))
    assert caught.value.code == rpc.INVALID_PARAMS


@pytest.mark.parametrize(
    "params",
    [
        {"name": "a.b", "id": "1", "priority": 1},
        {"name": "a.b", "id": "1", "timeout": -1},
        {"name": "a.b", "id": "1", "expires": 1e12},
        {"name": "a.b", "id": "x" * 65},
        {"name": "", "id": "1"},
        {"name": "a.b", "id": "1", "args": [1]},
        {"name": "a.b"},
    ],
)
def test_a_submit_with_a_wrong_parameter_is_refused(params: dict[str, object]) -> None:
    with pytest.raises(RpcError) as caught:
        envelope.decode_params("tasks.submit", msgspec.Raw(json.dumps(params).encode()))
    assert caught.value.code == rpc.INVALID_PARAMS


@pytest.mark.parametrize(
    ("rejected_as", "code"),
    [("UnknownTask", rpc.NO_SUCH_NAME), ("QueueFull", rpc.FAILED), ("InvalidTask", rpc.FAILED)],
)
def test_a_rejection_tells_its_kind_and_when_to_come_back(rejected_as: str, code: int) -> None:
    error = convert.rejected(Rejection("1", rejected_as, "why", 2_500_000_000))
    assert error.code == code
    assert error.data == {"rejected": rejected_as, "retry_after": 2.5}
    assert rejected_as in error.message


@pytest.mark.parametrize(
    ("given", "number"),
    [
        ("HUP", 1),
        ("sighup", 1),
        ("1", 1),
        (15, 15),
        ("SIGKILL", 9),
        ("0009", 9),
        ("0" * 99 + "9", 9),
    ],
)
def test_signals_have_names_and_numbers(given: str | int, number: int) -> None:
    assert convert.signal_number(given) == number


@pytest.mark.parametrize(
    "given",
    [
        *("", "SIG", "NOPE", "0", "99", 0, -1, "1" * 5000, "²", "_DFL", "0" * 5000),
        *("00091234567890123", "9" * 17, "0009123", "0009" + "1" * 5000, 2**64, 10**5000, "٩"),
    ],
    ids=lambda given: repr(given)[:20] if isinstance(given, str) else "a number",
)
def test_what_is_no_signal_is_refused(given: str | int) -> None:
    with pytest.raises(RpcError) as caught:
        convert.signal_number(given)
    assert caught.value.code == rpc.INVALID_PARAMS


@pytest.mark.parametrize(
    ("module", "others"),
    [
        ("ctl", ["zmq", "rich", "asyncio", "psutil", "sqlite3"]),
        ("loop.daemon", ["zmq", "rich", "asyncio", "ssl", "psycopg"]),
    ],
)
def test_modules_that_are_not_needed_are_not_loaded(module: str, others: list[str]) -> None:
    script = (
        f"import sys; import musterd.supervisor.{module}; "
        f"print([name for name in {others} if name in sys.modules])"
    )
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    assert found.stdout.strip() == "[]"


# -- names ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["parser"], [("parser", WHOLE_POOL)]),
        (["parser/1"], [("parser", 1)]),
        (["parser/1", "parser/1"], [("parser", 1)]),
        (["all"], [(pool, WHOLE_POOL) for pool in SLOTS]),
        (["*"], [(pool, WHOLE_POOL) for pool in SLOTS]),
        (["par*"], [("parser", WHOLE_POOL), ("parked", WHOLE_POOL)]),
        (["*/0"], [("parser", 0), ("browser", 0)]),
        (["parser/[12]"], [("parser", 1), ("parser", 2)]),
        ([], []),
    ],
)
def test_names_mean_pools_and_slots(names: list[str], expected: list[tuple[str, int]]) -> None:
    assert expand(names, SLOTS) == tuple(expected)


@pytest.mark.parametrize("name", ["pars", "parser/3", "x*", "parser/", "/0", "", "Parser"])
def test_a_name_that_means_nothing_is_an_error_that_names_what_there_is(name: str) -> None:
    with pytest.raises(RpcError) as caught:
        expand(["browser", name], SLOTS)
    assert caught.value.code == rpc.NO_SUCH_NAME
    assert repr(name) in caught.value.message
    assert "parser" in caught.value.message


def test_all_of_an_empty_fleet_is_no_error() -> None:
    assert expand(["all"], {}) == ()


def fleet() -> FleetStatus:
    def pool(name: str, size: int, states: list[str]) -> PoolStatus:
        workers = [WorkerStatus(name=f"{name}/{n}", state=s) for n, s in enumerate(states)]
        running = sum(state in ("RUNNING", "BUSY", "DRAINING") for state in states)
        return PoolStatus(name=name, state="RUNNING", size=size, running=running, workers=workers)

    pools = [pool("good", 2, ["RUNNING", "BUSY"]), pool("bad", 2, ["RUNNING", "BACKOFF"])]
    return FleetStatus(version="1", pid=1, uptime_seconds=1, state="running", pools=pools)


@pytest.mark.parametrize(
    ("names", "shown", "at_target"),
    [
        ([], {"good": 2, "bad": 2}, False),
        (["all"], {"good": 2, "bad": 2}, False),
        (["good"], {"good": 2}, True),
        (["bad"], {"bad": 2}, False),
        (["bad/0"], {"bad": 1}, True),
        (["bad/1"], {"bad": 1}, False),
        (["good", "bad/0"], {"good": 2, "bad": 1}, True),
    ],
)
def test_a_status_is_judged_by_what_was_asked_for(
    names: list[str], shown: dict[str, int], at_target: bool
) -> None:
    selected = select(fleet(), names)
    assert {pool.name: len(pool.workers) for pool in selected.pools} == shown
    assert selected.at_target is at_target


# -- tasks as they are shown ------------------------------------------------------------------


def test_a_task_is_shown_with_its_failure_and_value_in_words() -> None:
    view = TaskView(
        id="1",
        name="a.b",
        state="failed",
        priority="low",
        attempt=3,
        failure=Failure("error", "ValueError", "no", "Traceback ...", 503, 1_500_000_000),
        value=msgspec.msgpack.encode({"half": 0.5}),
    )
    shown = json.loads(msgspec.json.encode(task_status(view)))
    assert shown["failure"] == {
        "kind": "error",
        "type": "ValueError",
        "message": "no",
        "traceback": "Traceback ...",
        "status": 503,
        "retry_after": 1.5,
        "unwell": False,
    }
    assert (shown["value"], shown["attempt"]) == ({"half": 0.5}, 3)
    assert json.loads(msgspec.json.encode(task_status(view, with_value=False)))["value"] is None


def test_what_has_not_been_is_null_and_no_key_is_left_out() -> None:
    view = TaskView(id="1", name="a.b", state="queued", priority="low", submitted_at=1.5)
    shown = json.loads(msgspec.json.encode(task_status(view)))
    assert set(shown) == {field.encode_name for field in msgspec.structs.fields(TaskStatus)}
    assert (shown["submitted_at"], shown["finished_at"]) == (1.5, None)
    schedule = ScheduleStatus(name="a", state="paused", task="a.b", when="every 5m")
    shown = json.loads(msgspec.json.encode(schedule))
    assert (shown["next_at"], shown["last_at"]) == (None, None)


@pytest.mark.parametrize("value", [b"\xc1", msgspec.msgpack.encode({None: 1}), b"\xd9"])
def test_a_value_that_json_cannot_hold_is_described(value: bytes) -> None:
    view = TaskView(id="1", name="a.b", state="succeeded", priority="low", value=value)
    shown = json.loads(msgspec.json.encode(task_status(view)))
    assert "JSON cannot show" in shown["value"]


def test_ages_of_results_are_seconds_or_as_configured_or_never() -> None:
    def ages(**given: Any) -> tuple[int, int]:
        spec = convert.task_spec(rpc.SubmitTask(name="a.b", id="1", **given))
        return spec.cache_ns, spec.debounce_ns

    assert ages() == (0, 0)
    assert ages(cache=True, debounce=1.5) == (AS_CONFIGURED, 1_500_000_000)
    assert ages(cache=30, debounce=True) == (30 * 10**9, AS_CONFIGURED)
    assert ages(cache=False, debounce=False) == (NEVER_NS, NEVER_NS)
