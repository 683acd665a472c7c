"""Tasks of lm-evaluation-harness of each kind, read from local files, and how runs are compared."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

TASKS: Final = ("lmpool_choices", "lmpool_words", "lmpool_rolling", "lmpool_texts")

_CHOICES: Final = [
    ("If the file does not", ["exist", "have", "walk", "end of the world"], 0),
    ("This function returns a", ["new list", "walk in the park", "tuple", "string\n"], 2),
    ("The class is used to", ["provide a method", "be", "eat", "determine"], 0),
    ("Return the number of", ["bytes", "items in the list", "characters", "é"], 0),
    ("Raised when the", ["file is not found", "x", "system", "operation fails"], 3),
]
_WORDS: Final = [
    ("If the file does not", " exist"),
    ("The class is used to", " provide"),
    ("Return the number of", " bytes"),
    ("This function returns a", " tuple"),
    ("Raised when an", " error occurs"),
    ("For example, if the", " value is not a string"),
]
_TEXTS: Final = [
    "If the file does not exist, it is created.",
    "The class is used to provide a new method. It returns the number of items.",
    "Naïve: déjà vu, 日本 🎉",
]
_STARTS: Final = [
    "If the file does not",
    "The class is used to provide a new method",
    "Return the number of",
    "This function returns a new list of",
    "Raised when the",
    "For example, the",
]

_YAML: Final = {
    "lmpool_choices": """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
  - {metric: acc_norm, aggregation: mean, higher_is_better: true}
""",
    "lmpool_words": """
output_type: loglikelihood
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
target_delimiter: ""
metric_list:
  - {metric: perplexity, aggregation: perplexity, higher_is_better: false}
  - {metric: acc, aggregation: mean, higher_is_better: true}
""",
    "lmpool_rolling": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list:
  - {metric: word_perplexity}
  - {metric: byte_perplexity}
  - {metric: bits_per_byte}
""",
    "lmpool_texts": """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs:
  until: ["\\n\\n", ".", " list of the", "(", "zzz", "qqq"]
  max_gen_toks: 24
  do_sample: false
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true}
""",
}


def text_of(tokenizer: Any, tokens: int) -> str:
    """A text of exactly so many tokens, the BOS token that the tokenizer adds included."""
    words = ("The class is used to provide a new method. " * (tokens // 4)).split(" ")
    for count in range(len(words), 0, -1):
        text = " ".join(words[:count])
        while len(tokenizer.encode(text)) < tokens:
            text += " the"
        if len(tokenizer.encode(text)) == tokens:
            return text
    raise AssertionError(f"no text of {tokens} tokens")


def write_tasks(folder: Path, tokenizer: Any, longest: int, most: int = 1) -> None:
    """The tasks, for a model that takes `longest` tokens in, whose texts are up to `most` windows.

    Among the choices and words are texts of `longest` + 1 tokens, whose last is only a target, and
    of more, which are cut.
    """
    exactly = text_of(tokenizer, longest)
    longer = text_of(tokenizer, longest + 40)
    word = " exist"
    assert len(tokenizer.encode(exactly + word)) == longest + 1
    choices = [*_CHOICES, (exactly, ["exist", "the", "a new"], 1), (longer, ["exist", "the"], 0)]
    words = [*_WORDS, (exactly, word), (longer, " the end")]
    texts = [*_TEXTS, "The file is not a list of items. " * (most * longest // 5)]
    data: dict[str, list[dict[str, Any]]] = {
        "lmpool_choices": [{"question": q, "choices": c, "answer": a} for q, c, a in choices],
        "lmpool_words": [{"question": q, "answer": a} for q, a in words],
        "lmpool_rolling": [{"text": text} for text in texts],
        "lmpool_texts": [{"question": q, "answer": "exist"} for q in _STARTS],
    }
    for name, documents in data.items():
        file = folder / f"{name}.jsonl"
        file.write_text("".join(json.dumps(each) + "\n" for each in documents), "utf-8")
        head = (
            f"task: {name}\ndataset_path: json\ndataset_kwargs:\n  data_files:\n"
            f"    test: {file}\ntest_split: test\nmetadata: {{version: 1.0}}"
        )
        (folder / f"{name}.yaml").write_text(head + _YAML[name], "utf-8")


def evaluated(model: Any, folder: Path, tasks: Sequence[str] = TASKS, **given: Any) -> Any:
    """What the harness makes of a model, with every answer."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    return lm_eval.simple_evaluate(
        model=model,
        tasks=list(tasks),
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        bootstrap_iters=0,
        log_samples=True,
        **given,
    )


def metrics(results: Any) -> dict[str, float]:
    """Every metric, by task and name."""
    return {
        f"{task} {name}": value
        for task, found in results["results"].items()
        for name, value in found.items()
        if isinstance(value, float) and "stderr" not in name
    }


def answers(results: Any) -> dict[str, list[Any]]:
    """Every answer of the model's, by task, in the order of the documents."""
    return {
        task: [sample["resps"] for sample in sorted(samples, key=lambda sample: sample["doc_id"])]
        for task, samples in results["samples"].items()
    }


def assert_same(found: Any, expected: Any) -> None:
    """Metrics and log-likelihoods within 1e-4, every text and every `is_greedy` equal.

    Of a perplexity that is 1e-4 of itself: those of words here are in the thousands.
    """
    mine, theirs = metrics(found), metrics(expected)
    assert mine.keys() == theirs.keys()
    assert mine
    for name, value in theirs.items():
        assert abs(mine[name] - value) < 1e-4 * max(1, abs(value)), (name, mine[name], value)
    ours, others = answers(found), answers(expected)
    assert ours.keys() == others.keys()
    for task, documents in others.items():
        assert len(ours[task]) == len(documents)
        for one, other in zip(flat(ours[task]), flat(documents), strict=True):
            if isinstance(other, float):
                # float32 sums of hundreds of terms
                assert abs(one - other) < 1e-4 + 2e-6 * abs(other), (task, one, other)
            else:
                assert one == other, (task, one, other)


def flat(found: Any) -> list[Any]:
    """The texts, numbers and truths of an answer, as those of a file are in memory."""
    if isinstance(found, list | tuple):
        return [each for part in found for each in flat(part)]
    if isinstance(found, str) and found in {"True", "False"}:
        return [found == "True"]
    if isinstance(found, str):
        try:
            return [float(found)]
        except ValueError:
            return [found]
    return [found]
