"""What the tests of the server that are written in Python share: the server as a process, and requests by hand."""

import contextlib
import http.client
import json
import os
import pathlib
import re
import signal
import subprocess
import tempfile
import time


class Server:
    """`anchorkv serve` on a free port; a context manager."""

    def __init__(self, program, model, *more):
        self.errors = tempfile.NamedTemporaryFile("w+", suffix=".log", delete=False)
        command = [program, "serve", "-m", str(model), "--port", "0", *more]
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=self.errors)
        self.port = 0
        for _ in range(1200):
            found = re.search(r"listening on http://[\d.]+:(\d+)\n", self.messages())
            if found:
                self.port = int(found.group(1))
                return
            if self.process.poll() is not None:
                break
            time.sleep(0.05)
        raise RuntimeError(f"the server does not start: {self.messages()}")

    def messages(self):
        return pathlib.Path(self.errors.name).read_text(encoding="utf-8")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.errors.close()
        os.unlink(self.errors.name)

    def stop(self):
        """Ends it as people do; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=90)

    def resident_bytes(self):
        fields = pathlib.Path(f"/proc/{self.process.pid}/statm").read_text(encoding="ascii").split()
        return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")

    def request(self, method, path, body=None, content_type="application/json", timeout=120):
        """(status, JSON or text)."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        with contextlib.closing(connection):
            data = json.dumps(body).encode() if isinstance(body, (dict, list)) else body
            connection.request(method, path, data, {"Content-Type": content_type} if data is not None else {})
            response = connection.getresponse()
            text = response.read().decode("utf-8", "replace")
        try:
            return response.status, json.loads(text)
        except ValueError:
            return response.status, text

    def metric(self, name):
        found = re.search(rf"^{re.escape(name)}\{{[^}}]*\}} (\S+)$", self.request("GET", "/metrics")[1], re.MULTILINE)
        return float(found.group(1)) if found else None


def model_path(name="smollm2-135m-instruct-q4_1.gguf"):
    cache = os.environ.get("ANCHORKV_CACHE") or pathlib.Path.home() / ".cache" / "anchorkv"
    return pathlib.Path(cache) / "models" / name
