"""The options of pytest with which whoever writes an engine has it examined.

This is a plug-in of pytest that every run loads where lmpool is installed, so it imports nothing,
and takes no option but of a run that names the contract, or one of its options.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import pytest

_CONTRACT: Final = "lmpool.backends.contract"
_NAMED: Final = ("--engine-seed", "--engine-seconds")
"""Those that a class derived from `EngineContract` heeds as well."""


def pytest_load_initial_conftests(
    early_config: pytest.Config, parser: pytest.Parser, args: list[str]
) -> None:
    """Take the options, before they are read for good."""
    if not any(arg.startswith((_CONTRACT, *_NAMED)) for arg in args):
        return
    group = parser.getgroup("lmpool", "the contract of lmpool's engines")
    option: Any = group.addoption
    option("--engine", metavar="NAME", help="the engine, as in LMPOOL_ENGINE")
    option(
        "--engine-opts",
        metavar="JSON",
        help='what it is opened with, such as \'{"device": "cpu"}\'',
    )
    option("--engine-model", metavar="MODEL", help="the model: a folder, a hub id, or tiny")
    option(
        "--engine-bounded",
        metavar="JSON",
        help="options on top, with which 1,500 prompts of 4 tokens fill what the engine keeps",
    )
    option(
        "--engine-reference",
        metavar="MODULE:FUNCTION",
        help="what gives the right rows float32 [prompts, vocab] of (prompts, adapter), where "
        "adapter is None or has a name and a folder; transformers by default",
    )
    option("--engine-tolerance", type=float, metavar="NATS", help="how far rows may be off (1e-4)")
    option(
        "--engine-lacks",
        action="append",
        metavar="FEATURE",
        help="what it does not have: 'adapters', or 'adapter files'",
    )
    option("--engine-most-adapters", type=int, metavar="N", help="more of them it may refuse (70)")
    option(
        "--engine-own-draws",
        action="store_true",
        help="it draws tokens by a generator of its own",
    )
    option(
        "--engine-seed",
        metavar="N",
        help="the seed of the scenarios, an integer or 'random' (0)",
    )
    option(
        "--engine-seconds",
        type=float,
        metavar="SECONDS",
        help="how long each test goes on with random seeds (0: its own seed alone)",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Let tests take the time that they were given."""
    if config.getoption("--engine-seconds", default=None) and config.pluginmanager.hasplugin(
        "timeout"
    ):
        import pytest

        for item in items:
            item.add_marker(pytest.mark.timeout(0), append=False)
