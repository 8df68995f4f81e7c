"""The reproduction pages: every claim, reason, table and plot appears, and a stored section reads back."""

import json
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pytest

from benchmarks.reproduce.__main__ import PAPERS, ROOT, STORE, main, retold, run_paper, stored
from benchmarks.reproduce.claims import VERDICTS, Claim, Plot, Section, Table
from benchmarks.reproduce.headlines import headlines
from benchmarks.reproduce.page import write

SECTION = Section(
    "Paper",
    "Two workers.",
    [
        Claim("Paper", "Fig. 1", "rate over FCFS", 4.7, 5.12345, True, "1P1D", (1, 2)),
        Claim("Paper", "Fig. 2", "over a | rival", 2.0, 1.5, False, "1P1D", (1,), "the rival is at its best"),
        Claim("Paper", "Fig. 3", "over one only described", 2.0, None, None, "1P1D", (1,)),
    ],
    [Table("Sweep", ["window", "attainment"], [[6, 0.5], ["best", None]])],
    [Plot("fig1", "Attainment", "requests/s", "share", {"ours": [(1.0, 1.0), (2.0, 0.9)], "none": []}, level=0.9)],
    {"took": "1 s"},
)


def test_summary_counts_claims_by_figure(tmp_path):
    write([SECTION], tmp_path)
    summary = (tmp_path / "README.md").read_text()
    assert "| [Paper](paper.md) | Fig. 1 | 1 of 1 | - | - | - | - | 0 | rate over FCFS | 4.7 | - | 5.123 |" in summary
    assert "over a \\| rival" in summary
    assert "| Fig. 3 | - | - | - | - | - | 1 | over one only described | 2 | - | - |" in summary


def test_verdicts_of_each_kind_are_counted_apart(tmp_path):
    others = [
        Claim("Paper", "Fig. 1", "over a better one", None, 0.9, False, "", (1,), verdict="printed, stronger", bar=1.0),
        Claim("Paper", "Fig. 1", "of the set", 2.0, 3.0, True, "", (1,), verdict="set"),
        Claim("Paper", "Fig. 1", "with a change", 2.0, 3.0, True, "", (1,), verdict="changed"),
    ]
    write([replace(SECTION, claims=[*SECTION.claims, *others])], tmp_path)
    summary = (tmp_path / "README.md").read_text()
    assert "| [Paper](paper.md) | 1 of 2 | 0 of 1 | 1 of 1 | - | 1 of 1 |\n" in summary
    (row,) = [line for line in summary.splitlines() if line.startswith("| [Paper](paper.md) | Fig. 1 |")]
    assert row.startswith("| [Paper](paper.md) | Fig. 1 | 1 of 1 | 0 of 1 | 1 of 1 | - | 1 of 1 | 0 | rate over FCFS |")
    page = (tmp_path / "paper.md").read_text()
    assert [f"| Fig. 1 | {VERDICTS[kind]} |" in page for kind in VERDICTS] == [True, True, True, False, True]


def test_variants_of_a_figure_share_its_row_in_the_summary(tmp_path):
    claims = [replace(SECTION.claims[0], figure=name) for name in ("Fig. 3", "Fig. 3, 8 sequences")]
    write([replace(SECTION, claims=claims)], tmp_path)
    summary = (tmp_path / "README.md").read_text()
    assert "| Fig. 3 | 2 of 2 |" in summary
    assert "8 sequences |" not in summary


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"verdict": "ours"}, "is no verdict"),
        ({"verdict": "set, stronger"}, "the paper's value is not about this baseline"),
        ({"theirs": None}, "neither the paper's value nor a bar is given"),
        ({"analyser": "tarot"}, "'tarot' is no analyser; valid: trained, noise, oracle"),
    ],
)
def test_a_claim_has_a_verdict_and_what_it_is_judged_by(changes, said):
    with pytest.raises(ValueError, match=said):
        replace(SECTION.claims[0], **changes)


def test_every_stored_comparison_with_a_stronger_baseline_has_a_bar():
    claims = [claim for section in stored(STORE) for claim in section.claims]
    stronger = [claim for claim in claims if claim.verdict.endswith("stronger")]
    assert stronger
    assert all(claim.bar is not None for claim in stronger)
    outside = [claim for claim in claims if "not in the paper" in claim.claim]
    assert all(claim.verdict.endswith("stronger") for claim in outside)


def test_a_run_of_a_tree_with_changes_says_so(tmp_path):
    write([replace(SECTION, meta={"on": "2026-11-22", "tree": "aaa-dirty", "cores": 2})], tmp_path)
    page = (tmp_path / "paper.md").read_text()
    assert "Run on 2026-11-22, from commit aaa with changes that were not committed yet, on 2 cores.\n" in page


def test_a_run_names_the_commit_of_the_deciders(tmp_path, monkeypatch):
    made = replace(SECTION, meta={})
    monkeypatch.setattr("importlib.import_module", lambda name: SimpleNamespace(reproduce=lambda *_: made))
    section = run_paper("paper", (), True)
    last = subprocess.run(
        ["git", "log", "-1", "--format=%h", "--", "controller"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert section.meta["deciders"] == (last.stdout.strip() or "unknown")
    assert section.meta["processor"].removesuffix(" s").isdigit()
    write([replace(section, meta={"tree": "aaa", "deciders": "bbb"})], tmp_path)
    assert "Run from commit aaa, with the deciders of commit bbb.\n" in (tmp_path / "paper.md").read_text()


def test_a_part_that_copies_another_section_names_the_deciders_of_that_run(tmp_path, monkeypatch):
    """Copying it after the deciders changed would name those."""
    (tmp_path / "source.json").write_text(json.dumps({"meta": {"deciders": "bbb"}}))
    monkeypatch.setattr("benchmarks.reproduce.__main__.STORE", tmp_path)
    made = SimpleNamespace(reproduce=lambda *_, **__: replace(SECTION, meta={}), COPIED_FROM={"copied": "source"})
    monkeypatch.setattr("importlib.import_module", lambda name: made)
    assert run_paper("paper", ("copied",), True).meta["deciders"] == "bbb"
    assert run_paper("paper", ("copied", "own"), True).meta["deciders"] != "bbb"


def test_a_paper_has_its_setting_results_reasons_tables_and_plots(tmp_path):
    write([SECTION], tmp_path)
    page = (tmp_path / "paper.md").read_text()
    assert "Two workers." in page
    assert "Run in 1 s." in page
    assert f"| Fig. 2 | {VERDICTS['printed']} | 0 of 1 | 0 |" in page
    assert '- **Fig. 2**, "over a | rival": the rival is at its best' in page
    assert "- [All claims](tables/paper/all-claims.csv), 3 rows" in page
    assert "- [Sweep](tables/paper/sweep.csv), 2 rows" in page
    assert "![Attainment](fig1.svg)" in page
    assert "<svg" in (tmp_path / "fig1.svg").read_text()


def test_tables_are_written_as_csv(tmp_path):
    write([SECTION], tmp_path)
    folder = tmp_path / "tables" / "paper"
    assert (folder / "sweep.csv").read_text() == "window,attainment\n6,0.5\nbest,\n"
    assert "rate over FCFS,4.7,,5.123,yes,1P1D,1 2,\n" in (folder / "all-claims.csv").read_text()


def test_where_a_claim_says_what_lengths_were_told_from_all_do(tmp_path):
    first, *others = SECTION.claims
    write([replace(SECTION, claims=[replace(first, analyser="trained"), *others])], tmp_path)
    heads, row, *_ = (tmp_path / "tables" / "paper" / "all-claims.csv").read_text().splitlines()
    assert heads.endswith(",seeds,analyser,reason")
    assert row.endswith(",1 2,trained,")


def test_tables_of_one_name_are_refused(tmp_path):
    twice = replace(SECTION, tables=[SECTION.tables[0]] * 2)
    with pytest.raises(ValueError, match=r"two tables would be written to sweep\.csv"):
        write([twice], tmp_path)


def test_equal_sections_give_equal_files(tmp_path):
    for folder in ("a", "b"):
        write([SECTION], tmp_path / folder)
    assert (tmp_path / "a" / "fig1.svg").read_bytes() == (tmp_path / "b" / "fig1.svg").read_bytes()


def test_the_stored_results_give_the_committed_pages(tmp_path):
    sections = [replace(section, plots=[]) for section in stored(STORE)]
    write(sections, tmp_path)
    pages = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert pages
    for made in pages:
        kept = re.sub(r"!\[.*\]\(.*\.svg\)\n\n", "", (STORE / made.relative_to(tmp_path)).read_text())
        assert made.read_text() == kept, f"{made.name}: python -m benchmarks.reproduce --page-only"


@pytest.mark.parametrize("paper", PAPERS)
def test_stored_texts_and_reasons_are_those_of_the_code(paper):
    section = Section.from_json(json.loads((STORE / f"{paper}.json").read_text()))
    assert retold(paper, section) == section, "python -m benchmarks.reproduce --page-only"


def test_a_page_says_how_long_all_parts_took(tmp_path):
    parts = {"fig1": {"took": "40 s"}, "fig2": {"took": "3600 s"}}
    section = Section(
        "Paper", "", [parted("1", 1.0, "fig1"), parted("2", 3.0, "fig2")], [], [], {"on": "2026-11-29", "parts": parts}
    )
    write([section], tmp_path)
    assert "- all of these parts: 3,640 s (61 minutes)\n" in (tmp_path / "paper.md").read_text()
    write([replace(section, claims=[*section.claims, parted("3", 1.0, "fig3")])], tmp_path)
    assert "all of these parts" not in (tmp_path / "paper.md").read_text()


def test_a_page_adds_up_the_processor_time_of_parts_that_have_it(tmp_path):
    parts = {"fig1": {"took": "90 s", "processor": "70 s"}, "fig2": {"took": "7200 s", "processor": "3600 s"}}
    section = Section("Paper", "", [parted("1", 1.0, "fig1"), parted("2", 3.0, "fig2")], [], [], {"parts": parts})
    write([section], tmp_path)
    page = (tmp_path / "paper.md").read_text()
    assert "in 90 s, with 70 s of processor time" in page
    assert "- all of these parts: 3,670 s (61 minutes), of processor time\n" in page
    del parts["fig1"]["processor"]
    write([section], tmp_path)
    page = (tmp_path / "paper.md").read_text()
    assert "- all of these parts: 3,690 s (62 minutes), of processor time where it is known\n" in page


def test_headlines_are_those_of_the_stored_claims():
    found = headlines(stored(STORE))
    combined = found["combined"]
    assert (combined["first_loads"], combined["loads_at_64_and_256"]) == (104, 12)
    assert 0 < combined["at_least_as_good_of_first"] <= 104
    assert set(found["pd_cost"]) == {"Qwen7B", "Qwen32B"}
    assert {figure: gain["paper"] for figure, gain in found["kairos_gains"].items()} == {
        "Fig. 4": 23.9, "Fig. 5": 27.1, "Fig. 3": 33.8,
    }  # fmt: skip
    assert headlines([SECTION]) == {}


def test_a_stored_section_reads_back():
    stored = json.dumps(SECTION.to_json())
    assert json.dumps(Section.from_json(json.loads(stored)).to_json()) == stored


def parted(figure, ours, part):
    return Claim("Paper", figure, "rate", 2.0, ours, ours > 2.0, "", (1,), part=part)


def test_a_part_run_again_replaces_its_own_and_nothing_else(tmp_path):
    order = ("fig1", "fig2")
    tables = [Table("One", ["a"], [[1]], part="fig1"), Table("Two", ["a"], [[2]], part="fig2")]
    stored = Section("Paper", "old", [parted("1", 1.0, "fig1"), parted("2", 3.0, "fig2")], tables, [], {"tree": "aaa"})
    fresh = Section(
        "Paper", "new", [parted("1", 4.0, "fig1")], [Table("One b", ["a"], [[5]], part="fig1")], [], {"tree": "bbb"}
    )
    found = stored.updated(fresh, ("fig1",), order)
    assert [(claim.figure, claim.ours) for claim in found.claims] == [("1", 4.0), ("2", 3.0)]
    assert [table.title for table in found.tables] == ["One b", "Two"]
    assert found.meta == {"tree": "aaa", "parts": {"fig1": {"tree": "bbb"}}}
    assert json.dumps(Section.from_json(json.loads(json.dumps(found.to_json()))).to_json()) == json.dumps(
        found.to_json()
    )
    again = found.updated(
        Section("Paper", "new", [parted("2", 1.0, "fig2")], [], [], {"tree": "ccc"}), ("fig2",), order
    )
    assert list(again.meta["parts"]) == ["fig1", "fig2"]
    assert [(claim.figure, claim.ours) for claim in again.claims] == [("1", 4.0), ("2", 1.0)]
    assert [table.title for table in again.tables] == ["One b"]
    write([again], tmp_path)
    page = (tmp_path / "paper.md").read_text()
    assert "Run from commit aaa.\n\n- Fig. 1: run again from commit bbb\n- Fig. 2: run again from commit ccc\n" in page


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--part", "fig3"], "--part needs one --paper"),
        (["--paper", "hyperflexis", "--part", "fig33"], "no part 'fig33'; valid: fig3, slots, fig4"),
        (["--paper", "flowprefill", "--part", "fig9"], "flowprefill has no part 'fig9'; valid: simulated, prediction"),
    ],
)
def test_a_part_that_is_not_there_is_refused(arguments, said, capsys):
    with pytest.raises(SystemExit):
        main(arguments)
    assert said in capsys.readouterr().err


def test_a_long_paper_is_stored_part_by_part(tmp_path, monkeypatch):
    """A part that fails loses nothing that the others found."""
    monkeypatch.setattr("benchmarks.reproduce.__main__.STORE", tmp_path)
    monkeypatch.setattr("benchmarks.reproduce.__main__.ProcessPoolExecutor", ThreadPoolExecutor)

    def run(name, parts, *_):
        assert name == "mfs"
        if parts == ("fig12",):
            raise ValueError("a part that fails")
        return replace(SECTION, paper="MFS", claims=[], tables=[replace(SECTION.tables[0], part=parts[0])], plots=[])

    monkeypatch.setattr("benchmarks.reproduce.__main__.run_paper", run)
    with pytest.raises(ValueError, match="a part that fails"):
        main(["--paper", "mfs", "--jobs", "1"])
    (section,) = stored(tmp_path)
    assert [table.part for table in section.tables] == ["fig10", "fig11", "fig13", "fig14", "ablations", "sender"]
