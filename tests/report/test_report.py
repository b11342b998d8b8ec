"""Reports: the page (also of hostile runs), the CSV file, the PNG files."""

import base64
import hashlib
import html.parser
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel_gpt import cli
from accel_gpt.config.experiment import OptimConfig, Stage
from accel_gpt.console import run_main
from accel_gpt.files import locked_file
from accel_gpt.report.curves import read_metrics
from accel_gpt.report.page import final_results
from accel_gpt.report.payload import MOST_POINTS, all_marks, thin
from accel_gpt.report.plots import loss_curves
from accel_gpt.report.runs import open_runs
from accel_gpt.runs.folder import PROMPT_END, RunFolder
from tests.helpers.runs import LAUNCH, make_run, record

EVIL = "</script><img src=x onerror=alert(1)>'\"&lt;{{ version }}"


def report(*words: object) -> int:
    return run_main(cli.dispatch, ["report", *map(str, words)])


def page(run: Path, *words: object) -> str:
    """Return the report of a run."""
    assert report(run, *words) == 0
    return (run / "report.html").read_text(encoding="utf-8")


def drawn(text: str) -> Any:
    """Return the data that the script of a page draws."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text)
    assert found
    return json.loads(found[1])


def section(text: str, name: str) -> str:
    return text.partition(f'id="{name}"')[2].partition("</section>")[0]


class Tags(html.parser.HTMLParser):
    """The elements of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


# --------------------------------------------------------------------------- the page


def test_the_page_shows_what_ran_and_how_far_it_got(tmp_path: Path) -> None:
    text = page(make_run(tmp_path / "run", optim=OptimConfig(lr=0.0125)))
    shown = re.sub(r"<[^>]+>", "\n", text.partition("<main>")[2].partition("<script")[0])
    for words in (
        *("run", "finished", "1.6366", "best val loss, step&nbsp;40", "0:00:20"),
        "30,000 parameters",
        *("0123456789ab", "A processor", "torch 2.13.0", "accel-gpt train configs/small.yaml"),
        *("data/x: 18,000 tokens", "first of 20", "second of 40", "optim.lr", "0.0125", "10.24K"),
    ):
        assert words in shown, words
    data = drawn(text)
    names = [panel["name"] for panel in data["panels"]]
    assert names == ["loss", "bits_per_byte", "lr", "grad_norm", "throughput", "memory"]
    curves = data["panels"][0]["curves"]
    assert [curve["key"] for curve in curves] == ["train/loss", "eval/train_loss", "eval/val_loss"]
    assert data["runs"][0]["clock"]["tokens"][-1] == 40 * 256
    assert data["runs"][0]["clock"]["flops"][-1] == 40 * 256 * 200_000


def test_nothing_is_fetched_and_only_our_script_runs(tmp_path: Path) -> None:
    text = page(make_run(tmp_path / "run"))
    for name, attributes in Tags(text).found:
        assert name not in ("link", "img", "iframe", "object", "base", "form"), name
        assert not {"src", "style"} & attributes.keys()
        assert not any(key.startswith("on") for key in attributes)
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', text)
    script = text.rpartition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy
    assert "default-src 'none'" in policy[1]
    assert f"script-src 'sha256-{digest}'" in policy[1]
    assert "unsafe" not in policy[1]
    assert not re.search(r"@import|url\((?!#)|https?://(?!www\.w3\.org/2000/svg)", text)


def test_texts_of_a_run_stay_texts(tmp_path: Path) -> None:
    launch = {**LAUNCH, "command": EVIL, "commit": EVIL, "device": EVIL, "versions": {EVIL: EVIL}}
    launch["data"] = {"lines": [EVIL, [EVIL], 7]}
    records = [record(10, **{f"eval/{EVIL}": 1e308, f"eval/val_loss/{EVIL}": 2, "perf/mfu": 1e308})]
    run = make_run(tmp_path / f"a{EVIL.replace('/', '')}", records, [launch, {"step": EVIL}])
    (run / "config.yaml").write_text(json.dumps({EVIL: {"x": [EVIL]}, "model": {"preset": EVIL}}))
    (run / "samples" / "step_00000050.txt").write_text(f"--- sample 1\n{EVIL}\x1b[2J\n")
    plain, hostile = page(make_run(tmp_path / "plain")), page(run)
    count = [name for name, _ in Tags(hostile).found]
    assert count.count("script") == [n for n, _ in Tags(plain).found].count("script") == 2
    assert "img" not in count
    assert "\x1b" not in hostile
    assert "onerror=alert(1)&gt;" in hostile
    assert "{{ version }}" in hostile
    assert drawn(hostile)["runs"][0]["name"] == run.name


def test_resumes_and_skipped_updates_are_marked(tmp_path: Path) -> None:
    counts = {20: 1, 21: 1, 30: 4}
    skipped = 0
    records = []
    for step in (*range(1, 20, 2), 20, 21, 30, 40):
        skipped = counts.get(step, skipped)
        records.append(record(step, **{"train/skipped": skipped}))
    # the third launch resumed before the second
    launches = [{**LAUNCH, "step": step} for step in (0, 15, 12, 12, 33)]
    [run] = open_runs([str(make_run(tmp_path / "run", records, launches))])
    assert run.resumes() == [12, 33]
    assert [(mark["step"], mark["text"]) for mark in all_marks(run)] == [
        (12, "resumed at step 12"),
        (33, "resumed at step 33"),
        (20, "1 skipped update, step 20"),
        (30, "3 skipped updates, steps 22 to 30"),
    ]


def test_a_run_that_is_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run", [record(step) for step in range(1, 21)])
    assert "stopped at step 20 of 40" in page(run)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 21, "tokens": 53')
    with locked_file(run / ".lock"):
        text = page(run)
    assert "in progress: step 20 of 40" in text
    assert "run: in progress: step 20 of 40\n" in capsys.readouterr().out
    assert max(drawn(text)["runs"][0]["clock"]["step"]) == 20


def test_a_run_that_has_written_nothing_yet(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (run / "metrics.jsonl").unlink()
    (run / "config.yaml").write_text("{")
    text = page(run)
    assert "No metrics yet" in text
    assert drawn(text)["panels"] == []


def test_of_several_runs_the_differences_are_shown(tmp_path: Path) -> None:
    a = make_run(tmp_path / "a" / "run", optim=OptimConfig(lr=0.001))
    worse = [record(s, **({"eval/val_loss": 3.5} if s % 10 == 0 else {})) for s in range(1, 41)]
    b = make_run(tmp_path / "b" / "run", worse, optim=OptimConfig(lr=0.125))
    out = tmp_path / "both.html"
    assert report(a, b, "--out", out) == 0
    text = out.read_text()
    data = drawn(text)
    assert [run["name"] for run in data["runs"]] == ["a/run", "b/run"]
    lr = next(panel for panel in data["panels"] if panel["name"] == "lr")
    assert [(c["label"], c["color"]) for c in lr["curves"]] == [("a/run", 0), ("b/run", 1)]
    assert re.findall(r'<th scope="row">([\w.]+)', section(text, "config")) == ["optim.lr"]
    assert re.findall(r"<td>([\d.]+)", section(text, "config")) == ["0.001", "0.125"]
    assert re.findall(r'class="number best">([\d.]+)', text) == ["1.6366"]


def test_the_file_of_code_is_named_and_its_metrics_have_plots(tmp_path: Path) -> None:
    """Those with one prefix share a plot; ours have no second one."""
    own = {"train/z_loss": 0.5, "train/norm/0": 1.0, "train/norm/1": 2.0, "score": 3.0}
    code = {"file": "mine.py", "sha256": "abc" * 20, "functions": ["model", "loss"]}
    launches = [{**LAUNCH, "code": code}]
    run = make_run(tmp_path / "run", [record(step, **own) for step in (1, 2)], launches)
    text = page(run)
    assert "mine.py (abcabcabcabc): model, loss" in text
    assert "mine.py, 30,000 parameters" in text
    plots = drawn(text)["panels"]
    found = {plot["title"]: [curve["key"] for curve in plot["curves"]] for plot in plots}
    assert found["norm"] == ["train/norm/0", "train/norm/1"]
    assert found["z_loss"] == ["train/z_loss"]
    assert found["score"] == ["score"]
    assert not {"skipped", "spikes", "loss"} & found.keys()


def test_a_long_run_is_thinned_on_a_small_page(tmp_path: Path) -> None:
    text = page(make_run(tmp_path / "run", [record(step) for step in range(1, 6001)]))
    assert len(text) < 500_000
    assert "are thinned" in text
    [curve] = [c for c in drawn(text)["panels"][0]["curves"] if c["key"] == "train/loss"]
    assert len(curve["v"]) <= MOST_POINTS


@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=300), st.integers(6, 60))
def test_thinning_keeps_ends_and_extremes(values: list[float], most: int) -> None:
    array = np.array(values)
    kept = thin(array, most)
    assert len(kept) <= max(most, 2)
    assert kept.tolist() == sorted(set(kept.tolist()))
    assert {array[kept].min(), array[kept].max()} == {array.min(), array.max()}
    assert {0, len(values) - 1} <= set(kept.tolist())


# --------------------------------------------------------------------------- other outputs


def test_metrics_of_any_origin(tmp_path: Path) -> None:
    lines = [
        '{"step": 2, "tokens": 20, "time": 2.0, "train/loss": 3.0, "eval/val_loss": 2.5}',
        *("not json", "[1]", '{"tokens": 5}', '{"step": "3"}', '{"step": 1e400}'),
        '{"step": 4, "train/loss": null, "eval/val_loss": null, "x": "text"}',
        '{"step": 6, "tokens": 60, "time": 6.0, "train/loss": 1.0, "eval/val_loss": 2.0}',
        '{"step": 8, "trai',  # torn
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    metrics = read_metrics(RunFolder(tmp_path).records())
    assert metrics.steps.tolist() == [2, 4, 6]
    assert metrics.tokens.tolist()[::2] == [20, 60]
    assert [values.tolist() for values in metrics.curve("train/loss")] == [[2, 6], [3, 1]]
    assert [values.tolist() for values in metrics.curve("eval/val_loss")] == [[2, 6], [2.5, 2]]
    assert (metrics.last("x"), metrics.keys("eval/")) == (None, ["eval/val_loss"])
    (tmp_path / "metrics.csv").write_text('step,train/loss\n2,3.0\n"4,\nx,1\n6,1.0,extra\n8,0.')
    assert [row["step"] for row in RunFolder(tmp_path).csv_records()] == ["2", "6"]


def test_the_loss_that_a_run_began_with_is_drawn_and_is_not_its_best(tmp_path: Path) -> None:
    first = {"step": 0, "tokens": 0, "time": 0.1, "eval/val_loss": 0.5}
    records = [first, *(record(step) for step in range(1, 41))]
    text = page(make_run(tmp_path / "run", records))
    curves = {curve["key"]: curve for curve in drawn(text)["panels"][0]["curves"]}
    assert curves["eval/val_loss"]["s"] == [0, 10, 20, 30, 40]
    assert "best val loss, step&nbsp;40" in re.sub(r"<[^>]+>", "", text)


def test_the_results_of_an_evaluation_are_all_of_the_best_one(tmp_path: Path) -> None:
    records = [record(step) for step in range(1, 41)]
    for step, loss in ((10, 3.0), (20, 2.0), (30, 2.5), (40, 4.0)):
        evaluated = {"loss": loss, "perplexity": 10 * loss, "bits_per_byte": loss / 2}
        records[step - 1] |= {f"eval/val_{name}": value for name, value in evaluated.items()}
    tiles = re.findall(
        r'class="tile"><b>(.*?)</b><span>(.*?)</span>', page(make_run(tmp_path / "run", records))
    )
    assert tiles[:3] == [
        ("2.0000", "best val loss, step&nbsp;20"),
        ("1", "best bits per byte, step&nbsp;20"),
        ("20", "best perplexity, step&nbsp;20"),
    ]


def test_the_prompt_of_a_sample_is_bold(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    text = f"--- sample 1\na <b{PROMPT_END}c{PROMPT_END}\n\n--- sample 2\nd\n"
    (run / "samples" / "step_00000040.txt").write_text(text, encoding="utf-8")
    found = re.findall("<pre>(.*?)</pre>", section(page(run), "samples"))
    assert found[2:] == [f"<b>a &lt;b</b>c{PROMPT_END}", "d"]


def test_losses_of_different_tokenizers_are_not_ranked(tmp_path: Path) -> None:
    """Tokens of one byte have a lower loss in nats than longer tokens, so it is no rank."""

    def run(name: str, tokenizer: str, loss: float, bits: float) -> Path:
        data = {**LAUNCH["data"], "tokenizer_fingerprint": tokenizer}
        last = record(40, **{"eval/val_loss": loss, "eval/val_bits_per_byte": bits})
        return make_run(tmp_path / name, [last], [{**LAUNCH, "data": data}])

    def marked(*runs: Path) -> set[str]:
        out = tmp_path / "compared.html"
        assert report(*runs, "--out", out) == 0
        text = out.read_text(encoding="utf-8")
        assert ("different tokenizers" in text) is (len({path.name[0] for path in runs}) > 1)
        return set(re.findall(r'class="number best">([^<]*)<', text))

    chars = run("chars", "c" * 64, loss=2.9969, bits=4.32)
    bpe = run("bpe", "b" * 64, loss=4.9933, bits=2.16)
    longer = run("bpe_longer", "b" * 64, loss=4.5, bits=1.95)
    assert marked(chars, bpe) == {"2.16"}
    assert marked(bpe, longer) == {"4.5000"}


# --------------------------------------------------------------------------- stages

BEST = [{"path": "data/web", "weight": 0.3}, {"path": "data/best", "weight": 0.7}]
STAGES = (
    Stage(10, {"train.tokens_per_step": 512}),
    Stage(0.75, {"data.train": BEST, "model.block_size": 8}),
)


def staged(folder: Path, **plan: Any) -> Path:
    """Write a run of 40 steps with three stages."""
    batches = [{"first_step": first, "block_size": 32} for first in (0, 10)]
    batches.append({"first_step": 30, "block_size": 8})
    planned = [{**batch, "micro_batch_size": 4, "accumulation_steps": 1} for batch in batches]
    launch = {**LAUNCH, "plan": {**LAUNCH["plan"], "stages": planned, **plan}}
    return make_run(folder, launches=[launch], stages=STAGES)


def test_stages_are_bands_of_one_run_and_lines_of_several(tmp_path: Path) -> None:
    run = staged(tmp_path / "run")
    text = page(run)
    assert drawn(text)["runs"][0]["stages"] == [
        {"step": 0, "label": "stage 1", "text": "stage 1 from step 0"},
        {
            "step": 10,
            "label": "stage 2",
            "text": "stage 2 from step 10: train.tokens_per_step 512",
        },
        {
            "step": 30,
            "label": "3: best",
            "text": "stage 3 from step 30: data.train best 0.7 + web 0.3, model.block_size 8",
        },
    ]
    assert "Bands: stage 1 from step 0; stage 2 from step 10: train.tokens_per_step 512;" in text
    plain = make_run(tmp_path / "plain")
    assert report(run, plain, "--out", tmp_path / "both.html") == 0
    both = (tmp_path / "both.html").read_text(encoding="utf-8")
    assert "Dotted vertical lines in the color of a run: its stages." in both
    assert [len(one["stages"]) for one in drawn(both)["runs"]] == [3, 0]
    assert "Bands: " not in page(plain)


@pytest.mark.parametrize("stages", [None, "x", [1], [{"first_step": "x"}]])
def test_stages_of_an_edited_run_are_left_out(tmp_path: Path, stages: Any) -> None:
    assert drawn(page(staged(tmp_path / "run", stages=stages)))["runs"][0]["stages"] == []


def test_flops_and_best_losses_are_those_of_the_stage(tmp_path: Path) -> None:
    run = staged(tmp_path / "run")
    flops = drawn(page(run))["runs"][0]["clock"]["flops"]
    shorter = 200_000 - 12 * 2 * 32 * 24  # 12 L H D for each of 24 tokens
    assert flops[-1] == 256 * (30 * 200_000 + 10 * shorter)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines[19]["eval/val_loss"] = 0.5  # of step 20: another length, so no better loss
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    [opened] = open_runs([str(run)])
    assert final_results(opened)[0].step == 40


def test_the_picture_has_a_line_at_the_end_of_a_stage(tmp_path: Path) -> None:
    pictures = []
    for edge in (None, 99, 20):  # step after which the second stage begins
        records = [record(step) for step in range(1, 41)]
        for one in records if edge else ():
            one["data/stage"] = 1 + (one["step"] > (edge or 0))
        loss_curves(records, tmp_path / "loss.png")
        pictures.append((tmp_path / "loss.png").read_bytes())
    assert pictures[0] == pictures[1] != pictures[2]


# --------------------------------------------------------------------------- machines


def launched(
    step: int, device: str, price: float | None, began: float, time: float, **clock: float
) -> dict[str, Any]:
    """Return a launch on two devices whose process began 100 s before it trained."""
    clock = {"started": began - 100, "trained": began, "time": time, **clock}
    return {
        **LAUNCH,
        "step": step,
        "device": device,
        "processes": 2,
        "price": price,
        "clock": clock,
    }


# A: 20 steps, 10 s, and 5 s that a kill lost; A again, superseded; B for the rest, 10 s
MOVED = [
    launched(0, "NVIDIA A", 36.0, began=1000, time=0.0, ended=1015),
    launched(20, "NVIDIA A", 36.0, began=2000, time=10.0, ended=2001),
    launched(20, "NVIDIA B", 72.0, began=2101, time=10.0),
]


def moved(folder: Path, launches: list[dict[str, Any]], last: int = 3) -> Path:
    """Write a run of 40 steps, 2 a second, whose last records launch `last` wrote."""
    records = [record(step) for step in range(1, 41)]
    for one in records[20:]:
        one["perf/tokens_per_second"] = 900.0
    records[20] |= {"launch/number": last, "launch/device": "2 x NVIDIA B"}
    return make_run(folder, records, launches)


def test_machines_are_bands_with_a_table_of_their_hours_and_money(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = moved(tmp_path / "run", MOVED)
    text = page(run)
    a = {"step": 0, "kind": 0, "label": "2 x A"}
    b = {"step": 20, "kind": 1, "label": "2 x B"}
    a["text"] = "2 x NVIDIA A from step 0, 500 tokens/s, 36 per device hour"
    b["text"] = (
        "2 x NVIDIA B from step 20, 900 tokens/s, 72 per device hour, 0:01:40 between launches"
    )
    assert drawn(text)["runs"][0]["machines"] == [a, b]
    names = [panel["name"] for panel in drawn(text)["panels"]]
    assert names == ["loss", "bits_per_byte", "lr", "grad_norm", "throughput", "memory"]
    shown = section(text, "machines")
    cells = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in shown.split("<tr>")[2:]]
    assert [row[1:] for row in cells] == [
        ["2", "500", "0:00:16", "0.12", "36", "4.32"],
        ["1", "900", "0:00:10", "0.06", "72", "4.40"],
    ]
    sums = (
        "3 launches: 0:00:26 of training, 0:00:06 of it in steps that were repeated, "
        "0.18 device hours, 0:18:05 between launches, cost 8.72"
    )
    assert f"{sums}." in shown
    assert f"machines   {sums}\n" in capsys.readouterr().out


def test_money_is_summed_over_the_launches_whose_price_is_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    launches = [{**MOVED[0], "price": None}, *MOVED[1:]]
    report(moved(tmp_path / "some", launches))
    assert capsys.readouterr().out.endswith("between launches, cost 6.42 for 2 of them\n")
    report(moved(tmp_path / "none", [{**one, "price": None} for one in MOVED]))
    assert capsys.readouterr().out.endswith("0:18:05 between launches\n")


def test_the_last_launch_has_no_time_that_another_one_recorded(tmp_path: Path) -> None:
    [run] = open_runs([str(moved(tmp_path / "run", MOVED, last=2))])
    assert [clock.seconds for clock in run.clocks if clock] == [15, 1, 0]


@pytest.mark.parametrize(
    "launch", [LAUNCH, {**MOVED[0], "price": None}, {**LAUNCH, "price": EVIL, "clock": EVIL}]
)
def test_one_launch_without_a_price_changes_nothing(
    tmp_path: Path, launch: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    text = page(make_run(tmp_path / "run", launches=[launch]))
    assert drawn(text)["runs"][0]["machines"] == []
    assert 'id="machines"' not in text
    assert "machines" not in capsys.readouterr().out


def test_launches_on_one_machine_are_no_band(tmp_path: Path) -> None:
    launches = [{**LAUNCH, "step": step} for step in range(40)]
    assert drawn(page(make_run(tmp_path / "run", launches=launches)))["runs"][0]["machines"] == []
