"""Sidecars under a real systemd: the web process as a unit, and alerts."""

import json
import re
from pathlib import Path
from typing import Any

from bed.host import Host
from support.waiting import Waiting

DOCS = Path(__file__).parents[2] / "docs"
SCALED = {"done": "parser is being scaled to 3 workers"}
ADDRESS = "127.0.0.1:7717"
POOLS = {"jobs": {"worker": "bed_jobs:Jobs", "size": 2}}
# The command appends its input: more than one message may come.
TICKET = "#!/bin/sh\nexec cat >> /var/lib/musterd/tickets\n"


def shell(page: str, heading: str) -> str:
    """Return the first commands for root below a heading."""
    text = (DOCS / page).read_text().partition(heading)[2]
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return next(block for kind, block in blocks if not kind and "sudo " in block).replace(
        "sudo ", ""
    )


def get(host: Host, path: str) -> tuple[int, Any]:
    said = host.run("curl", "-s", "-w", "\n%{http_code}", f"http://{ADDRESS}{path}", check=False)
    body, _, code = said.stdout.rpartition("\n")
    return int(code or 0), json.loads(body) if body.startswith("{") else body


def test_the_web_process_is_a_service_of_its_own(host: Host, waiting: Waiting) -> None:
    host.configure(POOLS, http__listen=ADDRESS, http__start=False)
    host.start()
    host.run("sh", "-euc", shell("monitoring.md", "**As a service.**"))
    waiting("it answers", lambda: get(host, "/healthz")[0] == 200)
    assert get(host, "/healthz")[1]["pid"] == host.main_pid()
    assert get(host, "/readyz")[0] == 200
    assert len(get(host, "/status")[1]["pools"][0]["workers"]) == 2
    assert "musterd_up 1.0" in get(host, "/metrics")[1]
    web = host.main_pid("musterd-web")
    assert host.run("stat", "-c", "%U", f"/proc/{web}").stdout == "musterd\n"
    assert host.status()["web"] is None, "the daemon starts none of its own"
    host.run("systemctl", "stop", "musterd")
    code, told = get(host, "/healthz")
    assert (code, told["status"]) == (503, "unhealthy"), "it is there to say so"
    assert "musterd_up 0.0" in get(host, "/metrics")[1]
    host.start()
    waiting("it is well again", lambda: get(host, "/healthz")[0] == 200)
    assert host.main_pid("musterd-web") == web


def test_actions_take_the_token_of_a_file_or_of_a_credential(host: Host, waiting: Waiting) -> None:
    pools = {"parser": {"worker": "bed_jobs:Jobs", "size": 2}}
    host.configure(pools, http__listen=ADDRESS, http__token_file="/etc/musterd/http-token")
    host.run("sh", "-euc", shell("monitoring.md", "\n## Dashboard\n"))
    host.start()
    waiting("it answers", lambda: get(host, "/healthz")[0] == 200)
    (curl,) = re.findall(r"^curl -H .*?\n .*?$", (DOCS / "monitoring.md").read_text(), re.M)
    assert json.loads(host.run("sh", "-euc", curl).stdout) == SCALED
    waiting("it has three", lambda: host.status()["pools"][0]["running"] == 3)
    token = host.file("/etc/musterd/http-token").read_text().strip()
    assert token not in host.journal("-u", "musterd")
    host.drop_in("[Service]\nLoadCredential=http-token:/etc/musterd/http-token\n")
    host.run("chmod", "600", "/etc/musterd/http-token")  # the daemon's user cannot read the file
    host.configure(pools, http__listen=ADDRESS, http__token_file="http-token")
    host.run("systemctl", "restart", "musterd")
    waiting("it answers", lambda: get(host, "/healthz")[0] == 200)
    asked = host.run("sh", "-euc", curl).stdout
    assert json.loads(asked) == SCALED


def test_alerts_are_sent_out_of_the_hardened_unit(host: Host, waiting: Waiting) -> None:
    host.write("/usr/local/bin/open-ticket", TICKET)
    host.run("chmod", "755", "/usr/local/bin/open-ticket")
    host.configure(POOLS)
    with host.file("/etc/musterd/musterd.toml").open("a") as config:
        config.write('[[alerts]]\nname = "ops"\non = ["worker.crashed", "daemon.crashed"]\n')
        config.write('group = "0s"\ncommand = ["/usr/local/bin/open-ticket"]\n')
    host.start()
    sent = ("alerts", "test", "ops")
    waiting("a test is sent", lambda: "delivered" in host.ctl(*sent, check=False).stdout)
    host.run("kill", "-KILL", host.ctl("pid", "jobs/0").stdout.strip())
    tickets = host.file("/var/lib/musterd/tickets")
    waiting("it is told", lambda: "worker.crashed jobs/0" in tickets.read_text())
    host.run("kill", "-KILL", str(host.main_pid()))
    waiting("that is told by the next one", lambda: "daemon.crashed" in tickets.read_text())
