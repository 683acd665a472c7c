from __future__ import annotations

import inspect
import pickle
import re

import pytest

import lmpool
from lmpool import errors
from lmpool.errors import LmpoolError

TREE = {
    name: kind
    for name, kind in vars(errors).items()
    if inspect.isclass(kind) and issubclass(kind, Exception)
}


def test_every_error_is_an_lmpool_error() -> None:
    assert all(issubclass(kind, LmpoolError) for kind in TREE.values())
    assert lmpool.LmpoolError is LmpoolError
    assert lmpool.errors is errors


def test_the_docstring_shows_the_whole_tree_as_it_is() -> None:
    document = errors.__doc__ or ""
    shown: dict[str, str] = {}
    path: list[str] = []
    for line in document.splitlines():
        found = re.match(r"( {4}(?:│   |    |├── |└── )*)([A-Z]\w+)(?: \((\w+)\))?", line)
        if found is None:
            continue
        depth = len(found[1]) // 4 - 1
        path[depth:] = [found[2]]
        if depth:
            shown[found[2]] = path[depth - 1]
        if found[3]:
            assert issubclass(TREE[found[2]], vars(__import__("builtins"))[found[3]]), line
    assert shown.keys() | {"LmpoolError"} == TREE.keys()
    for name, parent in shown.items():
        assert TREE[name].__bases__[0] is TREE[parent], name


@pytest.mark.parametrize(
    "kind", [errors.PromptError, errors.UnknownAdapter, errors.SettingsError, errors.AdapterError]
)
def test_mistakes_of_the_caller_are_value_errors(kind: type[LmpoolError]) -> None:
    assert issubclass(kind, ValueError)


def test_waits_that_were_too_long_are_timeout_errors() -> None:
    assert issubclass(errors.PoolTimeout, TimeoutError)
    assert issubclass(errors.JobExpired, errors.PoolTimeout)


@pytest.mark.parametrize("kind", TREE.values(), ids=TREE)
def test_errors_can_be_sent_to_another_process(kind: type[LmpoolError]) -> None:
    copy = pickle.loads(pickle.dumps(kind("why")))
    assert type(copy) is kind
    assert str(copy) == "why"
