"""A simulated vLLM engine to embed: the wire formats, the batching, the prefix cache, and no model.

    async with SimFleet(4, SimConfig(time_scale=10)) as fleet:
        ... # fleet.urls, fleet.pods[0].requests, await fleet.pods[1].kill()

`Engine` alone is the step model without sockets, for simulations on a virtual clock:

    engine.submit(Sequence(prompt, Sampling(max_tokens=100)), now)
    while engine.busy:
        outputs, duration = engine.step(now)
        now += duration
"""

from proxy.lab.sim.config import SimConfig, StepTiming, TransferTiming
from proxy.lab.sim.engine import Engine
from proxy.lab.sim.faults import Fault, Faults, Kind
from proxy.lab.sim.http import RequestLog, RequestRecord
from proxy.lab.sim.pod import SimFleet, SimPod, serve
from proxy.lab.sim.sequence import Finish, Output, Sampling, Sequence

__all__ = [
    "Engine",
    "Fault",
    "Faults",
    "Finish",
    "Kind",
    "Output",
    "RequestLog",
    "RequestRecord",
    "Sampling",
    "Sequence",
    "SimConfig",
    "SimFleet",
    "SimPod",
    "StepTiming",
    "TransferTiming",
    "serve",
]
