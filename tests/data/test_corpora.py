import json
import subprocess
import sys

import pytest

from magicdec.config.load import compose
from magicdec.config.registry import CORPORA
from magicdec.data import PromptRequest, load_prompts, text_fingerprint
from magicdec.errors import UserError
from magicdec.planning.resolve import resolve
from magicdec.tracking.run_id import run_id
from tests.data.characters import CharacterTokenizer, load, texts
from tests.refusals import refusal


def error_of(*args, **options) -> str:
    with refusal() as caught:
        load(*args, **options)
    return str(caught.value)


def test_unknown_corpus_names_the_valid_ones():
    assert all(name in error_of("wikipedia") for name in CORPORA)


def test_text_of_a_folder(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.md").write_text("# " + "m" * 30)
    (tmp_path / "b.txt").write_text("t" * 30)
    (tmp_path / "image.png").write_bytes(b"\xff" * 100)
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "c.txt").write_text("g" * 100)
    assert {source.split("#")[0] for source in load("text", tmp_path).sources} == {
        "sub/a.md",
        "b.txt",
    }


def test_text_of_one_file_with_any_suffix_and_a_byte_order_mark(tmp_path):
    file = tmp_path / "novel"
    file.write_bytes(b"\xef\xbb\xbf" + bytes(range(40, 80)))
    assert texts(load("text", file, context_len=40, num_rows=1)) == [bytes(range(40, 80)).decode()]


def test_text_errors(tmp_path):
    assert "data.path" in error_of("text")
    for name in ("text", "repeat"):
        message = error_of(name, tmp_path / "absent", context_len=100)
        assert message == f"data.path={tmp_path / 'absent'}: no such file or folder"
    for name in ("text", "pg19"):
        assert "~no-such-user: no such file or folder" in error_of(name, "~no-such-user")
        assert error_of(name, "x" * 300).endswith("x: no such file or folder")
    assert "no text files" in error_of("text", tmp_path)
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 " * 20)
    message = error_of("text", tmp_path)
    assert "latin.txt is not UTF-8 text (byte 3)" in message
    (tmp_path / "latin.txt").write_text("short")
    message = error_of("text", tmp_path)
    assert "need 40 tokens" in message
    assert "hold 5" in message


def test_prompts_are_the_users_own_and_ragged(tmp_path):
    file = tmp_path / "mine.jsonl"
    file.write_text(
        '{"prompt": "hello"}\n\n{"messages": [{"role": "user", "content": "hi"}]}\n{"prompt":'
        ' "unused"}\n'
    )
    prompts = load("prompts", file)
    assert texts(prompts) == ["hello", "hi"]
    lengths = {name: value for name, value in prompts.facts.items() if "context_len" in name}
    assert lengths == {
        "data/context_len_mean": 3.5,
        "data/context_len_min": 2,
        "data/context_len_max": 5,
    }
    assert prompts.sources == ["mine.jsonl:1", "mine.jsonl:3"]
    assert texts(load("prompts", file, tokenizer=CharacterTokenizer(bos=True)))[0] == "\x01hello"
    templated = load("prompts", file, tokenizer=CharacterTokenizer(bos=True, chat_template="..."))
    assert texts(templated) == ["\x01hello", "[user]hi[assistant]"]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{prompt: 1}", "is not JSON"),
        ('["hello"]', 'either "prompt" or "messages"'),
        ("{}", 'either "prompt" or "messages"'),
        ('{"prompt": "a", "messages": []}', 'either "prompt" or "messages"'),
        ('{"prompt": 3}', '"prompt" must be a string'),
        ('{"prompt": ""}', "empty"),
        ('{"messages": []}', '"messages" must be'),
        ('{"messages": [{"role": "user"}]}', '"messages" must be'),
        ('{"messages": [{"role": "nobody", "content": ""}]}', "unknown role nobody"),
        ('{"prompt": "a\\ud800"}', "cannot be read (UnicodeEncodeError: "),
        (
            '{"messages": [{"role": "user", "content": "\\udfff"}]}',
            "cannot be read (UnicodeEncodeError: ",
        ),
        ('{"prompt": ' + "[" * 100_000, "cannot be read (RecursionError: "),
        (
            '{"prompt": ' + "1" * 6000 + "}",
            "cannot be read (ValueError: Exceeds the limit (4300 digits)",
        ),
        (json.dumps({"prompt": "x" * 21}), "21 tokens, more than batch.context_len=20"),
    ],
)
def test_a_bad_prompt_names_its_line(tmp_path, line, reason):
    file = tmp_path / "mine.jsonl"
    file.write_text(f'{{"prompt": "fine"}}\n{line}\n')
    with refusal("line 2", reason):
        load("prompts", file, tokenizer=CharacterTokenizer(chat_template="..."))


def test_too_few_prompts_names_both_numbers(tmp_path):
    file = tmp_path / "mine.jsonl"
    file.write_text('{"prompt": "only one"}\n')
    assert "3 rows need as many prompts, the file has 1" in error_of("prompts", file, num_rows=3)
    assert "data.path" in error_of("prompts")
    assert "no such file" in error_of("prompts", tmp_path / "absent.jsonl")
    assert "no such file" in error_of("prompts", "~no-such-user/absent.jsonl")
    assert "no such file" in error_of("prompts", "x" * 300)


def test_pg19_from_a_local_copy_takes_the_test_split(tmp_path):
    for split in ("train", "test"):
        (tmp_path / split).mkdir()
        (tmp_path / split / "1.txt").write_text(split * 30)
    assert "test" in texts(load("pg19", tmp_path, num_rows=1))[0]
    assert texts(load("pg19", tmp_path / "train", num_rows=1))[0].startswith(
        ("train", "rain", "ain", "in", "n")
    )


def test_pg19_without_the_library_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "pip install 'magicdec[pg19]'" in error_of("pg19")


def test_pg19_through_the_library(monkeypatch):
    class Datasets:
        @staticmethod
        def load_dataset(name, split, streaming):
            assert split == "test"
            assert streaming
            return iter([{"short_book_title": "Emma", "text": "e" * 50}])

    monkeypatch.setitem(sys.modules, "datasets", Datasets)
    assert load("pg19", num_rows=1).sources[0].startswith("Emma (0)#")
    monkeypatch.setattr(Datasets, "load_dataset", staticmethod(lambda *_, **__: 1 / 0))
    assert "(ZeroDivisionError: division by zero); use data.path=FOLDER" in error_of("pg19")


def test_random_needs_no_tokenizer_and_repeats_itself():
    one, again, fewer, others = (
        load_prompts("random", PromptRequest(rows, 30, 7, seed=seed))
        for rows, seed in ((5, 3), (5, 3), (2, 3), (5, 4))
    )
    assert one == again
    assert one.tokens[:2] == fewer.tokens
    assert one.fingerprint != others.fingerprint
    assert {token for row in one.tokens for token in row} <= set(range(7))
    assert [len(row) for row in one.tokens] == [30] * 5


def test_a_tokenizer_larger_than_the_models_vocabulary_is_an_error(tmp_path):
    (tmp_path / "a.txt").write_text("".join(map(chr, range(97, 197))))
    assert "vocabulary has 100 tokens" in error_of("text", tmp_path, vocab_size=100)


def test_importing_the_package_imports_no_heavy_library():
    heavy = ("transformers", "datasets", "hydra", "wandb", "torch")
    code = f"import sys, magicdec.data; print([name for name in {heavy} if name in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize("name", ["prompts", "text", "repeat", "ruler"])
def test_the_fingerprint_of_a_file_is_that_of_its_content(tmp_path, name):
    file, found = tmp_path / "mine.jsonl", []
    for content in ("hello", "hallo", "hello"):
        file.write_text(json.dumps({"prompt": content}))
        found.append(text_fingerprint(name, str(file)))
    assert found[0] == found[2] != found[1]


def test_the_fingerprint_of_a_folder_covers_the_text_in_it(tmp_path):
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "book.txt").write_text("a book")
    before = {name: text_fingerprint(name, str(tmp_path)) for name in ("text", "pg19")}
    (tmp_path / "image.png").write_bytes(b"no text")
    assert {name: text_fingerprint(name, str(tmp_path)) for name in before} == before
    (tmp_path / "more.txt").write_text("of which PG-19 takes no notice")
    assert text_fingerprint("text", str(tmp_path)) != before["text"]
    assert text_fingerprint("pg19", str(tmp_path)) == before["pg19"]
    (tmp_path / "test" / "book.txt").write_text("A book")
    assert text_fingerprint("pg19", str(tmp_path)) != before["pg19"]
    with pytest.raises(UserError, match=r"^data=text data.path=nowhere: no such file or folder$"):
        text_fingerprint("text", "nowhere")


def test_edited_prompts_are_another_run(tmp_path):
    file = tmp_path / "mine.jsonl"
    ids = []
    for content in ("hello", "hallo"):
        file.write_text(json.dumps({"prompt": content}))
        plan = resolve(
            compose(["hardware=cpu", "batch.size=1", "data=prompts", f"data.path={file}"])
        )
        ids.append(run_id({}, plan.fingerprints, ""))
    assert ids[0] != ids[1]
