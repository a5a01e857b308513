"""Settings of the alerts process, which the daemon writes to its standard input."""

from msgspec import Struct

from musterd.supervisor.alerts.rules import Rule
from musterd.supervisor.alerts.template import names_in


class Destination(Struct, frozen=True, omit_defaults=True):
    """One of the first four is given; the secret is looked up for each delivery."""

    url: str = ""
    url_file: str = ""
    url_secret: str = ""
    command: tuple[str, ...] = ()
    timeout_ns: int = 30_000_000_000
    title: str = ""  # templates; "": the usual words
    body: str = ""

    @property
    def placeholders(self) -> frozenset[str]:
        """Return the names that the templates use."""
        return names_in(self.title) | names_in(self.body)

    @property
    def shown(self) -> str:
        """Return the destination in words, without a secret."""
        if self.command:
            return f"command {self.command[0]}"
        if self.url_file:
            return f"url_file {self.url_file}"
        if self.url_secret:
            return f"url_secret {self.url_secret}"
        return f"{self.url.partition('://')[0]}://..."


class AlertSettings(Struct, frozen=True):
    control_socket: str
    state_file: str
    rules: list[Rule]
    destinations: dict[str, Destination]
    pictures: str = ""  # folder of artefacts
