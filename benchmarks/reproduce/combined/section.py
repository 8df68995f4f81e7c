"""The combined policy set `slackline` on each paper's home workload, beside the best of that paper.

There is one set, by role (`controller/policies/by_stage.py`): dispatcher and migrator `slackline` everywhere, and in
the engines the scheduler of `--scheduler slackline`, with the same options.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from benchmarks.reproduce.claims import Claim, Progress, Section, Table
from benchmarks.reproduce.combined.kairos import exchanged, kairos
from benchmarks.reproduce.combined.pairs import compare
from benchmarks.reproduce.combined.stored import by_sequences, calm_at_its_best, figure_3, from_the_report
from benchmarks.reproduce.concord import lab as concord_lab
from benchmarks.reproduce.concord import sweep as concord_sweep
from benchmarks.reproduce.flowprefill import setting as flowprefill_setting
from benchmarks.reproduce.hyperflexis import setting as hyperflexis
from benchmarks.reproduce.hyperflexis import stages as hyperflexis_stages
from benchmarks.reproduce.hyperflexis.multitask import BEHIND, BY_CLASS, SCORPIO
from benchmarks.reproduce.hyperflexis.setting import CONTENDERS, MODELS, OURS
from controller.dispatch import build_dispatcher, build_migrator
from controller.policies.by_stage import BY_STAGE
from controller.simulator import Demand, InstanceSettings, RunResult, Simulation, SimulationSettings
from controller.simulator.experiment import Contender
from controller.simulator.workloads.mixes import MIXES

TEXT = """`slackline` as a whole: dispatcher and migrator of that name in the gateway, and in the engines the
scheduler that `--scheduler slackline` starts, with exactly the options of
`controller/policies/by_stage.py`. **Collocated** engines run their own scheduler with the deadline as
priority, or CALM (packed by bandwidth, 96 sequences a step) if classes with end-to-end deadlines or
workflows are served; **prefill** engines are preemptive (S-EDF, SLO-aware batching, operator
boundaries); **decode** engines run `kairos_decode` with a table that starts from the engine's profile,
and leave sequences out of a step only if a step of all would be too slow for the tightest TPOT.
An engine whose policy selects by value (`selects`) gets every request at once.

Each row is a load of the paper's home workload in the setting of its own section. "Paper's own" is the
best that the paper has for that load: HyperFlexis' and FlowPrefill's policies as printed; for Kairos
the better of *as read* and *as printed*; for Concord the better of packed and whole slots, each at the
best of the section's sweep. Both run the same arrivals, seed by seed. "At least as good" means that the
mean of the differences is not below zero by more than its standard error. Rows of Figures 3 and 5 to 7
are the figures of [HyperFlexis' section](hyperflexis.md), which runs the set too: means of the seeds, not
pairs, so there is no tolerance for noise. That page says when they were run; the lines `hyperflexis`,
`sequences` and `reported` below, when they were taken from it. Disaggregated HyperFlexis (Fig. 4) is
measured again here, since its section uses vLLM's batching in all engines and the set does not. With 64 and
256 sequences per engine (two seeds) the set is compared with the best, at each load, of HyperFlexis as
printed, SCORPIO, the engines' own priority by class and round robin. Why it is behind SCORPIO at its best with 256
sequences where 600 requests come within two seconds (2-task mix, 4.5 times the 90 % point) is
[decision 331](../decisions/capacity.md#331).

Kairos' setting is simulated as a whole here, with `decode_by: longest` (a step takes as long as its longest sequence
needs) as in the testbed of its section: dispatcher, prefill engine, migrator, link, decode engine. Dispatcher and
migrator use a profile fitted (eq. 1 and 2, as the profiler does) to the steps of another seed's run on that device.
"""
STAGES = (
    "the set's prefill engines choose among all requests themselves, so that the gateway sends them everything and "
    "plans nothing, which costs attainment where prompts are short (decision 164)"
)
RIVALS = (OURS[1], SCORPIO, BEHIND, BY_CLASS, "round robin")
BIG_KV, MANY = 1 << 26, 4096  # a decode instance that never delays a prefill, as in FlowPrefill's section


PARTS = ("hyperflexis", "exchanged", "sequences", "stages", "reported", "flowprefill", "kairos", "concord")
COPIED_FROM = dict.fromkeys(("hyperflexis", "sequences", "reported"), "hyperflexis")  # parts that another section ran
Rows = Callable[[Progress, bool], Iterable[Claim]]


def reproduce(progress: Progress, quick: bool, parts: Sequence[str] = PARTS) -> Section:
    """All home workloads in turn, or `parts` of them."""
    homes: Mapping[str, tuple[Rows, Callable[[bool], Table] | None]] = {
        "hyperflexis": (_hyperflexis, None),
        "exchanged": (_nothing, _parts_of_the_order),
        "sequences": (_by_sequences, None),
        "stages": (_apart, None),
        "reported": (_reported, None),
        "flowprefill": (_flowprefill, None),
        "kairos": (kairos, exchanged),
        "concord": (_concord, learned_too),
    }
    claims: list[Claim] = []
    tables: list[Table] = []
    for name, (rows, table) in homes.items():
        if name in parts:
            claims += [replace(each, part=name) for each in rows(progress, quick)]
            tables += [replace(table(quick), part=name)] if table is not None else []
            progress(f"{name} done")
    return Section("Combined", TEXT, claims, tables)


# ---- HyperFlexis -----------------------------------------------------------------------------------------------------


def _apart(progress: Progress, quick: bool) -> Iterable[Claim]:
    """Fig. 4: prefill and decode on instances of their own, where the set's engines are others than HyperFlexis'."""
    lab, seeds, per_task = hyperflexis, (1,) if quick else (1, 2, 3), 40 if quick else 300
    for name in ("Qwen32B",) if quick else ("Qwen7B", "Qwen32B"):
        fixed = hyperflexis_stages.stages(MODELS[name])
        at = lab.knee(fixed, CONTENDERS["round robin"], MIXES["4-task"], per_task, seeds[:1])
        for times in (1.5,) if quick else (1.5, 4.0):
            requests = lab.of_mix(MIXES["4-task"], at * times, per_task)
            growing = hyperflexis_stages.stages(MODELS[name], scaling=True)
            for workers, settings in (("2P + 2D", fixed), ("2P + 2D growing to 8", growing)):
                theirs, ours = (
                    [lab.attainment(lab.run(each, CONTENDERS[policy], requests(seed))) for seed in seeds]
                    for policy, each in ((OURS[1], settings), (OURS[0], by_stage(settings)))
                )
                setting = f"{name}, 4-task mix, {workers}, {times:g} x round robin's 90 % point ({at * times:.1f}/s)"
                yield compare("HyperFlexis", "attainment", setting, theirs, ours, seeds, STAGES)
        progress(f"HyperFlexis {name} disaggregated done")


def by_stage(settings: SimulationSettings) -> SimulationSettings:
    """The same instances, each as started with `--scheduler slackline`."""
    engines = (replace(each, batching=None, batching_settings={}, engine_kind=BY_STAGE) for each in settings.instances)
    return replace(settings, instances=tuple(engines))


def _hyperflexis(progress: Progress, quick: bool) -> Iterable[Claim]:
    """Fig. 3 on two workers and on two that scale out to four, from HyperFlexis' section, which runs the set there."""
    return () if quick else figure_3(progress)


def _by_sequences(progress: Progress, quick: bool) -> Iterable[Claim]:
    """Fig. 3 with 64 and 256 sequences per engine: the set against the best rival at each load, from that section."""
    return () if quick else by_sequences(progress, RIVALS)


def _reported(progress: Progress, quick: bool) -> Iterable[Claim]:
    """Fig. 5, 6 and 7 from HyperFlexis' section, whose collocated engines are those of the set."""
    return () if quick else from_the_report(progress)


def _nothing(progress: Progress, quick: bool) -> Iterable[Claim]:
    """Of a part that is a table alone."""
    return ()


def _parts_of_the_order(quick: bool) -> Table:
    """Which part makes the difference while a fleet scales out: the plan, the order or the pacing."""
    lab, seeds, per_task = hyperflexis, (1,) if quick else (1, 2, 3), 40 if quick else 300
    named = {"ordering": {"name": "tpot_then_arrival"}}
    cases: Mapping[str, Contender] = {
        "HyperFlexis as printed": CONTENDERS[OURS[1]],
        "set": CONTENDERS[OURS[0]],
        "plans with the whole rate": Contender("", "slackline", {"ordering": {"trust": 1.0}}),
        "deadlines alone": Contender("", "slackline", {"ordering": {"name": "earliest_deadline_first"}}),
        "tardiness alone": Contender("", "slackline", {"ordering": {"name": "apparent_tardiness_cost"}}),
        "HyperFlexis' order": Contender("", "slackline", named),
        "its order and pacing": Contender("", "slackline", {**named, "pacing": {"name": "maturity"}}),
    }
    rows: list[list[str | float | int | None]] = []
    for name in ("Qwen7B",) if quick else ("Qwen7B", "Llama70B"):
        at = lab.round_robin_knee(name, "2-task", per_task, seeds)
        growing = lab.fleet(MODELS[name], elastic=lab.growing(MODELS[name]))
        for workers, settings, times in (
            ("2", lab.fleet(MODELS[name]), 2.0), ("2 to 4", growing, 2.0), ("2 to 4", growing, 4.5),
        ):  # fmt: skip
            requests = lab.of_mix(MIXES["2-task"], at * times, per_task)
            met = [lab.measure(settings, each, requests, seeds).attainment for each in cases.values()]
            rows.append([name, workers, times, *met])
    columns = ["model, 2-task", "workers", "load, x", *cases]
    return Table("Parts of the set while a fleet scales out: attainment with one of them exchanged", columns, rows)


# ---- FlowPrefill -----------------------------------------------------------------------------------------------------


def _flowprefill(progress: Progress, quick: bool) -> Iterable[Claim]:
    lab, seeds, count = flowprefill_setting, (1,) if quick else (1, 2, 3), 120 if quick else 1000
    own, bench = lab.flowprefill(), lab.PrefillBench()
    for model in [lab.MODELS["Llama3-8B"]] if quick else lab.MODELS.values():
        loads = [lab.OfferedLoad(model, count, (seed,)) for seed in seeds]
        theirs = [bench.goodput(own, load, 4.0) for load in loads]
        ours = [lab.highest(lambda rate, load=load: _in_time(load, rate), 4.0) for load in loads]  # type: ignore[misc]
        setting = f"{model.name}, one prefill engine"
        yield compare("FlowPrefill", "goodput (requests/s at 90 %)", setting, theirs, ours, seeds)
        progress(f"FlowPrefill {model.name} done")


def _in_time(load: flowprefill_setting.OfferedLoad, rate: float) -> bool:
    """Whether the set's prefill engine gives enough first tokens in time."""
    lab = flowprefill_setting
    engine = lab.instance(load.model, lab.EngineContender("set", {"engine_kind": BY_STAGE, "role": "prefill"}))
    engine = replace(engine, max_num_batched_tokens=4096)  # tokens per batch: the paper's G
    decode = replace(engine, role="decode", kv_tokens=BIG_KV, max_num_seqs=MANY)
    result = simulated((engine, decode), load.demands(rate, load.seeds[0]))
    share: float = sum(record.ttft_met for record in result.records) / len(result.records)
    return share >= lab.LEVEL


def simulated(instances: tuple[InstanceSettings, ...], demands: list[Demand]) -> RunResult:
    """A run of the set on instances with roles."""
    settings = SimulationSettings(instances, sample_s=1e6, progress_s=1e6, telemetry_period_s=1e6)
    return Simulation(settings, build_dispatcher(BY_STAGE), demands, migrator=build_migrator(BY_STAGE)).run()


# ---- Concord ---------------------------------------------------------------------------------------------------------


LEARNT = (
    "the best of the sweep knows how much longer stages take under load (`history`). The set learns it from "
    "stages that ended before, as a gateway must, and knows nothing when a run begins. With the same "
    "knowledge, the paper's policy earns as much as the set (last table)"
)


def _concord(progress: Progress, quick: bool) -> Iterable[Claim]:
    lab, seeds, programs = concord_lab, (1,) if quick else (2, 3, 4), 60 if quick else 1000
    candidates = [concord_sweep.choices()[name][0] for name in (lab.CONCORD.name, lab.WHOLE_SLOTS.name)]
    own = candidates if quick else calm_at_its_best()
    for rate in (3.0,) if quick else (2.0, 3.0, 4.0):
        cases = [lab.Case(rate, programs, seed) for seed in seeds]
        theirs = {system.name: [lab.run(system, case) for case in cases] for system in own}
        combined = [lab.run(lab.CONCORD.variant(policy="slackline"), case, collocated()) for case in cases]
        measures: tuple[tuple[str, Callable[[lab.LabFigures], float]], ...] = (
            ("token goodput (tokens/s)", lambda figures: figures.tokens_per_s),
            ("request goodput (programs/s)", lambda figures: figures.requests_per_s),
        )
        for what, value in measures:
            name = max(theirs, key=lambda each: sum(map(value, theirs[each])))
            setting = f"one engine, {rate:g} programs/s; {name}"
            best, ours = ([value(each) for each in runs] for runs in (theirs[name], combined))
            yield compare("Concord", what, setting, best, ours, seeds, LEARNT)
        progress(f"Concord {rate:g} programs/s done")


def collocated() -> InstanceSettings:
    """Concord's engine, as started with `--scheduler slackline --deadlines`."""
    own = concord_lab.instance(concord_lab.CONCORD)
    return replace(own, batching=None, batching_settings={}, engine_kind=BY_STAGE, deadlines=True)


def learned_too(quick: bool) -> Table:
    """Concord's policy and the set, where both learn the time of stages."""
    lab, seeds, programs = concord_lab, (1,) if quick else (2, 3, 4), 60 if quick else 1000
    rows: list[list[str | float | int | None]] = []
    for rate in (3.0,) if quick else (2.0, 3.0, 4.0):
        cases = [lab.Case(rate, programs, seed) for seed in seeds]
        theirs = [lab.run(lab.CONCORD, case) for case in cases]
        ours = [lab.run(lab.CONCORD.variant(policy="slackline"), case, collocated()) for case in cases]
        met = [lab.mean(runs, key) for key in ("tokens_per_s", "requests_per_s") for runs in (theirs, ours)]
        rows.append([rate, *met])
    columns = ["programs/s", "CALM: tokens/s", "set: tokens/s", "CALM: programs/s", "set: programs/s"]
    return Table("Concord's setting, stage times learned by both: means over seeds", columns, rows)
