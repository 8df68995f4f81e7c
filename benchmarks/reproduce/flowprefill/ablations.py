"""FlowPrefill, Fig. 10 to 13 and the scheduling cost of sec. 6.4, on Llama3-8B."""

from __future__ import annotations

import statistics
from dataclasses import replace

from benchmarks.reproduce.claims import Claim, Plot, Progress, Table
from benchmarks.reproduce.flowprefill.setting import (
    LEVEL,
    MODELS,
    PAPER,
    EngineContender,
    OfferedLoad,
    PrefillBench,
    Rows,
    SectionPart,
    Size,
    claimed,
    flowprefill,
    run,
)
from controller.engine import PreemptivePrefill

UNCOMPARED = (
    "the simulated device *is* the polynomial that predicts it, so real and predicted TTFT are equal by "
    "construction. Measured instead is how much of the goodput depends on the prediction. How close a fitted "
    "profile comes to a real engine is measured separately (`make fidelity`)"
)
LLAMA = MODELS["Llama3-8B"]
FLOW = flowprefill()
ORDERS = (FLOW, flowprefill("D-EDF", ordering="d_edf"), flowprefill("EDF", ordering="edf"))
ALONE = flowprefill("no batching", batch=False)
BUDGETS = (2048, 4096, 8192, 16_384)


def orders(bench: PrefillBench, size: Size, progress: Progress) -> SectionPart:
    """Fig. 10: S-EDF against D-EDF and EDF, with the same batching and preemption."""
    load = OfferedLoad(LLAMA, size.count, size.seeds)
    rates = {each.label: bench.goodput(each, load, 6.0) for each in ORDERS}
    rate = 0.5 * rates[FLOW.label]
    scales = {each.label: bench.tightest(each, load, rate) for each in ORDERS}
    progress(f"Fig. 10: {rates}, {scales}")
    setting = "Llama3-8B, operator boundaries, batching on; the paper gives a drawing only"
    claims = []
    for other in ("D-EDF", "EDF"):
        claims += [
            claimed(
                "Fig. 10",
                f"goodput of S-EDF over {other} (factor)",
                None,
                rates[FLOW.label] / rates[other],
                size,
                setting,
            ),
            claimed(
                "Fig. 10", f"tighter SLO than {other} (factor)", None, scales[other] / scales[FLOW.label], size, setting
            ),
        ]
    rows: Rows = [
        [label, rates[label], rates[FLOW.label] / rates[label], scales[label], scales[label] / scales[FLOW.label]]
        for label in rates
    ]
    titles = ["order", "goodput, requests/s", "S-EDF x", f"smallest SLO scale at {rate:.2f}/s", "S-EDF x tighter"]
    table = Table("Fig. 10: orders, Llama3-8B (FlowPrefill: S-EDF)", titles, rows)
    plot = Plot(
        "flowprefill-10",
        "Llama3-8B: scheduling policies",
        "requests/s",
        "attainment",
        {("S-EDF" if each is FLOW else each.label): bench.curve(each, load) for each in ORDERS},
        LEVEL,
        log_x=True,
    )
    return SectionPart(claims, [table], [plot])


def batching(bench: PrefillBench, size: Size, progress: Progress) -> SectionPart:
    """Fig. 11: token budgets, and no batching; attainment and, above saturation, throughput."""
    load = OfferedLoad(LLAMA, size.count, size.seeds)
    top = bench.goodput(FLOW, load, 6.0)
    contenders = [flowprefill(f"budget {budget}", batch_tokens=budget) for budget in BUDGETS] + [ALONE]
    rows: Rows = []
    tokens: dict[str, float] = {}
    reached: dict[str, float] = {}
    for each in contenders:
        reached[each.label] = bench.attainment(each, load, 1.1 * top)
        tokens[each.label] = _throughput(each, load, 1.5 * top)
        rows.append([each.label, reached[each.label], tokens[each.label]])
    progress(f"Fig. 11: {rows}")
    setting = "Llama3-8B; attainment at 1.1 times, throughput at 1.5 times FlowPrefill's goodput"
    others = [reached[each.label] for each in contenders[:-1]]
    reason = (
        "the profile is linear above its constant, so sharing a step saves only 6.6 ms per prompt; on the real "
        "device all prompts below 256 tokens take the same time, so batching them gains more than this profile "
        "can show"
    )
    claims = [
        claimed(
            "Fig. 11",
            "throughput with batching (4K) over none (factor)",
            None,
            tokens["budget 4096"] / tokens["no batching"],
            size,
            setting,
            reason,
        ),
        claimed("Fig. 11", "attainment of the worst budget over none (factor)", None,
                min(others) / reached["no batching"], size, setting, reason),
    ]  # fmt: skip
    titles = ["batch token budget", "attainment", "prompt tokens/s"]
    return SectionPart(claims, [Table("Fig. 11: SLO-aware batching, Llama3-8B", titles, rows)], [])


def _throughput(contender: EngineContender, load: OfferedLoad, rate: float) -> float:
    found = []
    for seed in load.seeds:
        result, _ = run(contender, load.model, load.demands(rate, seed))
        found.append(sum(record.prompt_tokens for record in result.records) / result.ended_at)
    return statistics.median(found)


def blocking(size: Size, progress: Progress) -> SectionPart:
    """Fig. 12 and sec. 6.4's scheduling cost, measured in the runs and not from the formula."""
    rows: Rows = []
    ratios: list[float] = []
    means: list[float] = []
    rounds: list[tuple[str, int, float, float]] = []
    for model in MODELS.values():
        rate = {"Llama3-8B": 5.0, "Qwen2.5-14B": 5.0, "Llama3-70B": 2.5}[model.name]
        found: dict[str, float] = {}
        for kind in ("operator", "layer"):
            contender = flowprefill(kind, {"boundary": kind})
            waits, signals, most = 0.0, 0, 0.0
            for seed in size.seeds:
                load = OfferedLoad(model, size.count, (seed,))
                demands = load.demands(rate, seed)
                _, simulation = run(contender, model, demands)
                (engine,) = (each.engine for each in simulation.cluster)
                if not isinstance(engine, PreemptivePrefill):
                    raise TypeError("FlowPrefill's engine was wanted")
                totals = engine.rounds
                waits, signals = waits + totals.blocking_s, signals + totals.signals
                most = max(most, totals.blocking_max_s)
                if kind == "operator":
                    commands = totals.submits + totals.preempts + totals.resumes
                    rounds.append((model.name, len(demands), totals.rounds / len(demands), commands / len(demands)))
            found[kind] = waits / signals
            rows.append([model.name, kind, 1000 * waits / signals, 1000 * most, signals])
        ratios.append(found["layer"] / found["operator"])
        means.append(1000 * found["operator"])
    progress(f"Fig. 12: ratios {ratios}, operator means {means} ms")
    setting = "signals of the runs; operators composed from FLOP shares and the profile's attention term"
    reason = (
        "the ratio follows from the operators' shares alone: projections by their work (checked against "
        "measured kernels), all-reduces as measured, attention by the profile's quadratic term; norms and "
        "rotary embedding, which make operators more alike, are not separated, and the paper's figure includes "
        "what its runtime adds"
    )
    text = "blocking time at layers over that at operators, {} of the models (factor)"
    claims = [
        claimed("Fig. 12", text.format("least"), 3.5, min(ratios), size, setting, reason),
        claimed("Fig. 12", text.format("most"), 4.2, max(ratios), size, setting, reason),
        replace(
            claimed(
                "Fig. 12", "mean blocking time at operators, highest of the models (ms)", 4.5, max(means), size, setting
            ),
            reached=max(means) <= 4.5,
        ),
        replace(
            claimed("Sec. 6.4", "scheduling rounds per request", 2.0, max(row[2] for row in rounds), size, setting),
            reached=all(1.5 <= row[2] <= 2.0 for row in rounds),
        ),
    ]
    tables = [
        Table("Fig. 12: blocking time", ["model", "boundary", "mean, ms", "longest, ms", "signals"], rows),
        Table("Sec. 6.4: rounds", ["model", "requests", "rounds a request", "commands a request"], rounds),
    ]
    return SectionPart(claims, tables, [])


def prediction(bench: PrefillBench, size: Size, progress: Progress) -> SectionPart:
    """Fig. 13 asks how well a polynomial predicts.

    Here the device *is* one, so this asks for the effect of a wrong prediction. A margin of 1.1 on one that is a fifth
    too short makes it 0.88; on a right one it makes it 1.1.
    """
    load = OfferedLoad(LLAMA, size.count, size.seeds)
    right = bench.goodput(FLOW, load, 6.0)
    rows: Rows = [[1.0, right, 1.0]]
    shares: dict[float, float] = {}
    for factor in (0.6, 0.8, 0.88, 1.1, 1.25, 1.6):
        k = LLAMA.latency
        believed = {f"prefill_{name}": factor * getattr(k, f"prefill_{name}") for name in "abc"}
        rate = bench.goodput(flowprefill(f"prediction x {factor}", None, **believed), load, 6.0)
        shares[factor] = rate / right
        rows.append([factor, rate, rate / right])
    progress(f"Fig. 13: {rows}")
    titles = ["prediction x", "goodput", "of the right one"]
    table = Table("Sec. 6.4: goodput with a wrong prediction, Llama3-8B", titles, rows)
    setting = "Llama3-8B; every prediction 20 % too short or 25 % too long; the paper shows that its are close"
    kept = min(value for factor, value in shares.items() if factor in (0.8, 1.25))
    claim = claimed("Fig. 13", "goodput kept with predictions off by a fifth (share)", None, kept, size, setting)
    shown = Claim(
        PAPER, "Fig. 13", "real against predicted TTFT, three models (the paper: a plot; most are close)", None, None,
        None, "not reproduced", [], UNCOMPARED,
    )  # fmt: skip
    return SectionPart([shown, replace(claim, reached=None, reason=UNCOMPARED)], [table], [])
