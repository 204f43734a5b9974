"""A plan as one screen of text, or as JSON. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from launcher.job.content import JobContent
from launcher.plan.devices import Device
from launcher.plan.figure import GIB, Figure
from launcher.plan.plan import Plan

_NAME_WIDTH, _VALUE_WIDTH = 22, 18


def plan_text(plan: Plan, *, is_explained: bool) -> str:
    """Return the lines of a plan, each with its formula and source where it is explained."""
    return "\n".join(_lines(plan, is_explained=is_explained)) + "\n"


def script_text(job: JobContent, device: Device | None) -> str:
    """Return what is known of a job whose program only its user knows."""
    return f"{_headline(job, device)}\n{_UNKNOWN}\n"


def script_json(job: JobContent) -> str:
    """Return the same as indented JSON."""
    return json.dumps({**_job_content(job), "note": _UNKNOWN}, indent=2) + "\n"


_UNKNOWN = "the program is a script, so parameters, memory and days are not known"


def _headline(job: JobContent, device: Device | None) -> str:
    recipe, trainer = job.recipe, job.trainer
    return (
        f"{recipe.name} version {recipe.version}: {trainer.num_nodes} x {job.instance.type}, "
        f"{trainer.num_devices} {device.name if device else 'workers'} each"
    )


def _job_content(job: JobContent) -> dict[str, Any]:
    return {
        "recipe": job.recipe.name,
        "version": job.recipe.version,
        "instance": job.instance.type,
        "num_nodes": job.trainer.num_nodes,
        "num_devices": job.trainer.num_devices,
    }


def _lines(plan: Plan, *, is_explained: bool) -> Iterator[str]:
    yield _headline(plan.job, plan.device)
    yield _line(plan.parameters, is_explained=is_explained)
    if plan.device and plan.device_fit:
        yield f"memory of a device: {plan.device_fit.verdict}"
        for figure in (*plan.on_device, *plan.replica):
            yield _line(figure, is_explained=is_explained)
    yield f"memory of a node: {plan.node_fit.verdict}"
    for figure in plan.on_node:
        yield _line(figure, is_explained=is_explained)
    yield f"time{_time_verdict(plan)}"
    for figure in plan.time:
        yield _line(figure, is_explained=is_explained)


def _line(figure: Figure, *, is_explained: bool) -> str:
    words = figure.formula if figure.name == "together" else f"= {figure.formula}"
    if is_explained:
        words = f"{words} [{figure.source}]"
    elif figure.name != "together":
        words = ""
    return f"  {figure.name:<{_NAME_WIDTH}}{_shown(figure):>{_VALUE_WIDTH}}  {words}".rstrip()


def _shown(figure: Figure) -> str:
    value = figure.value
    if figure.unit == "bytes":
        return f"{value / GIB:,.2f} GiB"
    if figure.unit == "number" or value >= 1000:
        return f"{round(value):,}"
    text = f"{value:.1f}" if value >= 10 else f"{value:.3g}"
    return f"{text} s" if figure.unit == "seconds" else text


def _time_verdict(plan: Plan) -> str:
    if plan.device is None:
        return ""
    days = f"{_shown(plan.time[-1])} days at plan.mfu {plan.mfu:g}"
    if plan.limit_days is None:
        return f": {days}, and time_limit is null"
    verdict = "ends in time" if plan.ends_in_time else "does not end in time"
    return f": {verdict}, {days} against {plan.limit_days:.3g} of time_limit"


def plan_json(plan: Plan, *, is_explained: bool) -> str:
    """Return a plan as indented JSON: bytes, numbers, hours, days and seconds."""

    def figures(*given: Figure) -> dict[str, Any]:
        return {each.name: _plain(each, is_explained=is_explained) for each in given}

    content: dict[str, Any] = {
        **_job_content(plan.job),
        **figures(plan.parameters),
        "node": figures(*plan.on_node),
        "node_fit": plan.node_fit.verdict,
        "time": figures(*plan.time),
        "limit_days": plan.limit_days,
    }
    if plan.device and plan.device_fit:
        content |= {
            "device_name": plan.device.name,
            "device": figures(*plan.on_device, *plan.replica),
            "device_fit": plan.device_fit.verdict,
            "mfu": plan.mfu,
            "ends_in_time": plan.ends_in_time,
        }
    return json.dumps(content, indent=2) + "\n"


def _plain(figure: Figure, *, is_explained: bool) -> Any:
    if not is_explained:
        return figure.value
    return {"value": figure.value, "unit": figure.unit, "formula": figure.formula,
            "source": figure.source}  # fmt: skip
