"""Run the unit tests with the Python of another Debian release (`make test-trixie`)."""

from pathlib import Path

import pytest

from bed.host import Host

UNIT_SECONDS = 1800.0  # on a busy machine; three minutes are usual
SHOWN = 20_000  # characters shown of a failed run's output


@pytest.mark.timeout(UNIT_SECONDS + 400)
def test_the_unit_tests_pass_with_the_python_of_the_release(host: Host, tree: Path) -> None:
    if tree == Path("/"):
        pytest.skip("this machine's own Python runs them anyway; for others: make test-trixie")
    pip = "/opt/tests/bin/pip --quiet --disable-pip-version-check"
    host.run("sh", "-euc", f"{pip} install --no-deps --no-build-isolation -e /usr/src/musterd")
    done = host.run(
        "sh",
        "-c",
        "cd /usr/src/musterd && exec /opt/tests/bin/python -m pytest tests/unit -q --tb=short 2>&1",
        check=False,
        timeout=UNIT_SECONDS,
    )
    assert done.returncode == 0, done.stdout[-SHOWN:]
