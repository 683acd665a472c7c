"""Engines that take one adapter for another, or for none."""

from __future__ import annotations

from collections.abc import Sequence

from lmpool.backends import Engine, EngineInfo, Request
from lmpool.errors import AdapterError, EngineError
from lmpool.wants import Generate
from tests.engines.mutants.engines import F32, Ids, Inner, Model, Remembering, Wrapper
from tests.engines.mutants.registry import BOTH, Witness, mutant
from tests.engines.mutants.witnesses import (
    ask,
    ask_rightly,
    check,
    continuations,
    prompts_of,
    refused,
    request,
    requests_of,
    run,
    scenario,
)

WANT = Generate(6, (), 1.0, 4)


def _folder(name: str) -> str:
    return f"/adapters/{name}"


def _many(count: int) -> Witness:
    """So many adapters, each asked once all are loaded, with the model itself among them."""

    def play(engine: Engine) -> None:
        names = [f"adapter-{n}" for n in range(count)]
        for name in names:
            engine.add_adapter(name, _folder(name))
        asked = [request(n, [1, 2], name) for n, name in enumerate([*names, None])]
        ask_rightly(engine, asked)

    return scenario(play)


class Loaded(Model):
    """Knows the adapters in the order in which they were loaded."""

    def __init__(self, info: EngineInfo) -> None:
        super().__init__(info)
        self.loaded: list[str] = []
        self.times: dict[str, int] = {}

    def add_adapter(self, name: str) -> None:
        self.loaded = [*(other for other in self.loaded if other != name), name]
        self.times[name] = self.times.get(name, 0) + 1

    def remove_adapter(self, name: str) -> None:
        self.loaded = [other for other in self.loaded if other != name]

    def row(self, tokens: Ids, adapter: str | None) -> F32:
        return super().row(tokens, None if adapter is None else self.instead(adapter))

    def instead(self, adapter: str) -> str | None:
        return adapter


@mutant("adapters-beyond-32-are-the-model", _many(34), forms=BOTH, subtle=True)
class BeyondThe32nd(Loaded):
    """Each adapter that was taken gives its own rows, also the 33rd."""

    def instead(self, adapter: str) -> str | None:
        return adapter if adapter in self.loaded[:32] else None


@mutant("adapters-beyond-16-take-the-place-of-others", _many(18), forms=BOTH, subtle=True)
class PlacesTaken(Loaded):
    """Each adapter that was taken gives its own rows, whatever was loaded after it."""

    def instead(self, adapter: str) -> str | None:
        place = self.loaded.index(adapter) % 16 if adapter in self.loaded else 0
        return self.loaded[place::16][-1]


@mutant("adapters-beyond-32-push-out-the-first", _many(34), forms=BOTH, subtle=True)
class PushedOut(Wrapper):
    """What was loaded stays until it is removed."""

    def add_adapter(self, name: str, path: str) -> None:
        super().add_adapter(name, path)
        while len(self.inner.adapters) > 32:
            self.inner.remove_adapter(next(iter(self.inner.adapters)))


@mutant("the-last-adapter-loaded-is-all-adapters", _many(2))
class LastLoaded(Loaded):
    """Loading an adapter changes no other's rows."""

    def instead(self, adapter: str) -> str | None:
        return self.loaded[-1] if self.loaded else adapter


def _some_in_a_batch(count: int) -> Witness:
    def play(engine: Engine) -> None:
        names = [f"n{n}" for n in range(count)]
        for name in names:
            engine.add_adapter(name, _folder(name))
        prompts = prompts_of(2 * count)
        ask_rightly(engine, [request(n, p, names[n % count]) for n, p in enumerate(prompts)])

    return scenario(play)


@mutant(
    "adapters-of-a-batch-of-more-than-4-are-the-first",
    _some_in_a_batch(5),
    forms=BOTH,
    subtle=True,
    most=64,
)
class FirstOfManyInABatch(Model):
    """Any number of adapters may meet in a batch."""

    def rows(self, requests: Sequence[Request]) -> list[F32]:
        names = list(dict.fromkeys(r.adapter for r in requests if r.adapter is not None))
        first = dict.fromkeys(names[4:], names[0]) if names else {}
        return [self.row(r.tokens, first.get(r.adapter, r.adapter)) for r in requests]


def _in_turn(engine: Engine) -> None:
    engine.add_adapter("a", _folder("a"))
    prompts = prompts_of(4)
    ask_rightly(engine, [request(n, p, None if n % 2 else "a") for n, p in enumerate(prompts)])
    ask_rightly(engine, requests_of(prompts))


@mutant("adapters-stay-on-for-what-follows-them", scenario(_in_turn), forms=BOTH)
class StaysOn(Model):
    """The model's own rows are without adapter, in any company."""

    def rows(self, requests: Sequence[Request]) -> list[F32]:
        found, on = [], None
        for each in requests:
            on = each.adapter or on
            found.append(self.row(each.tokens, on))
        return found


@mutant("adapters-stay-on-for-the-next-batch", scenario(lambda engine: _batches_in_turn(engine)))
class StaysOnForTheNext(Model):
    """The model's own rows are without adapter, whatever ran before."""

    on: str | None = None

    def rows(self, requests: Sequence[Request]) -> list[F32]:
        names = {each.adapter for each in requests}
        on, self.on = self.on, max((name for name in names if name), default=None)
        first = requests[:1]
        found = [self.row(each.tokens, each.adapter or on) for each in first]
        return [*found, *super().rows(requests[1:])]


def _batches_in_turn(engine: Engine) -> None:
    engine.add_adapter("a", _folder("a"))
    ask_rightly(engine, requests_of([[1, 2]], "a"))
    ask_rightly(engine, requests_of([[1, 2]]))


@mutant("adapters-forgotten-after-the-first-token", continuations(WANT, adapter="a"), forms=BOTH)
class ForgottenAfterTheFirst(Model):
    """Every token of a continuation is drawn with its adapter."""

    def __init__(self, info: EngineInfo) -> None:
        super().__init__(info)
        self.seen: set[bytes] = set()

    def rows(self, requests: Sequence[Request]) -> list[F32]:
        seen, self.seen = self.seen, {r.id for r in requests}
        return [self.row(r.tokens, None if r.id in seen else r.adapter) for r in requests]


@mutant(
    "adapters-ignored-for-prompts-of-a-token", scenario(lambda engine: _short(engine)), subtle=True
)
class IgnoredForAToken(Model):
    """An adapter holds for prompts of every length."""

    def row(self, tokens: Ids, adapter: str | None) -> F32:
        return super().row(tokens, adapter if len(tokens) > 1 else None)


def _short(engine: Engine) -> None:
    engine.add_adapter("a", _folder("a"))
    ask_rightly(engine, requests_of([[5], [5, 6]], "a"))


# --- names that come and go ----------------------------------------------------------------------


def _removed(engine: Engine) -> None:
    engine.add_adapter("a", _folder("a"))
    engine.add_adapter("b", _folder("b"))
    ask_rightly(engine, requests_of([[1]], "a"))
    engine.remove_adapter("a")
    assert isinstance(ask(engine, requests_of([[1]], "a"))[0].error, EngineError)
    ask_rightly(engine, requests_of([[1]], "b"))
    engine.remove_adapter("never seen")
    ask_rightly(engine, requests_of([[1]], "b"))


REMOVED = scenario(_removed)


@mutant("removed-adapters-are-still-served", REMOVED, forms=BOTH)
class StillServed(Wrapper):
    """A removed adapter's name is refused."""

    def remove_adapter(self, name: str) -> None:
        pass


@mutant("removed-adapters-are-the-model", REMOVED, forms=BOTH)
class RemovedIsTheModel(Wrapper):
    """A removed adapter's name is refused, and not answered without it."""

    def __init__(self, inner: Inner) -> None:
        super().__init__(inner)
        self.removed: set[str] = set()

    def remove_adapter(self, name: str) -> None:
        if name in self.inner.adapters:
            self.removed.add(name)
        super().remove_adapter(name)

    def add_adapter(self, name: str, path: str) -> None:
        super().add_adapter(name, path)
        self.removed.discard(name)

    def submit(self, requests: Sequence[Request]) -> None:
        super().submit(
            [
                Request(r.id, r.tokens, None, r.want) if r.adapter in self.removed else r
                for r in requests
            ]
        )


@mutant("removing-an-adapter-removes-all", REMOVED)
class RemovesAll(Wrapper):
    """Removing an adapter leaves the others."""

    def remove_adapter(self, name: str) -> None:
        for other in list(self.inner.adapters):
            super().remove_adapter(other)


def _one_folder(engine: Engine) -> None:
    for name in ("a", "b"):
        engine.add_adapter(name, _folder("both"))
    engine.remove_adapter("a")
    ask_rightly(engine, requests_of([[1]], "b"))


@mutant("removing-an-adapter-removes-others-of-its-folder", scenario(_one_folder), subtle=True)
class RemovesOthersOfItsFolder(Wrapper):
    """Two names may stand for one folder, and are removed one by one."""

    def remove_adapter(self, name: str) -> None:
        folder = self.inner.adapters.get(name)
        for other in [n for n, path in self.inner.adapters.items() if path == folder]:
            super().remove_adapter(other)


@mutant("removing-an-unknown-adapter-raises", REMOVED)
class UnknownRaises(Wrapper):
    """Unknown names are ignored."""

    def remove_adapter(self, name: str) -> None:
        if name not in self.inner.adapters:
            raise AdapterError(f"no adapter named {name!r}")
        super().remove_adapter(name)


@mutant("removing-an-unknown-adapter-removes-the-last", REMOVED, subtle=True)
class UnknownRemovesTheLast(Wrapper):
    """Unknown names are ignored."""

    def remove_adapter(self, name: str) -> None:
        known = self.inner.adapters
        super().remove_adapter(name if name in known else next(reversed(known), ""))


@mutant("unknown-adapters-are-the-model", refused([[1, 2]], adapter="unknown"), forms=BOTH)
class UnknownIsTheModel(Wrapper):
    """A prompt for an adapter that is not loaded is refused."""

    def submit(self, requests: Sequence[Request]) -> None:
        known = self.inner.adapters
        super().submit(
            [
                r
                if r.adapter is None or r.adapter in known
                else Request(r.id, r.tokens, None, r.want)
                for r in requests
            ]
        )


@mutant("unknown-adapters-fail-their-batch", refused([[1, 2]], adapter="unknown"))
class UnknownFailsAll(Wrapper):
    """A prompt for an adapter that is not loaded is refused alone."""

    def submit(self, requests: Sequence[Request]) -> None:
        known = {None, *self.inner.adapters}
        unknown = next((r.adapter for r in requests if r.adapter not in known), None)
        super().submit([Request(r.id, r.tokens, unknown or r.adapter, r.want) for r in requests])


def _again(engine: Engine) -> None:
    for _ in range(3):
        engine.add_adapter("a", _folder("a"))
        ask_rightly(engine, requests_of([[1, 2]], "a"))
    engine.remove_adapter("a")
    engine.add_adapter("a", _folder("a"))
    ask_rightly(engine, requests_of([[1, 2]], "a"))


@mutant("replaced-adapters-are-the-model", scenario(_again), forms=BOTH, subtle=True)
class ReplacedIsTheModel(Loaded):
    """An adapter that replaces one of its name is an adapter, too."""

    def instead(self, adapter: str) -> str | None:
        return adapter if self.times.get(adapter) == 1 else None


@mutant("replaced-adapters-are-both-at-once", scenario(_again), subtle=True)
class ReplacedIsBoth(Loaded):
    """An adapter that replaces one of its name takes its place, and is not added to it."""

    def instead(self, adapter: str) -> str | None:
        return adapter + "+" + adapter if self.times.get(adapter) == 2 else adapter


def _gone_and_back(engine: Engine) -> None:
    for _ in range(2):
        engine.add_adapter("a", _folder("a"))
        ask_rightly(engine, requests_of([[1, 2]], "a"))
        engine.remove_adapter("a")


@mutant("adapters-that-were-removed-never-come-back", scenario(_gone_and_back), subtle=True)
class NeverBack(Wrapper):
    """A name that was removed may be given again."""

    def __init__(self, inner: Inner) -> None:
        super().__init__(inner)
        self.removed: set[str] = set()

    def remove_adapter(self, name: str) -> None:
        self.removed.add(name)
        super().remove_adapter(name)

    def add_adapter(self, name: str, path: str) -> None:
        if name not in self.removed:
            super().add_adapter(name, path)


def _under_way(engine: Engine) -> None:
    engine.add_adapter("a", _folder("a"))
    asked = [*requests_of(prompts_of(2), want=WANT), *requests_of(prompts_of(2), "a", WANT, 10)]
    engine.submit(asked)
    engine.step()
    engine.step()
    engine.add_adapter("b", _folder("b"))
    engine.add_adapter("b", _folder("b again"))
    engine.remove_adapter("b")
    found = run(engine, [each.id for each in asked])
    for each in asked:
        check(each, found[each.id])


@mutant("adding-an-adapter-drops-continuations", scenario(_under_way), forms=BOTH)
class AddingDrops(Remembering):
    """Adapters are loaded while requests are under way, which go on."""

    def add_adapter(self, name: str, path: str) -> None:
        self.cancel(self.drawing())
        super().add_adapter(name, path)


@mutant("adding-an-adapter-puts-it-on-what-runs", scenario(_under_way), subtle=True)
class AddedToWhatRuns(Loaded):
    """An adapter is for requests that name it, and no others under way."""

    def __init__(self, info: EngineInfo) -> None:
        super().__init__(info)
        self.running: dict[bytes, str] = {}
        self.ids: list[bytes] = []

    def add_adapter(self, name: str) -> None:
        super().add_adapter(name)
        self.running = dict.fromkeys(self.ids, name)

    def rows(self, requests: Sequence[Request]) -> list[F32]:
        self.ids = [r.id for r in requests]
        return [Model.row(self, r.tokens, self.running.get(r.id, r.adapter)) for r in requests]


def _removed_under_way(engine: Engine) -> None:
    engine.add_adapter("a", _folder("a"))
    asked = requests_of(prompts_of(3), "a", WANT)
    engine.submit(asked)
    engine.step()
    engine.remove_adapter("a")
    found = run(engine, [each.id for each in asked])
    for each in asked:
        check(each, found[each.id])


@mutant(
    "removing-an-adapter-turns-what-runs-into-the-model",
    scenario(_removed_under_way),
    forms="fed",
    subtle=True,
)
class RemovedUnderWay(Loaded):
    """A fed engine answers the requests in flight of an adapter that is removed, with it."""

    def instead(self, adapter: str) -> str | None:
        return adapter if adapter in self.loaded else None


def _replaced_under_way(engine: Engine) -> None:
    engine.add_adapter("a", _folder("a"))
    asked = requests_of(prompts_of(3), "a", WANT)
    engine.submit(asked)
    engine.step()
    engine.add_adapter("a", _folder("a"))
    found = run(engine, [each.id for each in asked])
    for each in asked:
        check(each, found[each.id])


@mutant("replacing-an-adapter-drops-what-runs", scenario(_replaced_under_way), forms=BOTH)
class ReplacedUnderWay(Remembering):
    """Requests in flight of an adapter that is replaced are answered."""

    def add_adapter(self, name: str, path: str) -> None:
        if name in self.inner.adapters:
            self.cancel([each.id for each in self.asked.values() if each.adapter == name])
        super().add_adapter(name, path)
