"""What the package shows: its names, and that no signature says Any."""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from types import FunctionType
from typing import Any

import pytest

import lmpool
from lmpool.producer import EmbeddedLM, PooledLM, SyncPooledLM

PUBLIC = ["lmpool", "lmpool.errors", "lmpool.producer", "lmpool.producer.embedded"]


def test_tab_completion_shows_the_public_names_and_no_others() -> None:
    assert [name for name in dir(lmpool) if not name.startswith("__")] == sorted(
        name for name in lmpool.__all__ if not name.startswith("__")
    )
    for name in lmpool.__all__:
        assert getattr(lmpool, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'conect'"):
        lmpool.conect  # noqa: B018


def test_importing_lmpool_reads_nothing_of_the_producer() -> None:
    code = (
        "import lmpool, sys; sys.exit('lmpool.producer' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_embedded_is_the_function_whatever_is_imported() -> None:
    package = importlib.import_module("lmpool.producer.embedded")
    producer = importlib.import_module("lmpool.producer")
    assert package.embedded is producer.embedded is lmpool.embedded
    assert inspect.isfunction(lmpool.embedded)
    assert importlib.import_module("lmpool.producer.embedded.private_pool").PrivatePool


@pytest.mark.parametrize("module", PUBLIC)
def test_all_names_are_there(module: str) -> None:
    found = importlib.import_module(module)
    assert sorted(found.__all__) == list(found.__all__)
    for name in found.__all__:
        assert hasattr(found, name)


def public_functions() -> Iterator[tuple[str, Any]]:
    for kind in (PooledLM, SyncPooledLM, EmbeddedLM):
        for name, member in inspect.getmembers(kind):
            if not name.startswith("_") or name == "__init__":
                function = member.fget if isinstance(member, property) else member
                if isinstance(function, FunctionType):
                    yield f"{kind.__name__}.{name}", function
    yield "connect", lmpool.connect
    yield "embedded", lmpool.embedded


FUNCTIONS = pytest.mark.parametrize(
    ("name", "function"),
    [pytest.param(name, function, id=name) for name, function in public_functions()],
)


@FUNCTIONS
def test_no_public_signature_says_any(name: str, function: Any) -> None:
    signature = inspect.signature(function)
    hints = [p.annotation for p in signature.parameters.values() if p.name != "self"]
    for hint in [*hints, signature.return_annotation]:
        assert hint is not inspect.Signature.empty, name
        assert not re.search(r"\bAny\b", str(hint)), name


MODULES = ["wants", "errors", "inspection", "dead_letters", "engine_check", "benchmark"]
MODULES += ["backends", "backends.contract", "backends.hf", "backends.mock", "backends.tiny"]
MODULES += ["testing"]


@pytest.mark.parametrize("module", [*PUBLIC, *(f"lmpool.{module}" for module in MODULES)])
def test_nothing_that_a_module_shows_says_any(module: str) -> None:
    """Only an array may have numbers of any kind."""
    found = importlib.import_module(module)
    shown = [(name, getattr(found, name)) for name in found.__all__]
    for name, kind in [pair for pair in shown if inspect.isclass(pair[1])]:
        members = [n for n in vars(kind) if not n.startswith("_") or n == "__init__"]
        for member in members:
            what = inspect.getattr_static(kind, member)
            what = what.fget if isinstance(what, property) else getattr(what, "__func__", what)
            shown.append((f"{name}.{member}", what))
    functions = [(name, what) for name, what in shown if isinstance(what, FunctionType)]
    for name, function in functions:
        for hint in function.__annotations__.values():
            assert not re.search(r"(?<!NDArray\[)\bAny\b", str(hint)), name


@FUNCTIONS
def test_every_public_method_says_what_it_does(name: str, function: Any) -> None:
    assert name.endswith("__init__") or inspect.getdoc(function), name


def test_sync_has_every_method_of_the_client() -> None:
    def names(kind: type) -> set[str]:
        return {name for name in dir(kind) if not name.startswith("_")}

    twins = {name for name in names(PooledLM) if name.endswith("_sync")}
    only_async = {"aclose", "sync", "ask_again"}
    assert names(SyncPooledLM) == names(PooledLM) - twins - only_async
    for name in names(SyncPooledLM):
        assert not inspect.iscoroutinefunction(getattr(SyncPooledLM, name)), name
    for name in twins:
        assert inspect.iscoroutinefunction(getattr(PooledLM, name.removesuffix("_sync"))), name
