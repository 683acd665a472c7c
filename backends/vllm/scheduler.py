"""vLLM's schedulers, with a bound on what a scored text may take from the prefix cache.

What lies behind the bound is computed, so that there are hidden states to score it by. A text
without such a bound, and every other request, is scheduled as vLLM does.
"""

from __future__ import annotations

from typing import Any, Final

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

MOST_CACHED: Final = "lmpool_most_cached"
"""The key of `SamplingParams.extra_args` that bounds a request's tokens from the prefix cache."""


class _Bounded:
    """Relies on `_get_local_prefix_cache_hit` being where a scheduler asks for them, and on the
    coordinator's `find_longest_cache_hit` being what its manager asks. The bound is set on what is
    looked for and not on what is found, which hybrid models could not be cut from."""

    kv_cache_manager: Any
    computed_tokens: int = 0
    """Tokens that were given to the model since the scheduler was made."""

    def schedule(self, *given: Any, **named: Any) -> Any:
        """What the next step computes."""
        output = super().schedule(*given, **named)  # type: ignore[misc]
        self.computed_tokens += output.total_num_scheduled_tokens
        return output

    def _get_local_prefix_cache_hit(self, request: Any) -> Any:
        hit = super()._get_local_prefix_cache_hit  # type: ignore[misc]
        params = request.sampling_params
        most = params and (params.extra_args or {}).get(MOST_CACHED)
        if most is None:
            return hit(request)
        coordinator = self.kv_cache_manager.coordinator
        find = coordinator.find_longest_cache_hit
        coordinator.find_longest_cache_hit = lambda hashes, longest: find(
            hashes, min(longest, most)
        )
        try:
            return hit(request)
        finally:
            del coordinator.find_longest_cache_hit


class BoundedScheduler(_Bounded, Scheduler):  # type: ignore[misc]
    """vLLM's `Scheduler`."""


class BoundedAsyncScheduler(_Bounded, AsyncScheduler):  # type: ignore[misc]
    """vLLM's `AsyncScheduler`."""


_BOUNDED: Final[dict[type, type]] = {
    Scheduler: BoundedScheduler,
    AsyncScheduler: BoundedAsyncScheduler,
}
_asked = Scheduler._get_local_prefix_cache_hit  # a release without it fails here, and at once


def bound(config: Any) -> None:
    """Have a `VllmConfig` use such a scheduler, where it uses one of vLLM's own."""
    scheduling = config.scheduler_config
    if scheduling.scheduler_cls is None:
        scheduling.scheduler_cls = _BOUNDED[scheduling.get_scheduler_cls()]


def is_bound(config: Any) -> bool:
    """Whether it does."""
    return config.scheduler_config.scheduler_cls in _BOUNDED.values()
