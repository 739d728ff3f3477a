"""A simulated vLLM engine to embed: the wire formats, the batching, the prefix cache, and no model.

    async with SimFleet(4, SimConfig(time_scale=10)) as fleet:
        ... # fleet.urls, fleet.pods[0].requests, await fleet.pods[1].kill()

`SimEngine` alone is the step model without sockets, for simulations on a virtual clock:

    engine.submit(Sequence(prompt, SamplingParams(max_tokens=100)), now)
    while engine.busy:
        outputs, duration = engine.step(now)
        now += duration
"""

from proxy.lab.sim.config import SimConfig, StepTiming, TransferTiming
from proxy.lab.sim.engine import SimEngine
from proxy.lab.sim.faults import Fault, FaultKind, Faults
from proxy.lab.sim.http import RequestRecord
from proxy.lab.sim.pod import SimFleet, SimPod, serve
from proxy.lab.sim.sequence import Finish, Output, SamplingParams, Sequence

__all__ = [
    "Fault",
    "FaultKind",
    "Faults",
    "Finish",
    "Output",
    "RequestRecord",
    "SamplingParams",
    "Sequence",
    "SimConfig",
    "SimEngine",
    "SimFleet",
    "SimPod",
    "StepTiming",
    "TransferTiming",
    "serve",
]
