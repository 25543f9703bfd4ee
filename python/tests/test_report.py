"""Reading, grouping, the page and its files, on made-up results."""

import contextlib
import io
import json
import math
import pathlib
import re
import shutil
import tempfile
import unittest

import synthetic
from anchorkv import report, results, style, summary, tables

BASE = {"suite": "ruler", "task": "niah_single_1", "sample": 0, "question": 0, "length": 4096, "protocol": "agnostic",
        "method": "full", "profile": "", "ratio": None, "achieved_ratio": 1.0, "score": 1.0, "kl": 0.0, "gold_nll": 0.5,
        "model": "m", "model_hash": "h", "options": {}, "seed": 0, "error": ""}


def row(**changes):
    return {**BASE, **changes}


class Scratch(unittest.TestCase):
    def setUp(self):
        self.folder = pathlib.Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.folder)

    def read(self, *rows, text=None):
        path = self.folder / "r.jsonl"
        path.write_text(text if text is not None else "".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
        return results.read([path])

    def panel(self, *rows):
        return next(iter(self.read(*rows).panels.values()))

    def run_report(self, *arguments):
        log = io.StringIO()
        with contextlib.redirect_stderr(log):
            code = report.main([str(a) for a in arguments])
        return code, log.getvalue()


class Reading(Scratch):
    def refused(self, message, *rows, text=None):
        with self.assertRaises(results.ReportError) as caught:
            self.read(*rows, text=text)
        self.assertIn(message, str(caught.exception))
        self.assertNotIn("\n", str(caught.exception))

    def test_errors_name_file_and_line(self):
        good = json.dumps(BASE) + "\n"
        self.refused("r.jsonl:2: not a JSON object", text=good + "{\"suite\":\n" + good)
        self.refused("r.jsonl:2: not a JSON object but list", text=good + "[]\n")
        self.refused("r.jsonl:2: score is 1.5; allowed are numbers from 0 to 1", BASE, row(score=1.5))
        self.refused("score is \"1\"", row(score="1"))
        self.refused("NaN is not a JSON number", row(kl=math.nan))
        self.refused("suite is 'rulers'; allowed are ruler, niah", row(suite="rulers"))
        self.refused("protocol is 'both'", row(protocol="both"))
        self.refused("method is missing", row(method=""))
        self.refused("score is missing", row(score=None))
        self.refused("layer is missing", row(suite="distort"))
        self.refused("no result in it", text="\n")

    def test_unreadable_file(self):
        with self.assertRaisesRegex(results.ReportError, "nowhere.jsonl: cannot be read"):
            results.read([self.folder / "nowhere.jsonl"])

    def test_half_written_last_line_is_a_warning(self):
        found = self.read(text=json.dumps(BASE) + "\n" + json.dumps(BASE)[:40])
        self.assertEqual(found.rows, 1)
        self.assertRegex(found.warnings[0], r"r\.jsonl:2: half-written last line")

    def test_unknown_keys_are_ignored_and_last_repetition_counts(self):
        found = self.read(row(score=None, error="out of memory"), row(score=0.25, later_key=[1]))
        panel = next(iter(found.panels.values()))
        self.assertEqual(panel.gaps(results.FULL), (0, 0))
        self.assertEqual(panel.matrix(("niah_single_1", 4096), "score").tolist(), [[0.25]])
        self.assertIn("1 rows repeat an earlier one", found.warnings[0])

    def test_weights_type(self):
        for name, weights in (("Qwen2.5-Coder-1.5B-Instruct-Q4_K_M", "Q4_K_M"), ("smollm2-135m-instruct-q4_1", "Q4_1"),
                              ("m-BF16", "BF16"), ("Qwen2.5-Coder", ""), ("Llama-3.2-1B-IQ4_XS.gguf", "IQ4_XS")):
            self.assertEqual(results.weights_type(name), weights)


class Summaries(Scratch):
    ANCHOR = {"method": "anchorkv", "profile": "blend", "ratio": 4.0, "achieved_ratio": 4.01}

    def test_identical_runs_differ_by_exactly_zero(self):
        scores = [1.0, 0.1, 0.7, 0.3]
        panel = self.panel(*[row(sample=i, score=s, **v) for i, s in enumerate(scores) for v in ({}, self.ANCHOR)])
        ours = summary.summarise(panel)[1]
        for name in (("score", "full"), ("gold_nll", "full")):
            self.assertEqual((ours[name].mean, ours[name].low, ours[name].high), (0, 0, 0))
        self.assertEqual(ours.versus_full, (0, 0, 1.0))

    def test_gaps_are_counted_and_left_out_of_the_pairing(self):
        rows = [row(sample=i, score=s) for i, s in enumerate([1.0, 1.0, 0.0, 1.0])]
        rows += [row(sample=0, score=1.0, **self.ANCHOR), row(sample=1, score=0.0, **self.ANCHOR),
                 row(sample=2, score=None, error="bytes buy no token", **self.ANCHOR)]
        panel = self.panel(*rows)
        full, ours = summary.summarise(panel)
        self.assertEqual((full.samples, full.failed, full.missing), (4, 0, 0))
        self.assertEqual((ours.samples, ours.failed, ours.missing), (2, 1, 1))
        self.assertEqual(ours["score", "full"].mean, -0.5)
        self.assertEqual(ours["retention"].mean, 0.5)
        self.assertEqual(ours.versus_full, (1, 0, 1.0))
        cells = [cell for line in tables.gap_table([panel]).rows for cell in line]
        self.assertIn("bytes buy no token", cells)
        self.assertIn("2.0", cells)
        self.assertIn("not run", cells)

    def test_a_sample_with_a_failed_question_is_a_gap(self):
        panel = self.panel(row(question=0), row(question=1, score=0.0), row(sample=1, question=0),
                           row(sample=1, question=1, score=None, error="x"))
        self.assertEqual(summary.summarise(panel)[0].samples, 1)
        self.assertEqual(summary.summarise(panel)[0]["score"].mean, 0.5)

    def test_retention_counts_only_tasks_that_the_full_cache_can_do(self):
        rows = []
        for task, full, ours in (("niah_single_1", 1.0, 0.5), ("vt", 0.59, 0.59), ("cwe", 0.6, 0.3)):
            rows += [row(task=task, score=full), row(task=task, score=ours, **self.ANCHOR)]
        panel = self.panel(*rows)
        self.assertEqual(summary.gated_tasks(panel), [("cwe", 4096), ("niah_single_1", 4096)])
        summaries = summary.summarise(panel)
        self.assertAlmostEqual(summaries[1]["retention"].mean, 0.5)
        self.assertIn("2 of 3 tasks", tables.main_notes(panel, summaries)[0])

    def test_noise_tasks_are_left_out_of_means(self):
        panel = self.panel(row(suite="longbench", task="trec", score=1.0), row(suite="longbench", task="passage_count", score=0.0))
        summaries = summary.summarise(panel)
        self.assertEqual(summaries[0]["score"].mean, 1.0)
        self.assertIn("passage_count", tables.main_notes(panel, summaries)[-1])

    def test_needles_have_exact_scores_beside_partial_ones(self):
        rows = [row(task="niah_single_1", score=1.0, exact=1.0, score_nospace=1.0), row(task="vt", score=0.6),
                row(task="niah_single_1", score=1.0, exact=0.0, score_nospace=1.0, **self.ANCHOR),
                row(task="vt", score=0.2, **self.ANCHOR)]
        panel = self.panel(*rows)
        summaries = summary.summarise(panel)
        table = tables.main_table(panel, summaries, "T")
        first = table.header.index("score")
        self.assertEqual(table.header[first + 1:first + 3], ["needles exact", "needles ignoring spaces"])
        self.assertEqual([r[first:first + 3] for r in table.rows], [["80.0", "100.0", "100.0"], ["60.0", "0", "100.0"]])
        self.assertIn("1 of 2 tasks", table.notes[-1])
        self.assertNotIn("needles exact", tables.main_table(self.panel(BASE), summary.summarise(self.panel(BASE)), "T").header)

    def test_against(self):
        panel = self.panel(BASE, row(**self.ANCHOR), row(**{**self.ANCHOR, "profile": "paper"}))
        self.assertEqual(summary.find_against(panel, "anchorkv:paper@4").profile, "paper")
        self.assertIsNone(summary.find_against(panel, "snapkv@4"))
        with self.assertRaisesRegex(results.ReportError, "AnchorKV blend 4x, AnchorKV paper 4x; add :PROFILE"):
            summary.find_against(panel, "anchorkv@4")
        with self.assertRaisesRegex(results.ReportError, "METHOD"):
            summary.find_against(panel, "snapkv@much")


class Numbers(unittest.TestCase):
    def test_plain(self):
        self.assertEqual(tables.plain(-0.04, 1, signed=True), "0.0")
        self.assertEqual(tables.plain(-2.25, 1), "\u22122.2")
        self.assertEqual(tables.plain(0.0314, tables.digits(0.0314)), "0.031")
        self.assertEqual(tables.plain(math.nan, 1), "\u2013")

    def test_spread_keeps_order_and_distance(self):
        self.assertEqual(style.spread([0, 10, 20], 5), [0, 10, 20])
        self.assertEqual(style.spread([3, 3], 4), [1, 5])
        moved = style.spread([5, 1, 2, 1.5, 30], 3)
        ordered = sorted(moved)
        self.assertTrue(all(b - a >= 3 - 1e-9 for a, b in zip(ordered, ordered[1:])))
        self.assertEqual(sorted(range(5), key=lambda i: moved[i]), [1, 3, 2, 0, 4])


class Page(Scratch):
    def test_page_figures_and_markdown(self):
        rows = [r for r in synthetic.rows(samples=2) if r.get("method") in (None, "full", "anchorkv", "kvzip", "streamingllm")
                and r.get("ratio") in (None, 20) and r["task"] not in ("cwe", "fwe", "qa_1", "qa_2")]
        rows.append({**next(r for r in rows if r["suite"] == "ruler" and r["method"] == "full"), "method": "kvzip", "ratio": 20,
                     "score": None, "error": "10 bytes <per head>"})
        source, output, markdown = (self.folder / name for name in ("r.jsonl", "out.html", "main.md"))
        synthetic.write(source, rows)
        code, log = self.run_report(source, "-o", output, "--markdown", markdown, "--against", "kvzip@20")
        self.assertEqual(code, 0, log)
        page = output.read_text(encoding="utf-8")
        for title in ("RULER, 16,384 tokens", *(name for suite, name in results.SUITE_NAMES.items() if suite != "documents"), "Gaps", "Difference to KVzip 20x", "Tasks",
                      "question-agnostic", "question-aware", "weights Q4_K_M", "seed 42", "10 bytes &lt;per head&gt;"):
            self.assertIn(title, page)
        # Nothing to load and nothing to run.
        self.assertNotIn("<script", page)
        self.assertEqual([u for u in re.findall(r'(?:src|srcset|href)="([^"]{0,5})', page) if u[:5] != "data:" and u[0] != "#"], [])
        stems = {"ruler-16384-score", "ruler-16384-kl", "ruler-16384-agnostic-20x-tasks", "ruler-16384-aware-20x-tasks",
                 "niah-score", "niah-kl", "niah-agnostic-20x-needles", "longbench-score", "longbench-kl",
                 "longbench-agnostic-20x-tasks", "ablation-agnostic-20x", "ppl-kl", "distort-agnostic-20x", "cosine"}
        expected = {f"{s}{theme}.{kind}" for s in stems for theme in ("", "-dark") for kind in ("png", "svg")}
        self.assertEqual({p.name for p in (self.folder / "out").iterdir()}, expected)
        self.assertTrue(all(p.stat().st_size > 2000 for p in (self.folder / "out").iterdir()))
        text = markdown.read_text(encoding="utf-8")
        self.assertIn("| **AnchorKV blend 20x** |", text)
        self.assertEqual(text.count("### "), 6 + 5)  # six panels; five of them have the cache that --against names

    def test_bad_command_lines(self):
        source = self.folder / "r.jsonl"
        synthetic.write(source, [BASE])
        code, log = self.run_report(source, "-o", self.folder / "o.html", "--against", "snapkv@20")
        self.assertEqual((code, log.strip()), (1, "report: --against is 'snapkv@20'; these results have Full cache"))
        code, log = self.run_report(source, "-o", self.folder / "no" / "o.html", "--seed", "1")
        self.assertEqual(code, 1)
        with self.assertRaises(SystemExit) as caught:
            self.run_report(source, "-o", self.folder / "o.pdf")
        self.assertEqual(caught.exception.code, 2)


if __name__ == "__main__":
    unittest.main()
