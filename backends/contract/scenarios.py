"""The scenarios of the contract, each about one thing and made up anew for each seed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

from lmpool.backends.contract.continuing import continuations
from lmpool.backends.contract.operations import Cancel, Prompt, Submit
from lmpool.backends.contract.prompts import (
    LONGEST,
    lengths,
    near_copies,
    random_prompt,
)
from lmpool.backends.contract.script import HOW, Script, shuffled, versioned
from lmpool.wants import Generate


def rows(script: Script) -> None:
    """Prompts of every length, and those that an engine could mistake for each other."""
    random, vocab, longest = script.random, script.vocab, script.longest
    most = min(longest, LONGEST)
    # Twice: alone with its kind, and then all in another order, out of what may be kept.
    families: list[list[Prompt]] = []
    between = int(random.integers(100, 300))
    for length, some in ((2, 99), (5, 99), (9, 99), (20, 99), (33, 99), (70, 24), (between, 6)):
        length = min(length, most - 1) - int(random.integers(0, 2))
        prompt = random_prompt(random, vocab, max(1, length))
        copies = shuffled(random, near_copies(random, prompt, vocab, most))
        families.append([prompt, *copies[:some]])
    for family in families:
        script.submit(map(script.ask, shuffled(random, family)), portions=2)
    script.settle()
    near = lengths(longest)
    long = [n for n in near if n > 100 and n < most - 1]
    few = [n for n in near if n not in long] + random.permutation(long)[:4].tolist()
    every = [random_prompt(random, vocab, n) for n in few]
    whole = random_prompt(random, vocab, min(40, most))
    nested = [whole[:n] for n in range(1, len(whole) + 1)]
    edges = [(0,), (vocab - 1,), (0,) * 20, (vocab - 1,) * 20, (vocab - 1, 0)]
    again = [family[int(random.integers(len(family)))] for family in families for _ in range(6)]
    script.submit(map(script.ask, shuffled(random, [*every, *nested, *edges, *again])), portions=4)
    script.settle()
    # Many tokens at once, most of them the same.
    shared = random_prompt(random, vocab, min(180, most - 8))
    many = [shared + random_prompt(random, vocab, 1 + n % 7) for n in range(26)]
    script.submit(map(script.ask, many))
    script.settle()
    if longest < 100_000:
        script.submit([script.ask((1,) * (longest + by)) for by in (1, 0, -1) if longest + by > 0])
    _particles(script)
    script.settle()


def _particles(script: Script) -> None:
    """Prompts that all begin alike, grow by a token, and are resampled."""
    random, vocab = script.random, script.vocab
    begin = random_prompt(random, vocab, min(40, script.longest // 2))
    particles = [begin] * 8
    for _ in range(7):
        script.submit(map(script.ask, particles))
        script.settle()
        chosen = random.integers(0, 8, 8) if random.random() < 0.3 else range(8)
        particles = [(*particles[int(i)], int(random.integers(vocab))) for i in chosen]


def company(script: Script) -> None:
    """Batches of every size up to more than a thousand, of all that can be asked at once."""
    random = script.random
    if script.has_adapters:
        for number in range(3):
            script.add_adapter(versioned("company", number), number)
    sizes = {2**k + by for k in range(8) for by in (-1, 0, 1)}
    sizes |= {256 + int(random.integers(3)), 511 + int(random.integers(3)), 1_025}
    for size in shuffled_sizes(script, {2**k for k in range(11)}):  # nothing but rows of the model
        script.submit(script.mixed(size, adapters=0.0, others=0.0, reduced=0.0, bad=0.0, most=3))
        script.settle()
    for size in shuffled_sizes(script, sizes):
        asked = script.mixed(size, others=0.12, bad=0.02, most=3 if size > 200 else 6)
        if size < 200 and random.random() < 0.4:  # of one kind
            by = float(random.integers(2))
            asked = script.mixed(size, adapters=by, others=0.0, reduced=0.0, bad=0.0)
        script.submit(asked, portions=1 if size > 200 else 2)
        if size > 100 or random.random() < 0.6:
            script.settle()
    script.remove_adapters()


def shuffled_sizes(script: Script, sizes: set[int]) -> list[int]:
    """Positive sizes in a random order."""
    wanted = sorted(size for size in sizes if size > 0)
    return [int(size) for size in script.random.permutation(wanted)]


def adapters(script: Script) -> None:
    """Adapters by the dozen, which come, go and are replaced while they are asked for."""
    if not script.has_adapters:
        return
    random = script.random
    names = [versioned(name, n) for n, name in enumerate(("french", "legal", "rs", "code"))]
    for number, name in enumerate(names):
        script.add_adapter(name, number)
    twin = versioned("twin", 9)
    script.add_adapter(twin, 0)  # of the same folder as the first
    longer = random_prompt(random, script.vocab, min(90, script.longest))
    prompts = [longer, *near_copies(random, longer, script.vocab, script.longest)[:4]]
    prompts += [script.prompt(20) for _ in range(4)]
    for _ in range(2):  # the second time out of what was kept
        asked = [script.ask(p, name) for p in prompts for name in (None, *script.loaded)]
        script.submit([asked[i] for i in random.permutation(len(asked))], portions=2)
        script.settle()
    script.remove_adapter(twin)
    script.submit([script.ask(prompts[0], name) for name in (names[0], twin)])
    script.settle()
    for turn in range(6):
        name = names[int(random.integers(len(names)))]
        mine = [script.ask(p, name, Generate(9, (), 1.0, turn)) for p in prompts[-2:]]
        script.submit([*mine, script.ask(prompts[-1], name)])
        if turn % 2:  # under way, or just submitted
            script.do_steps()
        script.submit(script.mixed(14, adapters=0.8, others=0.4, bad=0.0))
        if turn % 3 == 0:
            script.do_steps(1)
        if turn % 3 < 2 or name not in script.loaded:
            script.add_adapter(name, 10 + turn)
        else:
            script.remove_adapter(name)
            script.remove_adapter(name)
            gone = [script.ask(prompt, name) for prompt in prompts[:2]]
            script.submit([*gone, *script.mixed(6, adapters=0.7)])
        script.settle()
        for name in names:
            if name not in script.loaded:
                script.submit([script.ask(prompts[0], name)])
        script.settle()
    script.remove_adapters()
    _many_adapters(script)


def _many_adapters(script: Script) -> None:
    """As many as an engine keeps, of which each is asked for."""
    most = min(script.truth.suite.most_adapters, 70)
    for number in range(most):
        script.add_adapter(versioned(f"a{number}", number), 100 + len(HOW) * number)
    short, longer = script.prompt(), script.prompt(20)
    asked = [script.ask(short, name) for name in script.loaded]
    asked += [script.ask(longer, name) for name in script.loaded if script.random.random() < 0.3]
    for name in list(script.loaded)[:: max(1, most // 8)]:
        asked.append(script.ask(short, name, script.other_want(short, name)))
    script.submit([asked[i] for i in script.random.permutation(len(asked))], portions=2)
    script.submit([script.ask(short)])
    script.remove_adapters()


def answers(script: Script) -> None:
    """What follows from rows: of prompts that resemble each other, and whatever goes on beside."""
    random = script.random
    names: list[str | None] = [None]
    if script.has_adapters:
        names += [versioned("short", 0), versioned("answer", 1)]
        for number, name in enumerate(names[1:]):
            script.add_adapter(str(name), number)
    whole = random_prompt(random, script.vocab, min(30, script.longest // 2))
    copies = shuffled(random, near_copies(random, whole, script.vocab, script.longest))
    prompts = [*(whole[:n] for n in range(1, len(whole) + 1, 3)), *copies[:12]]
    for turn in range(3):  # from nothing, out of what may be kept, and by another adapter
        asked = [
            script.ask(p, name, script.want_of_row(p, name)) for p in prompts for name in names
        ]
        script.submit([asked[i] for i in random.permutation(len(asked))], portions=1 + turn)
        script.submit(script.mixed(10))
        script.settle()
        script.cache_prefix(whole[: 10 + turn])
        if script.has_adapters and turn == 1:
            script.clear_cache()
            script.add_adapter(str(names[1]), 7)
    for _ in range(6):  # one question, of prompts that could be taken for each other
        want = script.want_of_row(whole)
        script.submit([script.ask(p, None, want) for p in shuffled(random, copies)])
        script.settle()
    _many_questions(script, names)
    _in_flight(script, names)
    script.remove_adapters()


def _many_questions(script: Script, names: list[str | None]) -> None:
    """All that can be asked of one prompt, at once; and the same wants of others."""
    prompt, other = script.prompt(12), script.prompt(12)
    for name in names:
        wants = [script.want_of_row(prompt, name) for _ in range(24)]
        wants += [script.row(), script.other_want(prompt, name), *wants[:6]]
        script.submit([script.ask(prompt, name, want) for want in wants], portions=2)
        script.submit([script.ask(other, name, want) for want in wants[:12]])
        script.settle()


def _in_flight(script: Script, names: list[str | None]) -> None:
    """They are cancelled, their ids taken for other questions, and their adapters replaced."""
    for turn in range(4):
        name = names[turn % len(names)]
        prompts = [script.prompt() for _ in range(10)]
        asked = [script.ask(p, name, script.want_of_row(p, name)) for p in prompts]
        script.submit(asked)
        if turn % 2:
            script.do_steps(1)
        script.do(Cancel(tuple(each.number for each in asked[::2])))
        if name is not None:
            script.add_adapter(name, 10 + turn)
        script.settle()
        again = [replace(each, want=script.want_of_row(each.prompt, name)) for each in asked]
        script.submit(again)
        script.settle()


def cancelling(script: Script) -> None:
    """Requests that nobody waits for any more, and ids that are used again."""
    if script.has_adapters:
        script.add_adapter(versioned("cancelled", 2), 2)
    room = script.longest - 8
    for turn in range(5):
        asked = script.mixed(24, others=0.25)
        endless = [
            script.ask(script.prompt(4), script.any_adapter(0.3), Generate(room, (), 1.0, n))
            for n in range(3)
        ]
        script.submit([*asked, *endless], portions=1 + turn % 3)
        if turn % 2:
            script.do_steps()
        script.cancel(12, unknown=2)
        if turn == 3:
            script.submit(script.mixed(90, adapters=0.2, others=0.1, bad=0.0))
            script.cancel(75)
        if turn % 2 == 0:
            script.submit(script.mixed(8))
        script.do(Cancel(tuple(each.number for each in endless)))
        if turn > 1:  # the same again, while some of it is in flight
            script.do(Submit((*asked[::2], *script.mixed(3))))
        script.settle()
        # The same ids for something else, and cancelled for nothing.
        others = script.mixed(len(asked))
        renamed = [
            type(each)(was.number, each.prompt, each.adapter, each.want)
            for was, each in zip(asked, others, strict=True)
        ]
        script.cancel(0, unknown=3)
        script.submit(renamed)
        script.cancel(0, unknown=1)
        script.settle()
    script.remove_adapters()


def kept_state(script: Script) -> None:
    """Prefixes that are kept and dropped, with everything under way."""
    random, vocab = script.random, script.vocab
    prefix = random_prompt(random, vocab, min(40, script.longest // 2))
    relatives = [
        prefix, (*prefix, 3), (*prefix, 3, 4), prefix[:-1], (*prefix[:-1], 9), prefix + prefix[:5],
        *shuffled(random, near_copies(random, prefix, vocab, script.longest))[:6],
    ]  # fmt: skip
    names: list[str | None] = [None]
    if script.has_adapters:
        script.add_adapter(versioned("kept", 0), 0)
        script.add_adapter(versioned("too", 1), 1)
        names += list(script.loaded)
    # Kept prefixes that resemble each other, and prompts behind them and behind their likes.
    alike = [prefix, *shuffled(random, near_copies(random, prefix, vocab, len(prefix)))[:10]]
    alike.append((*prefix[:-1], (prefix[-1] + 1) % vocab))
    for kept in alike[:3]:
        script.cache_prefix(kept)
    behind = [(*before, *end) for before in alike for end in ((5, 6, 7), (4,), prefix[:2])]
    script.submit(map(script.ask, shuffled(random, behind)), portions=2)
    script.settle()
    for turn in range(4):
        asked = [script.ask(prompt, name) for prompt in relatives for name in names[: 1 + turn]]
        asked += script.mixed(6, others=1.0, bad=0.0)
        script.submit([asked[i] for i in random.permutation(len(asked))], portions=2)
        if turn % 2:
            script.do_steps()
            script.cache_prefix(script.prompt(30))
            script.clear_cache()
            script.submit(script.mixed(6))
            script.clear_cache()
        script.settle()
        script.cache_prefix(prefix[: 20 + turn])
        if turn == 2:
            script.clear_cache()
            script.clear_cache()
    # Dropped after each step of continuations by adapters that were kept a prefix of.
    wants = [Generate(6, (), temperature, 7) for temperature in (0.0, 1.0)]
    script.submit([script.ask(prefix, name, want) for name in names for want in wants])
    for _ in range(6):
        script.do_steps(1)
        script.clear_cache()
    script.submit([script.ask(prefix, name) for name in names])
    script.settle()
    script.remove_adapters()
    script.submit([script.ask(prompt) for prompt in relatives])
    script.settle()


def life(script: Script) -> None:
    """All of it in any order."""
    random = script.random
    acts: list[tuple[float, Callable[[], None]]] = [
        (8, lambda: script.submit(script.mixed(int(random.integers(1, 12)), others=0.3))),
        (8, lambda: script.do_steps(int(random.integers(1, 5)))),
        (2, script.settle),
        (2, lambda: script.cancel(int(random.integers(0, 6)))),
        (1, script.clear_cache),
        (1, lambda: script.cache_prefix(script.prompt(20))),
        (1, lambda: script.cache_prefix(())),
        (1, lambda: script.do(Submit(()))),
        (1, lambda: script.submit(script.mixed(20, most=40))),
    ]
    if script.has_adapters:
        names = [versioned(f"x{n}", n) for n in range(4)]

        def one_of_them() -> str:
            return names[int(random.integers(len(names)))]

        acts.append((2, lambda: script.add_adapter(one_of_them(), int(random.integers(40, 48)))))
        acts.append((1, lambda: script.remove_adapter(one_of_them())))
    weights = [weight for weight, _ in acts]
    for place in random.choice(len(acts), 90, p=[w / sum(weights) for w in weights]):
        acts[int(place)][1]()
    script.remove_adapters()


SCENARIOS: Final[Mapping[str, Callable[[Script], None]]] = {
    "rows": rows,
    "cancelling": cancelling,
    "kept_state": kept_state,
    "adapters": adapters,
    "life": life,
    "answers": answers,
    "continuations": continuations,
    "company": company,
}
"""By name, in the order in which they are run: what takes longest is last."""
