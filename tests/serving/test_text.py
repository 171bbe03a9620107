"""Stop strings across the borders of tokens, wherever those lie."""

from hypothesis import given
from hypothesis import strategies as st

from magicdec.http.stoppable_text import StoppableText


class Letters:
    """A tokenizer whose tokens are characters."""

    def decode(self, tokens, skip_special_tokens):
        return "".join(map(chr, tokens))


def pieces(text: str, ends: list[int], stops: list[str]) -> tuple[list[str], bool, list[int]]:
    """The text that is sent when a text arrives in parts, whether it was stopped, and its
    tokens.
    """
    growing, found = StoppableText(Letters(), stops), []
    for start, end in zip([0, *ends], [*ends, len(text)], strict=True):
        found.append(growing.add([*map(ord, text[start:end])]))
        if growing.stopped:
            break
    return [*found, growing.rest()], growing.stopped, growing.tokens


FEW = st.text("ab", min_size=1, max_size=4)


@given(st.text("ab", max_size=12), st.sets(st.integers(0, 12)), st.lists(FEW, max_size=3))
def test_the_text_ends_before_the_first_stop_string(text, cuts, stops):
    found, stopped, tokens = pieces(text, sorted(cut for cut in cuts if cut < len(text)), stops)
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    assert stopped == bool(ends)
    assert tokens == [*map(ord, text)][: min([*ends, len(text)])], (
        "up to the one that completes a stop string"
    )
    sent = "".join(found)
    assert sent == "".join(pieces(text, [], stops)[0]), "whatever the rounds are"
    assert not any(stop in sent for stop in stops)
    if not ends:
        assert sent == text
    else:
        assert any(text.startswith(sent + stop) for stop in stops)


def test_what_may_become_a_stop_string_is_held_back():
    assert pieces("one\n\ntwo", [1, 4, 5], ["\n\n"])[:2] == (["o", "ne", "", ""], True)
    assert pieces("one\ntwo", [4], ["\n\n"])[:2] == (["one", "\ntwo", ""], False)
    assert pieces("one\n", [4], ["\n\n"])[0] == ["one", "", "\n"]
