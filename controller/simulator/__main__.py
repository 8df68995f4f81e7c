"""`python -m controller.simulator run|compare|sweep|goodput CONFIG`: simulate traffic under policies.

CONFIG is a JSON file; controller/simulator/experiments/ has examples. Prints a progress bar to stderr, one table and,
as the last line, JSON. An invalid file ends with status 2, the field and its valid names.

`replay LOG` repeats what a gateway recorded of its scheduler (`python -m api.openai --scheduler-log LOG`, also
gzipped), and ends with status 1 if the scheduler answers anything differently.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from controller.core.errors import ConfigError
from controller.dispatch.event_log import Log
from controller.simulator import runner
from controller.simulator.experiment import Contender, ExperimentPlan, contender, parse_experiment
from controller.simulator.replay import Replay
from controller.simulator.report import table
from controller.simulator.report.page import page
from controller.simulator.report.summary import report
from controller.simulator.report.trace_events import TraceWriter
from controller.simulator.workloads.sources import TraceRow, parse_row

BAR = 30
EVERY_S = 0.1
SHOWN = 5  # most differences of a replay to print


class Bar:
    """A progress bar on a terminal; silent otherwise."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._shown_at = 0.0
        self._on = out.isatty()

    def __call__(self, what: str, done: int, of: int) -> None:
        now = time.monotonic()
        if self._on and (now - self._shown_at > EVERY_S or done == of):
            self._shown_at = now
            filled = round(BAR * done / max(1, of))
            self._out.write(f"\r\033[K{'█' * filled}{'·' * (BAR - filled)} {done}/{of}  {what}")
            self._out.flush()

    def close(self) -> None:
        if self._on:
            self._out.write("\r\033[K")


def read_profile(reference: str) -> Mapping[str, Any]:
    """Read a profile: a JSON file of one profile, `file.json#id` of a file with a list of `profiles` (by id or alias),
    or a CSV file of measured operators, one row per line.
    """
    path, _, name = reference.partition("#")
    if path.endswith((".csv", ".csv.gz")):
        return {"rows": read_csv(path, "profile")}
    raw = read_json(Path(path), "profile")
    if not name:
        return raw  # type: ignore[no-any-return]
    profiles = raw.get("profiles", []) if isinstance(raw, dict) else []
    for profile in profiles:
        if name == profile.get("id") or name in profile.get("aliases", ()):
            return profile  # type: ignore[no-any-return]
    names = ", ".join(sorted(str(profile.get("id")) for profile in profiles)) or "none"
    raise ConfigError(f"{path} has no profile {name!r}; valid: {names}", field="instances.profile")


def read_json(path: Path, field: str) -> Any:
    try:
        return json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}", field=field) from None
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}", field=field) from None


def read_trace(name: str) -> list[TraceRow]:
    """Read a CSV file with a header (gzipped if it ends with .gz): arrival_s, input_tokens, output_tokens,
    prefix_hashes.
    """
    return [parse_row(raw, number) for number, raw in enumerate(read_csv(name, "workload.path"), 1)]


def read_csv(name: str, field: str) -> list[dict[str, str]]:
    try:
        with gzip.open(name, "rt") if name.endswith(".gz") else open(name) as lines:
            return list(csv.DictReader(lines))
    except OSError as error:
        raise ConfigError(f"{name}: {error.strerror or error}", field=field) from None


def load(arguments: argparse.Namespace) -> ExperimentPlan:
    experiment = parse_experiment(read_json(arguments.config, "config"), read_profile, read_trace)
    if arguments.policies:
        chosen = tuple(contender(name.strip(), "--policies") for name in arguments.policies.split(","))
        experiment = replace(experiment, contenders=chosen)
    added = tuple(variant(text) for text in arguments.variant)
    experiment = replace(experiment, contenders=(*experiment.contenders, *added))
    for text in arguments.set:
        experiment = replace(experiment, contenders=_with(experiment.contenders, text))
    if arguments.rates:
        experiment = replace(experiment, rates=tuple(_number(rate, "--rates") for rate in arguments.rates.split(",")))
    if arguments.seeds:
        experiment = replace(experiment, seeds=experiment.seeds[: arguments.seeds])
    return experiment


def variant(text: str) -> Contender:
    """Parse `label=policy_set:{"pacing": {"share": 0.5}}`."""
    label, equals, rest = text.partition("=")
    name, _, overrides = rest.partition(":")
    if not equals:
        raise ConfigError(f"--variant {text!r}: write label=policy_set:{{overrides}}", field="--variant")
    return contender({"label": label, "name": name, "overrides": _value(overrides or "{}")}, "--variant")


def _with(contenders: Sequence[Contender], text: str) -> tuple[Contender, ...]:
    """Parse `label.part.setting=value`, which changes one setting of one contender."""
    path, equals, value = text.partition("=")
    parts = path.rsplit(".", 2)
    if not equals or len(parts) != 3:
        raise ConfigError(f"--set {text!r}: write label.part.setting=value", field="--set")
    label, part, setting = parts
    if label not in {each.label for each in contenders}:
        names = ", ".join(each.label for each in contenders)
        raise ConfigError(f"--set: no policy {label!r} here; valid: {names}", field="--set")
    return tuple(_changed(each, part, setting, _value(value)) if each.label == label else each for each in contenders)


def _changed(each: Contender, part: str, setting: str, value: Any) -> Contender:
    overrides = {**each.overrides, part: {**each.overrides.get(part, {}), setting: value}}
    engines = {"engine": each.engine, "prefill_engine": each.prefill_engine, "decode_engine": each.decode_engine}
    changed = {"label": each.label, "name": each.policy_set, "overrides": overrides, **engines}
    return replace(contender(changed, "--set"), foresight=each.foresight)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _number(text: str, field: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not number > 0:
        raise ConfigError(f"{field}: {text!r} is not a positive number", field=field)
    return number


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m controller.simulator", description=(__doc__ or "").split("\n")[0])
    kinds = ("run", "compare", "sweep", "goodput", "replay")
    parser.add_argument("what", choices=kinds, help="run: the first policy, once; replay: a gateway's log")
    parser.add_argument("config", type=Path, metavar="CONFIG", help="an experiment, or the log of a replay")
    parser.add_argument("--policies", default="", help="only these policy sets, comma-separated")
    parser.add_argument(
        "--variant", action="append", default=[], metavar="LABEL=POLICY:JSON", help="one more contender"
    )
    parser.add_argument("--set", action="append", default=[], metavar="LABEL.PART.SETTING=VALUE")
    parser.add_argument("--rates", default="", help="requests/s, comma-separated, in place of the file's")
    parser.add_argument("--seeds", type=int, default=0, help="only the first N seeds")
    parser.add_argument("--json", type=Path, help="also write the JSON here, indented")
    parser.add_argument("--html", type=Path, help="also write a page with charts here")
    parser.add_argument("--trace", type=Path, help="also write a Chrome trace of the run here (only with run)")
    return parser.parse_args(arguments)


@contextmanager
def tracing(path: Path | None) -> Iterator[TraceWriter | None]:
    if path is None:
        yield None
        return
    try:
        with path.open("w") as file:
            writer = TraceWriter(file.write)
            yield writer
            writer.close()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}", field="--trace") from None


class Found(NamedTuple):
    """The result of a command: its table, its JSON, and the data of its page."""

    shown: str
    values: dict[str, Any]
    drawn: dict[str, Any]


def carry_out(what: str, experiment: ExperimentPlan, bar: Bar, trace: Path | None) -> Found:
    if what == "goodput":
        found = runner.goodput(experiment, bar)
        return Found(table.goodput_table(found), found, found)
    if what == "run":
        only = experiment.contenders[0]
        rates, knee = runner.rates_of(experiment, bar)
        with tracing(trace) as writer:
            result = runner.run_once(experiment, only, rates[0], experiment.seeds[0], bar, writer)
        found = report(result, experiment.warmup_s)
        entry = {"policy": only.label, "policy_set": only.policy_set, "rate": rates[0], **runner.summary([found])}
        drawn = {"name": experiment.name, "knee": knee, "entries": [entry], "run": found}
        return Found(table.comparison_table(drawn), found, drawn)
    found = runner.compare(experiment, bar)
    return Found((table.sweep_table if what == "sweep" else table.comparison_table)(found), found, found)


def read_log(path: Path) -> Iterator[str]:
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
            yield from lines
    except OSError as error:
        raise ConfigError(f"{error.strerror or error}", field="log") from None


def replayed(path: Path) -> int:
    replay = Replay(Log(read_log(path)))
    different = 0
    for found in replay.differences():
        different += 1
        if different <= SHOWN:
            print(f"batch {found.batch} at {found.at}:\n  logged   {found.logged}\n  answered {found.answered}")
    same = replay.batches - different
    print(f"{same} of {replay.batches} batches answered identically")
    print(json.dumps({"batches": replay.batches, "different": different, "actions": dict(replay.kinds)}))
    return 1 if different else 0


def write(path: Path, text: str, option: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}", field=option) from None


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.trace and options.what != "run":
        print("--trace shows one run: use run", file=sys.stderr)
        return 2
    bar = Bar(sys.stderr)
    try:
        if options.what == "replay":
            return replayed(options.config)
        experiment = load(options)
        found = carry_out(options.what, experiment, bar, options.trace)
        bar.close()
        print(found.shown)
        if options.html:
            write(options.html, page(found.drawn, experiment.level), "--html")
        if options.json:
            write(options.json, json.dumps(found.values, indent=1) + "\n", "--json")
    except ConfigError as error:
        bar.close()
        print(f"{options.config}: {error}" + (f" (field {error.field})" if error.field else ""), file=sys.stderr)
        return 2
    print(json.dumps(found.values))
    return 0


if __name__ == "__main__":
    sys.exit(main())
