"""Which numbers of a model change its rows: each alone decides, however they work together."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from lmpool.backends.hf.numbers import numbers  # noqa: E402

POSITIONS = 17
LONGEST = 1_000

Rule = Callable[[Any], Any]


class Configuration(SimpleNamespace):
    def get_text_config(self) -> Configuration:
        return self


class Model(torch.nn.Module):  # type: ignore[misc]
    """Its rows follow from its configuration by a rule."""

    def __init__(self, rule: Rule, config: dict[str, Any]) -> None:
        super().__init__()
        self.config = Configuration(**config)
        self.rule = rule

    def forward(self) -> Any:
        return torch.as_tensor(self.rule(self.config))


def found(rule: Rule, **config: Any) -> tuple[list[str], int]:
    """The names of the numbers that change rows, and how many forward passes it took to know."""
    model = Model(rule, copy.deepcopy(config))
    plain = model()
    passes = 0

    def changed() -> bool:
        nonlocal passes
        passes += 1
        return not torch.equal(model(), plain)

    names = [number.name for number in numbers(model, changed, LONGEST)]
    assert vars(model.config) == config
    assert torch.equal(model(), plain)
    return names, passes


def seen(length: int) -> Any:
    """Which positions are nearer to the last than this."""
    return torch.arange(POSITIONS) < length


def test_a_number_that_matters_alone_is_found_among_many_that_do_not() -> None:
    sizes = {f"size_{i}": 100 + i for i in range(30)}
    names, passes = found(lambda config: seen(config.window), **sizes, window=64)
    assert names == ["window"]
    assert passes <= 4


def test_where_no_number_matters_two_forward_passes_tell() -> None:
    assert found(lambda config: seen(POSITIONS), **{f"size_{i}": 100 for i in range(30)}) == ([], 2)


def test_numbers_that_matter_only_together_do_not_matter() -> None:
    assert found(lambda c: seen(c.a) | seen(c.b), a=100, b=200)[0] == []


def test_numbers_that_cancel_each_other_are_found() -> None:
    assert found(lambda c: c.a - c.b, a=100, b=100, c=100)[0] == ["a", "b"]
    assert found(lambda c: seen(c.a) ^ seen(c.b), a=100, b=200)[0] == ["a", "b"]


def bounded(config: Any) -> Any:
    """Rows that `bound`, once it is lowered, hides `window` from."""
    return seen(config.window if config.window < config.bound else POSITIONS)


def test_a_number_that_hides_another_does_not_keep_it_from_being_found() -> None:
    assert found(bounded, window=100, bound=200)[0] == ["window"]
    assert found(bounded, bound=200, window=100)[0] == ["window"]


def test_a_number_that_raises_is_a_size() -> None:
    def rule(config: Any) -> Any:
        return seen(config.window) & torch.ones(64).view(-1, config.size).bool().all()

    assert found(rule, size=64, window=20)[0] == ["window"]


def test_a_model_that_goes_on_after_an_error_hides_nothing() -> None:
    def rule(config: Any) -> Any:
        try:
            return bounded(config)
        except Exception:
            return seen(POSITIONS)

    assert found(rule, window=100, bound=200)[0] == ["window"]


def test_code_that_asks_for_the_type_of_a_number_hides_nothing() -> None:
    def rule(config: Any) -> Any:
        return seen(config.window) if type(config.window) is int else seen(POSITIONS)

    def strict(config: Any) -> Any:
        if type(config.window) is int and type(config.bound) is int:
            return bounded(config)
        raise TypeError

    assert found(rule, window=100, size=300)[0] == ["window"]
    assert found(strict, window=100, bound=200)[0] == ["window"]


def test_a_number_that_is_handed_on_is_forgotten() -> None:
    def rule(config: Any) -> Any:
        config.kept = config.size
        config.kinds["kept"] = config.size
        return seen(POSITIONS)

    assert found(rule, size=300, kinds={"kept": 300}, kept=300) == ([], 2)


def test_a_device_out_of_memory_is_no_size() -> None:
    def rule(config: Any) -> Any:
        if config.size < POSITIONS:
            raise torch.OutOfMemoryError
        return seen(POSITIONS)

    with pytest.raises(torch.OutOfMemoryError):
        found(rule, size=300)


@pytest.mark.parametrize(
    "use",
    [
        lambda n: n + 1,
        lambda n: 1 - n,
        lambda n: -n,
        lambda n: 3 // n,
        lambda n: n < 3,
        lambda n: n == 3,
        lambda n: n in (3, 4),
        lambda n: {n: 1},
        lambda n: not n,
        lambda n: f"{n}",
        lambda n: str(n),
        lambda n: max(n, 3),
        lambda n: list(range(n)),
        lambda n: [1, 2][:n],
        lambda n: float(n),
        lambda n: n.bit_length(),
        lambda n: isinstance(n, int),
        lambda n: copy.copy(n),
        lambda n: copy.deepcopy(n),
        lambda n: torch.arange(3) < n,
        lambda n: torch.arange(3) // n,
        lambda n: torch.arange(n),
        lambda n: torch.zeros(300)[:n],
        lambda n: torch.zeros(300).view(-1, n),
        lambda n: torch.zeros(300).split(n),
        lambda n: torch.zeros(300).topk(n),
        lambda n: torch.nn.functional.pad(torch.zeros(3), (0, n)),
        lambda n: torch.nn.functional.layer_norm(torch.zeros(300), (n,)),
        lambda n: torch.nn.ModuleList()[:n],
    ],
)
def test_whatever_is_done_with_a_number_is_noticed(use: Rule) -> None:
    """So that it is tried alone, and not what else there is."""
    tried: list[tuple[bool, bool]] = []

    def rule(config: Any) -> Any:
        tried.append((type(config.used) is int, type(config.other) is int))
        use(config.used)
        return seen(POSITIONS)

    found(rule, used=300, other=300)
    alone = [given for given in tried if given == (True, False)]
    assert alone, "the other number was not told from it"
