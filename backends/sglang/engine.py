"""SGLang as an engine, fed while it runs: its radix cache, its batching, its adapters."""

from __future__ import annotations

import functools
import importlib
import json
import logging
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt
import torch

from lmpool.backends.config_files import ConfigFiles, load_tokenizer
from lmpool.backends.engine import Engine, EngineInfo, Outcome, Request, Tokens
from lmpool.backends.model_files import model_identity, resolve_model, tokenizer_files
from lmpool.backends.sampling import sample_token
from lmpool.backends.sglang.scheduler import SGLangScheduler, Step
from lmpool.backends.vocabulary import served_byte_vocabulary
from lmpool.errors import AdapterError, EngineBroken, PromptFailed, SettingsError

logger = logging.getLogger(__name__)

LORA_TARGETS: Final = (
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
)
"""The layers that adapters change in most models."""

_DTYPES: Final = ("auto", "float32", "bfloat16", "float16")


class SGLangEngine(Engine):
    """Computes rows with SGLang's scheduler, in this process.

    `model` is ``tiny``, a folder, or a hub id (then with an optional `revision`). `dtype` is
    ``float32``, ``bfloat16``, ``float16``, or ``auto``: float32 on a CPU, the model's own on a
    GPU. `max_prompt_tokens` lowers the bound on prompts, which is a few tokens below the model's.
    Up to `max_loras` adapters are in one batch, and any number is loaded; 0 for none. They have a
    rank of `max_lora_rank` or less and change layers of the names in `lora_targets`. `server_args`
    are SGLang's own, by their names in its `ServerArgs` (``mem_fraction_static``,
    ``chunked_prefill_size``, ``quantization``, ...).

    SGLang batches, keeps prefixes and evicts them. Tokens are drawn as every engine of lmpool draws
    them, from the logits that SGLang computes step by step. A process has one such engine at a
    time. Raises `SettingsError` for a model or an option that cannot be used.
    """

    continuous: ClassVar[bool] = True

    def __init__(
        self,
        model: str,
        *,
        revision: str | None = None,
        dtype: str = "auto",
        max_prompt_tokens: int | None = None,
        max_loras: int = 0,
        max_lora_rank: int = 64,
        lora_targets: Sequence[str] = LORA_TARGETS,
        server_args: Mapping[str, Any] | None = None,
    ) -> None:
        if dtype not in _DTYPES:
            raise SettingsError(f"dtype={dtype!r}: one of {', '.join(_DTYPES)} expected")
        for name, value, least in (
            ("max_loras", max_loras, 0),
            ("max_lora_rank", max_lora_rank, 1),
        ):
            if type(value) is not int or value < least:
                raise SettingsError(f"{name}={value!r}: an integer of {least} or more expected")
        self._folder = resolve_model(model, revision)
        files = ConfigFiles(self._folder)
        longest = files.longest_prompt(max_prompt_tokens)
        if dtype == "auto" and not torch.cuda.is_available():
            dtype = "float32"
        arguments = dict(server_args or {})
        self._running: dict[str, Request] = {}
        self._places: dict[bytes, str] = {}
        self._refused: list[Outcome] = []
        self._adapters: dict[str, str] = {}
        self._leaving: set[str] = set()
        self._loaded = 0
        self._flush_due = False
        self._max_loras = max_loras
        self._max_lora_rank = max_lora_rank
        self._scheduler: SGLangScheduler | None = SGLangScheduler(
            self._folder,
            dtype=dtype,
            draw=self._draw,
            max_loras=max_loras,
            max_lora_rank=max_lora_rank,
            lora_targets=lora_targets,
            server_args=arguments,
        )
        scheduler = self._scheduler
        self._tokenizer = load_tokenizer(self._folder)
        self._bfloat16 = scheduler.dtype == "bfloat16"
        vocab_size = scheduler.vocab_size
        self.info = EngineInfo(
            engine="sglang",
            model=model,
            revision=revision,
            vocab_size=vocab_size,
            max_prompt_tokens=min(longest, scheduler.longest_prompt),
            dtype=scheduler.dtype,
            encoding="bf16" if self._bfloat16 else "f32",
            identity={
                "engine": "sglang",
                "dtype": scheduler.dtype,
                "files": model_identity(self._folder),
                "server_args": json.dumps(arguments, sort_keys=True, default=str),
            },
            bos_token_id=files.special_token("bos_token_id", vocab_size),
            eos_token_ids=files.special_tokens("eos_token_id", vocab_size),
            pad_token_id=files.special_token("pad_token_id", vocab_size),
        )

    # --- requests ------------------------------------------------------------------------------

    def submit(self, requests: Sequence[Request]) -> None:
        scheduler = self._open()
        for request in requests:
            reason = self._reason_to_refuse(request)
            if reason is not None:
                self._refused.append(Outcome(request.id, error=PromptFailed(reason)))
                continue
            sampling, room = request.sampling, 0
            if sampling is not None:
                # The last row that can be computed is that of the longest prompt.
                room = min(
                    sampling.max_tokens, self.info.max_prompt_tokens - request.tokens.size + 1
                )
                if room <= 0:
                    self._refused.append(Outcome(request.id, tokens=np.empty(0, np.uint32)))
                    continue
            lora_id = None if request.adapter is None else self._adapters[request.adapter]
            name = scheduler.add(request.tokens.tolist(), lora_id=lora_id, max_tokens=room)
            self._running[name] = request
            self._places[request.id] = name

    def step(self) -> Sequence[Outcome]:
        scheduler = self._open()
        outcomes, self._refused = self._refused, []
        if self._running:
            done = scheduler.step()
            outcomes.extend(self._rows(done))
            for name, tokens in done.drawn.items():
                running = self._end(name)
                if running is not None:
                    drawn = np.array(tokens, np.uint32)
                    outcomes.append(Outcome(running.id, tokens=drawn))
            for name, reason in done.failed.items():
                running = self._end(name)
                if running is not None:
                    outcomes.append(Outcome(running.id, error=PromptFailed(reason)))
            self._unload_unused()
        if self._flush_due and not self._running:
            self.clear_cache()
        return outcomes

    def in_flight(self) -> int:
        return len(self._running) + len(self._refused)

    def cancel(self, ids: Collection[bytes]) -> None:
        for cancelled in ids:
            name = self._places.get(cancelled)
            if name is not None:
                self._end(name)
                self._open().abort(name)
        self._refused = [outcome for outcome in self._refused if outcome.id not in ids]

    def _reason_to_refuse(self, request: Request) -> str | None:
        tokens, longest = request.tokens, self.info.max_prompt_tokens
        if not 0 < tokens.size <= longest:
            return f"a prompt of {tokens.size} tokens: 1 to {longest} expected"
        if int(tokens.max()) >= self.info.vocab_size:
            return f"token id {int(tokens.max())}: below {self.info.vocab_size} expected"
        if request.adapter is not None and request.adapter not in self._adapters:
            return f"no adapter named {request.adapter!r} is loaded"
        sampling = request.sampling
        if sampling is not None and not 0.0 <= sampling.temperature < np.inf:
            return f"temperature={sampling.temperature!r}: a finite number, 0 or more, expected"
        return None

    def _end(self, name: str) -> Request | None:
        """The request called `name`, which ends; None for one that was cancelled."""
        running = self._running.pop(name, None)
        if running is not None and self._places.get(running.id) == name:
            del self._places[running.id]
        return running

    # --- outcomes ------------------------------------------------------------------------------

    def _rows(self, done: Step) -> list[Outcome]:
        outcomes: list[Outcome] = []
        if done.logits is None or done.logsumexp is None:
            return outcomes
        logits, logsumexp = done.logits, done.logsumexp
        narrow = logits.to(torch.bfloat16)
        block: Any
        # Some models compute more after the head, in float32.
        if self._bfloat16 and torch.allclose(narrow.to(logits), logits, 0, 0, equal_nan=True):
            block = narrow.view(torch.int16).cpu().numpy().view(np.uint16)
        else:
            block = (logits.float() - logsumexp[:, None]).cpu().numpy()
        block.flags.writeable = False
        for name, row, scale in zip(done.rows, block, logsumexp.tolist(), strict=True):
            running = self._end(name)
            if running is None:
                continue
            if not math.isfinite(scale):
                reason = f"the model's logits have the logsumexp {scale}: it overflows"
                outcomes.append(Outcome(running.id, error=PromptFailed(reason)))
                continue
            scale = scale if row.dtype == np.uint16 else 0.0
            outcomes.append(Outcome(running.id, row=row, logsumexp=scale))
        return outcomes

    def _draw(
        self, name: str, drawn: Sequence[int], logprobs: npt.NDArray[np.float32]
    ) -> tuple[int, bool]:
        running = self._running.get(name)
        if running is None or running.sampling is None:
            return 0, True  # cancelled
        sampling = running.sampling
        token = sample_token(logprobs, sampling.temperature, sampling.seed, len(drawn))
        return token, token in sampling.eos_token_ids

    # --- kept prefixes -------------------------------------------------------------------------

    def cache_prefix(self, tokens: Tokens) -> None:
        """Compute a prefix, which SGLang then keeps as long as there is room."""
        request = Request(b"cache_prefix", tokens)
        reason = self._reason_to_refuse(request)
        if reason is not None:
            raise PromptFailed(reason)
        # It has no outcome: nobody asked for its row.
        self._open().add(tokens.tolist())
        if not self._running:
            self._drain()

    def clear_cache(self) -> None:
        """Drop the radix cache, as soon as no request is running."""
        self._flush_due = bool(self._running)
        if not self._running:
            self._drain()
            self._open().flush()

    def _drain(self) -> None:
        """Run what nobody waits for any more: cancelled requests, and prefixes."""
        scheduler = self._open()
        while scheduler.busy():
            scheduler.step()

    # --- adapters ------------------------------------------------------------------------------

    def add_adapter(self, name: str, path: str) -> None:
        """Load a LoRA adapter of PEFT."""
        if not self._max_loras:
            raise AdapterError(
                "this engine was opened without adapters: write engine_opts={'max_loras': 4} for "
                "4 of them in one batch"
            )
        config, tensors = self._read_adapter(Path(path))
        # SGLang keeps an adapter's prefixes under its id, and loads an unloaded one again when it
        # is named: an id that was never used is a new adapter, and a name is known here alone.
        self._loaded += 1
        lora_id = f"lmpool-{self._loaded}"
        wrong = self._open().load_lora(lora_id, config, tensors)
        if wrong:
            raise AdapterError(f"SGLang refuses the adapter in {path!r}: {wrong}")
        self.remove_adapter(name)
        self._adapters[name] = lora_id

    def remove_adapter(self, name: str) -> None:
        """Forget an adapter; its requests in flight are answered before it is unloaded."""
        lora_id = self._adapters.pop(name, None)
        if lora_id is not None:
            self._leaving.add(lora_id)
            self._unload_unused()

    def _unload_unused(self) -> None:
        if not self._leaving:
            return
        if not self._running:
            self._drain()
        scheduler = self._open()
        for lora_id in sorted(self._leaving - scheduler.loras_in_use()):
            scheduler.unload_lora(lora_id)
            self._leaving.discard(lora_id)

    def _read_adapter(self, folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        load_file: Any = importlib.import_module("safetensors.torch").load_file
        try:
            config = json.loads((folder / "adapter_config.json").read_bytes())
            tensors = load_file(folder / "adapter_model.safetensors")
            rank, alpha = int(config["r"]), float(config["lora_alpha"])
        except Exception as error:
            raise AdapterError(
                f"adapter folder {str(folder)!r} cannot be read: {type(error).__name__}: {error}"
            ) from error
        for option in ("use_dora", "alpha_pattern", "rank_pattern", "modules_to_save"):
            if config.get(option):
                raise AdapterError(
                    f"adapter folder {str(folder)!r} has {option}={config[option]!r}: SGLang does "
                    "not compute that"
                )
        if rank > self._max_lora_rank:
            raise AdapterError(
                f"adapter folder {str(folder)!r} has rank {rank}: write "
                f"engine_opts={{'max_lora_rank': {rank}}}"
            )
        self._check_shapes(folder, rank, tensors)
        if config.get("use_rslora"):
            # SGLang scales by alpha / rank.
            config = {**config, "lora_alpha": alpha * math.sqrt(rank), "use_rslora": False}
        return config, tensors

    def _check_shapes(self, folder: Path, rank: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """SGLang copies what fits and breaks on the rest, a batch later."""
        shapes = self._layer_shapes
        for name, tensor in tensors.items():
            module, _, half = name.removeprefix("base_model.model.").rpartition(".lora_")
            layer = shapes.get(module)
            expected = None
            if layer is not None and half in ("A.weight", "B.weight"):
                expected = (rank, layer[1]) if half == "A.weight" else (layer[0], rank)
            if expected is None or tuple(tensor.shape) != expected:
                raise AdapterError(
                    f"adapter folder {str(folder)!r} has {name!r} of shape "
                    f"{tuple(tensor.shape)}, and the model "
                    + ("no such layer" if expected is None else f"takes {expected}")
                )

    @functools.cached_property
    def _layer_shapes(self) -> dict[str, tuple[int, int]]:
        """[outputs, inputs] of each linear layer, by the name that PEFT calls it."""
        transformers: Any = importlib.import_module("transformers")
        config = transformers.AutoConfig.from_pretrained(self._folder)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
        return {
            name: (module.weight.shape[0], module.weight.shape[1])
            for name, module in model.named_modules()
            if isinstance(module, torch.nn.Linear)
        }

    # --- the rest ------------------------------------------------------------------------------

    def tokenizer_files(self) -> Mapping[str, bytes]:
        return tokenizer_files(self._folder)

    def byte_vocabulary(self) -> list[bytes] | None:
        return served_byte_vocabulary(self._tokenizer)

    def close(self) -> None:
        """Free the model; another engine may then be made in this process."""
        if self._scheduler is not None:
            self._scheduler.close()
            self._scheduler = None

    def _open(self) -> SGLangScheduler:
        if self._scheduler is None:
            raise EngineBroken("the engine was closed")
        return self._scheduler
