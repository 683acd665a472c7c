"""Hugging Face transformers as an engine: prompts of like length share a padded forward pass.

It keeps nothing between batches: each row costs its whole prompt.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from lmpool.backends.engine import BatchEngine, EngineInfo, Outcome, Request, Tokens
from lmpool.backends.grouping import group_by_length
from lmpool.backends.hf_forward import Forward
from lmpool.backends.hf_model import load_model, longest_prompt, special_tokens
from lmpool.backends.model_files import model_identity, resolve_model, tokenizer_files
from lmpool.backends.vocabulary import byte_vocabulary
from lmpool.errors import AdapterError, EngineBroken, PromptFailed, SettingsError

logger = logging.getLogger(__name__)

_MAX_LOGITS: Final = 1 << 26
"""Logits computed at once: 256 MiB in float32."""

_MAX_WASTE: Final = 0.25
"""The part of a forward pass that may be padding."""

# On a CPU what fits its caches is computed fastest; a GPU wants to be filled.
_FORWARD_TOKENS_CPU: Final = 1_024
_FORWARD_TOKENS_GPU: Final = 16_384


class HFEngine(BatchEngine):
    """Computes rows with a causal language model of transformers.

    `model` is ``tiny``, a folder, or a hub id (then with an optional `revision`). `dtype` is
    ``float32``, ``bfloat16``, ``float16``, or ``auto``: float32 on a CPU, the model's own
    elsewhere. `device` is a torch device, ``auto`` the first GPU or else the CPU.
    `max_prompt_tokens` lowers the model's own bound. A forward pass takes at most `forward_tokens`
    positions, padding included (by default 1,024 on a CPU, else 16,384), or one prompt. `threads`
    are those that torch computes with on a CPU, in the whole process: where workers share a CPU,
    all their threads together should be no more than its cores.
    `model_kwargs` go to `from_pretrained`; bitsandbytes' options (``load_in_4bit``,
    ``bnb_4bit_quant_type``, ...) may be among them.

    Rows are float32 log-probabilities or, from a head that computes in bfloat16, the bits of its
    logits. Raises `SettingsError` for a model or an option that cannot be used.
    """

    def __init__(
        self,
        model: str,
        *,
        revision: str | None = None,
        dtype: str = "auto",
        device: str = "auto",
        max_prompt_tokens: int | None = None,
        forward_tokens: int | None = None,
        threads: int | None = None,
        trust_remote_code: bool = False,
        model_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        for name, value in (("forward_tokens", forward_tokens), ("threads", threads)):
            if value is not None and (type(value) is not int or value < 1):
                raise SettingsError(f"{name}={value!r}: a positive integer expected")
        if threads is not None:
            torch.set_num_threads(threads)
        kwargs = dict(model_kwargs or {})
        self._folder = resolve_model(model, revision)
        loaded = load_model(
            self._folder,
            dtype=dtype,
            device=device,
            trust_remote_code=trust_remote_code,
            model_kwargs=kwargs,
        )
        self._tokenizer = loaded.tokenizer
        on_cpu = loaded.device.type == "cpu"
        automatic = _FORWARD_TOKENS_CPU if on_cpu else _FORWARD_TOKENS_GPU
        self._forward_tokens = forward_tokens or automatic
        self._forward: Forward | None = Forward(loaded.model, loaded.device)
        # What a config says of its model may differ from the head (padded, resized vocabularies).
        probe = self._forward([np.zeros(1, np.uint32)])
        self._bfloat16 = loaded.dtype == "bfloat16" and _fits_bfloat16(probe)
        vocab_size = int(probe.shape[-1])
        embedded = int(loaded.model.get_input_embeddings().weight.shape[0])
        if embedded < vocab_size:
            raise SettingsError(
                f"the model {model!r} has rows of {vocab_size} tokens but embeds {embedded}: some "
                "of the tokens that it predicts cannot continue a prompt"
            )
        special = special_tokens(loaded, vocab_size)
        self.info = EngineInfo(
            engine="hf",
            model=model,
            revision=revision,
            vocab_size=vocab_size,
            max_prompt_tokens=longest_prompt(loaded, max_prompt_tokens),
            dtype=loaded.dtype,
            encoding="bf16" if self._bfloat16 else "f32",
            identity={
                "engine": "hf",
                "dtype": loaded.dtype,
                "files": model_identity(self._folder, code=trust_remote_code),
                "model_kwargs": json.dumps(kwargs, sort_keys=True, default=str),
            },
            bos_token_id=special.bos,
            eos_token_ids=special.eos,
            pad_token_id=special.pad,
        )

    def compute(self, requests: Sequence[Request]) -> Iterable[Outcome]:
        forward = self._open()
        alike: dict[bytes, list[Request]] = {}
        for request in requests:
            alike.setdefault(request.tokens.tobytes(), []).append(request)
        distinct = list(alike.values())
        prompts = [requests[0].tokens for requests in distinct]
        outcomes: list[Outcome] = []
        for group in self._groups([prompt.size for prompt in prompts], forward.may_pad):
            try:
                rows, logsumexp = self._rows(forward, [prompts[i] for i in group])
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()
                raise  # a smaller batch may fit
            except torch.AcceleratorError as error:
                # An asynchronous CUDA error leaves the process without a usable device.
                raise EngineBroken(f"{type(error).__name__}: {error}") from error
            for i, row, scale in zip(group, rows, logsumexp, strict=True):
                outcomes.extend(_outcome(request, row, float(scale)) for request in distinct[i])
        return outcomes

    def _groups(self, lengths: Sequence[int], may_pad: bool) -> list[list[int]]:
        return group_by_length(
            lengths,
            max_positions=self._forward_tokens,
            max_rows=max(1, _MAX_LOGITS // self.info.vocab_size),
            max_waste=_MAX_WASTE if may_pad else 0.0,
            free_padding=self._forward_tokens // 8 if may_pad else 0,
        )

    def _rows(
        self, forward: Forward, prompts: Sequence[Tokens]
    ) -> tuple[npt.NDArray[np.float32] | npt.NDArray[np.uint16], npt.NDArray[np.float32]]:
        """The prompts' rows [prompts, vocab], and the logsumexp [prompts] of each one's logits."""
        with torch.inference_mode():
            logits = forward(prompts)
            wide = logits.float()
            logsumexp = torch.logsumexp(wide, dim=-1).cpu().numpy()
            if self._bfloat16 and _fits_bfloat16(logits):
                bits = logits.to(torch.bfloat16).view(torch.int16).cpu().numpy()
                block: Any = bits.view(np.uint16)
            else:
                block = torch.log_softmax(wide, dim=-1).cpu().numpy()
        block.flags.writeable = False
        return block, logsumexp

    def _open(self) -> Forward:
        if self._forward is None:
            raise EngineBroken("the engine was closed")
        return self._forward

    def add_adapter(self, name: str, path: str) -> None:
        raise AdapterError(f"adapter {name!r}: the hf engine of this release has no adapters yet")

    def tokenizer_files(self) -> Mapping[str, bytes]:
        return tokenizer_files(self._folder)

    def byte_vocabulary(self) -> list[bytes] | None:
        if self._tokenizer is None:
            return None
        try:
            return byte_vocabulary(self._tokenizer)
        except SettingsError as error:
            logger.warning("this pool has no byte vocabulary: %s", error)
            return None

    def close(self) -> None:
        """Free the model."""
        if self._forward is not None:
            self._forward.close()
            self._forward = None
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


def _fits_bfloat16(logits: torch.Tensor) -> bool:
    """Whether a cast to bfloat16 loses nothing."""
    if logits.dtype == torch.bfloat16:
        return True
    return bool((logits.to(torch.bfloat16).to(logits.dtype) == logits).all())


def _outcome(
    request: Request, row: npt.NDArray[np.float32] | npt.NDArray[np.uint16], logsumexp: float
) -> Outcome:
    if not np.isfinite(logsumexp):
        reason = f"the model's logits have the logsumexp {logsumexp}: it overflows in this dtype"
        return Outcome(request.id, error=PromptFailed(reason))
    return Outcome(request.id, row=row, logsumexp=logsumexp if row.dtype == np.uint16 else 0.0)
