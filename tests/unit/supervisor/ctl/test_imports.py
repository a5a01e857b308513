"""Files of sites: what their entries become, what is told of the rest, and what is refused."""

import builtins
import io
import json
import zipfile
from typing import Any

import pytest

from musterd.supervisor.config.sources import Unusable
from musterd.supervisor.ctl import import_changedetection
from musterd.supervisor.ctl.import_changedetection import read_changedetection
from musterd.supervisor.ctl.import_csv import read_csv
from musterd.supervisor.ctl.import_entries import (
    ENTRIES_MAX,
    VALUES_MAX,
    WHOLE_PAGE,
    Entry,
    give_names,
    safe,
    secrets_in,
    slug,
)
from musterd.supervisor.ctl.import_urlwatch import read_urlwatch

URL = "https://shop.example/kites"


def noted(entry: Entry) -> set[str]:
    return {note.key for note in entry.notes}


def watches(*given: dict[str, Any], settings: dict[str, Any] | None = None) -> list[Entry]:
    document: dict[str, Any] = {"watching": {str(n): each for n, each in enumerate(given)}}
    if settings is not None:
        document["settings"] = settings
    return read_changedetection(json.dumps(document).encode())


# -- names ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("title", "name"),
    [
        ("kites_2", "kites_2"),
        ("Zephyr Kites & Co.", "zephyr-kites-co"),
        ("Crème brûlée", "creme-brulee"),
        ("4 kites", "site-4-kites"),
        ("x" * 60, "x" * 40),
        ("k" + "_" * 39, "k" + "_" * 39),
        ("Воздушные змеи 5", ""),
        ("", ""),
    ],
)
def test_a_name_is_made_of_the_title(title: str, name: str) -> None:
    assert slug(title) == name


def test_names_are_unique_and_a_changed_one_is_told() -> None:
    titled = [Entry("line 2", "a" * 40, URL), Entry("line 3", "a" * 40, URL)]
    hosts = [Entry("line 4", url="https://www.shop.example/a"), Entry("line 5", "Змей", URL)]
    give_names([*titled, *hosts])
    assert [each.name for each in titled] == ["a" * 40, "a" * 38 + "-2"]
    assert [each.name for each in hosts] == ["shop-example", "shop-example-2"]
    assert noted(titled[1]) == {"name"}
    many = [Entry("", url=URL) for _ in range(ENTRIES_MAX)]
    give_names(many)
    assert len({each.name for each in many}) == ENTRIES_MAX


def test_secrets_of_other_programs_are_not_shown() -> None:
    assert safe("cookies", {"id": "pw"}) == safe("notification_urls", ["pw"]) == "(not shown)"
    assert safe("url", "ftp://me:pw@shop.example/") == '"ftp://shop.example/"'


def test_secrets_that_arguments_name_are_found_at_any_depth() -> None:
    args = {"headers": {"X": {"$secret": "A"}}, "list": [{"y": {"$secret": "B"}}, "$secret"]}
    assert secrets_in(args) == {"A", "B"}
    assert secrets_in({"$secret": "C"}) == {"C"}
    assert secrets_in("text") == set()


# -- CSV --------------------------------------------------------------------------------------


def test_columns_of_csv_become_keys_and_arguments() -> None:
    kites, page, script = read_csv(
        "url,name,select.price,every,max_retries,key,paused,args.headers,task\n"
        f'{URL},kites,.price,5m,2,7,yes,"{{""X"": ""1""}}",\n'
        "https://other.example/,,,,,,,,\n"
        f"{URL},,,,,,,,browser.render\n"
    )
    assert (kites.place, kites.title, kites.paused) == ("line 2", "kites", True)
    assert kites.keys == {
        "task": "parser.extract",
        "notify": "task.changed",
        "every": "5m",
        "max_retries": 2,
        "key": "7",
        "args": {"url": URL, "headers": {"X": "1"}, "select": {"price": ".price"}},
    }
    assert page.keys["args"]["select"] == {"text": WHOLE_PAGE}
    assert script.keys["args"] == {"url": URL}


@pytest.mark.parametrize("sign", [",", ";", "\t"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_spreadsheets_of_all_countries_are_read(sign: str, end: str) -> None:
    rows = ("url,name,select.a,every", f'{URL},"two\nlines","h1 , b",5m', f"{URL},a\x0bb,,")
    text = end.join(rows).replace(",", sign).replace(f"h1 {sign} b", "h1 , b")
    first, second = read_csv(text)
    assert (first.title, first.keys["every"]) == ("two\nlines", "5m")
    assert first.keys["args"]["select"] == {"a": "h1 , b"}
    assert second.title == "a\x0bb"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "needs a first line"),
        ("name\nkites\n", "needs a column 'url'"),
        ("url,url\na,b\n", "each once"),
        (f"url\n{URL},more\n", "more cells than columns in line 2"),
        ('url\n"open\n', "is not valid CSV"),
    ],
)
def test_csv_that_is_no_table_is_refused_whole(text: str, why: str) -> None:
    with pytest.raises(Unusable, match=why):
        read_csv(text)


def test_no_file_has_more_entries_than_there_can_be_schedules() -> None:
    many = ENTRIES_MAX + 1
    for read in (
        lambda: read_csv("url\n" + f"{URL}\n" * many),
        lambda: read_urlwatch("---\n".join([f"url: {URL}\n"] * many)),
        lambda: watches(*[{"url": URL}] * many),
    ):
        with pytest.raises(Unusable, match="more than 10000 entries, and there can be no more"):
            read()


@pytest.mark.parametrize(
    ("row", "why"),
    [
        (",x,", "it has no url"),
        ("shop.example,x,", "is no address of a page"),
        ("http://[::1,x,", "is no address of a page"),
        ("file:///etc/passwd,x,", "is no address of a page"),
        (f"{URL},x,perhaps", "is neither true nor false"),
    ],
)
def test_a_line_that_cannot_be_used_is_refused_alone(row: str, why: str) -> None:
    bad, good = read_csv(f"url,name,paused\n{row}\n{URL},y,\n")
    assert why in " ".join(bad.problems)
    assert not good.problems


# -- urlwatch ---------------------------------------------------------------------------------


def job(text: str) -> Entry:
    [entry] = read_urlwatch(text)
    return entry


@pytest.mark.parametrize(
    ("filters", "selector"),
    [
        ("[{css: .price}, html2text, strip]", "[].price"),
        ("[{css: {selector: .price, maxitems: 1}}]", ".price"),
        ("[{xpath: //b/text()}]", "[]xpath://b/text()"),
        ("[{xpath: {path: //b, method: html}}]", "[]xpath://b"),
        ("[{element-by-id: 'a\"b'}]", '[][id="a\\"b"]'),
        ("[{element-by-class: new}]", '[][class~="new"]'),
        ("[{element-by-tag: body}]", "[]body"),
        ("css:.price,html2text", "[].price"),
        ("[html2text]", WHOLE_PAGE),
        ("", WHOLE_PAGE),
    ],
)
def test_filters_of_urlwatch_become_selectors(filters: str, selector: str) -> None:
    entry = job(f"url: {URL}\nfilter: {filters}\n")
    assert entry.keys["args"]["select"] == {"text": selector}
    assert not entry.problems
    assert not entry.notes


def test_jobs_of_urlwatch_become_schedules() -> None:
    first, second = read_urlwatch(
        f"name: Kites\nurl: {URL}\nmax_tries: 3\ntimeout: 9\nheaders: {{X: 1}}\n"
        "ignore_cached: true\nenabled: false\n"
        f"---\n---\nkind: browser\nnavigate: {URL}\nwait_until: networkidle0\nwait_for: .a\n"
    )
    assert (first.title, first.paused, second.place) == ("Kites", True, "job 3")
    assert first.keys == {
        "task": "parser.extract",
        "notify": "task.changed",
        "max_retries": 2,
        "timeout": 9,
        "args": {
            "url": URL,
            "select": {"text": WHOLE_PAGE},
            "headers": {"X": "1"},
            "conditional": False,
        },
    }
    assert second.keys["task"] == "browser.extract"
    assert second.keys["args"]["wait_until"] == "networkidle"
    assert second.keys["args"]["wait_for"] == ".a"


def test_what_schedules_do_not_have_of_a_job_is_told() -> None:
    entry = job(
        f"url: {URL}\nssl_no_verify: true\ncookies: {{a: pw}}\nmax_tries: none\ntimeout: 0\n"
        "wait_for: 3\nwait_until: never\ntags: [a]\nfuture: 1\nhttp_proxy: null\n"
        "filter: [{grep: x}, {css: {selector: b, exclude: i, skip: 1}}]\n"
    )
    assert not entry.problems
    assert noted(entry) == {
        *("ssl_no_verify", "cookies", "max_tries", "timeout", "wait_for", "wait_until", "tags"),
        *("future", "filter grep", "filter css.exclude", "filter css.skip"),
    }
    assert all(note.advice for note in entry.notes)
    assert "pw" not in str(entry.notes)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("command: ls", "is a shell command"),
        (f"url: {URL}\ndata: a=b", "sends a form"),
        (f"url: {URL}\nmethod: PUT", "sends a form"),
        (f"url: {URL}\nheaders: [a]", "are no table"),
        (f"url: {URL}\nfilter: [{{shellpipe: rm}}]", "makes something else of the page"),
        (f"url: {URL}\nfilter: [{{jq: .a}}]", "makes something else of the page"),
        (f"url: {URL}\nfilter: [3]", "makes something else of the page"),
        (f"url: {URL}\nfilter: [{{css: a}}, {{css: b}}]", "selects in a selection"),
        (f"url: {URL}\nfilter: [{{css: {{selector: a, method: xml}}}}]", "is for XML"),
        (f"url: {URL}\nfilter: [css]", "is no selector"),
        (f"url: {URL}\nfilter: [{{element-by-tag: 'a b'}}]", "is no tag"),
        ("name: x", "it has no url"),
    ],
)
def test_a_job_that_would_look_at_something_else_is_refused(text: str, why: str) -> None:
    assert why in " ".join(job(text).problems)


BOMB = "a0: &a0 [x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12)
)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("url: [", "not valid YAML"),
        ("\x01", "not valid YAML"),
        ("!!python/object:os.system {}", "not valid YAML"),
        ("a: 2020-13-40", "cannot be read"),
        (f"url: {URL}\nurl: {URL}", "given twice"),
        ("just text", "not a job"),
        ("report: {}", "urlwatch's settings"),
        (BOMB, "values"),
        ("[" * 10_000, "nested"),
        ("&a [*a]", "levels"),
    ],
)
def test_yaml_without_jobs_is_refused_whole(text: str, why: str) -> None:
    with pytest.raises(Unusable, match=why):
        read_urlwatch(text)


def test_merges_in_yaml_cannot_fill_the_memory() -> None:
    """Nine lines, each of which merges the one before ten times, are a thousand million keys."""
    lines = ["a0: &a0 {x: 1}"]
    lines += [f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 10)}]}}" for n in range(1, 10)]
    with pytest.raises(Unusable, match="merges more than"):
        read_urlwatch("\n".join([*lines, f"url: {URL}"]))


def test_tables_may_be_merged_and_their_keys_given_anew() -> None:
    """The last one is made before the one it merges, which is deeper."""
    shared = "headers: {deep: &deep {<<: &base {Accept: text/html}, Accept: text/plain}}"
    text = f"{shared}\nurl: {URL}\ncookies: {{<<: *deep}}\n<<: {{name: tea, url: none}}"
    (entry,) = read_urlwatch(text)
    assert (entry.url, entry.title) == (URL, "tea")


def test_yaml_needs_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *others: Any, **more: Any) -> Any:
        if name == "yaml":
            raise ImportError(name)
        return real(name, *others, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(Unusable, match=r"install musterd\[yaml\]"):
        read_urlwatch(f"url: {URL}")


# -- changedetection.io -----------------------------------------------------------------------


def test_watches_become_schedules() -> None:
    entries = watches(
        {
            "url": URL,
            "title": "Kites",
            "include_filters": [".price", "xpath://b", "//i", "xpath1:/u"],
            "time_between_check": {"weeks": None, "hours": 1, "minutes": "30"},
            "time_between_check_use_default": False,
            "fetch_backend": "html_webdriver",
            "headers": {"X": "1"},
            "paused": True,
            "method": "GET",
            "processor": "text_json_diff",
            "last_checked": 5,
            "filter_text_added": True,
            "time_schedule_limit": {"enabled": False, "monday": {"enabled": True}},
            "browser_steps": [{"operation": "Choose one"}],
        },
        {"url": URL, "time_between_check_use_default": True, "time_between_check": {"days": 1}},
        {"url": URL, "minutes_between_check": 7, "css_filter": "b", "notification_muted": True},
        settings={
            "requests": {"time_between_check": {"hours": 3}},
            "application": {"fetch_backend": "html_requests"},
        },
    )
    assert [(each.problems, each.notes) for each in entries] == [([], [])] * 3
    assert entries[0].paused
    assert entries[0].keys == {
        "task": "browser.extract",
        "notify": "task.changed",
        "every": "5400s",
        "args": {
            "url": URL,
            "select": {
                "text_1": "[].price",
                "text_2": "[]xpath://b",
                "text_3": "[]xpath://i",
                "text_4": "[]xpath:/u",
            },
            "headers": {"X": "1"},
        },
    }
    assert "every" not in entries[1].keys
    assert entries[1].usual_every == "10800s"
    assert entries[2].keys == {
        "task": "parser.extract",
        "every": "7m",
        "args": {"url": URL, "select": {"text": "[]b"}},
    }


def test_a_browser_may_be_the_default_of_all_watches() -> None:
    application = {"application": {"fetch_backend": "html_webdriver"}}
    [entry] = watches({"url": URL, "fetch_backend": "system"}, settings=application)
    assert entry.keys["task"] == "browser.extract"


def test_what_schedules_do_not_have_of_a_watch_is_told() -> None:
    [entry] = watches(
        {
            "url": URL,
            "ignore_text": ["a"],
            "notification_urls": ["tgram://pw"],
            "tags": ["uuid"],
            "time_schedule_limit": {"enabled": True},
            "filter_text_removed": False,
            "trigger_text": [],
            "future": {"a": 1},
        }
    )
    assert not entry.problems
    assert noted(entry) == {
        *("ignore_text", "notification_urls", "tags", "time_schedule_limit"),
        *("filter_text_removed", "future"),
    }
    assert "pw" not in str(entry.notes)


@pytest.mark.parametrize(
    ("watch", "why"),
    [
        ({"title": "x"}, "it has no url"),
        ({"url": "source:https://a.example/"}, "is no address"),
        ({"url": "https://a.example/{% now 'utc' %}"}, "is a template"),
        ({"url": URL, "method": "POST"}, "sends a form"),
        ({"url": URL, "processor": "restock_diff"}, "looks for more than text"),
        ({"url": URL, "browser_steps": [{"operation": "Click element"}]}, "use a session"),
        ({"url": URL, "include_filters": ["json:$.a"]}, "is for JSON"),
        ({"url": URL, "include_filters": [3]}, "is no selector"),
        ({"url": URL, "headers": "X: 1"}, "are no table"),
    ],
)
def test_a_watch_that_would_look_at_something_else_is_refused(
    watch: dict[str, Any], why: str
) -> None:
    [entry] = watches(watch)
    assert why in " ".join(entry.problems)


def backup(**members: Any) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as file:
        for name, value in members.items():
            file.writestr(name.replace("__", "/") + ".json", json.dumps(value))
        file.writestr("secret.txt", "pw")
    return packed.getvalue()


def test_backups_of_both_forms_and_other_json_are_read() -> None:
    watch = {"url": URL}
    settings = {"requests": {"time_between_check": {"minutes": 9}}}
    new = backup(changedetection={"settings": settings}, a__watch=watch, b__watch=watch)
    [first, second] = read_changedetection(new)
    assert (first.usual_every, second.url) == ("540s", URL)
    old = backup(**{"url-watches": {"watching": {"a": watch}, "settings": settings}})
    assert [each.usual_every for each in read_changedetection(old)] == ["540s"]
    for document in ([watch], {"uuid": watch}, watch):
        [entry] = read_changedetection(json.dumps(document).encode())
        assert entry.url == URL


def test_an_interval_that_never_ends_is_none() -> None:
    [entry] = read_changedetection(
        b'[{"url": "https://shop.example/", "time_between_check": {"minutes": Infinity}}]'
    )
    assert "every" not in entry.keys


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "not valid JSON"),
        (b"\xff\xfe", "not UTF-8"),
        (b"[" * 100_000, "not valid JSON"),
        (b"7" * 5000, "not valid JSON"),
        (b"3", "not a backup"),
        (b"{}", "has no watches"),
        (b"[3]", "not a watch"),
        (b'{"settings": {}}', "give the backup"),
        (b'{"settings": {}, "watching": {}}', "give the backup"),
        (json.dumps([{"a": list(range(VALUES_MAX))}]).encode(), "values"),
        (b"[" + b"0," * ENTRIES_MAX + b"0]", "more than 10000 entries"),
        (backup(), "has no watches"),
        (backup(a__watch={"url": URL})[:-40] + b"PK\x05\x06" + b"\0" * 18, "has no watches"),
    ],
)
def test_what_is_no_backup_is_refused_whole(content: bytes, why: str) -> None:
    with pytest.raises(Unusable, match=why):
        read_changedetection(content)


def test_a_backup_cannot_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    bomb = backup(a__watch={"url": URL, "title": " " * 2_000_000})
    with pytest.raises(Unusable, match="too large"):
        read_changedetection(bomb)
    monkeypatch.setattr(import_changedetection, "IMPORT_BYTES_MAX", 50)
    with pytest.raises(Unusable, match="too large"):
        read_changedetection(backup(a__watch={"url": URL}, b__watch={"url": URL}))
