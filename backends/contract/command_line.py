"""The engine that pytest's command line names."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from lmpool.backends.contract.reference import PromptTokens
from lmpool.backends.contract.subject import FEATURES, Adapter, Subject
from lmpool.backends.load import engine_names


def configure(suite: type[Subject], config: pytest.Config) -> None:
    """Set the attributes of `suite` as the options say. Raises `pytest.UsageError`."""
    name = config.getoption("--engine")
    if not name:
        raise pytest.UsageError(f"--engine: write one of {', '.join(engine_names())}")
    suite.engine = name
    suite.options = _object(config, "--engine-opts")
    suite.bounded = _object(config, "--engine-bounded")
    suite.model = config.getoption("--engine-model") or suite.model
    tolerance = config.getoption("--engine-tolerance")
    suite.tolerance = suite.tolerance if tolerance is None else tolerance
    most = config.getoption("--engine-most-adapters")
    suite.most_adapters = suite.most_adapters if most is None else most
    suite.own_draws = bool(config.getoption("--engine-own-draws"))
    lacks = config.getoption("--engine-lacks") or []
    if unknown := set(lacks) - FEATURES:
        raise pytest.UsageError(
            f"--engine-lacks={sorted(unknown)[0]!r}: write one of {', '.join(sorted(FEATURES))}"
        )
    suite.lacks = dict.fromkeys(lacks, "the command line says so")
    reference = config.getoption("--engine-reference")
    if reference:
        _set_reference(suite, reference)


def _object(config: pytest.Config, option: str) -> Mapping[str, Any]:
    written = config.getoption(option)
    try:
        found = json.loads(written or "{}")
    except ValueError as error:
        raise pytest.UsageError(f"{option}={written!r} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise pytest.UsageError(f'{option}={written!r}: write an object, such as {{"a": 1}}')
    return found


def _set_reference(suite: type[Subject], written: str) -> None:
    module, _, name = written.partition(":")
    try:
        function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise pytest.UsageError(f"--engine-reference={written!r}: {error}") from error

    def reference(
        cls: type[Subject], prompts: Sequence[PromptTokens], adapter: Adapter | None = None
    ) -> npt.NDArray[np.float32]:
        return np.asarray(function(prompts, adapter), np.float32)

    suite.reference = classmethod(reference)  # type: ignore[method-assign, assignment]
