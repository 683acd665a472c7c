"""Vocabularies of tokenizers as they are found: byte-level BPE and SentencePiece's kinds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from lmpool.backends.vocabulary import byte_vocabulary, string_vocabulary
from lmpool.errors import SettingsError

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers  # noqa: E402

from lmpool.backends import tiny  # noqa: E402

TEXTS = [
    "the cat sat on the mat, and the dog sat on the cat",
    "Über den Wolken, naïve façade — 3 × 4 = 12",
    "日本語のテキスト 🙂 and a tab\tand\nlines\r\n",
    "  two spaces,   three   spaces ",
]
ODD_TEXT = "’•¶∂ƒ˙∆£Ħ爨ൠᅘ∰፨ \x00\x7f\u200b"

BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]


def byte_level() -> Any:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>", "<päd>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")


def llama_2_like() -> Any:
    """BPE with byte fallback, spaces made marks by the normalizer."""
    pieces = ["<unk>", "<s>", "</s>", *BYTE_TOKENS, "▁", "t", "h", "e", "c", "a", "s", "é"]
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("▁", "c"), ("▁", "▁")]
    pieces += ["".join(merge) for merge in merges]
    tokenizer = Tokenizer(
        models.BPE(
            {piece: token for token, piece in enumerate(pieces)},
            merges,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


def unigram() -> Any:
    """Unigram with Metaspace, as T5's and XGLM's, here with byte fallback."""
    pieces = [("<unk>", 0.0), ("▁", -2.0), ("▁the", -1.0), ("▁cat", -1.5), ("s", -3.0), ("é", -4.0)]
    pieces += [(piece, -9.0) for piece in BYTE_TOKENS]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def with_added_tokens() -> Any:
    tokenizer = byte_level()
    tokenizer.add_tokens(["▁added ", "tool▁call", "<0x41>"])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "�"]})
    return tokenizer


def sentencepiece_with_added_tokens() -> Any:
    tokenizer = llama_2_like()
    tokenizer.add_tokens(["▁added ", "<0x41>"])
    return tokenizer


def tiny_tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(tiny.path())


ALL: list[Callable[[], Any]] = [
    byte_level,
    llama_2_like,
    unigram,
    with_added_tokens,
    sentencepiece_with_added_tokens,
    tiny_tokenizer,
]
BYTE_LEVEL = [byte_level, with_added_tokens, tiny_tokenizer]


@pytest.mark.parametrize("make", BYTE_LEVEL)
def test_byte_level_tokens_spell_the_text(make: Callable[[], Any]) -> None:
    tokenizer = make()
    vocabulary = byte_vocabulary(tokenizer)
    assert len(vocabulary) == len(tokenizer)
    assert {bytes([byte]) for byte in range(256)} <= set(vocabulary)
    for text in [*TEXTS, ODD_TEXT]:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert b"".join(vocabulary[token] for token in ids) == text.encode()


@pytest.mark.parametrize("make", [llama_2_like, unigram, sentencepiece_with_added_tokens])
def test_sentencepiece_tokens_spell_the_text_after_a_space(make: Callable[[], Any]) -> None:
    tokenizer = make()
    vocabulary = byte_vocabulary(tokenizer)
    assert len(vocabulary) == len(tokenizer)
    for text in [*TEXTS, ODD_TEXT, "the cats"]:
        text = text.lstrip()  # before which some put no further space
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert b"".join(vocabulary[token] for token in ids) == b" " + text.encode()


def test_special_and_added_tokens_stand_for_their_text() -> None:
    tokenizer = with_added_tokens()
    vocabulary = byte_vocabulary(tokenizer)
    for text in ("<s>", "<päd>", "▁added ", "<0x41>", "<|im_start|>"):
        assert vocabulary[tokenizer.convert_tokens_to_ids(text)] == text.encode()


def test_bytes_escaped_in_a_sentencepiece_vocabulary() -> None:
    tokenizer = llama_2_like()
    vocabulary = byte_vocabulary(tokenizer)
    assert vocabulary[tokenizer.convert_tokens_to_ids("<0x0A>")] == b"\n"
    assert vocabulary[tokenizer.convert_tokens_to_ids("<0xE2>")] == b"\xe2"
    assert vocabulary[tokenizer.convert_tokens_to_ids("▁the")] == b" the"


@pytest.mark.parametrize("make", ALL)
def test_strings_are_the_text_or_the_tokenizers_spelling(make: Callable[[], Any]) -> None:
    tokenizer = make()
    vocabulary = byte_vocabulary(tokenizer)
    strings = string_vocabulary(vocabulary, tokenizer)
    assert len(strings) == len(vocabulary)
    for i, (token, text) in enumerate(zip(vocabulary, strings, strict=True)):
        try:
            assert text == token.decode()
        except UnicodeDecodeError:
            assert text == tokenizer.convert_ids_to_tokens(i)


@pytest.mark.genlm
@pytest.mark.parametrize("make", ALL)
def test_genlm_backend_gives_the_same(make: Callable[[], Any]) -> None:
    tokenization = pytest.importorskip("genlm.backend.tokenization")
    tokenizer = make()
    tokens, strings = tokenization.decode_vocab(tokenizer)
    assert byte_vocabulary(tokenizer) == [bytes(token) for token in tokens]
    assert string_vocabulary(tokens, tokenizer) == strings


def test_a_decoder_that_tells_no_bytes_is_refused() -> None:
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]")
    with pytest.raises(SettingsError, match="decodes with WordPiece: only byte-level"):
        byte_vocabulary(fast)


def test_a_character_outside_the_byte_alphabet_is_named() -> None:
    tokenizer = Tokenizer(models.BPE({"a": 0, "日": 1}, []))
    tokenizer.decoder = decoders.ByteLevel()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    with pytest.raises(SettingsError, match="spells the token 1 as '日'"):
        byte_vocabulary(fast)


def test_ids_with_a_gap_are_refused() -> None:
    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 2}, []))
    tokenizer.decoder = decoders.ByteLevel()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    with pytest.raises(SettingsError, match="none of id 1"):
        byte_vocabulary(fast)


class PythonTokenizer:
    """As much of a tokenizer without a Rust backend as a vocabulary needs."""

    name_or_path = "python-tokenizer"

    def __init__(self, pieces: list[str], **attributes: object) -> None:
        self._pieces = pieces
        self.__dict__.update(attributes)

    def __len__(self) -> int:
        return len(self._pieces)

    def get_added_vocab(self) -> dict[str, int]:
        return {"<s>": 0}

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        return [self._pieces[token] for token in ids]


def test_tokenizers_without_a_decoder_are_told_by_what_they_have() -> None:
    pieces = ["<s>", "▁a", "<0x0A>"]
    assert byte_vocabulary(PythonTokenizer(pieces, sp_model=object())) == [b"<s>", b" a", b"\n"]
    assert byte_vocabulary(PythonTokenizer(["<s>", "Ġa", "Ċ"])) == [b"<s>", b" a", b"\n"]
    decoder = {"x": 255, "y": 0}
    assert byte_vocabulary(PythonTokenizer(["<s>", "xy"], byte_decoder=decoder)) == [
        b"<s>",
        b"\xff\x00",
    ]
