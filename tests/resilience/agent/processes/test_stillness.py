"""When a program is said to hang that has no block."""

from __future__ import annotations

import pytest

from resilience.agent.processes.stillness import Observation, Stillness

STEPS = "no step for 100 s"
NOTHING = "no output and no processor time for 100 s; the program tells no steps"


def found(*sights: tuple[float, float | None, float, float]) -> list[tuple[float, str, float]]:
    """Return what is said when, of (time, last step, last output, processor seconds)."""
    stillness = Stillness(100.0, 50.0)
    stillness.note_time(0, 1000.0)
    said = []
    for at_s, step_s, output_s, processor_s in sights:
        seen = Observation(step_s=step_s, output_s=output_s, processor_s=processor_s)
        stillness.note_time(0, at_s)
        if still := stillness.look(seen, at_s):
            said.append((at_s, still.text, still.quiet_s))
    return said


@pytest.mark.parametrize(("sights", "said"), [
    pytest.param([(1040, None, 0, 0), (1099, None, 0, 0)], [], id="not-yet"),
    pytest.param([(1050, None, 0, 0), (1100, None, 0, 0.9)], [(1100, NOTHING, 100)], id="nothing"),
    pytest.param([(1050, None, 0, 1), (1100, None, 0, 1.9), (1150, None, 0, 1.9)],
                 [(1150, NOTHING, 100)], id="a-hundredth-of-a-core"),
    pytest.param([(1050, None, 0, 0.5), (1090, None, 0, 1.0), (1140, None, 0, 1.5),
                  (1189, None, 0, 2)], [], id="little-by-little"),
    pytest.param([(1050, None, 1049, 0), (1099, None, 1049, 0), (1149, None, 1049, 0),
                  (1150, None, 1049, 0)], [(1150, NOTHING, 100)], id="output"),
    pytest.param([(1050, None, 0, 9), (1099, None, 0, 2), (1149, None, 0, 3)], [],
                 id="a-process-took-its-time-along"),
    pytest.param([(1050, 1020, 0, 0), (1099, 1020, 1098, 50), (1119, 1020, 1118, 60),
                  (1120, 1020, 1119, 60)], [(1120, STEPS, 100)],
                 id="steps-alone-count-where-there-are-any"),
    pytest.param([(1050, 1020, 0, 0), (1099, 1098, 0, 0), (1140, 1098, 0, 0), (1189, 1098, 0, 0)],
                 [], id="the-newest-of-all-ranks"),
    pytest.param([(1040, None, 0, 0), (1080, None, 0, 0), (1600, None, 0, 0), (1619, None, 0, 0),
                  (1620, None, 0, 0)], [(1620, NOTHING, 100)], id="the-agent-stood-still"),
    pytest.param([(at, None, 0, 0) for at in (1050, 1100, 1150, 1199, 1200)],
                 [(1100, NOTHING, 100), (1200, NOTHING, 100)], id="said-again-a-deadline-later"),
])  # fmt: skip
def test_what_is_said_of_a_program(
    sights: list[tuple[float, float | None, float, float]], said: list[tuple[float, str, float]]
) -> None:
    assert found(*sights) == said


def test_another_generation_begins_its_own_deadline() -> None:
    stillness = Stillness(100.0, 50.0)
    seen = Observation(step_s=None, output_s=0.0, processor_s=0.0)
    for generation, now_s in ((0, 1000.0), (0, 1040.0), (0, 1080.0), (1, 1090.0), (1, 1130.0)):
        stillness.note_time(generation, now_s)
        assert stillness.look(seen, now_s) is None

    stillness.note_time(1, 1170.0)
    assert stillness.look(seen, 1189.0) is None
    assert stillness.look(seen, 1190.0) is not None
