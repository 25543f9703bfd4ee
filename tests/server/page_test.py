#!/usr/bin/env python3
"""The web page in headless Chromium, driven through its DevTools protocol: a document, questions with streamed answers,
the gauge, the list of contexts, stopping with Escape, the width of a phone.

    tests/server/page_test.py PROGRAM MODEL [--pictures FOLDER]

Exit code 77 (skipped) where there is no chromium. --pictures takes the pictures of docs/ (needs a model that can read).
"""

import argparse
import base64
import contextlib
import json
import os
import pathlib
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import time
import urllib.request

from clients import Server


class WebSocket:
    """The little of RFC 6455 that DevTools needs: text messages to and from a local server."""

    def __init__(self, url):
        address, path = url.removeprefix("ws://").split("/", 1)
        host, port = address.split(":")
        self.socket = socket.create_connection((host, int(port)), timeout=60)
        key = base64.b64encode(os.urandom(16)).decode()
        self.socket.sendall(f"GET /{path} HTTP/1.1\r\nHost: {address}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
                            f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n".encode())
        self.stream = self.socket.makefile("rb")
        assert b"101" in self.stream.readline()
        while self.stream.readline() not in (b"\r\n", b""):
            pass

    def send(self, text):
        data = text.encode()
        length = bytes([0x80 | len(data)]) if len(data) < 126 else b"\xfe" + struct.pack(">H", len(data))
        mask = os.urandom(4)
        self.socket.sendall(b"\x81" + length + mask + bytes(b ^ mask[i % 4] for i, b in enumerate(data)))

    def receive(self):
        message = b""
        while True:
            head = self.stream.read(2)
            length = head[1] & 127
            if length > 125:
                length = struct.unpack(">H" if length == 126 else ">Q", self.stream.read(2 if length == 126 else 8))[0]
            message += self.stream.read(length)
            if head[0] & 0x80:
                return message.decode()


class Page:
    """A tab of a browser."""

    def __init__(self, socket_url):
        self.socket = WebSocket(socket_url)
        self.count = 0
        self.errors = []
        for domain in ("Page", "Runtime", "DOM"):
            self.command(domain + ".enable")

    def command(self, method, **parameters):
        self.count += 1
        self.socket.send(json.dumps({"id": self.count, "method": method, "params": parameters}))
        while True:
            message = json.loads(self.socket.receive())
            if message.get("method") == "Runtime.exceptionThrown":
                self.errors.append(json.dumps(message["params"])[:500])
            if message.get("id") == self.count:
                return message.get("result", message)

    def run(self, script):
        return self.command("Runtime.evaluate", expression=script, returnByValue=True)["result"].get("value")

    def wait(self, condition, seconds=60):
        for _ in range(int(seconds * 10)):
            if self.run(condition):
                return
            time.sleep(0.1)
        raise AssertionError(f"{condition} does not come true; the page: {self.run('document.body.innerText')}")

    def size(self, width, height, phone):
        self.command("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        time.sleep(0.3)

    def picture(self, path):
        path.write_bytes(base64.b64decode(self.command("Page.captureScreenshot", format="png")["data"]))

    def ask(self, question, wait=True):
        self.run(f"document.getElementById('question').value = {json.dumps(question)};"
                 "document.getElementById('ask').requestSubmit()")
        if wait:
            self.wait("document.getElementById('send').textContent === 'Send'")


@contextlib.contextmanager
def browser(program):
    with tempfile.TemporaryDirectory() as folder:
        command = [program, "--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0",
                   f"--user-data-dir={folder}", "about:blank"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            port_file = pathlib.Path(folder) / "DevToolsActivePort"
            for _ in range(300):
                if port_file.exists() and port_file.read_text(encoding="ascii").count("\n"):
                    break
                time.sleep(0.1)
            port = port_file.read_text(encoding="ascii").split()[0]
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/json") as answer:
                tabs = json.load(answer)
            yield Page(next(tab for tab in tabs if tab["type"] == "page")["webSocketDebuggerUrl"])
        finally:
            process.terminate()
            process.wait()


def use(page, server, document, questions):
    text = "document.getElementById('{}').textContent".format
    page.size(1100, 700, False)
    page.command("Page.navigate", url=f"http://127.0.0.1:{server.port}/")
    page.wait(f"{text('model')}.includes('tokens')")
    root = page.command("DOM.getDocument")["root"]["nodeId"]
    field = page.command("DOM.querySelector", nodeId=root, selector="#file")["nodeId"]
    page.command("DOM.setFileInputFiles", nodeId=field, files=[str(document)])
    page.wait(f"{text('filename')} === {json.dumps(document.name)}")
    page.run("const r = document.getElementById('ratio'); r.value = 2; r.dispatchEvent(new Event('input'))"
             if not questions else "0")
    for question in questions or ["First?", "Second?"]:
        page.ask(question)
    assert page.run("document.querySelectorAll('.assistant').length") == 2, page.run("document.body.innerText")
    assert not page.run("document.querySelectorAll('.bad').length"), page.run("document.body.innerText")
    assert page.run(text("bytes")).startswith("dense would be"), page.run(text("bytes"))
    page.wait("document.querySelectorAll('#contexts li[aria-current=true]').length === 1")


def stop(page):
    page.ask("Go on and on.", wait=False)
    page.wait("document.getElementById('send').textContent === 'Stop'")
    page.run("document.dispatchEvent(new KeyboardEvent('keydown', {key: 'Escape'}))")
    page.wait("document.getElementById('send').textContent === 'Send'")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("program")
    parser.add_argument("model")
    parser.add_argument("--pictures", type=pathlib.Path)
    parser.add_argument("--document", type=pathlib.Path)
    parser.add_argument("--question", action="append", default=[])
    args = parser.parse_args()
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        print("skipped: there is no chromium")
        sys.exit(77)
    more = ["--temp", "0"] if args.pictures else ["--kv-min-tokens", "64", "-n", "200"]
    with tempfile.TemporaryDirectory() as folder, Server(args.program, args.model, *more) as server, \
            browser(chromium) as page:
        document = args.document or pathlib.Path(folder) / "a document.txt"
        if not args.document:
            document.write_text(" ".join(f"Item {i} costs {i * 7 % 100} coins." for i in range(100)), encoding="utf-8")
        use(page, server, document, args.question)
        if args.pictures:
            page.picture(args.pictures / "server-desktop.png")
        page.size(390, 780, True)
        assert page.run("document.documentElement.scrollWidth") == 390, "the page is wider than a phone"
        if args.pictures:
            page.picture(args.pictures / "server-phone.png")
        page.run("document.getElementById('side').click()")
        assert page.run("getComputedStyle(document.getElementById('panel')).display") == "block"
        assert page.run("document.documentElement.scrollWidth") == 390
        page.run("document.getElementById('side').click()")
        stop(page)
        page.run("document.querySelector('#contexts [aria-label^=Delete]').click()")
        page.wait("document.querySelectorAll('#contexts li').length === 0")
        assert not page.errors, page.errors
        assert server.request("GET", "/v1/contexts")[1]["data"] == []
    print("the page passed")


if __name__ == "__main__":
    main()
