from __future__ import annotations

import html
import json
import re
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from launcher.composition.frozen import ROOT_FILE, File, Frozen, frozen_text
from launcher.errors import RecipeError
from launcher.job import Job
from launcher.report import summary_text, write_report
from launcher.report.page import build_page, summary_rows
from launcher.report.record import Span, build_record
from launcher.rundir import command_comment
from resilience.events import Event, EventLog
from tests.launcher.local_job import local_job
from tests.launcher.run_events import all_ranks, event, step_event, whole_run

SCRIPT = "<script>alert(1)</script>"


def job() -> Job:
    return local_job("trainer.max_steps=4")


def page_of(events: Sequence[Event], notes: Sequence[str] = ()) -> str:
    return build_page(build_record(job(), events), notes, b"packed")


def figures_in(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="figures">(.*?)</script>', page)
    assert found
    figures: dict[str, Any] = json.loads(found[1])
    return figures


def phases(spans: Sequence[Span], rank: int) -> list[tuple[str, float, float]]:
    return [(span.phase, span.start_s, span.end_s) for span in spans if span.rank == rank]


def test_time_line_has_every_phase_of_every_rank() -> None:
    spans = build_record(job(), whole_run()).spans

    expected = [
        ("starting workers", 0.0, 2.0),
        ("process group", 2.0, 5.0),
        ("data", 5.0, 6.0),
        ("model", 6.0, 8.0),
        ("training", 8.0, 13.0),
        ("checkpoint", 13.0, 15.0),
        ("training", 15.0, 16.0),
        ("idle", 16.0, 20.0),
    ]
    assert [phases(spans, rank) for rank in range(4)] == [expected] * 4


def test_workers_that_are_started_again_are_starting_until_they_run() -> None:
    events = [
        event("run_started", 0.0),
        event("worker_started", 1.0, 0),
        event("worker_failed", 3.0, 0, message="x"),
        event("worker_started", 7.0, 0, generation=1),
        event("run_finished", 9.0, exit_status=1, reason="x"),
    ]

    assert phases(build_record(job(), events).spans, 0) == [
        ("starting workers", 0.0, 1.0),
        ("process group", 1.0, 3.0),
        ("starting workers", 3.0, 7.0),
        ("process group", 7.0, 9.0),
    ]


def test_table_sums_the_run_up() -> None:
    rows = dict(summary_rows(build_record(job(), whole_run())))

    assert rows == {
        "recipe": "llama/llama3_tiny_pretrain",
        "version": "1",
        "digest": job().digest(),
        "result": "finished",
        "nodes x workers": "2 x 2",
        "steps": "4 of 4",
        "first loss": "4.0000",
        "last loss": "1.0000",
        "fall": "75.0 %",
        "begin": "1970-01-01 00:01:40 UTC",
        "end": "1970-01-01 00:02:00 UTC",
        "wall time": "20 s",
        "samples per second": "16.0",
        "tokens per second": "2,048",
        "last learning rate": "0.001",
        "checkpoint": "/runs/x/checkpoint (2.5 MB)",
    }


def test_charts_hold_the_steps() -> None:
    figures = figures_in(page_of(whole_run()))

    loss, durations = figures["loss"]["data"], figures["durations"]["data"]
    assert [(trace["x"], trace["y"]) for trace in loss] == [([1, 2, 3, 4], [4.0, 3.0, 2.0, 1.0])]
    assert durations[0]["y"] == [0.5] * 4
    assert figures["rates"]["data"][0]["y"] == [0.001] * 4
    assert figures["timeline"]["layout"]["yaxis"]["categoryarray"] == [
        "node-0 rank 0", "node-0 rank 1", "node-1 rank 2", "node-1 rank 3"
    ]  # fmt: skip


def test_loss_that_is_no_number_is_a_gap_and_named_in_the_table() -> None:
    events = [step_event(0, 1.0, 4.0), step_event(1, 2.0, "NaN")]

    rows = dict(summary_rows(build_record(job(), events)))
    (trace,) = figures_in(page_of(events))["loss"]["data"]

    assert (rows["last loss"], rows["fall"]) == ("nan", "-")
    assert trace["y"] == [4.0, None]


def test_curve_over_several_starts_is_one_with_marks() -> None:
    events = [step_event(number, 1.0 + number, 4.0 - number, start=0) for number in range(4)]
    # Its last step is written again by who goes on from it, as of the start that took it.
    again = [step_event(3, 10.0, 1.0, start=0, duration_s=None)]
    more = [step_event(number, 8.0 + number, 4.0 - number, start=1) for number in range(4, 6)]

    one = figures_in(page_of(events))["loss"]["data"]
    both = figures_in(page_of([*events, *again, *more]))["loss"]["data"]

    assert len(one) == 1
    curve, marks = both
    assert curve["x"] == [1, 2, 3, 4, 5, 6]
    assert (marks["name"], marks["x"], marks["y"]) == ("start", [5], [0.0])
    assert marks["text"] == ["start 1 of the run: step 5"]


@pytest.mark.parametrize("events", [[], [event("run_started", 1.0)]], ids=["none", "started"])
def test_run_that_got_nowhere_has_a_page_that_says_so(events: list[Event]) -> None:
    page = page_of(events)

    assert page.count("The run did not get that far.") == 5
    assert "no end on record" in page
    assert figures_in(page) == {}


class Tags(HTMLParser):
    """Collects what a browser would take for scripts, and for references to elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.num_scripts = 0
        self.references: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.num_scripts += tag == "script"
        self.references += [value or "" for name, value in attrs if name in {"src", "href"}]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_text_of_a_run_stays_text() -> None:
    base = job()
    recipe = base.recipe.model_copy(update={"description": SCRIPT, "name": SCRIPT})
    hostile = event("worker_failed", 5.0, 0, at=SCRIPT, message=f"{SCRIPT}\nnext")
    record = build_record(
        base.model_copy(update={"recipe": recipe}),
        [
            event("run_started", 1.0),
            hostile,
            event("run_finished", 9.0, exit_status=1, reason=SCRIPT),
        ],
    )
    tags = Tags()

    tags.feed(page := build_page(record, [SCRIPT], b"packed"))

    # The figures, the packed library, and the one that draws.
    assert tags.num_scripts == 3
    assert tags.references == []
    # Name, title, description, table, result, failure's node and message, note.
    assert tags.text.count(SCRIPT) == 8
    labels = figures_in(page)["timeline"]["layout"]["yaxis"]["categoryarray"]
    assert labels == [html.escape(f"{SCRIPT} rank 0")]


def test_failures_are_listed_first_to_last() -> None:
    page = page_of(
        [
            event("worker_failed", 3.0, 0, message="reset by peer"),
            event("worker_failed", 2.0, 3, message="out of memory"),
        ]
    )

    assert 0 < page.index("node-1, rank 3: out of memory") < page.index("reset by peer")


def write_folder(folder: Path, *tail: bytes) -> None:
    (folder / "job.json").write_text(job().to_json())
    with EventLog(folder / "events.jsonl", node="node-0", rank=0, generation=0) as log:
        log.write("step", step=0, loss=5.5, duration_s=0.1)
    with (folder / "events.jsonl").open("ab") as file:
        file.write(b"".join(tail))


def test_report_is_one_file_made_of_job_and_events_alone(tmp_path: Path) -> None:
    write_folder(tmp_path)

    path = write_report(tmp_path)

    page = path.read_text("utf-8")
    assert path == tmp_path / "report.html"
    assert sorted(each.name for each in tmp_path.iterdir()) == [
        "events.jsonl",
        "job.json",
        "report.html",
    ]
    assert "5.5000" in page
    assert "Plotly.newPlot" in page
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=", page)


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        pytest.param((), "none", id="none"),
        pytest.param(
            ("trainer.max_steps=40", "data.path=/a b/<c>"),
            "trainer.max_steps=40 &#39;data.path=/a b/&lt;c&gt;&#39;",
            id="some",
        ),
    ],
)
def test_report_says_how_the_run_was_begun_and_where_the_logs_are(
    tmp_path: Path, overrides: tuple[str, ...], text: str
) -> None:
    write_folder(tmp_path)
    (tmp_path / "logs").mkdir()
    files = {ROOT_FILE: File(content={}, package=None)}
    frozen = Frozen(name="a/b", version=1, digest="0" * 64, files=files, overrides=overrides)
    told = command_comment(["recipe=a/b", "run.dir=a\nb", *overrides])
    (tmp_path / "recipe.yaml").write_text(frozen_text(frozen) + told)

    page = write_report(tmp_path).read_text("utf-8")

    words = f"launcher recipe=a/b &#39;run.dir=a\nb&#39; {'' if text == 'none' else text}".rstrip()
    assert f"<tr><th>command line</th><td>{words}</td></tr>" in page
    assert f"<tr><th>overrides</th><td>{text}</td></tr>" in page
    assert f"<tr><th>logs</th><td>{tmp_path / 'logs'}</td></tr>" in page


def test_report_says_what_it_left_out(tmp_path: Path) -> None:
    write_folder(tmp_path, b"hello\n", b'{"time":1.0,"no\n', b'{"time":')

    page = write_report(tmp_path).read_text("utf-8")

    assert "left out: events.jsonl, line 2: " in page
    assert "left out: 1 lines of events.jsonl whose writer died within them" in page
    assert "left out: the end of events.jsonl, which no newline closes" in page


@pytest.mark.parametrize(
    ("missing", "message"),
    [("job.json", "cannot read the job {}/job.json"), ("events.jsonl", "no run in {}: it has no")],
)
def test_folder_without_a_run_is_refused(tmp_path: Path, missing: str, message: str) -> None:
    write_folder(tmp_path)
    (tmp_path / missing).unlink()

    with pytest.raises(RecipeError, match=message.format(tmp_path)):
        write_report(tmp_path)


def test_job_of_another_version_is_refused(tmp_path: Path) -> None:
    write_folder(tmp_path)
    (tmp_path / "job.json").write_text("{}")

    with pytest.raises(RecipeError, match=r"job\.json is no job of this version"):
        write_report(tmp_path)


def test_summary_at_the_end_of_a_run() -> None:
    text = summary_text(build_record(job(), whole_run()).state, Path("/runs/x/report.html"))

    assert text == (
        "llama/llama3_tiny_pretrain version 1: finished\n"
        "  steps       4 of 4\n"
        "  loss        4.0000 -> 1.0000 (fell by 75.0 %)\n"
        "  wall time   20 s\n"
        "  checkpoint  /runs/x/checkpoint\n"
        "  report      /runs/x/report.html"
    )


def test_summary_of_a_run_that_failed_at_once() -> None:
    ended = event("run_finished", 3.0, exit_status=2, reason="node-0 ended with exit status 2")

    text = summary_text(build_record(job(), [event("run_started", 1.0), ended]).state, None)

    assert text == (
        "llama/llama3_tiny_pretrain version 1: "
        "failed with exit status 2: node-0 ended with exit status 2\n"
        "  steps       0 of 4\n"
        "  wall time   2.0 s"
    )


def test_summary_of_a_loss_that_rose() -> None:
    events = [*all_ranks("model_ready", 0.0), step_event(0, 1.0, 2.0), step_event(1, 2.0, 3.0)]

    assert "2.0000 -> 3.0000 (rose by 50.0 %)" in summary_text(
        build_record(job(), events).state, None
    )
