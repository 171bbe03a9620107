"""The server, driven by OpenAI's own client."""

import copy
from itertools import cycle

import httpx
import openai
import pytest

from tests.serving.conftest import serving

TEMPLATE = """{% for message in messages %}\
{% if message.role == 'robot' %}{{ raise_exception('no robots') }}{% endif %}\
# {{ message.role }}: {{ message.content }}
{% endfor %}{% if add_generation_prompt %}def {% endif %}"""
MESSAGES = [
    {"role": "system", "content": "Write Python."},
    {"role": "user", "content": "Name the class."},
]
PROMPT = "# system: Write Python.\n# user: Name the class.\ndef "


@pytest.fixture(scope="module")
def chat(parts):
    """A client of a server whose model has a template."""
    tokenizer = copy.deepcopy(parts[1])
    tokenizer.chat_template = TEMPLATE
    with serving(parts, 2, 128, tokenizer=tokenizer) as url:
        yield client_of(url)


@pytest.fixture(scope="module")
def whole(chat):
    """The answer to PROMPT."""
    return completed(chat).choices[0].text


def client_of(url: object) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)


def completed(chat: openai.OpenAI, **settings) -> openai.types.Completion:
    settings = {"model": "tiny", "prompt": PROMPT, "max_tokens": 40, "temperature": 0} | settings
    return chat.completions.create(**settings)


def chatted(chat: openai.OpenAI, **settings):
    settings = {
        "model": "tiny",
        "messages": MESSAGES,
        "max_completion_tokens": 40,
        "temperature": 0,
    } | settings
    return chat.chat.completions.create(**settings)


def test_a_chat_is_a_completion_of_the_template(chat, whole):
    answer = chatted(chat)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", whole)
    assert (answer.object, choice.finish_reason) == ("chat.completion", "length")
    parts = [
        MESSAGES[0],
        {"role": "user", "content": [{"type": "text", "text": MESSAGES[1]["content"]}]},
    ]
    assert (
        chatted(chat, messages=parts, n=1, logprobs=False, stop=[]).choices[0].message.content
        == whole
    )
    assert chatted(chat, max_tokens=40).choices[0].message.content == whole
    details = answer.usage.completion_tokens_details
    assert 0 < details.accepted_prediction_tokens < answer.usage.completion_tokens == 40
    events = list(chatted(chat, stream=True, stream_options={"include_usage": True}))
    assert {event.object for event in events} == {"chat.completion.chunk"}
    *texts, last = events
    assert "".join(event.choices[0].delta.content for event in texts) == whole
    assert [event.choices[0].delta.role for event in texts] == ["assistant"] + [None] * (
        len(texts) - 1
    )
    assert (last.usage, last.choices) == (answer.usage, [])


def test_a_chat_without_a_limit_ends_where_the_slot_does(chat):
    answer = chatted(chat, max_completion_tokens=None, extra_body={"ignore_eos": True})
    assert answer.usage.total_tokens == 128


@pytest.mark.parametrize(
    ("start", "length"), list(zip(range(3, 60, 7), cycle([1, 2, 5]), strict=False))
)
def test_a_stop_string_ends_an_answer_wherever_it_begins(chat, whole, start, length):
    """Also within tokens and across them, streamed or not; the client never sees a part of it."""
    stop = whole[start : start + length]
    expected = whole[: whole.find(stop)]
    assert completed(chat, stop=stop).choices[0].text == expected
    events = list(completed(chat, stop=[stop, "never"], stream=True))
    assert "".join(event.choices[0].text for event in events) == expected
    assert events[-1].choices[0].finish_reason == "stop"
    answer = chatted(chat, stop=stop)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (
        expected,
        "stop",
    )


def test_a_stop_string_frees_the_slot_and_is_counted_as_a_stop(chat, whole):
    assert completed(chat, stop=whole[5:9], max_tokens=80).usage.completion_tokens < 40
    metrics = httpx.get(str(chat.base_url).replace("/v1/", "/metrics")).text
    assert 'magicdec_requests_total{end="stop"}' in metrics
    assert 'end="cancelled"' not in metrics


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"logprobs": True}, "logprobs=True: not supported; leave it out"),
        ({"n": 2}, "n=2: not supported; leave it out"),
        ({"messages": []}, "messages=[]: must not be empty"),
        ({"messages": [{"role": "user"}]}, "messages.0.content: is required"),
        (
            {"messages": [{"role": "user", "content": 5}]},
            "messages.0.content=5: must be a text or a list of parts",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "must be a text or a list of parts of",
        ),
        (
            {"messages": [{"role": "robot", "content": "a"}]},
            "messages: refused by the model's chat template: no robots",
        ),
        ({"tools": [{"type": "function"}]}, "not supported; leave it out"),
        (
            {"max_completion_tokens": 120},
            "tokens and max_completion_tokens=120 exceed the limit of 128 tokens",
        ),
        ({"max_completion_tokens": -1}, "max_completion_tokens=-1: must be at least 1"),
        ({"max_tokens": 5}, "max_tokens and max_completion_tokens differ; send one"),
        ({"max_tokens": -1, "max_completion_tokens": None}, "max_tokens=-1: must be at least 1"),
    ],
)
def test_what_a_chat_cannot_be(chat, settings, said):
    with pytest.raises(openai.BadRequestError) as refused:
        chatted(chat, **settings)
    assert said in refused.value.body["message"]


def test_a_model_without_a_template_says_so(client):
    with pytest.raises(
        openai.BadRequestError, match="model=tiny has no chat template; send a prompt to"
    ):
        chatted(client_of(str(client.base_url).rstrip("/")))
