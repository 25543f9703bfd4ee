#!/usr/bin/env python3
"""Everything that a request can grow has a limit, and nothing in a request gets out of its place: sizes, counts, nesting,
names of contexts, headers, connections. With --slow, bodies that come a byte at a time and answers that nobody reads, too
(two minutes).

    tests/server/limits_test.py PROGRAM MODEL [--slow]
"""

import json
import os
import pathlib
import re
import socket
import sys
import tempfile
import threading
import time

from clients import Server

CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}


def raw(server, data, timeout=10):
    """(status or None, headers, body) of bytes sent as they are."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=timeout) as connection:
        answer = b""
        try:
            connection.sendall(data)
            while part := connection.recv(65536):
                answer += part
        except (ConnectionError, TimeoutError):
            pass
    head, _, body = answer.partition(b"\r\n\r\n")
    found = re.match(rb"HTTP/1.1 (\d+)", head)
    return int(found.group(1)) if found else None, head.decode("latin-1"), body.decode("utf-8", "replace")


def get(path):
    return f"GET {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n".encode("latin-1")


def alive(server):
    return server.request("GET", "/health")[0] == 200 and server.request("POST", CHAT, HELLO)[0] == 200


def check_bodies(server):
    refused = [
        ({**HELLO, "n": 2}, "n is 2"),
        ({**HELLO, "logit_bias": {"1": 5}}, "logit_bias"),
        ({**HELLO, "stop": ["x"] * 17}, "at most 16"),
        ({**HELLO, "stop": "x" * 513}, "1 to 512 bytes"),
        ({**HELLO, "messages": HELLO["messages"] * 4097}, "4096 messages"),
        ({**HELLO, "top_logprobs": 21, "logprobs": True}, "20"),
        ({**HELLO, "max_tokens": 1 << 40}, "max_tokens"),
        ({**HELLO, "repeat_last_n": 1 << 40}, "repeat_last_n"),
        ({**HELLO, "kv_ratio": 1e300}, "kv_ratio"),
        ({**HELLO, "messages": [{"role": "user", "content": "word " * 60000}]}, "context"),
    ]
    for body, part in refused:
        status, answer = server.request("POST", CHAT, body)
        assert status == 400 and part in answer["error"]["message"], (part, status, answer)
        assert len(answer["error"]["message"]) < 1000
    for text, part in (("[" * 200000 + "]" * 200000, "deeper"), ('{"a":' * 200000 + "1" + "}" * 200000, "deeper"),
                       ("[" * 200000, "not JSON"),
                       ('{"x": [' + "0," * (2 << 20) + "0]}", "JSON values"),
                       (json.dumps({"prompt": [1] * 100000}), "context")):
        path = "/v1/completions" if "prompt" in text else CHAT
        status, answer = server.request("POST", path, text.encode())
        assert status == 400 and part in answer["error"]["message"], (part, status, answer)
    status, answer = server.request("POST", "/v1/contexts", {"text": "word " * 100, "name": "n" * 256})
    assert status == 400 and "255 bytes" in answer["error"]["message"], answer
    status, answer = server.request("POST", "/v1/contexts", b"x", content_type="multipart/form-data; boundary=x")
    assert status == 415, answer
    # Many stops and the longest ones, which the text begins with again and again.
    stops = ["a" * 511 + chr(ord("b") + i) for i in range(16)]
    status, answer = server.request("POST", CHAT, {**HELLO, "stop": stops, "max_tokens": 50})
    assert status == 200, answer
    assert alive(server)


def check_heads(server):
    head = "GET /health HTTP/1.1\r\nHost: a\r\n"
    for data in (head + "X: " + "y" * 100000 + "\r\n\r\n", head + "".join(f"X{i}: y\r\n" for i in range(500)) + "\r\n",
                 f"GET /{'y' * 20000} HTTP/1.1\r\n\r\n", "GET\r\n\r\n", "\r\n" * 1000, "\0" * 1000,
                 head + "Content-Length: -1\r\n\r\n", head + "Content-Length: 99999999999999999999999\r\n\r\n",
                 f"POST {CHAT} HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
                 f"POST {CHAT} HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\nx",
                 f"POST {CHAT} HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\nx"):
        status, _, _ = raw(server, data.encode("latin-1") + b"", timeout=3)
        assert status is None or status >= 400 or "Content-Length" in data, (data[:60], status)
    # The body of a request that cannot be read is not the next request.
    for first in (f"QUERY /nowhere HTTP/1.1\r\nHost: a\r\nContent-Length: {len(head) + 2}\r\n\r\n",
                  f"GET /nowhere HTTP/1.1\r\nHost : a\r\nContent-Length: {len(head) + 2}\r\n\r\n",
                  f"GET  /nowhere HTTP/1.1\r\nHost: a\r\nContent-Length: {len(head) + 2}\r\n\r\n"):
        status, _, body = raw(server, (first + head + "\r\n").encode("latin-1"), timeout=3)
        assert status in (400, 404, 405) and '"ok"' not in body, (first, status, body)
    # A body that ends too soon.
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: a\r\nContent-Length: 500\r\n\r\n{{".encode())
    assert alive(server)


def check_names(server, folder):
    secret = folder.parent / ("0" * 32 + ".akv")
    secret.write_text("not for everyone", encoding="utf-8")
    for name in ("../" + "0" * 32, "..%2f" + "0" * 32, "%2e%2e/" + "0" * 32, "..\\" + "0" * 32, "/etc/passwd",
                 "%2fetc%2fpasswd", "....//....//etc/passwd", "0" * 31 + "/", "%00", "0" * 32 + "%00.akv", "A" * 32):
        for method in ("GET", "DELETE"):
            for tail in ("", "/file"):
                status, _, body = raw(server, get(f"/v1/contexts/{name}{tail}").replace(b"GET", method.encode(), 1))
                assert status in (400, 404, 405), (name, status, body)
                assert "not for everyone" not in body and "root:" not in body
    assert secret.exists()
    for path in ("/../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "//etc/passwd", "/page.html/../x"):
        assert raw(server, get(path))[0] in (400, 404), path
    # Line ends in names and paths stay text.
    evil = "a\r\nSet-Cookie: evil=1\r\n\r\nHTTP/1.1 200 OK"
    status, made = server.request("POST", "/v1/contexts", {"text": "word " * 100, "name": evil, "kv_ratio": 2})
    assert status == 200, made
    for path in (f"/v1/contexts/{made['id']}", f"/v1/contexts/{made['id']}/file", "/v1/contexts",
                 "/x%0d%0aSet-Cookie:%20evil=1", "/v1/contexts/x%0d%0aSet-Cookie:%20evil=1"):
        _, head, _ = raw(server, get(path))
        assert "evil" not in head, head
    assert [line for line in server.messages().splitlines() if line.startswith("Set-Cookie")] == []
    assert all(re.fullmatch(r"[0-9a-f]{32}\.akv(\.\w{6}\.part)?", name) for name in os.listdir(folder))
    assert alive(server)


def drip(server, head, seconds, answers):
    """Sends a head, then a byte every half second; what came back and after how long."""
    begin = time.monotonic()
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as connection:
        answer = b""
        try:
            connection.sendall(head)
            connection.settimeout(0.5)
            while time.monotonic() - begin < seconds:
                try:
                    part = connection.recv(4096)
                    answer += part
                    if not part:
                        break
                except TimeoutError:
                    connection.sendall(b" ")
        except ConnectionError:
            pass
    answers.append((time.monotonic() - begin, answer))


def ends(connection, data=b"", seconds=90):
    """Sends a byte of the data now and then, over and over; whether the server ends the connection in time."""
    begin, at = time.monotonic(), 0
    connection.settimeout(0.2)
    while time.monotonic() - begin < seconds:
        try:
            if not connection.recv(4096):
                return True
        except TimeoutError:
            pass
        except ConnectionError:
            return True
        if data:
            try:
                connection.sendall(data[at % len(data):][:1])
                at += 1
            except ConnectionError:
                return True
    return False


def check_connections(program, model):
    """Clients that say nothing, or say it slowly, do not keep others out, and are sent away."""
    with Server(program, model, "-t", "1", "--threads-http", "4", "--timeout", "3") as server:
        posts = [f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Length: 100000\r\n\r\n".encode()
                 for path in (CHAT, "/nowhere", "/completion", "/health", "/v1/contexts/x")]
        heads = [b""] * 40 + [b"G", b"GET /health HTTP/1.1\r\nX: "] * 5 + posts * 2
        connections = []
        for head in heads:
            connection = socket.create_connection(("127.0.0.1", server.port))
            connection.sendall(head)
            connections.append((connection, b"" if not head else b"a"))
        assert alive(server), "idle and slow clients keep the others out"
        results = []
        threads = [threading.Thread(target=lambda c=c, d=d: results.append(ends(c, d))) for c, d in connections]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(results) == len(heads) and all(results), results
        assert alive(server)
        assert server.stop() == 0


def check_address(program, model):
    """Loopback unless told otherwise; a warning where others may come in without a key."""
    def warns(*more):
        with Server(program, model, *more) as server:
            return re.search(r"listening on http://([\d.]+):", server.messages()).group(1), "warning" in server.messages()
    assert warns() == ("127.0.0.1", False)
    assert warns("--host", "0.0.0.0") == ("0.0.0.0", True)
    assert warns("--host", "0.0.0.0", "--api-key", "a") == ("0.0.0.0", False)


def check_unread(program, model):
    """Answers that are not read are given up. Many are asked for at once: the first ones fit into the buffers between."""
    with Server(program, model, "-t", "1", "--kv-min-tokens", "64", "--timeout", "1") as server:
        status, made = server.request("POST", "/v1/contexts", {"text": "word " * 800, "kv_ratio": 8})
        assert status == 200, made
        path, count = f"/v1/contexts/{made['id']}/file", 200
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(("127.0.0.1", server.port))
            connection.sendall(f"GET {path} HTTP/1.1\r\nHost: a\r\n\r\n".encode() * count)
            time.sleep(20)
            connection.settimeout(5)
            got = 0
            try:
                while part := connection.recv(65536):
                    got += len(part)
            except ConnectionError:
                pass
        assert 0 < got < count * made["kv"]["resident_bytes"], (got, made)
        assert alive(server)


def check_slow(server):
    answers = []
    body = f"POST {CHAT} HTTP/1.1\r\nHost: a\r\nContent-Length: 100000\r\n\r\n{{".encode()
    heads = [body] * 30 + [b"GET /health HTTP/1.1\r\nX: "] * 10
    threads = [threading.Thread(target=drip, args=(server, head, 45, answers)) for head in heads]
    for thread in threads:
        thread.start()
    time.sleep(2)
    assert alive(server), "slow clients keep the others out"
    for thread in threads:
        thread.join()
    ended = [(after, answer) for after, answer in answers if b"408" in answer.split(b"\r\n")[0]]
    assert len(ended) == 30, answers
    assert all(25 < after < 45 and b"body_too_slow" in answer for after, answer in ended), ended
    assert alive(server)


def main():
    program, model = sys.argv[1:3]
    with tempfile.TemporaryDirectory() as place:
        folder = pathlib.Path(place) / "contexts"
        folder.mkdir()
        more = ["-t", "1", "--kv-min-tokens", "64", "--kv-dir", str(folder), "-v"]
        with Server(program, model, *more) as server:
            if "--slow" in sys.argv:
                check_slow(server)
            else:
                check_bodies(server)
                check_heads(server)
                check_names(server, folder)
            assert server.stop() == 0
    if "--slow" in sys.argv:
        check_unread(program, model)
    else:
        check_connections(program, model)
        check_address(program, model)
    print("every limit holds")


if __name__ == "__main__":
    main()
