"""The page of a run: one HTML document that fetches nothing. Pure.

Every text of a run is escaped where it enters the page; the policy in its head
keeps a browser from fetching anything, should a text get through.
"""

from __future__ import annotations

import base64
import datetime
import html
import json
from collections.abc import Sequence

from launcher.monitor.checkpoints import checkpoints_text
from launcher.monitor.duration import format_seconds
from launcher.report.account import account_of
from launcher.report.charts import (
    NUM_RANKS_MAX,
    Figure,
    loss_chart,
    size_chart,
    step_chart,
    timeline_chart,
)
from launcher.report.record import RunRecord, Step
from launcher.report.recoveries import recoveries_card
from launcher.report.summary import fall_percent, faults_text, result_text, store_text

_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:"

_STYLE = """
:root { color-scheme: light; }
body { margin: 0 auto; max-width: 1080px; padding: 24px; background: #f5f7f9; color: #22303c;
  font: 15px/1.45 system-ui, sans-serif; }
h1 { margin: 0; font-size: 24px; overflow-wrap: anywhere; }
h2 { margin: 0 0 4px; font-size: 16px; }
.about { margin: 4px 0 16px; color: #5b6b79; overflow-wrap: anywhere; }
.card .about { margin: 0; font-size: 13px; } .card .about:empty { display: none; }
.card { margin: 0 0 16px; padding: 16px 18px; background: #fff; border: 1px solid #dfe3e8;
  border-radius: 8px; }
.good { color: #1f7a4a; } .bad { color: #b3261e; } .open { color: #8a5a00; }
table { width: 100%; border-collapse: collapse; table-layout: fixed; }
th, td { padding: 6px 8px; border-bottom: 1px solid #eef1f4; text-align: left;
  vertical-align: top; overflow-wrap: anywhere; }
tr:last-child th, tr:last-child td { border-bottom: 0; }
th { width: 190px; color: #5b6b79; font-weight: 500; }
td { font-variant-numeric: tabular-nums; }
pre { margin: 6px 0 0; white-space: pre-wrap; overflow-wrap: anywhere; font-size: 13px; }
.empty { color: #5b6b79; }
.scroll { overflow-x: auto; }
table.recoveries { table-layout: auto; font-size: 13px; }
table.recoveries th, table.recoveries td { width: auto; white-space: nowrap; }
table.recoveries td.words { min-width: 150px; white-space: normal; }
.injected { padding: 1px 6px; border-radius: 8px; background: #fdf0d5; color: #8a5a00; }
"""

_PHASES_TEXT = (
    "starting workers: until a worker's program runs; process group: it imports torch and the "
    "workers find each other; recovery: from the stop after a fault until the rank has its state; "
    "checkpoint: one rank writes, the others take part or wait; idle: the worker has ended, the "
    "run has not; a dotted line is a fault, by its number in the table; marks above the ranks are "
    "checkpoints in the tiers"
)

_ACCOUNT_TEXT = (
    "seconds of a rank on average, and the share of all; detection, teardown and repair lie "
    "between a fault and the first step after it; lost work was done again"
)

# The library that draws is a third as long when it is packed. As an element's text it needs no
# right but the one that the page's own scripts have.
_DRAW = """
const packed = document.getElementById("plotly").textContent.trim();
const bytes = Uint8Array.from(atob(packed), (letter) => letter.charCodeAt(0));
const unpacked = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
new Response(unpacked).text().then((text) => {
  const library = document.createElement("script");
  library.textContent = text;
  document.head.append(library);
  for (const [id, figure] of Object.entries(JSON.parse(
      document.getElementById("figures").textContent))) {
    Plotly.newPlot(id, figure.data, figure.layout, {responsive: true, displayModeBar: false});
  }
});
"""


def build_page(
    record: RunRecord,
    notes: Sequence[str],
    plotly_gzip: bytes,
    folder_rows: Sequence[tuple[str, str]] = (),
) -> str:
    """Return the page; `notes` are remarks about the log that it was made from.

    `plotly_gzip` is the script that draws, packed. `folder_rows` are names and values of what the
    run's folder tells beside its events.
    """
    figures = {
        "loss": loss_chart(record),
        "durations": step_chart(record, "seconds a step", lambda step: step.duration_s),
        "rates": step_chart(record, "learning rate", lambda step: step.lr, exponentformat="e"),
        "norms": step_chart(record, "gradient norm", lambda step: step.grad_norm),
        "timeline": timeline_chart(record),
    }
    if (sizes := size_chart(record))["data"]:
        figures["sizes"] = sizes
    if record.state.is_script and record.lines:
        # A program may tell of its steps without some of these numbers.
        figures = {name: each for name, each in figures.items() if _has_values(each)}
    title = html.escape(record.job.recipe.name)
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{html.escape(_POLICY)}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{title}</title>",
            f"<style>{_STYLE}</style></head><body>",
            f"<h1>{title}</h1>",
            f'<p class="about">{html.escape(record.job.recipe.description)}</p>',
            _summary([*summary_rows(record), *folder_rows], record.state.exit_status),
            _failures(record),
            recoveries_card(record),
            _account(record),
            *(
                _chart(name, heading, figures)
                for name, heading in _CHARTS.items()
                if name in figures
            ),
            _chart("sizes", "Size", figures) if "sizes" in figures else "",
            _chart("timeline", _timeline_title(record), figures, _PHASES_TEXT),
            _notes(notes),
            f'<script type="application/json" id="figures">{_to_json(figures)}</script>',
            '<script type="application/octet-stream" id="plotly">',
            base64.b64encode(plotly_gzip).decode("ascii"),
            "</script>",
            f"<script>{_DRAW}</script>",
            "</body></html>",
            "",
        ]
    )


def _has_values(figure: Figure) -> bool:
    return any(value is not None for trace in figure["data"] for value in trace["y"])


_CHARTS = {
    "loss": "Loss",
    "durations": "Step times",
    "rates": "Learning rate",
    "norms": "Gradient norm",
}


def summary_rows(record: RunRecord) -> list[tuple[str, str]]:
    """Return the name and value of each line of the page's table."""
    job, state = record.job, record.state
    told = {"code": state.code_text, "steps": state.steps_text}
    rows = [
        ("recipe", job.recipe.name),
        ("version", str(job.recipe.version)),
        ("digest", job.digest()),
        ("result", result_text(state)),
        ("nodes x workers", f"{job.trainer.num_nodes} x {job.trainer.workers_per_node}"),
        *((name, text) for name, text in told.items() if text),
        *_loss_rows(record),
        *_time_rows(record),
    ]
    if (rate := record.samples_per_second) is not None:
        rows.append(("samples per second", f"{rate:.1f}"))
    if (rate := record.tokens_per_second) is not None:
        rows.append(("tokens per second", f"{rate:,.0f}"))
    if steps := [step for line in record.lines for step in line]:
        rows += _last_values(steps[-1])
    if faults := faults_text(state, record.recoveries, record.lost_s, record.wall_s):
        rows.append(("faults", faults))
    elif state.generation:
        rows.append(("starts of the workers", str(state.generation + 1)))
    if tiers := checkpoints_text(state.tiers):
        rows.append(("tiers", tiers))
    if stored := store_text(state, record.end, "before the end"):
        rows.append(("store", stored))
    if state.checkpoint:
        num_bytes = state.checkpoint_bytes
        size = "" if num_bytes is None else f" ({num_bytes / 1e6:,.1f} MB)"
        rows.append(("checkpoint", state.checkpoint + size))
    return rows + [("lost", each) for each in state.losses]


def _time_rows(record: RunRecord) -> list[tuple[str, str]]:
    if not record.starts:
        return []
    wall = format_seconds(record.wall_s)
    if len(record.starts) > 1:
        between_s = record.end - record.start - record.wall_s
        wall += f" in {len(record.starts)} starts, {format_seconds(between_s)} between them"
    times = {"begin": record.start, "end": record.end}
    return [*((name, _utc_text(at)) for name, at in times.items()), ("wall time", wall)]


def _utc_text(seconds: float) -> str:
    moment = datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc)
    return f"{moment:%Y-%m-%d %H:%M:%S} UTC"


def _last_values(step: Step) -> list[tuple[str, str]]:
    values = {"last learning rate": step.lr, "last gradient norm": step.grad_norm}
    return [(name, f"{value:.4g}") for name, value in values.items() if value is not None]


def _account(record: RunRecord) -> str:
    account = account_of(record)
    if account.total_s <= 0:
        return ""
    shares = [
        (part, seconds / account.num_ranks, 100 * seconds / account.total_s)
        for part, seconds in account.seconds.items()
    ]
    rows = "".join(
        f"<tr><th>{html.escape(part)}</th><td>{format_seconds(seconds)}</td>"
        f"<td>{share:.1f} %</td></tr>"
        for part, seconds, share in shares
    )
    return (
        '<section class="card"><h2>Where the time went</h2>'
        f'<p class="about">{html.escape(_ACCOUNT_TEXT)}</p><table>{rows}</table></section>'
    )


def _loss_rows(record: RunRecord) -> list[tuple[str, str]]:
    first, last = record.state.first_loss, record.state.loss
    if first is None or last is None:
        return []
    fall = fall_percent(first, last)
    return [
        ("first loss", f"{first:.4f}"),
        ("last loss", f"{last:.4f}"),
        ("fall", "-" if fall is None else f"{fall:.1f} %"),
    ]


def _summary(rows: Sequence[tuple[str, str]], status: int | None) -> str:
    kind = "open" if status is None else "bad" if status else "good"
    lines = []
    for name, value in rows:
        mark = f' class="{kind}"' if name == "result" else ""
        lines.append(f"<tr><th>{html.escape(name)}</th><td{mark}>{html.escape(value)}</td></tr>")
    return f'<section class="card"><table>{"".join(lines)}</table></section>'


def _failures(record: RunRecord) -> str:
    if not record.failures:
        return ""
    texts = "".join(f"<pre>{html.escape(text)}</pre>" for text in record.failures)
    return f'<section class="card"><h2 class="bad">Failures, first to last</h2>{texts}</section>'


def _chart(name: str, title: str, figures: dict[str, Figure], caption: str = "") -> str:
    if figures[name]["data"]:
        inner = f'<div id="{name}"></div><p class="about">{html.escape(caption)}</p>'
    else:
        inner = '<p class="empty">The run did not get that far.</p>'
        del figures[name]
    return f'<section class="card"><h2>{html.escape(title)}</h2>{inner}</section>'


def _timeline_title(record: RunRecord) -> str:
    num_ranks = len({span.rank for span in record.spans})
    if num_ranks > NUM_RANKS_MAX:
        shown = f"{NUM_RANKS_MAX} of {num_ranks}, those that failed among them"
        return f"What each rank did when ({shown})"
    return "What each rank did when"


def _notes(notes: Sequence[str]) -> str:
    if not notes:
        return ""
    items = "".join(f"<li>{html.escape(note)}</li>" for note in notes)
    return f'<section class="card"><h2>About the log</h2><ul>{items}</ul></section>'


def _to_json(figures: dict[str, Figure]) -> str:
    """Return JSON that cannot end the element it stands in."""
    return json.dumps(figures, ensure_ascii=True, allow_nan=False).replace("<", "\\u003c")
