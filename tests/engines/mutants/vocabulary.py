"""Engines that say something false of themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any, ClassVar

import msgpack
import numpy as np

from lmpool.backends import Engine, EngineInfo
from lmpool.backends.engine import Measures, Outcome
from lmpool.backends.mock import MockEngine
from lmpool.model_info import fingerprint
from lmpool.vocabulary import TOKENIZER_FILES, Vocabulary
from lmpool.wants import Generate
from tests.engines.mutants.ends import LAST_AT_3
from tests.engines.mutants.engines import Inner, Wrapper
from tests.engines.mutants.registry import BOTH, Make, mutant
from tests.engines.mutants.witnesses import (
    LONGEST,
    OPTIONS,
    VOCAB,
    ask_rightly,
    continuations,
    prompt_of,
    requests_of,
    scenario,
)


def _vocabulary(engine: Engine) -> None:
    right = MockEngine(**OPTIONS)
    for _ in range(2):
        assert engine.byte_vocabulary() == right.byte_vocabulary()
        files = engine.tokenizer_files()
        assert files == right.tokenizer_files()
        assert files.keys() <= TOKENIZER_FILES
        Vocabulary.unpack(Vocabulary(engine.byte_vocabulary() or [], files).pack())


VOCABULARY = scenario(_vocabulary)


class Spelled(Wrapper):
    """Has another vocabulary."""

    def byte_vocabulary(self) -> list[bytes]:
        return self.spelled(super().byte_vocabulary() or [])

    def spelled(self, tokens: list[bytes]) -> list[Any]:
        return tokens


@mutant("byte-vocabulary-one-short", VOCABULARY, forms=BOTH)
class OneShort(Spelled):
    """The byte vocabulary has an entry for each id."""

    def spelled(self, tokens: list[bytes]) -> list[Any]:
        return tokens[:-1]


@mutant("byte-vocabulary-one-long", VOCABULARY)
class OneLong(Spelled):
    """The byte vocabulary has no entry beyond `vocab_size`."""

    def spelled(self, tokens: list[bytes]) -> list[Any]:
        return [*tokens, b""]


@mutant("byte-vocabulary-shifted", VOCABULARY, forms=BOTH)
class Shifted(Spelled):
    """Entry i of the byte vocabulary is that of id i."""

    def spelled(self, tokens: list[bytes]) -> list[Any]:
        return [*tokens[1:], tokens[0]]


@mutant("byte-vocabulary-shifted-from-the-bytes-on", VOCABULARY, subtle=True)
class ShiftedFrom256(Spelled):
    """Entry i of the byte vocabulary is that of id i, also behind the 256 bytes."""

    def spelled(self, tokens: list[bytes]) -> list[Any]:
        return [*tokens[:256], *tokens[257:], *tokens[256:257]]


@mutant("byte-vocabulary-of-text", VOCABULARY)
class OfText(Spelled):
    """The byte vocabulary is bytes."""

    def spelled(self, tokens: list[bytes]) -> list[Any]:
        return [token.decode("latin-1") for token in tokens]


@mutant("byte-vocabulary-through-utf-8", VOCABULARY, subtle=True)
class ThroughUtf8(Spelled):
    """Bytes that are no text alone stay as they are."""

    def spelled(self, tokens: list[bytes]) -> list[Any]:
        return [token.decode("utf-8", "replace").encode() for token in tokens]


@mutant("byte-vocabulary-that-is-used-up", VOCABULARY, subtle=True)
class UsedUp(Spelled):
    """Asked again, the vocabulary is the same."""

    asked = 0

    def spelled(self, tokens: list[bytes]) -> list[Any]:
        self.asked += 1
        return tokens if self.asked == 1 else []


class Filed(Wrapper):
    """Has other tokenizer files."""

    def tokenizer_files(self) -> Mapping[str, Any]:
        return self.filed(dict(super().tokenizer_files()))

    def filed(self, files: dict[str, bytes]) -> Mapping[str, Any]:
        return files


@mutant("tokenizer-of-another-vocabulary", VOCABULARY, subtle=True)
class AnotherTokenizer(Filed):
    """The tokenizer and the byte vocabulary are of one model."""

    def filed(self, files: dict[str, bytes]) -> Mapping[str, Any]:
        return MockEngine(vocab_size=self.info.vocab_size + 1).tokenizer_files()


@mutant("tokenizer-files-named-by-their-paths", VOCABULARY)
class FilesByPath(Filed):
    """Tokenizer files are named as a client takes them."""

    def filed(self, files: dict[str, bytes]) -> Mapping[str, Any]:
        return {f"model/{name}": content for name, content in files.items()}


@mutant("tokenizer-files-as-text", VOCABULARY)
class FilesAsText(Filed):
    """Tokenizer files are bytes."""

    def filed(self, files: dict[str, bytes]) -> Mapping[str, Any]:
        return {name: content.decode() for name, content in files.items()}


@mutant("tokenizer-files-with-the-weights-among-them", VOCABULARY)
class WeightsAmongFiles(Filed):
    """Tokenizer files are those that a client takes, and no others."""

    def filed(self, files: dict[str, bytes]) -> Mapping[str, Any]:
        return {**files, "model.safetensors": b"\0" * 100}


# --- info ----------------------------------------------------------------------------------------


def _info(engine: Engine) -> None:
    """All that it says is so, of the types that it names, and can be packed for clients."""
    info = engine.info
    assert (info.dtype, info.encoding, info.engine) == ("float32", "f32", "mock")
    assert (info.vocab_size, info.max_prompt_tokens) == (VOCAB, LONGEST)
    assert (info.bos_token_id, info.eos_token_ids) == (0, (VOCAB - 1,))
    assert type(info.vocab_size) is type(info.max_prompt_tokens) is int
    msgpack.packb(asdict(info))
    fingerprint(info.identity)
    ask_rightly(engine, requests_of([prompt_of(LONGEST)]))


INFO = scenario(_info)


def _measures(engine: Engine) -> None:
    """What was computed are the tokens of a new prompt, and grows."""
    before = engine.measures().computed_tokens
    ask_rightly(engine, requests_of([prompt_of(8)]))
    after = engine.measures().computed_tokens
    assert type(before) is type(after)
    if before is not None and after is not None:
        assert after - before >= 8


MEASURES = scenario(_measures)


@mutant("measures-count-batches", MEASURES)
class CountsBatches(Wrapper):
    """`computed_tokens` are tokens."""

    batches = 0

    def handed(self, outcomes: list[Outcome]) -> list[Outcome]:
        self.batches += bool(outcomes)
        return outcomes

    def counted(self, found: Measures) -> Measures:
        return Measures(computed_tokens=self.batches)


@mutant("measures-are-of-the-last-batch", MEASURES, forms="batch")
class ForgetsWhatItCounted(Wrapper):
    """`computed_tokens` are those since the engine was made."""

    def counted(self, found: Measures) -> Measures:
        return Measures(computed_tokens=24 if self.inner.in_flight() else 12)


class Said(Wrapper):
    """Says something else of itself than it does."""

    def __init__(self, inner: Inner) -> None:
        super().__init__(inner)
        self.info = self.said(inner.info)

    def said(self, info: EngineInfo) -> EngineInfo:
        return info


@mutant("info-says-bfloat16", INFO)
class SaysBfloat16(Said):
    """`dtype` is what the model computes in."""

    def said(self, info: EngineInfo) -> EngineInfo:
        return replace(info, dtype="bfloat16")


@mutant("info-says-an-unknown-dtype", INFO, forms="fed")
class SaysUnknownDtype(Said):
    """`dtype` is written as lmpool writes dtypes."""

    def said(self, info: EngineInfo) -> EngineInfo:
        return replace(info, dtype="torch.float32")


@mutant("info-says-bf16-is-lossless", INFO)
class SaysBf16(Said):
    """`encoding` is the smallest that loses nothing of the rows."""

    def said(self, info: EngineInfo) -> EngineInfo:
        return replace(info, encoding="bf16")


@mutant("info-says-f16-is-lossless", INFO, forms="fed", subtle=True)
class SaysF16(Said):
    """`encoding` is the smallest that loses nothing of the rows."""

    def said(self, info: EngineInfo) -> EngineInfo:
        return replace(info, encoding="f16")


@mutant("info-says-a-larger-vocabulary", INFO, forms=BOTH)
class LargerVocabulary(Said):
    """`vocab_size` is the length of a row."""

    def said(self, info: EngineInfo) -> EngineInfo:
        return replace(info, vocab_size=info.vocab_size + 64 - info.vocab_size % 64)


@mutant("info-says-longer-prompts", INFO, forms=BOTH)
class LongerPrompts(Said):
    """A prompt of `max_prompt_tokens` is run."""

    def said(self, info: EngineInfo) -> EngineInfo:
        return replace(info, max_prompt_tokens=info.max_prompt_tokens + 1)


@mutant("info-says-shorter-prompts", INFO, subtle=True)
class ShorterPrompts(Said):
    """A prompt of more than `max_prompt_tokens` is refused."""

    def said(self, info: EngineInfo) -> EngineInfo:
        return replace(info, max_prompt_tokens=info.max_prompt_tokens - 1)


@mutant(
    "info-says-another-eos-than-ends-continuations",
    continuations(Generate(9, None, 4.0, LAST_AT_3)),
    subtle=True,
)
class AnotherEos(Said):
    """`eos_token_ids` are the tokens that end a continuation."""

    def said(self, info: EngineInfo) -> EngineInfo:
        self.inner.info = replace(info, eos_token_ids=(info.vocab_size - 2,))
        return info


@mutant("info-with-ids-past-the-vocabulary", INFO, subtle=True)
class IdsPastTheVocabulary(Said):
    """The special tokens are ids of the vocabulary."""

    def said(self, info: EngineInfo) -> EngineInfo:
        return replace(info, eos_token_ids=(*info.eos_token_ids, info.vocab_size))


@mutant("info-of-numpy-numbers", INFO)
class NumpyNumbers(Said):
    """What an engine says is packed for clients: its numbers are Python's."""

    def said(self, info: EngineInfo) -> EngineInfo:
        return replace(info, vocab_size=np.int64(info.vocab_size))  # type: ignore[arg-type]


@mutant("identity-that-cannot-be-hashed", INFO, subtle=True)
class IdentityUnhashable(Said):
    """A pool's keys carry the identity's hash: it is made of what msgpack packs."""

    def said(self, info: EngineInfo) -> EngineInfo:
        return replace(info, identity={**info.identity, "dtype": np.dtype(np.float32)})


def _identities(make: Make) -> None:
    first, second = make(**OPTIONS), make(**OPTIONS)
    assert fingerprint(first.info.identity) == fingerprint(second.info.identity)


@mutant("identity-that-differs-with-each-opening", _identities)
class IdentityDiffers(Said):
    """Workers of equal engines share a pool: their identity is equal."""

    opened: ClassVar[dict[str, int]] = {"times": 0}

    def said(self, info: EngineInfo) -> EngineInfo:
        self.opened["times"] += 1
        return replace(info, identity={**info.identity, "opened": self.opened["times"]})


def _sizes(make: Make) -> None:
    first, second = make(**OPTIONS), make(**{**OPTIONS, "vocab_size": VOCAB + 1})
    assert fingerprint(first.info.identity) != fingerprint(second.info.identity)


@mutant("identity-of-the-engines-name-alone", _sizes, subtle=True)
class IdentityOfTheName(Said):
    """The identity holds all that changes the rows."""

    def said(self, info: EngineInfo) -> EngineInfo:
        return replace(info, identity={"engine": info.engine})
