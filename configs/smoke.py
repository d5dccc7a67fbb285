"""A toy run that passes through everything, for a first look and for tests.

Command:  python -m train.main --config=configs/smoke.py
Hardware: 2 CPU cores, no GPU.
Time:     20 s of processor time in all.
Result:   none worth telling; the model stays far behind the bigram.
"""

from bcl_grain.layouts import RowPackedLayout
from train.config import BalanceConfig, CorpusConfig, OptimizerConfig, RuntimeConfig, TrainConfig
from train.model import ModelConfig


def get_config() -> TrainConfig:
    return TrainConfig(
        corpus=CorpusConfig(max_tokens=256, on_oversize="truncate", eval_share=0.02),
        balance=BalanceConfig(pack_size=4, lookahead=4),
        layout=RowPackedLayout(length=256, rows_per_chunk=2, heights=(1,)),
        model=ModelConfig(vocab_size=1, layers=1, width=16, heads=2, kv_heads=1, head_dim=8, hidden=16),
        optimizer=OptimizerConfig(warmup_steps=2),
        runtime=RuntimeConfig(eval_every=5, checkpoint_every=5, simulated_steps=20),
        steps=12,
    )
