"""Real daemons beside an agent: started, killed and ended, and what a run hears of its store."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from resilience.agent.services.services import Services
from tests.processes import wait_for_end
from tests.resilience.agent.places import (
    Place,
    break_store,
    make_store,
    serve,
    start,
    start_agent,
)
from tests.resilience.agent.runs import PROGRAM, Run, fault, plan
from tests.resilience.tiered.daemons import load, make_content, make_id, save
from tests.resilience.tiered.kept import stored

LIMIT_S = 60.0


def test_daemon_is_ready_before_work_begins_and_gone_after_it(place: Place) -> None:
    services, told = start(place, place.service())

    assert told == ["ready"]
    assert place.daemons() == [place.pid()]
    assert os.getsid(place.pid()) == place.pid()

    services.end(removes=True)

    assert place.daemons() == []
    assert not place.arena.exists()
    assert place.said == []


def test_daemon_does_without_a_log_that_hangs(place: Place) -> None:
    """A pipe that nobody opens to read stands in its place."""
    service = place.service()
    os.mkfifo(service.log)

    services, told = start(place, service)

    assert told == ["ready"]
    (said,) = place.said
    assert said.startswith("WARNING: memoryd is started without its log: ")
    services.end(removes=True)
    assert place.daemons() == []
    # Who waits for it still may go on.
    os.close(os.open(service.log, os.O_RDONLY | os.O_NONBLOCK))


def test_daemon_that_refuses_to_start_is_given_up_with_its_words_in_one_line(
    place: Place,
) -> None:
    """Whoever shows why a run ended shows one line, and `status` what events say."""
    service = place.service("--http=nowhere")

    services, (told,) = start(place, service)

    text = (
        "refused to start (exit status 2): argument --http: 'nowhere' is not HOST:PORT, "
        f"as 127.0.0.1:9200 (see {service.log})"
    )
    assert told == f"memoryd {text}"
    assert place.noted == [{"event": "service_lost", "service": "memoryd", "text": text}]
    services.end(removes=False)


@pytest.mark.parametrize("removes", [False, True])
def test_daemon_that_was_stopped_ends_in_order(place: Place, tmp_path: Path, removes: bool) -> None:
    store = tmp_path / "store"
    services, _ = start(place, place.service(config=place.write(store=store)))
    with place.client() as client:
        save(client, make_id(), make_content(1000))
    os.kill(place.pid(), signal.SIGSTOP)

    services.end(removes=removes)

    assert place.daemons() == []
    assert (place.said, lost(place)) == ([], [])
    assert len(stored(store, "steps")) == 1
    assert place.arena.exists() is not removes


@pytest.mark.parametrize("is_required", [True, False])
def test_what_the_store_has_not_got_in_time_is_told(
    place: Place, tmp_path: Path, is_required: bool
) -> None:
    """The run's end is not held up for longer, and nobody takes those steps for safe."""
    store = make_store(tmp_path)
    config = place.write(store=store, drain_s=60.0, deadline_s=60.0, is_required=is_required)
    service = place.service(config=config)
    service = replace(service, limits=replace(service.limits, end_s=0.5, remove_s=0.5))
    services, told = start(place, service)
    assert told == ["ready"]
    break_store(store)
    with place.client() as client:
        save(client, make_id(7), make_content(1000))
    serve(services, lambda: "store_failing" in [each["event"] for each in place.noted])

    assert services.end(removes=True) is not is_required

    where = f"stays in {place.arena}" if is_required else "is not there"
    text = f"did not end in time, and was killed; what it had not brought to the store {where}"
    assert lost(place) == [{"event": "service_lost", "service": "memoryd", "text": text}]
    assert place.said[0].startswith("WARNING: memoryd cannot bring checkpoints to the store ")
    assert place.said[-1].startswith(f"WARNING: memoryd {text}; its last words, of ")
    # A launcher's console shows the lines that say so themselves.
    assert all(line.startswith("WARNING: ") for said in place.said for line in said.splitlines())
    assert place.daemons() == []
    assert place.arena.exists() is is_required


def test_node_of_a_run_that_goes_on_does_without_a_store_that_cannot_be_used(
    place: Place, tmp_path: Path
) -> None:
    store = make_store(tmp_path)
    break_store(store)
    service = place.service(config=place.write(store=store))

    services, told = start(place, service, is_joining=True)

    assert told == ["ready"]
    serve(services, lambda: bool(place.noted))
    assert place.noted[0]["event"] == "store_failing"
    services.end(removes=False)


def test_external_daemon_is_waited_for_at_both_ends_until_the_store_has_all(
    place: Place, tmp_path: Path
) -> None:
    store = make_store(tmp_path)
    config = place.write(store=store, is_external=True)
    services = Services([place.service(config=config)], place.said.append, place.note)
    told: list[str] = []
    services.begin(lambda: told.append("ready"), told.append)
    services.serve(0.1)
    assert told == [], "it is waited for"
    theirs, _ = start(place, place.service(config=place.write(store=store)))
    serve(services, lambda: told == ["ready"])
    break_store(store)
    with place.client() as client:
        save(client, make_id(7), make_content(1000))
        client.flush(step=7, generation=0)
    ended: list[bool] = []
    ending = threading.Thread(target=lambda: ended.append(services.end(removes=True)))
    ending.start()
    ending.join(1.0)
    assert not ended
    store.parent.unlink()
    store.parent.mkdir()

    ending.join(LIMIT_S)

    assert ended == [True]
    assert len(stored(store, "steps")) == 1
    assert place.daemons() == [place.pid()]
    theirs.end(removes=True)


def lost(place: Place) -> list[dict[str, object]]:
    """Return what was said of a service that has not done its duty."""
    return [each for each in place.noted if each["event"] == "service_lost"]


def test_daemon_leaves_a_schedulers_sigterm_to_its_agent(place: Place) -> None:
    """The workers get it, too, and save their last step before the agent ends the daemon."""
    services, _ = start(place, place.service())
    before = place.pid()

    os.kill(before, signal.SIGTERM)
    serve(services, lambda: "SIGTERM is left to the agent" in place.log())
    with place.client() as client:
        save(client, make_id(7), make_content(1000))
    assert place.pid() == before

    services.end(removes=False)
    assert place.daemons() == []


@pytest.mark.parametrize("is_required", [False, True])
def test_daemon_that_was_given_up_is_told_and_leaves_what_only_it_may_have(
    place: Place, tmp_path: Path, is_required: bool
) -> None:
    """Nobody has seen that the store has all of it."""
    config = place.write(store=tmp_path / "store", is_required=is_required)
    service = place.service(config=config)
    service = replace(service, limits=replace(service.limits, short_lives_max=1))
    services, _ = start(place, service)
    os.kill(place.pid(), signal.SIGKILL)
    serve(services, lambda: bool(place.noted))

    assert services.end(removes=True) is not is_required

    where = f"stays in {place.arena}" if is_required else "is not there"
    text = (
        "ended with SIGKILL, 1 times in a row at once, and is given up; the run goes on without "
        f"it; what it had not brought to the store {where}"
    )
    assert place.noted == [{"event": "service_lost", "service": "memoryd", "text": text}]
    assert place.said[-1].startswith(f"WARNING: memoryd {text}; its last words, of ")
    assert place.daemons() == []
    assert place.arena.exists() is is_required


# The process is another agent's, which waits for it.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_second_agent_takes_a_daemon_over_and_the_first_leaves_it_alone(place: Place) -> None:
    first, _ = start(place, place.service())
    pid = place.pid()

    second, told = start(place, place.service())
    serve(first, lambda: len(place.said) == 2)

    assert told == ["ready"]
    assert place.pid() == pid
    assert place.said[0] == "memoryd of an earlier agent goes on"
    assert "taken over by another agent" in place.said[1]
    first.end(removes=True)
    assert place.pid() == pid
    second.end(removes=True)
    assert place.daemons() == []


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_daemon_of_other_settings_in_the_same_file_is_replaced(
    place: Place, tmp_path: Path
) -> None:
    """It ends in order, with all that its store has to get, before the next one begins."""
    first, _ = start(place, place.service(config=place.write(store=tmp_path / "store")))
    content = make_content(1000)
    with place.client() as client:
        save(client, make_id(), content)
    pid = place.pid()

    config = place.write(store=tmp_path / "other", budget_mib=32)
    second, told = start(place, place.service(config=config))

    assert told == ["ready"]
    assert place.daemons() == [place.pid()] != [pid]
    assert len(stored(tmp_path / "store", "steps")) == 1
    with place.client() as client:
        assert load(client, make_id()) == content
        assert client.status()["budget_bytes"] == 32 << 20
    second.end(removes=True)
    first.end(removes=False)


def test_file_that_has_changed_since_the_agent_read_it_is_refused(place: Place) -> None:
    service = place.service(config=place.write())
    place.write(budget_mib=32)

    services, (told,) = start(place, service)

    assert "argument --config-digest: " in told
    assert "has been changed since the agent read it" in told
    services.end(removes=False)


def test_daemon_of_somebody_by_hand_is_not_touched(place: Place) -> None:
    """It has no lease, so nobody's agent has started it."""
    service = place.service()
    unleased = tuple(each for each in service.arguments if not each.startswith("--lease-s"))
    by_hand = replace(service, arguments=unleased)
    first, (told,) = start(place, by_hand)

    assert "the daemon has no lease" in told
    first.end(removes=False)


def start_long_run(run: Run, place: Place) -> None:
    """Start an agent whose program goes on until it is ended, and return when it is at work."""
    variables = plan(fault("tell", "forward", 0, 1, always=True), STEPS=1_000_000, NOTE=run.note)
    run.start(
        "n0", "--config", str(place.folder / "node.json"), "--nproc-per-node", "1",
        "--spares", "0", variables={**variables, **place.variables()}, program=(str(PROGRAM),),
    )  # fmt: skip
    run.wait_for_note()


def test_daemon_outlives_a_killed_agent_until_the_next_one_finds_it(run: Run, place: Place) -> None:
    place.write()
    start_long_run(run, place)
    pid = place.pid()
    run.kill("n0")

    start_long_run(run, place)

    assert place.pid() == pid
    assert "resilience.agent n0: memoryd of an earlier agent goes on" in run.text()
    run.agents["n0"].terminate()
    assert run.wait() == 143, run.show()
    wait_for_end(pid)
    assert place.daemons() == []
    assert place.arena.is_dir()


def test_daemon_whose_agent_does_not_come_back_ends_with_its_lease(place: Place) -> None:
    service = place.service(config=place.write(lease_s=1.0))
    with service.log.open("wb") as log:
        daemon = subprocess.Popen([*service.command, *service.arguments], stderr=log)

        assert daemon.wait(LIMIT_S) == 0

    assert "no agent has come back for 1 s; the daemon ends" in place.log()
    assert place.daemons() == []
    assert [each.name for each in place.arena.iterdir() if each.name != "lock"] == []


@pytest.mark.parametrize(("is_required", "status"), [(True, 74), (False, 0)])
def test_run_that_leaves_steps_behind_says_so(
    run: Run, place: Place, tmp_path: Path, is_required: bool, status: int
) -> None:
    store = make_store(tmp_path)
    place.write(store=store, drain_s=0.1, deadline_s=1.0, is_required=is_required)
    gate = start_agent(run, place)
    # The store is tried before that.
    run.wait_for(lambda event: event.event == "generation_opened")
    break_store(store)
    with place.client() as client:
        save(client, make_id(7), make_content(1000))

    gate.write_bytes(b"")

    assert run.wait() == status, run.show()
    (told,) = [each for each in run.events() if each.event == "service_lost"]
    where = f"stays in {place.arena}" if is_required else "is not there"
    text = f"has ended, and the store lacks step 7; what it had not brought to the store {where}"
    assert told.fields == {"service": "memoryd", "text": text}
    assert f"resilience.agent n0: WARNING: memoryd {text}" in run.text()
    assert place.arena.exists() is is_required


def test_step_that_is_stored_as_the_daemon_ends_is_told(place: Place, tmp_path: Path) -> None:
    """The news of it, and the end of the process that has sent it, are there at one time."""
    store = make_store(tmp_path)
    told = {"event": "step_stored", "store": f"folder:{store}"}
    for step in range(2, 6, 2):
        services, _ = start(place, place.service(config=place.write(store=store)))
        with place.client() as client:
            save(client, make_id(step), make_content(1000))
            serve(services, lambda step=step: {**told, "step": step} in place.noted)  # type: ignore[misc]
            save(client, make_id(step + 1), make_content(1000))

        assert services.end(removes=False)

        assert place.noted[-1] == {**told, "step": step + 1}
    assert place.daemons() == []


def test_run_hears_that_its_store_fails_and_that_it_answers_again(
    place: Place, tmp_path: Path
) -> None:
    store = make_store(tmp_path)
    services, _ = start(place, place.service(config=place.write(store=store)))
    with place.client() as client:
        save(client, make_id(7), make_content(1000))
        serve(services, lambda: len(place.noted) == 1)
        break_store(store)
        save(client, make_id(8), make_content(1000, 8))
        serve(services, lambda: len(place.noted) == 2)
        store.parent.unlink()
        store.parent.mkdir()
        save(client, make_id(9), make_content(1000, 9))
        serve(services, lambda: place.noted[-1].get("step") == 9)

    name = f"folder:{store}"
    failing = place.noted.pop(1)
    # The step between is brought there as well, before the last one or not at all.
    assert [each for each in place.noted if each.get("step") != 8] == [
        {"event": "step_stored", "store": name, "step": 7},
        {"event": "store_well", "store": name},
        {"event": "step_stored", "store": name, "step": 9},
    ]
    assert (failing["event"], failing["store"]) == ("store_failing", name)
    assert "Not a directory" in failing["text"]
    assert services.end(removes=True)
    assert not place.arena.exists()
