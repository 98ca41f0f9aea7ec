"""The HTML page of a report, in one file that needs no network; plots are embedded as SVG."""

import io
from base64 import b64encode
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from deploy.report.plots import PLOTS, PlottedRun, figure_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.45 system-ui, sans-serif; color: #1d2329; background: #f4f5f7; margin: 0; }
main { max-width: 84rem; margin: auto; padding: 1rem; }
h1 { font-size: 1.4rem; margin: 0.2rem 0; }
h2 { font-size: 1rem; margin: 0; }
p { margin: 0.1rem 0 0.5rem; color: #59636e; font-size: 0.86rem; }
.plots { display: grid; gap: 1rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)); }
section { background: #fff; border: 1px solid #dfe3e8; border-radius: 6px; padding: 0.8rem; }
img { width: 100%; height: auto; display: block; }
.wide { margin-top: 1rem; overflow-x: auto; }
.wide img { min-width: 44rem; }
.figures { overflow-x: auto; margin-bottom: 1rem; }
table { border-collapse: collapse; font-size: 0.88rem; }
th, td { text-align: right; padding: 0.2rem 0.8rem; border-bottom: 1px solid #eceff2; }
th:first-child { text-align: left; font-weight: 500; }
thead th { font-weight: 600; }
i { display: inline-block; width: 0.7rem; height: 0.7rem; border-radius: 2px; }
"""


def page(title: str, runs: Sequence[PlottedRun], timeline: tuple[str, "Figure"] | None) -> str:
    """Return the text of the page: figures, all plots, and a timeline with its title."""
    parts = [_figures(runs), '<div class="plots">']
    for plot in PLOTS:
        head = f"<h2>{escape(plot.title)}</h2><p>{escape(plot.description)}</p>"
        parts.append(f"<section>{head}{_image(figure_of(plot, runs), plot.title)}</section>")
    parts.append("</div>")
    if timeline is not None:
        name, figure = timeline
        head = f"<h2>{escape(name)}</h2>"
        parts.append(f'<section class="wide">{head}{_image(figure, name)}</section>')
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n"
        f"<body><main><h1>{escape(title)}</h1>\n" + "\n".join(parts) + "\n</main></body></html>\n"
    )


def _figures(runs: Sequence[PlottedRun]) -> str:
    """Return a table with a row for each figure and a column for each run."""
    head = "".join(
        f'<th><i style="background:{run.colour}"></i> {escape(run.label)}</th>' for run in runs
    )
    rows = "".join(
        f"<tr><th>{escape(name)}</th>"
        + "".join(f"<td>{escape(run.figures.get(name, '–'))}</td>" for run in runs)
        + "</tr>"
        for name in dict.fromkeys(name for run in runs for name in run.figures)
    )
    return (
        f'<section class="figures"><table><thead><tr><th></th>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></section>"
    )


def _image(figure: "Figure", name: str) -> str:
    """Embed a figure as an image of its own, so that SVG ids of two figures never collide."""
    import matplotlib as mpl

    buffer = io.BytesIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = b64encode(buffer.getvalue()).decode()
    return f'<img alt="{escape(name)}" src="data:image/svg+xml;base64,{text}">'
