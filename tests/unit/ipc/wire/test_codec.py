"""A decoder returns a message or raises ProtocolError for any bytes, nothing else."""

from contextlib import suppress

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from musterd.ipc.errors import ProtocolError
from musterd.ipc.wire.codec import (
    decode_client,
    decode_command,
    decode_server,
    decode_worker,
    encode,
    nests_too_deeply,
)
from musterd.ipc.wire.messages import (
    BATCH_BYTES_MAX,
    BATCH_TASKS_MAX,
    FAILURE_CHARS_MAX,
    LOW,
    MESSAGE_BYTES_MAX,
    NESTING_MAX,
    PROTOCOL,
    RESULT_BYTES_MAX,
    TASK_BYTES_MAX,
    Accepted,
    Assign,
    Cancel,
    CancelLease,
    ClientMessage,
    Completion,
    Done,
    Failure,
    Hello,
    Inspect,
    Inspected,
    Lease,
    LockState,
    Missing,
    Outcome,
    Progress,
    Recall,
    Refused,
    Rejection,
    Results,
    Returned,
    SaveState,
    Stop,
    Submit,
    TaskDeclaration,
    TaskSpec,
    TaskView,
    Watch,
    Welcome,
    WorkerHello,
    WorkerMessage,
)
from musterd.ipc.wire.node_codec import decode_node, decode_sidecar
from musterd.ipc.wire.node_messages import (
    ATTEMPTS_MAX,
    NODE_PROTOCOL,
    Attempt,
    AttemptEnd,
    AttemptProgress,
    Begun,
    CancelAttempts,
    Confirmed,
    Finish,
    Granted,
    Greeting,
    Held,
    Holds,
    LoginsTold,
    LoginVerdict,
    LoseAttempts,
    Membership,
    NodeMessage,
    PoolCard,
    Pools,
    ProgressMarks,
    ScheduleNews,
    SessionLogins,
    SharedPolicy,
    SidecarHello,
    SidecarMessage,
    Want,
    portions,
)
from musterd.ipc.wire.resolving import Resolve, Resolved
from musterd.ipc.wire.schedule_messages import ScheduleMessage
from musterd.supervisor.processes.forkserver_messages import ForkServerMessage

FAILURE = Failure("error", "ValueError", "no", "Traceback ...", 503, 7)
WORKED = LoginVerdict("acme", "worked", 3, 60, 600)
WANTED = LoginVerdict("acme", "wanted", 3, 60, 600, "", "door.log_in", b"\x80")
MESSAGES = [
    (decode_client, Hello(PROTOCOL, "test")),
    (decode_client, Submit(7, [TaskSpec("id", "p.m", b"\x80", LOW, "site", 1, 2, 3, 4)], True)),
    (decode_client, Watch(["a", "b"])),
    (decode_client, Inspect(3, "a")),
    (decode_client, Cancel(["a"])),
    (decode_client, Resolve(4, "promos:Promos.check")),
    (decode_server, Welcome(PROTOCOL, "epoch", "test")),
    (decode_server, Refused(PROTOCOL, "too old")),
    (decode_server, Accepted(7, [Rejection("a", "QueueFull", "full", 5)])),
    (decode_server, Results([Outcome("a", "failed", b"", FAILURE, 2, 9)])),
    (decode_server, Missing(["a"])),
    (decode_server, Inspected(3, TaskView("a", "p.m", "queued", "low", failure=FAILURE))),
    (decode_server, Inspected(3, None)),
    (decode_server, Resolved(4, ["promos.check"], ["slow"], ["broken"], ["promos"], "away")),
    (decode_worker, WorkerHello(PROTOCOL, "token")),
    (decode_worker, Done([Completion(1, 2, b"\xc0", FAILURE, 3)])),
    (decode_worker, Returned([1, 2])),
    (decode_command, Assign([Lease(1, "a", "m", b"\x80", 1, 5)])),
    (decode_command, Recall()),
    (decode_command, CancelLease(1)),
    (decode_command, Stop()),
    (decode_sidecar, SidecarHello(NODE_PROTOCOL, "token")),
    (decode_sidecar, Membership(3, 7, True, True, 2)),
    (decode_sidecar, SharedPolicy(2, b"part", True)),
    (decode_sidecar, ScheduleNews("schedule.skipped", "kites", "p", "", "why", 3)),
    (decode_sidecar, Granted(1, "p", [Attempt(TaskSpec("id", "p.m", b""), 9, 2, 1, 1, "c", 5)])),
    (decode_sidecar, LoginsTold([SessionLogins("acme", 3, 60, "wrong password", True)])),
    (decode_sidecar, Confirmed([Held("a", 9)])),
    (decode_sidecar, CancelAttempts([Held("a", 9)])),
    (decode_sidecar, LoseAttempts([Held("a", 9)])),
    (decode_node, Greeting(NODE_PROTOCOL, 3, [Held("a", 9)], 2, True)),
    (decode_node, Holds([Held("a", 9)])),
    (decode_node, Pools((PoolCard("p", 4, (TaskDeclaration("m"),), 5, 6, 7, 8, 9),))),
    (decode_node, Want(1, "p", 4, ("p.m",), 2)),
    (decode_node, Finish([AttemptEnd("a", 9, "failed", b"", FAILURE, 1, 2, 3, "k", True)])),
    (decode_node, Finish([AttemptEnd("a", 9, "failed", login=WORKED)])),
    (decode_node, Finish([AttemptEnd("a", 9, "untouched", login=WANTED)])),
    (decode_node, Begun([Held("a", 9)])),
    (decode_node, ProgressMarks([AttemptProgress("a", 0.5, "half")])),
]
DECODERS = [
    decode_client,
    decode_server,
    decode_worker,
    decode_command,
    decode_sidecar,
    decode_node,
]
every_decoder = pytest.mark.parametrize("decode", DECODERS, ids=lambda decode: decode.__name__)
every_message = pytest.mark.parametrize(
    ("decode", "message"), MESSAGES, ids=lambda value: type(value).__name__
)


@every_message
def test_a_message_survives_the_wire(decode, message):
    assert decode(encode(message)) == message


@every_message
def test_a_message_cut_anywhere_is_a_protocol_error(decode, message):
    frame = encode(message)
    for length in range(len(frame)):
        with pytest.raises(ProtocolError, match="malformed"):
            decode(frame[:length])


@every_message
def test_bytes_behind_a_message_are_a_protocol_error(decode, message):
    with pytest.raises(ProtocolError, match="malformed"):
        decode(encode(message) + b"\x00")


@every_decoder
@given(frame=st.binary(max_size=300))
@settings(max_examples=300, deadline=None)
def test_garbage_is_a_protocol_error(decode, frame):
    try:
        message = decode(frame)
    except ProtocolError:
        return
    assert decode(encode(message)) == message  # the bytes happened to be a message


@every_message
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_message_with_flipped_bytes_decodes_or_is_a_protocol_error(decode, message, data):
    frame = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 3))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    with suppress(ProtocolError):
        decode(bytes(frame))


@every_decoder
def test_deep_nesting_is_a_protocol_error_or_skipped(decode):
    for opening in (b"\x91", b"\x81\xa1k"):
        with pytest.raises(ProtocolError, match="malformed"):
            decode(opening * 100_000 + b"\xc0")
        hello = msgspec.msgpack.encode(["hello", 1, ""])
        try:
            known = decode(hello)
        except ProtocolError:  # this decoder knows no hello
            known = None
        # Nest behind the fields that a decoder knows, where it only skips. How deep it can skip
        # depends on the version of Python, and from 3.14 on also on the stack.
        for depth in (100_000, 1_000_000):
            frame = b"\x94" + hello[1:] + opening * depth + b"\xc0"
            try:
                found = decode(frame)
            except ProtocolError:
                continue
            assert found == known
            assert known is not None


@pytest.mark.parametrize("opening", [b"\x91", b"\x81\xa1k", b"\xdc\x00\x01", b"\xde\x00\x01\x00"])
@pytest.mark.parametrize(
    ("depth", "too_deep"),
    [(1, False), (NESTING_MAX, False), (NESTING_MAX + 1, True), (4_000_000, True)],
)
def test_how_deep_a_value_may_be_nested_depends_on_no_stack(opening, depth, too_deep):
    assert nests_too_deeply(opening * (depth - 1) + b"\x90") == too_deep


@pytest.mark.parametrize(
    "value",
    [
        [{"title": "of a row", "tags": [1, {}]}] * (NESTING_MAX + 1),
        {str(number): [] for number in range(NESTING_MAX + 1)},
        bytes(range(256)) * NESTING_MAX,
        {frozenset((1, 2)): b"\x91" * (NESTING_MAX + 1)},  # a key that cannot be decoded
    ],
    ids=["rows", "map", "bytes", "key"],
)
def test_a_wide_value_is_not_deep(value):
    assert not nests_too_deeply(encode(value))


@every_decoder
def test_an_oversized_frame_is_a_protocol_error_that_names_the_limit(decode):
    with pytest.raises(ProtocolError, match=f"over the limit of {MESSAGE_BYTES_MAX}"):
        decode(b"\xc0" * (MESSAGE_BYTES_MAX + 1))


@every_decoder
def test_an_unknown_tag_is_a_protocol_error(decode):
    with pytest.raises(ProtocolError, match="malformed"):
        decode(msgspec.msgpack.encode(["pickle", b"..."]))


def test_a_message_of_the_other_direction_is_a_protocol_error():
    with pytest.raises(ProtocolError):
        decode_client(encode(Welcome(PROTOCOL, "epoch")))
    with pytest.raises(ProtocolError):
        decode_server(encode(Hello(PROTOCOL)))


def test_another_protocol_version_decodes_so_that_it_can_be_refused():
    assert decode_client(encode(Hello(PROTOCOL + 1, "newer"))) == Hello(PROTOCOL + 1, "newer")


def test_text_that_is_not_unicode_is_a_protocol_error():
    frame = encode(Hello(PROTOCOL, "AAAA")).replace(b"AAAA", b"\xff\xfe\xff\xfe")
    with pytest.raises(ProtocolError, match="malformed"):
        decode_client(frame)


@pytest.mark.parametrize(
    "task",
    [
        TaskSpec("", "p.m", b""),
        TaskSpec("i" * 65, "p.m", b""),
        TaskSpec("id", "", b""),
        TaskSpec("id", "n" * 201, b""),
        TaskSpec("id", "p.m", b"x" * (TASK_BYTES_MAX + 1)),
        TaskSpec("id", "p.m", b"", priority=4),
        TaskSpec("id", "p.m", b"", priority=-1),
        TaskSpec("id", "p.m", b"", target="t" * 254),
        TaskSpec("id", "p.m", b"", timeout_ns=-1),
        TaskSpec("id", "p.m", b"", max_retries=1001),
        TaskSpec("id", "p.m", b"", delay_ns=2**63 - 1),
    ],
    ids=lambda task: repr(task)[:60],
)
def test_a_task_outside_the_limits_is_a_protocol_error(task):
    with pytest.raises(ProtocolError, match="malformed"):
        decode_client(encode(Submit(1, [task])))


def test_a_batch_over_the_limit_is_a_protocol_error():
    tasks = [TaskSpec(str(number), "p.m", b"") for number in range(1, BATCH_TASKS_MAX + 2)]
    assert len(decode_client(encode(Submit(1, tasks[:-1]))).tasks) == BATCH_TASKS_MAX
    with pytest.raises(ProtocolError, match="malformed"):
        decode_client(encode(Submit(1, tasks)))


# A worker may measure any float, and find any number on a page.
UNBOUNDED = {"Sample.value", "View.numbers"}


def unbounded(kind, place):
    """Return the parts of a type that may be as large as a message can carry."""
    parts, bounded = [], True
    match kind:
        case msgspec.inspect.StructType():
            name = kind.cls.__name__
            parts = [(field.type, f"{name}.{field.name}") for field in kind.fields]
        case msgspec.inspect.UnionType():
            parts = [(each, place) for each in kind.types]
        case msgspec.inspect.ListType() | msgspec.inspect.VarTupleType():
            parts, bounded = [(kind.item_type, place)], kind.max_length is not None
        case msgspec.inspect.DictType():
            parts = [(kind.key_type, place), (kind.value_type, place)]
            bounded = kind.max_length is not None
        case msgspec.inspect.StrType() | msgspec.inspect.BytesType():
            bounded = kind.max_length is not None
        case msgspec.inspect.IntType() | msgspec.inspect.FloatType():
            bounded = kind.ge is not None and kind.le is not None
        case _:
            bounded = isinstance(
                kind,
                msgspec.inspect.BoolType | msgspec.inspect.NoneType | msgspec.inspect.LiteralType,
            )
    found = [each for part, at in parts for each in unbounded(part, at)]
    return found if bounded else [place, *found]


@pytest.mark.parametrize(
    "kind",
    [
        *(ClientMessage, ScheduleMessage, WorkerMessage),
        *(ForkServerMessage, SidecarMessage, NodeMessage),
    ],
    ids=["client", "schedules", "worker", "fork_server", "sidecar", "node"],
)
def test_every_value_that_a_peer_sends_has_a_bound(kind):
    assert set(unbounded(msgspec.inspect.type_info(kind), "")) <= UNBOUNDED


@pytest.mark.parametrize(
    "message",
    [
        Done([Completion(1, 2, b"", FAILURE, 2**63)]),
        Done([Completion(1, 2**63, b"")]),
        Done([Completion(2**63, 1, b"")]),
        Done([Completion(1, 1, b"", msgspec.structs.replace(FAILURE, status=2**63))]),
        Done([Completion(1, 1, b"", msgspec.structs.replace(FAILURE, message="x" * 2**17))]),
        Done([Completion(1, 1, b"", clears="k" * 201)]),
        Returned([2**63]),
        Progress(1, float("nan")),
        Progress(1, float("inf")),
        SaveState(2**63, "key", b""),
        SaveState(1, "key", b"", 2**63),
        LockState(1, "name", True, 2**63),
    ],
    ids=lambda message: repr(message)[:60],
)
def test_a_value_of_a_worker_that_no_store_can_hold_is_a_protocol_error(message):
    with pytest.raises(ProtocolError, match="malformed"):
        decode_worker(encode(message))


def test_ends_are_cut_into_messages_by_number_and_size():
    small = [AttemptEnd(str(number), 1, "untouched") for number in range(1, ATTEMPTS_MAX + 2)]
    assert [len(part) for part in portions(small)] == [ATTEMPTS_MAX, 1]
    large = [AttemptEnd("a", 1, "succeeded", bytes(BATCH_BYTES_MAX // 2 + 1))] * 3
    assert [len(part) for part in portions([*large, *small[:2]])] == [1, 1, 3]
    assert not list(portions([]))


def test_the_largest_end_fits_into_a_message():
    failure = Failure("error", message="é" * FAILURE_CHARS_MAX, traceback="é" * FAILURE_CHARS_MAX)
    small = [AttemptEnd(str(number), 1, "failed", b"", failure) for number in range(1, 20)]
    large = AttemptEnd("a", 1, "succeeded", bytes(RESULT_BYTES_MAX))
    for part in portions([*small, large, *small]):
        decode_node(encode(Finish(part)))
