"""Small models of random weights, one of each class of transformers that hotplane knows, as
checkpoints. Needs torch and transformers."""

import json
import os

import torch
import transformers
from safetensors.torch import load_file, save_file

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, VOCABULARY = 128, 64, 8, 2, 256
BASE = {"vocab_size": VOCABULARY, "hidden_size": HIDDEN, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 128,
        "pad_token_id": None, "bos_token_id": None, "eos_token_id": None, "initializer_range": 0.2,
        "num_experts_per_tok": TOP_K}
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16,
          "v_head_dim": 32}
SHARED = {"moe_intermediate_size": INTERMEDIATE, "intermediate_size": 96,
          "n_routed_experts": EXPERTS, "n_shared_experts": 1}
# Class of the config, and its arguments beside BASE.
KINDS = {
    "qwen3_moe": ("Qwen3MoeConfig", {
        "moe_intermediate_size": INTERMEDIATE, "num_experts": EXPERTS, "head_dim": 32,
        "intermediate_size": 96}),
    "mixtral": ("MixtralConfig", {
        "intermediate_size": INTERMEDIATE, "num_local_experts": EXPERTS}),
    "deepseek_v3": ("DeepseekV3Config", {
        **SHARED, **LATENT, "num_hidden_layers": 3, "first_k_dense_replace": 1, "n_group": 2,
        "topk_group": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}),
    "deepseek_v4": ("DeepseekV4Config", {
        **SHARED, "intermediate_size": INTERMEDIATE, "swiglu_limit": 1.0}),
    "glm4_moe": ("Glm4MoeConfig", {
        **SHARED, "num_hidden_layers": 3, "first_k_dense_replace": 1, "n_group": 1,
        "topk_group": 1, "head_dim": 32}),
    "glm_moe_dsa": ("GlmMoeDsaConfig", {
        **SHARED, **LATENT, "num_hidden_layers": 3, "n_group": 1, "topk_group": 1,
        "index_topk": 16, "index_n_heads": 2, "index_head_dim": 32,
        "mlp_layer_types": ["dense", "sparse", "sparse"]}),
    "gpt_oss": ("GptOssConfig", {
        "intermediate_size": INTERMEDIATE, "num_local_experts": EXPERTS, "head_dim": 32,
        "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "beta_fast": 32.0,
            "beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 64}}),
}


def config_of(kind, **changes):
    name, arguments = KINDS[kind]
    return getattr(transformers, name)(**{**BASE, **arguments, **changes})


def model_of(config):
    """A stock model of seeded weights, BF16, in eval mode."""
    torch.manual_seed(20)
    model = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.2)
    return model.to(torch.bfloat16).eval()


def _mxfp4_experts(tensors):
    """Experts of gpt-oss as its published checkpoints have them: random nibbles and scales."""
    generator = torch.Generator().manual_seed(21)
    packed = {}
    for name, tensor in tensors.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            packed[name] = tensor
            continue
        experts, columns, rows = tensor.shape
        packed[name + "_blocks"] = torch.randint(0, 256, (experts, rows, columns // 32, 16),
                                                 dtype=torch.uint8, generator=generator)
        packed[name + "_scales"] = torch.randint(121, 125, (experts, rows, columns // 32),
                                                 dtype=torch.uint8, generator=generator)
    return packed


def _published(name):
    """Of DeepSeek-V4, whose names transformers reads and does not write."""
    name = name.removeprefix("model.").replace("hc_head.hc_", "hc_head_")
    return name.replace("embed_tokens.", "embed.").replace(".attn.norm.", ".attn.kv_norm.")


def make_checkpoint(kind, folder, **changes):
    """Writes a checkpoint as the models of this class are published."""
    config = config_of(kind, **changes)
    model_of(config).save_pretrained(folder)
    path = os.path.join(folder, "model.safetensors")
    tensors = load_file(path)
    if kind == "gpt_oss":
        tensors = _mxfp4_experts(tensors)
        with open(os.path.join(folder, "config.json"), encoding="utf-8") as file:
            written = json.load(file)
        written["quantization_config"] = {"quant_method": "mxfp4",
                                          "modules_to_not_convert": ["model.layers.*.self_attn"]}
        with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as file:
            json.dump(written, file)
    if kind == "deepseek_v4":
        tensors = {_published(name): tensor for name, tensor in tensors.items()}
    save_file(tensors, path, {"format": "pt"})
    return folder


def tokens(rows=2, columns=24, seed=22):
    return torch.randint(0, VOCABULARY, (rows, columns),
                         generator=torch.Generator().manual_seed(seed))
