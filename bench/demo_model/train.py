"""Trains the model that `dflash-moe demo` completes a sentence with: a Qwen3-MoE of at most 8 MB in
bf16.

    python bench/demo_model/train.py --out DIR

Writes a checkpoint (safetensors, one tensor per expert), a byte-level BPE tokenizer and
training.json (corpus hash, losses). The defaults make the shipped file: 1,500 steps (40 minutes on
two cores) of a schedule planned for 3,600, stopped there because held-out bits per byte no longer
fell. Seeds are fixed and the corpus's hash is checked first; the same torch on the same kind of CPU
with the same --threads gives the same model, others round differently.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import torch
from corpus import checked_corpus, load_corpus
from held_out import SEQUENCE_TOKENS, held_out_text, token_stream, window_bits
from tokenizers import ByteLevelBPETokenizer
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from dflash_moe.errors import ConfigError

VOCAB_SIZE = 2048
END_OF_TEXT = "<|endoftext|>"
# The model has read documents and no conversations: it goes on with what a user begins, and an
# answer ends as a document does.
CHAT_TEMPLATE = """{% for message in messages %}
{{ message['content'] }}{% if message['role'] != 'user' %}{{ eos_token }}{% endif %}
{% endfor %}"""
BATCH_SEQUENCES = 16
PEAK_LEARNING_RATE = 3e-3
WARMUP_STEPS = 200
SEED = 20


def dense_experts(
    module: torch.nn.Module, hidden: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
) -> torch.Tensor:
    """Computes every expert on every token, weighted by the routing. At this size batched products
    beat gathering on a CPU.
    """
    gate_up = torch.einsum("th,eih->eti", hidden, module.gate_up_proj)
    gate, up = gate_up.chunk(2, dim=-1)
    down = torch.bmm(module.act_fn(gate) * up, module.down_proj.transpose(1, 2))  # [E, T, H]
    routing = torch.zeros(hidden.shape[0], down.shape[0], dtype=hidden.dtype).scatter_add(
        1, topk_ids, topk_weights.to(hidden.dtype)
    )
    return torch.einsum("eth,te->th", down, routing)


def model_config() -> Qwen3MoeConfig:
    return Qwen3MoeConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=192,
        intermediate_size=384,
        moe_intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=14,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        rope_theta=10000.0,
        output_router_logits=True,
        router_aux_loss_coef=0.01,
        bos_token_id=0,
        eos_token_id=0,
    )


def train_tokenizer(texts: tuple[str, ...], out: Path) -> PreTrainedTokenizerFast:
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(texts, vocab_size=VOCAB_SIZE, min_frequency=2, special_tokens=[END_OF_TEXT], show_progress=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, eos_token=END_OF_TEXT, bos_token=END_OF_TEXT)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(out)
    return tokenizer


def batches(stream: torch.Tensor, generator: torch.Generator):  # noqa: ANN201
    """Yields random windows for ever."""
    while True:
        starts = torch.randint(0, len(stream) - SEQUENCE_TOKENS - 1, (BATCH_SEQUENCES,), generator=generator)
        yield torch.stack([stream[start : start + SEQUENCE_TOKENS] for start in starts.tolist()])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory of the checkpoint")
    parser.add_argument("--steps", type=int, default=1500, help="optimizer steps of 4,096 tokens (1500)")
    parser.add_argument("--schedule-steps", type=int, default=3600, help="steps over which the learning rate falls (3600)")
    parser.add_argument("--any-corpus", action="store_true", help="train on this Python's corpus, whatever its hash")
    parser.add_argument("--threads", type=int, default=2, help="torch threads (2)")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(SEED)
    torch.set_num_threads(arguments.threads)

    try:
        corpus = load_corpus() if arguments.any_corpus else checked_corpus()
    except ConfigError as error:
        parser.error(f"{error}, or pass --any-corpus for another model")
    tokenizer = train_tokenizer(corpus.train, arguments.out)
    stream, held_out = token_stream(tokenizer, corpus.train), held_out_text(tokenizer, corpus.held_out)
    ALL_EXPERTS_FUNCTIONS.register("dense_training", dense_experts)
    model = Qwen3MoeForCausalLM._from_config(model_config(), experts_implementation="dense_training", dtype=torch.float32)
    print(f"corpus {len(stream):,} tokens, parameters {sum(p.numel() for p in model.parameters()):,}", flush=True)

    decayed = [p for p in model.parameters() if p.dim() >= 2]
    plain = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}], betas=(0.9, 0.95)
    )
    started, step, log = time.monotonic(), 0, []
    for batch in batches(stream, torch.Generator().manual_seed(SEED)):
        if step == arguments.steps:
            break
        decay = 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / arguments.schedule_steps))
        rate = PEAK_LEARNING_RATE * min(1.0, (step + 1) / WARMUP_STEPS) * decay
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        if step % 250 == 0:
            spent = time.monotonic() - started
            model.eval()
            bits = sum(window_bits(model, held_out)) / held_out.num_bytes
            model.train()
            log.append(
                {
                    "step": step,
                    "seconds": round(spent, 1),
                    "loss": round(float(loss), 4),
                    "held_out_bits_per_byte": round(bits, 4),
                }
            )
            print(log[-1], flush=True)
            save(model, tokenizer, arguments.out, corpus.sha256, step, spent, log)
    save(model, tokenizer, arguments.out, corpus.sha256, step, time.monotonic() - started, log)


def save(model, tokenizer, out: Path, corpus_sha256: str, step: int, seconds: float, log: list) -> None:  # noqa: ANN001
    import copy

    rounded = copy.deepcopy(model).to(torch.bfloat16)
    rounded.config.output_router_logits = False
    rounded.save_pretrained(out)
    tokenizer.save_pretrained(out)
    record = {
        "corpus_sha256": corpus_sha256,
        "steps": step,
        "seconds": round(seconds),
        "sequence_tokens": SEQUENCE_TOKENS,
        "batch_sequences": BATCH_SEQUENCES,
        "log": log,
    }
    (out / "training.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
