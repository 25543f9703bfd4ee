#!/usr/bin/env python3
"""Runs the curl lines of docs/server.md and docs/quickstart.md as they are printed, but for the port.

    tests/server/docs_test.py PROGRAM MODEL
"""

import json
import pathlib
import re
import subprocess
import sys
import tempfile

from clients import Server

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


def blocks():
    text = "".join((ROOT / name).read_text(encoding="utf-8") for name in ("docs/server.md", "docs/quickstart.md"))
    return [block for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL) if "curl " in block]


def answers(out):
    """The JSON objects of an output: one after another, or events of a stream."""
    if out.startswith("data: "):
        events = [line[6:] for line in out.splitlines() if line.startswith("data: ")]
        assert events.pop() == "[DONE]", out
        return [json.loads(event) for event in events]
    decoder, found, at = json.JSONDecoder(), [], 0
    while at < len(out):
        value, at = decoder.raw_decode(out, at)
        found.append(value)
        while at < len(out) and out[at].isspace():
            at += 1
    return found


def main():
    program, model = sys.argv[1:3]
    count = 0
    with Server(program, model, "--kv-min-tokens", "64") as server, tempfile.TemporaryDirectory() as folder:
        (pathlib.Path(folder) / "README.md").write_text((ROOT / "README.md").read_text(encoding="utf-8")[:3000],
                                                        encoding="utf-8")
        for block in blocks():
            script = block.replace("127.0.0.1:8080", f"127.0.0.1:{server.port}")
            result = subprocess.run(["bash", "-euc", script], cwd=folder, capture_output=True, text=True, check=True)
            for answer in answers(result.stdout):
                count += 1
                assert "error" not in answer, answer
        assert server.request("GET", "/v1/contexts")[1]["data"], "the uploaded file is there"
    assert count > 8, count
    print(f"{count} answers")


if __name__ == "__main__":
    main()
