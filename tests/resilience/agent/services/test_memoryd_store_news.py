"""What a run hears of its store while its daemon lives, and as it ends."""

from __future__ import annotations

from pathlib import Path

from tests.resilience.agent.places import Place, break_store, make_store, serve, start
from tests.resilience.tiered.daemons import make_content, make_id, save


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
