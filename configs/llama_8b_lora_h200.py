"""An 8 B-class model, adapters of rank 16 on all projections, on the 8 GPUs of one H200 node.

Model:    a directory of Llama-3.1-8B-Instruct (or of its dimensions) at models/Llama-3.1-8B-Instruct
Data:     conversations at data/train.jsonl
Command:  python -m train.main --config=configs/llama_8b_lora_h200.py
Hardware: 8 H200 of 141 GB, one process.
Memory:   8.03 B frozen parameters in bfloat16, and 20 bytes for each of the adapters' 42 M: 15.7 GiB; with activations
          kept of one layer (remat), a chunk of 2 x 4,096 tokens: 20.8 GiB of the 139 GiB that a GPU shows, of which
          JAX takes three quarters unless XLA_PYTHON_CLIENT_MEM_FRACTION says more. `bcl-grain boundary` with
          --precision=frozen --logits-at-once=134217728 agrees but for the adapters' 0.8 GiB, which it leaves out.
          Training all parameters would take 149.6 GiB before the first activation, more than a GPU has; with ZeRO-1 on
          8 GPUs 97.2 GiB, and 101.0 GiB in the update.
Time:     unknown: no GPU was at hand.
Result:   unknown for the same reason; the arithmetic is `train.memory`'s, which the trainer checks before it compiles.
"""

from bcl_grain.layouts import RowPackedLayout
from train.config import BalanceConfig, CorpusConfig, OptimizerConfig, RuntimeConfig, TrainConfig
from train.lora import LoraConfig
from train.model import ModelConfig


def get_config() -> TrainConfig:
    return TrainConfig(
        pretrained="models/Llama-3.1-8B-Instruct",
        corpus=CorpusConfig(chat_paths=("data/train.jsonl",), eval_share=0.02, max_tokens=8192, on_oversize="drop"),
        balance=BalanceConfig(pack_size=16, lookahead=32),
        layout=RowPackedLayout(length=4096, rows_per_chunk=2, heights=(1,), lengths=(1024, 2048, 8192)),
        model=ModelConfig(vocab_size=1, remat=True, lora=LoraConfig(rank=16, alpha=32.0)),
        optimizer=OptimizerConfig(learning_rate=2e-4, warmup_steps=30, weight_decay=0.0),
        runtime=RuntimeConfig(eval_every=200, checkpoint_every=200),
        epochs=2,
    )
