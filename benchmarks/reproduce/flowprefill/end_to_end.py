"""FlowPrefill, Fig. 9 and 17: goodput and tightest SLO of three dense models and one of experts; baseline sweeps."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.reproduce.claims import PRINTED_STRONGER, Claim, Plot, Progress, Table
from benchmarks.reproduce.flowprefill.setting import (
    CV,
    LEVEL,
    MODELS,
    MOE,
    EngineContender,
    FlowPrefillModel,
    OfferedLoad,
    PrefillBench,
    Rows,
    SectionPart,
    Size,
    chunked,
    claimed,
    class_priority,
    distserve,
    flowprefill,
)

FLOW, CP2K, CP8K, TODAY = flowprefill(), chunked(2048), chunked(8192), class_priority(2048)
BUDGETS = tuple(map(distserve, (256, 2048, 4096, 8192)))
CHUNKS = (chunked(512), chunked(1024), chunked(4096), chunked(16_384))
SLACK_CHUNKS = (chunked(1024, "s_edf", "CP1K, S-EDF"), chunked(2048, "s_edf", "CP2K, S-EDF"))
FIRST = {"Llama3-8B": 4.0, "Qwen2.5-14B": 4.0, "Llama3-70B": 2.0}  # requests/s at which searches begin
AT = 0.5  # share of FlowPrefill's goodput: the fixed rate in the second row of Fig. 9


def end_to_end(bench: PrefillBench, size: Size, progress: Progress) -> SectionPart:
    claims: list[Claim] = []
    plots: list[Plot] = []
    rows: Rows = []
    rates: dict[str, dict[str, float]] = {}
    scales: dict[str, dict[str, float]] = {}
    models = list(MODELS.values())[: 1 if size.quick else None]
    for model in models:
        load = OfferedLoad(model, size.count, size.seeds)
        contenders = [FLOW, BUDGETS[0], CP2K, CP8K, TODAY] if size.quick else [FLOW, *BUDGETS, CP2K, CP8K, TODAY]
        found = {each.label: bench.goodput(each, load, FIRST[model.name]) for each in contenders}
        best = max(BUDGETS, key=lambda each: found.get(each.label, 0.0))
        found["DistServe"] = found[best.label]
        rates[model.name] = found
        shown = [FLOW, best, CP2K, CP8K, TODAY]
        plots.append(_attainment_plot(bench, model, load, shown))
        rate = AT * found[FLOW.label]
        scales[model.name] = {each.label: bench.tightest(each, load, rate) for each in (FLOW, CP2K, CP8K)}
        plots.append(_scale_plot(bench, model, load, rate, (FLOW, CP2K, CP8K)))
        rows += [
            [model.name, each.label, found[each.label], found[FLOW.label] / found[each.label]] for each in contenders
        ]
        progress(f"Fig. 9 {model.name}: " + ", ".join(f"{name} {value:.2f}" for name, value in found.items()))
    claims += _rate_claims(rates, size)
    claims += _scale_claims(scales, size)
    tables = [
        Table("Fig. 9, first row: goodput (requests/s at 90 %)", ["model", "system", "goodput", "FlowPrefill x"], rows),
        Table(
            f"Fig. 9, second row: smallest SLO scale at 90 %, at {AT:.0%} of FlowPrefill's goodput",
            ["model", "system", "SLO scale", "FlowPrefill x tighter"],
            [
                [name, label, scale, scale / found[FLOW.label]]
                for name, found in scales.items()
                for label, scale in found.items()
            ],
        ),
    ]
    if not size.quick:
        more, sweep = _sweep(bench, size, progress)
        claims += more
        tables += [*sweep, _sensitivity(bench, size, progress)]
    return SectionPart(claims, tables, plots)


def _rate_claims(rates: dict[str, dict[str, float]], size: Size) -> list[Claim]:
    def over(label: str) -> list[float]:
        return [found[FLOW.label] / found[label] for found in rates.values()]

    setting = f"{', '.join(rates)}; 1 prefill instance; Table 2 SLOs; best of {len(BUDGETS)} FCFS settings"
    low, high = min(over("DistServe")), max(over("DistServe"))
    return [
        claimed("Fig. 9", "goodput over DistServe (FCFS), lowest of the models (factor)", 4.7, low, size, setting),
        claimed("Fig. 9", "goodput over DistServe (FCFS), highest of the models (factor)", 5.6, high, size, setting),
        claimed(
            "Fig. 9", "goodput over DistServe-CP2K (EDF), up to (factor)", 2.0, max(over(CP2K.label)), size, setting
        ),
        claimed(
            "Fig. 9", "goodput over DistServe-CP8K (EDF), up to (factor)", 4.5, max(over(CP8K.label)), size, setting
        ),
        claimed(
            "Fig. 9",
            "goodput over vLLM 2K with class priorities, lowest of the models (factor; not in the paper)",
            None,
            min(over(TODAY.label)),
            size,
            setting,
            verdict=PRINTED_STRONGER,
        ),
    ]


def _scale_claims(scales: dict[str, dict[str, float]], size: Size) -> list[Claim]:
    setting = f"{', '.join(scales)}; rate {AT:.0%} of FlowPrefill's goodput (the paper does not name its rates)"
    claims = []
    for each, low, high in ((CP2K, 1.5, 2.3), (CP8K, 2.1, 3.1)):
        over = [found[each.label] / found[FLOW.label] for found in scales.values()]
        claims += [
            claimed(
                "Fig. 9", f"tighter SLO than {each.label}, lowest of the models (factor)", low, min(over), size, setting
            ),
            claimed(
                "Fig. 9",
                f"tighter SLO than {each.label}, highest of the models (factor)",
                high,
                max(over),
                size,
                setting,
            ),
        ]
    return claims


def _attainment_plot(
    bench: PrefillBench, model: FlowPrefillModel, load: OfferedLoad, shown: list[EngineContender]
) -> Plot:
    return Plot(
        f"flowprefill-9-{model.shape}",
        f"{model.name}: TTFT attainment against rate",
        "requests/s",
        "attainment",
        {each.label: bench.curve(each, load) for each in shown},
        LEVEL,
        log_x=True,
    )


def _scale_plot(
    bench: PrefillBench, model: FlowPrefillModel, load: OfferedLoad, rate: float, shown: tuple[EngineContender, ...]
) -> Plot:
    return Plot(
        f"flowprefill-9-slo-{model.shape}",
        f"{model.name}: TTFT attainment against SLO scale at {rate:.2g} requests/s",
        "SLO scale (1: Table 2)",
        "attainment",
        {each.label: bench.scales(each, load, rate) for each in shown},
        LEVEL,
        log_x=True,
    )


def _sweep(bench: PrefillBench, size: Size, progress: Progress) -> tuple[list[Claim], list[Table]]:
    """Every baseline's own settings, so that each is shown at its best; and chunks in FlowPrefill's own order."""
    in_order = (*CHUNKS[:2], CP2K, CHUNKS[2], CP8K, CHUNKS[3])
    tables: list[Table] = []
    edf: dict[str, float] = {}
    slack: dict[str, float] = {}
    for model in MODELS.values():
        load = OfferedLoad(model, size.count, size.seeds)
        flow = bench.goodput(FLOW, load, FIRST[model.name])
        found = {
            each.label: bench.goodput(each, load, FIRST[model.name]) for each in (*BUDGETS, *in_order, *SLACK_CHUNKS)
        }
        progress(f"sweep of {model.name}: " + ", ".join(f"{name} {value:.2f}" for name, value in found.items()))
        rows: Rows = [[label, rate, flow / rate] for label, rate in found.items()]
        columns = ["system", "goodput, requests/s", "FlowPrefill x"]
        tables.append(Table(f"Baselines' own settings, {model.name}", columns, rows))
        edf[model.name] = flow / max(found[each.label] for each in in_order)
        slack[model.name] = flow / max(found[each.label] for each in SLACK_CHUNKS)
    setting = "Llama3-8B, Qwen2.5-14B, Llama3-70B; not in the paper, which has chunks of 2K and 8K"
    over = ", ".join(f"{name} {ratio:.2f}" for name, ratio in edf.items())
    best = (
        f'by model: {over}. The paper\'s "up to 2.0x" is over CP2K; over the best chunk size of each model it would '
        + ("also be reached" if max(edf.values()) >= 2.0 else "be missed: shorter chunks than 2K serve EDF better here")
    )
    reason = "with chunks as short as 1,024 tokens, the order alone gives most of the gain over EDF"
    text = "goodput over chunked prefill with {}, lowest of the models (factor)"
    claims = [
        claimed("Fig. 9", text.format("EDF at its best chunk size"), None, min(edf.values()), size, setting, best,
                PRINTED_STRONGER),
        claimed("Fig. 9", text.format("S-EDF at its best"), None, min(slack.values()), size, setting, reason,
                PRINTED_STRONGER),
    ]  # fmt: skip
    return claims, tables


def _sensitivity(bench: PrefillBench, size: Size, progress: Progress) -> Table:
    """How the headline depends on burstiness and on the length of the run.

    The paper's trace is bursty, and this stand-in assumes a value. Above saturation S-EDF postpones hopeless requests,
    which a longer run leaves less room for.
    """
    rows: Rows = []
    cases = [(model, cv, size.count) for model in MODELS.values() for cv in (1.0, 1.6)]
    for model, cv, count in [*cases, (MODELS["Llama3-8B"], CV, 4 * size.count)]:
        load = OfferedLoad(model, count, size.seeds[:1], cv)
        flow, *others = (bench.goodput(each, load, FIRST[model.name]) for each in (FLOW, BUDGETS[0], CP2K, CP8K))
        rows.append([model.name, cv, count, flow, *(flow / other for other in others)])
        progress(f"sensitivity {model.name}, CV {cv}, {count} requests: {rows[-1]}")
    title = (
        "Rate over the baselines where arrivals are smoother (Poisson: CV 1) or burstier, or the run longer; one seed"
    )
    columns = ["model", "CV", "requests", "goodput, requests/s", "x DistServe", "x CP2K", "x CP8K"]
    return Table(title, columns, rows)


def experts(bench: PrefillBench, size: Size, progress: Progress) -> SectionPart:
    """Fig. 17."""
    load = OfferedLoad(MOE, size.count, size.seeds)
    shown = (FLOW, CP2K, CP8K, TODAY)
    rates = {each.label: bench.goodput(each, load, 8.0) for each in shown}
    rate = AT * rates[FLOW.label]
    scales = {each.label: bench.tightest(each, load, rate) for each in shown}
    progress(f"Fig. 17: {rates}, {scales}")
    setting = f"{MOE.name}, profile {MOE.profile}; Llama3-8B's SLOs (Table 2 has none for it)"
    looser = scales[CP2K.label] / scales[FLOW.label]
    claims = [
        claimed(
            "Fig. 17", "goodput over DistServe-CP2K (factor)", 1.6, rates[FLOW.label] / rates[CP2K.label], size, setting
        ),
        claimed("Fig. 17", "tighter SLO than DistServe-CP2K (factor)", 2.4, looser, size, setting),
        claimed(
            "Fig. 17",
            "goodput over vLLM 2K with class priorities (factor; not in the paper)",
            None,
            rates[FLOW.label] / rates[TODAY.label],
            size,
            setting,
            verdict=PRINTED_STRONGER,
        ),
    ]
    # Neither its latency nor its SLOs are known, so figures of this assumed device are not judged.
    reason = "its profile is composed, its SLOs are assumed"
    undecided = [replace(claim, reached=None, reason=reason) for claim in claims]
    rows: Rows = [
        [label, rates[label], rates[FLOW.label] / rates[label], scales[label], scales[label] / scales[FLOW.label]]
        for label in rates
    ]
    titles = ["system", "goodput, requests/s", "FlowPrefill x", f"smallest SLO scale at {rate:.2f}/s", "x tighter"]
    table = Table(f"Fig. 17: {MOE.name}", titles, rows)
    return SectionPart(undecided, [table], [_attainment_plot(bench, MOE, load, list(shown))])
