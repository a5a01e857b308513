"""The last chapter of docs/tutorial.md, typed on a machine with a real systemd."""

import re
from pathlib import Path

from bed.host import Host
from support.waiting import Waiting
from support.walk import files_of

PAGE = (Path(__file__).parents[2] / "docs" / "tutorial.md").read_text()
SERVER = re.compile(r"^```sh\n# on the server\n(.*?)^```", re.MULTILINE | re.DOTALL)
FOLDER = "/root/tutorial"
SHOP = "http://127.0.0.1:8700"


def test_what_the_tutorial_has_made_runs_as_a_service(host: Host, waiting: Waiting) -> None:
    for name, text in files_of(PAGE).items():
        host.write(f"{FOLDER}/{name}", text)
    host.write(f"{FOLDER}/price.txt", "49.00")
    first, second = SERVER.findall(PAGE)
    lines = first.splitlines()
    assert [line for line in lines if "pip" not in line and "venv" not in line] == lines[2:]
    for block in (lines[2], second):  # a machine without a network has the package already
        said = host.run("bash", "-euc", f"cd {FOLDER}\n{block}").stdout
    assert re.search(r"^promos +RUNNING +2/2", said, re.MULTILINE), said

    shop = ("/opt/musterd/bin/python", f"{FOLDER}/shop.py")
    host.run("systemd-run", "--unit=shop", f"--working-directory={FOLDER}", *shop)
    kites = ("submit", "promos.check", f"url={SHOP}/kites", "--wait")
    waiting("the shop is open", lambda: host.ctl(*kites, check=False).returncode == 0)
    select = 'select={"count": ".count"}'
    orders = ("submit", "promos.extract", f"url={SHOP}/orders", select, "--session", "shop")
    assert '"count": "3"' in host.ctl(*orders, "--wait").stdout
