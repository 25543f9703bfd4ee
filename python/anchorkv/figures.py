"""Figures of a report. Each function draws one figure in a theme and returns it; sizes in inches."""

import contextlib
import math
import textwrap

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402  after the backend is chosen
import numpy as np  # noqa: E402
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator  # noqa: E402

from . import style  # noqa: E402
from .results import FULL  # noqa: E402
from .tables import DASH, context_line, digits, layer_means, plain  # noqa: E402

SIZE = 9  # points
LINE_HEIGHT = 1.35  # of a label, in sizes


@contextlib.contextmanager
def themed(theme):
    settings = {
        "font.family": "DejaVu Sans", "font.size": SIZE, "text.color": theme.ink, "axes.labelcolor": theme.ink,
        "axes.edgecolor": theme.muted, "xtick.color": theme.muted, "ytick.color": theme.muted, "axes.spines.top": False,
        "axes.spines.right": False, "axes.grid": False, "grid.color": theme.grid, "grid.linewidth": 0.7,
        "axes.axisbelow": True, "axes.titlesize": SIZE + 1, "axes.titleweight": "bold", "axes.titlelocation": "left",
        "axes.facecolor": "none", "figure.facecolor": theme.surface, "savefig.facecolor": theme.surface,
        "svg.hashsalt": "anchorkv", "svg.fonttype": "path", "figure.max_open_warning": 0,
    }
    with matplotlib.rc_context(settings):
        yield


def close(figure):
    plt.close(figure)


def _captions(figure, theme, title, context):
    """Title above and, below, what was measured on what. Returns the inches that both take."""
    width, height = figure.get_size_inches()
    lines = textwrap.wrap(context, max(40, int(width * 15)))
    figure.text(0.1 / width, 1 - 0.1 / height, title, fontsize=SIZE + 2, fontweight="bold", va="top")
    figure.text(0.1 / width, 0.08 / height, "\n".join(lines), fontsize=SIZE - 2, color=theme.muted, va="bottom",
                linespacing=1.3)
    return 0.34, 0.12 + 0.16 * len(lines)


def _finish(figure, theme, title, context, room=0.0):
    """Captions, and the axes between them; `room` inches at the right stay free."""
    width, height = figure.get_size_inches()
    top, bottom = _captions(figure, theme, title, context)
    figure.tight_layout(rect=(0, bottom / height, 1 - room / width, 1 - top / height), w_pad=2.5)
    return figure


def _ratio_axis(axes, ratios):
    axes.set_xscale("log", base=2)
    low, high = min(ratios), max(ratios)
    ticks = [t for t in (1, 2, 3, 5, 7, 10, 15, 20, 30, 50, 100) if low * 0.8 <= t <= high * 1.2]
    axes.set_xlim(low * 0.88, high * 1.08)
    axes.set_xticks(ticks, [f"{t}x" for t in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("smaller by (achieved)")
    axes.grid(True)


def _label_ends(axes, theme, labels):
    """Names in a column right of the axes. labels: (text, x, y, colour, emphasised)."""
    axes.figure.canvas.draw()
    axes.autoscale(False)
    inverse = axes.transData.inverted()
    pixels = [axes.transData.transform((x, y)) for _, x, y, _, _ in labels]
    gap = SIZE * LINE_HEIGHT * axes.figure.dpi / 72
    edge = axes.get_window_extent().x1
    for label, (x, y), moved in zip(labels, pixels, style.spread([p[1] for p in pixels], gap)):
        text, _, _, color, emphasised = label
        start, end = inverse.transform((x, y)), inverse.transform((edge + 4, moved))
        axes.plot([start[0], end[0]], [start[1], end[1]], color=color, lw=0.6, alpha=0.55, clip_on=False, zorder=1)
        axes.annotate(text, xy=end, xytext=(2, 0), textcoords="offset points", va="center", color=color,
                      fontweight="bold" if emphasised else "normal", annotation_clip=False, zorder=5)


def against_ratio(panels, summaries, metric, theme, unknown, title):
    """A metric against the achieved ratio: one plot per protocol, one line per method and profile.

    summaries: one list per panel. Returns None when no panel has the metric.
    """
    drawn = [(p, s) for p, s in zip(panels, summaries) if any(x.has(metric) and x.variant != FULL for x in s)]
    if not drawn:
        return None
    longest = max(len(s.variant.family) for _, summary in drawn for s in summary)
    names = 0.2 + 0.095 * longest
    # Axes are placed by hand: the names to their right need room that a layout engine does not see.
    width, lines, left, bottom = 4.1, len(drawn), 0.72, 1.0
    labels = max(len({s.variant.family for s in summary if s.has(metric)}) for _, summary in drawn)
    height = max(3.0, 0.19 * labels)
    total_width, total_height = lines * (left + width + names), bottom + height + 0.62
    figure = plt.figure(figsize=(total_width, total_height))
    scale = 100 if metric == "score" else 1
    plots = []
    for i, (panel, summary) in enumerate(drawn):
        axes = figure.add_axes(((left + i * (left + width + names)) / total_width, bottom / total_height,
                                width / total_width, height / total_height))
        plots.append((axes, panel, _draw_lines(axes, theme, unknown, summary, metric, scale)))
    for axes, panel, ends in plots:
        axes.set_title(f"question-{panel.key.protocol}" if panel.key.protocol else "")
        if metric == "score":
            axes.set_ylabel("mean score")
        else:
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(numticks=6))
            axes.yaxis.set_minor_locator(NullLocator())
            axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
            axes.set_ylabel("KL to the full cache, nats")
    low = min(axes.get_ylim()[0] for axes, _, _ in plots)
    high = max(axes.get_ylim()[1] for axes, _, _ in plots)
    for axes, _, ends in plots:
        axes.set_ylim(max(low, 0) if metric == "score" else low, min(high, 102) if metric == "score" else high)
        _label_ends(axes, theme, ends)
    context = context_line(drawn[0][0]) if len(drawn) == 1 else context_line(drawn[0][0]).replace(
        f"question-{drawn[0][0].key.protocol}", "both protocols")
    _captions(figure, theme, title, context + ". Bars: bootstrap 95 % intervals.")
    return figure


def _draw_lines(axes, theme, unknown, summary, metric, scale):
    families, ends, alone, ratios = {}, [], [], []
    for s in summary:
        if s.has(metric) and not math.isnan(s.achieved) and (s.variant != FULL or metric == "score"):
            families.setdefault(s.variant.family, []).append(s)
    for family, members in families.items():
        members.sort(key=lambda s: s.achieved)
        variant = members[0].variant
        color, is_ours = theme.color(variant.method, unknown), variant.method == "anchorkv"
        x = [s.achieved for s in members]
        y = [scale * s[metric].mean for s in members]
        ratios += x
        if variant == FULL:
            axes.axhline(y[0], color=color, lw=1, ls=(0, (2, 2)), zorder=1)
        axes.plot(x, y, color=color, lw=2.4 if is_ours else 1.2, ls=style.line_style(variant),
                  marker=style.marker(variant.method), ms=6 if is_ours else 4.5, zorder=4 if is_ours else 3)
        for s in members:
            e = s[metric]
            if not math.isnan(e.low) and (metric == "score" or e.low > 0):
                axes.plot([s.achieved] * 2, [scale * e.low, scale * e.high], color=color, lw=1.6 if is_ours else 0.9,
                          alpha=0.75, zorder=2, solid_capstyle="butt")
        if variant.ratio:
            ends.append((family, x[-1], y[-1], color, is_ours))
        else:
            alone.append((x[-1], y[-1], family, color))
    # Single points are named beside them, above and below in turn.
    for index, (x, y, family, color) in enumerate(sorted(alone)):
        axes.annotate(family, (x, y), xytext=(5, -5 if index % 2 else 5), textcoords="offset points", color=color,
                      va="top" if index % 2 else "bottom")
    _ratio_axis(axes, ratios)
    return ends


def _heat(axes, theme, values, rows, columns, strong=(), top=False):
    """Shares in [0, 1] as shaded, numbered cells; NaN is a gap and stays empty."""
    colormap = theme.colormap
    axes.pcolormesh(np.arange(len(columns) + 1) - 0.5, np.arange(len(rows) + 1) - 0.5, np.ma.masked_invalid(values),
                    cmap=colormap, vmin=0, vmax=1, edgecolors=theme.surface, linewidth=1.5)
    axes.invert_yaxis()
    for (i, j), value in np.ndenumerate(values):
        known = not math.isnan(value)
        dark = known and style.luminance(colormap(value)) < 0.45
        color = "#ffffff" if dark else "#10151b" if known else theme.muted
        axes.text(j, i, f"{100 * value:.0f}" if known else DASH, ha="center", va="center", color=color, fontsize=SIZE - 1)
    if top:
        axes.xaxis.tick_top()
    axes.set_xticks(range(len(columns)), columns, fontsize=SIZE - 1)
    axes.set_yticks(range(len(rows)), rows)
    axes.tick_params(length=0)
    for tick, index in zip(axes.get_xticklabels(), range(len(columns))):
        tick.set_color(theme.ours if index in strong else theme.ink)
        tick.set_fontweight("bold" if index in strong else "normal")
    for tick in axes.get_yticklabels():
        tick.set_color(theme.ink)
    for spine in axes.spines.values():
        spine.set_visible(False)


def task_heat(panel, ratio, theme):
    """Mean score, tasks x methods at one asked ratio; methods without a ratio stand beside them."""
    variants = [v for v in panel.variants if v.ratio in (None, ratio)]
    chosen = [panel.variants.index(v) for v in variants]
    means = np.array([_column_means(panel.matrix(stratum, "score"))[chosen] for stratum in panel.strata])
    several = len(panel.lengths) > 1
    rows = [f"{task}, {length:,}" if several else task for task, length in panel.strata]
    columns = [_two_lines(v) for v in variants]
    figure, axes = plt.subplots(figsize=(2.2 + 0.95 * len(columns), 1.5 + 0.27 * len(rows)))
    _heat(axes, theme, means, rows, columns, {i for i, v in enumerate(variants) if v.method == "anchorkv"}, top=True)
    at = f" at {ratio:g}x" if ratio else ""
    return _finish(figure, theme, f"Score by task{at}", context_line(panel))


def _column_means(values):
    counts = (~np.isnan(values)).sum(axis=0)
    return np.where(counts > 0, np.nansum(values, axis=0) / np.maximum(counts, 1), np.nan)


def _two_lines(variant):
    """A name that fits above a narrow column."""
    return "\n".join(textwrap.wrap(variant.family, 13, break_long_words=True)[:3])


def needle_grid(panel, ratio, theme):
    """Mean score by depth and length: one grid per method."""
    variants = [v for v in panel.variants if v.ratio in (None, ratio)]
    depths = sorted({row["depth"] for row in panel.rows() if row["depth"] is not None})
    lengths = panel.lengths
    if not depths or not lengths:
        return None
    across = min(4, len(variants))
    down = math.ceil(len(variants) / across)
    cell_width = max(1.9, 0.42 * len(lengths) + 0.5)
    figure, grid = plt.subplots(down, across, squeeze=False,
                                figsize=(0.5 + across * cell_width, 0.9 + down * (0.9 + 0.22 * len(depths))))
    for axes, variant in zip(grid.flat, variants):
        values = np.full((len(depths), len(lengths)), np.nan)
        cells = {}
        for row in panel.rows():
            if row["variant"] == variant and not row["error"] and row["depth"] is not None and row["score"] is not None:
                cells.setdefault((depths.index(row["depth"]), lengths.index(row["length"])), []).append(row["score"])
        for index, scores in cells.items():
            values[index] = sum(scores) / len(scores)
        _heat(axes, theme, values, [f"{100 * d:.0f} %" for d in depths],
              [f"{n / 1024:.0f}K" if n % 1024 == 0 else f"{n / 1000:g}K" for n in lengths])
        achieved = panel.mean(variant, "achieved_ratio")
        axes.set_title(variant.family + (f", {achieved:.1f}x" if variant != FULL and not math.isnan(achieved) else ""),
                       color=theme.ours if variant.method == "anchorkv" else theme.ink)
    for axes in grid.flat[len(variants):]:
        axes.set_visible(False)
    for axes in grid[:, 1:].flat:
        axes.set_yticklabels([])
    for axes in grid[:, 0]:
        axes.set_ylabel("depth of the needle")
    for axes in list(grid.flat)[max(0, len(variants) - across):len(variants)]:
        axes.set_xlabel("tokens")
    at = f" at {ratio:g}x" if ratio else ""
    return _finish(figure, theme, f"Score by depth and length{at}", context_line(panel))


def ablation_bars(panel, summaries, ratio, theme):
    """Score and KL of every variant at one asked ratio, with intervals; the unchanged method emphasised."""
    chosen = [s for s in summaries if s.variant.ratio in (None, ratio)]
    metrics = [m for m in ("score", "kl") if any(s.has(m) for s in chosen)]
    names = [_ablation_name(s.variant) for s in chosen]
    figure, grid = plt.subplots(1, len(metrics), squeeze=False, sharey=True,
                                figsize=(2.0 + 3.6 * len(metrics), 1.5 + 0.3 * len(chosen)))
    for axes, metric in zip(grid[0], metrics):
        scale = 100 if metric == "score" else 1
        reach = 0
        for row, s in enumerate(chosen):
            e = s[metric]
            if math.isnan(e.mean):
                axes.text(0, row, f" {DASH}", va="center", color=theme.muted)
                continue
            plain_variant = s.variant.method == "anchorkv" and not s.variant.options
            color = theme.ours if plain_variant else theme.muted
            axes.barh(row, scale * e.mean, height=0.62, color=color, alpha=1 if plain_variant else 0.55)
            end = scale * e.mean
            if not math.isnan(e.low):
                axes.plot([scale * e.low, scale * e.high], [row, row], color=theme.ink, lw=1.3, solid_capstyle="butt")
                end = max(end, scale * e.high)
            text = plain(scale * e.mean, 1 if metric == "score" else digits(e.mean))
            axes.annotate(text, (end, row), xytext=(4, 0), textcoords="offset points", va="center",
                          fontweight="bold" if plain_variant else "normal")
            reach = max(reach, end)
        axes.set_xlim(0, (reach or 1) * 1.18)
        axes.set_title("Score" if metric == "score" else "KL to the full cache, nats")
        axes.grid(True, axis="x")
        axes.tick_params(axis="y", length=0)
    grid[0, 0].set_yticks(range(len(names)), names)
    grid[0, 0].set_ylim(len(names) - 0.4, -0.6)
    for tick, s in zip(grid[0, 0].get_yticklabels(), chosen):
        tick.set_color(theme.ours if s.variant.method == "anchorkv" and not s.variant.options else theme.ink)
    at = f" at {ratio:g}x" if ratio else ""
    return _finish(figure, theme, f"Ablations{at}", context_line(panel) + ". Lines: bootstrap 95 % intervals.")


def _ablation_name(variant):
    return variant.options.replace(", ", ",\n") if variant.options else variant.family


def cosine_bands(panel, theme):
    """Median cosine per depth band before and after RoPE: one plot per task."""
    tasks = panel.tasks
    across = min(4, len(tasks))
    down = math.ceil(len(tasks) / across)
    figure, grid = plt.subplots(down, across, squeeze=False, sharex=True, sharey=True,
                                figsize=(2.1 + 2.3 * across, 0.9 + 2.3 * down))
    ends = []
    for index, (axes, task) in enumerate(zip(grid.flat, tasks)):
        for key, color, line in (("pre_rope", theme.ours, "-"), ("post_rope", theme.muted, (0, (4, 2)))):
            bands = {}
            for row in panel.rows():
                if row["task"] == task and not row["error"] and row[key] is not None:
                    bands.setdefault(int(row["band"]), []).append(row[key])
            if not bands:
                continue
            x = sorted(bands)
            y = [sum(bands[b]) / len(bands[b]) for b in x]
            axes.plot(x, y, color=color, ls=line, lw=2 if line == "-" else 1.5, marker="o", ms=3.5)
            if index == across - 1:
                ends.append(("before RoPE" if key == "pre_rope" else "after RoPE", x[-1], y[-1], color, line == "-"))
        axes.set_title(task)
        axes.grid(True)
    for axes in grid.flat[len(tasks):]:
        axes.set_visible(False)
    for axes in grid[:, 0]:
        axes.set_ylabel("median cosine")
    for axes in grid[-1]:
        axes.set_xlabel("depth band")
    _finish(figure, theme, "Cosine to the best anchor", context_line(panel), room=1.1)
    _label_ends(grid[0, across - 1], theme, ends)
    return figure


def layer_errors(panel, ratio, theme, unknown):
    """Relative error of the attention output, by layer."""
    variants = [v for v in panel.variants if v.ratio in (None, ratio) and v != FULL and layer_means(panel, v)]
    if not variants:
        return None
    names = 0.2 + 0.095 * max(len(v.family) for v in variants)
    width, height = 0.75 + 5.6 + names, max(4.0, 1.6 + 0.19 * len(variants))
    figure = plt.figure(figsize=(width, height))
    axes = figure.add_axes((0.75 / width, 0.95 / height, 5.6 / width, 1 - 1.45 / height))
    ends = []
    for variant in variants:
        layers = layer_means(panel, variant)
        is_ours, color = variant.method == "anchorkv", theme.color(variant.method, unknown)
        axes.plot(list(layers), list(layers.values()), color=color, lw=2.2 if is_ours else 1.2, ls=style.line_style(variant),
                  zorder=4 if is_ours else 3)
        ends.append((variant.family, list(layers)[-1], list(layers.values())[-1], color, is_ours))
    axes.set_ylim(bottom=0)
    axes.margins(x=0.02)
    axes.set_xlabel("layer")
    axes.set_ylabel("relative error")
    axes.grid(True)
    _label_ends(axes, theme, ends)
    at = f" at {ratio:g}x" if ratio else ""
    _captions(figure, theme, f"Error of the attention output{at}", context_line(panel))
    return figure
