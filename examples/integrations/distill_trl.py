"""TRL's server distillation with a pool as the teacher: no server, no HTTP.

    python examples/integrations/distill_trl.py                    # a private pool, the tiny model
    python examples/integrations/distill_trl.py --url redis://server:6379/0 --pool llama --student s

Needs ``pip install 'lmpool[trl]'``. The student here is the tiny model with some noise on its
weights, which a few steps take away again.
"""

from __future__ import annotations

import argparse
import tempfile

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.experimental.server_distillation import (
    ServerDistillationConfig,
    ServerDistillationTrainer,
)

import lmpool
from lmpool.backends import tiny
from lmpool.integrations.trl import pool_as_server

PROMPTS = ["If the file does not", "Return the number of", "The class is used to", "This function"]


def noisy(name: str) -> torch.nn.Module:
    """A student that has something to learn."""
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    torch.manual_seed(1)
    with torch.no_grad():
        for weights in model.parameters():
            weights += 0.02 * torch.randn_like(weights)
    return model


def main() -> None:
    """Distill what the command line says."""
    parser = argparse.ArgumentParser(description="Server distillation from a pool.")
    parser.add_argument("--url", help="of a pool's server; without one a private pool is started")
    parser.add_argument("--pool")
    parser.add_argument("--student", default=tiny.path(), help="a model of the same tokenizer")
    parser.add_argument("--steps", type=int, default=3)
    given = parser.parse_args()
    lm = lmpool.connect(given.url, given.pool) if given.url else lmpool.embedded("tiny", "hf")
    with lm, tempfile.TemporaryDirectory() as folder:
        args = ServerDistillationConfig(
            output_dir=folder,
            teacher_model_server_url="a pool",  # nothing connects to it
            beta=0.0,
            loss_top_k=20,
            max_steps=given.steps,
            per_device_train_batch_size=4,
            max_completion_length=8,
            learning_rate=1e-3,
            logging_steps=1,
            bf16=torch.cuda.is_available(),
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        )
        with pool_as_server(lm):
            trainer = ServerDistillationTrainer(
                model=noisy(given.student),
                args=args,
                train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
                processing_class=AutoTokenizer.from_pretrained(given.student, padding_side="left"),
            )
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print("losses " + " ".join(f"{float(loss):.3f}" for loss in losses))


if __name__ == "__main__":
    main()
