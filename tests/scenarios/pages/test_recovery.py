"""What docs/recovery.md says in numbers is what the code has, and its first command is right."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shlex
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import yaml

from recipes_training.group import CHECKPOINT_TIMEOUT, DATA_TIMEOUT
from resilience.agent.coordination import founding, membership, succession
from resilience.agent.ending import GOOD_END_S, LAST_WORDS_S, LEFT_STATUS
from resilience.agent.evidence.node_states import ANSWER_DEADLINE_S, CLOCKS_APART_S
from resilience.agent.options import parse_options
from resilience.agent.processes import output, starts
from resilience.agent.processes.writer import LIMIT_BYTES
from resilience.agent.services import services
from resilience.comm.agent_store import VALUE_BYTES_MAX
from resilience.comm.generation_store import STORE_BYTES_MAX
from resilience.comm.messages import GAVE_UP_STATUS
from resilience.comm.waits import SLICE
from resilience.comm.world import COLLECTIVE_TIMEOUT
from resilience.inprocess.block import BAD_REPORT_STATUS, COLLECTIVE_DEADLINE
from resilience.runtime import door
from tests.launcher.command import launch

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "recovery.md").read_text("utf-8")
WORDS = " ".join(PAGE.split())
SETTINGS = yaml.safe_load((ROOT / "conf/resilience/checkpointless/default.yaml").read_text())
HOUR, MINUTE = timedelta(hours=1), timedelta(minutes=1)
FAULTS_MAX = 16 * SETTINGS["process_restarts_max"]
PLAIN = parse_options(["--no-recovery", "--", "python", __file__])
PARTY = membership.Options(num_nodes=1, num_local_ranks=1)
SPELLED = {3: "three", 8: "eight"}


def _pipe_bytes() -> int:
    """Return how much of a pipe may wait for its reader, as Linux makes it."""
    reading, writing = os.pipe()
    try:
        return fcntl.fcntl(writing, fcntl.F_GETPIPE_SZ)
    finally:
        os.close(reading)
        os.close(writing)


def _sentences() -> Iterator[str]:
    """Yield what has to stand on the page, with the numbers that the code has."""
    # A fault and the way back.
    yield f"looks every {SLICE.total_seconds():g} s whether its generation goes on"
    yield f"wait for it for at most {COLLECTIVE_DEADLINE / MINUTE:g} minutes"
    yield f"others wait for at most {COLLECTIVE_TIMEOUT / MINUTE:g} minutes, whatever is set"
    yield f"for data at most {DATA_TIMEOUT / HOUR:g} hours"
    yield f"for a state at most {CHECKPOINT_TIMEOUT / HOUR:g} hour."
    yield f"ends at once with status {BAD_REPORT_STATUS} and claims no state"
    yield f"agent ends with status {LEFT_STATUS}, that of a killed one"
    yield f"exit status {GAVE_UP_STATUS}, for whatever starts jobs again"
    yield f"16 nodes and {SETTINGS['process_restarts_max']}, after the {FAULTS_MAX + 1}st"
    # Silent nodes.
    yield f"last argument and has {ANSWER_DEADLINE_S:g} s"
    yield f"more than {CLOCKS_APART_S:g} s after the silence was noticed"
    yield f"the newcomer ends with exit status {succession.TAKEN_NAME_STATUS}"
    yield f"each once a {'second' if succession._RETRY_LEADING_S == 1 else '?'}"
    yield f"asks all nodes before it, {SPELLED[succession._CALLS_MAX]} at a time"
    yield f"has renewed its record for {founding.SILENCE_S:g} s |"
    yield f"has renewed its record for {founding.OTHERS_SILENCE_S:g} s |"
    yield f"for {founding.OTHERS_SILENCE_S:g} s (it does every {founding.RENEWAL_S:g} s)"
    yield f"else {founding.SLACK} further on"
    yield f"skips {founding.SLACK} numbers"
    # The agent.
    yield f"without some standby nodes {PARTY.last_call_s:g} s after the last one"
    yield f"until {SPELLED[starts._STARTS_MAX]} starts in a row have failed"
    yield f"{LIMIT_BYTES >> 20} MiB wait for each destination"
    yield f"at most {GOOD_END_S:g} s where the run has ended well, for {LAST_WORDS_S:g} s where it"
    yield f"for {output._CONSOLE_DEADLINE_S:g} s to the console"
    yield f"it waits for that for at most {services._LOG_DEADLINE_S:g} s"
    yield f"stands still and {_pipe_bytes() >> 10} KiB of them wait"
    yield f"SIGKILL after `--term-deadline-s` ({PLAIN.term_deadline_s:g})"
    yield f"the run (default {PLAIN.max_restarts})"
    # Who is let in.
    yield f"at most {door._HELLO_BYTES + door._PROOF_BYTES} bytes of a connection before it is"
    yield f"that proves nothing within {door.PROOF_S:g} s is closed"
    yield f"at most {VALUE_BYTES_MAX >> 20} MiB. The keys and values of a generation have"
    yield f"of a generation have at most {STORE_BYTES_MAX >> 20} MiB, in base64"
    yield f"At most {door.PLACES_MAX} connections may wait there, {door.ORIGIN_PLACES_MAX} from one"


@pytest.mark.parametrize("sentence", list(_sentences()))
def test_numbers_on_the_page_are_those_of_the_code(sentence: str) -> None:
    assert sentence in WORDS


def test_checkpoints_are_as_far_apart_as_the_page_says() -> None:
    tier = yaml.safe_load((ROOT / "conf/resilience/tiered/run_folder.yaml").read_text())

    assert (
        f"every {'half hour' if tier['store']['every_s'] == 1800 else '?'} in its folder" in WORDS
    )


def test_the_command_that_the_page_begins_with_makes_a_job(tmp_path: Path) -> None:
    block = re.findall(r"^```\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)[0]
    (command,) = re.findall(r"^python -m launcher (.*)", block.replace("\\\n", " "), re.MULTILINE)

    ended = launch(*shlex.split(command), "run.dir=out", folder=tmp_path)

    assert ended.status == 0, ended.err
    job = json.loads((tmp_path / "out" / "job.json").read_text())
    assert (job["trainer"]["sharding"], job["trainer"]["num_replicas"]) == ("hybrid", 2)
    assert job["resilience"]["checkpointless"] == SETTINGS
    assert "--rdzv-attempt" in (tmp_path / "out" / "job.sbatch").read_text()
