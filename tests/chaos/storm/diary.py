"""The lines that workers wrote: which worker ran what, and which were killed."""

from collections import Counter, defaultdict
from pathlib import Path


class Diary:
    def __init__(self, path: Path) -> None:
        self.incarnations: list[str] = []  # in the order of their birth
        self.runs: dict[tuple[str, int], list[str]] = defaultdict(list)  # keys: (task, attempt)
        said_bye = set()
        for line in path.read_text().splitlines():
            what, incarnation, *more = line.split()
            if what == "born":
                self.incarnations.append(incarnation)
            elif what == "bye":
                said_bye.add(incarnation)
            else:
                self.runs[more[0], int(more[1])].append(incarnation)
        self.killed = [each for each in self.incarnations if each not in said_bye]
        # The last worker killed in a slot may have died with its supervisor; one that has a
        # successor under the same supervisor was killed alone.
        last = {each.rpartition(":")[0]: each for each in self.incarnations}
        self.killed_alone = [each for each in self.killed if each not in last.values()]
        self.repeated = Counter(
            incarnation for runs in self.runs.values() for incarnation in runs[:-1]
        )

    @property
    def executions(self) -> int:
        return sum(map(len, self.runs.values()))

    def check(self) -> None:
        """Check that no attempt ran twice in one worker."""
        for run, by in self.runs.items():
            assert len(by) == len(set(by)), f"{run} ran twice in one worker: {by}"
