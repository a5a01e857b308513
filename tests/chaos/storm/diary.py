"""What the workers wrote down: who ran what, and who was killed."""

from collections import Counter, defaultdict
from pathlib import Path


class Diary:
    def __init__(self, path: Path) -> None:
        self.incarnations: list[str] = []  # in the order of their birth
        self.runs: dict[tuple[str, int], list[str]] = defaultdict(list)  # (task, attempt): by whom
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
        # The last one that was killed in a slot may have died with its supervisor; one that has a
        # successor under the same supervisor was killed by itself.
        last = {each.rpartition(":")[0]: each for each in self.incarnations}
        self.killed_alone = [each for each in self.killed if each not in last.values()]
        self.repeated = Counter(
            incarnation for runs in self.runs.values() for incarnation in runs[:-1]
        )

    @property
    def executions(self) -> int:
        return sum(map(len, self.runs.values()))

    def check(self) -> None:
        """No attempt ran twice in one worker."""
        for run, by in self.runs.items():
            assert len(by) == len(set(by)), f"{run} ran twice in one worker: {by}"
