"""Learned speeds: the time of prompts and response tokens on one pod (`Rates`) and in the fleet (`FleetModel`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import exp
from weakref import WeakValueDictionary

from proxy.core.endpoint import Endpoint
from proxy.latency.regression import Regression

TOKEN_SCALE, PAIR_SCALE = 1e-3, 5e-8
"""Scales of the features of a prefill: thousands of tokens, and units of twenty million token pairs."""

RUNNING_SCALE, HELD_SCALE = 0.1, 1e-5

MEMORY = 0.98
"""Factor of the weight of a pod's earlier observations at each observation."""

PRIOR_WEIGHT = 10.0
"""Weight of the fleet's coefficients in the solution of a pod, in observations."""

SOLVE_EVERY = 8
"""The coefficients of a pod are solved once per this many observations. The fleet learns from one of them."""

PREFILL_ALLOWANCE, DECODE_ALLOWANCE = 0.05, 0.002
"""Error of the shortest prefill, and of a token, in seconds."""

SLOWNESS_MEMORY = 0.8
MOST_DEVIATION = 3.0
"""An observation is clipped to this factor of the expected time, before it changes the slowness."""

SLOWNESS_SECONDS, TERMS_SECONDS = 5.0, 60.0
"""Time constants with which the slowness and the coefficients of an unused pod fade; see `Fading`."""

MOST_SLOWNESS, LEAST_SLOWNESS = 10.0, 0.1
PRIOR_SECONDS = 0.01
"""Weight of the fleet's slowness in that of a pod, in seconds of prefill."""

LEAST_STEP = 0.001

FLEET_MEMORY = 0.998
FLEET_SOLVE_EVERY = 4
FIRST_PRIOR_WEIGHT = 0.1

FIRST_PREFILL = (0.0, 0.1, 0.0)
"""Before the first observation: 100 us per token."""

FIRST_DECODE = (0.01, 0.002, 0.0)
"""10 ms per token, and 0.2 ms more per running request."""

FIRST_WHOLE = (1.0, 1.0, 0.2)
"""For responses that are not streamed: as FIRST_PREFILL and FIRST_DECODE, in the units of WHOLE_SCALES."""

WHOLE_SCALES = (1e-4, 1e-2)
"""Scales of the features of a response that is not streamed: ten thousand tokens of prompts, a hundred of the response.
"""

FIRST_SHARING = (0.0, 0.1, 0.1)
"""For a pod that shares itself among prompts: 100 us per token of the prompt, and of the prompts next to it."""

SHRINK = (0.1, 0.0, 0.01)
"""The `shrink` of a prefill: what tokens, the fixed time and the pairs explain equally well is assigned to tokens."""

SHARING_SHRINK = (0.0, 0.01, 0.0)
"""The `shrink` of `sharing`: prompts of equal length do not show the cost of a token."""

FIRST_DISCIPLINE, DISCIPLINE_MEMORY = 0.2, 0.99
"""Weight of the initial assumption that prompts are computed in turn, and the factor of the weight of earlier
observations at each observation. See `FleetModel.observe_discipline`."""

LEAST_IN_TURN, MOST_IN_TURN = 0.15, 0.7
"""Smaller shares count as 0 and larger ones as 1, because pods that compute in turn deviate a little by chance."""

FIRST_REACH, FURTHER = 4.0, 2.0
"""`FleetModel.in_turn` applies to queues up to this length, and up to this many times the longest queue whose prompts
were computed side by side; see `FleetModel.in_turn_of`. Without a limit, one of 256 pods whose queue seemed to cost
nothing got 160 times as many requests as the mean."""

FIRST_OUTPUT, FIRST_PROMPT, SIZE_MEMORY = 200.0, 1000.0, 0.98
ERROR_MEMORY = 0.98
FLEET_SLOWNESS_MEMORY = 0.98
FIRST_SLOWNESS = (0.001, 0.001)
"""Initial observed and expected seconds of prompts."""

SLOWNESS_CHANGE = 0.05
"""Pods without own observations are updated when the slowness of the fleet has changed by this share."""

LEAST_COMPARED = 20
TOLERATED = 0.01
"""Prediction errors up to this many seconds count as 0: the duration of an engine step, and network jitter."""

QUIET_SECONDS = 5.0
"""Seconds without an observation of a pod after which its observations fade."""

FADE_INTERVAL = 1.0
"""Interval of the fading in seconds; it takes 0.1 ms."""


INHERITED_WEIGHT, INHERITED_SECONDS = 200.0, 1.0
"""Weight of what another process has learned: of its coefficients in observations, and of the slowness of a pod in
seconds of prefill. A pod that serves has about as much."""

FLEET_NUMBERS, POD_NUMBERS = 17, 7
"""Number of values in `FleetModel.learned` and in `Rates.learned`."""

MOST_LEARNED = 1e9
"""Largest of these values that is accepted."""


class FleetModel:
    """The model of all pods together. Lives as long as the process. A pod starts with its coefficients, and stays close
    to them while there are few observations of the pod. `changed` is called when pods without own observations must
    read the coefficients again."""

    def __init__(self, changed: Callable[[], object] = lambda: None) -> None:
        self.changed = changed
        self.prefill = Regression(FIRST_PREFILL, FLEET_MEMORY, FIRST_PRIOR_WEIGHT, SHRINK, FLEET_SOLVE_EVERY)
        self.decode = Regression(FIRST_DECODE, FLEET_MEMORY, FIRST_PRIOR_WEIGHT, every=FLEET_SOLVE_EVERY)
        self.sharing = Regression(FIRST_SHARING, FLEET_MEMORY, FIRST_PRIOR_WEIGHT, SHARING_SHRINK, FLEET_SOLVE_EVERY)
        self.whole = Regression(FIRST_WHOLE, FLEET_MEMORY, FIRST_PRIOR_WEIGHT, every=FLEET_SOLVE_EVERY)
        self.in_turn = 1.0
        """Weight from 0 to 1 of the model that prompts are computed in turn; the rest is the weight of `Sharing`."""
        self._in_turn_seen = self._in_turn_weight = FIRST_DISCIPLINE
        self._reach = FIRST_REACH
        self.output = FIRST_OUTPUT
        """Mean tokens of a response."""
        self.prompt = FIRST_PROMPT
        """Mean uncached tokens of a prompt."""
        self.slowness = 1.0
        """Mean of observed over expected seconds of recent prompts."""
        self.compared = 0
        """Number of predictions that were compared with observations."""
        self.observations = 0
        """Number of observations of all pods. `Fading` reads whether there are new ones."""
        self._took, self._expected = FIRST_SLOWNESS
        self._published_slowness = 1.0
        self._off = self._seen = 0.0
        self._has_inherited = False
        self.rates: WeakValueDictionary[Endpoint, Rates] = WeakValueDictionary()
        """The speeds of pods that have a model. Ranks of one pod share their speeds, and are left out."""
        self._inherited: dict[Endpoint, Sequence[float]] = {}
        """What another process has learned of pods that have no model here yet."""

    @property
    def has_learned(self) -> bool:
        """Whether there is an observation, here or of the process that this one has inherited from."""
        return self._has_inherited or self.observations > 0

    def learned(self) -> list[float]:
        """Return what was learned of all pods together, for a process that has no observation."""
        coefficients = [each for regression in self._regressions for each in regression.coefficients]
        return [*coefficients, self.in_turn, self._reach, self.output, self.prompt, self.slowness]

    def learned_of_pods(self) -> Mapping[Endpoint, Sequence[float]]:
        """Return `Rates.learned` of each pod that was observed."""
        own = {endpoint: rates.learned() for endpoint, rates in self.rates.items() if rates.prefill.has_own}
        return {**self._inherited, **own}

    def inherit(self, learned: Sequence[float]) -> None:
        """Start with what another process has learned. Without effect after an observation."""
        if self.observations:
            return
        *coefficients, self.in_turn, self._reach, self.output, self.prompt, self.slowness = learned
        for at, regression in enumerate(self._regressions):
            regression.start_at(coefficients[3 * at : 3 * at + 3], INHERITED_WEIGHT)
        self._in_turn_seen = self.in_turn * self._in_turn_weight
        self._took = self.slowness * self._expected
        self._has_inherited = True
        self.changed()

    def inherit_of_pod(self, endpoint: Endpoint, learned: Sequence[float]) -> None:
        """Start with what another process has learned of a pod. Without effect after an observation."""
        if self.observations:
            return
        if (rates := self.rates.get(endpoint)) is not None:
            rates.inherit(learned)
        else:
            self._inherited[endpoint] = learned

    def rates_of(self, endpoint: Endpoint) -> Rates:
        """Return the speeds of a pod that has no model yet."""
        rates = self.rates[endpoint] = Rates(self)
        if (learned := self._inherited.pop(endpoint, None)) is not None:
            rates.inherit(learned)
        return rates

    @property
    def _regressions(self) -> Sequence[Regression]:
        return self.prefill, self.decode, self.sharing, self.whole

    @property
    def error(self) -> float:
        """Mean error of recent predictions of the time to first token, beyond 10 ms, over the mean observed time; 0
        while fewer than 20 are known."""
        return self._off / self._seen if self.compared >= LEAST_COMPARED and self._seen > 0.0 else 0.0

    def observe_error(self, predicted: float, seen: float) -> None:
        self.compared += 1
        self._off = ERROR_MEMORY * self._off + max(0.0, abs(predicted - seen) - TOLERATED)
        self._seen = ERROR_MEMORY * self._seen + seen

    def observe_slowness(self, expected: float, seconds: float) -> None:
        self.observations += 1
        self._took = FLEET_SLOWNESS_MEMORY * self._took + seconds
        self._expected = FLEET_SLOWNESS_MEMORY * self._expected + expected
        self.slowness = slowness = self._took / self._expected
        if abs(slowness - self._published_slowness) > SLOWNESS_CHANGE * self._published_slowness:
            self._published_slowness = slowness
            self.changed()

    def observe_whole(self, seconds: float, computed: float, tokens: int, running: float) -> float:
        """Learn from the duration of a response that was not streamed, its `tokens`, the mean number of requests that
        ran meanwhile and the tokens of the prompts that were computed. Return the share of the time that the prompts
        took."""
        prompts, response = computed * WHOLE_SCALES[0], tokens * WHOLE_SCALES[1]
        features = (prompts, response, response * running * RUNNING_SCALE)
        self.whole.observe(features, seconds, PREFILL_ALLOWANCE)
        expected = self.whole.predict(features)
        return self.whole.coefficients[0] * prompts / expected if expected else 0.0

    def observe_discipline(self, in_turn: float, weight: float) -> None:
        """Learn whether prompts are computed in turn: in this observation, by the share `in_turn` / `weight`. The pods
        of a fleet run the same engine, so this is learned from all of them together."""
        self.observations += 1
        self._in_turn_seen = DISCIPLINE_MEMORY * self._in_turn_seen + in_turn
        self._in_turn_weight = DISCIPLINE_MEMORY * self._in_turn_weight + weight
        share = self._in_turn_seen / self._in_turn_weight
        self.in_turn = 0.0 if share < LEAST_IN_TURN else 1.0 if share > MOST_IN_TURN else share

    def observe_reach(self, queue: int, is_shared: bool) -> None:
        """Learn up to which queue length prompts are computed side by side. `is_shared`: whether this queue was."""
        reach = FURTHER * (queue + 1) if is_shared else FIRST_REACH
        self._reach = max(reach, FIRST_REACH, DISCIPLINE_MEMORY * self._reach)

    def in_turn_of(self, queue: int) -> float:
        """Return `in_turn` for a queue of this length. It is higher for a queue that is longer than any observed
        one."""
        return self.in_turn if queue <= self._reach else 1.0 - (1.0 - self.in_turn) * self._reach / queue

    def observe_sizes(self, prompt: float, output: float) -> None:
        """Learn the usual number of uncached tokens of a prompt, and of tokens of a response."""
        self.prompt = SIZE_MEMORY * self.prompt + (1.0 - SIZE_MEMORY) * prompt
        self.output = SIZE_MEMORY * self.output + (1.0 - SIZE_MEMORY) * output


class Fading:
    """The age of the observations of one pod, which fade while other pods are observed.

    A pod that was slow once, after a cold start or a pause of its machine, is avoided while other pods are free, so no
    request would show that it has recovered. Therefore its observations fade, and the pod is tried again: if it is
    still slow, one request shows that. While no pod is used, nothing fades.
    """

    def __init__(self, fleet: FleetModel) -> None:
        self._fleet = fleet
        self._observations = fleet.observations
        self._read_at: float | None = None
        self._age = self._missed = 0.0
        self.has_new_observation = False
        """Whether the pod was observed since the last call of `seconds`."""

    def seconds(self, now: float) -> float:
        """Return the time by which observations of the pod have aged since the last call."""
        before, self._read_at = self._read_at, now
        before_call, self._observations = self._observations, self._fleet.observations
        if self.has_new_observation or before is None:
            self.has_new_observation, self._age, self._missed = False, 0.0, 0.0
        elif before_call != self._observations:
            self._age += now - before
            if self._age > QUIET_SECONDS:
                self._missed += now - before
        if self._missed < FADE_INTERVAL:
            return 0.0
        missed, self._missed = self._missed, 0.0
        return missed


class Rates:
    """The speeds of one pod. Lives as long as the pod's memory.

    A prefill takes fixed + slowness * step + tokens * per_token + pairs * per_pair seconds, and a response token
    step + running * per_running. The coefficients are learned slowly. `slowness`, the recent ratio of observed to
    expected time, multiplies the coefficients of a prefill and adapts quickly.
    """

    def __init__(self, fleet: FleetModel) -> None:
        self._fleet = fleet
        self.prefill = Regression(fleet.prefill, MEMORY, PRIOR_WEIGHT, SHRINK, SOLVE_EVERY)
        self.decode = Regression(fleet.decode, MEMORY, PRIOR_WEIGHT, every=SOLVE_EVERY)
        self.fading = Fading(fleet)
        self._seen = self._expected = 0.0
        self._held = 0.0
        self.refresh()

    def refresh(self) -> None:
        """Read the coefficients again. Called when the fleet has new ones and the pod has no observations."""
        step, per_running, per_held = self.decode.coefficients
        self.step = max(LEAST_STEP, step + per_held * self._held)
        self.per_running = per_running * RUNNING_SCALE
        self.alone = max(LEAST_STEP, step) + self.per_running
        self._apply_slowness()

    def learned(self) -> Sequence[float]:
        """Return what was learned, for a process that has no observation."""
        return [*self.prefill.coefficients, *self.decode.coefficients, self.slowness]

    def inherit(self, learned: Sequence[float]) -> None:
        """Start with what another process has learned."""
        self.prefill.start_at(learned[:3], INHERITED_WEIGHT)
        self.decode.start_at(learned[3:6], INHERITED_WEIGHT)
        self._seen, self._expected = learned[6] * INHERITED_SECONDS, INHERITED_SECONDS
        self.refresh()

    def set_cached(self, tokens: float) -> None:
        """Set the tokens in the pod's KV cache: attention to them makes steps longer."""
        self._held = tokens * HELD_SCALE
        self.refresh()

    def fade(self, seconds: float) -> None:
        """Reduce the weight of the observations by a fading of `seconds`. The caller calls `refresh`."""
        left = exp(-seconds / SLOWNESS_SECONDS)
        self._seen *= left
        self._expected *= left
        left = exp(-seconds / TERMS_SECONDS)
        self.prefill.fade(left)
        self.decode.fade(left)

    def observe_prefill(self, seconds: float, steps: float, tokens: float, pairs: float) -> None:
        """Learn from prompts whose first tokens came from one engine step. The pod worked on all of them for
        `seconds`; `steps` is the part that does not depend on the lengths of the prompts."""
        features = (1.0, tokens * TOKEN_SCALE, pairs * PAIR_SCALE)
        self.observe_slowness(steps + self.prefill.predict(features), seconds)
        if self.prefill.observe(features, max(0.0, seconds - steps), PREFILL_ALLOWANCE):
            self._fleet.changed()
            self.refresh()

    def observe_decode(self, running: float, pace: float) -> None:
        """Learn from a response: its seconds per token, and the mean number of requests that ran at the same time."""
        self.fading.has_new_observation = True
        features = (1.0, running * RUNNING_SCALE, self._held)
        if self.decode.observe(features, pace, DECODE_ALLOWANCE):
            self._fleet.changed()
            self.refresh()

    def observe_slowness(self, expected: float, seconds: float) -> None:
        """Learn from a time that the coefficients predict as `expected` and that was observed as `seconds`."""
        self.fading.has_new_observation = True
        usual = self.slowness * expected
        within = min(MOST_DEVIATION * usual, max(usual / MOST_DEVIATION, seconds))
        self._seen = SLOWNESS_MEMORY * self._seen + within
        self._expected = SLOWNESS_MEMORY * self._expected + expected
        self._fleet.observe_slowness(expected, within)
        self._apply_slowness()

    def _apply_slowness(self) -> None:
        seen, expected = self._seen + PRIOR_SECONDS * self._fleet.slowness, self._expected + PRIOR_SECONDS
        self.slowness = slowness = min(MOST_SLOWNESS, max(LEAST_SLOWNESS, seen / expected))
        fixed, per_token, per_pair = self.prefill.coefficients
        self.fixed = slowness * fixed
        self.per_token = slowness * per_token * TOKEN_SCALE
        self.per_pair = slowness * per_pair * PAIR_SCALE
