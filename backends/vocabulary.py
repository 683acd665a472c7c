"""The bytes and the text of every token of a Hugging Face tokenizer.

Both agree with what genlm-backend's `decode_vocab` returns for the tokenizers that it supports.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from lmpool.errors import SettingsError

logger = logging.getLogger(__name__)

_ESCAPED_BYTE: Final = re.compile(rb"<0x([0-9A-Fa-f]{2})>")
_SPACE_MARK: Final = "\N{LOWER ONE EIGHTH BLOCK}"


def byte_vocabulary(tokenizer: Any) -> list[bytes]:
    """The bytes that each token id stands for; a list of ``len(tokenizer)``.

    The tokenizer's decoder tells how its tokens spell bytes: ``ByteLevel`` by GPT-2's alphabet,
    ``ByteFallback`` and ``Metaspace`` as SentencePiece does (``<0x0A>`` is a byte, and the mark
    U+2581 a space). Special and added tokens stand for their own text.

    Raises `SettingsError` for a tokenizer that does neither, or that has ids without a token.
    """
    kinds = _decoder_kinds(tokenizer)
    if kinds & {"ByteFallback", "Metaspace"} or (not kinds and hasattr(tokenizer, "sp_model")):
        return _sentencepiece_bytes(tokenizer)
    if kinds and "ByteLevel" not in kinds:
        raise SettingsError(
            f"the tokenizer {_name(tokenizer)} decodes with {', '.join(sorted(kinds))}: only "
            "byte-level tokenizers (ByteLevel) and SentencePiece (Metaspace, ByteFallback) tell "
            "the bytes of a token"
        )
    alphabet = None if kinds else getattr(tokenizer, "byte_decoder", None)
    return _byte_level_bytes(tokenizer, alphabet or _GPT2_BYTES)


def served_byte_vocabulary(tokenizer: Any) -> list[bytes] | None:
    """The same for an engine to serve: None without a tokenizer, or where it tells no bytes."""
    if tokenizer is None:
        return None
    try:
        return byte_vocabulary(tokenizer)
    except SettingsError as error:
        logger.warning("this pool has no byte vocabulary: %s", error)
        return None


def string_vocabulary(byte_vocab: Sequence[bytes], tokenizer: Any) -> list[str]:
    """Each token as text; one whose bytes are not UTF-8 alone, as the tokenizer spells it."""
    spelled = tokenizer.convert_ids_to_tokens(list(range(len(byte_vocab))))
    strings = []
    for token, spelling in zip(byte_vocab, spelled, strict=True):
        try:
            strings.append(bytes(token).decode())
        except UnicodeDecodeError:
            strings.append(spelling)
    return strings


def _decoder_kinds(tokenizer: Any) -> set[str]:
    """The types of the decoder and of its parts; empty for a tokenizer without one."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = None if backend is None else backend.decoder
    if decoder is None:
        return set()
    return set(_types(json.loads(decoder.__getstate__())))


def _types(node: object) -> Iterator[str]:
    if isinstance(node, dict):
        if isinstance(kind := node.get("type"), str):
            yield kind
        for value in node.values():
            yield from _types(value)
    elif isinstance(node, list):
        for value in node:
            yield from _types(value)


def _spellings(tokenizer: Any) -> tuple[list[str], dict[int, str]]:
    """How the tokenizer spells each id, and the text of those that were added to it."""
    added = {token: text for text, token in tokenizer.get_added_vocab().items()}
    spelled = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    for token, spelling in enumerate(spelled):
        if spelling is None and token not in added:
            raise SettingsError(
                f"the tokenizer {_name(tokenizer)} has {len(tokenizer)} tokens, but none of id "
                f"{token}: its ids must run from 0 without a gap"
            )
    return spelled, added


def _sentencepiece_bytes(tokenizer: Any) -> list[bytes]:
    spelled, added = _spellings(tokenizer)
    mark = _SPACE_MARK.encode()
    tokens = []
    for token, spelling in enumerate(spelled):
        if token in added:
            spelled_bytes = added[token].encode()
        else:
            spelled_bytes = _ESCAPED_BYTE.sub(
                lambda m: bytes.fromhex(m[1].decode()), spelling.encode()
            )
        tokens.append(spelled_bytes.replace(mark, b" "))
    return tokens


def _byte_level_bytes(tokenizer: Any, alphabet: Mapping[str, int]) -> list[bytes]:
    spelled, added = _spellings(tokenizer)
    tokens = []
    for token, spelling in enumerate(spelled):
        if token in added:
            tokens.append(added[token].encode())
            continue
        try:
            tokens.append(bytes([alphabet[character] for character in spelling]))
        except KeyError as error:
            raise SettingsError(
                f"the tokenizer {_name(tokenizer)} spells the token {token} as {spelling!r}, whose "
                f"{error.args[0]!r} is not in GPT-2's byte alphabet: its bytes cannot be told"
            ) from None
    return tokens


def _name(tokenizer: Any) -> str:
    return repr(getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__)


def _gpt2_bytes() -> dict[str, int]:
    """GPT-2's byte alphabet: printable Latin-1 stands for itself, the rest is moved past 255.

    Spaces and line ends also stand for themselves, which some byte-level vocabularies use.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(256 + i): byte for i, byte in enumerate(moved)})
    return {**alphabet, " ": 32, "\n": 10, "\r": 13, "\t": 9, _SPACE_MARK: 32}


_GPT2_BYTES: Final = _gpt2_bytes()
