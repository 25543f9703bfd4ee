"""The page around tables and figures: one HTML file without scripts and without anything to load."""

import base64
import html

CSS = """
:root { color-scheme: light dark; --surface: #ffffff; --raised: #f6f8fa; --ink: #1f2328; --muted: #59626c; --line: #d8dee4;
  --ours: #0a58ca; --ours-back: #eef4fd; }
@media screen and (prefers-color-scheme: dark) { :root { --surface: #0f1419; --raised: #171d24; --ink: #e6edf3;
  --muted: #9aa4af; --line: #30373f; --ours: #5aa9ff; --ours-back: #14243a; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem 1.5rem 4rem; max-width: 88rem; background: var(--surface); color: var(--ink);
  font: 15px/1.5 "DejaVu Sans", Verdana, sans-serif; }
h1 { font-size: 1.6rem; margin: 0 0 .3rem; }
h2 { font-size: 1.25rem; margin: 3rem 0 .3rem; padding-top: 1rem; border-top: 2px solid var(--line); }
h3 { font-size: 1.05rem; margin: 2rem 0 .5rem; }
h4 { font-size: .95rem; margin: 1.5rem 0 .4rem; }
p { margin: .4rem 0; max-width: 60rem; }
a { color: var(--ours); }
.note, .lead { color: var(--muted); font-size: .85rem; }
.warning { border-left: 4px solid #c77700; padding: .3rem .8rem; background: var(--raised); }
nav ul { columns: 2; padding-left: 1.2rem; font-size: .9rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .82rem; font-variant-numeric: tabular-nums; }
th, td { padding: .28rem .45rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th:first-child { text-align: left; padding-left: .3rem; }
tbody th { font-weight: normal; }
small { color: var(--muted); font-size: .86em; }
thead th { vertical-align: bottom; white-space: normal; color: var(--muted); font-weight: 600; border-bottom: 2px solid var(--line); }
tr.ours th, tr.ours td { background: var(--ours-back); }
tr.ours th { color: var(--ours); font-weight: 700; }
figure { margin: 1.2rem 0; }
figure img { max-width: 100%; height: auto; display: block; }
figure img.dark { display: none; }
@media screen and (prefers-color-scheme: dark) { figure img.light { display: none; } figure img.dark { display: block; } }
figcaption { color: var(--muted); font-size: .85rem; max-width: 60rem; }
@media print {
  @page { size: A4 landscape; margin: 12mm; }
  body { padding: 0; max-width: none; font-size: 10pt; }
  table { font-size: 7pt; } th, td { padding: .2rem .4rem; } .scroll { overflow: visible; }
  h2 ~ h2 { break-before: page; } h3, h4 { break-after: avoid; }
  figure, tr { break-inside: avoid; } thead { display: table-header-group; }
  figure img { max-height: 165mm; }
  nav { display: none; } .scroll table { max-width: 100%; } th, td { white-space: normal; }
}
"""


def figure(title, caption, light, dark, width):
    """One picture in two themes. light, dark: SVG texts; width in CSS pixels."""
    # Two images that CSS switches: the source of a <picture> stays as it is on the screen when the page is printed.
    images = "".join(f'<img class={name} src="{_uri(svg)}" width="{width}" alt="{html.escape(title)}">'
                     for name, svg in (("light", light), ("dark", dark)))
    return (f"<figure>{images}<figcaption>{html.escape(caption)}</figcaption></figure>\n")


def _uri(svg):
    return "data:image/svg+xml;base64," + base64.b64encode(svg).decode()


def section(level, title, anchor=""):
    return f"<h{level}{f' id={anchor}' if anchor else ''}>{html.escape(title)}</h{level}>\n"


def paragraph(text, kind=""):
    return f"<p{f' class={kind}' if kind else ''}>{html.escape(text)}</p>\n"


def contents(entries):
    """entries: (anchor, title)."""
    return "<nav><ul>" + "".join(f'<li><a href="#{a}">{html.escape(t)}</a></li>' for a, t in entries) + "</ul></nav>\n"


def document(title, body):
    return (f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
            f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{CSS}</style></head>\n'
            f"<body>\n{body}</body></html>\n")
