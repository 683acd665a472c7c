"""An engine by its name."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.metadata
import importlib.util
import inspect
from collections.abc import Callable, Iterator
from typing import Any, Final

from lmpool.backends.batch import is_out_of_memory
from lmpool.backends.engine import Engine
from lmpool.backends.options import check_types
from lmpool.checks import why_failed
from lmpool.errors import LmpoolError, SettingsError
from lmpool.garbage import uncollected

ENTRY_POINTS: Final = "lmpool.engines"
"""The entry-point group of engines that other packages bring: a callable
``(model, **options) -> Engine``, usually the class."""

_BUILT_IN: Final = {
    "mock": ("lmpool.backends.mock", "MockEngine"),
    "hf": ("lmpool.backends.hf", "HFEngine"),
    "mlx": ("lmpool.backends.mlx", "MLXEngine"),
    "sglang": ("lmpool.backends.sglang", "SGLangEngine"),
    "vllm": ("lmpool.backends.vllm", "VLLMEngine"),
}
# What an engine with a model computes with, by the names that one imports.
_NEEDS: Final = {
    "hf": ("torch", "transformers"),
    "sglang": ("sglang",),
    "mlx": ("mlx", "mlx_lm"),
    "vllm": ("vllm",),
}


def engine_names() -> list[str]:
    """The engines that `load_engine` knows here, ``auto`` among them."""
    return sorted({*_BUILT_IN, "auto", *importlib.metadata.entry_points(group=ENTRY_POINTS).names})


def installed_engines() -> list[str]:
    """The engines that can serve a model here: those of lmpool whose packages are installed, ``hf``
    first, and those that other packages bring."""
    own = [
        name
        for name, packages in _NEEDS.items()
        if all(importlib.util.find_spec(package) is not None for package in packages)
    ]
    brought = importlib.metadata.entry_points(group=ENTRY_POINTS).names
    return [*own, *sorted(set(brought) - set(own))]


def load_engine(name: str, model: str, **options: object) -> Engine:
    """Make the engine `name` serve `model`.

    `name` is ``mock``, ``hf``, the name of an engine that another package brings by the
    entry-point group ``lmpool.engines``, or ``auto``: vLLM where it is installed and a GPU is
    there, else Hugging Face transformers. `options` are the engine's own.

    Raises `SettingsError` for an unknown engine or option, a value of another type than the engine
    names, a model that cannot be loaded, and a package that is not installed; where memory is
    short, what the engine raised: a later start may find more.
    """
    chosen = _automatic() if name == "auto" else name
    make = _find(chosen)
    _check_options(chosen, make, options)
    check_types(f"engine={chosen!r}", options, make)
    try:
        engine = make(model, **options)
    except LmpoolError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise  # who starts it again may have more luck
        raise SettingsError(
            f"engine={chosen!r} cannot serve model={model!r} with the options {sorted(options)}: "
            f"{why_failed(error)}"
        ) from error
    if not isinstance(engine, Engine):
        raise SettingsError(
            f"engine={chosen!r} made a {type(engine).__name__}: its entry point in the group "
            f"{ENTRY_POINTS} must make an lmpool.backends.Engine"
        )
    return engine


def _automatic() -> str:
    # Nothing else than a GPU makes vLLM the better choice, and asking torch for one is slow.
    if importlib.util.find_spec("vllm") is not None:
        with _telling_what_to_install("vllm"):
            torch: Any = importlib.import_module("torch")
        if torch.cuda.is_available():
            return "vllm"
    return "hf"


def _find(name: str) -> Callable[..., object]:
    if name in _BUILT_IN:
        module, attribute = _BUILT_IN[name]
        with _telling_what_to_install(name), uncollected():
            # The folder imports its engine, and the engine its packages, when it is named.
            make: Callable[..., object] = getattr(importlib.import_module(module), attribute)
        return make
    for point in importlib.metadata.entry_points(group=ENTRY_POINTS, name=name):
        try:
            loaded: Callable[..., object] = point.load()
        except Exception as error:
            raise SettingsError(
                f"engine={name!r}: {point.value} cannot be imported: {why_failed(error)}"
            ) from error
        return loaded
    names = engine_names()
    close = difflib.get_close_matches(name, names, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise SettingsError(f"engine={name!r}: one of {', '.join(names)} expected{hint}")


@contextlib.contextmanager
def _telling_what_to_install(extra: str) -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing == "lmpool":
            raise
        raise SettingsError(
            f"engine={extra!r} needs {missing}, which is not installed: "
            f"pip install 'lmpool[{extra}]'"
        ) from error


def _check_options(name: str, make: Callable[..., object], options: dict[str, Any]) -> None:
    parameters = inspect.signature(make).parameters.values()
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        return
    known = [p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]
    for option in options:
        if option not in known:
            close = difflib.get_close_matches(option, known, n=1)
            there_is = f"did you mean {close[0]!r}? It has" if close else "it has"
            raise SettingsError(
                f"the engine {name!r} has no option {option!r}; {there_is} "
                f"{', '.join(known) or 'none'}"
            )
