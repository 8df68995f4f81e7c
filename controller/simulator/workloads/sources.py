"""Workloads of an experiment file: a mix of tasks, rows of a trace, or programs.

Each gives requests for a rate and seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from controller.core.errors import ConfigError
from controller.core.types import Targets
from controller.simulator.fields import Fields
from controller.simulator.workloads import mixes, qwen
from controller.simulator.workloads.arrivals import LAWS, Lengths, renewal_times
from controller.simulator.workloads.demand import Demand
from controller.simulator.workloads.mixes import PATIENT_S, Task
from controller.simulator.workloads.program_workload import ProgramMix, read_program_mix

KINDS = ("mix", "tasks", "trace", "programs")
MIXES = {**mixes.MIXES, **qwen.MIXES}


class TraceRow(NamedTuple):
    """One request of a trace. `prefix`: block ids of its prompt. `session`: the program that it belongs to."""

    at: float
    prompt_tokens: int
    output_tokens: int
    prefix: tuple[Hashable, ...] = ()
    session: str = ""


ReadTrace = Callable[[str], Sequence[TraceRow]]


class Workload(Protocol):
    def demands(self, rate: float | None, seed: int) -> list[Demand]:
        """`rate` in requests/s, all together; None: the workload's own."""
        ...


@dataclass(frozen=True, slots=True)
class TaskWorkload:
    """Independent renewal processes, one per task."""

    tasks: tuple[Task, ...]
    rate: float | None
    per_task: int | None
    duration_s: float
    cv: float
    stagger_s: float = 0.0

    def demands(self, rate: float | None, seed: int) -> list[Demand]:
        wanted = rate or self.rate
        if wanted is None:
            raise ConfigError("this workload needs a rate", field="workload.rate")
        return mixes.demands(
            self.tasks,
            wanted,
            seed,
            per_task=self.per_task,
            duration_s=self.duration_s,
            cv=self.cv,
            stagger_s=self.stagger_s,
        )


@dataclass(frozen=True, slots=True)
class TraceWorkload:
    """Rows of a trace: its own arrival times scaled to a rate, or its lengths in random order at renewal times."""

    rows: tuple[TraceRow, ...]
    targets: Targets
    slo_class: str
    arrivals: str
    rate: float | None
    count: int
    cv: float
    longest: int

    def demands(self, rate: float | None, seed: int) -> list[Demand]:
        wanted = rate or self.rate
        if self.arrivals == "trace":
            rows, times = self._as_recorded(wanted)
        else:
            rows, times = self._drawn(wanted, seed)
        return [self._demand(number, row, at) for number, (row, at) in enumerate(zip(rows, times, strict=True))]

    def _as_recorded(self, rate: float | None) -> tuple[Sequence[TraceRow], list[float]]:
        rows = self.rows[: self.count]
        span = rows[-1].at - rows[0].at
        factor = 1.0 if rate is None or span <= 0 else (len(rows) - 1) / span / rate
        return rows, [(row.at - rows[0].at) * factor for row in rows]

    def _drawn(self, rate: float | None, seed: int) -> tuple[Sequence[TraceRow], list[float]]:
        if rate is None:
            raise ConfigError("arrivals of their own need a rate", field="workload.rate")
        lengths, gaps = np.random.default_rng([seed, 0]), np.random.default_rng([seed, 1])
        chosen = lengths.integers(0, len(self.rows), self.count).tolist()
        return [self.rows[index] for index in chosen], renewal_times(gaps, rate, count=self.count, cv=self.cv)

    def _demand(self, number: int, row: TraceRow, at: float) -> Demand:
        output = max(1, min(row.output_tokens, self.longest - 2))
        prompt = max(1, min(row.prompt_tokens, self.longest - 1 - output))
        return Demand(
            id=f"t{number}",
            at=at,
            prompt_tokens=prompt,
            output_tokens=output,
            targets=self.targets,
            slo_class=self.slo_class,
            max_tokens=output,
            prefix=row.prefix,
            workflow=row.session,
        )


def read_workload(fields: Fields, read_trace: ReadTrace, longest: int) -> Workload:
    """`longest`: most tokens (prompt and answer) that an engine accepts; longer rows of a trace are cut."""
    kind = fields.text("kind", valid=KINDS)
    workload: Workload
    if kind == "trace":
        workload = _trace(fields, read_trace, longest)
    else:
        workload = _programs(fields, read_trace, longest) if kind == "programs" else _tasks(fields, kind)
    fields.done()
    return workload


def _programs(fields: Fields, read_trace: ReadTrace, longest: int) -> ProgramMix:
    recorded = []
    if "gaps" in fields:
        path = fields.text("gaps")
        try:
            recorded = [row.at for row in read_trace(path)]
        except ConfigError as error:
            raise ConfigError(str(error), field=fields.name("gaps")) from None
        if not recorded:
            raise ConfigError(f"{path} has no requests", field=fields.name("gaps"))
        if "cv" in fields:
            raise ConfigError("gaps of a trace have a cv of their own", field=fields.name("cv"))
    return read_program_mix(fields, recorded, longest)


def _tasks(fields: Fields, kind: str) -> TaskWorkload:
    tasks = MIXES[fields.text("mix", valid=sorted(MIXES))] if kind == "mix" else _own_tasks(fields)
    per_task = fields.optional_integer("per_task")
    duration = fields.optional_number("duration_s", above=0)
    if (per_task is None) == (duration is None):
        raise ConfigError(f"{fields.where} needs either per_task or duration_s", field=fields.name("per_task"))
    rate = fields.optional_number("rate", above=0)
    stagger = fields.number("stagger_s", 0.0, above=-1e-9)
    if duration is not None and stagger * (len(tasks) - 1) >= duration:
        raise ConfigError("the last task would start after duration_s", field=fields.name("stagger_s"))
    cv = fields.number("cv", 1.0, above=-1e-9)
    return TaskWorkload(tasks, rate, per_task, duration or math.inf, cv, stagger)


def _own_tasks(fields: Fields) -> tuple[Task, ...]:
    raw = fields.list("tasks")
    if not raw:
        raise ConfigError("tasks must not be empty", field=fields.name("tasks"))
    return tuple(_own_task(Fields(item, f"{fields.name('tasks')}[{index}]")) for index, item in enumerate(raw))


def _own_task(fields: Fields) -> Task:
    task = Task(
        fields.text("name"),
        _targets(fields),
        _lengths(fields.object("prompt")),
        _lengths(fields.object("output")),
        fields.number("share", 1.0, above=0),
        fields.text("model", ""),
        fields.integer("shared_prefix", 0, least=0),
    )
    fields.done()
    return task


def _targets(fields: Fields) -> Targets:
    return Targets(
        fields.number("ttft_s", above=0),
        fields.number("tpot_s", above=0),
        fields.optional_number("deadline_s", above=0),
        fields.number("waiting_time_s", PATIENT_S, above=0),
    )


def _lengths(fields: Fields) -> Lengths:
    law = fields.text("law", "normal", valid=LAWS)
    mean = fields.number("mean", above=0)
    std = fields.number("std", 0.0, above=-1e-9)
    high = fields.integer("high", max(1, math.ceil(mean + 4 * std)))
    try:
        made = Lengths(mean, std, fields.integer("low", 1), high, law)  # type: ignore[arg-type]
    except ConfigError as error:
        raise ConfigError(str(error), field=fields.name(error.field or "")) from None
    fields.done()
    return made


def _trace(fields: Fields, read_trace: ReadTrace, longest: int) -> TraceWorkload:
    path = fields.text("path")
    rows = tuple(read_trace(path))
    if not rows:
        raise ConfigError(f"{path} has no requests", field=fields.name("path"))
    arrivals = fields.text("arrivals", "trace", valid=("trace", "renewal"))
    count = fields.integer("count", len(rows))
    if arrivals == "trace" and count > len(rows):
        raise ConfigError(f"{path} has {len(rows)} requests, not {count}", field=fields.name("count"))
    return TraceWorkload(
        rows,
        _targets(fields),
        fields.text("slo_class", "trace"),
        arrivals,
        fields.optional_number("rate", above=0),
        count,
        fields.number("cv", 1.0, above=-1e-9),
        longest,
    )


def parse_row(raw: Mapping[str, str], number: int) -> TraceRow:
    """Parse a CSV row: `input_tokens`, `output_tokens`, and optionally `arrival_s`, `prefix_hashes` (separated by
    spaces) and `session`.
    """
    try:
        at = float(raw.get("arrival_s") or 0.0)
        prompt, output = int(float(raw["input_tokens"])), int(float(raw["output_tokens"]))
    except KeyError as error:
        raise ConfigError(f"row {number} of the trace has no column {error}", field="workload.path") from None
    except (ValueError, OverflowError) as error:  # inf is a float, and no integer
        raise ConfigError(f"row {number} of the trace: {error}", field="workload.path") from None
    prefix = tuple((raw.get("prefix_hashes") or "").split())
    return TraceRow(at, max(1, prompt), max(1, output), prefix, raw.get("session") or "")
