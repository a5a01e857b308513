"""Credentials of systemd: a pool gets those that it names, of all that the hardened unit loads."""

from typing import Any

from bed.host import Host

SHOP = """
import os
from musterd import Worker, task

class Shop(Worker):
    @task
    def size(self, ctx, api_key: str) -> int:
        return len(api_key)

    @task
    def environment(self, ctx) -> dict:
        return dict(os.environ)
"""
UNIT = """
[Service]
LoadCredential=SHOP_API_KEY:/etc/shop/key
LoadCredential=http-token:/etc/shop/token
Environment=DATABASE_PASSWORD=of-the-daemon
"""


def test_a_pool_has_the_credential_that_it_names_and_no_other(host: Host) -> None:
    host.write("/srv/bed/shop.py", SHOP)
    host.write("/etc/shop/key", "k-98765\n")
    host.write("/etc/shop/token", "0123456789abcdef0123456789abcdef\n")
    host.run("chmod", "600", "/etc/shop/key", "/etc/shop/token")
    host.drop_in(UNIT)
    pool = {"worker": "shop:Shop", "size": 1, "secrets": ["*", "SHOP_API_KEY"]}
    host.configure({"shop": pool}, http__token_file="http-token")
    host.start()

    def size_of(name: str) -> Any:
        secret = f'api_key={{"$secret": "{name}"}}'
        return host.ctl("submit", "shop.size", secret, "--wait", check=False)

    assert size_of("SHOP_API_KEY").stdout.strip() == "7"
    for name in ("http-token", "DATABASE_PASSWORD", "PATH"):
        done = size_of(name)
        assert done.returncode == 1
        assert f"secret '{name}' is not given to pool 'shop'" in done.stderr
    shown = host.ctl("submit", "shop.environment", "--wait").stdout
    assert '"PATH"' in shown
    assert "CREDENTIALS_DIRECTORY" not in shown
    assert "of-the-daemon" not in shown


def test_musterctl_says_what_only_a_restart_of_the_service_reads(host: Host) -> None:
    host.write("/srv/bed/shop.py", SHOP)
    host.write("/etc/shop/key", "k-98765\n")
    host.write("/etc/shop/bot.env", "COLOUR=red\n")
    host.drop_in(f"{UNIT}EnvironmentFile=/etc/shop/*.env\n")
    host.write("/etc/shop/token", "0123456789abcdef0123456789abcdef\n")
    host.configure({"shop": {"worker": "shop:Shop", "size": 1, "secrets": ["COLOUR"]}})
    host.start()
    only = "since the daemon was started, and only a restart reads that: type"
    for command in ("reload", "restart"):
        assert only not in host.ctl(command, "shop").stderr
    host.write("/etc/shop/bot.env", "COLOUR=blue\n")
    for command in ("reload", "restart"):
        assert (
            f"/etc/shop/bot.env has changed {only} systemctl restart musterd.service"
            in host.ctl(command, "shop").stderr
        )
    host.write("/etc/shop/key", "k-another\n")
    changed = "/etc/systemd/system/musterd.service.d/test.conf"
    host.write(changed, f"{UNIT}EnvironmentFile=/etc/shop/bot.env\n")
    assert (
        f"musterd.service, /etc/shop/bot.env, /etc/shop/key have changed {only} systemctl "
        "daemon-reload; systemctl restart musterd.service" in host.ctl("reload", "shop").stderr
    )
    host.run("sh", "-c", "systemctl daemon-reload; systemctl restart musterd.service")
    assert only not in host.ctl("reload", "shop").stderr
    environment = host.ctl("submit", "shop.environment", "--wait").stdout
    assert '"COLOUR": "blue"' in environment
