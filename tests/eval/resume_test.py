"""An evaluation that is killed and started again loses no finished row and repeats none.

    resume_test.py ANCHORKV

Needs the small model. The run is killed (SIGKILL) as soon as a few rows are there, again and again until it ends by
itself, and must leave the rows of a run that was left alone.
"""

import json
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
MEASURED = ("score", "score_nospace", "exact", "kl", "top1", "gold_nll", "prediction", "resident_bytes", "achieved_ratio")


def tool(name, *arguments):
    return subprocess.run([ROOT / "tools" / name, *map(str, arguments)], check=True, stdout=subprocess.PIPE,
                          text=True).stdout.strip()


def command(binary, folder, output):
    return [binary, "eval", "documents", "-m", tool("get-model", "smollm2-135m"), "-f", folder / "a.txt", folder / "b.txt",
            "--kv", "full,anchorkv,keydiff,q8_0", "--kv-ratio", "4,60", "--protocol", "both", "-n", "8", "-o", output]


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def identity(row):
    return json.dumps([row[name] for name in ("task", "sample", "question", "protocol", "method", "ratio")])


def main():
    binary = pathlib.Path(sys.argv[1]).resolve()
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        for seed, stem in ((1, "a"), (2, "b")):
            tool("make-document", "--tokens", 900, "--seed", seed, "--facts", 2, "-o", folder / f"{stem}.txt",
                 "--questions", folder / f"{stem}.json")
        whole, killed = folder / "whole.jsonl", folder / "killed.jsonl"
        subprocess.run(command(binary, folder, whole), check=True, stderr=subprocess.DEVNULL)

        kills = 0
        finished = []
        while True:
            process = subprocess.Popen(command(binary, folder, killed), stderr=subprocess.DEVNULL)
            goal = len(finished) + 5
            while process.poll() is None and len(killed.read_bytes().splitlines() if killed.exists() else ()) < goal:
                time.sleep(0.01)
            if process.poll() is not None:
                break
            process.send_signal(signal.SIGKILL)
            process.wait()
            kills += 1
            # As if the last line had been cut by a full disk.
            if kills == 1:
                killed.write_bytes(killed.read_bytes() + b'{"suite":"documents","ta')
            text = killed.read_text()
            finished = [json.loads(line) for line in text[:text.rfind("\n") + 1].splitlines()]
        if process.returncode != 0:
            sys.exit(f"the last run failed with {process.returncode}")

        expected, actual = rows(whole), rows(killed)
        # 2 documents x 2 questions x 2 protocols x (full, anchorkv 4x and 60x, keydiff 4x and 60x, q8_0)
        if len(expected) != 48 or kills < 3:
            sys.exit(f"{len(expected)} rows and {kills} kills: the test says little")
        if sum("error" in row for row in expected) != 8:
            sys.exit("60x is out of reach for anchorkv and must be a gap in each of 8 cells")
        if any("exact" not in row for row in expected if "error" not in row):
            sys.exit("the documents ask for numbers; their rows have exact scores")
        if sorted(map(identity, actual)) != sorted(map(identity, expected)):
            sys.exit("rows were lost or repeated")
        by_identity = {identity(row): row for row in expected}
        for row in actual:
            for column in MEASURED:
                if row.get(column) != by_identity[identity(row)].get(column):
                    sys.exit(f"{identity(row)}: {column} is {row.get(column)}, uninterrupted "
                             f"{by_identity[identity(row)].get(column)}")
        again = killed.read_bytes()
        subprocess.run(command(binary, folder, killed), check=True, stderr=subprocess.DEVNULL)
        if sorted(map(identity, rows(killed))) != sorted(map(identity, expected)):
            sys.exit("a finished evaluation changed its rows")
        print(f"{len(actual)} rows, {kills} kills, {len(again)} bytes")


if __name__ == "__main__":
    main()
