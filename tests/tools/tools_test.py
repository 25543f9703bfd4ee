"""Tests of the Python tools; no network, no model."""

import hashlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

TOOLS = pathlib.Path(__file__).resolve().parent.parent.parent / "tools"


def run(tool, *arguments, **environment):
    return subprocess.run([sys.executable, TOOLS / tool, *map(str, arguments)], capture_output=True, text=True,
                          env={**os.environ, **environment}, check=False)


class Scratch(unittest.TestCase):
    def setUp(self):
        self.folder = pathlib.Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.folder)

    def write(self, name, text):
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path


class MakeDocument(Scratch):
    def make(self, *arguments):
        for i in range(4):
            paragraphs = ["".join(f"Sentence {n} of part {i} tells a little more about the harvest. " for n in range(12))] * 30
            self.write(f"prose/{i}.txt", "\n\n".join(paragraphs))
        document, questions = self.folder / "doc.txt", self.folder / "questions.json"
        result = run("make-document", "--source", self.folder / "prose", "-o", document, "--questions", questions, *arguments)
        self.assertEqual(result.returncode, 0, result.stderr)
        return document.read_text(encoding="utf-8"), json.loads(questions.read_text(encoding="utf-8"))

    def test_each_fact_stands_once_and_in_its_stretch(self):
        for seed in range(1, 6):
            text, questions = self.make("--tokens", 4000, "--seed", seed, "--facts", 3)
            self.assertEqual(len({q["key"] for q in questions}), 3)
            for i, q in enumerate(questions):
                self.assertEqual(text.count(f"special magic number for {q['key']} is {q['answer']}."), 1)
                self.assertEqual(text.count(q["answer"]), 1)
                self.assertRegex(q["answer"], r"^[1-9]\d{6}$")
                self.assertNotIn(q["answer"], q["question"])
                self.assertAlmostEqual(q["depth"], text.index(q["answer"]) / len(text), delta=0.03)
                self.assertAlmostEqual(q["depth"], (i + 0.5) / 3, delta=0.22)
            # 300 tokens are at least 1,200 characters of this prose.
            self.assertLess(text.index(questions[-1]["answer"]), len(text) - 1200)
            self.assertGreater(text.index(questions[0]["answer"]), 400)

    def test_deterministic_and_pinned(self):
        text, questions = self.make("--tokens", 3000, "--seed", 5)
        again, questions_again = self.make("--tokens", 3000, "--seed", 5)
        self.assertEqual((text, questions), (again, questions_again))
        other, _ = self.make("--tokens", 3000, "--seed", 6)
        self.assertNotEqual(text, other)
        self.assertEqual(hashlib.sha256(text.encode()).hexdigest()[:16], "1f6992cfa88200d7")

    def test_needle_is_one_fact(self):
        text, questions = self.make("--tokens", 2000, "--needle")
        self.assertEqual(len(questions), 1)
        self.assertEqual(text.count("special magic number for"), 1)

    def test_too_short_is_an_error(self):
        self.make("--tokens", 2000)
        result = run("make-document", "--source", self.folder / "prose", "--tokens", 300, "-o", self.folder / "d",
                     "--questions", self.folder / "q")
        self.assertEqual(result.returncode, 1)
        self.assertEqual(len(result.stderr.splitlines()), 1)
        self.assertIn("300", result.stderr)
        self.assertFalse((self.folder / "d").exists())


class CheckIncludes(Scratch):
    def violations(self, path, text):
        self.write("src/base/low.h", "#pragma once\n")
        self.write("src/cache/high.h", "#pragma once\n")
        self.write("src/backend/cpu/simd.h", "#pragma once\n")
        self.write(path, "#pragma once\n" + text)
        result = run("check-includes", self.folder)
        self.assertEqual(result.returncode == 0, "0 violations" in result.stdout)
        (self.folder / path).unlink()
        return result.returncode

    def test_room_order(self):
        self.assertEqual(self.violations("src/codec/a.h", '#include "base/low.h"\n#include <vector>\n'), 0)
        self.assertEqual(self.violations("src/codec/a.h", '#include "cache/high.h"\n'), 1)
        self.assertEqual(self.violations("src/backend/reference/a.h", '#include "backend/cpu/simd.h"\n'), 1)
        self.assertEqual(self.violations("src/codec/a.h", '#include "nowhere.h"\n'), 1)
        self.assertEqual(self.violations("src/unknown/a.h", ""), 1)

    def test_third_party(self):
        self.assertEqual(self.violations("src/runtime/a.h", '#include "ggml.h"\n'), 0)
        self.assertEqual(self.violations("src/cache/a.h", '#include "ggml.h"\n'), 1)
        self.assertEqual(self.violations("src/cache/a.h", "#include <llama.h>\n"), 1)
        self.assertEqual(self.violations("src/cache/a.h", "#include <nlohmann/json.hpp>\n"), 1)
        self.assertEqual(self.violations("src/cache/a.cc", "#include <nlohmann/json.hpp>\n"), 0)
        self.assertEqual(self.violations("include/anchorkv/a.h", "#include <omp.h>\n"), 1)
        self.assertEqual(self.violations("include/anchorkv/a.h", '#include "base/low.h"\n'), 1)


class CheckDocs(Scratch):
    def problems(self, text):
        self.write("CMakePresets.json", '{"configurePresets": [{"name": "release"}]}')
        self.write("quick", "")
        self.write("docs/other.md", "# A heading\n")
        self.write("tests/a_test.cc", "TEST_P(Suite, Name) {}\n")
        self.write("README.md", text)
        return run("check-docs", self.folder).returncode

    def test_links_and_commands(self):
        self.assertEqual(self.problems("[x](docs/other.md#a-heading) and `./quick` and cmake --preset release\n"), 0)
        self.assertEqual(self.problems("[x](docs/missing.md)\n"), 1)
        self.assertEqual(self.problems("[x](docs/other.md#no-heading)\n"), 1)
        self.assertEqual(self.problems("run `./missing`\n"), 1)
        self.assertEqual(self.problems("cmake --preset missing\n"), 1)
        self.assertEqual(self.problems("`Suite.Name`\n"), 0)
        self.assertEqual(self.problems("`Suite.Other`\n"), 1)

    def test_addresses(self):
        for right in ("https://arxiv.org/abs/1", "http://127.0.0.1:8080/x?a=b#c", "mailto:a@b.example"):
            self.assertEqual(self.problems(f"[x]({right})\n"), 0, right)
        for wrong in ("https:/arxiv.org", "https://", "htp://a.example", "mailto:nobody"):
            self.assertEqual(self.problems(f"[x]({wrong})\n"), 1, wrong)

    def test_list_of_pages(self):
        self.write("docs/README.md", "[x](other.md#a-heading)\n")
        self.assertEqual(self.problems(""), 0)
        self.write("docs/lost.md", "# Lost\n")
        self.assertEqual(self.problems(""), 1)

    def test_options_of_commands(self):
        self.write("docs/cli.md", "## anchorkv run\n\n```text\nOptions:\n  -m,--model FILE REQUIRED  The model (-mm, or so)\n"
                   "  --kv-ratio R              (default 4)\n```\n")
        self.write("tools/fetch", "parser.add_argument('--seed')\n")
        self.write("build/bin/anchorkv", "")

        def block(line):
            return self.problems(f"```sh\n{line}\n```\n")

        for right in ("build/bin/anchorkv run -m A --kv-ratio 4 -n1", "anchorkv run --model=A | less -R", "anchorkv --version",
                      "anchorkv run -mm a \\\n  --kv-ratio -1", "tools/fetch --seed 1 && other --option", "curl -s x",
                      "A=b anchorkv run -m 'x | --no'", "./quick --help", "# anchorkv run --no", "x=$(tools/fetch --seed 1)"):
            self.assertEqual(block(right.replace(" -n1", "")), 0, right)
        for wrong in ("anchorkv run --kv-ration 4", "anchorkv walk", "anchorkv run -m A -x", "tools/fetch --sed 1", "./quick -q",
                      "cd / && anchorkv run --no", "tools/missing"):
            self.assertEqual(block(wrong), 1, wrong)
        self.assertEqual(self.problems("Text:\n\n    anchorkv run --no\n"), 1)


class GetModel(Scratch):
    def test_unknown_name_lists_the_known(self):
        result = run("get-model", "nothing", ANCHORKV_CACHE=str(self.folder))
        self.assertEqual(result.returncode, 1)
        self.assertEqual(result.stdout, "")
        self.assertIn("smollm2-135m", result.stderr)
        self.assertEqual(len(result.stderr.splitlines()), 1)


class GetLlamaCpp(Scratch):
    def test_source_must_be_a_checkout(self):
        result = run("get-llama-cpp", "--source", self.folder, ANCHORKV_CACHE=str(self.folder))
        self.assertEqual(result.returncode, 1)
        self.assertEqual(result.stdout, "")
        self.assertIn("include/llama.h", result.stderr)


class CompareAnswers(Scratch):
    def table(self, answer):
        questions = [{"key": "k", "question": "What?", "answer": "1234567"}]
        run_line = {"question": "What?", "answer": answer, "prompt_tokens": 9, "kv": {"method": "full", "profile": "",
                    "resident_bytes": 1 << 20, "dense_bytes": 1 << 22, "ratio": 4.0},
                    "timing": {"prefill_s": 1, "compress_s": 0, "decode_tokens_per_s": 5}, "peak_rss_bytes": 1 << 20}
        result = run("compare-answers", self.write("q.json", json.dumps(questions)),
                     self.write("r.jsonl", json.dumps(run_line) + "\n"))
        self.assertEqual(result.returncode, 0, result.stderr)
        return result.stdout

    def test_right_and_wrong(self):
        for right in ("It is 1234567.", "1,234,567", "1234567"):
            self.assertIn("1 of 1", self.table(right))
        for wrong in ("It is 12345678.", "91234567", "", "123 4567"):
            self.assertIn("0 of 1", self.table(wrong))
        self.assertIn("4.00x", self.table(""))
        self.assertIn("1.0 MiB of 4.0 MiB", self.table(""))


class CrossCheckPerplexity(Scratch):
    """With programs that print what the two print."""

    def compare(self, our_kl):
        def program(name, text):
            path = self.write(name, f"#!/bin/sh\ncat <<'END'\n{text}END\n")
            path.chmod(0o755)
            return path

        llama = program("llama-perplexity", "Mean PPL(Q)   :  28.037184 ±   1.429100\nMean PPL(base) :  25.303133 ±   1.2\n"
                        "Mean PPL(Q)/PPL(base) : 1.108052 ± 0.01\nMean    KLD:   0.118633 ±   0.001897\n"
                        "Median  KLD:   0.095235\nSame top p: 77.949 ± 0.720 %\n")
        program("build/bin/anchorkv", "full: 3315 positions\n  Mean PPL(Q)   28.0392\n  Mean PPL(base)  25.3031\n"
                f"  Mean KLD   {our_kl}\n  kl_p50   0.095241\n  Same top p   77.979%\n")
        return run("cross-check-perplexity", "--llama-perplexity", llama, "--build", self.folder / "build", "base.gguf",
                   "text", "model.gguf")

    def test_agreement_is_a_table(self):
        result = self.compare("0.118634")
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertIn("| Mean PPL(Q) | 28.0372 | 28.0392 | 0.007 % |", result.stdout)
        self.assertIn("| Mean KLD | 0.118633 | 0.118634 | 0.001 % |", result.stdout)

    def test_disagreement_is_named(self):
        result = self.compare("0.119300")
        self.assertEqual(result.returncode, 1)
        self.assertTrue(result.stderr.endswith(": 0.5 % or more apart: Mean KLD\n"), result.stderr)
        self.assertIn("no 'Mean KLD' in", self.compare("nan").stderr)


class GetData(Scratch):
    def test_unknown_name_is_an_error(self):
        result = run("get-data", "--data", self.folder / "data", "novels")
        self.assertEqual(result.returncode, 1)
        self.assertEqual(len(result.stderr.splitlines()), 1)
        self.assertIn("'novels'", result.stderr)
        self.assertIn("squad", result.stderr)

    def test_unreachable_repositories_are_named_and_leave_nothing(self):
        config = self.write("gitconfig", f'[url "{self.folder}/nowhere/"]\n\tinsteadOf = https://github.com/\n')
        result = run("get-data", "--data", self.folder / "data", "squad", "ruler", GIT_CONFIG_GLOBAL=str(config))
        self.assertEqual(result.returncode, 1)
        for name in ("squad", "ruler"):
            self.assertIn(f"\n{name}: git fetch of https://github.com/", "\n" + result.stderr)
        self.assertTrue(result.stderr.rstrip().endswith("2 of 2 not fetched: squad, ruler"), result.stderr)
        self.assertEqual([path.name for path in (self.folder / "data").iterdir()], [".lock"])


class Reproduce(Scratch):
    """With a program that writes down what it was asked and waits."""

    def setUp(self):
        super().setUp()
        self.program = self.write("anchorkv", "#!/bin/sh\necho \"$@\" > \"$(dirname $0)/asked\"\n"
                                  "[ -e \"$(dirname $0)/wait\" ] && exec sleep 60\nexit 0\n")
        self.program.chmod(0o755)

    def reproduce(self, *arguments):
        command = [sys.executable, TOOLS.parent / "eval" / "reproduce", "--program", self.program, "-o",
                   self.folder / "results", *arguments]
        return subprocess.run([str(x) for x in command], capture_output=True, text=True, check=False, timeout=50)

    def test_suites_are_listed_with_their_cost(self):
        result = self.reproduce("--list")
        self.assertEqual(result.returncode, 0, result.stderr)
        for name in ("ruler16k", "niah64", "ablation", "ppl"):
            self.assertRegex(result.stdout, rf"(?m)^{name} .* (min|h) ")

    def test_one_command_with_what_was_replaced(self):
        result = self.reproduce("--suite", "ruler16k-ours", "-m", "some/model.gguf", "--samples", 3, "-c", 4096,
                                "--shard", "1/4", "--protocol", "aware")
        self.assertEqual(result.returncode, 0, result.stderr)
        asked = (self.folder / "asked").read_text(encoding="utf-8")
        self.assertIn("--samples 3 ", asked)
        self.assertIn("-c 4096 ", asked)
        self.assertIn("results/ruler16k-ours-model.1-of-4.jsonl --protocol aware", asked)
        self.assertIn(asked.strip(), result.stdout)

    def test_stops_when_the_time_is_over(self):
        self.write("wait", "")
        result = self.reproduce("--suite", "cosine", "-m", "model.gguf", "--minutes", 0.01)
        self.assertEqual(result.returncode, 3, result.stderr)
        self.assertIn("the same command goes on from here", result.stdout)

    def test_mistakes_are_named(self):
        for arguments, message in (((), "--suite NAME and -m GGUF are needed"),
                                   (("--suite", "cosine", "-m", "x", "--minutes", 0), "--minutes 0: it must be more than 0"),
                                   (("--suite", "cosine", "-m", "x", "--program", "nowhere"), "nowhere is missing"),
                                   (("--suite", "ppl", "-m", "x", "--data", self.folder), "no speeches in")):
            result = self.reproduce(*arguments)
            self.assertEqual(result.returncode, 2)
            self.assertIn(message, result.stderr)


class Dependencies(unittest.TestCase):
    def test_the_page_says_what_the_tools_check(self):
        page = (TOOLS.parent / "docs" / "dependencies.md").read_text(encoding="utf-8")
        pinned = [digest for tool in ("get-llama-cpp", "get-model")
                  for digest in re.findall(r'"([0-9a-f]{64})"', (TOOLS / tool).read_text(encoding="utf-8"))]
        self.assertGreaterEqual(len(pinned), 5)
        self.assertEqual(sorted(re.findall(r"`([0-9a-f]{64})`", page)), sorted(pinned))
        packages = re.findall(r"\blib[\w-]+-dev\b|nlohmann-json3-dev|prometheus-cpp-dev", page)
        listed = (TOOLS / "install-packages").read_text(encoding="utf-8").split()
        self.assertEqual([name for name in packages if name not in listed], [])


if __name__ == "__main__":
    unittest.main()
