"""Settings as the variables of a process."""

from __future__ import annotations

import pytest

from lmpool.errors import SettingsError
from lmpool.settings import WorkerOptions
from lmpool.variables import as_variables


def test_settings_come_back_from_the_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {
        "url": "unix:///tmp/x.sock?db=0",
        "engine_opts": {"delay": 0.5, "log": None},
        "adapter_dirs": ("/a", "/b c"),
        "replace": True,
        "batch_size": 7,
        "timeout": 0.25,
        "max_batch_tokens": None,
    }
    variables = as_variables(settings)
    assert "LMPOOL_MAX_BATCH_TOKENS" not in variables
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert WorkerOptions() == WorkerOptions(**settings)


def test_false_is_said() -> None:
    assert as_variables({"replace": False}) == {"LMPOOL_REPLACE": "0"}


def test_what_json_cannot_hold_is_refused() -> None:
    with pytest.raises(SettingsError, match="engine_opts"):
        as_variables({"engine_opts": {"device": object()}})
