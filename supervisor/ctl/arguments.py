"""Parse what people type: seconds, ages, and the arguments of a task."""

import math
from typing import Any

import click
import msgspec


class Seconds(click.FloatRange):
    """A number of seconds; "nan" is refused here because it passes every comparison."""

    name = "seconds"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        seconds: float = super().convert(value, param, ctx)
        if math.isnan(seconds):
            self.fail(f"{value!r} is not a number of seconds.", param, ctx)
        return seconds


AGE_CONFIGURED = "as configured"  # value of an option given without a number


class Age(Seconds):
    """The maximum age of a result: seconds, or True for an option without a number."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        if value == AGE_CONFIGURED or value is True:
            return True
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter:
            option = param.opts[0] if param is not None else "--cache"
            self.fail(
                f"{value!r} is not a number of seconds: write {option}=SECONDS, or {option} alone "
                "after all arguments.",
                param,
                ctx,
            )


def task_arguments(pairs: tuple[str, ...], json_args: str | None) -> dict[str, Any]:
    """Return the task's arguments; k=v wins over the same name in the JSON."""
    arguments: dict[str, Any] = {}
    if json_args is not None:
        try:
            arguments = msgspec.json.decode(json_args, type=dict[str, Any])
        except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as error:
            raise click.UsageError(
                f"--json-args: not a JSON object ({error})", click.get_current_context()
            ) from error
    given: set[str] = set()
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not name or not equals:
            raise click.UsageError(
                f"argument {pair!r}: write it as NAME=VALUE", click.get_current_context()
            )
        if name in given:
            raise click.UsageError(f"argument {name!r} is given twice", click.get_current_context())
        given.add(name)
        arguments[name] = value_of(text)
    return arguments


def value_of(text: str) -> Any:
    """Return the value of a JSON text, or the text itself where it is not JSON."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return text
