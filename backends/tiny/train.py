"""Train the tiny model from the text that comes with Python.

    python -m lmpool.backends.tiny.train --out DIR

The text is the English prose of the running interpreter's standard library: the reference pages
of `pydoc_data.topics`, the Zen of Python, docstrings, and comments of two lines and more. All of
it is under the PSF License Version 2. Modules that carry somebody else's copyright notice, tests
and site-packages are left out. Code, grammars and tables are dropped, paragraphs are unwrapped.

The model in the repository was made with Python 3.11.7, torch 2.13.0 and `--threads 1` in 23
minutes of one busy CPU core, from 4,748 documents (1.38 million characters, 402 thousand tokens,
each seen 12 times), which reaches 2.26 nats a token on the text it learnt from and 3.46 on the 191
documents held out; uniform is 7.60. It was then softened (`--threads 2`, 3 minutes): 3.57 held out
(1.4 bits a character), and rows small enough for float32: computed in batches and one at a time
they differ by at most 9e-6 instead of 1.5e-5. The seed is fixed; another Python has other text, and
another machine or number of threads rounds otherwise. Needs torch 2.9 (Muon).
"""

from __future__ import annotations

import argparse
import ast
import codecs
import contextlib
import importlib
import inspect
import io
import json
import math
import random
import re
import sys
import sysconfig
import textwrap
import time
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

SEED = 20_240
STEPS = 2_400
VOCAB_SIZE = 2_000
PAD, BOS, EOS = "<pad>", "<s>", "</s>"
PAD_ID, BOS_ID, EOS_ID = 0, 1, 2
MAX_POSITIONS = 512
BATCH_TOKENS = 2_048
MUON_LR = 0.02
ADAM_LR = 3e-3
WEIGHT_DECAY = 0.1
DROPOUT = 0.1
PAGE_CHARS = 1_600
HELD_OUT_PERCENT = 4
SOFT_STEPS = 150
SOFT_SEED = 1
SOFT_LR = 1e-3
LABEL_SMOOTHING = 0.1
Z_LOSS = 0.002
LOGIT_SCALE = 0.85

ASCII = str.maketrans({"‘": "'", "’": "'", "“": '"', "”": '"', "–": "-", "—": "-", "…": "..."})
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "pydoc_data"}
NOT_PROSE = re.compile(r">>>|::=|\+--|\|\s|\.\. |https?:|\s=\s|[{}\\<>]|\(\)\s*$|--- |@|_{3,}")


# The text


def documents() -> tuple[list[str], list[str]]:
    """The corpus, each paragraph once: documents to train on, and documents held out."""
    train: list[str] = []
    held_out: list[str] = []
    seen: set[str] = set()
    for text in texts():
        fresh = []
        for paragraph in prose(text):
            key = re.sub(r"\W+", " ", paragraph).lower()
            if key not in seen:
                seen.add(key)
                fresh.append(paragraph)
        for page in pages(fresh):
            chosen = zlib.crc32(page.encode()) % 100 < HELD_OUT_PERCENT
            (held_out if chosen else train).append(page)
    return train, held_out


def texts() -> Iterator[str]:
    """Raw texts: reference pages, then docstrings and comments, module by module."""
    for name in sorted(topics):
        yield from sections(topics[name])
    with contextlib.redirect_stdout(io.StringIO()):
        zen = importlib.import_module("this")
    yield codecs.decode(zen.s, "rot13")
    for name in sorted(sys.builtin_module_names):
        yield from builtin_docstrings(name)
    library = Path(sysconfig.get_paths()["stdlib"])
    for file in sorted(library.rglob("*.py")):
        if LEFT_OUT & set(file.relative_to(library).parts):
            continue
        try:
            source = file.read_text(encoding="utf-8")
            tree = ast.parse(source)
        except (UnicodeDecodeError, SyntaxError):
            continue
        if re.search("copyright", source, re.IGNORECASE) and "Python Software Found" not in source:
            continue
        yield from docstrings(tree)
        yield from comments(source)


def sections(page: str) -> Iterator[str]:
    """A reference page cut at its underlined headings, which are dropped."""
    yield from re.split(r"^.*\n[*=\-~^]{4,}$", page, flags=re.MULTILINE)


def docstrings(tree: ast.Module) -> Iterator[str]:
    """Every docstring of a module; those of one class's methods together."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, kinds) and (text := ast.get_docstring(node)) and len(text) > 200:
            yield text
        if isinstance(node, (ast.Module, ast.ClassDef)):
            inner = (ast.get_docstring(child) for child in node.body if isinstance(child, kinds))
            yield "\n\n".join(text for text in inner if text and len(text) <= 200)


def builtin_docstrings(module_name: str) -> Iterator[str]:
    """Docstrings of a module written in C, its types and their methods."""
    module = importlib.import_module(module_name)
    for _, member in inspect.getmembers(module):
        text = [inspect.getdoc(member) or ""]
        if inspect.isclass(member):
            text += [inspect.getdoc(value) or "" for value in vars(member).values()]
        yield "\n\n".join(text)


def comments(source: str) -> Iterator[str]:
    """Blocks of two and more comment lines."""
    for block in re.findall(r"(?:^[ \t]*#.*\n){2,}", source, flags=re.MULTILINE):
        yield textwrap.dedent(re.sub(r"^[ \t]*#+", "", block, flags=re.MULTILINE))


def prose(text: str) -> Iterator[str]:
    """The paragraphs of a text that read as English, each on one line."""
    for paragraph in re.split(r"\n\s*\n", textwrap.dedent(text).translate(ASCII)):
        lines = paragraph.strip("\n").splitlines()
        if not lines or not paragraph.isascii() or NOT_PROSE.search(paragraph):
            continue
        line = " ".join(" ".join(lines).split())
        line = re.sub(r":\w+:`([^`]*)`", r"\1", line)
        line = re.sub(r"`+'*|\*\*?(?=\w)|(?<=\w)\*\*?", "", line)
        line = re.sub(r"^([*\-o#]|\d+[.)]|\[\d+\])\s+|\s\[\d+\](?=\W|$)", "", line)
        words = re.findall(r"(?<![\w.])[A-Za-z][a-z']*(?![\w(.]\w)", line)
        letters = sum(character.isalpha() or character == " " for character in line)
        if (
            len(words) >= 5
            and letters >= 0.9 * len(line)
            and 5 * len(words) >= 4 * len(line.split())
            and re.match(r"[\"'(]?[A-Z]", line)
            and line[-1] in ".:!?"
        ):
            yield line


def pages(paragraphs: Iterable[str]) -> Iterator[str]:
    """Consecutive paragraphs joined into pages of at most about PAGE_CHARS characters."""
    page = ""
    for paragraph in paragraphs:
        if page and len(page) + len(paragraph) > PAGE_CHARS:
            yield page
            page = ""
        page += ("\n" if page else "") + paragraph
    if page:
        yield page


# The tokenizer


def train_tokenizer(corpus: list[str]) -> Tokenizer:
    """Byte-level BPE: any bytes in, the same bytes out, no unknown token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        corpus,
        trainers.BpeTrainer(
            vocab_size=VOCAB_SIZE,
            special_tokens=[PAD, BOS, EOS],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A",
        pair=f"{BOS} $A {BOS} $B:1",
        special_tokens=[(BOS, BOS_ID)],
    )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json and what transformers wants beside it."""
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    names = {"bos_token": BOS, "eos_token": EOS, "pad_token": PAD}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": MAX_POSITIONS,
        "clean_up_tokenization_spaces": False,
        **names,
    }
    write_json(folder / "tokenizer_config.json", settings)
    write_json(folder / "special_tokens_map.json", names)


def write_json(file: Path, content: object) -> None:
    """Indented JSON with a last newline."""
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


# The model


def configuration() -> LlamaConfig:
    """A Llama of 1.9 million parameters: 3.8 MB in two bytes each."""
    return LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=352,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        pad_token_id=PAD_ID,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        dtype="float32",
    )


def rows(encoded: list[list[int]], length: int, chance: random.Random) -> Iterator[list[int]]:
    """One epoch as rows of `length` tokens that all start with BOS, the documents shuffled."""
    row: list[int] = []
    for document in chance.sample(encoded, len(encoded)):
        row += document
        while len(row) >= length:
            yield row[:length]
            row = [BOS_ID, *row[length:]] if len(row) > length else []


def batches(encoded: list[list[int]], chance: random.Random) -> Iterator[Tensor]:
    """Endless batches of BATCH_TOKENS tokens; every third has rows of full length."""
    streams = {length: endless(encoded, length, chance) for length in (256, MAX_POSITIONS)}
    while True:
        for length in (256, 256, MAX_POSITIONS):
            stream = streams[length]
            yield torch.tensor([next(stream) for _ in range(BATCH_TOKENS // length)])


def endless(encoded: list[list[int]], length: int, chance: random.Random) -> Iterator[list[int]]:
    """Epoch after epoch of rows."""
    while True:
        yield from rows(encoded, length, chance)


def learning_rate(step: int, steps: int) -> float:
    """The part of the peak rate at a step: linear warm-up, cosine down to nothing."""
    warm_up = max(1, steps // 20)
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.5 + 0.5 * math.cos(math.pi * (step - warm_up) / (steps - warm_up))


def train_model(
    encoded: list[list[int]], held_out: list[list[int]], steps: int
) -> LlamaForCausalLM:
    """Train on shuffled documents, with dropout on what each sub-layer adds.

    Matrices learn by Muon (https://kellerjordan.github.io/posts/muon), which here needs a third
    of AdamW's tokens; embeddings and norms by AdamW.
    """
    torch.manual_seed(SEED)
    chance = random.Random(SEED)
    model = LlamaForCausalLM(configuration())
    layers: Any = model.model.layers
    adders = [part for layer in layers for part in (layer.self_attn.o_proj, layer.mlp.down_proj)]
    hooks = [part.register_forward_hook(drop) for part in adders]
    parameters = list(model.parameters())
    embedding = model.model.embed_tokens.weight
    matrices = [p for p in parameters if p.dim() == 2 and p is not embedding]
    norms = [p for p in parameters if p.dim() == 1]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=MUON_LR, weight_decay=WEIGHT_DECAY),
        torch.optim.AdamW(
            [
                {"params": [embedding], "weight_decay": WEIGHT_DECAY},
                {"params": norms, "weight_decay": 0.0},
            ],
            lr=ADAM_LR,
            betas=(0.9, 0.95),
        ),
    ]
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate(step, steps))
        for optimizer in optimizers
    ]
    start = time.monotonic()
    model.train()
    for step, batch in zip(range(1, steps + 1), batches(encoded, chance), strict=False):
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(input_ids=batch, use_cache=False).logits
        loss = next_token_loss(logits, batch)
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
        if step % 200 == 0 or step == steps:
            seconds = time.monotonic() - start
            measured = evaluate(model, held_out)
            print(
                f"{step:5} {seconds:5.0f} s  {loss.item():.3f}  held out {measured:.3f}", flush=True
            )
    for hook in hooks:
        hook.remove()
    return model


def soften(folder: Path, encoded: list[list[int]], held_out: list[list[int]]) -> None:
    """Shrink the logits of the saved model: it tests engines, whose rows differ by rounding.

    A row that spans 25 nats is off by 1e-5 in float32 however it is computed. Label smoothing and
    a loss on the normalizer draw rare tokens up; the final norm's weights are scaled down.
    """
    torch.manual_seed(SOFT_SEED)
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    layers: Any = model.model.layers
    for layer in layers:
        for part in (layer.self_attn.o_proj, layer.mlp.down_proj):
            part.register_forward_hook(drop)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=SOFT_LR, betas=(0.9, 0.95), weight_decay=WEIGHT_DECAY
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate(step, SOFT_STEPS)
    )
    stream = batches(encoded, random.Random(SOFT_SEED))
    for _, batch in zip(range(SOFT_STEPS), stream, strict=False):
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(input_ids=batch, use_cache=False).logits
        flat = logits[:, :-1].flatten(0, 1).float()
        loss = torch.nn.functional.cross_entropy(
            flat, batch[:, 1:].flatten(), label_smoothing=LABEL_SMOOTHING
        )
        loss = loss + Z_LOSS * torch.logsumexp(flat, -1).square().mean()
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model.model.norm.weight.data *= LOGIT_SCALE
    print(f"softened: held out {evaluate(model, held_out):.3f}", flush=True)
    save_model(model, folder)


def drop(module: torch.nn.Module, _: object, output: Tensor) -> Tensor:
    """A forward hook: dropout while training."""
    return torch.nn.functional.dropout(output, DROPOUT, module.training)


def next_token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """Mean negative log-likelihood of each token but the first, in nats."""
    return torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten()
    )


@torch.inference_mode()
def evaluate(model: LlamaForCausalLM, encoded: list[list[int]]) -> float:
    """Mean loss over rows of 256 tokens, in nats a token."""
    was_training = model.training
    model.eval()
    tokens = torch.tensor(list(rows(encoded, 256, random.Random(0)))[:200])
    losses = [next_token_loss(model(input_ids=part).logits, part) for part in tokens.split(20)]
    model.train(was_training)
    return torch.stack(losses).mean().item()


def save_model(model: LlamaForCausalLM, folder: Path) -> None:
    """Write the weights in bfloat16 under a float32 configuration.

    Each weight is then the same number whether an engine computes in float32 or bfloat16.
    """
    model.bfloat16().save_pretrained(folder)
    special = GenerationConfig(pad_token_id=PAD_ID, bos_token_id=BOS_ID, eos_token_id=EOS_ID)
    special.save_pretrained(folder)
    settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    write_json(folder / "config.json", settings | {"dtype": "float32"})
    for file in folder.iterdir():
        file.chmod(0o644)


def main() -> None:
    """Train, save, and say how good it is."""
    parser = argparse.ArgumentParser(description="Train the tiny model.")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent / "model")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)

    train, held_out = documents()
    tokenizer = train_tokenizer(train)
    save_tokenizer(tokenizer, options.out)

    def encode(pages: list[str]) -> list[list[int]]:
        return [[*found.ids, EOS_ID] for found in tokenizer.encode_batch(pages)]

    train_ids, held_out_ids = encode(train), encode(held_out)
    for name, texts_of, ids in (("train", train, train_ids), ("held out", held_out, held_out_ids)):
        size, tokens = sum(map(len, texts_of)), sum(map(len, ids))
        print(f"{name}: {len(ids)} documents, {size} characters, {tokens} tokens")
    save_model(train_model(train_ids, held_out_ids, options.steps), options.out)
    soften(options.out, train_ids, held_out_ids)

    model = LlamaForCausalLM.from_pretrained(options.out, dtype=torch.float32).eval()
    print(f"{sum(p.numel() for p in model.parameters())} parameters")
    print(f"train {evaluate(model, train_ids):.3f}, held out {evaluate(model, held_out_ids):.3f}")


if __name__ == "__main__":
    main()
