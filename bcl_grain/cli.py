"""The command line: `python -m bcl_grain` or `bcl-grain`. What would balancing buy on my data, model and machine?

    profile DATA     how uneven the lengths are, and what that costs
    simulate DATA    policies and baselines over the same records, ranks and steps
    plan DATA        settings for a model and a machine, as a Grain pipeline
    boundary DATA    which pack sizes and caps fit the memory

Exit codes: 0, and 2 where the request can't be served; the message says what to change.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import get_args

from bcl_grain import commands
from bcl_grain.arms import policy_names
from bcl_grain.boundary import PACK_SIZES
from bcl_grain.checks import checked_number
from bcl_grain.draws import DrawKind
from bcl_grain.memory import Attention
from bcl_grain.models import KNOWN_MODELS
from bcl_grain.planner import Order, Policy
from bcl_grain.simulate import Kernel

_LARGEST = 2**31 - 1  # of an integer option: beyond it, sums over records are no longer exact

_DATA = (
    "a workload's name (bcl_grain.workloads), or a file: .npz (len, or prompt_len and response_len), .npy, "
    ".csv or .parquet (a column of lengths), .jsonl (texts or messages)"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code.

    Args:
        argv: Arguments; default: those of the process.
    """
    args = build_parser().parse_args(argv)
    try:
        args.command(args)
    except BrokenPipeError:
        # Whoever reads the output has enough. Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, ModuleNotFoundError, OSError) as error:
        print(f"bcl-grain: error: {error}", file=sys.stderr)
        return 2
    except MemoryError as error:
        print(f"bcl-grain: error: not enough memory ({error}): lower --ranks, --steps or --pack-size", file=sys.stderr)
        return 2
    return 0


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of all commands."""
    parser = argparse.ArgumentParser(prog="bcl-grain", description=__doc__, formatter_class=_Formatter)
    subparsers = parser.add_subparsers(dest="name", required=True, metavar="COMMAND")
    _add_profile(subparsers.add_parser("profile", help="how uneven the lengths are", formatter_class=_Formatter))
    _add_simulate(subparsers.add_parser("simulate", help="what policies make of them", formatter_class=_Formatter))
    _add_plan(subparsers.add_parser("plan", help="settings for a model and a machine", formatter_class=_Formatter))
    _add_boundary(subparsers.add_parser("boundary", help="what fits the memory", formatter_class=_Formatter))
    return parser


class _Formatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults, where there is one to show."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        nothing = action.default is None or action.default is False
        return action.help if nothing else super()._get_help_string(action)


def _add_profile(parser: argparse.ArgumentParser) -> None:
    parser.description = "Length statistics, where the cost is, a cost prior, and a verdict in words."
    _add_data(parser)
    _add_job(parser)
    _add_cost(parser)
    parser.add_argument("--prior-out", metavar="FILE", help="write the cost prior there, for simulate --prior FILE")
    _add_output(parser)
    parser.set_defaults(command=commands.profile)


def _add_simulate(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Simulates policies and baselines over the same records in the same number of steps, start and flush included."
    )
    _add_data(parser)
    _add_job(parser)
    _add_cost(parser)
    parser.add_argument("--packs-per-step", type=_positive, default=1, metavar="L", help="ranks that one stream feeds")
    parser.add_argument(
        "--policies",
        default=",".join((*get_args(Policy), "mffd", "kk", "length-grouped")),
        help=f"a list with commas, of {', '.join(policy_names())}",
    )
    parser.add_argument("--order", choices=get_args(Order), default="aligned", help="of a cycle's steps")
    parser.add_argument(
        "--prior", default="none", metavar="auto|none|FILE", help="cost prior of policies that take one"
    )
    parser.add_argument(
        "--layout",
        default="none",
        metavar="NAME[:k=v,...]",
        help="none, row-packed, one-shape, bucketed or padded; several values are joined by +",
    )
    parser.add_argument(
        "--attention",
        choices=get_args(Kernel),
        default="rows",
        help="what attention runs: whole rows, or only inside each record",
    )
    parser.add_argument(
        "--bin-tokens", type=_positive, metavar="N", help="capacity of MFFD's bins (default: the longest record)"
    )
    parser.add_argument("--cap", default="none", metavar="none|N|pP", help="cut longer records to this length")
    parser.add_argument(
        "--draws",
        choices=get_args(DrawKind),
        help="with replacement; one permutation an epoch, dealt out; or natural order, dealt out (default: shuffled "
        "for a file, iid for a workload)",
    )
    parser.add_argument("--steps", type=_positive, metavar="S", help="(default: one epoch; 1,000 with iid draws)")
    parser.add_argument("--report", metavar="A:B", help="restrict the figures to steps A to B - 1")
    parser.add_argument("--workers", type=_positive, metavar="N", help="processes (default: 1, or all for long runs)")
    _add_output(parser)
    parser.set_defaults(command=commands.simulate)


def _add_plan(parser: argparse.ArgumentParser) -> None:
    parser.description = "Recommends pack size, lookahead, policy, cap and layout, as a ready Grain pipeline."
    _add_data(parser)
    _add_memory(parser)
    parser.add_argument("--ranks", type=_positive, default=8, help="devices of the job")
    parser.add_argument("--devices-per-host", type=_positive, default=1, help="devices that one process feeds")
    parser.add_argument("--pack-size", type=_positive, help="records of a rank in a step (default: chosen)")
    _add_output(parser, plots=False)
    parser.set_defaults(command=commands.plan)


def _add_boundary(parser: argparse.ArgumentParser) -> None:
    parser.description = "Which pack sizes and caps fit the memory, and what the caps touch."
    _add_data(parser)
    _add_memory(parser)
    parser.add_argument("--lookahead", type=_positive, default=32, metavar="K", help="of the windowed policy, in steps")
    parser.add_argument(
        "--pack-sizes", default=",".join(map(str, PACK_SIZES)), metavar="P,...", help="pack sizes to judge"
    )
    _add_output(parser)
    parser.set_defaults(command=commands.boundary)


def _add_data(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("data", metavar="DATA", help=_DATA)
    parser.add_argument("--column", help="column or array of lengths in the file (default: found by its name)")
    parser.add_argument("--tokenizer", metavar="FILE", help="tokenizer.json for a .jsonl (default: count bytes)")


def _add_job(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=_positive, default=8, metavar="R", help="data-parallel ranks")
    parser.add_argument("--pack-size", type=_positive, default=64, metavar="P", help="records of a rank in a step")
    parser.add_argument("--lookahead", type=_positive, default=32, metavar="K", help="pool length in steps")


def _add_cost(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cost",
        default="tokens",
        metavar="SPEC",
        help="tokens, transformer:MODEL (a known model or a config.json), linear=A,quadratic=B[,chunk=C], or "
        "table:FILE (measured by train.calibrate)",
    )


def _add_memory(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", required=True, help=f"a Hugging Face config.json, or one of {', '.join(KNOWN_MODELS)}"
    )
    parser.add_argument("--memory-gib", type=_amount, required=True, metavar="GIB", help="memory of a device")
    parser.add_argument(
        "--precision",
        choices=("f32", "bf16", "frozen"),
        default="f32",
        help="of the parameters; with bf16 the optimizer keeps a float32 copy; frozen: in bfloat16, and not trained, "
        "beside adapters whose own memory is left out",
    )
    parser.add_argument("--optimizer-shards", type=_positive, default=1, help="ranks that share the optimizer state")
    parser.add_argument(
        "--logits-at-once", type=_positive, default=2**24, metavar="N", help="logits that the trainer makes at a time"
    )
    parser.add_argument("--remat", action=argparse.BooleanOptionalAction, default=True, help="recompute activations")
    parser.add_argument(
        "--attention", choices=get_args(Attention), default="fused", help="whether scores are kept (dense) or not"
    )
    parser.add_argument("--reserve", type=float, default=0.1, help="share of the memory to leave free")


def _add_output(parser: argparse.ArgumentParser, *, plots: bool = True) -> None:
    parser.add_argument("--seed", type=_seed, default=0, metavar="N", help="of everything random")
    parser.add_argument("--json", metavar="PATH", help="write the figures there; - for standard output, and no tables")
    if plots:
        parser.add_argument("--plot", metavar="DIR", help="write PNG plots there")
    parser.add_argument("--quiet", action="store_true", help="no progress")


def _amount(text: str) -> float:
    try:
        return checked_number("it", float(text), above=0)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive, finite number") from None


def _positive(text: str) -> int:
    return _integer(text, 1)


def _seed(text: str) -> int:
    return _integer(text, 0)


def _integer(text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if not least <= value <= _LARGEST:
        raise argparse.ArgumentTypeError(f"{text!r} is no integer from {least} to {_LARGEST:,}")
    return value


if __name__ == "__main__":
    sys.exit(main())
