"""Public length distributions, as quantile tables: what records weigh where no data is at hand.

Fine-tuning corpora, request traces, and other records of uneven cost (documents, source files, images, proteins,
molecules). There is none of audio, for want of a public table of durations. A table holds lengths alone, facts about a
corpus, and no text. It knows no order either: samples are independent, whereas neighbours in a file are often alike.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib.resources
import json
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

Kind = Literal["sft", "trace", "other"]


@dataclasses.dataclass(frozen=True)
class Workload:
    """The distribution of the lengths of a public corpus or trace.

    Attributes:
        name: Its name here.
        kind: "sft" (prompt and response of fine-tuning data), "trace" (prompt and response of served requests) or
            "other".
        description: What a record is.
        source: Repository and files that the lengths were counted in.
        licence: Licence of the source. The table holds none of its content.
        unit: What a length counts, with the tokenizer.
        note: A caveat, or "".
        nemo_rl_stand_in: Where the workload stands in for one of the NeMo-RL fine-tuning corpora, the kind of data it
            shares with it: see `nemo_rl_stand_ins`. Else "".
        records: Records in the corpus.
        mean: Mean length of the corpus.
        cv: Standard deviation of its lengths / mean.
        p99: 99th percentile of its lengths.
        probabilities: [m] ascending from 0 to 1, the same for all workloads.
        quantiles: [m] lengths at `probabilities`.
    """

    name: str
    kind: Kind
    description: str
    source: str
    licence: str
    unit: str
    note: str
    nemo_rl_stand_in: str
    records: int
    mean: float
    cv: float
    p99: float
    probabilities: tuple[float, ...] = dataclasses.field(repr=False)
    quantiles: tuple[float, ...] = dataclasses.field(repr=False)

    def quantile(self, probability: npt.ArrayLike) -> FloatArray:
        """Returns the length at `probability`, elementwise: linear between the table's entries.

        >>> load_workload("gsm8k_train").quantile([0.0, 0.5, 1.0])
        array([ 64., 168., 536.])
        """
        return np.asarray(np.interp(np.asarray(probability, np.float64), self.probabilities, self.quantiles))

    def sample(self, n: int, rng: np.random.Generator) -> IntArray:
        """Returns n independent lengths, [n], each at least 1, in `unit`.

        Uniform draws through the table (inverse transform). The table's mean, CV and 99th percentile agree with the
        corpus's within 1.2 %; samples lie between its shortest and its longest record.

        >>> load_workload("gsm8k_train").sample(3, np.random.default_rng(0))
        array([194, 134,  92])
        """
        return np.rint(self.quantile(rng.random(n))).astype(np.int64)


def load_workload(name: str) -> Workload:
    """Returns the workload of that name.

    Raises:
        ValueError: If there is none; the message names the most similar ones.

    >>> load_workload("gsm8k")
    Traceback (most recent call last):
    ...
    ValueError: unknown workload 'gsm8k': did you mean gsm8k_train?
    """
    tables = _tables()
    facts = tables["workloads"].get(name)
    if facts is None:
        names = workload_names()
        similar = [known for known in names if name and name in known] or difflib.get_close_matches(name, names)
        hint = f"did you mean {' or '.join(similar)}?" if similar else f"pass one of {', '.join(names)}"
        raise ValueError(f"unknown workload {name!r}: {hint}")
    quantiles = tuple(map(float, facts["quantiles"]))
    return Workload(name=name, probabilities=tables["probabilities"], **{**facts, "quantiles": quantiles})


def workload_names(kind: Kind | None = None) -> tuple[str, ...]:
    """Returns the names of all workloads, or of those of one kind, in alphabetical order.

    >>> workload_names("trace")[:2]
    ('azure_llm_2023_code', 'mooncake_conversation')
    """
    return tuple(name for name, facts in _tables()["workloads"].items() if kind in (None, facts["kind"]))


def nemo_rl_stand_ins() -> tuple[str, ...]:
    """Returns the names of 13 fine-tuning corpora that stand in for the NeMo-RL ones that BCL was measured on.

    They are not those corpora: they cover like tasks (mathematics, code, tool use, dialogue, reading, long context), as
    `Workload.nemo_rl_stand_in` says for each. Figures over them compare with published ones in kind, not number by
    number.

    >>> len(nemo_rl_stand_ins())
    13
    """
    return tuple(name for name, facts in _tables()["workloads"].items() if facts["nemo_rl_stand_in"])


@functools.cache
def _tables() -> dict[str, Any]:
    text = importlib.resources.files("bcl_grain").joinpath("workloads.json").read_text(encoding="utf-8")
    tables = cast(dict[str, Any], json.loads(text))
    tables["probabilities"] = tuple(tables["probabilities"])
    return tables
