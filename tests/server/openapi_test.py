#!/usr/bin/env python3
"""Sends a server what schemathesis makes of docs/openapi.yaml, valid and invalid, and compares every answer with the file:
no 5xx, no status, type or field that it does not name. Then streams, event by event.

    tests/server/openapi_test.py PROGRAM MODEL [--seconds N] [--key]

Needs PyPI's schemathesis (`tools/get-python-env --server`); exit code 77 without it. --key: the server asks for a key.
"""

import argparse
import copy
import json
import pathlib
import subprocess
import sys
import tempfile

from clients import Server

try:
    import jsonschema_rs
    import schemathesis
    import yaml
except ImportError:
    print("skipped: no schemathesis here; tools/get-python-env --server makes an environment that has it")
    sys.exit(77)

FILE = pathlib.Path(__file__).resolve().parent.parent.parent / "docs" / "openapi.yaml"

# What a schema cannot say is refused with 400: the last message's role, texts longer than the context, bytes of UTF-8.
CONFIG = """
[checks]
positive_data_acceptance.expected-statuses = ["2xx", "400", "401", "404", "415", "429"]
negative_data_rejection.expected-statuses = ["400", "401", "403", "404", "405", "408", "413", "415", "429"]
"""


def close(schema):
    """Makes every object of a schema of answers one that has the named fields only."""
    if isinstance(schema, list):
        for item in schema:
            close(item)
    elif isinstance(schema, dict):
        if "properties" in schema and "additionalProperties" not in schema:
            schema["additionalProperties"] = False
        for item in schema.values():
            close(item)


def strict(description):
    """The description with answers that may not have more than it says. Requests stay open."""
    description = copy.deepcopy(description)
    requests = {"Token", "Ratio", "Messages", "Generation", "Nothing", "ChatRequest", "CompletionRequest", "ContextRequest"}
    for name, schema in description["components"]["schemas"].items():
        if name not in requests:
            close(schema)
    for path in description["paths"].values():
        for operation in path.values():
            if isinstance(operation, dict):
                close(operation["responses"])
    return description


def check_streams(server, description):
    """Every event of a stream has the schema of its kind."""
    words = {"stream": True, "max_tokens": 8, "stream_options": {"include_usage": True}}
    chat = {**words, "messages": [{"role": "user", "content": "Hello"}]}
    for path, name, body in (("/v1/chat/completions", "ChatChunk", chat),
                             ("/v1/chat/completions", "ChatChunk", {**chat, "logprobs": True, "top_logprobs": 3}),
                             ("/v1/completions", "CompletionChunk", {**words, "prompt": "Hello"}),
                             ("/v1/completions", "CompletionChunk", {**words, "prompt": "Hello", "logprobs": 3})):
        schema = {"$ref": f"#/components/schemas/{name}", "components": description["components"]}
        validator = jsonschema_rs.Draft202012Validator(schema)
        status, text = server.request("POST", path, body)
        assert status == 200, text
        events = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
        assert events.pop() == "[DONE]" and len(events) > 2, text
        for event in events:
            validator.validate(json.loads(event))


def check_same_file(server):
    status, text = server.request("GET", "/openapi.yaml")
    assert status == 200 and text == FILE.read_text(encoding="utf-8"), "the server gives another file"


def fuzz(server, description, seconds, key, seed):
    with tempfile.TemporaryDirectory() as folder:
        place = pathlib.Path(folder)
        (place / "openapi.json").write_text(json.dumps(description), encoding="utf-8")
        (place / "schemathesis.toml").write_text(CONFIG, encoding="utf-8")
        program = pathlib.Path(sys.executable).parent / "schemathesis"
        # A key is sent with every request; that requests without it are refused is a check of schemathesis'.
        command = [program, "--config-file", "schemathesis.toml", "run", "openapi.json", "--url",
                   f"http://127.0.0.1:{server.port}", "--checks", "all", "--max-time", str(seconds), "--seed", str(seed),
                   "--continue-on-failure", "--request-timeout", "60", "--no-color", "--warnings", "off"]
        if key:
            command += ["-H", f"Authorization: Bearer {key}"]
        return subprocess.run(command, cwd=place, check=False).returncode


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("program")
    parser.add_argument("model")
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--key", action="store_true")
    options = parser.parse_args()
    description = strict(yaml.safe_load(FILE.read_text(encoding="utf-8")))
    schemathesis.openapi.from_dict(description)  # it can be read
    key = "a-secret" if options.key else ""
    more = ["--api-key", key] if key else []
    with Server(options.program, options.model, "-t", "1", "-c", "600", "-n", "8", "--kv-min-tokens", "64",
                "--kv-pool-bytes", "4M", *more) as server:
        if not key:
            check_same_file(server)
            check_streams(server, description)
        code = fuzz(server, description, options.seconds, key, options.seed)
        assert server.stop() == 0, server.messages()
        assert code == 0, f"schemathesis found something (exit code {code})"
    print("every answer is as described")


if __name__ == "__main__":
    main()
