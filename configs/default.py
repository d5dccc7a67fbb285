"""The main job."""

from bcl_grain.layouts import RowPackedLayout
from train.config import BalanceConfig, CorpusConfig, OptimizerConfig, RuntimeConfig, TrainConfig


def get_config() -> TrainConfig:
    return TrainConfig(
        corpus=CorpusConfig(max_tokens=1024, on_oversize="truncate"),
        balance=BalanceConfig(pack_size=16, lookahead=32, policy="windowed"),
        layout=RowPackedLayout(length=1024, rows_per_chunk=2, heights=(1,)),
        optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=20),
        runtime=RuntimeConfig(eval_every=50, checkpoint_every=50),
        steps=150,
    )
