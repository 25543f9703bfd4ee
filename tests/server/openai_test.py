#!/usr/bin/env python3
"""The `openai` client (PyPI) against the server: chat, streams, stop, logprobs, errors, cancellation, keys.

    tests/server/openai_test.py PROGRAM MODEL

Exit code 77 (skipped) where the client is not installed: python3 -m venv V && V/bin/pip install openai, then run this
with V/bin/python.
"""

import sys
import time

from clients import Server

try:
    import openai
except ImportError:
    print("skipped: the Python package openai is not installed")
    sys.exit(77)

MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]


def check(good, what):
    if not good:
        raise AssertionError(what)


def refused(call, error, part):
    try:
        call()
    except error as caught:
        check(part in str(caught), f"{part!r} is not in {caught}")
        return
    raise AssertionError(f"nothing was refused; expected {error.__name__} with {part!r}")


def chat(client, model):
    ask = client.chat.completions.create
    answer = ask(model=model, messages=MESSAGES, temperature=0, max_tokens=24, logprobs=True, top_logprobs=2)
    text = answer.choices[0].message.content
    check(answer.choices[0].finish_reason in ("stop", "length"), "finish_reason")
    check(answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens, "usage")
    check(len(answer.choices[0].logprobs.content) == answer.usage.completion_tokens, "a log-probability per token")
    stream = ask(model=model, messages=MESSAGES, temperature=0, max_tokens=24, stream=True,
                 stream_options={"include_usage": True})
    parts, usage = [], None
    for part in stream:
        usage = part.usage or usage
        parts += [choice.delta.content or "" for choice in part.choices]
    check("".join(parts) == text, f"the stream says {parts}, the answer {text!r}")
    check(usage.completion_tokens == answer.usage.completion_tokens, "the stream's usage")
    if len(text) > 6:
        stop = text[3:6]
        check(ask(model=model, messages=MESSAGES, temperature=0, max_tokens=24, stop=[stop]).choices[0].message.content
              == text[:text.index(stop)], "stop")
    twice = [ask(model=model, messages=MESSAGES, seed=7, max_tokens=16).choices[0].message.content for _ in range(2)]
    check(twice[0] == twice[1], "the same seed gives the same text")
    check(client.models.list().data[0].id == model, "models")
    text = client.completions.create(model=model, prompt="Once upon", max_tokens=5, temperature=0, logprobs=1)
    check(len(text.choices[0].logprobs.token_logprobs) == text.usage.completion_tokens, "completions")


def extras(client, model, server):
    document = " ".join(f"Item {i} costs {i * 7 % 100} coins." for i in range(80))
    messages = [{"role": "system", "content": document}, *MESSAGES]
    answers = [client.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=8,
                                              extra_body={"kv_ratio": 2}) for _ in range(2)]
    check(answers[0].choices[0].message.content == answers[1].choices[0].message.content, "cold and warm")
    check(answers[1].usage.prompt_tokens_details.cached_tokens > 100, "the prefix is found")
    check(answers[1].kv["ratio"] > 1.2, f"compressed: {answers[1].kv}")
    _, context = server.request("POST", "/v1/contexts", {"text": document, "kv_ratio": 2})
    answer = client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=8,
                                            extra_body={"context": context["id"]})
    check(answer.usage.prompt_tokens_details.cached_tokens == context["tokens"], "a context")


def errors(client, model):
    ask = client.chat.completions.create
    refused(lambda: ask(model=model, messages=MESSAGES, temperature=-1), openai.BadRequestError, "temperature is -1")
    refused(lambda: ask(model=model, messages=[]), openai.BadRequestError, "messages")
    refused(lambda: ask(model=model, messages=MESSAGES, n=2), openai.BadRequestError, "n is 2")
    refused(lambda: client.embeddings.create(model=model, input="x"), openai.InternalServerError, "/v1/embeddings")
    refused(lambda: ask(model=model, messages=MESSAGES, extra_body={"context": "0" * 32}), openai.NotFoundError,
            "no context")


def cancellation(client, model, server):
    before = server.metric("anchorkv:decode_steps_total")
    stream = client.chat.completions.create(model=model, messages=MESSAGES, temperature=1.5, max_tokens=1500,
                                            stream=True)
    for _ in zip(range(3), stream):
        pass
    stream.close()
    for _ in range(100):
        if server.metric("vllm:num_requests_running") == 0:
            break
        time.sleep(0.1)
    check(server.metric("vllm:num_requests_running") == 0, "the request goes on without its client")
    check(server.metric("anchorkv:decode_steps_total") - before < 1500, "it was finished instead of cancelled")
    impatient = client.with_options(timeout=0.01, max_retries=0)
    try:
        impatient.chat.completions.create(model=model, messages=MESSAGES, max_tokens=1500, temperature=1.5)
    except openai.APITimeoutError:
        pass


def main():
    program, path = sys.argv[1:3]
    with Server(program, path, "--kv-min-tokens", "64", "-c", "2048", "--api-key", "") as server:
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0)
        model = client.models.list().data[0].id
        chat(client, model)
        extras(client, model, server)
        errors(client, model)
        cancellation(client, model, server)
        check(server.stop() == 0, "exit code")
    with Server(program, path, "--api-key", "secret") as server:
        base = f"http://127.0.0.1:{server.port}/v1"
        refused(lambda: openai.OpenAI(base_url=base, api_key="x", max_retries=0).models.list(),
                openai.AuthenticationError, "key")
        check(openai.OpenAI(base_url=base, api_key="secret").models.list().data, "the key is taken")
    print("openai", openai.__version__, "passed")


if __name__ == "__main__":
    main()
