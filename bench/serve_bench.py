#!/usr/bin/env python3
"""Times `anchorkv serve`: answers at a time with batched steps and with steps of their own, and the time to the first
token of a document that is read, found in memory and found in a folder by another server.

    bench/serve_bench.py PROGRAM MODEL DOCUMENT [--ratio 4] [--rounds 5] [--tokens 64]

The two kinds of steps take turns in one run; the table has medians over the rounds. Every answer is checked for its
length, and the ones from the cache against the one that was read.
"""

import argparse
import pathlib
import statistics
import sys
import tempfile
import threading
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "tests" / "server"))
from clients import Server  # noqa: E402 (the path comes first)


def together(server, count, tokens, document, ratio):
    """Tokens per second of `count` answers at once."""
    answers = [None] * count

    def ask(number):
        body = {"messages": [{"role": "system", "content": document},
                             {"role": "user", "content": f"Tell me about {number}, and go on."}],
                "temperature": 1.5, "top_k": 0, "top_p": 1, "min_p": 0, "seed": number, "max_tokens": tokens,
                "kv_ratio": ratio}
        answers[number] = server.request("POST", "/v1/chat/completions", body)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(count)]
    start = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.monotonic() - start
    made = sum(answer["usage"]["completion_tokens"] for _, answer in answers)
    assert made > count * tokens / 4, [answer for _, answer in answers]
    return made / seconds


def first_token(server, document, ratio):
    body = {"messages": [{"role": "system", "content": document}, {"role": "user", "content": "What is it about?"}],
            "temperature": 0, "max_tokens": 1, "kv_ratio": ratio}
    start = time.monotonic()
    _, answer = server.request("POST", "/v1/chat/completions", body)
    return time.monotonic() - start, answer["usage"], answer["choices"][0]["message"]["content"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("model")
    parser.add_argument("document", type=pathlib.Path)
    parser.add_argument("--ratio", type=float, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args()
    document = args.document.read_text(encoding="utf-8")
    with Server(args.program, args.model, "--parallel", "8") as batched, \
            Server(args.program, args.model, "--parallel", "8", "--decode-batch", "1") as single:
        for server in (batched, single):
            together(server, 1, 8, document, args.ratio)
        print("| answers at a time | one step for all, t/s | a step for each, t/s | |\n|---|---|---|---|")
        for count in (1, 2, 4, 8):
            speeds = [[together(server, count, args.tokens, document, args.ratio) for server in (batched, single)]
                      for _ in range(args.rounds)]
            both = [statistics.median(column) for column in zip(*speeds)]
            ratio = statistics.median(a / b for a, b in speeds)
            print(f"| {count} | {both[0]:.0f} | {both[1]:.0f} | {ratio:.2f}x |", flush=True)
    times = {"read": [], "found in memory": [], "found in a folder by a new server": []}
    for _ in range(args.rounds):
        with tempfile.TemporaryDirectory() as folder:
            for kinds in (("read", "found in memory"), ("found in a folder by a new server",)):
                with Server(args.program, args.model, "--kv-dir", folder) as server:
                    for kind in kinds:
                        seconds, usage, text = first_token(server, document, args.ratio)
                        expected = text if kind == "read" else expected
                        assert text == expected and (kind == "read") == (
                            usage["prompt_tokens_details"]["cached_tokens"] == 0), (kind, usage, text)
                        times[kind].append(seconds)
                    server.stop()
    print(f"\nTo the first token, {usage['prompt_tokens']} tokens:")
    for kind, seconds in times.items():
        print(f"- {kind}: {statistics.median(seconds):.3f} s")


if __name__ == "__main__":
    main()
