"""A secret is found in every text of a worker: secrets x encodings x places."""

import base64
import html
import json
import logging
import math
import re
import sys
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import quote, quote_plus

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from musterd import Secret, Worker
from musterd.ipc.client.taskspec import encode_args
from musterd.ipc.secrets.access import Access
from musterd.ipc.wire.codec import encode
from musterd.ipc.wire.messages import Completion, Lease, Progress, StateAnswer
from musterd.workers.authoring import outcome
from musterd.workers.authoring.base import Context, Permanent, TaskOptions
from musterd.workers.authoring.request_channel import RequestChannel
from musterd.workers.authoring.vault import KNOWN_MAX, Leak, Vault, Vaults
from musterd.workers.metrics import Metrics
from musterd.workers.runtime import speech

KEY = """-----BEGIN PRIVATE KEY-----
MIIEvQIBADANBgkqhkiG9w0BAQEFAASCBKcwggSjAgEAAoIBAQC7VJTUt9Us8cKj
MzEfYyjiWA4R4/M2bS1GB4t7NXp98C3SC6dVMvDuictGeurT8jNbvJZHtCSuYEvu
NMoSfm76oqFvAp8Gy0iz5sxjZmSnXyCdPEovGhLa0VzMaQ8s+CLOyS56YyCFGeJZ
qgtzJ6GR3eqoYSW9b9UMvkBpZODSctWSNGj3P7jRFDO5VoTwCQAWbFnOjDfH5Ulg
p2PKSQnSJP3AJLQNFNe7br1XbrhV//eO+t51mIpGSDCUv3E0DDFcWDTH9cXDTTlR
ZVEiR2Bw==
-----END PRIVATE KEY-----"""


def lower_quote(text: str) -> str:
    """Encode as some libraries do: %2f."""
    return re.sub("%[0-9A-F]{2}", lambda found: found[0].lower(), quote(text, safe=""))


def wrapped_base64(text: str) -> str:
    return base64.encodebytes(text.encode()).decode()


ENCODINGS: dict[str, Callable[[str], str]] = {
    "as it is": str,
    "repr": repr,
    "repr of a list": lambda text: repr([text, 1]),
    "ascii": ascii,
    "repr of bytes": lambda text: repr(text.encode()),
    "JSON": json.dumps,
    "JSON in UTF-8": lambda text: json.dumps({"a": text}, ensure_ascii=False),
    "JSON by msgspec": lambda text: msgspec.json.encode({"a": text}).decode(),
    "JSON of PHP": lambda text: json.dumps(text).replace("/", "\\/"),
    "URL": lambda text: quote(text, safe=""),
    "path of a URL": quote,
    "form": quote_plus,
    "URL, lower case": lower_quote,
}
LAST: dict[str, Callable[[str], str]] = {
    "HTML": html.escape,
    "HTML by numbers": lambda text: text.encode("ascii", "xmlcharrefreplace").decode(),
    "HTML in HTML": lambda text: html.escape(html.escape(text)),
    "HTML in repr": lambda text: repr(html.escape(text)),
    "HTML in JSON": lambda text: json.dumps(html.escape(text)),
}
BASE64: dict[str, Callable[[str], str]] = {
    "base64": lambda text: base64.b64encode(text.encode()).decode(),
    "base64 for URLs": lambda text: base64.urlsafe_b64encode(text.encode()).decode(),
    "base64 in lines": wrapped_base64,
}

SIGNS = "'\"\\/%&+ =?#<>$!*()[]{}|~`^@:;,\t"
plain = st.text("abcdefgXYZ0123456789_.-", min_size=6, max_size=12)
signs = st.one_of(
    st.sampled_from(SIGNS + "öß€日本\U0001f600"),
    st.characters(exclude_categories=["Cs"], exclude_characters="\0\r\n"),
)
odd = st.text(signs, max_size=12)
one_line = st.builds(lambda a, b, c: f"{a}{b}{c}", odd, plain, odd).filter(lambda v: v == v.strip())
several_lines = st.lists(st.text("abcdefgXYZ0123456789+/=", min_size=20, max_size=64), min_size=2)
values = st.one_of(one_line, several_lines.map("\n".join), st.just(KEY))
around = st.text(SIGNS + "abc\n", max_size=20)
one_after_the_other = st.lists(st.sampled_from(list(ENCODINGS)), max_size=3)
chains = st.one_of(
    one_after_the_other,
    st.builds(lambda a, b: [*a, b], one_after_the_other, st.sampled_from(list(LAST))),
)


def vaulted(value: str) -> Vault:
    """Return a vault that has looked the value up."""

    class Given(Access, frozen=True):
        def find(self, name: str) -> str:
            return value

    vault = Vaults(Given()).new()
    vault.open(encode_args("p.x", {"a": Secret("KEY")}))
    return vault


def encoded(text: str, chain: list[str]) -> str:
    for name in chain:
        text = {**ENCODINGS, **LAST}[name](text)
    return text


def tell_tale(value: str) -> str:
    """Return a part of the value that no encoding changes."""
    found: list[str] = re.findall("[A-Za-z0-9]+", value.replace("PRIVATE KEY", ""))
    return max(found, key=len)


@settings(max_examples=200)
@given(values, chains, around, around)
@example('it\'s "both" kinds', ["repr"], "it's ", "")
@example('it\'s "both" kinds', ["JSON", "JSON", "repr"], '"', "")
@example("pässwörd-1", ["repr of bytes", "JSON"], "", "")
@example("a\\b\\\\c'd\\n", ["repr", "JSON"], "", "")
@example("a/b+c d/e", ["JSON", "URL, lower case", "URL"], "?", "")
def test_no_text_has_a_value_in_any_encoding(
    value: str, chain: list[str], before: str, after: str
) -> None:
    text = encoded(f"{before}<{value}>{after}", chain)
    told = vaulted(value).redact(text)
    assert "***KEY***" in told
    assert value not in told
    left = tell_tale(value)
    if len(left) >= 4 and left not in encoded(before + after, chain):
        assert left not in told


@settings(max_examples=150)
@given(
    values.filter(lambda value: len(value.encode()) >= 8),
    st.sampled_from(list(BASE64)),
    st.lists(
        st.sampled_from(["repr", "JSON", "JSON of PHP", "URL", "URL, lower case"]), max_size=2
    ),
    around,
    around,
)
@example("<=]{\\{\\`<(.`<@?|\\[<[~/$_?`.]'", next(iter(BASE64)), ["JSON of PHP", "URL"], "", "")
def test_no_text_has_a_value_in_base64(
    value: str, form: str, chain: list[str], before: str, after: str
) -> None:
    text = encoded(BASE64[form](f"{before}{value}{after}"), chain)
    told = vaulted(value).redact(text)
    assert "***KEY***" in told


# -- places ---------------------------------------------------------------------------------------


class Wire:
    """The wire of a channel; it keeps the frames instead of sending them to the supervisor."""

    begun = running = 1
    is_async = False
    asks = 0

    def __init__(self) -> None:
        self.sent: list[bytes] = []

    def send(self, frame: bytes) -> None:
        self.sent.append(frame)

    def ask(self, request: int, frame: bytes) -> Any:
        self.sent.append(frame)
        return StateAnswer(request, None)

    async def ask_async(self, request: int, frame: bytes) -> Any:
        raise AssertionError("nobody awaits here")

    def report(self, progress: Progress) -> None:
        self.sent.append(encode(progress))


LEASE = Lease(1, "t", "x", encode_args("p.x", {"a": Secret("KEY")}), 1, 0)


def told_of(vault: Vault, error: BaseException) -> bytes:
    attempt = outcome.FailedAttempt(LEASE, TaskOptions(), Context("t"), error)
    return encode(outcome.failed(attempt, 1, vault.redact))


def in_a_message(vault: Vault, text: str) -> bytes:
    return told_of(vault, ValueError(text))


def in_a_traceback(vault: Vault, text: str) -> bytes:
    try:
        try:
            raise ConnectionError(text)
        except ConnectionError as error:
            raise ValueError("no luck") from error
    except ValueError as error:
        error.add_note(f"tried with {text}")
        return told_of(vault, error)


def in_a_group(vault: Vault, text: str) -> bytes:
    inner = ExceptionGroup("inner", [ValueError(text), KeyError(text)])
    return told_of(vault, ExceptionGroup("outer", [inner, OSError(text)]))


def in_arguments_that_do_not_fit(vault: Vault, text: str) -> bytes:
    return encode(Completion(1, 0, b"", outcome.invalid("x()", ValueError(text), vault.redact)))


def in_the_log(vault: Vault, text: str) -> bytes:
    formatter = speech.Formatter(marks=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speech.Formatter, "redact", vault.redact)
        try:
            raise ValueError(text)
        except ValueError:
            record = logging.LogRecord(
                "a", 30, "f", 1, "said %s and %r", (text, text), sys.exc_info()
            )
        return formatter.format(record).encode("utf-8", "surrogatepass")


def in_progress(vault: Vault, text: str) -> bytes:
    wire = Wire()
    RequestChannel(wire, Worker(), vault).progress(LEASE, 0.5, text)
    return b"".join(wire.sent)


def in_metrics(vault: Vault, text: str) -> bytes:
    metrics = Metrics()
    metrics.redact = vault.redact
    metrics.counter("pages", url=text).inc()
    return msgspec.msgpack.encode(metrics.take())


TEXTS = [
    *(in_a_message, in_a_traceback, in_a_group, in_arguments_that_do_not_fit),
    *(in_the_log, in_progress, in_metrics),
]


def as_a_result(vault: Vault, text: str) -> None:
    vault.check("the result", outcome.encode_result("x", {"page": [text]}))


def as_the_key_of_a_result(vault: Vault, text: str) -> None:
    vault.check("the result", outcome.encode_result("x", {text: 1}))


def as_an_artefact(vault: Vault, text: str) -> None:
    page = b"\x89PNG\r\n" + text.encode("utf-8", "surrogatepass") + b"\xff\xfe"
    vault.check("the result", outcome.encode_result("x", {"screenshot": page}))


def as_a_state(vault: Vault, text: str) -> None:
    RequestChannel(Wire(), Worker(), vault).state(LEASE).save({"next": text})


def as_the_key_of_a_state(vault: Vault, text: str) -> None:
    RequestChannel(Wire(), Worker(), vault).state(LEASE).load(text[:190])


def as_the_name_of_a_lock(vault: Vault, text: str) -> None:
    RequestChannel(Wire(), Worker(), vault).lock(LEASE, text[:190], 1)


DATA = [
    *(as_a_result, as_the_key_of_a_result, as_an_artefact, as_a_state),
    *(as_the_key_of_a_state, as_the_name_of_a_lock),
]


@settings(max_examples=100)
@given(values, chains, st.sampled_from(TEXTS))
@example(KEY, [], in_a_group)
@example(KEY, ["repr"], in_a_group)
@example("000000\x1e0", [], in_a_group)
@example("secret\u2028 of two lines", [], in_a_group)
@example('it\'s "both"', ["repr"], in_the_log)
def test_no_place_tells_a_value(
    value: str, chain: list[str], place: Callable[[Vault, str], bytes]
) -> None:
    vault = vaulted(value)
    left = place(vault, encoded(f"login with {value!s} failed", chain))
    assert value.encode() not in left
    if len(tell_tale(value)) >= 6:
        assert tell_tale(value).encode() not in left
    vault.clear()
    left = place(vault, encoded(value, chain))
    assert value.encode() not in left, "what a thread says after the attempt"


@settings(max_examples=100)
@given(values.filter(lambda value: len(value) >= 8), chains, st.sampled_from(DATA))
@example('it\'s "both" kinds', ["repr"], as_a_result)
@example("p4$$/word+with", ["URL, lower case"], as_a_state)
def test_no_place_keeps_a_value(
    value: str, chain: list[str], place: Callable[[Vault, str], None]
) -> None:
    text = encoded(value, chain)
    if place in (as_the_key_of_a_state, as_the_name_of_a_lock) and len(text) > 190:
        text = value[:40] if len(value) <= 40 else value.split("\n")[1]
    with pytest.raises(Leak, match="contains the value of secret 'KEY'") as caught:
        place(vaulted(value), text)
    assert value not in str(caught.value)


LONG = "-".join(f"{n:04x}" for n in range(60))  # longer than a message shows


@pytest.mark.parametrize(
    "name",
    [
        lambda vault: outcome.encode_result("x", {LONG: object()}),
        lambda vault: outcome.encode_result("x", {LONG: [object()]}),
        lambda vault: RequestChannel(Wire(), Worker(), vault).lock(LEASE, LONG, 1),
        lambda vault: RequestChannel(Wire(), Worker(), vault).state(LEASE).load(LONG),
        lambda vault: Metrics().counter(LONG),
    ],
)
def test_no_message_tells_the_beginning_of_a_value(name: Callable[[Vault], object]) -> None:
    vault = vaulted(LONG)
    with pytest.raises((TypeError, ValueError, Permanent)) as caught:
        name(vault)
    attempt = outcome.FailedAttempt(LEASE, TaskOptions(), Context("t"), caught.value)
    failure = outcome.failed(attempt, 1, vault.redact).failure
    assert failure is not None
    assert LONG[:9] not in failure.message + failure.traceback


def test_a_metric_is_not_named_by_a_secret() -> None:
    metrics = Metrics()
    metrics.redact = vaulted("hunter2hunter2").redact
    with pytest.raises(ValueError, match=r"contains a secret: logins_\*\*\*KEY\*\*\*"):
        metrics.counter("logins_hunter2hunter2")
    with pytest.raises(ValueError, match="contains a secret"):
        metrics.gauge("logins", hunter2hunter2=1)


# -- texts that stay as they are, and the cost ---------------------------------------------------


@given(st.text(max_size=300), one_line.filter(lambda value: len(tell_tale(value)) >= 6))
def test_a_text_without_the_value_stays_as_it_is(text: str, value: str) -> None:
    if tell_tale(value) not in text:
        assert vaulted(value).redact(text) == text


def test_lines_that_all_keys_have_are_no_secrets() -> None:
    vault = vaulted(KEY)
    public = "-----BEGIN PRIVATE KEY-----\nanother key altogether\n-----END PRIVATE KEY-----"
    assert vault.redact(public) == public
    service = '{\n  "type": "service_account",\n  "key": "abcdefghijklmnopqrst"\n}'
    vault = vaulted(service)
    vault.check("a result", b'{"type": "service_account"}')
    assert vault.redact(f"<{service}>") == "<***KEY***>"
    assert "abcdefghij" not in vault.redact(json.dumps(service))


def test_one_line_of_a_key_is_a_secret() -> None:
    for line in KEY.splitlines()[1:-2]:
        assert vaulted(KEY).redact(f"bad line: {line!r}") == "bad line: '***KEY***'"


def test_values_that_are_not_used_any_more_are_forgotten_in_the_end() -> None:
    found = iter(f"value-number-{number:04}" for number in range(KNOWN_MAX + 2))

    class Changing(Access, frozen=True):
        def find(self, name: str) -> str:
            return next(found)

    vaults = Vaults(Changing())
    for _ in range(KNOWN_MAX + 2):
        vaults.new().open(LEASE.args)
    assert vaults.redact("value-number-0001") == "value-number-0001"
    assert vaults.redact("value-number-0002") == "***KEY***"


@pytest.mark.parametrize("value", [KEY, 'it\'s "both"', "\\\\\\\\'\\\\\"", "%%%%%%%%", "&&&&&&&&;"])
@pytest.mark.parametrize("noise", ["\\", "%25", "%5C", "&amp;", "A", "'", "\n", " | "])
def test_hostile_texts_take_time_in_proportion(value: str, noise: str) -> None:
    """Check that ten times the text does not take a hundred times as long."""
    vault = vaulted(value)
    anchor = tell_tale("x" + value)
    vault.redact(anchor)  # compiles the patterns

    def seconds(count: int) -> float:
        text = noise * count + anchor + noise * count
        best = math.inf
        for _ in range(3):
            began = time.process_time()
            vault.redact(text)
            best = min(best, time.process_time() - began)
        return best

    assert seconds(10_000) < 50 * seconds(1_000)


def account(lines: int) -> str:
    """Return a value of several lines with blanks and percents; no line is searched by itself."""
    return "\n".join(
        ["{", *(f'  "name {n}": "a%40b%2Fc {n}",' for n in range(lines)), '  "end": 1']
    )


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace("\n", "\n    "),
        lambda text: text.replace("\n", "\r\n"),
        lambda text: text.replace("%", "%25"),
        lambda text: text.replace(" ", "\n "),
    ],
)
def test_a_text_that_differs_at_its_end_takes_time_in_proportion(
    change: Callable[[str], str],
) -> None:
    """Check that a near miss is not tried in 2**n ways."""

    def seconds(lines: int) -> float:
        vault = vaulted(account(lines))
        almost = change(account(lines)).replace("end", "and")
        vault.redact(almost)  # compiles the patterns
        best = math.inf
        for _ in range(3):
            began = time.process_time()
            assert vault.redact(almost) == almost
            best = min(best, time.process_time() - began)
        return best

    assert seconds(7) < 20 * seconds(3)


@pytest.mark.parametrize(
    "value", ["  leading blanks", "a  >b", "x\n| y z", "a +b  c", "tab\t \n\tx y"]
)
@pytest.mark.parametrize("chain", [[], ["repr"], ["JSON", "JSON"], ["URL"], ["HTML"]])
def test_blanks_are_found_beside_what_is_taken_for_them(value: str, chain: list[str]) -> None:
    assert "***KEY***" in vaulted(value).redact(encoded(f"<{value}>", chain))
