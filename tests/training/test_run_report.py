"""What a finished run says of itself."""

import json

from megajax.training import report


def test_the_summary_the_title_and_the_table_agree(tmp_path):
    """24 steps, the last held-out loss at step 20: each figure with the steps that it is of."""
    rows = [
        {"step": s, "loss": 5 - 0.1 * s, "step_time_s": 0.5, "tokens": 64} for s in range(1, 25)
    ]
    rows[22]["loss"] = None  # was not finite
    rows += [{"step": s, "eval_loss": 3.5, "eval_bits_per_byte": 5.05} for s in (10, 20)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    facts = {
        "preset": "nano", "seed": 3,
        "overrides": "--optim.lr=0.01 --eval.prompt='a|b\n$\\c{$\udce9'",
        "command": "uv run experiments/pretrain.py --optim.lr=0.01",
    }  # fmt: skip
    figures = report.write_report(tmp_path, facts, None)
    mean = sum(5 - 0.1 * s for s in (15, 16, 17, 18, 19, 20, 21, 22, 24)) / 9
    assert abs(figures["last_10_loss"] - mean) < 1e-12 and figures["eval_step"] == 20
    text = (tmp_path / "summary.md").read_text()
    for line in (
        "| preset | nano |",
        "| overrides | --optim.lr=0.01 --eval.prompt='a\\|b $\\c{$\\udce9' |", "| seed | 3 |",
        "| command | uv run experiments/pretrain.py --optim.lr=0.01 |", "| eval_step | 20 |",
        f"| last_10_loss | {mean:.4g} |",
    ):  # fmt: skip
        assert line in text, text
    train = report.rows_by_step(tmp_path / "metrics.jsonl", "loss")
    held_out = report.rows_by_step(tmp_path / "metrics.jsonl", "eval_loss")
    assert report.title(train, held_out) == (
        f"training loss {mean:.2f} nats (mean of steps 15 to 24),\n"
        "held out 5.05 bits per byte (step 20)"
    )
    assert (tmp_path / "curve.png").stat().st_size > 0
    assert report.title({1: {"loss": None}}, {}) == "loss not finite"
