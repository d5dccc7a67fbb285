"""A 1 B-class model, all parameters trained, on the 8 GPUs of one H200 node.

Model:    a directory of Llama-3.2-1B-Instruct (or of its dimensions) at models/Llama-3.2-1B-Instruct
Data:     conversations at data/train.jsonl
Command:  python -m train.main --config=configs/llama_1b_h200.py
Hardware: 8 H200 of 141 GB, one process.
Memory:   1.236 B parameters at 13 bytes (parameter, accumulated and new gradient in float32, and an eighth of Adam's 8:
          ZeRO-1): 15.0 GiB; with activations kept of one layer (remat), a chunk of 2 x 4,096 tokens: 17.6 GiB of the
          139 GiB that a GPU shows, of which JAX takes three quarters unless XLA_PYTHON_CLIENT_MEM_FRACTION says more.
          The update takes 15.5 GiB. `bcl-grain boundary` with --optimizer-shards=8 --logits-at-once=134217728 agrees.
Time:     unknown: no GPU was at hand.
Result:   unknown for the same reason; the arithmetic is `train.memory`'s, which the trainer checks before it compiles.
"""

from bcl_grain.layouts import RowPackedLayout
from train.config import BalanceConfig, CorpusConfig, OptimizerConfig, RuntimeConfig, TrainConfig
from train.model import ModelConfig


def get_config() -> TrainConfig:
    return TrainConfig(
        pretrained="models/Llama-3.2-1B-Instruct",
        corpus=CorpusConfig(chat_paths=("data/train.jsonl",), eval_share=0.02, max_tokens=8192, on_oversize="drop"),
        balance=BalanceConfig(pack_size=32, lookahead=32),
        layout=RowPackedLayout(length=4096, rows_per_chunk=2, heights=(1,), lengths=(1024, 2048, 8192)),
        model=ModelConfig(vocab_size=1, remat=True),
        optimizer=OptimizerConfig(learning_rate=2e-5, warmup_steps=30, weight_decay=0.0),
        runtime=RuntimeConfig(eval_every=200, checkpoint_every=200, zero1=True),
        epochs=2,
    )
