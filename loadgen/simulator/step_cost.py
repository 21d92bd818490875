"""How long a model takes for one scheduler step: from what is in the step to seconds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from deployments.step_content import Step
from loadgen.simulator.hardware import BF16, Device, Model

ATTENTION_MFU = 0.4  # prefill attention; not measured
HOST_S = 1e-3  # launches and sampling, per step; not measured
HOST_PER_REQUEST_S = 8e-6  # likewise, per request of a step
ALL_REDUCE_S = 10e-6  # latency of one all-reduce; not measured


class StepCost(Protocol):
    """Predicts step times; the same step always takes the same time."""

    def seconds(self, step: Step) -> float:
        """Time from the start of the step to its tokens."""


class Roofline:
    """Seconds from the shape of the model and the figures of the device, on `tp` of them.

    With n tokens in the step, s of them sampled, P linear and H head parameters:

        compute = (2 P n + 2 H s) / (tp * mfu * flops)          memory = bytes of P + H / (tp * mbu * bandwidth)
        linear  = (compute^b + memory^b)^(1/b) + layers * per_layer_s
        decode attention  = context_tokens * KV bytes / (tp * mbu * bandwidth)
        prefill attention = attention * 4 * layers * heads * head_dim / (tp * 0.4 * flops)
        all-reduce        = 2 * layers * (10 us + 2 (tp - 1) / tp * n * hidden * 2 bytes / link bandwidth), tp > 1
        host              = 1 ms + 8 us * requests

    The link's bandwidth is that of one direction: in a ring each device sends 2 (tp - 1) / tp of the activations.

    Source: the roofline of Williams et al. (CACM 2009) with a soft knee; FLOP counts as in Vidur (Agrawal et al.,
    MLSys 2024). Only the linear part is checked against measurements (`Device`), and only in bf16: weights of one byte
    are taken to be read and multiplied in half the time.
    """

    def __init__(self, model: Model, device: Device, tp: int = 1) -> None:
        flops = tp * device.mfu * device.flops * BF16 / model.weight_size
        bandwidth = tp * device.mbu * device.bandwidth
        self._blend = device.blend
        self._per_token = 2 * model.linear_parameters / flops
        self._per_sample = 2 * model.head_parameters / flops
        self._weights = (
            model.weight_size * (model.linear_parameters + model.head_parameters) / bandwidth
        ) ** device.blend
        self._per_context_token = model.kv_bytes / bandwidth
        self._per_pair = 4 * model.layers * model.heads * model.head_dim / (tp * ATTENTION_MFU * device.flops)
        self._fixed = HOST_S + model.layers * device.per_layer_s
        self._reduce_token = 0.0
        if tp > 1:
            self._fixed += 2 * model.layers * ALL_REDUCE_S
            share = 2 * (tp - 1) / tp
            self._reduce_token = 2 * model.layers * share * model.hidden * BF16 / device.link_bandwidth

    def seconds(self, step: Step) -> float:
        prefill_tokens, prefill_requests, attention, decodes, context_tokens = step
        tokens, requests = prefill_tokens + decodes, prefill_requests + decodes
        compute = self._per_token * tokens + self._per_sample * requests
        linear: float = (compute**self._blend + self._weights) ** (1 / self._blend)
        attending = context_tokens * self._per_context_token + attention * self._per_pair
        return linear + attending + tokens * self._reduce_token + requests * HOST_PER_REQUEST_S + self._fixed


@dataclass(frozen=True, slots=True)
class Fitted:
    """Seconds as a sum of what is in the step, each times what it was found to take on a machine.

    In seconds: `step` per step, the others per token, request or pair, as in Step.
    """

    step: float
    prefill_token: float
    prefill_request: float
    attention_pair: float
    decode: float
    context_token: float

    def seconds(self, step: Step) -> float:
        return (
            self.step
            + self.prefill_token * step.prefill_tokens
            + self.prefill_request * step.prefill_requests
            + self.attention_pair * step.attention
            + self.decode * step.decodes
            + self.context_token * step.context_tokens
        )
