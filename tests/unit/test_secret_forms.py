"""However a secret is written in what a worker says, it is found: secrets x encodings x places."""

import base64
import html
import json
import re
from collections.abc import Callable
from urllib.parse import quote, quote_plus

import msgspec
from hypothesis import example, given, settings
from hypothesis import strategies as st

from musterd import Secret
from musterd.ipc.secret_access import Access
from musterd.ipc.taskspec import encode_args
from musterd.workers.vault import Vault, Vaults

KEY = """-----BEGIN PRIVATE KEY-----
MIIEvQIBADANBgkqhkiG9w0BAQEFAASCBKcwggSjAgEAAoIBAQC7VJTUt9Us8cKj
MzEfYyjiWA4R4/M2bS1GB4t7NXp98C3SC6dVMvDuictGeurT8jNbvJZHtCSuYEvu
NMoSfm76oqFvAp8Gy0iz5sxjZmSnXyCdPEovGhLa0VzMaQ8s+CLOyS56YyCFGeJZ
qgtzJ6GR3eqoYSW9b9UMvkBpZODSctWSNGj3P7jRFDO5VoTwCQAWbFnOjDfH5Ulg
p2PKSQnSJP3AJLQNFNe7br1XbrhV//eO+t51mIpGSDCUv3E0DDFcWDTH9cXDTTlR
ZVEiR2Bw==
-----END PRIVATE KEY-----"""


def lower_quote(text: str) -> str:
    """As some libraries write it: %2f."""
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
    "URL": lambda text: quote(text, safe=""),
    "path of a URL": quote,
    "form": quote_plus,
    "URL, lower case": lower_quote,
    "HTML": html.escape,
}
BASE64: dict[str, Callable[[str], str]] = {
    "base64": lambda text: base64.b64encode(text.encode()).decode(),
    "base64 for URLs": lambda text: base64.urlsafe_b64encode(text.encode()).decode(),
    "base64 in lines": wrapped_base64,
}

SIGNS = "'\"\\/%&+ =?#<>$!*()[]{}|~`^@:;,\t"
plain = st.text("abcdefgXYZ0123456789_.-", min_size=6, max_size=12)
odd = st.text(SIGNS + "öß€日本\U0001f600\u00a0é", max_size=12)
one_line = st.builds(lambda a, b, c: f"{a}{b}{c}", odd, plain, odd).filter(lambda v: v == v.strip())
several_lines = st.lists(st.text("abcdefgXYZ0123456789+/=", min_size=20, max_size=64), min_size=2)
values = st.one_of(one_line, several_lines.map("\n".join), st.just(KEY))
around = st.text(SIGNS + "abc\n", max_size=20)
chains = st.lists(st.sampled_from(list(ENCODINGS)), max_size=3)


def vaulted(value: str) -> Vault:
    """A vault that has looked the value up."""

    class Given(Access, frozen=True):
        def find(self, name: str) -> str:
            return value

    vault = Vaults(Given()).new()
    vault.open(encode_args("p.x", {"a": Secret("KEY")}))
    return vault


def encoded(text: str, chain: list[str]) -> str:
    for name in chain:
        text = ENCODINGS[name](text)
    return text


def tell_tale(value: str) -> str:
    """A part of the value that no encoding changes."""
    found: list[str] = re.findall("[A-Za-z0-9]+", value.replace("PRIVATE KEY", ""))
    return max(found, key=len)


@settings(max_examples=500, deadline=None)
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


@settings(max_examples=300, deadline=None)
@given(
    values.filter(lambda value: len(value.encode()) >= 8),
    st.sampled_from(list(BASE64)),
    st.lists(st.sampled_from(["repr", "JSON", "URL", "URL, lower case"]), max_size=2),
    around,
    around,
)
def test_no_text_has_a_value_in_base64(
    value: str, form: str, chain: list[str], before: str, after: str
) -> None:
    text = encoded(BASE64[form](f"{before}{value}{after}"), chain)
    told = vaulted(value).redact(text)
    assert "***KEY***" in told
