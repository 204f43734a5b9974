"""The page of a run: one HTML document that fetches nothing. Pure.

Every text of a run is escaped where it enters the page; the policy in its head
keeps a browser from fetching anything, should a text get through.
"""

from __future__ import annotations

import html
import json
from collections.abc import Sequence

from launcher.monitor.checkpoints import checkpoints_text
from launcher.monitor.duration import format_seconds
from launcher.report.charts import (
    NUM_RANKS_MAX,
    Figure,
    duration_chart,
    loss_chart,
    timeline_chart,
)
from launcher.report.record import RunRecord
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

_DRAW = """
for (const [id, figure] of Object.entries(JSON.parse(
    document.getElementById("figures").textContent))) {
  Plotly.newPlot(id, figure.data, figure.layout, {responsive: true, displayModeBar: false});
}
"""


def build_page(record: RunRecord, notes: Sequence[str], plotly_js: str) -> str:
    """Return the page; `notes` are remarks about the log that it was made from."""
    figures = {
        "loss": loss_chart(record),
        "durations": duration_chart(record),
        "timeline": timeline_chart(record),
    }
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
            _summary(record),
            _failures(record),
            recoveries_card(record),
            _chart("loss", "Loss", figures),
            _chart("durations", "Step times", figures),
            _chart("timeline", _timeline_title(record), figures, _PHASES_TEXT),
            _notes(notes),
            f'<script type="application/json" id="figures">{_to_json(figures)}</script>',
            f"<script>{plotly_js}</script>",
            f"<script>{_DRAW}</script>",
            "</body></html>",
            "",
        ]
    )


def summary_rows(record: RunRecord) -> list[tuple[str, str]]:
    """Return the name and value of each line of the page's table."""
    job, state = record.job, record.state
    rows = [
        ("recipe", job.recipe.name),
        ("version", str(job.recipe.version)),
        ("digest", job.digest()),
        ("result", result_text(state)),
        ("nodes x workers", f"{job.trainer.num_nodes} x {job.trainer.num_devices}"),
        ("steps", f"{state.num_steps} of {state.max_steps}"),
        *_loss_rows(record),
        ("wall time", format_seconds(record.wall_s)),
    ]
    if (rate := record.samples_per_second) is not None:
        rows.append(("samples per second", f"{rate:.1f}"))
    if faults := faults_text(state, record.lost_s, record.wall_s):
        rows.append(("faults", faults))
    elif state.generation:
        rows.append(("starts of the workers", str(state.generation + 1)))
    if tiers := checkpoints_text(state.tiers):
        rows.append(("tiers", tiers))
    if stored := store_text(state, record.start + record.wall_s):
        rows.append(("store", stored))
    if state.checkpoint:
        rows.append(("checkpoint", state.checkpoint + _size(state.checkpoint_bytes)))
    return rows + [("lost", each) for each in state.losses]


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


def _size(num_bytes: int | None) -> str:
    return "" if num_bytes is None else f" ({num_bytes / 1e6:,.1f} MB)"


def _summary(record: RunRecord) -> str:
    status = record.state.exit_status
    kind = "open" if status is None else "bad" if status else "good"
    lines = []
    for name, value in summary_rows(record):
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
        return f"What each rank did when (the first {NUM_RANKS_MAX} of {num_ranks})"
    return "What each rank did when"


def _notes(notes: Sequence[str]) -> str:
    if not notes:
        return ""
    items = "".join(f"<li>{html.escape(note)}</li>" for note in notes)
    return f'<section class="card"><h2>About the log</h2><ul>{items}</ul></section>'


def _to_json(figures: dict[str, Figure]) -> str:
    """Return JSON that cannot end the element it stands in."""
    return json.dumps(figures, ensure_ascii=True, allow_nan=False).replace("<", "\\u003c")
