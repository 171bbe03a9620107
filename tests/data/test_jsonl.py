"""Prompts and traces of any field names: every preset on rows of our own making, and the errors."""

import csv
import gzip
import json
from dataclasses import replace

import pytest

from magicdec.config.load import compose
from magicdec.data import Prompts
from magicdec.data.records import records
from magicdec.errors import UserError
from magicdec.planning.resolve import resolve
from magicdec.tracking.run_id import run_id
from tests.data.characters import CharacterTokenizer, load, texts
from tests.refusals import refusal

TEXT = [f"{number} " + chr(97 + number) * 40 for number in range(6)]
# Rows with the field names of each data set, and what a run makes of the first four.
TURNS = [
    {"question_id": n, "category": c, "turns": [TEXT[n], "and?"]}
    for n, c in enumerate(["qa", "qa", "rag", "math"])
]
IN_TURNS = {
    "texts": [TEXT[0], TEXT[2], TEXT[3], TEXT[1]],
    "categories": ["qa", "rag", "math", "qa"],
}
LONG = {"dataset": "qasper", "length": 9, "language": "en", "all_classes": None, "_id": "x"}
PRESETS = {
    "speed_bench": ([{**row, "sub_category": "", "multiturn": True} for row in TURNS], IN_TURNS),
    "mt_bench": (TURNS, IN_TURNS),
    "longbench": (
        [
            {"input": f"{n}?", "context": TEXT[n], "answers": [f"{n}", "no"], **LONG}
            for n in range(4)
        ],
        {
            "texts": [f"{TEXT[n]}\n\n{n}?" for n in range(4)],
            "answers": [[f"{n}", "no"] for n in range(4)],
        },
    ),
    "sharegpt": (
        [{"id": "a", "conversations": [{"from": "human", "value": "left out, without an answer"}]}]
        + [
            {"id": "b", "conversations": [{"from": "human", "value": TEXT[n]}, {"value": "42"}]}
            for n in range(4)
        ],
        {"texts": TEXT[:4], "output_lens": [2] * 4, "num_left_out": 1},
    ),
    "mooncake": (
        [
            {"timestamp": at, "input_length": at // 100 + 9, "output_length": 5}
            for at in (0, 0, 900, 300)
        ],
        {"lengths": [9, 9, 12, 18], "output_lens": [5] * 4, "arrivals_s": [0.0, 0.0, 0.3, 0.9]},
    ),
    "burstgpt": (
        (
            "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log"
            " Type\n5,ChatGPT,9,7,16,API log\n6,GPT-4,9,0,9,API"
            " log\n45.5,GPT-4,12,3,15,Conversation log\n46,ChatGPT,8,1,9,API"
            " log\n47,GPT-4,8,1,9,x\n"
        ),
        {"lengths": [9, 12, 8, 8], "arrivals_s": [0.0, 40.5, 41.0, 42.0], "num_left_out": 1}
        | {"categories": ["ChatGPT", "GPT-4", "ChatGPT", "GPT-4"]},
    ),
    "azure_llm": (
        (
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,9,10\n2023-11-16"
            " 18:17:04.0319600,8,8\n2023-11-16 18:17:05.4799600,7,1\n2024-05-10"
            " 00:00:00.009930+00:00,7,1\n"
        ),
        {"lengths": [9, 8, 7, 7], "output_lens": [10, 8, 1, 1]},
    ),
}


def written(folder, content):
    """The file of a data set: CSV as it is, or a row a line."""
    file = folder / ("rows.csv" if isinstance(content, str) else "rows.jsonl")
    file.write_text(
        content if isinstance(content, str) else "".join(json.dumps(row) + "\n" for row in content)
    )
    return file


def loaded(file, *overrides, preset="jsonl", num_rows=4, **changes):
    keys = compose([f"data={preset}", f"data.path={file}", *overrides]).data
    limits = {"context_len": 60, "most_new_tokens": 20}
    return load("jsonl", file, num_rows=num_rows, keys=keys, **limits, **changes)


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_reads_the_fields_of_its_data_set(tmp_path, preset, capsys):
    content, expected = PRESETS[preset]
    prompts = loaded(written(tmp_path, content), preset=preset)
    found = {"texts": texts(prompts), "lengths": [len(row) for row in prompts.tokens]}
    assert {key: found.get(key) or getattr(prompts, key) for key in expected} == expected
    assert ("left out 1 that do not fit, the first: " in capsys.readouterr().err) == (
        "num_left_out" in expected
    )
    assert prompts.facts.get("data/rows_left_out", 0) == prompts.num_left_out


def test_dates_of_arrival_are_seconds_since_the_first(tmp_path):
    prompts = loaded(written(tmp_path, PRESETS["azure_llm"][0]), preset="azure_llm", num_rows=3)
    assert prompts.arrivals_s == pytest.approx([0, 0.052, 1.5], abs=1e-4)


def test_a_text_becomes_a_users_message_and_messages_stay(tmp_path):
    tokenizer = CharacterTokenizer(chat_template="...")
    file = written(tmp_path, [{"p": "hi"}, {"p": [{"role": "system", "content": "be"}]}])
    prompts = loaded(file, "data.prompt=p", "data.chat=true", num_rows=2, tokenizer=tokenizer)
    assert texts(prompts) == ["[user]hi[assistant]", "[system]be[assistant]"]
    assert texts(loaded(file, "data.prompt=p", num_rows=1, tokenizer=tokenizer)) == ["hi"]


def test_prompts_of_a_length_alone_are_different_parts_of_the_filler(tmp_path):
    (tmp_path / "book").write_text("".join(map(chr, range(1000, 1100))))
    rows, filler = [{"n": length} for length in (1, 30, 20, 30, 2)], f"data.filler={tmp_path}/book"
    file, tokenizer = written(tmp_path, rows), CharacterTokenizer(bos=True)
    prompts = loaded(file, "data.prompt_len=n", filler, num_rows=5, tokenizer=tokenizer)
    assert [len(row) for row in prompts.tokens] == [1, 30, 20, 30, 2]
    assert {row[0] for row in prompts.tokens} == {1}
    used = [token for row in prompts.tokens for token in row[1:]]
    assert len(set(used)) == len(used)
    with pytest.raises(
        UserError, match=r"^data.filler=.*book is too short: .*take more text with data.filler$"
    ):
        loaded(written(tmp_path, rows * 2), "data.prompt_len=n", filler, num_rows=10)


@pytest.mark.parametrize(
    ("row", "keys", "reason"),
    [
        ("{p: 1}", "prompt=p", "line 2 is not JSON: "),
        (
            {"prmpt": "x"},
            "prompt=prompt",
            "line 2: data.prompt=prompt: there is no field prompt; did you mean prmpt?",
        ),
        (
            {"turns": ["x"], "id": 1},
            "prompt=text",
            "there is no field text; the fields are turns, id",
        ),
        ({"turns": ["x"]}, "prompt=turns.x", "data.prompt=turns.x: there is no field x"),
        (
            {"turns": ["x"]},
            "prompt=turns.1",
            "line 2: data.prompt=turns.1 must be a text or messages; data.unfit=skip",
        ),
        (
            {"p": ""},
            "prompt=p",
            "line 2: the prompt is empty; data.unfit=skip leaves out such rows",
        ),
        ({"p": "x" * 61}, "prompt=p", "the prompt has 61 tokens, more than batch.context_len=60"),
        (
            {"p": "x", "o": 21},
            "prompt=p output_len=o",
            "21 new tokens, more than batch.generate_len=20",
        ),
        (
            {"p": "x", "o": 1.5},
            "prompt=p output_len=o",
            "data.output_len=o: 1.5 is not a number of tokens",
        ),
        ({"n": 0}, "prompt_len=n", "data.prompt_len=n: 0 is not a number of tokens"),
        ({"n": 61}, "prompt_len=n", "the prompt has 61 tokens, more than batch.context_len=60"),
        ({"p": "x", "c": None}, "prompt=p category=c", "data.category=c: there is no value"),
        ({"p": "x", "r": []}, "prompt=p reference=r", "must be a text, or a list of texts"),
        ({"p": "x", "r": [1]}, "prompt=p reference=r", "must be a text, or a list of texts"),
        (
            {"p": "x", "t": "noon"},
            "prompt=p arrival=t",
            "'noon' is neither a number nor a date and time",
        ),
        ({"p": "FULL x"}, "prompt=p placeholder=FULL", "the prompt is a placeholder"),
        (
            {"p": "x", "by": "gpt"},
            "prompt=p speaker=by",
            "data.speaker=by: 'gpt' begins, not the user",
        ),
        ({"p": "x\ud800"}, "prompt=p", "line 2 cannot be read (UnicodeEncodeError: "),
    ],
)
def test_a_row_that_is_wrong_names_its_line(tmp_path, row, keys, reason):
    file = tmp_path / "rows.jsonl"
    file.write_text("\n" + (row if isinstance(row, str) else json.dumps(row)) + "\n")
    with refusal(reason):
        loaded(file, *(f"data.{key}" for key in keys.split()), num_rows=1)


def test_no_row_is_lost_in_silence(tmp_path, capsys):
    rows = [{"p": "x" * 99}, {"p": "a"}, {"p": ""}, {"p": "b"}]
    keys = ["data.prompt=p", "data.unfit=skip"]
    prompts = loaded(written(tmp_path, rows), *keys, num_rows=2)
    assert (texts(prompts), prompts.num_left_out) == (["a", "b"], 2)
    where = f"data=jsonl data.path={tmp_path}/rows.jsonl"
    line = (
        f"warning: {where}: took 2 rows, left out 2 that do not fit, the first: {where}, line 1:"
        " the prompt has 99"
    )
    assert line in capsys.readouterr().err
    with refusal("3 rows need as many prompts, the file has 2 and 2 that do not fit, the first: "):
        loaded(written(tmp_path, rows), *keys, num_rows=3)


def test_rows_without_a_field_and_rows_that_are_no_text_are_left_out_too(tmp_path):
    rows = [
        {"q": "x"},
        {"p": "\udfff", "c": "k"},
        {"p": "a"},
        {"p": "b", "c": "k"},
        {"p": "d", "c": "l"},
    ]
    keys = ["data.prompt=p", "data.unfit=skip"]
    prompts = loaded(written(tmp_path, rows), *keys, num_rows=3)
    assert (texts(prompts), prompts.num_left_out) == (["a", "b", "d"], 2)
    prompts = loaded(written(tmp_path, rows), *keys, "data.category=c", num_rows=2)
    assert sorted(prompts.categories) == ["k", "l"]
    with refusal(
        "the file has 0 and 5 that do not fit, the first: ",
        "there is no field pp; the fields are q",
    ):
        loaded(written(tmp_path, [{"q": "x"}] * 5), "data.prompt=pp", "data.unfit=skip")


def test_cells_of_csv_are_texts_unless_a_number_is_asked_for(tmp_path):
    prompts = ["2024", "007", "1e5", "x" * 50]
    file = written(
        tmp_path, "".join(f"{line}\n" for line in ["p,n", *(f"{prompt},7" for prompt in prompts)])
    )
    found = loaded(file, "data.prompt='code {p}'", "data.output_len=n", "data.reference=p")
    assert texts(found) == [f"code {prompt}" for prompt in prompts]
    assert (found.output_lens, found.answers) == ([7] * 4, [[prompt] for prompt in prompts])


def test_a_cell_of_csv_may_be_as_long_as_a_prompt(tmp_path):
    limit = csv.field_size_limit()
    file = written(tmp_path, f"p\n{'x' * 200_000}\n")
    assert [len(row["p"]) for _, _, row in records(str(file), "a file")] == [200_000]
    assert csv.field_size_limit() == limit


ROWS = [{"p": "one", "more": [{"a": 1}, "]},"]}, {"p": "two"}, {"p": "trois é"}]
LINES, TABLE = "".join(json.dumps(row) + "\n" for row in ROWS), "p,n\none,1\ntwo,2\ntrois é,3\n"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rows.json", json.dumps(ROWS).encode()),
        ("rows.json", json.dumps(ROWS, indent=2).encode()),
        ("rows.jsonl", ("\ufeff\n" + json.dumps(ROWS, indent=1)).encode()),
        ("rows.jsonl", LINES.encode("utf-16")),
        ("rows.jsonl.gz", gzip.compress(LINES.encode(), mtime=0)),
        ("rows.json.gz", gzip.compress(json.dumps(ROWS).encode(), mtime=0)),
        ("rows.csv", TABLE.encode("utf-16")),
        ("rows.CSV.gz", gzip.compress(TABLE.encode(), mtime=0)),
    ],
)
def test_files_as_they_are_published_are_read(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    prompts = loaded(tmp_path / name, "data.prompt=p", num_rows=3)
    assert texts(prompts) == ["one", "two", "trois é"]
    assert prompts.sources[0].startswith(f"{name}:")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (
            b'[{"p": "one"}, {"p": "two"]',
            "row 2 is not JSON: Expecting ',' delimiter before line 2",
        ),
        (b'[{"p": "one"},\n {"p": "two"\n', "it does not end behind row 1"),
        (b'[{"p": "one"}]\n[{"p": "two"}]\n', "it does not end behind row 1"),
        (b'[{"p": "one"}[{"p": "two"}]\n', "it does not end behind row 1"),
        (
            b'{"p": "caf\xe9"}\n',
            "after line 0, is not UTF-8 text (invalid continuation byte); iconv converts it",
        ),
        (gzip.compress(LINES.encode(), mtime=0)[:-12], "cannot be read (EOFError: "),
        (gzip.compress(LINES.encode(), mtime=0)[:20] + b"x" * 40, "cannot be read ("),
    ],
)
def test_a_file_that_cannot_be_read_says_why(tmp_path, content, reason):
    (tmp_path / "rows.jsonl").write_bytes(content)
    with refusal(reason):
        loaded(tmp_path / "rows.jsonl", "data.prompt=p", num_rows=3)


@pytest.mark.parametrize("value", [None, ["x"], {"a": 1}])
def test_a_template_is_filled_with_texts_and_numbers(tmp_path, value):
    keys = ["data.prompt='{p}\\n{more}'"]
    assert texts(loaded(written(tmp_path, [{"p": "a", "more": 7}]), *keys, num_rows=1)) == ["a\n7"]
    with refusal("must be filled with texts and numbers"):
        loaded(written(tmp_path, [{"p": "a", "more": value}]), *keys, num_rows=1)


@pytest.mark.parametrize("value", [True, 10**400])
def test_a_time_of_arrival_is_a_number(tmp_path, value):
    with refusal("is neither a number nor a date and time"):
        loaded(
            written(tmp_path, [{"p": "a", "at": value}]),
            "data.prompt=p",
            "data.arrival=at",
            num_rows=1,
        )


def test_an_array_is_read_row_by_row(tmp_path):
    """Nobody waits for the rest of a large file, which may even be torn."""
    (tmp_path / "rows.json").write_text(json.dumps(ROWS, indent=2)[:-5])
    assert texts(loaded(tmp_path / "rows.json", "data.prompt=p", num_rows=1)) == ["one"]


def test_a_row_of_many_lines_is_not_parsed_after_each(tmp_path, monkeypatch):
    """Tokens of a long prompt, one in each line."""
    decoder, looks = json.JSONDecoder.raw_decode, []

    def raw_decode(self, text, start=0):
        looks.append(len(text) - start)
        return decoder(self, text, start)

    monkeypatch.setattr(json.JSONDecoder, "raw_decode", raw_decode)
    rows = [{"tokens": list(range(10_000, 40_000))}, {"tokens": [1, 2]}]
    file = tmp_path / "rows.json"
    file.write_text(json.dumps(rows, indent=0))
    assert [content for _, _, content in records(str(file), "a corpus")] == rows
    assert sum(looks) < 12 * file.stat().st_size


@pytest.mark.parametrize(
    "typed", ["{a}\\n\\n{b}", "{a}\n\n{b}"], ids=["as a shell leaves it", "as YAML has it"]
)
def test_a_line_end_in_a_template(tmp_path, typed):
    file = written(tmp_path, [{"a": "x\\n", "b": "y"}])
    keys = replace(compose(["data=jsonl", f"data.path={file}", "data.prompt=a"]).data, prompt=typed)
    assert texts(load("jsonl", file, num_rows=1, keys=keys)) == ["x\\n\n\ny"]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("a,b\n1,2\n3\n", "line 3 does not have as many fields as the header"),
        ("a,b\n1,2,3\n", "line 2 does not have as many fields as the header"),
        ('a,b\n1,"2\n', "after line 1, cannot be read"),
    ],
)
def test_broken_csv_names_its_line(tmp_path, content, reason):
    with pytest.raises(UserError, match=reason):
        loaded(written(tmp_path, content), "data.prompt_len=a")


def test_keys_that_do_not_go_together():
    for keys in ([], ["data.prompt=a", "data.prompt_len=b"]):
        with pytest.raises(
            UserError, match="name one of them, the field of the prompt or of its length"
        ):
            compose(["data=jsonl", "data.path=x", *keys])
    with pytest.raises(
        UserError, match=r"data=text has no times of arrival; set data.arrival=FIELD"
    ):
        compose(["scenario=serve", "data=text", "data.path=x", "scenario.replays=[1]"])


def test_an_edited_filler_is_another_run(tmp_path):
    file, book = written(tmp_path, [{"n": 5}]), tmp_path / "book"
    ids = []
    for text in ("one", "two"):
        book.write_text(text)
        keys = [f"data.path={file}", "data.prompt_len=n", f"data.filler={book}"]
        ids.append(
            run_id(
                {},
                resolve(
                    compose(["hardware=cpu", "batch.size=1", "data=jsonl", *keys])
                ).fingerprints,
                "",
            )
        )
    assert ids[0] != ids[1]


def test_rows_in_another_order_keep_all_that_they_have():
    prompts = Prompts([[1], [2, 3]], ["a", "b"], [["x"], ["y"]], ["c", "d"], [4, 5], [0.0, 1.0])
    assert prompts.take([1, 0]) == Prompts(
        [[2, 3], [1]], ["b", "a"], [["y"], ["x"]], ["d", "c"], [5, 4], [1.0, 0.0]
    )
