"""Errors that users meet."""

import pickle

import pytest

import musterd

PUBLIC = {
    name: kind
    for name in musterd.__all__
    if isinstance(kind := getattr(musterd, name), type) and issubclass(kind, BaseException)
}


@pytest.mark.parametrize("name", PUBLIC)
def test_an_error_is_called_as_it_is_imported(name: str) -> None:
    kind = PUBLIC[name]
    assert f"{kind.__module__}.{kind.__qualname__}" == f"musterd.{name}"
    assert pickle.loads(pickle.dumps(kind)) is kind


def test_there_are_many() -> None:
    assert len(PUBLIC) > 25
