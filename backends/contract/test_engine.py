"""The contract on the engine that the command line names: see `lmpool.contract_options`."""

from __future__ import annotations

import pytest

from lmpool.backends.contract.command_line import configure
from lmpool.backends.contract.suite import EngineContract


class TestEngine(EngineContract):
    """``pytest --pyargs lmpool.backends.contract --engine NAME``."""

    @pytest.fixture(autouse=True, scope="class")
    def _of_the_command_line(self, pytestconfig: pytest.Config) -> None:
        configure(type(self), pytestconfig)
