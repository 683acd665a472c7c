"""A second engine beside the first, and the end of both."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Final

from lmpool.backends.contract.breaches import BrokenPromise, expect
from lmpool.backends.contract.model import Model
from lmpool.backends.contract.operations import Asked, Settle, Step, Submit
from lmpool.backends.contract.script import Script, versioned
from lmpool.backends.contract.truth import Truth
from lmpool.backends.contract.wants import References
from lmpool.backends.engine import Engine, Request
from lmpool.errors import EngineBroken, SettingsError

CLOSED: Final = "a closed engine raises EngineBroken when it is asked"


def check_second(engine: Engine, model: Model, script: Script) -> bool:
    """Open another engine, use it and close it, on another thread, while the first is at work.

    False where the second one was refused, as an engine may. Raises `BrokenPromise`.
    """
    if script.has_adapters:
        script.add_adapter(versioned("first", 1), 1)
    script.submit(script.mixed(30, others=0.4))
    script.do_steps(1)
    for operation in script.operations:
        model.apply(operation)
    opened = _on_a_thread(lambda: _live(script.truth, engine, list(script.loaded)))
    script.operations.clear()
    script.submit(script.mixed(10))
    script.remove_adapters()
    for operation in script.operations:
        model.apply(operation)
    return opened


def check_reopened(engine: Engine, truth: Truth) -> None:
    """Open another one on another thread after the first, which was closed."""
    opened = _on_a_thread(lambda: _live(truth, engine, []))
    expect(opened, "an engine can be opened again after it was closed", "it is refused")


def check_identity(engine: Engine, truth: Truth) -> None:
    """Engines whose rows differ say so, for workers of one identity share their rows."""
    if not truth.suite.otherwise:
        return
    other = truth.suite.open_engine(**truth.suite.otherwise)
    found = dict(other.info.identity)
    other.close()
    expect(
        found != dict(engine.info.identity),
        "info.identity holds what changes the numbers",
        f"it is the same with {dict(truth.suite.otherwise)}: {found!r:.200}",
    )


def check_closed(engine: Engine, model: Model) -> None:
    """Close it, with something in flight; twice; and use it then."""
    model.apply(Submit((Asked(1, (1, 2)),)))
    try:
        engine.close()
        engine.close()
    except Exception as error:
        raise BrokenPromise("close ends an engine", f"{type(error).__name__}: {error}") from error
    _expect_broken(engine)
    model.check_held()


_lived: list[weakref.ref[Engine]] = []
"""Of the engine that lived on the thread."""


def _live(truth: Truth, first: Engine, adapters: list[str]) -> bool:
    """The whole life of an engine."""
    try:
        engine = truth.suite.open_engine()
    except SettingsError:
        return False
    _lived.append(weakref.ref(engine))
    model = Model(engine, truth, References())
    asked = [Asked(n, (n % truth.info.vocab_size, 3)) for n in range(9)]
    asked += [Asked(100 + n, (1,), name) for n, name in enumerate(adapters)]  # it has none
    try:
        expect(
            dict(engine.info.identity) == dict(first.info.identity),
            "info.identity is the same for the same model and options",
            f"{dict(engine.info.identity)!r:.200}",
        )
        for operation in (Submit(tuple(asked)), Step(), Settle()):
            model.apply(operation)
    finally:
        engine.close()
    _expect_broken(engine)
    model.check_held()
    return True


def _expect_broken(engine: Engine) -> None:
    form = engine.info.head
    if form is not None:
        _expect_closed("the head's rows", lambda: engine.head_weights(slice(0, 1)))
        if form.bias:
            _expect_closed("the head's bias", engine.head_bias)
    _expect_closed("a prompt", lambda: _ask(engine))


def _ask(engine: Engine) -> None:
    engine.submit([Request(b"after the end", Asked(1, (1, 2)).request().tokens)])
    for _ in range(100):
        if engine.step():
            break


def _expect_closed(what: str, ask: Callable[[], object]) -> None:
    try:
        ask()
    except EngineBroken:
        return
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
    else:
        found = "nothing is raised"
    expect(False, CLOSED, f"{what}: {found}")


def _on_a_thread(work: Callable[[], bool]) -> bool:
    """What it returns or raises there. Workers use their engine on a thread of its own."""
    results: list[bool] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, name="engine-contract")
    _lived.clear()
    thread.start()
    thread.join()
    if failures:
        raise failures[0]
    gc.collect()
    expect(
        all(engine() is None for engine in _lived),
        "nothing keeps an engine that was closed",
        "it is there still, after nobody else knows it",
    )
    return results[0]
