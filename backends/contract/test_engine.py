"""The contract on the engine that the command line names: see `lmpool.contract_options`."""

from __future__ import annotations

import pytest

from lmpool.backends.contract.command_line import configure
from lmpool.backends.contract.suite import EngineContract


class TestEngine(EngineContract):
    """``pytest --pyargs lmpool.backends.contract --engine NAME``."""

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def of_the_command_line(cls, pytestconfig: pytest.Config) -> None:
        """What the options say."""
        configure(cls, pytestconfig)
