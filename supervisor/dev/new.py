"""`musterd new NAME`: a project with a worker, its configuration and its test.

The files are those of the folder template/, with the name put in. They are written beside the
destination and take its place at once: there is a whole project or none.
"""

import importlib.util
import keyword
import os
import re
import secrets
import shutil
import sys
from importlib.resources import files
from pathlib import Path

from musterd.ipc.errors import MusterdError
from musterd.supervisor.config.pool import PoolConfig
from musterd.supervisor.config.schema import USUAL_POOLS
from musterd.supervisor.system.commands import typed

# What the template is called, what the file is called, and what is said of it.
FILES = (
    ("worker.py.txt", "{name}.py", "the worker: its task fetches a page, and remembers headlines"),
    ("musterd.toml.txt", "musterd.toml", "how it runs"),
    ("test.py.txt", "test_{name}.py", "its tests"),
    ("conftest.py.txt", "conftest.py", "what they need: a site on loopback"),
    ("README.md.txt", "README.md", "how to run it, test it, and put it on a server"),
    ("gitignore.txt", ".gitignore", ""),
)
NAMES_OF_PYTEST = frozenset({"conftest"})


class NotMade(MusterdError):
    """The project was not made; the text says why, and what to do."""


def make(name: str, parent: Path) -> str:
    """Make the project in a folder of its name; return what to say about it."""
    if problem := name_problem(name):
        raise NotMade(problem)
    folder = parent / name
    if os.path.lexists(folder):
        raise NotMade(f"{folder} exists: remove it, or choose another name")
    new = parent / f".{name}-{secrets.token_hex(4)}"
    try:
        new.mkdir()
        for template, called, _ in FILES:
            text = files("musterd.supervisor.dev").joinpath("template", template).read_text("utf-8")
            (new / called.format(name=name)).write_text(_filled(text, name), encoding="utf-8")
        new.rename(folder)
    except OSError as error:
        shutil.rmtree(new, ignore_errors=True)
        raise NotMade(f"{folder} cannot be made: {error.strerror}") from error
    return _what_next(name)


def name_problem(name: str) -> str:
    """Return why a project cannot have this name, and what to do; "" if it can."""
    if not name.isidentifier() or not name.isascii() or name != name.lower():
        near = re.sub(r"\W+", "_", name.lower(), flags=re.ASCII).strip("_")
        near = f", such as {near}" if not name_problem_of(near) else ""
        return (
            f"{name!r} cannot be the name of a module: use lower-case letters, digits and _, "
            f"beginning with a letter{near}"
        )
    return name_problem_of(name)


def name_problem_of(name: str) -> str:
    """Return why a word cannot name a module and its pool."""
    if keyword.iskeyword(name):
        return f"{name!r} is a word of Python: choose another name"
    if problem := PoolConfig.name_problem(name):
        return f"{name!r} is {problem}" if problem.startswith("not ") else problem
    if name in USUAL_POOLS:
        return f"{name!r} is the name of a pool that musterd comes with: choose another"
    if name in NAMES_OF_PYTEST or name in sys.stdlib_module_names:
        return f"{name!r} is a module already, which would hide the worker: choose another name"
    if importlib.util.find_spec(name) is not None:
        return f"{name!r} is an installed package, which would hide the worker: choose another name"
    return ""


def _filled(text: str, name: str) -> str:
    called = "".join(word.capitalize() for word in name.split("_"))
    return text.replace("{{name}}", name).replace("{{class}}", called)


def _what_next(name: str) -> str:
    shown = [(called.format(name=name), said) for _, called, said in FILES if said]
    width = max(len(called) for called, _ in shown)
    listed = "\n".join(f"  {called:{width}}  {said}" for called, said in shown)
    submit = f"submit {name}.check url=https://example.com/ --wait".split()
    return f"""\
Made {name}/

{listed}

Run it, and save a file to have it reloaded:

  cd {name}
  {typed("musterd", "dev")}

In another terminal, in that folder:

  {typed("musterctl", *submit)}
  {typed("pytest")}"""
