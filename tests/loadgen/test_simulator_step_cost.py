"""Step times: roofline figures that can be worked out by hand, and what must hold whatever the constants."""

import pytest

from deployments.step_content import Step
from loadgen.simulator.hardware import ACTIVATIONS_GIB, DEVICES, GIB, MODELS, Model, kv_blocks, named
from loadgen.simulator.step_cost import HOST_PER_REQUEST_S, HOST_S, Fitted, Roofline

LLAMA = MODELS["llama-3-8b"]
ONE_DECODE = Step(decodes=1, context_tokens=1)


def test_sizes_of_the_models() -> None:
    """Weights and KV bytes per token are those of the published models: 8.0, 70.6, 7.6 and 0.135 billion weights."""
    billions = {name: round(model.weight_bytes / model.weight_size / 1e9, 3) for name, model in MODELS.items()}
    assert billions == {
        "llama-3-8b": 8.03,
        "llama-3-70b": 70.552,
        "llama-3-70b-fp8": 70.552,
        "qwen2.5-7b": 7.615,
        "smollm2-135m": 0.134,
    }
    assert {name: model.kv_bytes for name, model in MODELS.items()} == {
        "llama-3-8b": 128 * 1024,
        "llama-3-70b": 320 * 1024,
        "llama-3-70b-fp8": 320 * 1024,
        "qwen2.5-7b": 56 * 1024,
        "smollm2-135m": 22.5 * 1024,
    }


def test_devices_are_those_of_the_data_sheets() -> None:
    """Dense bf16 TFLOP/s, memory GB/s and nominal GB of NVIDIA's data sheets; what the driver reports is not more."""
    sheets = {
        "a100-40g": (312, 1555, 40),
        "a100-80g": (312, 2039, 80),
        "h100-80g": (989, 3350, 80),
        "h200-141g": (989, 4800, 141),
        "l4-24g": (121, 300, 24),
    }
    assert sheets == {
        name: (round(device.flops / 1e12), round(device.bandwidth / 1e9), sheets[name][2])
        for name, device in DEVICES.items()
    }
    for name, (_, _, gigabytes) in sheets.items():
        assert 0.9 * gigabytes <= DEVICES[name].memory_gib <= gigabytes


def test_kv_cache_of_known_deployments() -> None:
    """Llama-3-8B leaves an A100-40G 156 thousand tokens; 70B needs two H100s and gets 28 thousand."""
    assert kv_blocks(LLAMA, DEVICES["a100-40g"]) == 9750
    assert kv_blocks(MODELS["llama-3-70b"], DEVICES["h100-80g"], tp=2) == 1758
    assert kv_blocks(LLAMA, DEVICES["a100-40g"], block_size=32) == 4875


def fewest(model: str, device: str) -> int:
    """The least of 1, 2, 4, 8 devices that the model fits on."""
    for tp in (1, 2, 4, 8):
        try:
            kv_blocks(MODELS[model], DEVICES[device], tp)
        except ValueError:
            continue
        return tp
    return 16


@pytest.mark.parametrize("model", ["llama-3-8b", "qwen2.5-7b", "smollm2-135m"])
def test_small_models_fit_on_every_device(model: str) -> None:
    """8 billion weights and less fit on one device of each kind, L4 included."""
    assert {fewest(model, device) for device in DEVICES} == {1}


def test_large_model_needs_several_devices() -> None:
    """141 GB of weights take two devices of 80 or 141 GB, four of 40, eight of 24."""
    found = {device: fewest("llama-3-70b", device) for device in DEVICES}
    assert found == {"a100-40g": 4, "a100-80g": 2, "h100-80g": 2, "h200-141g": 2, "l4-24g": 8}


@pytest.mark.parametrize("device", sorted(DEVICES))
@pytest.mark.parametrize("model", ["llama-3-8b", "llama-3-70b", "qwen2.5-7b", "smollm2-135m"])
def test_kv_cache_fills_what_is_left(model: str, device: str) -> None:
    """Weights, activations and KV cache take 90 % of each device's memory, to within one block."""
    shape, tp = MODELS[model], fewest(model, device)
    block = shape.kv_bytes * 16 / tp
    used = shape.weight_bytes / tp + ACTIVATIONS_GIB * GIB + kv_blocks(shape, DEVICES[device], tp) * block
    assert 0 <= 0.9 * DEVICES[device].memory_gib * GIB - used < block


def test_model_that_does_not_fit() -> None:
    """A model too large for its devices is refused with the option that helps."""
    with pytest.raises(ValueError, match="--tp"):
        kv_blocks(MODELS["llama-3-70b"], DEVICES["h100-80g"])


def test_unknown_names_list_the_choices() -> None:
    """A device or model that is not in the tables is refused with those that are."""
    with pytest.raises(ValueError, match=r"device: there is no 'b200'; choose one of a100-40g, "):
        named("device", DEVICES, "b200")


def test_one_decode_is_the_weights_through_memory() -> None:
    """Batch 1 on A100-40G: 15.0 GB of weights at 75 % of 1.555 TB/s, 1 ms host, 30 us a layer, 8 us a request."""
    weights = 2 * (LLAMA.linear_parameters + LLAMA.head_parameters) / (0.75 * 1.555e12)
    seconds = Roofline(LLAMA, DEVICES["a100-40g"]).seconds(ONE_DECODE)
    overhead = HOST_S + 32 * 30e-6 + HOST_PER_REQUEST_S
    assert weights == pytest.approx(0.01287, rel=1e-3)
    assert seconds == pytest.approx(weights + overhead, rel=0.01)


def test_long_prompt_is_compute() -> None:
    """A chunk of 8192 tokens takes its FLOPs at 65 % of the peak, and attention at 40 %, within the knee's softness."""
    step = Step(prefill_tokens=8192, prefill_requests=1, attention=8192 * 4096)
    linear = 2 * LLAMA.linear_parameters * 8192 / (0.65 * 312e12)
    attention = 4 * 32 * 32 * 128 * 8192 * 4096 / (0.4 * 312e12)
    seconds = Roofline(LLAMA, DEVICES["a100-40g"]).seconds(step)
    assert linear + attention < seconds < 1.05 * (linear + attention)


def test_context_costs_its_bytes() -> None:
    """A hundred thousand more KV tokens cost their bytes over the reachable bandwidth."""
    cost = Roofline(LLAMA, DEVICES["h100-80g"])
    more = cost.seconds(Step(decodes=64, context_tokens=164_000)) - cost.seconds(
        Step(decodes=64, context_tokens=64_000)
    )
    assert more == pytest.approx(100_000 * LLAMA.kv_bytes / (0.85 * 3.35e12))


@pytest.mark.parametrize("name", sorted(DEVICES))
@pytest.mark.parametrize("model", ["llama-3-8b", "qwen2.5-7b", "smollm2-135m"])
def test_more_work_takes_longer(name: str, model: str) -> None:
    """On every device a step takes longer with one more of anything, and two devices are faster than one."""
    cost = Roofline(MODELS[model], DEVICES[name])
    step = Step(prefill_tokens=512, prefill_requests=2, attention=512 * 300, decodes=16, context_tokens=16_000)
    for field, value in step._asdict().items():
        assert cost.seconds(step._replace(**{field: value + 1})) > cost.seconds(step)
    large = step._replace(prefill_tokens=8192, attention=8192 * 4096)
    if model != "smollm2-135m":  # which is too small to be worth the all-reduce
        assert Roofline(MODELS[model], DEVICES[name], tp=2).seconds(large) < cost.seconds(large)


@pytest.mark.parametrize(
    ("name", "one_way"), [("a100-40g", 300e9), ("a100-80g", 300e9), ("h100-80g", 450e9), ("h200-141g", 450e9)]
)
def test_all_reduce_is_paid_for(name: str, one_way: float) -> None:
    """With the shape of one layer, TP 2 adds two all-reduces of 10 us, whose n * hidden * 2 bytes go out one way."""
    tiny = Model(1, 64, 1, 1, 64, 128, 1000, context=10**7)
    alone, pair = (Roofline(tiny, DEVICES[name], tp) for tp in (1, 2))
    step = Step(prefill_tokens=10**6, prefill_requests=1)
    linear = 2 * (tiny.linear_parameters * 10**6 + tiny.head_parameters) / (DEVICES[name].mfu * DEVICES[name].flops)
    sent = 2 * 10**6 * 64 * 2 / one_way
    assert pair.seconds(step) - alone.seconds(step) == pytest.approx(20e-6 + sent - linear / 2, rel=0.01)


def test_fitted_is_a_sum() -> None:
    """A fitted cost adds each part of the step times its seconds."""
    cost = Fitted(1.0, prefill_token=2.0, prefill_request=3.0, attention_pair=5.0, decode=7.0, context_token=11.0)
    assert cost.seconds(Step(10, 20, 30.0, 40, 50)) == 1 + 20 + 60 + 150 + 280 + 550
    assert cost.seconds(Step()) == 1.0
