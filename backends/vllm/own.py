"""Rows of a vLLM that is somebody's own, captured at its sampler."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from vllm import LLM, SamplingParams
from vllm.platforms import current_platform

from lmpool.backends.engine import Outcome
from lmpool.backends.vllm import faithful, internals
from lmpool.backends.vllm.options import CAPTURED_ROWS
from lmpool.backends.vllm.rows import FullLogprobs, row_source
from lmpool.errors import SettingsError

logger = logging.getLogger(__name__)

WORKER_EXTENSION: Final = CAPTURED_ROWS
"""What such an ``LLM`` is given as `worker_extension_cls`."""


class OwnRows:
    """Captures rows of an ``LLM``, by number::

        llm = LLM(model, worker_extension_cls=WORKER_EXTENSION)
        with OwnRows(llm) as own:
            llm.generate(prompts, [own.params(i) for i in range(len(prompts))])
            rows = own.take(range(len(prompts)))

    The secret by which the ``LLM`` knows these requests is made here and goes with them: nobody
    else's are captured. Of several for one ``LLM`` the last one captures. Raises `SettingsError`
    for an ``LLM`` that cannot capture: one without the extension, or that decodes speculatively.

    The rows are those that the ``LLM`` itself samples from. Where it computes its model otherwise
    than transformers, and so than a worker's vLLM, the log says by which field, and what helps.
    """

    def __init__(self, llm: LLM) -> None:
        internals.check_version()
        self._engine: Any = llm.llm_engine
        try:
            self._rows = row_source(self._engine, capture=True)
        except SettingsError:
            raise
        except Exception as error:
            raise SettingsError(
                f"rows of this LLM cannot be captured: {internals.root_cause(error)}; it is to be "
                f"started with worker_extension_cls={WORKER_EXTENSION!r}"
            ) from error
        if isinstance(self._rows, FullLogprobs):
            raise SettingsError(
                "rows of this LLM cannot be captured: its model runner has not loaded the "
                "processor 'lmpool' of the entry points 'vllm.logits_processors'"
            )
        config, on_cpu = self._engine.vllm_config, current_platform.is_cpu()
        for deviation in faithful.deviations(config, on_cpu=on_cpu):
            logger.warning("this LLM's rows are others than those of transformers: %s", deviation)

    def params(self, number: int, **options: Any) -> SamplingParams:
        """Parameters of a request whose row is captured as `number`; one token, unless told."""
        chosen = {"max_tokens": 1, "temperature": 0.0, "detokenize": False, **options}
        return SamplingParams(**chosen, **self._rows.row(number))

    def take(self, numbers: Iterable[int]) -> dict[int, npt.NDArray[np.float32]]:
        """The rows of requests that have ended, float32 [vocab] log-probabilities, by number.

        A row is given once. One of logits that are not finite is not finite, either.
        """
        return {
            number: Outcome(b"", row=values, logsumexp=scale).logprobs()
            for number, (values, scale) in self._rows.take(list(numbers)).items()
        }

    def close(self) -> None:
        """Capture nothing any more; the ``LLM`` goes on."""
        internals.call_workers(self._engine.engine_core, "lmpool_detach")
        self._rows.close()

    def __enter__(self) -> OwnRows:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
