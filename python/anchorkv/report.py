"""Makes a page with tables and figures of evaluation results.

    python -m anchorkv.report results.jsonl [more.jsonl ...] -o report.html

Beside report.html a folder report/ holds each figure as PNG and SVG, light and dark. docs/reports.md.
"""

import argparse
import io
import pathlib
import re
import sys

try:
    from . import figures, page, results, style, summary, tables
except ModuleNotFoundError as missing:
    if missing.name not in ("matplotlib", "numpy"):
        raise
    raise SystemExit(f"report: {missing.name} is missing; pip install 'anchorkv[report]'") from None
from .results import SUITE_NAMES, ReportError


class Writer:
    """Collects the page and writes the figures beside it."""

    def __init__(self, folder):
        self.folder = folder
        self.parts = []
        self.entries = []
        self.count = 0

    def add(self, text):
        self.parts.append(text)

    def section(self, title):
        self.entries.append((f"s{len(self.entries) + 1}", title))
        self.add(page.section(2, title, self.entries[-1][0]))

    def figure(self, title, name, caption, draw):
        """draw(theme) returns a figure, or None when there is nothing to draw. name: of its files, without extension."""
        images = {}
        for theme in style.THEMES:
            with figures.themed(theme):
                drawn = draw(theme)
                if drawn is None:
                    return
                width = round(96 * drawn.get_size_inches()[0])
                images[theme.name] = self._save(drawn, name, theme)
                figures.close(drawn)
        self.count += 1
        self.add(page.figure(title, caption, images["light"], images["dark"], width))

    def _save(self, drawn, name, theme):
        stem = name + ("-dark" if theme is style.DARK else "")
        self.folder.mkdir(exist_ok=True)
        drawn.savefig(self.folder / f"{stem}.png", dpi=150)
        image = io.BytesIO()
        # No date in it: equal results give equal files.
        drawn.savefig(image, format="svg", transparent=True, metadata={"Date": None})
        (self.folder / f"{stem}.svg").write_bytes(image.getvalue())
        return image.getvalue()


class Report:
    def __init__(self, found, folder, against, seed):
        self.found = found
        self.against_text = against
        self.seed = seed
        self.writer = Writer(folder)
        self.main_tables = []
        self.models = sorted({(key.model, key.model_hash) for key in found.panels})
        methods = {v.method for panel in found.panels.values() for v in panel.variants}
        self.unknown = sorted(m for m in methods if m not in style.METHODS and m not in ("full", "anchorkv"))
        self.against = {key: summary.find_against(panel, against) for key, panel in found.panels.items()} if against else {}
        if against and not any(self.against.values()):
            labels = sorted({v.label for panel in found.panels.values() for v in panel.variants if not v.options})
            raise ReportError(f"--against is '{against}'; these results have {', '.join(labels)}")

    def build(self):
        draw = {"ablation": self._ablation, "distort": self._distort, "cosine": self._cosine}
        for suite in SUITE_NAMES:
            groups = {}
            for panel in self.found.by_suite(suite):
                groups.setdefault((panel.key.model, panel.key.model_hash, panel.key.length), []).append(panel)
            for (model, _, length), panels in groups.items():
                title = SUITE_NAMES[suite] + (f", {length:,} tokens" if length else "") + (f": {model}" if model else "")
                self.writer.section(title)
                draw.get(suite, self._scores)(title, panels)
        self._gaps()
        return page.document("anchorkv: evaluation report", self._head() + "".join(self.writer.parts))

    def _head(self):
        head = page.section(1, "anchorkv: evaluation report")
        head += page.paragraph(f"{self.found.rows:,} results. Scores are in points of 100. Brackets hold 95 % intervals: "
                               "paired bootstrap over samples, 10,000 resamples, stratified by task, means taken over tasks. "
                               "Differences compare the same samples only.", "lead")
        for warning in self.found.warnings:
            head += page.paragraph(warning, "warning")
        return head + page.contents(self.writer.entries)

    def _name(self, panel, *parts):
        """A figure's file name; it names the model only where there are several."""
        key = panel.key
        model = [key.model, key.model_hash[:8]] if len(self.models) > 1 else []
        words = [*model, key.suite, str(key.length or ""), *(p if isinstance(p, str) else f"{p:g}x" for p in parts if p)]
        return "-".join(re.sub(r"[^a-z0-9.]+", "-", word.lower()).strip("-") for word in words if word)

    def _tables(self, panel, title):
        against = self.against.get(panel.key)
        summaries = summary.summarise(panel, against, self.seed)
        table = tables.main_table(panel, summaries, title)
        self.main_tables.append((panel, table))
        self.writer.add(table.html())
        if against:
            differences = tables.against_table(panel, summaries, against)
            self.main_tables.append((panel, differences))
            self.writer.add(differences.html())
        return summaries

    def _scores(self, title, panels):
        """RULER, needles, LongBench and perplexity."""
        summaries = [self._tables(p, f"Question-{p.key.protocol}" if p.key.protocol else "Means") for p in panels]
        for metric, what in (("score", "Score"), ("kl", "KL")):
            heading = "Score against size" if metric == "score" else "Divergence against size"
            self.writer.figure(f"{title}: {what} by ratio", self._name(panels[0], what), "Further right is smaller; " +
                               ("higher is better." if metric == "score" else "lower is better."),
                               lambda theme: figures.against_ratio(panels, summaries, metric, theme, self.unknown, heading))
        for panel in panels:
            if not panel.has("score"):
                continue
            for ratio in ratios(panel):
                heading = f"{title}: {panel.key.protocol} {ratio or ''}"
                name = self._name(panel, panel.key.protocol, ratio)
                if panel.key.suite == "niah":
                    self.writer.figure(heading, f"{name}-needles", "Mean score of each cell, 100: every digit in place. A dash is a gap.",
                                       lambda theme: figures.needle_grid(panel, ratio, theme))
                else:
                    self.writer.figure(heading, f"{name}-tasks", "Mean score of each task over the samples that the "
                                       "method has. A dash is a gap.", lambda theme: figures.task_heat(panel, ratio, theme))
            self.writer.add(tables.task_table(panel).html())

    def _ablation(self, title, panels):
        for panel in panels:
            summaries = self._tables(panel, f"Question-{panel.key.protocol}" if panel.key.protocol else "Means")
            for ratio in ratios(panel):
                self.writer.figure(f"{title}: {ratio or ''}", self._name(panel, panel.key.protocol, ratio),
                                   "Each bar changes the options it names; the unchanged method is coloured.",
                                   lambda theme: figures.ablation_bars(panel, summaries, ratio, theme))

    def _distort(self, title, panels):
        for panel in panels:
            self.writer.add(tables.distort_table(panel).html())
            for ratio in ratios(panel):
                self.writer.figure(f"{title}: {ratio or ''}", self._name(panel, panel.key.protocol, ratio), "Lower is better.",
                                   lambda theme: figures.layer_errors(panel, ratio, theme, self.unknown))

    def _cosine(self, title, panels):
        for panel in panels:
            self.writer.figure(title, self._name(panel, panel.key.protocol), "The higher the cosine, the less is left for the residual.",
                               lambda theme: figures.cosine_bands(panel, theme))
            self.writer.add(tables.cosine_table(panel).html())

    def _gaps(self):
        table = tables.gap_table([self.found.panels[key] for key in sorted(self.found.panels)])
        self.writer.section("Gaps")
        if table.rows:
            self.writer.add(page.paragraph("Samples with a failed or missing question are left out of that cache's means and "
                                           "of the comparisons with it."))
            self.writer.add(table.html())
        else:
            self.writer.add(page.paragraph("None: every cache answered every question."))

    def markdown(self):
        parts = []
        for panel, table in self.main_tables:
            length = f", {panel.key.length:,} tokens" if panel.key.length else ""
            parts.append(f"### {SUITE_NAMES[panel.key.suite]}{length}\n\n{table.markdown()}")
        return "\n".join(parts)


def ratios(panel):
    """The asked ratios, or [None] where every method is without one."""
    return sorted({v.ratio for v in panel.variants if v.ratio}) or [None]


def parse(arguments):
    parser = argparse.ArgumentParser(prog="python -m anchorkv.report", description="Tables and figures of evaluation results.")
    parser.add_argument("results", nargs="+", type=pathlib.Path, metavar="RESULTS", help="JSON lines as written by the evaluation")
    parser.add_argument("-o", "--output", type=pathlib.Path, required=True, metavar="FILE.html",
                        help="the page; figures go to a folder of the same name without .html")
    parser.add_argument("--against", metavar="METHOD[:PROFILE]@RATIO", help="add paired differences to this cache")
    parser.add_argument("--markdown", type=pathlib.Path, metavar="FILE", help="write the main tables, and those of --against, as Markdown too")
    parser.add_argument("--seed", type=int, default=0, help="seed of the bootstrap (default 0)")
    options = parser.parse_args(arguments)
    if options.output.suffix.lower() not in (".html", ".htm"):
        parser.error(f"-o is '{options.output}'; allowed is a name ending in .html")
    if options.seed < 0:
        parser.error(f"--seed is {options.seed}; allowed are numbers from 0")
    return options


def main(arguments=None):
    options = parse(arguments)
    try:
        found = results.read(options.results)
        for warning in found.warnings:
            print(f"report: {warning}", file=sys.stderr)
        report = Report(found, options.output.with_suffix(""), options.against, options.seed)
        text = report.build()
        options.output.write_text(text, encoding="utf-8")
        if options.markdown:
            options.markdown.write_text(report.markdown(), encoding="utf-8")
    except ReportError as error:
        print(f"report: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"report: {error.filename}: {error.strerror}", file=sys.stderr)
        return 1
    print(f"{options.output}: {found.rows:,} results, {report.writer.count} figures in {options.output.with_suffix('')}/",
          file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
