"""Language models of transformers, and PEFT."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from bench.frameworks.models.workload import (
    VOCABULARY,
    Batch,
    OwnLoss,
    Scale,
    Workload,
    generator,
)


def language(net: Any, scale: Scale) -> Workload:
    """A model that learns to repeat random tokens."""

    def batch(step: int) -> Batch:
        shape = (scale.batch, scale.tokens)
        tokens = torch.randint(VOCABULARY, shape, generator=generator(step))
        return {"input_ids": tokens, "labels": tokens}

    return Workload(OwnLoss(net), batch, net.gradient_checkpointing_enable)


def gpt2(scale: Scale) -> Workload:
    """GPT-2 of transformers."""
    return language(_gpt2(scale), scale)


def _gpt2(scale: Scale, dropout: float = 0.1) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            n_layer=scale.layers,
            n_embd=scale.width,
            n_head=scale.width // 32,
            n_positions=scale.tokens,
            vocab_size=VOCABULARY,
            use_cache=False,
            bos_token_id=0,
            eos_token_id=0,
            **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), dropout),
        )
    )


def llama(scale: Scale) -> Workload:
    """Llama of transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=scale.layers,
        hidden_size=scale.width,
        intermediate_size=scale.width * 8 // 3 // 32 * 32,
        num_attention_heads=scale.width // 32,
        max_position_embeddings=scale.tokens,
        vocab_size=VOCABULARY,
        use_cache=False,
    )
    return language(LlamaForCausalLM(config), scale)


def bert(scale: Scale) -> Workload:
    """BERT of transformers, filling in words."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        num_hidden_layers=scale.layers,
        hidden_size=scale.width,
        intermediate_size=4 * scale.width,
        num_attention_heads=scale.width // 32,
        max_position_embeddings=scale.tokens,
        vocab_size=VOCABULARY,
    )
    return language(BertForMaskedLM(config), scale)


def lora(scale: Scale) -> Workload:
    """GPT-2 with LoRA of PEFT: its own weights stay as they are."""
    from peft import LoraConfig, get_peft_model

    net: Any = get_peft_model(_gpt2(scale), LoraConfig(r=8, task_type="CAUSAL_LM"))
    made = language(net, scale)

    def recompute() -> None:
        net.enable_input_require_grads()  # or nothing in a checkpointed block would need a gradient
        net.gradient_checkpointing_enable()

    return Workload(made.model, made.batch, recompute)


def compiled(scale: Scale) -> Workload:
    """GPT-2 of transformers under torch.compile; without dropout, which each graph draws anew."""
    made = language(_gpt2(scale, dropout=0.0), scale)
    made.model.compile()
    return made


def deberta(scale: Scale) -> Workload:
    """DeBERTa of transformers, filling in words."""
    from transformers import DebertaV2Config, DebertaV2ForMaskedLM

    config = DebertaV2Config(
        num_hidden_layers=scale.layers,
        hidden_size=scale.width,
        intermediate_size=4 * scale.width,
        num_attention_heads=scale.width // 32,
        max_position_embeddings=scale.tokens,
        vocab_size=VOCABULARY,
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        position_buckets=scale.tokens // 2,
        share_att_key=True,
    )
    return language(DebertaV2ForMaskedLM(config), replace(scale, batch=scale.batch // 2))


def mamba(scale: Scale) -> Workload:
    """Mamba of transformers, without its own kernels: a quarter of the tokens."""
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(
        num_hidden_layers=scale.layers // 2,
        hidden_size=scale.width // 2,
        vocab_size=VOCABULARY,
        use_cache=False,
    )
    return language(MambaForCausalLM(config), replace(scale, tokens=scale.tokens // 4))


def t5(scale: Scale) -> Workload:
    """T5 of transformers: both of its halves."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        num_layers=scale.layers,
        d_model=scale.width,
        d_kv=32,
        d_ff=4 * scale.width,
        num_heads=scale.width // 32,
        vocab_size=VOCABULARY,
        use_cache=False,
        decoder_start_token_id=0,
    )
    return language(T5ForConditionalGeneration(config), replace(scale, batch=scale.batch // 4))
