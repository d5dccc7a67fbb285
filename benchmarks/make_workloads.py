"""Makes the package's quantile tables, bcl_grain/workloads.json: `python -m benchmarks.make_workloads [DIRECTORY]`.

DIRECTORY (default: ../shared/data/lengths beside the checkout) holds one NAME.npz per corpus, with `len` or with
`prompt_len` and `response_len`, and an INDEX.md whose tables tell where each comes from. Prints how far each table's
mean, CV and p99 are from the corpus's.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

ROOT = Path(__file__).resolve().parents[1]
LENGTHS = ROOT.parent / "shared" / "data" / "lengths"
OUTPUT = ROOT / "bcl_grain" / "workloads.json"

# A table of some hundred quantiles is no summary of a corpus much smaller than this.
MIN_RECORDS = 1_000

# Every percent, and ever denser towards the ends, where a heavy tail keeps most of its variance.
PROBABILITIES = np.concatenate(
    [
        [0.0, 0.001, 0.002, 0.005],
        np.arange(1, 100) / 100,
        np.arange(991, 1000) / 1000,
        np.arange(9991, 10000) / 10000,
        [0.99995, 1.0],
    ]
)

KINDS = {
    "SFT / instruction corpora": "sft",
    "LLM request traces": "trace",
    "Other variable-cost workloads": "other",
}

UNITS = {
    "qwen2.5 (151,643 BPE)": "tokens (Qwen2.5)",
    "service's own": "tokens (the service's own)",
    "llama2": "tokens (Llama 2)",
    "Qwen / DeepSeek (service)": "tokens (the service's, Qwen or DeepSeek)",
    "residues (1 residue)": "residues",
    "nodes (1 atom)": "atoms",
    "patches (28 px patch)": "patches of 28 x 28 pixels",
    "words": "words",
}

NEMO_RL_STAND_INS = {
    "gsm8k_train": "short mathematics",
    "math_test_cot": "competition mathematics with solutions, near OpenMathInstruct",
    "gpteacher_codegen": "code",
    "gpteacher_toolformer": "tool use",
    "bfcl_v4": "function calling",
    "medquad": "medical answers, heavy tail",
    "mts_dialog": "clinical notes",
    "taskmaster4": "dialogue with API calls",
    "sgd_dialogues": "task dialogue",
    "xquad_multi": "reading comprehension, a multilingual relative of SQuAD",
    "p3_t0_mix": "instruction mixture, near the FLAN part of Tulu, heavy tail",
    "alpaca_eval_outputs": "general assistant answers, near OASST and HelpSteer",
    "qmsum": "long context",
}

# A table knows no order, so remarks on it would mislead.
NAMES_IN_BRACES = re.compile(r"\{[^}]*\}")  # long lists of file names
ORDER_REMARK = re.compile(
    r"\s*\((time order|directory order|\w+ by \w+|subset of [^)]*)\)"
    r"|;\s*(natural order = [^;]*|queries of one meeting are adjacent|\w+ by \w+$)"
)
RESAMPLED_FROM = re.compile(r"20,000 requests RESAMPLED.*?(Alibaba.*); prompt and response drawn independently")
RESAMPLED = "Resampled from published histograms, prompt and response drawn independently: not a recorded sequence."
NOTES = {
    "servegen_m_large": RESAMPLED,
    "servegen_deepseek_r1": RESAMPLED,
    "servegen_mm_image": RESAMPLED,
    "sgd_dialogues": "Source files of 4 MiB and more are missing.",
    "gorilla_apibench": "Two of the training files are missing.",
    "qmsum": "One transcript serves several queries.",
    "alpaca_eval_outputs": "The same 805 prompts answered by six models.",
    "xquad_en": "The English original of xquad_multi.",
    "xquad_multi": "Translations of one set into eleven languages.",
}


def read_lengths(path: Path) -> npt.NDArray[np.int64]:
    """Returns the length of every record of an archive."""
    with np.load(path) as archive:
        parts = [archive["len"]] if "len" in archive else [archive["prompt_len"], archive["response_len"]]
        return np.sum(parts, axis=0, dtype=np.int64)


def read_index(path: Path) -> dict[str, dict[str, str]]:
    """Returns kind, unit, licence, source and description by name, from the index's tables."""
    facts, kind = {}, None
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            kind = KINDS.get(line[3:].strip())
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if kind and line.startswith("| ") and cells[0] != "name":
            unit, licence, source, description = cells[2], *cells[-3:]
            facts[cells[0]] = {
                "kind": kind,
                "description": ORDER_REMARK.sub("", RESAMPLED_FROM.sub(r"\1", description)),
                "source": NAMES_IN_BRACES.sub("*", source),
                "licence": re.sub(r"\s*\(lengths only[^)]*\)", " (the texts)", licence),
                "unit": UNITS[unit],
            }
    return facts


def make_table(lengths: npt.NDArray[np.int64]) -> dict[str, Any]:
    """Returns a corpus's statistics and quantiles.

    The quantile of the record in place i of n, from 0, is (i + 0.5) / n (Hazen's rule): interpolated linearly, such a
    table has the corpus's own mean, whatever its size.
    """
    quantiles = np.round(np.quantile(lengths, PROBABILITIES, method="hazen"), 1)
    return {
        "records": int(lengths.size),
        "mean": float(f"{lengths.mean():.6g}"),
        "cv": float(f"{lengths.std() / lengths.mean():.6g}"),
        "p99": float(f"{np.quantile(lengths, 0.99):.6g}"),
        "quantiles": [int(q) if q == int(q) else float(q) for q in quantiles],
    }


def make_workloads(directory: Path) -> dict[str, Any]:
    """Returns the whole package file: the probabilities, and a table for each corpus that is large enough."""
    workloads = {}
    for name, facts in sorted(read_index(directory / "INDEX.md").items()):
        table = make_table(read_lengths(directory / f"{name}.npz"))
        if table["records"] >= MIN_RECORDS:
            note = NOTES.get(name, "")
            stand_in = NEMO_RL_STAND_INS.get(name, "")
            workloads[name] = {**facts, "note": note, "nemo_rl_stand_in": stand_in, **table}
    return {"probabilities": [float(f"{p:.5g}") for p in PROBABILITIES], "workloads": workloads}


def to_json(tables: dict[str, Any]) -> str:
    """Returns JSON with a line for every workload, so that a difference shows which table changed."""
    lines = [f"    {json.dumps(name)}: {json.dumps(table)}" for name, table in tables["workloads"].items()]
    head = f'  "probabilities": {json.dumps(tables["probabilities"])},\n'
    return "{\n" + head + '  "workloads": {\n' + ",\n".join(lines) + "\n  }\n}\n"


def table_errors(table: dict[str, Any]) -> dict[str, float]:
    """Returns the relative errors of a table's mean, CV and p99, from its exact moments."""
    p, q = PROBABILITIES, np.array(table["quantiles"], np.float64)
    low, high = q[:-1], q[1:]
    mean = float(np.diff(p) @ (low + high)) / 2
    square = float(np.diff(p) @ (low * low + low * high + high * high)) / 3
    cv = float(np.sqrt(square - mean * mean)) / mean
    p99 = float(np.interp(0.99, p, q))
    return {"mean": mean / table["mean"] - 1, "cv": cv / table["cv"] - 1, "p99": p99 / table["p99"] - 1}


def main(argv: list[str]) -> None:
    """Writes the package file and prints the errors."""
    directory = Path(argv[1]) if len(argv) > 1 else LENGTHS
    if not (directory / "INDEX.md").exists():
        raise SystemExit(f"no INDEX.md in {directory}: pass the folder that holds the lengths")
    tables = make_workloads(directory)
    OUTPUT.write_text(to_json(tables), encoding="utf-8")
    for name, table in tables["workloads"].items():
        errors = "  ".join(f"{key} {100 * error:+.2f} %" for key, error in table_errors(table).items())
        print(f"{name:22} {table['records']:6,} records  {errors}")
    print(f"{len(tables['workloads'])} tables, {OUTPUT.stat().st_size:,} bytes: {OUTPUT}")


if __name__ == "__main__":
    main(sys.argv)
