#!/usr/bin/env python3
"""Many clients at once, well-behaved and not: every answer belongs to the request that asked for it, nothing breaks,
and the memory comes back.

    tests/server/load_test.py PROGRAM MODEL [--seconds N] [--clients N] [--facts]

Each client has a prompt of its own whose answer was recorded while nobody else asked (greedy, one sequence per step of
the model, so that answers do not depend on what else is computed). Under load every complete answer must be that text,
to the letter. With --facts (a model that can read) the prompt holds a number of the client's own, the steps of the model
are batched, and an answer must have the client's number and nobody else's. In between: requests that are cancelled in
the prompt and in the answer, bodies that are too large, no JSON, sockets that die, half a request.
"""

import argparse
import json
import random
import socket
import sys
import threading
import time

from clients import Server

REFUSALS = {429, 503}


class Client:
    """One of the clients, with its prompt and what must come back."""

    def __init__(self, number, facts):
        self.random = random.Random(number)
        self.number = number
        words = " ".join("".join(self.random.choices("abcdefghijklmnop", k=self.random.randint(1, 6)))
                         for _ in range(self.random.randint(20, 160)))
        self.fact = str(1000000 + 27644 * number + 437)
        if facts:
            city = ["Lisbon", "Oslo", "Lima", "Cairo", "Milan", "Vienna", "Dublin", "Quito"][number % 8]
            system = f"The special magic number for {city} is {self.fact}. Remember it."
            question = f"What is the special magic number for {city}?"
        else:
            system, question = words, f"question {number}"
        self.body = {"messages": [{"role": "system", "content": system}, {"role": "user", "content": question}],
                     "temperature": 0, "max_tokens": 24, "kv_ratio": 2 if number % 3 == 0 and not facts else 1}
        self.expected = None
        self.done = {"answers": 0, "refused": 0, "wrong": [], "errors": []}

    def raw(self, server, data, wait):
        """Sends bytes, waits, and closes the socket hard."""
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
            connection.sendall(data)
            time.sleep(wait)
            linger = b"\x01\x00\x00\x00\x00\x00\x00\x00"
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)

    def request_bytes(self, body, length=None):
        data = json.dumps(body).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {length or len(data)}\r\n\r\n"
        return head.encode() + data

    def ask(self, server):
        status, answer = server.request("POST", "/v1/chat/completions", self.body)
        if status in REFUSALS:
            if not answer["error"]["message"]:
                self.done["errors"].append("a refusal without a reason")
            self.done["refused"] += 1
            time.sleep(0.02)
            return None
        if status != 200:
            self.done["errors"].append(f"{status}: {answer}")
            return None
        return answer["choices"][0]["message"]["content"]

    def once(self, server, others, facts):
        kind = self.random.random()
        if kind < 0.5:
            text = self.ask(server)
            if text is None:
                return
            self.done["answers"] += 1
            wrong = text != self.expected
            if facts:
                wrong = self.fact not in text or any(other.fact in text for other in others if other is not self)
            if wrong:
                self.done["wrong"].append((self.number, self.expected, text))
        elif kind < 0.6:
            self.raw(server, self.request_bytes({**self.body, "stream": True}), self.random.random() * 0.2)
        elif kind < 0.7:
            self.raw(server, self.request_bytes(self.body), self.random.random() * 0.05)
        elif kind < 0.8:
            status, _ = server.request("POST", "/v1/chat/completions", self.random.choice(["{", "[1", "", "\0", "{}"]))
            self.expect(status == 400, f"no JSON gives {status}")
        elif kind < 0.9:
            try:
                status, _ = server.request("POST", "/v1/chat/completions", b" " * (1 << 20))
                self.expect(status == 413, f"a large body gives {status}")
            except OSError:
                pass  # the server answers and closes before everything is sent
        else:
            self.raw(server, self.request_bytes(self.body, length=100000), self.random.random() * 0.05)

    def expect(self, good, what):
        if not good:
            self.done["errors"].append(what)

    def run(self, server, end, others, facts):
        while time.monotonic() < end:
            try:
                self.once(server, others, facts)
            except Exception as error:  # noqa: BLE001 (whatever it is, it is to be reported)
                self.done["errors"].append(repr(error))


def load(server, clients, seconds, facts):
    end = time.monotonic() + seconds
    threads = [threading.Thread(target=client.run, args=(server, end, clients, facts)) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for _ in range(600):
        if server.metric("vllm:num_requests_running") == 0 and server.metric("vllm:num_requests_waiting") == 0:
            return True
        time.sleep(0.1)
    return False


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("model")
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--facts", action="store_true")
    args = parser.parse_args()
    more = ["--kv-min-tokens", "64", "--max-body", "64K", "--parallel", "4", "--queue", "16", "--kv-pool-bytes", "8M"]
    more += ["-c", "2048"] if args.facts else ["-t", "1", "--decode-batch", "1"]
    failures = []
    with Server(args.program, args.model, *more) as server:
        clients = [Client(number, args.facts) for number in range(args.clients)]
        for client in clients:
            client.expected = client.ask(server)
            if client.expected is None:
                failures.append(f"client {client.number} gets no answer alone: {client.done}")
        if args.facts:
            clients = [client for client in clients if client.expected and client.fact in client.expected]
        # What is allocated once (threads, graphs, the pool) is there after a first round.
        load(server, clients, max(3, args.seconds / 4), args.facts)
        before = server.resident_bytes()
        quiet = load(server, clients, args.seconds, args.facts)
        after = server.resident_bytes()
        alive = server.request("GET", "/health")[0] == 200
        code = server.stop()
    total = sum(client.done["answers"] for client in clients)
    wrong = [entry for client in clients for entry in client.done["wrong"]]
    errors = [error for client in clients for error in client.done["errors"]]
    refused = sum(client.done["refused"] for client in clients)
    print(f"{len(clients)} clients, {args.seconds:g} s: {total} answers, {refused} refused, {len(wrong)} wrong, "
          f"{len(errors)} errors; resident {before / 2**20:.1f} -> {after / 2**20:.1f} MiB; exit code {code}")
    failures += [f"wrong: {entry}" for entry in wrong[:3]] + errors[:5]
    if not alive or not quiet or code != 0:
        failures.append(f"alive {alive}, quiet {quiet}, exit code {code}")
    if total < len(clients):
        failures.append("too few answers to say anything")
    if after > max(before * 1.05, before + (4 << 20)):  # a tiny model leaves a tiny process: pages of the allocator count
        failures.append("the memory did not come back")
    if args.facts and len(clients) < 8:
        failures.append(f"only {len(clients)} clients get their number back alone")
    print("\n".join(failures))
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
