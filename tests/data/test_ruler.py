"""RULER's tasks: the exact length, and a reader of the prompt that finds the answers by the task's
own rule.
"""

import re
from collections import Counter
from functools import partial

import pytest

from magicdec.config.registry import CORPORA
from magicdec.data.ruler import TASKS, accuracy
from magicdec.errors import UserError
from tests.data.characters import CharacterTokenizer, load, texts


class WordTokenizer(CharacterTokenizer):
    """Four characters a token, as a larger vocabulary would have them."""

    def encode(self, text: str, add_special_tokens: bool = True, verbose: bool = True) -> list[int]:
        bos = [1] * (self.bos and add_special_tokens)
        return bos + [2 + sum(map(ord, text[i : i + 4])) for i in range(0, len(text), 4)]


@pytest.fixture(scope="module")
def load_task(tmp_path_factory):
    """Prompts of a task, over a long text."""
    file = tmp_path_factory.mktemp("text") / "long.txt"
    file.write_text("\n".join(f"line {i} of a long text" for i in range(10_000)))
    return partial(load, "ruler", file, num_rows=4, context_len=4096)


def read_needle(text: str) -> list[str]:
    (key,) = re.findall(r"What is the secret number of (\w+)\?", text)
    return re.findall(rf"The secret number of {key} is (\d+)\.", text)


def read_common_words(text: str) -> list[str]:
    counts = Counter(
        word for line in re.findall(r"^Words: (.*)$", text, re.M) for word in line.split()
    )
    return [word for word, count in counts.most_common(10) if count > counts.most_common(11)[10][1]]


def read_variables(text: str) -> list[str]:
    (value,) = re.findall(r"Which variables hold the value (\d+)\?", text)
    sources = dict(re.findall(r"^VAR (\w+) = (\w+)$", text, re.M))
    found = [name for name, source in sources.items() if source == value]
    while len(found) < len(sources):
        found += [name for name, source in sources.items() if source == found[-1]]
    return found


def read_documents(text: str) -> list[str]:
    (person,) = re.findall(r"In which city did (\w+ \w+) live\?", text)
    return re.findall(rf"{person} was born in \d+ and spent a long life in (\w+)\.", text)


READERS = {"niah_single": read_needle, "niah_multikey": read_needle, "cwe": read_common_words}
READERS |= {"vt": read_variables, "qa": read_documents}


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("context_len", [1700, 4096])
@pytest.mark.parametrize("task", list(TASKS))
def test_a_reader_who_keeps_to_the_rule_finds_the_answers(load_task, task, context_len, bos):
    prompts = load_task(task=task, context_len=context_len, tokenizer=CharacterTokenizer(bos))
    for text, answers in zip(texts(prompts), prompts.answers, strict=True):
        assert len(text) == context_len
        assert text.startswith("\x01") or not bos
        found = READERS[task](text)
        assert sorted(found) == sorted(answers)
        assert accuracy(" ".join(found), answers) == 1.0


@pytest.mark.parametrize("task", list(TASKS))
def test_rows_differ_and_the_seed_decides(load_task, task):
    prompts = load_task(task=task)
    assert len({tuple(row) for row in prompts.tokens}) == 4
    # Two may live in one city.
    assert task == "qa" or len({tuple(answers) for answers in prompts.answers}) == 4
    assert load_task(task=task).fingerprint == prompts.fingerprint
    assert load_task(task=task, seed=1).fingerprint != prompts.fingerprint


@pytest.mark.parametrize("task", list(TASKS))
def test_the_length_is_exact_with_any_tokenizer(load_task, task):
    for length in (1001, 2048):
        prompts = load_task(task=task, context_len=length, tokenizer=WordTokenizer())
        assert {len(row) for row in prompts.tokens} == {length}


def test_without_a_path_it_is_the_standard_library():
    assert "def " in texts(load("ruler", num_rows=4, context_len=4096, task="niah_single"))[0]


def test_the_needles_lie_anywhere(load_task):
    found = [text for seed in range(8) for text in texts(load_task(task="niah_single", seed=seed))]
    places = [text.index("The secret number") / 4096 for text in found]
    assert min(places) < 0.2
    assert max(places) > 0.8


@pytest.mark.parametrize("task", list(TASKS))
def test_too_short_a_context_is_refused_with_the_shortest_that_would_do(load_task, task):
    with pytest.raises(
        UserError, match=rf"batch\.context_len=90: data\.task={task} needs at least (\d+) tokens"
    ) as e:
        load_task(task=task, context_len=90)
    assert int(re.findall(r"least (\d+)", str(e.value))[0]) > 90


def test_accuracy_is_the_share_of_the_answers():
    assert accuracy("It is 1234567, or so", ["1234567"]) == 1.0
    assert accuracy("alpha BETA", ["Beta", "gamma"]) == 0.5


def test_the_configuration_knows_every_task():
    assert CORPORA["ruler"].facts.tasks == tuple(TASKS)


def test_an_unknown_task_is_refused(load_task):
    with pytest.raises(UserError, match=r"data\.task=niah is unknown; valid: niah_single"):
        load_task(task="niah")
