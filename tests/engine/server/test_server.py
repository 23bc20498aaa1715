"""The server as its users meet it: OpenAI's own client, over a real socket."""

import asyncio
import http.client
import json
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import openai
import pytest
import uvicorn

from engine import AsyncLLM, SamplingParams
from engine.server.app import make_app
from engine.server.listener import Listener
from engine.stream import Stream
from kvstore.errors import ConfigError

MODEL, KEY = "tiny", "a secret"
GREEDY = {"model": MODEL, "temperature": 0.0, "max_tokens": 12, "extra_body": {"ignore_eos": True}}
HELLO = [{"role": "user", "content": "Hello"}]


class Running:
    """A server in a thread, on a loop of its own."""

    def __init__(self, llm: AsyncLLM, **options) -> None:
        self.listener = Listener("127.0.0.1", 0)
        self.listener.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        app = make_app(llm, model_name=MODEL, **options)
        self._server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_config=None))
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._server.serve([self.listener.socket]))
        )
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)
        self.url = self.listener.url

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join()


@pytest.fixture(scope="module")
def llm(text_model):
    llm = AsyncLLM(text_model, dtype="float32", device_cache="16MiB", load_policy="always")
    yield llm
    assert llm._llm.check() == []
    llm._llm.close()


@pytest.fixture(scope="module")
def server(llm):
    server = Running(llm, api_key=KEY)
    yield server
    server.close()


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as client:
        yield client


def ask(server, method: str, path: str, body=None, **headers):
    """Status and JSON of one plain request."""
    connection = http.client.HTTPConnection("127.0.0.1", server.listener.port, timeout=60)
    payload = body if isinstance(body, str | None) else json.dumps(body)
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"} | headers
    connection.request(method, path, payload, headers)
    with connection.getresponse() as response:
        text = response.read()
        is_json = response.headers["content-type"].startswith("application/json")
        connection.close()
        return response.status, json.loads(text) if is_json else text.decode()


def expected(llm, prompt, **params) -> str:
    params = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True} | params
    (output,) = llm._llm.generate(prompt, SamplingParams(**params))
    return output.outputs[0].text


def is_idle(llm, timeout=60) -> bool:
    core = llm._llm._core
    return core.wait_for(
        lambda: not core.scheduler.has_work and sum(core.store.index.refcount) == 0, timeout
    )


def test_a_completion_is_the_engines_answer(client, llm):
    completion = client.completions.create(prompt="Once upon", **GREEDY)
    assert completion.choices[0].text == expected(llm, "Once upon")
    assert completion.choices[0].finish_reason == "length"
    assert completion.usage.total_tokens == len("Once upon") + 12


def test_prompts_may_be_lists_token_ids_and_echoed(client, llm):
    ids = llm.get_tokenizer()("Once upon")["input_ids"]
    texts = [expected(llm, "Once upon"), expected(llm, "a time")]
    completion = client.completions.create(prompt=["Once upon", "a time"], n=2, **GREEDY)
    assert [choice.index for choice in completion.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in completion.choices] == [text for text in texts for _ in "12"]
    for prompt in (ids, [ids]):
        completion = client.completions.create(prompt=prompt, echo=True, **GREEDY)
        assert completion.choices[0].text == "Once upon" + texts[0]


@pytest.mark.parametrize("n", [1, 2])
def test_a_streamed_completion_is_the_whole_one_in_parts(client, n):
    sampled = GREEDY | {"temperature": 1.0, "seed": 5, "n": n, "max_tokens": 20}
    whole = client.completions.create(prompt=["Once upon", "a time"], **sampled)
    wanted = {"include_usage": True, "include_obfuscation": False}
    options = {"stream": True, "stream_options": wanted}
    chunks = list(client.completions.create(prompt=["Once upon", "a time"], **sampled, **options))
    texts = [""] * 2 * n
    for chunk in chunks[:-1]:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 40 * n
    assert {chunk.usage for chunk in chunks[:-1]} == {None}
    ends = [choice.finish_reason for chunk in chunks for choice in chunk.choices]
    assert ends.count("length") == 2 * n


def test_a_chat_streams_role_content_and_end(client, llm):
    whole = client.chat.completions.create(messages=HELLO, **GREEDY)
    assert whole.choices[0].message.role == "assistant"
    chunks = list(client.chat.completions.create(messages=HELLO, stream=True, **GREEDY))
    assert chunks[0].choices[0].delta.role == "assistant"
    content = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert content == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == "length"
    asked = llm._llm.chat(HELLO)[0].prompt_token_ids
    assert whole.usage.prompt_tokens == len(asked)


def test_a_chat_without_a_limit_may_fill_the_context(client, llm):
    messages = [{"role": "user", "content": "x" * 400}]
    chat = {"model": MODEL, "messages": messages, "extra_body": {"ignore_eos": True}}
    answer = client.chat.completions.create(**chat)
    assert answer.usage.total_tokens == llm.max_model_len
    most = client.chat.completions.create(**chat, max_completion_tokens=3)
    assert most.usage.completion_tokens == 3


def test_stop_strings_and_logprobs(client, llm):
    text = expected(llm, "Once upon")
    stop = text[5]
    stopped = client.completions.create(prompt="Once upon", stop=[stop], **GREEDY)
    assert stopped.choices[0].text == text[: text.index(stop)]
    assert stopped.choices[0].finish_reason == "stop"
    named = client.completions.create(prompt="Once upon", logprobs=2, **GREEDY).choices[0].logprobs
    assert len(named.tokens) == len(named.token_logprobs) == len(named.text_offset) == 12
    assert named.text_offset[:2] == [0, 1]
    chat = client.chat.completions.create(
        messages=HELLO, logprobs=True, top_logprobs=2, stream=True, **GREEDY
    )
    content = [
        entry
        for chunk in chat
        if chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content
    ]
    assert len(content) == 12
    assert all(len(entry.top_logprobs) == 2 for entry in content)
    assert content[0].logprob == content[0].top_logprobs[0].logprob


def test_logprobs_have_the_bytes_of_parts_of_a_character(client, llm):
    """They were those of the mark that stands for what is no character."""
    tokenizer = llm.get_tokenizer()
    first, second = tokenizer.encode("ñ")
    for token_id, byte in ((first, 0xC3), (second, 0xB1)):
        allowed = GREEDY | {"max_tokens": 1, "extra_body": {"allowed_token_ids": [token_id]}}
        answer = client.chat.completions.create(messages=HELLO, logprobs=True, **allowed)
        (entry,) = answer.choices[0].logprobs.content
        assert (entry.token, entry.bytes) == ("\ufffd", [byte])


def test_extensions_of_vllm_reach_the_engine(client, llm):
    options = {"top_k": 1, "min_p": 0.1, "repetition_penalty": 1.0, "ignore_eos": True}
    params = GREEDY | {"temperature": 1.0, "extra_body": options}
    top = client.completions.create(prompt="Once upon", **params)
    assert top.choices[0].text == expected(llm, "Once upon")  # one token is left to choose from
    biased = client.completions.create(
        prompt="Once upon", logit_bias={"65": 100}, presence_penalty=0.0, **GREEDY
    )
    assert len(set(biased.choices[0].text)) == 1
    end = client.completions.create(
        prompt="Once upon",
        **GREEDY | {"extra_body": {"stop_token_ids": list(range(256)), "ignore_eos": True}},
    )
    assert end.usage.completion_tokens == 1


def test_usage_tells_cached_tokens_and_their_tier_and_salts_keep_apart(client):
    prompt = "A prompt of more than one block of tokens."

    def cached(salt):
        usage = client.completions.create(
            prompt=prompt, **GREEDY | {"extra_body": {"cache_salt": salt}}
        ).usage
        details = usage.prompt_tokens_details
        return details.cached_tokens, details.model_extra["cached_tokens_by_tier"]

    none = {"device": 0, "host": 0, "disk": 0, "remote": 0}
    assert cached("a") == (0, none)
    assert cached("a") == (len(prompt) - 1, none | {"device": len(prompt) - 1})
    assert cached("b") == (0, none)


def test_many_clients_at_once_get_their_own_answers(server, llm):
    prompts = [f"{number} times upon" for number in range(6)]
    texts = [expected(llm, prompt) for prompt in prompts]

    async def one(client, prompt):
        stream = await client.completions.create(prompt=prompt, stream=True, **GREEDY)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def main():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEY) as client:
            return await asyncio.gather(*(one(client, prompt) for prompt in prompts))

    assert asyncio.run(main()) == texts


def test_models_health_and_metrics(client, server):
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    assert ask(server, "GET", "/health", Authorization="") == (200, {"status": "ok"})
    status, text = ask(server, "GET", "/metrics")
    assert status == 200
    assert 'kvstore_used_bytes{tier="device"}' in text


@pytest.mark.parametrize("key", ["", "Bearer wrong", KEY, "Basic a secret", "Bearer é"])
@pytest.mark.parametrize("path", ["/v1/models", "/metrics"])
def test_without_the_key_nothing_is_answered(server, key, path):
    status, answer = ask(server, "GET", path, Authorization=key.encode("latin-1"))
    assert (status, answer["error"]["code"]) == (401, "invalid_api_key")


def test_errors_are_those_that_the_client_knows(client, server):
    with pytest.raises(openai.NotFoundError, match="there is no 'gpt' here, only 'tiny'"):
        client.completions.create(prompt="x", **GREEDY | {"model": "gpt"})
    with pytest.raises(openai.BadRequestError, match=r"600 tokens .* takes 511 .* cut 89"):
        client.completions.create(prompt="x" * 600, **GREEDY)
    stranger = client.with_options(api_key="wrong")
    with pytest.raises(openai.AuthenticationError, match="API key"):
        stranger.models.list()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_more_tokens_than_the_context_takes_are_refused_with_how_many_would_do(
    server, llm, stream, name
):
    asked = {"model": MODEL, "stream": stream, "ignore_eos": True, "temperature": 0.0}
    path, prompt, num_prompt = "/v1/completions", {"prompt": ["x", "x" * 400]}, 400
    if name == "max_completion_tokens":
        path, prompt = "/v1/chat/completions", {"messages": HELLO}
        num_prompt = len(llm._llm._reader.read_messages(HELLO))
    room = llm.max_model_len - num_prompt
    status, answer = ask(server, "POST", path, asked | prompt | {name: room + 1})
    error = answer["error"]
    assert (status, error["param"], error["code"]) == (400, name, "context_length_exceeded")
    assert f"{room + 1} tokens behind a prompt of {num_prompt}" in error["message"]
    assert error["message"].endswith(f"ask for at most {room}")
    assert ask(server, "POST", path, asked | prompt | {name: room})[0] == 200


def test_a_prompt_that_is_cut_leaves_its_room_to_the_answer(server, llm):
    body = {"model": MODEL, "prompt": "x" * 9999, "max_tokens": 12, "truncate_prompt_tokens": 500}
    assert ask(server, "POST", "/v1/completions", body)[0] == 200
    status, answer = ask(server, "POST", "/v1/completions", body | {"max_tokens": 13})
    assert (status, answer["error"]["param"]) == (400, "max_tokens")
    no_limit = {name: value for name, value in body.items() if name != "max_tokens"}
    assert ask(server, "POST", "/v1/completions", no_limit)[0] == 200


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"messages": []}, None),
        ({"max_tokens": 0}, "max_tokens"),
        ({"top_p": 2}, "top_p"),
        ({"stop": ""}, "stop"),
        ({"cache_salt": 5}, "cache_salt"),
        ({"presence_penalty": 5}, "presence_penalty"),
        ({"suffix": "end"}, "suffix"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"logit_bias": {"word": 1}}, "logit_bias"),
        ({"logit_bias": {"100000": 1}}, "logit_bias"),
        ({"colour": "red"}, "colour"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream_options": {"include_obfuscation": True}, "stream": True}, "stream_options"),
        ({"messages": None}, "messages"),
        ({"messages": [{"role": "user"}]}, None),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, None),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, None),
        ({"messages": [{"role": "\ud800", "content": "hello"}]}, None),
        ({"bad_words": ["\ud800"]}, None),
        ({"logit_bias": {"\ud800": 1}}, "logit_bias"),
    ],
    ids=str,
)
def test_what_is_wrong_or_not_supported_is_refused_by_name(server, change, param):
    body = {"model": MODEL, "messages": HELLO, "max_tokens": 1} | change
    status, answer = ask(server, "POST", "/v1/chat/completions", body)
    assert (status, answer["error"]["param"]) == (400, param)
    assert answer["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("prompt", ["\ud800", ["\ud800"], [1, -2], [1, 1 << 60]], ids=ascii)
def test_a_prompt_that_is_no_text_or_no_tokens_is_refused_also_where_it_is_echoed(server, prompt):
    for echo in (False, True):
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 1, "echo": echo}
        assert ask(server, "POST", "/v1/completions", body)[0] == 400


@pytest.mark.parametrize(
    ("body", "headers"),
    [("{", {}), ("[]", {}), ('{"model": "tiny"}', {"Content-Type": "text/plain"}), ("", {})],
    ids=str,
)
def test_a_body_that_is_no_json_object_is_refused(server, body, headers):
    status, answer = ask(server, "POST", "/v1/completions", body, **headers)
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize("headers", [{}, {"Authorization": ""}], ids=["with the key", "without"])
def test_a_body_is_read_up_to_a_limit(server, headers, monkeypatch):
    monkeypatch.setattr("engine.server.bodies.MAX_BODY_BYTES", 1000)
    body = {"model": MODEL, "prompt": "x" * 1000}
    status, answer = ask(server, "POST", "/v1/completions", body, **headers)
    assert (status, answer["error"]["type"]) == (413, "invalid_request_error")
    assert ask(server, "POST", "/v1/completions", body | {"prompt": "x", "max_tokens": 1})[0] == 200


def test_what_changes_nothing_is_accepted(server):
    neutral = {
        "presence_penalty": 0.0, "frequency_penalty": None, "logit_bias": {}, "user": "me",
        "tools": [], "tool_choice": "auto", "response_format": {"type": "text"}, "store": False,
        "stream": False, "seed": None, "stop": None,
    }  # fmt: skip
    body = {"model": MODEL, "messages": HELLO, "max_tokens": 1} | neutral
    assert ask(server, "POST", "/v1/chat/completions", body)[0] == 200


def test_an_unknown_path_is_an_error_of_the_same_shape(server):
    status, answer = ask(server, "GET", "/v1/nothing")
    assert (status, answer["error"]["message"]) == (404, "there is no such path")
    assert ask(server, "GET", "/v1/completions")[0] == 405


@pytest.mark.parametrize("is_streamed", [True, False])
def test_a_client_that_goes_away_aborts_its_request(server, llm, hold_first, is_streamed):
    hold_first(llm._llm)
    core = llm._llm._core
    body = {"model": MODEL, "prompt": "Once upon", "max_tokens": 400, "ignore_eos": True}
    payload = json.dumps(body | {"stream": is_streamed}).encode()
    with socket.create_connection(("127.0.0.1", server.listener.port)) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            + f"Authorization: Bearer {KEY}\r\nContent-Length: {len(payload)}\r\n\r\n".encode()
            + payload
        )
        assert core.wait_for(lambda: bool(core.scheduler.running), timeout=60)
        (request,) = core.call(lambda: list(core.roster.requests.values()))
    assert is_idle(llm)
    assert request.result.result(60).outputs[0].finish_reason == "abort"


def test_a_client_that_does_not_read_stops_nobody(server, client, llm, monkeypatch):
    """Its answer waits in a few buffers and then in the engine, which gives its blocks up."""
    monkeypatch.setattr(Stream, "max_unread_tokens", 8)
    core = llm._llm._core
    body = {"model": MODEL, "prompt": "Once upon", "max_tokens": 400, "ignore_eos": True}
    payload = json.dumps(body | {"stream": True, "n": 16, "logprobs": 20}).encode()
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", server.listener.port))
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            + f"Authorization: Bearer {KEY}\r\nContent-Length: {len(payload)}\r\n\r\n".encode()
            + payload
        )
        assert core.wait_for(lambda: len(core.scheduler.paused) == 16, timeout=60)
        (unread,) = core.call(lambda: core.roster.requests.values())
        lengths: list[int] = []
        while len(lengths) < 5 or len(set(lengths[-5:])) > 1:  # until the buffers are full
            assert client.completions.create(prompt="read", **GREEDY).choices
            lengths.append(core.call(lambda: sum(len(s.token_ids) for s in unread.sequences)))
        assert core.wait_for(lambda: len(core.scheduler.paused) == 16, timeout=60)
        assert not unread.is_finished
    assert is_idle(llm)


@pytest.mark.parametrize("is_streamed", [True, False])
def test_a_full_queue_is_told_to_try_again(client, llm, monkeypatch, is_streamed):
    """And not to raise a setting, which is the operator's."""
    backlog = llm._llm._core._backlog
    monkeypatch.setattr(backlog, "_max_num_waiting", 0)
    monkeypatch.setattr(backlog, "_num_free_seats", lambda: 0)
    with pytest.raises(openai.InternalServerError, match="try again later") as raised:
        client.completions.create(prompt="x", stream=is_streamed, **GREEDY)
    assert raised.value.status_code == 503
    assert raised.value.response.headers["retry-after"] == "1"


@pytest.fixture
def few_tokens(llm, monkeypatch):
    """100 tokens for all requests together, 2 prompts at once."""
    limits = {"max_num_seqs": 1, "max_num_waiting": 1, "max_total_tokens": 100}
    monkeypatch.setattr(llm._llm, "config", replace(llm._llm.config, **limits))
    for name in ("max_num_waiting", "max_total_tokens"):
        monkeypatch.setattr(llm._llm._core._backlog, f"_{name}", limits[name])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("change", "param", "would_do"),
    [
        ({"max_tokens": 91}, "max_tokens", {"max_tokens": 90}),
        ({"max_tokens": 46, "n": 2}, "max_tokens", {"max_tokens": 45}),
        ({"prompt": "x" * 103}, None, {"prompt": "x" * (103 - 4)}),
        ({"prompt": ["x"] * 3}, "prompt", {"prompt": ["x"] * 2}),
    ],
    ids=str,
)
def test_what_never_fits_is_refused_for_good_with_what_would_do(
    server, few_tokens, change, param, would_do, stream
):
    """It was told to try again later."""
    body = {"model": MODEL, "prompt": "x" * 10, "stream": stream} | change
    status, answer = ask(server, "POST", "/v1/completions", body)
    assert (status, answer["error"]["param"]) == (400, param)
    (number,) = [each if isinstance(each, int) else len(each) for each in would_do.values()]
    cut = len(body["prompt"]) - number if param is None else number
    assert re.search(
        rf"(ask for at most|send at most|cut at least) {cut}$", answer["error"]["message"]
    )
    assert ask(server, "POST", "/v1/completions", body | would_do)[0] == 200


def test_without_a_limit_an_answer_takes_what_the_server_leaves(client, few_tokens):
    never_ends = {"model": MODEL, "extra_body": {"ignore_eos": True}}
    chat = client.chat.completions.create(messages=HELLO, **never_ends)
    assert chat.usage.total_tokens == 100
    completion = client.completions.create(prompt="x" * 90, **never_ends)
    assert completion.usage.completion_tokens == 10


def test_a_failed_step_is_500_and_the_next_request_is_served(server, client, llm, monkeypatch):
    def fail(steps):
        raise RuntimeError("a secret of the server")

    monkeypatch.setattr(llm._llm._core.runner, "execute", fail)
    with pytest.raises(openai.InternalServerError) as raised:
        client.completions.create(prompt="x", **GREEDY)
    assert "a secret" not in str(raised.value)
    with pytest.raises(openai.APIError, match="the request failed"):
        list(client.completions.create(prompt="x", stream=True, **GREEDY))
    monkeypatch.undo()
    assert client.completions.create(prompt="x", **GREEDY).choices


def test_an_engine_that_has_ended_is_unhealthy(text_model):
    llm = AsyncLLM(text_model, dtype="float32", device_cache="8MiB")
    server = Running(llm)
    try:
        assert ask(server, "GET", "/health")[0] == 200
        llm._llm.close()
        assert ask(server, "GET", "/health")[0] == 503
        body = {"model": MODEL, "prompt": "x"}
        assert ask(server, "POST", "/v1/completions", body)[0] == 503
    finally:
        server.close()


def test_a_port_that_is_taken_is_refused_in_one_line():
    first = Listener("127.0.0.1", 0)
    first.socket.listen()
    with pytest.raises(ConfigError, match=f"port {first.port}: Address already in use"):
        Listener("127.0.0.1", first.port)
    first.close()
    with pytest.raises(ConfigError, match=r"cannot listen on no\.such\.host"):
        Listener("no.such.host", 0)


def test_blocking_clients_in_threads_are_batched(client, llm):
    texts = [expected(llm, prompt) for prompt in "abc"]
    with ThreadPoolExecutor(3) as pool:
        answers = pool.map(lambda p: client.completions.create(prompt=p, **GREEDY), "abc")
        assert [answer.choices[0].text for answer in answers] == texts
