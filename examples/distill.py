"""Distillation data on disk: a teacher's likeliest tokens at each position of many texts.

    python examples/distill.py                                     # a private pool, the tiny model
    python examples/distill.py corpus.txt --out data -k 50 --url redis://server:6379/0 --pool llama

Each line of a file is a text; one that is longer than the model takes becomes several. 20 tokens a
position are 164 bytes, where the row has 513,048 at a vocabulary of 128,256.

Parts are files of NumPy arrays, `part-00000.npz` and so on, of which each is there whole or not at
all: stopped in the middle, by whatever, the same command goes on where it was. A part has `tokens`
int32 [N] of all its texts, which begin at `offsets` int64 [texts + 1]; and for the P tokens that
are not the first of a text, in their order, `top_ids` int32 [P, k], `top_logprobs` float32 [P, k]
and `rest` float32 [P], the log of the mass of all others.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

import lmpool
from lmpool.wants import Score, TextScores

Texts = Sequence[Sequence[int]]


def read(lm: lmpool.PooledLM[object], files: Iterable[Path]) -> list[list[int]]:
    """The token ids of each line, in pieces that the model takes; a score needs two tokens."""
    longest = lm.info.max_prompt_tokens + 1
    texts = []
    for file in files:
        for line in file.read_text("utf-8-sig").splitlines():
            tokens = lm.encode(line)
            texts += [tokens[at : at + longest] for at in range(0, len(tokens), longest)]
    return [tokens for tokens in texts if len(tokens) > 1]


def agree(folder: Path, about: dict[str, object]) -> None:
    """Write down what the parts are of. Ends where those that are there are of something else."""
    path = folder / "about.json"
    if path.exists():
        before = json.loads(path.read_text("utf-8"))
        if before != about:
            raise SystemExit(f"{folder} has parts of {before}, not of {about}: name another --out")
        return
    folder.mkdir(parents=True, exist_ok=True)
    write(path, json.dumps(about).encode())


def distill(
    lm: lmpool.SyncPooledLM[object], texts: Texts, folder: Path, k: int, part: int
) -> Iterator[Path]:
    """Ask for what is missing, and write it part by part."""
    paths = [folder / f"part-{n:05}.npz" for n in range(-(-len(texts) // part))]
    missing = [n for n, path in enumerate(paths) if not path.exists()]
    asks = ((tokens, Score(top_logprobs=k)) for n in missing for tokens in texts[n * part :][:part])
    # Parts to come are computed while one is written.
    answers = lm.ask_iter(asks, ordered=True, in_flight=4 * part)
    for n in missing:
        mine = texts[n * part :][:part]
        scores = [next(answers)[1] for _ in mine]
        write_part(paths[n], mine, [each for each in scores if isinstance(each, TextScores)])
        yield paths[n]


def write_part(path: Path, texts: Texts, scores: Sequence[TextScores]) -> None:
    """One part of the texts, and what was answered."""
    tops = [each.top_logprobs for each in scores if each.top_logprobs is not None]
    content = io.BytesIO()
    np.savez(
        content,
        tokens=np.concatenate([np.asarray(tokens, np.int32) for tokens in texts]),
        offsets=np.cumsum([0, *map(len, texts)], dtype=np.int64),
        top_ids=np.concatenate([top.token_ids for top in tops]),
        top_logprobs=np.concatenate([top.logprobs for top in tops]),
        rest=np.concatenate([top.rest for top in tops]),
    )
    write(path, content.getvalue())


def write(path: Path, content: bytes) -> None:
    """A file that is there whole or not at all."""
    hidden = path.with_suffix(".writing")
    with hidden.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    hidden.replace(path)


def main() -> None:
    """Distill what the command line says."""
    parser = argparse.ArgumentParser(description="Distillation data on disk.")
    parser.add_argument("files", nargs="*", type=Path, default=[Path(__file__)])
    parser.add_argument(
        "--out", type=Path, default=Path("distilled"), help="the folder of the parts"
    )
    parser.add_argument("-k", type=int, default=20, help="likeliest tokens at each position")
    parser.add_argument("--part", type=int, default=64, help="texts in a part")
    parser.add_argument("--url", help="of a pool's server; without one a private pool is started")
    parser.add_argument("--pool")
    given = parser.parse_args()
    for file in given.files:
        if not file.is_file():
            parser.error(f"{file} cannot be read: write the path of a text file")
    lm = lmpool.connect(given.url, given.pool) if given.url else lmpool.embedded("tiny", "hf")
    with lm:
        texts = read(lm, given.files)
        digest = hashlib.sha256(json.dumps(texts).encode()).hexdigest()
        model = {"model": lm.info.model, "fingerprint": lm.info.fingerprint}
        agree(given.out, {**model, "k": given.k, "part": given.part, "texts": digest})
        for path in distill(lm.sync, texts, given.out, given.k, given.part):
            print(f"{path}  {path.stat().st_size:9,} bytes")
    positions = sum(map(len, texts)) - len(texts)
    print(f"{len(texts):,} texts, {positions:,} positions, {given.k} tokens each")


if __name__ == "__main__":
    main()
