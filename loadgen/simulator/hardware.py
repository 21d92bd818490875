"""Models and devices to simulate without having them: shapes, data-sheet figures, measured efficiencies.

Shapes: the models' `config.json` on Hugging Face. Devices: NVIDIA's data sheets (dense bf16, the memory that the driver
reports). Efficiencies: `Device`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

GIB = 2**30
ACTIVATIONS_GIB = 2.0  # what vLLM's profiling run finds for activations and CUDA graphs, about, on each device
BF16 = 2  # bytes


@dataclass(frozen=True, slots=True)
class Model:
    """Shape of a decoder with gated MLPs and grouped-query attention. `context` is its window in tokens.

    `weight_size`: bytes of a weight, 2 for bf16, 1 for FP8. The KV cache is in bf16.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    context: int
    tied: bool = False  # one matrix for embedding and head
    weight_size: int = BF16

    @property
    def linear_parameters(self) -> int:
        """Weights that every token is multiplied with: attention projections and MLPs."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def head_parameters(self) -> int:
        """Weights that only sampled tokens are multiplied with."""
        return self.vocabulary * self.hidden

    @property
    def weight_bytes(self) -> int:
        """All weights in memory."""
        return self.weight_size * (self.linear_parameters + self.head_parameters * (1 if self.tied else 2))

    @property
    def kv_bytes(self) -> int:
        """KV cache of one token, over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * BF16

    def config(self) -> dict[str, Any]:
        """The `config.json` of a Llama of this shape: all that vLLM's scheduler wants to know."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": self.context,
            "tie_word_embeddings": self.tied,
            "torch_dtype": "bfloat16",
        }


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator: memory (GiB), dense bf16 FLOP/s, memory bytes/s, bytes/s to its peers in a host, one way.

    One way is what an all-reduce waits for: each device sends as much as it receives, at the same time. Data sheets add
    up both directions: NVLink 3 (A100) 600 GB/s, NVLink 4 (H100, H200) 900 GB/s, PCIe 4.0 x16 (L4) 64 GB/s.

    `mfu` and `mbu` are the shares of FLOP/s and bytes/s that the linear layers reach, `blend` how softly the roofline
    bends (loadgen/simulator/step_cost.py), `per_layer_s` what each layer costs beyond. `source` says where these four
    come from. Vidur's tables: time of linear layers measured on A100 and H100 (microsoft/vidur 7d47513,
    data/profiling/compute, MIT), up to 4096 tokens; one set per device meets two models at TP 1 to 8 within 5.6 % on
    A100 and 9.4 % on H100 (mean absolute error).
    """

    memory_gib: float
    flops: float
    bandwidth: float
    link_bandwidth: float
    mfu: float
    mbu: float
    source: str
    blend: float = 1.5
    per_layer_s: float = 30e-6


MODELS: dict[str, Model] = {
    "llama-3-8b": Model(32, 4096, 32, 8, 128, 14336, 128256, context=8192),
    "llama-3-70b": Model(80, 8192, 64, 8, 128, 28672, 128256, context=8192),
    "llama-3-70b-fp8": Model(80, 8192, 64, 8, 128, 28672, 128256, context=8192, weight_size=1),
    "qwen2.5-7b": Model(28, 3584, 28, 4, 128, 18944, 152064, context=32768),
    "smollm2-135m": Model(30, 576, 9, 3, 64, 1536, 49152, context=8192, tied=True),
}

_VIDUR = "fitted to Vidur's measured tables"
DEVICES: dict[str, Device] = {
    "a100-40g": Device(40, 312e12, 1.555e12, 300e9, mfu=0.65, mbu=0.75, source=_VIDUR),
    "a100-80g": Device(80, 312e12, 2.039e12, 300e9, mfu=0.65, mbu=0.75, source=_VIDUR),
    "h100-80g": Device(80, 989e12, 3.35e12, 450e9, mfu=0.60, mbu=0.85, source=_VIDUR),
    "h200-141g": Device(139, 989e12, 4.8e12, 450e9, mfu=0.60, mbu=0.85, source="as H100, not measured"),
    "l4-24g": Device(22.5, 121e12, 0.3e12, 32e9, mfu=0.65, mbu=0.75, source="as A100, not measured"),
}


def named(kind: str, table: dict[str, Any], name: str) -> Any:
    """The entry of MODELS or DEVICES; ValueError with the choices if there is none of that name."""
    try:
        return table[name]
    except KeyError:
        raise ValueError(f"{kind}: there is no {name!r}; choose one of {', '.join(table)}") from None


def check_split(model: Model, tp: int) -> None:
    """ValueError if vLLM cannot split the model's heads over `tp` devices: whole ones each, or copies of KV heads."""
    if model.heads % tp or (model.kv_heads % tp and tp % model.kv_heads):
        raise ValueError(f"tp: {model.heads} heads, {model.kv_heads} of KV, cannot be split over {tp} devices")


def kv_blocks(model: Model, device: Device, tp: int = 1, block_size: int = 16, utilization: float = 0.9) -> int:
    """KV blocks that `tp` devices have room for beside the weights, as `gpu_memory_utilization` would give.

    ValueError if the model does not fit.
    """
    left = device.memory_gib * GIB * utilization - model.weight_bytes / tp - ACTIVATIONS_GIB * GIB
    blocks = int(left // (model.kv_bytes / tp * block_size))
    if blocks < 1 and left > 0:
        raise ValueError(f"block_size: {block_size} tokens of KV need more than the {left / GIB:.1f} GiB that are left")
    if blocks < 1:
        raise ValueError(
            f"tp: the weights need {model.weight_bytes / tp / GIB:.0f} GiB on each of {tp} devices, which have "
            f"{device.memory_gib * utilization:.0f}; take more devices (--tp) or a larger one"
        )
    return blocks
