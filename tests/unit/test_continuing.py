"""Continuations of a pool that end at texts, as lm_eval, inspect_ai and trl have them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
import pytest

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

from lmpool.backends.vocabulary import byte_vocabulary  # noqa: E402
from lmpool.integrations.continuing import Continued, check_stops, continue_text  # noqa: E402
from lmpool.producer import Piece  # noqa: E402
from lmpool.wants import FinishReason, Generate, Generation, TopLogprobs  # noqa: E402

SPECIAL = ["<unk>", "<s>", "</s>", "<|end|>"]
EOS = SPECIAL.index("</s>")
PARTS = [*"ab <>/s|\n", "é", "€", "😀", "ab", "<s", "\n\n", " a"]
STOPS = ["<", "s>", "ab", "b", "\n", "\n\n", "é", "€a", "😀", " ", "aé", "a\n", "abab", "zz"]


def byte_level() -> Any:
    """GPT-2's kind, some of whose tokens end within a character."""
    from tokenizers import decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("a", "b"), ("<", "s"), ("Ċ", "Ċ"), ("Ġ", "a"), ("Ġ", "â"), ("Ã", "©")]
    spelled = [*SPECIAL, *alphabet, *(one + other for one, other in merges)]
    vocab = {token: number for number, token in enumerate(spelled)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def sentencepiece() -> Any:
    """Llama's kind: characters that are no tokens are bytes, and the first space is left out."""
    from tokenizers import decoders, models, normalizers

    merges = [("a", "b"), ("<", "s"), ("▁", "a")]
    spelled = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abs<>/|", "é"]
    spelled += [one + other for one, other in merges]
    vocab = {token: number for number, token in enumerate(spelled)}
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>")
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
         decoders.Strip(" ", 1, 0)]
    )  # fmt: skip
    return tokenizer


@pytest.fixture(scope="module", params=[byte_level, sentencepiece])
def tokenizer(request: pytest.FixtureRequest) -> Any:
    made = request.param()
    made.add_special_tokens([tokenizers.AddedToken(text, special=True) for text in SPECIAL])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


class Pool:
    """What a pool draws, in pieces that end at `cuts`."""

    def __init__(
        self, tokenizer: Any, ids: Sequence[int], cuts: Sequence[int], reason: FinishReason
    ) -> None:
        self.tokenizer = tokenizer
        self._ids = list(ids)
        self._cuts = cuts
        self._reason = reason

    async def ask(self, _: object, want: Generate, *__: object, **___: object) -> Generation:
        return Generation(np.array(self._ids, np.int32), 0, self._reason)

    async def stream(
        self, _: object, *, stop: Sequence[Sequence[int]], **__: object
    ) -> AsyncIterator[Piece]:
        ids, reason = self._ids, self._reason
        for end in range(1, len(ids) + 1):
            if any(ids[:end][-len(each) :] == list(each) for each in stop):
                ids, reason = ids[:end], "stop"
                break
        ends = [*(cut for cut in self._cuts if 0 < cut < len(ids)), len(ids)]
        for begin, end in zip([0, *ends], ends, strict=False):
            numbers = np.arange(begin, end, dtype=np.float32)
            part = np.array(ids[begin:end], np.int32)
            top = TopLogprobs(part[:, None], numbers[:, None], numbers)
            last = reason if end == len(ids) else None
            yield Piece(begin, part, numbers, top, last)


def read(pool: Pool, *stop: str) -> Continued:
    want = Generate(logprobs=True, top_logprobs=1)
    return asyncio.run(continue_text(pool, [1], want, stop))  # type: ignore[arg-type]


def told(tokens: Sequence[bytes], ids: Sequence[int], first_space: bool) -> str:
    """The whole characters of tokens that are text, as a tokenizer of this kind tells them."""
    data = b"".join(tokens[i] for i in ids if i >= len(SPECIAL))
    while data:
        try:
            data.decode()
            break
        except UnicodeDecodeError as error:
            data = data[: error.start]
    text = data.decode()
    return text if first_space else text.removeprefix(" ")


def expected(
    tokens: Sequence[bytes], ids: Sequence[int], stops: Sequence[str], first_space: bool
) -> tuple[str, int] | None:
    """The text up to the stop, and how many tokens it takes to know it."""
    for count in range(1, len(ids) + 1):
        text = told(tokens, ids[:count], first_space)
        places = [(at + len(stop), at) for stop in stops if (at := text.find(stop)) >= 0]
        if places:
            return text[: min(places)[1]], count
        if tokens[ids[count - 1]].decode("utf-8", "replace") in {*SPECIAL} & {*stops}:
            return text, count
    return None


def drawn(tokens: Sequence[bytes], dice: random.Random) -> list[int]:
    """Tokens of a random text, which divide it in any way, special ones among them."""
    by_bytes: dict[bytes, list[int]] = {}
    for number, token in enumerate(tokens[len(SPECIAL) :], len(SPECIAL)):
        by_bytes.setdefault(token, []).append(number)
    ids = []
    for _ in range(dice.randint(1, 4)):
        data = "".join(dice.choices(PARTS, k=dice.randint(1, 8))).encode()
        while data:
            sizes = [size for size in range(1, 5) if data[:size] in by_bytes]
            size = dice.choice(sizes)
            ids.append(dice.choice(by_bytes[data[:size]]))
            data = data[size:]
        if dice.random() < 0.5:
            ids.append(dice.randrange(1, len(SPECIAL)))
    return ids[: dice.randint(1, len(ids))]


@pytest.mark.parametrize("seed", range(4))
def test_texts_end_at_the_first_stop_however_tokens_and_pieces_divide_them(
    tokenizer: Any, seed: int
) -> None:
    tokens = byte_vocabulary(tokenizer)
    first_space = tokenizer.decode([tokens.index(b" a")]) == " a"
    dice = random.Random(seed)
    ended = 0
    for _ in range(150):
        ids = drawn(tokens, dice)
        stops = dice.sample([*STOPS, "</s>", "<|end|>", "a</s>"], dice.randint(1, 3))
        right = expected(tokens, ids, [s for s in stops if s != "a</s>"], first_space)
        cuts = sorted(dice.sample(range(1, 40), dice.randint(0, 12)))
        found = read(Pool(tokenizer, ids, cuts, "length"), *stops)
        case = (ids, [tokens[i] for i in ids], stops, cuts)
        if right is None:
            assert (found.token_ids, found.finish_reason) == (ids, "length"), case
            assert found.text == tokenizer.decode(ids, skip_special_tokens=True), case
        else:
            ended += 1
            text, count = right
            assert (found.text, found.token_ids) == (text, ids[:count]), case
            assert found.finish_reason == "stop", case
        size = len(found.token_ids)
        assert found.logprobs is not None
        assert found.top_logprobs is not None
        assert found.logprobs.tolist() == list(range(size)), case
        assert found.top_logprobs.token_ids[:, 0].tolist() == found.token_ids, case
    assert 20 < ended < 140


class AnyBytes:
    """A tokenizer whose tokens are any bytes, and how many tokens it was given to tell."""

    def __init__(self) -> None:
        self.given = 0
        self._tokens: list[bytes] = []

    def token(self, data: bytes) -> int:
        if data not in self._tokens:
            self._tokens.append(data)
        return self._tokens.index(data)

    def encode(self, text: str, **_: object) -> list[int]:
        return [self.token(bytes([byte])) for byte in text.encode()]

    def decode(self, ids: Sequence[int], **_: object) -> str:
        self.given += len(ids)
        return b"".join(self._tokens[i] for i in ids).decode("utf-8", "replace")


@pytest.mark.parametrize("broken", [False, True])
def test_tokens_that_all_end_within_characters_are_read_once(broken: bool) -> None:
    """Also where these are none: who reads all of them anew with each holds up everybody."""
    dice = random.Random(broken)
    for size in [*([20] * 100), 2000]:
        characters = "€世" if size > 100 else "é€😀世a"
        parts = [each.encode() for each in dice.choices(characters, k=size)]
        if broken:
            parts[size // 2 :] = dice.choices([b"\xff", b"\xe2", b"\x80", b"\xf0\x9f"], k=size)
        data = b"".join(parts) + "😀€\n".encode()
        begin = dice.randint(1, 2)  # of three bytes no other token ends where a character does
        pieces = [data[:begin], *(data[at : at + 3] for at in range(begin, len(data), 3))]
        tokenizer = AnyBytes()
        ids = [tokenizer.token(piece) for piece in pieces]
        found = read(Pool(tokenizer, ids, [], "length"), "😀€\n")
        assert found.finish_reason == "stop"
        assert found.text == data.decode("utf-8", "replace").removesuffix("😀€\n")
        assert tokenizer.given < 60 * len(ids) + 200


def test_a_stop_is_in_no_special_token(tokenizer: Any) -> None:
    ids = [*tokenizer.encode("ab", add_special_tokens=False), EOS]
    for stop in ("<", "s", ">", "/s", "b</s>"):
        found = read(Pool(tokenizer, ids, [], "eos"), stop)
        assert (found.text, found.token_ids, found.finish_reason) == ("ab", ids, "eos")


def test_special_tokens_are_stops(tokenizer: Any) -> None:
    ids = [*tokenizer.encode("ab", add_special_tokens=False), EOS, 3, EOS]
    for stop, left in (("</s>", 2), ("<|end|>", 1), ("</s><|end|>", 1), ("<|end|></s>", 0)):
        found = read(Pool(tokenizer, ids, [1, 2], "eos"), "zz", stop)
        assert found.token_ids == ids[: len(ids) - left]
        assert (found.text, found.finish_reason) == ("ab", "stop")
    found = read(Pool(tokenizer, ids, [1, 2], "eos"), "<s>")
    assert (found.text, found.token_ids, found.finish_reason) == ("ab", ids, "eos")


def test_empty_stops_end_nothing() -> None:
    assert check_stops(["", "a", ""]) == ["a"]
    assert check_stops("") == check_stops(None) == []
