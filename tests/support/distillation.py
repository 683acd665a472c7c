"""Steps of TRL's server-distillation trainer, and a teacher that knows every row exactly."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers

from lmpool.backends import tiny

STEPS = 2
PROMPTS = [
    "If the file does not",
    "Return the number of",
    "The class is used to provide a new method, which",
    "This function",
]


class ExactTeacher:
    """What TRL's client tells, from rows of transformers in float32, one sequence at a time."""

    def __init__(self) -> None:
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            tiny.path(), dtype=torch.float32
        ).eval()

    @torch.inference_mode()
    def get_sequence_logprobs(
        self,
        sequences: Sequence[Sequence[int]],
        prompt_lengths: Sequence[int],
        top_logprobs: int = 100,
        temperature: float = 1.0,
    ) -> dict[str, Any]:
        """As vLLM does: at temperature 1, whatever is asked."""
        found: dict[str, Any] = {
            "logprobs": [],
            "logprob_token_ids": [],
            "actual_logprobs": [],
            "actual_token_ids": [],
        }
        for ids, start in zip(sequences, prompt_lengths, strict=True):
            taken = torch.tensor([ids[: max(1, len(ids) - 1)]])
            rows = self._model(taken).logits[0].log_softmax(-1)
            values, tokens, own = [], [], []
            for at in range(start, len(ids)):
                if at == 0:
                    values.append([-math.inf] * top_logprobs)
                    tokens.append([0] * top_logprobs)
                    own.append([-math.inf])
                    continue
                top = rows[at - 1].topk(top_logprobs)
                values.append(top.values.tolist())
                tokens.append(top.indices.tolist())
                own.append([rows[at - 1, ids[at]].item()])
            found["logprobs"].append(values)
            found["logprob_token_ids"].append(tokens)
            found["actual_logprobs"].append(own)
            found["actual_token_ids"].append([[token] for token in ids[start:]])
        return found


def student() -> Any:
    """The tiny model, somewhat other than its teacher."""
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny.path(), dtype=torch.float32)
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weights in model.parameters():
            weights += 0.02 * torch.randn(weights.shape, generator=random)
    return model


def losses(folder: Path, *, teacher: Any = None, url: str = "pool", **options: Any) -> list[float]:
    """The loss of each step; `teacher` stands in for the client that the trainer makes."""
    from datasets import Dataset
    from trl.experimental.server_distillation import (
        ServerDistillationConfig,
        ServerDistillationTrainer,
    )

    found: list[float] = []

    class Recorded(ServerDistillationTrainer):  # type: ignore[misc]
        def compute_loss(self, *args: Any, **given: Any) -> Any:
            loss = super().compute_loss(*args, **given)
            found.append(float(loss))
            return loss

    args = ServerDistillationConfig(
        output_dir=str(folder),
        teacher_model_server_url=url,
        max_steps=STEPS,
        per_device_train_batch_size=2,
        max_completion_length=8,
        learning_rate=1e-3,
        seed=7,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        **options,
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny.path(), padding_side="left")
    replaced: Any = nullcontext()
    if teacher is not None:
        replaced = patch("trl.generation.vllm_client.VLLMClient", lambda **given: teacher)
    with replaced:
        trainer = Recorded(
            model=student(),
            args=args,
            train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
            processing_class=tokenizer,
        )
    trainer.train()
    return found
