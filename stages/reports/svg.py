"""Charts as inline SVG: drawn by matplotlib with stand-in colours that become the page's CSS variables.

So one drawing follows the page's light, dark and printed colours, its fonts, and the reader's width.
"""

import io
import re
import warnings
from collections.abc import Callable
from typing import Any
from xml.etree import ElementTree

import numpy as np
import numpy.typing as npt
from markupsafe import Markup

Floats = npt.NDArray[np.float64]

ROUND_STEPS = [1, 2, 2.5, 5, 10]  # between an axis's ticks, times a power of ten

# The CSS variables a chart may use; style.html.jinja gives each a value for light and for dark.
TONES = (
    "ink", "muted", "grid", "page", "train", "heldout",
    "pretrained", "sft", "best-of-n", "ppo", "other-1", "other-2", "other-3",
)  # fmt: skip
STAND_INS = {tone: f"#0101{number:02x}" for number, tone in enumerate(TONES, 1)}
VARIABLES = {stand_in: f"var(--{tone})" for tone, stand_in in STAND_INS.items()}

STYLE = {
    "svg.fonttype": "none",  # text stays text: selectable, in the page's font
    "svg.hashsalt": "heed",
    "text.parse_math": False,  # a "$" in a policy's name is a dollar
    "font.size": 11,
    "text.color": STAND_INS["ink"],
    "axes.labelcolor": STAND_INS["muted"],
    "axes.edgecolor": STAND_INS["grid"],
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": STAND_INS["grid"],
    "grid.linewidth": 0.8,
    "xtick.labelcolor": STAND_INS["muted"],
    "ytick.labelcolor": STAND_INS["muted"],
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "lines.linewidth": 1.8,
    "lines.markersize": 6,
    "lines.solid_capstyle": "round",
}


def running_mean(values: Floats, window: int) -> Floats:
    """The mean of up to `window` values around each, fewer at the ends."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    places = np.arange(len(values))
    starts, ends = np.maximum(places - window // 2, 0), np.minimum(places + window // 2 + 1, len(values))
    return np.asarray((sums[ends] - sums[starts]) / (ends - starts), dtype=np.float64)


def tone(name: str) -> str:
    """The stand-in for a CSS variable of the page."""
    return STAND_INS[name]


def set_ticks(axis: Any, num: int, *, whole: bool = False) -> None:
    """At most `num` ticks on one of matplotlib's axes, at round values."""
    from matplotlib.ticker import MaxNLocator

    steps = [1, 2, 5, 10] if whole else ROUND_STEPS
    axis.set_major_locator(MaxNLocator(num, integer=whole, steps=steps))


def show_percent(axis: Any) -> None:
    """Label the ticks of shares in percent, with as many digits as they need, and end the axis at 0% and 100%.

    Call it after everything is drawn and the margins are set.
    """
    from matplotlib.ticker import FuncFormatter

    axis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:.4g}%"))
    set_limits = axis.axes.set_xlim if axis.axis_name == "x" else axis.axes.set_ylim
    low, high = axis.axes.get_xlim() if axis.axis_name == "x" else axis.axes.get_ylim()
    set_limits(max(low, 0.0), min(high, 1.0))


def draw(
    paint: Callable[[Any], None], *, width: float, height: float, margins: tuple[float, ...], label: str, name: str
) -> Markup:
    """One chart as an <svg> element.

    `paint` draws on matplotlib axes. `width`, `height` and `margins` (left, right, bottom, top) are in CSS pixels at
    the natural size; `label` is what a screen reader says; `name` sets the chart's ids apart from other charts'.
    """
    import matplotlib  # takes a second, and most commands draw nothing
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    left, right, bottom, top = margins
    # From the defaults, so that a reader's own matplotlibrc does not change the report.
    style: dict[Any, Any] = {
        key: value for key, value in matplotlib.rcParamsDefault.items() if not key.startswith("backend")
    }
    style.update(STYLE)
    with matplotlib.rc_context(style), warnings.catch_warnings():
        # Layout may lack a glyph that the reader's browser has.
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        figure = Figure(figsize=(width / 72, height / 72), dpi=72)
        FigureCanvasSVG(figure)
        sides = (left / width, bottom / height, 1 - (left + right) / width, 1 - (bottom + top) / height)
        paint(figure.add_axes(sides))
        buffer = io.StringIO()
        no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(buffer, format="svg", transparent=True, metadata=no_metadata)
    return Markup(_for_page(buffer.getvalue(), label, name))  # ElementTree has escaped text and attributes


def _for_page(svg: str, label: str, name: str) -> str:
    """Matplotlib's file as an element of an HTML page: no namespaces, no global styles, no ids that clash."""
    root = ElementTree.fromstring(svg)
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        element.tail = None
        element.text = element.text if element.tag == "text" else None
        element.attrib = {key.rpartition("}")[2]: value for key, value in element.attrib.items()}
    used = {match for element in root.iter() for match in _references(element)}
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag in ("style", "metadata") or (child.tag == "defs" and not len(child)):
                parent.remove(child)
        _rewrite(parent, used, name)
    box = root.attrib["viewBox"]
    root.attrib = {"class": "chart", "viewBox": box, "role": "img", "aria-label": label}
    return ElementTree.tostring(root, encoding="unicode")


def _references(element: ElementTree.Element) -> list[str]:
    return re.findall(r"#([\w.-]+)", element.get("href", "") + element.get("clip-path", ""))


def _rewrite(element: ElementTree.Element, used: set[str], name: str) -> None:
    attributes = element.attrib
    identity = attributes.pop("id", "")
    if identity in used:
        attributes["id"] = f"{name}-{identity}"
    for key in ("href", "clip-path"):
        if key in attributes:
            attributes[key] = attributes[key].replace("#", f"#{name}-")
    if "style" in attributes:
        attributes["style"] = _page_style(attributes["style"])
    for key in ("d", "x", "y", "transform"):
        if key in attributes:
            attributes[key] = re.sub(r"\d+\.\d+", lambda found: f"{float(found[0]):.2f}", attributes[key])
            attributes[key] = " ".join(attributes[key].split())


def _page_style(style: str) -> str:
    style = re.sub(r"#[0-9a-f]{6}", lambda found: VARIABLES[found[0]], style)
    style = re.sub(r"font-family:[^;]*;?\s*", "", style)
    # --text lets narrow screens, which shrink the drawing, keep its text readable.
    return re.sub(r"font-size: ([\d.]+)px", r"font-size: calc(\1px * var(--text, 1))", style)
