"""Retrieval and aggregation tasks as in RULER (Hsieh et al. 2024, arXiv 2404.06654), at any exact
length.

Statements are placed at random in real text, the question comes last, and the answer is known.
Names and values are invented, so that no model has seen them in training.
"""

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise

from magicdec.config.choices import Corpus
from magicdec.config.registry import CORPORA
from magicdec.data import text
from magicdec.data.base import PromptRequest, Prompts
from magicdec.errors import UserError

COMMON_WORDS = 10  # each group of the list has as many others, which occur once
HOPS = 4
DOCUMENTS = 12
CITIES = (
    "Athens Berlin Cairo Dublin Geneva Havana Kyoto Lisbon Madrid Nairobi Oslo Prague Quito Rome"
    " Tunis Vienna"
)


@dataclass(frozen=True)
class Question:
    """The question of one row, with the statements that it is about."""

    statements: Iterable[str]  # placed in the text in this order, as many as there is room for
    needed: int  # statements that the text must hold
    question: str  # the end of the prompt
    answers: list[str]  # all of them belong into the output


def accuracy(output: str, answers: list[str]) -> float:
    """Return the share of a row's answers that its output contains; case does not matter."""
    return sum(answer.lower() in output.lower() for answer in answers) / len(answers)


def _row(
    made: Question, window: list[int], request: PromptRequest, generator: random.Random
) -> list[int]:
    """Return the beginning of the window with the statements at random places, followed by the
    question.
    """
    first = len(request.prefix)
    question = list(request.encode(f"\n\n{made.question}"))
    room = len(window) - first - len(question)
    pieces: list[list[int]] = []
    for statement in made.statements:
        piece = list(request.encode(f"\n{statement}\n"))
        if len(pieces) >= made.needed and len(piece) > room:
            break
        pieces.append(piece)
        room -= len(piece)
    if room < 0:
        shortest = len(window) - room
        raise UserError(
            f"batch.context_len={len(window)}: data.task={request.task} needs at least {shortest}"
            " tokens"
        )
    filler = window[first : first + room]
    places = [0, *sorted(generator.randint(0, room) for _ in pieces), room]
    parts = [filler[begin:end] for begin, end in pairwise(places)]
    between = chain.from_iterable(part + piece for part, piece in zip(parts, pieces, strict=False))
    return [*window[:first], *between, *parts[-1], *question]


def niah(generator: random.Random, count: int) -> Question:
    """Ask for one needle in a haystack, of `count` secret numbers."""
    keys = _words(generator, count)
    numbers = [str(number) for number in generator.sample(range(1_000_000, 10_000_000), count)]
    asked = generator.randrange(count)
    return Question(
        [
            f"The secret number of {key} is {number}."
            for key, number in zip(keys, numbers, strict=True)
        ],
        count,
        f"Question: What is the secret number of {keys[asked]}?\nAnswer: The secret number of"
        f" {keys[asked]} is",
        [numbers[asked]],
    )


def cwe(generator: random.Random) -> Question:
    """Ask for the common words: ten words occur in every group of the list, the others once."""
    common = _words(generator, COMMON_WORDS)
    question = f"Question: Which {COMMON_WORDS} words occur most often in the lists above?\nAnswer:"
    return Question(_word_groups(generator, common), 2, question, common)


def _word_groups(generator: random.Random, common: list[str]) -> Iterator[str]:
    """Yield groups of common and other words, without end."""
    used = set(common)
    while True:
        others = _words(generator, COMMON_WORDS, used)
        used.update(others)
        group = [*common, *others]
        generator.shuffle(group)
        yield "Words: " + " ".join(group)


def vt(generator: random.Random) -> Question:
    """Ask which variables hold a value that is assigned from one to the next."""
    names = [word.upper() for word in _words(generator, HOPS + 1)]
    value = str(generator.randrange(10_000, 100_000))
    statements = [
        f"VAR {name} = {source}" for name, source in zip(names, [value, *names], strict=False)
    ]
    question = (
        f"Question: Which variables hold the value {value}?\nAnswer: The variables that hold"
        f" {value} are"
    )
    return Question(statements, len(statements), question, names)


def qa(generator: random.Random) -> Question:
    """Ask about one of many short documents."""
    words = [word.capitalize() for word in _words(generator, 2 * DOCUMENTS)]
    first_names = words[::2]
    last_names = words[1::2]
    people = [f"{first} {last}" for first, last in zip(first_names, last_names, strict=True)]
    homes = [generator.choice(CITIES.split()) for _ in people]
    years = [generator.randrange(1700, 1950) for _ in people]
    facts = [
        f"Document {number}: {person} was born in {year} and spent a long life in {home}."
        for number, (person, year, home) in enumerate(
            zip(people, years, homes, strict=True), start=1
        )
    ]
    asked = generator.randrange(DOCUMENTS)
    question = (
        f"Question: In which city did {people[asked]} live?\nAnswer: {people[asked]} spent a long"
        " life in"
    )
    return Question(facts, DOCUMENTS, question, [homes[asked]])


TASKS: dict[str, Callable[[random.Random], Question]] = {
    "niah_single": partial(niah, count=1),
    "niah_multikey": partial(niah, count=8),
    "cwe": cwe,
    "vt": vt,
    "qa": qa,
}


def _words(generator: random.Random, count: int, used: Iterable[str] = ()) -> list[str]:
    """Return invented words of three syllables, all different and none of them `used`."""
    words: list[str] = []
    while len(words) < count:
        word = "".join(
            generator.choice("bdfgklmnprstvz") + generator.choice("aeiou") for _ in range(3)
        )
        if word not in words and word not in used:
            words.append(word)
    return words


@CORPORA.register(Corpus("ruler", tasks=tuple(TASKS), files_at=text.files_at))
def load(request: PromptRequest) -> Prompts:
    """Return prompts with their answers, in windows of `path` or of the standard library.

    Sources name the window and the task. Raise UserError if the context is too short for the task's
    statements.
    """
    task = request.task
    if task is None or task not in TASKS:
        raise UserError(f"data.task={task} is unknown; valid: {', '.join(TASKS)}")
    windows = text.load_or_stdlib(request)
    tokens, answers = [], []
    for window, source in zip(windows.tokens, windows.sources, strict=True):
        generator = random.Random(f"{request.seed}/{task}/{source}")
        made = TASKS[task](generator)
        tokens.append(_row(made, window, request, generator))
        answers.append(made.answers)
    return Prompts(tokens, [f"{source} {task}" for source in windows.sources], answers)
