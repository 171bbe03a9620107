import pytest
from hypothesis import given
from hypothesis import strategies as st

from magicdec.config.load import compose
from magicdec.data.base import PromptRequest, Prompts, _sections, cut_windows
from magicdec.errors import UserError
from magicdec.planning import build
from magicdec.planning.resolve import resolve
from tests.data.characters import UNICODE, CharacterTokenizer, texts
from tests.refusals import refusal

PLAIN = CharacterTokenizer()
# Every character is another one, so that any two windows that overlap or swap places are seen to.
TEXTS = {"long": "".join(map(chr, range(1000, 6000))), "short": "abcdefg"}
TEXTS |= {"middle": "".join(map(chr, range(7000, 7400)))}


def cut(
    documents: dict[str, str], rows: int, context: int, seed: int = 0, tokenizer=PLAIN
) -> Prompts:
    request = PromptRequest(rows, context, UNICODE, tokenizer, seed)
    return cut_windows(documents, documents.__getitem__, request, "data=test")


@given(
    st.dictionaries(st.text("abc", min_size=1), st.text("ab\n", max_size=300), max_size=4),
    st.integers(1, 12),
    st.integers(1, 40),
    st.integers(0, 5),
)
def test_windows_are_whole_pieces_of_one_document_and_distinct(documents, rows, context, seed):
    try:
        prompts = cut(documents, rows, context, seed)
    except UserError:  # too little text, or too much of it equal
        return
    assert len(prompts) == len(prompts.sources) == rows
    assert len({tuple(row) for row in prompts.tokens}) == rows
    assert len(set(prompts.sources)) == rows
    for text, source in zip(texts(prompts), prompts.sources, strict=True):
        assert len(text) == context
        assert text in documents[source.split("#")[0]]


def test_windows_do_not_overlap():
    prompts = cut(TEXTS, 90, 50)
    flat = [token for row in prompts.tokens for token in row]
    assert len(set(flat)) == len(flat)


def test_same_seed_same_prompts_other_seed_others():
    one = cut(TEXTS, 8, 50, seed=1)
    again = cut(TEXTS, 8, 50, seed=1)
    other = cut(TEXTS, 8, 50, seed=2)
    assert one == again
    assert one.fingerprint != other.fingerprint
    assert one.tokens != other.tokens


def test_the_order_of_the_files_does_not_matter():
    assert cut(TEXTS, 8, 50) == cut(dict(reversed(TEXTS.items())), 8, 50)


def test_more_rows_begin_with_the_fewer():
    assert cut(TEXTS, 20, 50).tokens[:8] == cut(TEXTS, 8, 50).tokens


def test_documents_take_turns():
    sources = cut(TEXTS, 2, 50).sources
    assert {source.split("#")[0] for source in sources} == {"long", "middle"}


def test_documents_equal_in_content_give_distinct_rows():
    prompts = cut({"one": "abcdef", "copy": "abcdef", "third": "ghijkl"}, 2, 6)
    assert sorted(texts(prompts)) == ["abcdef", "ghijkl"]


def test_too_little_text_names_both_numbers():
    with refusal(
        "4 rows x context_len=50 need 200 tokens", "2 documents hold 72 (1 distinct windows)"
    ):
        cut({"one": "x" * 70, "two": "yz"}, 4, 50)


def test_windows_begin_with_what_the_tokenizer_puts_before_a_text():
    tokenizer = CharacterTokenizer(bos=True)
    assert PromptRequest(8, 50, 128, tokenizer).prefix == (1,)
    prompts = cut(TEXTS, 8, 50, tokenizer=tokenizer)
    assert all(row[0] == 1 and 1 not in row[1:] and len(row) == 50 for row in prompts.tokens)


def test_one_window_of_a_book_does_not_cost_the_whole_book():
    tokenizer = CharacterTokenizer()
    cut({"book": "a line of text\n" * 100_000}, 1, 100, tokenizer=tokenizer)
    assert tokenizer.characters_read < 10_000


@given(st.text("ab\n", max_size=200), st.integers(1, 50))
def test_sections_are_the_text_at_line_ends_where_there_are_any(text, size):
    sections = _sections(text, size)
    assert "".join(sections) == text
    assert all(sections)
    assert len(sections) <= max(1, len(text) // size)


def test_sections_of_one_endless_line_are_cut_anyway():
    assert [len(section) for section in _sections("x" * 1000, 100)] == [100] * 10


def test_fingerprint_tells_rows_from_their_concatenation():
    assert (
        Prompts([[1, 2], [3]], ["", ""]).fingerprint != Prompts([[1], [2, 3]], ["", ""]).fingerprint
    )


@pytest.mark.parametrize(
    ("typed", "keys"),
    [
        ("scenario=compare", "batch.size, batch.num_batches or batch.context_len"),
        ("scenario=serve", "scenario.num_requests or batch.context_len"),
        ("scenario=verify", "scenario.batch_sizes or scenario.context_lens"),
    ],
)
def test_too_little_text_is_blamed_on_the_keys_of_the_scenario(tmp_path, typed, keys):
    (tmp_path / "book.txt").write_text("one two three " * 50)
    plan = resolve(compose(["experiment=quick", typed, "data=text", f"data.path={tmp_path}"]))
    with pytest.raises(UserError, match=f"; lower {keys}, or take more text with data.path$"):
        build.prompts(plan, build.tokenizer(plan), 1000)
