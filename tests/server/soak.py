#!/usr/bin/env python3
"""A server under a steady load for a long time: every answer is checked, and memory stays flat.

    tests/server/soak.py PROGRAM MODEL [--minutes N] [--rate R] [--growth SHARE]

R requests per second go out at fixed moments, whatever the server does meanwhile: conversations (some streamed, some
compressed), questions about uploaded documents, uploads that are deleted again, bodies that are refused. Each greedy
answer must be the one that the same request got before the load began. The resident memory of the second tenth of the
time is compared with that of the last tenth: growth by more than SHARE (5%) is a failure.
"""

import argparse
import concurrent.futures
import json
import random
import statistics
import sys
import tempfile
import time

from clients import Server

KINDS = 24  # different requests


def words(number, count):
    pick = random.Random(number)
    return " ".join("".join(pick.choices("abcdefghijklmnop", k=pick.randint(1, 6))) for _ in range(count))


def body(number):
    return {"messages": [{"role": "system", "content": words(number, 20 + 8 * (number % 12))},
                         {"role": "user", "content": f"question {number}"}],
            "temperature": 0, "max_tokens": 16, "kv_ratio": 2 if number % 3 == 0 else 1}


def answer(server, number, streamed):
    request = dict(body(number), stream=streamed)
    status, reply = server.request("POST", "/v1/chat/completions", request)
    if status != 200:
        return f"status {status}: {reply}"
    if not streamed:
        return reply["choices"][0]["message"]["content"]
    text = reply if isinstance(reply, str) else json.dumps(reply)
    parts = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    return "".join(part["choices"][0]["delta"].get("content") or "" for part in parts if part["choices"])


def keep_and_forget(server, number):
    """Uploads a document, asks it, deletes it; what went wrong, or nothing."""
    status, kept = server.request("POST", "/v1/contexts", {"text": words(1000 + number, 120), "kv_ratio": 2})
    if status not in (200, 201):
        return f"upload: {status} {kept}"
    question = {"messages": [{"role": "user", "content": "what?"}], "context": kept["id"], "temperature": 0,
                "max_tokens": 8}
    status, reply = server.request("POST", "/v1/chat/completions", question)
    if status != 200:
        return f"question to an upload: {status} {reply}"
    status, reply = server.request("DELETE", "/v1/contexts/" + kept["id"])
    return None if status in (200, 204, 404) else f"delete: {status} {reply}"  # 404: another copy of it was deleted


def one(server, count, expected):
    if count % 20 == 7:
        return keep_and_forget(server, count)  # each document once: the pool has to forget
    if count % 20 == 13:
        status, reply = server.request("POST", "/v1/chat/completions", b'{"messages": [}')
        return None if status == 400 else f"a damaged body: {status} {reply}"
    number = count % KINDS
    got = answer(server, number, streamed=count % 2 == 1)
    return None if got == expected[number] else f"request {number} (number {count}): {got!r}, not {expected[number]!r}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("model")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--rate", type=float, default=4)
    parser.add_argument("--growth", type=float, default=0.05)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, \
            Server(arguments.program, arguments.model, "--kv-min-tokens", "64", "--kv-dir", folder, "--parallel", "4",
                   "--decode-batch", "1", "--kv-pool-bytes", "4M", "--threads", "1") as server:
        expected = [answer(server, number, streamed=False) for number in range(KINDS)]
        wrong, memory = [], []
        start, seconds = time.monotonic(), 60 * arguments.minutes
        total = int(seconds * arguments.rate)
        late = 0.0
        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            pending = set()
            for count in range(total):
                due = start + count / arguments.rate
                time.sleep(max(0.0, due - time.monotonic()))
                late = max(late, time.monotonic() - due)
                pending.add(pool.submit(one, server, count, expected))
                done = {future for future in pending if future.done()}
                wrong += [future.result() for future in done if future.result() is not None]
                pending -= done
                memory.append((count / total, server.resident_bytes()))
                if count % max(1, total // 20) == 0:
                    print(f"{(time.monotonic() - start) / 60:6.1f} min  {count} requests  {len(pending)} waiting  "
                          f"{memory[-1][1] / 2**20:.1f} MiB  {len(wrong)} wrong", flush=True)
            wrong += [result for result in (future.result() for future in pending) if result is not None]
        early = statistics.median(size for share, size in memory if 0.1 <= share < 0.2)
        final = statistics.median(size for share, size in memory if share >= 0.9)
        growth = final / early - 1
        code = server.stop()
        print(f"{total} requests in {arguments.minutes:g} minutes ({arguments.rate:g}/s, at most {late:.1f} s late), "
              f"{len(wrong)} wrong; {early / 2**20:.1f} MiB, then {final / 2**20:.1f} MiB ({100 * growth:+.1f}%); "
              f"exit code {code}")
        for line in wrong[:10]:
            print(line)
        sys.exit(1 if wrong or growth > arguments.growth or code != 0 else 0)


if __name__ == "__main__":
    main()
