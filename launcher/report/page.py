"""The page of a run: one HTML document that fetches nothing, made from page.html.j2.

The template escapes every text of a run; the policy in its head keeps a browser from fetching
anything, should a text get through.
"""

from __future__ import annotations

import base64
import datetime
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import jinja2
from markupsafe import Markup

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
from launcher.report.recoveries import TITLES, recovery_cells
from launcher.report.summary import fall_percent, faults_text, result_text, store_text


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
    status = record.state.exit_status
    return _template().render(
        recipe=record.job.recipe,
        rows=[*summary_rows(record), *folder_rows],
        result="open" if status is None else "bad" if status else "good",
        failures=record.failures,
        titles=TITLES,
        recoveries=[
            (each.is_injected, list(zip(TITLES, recovery_cells(each, record.start), strict=True)))
            for each in record.recoveries
        ],
        account=_account(record),
        figures=figures,
        shown_ranks=_shown_ranks(record),
        notes=notes,
        drawn=_to_json({name: each for name, each in figures.items() if each["data"]}),
        plotly=base64.b64encode(plotly_gzip).decode("ascii"),
    )


@cache
def _template() -> jinja2.Template:
    """Return the page's template, which escapes all that is filled in."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template("page.html.j2")


def _has_values(figure: Figure) -> bool:
    return any(value is not None for trace in figure["data"] for value in trace["y"])


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


def _account(record: RunRecord) -> list[tuple[str, str, str]]:
    """Return parts of the time with a rank's seconds on average, and the share of all."""
    account = account_of(record)
    if account.total_s <= 0:
        return []
    return [
        (
            part,
            format_seconds(seconds / account.num_ranks),
            f"{100 * seconds / account.total_s:.1f} %",
        )
        for part, seconds in account.seconds.items()
    ]


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


def _shown_ranks(record: RunRecord) -> str:
    """Say how many ranks the time line shows, where these are not all."""
    num_ranks = len({span.rank for span in record.spans})
    if num_ranks > NUM_RANKS_MAX:
        return f" ({NUM_RANKS_MAX} of {num_ranks}, those that failed among them)"
    return ""


def _to_json(figures: dict[str, Figure]) -> Markup:
    """Return JSON that cannot end the element it stands in."""
    text = json.dumps(figures, ensure_ascii=True, allow_nan=False)
    return Markup(text.replace("<", "\\u003c"))
