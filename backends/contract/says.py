"""What an engine says of itself and of its tokens."""

from __future__ import annotations

from typing import Any, Final

from lmpool.backends.contract.asking import ask, request_for
from lmpool.backends.contract.breaches import expect
from lmpool.backends.contract.truth import Truth
from lmpool.backends.engine import Engine, EngineInfo
from lmpool.model_info import fingerprint
from lmpool.vocabulary import TOKENIZER_FILES

_MEASURED: Final = 24
"""Tokens of the prompt by which is seen what is counted."""
_UNDECODABLE: Final = "\N{REPLACEMENT CHARACTER}"


def check_says(engine: Engine, truth: Truth) -> None:
    """Raise `BrokenPromise` where `info`, the vocabulary or the tokenizer is not right."""
    _check_info(engine.info, truth)
    _check_vocabulary(engine, truth)
    _check_measures(engine)


def _check_info(info: EngineInfo, truth: Truth) -> None:
    rows = truth.rows([(0,)], None)
    expect(
        info.vocab_size == rows.shape[1],
        "info.vocab_size is the length of a row",
        f"{info.vocab_size} instead of {rows.shape[1]}",
    )
    expect(
        info.max_prompt_tokens >= 1 and info.dtype in ("float32", "bfloat16", "float16")
        and info.encoding in ("f32", "bf16"),
        "info says how prompts are computed",
        f"max_prompt_tokens={info.max_prompt_tokens}, dtype={info.dtype!r}, "
        f"encoding={info.encoding!r}",
    )  # fmt: skip
    special = [info.bos_token_id, info.pad_token_id, *info.eos_token_ids]
    wrong = [i for i in special if i is not None and not 0 <= i < info.vocab_size]
    expect(not wrong, "special tokens are of the vocabulary", f"{wrong}")
    expect(
        bool(info.identity),
        "info.identity holds what changes the numbers",
        "it is empty: pools of two models would share their rows",
    )
    try:
        fingerprint(info.identity)
    except (TypeError, ValueError) as error:
        expect(False, "info.identity can be hashed", f"{error}: {info.identity!r:.200}")


def _check_measures(engine: Engine) -> None:
    """What it has computed grows by what is new, and by no more where it is asked again."""
    length = min(_MEASURED, engine.info.max_prompt_tokens)
    prompt = [token % engine.info.vocab_size for token in range(length)]
    engine.clear_cache()
    looks = [engine.measures()]
    for _ in range(2):
        ask(engine, [request_for(prompt)])
        looks.append(engine.measures())
    for found in looks:
        numbers = [found.computed_tokens, found.kept_states, found.room, found.evicted_states]
        counts = all(number is None or (type(number) is int and number >= 0) for number in numbers)
        expect(
            counts and (found.room is None or (found.kept_states or 0) <= found.room),
            "measures are counts, and no more is kept than there is room for",
            f"{found}",
        )
    before, new, again = (look.computed_tokens for look in looks)
    expect(
        (before is None) == (new is None) == (again is None),
        "measures can be told always or never",
        f"{looks}",
    )
    if before is None or new is None or again is None:
        return
    expect(
        new - before >= length and again - new <= new - before,
        "measures count the tokens that are computed",
        f"{new - before} of a new prompt of {length} tokens, and {again - new} when it was asked "
        "for again",
    )


def _check_vocabulary(engine: Engine, truth: Truth) -> None:
    """The bytes of each id: as many as there are, and those that the tokenizer decodes."""
    vocabulary, files = engine.byte_vocabulary(), dict(engine.tokenizer_files())
    strange = set(files) - TOKENIZER_FILES
    expect(
        all(type(content) is bytes for content in files.values()) and not strange,
        "tokenizer_files are the bytes of files that clients take, by their names",
        sorted(map(str, strange or files)),
    )
    expect(
        engine.byte_vocabulary() == vocabulary and dict(engine.tokenizer_files()) == files,
        "byte_vocabulary and tokenizer_files are the same again",
        "they are others the second time",
    )
    right = truth.suite.vocabulary()
    if right is not None:
        expect(
            vocabulary is not None and len(vocabulary) == len(right),
            "byte_vocabulary has the bytes of every token",
            f"{None if vocabulary is None else len(vocabulary)} instead of {len(right)}",
        )
        assert vocabulary is not None
        wrong = [i for i, own in enumerate(right) if bytes(vocabulary[i]) != own]
        expect(
            not wrong,
            "byte_vocabulary has the bytes of every token",
            "" if not wrong else f"{vocabulary[wrong[0]]!r} for {wrong[0]}: {right[wrong[0]]!r}",
        )
    if vocabulary is None:
        return
    expect(
        0 < len(vocabulary) <= engine.info.vocab_size
        and all(type(token) is bytes for token in vocabulary),
        "byte_vocabulary has bytes for the ids of the vocabulary",
        f"{len(vocabulary)} for {engine.info.vocab_size}",
    )
    if "tokenizer.json" in files:
        _compare(vocabulary, files["tokenizer.json"])


def _compare(vocabulary: list[bytes], tokenizer: bytes) -> None:
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError:
        return
    loaded: Any = Tokenizer.from_str(tokenizer.decode())
    size = loaded.get_vocab_size(with_added_tokens=True)
    expect(
        len(vocabulary) == size,
        "byte_vocabulary has the bytes of every token",
        f"{len(vocabulary)} of the {size} in tokenizer_files",
    )
    texts = loaded.decode_batch([[i] for i in range(size)], skip_special_tokens=False)
    for i, (token, text) in enumerate(zip(vocabulary, texts, strict=True)):
        if _UNDECODABLE in text:
            continue  # a part of a character
        # A tokenizer drops the space before a text's first word.
        expect(
            token.decode(errors="replace").lstrip(" ") == text.lstrip(" "),
            "byte_vocabulary has the bytes that the tokenizer decodes",
            f"{token!r} for {i}, which is {text!r}",
        )
