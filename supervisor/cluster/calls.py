"""Calls of the engine, of one kind one at a time, with growing pauses after failures."""

from random import Random

from msgspec import Struct

from musterd.ipc.resilience.policy import SECOND_NS

PAUSE_NS, PAUSE_MAX_NS = SECOND_NS // 20, 2 * SECOND_NS  # between two attempts of one call


class Lane(Struct):
    """The call that is under way, and when the next one may be made."""

    ticket: int = 0  # 0: nothing is under way
    called_ns: int = 0
    failures: int = 0  # in a row
    not_before_ns: int = 0

    def called(self, ticket: int, now_ns: int) -> None:
        self.ticket, self.called_ns = ticket, now_ns

    def answered(self) -> None:
        self.ticket = self.failures = self.not_before_ns = 0

    def failed(self, now_ns: int, rng: Random) -> None:
        self.ticket = 0
        self.failures += 1
        pause_ns = min(PAUSE_MAX_NS, PAUSE_NS << min(self.failures - 1, 10))
        self.not_before_ns = now_ns + round(pause_ns * rng.uniform(0.5, 1.0))
