"""The list of mutants: each by a name that says in words what is broken."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from lmpool.backends import Engine
from lmpool.backends.sampling import Sampler
from tests.engines.mutants.engines import Form, Model, Wrapper, open_form

Make = Callable[..., Engine]
"""Opens an engine; takes a model's name and the options of `MockEngine`."""

Witness = Callable[[Make], None]
"""A scenario that a right engine goes through; an exception shows the broken promise."""


@dataclass(frozen=True, eq=False)
class Mutant:
    """One broken engine: called with the options of `MockEngine`, it opens."""

    name: str
    breaks: str
    """The promise that it breaks, in a line."""
    form: Form
    part: type[Wrapper] | type[Model] | type[Sampler]
    witness: Witness
    subtle: bool = False
    """Whether it takes a large batch, a long life or a rare prompt to see it."""
    options: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, model: str = "mock", **options: Any) -> Engine:
        options = {**self.options, **options}
        if issubclass(self.part, Wrapper):
            return self.part(open_form(self.form, model, **options))
        if issubclass(self.part, Model):
            return open_form(self.form, model, model=self.part, **options)
        return open_form(self.form, model, sampler=self.part, **options)

    def unbroken(self, model: str = "mock", **options: Any) -> Engine:
        """Opens the right engine of its form."""
        return open_form(self.form, model, **{**self.options, **options})

    @property
    def theme(self) -> str:
        """The module that it stands in."""
        return self.part.__module__.rpartition(".")[2]

    @property
    def twin(self) -> bool:
        """Whether it is the same mistake as that of an engine which takes a batch at a time."""
        return self.name.endswith("-fed") and self.name.removesuffix("-fed") in _all


_all: Final[set[str]] = set()
_mutants: Final[dict[str, Mutant]] = {}

_folder_mutants: Final[dict[str, Mutant]] = {}

MUTANTS: Final[Mapping[str, Mutant]] = _mutants
"""By name; those of engines that are fed while they run end in ``-fed``. Right are the rows of
`mock_row`, of an adapter by its name."""

FOLDER_MUTANTS: Final[Mapping[str, Mutant]] = _folder_mutants
"""Those that show only where an adapter's rows are those of its folder: right are the rows of
`mock_row`, with the folder's path in the place of the adapter's name."""

T = TypeVar("T", bound=type)


def mutant(
    name: str,
    witness: Witness,
    *,
    forms: str = "batch",
    subtle: bool = False,
    most: int = 8,
    by_folder: bool = False,
) -> Callable[[T], T]:
    """Put a class among the mutants, once for each of `forms`, of which there are two.

    `most` is how many requests a fed engine runs at once.
    """

    def add(part: T) -> T:
        breaks = inspect.getdoc(part) or ""
        for form in forms.split():
            called = name if form == "batch" else f"{name}-fed"
            assert called not in _all, called
            _all.add(called)
            options: dict[str, Any] = {} if form == "batch" else {"most": most}
            if by_folder:
                options["by_folder"] = True
            mutants = _folder_mutants if by_folder else _mutants
            mutants[called] = Mutant(called, breaks, form, part, witness, subtle, options)  # type: ignore[arg-type]
        return part

    return add


BOTH: Final = "batch fed"
