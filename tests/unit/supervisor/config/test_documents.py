"""The shipped configuration and the documentation say what the program does."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from musterd.supervisor.config import load as configuration
from musterd.supervisor.config.load import load
from musterd.supervisor.config.pool import ExecutorsConfig, ExecutorsOverride, PoolConfig
from musterd.supervisor.config.schema import (
    BreakerConfig,
    BreakerOverride,
    ClassConfig,
    Config,
    RetryConfig,
    RetryOverride,
    TargetConfig,
    inherited,
)
from musterd.supervisor.config.section import Section

ROOT = Path(__file__).parents[4]
SHIPPED = ROOT / "etc" / "musterd.toml"


# Has the keys of [targets."SITE"], which are told there.
LIKE_TARGETS = "target_defaults"
# Each has one row: its keys are those of the section, which are told there.
OVERRIDES = {
    RetryOverride: RetryConfig,
    BreakerOverride: BreakerConfig,
    ExecutorsOverride: ExecutorsConfig,
}


def schema_defaults(cls: Any = Config, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield every dotted key with its default as TOML writes it."""
    for field in msgspec.structs.fields(cls):
        key = f"{prefix}{field.encode_name}"
        if key == LIKE_TARGETS:
            continue
        if field.name == cls.flattens:
            key = prefix.removesuffix(".")
        kind, sections = configuration._kind(field.type), configuration._sections(field.type)
        if field.type in OVERRIDES:
            yield key, elsewhere(key)
        elif kind is None:
            yield from schema_defaults(
                sections or field.type, f"{key}.NAME." if sections else f"{key}."
            )
        elif field.required:
            yield key, "required"
        else:
            default = {} if field.default is msgspec.NODEFAULT else field.default
            if default is None:
                yield key, elsewhere(key)
            else:
                yield key, f"`{configuration._toml(kind.write(default))}`"


def elsewhere(key: str) -> str:
    """Return where the value of an override comes from when the override does not say it."""
    table, _, name = key.partition(".NAME.")
    if table == "schedule":
        return "none"
    section = name.partition("_")[0].partition(".")[0]
    if key == "targets.NAME.robots":
        return "as the pool says"
    if table == "pools" and section in ("cache", "debounce", "debug", "executors"):
        return f"as in [{section}]"
    if table in ("pools", "targets"):
        return "`size`" if table == "pools" else "as its class says"
    if name in (words := {"on_open": "wait", "fallback_on": "open", "counts": "as usual"}):
        return words[name]
    return "as the pool says" if name == "timeout" else f"as in [{name}]"


def without_comment_signs(text: str) -> str:
    """Return the file with every default that it shows switched on."""
    return re.sub(r"^#(?=[\[a-z])", "", text, flags=re.MULTILINE)


def loaded(path: Path) -> Config:
    return load([path], None, [], {}).config


def test_the_documentation_lists_every_key_with_its_default() -> None:
    text = (ROOT / "docs" / "configuration.md").read_text()
    rows = re.findall(r"^\| `([a-z]+\.[A-Za-z_.]+)` \| (.+?) \| .+ \|$", text, re.MULTILINE)
    assert rows == list(schema_defaults())


@pytest.mark.parametrize(("override", "section"), OVERRIDES.items())
def test_overrides_have_the_keys_of_their_section(override: Any, section: Any) -> None:
    keys = [field.name for field in msgspec.structs.fields(section)]
    if section is RetryConfig:
        keys.remove("budget")
    assert [field.name for field in msgspec.structs.fields(override)] == keys


def test_the_shipped_file_changes_nothing() -> None:
    assert loaded(SHIPPED) == load(None, None, [], {}, default_file=Path("/nonexistent")).config


def test_the_shipped_file_shows_every_key_with_its_default(tmp_path: Path) -> None:
    path = tmp_path / "all.toml"
    path.write_text(without_comment_signs(SHIPPED.read_text()))
    config = loaded(path)
    expected = Config(
        pools={
            "parser": PoolConfig(worker="musterd.workers.parser:ParserWorker", size=5),
            "browser": PoolConfig(
                worker="musterd.workers.browser:BrowserWorker",
                size=3,
                sacrifice=True,
            ),
        }
    )
    assert config == inherited(expected)
    origins = load([path], None, [], {}).origins
    assert [
        key
        for key, origin in origins.items()
        if origin == "built-in" and "browser" not in key and not key.startswith(LIKE_TARGETS)
    ] == []


@pytest.mark.parametrize(
    ("example", "cls"),
    [("[classes.critical]", ClassConfig), ('[targets."site.example"]', TargetConfig)],
)
def test_the_shipped_file_has_an_example_with_every_key(
    tmp_path: Path, example: str, cls: type[Section]
) -> None:
    text = SHIPPED.read_text()
    block = text[text.index(f"# {example}") :].partition("\n\n")[0]
    block = re.sub(r"^# ", "", block, flags=re.MULTILINE)
    path = tmp_path / "example.toml"
    path.write_text(block + ("\n[classes.critical]" if cls is TargetConfig else ""))
    loaded(path)
    shown = re.findall(r"^(\w+) =", block, re.MULTILINE)
    assert shown == [field.encode_name for field in msgspec.structs.fields(cls)]


# Of the tutorial an example may need those before; its own test types them all.
DOCUMENTS = [
    path.relative_to(ROOT / "docs").as_posix()
    for path in sorted((ROOT / "docs").rglob("*.md"))
    if "```toml\n" in path.read_text() and path.name != "tutorial.md"
]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_the_examples_in_the_documentation_load(document: str, tmp_path: Path) -> None:
    text = (ROOT / "docs" / document).read_text()
    examples = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    for rows in re.findall(r"```csv\n(.*?)```", text, re.DOTALL):
        (tmp_path / "sites.csv").write_text(rows)
    for example in examples:
        path = tmp_path / "example.toml"
        path.write_text(example)
        loaded(path)


def test_the_readme_of_the_drop_ins_is_no_drop_in() -> None:
    assert (ROOT / "etc" / "musterd.d" / "README").exists()
    origins = load([SHIPPED], None, [], {}).origins
    assert set(origins.values()) <= {"built-in", str(SHIPPED)}


@pytest.mark.parametrize("cls", [Config, *msgspec.structs.fields(Config)], ids=str)
def test_every_section_refuses_unknown_keys(cls: Any) -> None:
    struct = cls if cls is Config else configuration._sections(cls.type) or cls.type
    assert struct.__struct_config__.forbid_unknown_fields
    assert struct.__struct_config__.frozen
