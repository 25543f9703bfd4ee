#!/usr/bin/env python3
"""Two servers share one Redis: what one has read, the other answers from, with the same text and without a prefill; when
Redis goes, both go on. Exit code 77 (skipped) where there is no redis-server.

    tests/server/shared_test.py PROGRAM MODEL
"""

import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

from clients import Server


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def ask(server, **fields):
    body = {"messages": [{"role": "user", "content": "What is it?"}], "temperature": 0, "max_tokens": 12, **fields}
    status, answer = server.request("POST", "/v1/chat/completions", body)
    assert status == 200, answer
    return answer["choices"][0]["message"]["content"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def main():
    program, model = sys.argv[1:3]
    if shutil.which("redis-server") is None:
        print("skipped: there is no redis-server")
        sys.exit(77)
    port = free_port()
    redis = subprocess.Popen(["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", ""],
                             stdout=subprocess.DEVNULL)
    try:
        for _ in range(100):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        more = ["--kv-min-tokens", "64", "-t", "1", "--kv-redis", f"127.0.0.1:{port}"]
        document = " ".join(f"Item {i} costs {i * 7 % 100} coins." for i in range(100))
        with Server(program, model, *more) as one, Server(program, model, *more) as two:
            _, context = one.request("POST", "/v1/contexts", {"text": document, "name": "prices", "kv_ratio": 2})
            text, _ = ask(one, context=context["id"])
            for _ in range(100):  # it is on its way
                if two.request("GET", "/v1/contexts/" + context["id"])[0] == 200:
                    break
                time.sleep(0.1)
            assert ask(two, context=context["id"]) == (text, context["tokens"])
            messages = [{"role": "system", "content": document}, {"role": "user", "content": "What is it?"}]
            text, cached = ask(one, messages=messages, kv_ratio=2)
            assert cached == 0
            for _ in range(100):
                if len(two.request("GET", "/v1/contexts")[1]["data"]) == 2:
                    break
                time.sleep(0.1)
            again, cached = ask(two, messages=messages, kv_ratio=2)
            assert again == text and cached > 64, (text, again, cached)
            # A Redis that hangs: whoever asks it first waits for its time limit, the next ones do not.
            redis.send_signal(signal.SIGSTOP)
            messages[0]["content"] += " And more."
            start = time.monotonic()
            assert ask(one, messages=messages, kv_ratio=2)[1] == 0
            waited = time.monotonic() - start
            assert waited < 20, waited
            for question in ("Why?", "Where?"):
                start = time.monotonic()
                messages[1]["content"] = question
                assert ask(one, messages=messages, kv_ratio=2)[1] > 64
                assert time.monotonic() - start < 5
            # One that goes while a request is waiting for it.
            messages[0]["content"] += " And still more."
            killer = threading.Timer(1, redis.kill)
            killer.start()
            assert ask(two, messages=messages, kv_ratio=2)[1] == 0
            killer.join()
            redis.wait()
            messages[0]["content"] += " And the last."
            for server in (one, two):
                assert ask(server, messages=messages, kv_ratio=2)[1] == 0
                assert ask(server, messages=messages, kv_ratio=2)[1] > 64
                assert server.messages().count("contexts are not shared for now") == 1, server.messages()
                assert "can be used again" not in server.messages(), server.messages()
    finally:
        redis.kill()
        redis.wait()
    print("the servers share")


if __name__ == "__main__":
    main()
