"""Where the hidden states of each request are in a step of vLLM's model runners.

Touches vLLM beyond its public interface, as `internals` does: each function names what it relies
on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from vllm.lora.layers import LogitsProcessorWithLoRA
from vllm.model_executor.layers.logits_processor import LogitsProcessor

from lmpool.backends.head_fit import NoHead
from lmpool.backends.text_scores import Head, Span

Places = Sequence[int]
"""Positions of the V1 runner's batch, or slots of the V2 runner's requests."""
Spans = Callable[[Places], dict[int, Span]]
"""The spans of those that are in this step."""
See = Callable[[torch.Tensor, Spans, Head], None]
"""Looks at the hidden states [tokens, hidden] of a step, after it has sampled."""


def watch(model_runner: Any, see: See) -> bool:
    """Have `see` called in every step; whether this runner lets us.

    Relies on what each runner calls in every step that samples, for log-probabilities of prompts:
    `_get_prompt_logprobs_dict` in V1, `prompt_logprobs_worker.compute_prompt_logprobs` in V2. All
    ranks that have hidden states make the same calls.
    """
    if hasattr(model_runner, "_get_prompt_logprobs_dict"):
        _watch_v1(model_runner, see)
        return True
    worker = getattr(model_runner, "prompt_logprobs_worker", None)
    if hasattr(worker, "compute_prompt_logprobs"):
        _watch_v2(worker, see)
        return True
    return False


def _watch_v1(model_runner: Any, see: See) -> None:
    """Relies on `query_start_loc`, and on `requests` whose `num_computed_tokens` are those before
    the step."""
    after = model_runner._get_prompt_logprobs_dict

    def seen(hidden: torch.Tensor, scheduled: dict[str, int]) -> Any:
        def spans(places: Places) -> dict[int, Span]:
            names, starts = model_runner.input_batch.req_ids, model_runner.query_start_loc.np
            return {
                place: Span(
                    int(starts[place]),
                    int(model_runner.requests[names[place]].num_computed_tokens),
                    scheduled[names[place]],
                )
                for place in places
                if place < len(names) and names[place] in scheduled
            }

        see(hidden, spans, model_runner.model.compute_logits)
        return after(hidden, scheduled)

    model_runner._get_prompt_logprobs_dict = seen


def _watch_v2(worker: Any, see: See) -> None:
    """Relies on the arrays of the runner's `input_batch`."""
    after = worker.compute_prompt_logprobs

    def seen(head: Head, hidden: torch.Tensor, batch: Any, *given: Any) -> Any:
        def spans(places: Places) -> dict[int, Span]:
            rows = {int(slot): row for row, slot in enumerate(batch.idx_mapping_np)}
            return {
                place: Span(
                    int(batch.query_start_loc_np[row]),
                    int(batch.num_computed_prefill_tokens_np[row]),
                    int(batch.num_scheduled_tokens[row]),
                )
                for place in places
                if (row := rows.get(place)) is not None
            }

        see(hidden, spans, head)
        return after(head, hidden, batch, *given)

    worker.compute_prompt_logprobs = seen


def head_layer(model: Any, config: Any) -> tuple[Any, torch.Tensor | None]:
    """The layer that makes logits, and its bias: what the model hands its logits processor.

    Relies on `compute_logits` calling the `LogitsProcessor`, or what wraps it for adapters, with
    the layer first and the bias, where there is one, third or by the name of `embedding_bias`.
    """
    given: list[tuple[Any, torch.Tensor | None]] = []

    def see(_: Any, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
        layer = positional[0] if positional else named["lm_head"]
        bias = positional[2] if len(positional) > 2 else named.get("embedding_bias")
        given.append((getattr(layer, "base_layer", layer), bias))

    kinds = LogitsProcessor | LogitsProcessorWithLoRA
    hooks = [
        module.register_forward_pre_hook(see, with_kwargs=True)
        for module in model.modules()
        if isinstance(module, kinds)
    ]
    try:
        device = next(model.parameters()).device
        model.compute_logits(
            torch.zeros(1, config.get_hidden_size(), dtype=config.dtype).to(device)
        )
    finally:
        for hook in hooks:
            hook.remove()
    if len(given) != 1:
        raise NoHead(f"it applies {len(given)} heads")
    return given[0]


@contextmanager
def adapters_off_the_head(model: torch.nn.Module) -> Iterator[None]:
    """Compute logits as if no adapter changed the head.

    vLLM adds an adapter's part by the adapters of the rows that are sampled: for other rows it is
    another's, or there is none for so many. Relies on `LogitsProcessorWithLoRA` adding it by its
    `punica_wrapper.add_lora_logits`.
    """
    wrapped: list[Any] = [
        module.punica_wrapper
        for module in model.modules()
        if hasattr(module, "lora_a_stacked") and hasattr(module, "sharded_to_full_mapping_gpu")
    ]
    for wrapper in wrapped:
        wrapper.add_lora_logits = lambda logits, *_, **__: logits
    try:
        yield
    finally:
        for wrapper in wrapped:
            del wrapper.add_lora_logits
