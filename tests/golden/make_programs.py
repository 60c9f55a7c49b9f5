"""Writes program_*.hlo.gz and program_*.json: a compiled step and its records.

    PYTHONPATH=. uv run --extra aot tests/golden/make_programs.py

The texts are of the versions of jax in pyproject.toml. Read every changed number by hand: the
records are what tests/cost/test_program_golden.py compares with.
"""

import gzip
import json
import os
import pathlib
import re

HERE = pathlib.Path(__file__).parent


def stripped(line: str) -> str:
    """Returns a line without the code of a kernel, which names files; those lie elsewhere."""
    return re.sub(r'(custom_call_target="mosaic.*?), backend_config=.*', r"\1", line)


def main() -> None:
    os.environ["JAX_PLATFORMS"] = "cpu"  # before jax is imported
    from megajax.cost.program import records
    from tests.program_cases import golden_cpu, golden_h100, summary

    for name, make, platform in (("cpu", golden_cpu, "cpu"), ("h100", golden_h100, "gpu")):
        text = make().as_text()
        text = "\n".join(stripped(line) for line in text.split("\n") if not line[:1].isdigit())
        program = records(text, platform=platform)
        (HERE / f"program_{name}.hlo.gz").write_bytes(gzip.compress(text.encode(), mtime=0))
        rows = ",\n".join(json.dumps(row) for row in summary(program))
        (HERE / f"program_{name}.json").write_text(f"[\n{rows}\n]\n")


if __name__ == "__main__":
    main()
